"""Gymnasium environments of several agents, as PettingZoo has them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Env, spaces
from pettingzoo import ParallelEnv

from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.envs.reset_options import reset_env
from tidemill.envs.space_values import brief, is_sequence
from tidemill.envs.tick_check import check_flag


class TupleAgents(ParallelEnv[str, Any, Any]):  # type: ignore[misc]  # published without types
    """A Gymnasium environment whose observations, actions and rewards are tuples with a
    part for each agent, as a `ParallelEnv`: lb-foraging, RWARE, and what else EPyMARL
    trains.

    Agents are called agent_0, agent_1, … and live until the episode ends for all: where
    ends are told by agent, once each is at its end. A reward that is one number is each
    agent's, as is an info that is one for all. `state()` is all observations in a row, as
    EPyMARL has it for critics.

    Raises `ConfigError` where `env`, called `name`, has no such spaces.
    """

    def __init__(self, env: Env[Any, Any], name: str) -> None:
        sees, does = (getattr(env, name, None) for name in ("observation_space", "action_space"))
        if not (
            isinstance(sees, spaces.Tuple)
            and isinstance(does, spaces.Tuple)
            and len(sees.spaces) == len(does.spaces)
        ):
            raise ConfigError(
                f"{name} is a gymnasium.Env, which is of several agents where observations and actions are "
                f"Tuples with a part for each: it sees {brief(sees)} and does {brief(does)}. One of a single "
                "agent is named without pettingzoo:"
            )
        self.env, self.metadata, self.render_mode = env, env.metadata, env.render_mode
        self.possible_agents = [f"agent_{number}" for number in range(len(sees.spaces))]
        self.agents: list[str] = []
        self._name, self._observed = name, ()
        self._sees = dict(zip(self.possible_agents, sees.spaces, strict=True))
        self._does = dict(zip(self.possible_agents, does.spaces, strict=True))

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """Return what `agent` sees."""
        return self._sees[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """Return what `agent` does."""
        return self._does[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode of all agents."""
        answer = reset_env(self.env, seed, options)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise EnvironmentFault(
                f"{self._name}: reset returned {brief(answer)} instead of (observations, info)"
            )
        self._observed, info = answer
        self.agents = [*self.possible_agents]
        return self._by_agent("observations", self._observed), self._infos(info)

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """Step all agents."""
        answer: Any = self.env.step(tuple(actions[agent] for agent in self.agents))
        if not isinstance(answer, tuple) or len(answer) != 5:
            raise EnvironmentFault(
                f"{self._name}: step returned {brief(answer)} instead of (observations, rewards, terminated, "
                "truncated, info)"
            )
        self._observed, rewards, *ends, info = answer
        done, cut = map(self._ends, ("terminated", "truncated"), ends)
        over = all(done[agent] or cut[agent] for agent in self.agents)
        told = (
            self._by_agent("observations", self._observed),
            self._parts("rewards", rewards),
            done if over else self._each(False),
            cut if over else self._each(False),
            self._infos(info),
        )
        if over:
            self.agents = []
        return told

    def state(self) -> np.ndarray[Any, Any]:
        """Return all observations in a row."""
        return spaces.flatten(self.env.observation_space, self._observed)  # type: ignore[return-value]

    def render(self) -> Any:
        """Return the environment's picture."""
        return self.env.render()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _each(self, value: Any) -> dict[str, Any]:
        return dict.fromkeys(self.possible_agents, value)

    def _ends(self, what: str, value: Any) -> dict[str, bool]:
        """Return by agent whether it has ended. Raises `EnvironmentFault` for what does
        not say that."""
        found = self._parts(what, value)
        for agent, flag in found.items():
            check_flag(flag, f"{what} of agent {agent}", self._name)
        return found

    def _infos(self, info: Any) -> dict[str, Any]:
        return self._parts("infos", info if is_sequence(info) or isinstance(info, Mapping) else {})

    def _parts(self, what: str, value: Any) -> dict[str, Any]:
        """Return each agent's part, or for each what is one for all."""
        return self._by_agent(what, value) if is_sequence(value) else self._each(value)

    def _by_agent(self, what: str, values: Sequence[Any]) -> dict[str, Any]:
        """Return a tuple's parts by agent. Raises `EnvironmentFault` where there is not
        one for each."""
        try:
            return dict(zip(self.possible_agents, values, strict=True))
        except (TypeError, ValueError):
            count = len(self.possible_agents)
            raise EnvironmentFault(
                f"{self._name}: {what} are {brief(values)}; they must have {count} parts, one for each agent"
            ) from None
