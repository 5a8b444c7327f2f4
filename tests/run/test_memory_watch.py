"""A worker whose memory grows beyond its plan is told with how fast, and what grows in
it, before the system kills it for that."""

import ctypes
import gc
import os
import re
import sys
from pathlib import Path
from time import time
from typing import Any
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Limits,
    Scripted,
    Trainer,
    train,
)
from tidemill.api.control_messages import LookAtMemory, State, WorkerStatistics, pack
from tidemill.core import object_census
from tidemill.core.memory import Need, own_bytes
from tidemill.run import memory_watch
from tidemill.run.events import read_events
from tidemill.run.member import Member
from tidemill.run.memory_watch import MemoryWatch
from tidemill.run.run_control import RunControl

MB = 1 << 20


class Clock:
    """Two processes, their memory, and what is told, on a clock of their own; the actor
    answers at once, where it `answers`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: bool = True) -> None:
        self.now, self.told, self.own = 0.0, list[str](), {"actor-0": 100 * MB, "trainer-0": 300 * MB}
        monkeypatch.setattr(memory_watch, "awake", lambda: self.now)
        monkeypatch.setattr(memory_watch, "available", lambda: 4000 * MB)
        actor = Member(Actors(environment=Scripted()), Mock(), State.RUNNING)
        trainer = Member(Trainer(algorithm=PPO()), Mock(), State.RUNNING)
        trainer.updated(WorkerStatistics(0, values={"update": 1.0}))
        self.members = {"actor-0": actor, "trainer-0": trainer}
        self.asked = list[bytes]()

        def ask(message: bytes) -> None:
            self.asked.append(message)
            if answers and message != pack(LookAtMemory()):
                actor.grows = "a list grows"

        actor.link.send = ask
        self.watch = MemoryWatch(
            [["actor-0"], ["trainer-0"]], self.own.get, lambda _, text: self.told.append(text)
        )

    def minutes(self, count: float, **grows: int) -> None:
        """Let so many minutes go by, in each of which processes grow by so many MB."""
        for _ in range(round(count * 12)):
            self.now += 5
            for name, by in grows.items():
                self.own[name.replace("_", "-")] += by * MB // 12
            self.watch.look(self.members)
            self.watch.look(self.members)  # what was answered meanwhile


def test_growth_beyond_the_plan_is_told_and_again_at_twice_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.minutes(1, actor_0=1200)  # it begins to work
    clock.minutes(10, actor_0=24)
    assert not clock.told  # less than a quarter of what it has
    clock.minutes(10, actor_0=24)
    assert len(clock.told) == 1
    assert clock.told[0].startswith("actor-0 holds 1.7 GB for itself")
    assert "grows by 25 MB a minute" in clock.told[0] and "would last 3 hours" in clock.told[0]
    assert clock.told[0].endswith("; a list grows") and "0.0 MB were planned" in clock.told[0]
    clock.minutes(6, actor_0=24)
    assert len(clock.told) == 1
    clock.minutes(5, actor_0=24)
    assert len(clock.told) == 2
    first, *others = clock.asked
    assert first == pack(LookAtMemory()) and len(others) == 2  # once it was suspected, and when it was told


def test_a_process_that_does_not_grow_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.minutes(1, actor_0=1200)
    clock.minutes(60, actor_0=2)
    assert not clock.asked and not clock.told


def test_one_that_does_not_answer_is_told_in_time_and_its_answer_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, answers=False)
    clock.minutes(2)
    clock.minutes(1, actor_0=300)
    assert not clock.told
    clock.minutes(0.5)
    assert len(clock.told) == 1
    assert clock.told[0].endswith("keeps what it could forget (episodes, lists that only grow)")
    clock.members["actor-0"].grows = "a list grows"
    clock.minutes(0.1)
    assert clock.told[1:] == ["actor-0: a list grows"]


def test_one_that_dies_before_it_answers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, answers=False)
    clock.minutes(2)
    clock.minutes(1, actor_0=300)
    clock.members["actor-0"].bury("killed")
    clock.watch.look(clock.members)
    assert len(clock.told) == 1 and "it has not answered what grows" in clock.told[0]


def test_what_was_planned_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.members["trainer-0"].unfilled = 3000 * MB
    clock.minutes(1.1)
    clock.members["trainer-0"].unfilled = 0
    clock.minutes(20, trainer_0=150)
    assert not clock.told
    clock.minutes(3, trainer_0=150)
    clock.minutes(0.5)
    assert len(clock.told) == 1 and "a list in its algorithm or policy" in clock.told[0]


def test_what_was_filled_before_is_no_room_to_grow_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a resumed replay memory's, which is full at once."""
    clock = Clock(monkeypatch)
    clock.members["trainer-0"].needs = (Need("replay", 3000 * MB),)
    clock.members["trainer-0"].unfilled = 3000 * MB
    clock.minutes(0.5, trainer_0=6000)
    clock.members["trainer-0"].unfilled = 0
    clock.minutes(2)
    assert not clock.told
    clock.minutes(7, trainer_0=150)
    assert len(clock.told) == 1 and "where 0.0 MB were planned" in clock.told[0]


def test_what_training_takes_is_not_told_as_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.members["trainer-0"].forget_updates()
    clock.minutes(3, trainer_0=300)  # its first update is a slow one
    assert clock.told == []
    clock.members["trainer-0"].updated(WorkerStatistics(0, values={"update": 1.0}))
    clock.minutes(0.5, trainer_0=300)
    clock.minutes(4, trainer_0=40)
    assert clock.told == []
    clock.minutes(4, trainer_0=400)
    assert clock.told and "trainer-0 holds" in clock.told[0]


def test_what_never_trains_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.members["trainer-0"].forget_updates()
    clock.minutes(20, trainer_0=100)  # it warms up, for hours
    assert clock.told and "trainer-0 holds" in clock.told[0]


def test_a_new_life_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.minutes(2)
    clock.members["actor-0"].life += 1
    clock.minutes(0.9, actor_0=2000)
    clock.minutes(5)
    assert not clock.told


def trim_memory() -> None:
    """Give what earlier tests have freed back to the system (glibc): what is kept in this
    process would fill that first, and the process not grow."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def test_a_process_tells_what_it_holds_for_itself_alone() -> None:
    trim_memory()
    before = own_bytes(os.getpid())
    kept = np.ones(64 * MB, np.uint8)
    after = own_bytes(os.getpid())
    assert before is not None and after is not None and after - before > 32 * MB and kept[0]
    assert own_bytes(1 << 30) is None


class Hoarding(gymnasium.Env[Any, Any]):
    """Keeps a quarter of a megabyte of each step, once there is a file `flag`, and
    `natively` in no object of Python."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, flag: str, natively: bool = False, numbers: int = 2) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (numbers,), np.float32)
        self.flag, self.natively, self.steps = Path(flag), natively, 0
        self.kept = list[Any]()
        self.allocate = ctypes.CDLL(None).malloc
        self.allocate.restype = ctypes.c_void_p

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape, np.float32), {}

    def step(self, action: Any) -> Any:
        if self.steps < 4000 and self.flag.exists():
            self.steps += 1
            if self.natively:
                ctypes.memset(self.allocate(1 << 18), 1, 1 << 18)
            else:
                self.kept.append(np.ones(1 << 18, np.uint8))
            if self.steps == 4000:
                self.flag.with_name("all").touch()
        return np.zeros(self.observation_space.shape, np.float32), 0.0, False, False, {}


def told_of(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    launch: str,
    natively: bool = False,
    numbers: int = 2,
    slots: int = 2,
) -> str:
    """Return what a run tells whose environment keeps all, and observes so many
    `numbers`."""
    if launch == "processes" and not sys.platform.startswith("linux"):
        pytest.skip("processes need Linux")
    for name, value in {"EVERY": 0.05, "SETTLED": 0.1, "MARGIN": 64 * MB, "MARGIN_SHARE": 0.05}.items():
        monkeypatch.setattr(memory_watch, name, value)
    for name in ("ANSWER", "ANSWER_SHARE"):  # as long as a busy machine takes
        monkeypatch.setattr(memory_watch, name, 1e9)
    for name in ("LOOKING", "WEIGHING", "NAMING"):  # where it is this process
        monkeypatch.setattr(object_census, name, 60.0)
    trim_memory()
    flag = folder / "flag"
    environment = Gymnasium(
        make=Hoarding, kwargs={"flag": str(flag), "natively": natively, "numbers": numbers}
    )
    made = Experiment(
        name="hoarding",
        policies={"policy": ActorCritic(hidden=(8,))},
        workers={
            "actor": Actors(
                environment=environment, lanes=1, agents=(AgentSpec(sample_steps=64),), slots=slots
            ),
            "trainer": Trainer(algorithm=PPO(minibatch_size=64, epochs=1)),
        },
        limits=Limits(steps=10**9),
    )

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        controller = control._controller
        if controller._memory._known and all(known.settled for known in controller._memory._known.values()):
            flag.touch()
        if any(" for itself, " in text for text in controller.state.report.notices):
            control.stop("it was told")
        kept_all = folder / "all"
        if kept_all.exists() and time() - kept_all.stat().st_mtime > 60:
            control.stop("it is not told")

    train(
        made,
        layout="given",
        run_dir=folder / "run",
        quiet=True,
        launch=launch,
        source=Path(__file__),
        on_update=on_update,
    )
    event, *_ = [event for event in read_events(folder / "run") if " for itself, " in event.cause]
    assert (event.worker, event.life) == ("actor-0", 1)
    told = event.cause
    whose = "actor-0" if launch == "processes" else "actor-0, trainer-0"
    assert told.startswith(f"{whose} holds ")
    return told


@pytest.mark.parametrize("launch", ["inline", "threads", "processes"])
def test_an_environment_that_keeps_all_is_told_with_the_list_that_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launch: str
) -> None:
    told = told_of(monkeypatch, tmp_path, launch)
    assert "the list `kept` of test_memory_watch.py:Hoarding (" in told
    assert " MB of numpy arrays)" in told and "no object of Python" not in told


def test_slots_that_are_planned_are_no_room_for_others_to_grow_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are shared, and what a process holds for itself is watched."""
    told = told_of(monkeypatch, tmp_path, "threads", numbers=4000, slots=400)
    assert "the list `kept` of test_memory_watch.py:Hoarding (" in told
    (planned,) = re.findall(r"where ([0-9.]+) MB were planned", told)
    assert float(planned) < 10


def test_memory_that_no_object_has_is_told_as_native(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = told_of(monkeypatch, tmp_path, "processes", natively=True)
    assert " MB in no object of Python" in told and "numpy arrays" not in told
