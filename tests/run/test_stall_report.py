"""A run that makes no progress says who waits for whom."""

import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from tests.run.watching import EXPERIMENTS, wait_until

from tidemill import Gymnasium, Limits, ReplayActors, ReplayTrainer, Slots, populate
from tidemill.api.control_messages import State, WorkerStatistics
from tidemill.core.clock import awake
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.user_code_loading import load_file
from tidemill.run import stall_report, stall_watch
from tidemill.run.member import Member
from tidemill.run.run_control import RunControl
from tidemill.run.stall_report import BESIDES, SILENT, explain_stall, stall_limit, waits_for_pause
from tidemill.run.waiting import whom_each_awaits
from tidemill.run.worker_messages import WorkerMessages
from tidemill.store.checkpoint import checkpoints
from tidemill.training.train import train
from tidemill.transports.local import LocalBell, LocalLink

experiments = load_file(EXPERIMENTS, "test")
CLOCK = 1_800_000_000.0  # what the wall clock shows where it stands still


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """The second of `awake` in which reports are made: their clocks stand still."""
    now = awake() + 1
    monkeypatch.setattr(stall_report, "awake", lambda: now)
    monkeypatch.setattr(stall_report, "time", lambda: CLOCK)
    return now


def test_a_chain_leads_from_the_trainer_to_who_explains_most(now: float) -> None:
    experiment = experiments.cartpole()
    link = LocalLink.pair(LocalBell(), LocalBell())[0]
    members = {
        name: Member(config, link, State.RUNNING, {"wait": 0.98, "python": 0.02}, heard=now)
        for name, config in experiment.members()
    }
    actor, server, trainer = (members[name] for name in ("actor-0", "server-0", "trainer-0"))

    def told(condition: Callable[[str], str] = lambda _: "") -> str:
        return explain_stall(
            ["trainer-0"], members, whom_each_awaits(experiment, experiment.edges()), condition
        )

    # nobody does anything: it may be the environment
    assert told() == (
        "trainer-0 waits for samples ← actor-0 waits for room at trainer-0 or answers of server-0 or its "
        "environment"
    )
    server.shares = {"inference": 0.9, "wait": 0.1}
    assert told() == (
        "trainer-0 waits for samples ← actor-0 waits for answers ← server-0 works (90% inference)"
    )
    server.heard = now - 28
    assert told().endswith("waits for answers ← server-0 is silent for 28 s, where cannot be seen")
    server.where = "act (policy.py:7) ← _poll (policy.py:320)"  # in no environment
    assert told().endswith("← server-0 is silent for 28 s: act (policy.py:7) ← _poll (policy.py:320)")
    server.bury("its process was killed by SIGKILL (by hand); its last output: none")
    server.died_at, server.life = now - 3, 2
    at = datetime.fromtimestamp(CLOCK - 3).strftime("%H:%M:%S")
    assert told() == (
        f"trainer-0 waits for samples ← actor-0 waits for answers ← server-0 died at {at} "
        "(its process was killed by SIGKILL (by hand)), restarted twice"
    )
    # who is on no chain, and does not live either, is told besides
    actor.heard, actor.where = now - 28, "lane 1 of actor-0: read (arm.py:41)"
    assert told().startswith(
        "trainer-0 waits for samples ← actor-0 is silent for 28 s: lane 1 of actor-0: read (arm.py:41); "
    )
    assert "; besides, server-0 died at" in told()
    held = told(lambda name: "is stopped (by SIGSTOP)" if name == "actor-0" else "")
    assert held.startswith("trainer-0 waits for samples ← actor-0 is stopped (by SIGSTOP); besides")
    trainer.state = State.PAUSED
    assert told().startswith("trainer-0 is paused; besides, actor-0 is silent")


def test_a_member_waits_for_the_population_and_that_for_the_other_member(now: float) -> None:
    one = experiments.experiment(Gymnasium(id="CartPole-v1"))
    experiment = populate(one, [{}, {}], updates=5, explore={})
    link = LocalLink.pair(LocalBell(), LocalBell())[0]
    members = {
        name: Member(config, link, State.RUNNING, {"wait": 1.0}, heard=now)
        for name, config in experiment.members()
    }
    members["trainer-1-0"].bury("its process was killed")
    members["trainer-1-0"].died_at = now
    told = explain_stall(
        ["trainer-0-0"], members, whom_each_awaits(experiment, experiment.edges()), lambda _: ""
    )
    assert told.startswith(
        "trainer-0-0 waits for what is recorded ← population-0 waits for a version ← trainer-1-0 died at "
    )


def test_equal_trainers_that_wait_for_one_actor_are_one_chain(now: float) -> None:
    experiment = load_file(EXPERIMENTS, "test").equal()
    link = LocalLink.pair(LocalBell(), LocalBell())[0]
    members = {
        name: Member(config, link, State.RUNNING, {"wait": 1.0}, heard=now)
        for name, config in experiment.members()
    }
    members["actor-1"].heard = now - 28
    trainers = ["trainer-0", "trainer-1"]
    text = explain_stall(trainers, members, whom_each_awaits(experiment, experiment.edges()), lambda _: "")
    assert text == (
        "trainer-0 waits for a sum's part ← trainer-1 waits for samples ← actor-1 is silent for 28 s, "
        "where cannot be seen"
    )


def test_a_pause_excuses_no_stall_of_who_does_not_wait_for_it(now: float) -> None:
    experiment = experiments.equal()
    link = LocalLink.pair(LocalBell(), LocalBell())[0]
    members = {
        name: Member(config, link, State.RUNNING, {"wait": 1.0}, heard=now)
        for name, config in experiment.members()
    }
    actor, other = members["actor-0"], members["trainer-1"]

    def excused(*trainers: str) -> bool:
        awaited = whom_each_awaits(experiment, experiment.edges())
        return all(waits_for_pause(name, members, awaited) for name in trainers)

    assert not excused("trainer-0")
    actor.away, actor.pauses = "nothing answers there", True
    assert excused("trainer-0", "trainer-1")  # the latter waits for the former's sum, that for samples
    other.heard = now - 28  # it hangs
    assert excused("trainer-0") and not excused("trainer-1")
    other.heard, other.shares = now, {"train": 0.9, "wait": 0.1}
    assert not excused("trainer-1")
    other.shares = {"wait": 1.0}
    actor.heard = now - 28  # nobody knows whether it still pauses
    assert not excused("trainer-0")
    actor.heard = now
    other.bury("it was killed")  # the supervisor has deadlines for its next life
    assert excused("trainer-0", "trainer-1")


class Licensed(gymnasium.Env[np.ndarray, int]):
    """Fails after some steps, and cannot be made a second time."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)  # type: ignore[assignment]

    def __init__(self, licence: str) -> None:
        Path(licence).touch(exist_ok=False)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> Any:
        self._steps += 1
        if self._steps == 50:
            raise RuntimeError("the arm is stuck")
        return np.zeros(2, np.float32), 1.0, self._steps % 10 == 0, False, {}


@pytest.mark.timeout(180)
def test_a_chain_ends_with_slots_that_all_rest_and_says_why(tmp_path: Path) -> None:
    """How long a stall may last is cut short once they do."""
    watchers = list[threading.Thread]()

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        controller = control._controller

        def watch() -> None:
            wait_until(lambda: controller.state.members["actor-0"].away, 120, "all slots rest")
            controller.stalls.watches["trainer-0"]._most = SILENT

        if not watchers:
            watchers.append(threading.Thread(target=watch, daemon=True))
            watchers[0].start()

    licensed = Gymnasium(
        make=f"{__file__}:Licensed", kwargs={"licence": str(tmp_path / "licence")}, threads=1
    )
    made = experiments.from_memory(Slots(environment=licensed, backoff_s=0.3))
    workers = {**made.workers, "actor": made.workers["actor"].replace(ring=1)}
    with pytest.raises(RunError) as raised:
        train(
            made.replace(workers=workers, limits=Limits(steps=10_000)),
            run_dir=tmp_path / "run",
            source=EXPERIMENTS,
            quiet=True,
            launch="threads",
            on_update=on_update,
        )
    assert (
        "trainer-0 waits for samples ← actor-0 waits for its slots, which all fail again and again, and "
        "rest: slot 0: a reset is lost: " in str(raised.value)
    )
    assert "FileExistsError" in str(raised.value)


def test_the_pause_of_one_that_has_died_excuses_no_stall() -> None:
    config, link = experiments.cartpole().workers["actor"], LocalLink.pair(LocalBell(), LocalBell())[0]
    member = Member(config, link)
    member.note_statistics(WorkerStatistics(0, away="nothing answers there", pauses=True))
    assert member.pauses and member.away
    member.bury("it was killed")
    assert not (member.pauses or member.away)


@pytest.mark.timeout(120)
def test_a_run_in_which_nothing_progresses_ends_with_the_chain_and_a_checkpoint(tmp_path: Path) -> None:
    """How long that may last is cut short only once the environment hangs, and all that
    came before was trained: until then nothing depends on how busy the machine is."""
    flag = tmp_path / "hung"

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if metrics["update"] == 13:
            wait_until(flag.exists, 60, "it hangs")
            control._controller.stalls.watches["trainer-0"]._most = 2 * SILENT

    with pytest.raises(RunError) as raised:
        train(
            experiments.hangs_at_last(str(flag), 600.0),
            run_dir=tmp_path / "run",
            source=EXPERIMENTS,
            quiet=True,
            launch="threads",
            on_update=on_update,
        )
    flag.with_suffix(".over").touch()
    text = str(raised.value)
    assert text.startswith("nothing has progressed for ") and "(limits.stall_s = 600)" in text
    assert "trainer-0 waits for samples ← actor-0 is silent for " in text
    assert " s: lane 0 of target 0 of actor-0: " in text and "environments.py:" in text
    assert "go on from the last one by: " in text
    # all that was trained until then
    newest = checkpoints(tmp_path / "run" / "checkpoints" / "policy")[-1]
    assert newest.name == "update-13"


@pytest.mark.timeout(120)
def test_a_slow_environment_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll has 16 steps of a quarter of a second; each of them is told."""
    told, take = list[tuple[int, int]](), WorkerMessages._take_statistics

    def listen(self: WorkerMessages, name: str, member: Member, message: WorkerStatistics) -> None:
        if name == "actor-0":
            told.append((message.polls, message.progress))
        take(self, name, member, message)

    monkeypatch.setattr(WorkerMessages, "_take_statistics", listen)
    train(experiments.dawdles(), run_dir=tmp_path / "run", source=EXPERIMENTS, quiet=True, launch="threads")
    in_first_poll = {progress for polls, progress in told if not polls}
    assert len(in_first_poll) >= 6, told


@pytest.mark.timeout(120)
def test_what_a_callback_takes_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, passed = experiments.cartpole(), list[float]()
    made = made.replace(limits=made.limits.replace(updates=4))
    monkeypatch.setattr(stall_watch, "awake", lambda: awake() + sum(passed))

    def on_update(metrics: dict[str, float], _: RunControl) -> None:
        if metrics["update"] == 2:
            passed.append(2 * made.limits.stall_s)  # as if it had taken so long

    result = train(
        made,
        run_dir=tmp_path / "run",
        source=EXPERIMENTS,
        quiet=True,
        launch="inline",
        on_update=on_update,
    )
    assert result.summary["status"] == "completed"


def test_what_workers_wait_for_by_settings_of_their_own_comes_before() -> None:
    made = experiments.cartpole()

    def limit(**workers: object) -> float | None:
        return stall_limit(made.replace(workers={**made.workers, **workers}))

    assert limit() == 600.0
    assert limit(actor=made.workers["actor"].replace(deadline_s=1000.0)) == 1000.0 + BESIDES
    assert limit(actor=made.workers["actor"].replace(deadline_s=2.0)) == 600.0
    slots = Slots(environment=made.workers["actor"].environment, deadline_s=900.0)
    assert limit(actor=ReplayActors(environment=slots)) == 900.0 + BESIDES
    replay = experiments.slots().workers["trainer"]
    assert isinstance(replay, ReplayTrainer)
    assert limit(trainer=replay.replace(max_no_progress_s=700.0)) == 700.0 + BESIDES
    never = made.replace(limits=made.limits.replace(stall_s=None))
    assert stall_limit(never) is None
    with pytest.raises(ConfigError, match="stall_s = 0"):
        made.limits.replace(stall_s=0.0)
