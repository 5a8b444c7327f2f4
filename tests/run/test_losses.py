"""What a run counts as lost with workers that die: events and metrics tell the same."""

from collections.abc import Sequence
from time import time

from tests.run.experiments import cartpole

from tidemill.api.launcher import Loss
from tidemill.launchers.inline import InlineLauncher
from tidemill.run.events import Event
from tidemill.run.losses import Losses
from tidemill.run.run_state import RunState


class Losing(InlineLauncher):
    """A launcher that tells of losses with hosts."""

    known: Sequence[Loss] = ()

    def losses(self) -> Sequence[Loss]:
        found, self.known = self.known, ()
        return found


class Lost:
    """What a run has lost so far."""

    def __init__(self) -> None:
        self.launcher, self.state = Losing(), RunState(cartpole())
        self._losses = Losses(self.launcher, self.state)

    def dies(self, steps: int, life: int = 1) -> None:
        self._losses.note(Event(time(), "died", "actor-0", life, steps=steps))

    def turns_out(self, *known: Loss) -> None:
        self.launcher.known = known
        self._losses.look()

    def told(self) -> tuple[dict[str, float], tuple[int, int]]:
        """Return what a record tells, and what events do: the last one of each life."""
        record = self.state.progress.record({})
        steps = {(event.worker, event.life): event.steps for event in self.state.report.events}
        samples = sum(event.samples for event in self.state.report.events)
        return {k: v for k, v in record.items() if k.startswith("lost/")}, (samples, sum(steps.values()))


def test_a_host_that_is_heard_again_corrects_what_was_taken_for_lost() -> None:
    lost = Lost()
    assert lost.told() == ({}, (0, 0))
    lost.dies(41)
    assert lost.told() == ({"lost/samples": 0, "lost/steps": 41}, (0, 41))
    # of these it has sent a sample meanwhile, and begun another one
    lost.turns_out(Loss("actor-0", 1, "b", samples=1), Loss("actor-0", 1, "b", steps=2))
    assert lost.told() == ({"lost/samples": 1, "lost/steps": 2}, (1, 2))
    lost.dies(7, life=2)
    assert lost.told() == ({"lost/samples": 1, "lost/steps": 9}, (1, 9))


def test_a_worker_whose_host_is_lost_before_it_lives_again_loses_nothing_more() -> None:
    lost = Lost()
    lost.dies(41)
    lost.dies(0)  # it has told nothing since
    assert lost.told() == ({"lost/samples": 0, "lost/steps": 41}, (0, 41))


def test_what_comes_to_nothing_is_told_so() -> None:
    lost = Lost()
    lost.dies(41)
    lost.told()
    lost.turns_out(Loss("actor-0", 1, "b", steps=0))
    assert lost.told() == ({"lost/samples": 0, "lost/steps": 0}, (0, 0))
