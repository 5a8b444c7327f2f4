"""What environments must not answer, found once per tick and explained in full only when it happens."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tidemill.api.environment import Tick
from tidemill.core.errors import EnvironmentFault


def check_finite(tick: Tick, what: str, agents: Sequence[str]) -> None:
    """Raise `EnvironmentFault` naming lane, agent and field when a float of `tick` is NaN or infinite. `agents` are the group's names, `what` the
    environment. Rows of absent seats are looked at, too: fill them with zeros."""
    _check(tick.reward, "reward", what, agents)
    for name, array in tick.observation.items():
        if array.dtype.kind == "f":
            _check(array, name, what, agents)
    if tick.final and tick.restarted.any():
        for name, array in tick.final.items():
            if array.dtype.kind == "f":  # rows of other seats hold anything
                _check(np.where(tick.restarted.reshape(-1, *[1] * (array.ndim - 1)), array, 0), f"final {name}", what, agents)


def _check(array: Any, name: str, what: str, agents: Sequence[str]) -> None:
    if np.count_nonzero(np.isfinite(array)) == array.size:  # `all` costs twice as much
        return
    good = np.isfinite(array).reshape(len(array), -1).all(axis=1)
    seat = int(np.argmin(good))
    lane, agent = divmod(seat, len(agents))
    raise EnvironmentFault(
        f"{what}: {name} of agent {agents[agent]} in lane {lane} is not finite: {_short(array[seat])}. "
        "Tidemill trains on finite numbers only; find where the environment divides by zero or overflows, or clip there"
    )


def _short(value: Any) -> str:
    text = np.array2string(np.asarray(value), threshold=8, edgeitems=3, precision=4)
    return text if len(text) < 200 else text[:200] + "…"
