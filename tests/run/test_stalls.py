"""Each trainer that nothing brings on is told with its own chain, and ends the run in the
end, however well others do; one that waits for others which go on is left alone."""

from collections.abc import Collection
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.run.cut_experiments import JUDGE, population, two_policies
from tests.run.experiments import ENVIRONMENTS, cartpole, experiment
from tests.run.watching import EXPERIMENTS

from tidemill import Actors, Evaluation, Experiment, Gymnasium, Limits, Stage, populate, train
from tidemill.api.control_messages import RoundOver, State, WorkerStatistics
from tidemill.api.launcher import Call
from tidemill.core.clock import awake
from tidemill.core.errors import RunError
from tidemill.run import stall_report, stall_watch, status
from tidemill.run.events import read_events
from tidemill.run.member import Member
from tidemill.run.run_control import RunControl
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


# ---- what is due beside training -------------------------------------------------------

WELL = {"done": ["actor-0"], "updates": ["trainer-0"]}


def judged(**evaluation: object) -> Experiment:
    """An evaluation for which training does not wait, and its judge."""
    made = experiment(Gymnasium(id="CartPole-v1"))
    judge = Actors(environment=Gymnasium(id="CartPole-v1"), lanes=2, agents=(JUDGE,))
    return made.replace(
        workers={**made.workers, "judge": judge, "evaluation": Evaluation(games=2, **evaluation)}
    )


def evaluating(monkeypatch: pytest.MonkeyPatch, made: Experiment | None = None) -> Run:
    """A run in which a version is evaluated."""
    run = Run(monkeypatch, made or judged())
    run.members["evaluation-0"].due = {"policy": "evaluation/return"}
    return run


def test_an_evaluation_that_gets_nothing_of_its_judges_is_told_and_ends_no_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = evaluating(monkeypatch)
    assert not run.after(STALL - 1, **WELL)
    run.stacks["judge-0"] = (Call("read", "/home/arm.py", 41),)
    (told,) = run.after(2000, **WELL)
    assert told == (
        "no progress of evaluation-0 for 30 s: evaluation-0 waits for samples ← judge-0 waits for room at "
        "evaluation-0 or its environment"
    )
    assert run.stalls.why().startswith("no progress of evaluation-0 for 20")
    assert not run.after(1, done=["actor-0", "judge-0"], updates=["trainer-0"]) and not run.stalls.why()
    assert not run.after(4000, **WELL)  # it has taken 2,000 s, and may again
    assert len(run.after(100, **WELL)) == 1


def test_an_evaluation_whose_judge_is_silent_is_told_with_where_that_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = evaluating(monkeypatch)
    run.stacks["judge-0"] = (Call("read", "/home/arm.py", 41),)
    (told,) = run.after(100, **WELL, silent=["judge-0"])
    assert told.endswith("evaluation-0 waits for samples ← judge-0 is silent for 31 s: read (arm.py:41)")


def test_one_that_has_nothing_to_evaluate_or_plays_on_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, judged())
    assert not run.after(200, **WELL)  # no new version
    run.members["evaluation-0"].due = {"policy": "evaluation/return"}
    long = {"done": ["actor-0", "judge-0"], "updates": ["trainer-0"]}  # an episode without an end
    assert not run.after(200, **long)
    run.state.paused = True
    assert not run.after(200)
    run.state.paused = False
    run.stalls.begin()
    assert not run.after(200, **long)
    assert not run.after(200, **WELL, silent=["evaluation-0"])  # that is told as silence
    run.state.reason = "limit"
    assert not run.after(200, **WELL) and not run.stalls.why()
    run.members["evaluation-0"].bury("its process was killed")
    assert not run.members["evaluation-0"].due  # its next life says so again


def test_one_that_a_trainer_in_its_judges_process_holds_up_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = evaluating(monkeypatch, judged().replace(together=("judge", "trainer")))
    run.after(5, done=["judge-0"], updates=["trainer-0"])
    run.stacks |= dict.fromkeys(("judge-0", "trainer-0"), TRAINS)
    told = run.after(500, silent=["judge-0", "trainer-0"])
    assert [text.partition(":")[0] for text in told] == ["no update for 30 s"]


def members_judged(**population: object) -> Experiment:
    return populate(judged(), [{}, {}], steps=10**9, explore={}, metric="evaluation/return", **population)


def test_a_population_that_lacks_what_a_dead_evaluation_was_to_record_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, members_judged())
    well = {"done": ["actor-0-0", "actor-1-0"], "updates": ["trainer-0-0", "trainer-1-0"]}
    run.members["evaluation-1-0"].bury("its process was killed")
    assert not run.after(200, **well)  # it is not time to decide
    run.members["population-0"].due = {"policy-1": "evaluation/return"}
    (told,) = run.after(500, **well)
    assert told.startswith(
        "no progress of population-0 for 30 s: population-0 waits for what is recorded ← evaluation-1-0 died "
    )


def test_a_population_that_lacks_versions_is_told_with_their_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, members_judged())
    run.members["population-0"].due = {"policy-1": ""}
    well = {"done": ["actor-0-0"], "updates": ["trainer-0-0"]}
    told = "\n".join(run.after(500, **well))
    chain = "trainer-1-0 waits for samples ← actor-1-0 waits for room at trainer-1-0 or its environment"
    assert told.count(chain) == 1 and told.count("\n") == 0  # one cause is told once
    assert "no progress of population-0 for " in run.stalls.why()
    both = {"done": [], "updates": ["trainer-0-0", "trainer-1-0"]}
    assert not run.after(500, **both) and not run.stalls.why()
    run.members["trainer-1-0"].state = State.COMPLETED  # nobody is to bring any more
    assert not run.after(500, **well) and not run.stalls.why()


def test_a_judge_whose_lane_hangs_is_told_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lanes step in threads, so that its loop turns; it may wait for ever."""
    monkeypatch.setattr(stall_watch, "STALL", 1.0)
    flag, made = tmp_path / "hung", judged()
    environment = Gymnasium(make=f"{ENVIRONMENTS}:HangsOnce", kwargs={"flag": str(flag)}, threads=2)
    judge = made.workers["judge"].replace(environment=environment, deadline_s=float("inf"))
    actor = made.workers["actor"].replace(environment=Gymnasium(make=f"{ENVIRONMENTS}:Talker"))
    begun = "evaluation-0 waits for samples ← judge-0 waits for room at evaluation-0 or its environment"

    def told() -> list[str]:
        return [event.cause for event in read_events(tmp_path / "run") if begun in event.cause]

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if flag.exists() and told():
            control.stop("it was told")

    try:
        result = train(
            made.replace(
                workers={**made.workers, "actor": actor, "judge": judge}, limits=Limits(seconds=1000)
            ),
            run_dir=tmp_path / "run",
            source=EXPERIMENTS,
            quiet=True,
            launch="threads",
            on_update=on_update,
        )
    finally:
        flag.with_suffix(".over").touch()
    assert result.summary["reason"] == "it was told"
    assert "no progress of evaluation-0 for " in told()[0]
