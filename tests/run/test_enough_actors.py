"""Trainers pause while too few actors run: what they are told, and when."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.run.watching import EXPERIMENTS

from tidemill import Gymnasium
from tidemill.api.control_messages import Pause, Start, State
from tidemill.core.user_code_loading import load_file
from tidemill.run.enough_actors import EnoughActors
from tidemill.run.member import Member
from tidemill.run.run_state import RunState

experiments = load_file(EXPERIMENTS, "test")


class Run:
    """Four actors of which three in four must run, and a trainer."""

    def __init__(self, share: float = 0.75) -> None:
        made = experiments.experiment(Gymnasium(id="CartPole-v1"))
        actor = made.workers["actor"].replace(count=4, min_running=share)
        made = made.replace(workers={**made.workers, "actor": actor})
        self.state, self.waited, self.given_up = RunState(made), 0, set[str]()
        self.state.running = True
        for name, config in made.members():
            link: Any = SimpleNamespace(send=lambda data: None)
            self.state.members[name] = Member(config, link, State.RUNNING)
        self.told: list[Any] = []
        self.trainer = self.state.members["trainer-0"]
        self.trainer.send = self.told.append  # type: ignore[method-assign, assignment]
        self.enough = EnoughActors(made, self.state, self.given_up, self._waits)

    def _waits(self) -> None:
        self.waited += 1

    def bury(self, *names: str) -> None:
        for name in names:
            self.state.members[name].bury("killed")

    def looks(self) -> list[Any]:
        """Return what the trainer was told, of two looks."""
        self.told.clear()
        self.enough.look()
        self.enough.look()
        return [*self.told]


def test_the_trainer_pauses_once_and_goes_on() -> None:
    run = Run()
    run.bury("actor-1")
    assert run.looks() == [] and run.waited == 0
    run.bury("actor-3")
    assert run.looks() == [Pause()] and run.waited == 2
    run.trainer.state = State.PAUSED
    assert run.looks() == []
    for name in ("actor-1", "actor-3"):
        member = run.state.members[name]
        member.buried, member.reviving, member.state = False, True, State.RUNNING
        assert run.looks() == []  # its next life was not told yet all that it is to know
    run.state.members["actor-1"].reviving = False
    assert run.looks() == [Start()]


def test_a_trainer_that_lives_again_meanwhile_pauses_too() -> None:
    run = Run()
    run.bury("actor-1", "actor-3")
    assert run.looks() == [Pause()]
    run.trainer.life += 1
    assert run.looks() == [Pause()]


@pytest.mark.parametrize("how", ["reason", "finishing", "paused"])
def test_nobody_is_told_anything_while_the_run_is_paused_or_ends(how: str) -> None:
    run = Run()
    setattr(run.state, how, "it fails" if how == "reason" else True)
    run.bury("actor-1", "actor-3")
    assert run.looks() == []
    if how == "paused":
        run.state.paused = False
        assert run.looks() == [Pause()]


def test_of_a_small_share_one_must_run_and_who_is_given_up_does_not_count() -> None:
    run = Run(1e-12)
    run.bury("actor-0", "actor-1", "actor-2")
    assert run.looks() == []
    run.bury("actor-3")
    assert run.looks() == [Pause()]
    run.given_up |= {f"actor-{i}" for i in range(4)}
    assert run.looks() == [Start()]
