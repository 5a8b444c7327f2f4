"""Which episodes count: rounds, whoever ends first."""

from itertools import product

from tidemill.workers.counted_episodes import counted_of, next_counted


def test_the_shares_of_players_are_the_first_episodes_in_rounds() -> None:
    assert [next_counted(counted, 2) for counted in range(5)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    for players, episodes in product(range(1, 7), range(20)):
        one_by_one = [next_counted(counted, players)[0] for counted in range(episodes)]
        assert [counted_of(each, players, episodes) for each in range(players)] == [
            one_by_one.count(each) for each in range(players)
        ]
