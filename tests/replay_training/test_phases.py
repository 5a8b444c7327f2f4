"""What the trainer of a replay memory counts its steps by: grants to the actors, phases,
and its metrics."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest

from tidemill.api.algorithm import Sample
from tidemill.api.stream import Offered, SampleConsumer
from tidemill.core.memory import LocalSegment
from tidemill.replay.limiter import Limiter
from tidemill.replay_training.credit_grants import CreditGrants
from tidemill.replay_training.limiter_metrics import LimiterMetrics
from tidemill.replay_training.open_episodes import OpenEpisodeTracker
from tidemill.replay_training.phases import Phases
from tidemill.replay_training.policy_lag import PolicyLag
from tidemill.streams.credits import Credits
from tidemill.transports.slots import SlotReader, SlotWriter

CHANNELS = (("a", 2), ("b", 1), ("a", 1))


class Nothing(SampleConsumer):
    """Nothing ever comes."""

    def offered(self) -> list[Offered] | None:
        return None

    def consume(self) -> Sample | None:
        return None

    def release(self) -> None:
        raise AssertionError("nothing was consumed")


def shares_of(
    lanes: int = 1, channels: Sequence[tuple[str, int]] = CHANNELS
) -> tuple[CreditGrants, dict[str, Credits]]:
    """The shares of actors a and b, and where they read them."""
    cells = {name: LocalSegment() for name in ("a", "b")}
    shares = CreditGrants(
        {name: SlotWriter(cell, []) for name, cell in cells.items()}, dict.fromkeys(cells, lanes), channels
    )
    return shares, {name: Credits(SlotReader(cell)) for name, cell in cells.items()}


def test_each_actor_is_granted_as_many_steps_as_it_has_slots_and_hears_of_them_when_it_is_told() -> None:
    shares, actors = shares_of()
    limiter = Limiter(Fraction(1), 100)
    assert (shares.slots, shares.holding, shares.quiet()) == (4, 0, True)
    assert shares.start(limiter) == limiter.in_flight == 4 and not shares.quiet()
    assert all(actor.left() <= 0 for actor in actors.values())
    shares.tell(False)
    assert [actor.left() for actor in actors.values()] == [3, 1]
    shares.receive(0, 2)
    shares.receive(2, 0)  # an episode's first row
    assert shares.start(limiter) == 2
    shares.tell(False)
    assert [actor.left() for actor in actors.values()] == [5, 1]
    assert [actor.received() for actor in actors.values()] == [2, 0]


def test_whoever_has_least_of_what_it_can_use_is_granted_first() -> None:
    shares, actors = shares_of()
    limiter = Limiter(Fraction(1), 100)
    shares.start(limiter)
    shares.receive(0, 2)
    shares.receive(1, 1)
    limiter.begin_phase(limiter.in_flight + 1)
    assert shares.start(limiter) == 1
    shares.tell(False)
    assert [actor.left() for actor in actors.values()] == [3, 2]


def test_an_actor_that_lives_again_counts_its_steps_from_0_and_those_in_flight_are_lost() -> None:
    channels = (("a", 2), ("b", 2))
    shares, actors = shares_of(channels=channels)
    limiter = Limiter(Fraction(1), 100)
    shares.keep_to([np.ones(2, np.bool_), np.ones(2, np.bool_)])
    assert shares.start(limiter) == 4
    shares.tell(False)
    shares.receive(0, 1)
    limiter.commit(1)
    segment = LocalSegment()
    assert shares.begin_life(0, SlotWriter(segment, [])) == 1
    limiter.void(1)
    again = Credits(SlotReader(segment))
    assert (again.left(), again.finishing) == (0, False)  # it has heard nothing yet
    assert shares.start(limiter) == 2
    shares.tell(False)
    assert (again.left(), again.finishing, actors["b"].left()) == (2, True, 2)
    shares.receive(0, 2)
    shares.receive(1, 2)
    limiter.commit(4)
    assert limiter.in_flight == 0 and limiter.counts.voided == 1


@pytest.mark.parametrize("dealt", [False, True])
def test_what_was_dealt_with_is_told_by_itself_where_actors_wait_for_it(dealt: bool) -> None:
    shares, actors = shares_of()
    shares.start(Limiter(Fraction(1), 100))
    shares.tell(dealt)
    shares.receive(1, 1)
    shares.tell(dealt)
    assert actors["b"].received() == int(dealt)


def test_where_no_episode_may_begin_open_ones_alone_are_granted_steps() -> None:
    shares, actors = shares_of()
    open_ = [np.array([True, False]), np.array([False]), np.array([True])]
    shares.keep_to(open_)
    assert shares.start(Limiter(Fraction(1), 100)) == 2
    shares.tell(False)
    # b has heard nothing yet
    assert actors["a"].left() == 2 and actors["a"].finishing and not actors["b"].finishing
    open_[0][0] = False
    shares.receive(0, 1)
    assert shares.start(Limiter(Fraction(1), 100)) == 0
    shares.keep_to(None)
    assert shares.start(Limiter(Fraction(1), 100)) == 3


def test_a_target_of_many_lanes_may_hold_what_it_cannot_use() -> None:
    shares, _ = shares_of(lanes=3, channels=(("a", 3), ("b", 3)))
    limiter = Limiter(Fraction(1), 100)
    assert shares.holding == 4
    limiter.begin_phase(2)
    assert shares.start(limiter) == 2 and shares.quiet()
    limiter.begin_phase(3)
    assert shares.start(limiter) == 1 and shares.quiet()  # b's


def test_a_phase_ends_with_its_iteration_and_the_last_one_with_the_run() -> None:
    limiter, (shares, _) = Limiter(Fraction(1), 100), shares_of()
    phases = Phases(limiter, shares, 10, 25, None, {})
    ends = []
    for steps in (10, 20, 25):
        assert limiter.start(100) == steps - limiter.counts.committed and not phases.steps_reached(steps - 1)
        limiter.commit(limiter.in_flight)
        ends.append((phases.steps_reached(steps), phases.iteration_reached(steps), phases.facts(steps)))
        phases.end(False)
        phases.end_iteration()
        assert limiter.start(100) == 0
        phases.begin(steps)
    assert ends == [
        (True, True, {"iteration_end": 10}),
        (True, True, {"iteration_end": 20}),
        (True, False, {}),
    ]


@pytest.mark.parametrize(("end", "goes_on"), [(20, 20), (15, 30)])
def test_a_resumed_run_ends_the_iteration_that_it_was_in_unless_iterations_are_others_now(
    end: int, goes_on: int
) -> None:
    phases = Phases(
        Limiter(Fraction(1), 100), shares_of()[0], 10, None, None, {"steps": 20, "iteration_end": end}
    )
    assert phases.iteration_end == goes_on and phases.iteration_reached(20) == (end == 20)


def test_open_episodes_are_played_on_when_nothing_else_is_in_flight() -> None:
    limiter, (shares, _) = Limiter(Fraction(1), 100), shares_of()
    unfinished = OpenEpisodeTracker(Nothing(), [2, 1, 1])
    phases = Phases(limiter, shares, None, 6, unfinished, {})
    shares.start(limiter)
    phases.end(True)
    assert not phases.finishing
    unfinished.open[0][1] = True
    for channel, (_, seats) in enumerate(CHANNELS):
        shares.receive(channel, seats)
    limiter.commit(4)
    phases.end(True)
    assert phases.finishing and phases.facts(4) == {"finishing": True}
    assert shares.start(limiter) == 1 and not phases.quiet()  # of that episode, whatever the limit says
    unfinished.open[0][1] = False
    assert phases.quiet() and phases.facts(5) == {}


def test_an_account_is_of_what_has_happened_since_the_last_one() -> None:
    now = [0.0]
    limiter = Limiter(Fraction(1, 2), 100, clock=lambda: now[0])
    account = LimiterMetrics(limiter, PolicyLag(Nothing()), known=False)
    assert account.take() is None
    limiter.start(4)
    now[0] = 3.0
    limiter.commit(4)
    assert account.take() is None  # nobody knows what is to come
    limiter.start(4)
    now[0] = 6.0
    limiter.commit(2)
    for loss in (1.0, 5.0):
        account.count({"loss": loss}, 0.25)
    told = account.take()
    assert told is not None and (told["loss"], told["limiter/committed"]) == (3.0, 6)
    # seconds of a step, by those of the training that it owes
    assert told["limiter/balance"] == (4 * 3.0 / 2) / (0.5 * 0.25)
    assert account.take() is None
    limiter.void(1)
    told = account.take()
    assert (
        told is not None
        and (told["loss"], told["limiter/voided"]) == (3.0, 1)
        and "limiter/balance" not in told
    )


def test_a_warm_up_is_told_of_where_it_is_known_what_is_to_come() -> None:
    limiter = Limiter(Fraction(1), 100)
    account = LimiterMetrics(limiter, PolicyLag(Nothing()), known=True)
    limiter.start(1)
    assert account.take() is None
    limiter.commit(1)
    assert account.take() is not None
