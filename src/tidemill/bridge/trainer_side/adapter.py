"""What the adapters to other libraries share: simulators played an exchange at a time,
with observations and actions as those libraries have them.

Action masks are in the infos there, ``action_mask``, int8, 1: allowed; of several
branches a tuple, as `action_space.sample(mask=…)` takes it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import Tick
from tidemill.api.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Spaces, field_of, leaves
from tidemill.bridge.protocol.samplers import parameter
from tidemill.bridge.trainer_side.environment import SimulatorEnvironment
from tidemill.bridge.trainer_side.lanes import SEEDS
from tidemill.bridge.trainer_side.spaces import MASK
from tidemill.bridge.trainer_side.steps import as_array
from tidemill.core.errors import ConfigError, SchemaError, did_you_mean
from tidemill.core.schema import Arrays


def nested(space: Space, arrays: Arrays, name: str, row: Any) -> Any:
    """Return these rows (an index) of flat arrays as a copy, nested as `space` is."""
    if isinstance(space, Dict):
        return {key: nested(part, arrays, f"{name}.{key}", row) for key, part in space.spaces.items()}
    return np.array(arrays[name][row])


def observed(spaces: Spaces) -> tuple[Space, str]:
    """Return what an agent sees besides its action mask, and the name of that in flat
    arrays."""
    if not isinstance(spaces.observation, Dict):
        return spaces.observation, "obs"
    parts = {name: part for name, part in spaces.observation.spaces.items() if name != "action_mask"}
    return (
        (parts["observation"], "obs.observation") if list(parts) == ["observation"] else (Dict(parts), "obs")
    )


def masks(spaces: Spaces, arrays: Arrays, row: Any) -> dict[str, Any]:
    """Return the action mask of these rows, as an info has it; {} where there is none."""
    if MASK not in arrays:
        return {}
    mask = np.array(arrays[MASK][row])
    action = spaces.action.spaces["discrete"] if isinstance(spaces.action, Dict) else spaces.action
    if isinstance(action, MultiDiscrete):
        return {"action_mask": tuple(np.split(mask, np.cumsum(action.nvec)[:-1], axis=-1))}
    return {"action_mask": mask}


def flatten(space: Space, value: Any, arrays: Arrays, name: str, row: Any) -> None:
    """Write an action, nested as `space` is, into these rows (an index) of flat arrays.
    Raises `SchemaError` where it is none of that space."""
    if isinstance(space, Dict):
        if not isinstance(value, Mapping) or value.keys() != space.spaces.keys():
            given = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise SchemaError(f"{name} must be a dict of {', '.join(space.spaces)}, and was {given}")
        for key, part in space.spaces.items():
            flatten(part, value[key], arrays, f"{name}.{key}", row)
        return
    arrays[name][row] = _checked(space, value, name, arrays[name][row].shape)


def _checked(space: Space, value: Any, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    array, floats = as_array(name, value), isinstance(space, Box)
    if array.shape != shape or array.dtype.kind not in ("fiu" if floats else "iu"):
        wanted = f"{'numbers' if floats else 'integers'} of shape {list(shape)}"
        raise SchemaError(
            f"{name} must be {wanted}, and was {array.dtype} of shape {list(array.shape)}: {value!r:.80}"
        )
    if isinstance(space, (Discrete, MultiDiscrete)):
        sizes = space.n if isinstance(space, Discrete) else space.nvec
        fits, wanted = (array >= 0) & (array < sizes), f"at least 0 and below {sizes}"
    else:
        fits, wanted = np.isfinite(array), "finite"
    if not fits.all():
        raise SchemaError(f"{name} must be {wanted}, and has {array[~fits].flat[0]} in it")
    return array


class SteppedSimulators:
    """Simulators whose exchanges are asked for one by one.

    groups: names of the groups that are played; agents of others act by zeros
    actions: per group, by leaf: what is sent with the next exchange
    """

    def __init__(
        self,
        config: SimulatorEnvironment,
        groups: Sequence[str] | None,
        lanes: int,
        seed: int,
        restarts: int = 0,
    ) -> None:
        """Start `lanes` simulators. Those that die, hang or tell NaN are started again,
        `restarts` times in all; 0: their first fault is raised."""
        if restarts < 0:
            raise ConfigError(f"restarts = {restarts} must be at least 0")
        self.lanes = config.build(lanes, seed)
        self._left = restarts
        if restarts:
            self.lanes.watch(None)
            self.lanes.restart_lanes(self._permit)
        self._last_seed: int | None = None
        try:
            self.groups = list(self.lanes.groups) if groups is None else list(groups)
            for name in self.groups:
                if name not in self.lanes.groups:
                    raise ConfigError(f'there is no group "{name}"; {did_you_mean(name, self.lanes.groups)}')
        except BaseException:
            self.lanes.close()
            raise
        first, indices = 0, {}
        for name, count in self.lanes.groups.items():
            indices[name] = list(range(first, first + count))
            first += count
        agents = self.lanes.agents
        self.names = [[agents[index].name for index in indices[name]] for name in self.groups]
        self.spaces = [agents[indices[name][0]].spaces for name in self.groups]
        self.lanes.bind([indices[name] for name in self.groups])
        self.ticks = [
            Tick.allocate(spaces.observation, lanes * len(names), {}, self.lanes.same_step)
            for spaces, names in zip(self.spaces, self.names, strict=True)
        ]
        self.actions: list[Arrays] = [
            {
                name: np.zeros((lanes * len(names), *field_of(leaf).shape), field_of(leaf).dtype)
                for name, leaf in leaves(s.action, "action").items()
            }
            for s, names in zip(self.spaces, self.names, strict=True)
        ]
        self._none: NDArray[np.bool_] = np.zeros(lanes, np.bool_)

    def _permit(self, fault: Exception) -> int:
        if not self._left:
            raise fault
        self._left -= 1
        return self._left

    def exchange(self) -> list[Tick]:
        """Send the actions and return what came."""
        self.lanes.send(self.actions, self._none)
        self.lanes.recv(self.ticks)
        return self.ticks

    def reset(self, seed: int | None, options: Mapping[str, Any] | None) -> list[Tick]:
        """Begin all over; `seed` goes to the environment parameter ``seed``, `options` to
        those of their names."""
        for name, value in (options or {}).items():
            parameter(name, value)
        self.lanes.enter_stage(options or {})
        if seed is not None:
            if seed % SEEDS == self._last_seed:  # simulators look whether it has changed
                self.lanes.seed(self._last_seed + 1)
                self.lanes.restart()
                self.exchange()
            self._last_seed = seed % SEEDS
            self.lanes.seed(self._last_seed)
        self.lanes.restart()
        return self.exchange()

    def close(self) -> None:
        """End the simulators."""
        self.lanes.close()
