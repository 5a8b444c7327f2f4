"""Runs that suffer faults, for `soak.py` and `moments.py`: of CartPole that raises, hangs
or tells what nobody can learn from, where a file asks for that."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from fault_rows.hoard import take_all_memory
from fault_rows.runs import begin, processes
from gymnasium.envs.classic_control import CartPoleEnv
from memory_groups import MemoryGroup
from shares import Share

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Buffers,
    Drawn,
    Evaluation,
    Experiment,
    Gymnasium,
    Limits,
    PolicyWorkers,
    Trainer,
    populate,
)
from tidemill.api.algorithm import AlgorithmConfig
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.policy import PolicyConfig

LOOK_EVERY = 32  # steps of a lane between looks at whether it is to have a fault
WATCHED = 10  # updates between two versions that are evaluated
DEADLINE = 5.0  # seconds after which a step counts as hung
LONGEST = 300.0  # seconds that something of a run may take, however busy the machine is
ENVIRONMENT = ("raise", "nan", "huge", "hang")
FAULTS = ("kill", "stop", *ENVIRONMENT)


class NoFault(Exception):
    """A fault that did not come, since nobody was there whom it could strike."""


class Faulty(CartPoleEnv):
    """CartPole that takes the faults which lie in a folder, each once."""

    def __init__(self, faults: str) -> None:
        super().__init__()
        self._faults, self._left = faults, LOOK_EVERY

    def step(self, action: Any) -> Any:
        observation, reward, over, cut, info = super().step(action)
        self._left -= 1
        if self._left == 0:
            self._left = LOOK_EVERY
            for fault in os.listdir(self._faults):
                with suppress(FileNotFoundError):  # another lane was before this one
                    os.unlink(f"{self._faults}/{fault}")
                    observation, reward = self._suffer(fault, observation, reward)
        return observation, reward, over or cut, False, info

    def _suffer(self, fault: str, observation: Any, reward: Any) -> tuple[Any, Any]:
        if fault == "raise":
            raise RuntimeError("the pole is gone")
        if fault == "hang":
            time.sleep(1e6)
        if fault == "eat":
            take_all_memory()
        if fault == "nan":
            return np.full_like(observation, np.nan), reward
        return observation, 3e38


LASTING: dict[str, Any] = {"deadline_s": DEADLINE, "restarts": 1000, "lane_restarts": 1000}


SAVING: dict[str, Any] = {"checkpoint_seconds": 1.0, "checkpoint_share": 0.5}


def faulty_cartpole(threads: int = 0, folder: str = "FAULTS") -> Gymnasium:
    """CartPole with the faults of this run that lie in the folder which a variable of
    this name tells."""
    return Gymnasium(
        make=f"{__file__}:Faulty",
        kwargs={"faults": os.environ[folder]},
        max_episode_steps=500,
        threads=threads,
    )


def judged(
    environment: EnvironmentConfig,
    workers: dict[str, Any],
    agent: AgentSpec,
    judged_in: EnvironmentConfig,
    policy: PolicyConfig | None = None,
    lanes: tuple[int, int] = (16, 8),
    **settings: Any,
) -> Experiment:
    """Two actors whose environments suffer, other `workers`, and an evaluation; so many
    `lanes` of both."""
    judge = AgentSpec(
        inference="inline", parameters=Drawn(tag="evaluating"), samples="evaluation", mode="concise",
        deterministic=True,
    )  # fmt: skip
    return Experiment(
        name="faulty",
        policies={"policy": policy or ActorCritic()},
        workers={
            "actor": Actors(
                count=2, environment=environment, lanes=lanes[0], slots=2, agents=(agent,), **LASTING
            ),
            **workers,
            "judge": Actors(environment=judged_in, lanes=lanes[1], slots=2, agents=(judge,), **LASTING),
            "evaluation": Evaluation(games=16, restarts=1000),
        },
        limits=Limits(updates=100_000_000, stall_s=60.0),
        **settings,
    )


def trainers(algorithm: AlgorithmConfig | None = None, count: int = 1, **settings: Any) -> Trainer:
    """Trainers that save and publish often."""
    algorithm = algorithm or PPO(minibatch_size=512, epochs=4)
    often = {"database_seconds": 1.0, **SAVING, **settings}
    return Trainer(count=count, algorithm=algorithm, restarts=1000, **often)


def apart(threads: int = 0) -> Experiment:
    """Two actors, a policy worker, a trainer and an evaluation, each in a process of its
    own. Judges take faults of their own."""
    server = PolicyWorkers(stream="inference", restarts=1000)
    return judged(
        faulty_cartpole(threads),
        {"server": server, "trainer": trainers()},
        AgentSpec(inference="inference", sample_steps=32),
        faulty_cartpole(threads, "JUDGED"),
    )


def watched(threads: int = 0) -> Experiment:
    """The same, but that each version after so many updates (`WATCHED`) is evaluated, and
    training waits for that."""
    made = apart(threads)
    trainer = made.workers["trainer"].replace(database_updates=WATCHED)
    evaluation = made.workers["evaluation"].replace(updates=WATCHED)
    return made.replace(workers={**made.workers, "trainer": trainer, "evaluation": evaluation})


def equal() -> Experiment:
    """Two processes, each an actor and an equal trainer by turns, beside an
    evaluation."""
    return judged(
        faulty_cartpole(),
        {"trainer": trainers(count=2)},
        AgentSpec(sample_steps=32),
        Gymnasium(id="CartPole-v1"),
        together=("actor", "trainer"),
    )


def buffered() -> Experiment:
    """Two actors, two buffer workers behind them, a trainer and an evaluation, each in a
    process of its own."""
    return judged(
        faulty_cartpole(),
        {"buffers": Buffers(process=(), count=2, restarts=1000), "trainer": trainers()},
        AgentSpec(samples="gathered", sample_steps=32),
        Gymnasium(id="CartPole-v1"),
    )


def population() -> Experiment:
    """Two members, each an actor and a trainer, and what manages them, for which they
    wait after each ten updates; a process for each of the five."""
    one = Experiment(
        name="population",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(
                environment=faulty_cartpole(),
                lanes=2,
                slots=2,
                agents=(AgentSpec(sample_steps=32),),
                **LASTING,
            ),
            "trainer": trainers(
                PPO(minibatch_size=64, epochs=4), database_updates=10, checkpoint_seconds=0.2
            ),
        },
        limits=Limits(updates=100_000_000, stall_s=60.0),
    )
    starts = [{"learning_rate": rate} for rate in (1e-3, 3e-4)]
    return populate(one, starts, explore={"learning_rate": (1e-5, 1e-2)}, updates=10, restarts=1000)


def in_threads() -> Experiment:
    """The same as `apart`, with lanes that step in threads, so that one which hangs can
    be left alone."""
    return apart(threads=2)


def watched_in_threads() -> Experiment:
    """The same as `watched`, likewise."""
    return watched(threads=2)


LAYOUTS = {"apart": apart, "equal": equal}


class Run:
    """A run of an experiment in a folder of its own, begun by `tidemill train`; what is
    beside it may be a disk, or a share, for its results, the control group that it is in,
    or somebody whom it needs."""

    def __init__(
        self,
        folder: Path,
        function: Callable[[], Experiment],
        *words: str,
        launch: str = "processes",
        beside: Any = None,
    ) -> None:
        self.folder, self.beside, self.commands, self.asked = folder, beside, 0, ""
        place = beside.place if isinstance(beside, Share) else beside
        self.path = (place if isinstance(place, Path) else folder) / "run"
        self._group = beside.folder if isinstance(beside, MemoryGroup) else None
        self.faults, self.judged = folder / "faults", folder / "judged"
        self.temporary, self.output = folder / "tmp", folder / "output.txt"
        for made in (self.faults, self.judged, self.temporary):
            made.mkdir()
        file = Path(function.__code__.co_filename).resolve()
        # nothing said, the command has processes begin before it knows whose they will be
        where = [] if launch == "processes" else ["--launch", launch]
        words = words if "--log" in words else (*words, "--log", "")
        self._words = [f"{file}:{function.__name__}", *where, "--layout", "given", *words]
        self.begin()

    def begin(self, *more: str) -> None:
        """Begin it, or go on with it by the same command, which `commands` counts."""
        self.commands += 1
        command = [str(Path(sys.executable).with_name("tidemill")), "train", *self._words, *more]
        places = {"TMPDIR": self.temporary, "FAULTS": self.faults, "JUDGED": self.judged}
        variables = {**os.environ, **{name: str(place) for name, place in places.items()}}
        with self.output.open("ab") as output:
            self.main = subprocess.Popen(
                [*command, "--run-dir", str(self.path)],
                stdout=output, stderr=output, env=variables, preexec_fn=lambda: begin(self._group),
            )  # fmt: skip

    def suffer(self, fault: str, draw: random.Random, whose: str = "") -> None:
        """Have one of these faults: of a process of a worker so named, where it is one of
        a process. Raises `NoFault` where there is no such worker; one of an environment
        comes once it is no longer `waiting`."""
        if fault in ENVIRONMENT:
            self.ask_for(fault)
            return
        workers = {name: p for name, p in processes(self.main.pid).items() if whose in name}
        try:
            process = workers[draw.choice(sorted(workers))]
            if fault == "kill":
                process.kill()
            else:
                stop_for(process, draw.uniform(1.0, 8.0))
        except (IndexError, psutil.Error):  # there is none, or none any more
            raise NoFault from None

    def ask_for(self, fault: str, of_judges: bool = False) -> None:
        """Have a fault wait for whoever takes it. Raises `NoFault` where one like it
        waits already."""
        self.asked = fault
        try:
            ((self.judged if of_judges else self.faults) / fault).touch(exist_ok=False)
        except FileExistsError:
            raise NoFault from None

    def waiting(self) -> list[str]:
        """Return the faults that nobody has taken yet."""
        return sorted(file.name for folder in (self.faults, self.judged) for file in folder.iterdir())

    def processes(self) -> list[psutil.Process]:
        """Return everything that the run has started and that lives, itself among it."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it is gone, or another user's
                if process.status() != psutil.STATUS_ZOMBIE and (
                    process.environ().get("TMPDIR") == str(self.temporary)
                ):
                    found.append(process)
        return found

    @property
    def process(self) -> psutil.Process:
        """Its main process."""
        return psutil.Process(self.main.pid)

    def left(self, halves: bool = True) -> str:
        """Return what the run has left, once it has ended, in words; "" where that is
        nothing: processes, temporary files, and in its folder sockets and half-written
        things (`halves`; who is killed leaves them to the next start)."""
        files = [*self.temporary.iterdir()]
        for path in self.path.rglob("*"):
            half = path.name.startswith(".") or path.name.endswith((".tmp", "-journal"))
            if path.is_socket() or (half and halves):
                files.append(path)
        processes = self.processes()
        told = [f"{len(processes)} processes"] * bool(processes) + [path.name for path in files]
        return ", ".join(told)

    def newest(self, of: str = "update") -> dict[str, float]:
        """Return the newest record that has this metric."""
        with suppress(OSError):
            for line in reversed((self.path / "metrics.jsonl").read_bytes()[-20_000:].splitlines()):
                with suppress(ValueError):
                    if of in (record := json.loads(line)):
                        return dict(record)
        return {}

    def wait_for(self, holds: Callable[[], object]) -> bool:
        """Wait until something holds; False where the run ended before."""
        until = time.monotonic() + LONGEST
        while not holds():
            if self.main.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.003)
        return True

    def end(self, number: int = 0, seconds: float = LONGEST) -> int | None:
        """Wait for its end, which this signal asks for, if any. Return its exit status;
        None where it had to be killed."""
        if number:
            self.main.send_signal(number)
        try:
            return self.main.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self) -> None:
        """Kill all that is left of it."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self.main.wait()

    def said(self) -> str:
        """Return why it ended, in the last words that it said."""
        lines = self.output.read_text(errors="replace").strip().splitlines()
        errors = [number for number, line in enumerate(lines) if "rror" in line]
        return " ".join(lines[errors[-1] :][:4] if errors else lines[-2:])[:400]


def stop_for(process: psutil.Process, seconds: float) -> None:
    """Stop a process for so long, meanwhile."""

    def resume() -> None:
        with suppress(psutil.Error):
            process.resume()

    process.suspend()
    later(seconds, resume)


def later(seconds: float, call: Callable[[], object]) -> None:
    """Call it after so many seconds, unless this process is over."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
