"""All agents of a simulator as a PettingZoo parallel environment.

    env = SimulatorParallelEnv("build/corridor")
    observations, infos = env.reset(seed=1)

A simulator that fails is started again `restarts` times. Further arguments are the
settings of `SimulatorEnvironment`.
"""

from typing import Any

import gymnasium
from pettingzoo import ParallelEnv

from tidemill.api.spaces import to_gymnasium
from tidemill.bridge.trainer_side.adapter import (
    SteppedSimulators,
    flatten,
    masks,
    nested,
    observed,
)
from tidemill.bridge.trainer_side.environment import SimulatorEnvironment
from tidemill.core.errors import SchemaError, did_you_mean


class SimulatorParallelEnv(ParallelEnv):  # type: ignore[misc]  # published without types
    """An agent is called as its group and its seat, ``reach_3``. It is among `agents`
    from its first observation to the end of its episode.

    PettingZoo's agents live once per episode: who takes the seat of one that has ended is
    left alone, acting by zeros, until `reset`. Agents that ask for no action for a while
    keep their last observation.
    """

    metadata: dict[str, Any] = {"render_modes": [], "name": "simulator", "is_parallelizable": True}  # noqa: RUF012  as PettingZoo has it

    def __init__(self, path: str | None = None, seed: int = 0, restarts: int = 0, **settings: Any) -> None:
        config = SimulatorEnvironment(path=path, **settings)
        self._played = played = SteppedSimulators(config, None, 1, seed, restarts)
        self.possible_agents = [name for names in played.names for name in names]
        self.agents: list[str] = []
        self._where = {
            name: (group, seat) for group, names in enumerate(played.names) for seat, name in enumerate(names)
        }
        self._last: dict[str, Any] = {}
        self._ended: set[str] = set()
        self._seen = [observed(spaces) for spaces in played.spaces]
        self._infos: dict[str, dict[str, Any]] = {}
        self.observation_spaces = {
            name: to_gymnasium(self._seen[group][0]) for name, (group, _) in self._where.items()
        }
        self.action_spaces = {
            name: to_gymnasium(played.spaces[group].action) for name, (group, _) in self._where.items()
        }

    def observation_space(self, agent: str) -> "gymnasium.Space[Any]":
        """Return the agent's; the same object each time."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> "gymnasium.Space[Any]":
        """Return the agent's; the same object each time."""
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Reset the simulator; options are environment parameters."""
        self._played.reset(seed, options)
        self._ended, self.agents = set(), []
        self._see()
        return dict(self._last), dict(self._infos)

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Act with every agent."""
        played = self._played
        for arrays in played.actions:
            for array in arrays.values():
                array.fill(0)
        for agent in actions:
            if agent not in self._where:
                raise SchemaError(
                    f'there is no agent "{agent}"; {did_you_mean(str(agent), self.possible_agents)}'
                )
        for agent in self.agents:
            if agent not in actions:
                raise SchemaError(
                    f'actions lacks agent "{agent}", which lives; it has '
                    f"{', '.join(map(str, actions)) or 'none'}"
                )
            group, seat = self._where[agent]
            flatten(played.spaces[group].action, actions[agent], played.actions[group], "action", seat)
        played.exchange()
        rewards, done, truncated = {}, {}, {}
        for agent in self.agents:
            group, seat = self._where[agent]
            tick = played.ticks[group]
            rewards[agent] = float(tick.reward[seat])
            done[agent], truncated[agent] = bool(tick.done[seat]), bool(tick.truncated[seat])
        acted = self.agents
        observations = self._see()
        for agent in self.agents:
            if agent not in acted:
                rewards[agent], done[agent], truncated[agent] = 0.0, False, False
        return observations, rewards, done, truncated, dict(self._infos)

    def _see(self) -> dict[str, Any]:
        """Take in what came: who sees what, whose episode is over, who is new. Return all
        observations."""
        played, seen, infos = self._played, {}, {}
        living: list[str] = []
        for agent, (group, seat) in self._where.items():
            tick, (space, name) = played.ticks[group], self._seen[group]
            if agent in self._ended:
                continue
            over = bool(tick.done[seat] or tick.truncated[seat])
            if tick.present[seat]:
                source = tick.final if tick.restarted[seat] else tick.observation
                seen[agent] = nested(space, source, name, seat)
                infos[agent] = masks(played.spaces[group], source, seat)
            elif agent in self.agents:
                seen[agent], infos[agent] = self._last[agent], self._infos[agent]
            else:
                continue
            if over:
                self._ended.add(agent)
            else:
                living.append(agent)
        self.agents, self._last, self._infos = living, {agent: seen[agent] for agent in living}, infos
        return seen

    def close(self) -> None:
        """End the simulator."""
        self._played.close()
