"""A run in which nothing progresses ends; one whose trainer takes long for an update does
not."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
from tests.run.watching import wait_until

from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Gymnasium, Limits, Trainer, train
from tidemill.algorithms.ppo import PPOLearner, PPOLoss
from tidemill.api.algorithm import Algorithm, Sample
from tidemill.api.launcher import Call
from tidemill.api.policy import Policy
from tidemill.core.clock import awake
from tidemill.core.schema import Arrays
from tidemill.core.thread_stacks import stack_of, whereabouts
from tidemill.run import ending, interrupts, stall_watch
from tidemill.run.ending import Ending
from tidemill.run.events import read_events
from tidemill.run.member import Member
from tidemill.run.run_control import RunControl
from tidemill.run.silence import in_update
from tidemill.run.stall_watch import LONGEST_WORK, Stalls, StallWatch
from tidemill.run.worker_messages import WorkerMessages
from tidemill.store.checkpoint import checkpoints, read_newest


class Clock:
    """A watch on a clock of its own; in `works` is what it is answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: float | None = 600.0) -> None:
        self.now, self.works, self.asked = 1000.0, False, 0
        monkeypatch.setattr(stall_watch, "awake", lambda: self.now)
        self.watch = StallWatch(most, self._ask)

    def _ask(self) -> bool:
        self.asked += 1
        return self.works

    def after(self, seconds: float, counts: bool = True) -> float:
        """Look ten times a second for so long; return what the last look said, or the
        first that was too much."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            if still := self.watch.look(counts):
                return still
        return 0.0


def test_what_lasts_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert not clock.after(599)
    clock.watch.move()
    assert not clock.after(599)
    assert clock.after(2) == pytest.approx(600, abs=0.2)
    assert clock.asked == 1


def test_a_trainer_that_works_has_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.works = True
    assert not clock.after(LONGEST_WORK - 1)
    assert 250 < clock.asked < 310  # to ask takes a moment
    assert clock.after(20) > LONGEST_WORK
    clock.watch.move()
    assert not clock.after(700)
    clock.works = False  # it is done, and waits
    assert clock.after(11)


def test_what_is_set_longer_than_an_hour_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 2 * LONGEST_WORK)
    clock.works = True
    assert not clock.after(2 * LONGEST_WORK - 1)
    assert clock.after(2)
    assert not Clock(monkeypatch, None).after(3 * LONGEST_WORK)


def test_pauses_and_what_nobody_could_hear_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert not clock.after(700, counts=False)
    assert not clock.after(599)
    clock.now += 500  # a callback
    assert not clock.watch.look(True)
    assert clock.after(2)


@dataclass(frozen=True, kw_only=True)
class Looking(PPO):
    """Looks where its thread is in an update."""

    def build(self, policy: Policy, seed: int) -> Algorithm:
        return _Looking(self, self.trainable(policy), seed)


class _Looking(PPOLearner):
    seen: ClassVar[list[list[Call]]] = []

    def update(self, samples: Sequence[Sample], steps: int) -> dict[str, float]:
        self.seen.append(stack_of(threading.get_ident()))
        return super().update(samples, steps)


@dataclass(frozen=True, kw_only=True)
class Crawling(PPO):
    """Its updates take minutes from the third one on, as each tells by a file in
    `flags`; in threads until that is `over`."""

    flags: str
    over: ClassVar[threading.Event] = threading.Event()

    def build(self, policy: Policy, seed: int) -> Algorithm:
        return _Crawling(self, self.trainable(policy), seed)


class _CrawlingLoss(PPOLoss):
    def _crawl(self) -> None:
        assert isinstance(self.config, Crawling)
        if self.policy.version == 2 and not Crawling.over.is_set():
            (Path(self.config.flags) / str(id(self))).touch()
            time.sleep(0.1)

    def epoch(self, *arguments: Any) -> int | None:
        self._crawl()
        return super().epoch(*arguments)

    def differentiate(self, *arguments: Any) -> int:
        self._crawl()
        return super().differentiate(*arguments)


class _Crawling(PPOLearner):
    loss_type = _CrawlingLoss


class LookingGame(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    seen: ClassVar[list[list[Call]]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.seen.append(stack_of(threading.get_ident()))
        return np.zeros(2, np.float32), 0.0, False, False, {}


def looking(algorithm: PPO, updates: int) -> Experiment:
    """An actor and a trainer that share a thread."""
    return Experiment(
        name="looking",
        policies={"policy": ActorCritic(hidden=(4,))},
        workers={
            "actor": Actors(
                environment=Gymnasium(make=LookingGame), lanes=1, agents=(AgentSpec(sample_steps=8),)
            ),
            "trainer": Trainer(algorithm=algorithm),
        },
        together=("actor", "trainer"),
        limits=Limits(updates=updates),
    )


@pytest.mark.parametrize("launch", ["inline", "threads"])
def test_an_update_is_told_from_an_environment_by_where_its_thread_is(tmp_path: Path, launch: str) -> None:
    _Looking.seen.clear()
    LookingGame.seen.clear()
    made = looking(Looking(minibatch_size=8, epochs=1), 2)
    train(made, layout="given", run_dir=tmp_path / "run", quiet=True, launch=launch, source=Path(__file__))
    assert len(_Looking.seen) == 2 and all(map(in_update, _Looking.seen))
    assert LookingGame.seen and not any(map(in_update, LookingGame.seen))
    assert all(whereabouts(seen).startswith("lane 0 of target 0 of actor-0: ") for seen in LookingGame.seen)
    assert not in_update([])


@dataclass(frozen=True, kw_only=True)
class Lasting(PPO):
    """Its second update lasts until somebody has asked whether it is in one."""

    begun: ClassVar[threading.Event]
    asked: ClassVar[threading.Event]

    def build(self, policy: Policy, seed: int) -> Algorithm:
        return _Lasting(self, self.trainable(policy), seed)


class _Lasting(PPOLearner):
    def update(self, samples: Sequence[Sample], steps: int) -> dict[str, float]:
        if self.policy.version == 1:
            Lasting.begun.set()
            assert Lasting.asked.wait(60)
        return super().update(samples, steps)


@pytest.mark.timeout(120)
def test_who_is_told_to_end_in_a_long_update_ends_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Lasting.begun, Lasting.asked = threading.Event(), threading.Event()
    ask = Stalls.trains

    def trains(stalls: Stalls, name: str) -> bool:
        found = ask(stalls, name)
        Lasting.asked.set()
        return found

    monkeypatch.setattr(Stalls, "trains", trains)
    monkeypatch.setattr(ending, "EXIT_DEADLINE", 3.0)

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if metrics["update"] == 1:
            assert Lasting.begun.wait(60)
            control.stop("enough")

    result = train(
        looking(Lasting(minibatch_size=8, epochs=1), 100),
        layout="given",
        run_dir=tmp_path / "run",
        quiet=True,
        launch="threads",
        source=Path(__file__),
        on_update=on_update,
    )
    assert (result.summary["status"], result.summary["updates"]) == ("completed", 2)
    assert checkpoints(tmp_path / "run" / "checkpoints" / "policy")[-1].name == "update-2"


def pass_when(
    monkeypatch: pytest.MonkeyPatch, due: Callable[[Mapping[str, Member]], object]
) -> threading.Event:
    """More than its deadline passes for a run's ending at once, when it is `due` by what
    workers have told. What is returned is set when it has looked once more."""
    passed, looked, look = [0.0], threading.Event(), Ending.look
    monkeypatch.setattr(ending, "awake", lambda: awake() + passed[0])

    def look_late(self: Ending) -> None:
        if self.deadline is not None and not passed[0] and due(self._state.members):
            passed[0] = 2 * ending.EXIT_DEADLINE
        look(self)
        if passed[0]:
            looked.set()

    monkeypatch.setattr(Ending, "look", look_late)
    return looked


@pytest.mark.timeout(180)
def test_equal_trainers_that_are_told_to_end_in_a_long_update_end_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They speak meanwhile, and one may wait for the other."""
    flags = tmp_path / "flags"
    flags.mkdir()
    trainers = ("trainer-0", "trainer-1")
    train_now = lambda members: all(members[name].shares.get("train") for name in trainers)  # noqa: E731
    monkeypatch.setattr(Crawling, "over", pass_when(monkeypatch, train_now))
    made = looking(Crawling(minibatch_size=8, epochs=200, flags=str(flags)), 100)
    made = made.replace(workers={name: config.replace(count=2) for name, config in made.workers.items()})

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if metrics["update"] == 2:
            wait_until(lambda: len([*flags.iterdir()]) == 2, 120, "both are in the long update")
            control.stop("enough")

    run, source = tmp_path / "run", Path(__file__)
    result = train(
        made, layout="given", run_dir=run, quiet=True, launch="threads", source=source, on_update=on_update
    )
    assert Crawling.over.is_set()
    assert (result.summary["status"], result.summary["updates"]) == ("completed", 3)
    assert checkpoints(run / "checkpoints" / "policy")[-1].name == "update-3"


@pytest.mark.parametrize(("condition", "trains"), [("", True), ("is stopped (by SIGSTOP)", False)])
def test_a_trainer_that_saves_is_waited_for_unless_it_is_stopped(condition: str, trains: bool) -> None:
    member = Member(Trainer(algorithm=PPO()), Mock(), saving=True)
    state = SimpleNamespace(members={"trainer-0": member})
    stalls = SimpleNamespace(_state=state, _launcher=SimpleNamespace(condition=lambda name: condition))
    assert Stalls.trains(stalls, "trainer-0") is trains  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Keeping(PPO):
    """Once its run is `told` to end a checkpoint takes until that has `looked`."""

    told: ClassVar[threading.Event]
    looked: ClassVar[threading.Event]

    def build(self, policy: Policy, seed: int) -> Algorithm:
        return _Keeping(self, self.trainable(policy), seed)


class _Keeping(PPOLearner):
    def state(self) -> Arrays:
        if Keeping.told.is_set():
            Keeping.looked.wait(60)
        return super().state()


@pytest.mark.timeout(120)
def test_who_is_told_to_end_may_write_its_last_checkpoint_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Keeping.told = threading.Event()
    Keeping.looked = pass_when(monkeypatch, lambda members: members["trainer-0"].saving)

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if metrics["update"] > 1:  # of which there is a checkpoint
            Keeping.told.set()
            control.stop("enough")

    made, source = looking(Keeping(minibatch_size=8, epochs=1), 1000), Path(__file__)
    result = train(
        made,
        layout="given",
        run_dir=tmp_path / "run",
        quiet=True,
        launch="threads",
        source=source,
        on_update=on_update,
    )
    assert Keeping.looked.is_set() and result.summary["status"] == "completed"
    last = checkpoints(tmp_path / "run" / "checkpoints" / "policy")[-1]
    assert last.name == f"update-{result.summary['updates']}"


class Enough(BaseException):
    """What ends a run as failed, without any time for its trainers."""


@pytest.mark.timeout(120)
def test_a_run_that_fails_does_so_after_a_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In which more than the deadline passes that all others have."""
    passed, hear = [0.0], Ending._hear_last
    monkeypatch.setattr(ending, "awake", lambda: awake() + passed[0])
    Keeping.told, Keeping.looked = threading.Event(), threading.Event()

    def hear_last(self: Ending, messages: WorkerMessages) -> None:
        hear(self, messages)
        if passed[0]:
            Keeping.looked.set()
        elif self._state.members["trainer-0"].saving:
            passed[0] = 2 * ending.CLOSE_DEADLINE

    monkeypatch.setattr(Ending, "_hear_last", hear_last)

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if metrics["update"] > 1 and not Keeping.told.is_set():
            Keeping.told.set()
            raise Enough

    run, made, source = tmp_path / "run", looking(Keeping(minibatch_size=8, epochs=1), 1000), Path(__file__)
    with pytest.raises(Enough):
        train(
            made,
            layout="given",
            run_dir=run,
            quiet=True,
            launch="threads",
            source=source,
            on_update=on_update,
        )
    assert Keeping.looked.is_set()
    assert len(checkpoints(run / "checkpoints" / "policy")) > 1  # besides that of update 1


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("launch", "trainers"), [("inline", 1), ("processes", 1), ("threads", 2)])
def test_a_long_update_that_a_signal_comes_in_costs_no_update_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: str, trainers: int
) -> None:
    """It ends with the steps that it has done; equal trainers undo it."""
    if launch == "processes" and not sys.platform.startswith("linux"):
        pytest.skip("processes need Linux")
    monkeypatch.setattr(interrupts, "HURRY", 0.2)
    flags, run = tmp_path / "flags", tmp_path / "run"
    flags.mkdir()

    def interrupt() -> None:
        wait_until(lambda: len([*flags.iterdir()]) == trainers, 120, "the long update has begun")
        os.kill(os.getpid(), signal.SIGTERM)

    made = looking(Crawling(minibatch_size=8, epochs=500, flags=str(flags)), 100)
    made = made.replace(
        workers={
            name: config.replace(
                count=trainers, **({"checkpoint_seconds": 3600.0} if name == "trainer" else {})
            )
            for name, config in made.workers.items()
        }
    )
    thread = threading.Thread(target=interrupt)
    thread.start()
    result = train(made, layout="given", run_dir=run, quiet=True, launch=launch, source=Path(__file__))
    thread.join()
    done = 3 if trainers == 1 else 2
    assert (result.summary["status"], result.summary["reason"]) == ("interrupted", "SIGTERM")
    assert read_newest(run / "checkpoints" / "policy").facts["updates"] == done
    said = "update 3 ended with the steps that it had done"
    assert sum(said in event.cause for event in read_events(run)) == (trainers == 1)
