"""What the runner knows of a worker, and how it tells it what to do."""

from tidemill import PolicyWorkers
from tidemill.api.control_messages import Pause, Start, State, TryAgain, unpack_down
from tidemill.run.member import MOST_TURN, Member, turn
from tidemill.transports.local import LocalBell, LocalLink


def test_who_is_brought_up_is_told_alone_whether_to_try_again_but_what_it_is_to_become_is_known() -> None:
    link, end = LocalLink.pair(LocalBell(), LocalBell())
    member = Member(PolicyWorkers(), link, State.READY)

    def told() -> list[object]:
        return [unpack_down(data) for data in end.receive() or ()]

    member.send(Start())
    assert told() == [Start()] and member.wanted is State.RUNNING
    member.bury("it was killed")
    member.send(Pause())
    link, end = LocalLink.pair(LocalBell(), LocalBell())
    member.begin_life(link)
    member.send(Pause())
    member.send(TryAgain(False))
    assert told() == [TryAgain(False)] and member.wanted is State.RUNNING and member.reviving
    member.reviving = False  # the supervisor has told it all
    member.send(Pause())
    assert told() == [Pause()]


def test_who_takes_turns_is_heard_after_the_ticks_of_all_but_not_after_one_that_has_compiled() -> None:
    link, _ = LocalLink.pair(LocalBell(), LocalBell())
    trainer, actor, first = (Member(PolicyWorkers(), link, State.RUNNING) for _ in range(3))
    actor.statistics = {"tick_p99": 2.0, "tick_longest": 240.0}
    first.statistics = {"tick_longest": 3.0}
    assert (turn([trainer]), turn([trainer, actor, first])) == (0.0, 5.0)
    first.statistics = {"tick_longest": 240.0}
    assert turn([trainer, actor, first]) == MOST_TURN
