"""Numbers of the episodes of those who come and go by themselves, held against a count by
hand, seat by seat."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tidemill import ActorCritic, AgentSpec
from tidemill.api.environment import AgentInfo, Environment, Tick
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.schema import Arrays
from tidemill.trained.episode_player import Player
from tidemill.trained.load import LoadedPolicy

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
        self.ticks = ticks
        for playing, tick in zip(self._playing, ticks, strict=True):
            ends = playing & (self._rng.random(len(playing)) < 0.2)
            tick.done[:] = ends & (self._rng.random(len(playing)) < 0.5)
            tick.truncated[:] = ends & ~tick.done
            tick.present[:] = self._rng.random(len(playing)) < 0.6
            playing[:] = (playing & ~ends) | (tick.present & ~ends)

    def close(self) -> None: ...


def load_untrained(seed: int) -> LoadedPolicy:
    config = ActorCritic(hidden=(4,))
    weights = config.build(SPACES, seed).parameters()
    return LoadedPolicy("policy", config, SPACES, weights, {"updates": 0, "steps": 0}, seed)


@pytest.mark.parametrize("seed", range(4))
def test_episodes_of_independent_agents_are_numbered_as_they_begin(seed: int) -> None:
    environment = Coming(seed)
    specs = (AgentSpec(match="agent_[02]"), AgentSpec())
    policies: Any = [load_untrained(seed) for _ in specs]
    player = Player(environment, specs, policies, True)
    playing: dict[tuple[int, int, int], int] = {}  # (group, lane, agent) → number
    over: dict[tuple[int, int], list[bool]] = {}  # (group, lane) → of each episode
    for _ in range(200):
        played = player.tick()
        for group, tick in enumerate(environment.ticks):
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
            assert [(each.lane, each.episode) for each in played if each.spec == group] == ended
        for lane in range(LANES):
            begun = [over[group, lane] for group in range(len(GROUPS)) if over[group, lane]]
            first = [[*seats, False].index(False) for seats in begun]
            assert player.episodes[lane] == min(first, default=0)
    assert player.episodes.min() > 5
