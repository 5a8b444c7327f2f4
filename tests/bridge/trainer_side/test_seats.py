import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.bridge.trainer_side.seats import Seats
from tidemill.core.errors import EnvironmentFault

NOBODY = np.zeros(0, np.intp)


def ids(*agents):
    return np.array(agents, np.int32)


def test_agents_get_the_first_free_seats_in_the_order_of_their_numbers_and_keep_them():
    seats = Seats("g", 4)
    found, new = seats.seat(ids(30, 10, 20), NOBODY)
    assert found.tolist() == [2, 0, 1] and new.all()
    found, new = seats.seat(ids(20, 30), NOBODY)  # 10 is absent, and keeps its seat
    assert found.tolist() == [1, 2] and not new.any()
    found, new = seats.seat(ids(5, 10, 20, 30), NOBODY)
    assert found.tolist() == [3, 0, 1, 2] and new.tolist() == [True, False, False, False]


def test_the_same_agents_are_found_without_a_search():
    seats = Seats("g", 3)
    first, _ = seats.seat(ids(1, 2, 3), NOBODY)
    second, new = seats.seat(ids(1, 2, 3), NOBODY)
    assert second is first and not new.any()
    seats.free(np.array([1]))
    third, new = seats.seat(ids(1, 2, 3), NOBODY)
    assert third.tolist() == [0, 1, 2] and new.tolist() == [False, True, False]


def test_seats_that_were_just_freed_are_taken_last():
    seats = Seats("g", 3)
    seats.seat(ids(1, 2), NOBODY)
    freed = seats.of(ids(1))
    seats.free(freed)
    assert seats.seat(ids(2, 7), freed)[0].tolist() == [1, 2]
    freed = seats.of(ids(2))
    seats.free(freed)
    assert seats.seat(ids(7, 8, 9), freed)[0].tolist() == [2, 0, 1]


def test_an_agent_that_comes_back_gets_its_seat_again_unless_another_took_it():
    seats = Seats("g", 3)
    seats.seat(ids(1, 2, 3), NOBODY)
    seats.free(np.array([0, 2]))
    found, new = seats.seat(ids(3, 2), NOBODY)
    assert found.tolist() == [2, 1] and new.tolist() == [True, False]
    seats.seat(ids(2, 3, 4), NOBODY)  # 4 takes the seat that was 1's
    seats.free(np.array([1]))
    assert seats.seat(ids(1, 3, 4), NOBODY)[0].tolist() == [1, 2, 0]
    with pytest.raises(EnvironmentFault, match="agent 3 asks for two decisions"):
        seats.seat(ids(3, 4, 3), NOBODY)


def test_a_list_of_agents_that_was_found_before_is_looked_at_anew_where_seats_have_changed():
    seats = Seats("g", 4)
    seats.seat(ids(1, 2), NOBODY)
    seats.free(np.array([0]))
    assert seats.seat(ids(2, 3), NOBODY)[0].tolist() == [1, 0]  # 3 takes the seat that was 1's
    assert seats.seat(ids(1, 2, 3), NOBODY)[0].tolist() == [2, 1, 0]
    assert seats.of(ids(1, 2)).tolist() == [2, 1] and seats.seat(ids(1, 2), NOBODY)[0].tolist() == [2, 1]
    seats.free(np.array([2]))
    found, new = seats.seat(ids(1, 2, 3), np.array([2]))  # just freed: its seat comes last
    assert found.tolist() == [3, 1, 0] and new.tolist() == [True, False, False]


def test_what_is_kept_of_lists_of_agents_has_a_bound():
    seats = Seats("g", 10)
    for agents in range(1, 1 << 10):
        seats.seat(ids(*(agent for agent in range(10) if agents >> agent & 1)), NOBODY)
    assert len(seats._found) <= 64


def test_too_many_agents_and_one_twice_are_refused():
    seats = Seats("g", 2)
    seats.seat(ids(1), NOBODY)
    with pytest.raises(
        EnvironmentFault, match=r'group "g" has 3 agents alive, and 2 seats.*seats=\{"g": 3\}'
    ):
        seats.seat(ids(2, 3), NOBODY)
    with pytest.raises(EnvironmentFault, match="agent 4 asks for two decisions"):
        seats.seat(ids(4, 4), NOBODY)


@given(
    st.lists(
        st.tuples(st.sets(st.integers(-5, 12), max_size=6), st.sets(st.integers(-5, 12), max_size=4)),
        max_size=30,
    )
)
def test_a_seat_is_one_agents_from_its_first_row_to_its_last(exchanges):
    """Played against a dict: whoever is alive has one seat, its own, until it ends."""
    seats, alive = Seats("g", 12), {}
    for asks, ends in exchanges:
        ending = sorted(ends & alive.keys())
        freed = seats.of(ids(*ending))
        assert freed.tolist() == [alive.pop(agent) for agent in ending]
        seats.free(freed)
        if len(asks | alive.keys()) > 12:
            return
        found, new = seats.seat(ids(*asks), freed)
        for agent, seat, fresh in zip(asks, found.tolist(), new.tolist(), strict=True):
            assert fresh == (agent not in alive) and alive.setdefault(agent, seat) == seat
        assert len(set(alive.values())) == len(alive) and set(np.flatnonzero(seats.taken)) == set(
            alive.values()
        )
