"""Runs with `exact_resume` whose evaluations count updates: which versions are judged, and
what they reach, follows from the experiment, wherever the run is cut."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.run.test_cuts import differences, experiment

from tidemill import (
    Actors,
    AgentSpec,
    Drawn,
    Evaluation,
    Experiment,
    Gymnasium,
    ReplayTrainer,
    check_resume,
    resume,
    train,
)
from tidemill.algorithms.dqn import DQN
from tidemill.core.errors import ConfigError
from tidemill.metrics.json_lines import read_metrics
from tidemill.replay.replay import Replay
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase
from tidemill.training.check_resume import _measured
from tidemill.workers.trainer_config import Trainer

FILE = Path(__file__)
UNNAMED = shutil.ignore_patterns(".*")


def judged(lag: int | None, updates: int = 6, judges: int = 1, **evaluation: Any) -> Experiment:
    """Two targets of two lanes, judges that draw their actions likewise."""
    made = experiment(lag, updates, lanes=2, max_episode_steps=30, agents=(AgentSpec(sample_steps=8),))
    spec = AgentSpec(parameters=Drawn(tag="evaluating"), mode="concise", samples="evaluation")
    trainer = made.workers["trainer"].replace(database_updates=1)
    judge = Actors(
        environment=Gymnasium(id="CartPole-v1"),
        lanes=2,
        ring=2,
        count=judges,
        agents=(spec,),
        max_episode_steps=30,
    )
    own = Evaluation(**{"games": 7 * judges, "updates": 2, **evaluation})
    return made.replace(workers={**made.workers, "trainer": trainer, "judge": judge, "evaluation": own})


@pytest.mark.parametrize(("launch", "lag", "judges"), [("inline", None, 1), ("threads", 0, 2)])
def test_what_an_evaluation_finds_is_found_again(launch: str, lag: int | None, judges: int) -> None:
    found = check_resume(judged(lag, judges=judges), updates=8, launch=launch, source=FILE)
    assert found.exact and found.compared > 100, found


def told(folder: Path) -> list[dict[str, float]]:
    """What evaluations have told, in order."""
    return [
        {name: value for name, value in record.items() if name.startswith(("step", "evaluation/"))}
        for record in read_metrics(folder)
        if "evaluation/version" in record
    ]


def known(folder: Path) -> list[Any]:
    """What the database knows of versions."""
    versions = ParameterDatabase(folder / PARAMETERS).versions("policy")
    return [(each.version, each.tags, each.means) for each in versions]


def at_every_update(folder: Path, made: Experiment) -> list[Path]:
    """Train with a cut after each update. Return what a kill would have left when the
    update after it was done."""
    images = []

    def cut(record: dict[str, float], control: Any) -> None:
        if record["update"] > 1:
            images.append(folder.with_name(f"{folder.name}-{int(record['update'])}"))
            shutil.copytree(folder, images[-1], ignore=UNNAMED)
        control.save()

    train(made, launch="inline", run_dir=folder, source=FILE, quiet=True, on_update=cut)
    return images


def places(folder: Path) -> list[str]:
    return [f"cuts/{path.name}" for path in (folder / "cuts").iterdir()]


def test_a_run_that_is_killed_or_stopped_anywhere_evaluates_the_same(tmp_path: Path) -> None:
    whole, made = tmp_path / "whole", judged(None)
    train(made, launch="inline", run_dir=whole, source=FILE, quiet=True)
    assert [each["evaluation/version"] for each in told(whole)] == [0, 2, 4]
    images = at_every_update(tmp_path / "killed", made)
    for image in images:
        resume(image, quiet=True, trust=True)
    stopped = tmp_path / "stopped"

    def at_once(record: dict[str, float], control: Any) -> None:
        control.stop()

    settings: dict[str, Any] = {"launch": "inline", "quiet": True, "on_update": at_once}
    ended = train(made, run_dir=stopped, source=FILE, **settings).summary
    while ended["updates"] < 6:
        ended = resume(stopped, trust=True, **settings).summary
    assert len(images) == 5
    for folder in (tmp_path / "killed", *images, stopped):
        assert differences(whole, folder, *places(whole)) == []
        assert (told(folder), known(folder)) == (told(whole), known(whole)), folder
