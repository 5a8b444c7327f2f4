"""A run that makes no progress says who waits for whom."""

from tests.run.watching import EXPERIMENTS

from tidemill.api.control_messages import State
from tidemill.core.clock import awake
from tidemill.core.user_code_loading import load_file
from tidemill.run.progress import Member
from tidemill.run.stall_report import explain_stall
from tidemill.transports.local import LocalBell, LocalLink


def test_the_chain_of_waits_is_named() -> None:
    experiment = load_file(EXPERIMENTS, "test").cartpole()
    link = LocalLink.pair(LocalBell(), LocalBell())[0]
    members = {
        name: Member(config, link, State.RUNNING, {"wait": 0.98, "python": 0.02})
        for name, config in experiment.members()
    }
    members["actor-0"].heard = awake() - 28
    text = explain_stall(experiment, members, lambda _: "")
    assert "actor-0 is silent for 28 s, stuck in its environment" in text
    assert "trainer-0 waits for samples of actor-0" in text
    assert "server-0 waits for requests of actor-0" in text
    members["actor-0"].heard, members["server-0"].shares = awake(), {"inference": 0.9, "wait": 0.1}
    members["trainer-0"].state = State.PAUSED
    text = explain_stall(experiment, members, lambda _: "")
    assert "actor-0 waits for room at trainer-0 or answers of server-0 or its environment" in text
    assert "server-0 works (90% inference)" in text and "trainer-0 is paused" in text
    text = explain_stall(
        experiment, members, lambda name: "is stopped (by SIGSTOP)" if name == "actor-0" else ""
    )
    assert text.startswith("actor-0 is stopped (by SIGSTOP); ")
