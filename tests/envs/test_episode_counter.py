"""Numbers of episodes, held against a count by hand, seat by seat."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from tidemill.api.environment import AgentInfo, Environment, Tick
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.schema import Arrays
from tidemill.envs.episode_counter import EpisodeCounter

LANES, GROUPS = 3, ((0, 2), (1,))
SPACES = Spaces(Box((1,), "float32"), Discrete(2))


class Coming(Environment):
    """Agents come and go by themselves, as dice have it."""

    agents = tuple(AgentInfo(f"agent_{index}", SPACES) for index in range(3))
    lanes = LANES
    independent = True

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def bind(self, groups: Sequence[Sequence[int]]) -> None:
        self._playing = [np.zeros(LANES * len(group), np.bool_) for group in groups]

    def send(self, actions: Sequence[Arrays], reset: NDArray[np.bool_]) -> None: ...

    def ready(self) -> bool:
        return True

    def recv(self, ticks: Sequence[Tick]) -> None:
        for playing, tick in zip(self._playing, ticks, strict=True):
            ends = playing & (self._rng.random(len(playing)) < 0.2)
            tick.done[:] = ends & (self._rng.random(len(playing)) < 0.5)
            tick.truncated[:] = ends & ~tick.done
            tick.present[:] = self._rng.random(len(playing)) < 0.6
            playing[:] = (playing & ~ends) | (tick.present & ~ends)

    def close(self) -> None: ...


@pytest.mark.parametrize("seed", range(4))
def test_episodes_of_independent_agents_are_numbered_as_they_begin(seed: int) -> None:
    counter = EpisodeCounter(Coming(seed))
    counter.bind(GROUPS)
    ticks = [Tick.allocate(SPACES.observation, LANES * len(group), {}, False) for group in GROUPS]
    playing: dict[tuple[int, int, int], int] = {}  # (group, lane, agent) → number
    over: dict[tuple[int, int], list[bool]] = {}  # (group, lane) → of each episode
    for _ in range(200):
        counter.send([{}, {}], np.zeros(LANES, np.bool_))
        counter.recv(ticks)
        for group, tick in enumerate(ticks):
            ended = []
            for seat in range(LANES * len(GROUPS[group])):
                lane, agent = divmod(seat, len(GROUPS[group]))
                seats, ends = over.setdefault((group, lane), []), tick.done[seat] or tick.truncated[seat]
                if (group, lane, agent) in playing:
                    if ends:
                        ended.append((lane, playing[group, lane, agent]))
                        seats[playing.pop((group, lane, agent))] = True
                elif tick.present[seat]:
                    playing[group, lane, agent] = len(seats)
                    seats.append(False)
            assert counter.ended[group] == ended
        for lane in range(LANES):
            begun = [over[group, lane] for group in range(len(GROUPS)) if over[group, lane]]
            first = [[*seats, False].index(False) for seats in begun]
            assert counter.episodes[lane] == min(first, default=0)
    assert counter.episodes.min() > 5
