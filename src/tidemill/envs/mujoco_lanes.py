"""Gymnasium's MuJoCo environments with all lanes at once: MuJoCo steps them one after the
other, and what is observed and paid is computed for all of them together.

Bit by bit they are Gymnasium's environments. What they leave away: a model for each lane,
forces of contacts where nobody looks at them, islands where the model is one tree (it is
an island by itself), and MuJoCo's timers, which take a fifth of its time.
"""

import copy
import ctypes
import inspect
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import mujoco
import numpy as np
from numpy.typing import NDArray

from tidemill.core.cut import Part
from tidemill.core.errors import EnvironmentFault
from tidemill.core.schema import Array, Arrays
from tidemill.envs.batch_lanes import BatchLanes
from tidemill.envs.mujoco_simulations import SimulationFailed, simulations

State = Mapping[str, Array]
"""Name of an array of MjData → [L, ...]."""
_TRIED = 10  # steps by which `MujocoLanes.fits` compares


class Judgement(NamedTuple):
    """What a step of all lanes came to.

    reward: [L]
    ended: bool [L]: the episode is over; None: of no lane, ever
    parts: name → [L]: what `MujocoLanes.infos` tells of the reward
    """

    reward: Array
    ended: Array | None
    parts: dict[str, Array]


class MujocoLanes(BatchLanes):
    """Lanes of one of Gymnasium's MuJoCo environments, each a simulation of one model. A
    member says what is observed and paid.

    given: arguments of the environment's constructor, with their defaults
    version: of the environment, 4 or 5
    dt: seconds of a step
    reads: arrays of MjData that it needs besides `qpos` and `qvel`
    contact_forces: whether `mj_rnePostConstraint` must fill `cfrc_ext` after a step
    left_out: number of positions that are not observed unless asked for: those that tell
        where in the world the body is
    constants: what version 4 has in place of arguments of version 5
    """

    fewest = 2
    reads: tuple[str, ...] = ()
    contact_forces = False
    left_out = 1
    constants: Mapping[str, Any] = {}

    def __init__(self, env: Any, name: str, lanes: int, seed: int, limit: int) -> None:
        super().__init__(env, name, lanes, seed, limit)
        given = inspect.signature(type(env)).bind(**env.spec.kwargs)
        given.apply_defaults()
        self.given: Any = SimpleNamespace(**{**self.constants, **given.arguments})
        self.version = int(type(env).__module__[-1])
        self.dt: float = env.dt
        model = copy.deepcopy(env.model)
        islands = getattr(mujoco.mjtDisableBit, "mjDSBL_ISLAND", None)
        if islands is not None and model.ntree == 1:
            model.opt.disableflags |= islands.value
        _stop_timers()
        read = ("qpos", "qvel", *self.reads)
        self._simulations = simulations(model, lanes, env.frame_skip, read, self.contact_forces)
        self._state: State = self._simulations.read()
        self._parts: dict[str, Array] = {}
        self._resting: set[int] = set()  # lanes that take no step in the tick

    @abstractmethod
    def observe(self, state: State) -> Sequence[Array]:
        """Return the observations in parts, [L, ...] each, to be laid side by side."""

    @abstractmethod
    def judge(self, before: State, state: State, action: Array) -> Judgement:
        """Return what the step from `before` to `state` came to; `action` is float32
        [L, actuators]."""

    def infos(self, state: State, parts: Mapping[str, Array]) -> dict[str, Array]:
        """Return the infos of the step, each of all lanes."""
        return dict(parts)

    @classmethod
    def fits(cls, env: Any) -> bool:
        """Compare the first steps of an episode. A version of Gymnasium that is not known
        yet may compute something else. One that is not made by its id does not tell its
        arguments."""
        if env.spec is None:
            return False
        if fits := _agrees(cls(env, "", 1, 0, 0)):
            return fits
        warnings.warn(
            f"{type(env).__module__}: this version of Gymnasium computes other numbers than Tidemill does "
            "for all lanes at once, so its own steps are taken, which are slower",
            stacklevel=2,
        )
        return False

    def send(self, actions: Sequence[Arrays], reset: NDArray[np.bool_]) -> None:
        self._resting = set((reset | self._idle).nonzero()[0].tolist())
        super().send(actions, reset)

    def episode_infos(self, group: int, seats: Sequence[int]) -> Sequence[Any]:
        infos = self.infos(self._state, self._parts) if self._parts else {}
        return [
            None if lane in self._resting else {name: values[lane] for name, values in infos.items()}
            for lane in seats
        ]

    def _step(self, actions: Array) -> tuple[Array, Array, Array]:
        resting = self._resting
        chosen = [lane for lane in range(self.lanes) if lane not in resting] if resting else None
        try:
            self._simulations.step(actions, chosen)
        except SimulationFailed as error:
            raise EnvironmentFault(
                f"{self.name}: lane {error.number}: MuJoCo cannot step: {error}"
            ) from error
        before, self._state = self._state, self._simulations.read()
        reward, ended, self._parts = self.judge(before, self._state, actions)
        over = np.zeros(self.lanes, np.bool_) if ended is None else ended
        return np.concatenate(self.observe(self._state), axis=1), reward, over

    def _lane_states(self) -> Part:
        return {"states": self._simulations.states(), "read": self._state}

    def _load_lane_states(self, state: Part) -> None:
        self._state = state["read"]
        self._simulations.load_states(state["states"])

    def _load(self, lane: int) -> None:
        data = self.env.data
        self._simulations.take(lane, data)
        for name, values in self._state.items():
            values[lane] = getattr(data, name)

    def _positions(self, state: State) -> Array:
        """Return the positions that are observed."""
        first: int = self.left_out * self.given.exclude_current_positions_from_observation
        return state["qpos"][:, first:]


def _agrees(lanes: MujocoLanes) -> bool:
    """Return whether one lane and its environment tell the same of an episode's first
    steps."""
    env, draws = lanes.env, np.random.default_rng(0)
    low, high = env.action_space.low, env.action_space.high
    env.reset(seed=0)
    lanes._load(0)
    ended = False
    for _ in range(_TRIED):
        if ended:
            break
        action = draws.uniform(low, high).astype(np.float32)
        observation, reward, ended, _, info = env.step(action)
        seen, paid, over = lanes._step(action[None])
        if (
            seen.shape[1:] != observation.shape
            or np.abs(seen[0] - observation).max() > 1e-9
            or abs(paid[0] - reward) > 1e-9
            or over[0] != ended
            or lanes.episode_infos(0, [0])[0].keys() != info.keys()
        ):
            return False
    return True


def _stop_timers() -> None:
    """Have MuJoCo measure nothing in this process. Python's package has it look at the
    clock some dozen times a step, for `MjData.timer`, and knows no way to say otherwise.
    A clock that somebody has set stays."""
    if mujoco.get_mjcb_time() is not None:
        return
    try:
        library = ctypes.CDLL(mujoco._callbacks.__file__)
        ctypes.c_void_p.in_dll(library, "mjcb_time").value = None
    except (AttributeError, OSError, ValueError):  # a MuJoCo that is built in another way: only slower
        pass
