"""Workers that fall silent are told, with where they are; those that their environment
holds for too long live again."""

import os
import re
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.envs.driver import Driver
from tests.envs.games import Counter, Hanging
from tests.run import hanging_evaluation, hanging_halves
from tests.run.watching import EXPERIMENTS, ended_well, leftovers, wait_until

from tidemill import (
    DQN,
    PPO,
    Actors,
    Buffers,
    Evaluation,
    Limits,
    PolicyWorkers,
    Population,
    Replay,
    ReplayActors,
    ReplayTrainer,
    Scripted,
    Trainer,
)
from tidemill.api.control_messages import State, WorkerStatistics
from tidemill.api.experiment import Experiment
from tidemill.api.launcher import DEBUGGED, Call
from tidemill.api.worker import WorkerConfig
from tidemill.core.errors import RunError
from tidemill.core.thread_stacks import stack_of, whereabouts
from tidemill.core.user_code_loading import load_file
from tidemill.envs import lane_threads, parallel_build
from tidemill.envs.lanes import LaneLoop
from tidemill.launchers.processes import ProcessesLauncher
from tidemill.launchers.worker_stack import calls_of, dump_of
from tidemill.metrics.json_lines import read_metrics
from tidemill.run import ending, silence
from tidemill.run.controller import Controller
from tidemill.run.events import Event, read_events
from tidemill.run.member import Member
from tidemill.run.run_control import RunControl
from tidemill.run.silence import SilenceWatch, TurnWatch
from tidemill.store.database_watch import DatabaseWatch
from tidemill.training.train import train

experiments = load_file(EXPERIMENTS, "test")
NOW = 1000.0  # second of `awake`, which stands still while a watch looks
IN_ENVIRONMENT = [Call("read", "/home/arm.py", 41), Call("send", "/lib/tidemill/envs/lanes.py", 7)]
IN_STORE = [Call("connect", "/lib/sqlite.py", 7), Call("find", "/lib/tidemill/store/version_index.py", 9)]
IN_TRAINING = [Call("matmul", "/lib/torch.py", 1), Call("_poll", "/lib/tidemill/workers/trainer.py", 1)]


class Watched:
    """An actor and a trainer that share a process, or else only a worker of this
    configuration, and what is told of them."""

    def __init__(
        self, stack: Sequence[Call], condition: str = "", alone: WorkerConfig | None = None, **actors: float
    ) -> None:
        self.told: list[str] = []
        self.hung: list[tuple[str, str]] = []
        actor = Member(Actors(environment=Scripted(), **actors), Mock())
        trainer = Member(Trainer(algorithm=PPO()), Mock(), update=WorkerStatistics(1, update=True))
        self.members = {"actor-0": actor, "trainer-0": trainer}
        if alone is not None:
            self.members = {"worker-0": Member(alone, Mock())}
        for member in self.members.values():
            member.state, member.polls = State.RUNNING, 1000
            member.statistics = {"longest_poll": 0.1, "tick_p99": 0.1}
        self.watch = SilenceWatch(
            [[*self.members]],
            lambda _: stack,
            lambda _: condition,
            lambda _, text: self.told.append(text),
            lambda *said: self.hung.append(said),
        )

    def after(self, seconds: float) -> None:
        """Look once the process has been silent for so long."""
        for member in self.members.values():
            member.heard = NOW - seconds
        for _ in range(2):
            self.look()

    def look(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(silence, "awake", lambda: NOW)
            self.watch.look(self.members)


def test_a_process_that_falls_silent_is_told_once_and_when_it_speaks_again() -> None:
    watched = Watched(IN_TRAINING)
    watched.after(4.0)
    assert not watched.told
    watched.after(6.0)
    watched.look()
    assert watched.told == [
        "actor-0, trainer-0 is silent for 6 s (no poll took longer than 0.1 s before): matmul (torch.py:1) ← "
        "_poll (trainer.py:1)"
    ]
    assert watched.members["actor-0"].where == "matmul (torch.py:1) ← _poll (trainer.py:1)"
    watched.members["trainer-0"].heard = NOW
    watched.look()
    assert watched.told[1:] == ["actor-0, trainer-0 speaks again, after 6 s"]


def test_one_that_was_not_read_since_a_callback_is_not_silent() -> None:
    """Its words have come, and are read before the next look."""
    watched = Watched(IN_ENVIRONMENT)
    watched.after(1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "NOW", NOW + 90.0)
        watched.look()
        assert not watched.told and not watched.hung
        watched.look()  # nothing had come
        assert len(watched.told) == 1 and len(watched.hung) == 1


def test_who_hangs_beside_a_trainer_that_pauses_is_told() -> None:
    """Until enough actors run."""
    watched = Watched(IN_ENVIRONMENT)
    watched.members["trainer-0"].state = State.PAUSED
    watched.after(9.0)
    assert watched.told and "actor-0, trainer-0 is silent for 9 s" in watched.told[0]


@pytest.mark.parametrize("changed", ["saving", "paused", "slow", "begins"])
def test_silence_that_is_known_is_not_told(changed: str) -> None:
    watched = Watched(IN_ENVIRONMENT)
    actor, trainer = watched.members.values()
    if changed == "saving":
        trainer.saving = True
    elif changed == "paused":
        actor.state = State.PAUSED
    elif changed == "slow":
        actor.statistics = {"longest_poll": 2.0}
    else:
        trainer.update = WorkerStatistics(0)
    watched.after(9.0)
    assert not watched.told and not watched.hung


def test_an_actor_whose_environment_holds_it_for_too_long_is_gone() -> None:
    watched = Watched(IN_ENVIRONMENT)
    watched.after(9.0)
    assert not watched.hung
    watched.after(11.0)
    (found,) = watched.hung
    assert found == (
        "actor-0", "its environment has not come back for 11 s: read (arm.py:41) ← send (lanes.py:7)"
    )  # fmt: skip


def test_each_hang_has_the_same_deadline_whenever_the_last_one_was() -> None:
    watched = Watched(IN_ENVIRONMENT, deadline_s=3.0)
    watched.after(3.5)
    assert len(watched.hung) == 1
    watched.look()  # of one that nobody can end its stack is asked for now and then
    assert len(watched.hung) == 1
    for later in (4.0, 8.0):  # its next life hangs, and the one after that
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[__name__], "NOW", NOW + later)
            watched.after(2.5)
            watched.after(3.5)
    assert [why.partition(":")[0] for _, why in watched.hung] == [
        "its environment has not come back for 4 s"
    ] * 3


@pytest.mark.parametrize(
    "config",
    [
        PolicyWorkers(stream="inference"),
        Buffers(process=()),
        Actors(environment=Scripted()),
        Evaluation(),
        Population(members=("a", "b"), explore={}),
    ],
)
def test_who_is_no_trainer_and_hangs_anywhere_else_is_gone_likewise(config: WorkerConfig) -> None:
    watched = Watched([Call("act", "/home/policy.py", 7)], alone=config)
    watched.after(299.0)
    assert len(watched.told) == 1 and not watched.hung
    watched = Watched([Call("act", "/home/policy.py", 7)], alone=config)
    watched.after(301.0)
    assert watched.hung == [("worker-0", "its thread has not come back for 301 s: act (policy.py:7)")]


def test_one_whose_polls_take_long_has_more_time() -> None:
    for seconds, gone in ((499.0, 0), (501.0, 1)):
        watched = Watched([Call("act", "/home/policy.py", 7)], alone=PolicyWorkers(stream="inference"))
        watched.members["worker-0"].statistics = {"longest_poll": 100.0}
        watched.after(seconds)
        assert len(watched.hung) == gone


def test_an_environment_of_ones_own_has_the_time_that_is_set() -> None:
    for seconds, gone in ((999.0, 0), (1001.0, 1)):
        alone = Actors(environment=Scripted(), deadline_s=1000.0)
        watched = Watched([Call("send", "/home/own.py", 7)], alone=alone)
        watched.after(seconds)
        assert len(watched.hung) == gone


def test_a_replay_trainer_that_an_environment_holds_in_its_evaluation_is_gone() -> None:
    evaluates = [
        *IN_ENVIRONMENT,
        Call("evaluate", "/lib/tidemill/replay_training/iteration_evaluation.py", 9),
    ]
    makes = [Call("__init__", "/home/arm.py", 7), Call("make_all", parallel_build.__file__, 9), evaluates[-1]]
    trainer = ReplayTrainer(algorithm=DQN(), buffer=Replay(capacity=2000), batch_size=8)
    given = ReplayActors(environment=Scripted())
    for stack, deadline_s, seconds, gone in (
        (evaluates, None, 299.0, 0),
        (evaluates, None, 301.0, 1),
        (evaluates, 8.0, 9.0, 1),
        (makes, 8.0, 299.0, 0),  # that is for steps and resets
        (makes, 8.0, 301.0, 1),
        (IN_ENVIRONMENT, None, 400.0, 0),
    ):
        watched = Watched(stack, alone=trainer)
        watched.members["worker-0"].statistics = {"longest_poll": 0.1}  # trainers tell of no ticks
        others = given.replace(samples="others", deadline_s=1.0)
        watched.members["other-0"] = Member(others, Mock())  # they gather for another trainer
        watched.members["actor-0"] = Member(given.replace(deadline_s=deadline_s), Mock())
        watched.after(seconds)
        assert len(watched.hung) == gone


@pytest.mark.parametrize(
    ("stack", "alone"),
    [
        (IN_STORE, Evaluation()),
        (IN_STORE, Population(members=("a", "b"), explore={})),
        (IN_STORE, Actors(environment=Scripted())),
        ((), Evaluation()),  # the kernel may hold it at a share
        ((), Population(members=("a", "b"), explore={})),
        ([Call("act", "/home/policy.py", 7)], Trainer(algorithm=PPO())),
    ],
)
def test_who_may_wait_for_a_share_or_be_in_an_update_is_told_alone(
    stack: Sequence[Call], alone: WorkerConfig
) -> None:
    watched = Watched(stack, alone=alone)
    watched.after(4000.0)
    assert len(watched.told) == 1 and not watched.hung


def test_an_evaluation_that_shares_its_process_with_an_update_is_not_gone() -> None:
    for stack, gone in ((IN_TRAINING, 0), ([Call("act", "/home/policy.py", 7)], 1)):
        watched = Watched(stack)
        watched.members = {"evaluation-0": Member(Evaluation(), Mock()), **watched.members}
        for member in watched.members.values():
            member.state = State.RUNNING
        watched.watch._processes = [["evaluation-0", "trainer-0"]]
        watched.after(301.0)
        assert len(watched.hung) == gone


def test_who_hangs_in_the_runs_database_is_known_by_its_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, inside = threading.Event(), threading.Event()

    def stat(path: Path) -> None:
        inside.set()
        assert over.wait(60)
        raise FileNotFoundError

    thread = threading.Thread(target=DatabaseWatch(tmp_path).due)
    with monkeypatch.context() as patch:
        patch.setattr("tidemill.store.database_watch.os", Mock(stat=stat))
        thread.start()
        assert inside.wait(60)
        calls = stack_of(thread.ident)
        over.set()
        thread.join(60)
    assert silence.in_store(calls) and not silence.in_store(stack_of(threading.get_ident()))


@pytest.mark.parametrize(
    ("stack", "condition"), [(IN_TRAINING, ""), (IN_ENVIRONMENT, f"{DEBUGGED} (process 7)"), ((), "")]
)
def test_who_is_silent_for_another_reason_is_told_alone(stack: Sequence[Call], condition: str) -> None:
    watched = Watched(stack, condition)
    watched.after(4000.0)
    assert len(watched.told) == 1 and not watched.hung


@pytest.mark.parametrize("alone", [None, Trainer(algorithm=PPO()), Evaluation()])
def test_whoever_is_stopped_for_too_long_is_gone(alone: WorkerConfig | None) -> None:
    watched = Watched(IN_ENVIRONMENT, "is stopped (by SIGSTOP); let it go on by: kill -CONT 7", alone=alone)
    watched.after(299.0)
    assert watched.told[0].endswith(": is stopped (by SIGSTOP); let it go on by: kill -CONT 7")
    assert not watched.hung
    with pytest.MonkeyPatch.context() as patch:
        for later in (2.0, 11.0):  # what keeps it is asked for each 10 s
            patch.setattr(sys.modules[__name__], "NOW", NOW + later)
            watched.look()
    ((_, why),) = watched.hung
    assert why == "its process has not come back for 301 s: is stopped (by SIGSTOP)"


def test_one_that_is_stopped_while_it_saves_is_gone_likewise() -> None:
    watched = Watched(IN_TRAINING, "is stopped (by SIGSTOP); let it go on by: kill -CONT 7")
    watched.members["trainer-0"].saving = True
    watched.after(301.0)
    assert len(watched.told) == 1 and len(watched.hung) == 1


def test_one_whose_thread_cannot_be_looked_at_is_gone_where_no_trainer_is_beside_it() -> None:
    watched = Watched((), alone=PolicyWorkers(stream="inference"))
    watched.after(301.0)
    assert watched.hung == [
        ("worker-0", "its thread has not come back for 301 s: where it is cannot be seen")
    ]


def test_the_deadline_follows_from_ticks_and_resets_have_their_own() -> None:
    watched = Watched(IN_ENVIRONMENT)
    actor = watched.members["actor-0"]
    actor.statistics = {"longest_poll": 0.1, "tick_p99": 2.0}
    watched.after(39.0)
    assert not watched.hung
    watched.after(41.0)
    assert len(watched.hung) == 1
    for call in (Call("reset", "/home/arm.py", 41), Call("_restart", "/lib/tidemill/envs/lanes.py", 1)):
        for seconds, gone in ((299.0, 0), (301.0, 1)):
            watched = Watched([Call("load", "/home/arm.py", 9), call, *IN_ENVIRONMENT])
            watched.after(seconds)
            assert len(watched.hung) == gone
    watched = Watched(IN_ENVIRONMENT)
    watched.members["actor-0"].statistics = {"longest_poll": 0.1}  # too few ticks are known
    watched.after(299.0)
    assert not watched.hung
    watched = Watched(IN_ENVIRONMENT, deadline_s=2.0)
    watched.after(3.0)
    assert len(watched.hung) == 1


@pytest.mark.parametrize("file", [lane_threads.__file__, "/elsewhere/tidemill/envs/lane_threads.py"])
def test_who_waits_for_lanes_in_threads_is_not_gone(file: str) -> None:
    watched = Watched([Call("take", file, 1), *IN_ENVIRONMENT])
    watched.after(400.0)
    assert len(watched.told) == 1 and not watched.hung


def test_inline_an_environment_that_hangs_is_told_from_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Freed(threading.Event):
        """What takes long is told once this is waited for: before, all may."""

        def wait(self, timeout: float | None = None) -> bool:
            monkeypatch.setattr(silence, "LEAST", 0.1)
            return super().wait(timeout)

    monkeypatch.setattr(silence, "LEAST", float("inf"))
    hung, told = Hanging(), list[str]()
    hung.freed = Freed()

    def alarm(text: str) -> None:
        told.append(text)
        hung.freed.set()

    with TurnWatch(alarm) as watch:
        driver = Driver(LaneLoop([Counter(), hung], "Hanging", 0))
        for _ in range(3):  # hangs in the third until the watch has told it
            watch.turn()
            driver.tick()
        assert watch.turn().startswith("the environment has come back, after ")
        assert watch.turn() == ""
    (text,) = told
    assert text.startswith("an environment has not come back for ")
    assert " s: lane 1: " in text and "step (games.py:" in text


def test_inline_environments_that_hang_as_they_are_made_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "LEAST", 0.0)
    monkeypatch.setattr(silence, "FIRST", 0.1)
    freed, told = threading.Event(), list[str]()

    def alarm(text: str) -> None:
        told.append(text)
        freed.set()

    def hang(number: int) -> Mock:
        freed.wait(60)
        return Mock()

    with TurnWatch(alarm, turns=lambda: False):
        list(parallel_build.make_all(hang, range(1)))
    (text,) = told
    assert text.startswith("environments are still made, for ") and "hang (test_silence.py:" in text


@pytest.mark.parametrize("launch", ["inline", "threads", "processes"])
def test_a_callback_that_does_not_come_back_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launch: str
) -> None:
    monkeypatch.setattr(silence, "LEAST", 0.0)
    monkeypatch.setattr(silence, "FIRST", 1.0)
    run, hung = tmp_path / "run", list[float]()

    def told() -> list[str]:
        return [event.cause for event in read_events(run) if event.what == "told"]

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if not hung:
            hung.append(metrics["update"])
            wait_until(lambda: any("main thread" in text for text in told()), 60, "it is told")

    made = experiments.cartpole().replace(limits=Limits(updates=20))
    result = train(
        made, layout="given", launch=launch, run_dir=run, source=EXPERIMENTS, quiet=True, on_update=on_update
    )
    assert result.summary["status"] == "completed"
    first, second, *_ = (text for text in told() if "come back" in text)
    assert first.startswith("the run's main thread has not come back for ")
    assert "on_update (test_silence.py:" in first
    assert second.startswith("the run's main thread has come back, after ")


@pytest.mark.parametrize("breaks", [False, True])
def test_inline_environments_that_do_not_let_themselves_be_closed_are_told_and_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], breaks: bool
) -> None:
    monkeypatch.setattr(silence, "CLOSING", 0.1)
    made, run = experiments.never_closes(breaks), tmp_path / "run"
    with pytest.raises(RunError, match="the arm is broken") if breaks else nullcontext():
        train(made, run_dir=run, source=EXPERIMENTS, quiet=True, launch="inline")
    ended_well(run, "failed" if breaks else "completed", "the arm is broken" if breaks else "20 updates")
    told = [event.cause for event in read_events(run) if event.what == "told"]
    left = [text for text in told if text.startswith("an environment does not let itself be closed, for ")]
    assert [text.partition(": ")[2].partition(": close (environments.py:")[0] for text in left] == [
        "lane 0 of actor-0",
        "lane 0 of actor-1",
    ]
    assert f"note: {left[0]}" in capfd.readouterr().err


@pytest.mark.parametrize("launch", ["threads", "processes"])
def test_environments_that_do_not_let_themselves_be_closed_are_told_with_any_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launch: str
) -> None:
    """Their time begins once both are held: a busy machine may keep them from it."""
    wait, held = ending.Ending.await_closed, "close (environments.py:"

    def await_closed(each: ending.Ending) -> None:
        stack = each._launcher.stack
        for name in ("actor-0", "actor-1"):
            wait_until(lambda name=name: held in whereabouts(stack(name)), 60, f"{name} is held")
        wait(each)

    monkeypatch.setattr(ending, "CLOSING", 0.1)
    monkeypatch.setattr(ending.Ending, "await_closed", await_closed)
    run = tmp_path / "run"
    train(experiments.never_closes(False), run_dir=run, source=EXPERIMENTS, quiet=True, launch=launch)
    ended_well(run, "completed", "20 updates")
    told = [event.cause for event in read_events(run) if event.what == "told"]
    left = [text.partition(" s: ")[::2] for text in told if "does not let itself be closed" in text]
    assert [who.partition(":")[0] for who, _ in left] == ["actor-0", "actor-1"]
    assert all(held in where for _, where in left)


def test_who_has_hung_up_wakes_nobody_who_waits_for_environments_to_be_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waits, wait, closing = list[float](), ProcessesLauncher.wait, ending.Ending.await_closed

    def await_closed(each: ending.Ending) -> None:
        waits.clear()
        closing(each)

    def noted(launcher: ProcessesLauncher, seconds: float, least: float = 0.0) -> None:
        waits.append(seconds)
        wait(launcher, seconds, least)

    monkeypatch.setattr(ending, "CLOSING", 0.5)
    monkeypatch.setattr(ending.Ending, "await_closed", await_closed)
    monkeypatch.setattr(ProcessesLauncher, "wait", noted)
    made = experiments.never_closes(False)
    train(made, run_dir=tmp_path / "run", source=EXPERIMENTS, quiet=True, launch="processes")
    assert 0 < len(waits) < 30  # each 0.1 s, and once for each that hangs up


def test_the_workers_thread_is_found_in_a_dump_of_all() -> None:
    dump = (
        'Thread 0x01 (most recent call first):\n  File "/lib/threading.py", line 320 in wait\n\n'
        "Current thread 0x02 (most recent call first):\n"
        '  File "/home/my arm.py", line 41 in read\n  File "/lib/tidemill/workers/base.py", line 9 in run\n'
    )
    assert calls_of(dump) == [
        Call("read", "/home/my arm.py", 41), Call("run", "/lib/tidemill/workers/base.py", 9)
    ]  # fmt: skip
    assert calls_of("") == ()
    calls = [Call("read", "/home/my arm.py", 41, "lane 3"), Call("run", "/lib/tidemill/workers/base.py", 9)]
    assert calls_of(dump_of(calls)) == calls


def cut_short(made: Experiment, flag: Path, run: Path) -> list[Event]:
    """Train, and return what happened. The actor's deadline is cut short from when the
    environment hangs until another life of it has begun."""
    controllers, usual = list[Controller](), silence.deadline

    def deadline(given: float | None, p99: float | None, resetting: bool = False) -> float:
        hangs = flag.exists() and controllers and not controllers[0].state.members["actor-0"].life
        return 0.5 if hangs else usual(given, p99, resetting)

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        controllers.append(control._controller)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(silence, "deadline", deadline)
        train(made, run_dir=run, source=EXPERIMENTS, quiet=True, on_update=on_update)
    return read_events(run)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux")
def test_an_environment_that_hangs_costs_its_actor_a_life(tmp_path: Path) -> None:
    """Its deadline is cut short while it hangs alone: nothing else may be late for it."""
    flag = tmp_path / "hung"
    events = cut_short(experiments.hangs_once(str(flag)), flag, tmp_path / "run")
    (died,) = (event for event in events if event.what == "died")
    assert died.worker == "actor-0"
    assert "its environment has not come back for" in died.cause
    assert " s: lane 0 of target 0 of actor-0: hold (environments.py:" in died.cause
    assert [(event.worker, event.life) for event in events if event.what == "lives"] == [("actor-0", 2)]
    assert leftovers(tmp_path / "run") == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux")
def test_one_that_hangs_in_a_replay_trainers_evaluation_costs_that_a_life(tmp_path: Path) -> None:
    flag = tmp_path / "hung"
    events = cut_short(experiments.hangs_in_an_evaluation(str(flag)), flag, tmp_path / "run")
    (died,) = (event for event in events if event.what == "died")
    assert died.worker == "trainer-0" and "its environment has not come back for" in died.cause
    assert [(event.worker, event.life) for event in events if event.what == "lives"] == [("trainer-0", 2)]
    seen = [record for record in read_metrics(tmp_path / "run") if "iteration/number" in record]
    assert [record["iteration/number"] for record in seen] == [1, 2]
    assert all(record["iteration/evaluation_steps"] == 5 for record in seen)
    assert leftovers(tmp_path / "run") == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux")
def test_a_process_that_is_stopped_for_too_long_costs_its_worker_a_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as silent for long as soon as it is stopped: others are as they are."""
    stopped, look = list[int](), SilenceWatch.look

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if not stopped:
            stopped.append(control._controller.launcher._group_of["actor-0"].process.pid)
            os.kill(stopped[0], signal.SIGSTOP)
        elif control._controller.state.members["actor-0"].life:
            control.stop("it lives again")

    def look_late(self: SilenceWatch, members: Mapping[str, Member]) -> None:
        if stopped and not members["actor-0"].life:
            member = members["actor-0"]
            member.heard = min(member.heard, silence.awake() - 400.0)
        look(self, members)

    monkeypatch.setattr(SilenceWatch, "look", look_late)
    made, run = experiments.cartpole().replace(limits=Limits(seconds=300)), tmp_path / "run"
    train(made, layout="given", run_dir=run, source=EXPERIMENTS, quiet=True, on_update=on_update)
    (died,) = (event for event in read_events(run) if event.what == "died")
    assert died.worker == "actor-0"
    assert re.search(r"its process has not come back for 4\d\d s: is stopped \(by SIGSTOP", died.cause)
    assert leftovers(run) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux")
def test_an_evaluation_that_hangs_costs_it_a_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as silent for long as soon as it hangs: others are as they are."""
    flag, look = tmp_path / "hung", SilenceWatch.look

    def look_late(self: SilenceWatch, members: Mapping[str, Member]) -> None:
        if flag.exists() and not members["evaluation-0"].life:
            member = members["evaluation-0"]
            member.heard = min(member.heard, silence.awake() - 400.0)
        look(self, members)

    monkeypatch.setattr(SilenceWatch, "look", look_late)
    again, run = "evaluation/version >= 0", tmp_path / "run"
    made = hanging_evaluation.hangs_once(str(flag)).replace(limits=Limits(until=again, seconds=1000))
    done = train(made, run_dir=run, source=hanging_evaluation.__file__, quiet=True)
    assert done.summary["reason"] == again
    (died,) = (event for event in read_events(run) if event.what == "died")
    assert died.worker == "evaluation-0"
    assert re.match(r"its thread has not come back for 4\d\d s: .* ← _conclude", died.cause)
    lives = [(event.worker, event.life) for event in read_events(run) if event.what == "lives"]
    assert lives == [("evaluation-0", 2)]
    assert leftovers(run) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux")
def test_what_hangs_where_it_steps_elsewhere_costs_its_actor_s_process_a_life(tmp_path: Path) -> None:
    run, flag = tmp_path / "run", tmp_path / "hung"

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if flag.exists() and metrics["update"] > 30:  # it is not reached without the actor
            control.stop("the run went on")

    made = hanging_halves.hangs_once(str(flag)).replace(limits=Limits(seconds=1000))
    train(made, run_dir=run, source=hanging_halves.__file__, quiet=True, on_update=on_update)
    (died,) = (event for event in read_events(run) if event.what == "died")
    assert (
        died.cause.startswith("its environment has not come back for ") and "recv (vector.py:" in died.cause
    )
    assert leftovers(run) == []


@pytest.mark.parametrize("launch", ["threads", "processes"])
def test_a_lane_that_hangs_in_a_thread_costs_its_step_alone(tmp_path: Path, launch: str) -> None:
    if launch == "processes" and not sys.platform.startswith("linux"):
        pytest.skip("processes need Linux")
    made = experiments.hangs_in_a_thread(str(tmp_path / "hung"))
    seen = list[dict[str, float]]()

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if "time/actor-0/lanes/restarts" in metrics:  # it was made anew
            seen.append(metrics)
            control.stop("it was told, and the run went on")

    train(made, run_dir=tmp_path / "run", source=EXPERIMENTS, quiet=True, launch=launch, on_update=on_update)
    (tmp_path / "hung.over").touch()
    events = read_events(tmp_path / "run")
    (text,) = (event.cause for event in events if event.what == "told" and "has not come back" in event.cause)
    assert " has not come back from a step for " in text and "step (environments.py:" in text
    assert not [event for event in events if event.what == "died"]
    assert seen[0]["time/actor-0/lanes/hanging"] == seen[0]["time/actor-0/lanes/restarts"] == 1
    assert leftovers(tmp_path / "run") == []
