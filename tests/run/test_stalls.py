"""Each trainer that nothing brings on is told with its own chain, and ends the run in the
end, however well others do; one that waits for others which go on is left alone."""

from collections.abc import Collection
from unittest.mock import Mock

import pytest
from tests.run.cut_experiments import population, two_policies
from tests.run.experiments import cartpole, experiment

from tidemill import Experiment, Gymnasium, Limits, Stage, populate
from tidemill.api.control_messages import RoundOver, State, WorkerStatistics
from tidemill.api.launcher import Call
from tidemill.core.clock import awake
from tidemill.core.errors import RunError
from tidemill.run import stall_report, stall_watch, status
from tidemill.run.member import Member
from tidemill.run.run_state import RunState
from tidemill.run.stall_watch import STALL, Stalls
from tidemill.transports.local import LocalBell, LocalLink

TRAINS = (Call("matmul", "/lib/torch.py", 1), Call("_poll", "/lib/tidemill/workers/trainer.py", 1))


class Run:
    """A run of these workers, all of which wait, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, made: Experiment) -> None:
        self.now, self.state = awake(), RunState(made)
        for module in (stall_watch, stall_report):
            monkeypatch.setattr(module, "awake", lambda: self.now)
        self.stacks = dict[str, tuple[Call, ...]]()
        launcher = Mock(condition=lambda _: "", stack=lambda name: self.stacks.get(name, ()))
        link = LocalLink.pair(LocalBell(), LocalBell())[0]
        self.members = self.state.members
        self.members.update(
            (name, Member(config, link, State.RUNNING, {"wait": 1.0}, heard=self.now))
            for name, config in made.members()
        )
        self.stalls = Stalls(made, launcher, self.state)
        self.state.running = True
        self.stalls.begin()

    def after(
        self,
        seconds: float,
        done: Collection[str] = (),
        updates: Collection[str] = (),
        silent: Collection[str] = (),
    ) -> list[str]:
        """Look twice a second for so long, while these do something, or update, and all
        but the silent ones are heard. Return what was told."""
        told = len(self.state.report.notices)
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            for name, member in self.members.items():
                if name not in silent:
                    member.heard = self.now
                if name in updates:
                    self.updated(name, int(member.update.values.get("update", 0)) + 1)
                elif name in done:
                    self.stalls.note(name)
            self.stalls.look()
        return self.state.report.notices[told:]

    def updated(self, name: str, number: int) -> None:
        """A trainer has made this update."""
        self.members[name].update = WorkerStatistics(1, {"update": number}, update=True)
        self.stalls.note(name, update=True)


def apart() -> Experiment:
    """Two policies, each with an actor and a trainer of its own, which know nothing of
    each other."""
    return populate(experiment(Gymnasium(id="CartPole-v1")), [{}, {}], steps=10**9, explore={})


def test_one_trainer_that_starves_is_told_and_ends_the_run_beside_one_that_does_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, apart())
    well = {"done": ["actor-0-0"], "updates": ["trainer-0-0"]}
    assert not run.after(STALL - 1, **well)
    (told,) = run.after(500, **well)
    assert (
        told
        == "no update of trainer-1-0 for 30 s: trainer-1-0 waits for samples ← actor-1-0 waits for "
        + ("room at trainer-1-0 or its environment")
    )
    assert "trainer-0-0" not in run.stalls.why()
    assert not run.after(60, **{**well, "done": ["actor-0-0", "actor-1-0"]})  # it steps
    run.stacks["actor-1-0"] = (Call("recv", "/home/link.py", 7),)
    with pytest.raises(RunError) as raised:
        run.after(602, **well)
    text = str(raised.value)
    assert text.endswith(".\nactor-1-0 is in recv (link.py:7)")
    assert text.startswith(
        "nothing that trainer-1-0 waits for has progressed for 600 s (limits.stall_s = 600)"
    )
    assert "trainer-1-0 waits for samples ← actor-1-0" in text and "trainer-0-0" not in text


def test_it_is_told_again_once_it_has_made_an_update_since(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, cartpole())
    for _ in range(2):
        (told,) = run.after(STALL + 20)
        assert told.startswith("no update for 30 s: trainer-0 waits for samples ← actor-0")
        run.updated("trainer-0", 1)
        assert not run.after(1) and not run.stalls.why()


def test_a_chain_says_where_who_is_silent_is(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, cartpole())
    run.stacks["server-0"] = (Call("act", "/home/policy.py", 7),)
    (told,) = run.after(STALL + 2, silent=["server-0"])
    assert told.endswith("← actor-0 waits for answers ← server-0 is silent for 30 s: act (policy.py:7)")
    assert run.stalls.why().endswith("← server-0 is silent for 32 s: act (policy.py:7)")


def test_an_actor_that_steps_is_progress_for_all_that_it_plays_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may come seldom to its turn: that is told alone."""
    run = Run(monkeypatch, two_policies(None))
    (told,) = run.after(2000, done=["actor-0"], updates=["speaker-0"])
    assert told.startswith("no update of listener-0 for 30 s: listener-0 waits for samples ← actor-0 ")
    assert "speaker" not in told.partition("←")[2].partition("waits")[0]


def test_what_a_trainer_does_that_its_actor_waits_for_excuses_another_ones_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, two_policies(None))
    run.after(5, done=["actor-0"], updates=["speaker-0", "listener-0"])
    run.stacks["speaker-0"] = TRAINS
    told = run.after(3000, silent=["speaker-0"])  # an update of 50 minutes
    assert len(told) == 1 and "speaker-0 is silent" in told[0]
    run.after(0.5, updates=["speaker-0"])
    run.stacks.clear()
    run.after(590)  # there is time again from then on
    with pytest.raises(RunError, match=r"nothing that (speaker|listener)-0 waits for has progressed"):
        run.after(12)


def test_a_trainer_whose_actors_wait_for_nobody_is_ended_beside_one_that_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who makes updates has room."""
    run = Run(monkeypatch, two_policies(None))
    with pytest.raises(RunError, match="nothing that listener-0 waits for has progressed for 600 s"):
        run.after(602, updates=["speaker-0"])


def test_members_of_a_population_wait_for_each_other_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    made = populate(experiment(Gymnasium(id="CartPole-v1")), [{}, {}], updates=5000, explore={})
    run = Run(monkeypatch, made)
    assert not run.after(1, done=["actor-0-0"], updates=["trainer-0-0", "trainer-1-0"])
    run.updated("trainer-0-0", 5000)  # the quicker one is where they wait
    assert not run.after(1500, done=["actor-1-0"], updates=["trainer-1-0"])
    (told,) = run.after(STALL + 10)  # the other one starves, too: one cause is told once
    assert told.partition(": ")[2].startswith(
        "trainer-0-0 waits for what is recorded ← population-0 waits for a version ← trainer-1-0 waits for "
        "samples ← actor-1-0 "
    )
    with pytest.raises(RunError, match="waits for has progressed for 600 s"):
        run.after(600)


def test_status_tells_whom_each_waits_for_now_and_not_whom_it_may_ever_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def does(run: Run, made: Experiment) -> dict[str, str]:
        condition = Mock(condition=lambda _: "")
        controller = Mock(job=Mock(experiment=made), state=run.state, stalls=run.stalls, launcher=condition)
        controller.places = {}
        return {worker.name: worker.does for worker in status.status_of(controller).workers}

    monkeypatch.setattr(status, "snapshot", lambda _: Mock(mean_returns={}, hosts={}))
    made = populate(experiment(Gymnasium(id="CartPole-v1")), [{}, {}], updates=5000, explore={})
    run = Run(monkeypatch, made)
    run.after(1, updates=["trainer-0-0", "trainer-1-0"])
    assert does(run, made)["trainer-0-0"] == "waits for samples of actor-0-0"
    assert does(run, made)["actor-0-0"] == "waits for its environment"  # who makes updates has room
    run.updated("trainer-0-0", 5000)  # the quicker one is where they wait
    assert does(run, made)["trainer-0-0"] == "waits for what is recorded by population-0"
    run = Run(monkeypatch, cartpole())
    assert does(run, cartpole())["server-0"] == "waits for requests of actor-0"
    assert does(run, cartpole())["actor-0"] == "waits for answers of server-0 or its environment"


def test_one_that_starves_on_its_way_to_where_members_wait_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made = populate(experiment(Gymnasium(id="CartPole-v1")), [{}, {}], updates=5000, explore={})
    run = Run(monkeypatch, made)
    run.after(1, updates=["trainer-0-0", "trainer-1-0"])
    with pytest.raises(RunError, match="nothing that trainer-1-0 waits for has progressed"):
        run.after(700, done=["actor-0-0", "population-0"], updates=["trainer-0-0"])
    (told,) = run.state.report.notices
    assert told.startswith("no update of trainer-1-0 for 30 s: trainer-1-0 waits for samples")


def test_what_an_evaluation_plays_is_progress_for_who_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, population(0))
    for name in ("trainer-0-0", "trainer-1-0"):
        run.updated(name, 2)
    run.members["judge-1-0"].shares = {"environment": 1.0}
    (told,) = run.after(2000, done=["judge-1-0"])
    assert told.endswith("waits for samples ← judge-1-0 works (100% environment)")
    run.updated("trainer-1-0", 3)  # the judge is not its, nor anybody's any more
    with pytest.raises(RunError, match="waits for has progressed for 600 s"):
        run.after(700, done=["judge-1-0"])


def test_who_has_reached_its_limit_has_stalled_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, apart())
    run.members["trainer-1-0"].state = State.COMPLETED
    assert not run.after(2000, done=["actor-0-0"], updates=["trainer-0-0"])


def test_who_is_through_with_its_round_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made = two_policies(0).replace(
        exact_resume=True,
        curriculum=(Stage(until="episodes >= 5"), Stage()),
        limits=Limits(updates=100),
    )
    run = Run(monkeypatch, made)
    rounds = run.state.progress.rounds
    assert rounds is not None
    rounds.tell(0)
    run.after(1, updates=["speaker-0", "listener-0"])
    rounds.take("listener-0", RoundOver(1, 2))
    assert rounds.lacking("listener-0") == ["actor-0", "speaker-0"] and not rounds.lacking("speaker-0")
    assert not run.after(100, done=["actor-0"], updates=["speaker-0"])
    told = run.after(STALL + 5)
    assert "speaker-0" in told[0]


def test_pauses_and_long_looks_elsewhere_are_nobodys_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, cartpole())
    run.state.paused = True
    assert not run.after(700) and not run.stalls.why()
    run.state.paused = False
    run.stalls.begin()
    assert not run.after(20)
    run.now += 500  # a callback, or a cut
    assert not run.after(8)
    assert len(run.after(3)) == 1
