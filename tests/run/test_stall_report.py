"""A run that makes no progress says who waits for whom."""

from collections.abc import Callable
from datetime import datetime, timedelta
from time import time

from tests.run.watching import EXPERIMENTS

from tidemill.api.control_messages import State
from tidemill.core.clock import awake
from tidemill.core.user_code_loading import load_file
from tidemill.run.progress import Member
from tidemill.run.stall_report import explain_stall
from tidemill.transports.local import LocalBell, LocalLink


def test_a_chain_leads_from_the_trainer_to_who_explains_most() -> None:
    experiment = load_file(EXPERIMENTS, "test").cartpole()
    link = LocalLink.pair(LocalBell(), LocalBell())[0]
    members = {
        name: Member(config, link, State.RUNNING, {"wait": 0.98, "python": 0.02})
        for name, config in experiment.members()
    }
    actor, server, trainer = (members[name] for name in ("actor-0", "server-0", "trainer-0"))

    def told(condition: Callable[[str], str] = lambda _: "") -> str:
        return explain_stall(experiment, members, condition)

    # nobody does anything: it may be the environment
    assert told() == (
        "trainer-0 waits for samples ← actor-0 waits for room at trainer-0 or answers of server-0 or its "
        "environment"
    )
    server.shares = {"inference": 0.9, "wait": 0.1}
    assert told() == (
        "trainer-0 waits for samples ← actor-0 waits for answers ← server-0 works (90% inference)"
    )
    server.heard = awake() - 28
    assert told().endswith("waits for answers ← server-0 is silent for 28 s, stuck")
    server.bury("its process was killed by SIGKILL (by hand); its last output: none")
    server.died_at, server.life = awake() - 3, 2
    at = datetime.fromtimestamp(time() - 3)
    times = [(at + timedelta(seconds=s)).strftime("%H:%M:%S") for s in (-1, 0, 1)]
    assert told() in [
        "trainer-0 waits for samples ← actor-0 waits for answers ← server-0 died at "
        f"{clock} (its process was killed by SIGKILL (by hand)), restarted twice"
        for clock in times
    ]
    # who is on no chain, and does not live either, is told besides
    actor.heard = awake() - 28
    assert told().startswith(
        "trainer-0 waits for samples ← actor-0 is silent for 28 s, stuck in its environment; "
    )
    assert "; besides, server-0 died at" in told()
    held = told(lambda name: "is stopped (by SIGSTOP)" if name == "actor-0" else "")
    assert held.startswith("trainer-0 waits for samples ← actor-0 is stopped (by SIGSTOP); besides")
    trainer.state = State.PAUSED
    assert told().startswith("trainer-0 is paused; besides, actor-0 is silent")


def test_equal_trainers_that_wait_for_one_actor_are_one_chain() -> None:
    experiment = load_file(EXPERIMENTS, "test").equal()
    link = LocalLink.pair(LocalBell(), LocalBell())[0]
    members = {
        name: Member(config, link, State.RUNNING, {"wait": 1.0}) for name, config in experiment.members()
    }
    members["actor-1"].heard = awake() - 28
    text = explain_stall(experiment, members, lambda _: "")
    assert text == (
        "trainer-0 waits for a sum's part ← trainer-1 waits for samples ← actor-1 is silent for 28 s, "
        "stuck in its environment"
    )
