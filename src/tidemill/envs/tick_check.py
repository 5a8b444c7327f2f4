"""What environments must not answer, found once per tick and explained in full only when
it happens."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tidemill.api.environment import Tick
from tidemill.api.spaces import Discrete, MultiBinary, MultiDiscrete, Space, field_of, leaves
from tidemill.core.errors import EnvironmentFault
from tidemill.core.schema import Array
from tidemill.envs.space_values import brief

_NUMPY = [kind for kind in np.sctypeDict.values() if issubclass(kind, (np.integer, np.floating))]
NUMBERS = frozenset((float, int, bool, np.bool_, *_NUMPY))  # types of which everything is a number
FLAGS = frozenset((bool, np.bool_))
LARGEST = float(np.finfo(np.float32).max)
"""The largest reward that a row can hold."""


def is_number(value: Any) -> bool:
    """True for one real number, of whatever library."""
    return type(value) in NUMBERS or (np.ndim(value) == 0 and np.asarray(value).dtype.kind in "fiub")


def is_flag(value: Any) -> bool:
    """True for one truth: a bool, or 0 or 1. Not None, which would be False, and not
    "False", which would be True."""
    return type(value) in FLAGS or (
        is_number(value) and np.asarray(value).dtype.kind != "f" and value in (0, 1)
    )


def check_number(value: Any, what: str, where: str) -> None:
    """Raise `EnvironmentFault` unless `value`, a reward, is one number that a row can
    hold. NaN and infinity are told by `TickCheck`."""
    if not is_number(value):
        raise EnvironmentFault(
            f"{where}: {what} is {brief(value)}; it must be one number, as float(…) returns"
        )
    if abs(value) > LARGEST and (isinstance(value, int) or np.isfinite(value)):
        raise EnvironmentFault(
            f"{where}: {what} is {brief(value)}; rewards are stored as float32, which holds up to "
            f"{LARGEST:.4g}: scale or clip it"
        )


def check_flag(value: Any, what: str, where: str) -> None:
    """Raise `EnvironmentFault` unless `value`, whether something ended, is one truth."""
    if not is_flag(value):
        raise EnvironmentFault(
            f"{where}: {what} is {brief(value)}; it must be one bool, True or False, as bool(…) returns"
        )


class TickCheck:
    """The check looks at what one group of agents gets in a tick: floats must be finite,
    choices must be among those that there are.

    `agents` are the group's names, `what` the environment. Rows of absent seats are
    looked at, too: fill them with zeros.
    """

    def __init__(self, space: Space, what: str, agents: Sequence[str]) -> None:
        """`space` is what the group sees."""
        self._what, self._agents = what, agents
        found = leaves(space, "obs")
        self._floats = [name for name, leaf in found.items() if np.dtype(field_of(leaf).dtype).kind == "f"]
        # A negative number taken for one without a sign is larger than any bound: one
        # comparison tells both.
        self._choices = [
            (name, leaf, *limit) for name, leaf in found.items() if (limit := _limit(leaf)) is not None
        ]

    def __call__(self, tick: Tick) -> None:
        """Raise `EnvironmentFault` naming lane, agent and value for what `tick` must not
        hold."""
        self._finite(tick, tick.reward, "reward")
        for name in self._floats:
            self._finite(tick, tick.observation[name], name)
        for name, leaf, dtype, least in self._choices:
            self._among(tick, tick.observation[name], name, leaf, dtype, least)
        if tick.final and tick.restarted.any():
            again = tick.restarted.nonzero()[0]  # rows of other seats hold anything
            for name in self._floats:
                self._finite(tick, tick.final[name][again], f"final {name}", again)
            for name, leaf, dtype, least in self._choices:
                self._among(tick, tick.final[name][again], f"final {name}", leaf, dtype, least, again)

    def _finite(self, tick: Tick, array: Array, name: str, seats: Array | None = None) -> None:
        finite = np.isfinite(array)
        if 0 not in finite.tobytes():  # `all` takes four times as long for few rows
            return
        row = int(np.argmin(finite.reshape(len(array), -1).all(axis=1)))
        raise self._fault(
            tick,
            name,
            row,
            seats,
            f"is not finite: {_short(array[row])}. Tidemill trains on finite numbers only; find where the "
            "environment divides by zero or overflows, or clip there",
        )

    def _among(
        self,
        tick: Tick,
        array: Array,
        name: str,
        leaf: Space,
        dtype: str,
        least: Any,
        seats: Array | None = None,
    ) -> None:
        wrong = array.view(dtype) >= least
        if 1 not in wrong.tobytes():
            return
        row = int(np.argmax(wrong.reshape(len(array), -1).any(axis=1)))
        start = leaf.start if isinstance(leaf, Discrete) else 0
        says = f"is {_short(array[row] + start)}; the observation space says {leaf}"
        raise self._fault(tick, name, row, seats, says)

    def _fault(self, tick: Tick, name: str, row: int, seats: Array | None, says: str) -> EnvironmentFault:
        seat = row if seats is None else int(seats[row])
        lane, agent = divmod(seat, len(self._agents))
        text = f"{self._what}: {name} of agent {self._agents[agent]} in lane {lane} {says}"
        starts = {leaf: space.start for leaf, space, *_ in self._choices if isinstance(space, Discrete)}
        told = {
            **{leaf: array[seat] + starts.get(leaf, 0) for leaf, array in tick.observation.items()},
            **({} if seats is None else {f"final {leaf}": array[seat] for leaf, array in tick.final.items()}),
            "reward": tick.reward[seat],
            "terminated": tick.done[seat],
            "truncated": tick.truncated[seat],
        }
        return EnvironmentFault(text).in_lane(lane).telling({self._agents[agent]: told})


def _limit(leaf: Space) -> tuple[str, Any] | None:
    """Return the dtype without a sign as which choices are looked at, and the least
    number that is none; None where there are no choices."""
    match leaf:
        case Discrete(n=n):
            return "uint64", np.uint64(n)
        case MultiDiscrete(nvec=nvec):
            return "uint64", np.asarray(nvec, np.uint64)
        case MultiBinary():
            return "uint8", np.uint8(2)
    return None


def _short(value: Any) -> str:
    text = np.array2string(np.asarray(value), threshold=8, edgeitems=3, precision=4)
    return text if len(text) < 200 else text[:200] + "…"
