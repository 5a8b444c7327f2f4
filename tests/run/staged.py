"""An experiment in stages that is cut and goes on exactly, and its environments, in a
file of their own: each actor's process runs it."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from tests.run.cut_experiments import JUDGE, experiment

from tidemill import Actors, AgentSpec, Evaluation, Experiment, Gymnasium, Limits, Stage
from tidemill.core.errors import DatabaseError
from tidemill.store.checkpoint import checkpoints
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase
from tidemill.workers.cut_files import number_of

STAGED = Path(__file__)
UPDATES = 12


class Widening(gymnasium.Env[Any, Any]):
    """Its episodes are as wide, and as long, as their stage says."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.width, self.left = options["width"], options["length"]
        return self._see(), {}

    def _see(self) -> Any:
        return self.np_random.uniform(-self.width, self.width, 2).astype(np.float32)

    def step(self, action: Any) -> Any:
        self.left -= 1
        return self._see(), float(action), self.left == 0, False, {}


class Uneven(Widening):
    """The same, but some episodes are a step longer: of two lanes that have played as
    many, one is in the midst of another one."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        seen = super().reset(seed=seed, options=options)
        self.left += int(self.np_random.integers(2))
        return seen


def staged(updates: int = UPDATES, trainers: int = 2) -> Experiment:
    """Stages that end by episodes, by what these have reached, and by an evaluation."""
    environment = Gymnasium(make=f"{STAGED}:Widening")
    spec = AgentSpec(sample_steps=8)
    made = experiment(
        0, updates, trainers=trainers, environment=environment, lanes=2, count=2, agents=(spec,)
    )
    trainer = made.workers["trainer"].replace(database_updates=1)
    judge = Actors(environment=Gymnasium(make=f"{STAGED}:Uneven"), lanes=2, agents=(JUDGE,))
    return made.replace(
        workers={
            **made.workers,
            "trainer": trainer,
            "judge": judge,
            "evaluation": Evaluation(games=3, updates=2),
        },
        curriculum=(
            Stage(options={"width": 1, "length": 5}, until="episodes >= 24"),
            Stage(options={"width": 4, "length": 9}, until="return/mean > 1 and update >= 5"),
            Stage(options={"width": 2, "length": 7}, until="evaluation/return > 0"),
            Stage(options={"width": 1, "length": 5}),
        ),
        limits=Limits(updates=updates, window=8),
    )


class Dies(Widening):
    """The same. The first one that steps in the run in `folder` dies then, with its
    process, once the run's first version is judged."""

    def __init__(self, folder: str) -> None:
        self.flag, self.database = (
            Path(folder).with_name("died"),
            ParameterDatabase(Path(folder) / PARAMETERS),
        )

    def judged(self) -> bool:
        with suppress(DatabaseError):  # nothing was pushed yet
            return "evaluation/return" in self.database.results.means("policy", 0)
        return False

    def step(self, action: Any) -> Any:
        if not self.flag.exists():
            until = time.monotonic() + 120
            while not self.judged():
                assert time.monotonic() < until, "the first version is not judged"
                time.sleep(0.02)
            with suppress(FileExistsError):
                self.flag.open("x").close()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def newest_cut(folder: Path) -> int:
    """Return the number of the newest cut of which the runner has written its part."""
    return max((number_of(path) for path in checkpoints(folder / "cuts" / "runner")), default=0)
