"""One group of a simulator's agents for Gymnasium: an environment where it has one agent,
a vector environment where it has many.

    env = SimulatorEnv("build/drone", parameters={"wind": 0.2})
    envs = SimulatorVectorEnv("build/reach", simulators=4)

A simulator that fails is started again, `restarts` times in all. Further arguments are
the settings of `SimulatorEnvironment`. Observations and actions are as Tidemill's (see
`tidemill.bridge.trainer_side.spaces`), but action masks are in the infos (see
`tidemill.bridge.trainer_side.adapter`).
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from tidemill.api.environment import Tick
from tidemill.api.spaces import to_gymnasium
from tidemill.bridge.trainer_side.adapter import (
    SteppedSimulators,
    flatten,
    masks,
    nested,
    observed,
)
from tidemill.bridge.trainer_side.environment import SimulatorEnvironment
from tidemill.core.errors import ConfigError, EnvironmentFault


def _only(played: SteppedSimulators) -> str:
    if len(played.groups) > 1:
        played.close()
        raise ConfigError(
            f"the simulator has several groups ({', '.join(played.groups)}); say which by group=, or take "
            "the PettingZoo environment"
        )
    return played.groups[0]


class SimulatorEnv(gymnasium.Env[Any, Any]):
    """A simulator in which a single agent of `group` lives at a time. `reset` takes a
    seed, and environment parameters as options."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  as Gymnasium has it

    def __init__(
        self,
        path: str | None = None,
        group: str | None = None,
        seed: int = 0,
        restarts: int = 0,
        **settings: Any,
    ) -> None:
        config = SimulatorEnvironment(path=path, **settings)
        self._played = SteppedSimulators(config, None if group is None else [group], 1, seed, restarts)
        self.group = _only(self._played)
        self._spaces = self._played.spaces[0]
        self._seen, self._name = observed(self._spaces)
        self.observation_space = to_gymnasium(self._seen)
        self.action_space = to_gymnasium(self._spaces.action)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the simulator and return the agent's first observation."""
        super().reset(seed=seed)
        tick = self._played.reset(seed, options)[0]
        while not tick.present[0]:
            tick = self._played.exchange()[0]
        self._look(tick.present)
        return nested(self._seen, tick.observation, self._name, 0), masks(self._spaces, tick.observation, 0)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Act, and return what came of it once the agent asks for an action again or its
        episode is over."""
        played = self._played
        flatten(self._spaces.action, action, played.actions[0], "action", 0)
        reward = 0.0
        while True:
            tick = played.exchange()[0]
            reward += float(tick.reward[0])
            over = bool(tick.done[0] or tick.truncated[0])
            if tick.present[0] or over:
                break
        if not over:
            self._look(tick.present)
        source = tick.final if tick.restarted[0] else tick.observation
        observation, info = nested(self._seen, source, self._name, 0), masks(self._spaces, source, 0)
        return observation, reward, bool(tick.done[0]), bool(tick.truncated[0]), info

    def _look(self, present: NDArray[np.bool_]) -> None:
        if present[1:].any():
            raise EnvironmentFault(
                f'group "{self.group}" has {np.count_nonzero(present)} agents at a time, and a Gymnasium '
                "environment one; take SimulatorVectorEnv, or the PettingZoo environment"
            )

    def close(self) -> None:
        """End the simulator."""
        self._played.close()


class SimulatorVectorEnv(VectorEnv[Any, Any, Any]):
    """All agents of `group`, of several simulators, as a vector: agent a of simulator s
    is environment ``s · agents + a``.

    Each must ask for an action in every exchange. One whose episode ended begins the next
    one in the exchange after (`autoreset` "next-step"), or in the same one ("same-step";
    its final observation is in the infos then).
    """

    def __init__(
        self,
        path: str | None = None,
        group: str | None = None,
        simulators: int = 1,
        seed: int = 0,
        autoreset: str = "next-step",
        restarts: int = 0,
        **settings: Any,
    ) -> None:
        if autoreset not in ("next-step", "same-step"):
            raise ConfigError(f'autoreset = "{autoreset}" must be "next-step" or "same-step"')
        self._same_step = autoreset == "same-step"
        config = SimulatorEnvironment(path=path, **settings)
        names = None if group is None else [group]
        self._played = SteppedSimulators(config, names, simulators, seed, restarts)
        self.group = _only(self._played)
        tick = self._played.reset(None, None)[0]
        present = tick.present.reshape(simulators, -1)
        agents = int(present[0].sum())
        if not (present[:, :agents].all() and not present[:, agents:].any()):
            self._played.close()
            raise ConfigError(
                f'the simulators do not begin with equally many agents of group "{self.group}"; take the '
                "PettingZoo environment"
            )
        self._rows = np.flatnonzero(tick.present)
        self.num_envs = len(self._rows)
        self.metadata = {
            "autoreset_mode": AutoresetMode.SAME_STEP if self._same_step else AutoresetMode.NEXT_STEP
        }
        self._spaces = self._played.spaces[0]
        self._seen, self._name = observed(self._spaces)
        self.single_observation_space = to_gymnasium(self._seen)
        self.single_action_space = to_gymnasium(self._spaces.action)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the simulators; simulator s gets seed + s."""
        first = seed[0] if isinstance(seed, (list, tuple)) else seed
        tick = self._played.reset(first, options)[0]
        self._look(tick.present[self._rows])
        return nested(self._seen, tick.observation, self._name, self._rows), self._infos(tick)

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[Any], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Act with every agent."""
        played, rows = self._played, self._rows
        flatten(self._spaces.action, actions, played.actions[0], "action", rows)
        tick = played.exchange()[0]
        over = (tick.done | tick.truncated)[rows]
        again = tick.restarted[rows]
        self._look(tick.present[rows])
        if (again != over).any() if self._same_step else again.any():
            raise EnvironmentFault(
                f'group "{self.group}": agents whose episode ended began the next one in '
                + (
                    'a later exchange; take autoreset = "next-step"'
                    if self._same_step
                    else 'the same exchange; take autoreset = "same-step"'
                )
            )
        infos = self._infos(tick)
        if self._same_step and over.any():
            final = np.full(self.num_envs, None, object)
            for row in np.flatnonzero(over).tolist():
                final[row] = nested(self._seen, tick.final, self._name, rows[row])
            infos |= {"final_obs": final, "_final_obs": over}
        observation = nested(self._seen, tick.observation, self._name, rows)
        return observation, tick.reward[rows].astype(np.float64), tick.done[rows], tick.truncated[rows], infos

    def _infos(self, tick: Tick) -> dict[str, Any]:
        """Return the action masks, [num_envs, …] each."""
        infos = masks(self._spaces, tick.observation, self._rows)
        return infos | {f"_{name}": np.ones(self.num_envs, np.bool_) for name in infos}

    def _look(self, present: NDArray[np.bool_]) -> None:
        if not present.all():
            raise EnvironmentFault(
                f'group "{self.group}": agent {int(np.argmin(present))} asked for no action in this '
                "exchange, and a vector environment needs one of each; take the PettingZoo environment, or "
                "Tidemill's"
            )

    def close_extras(self, **kwargs: Any) -> None:
        """End the simulators."""
        self._played.close()
