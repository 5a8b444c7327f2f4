"""What environments say of an episode in the info of its last step, as numbers by name:
success, score, terms of the reward, costs.

Only numbers are taken (but for those whose names say that they are secrets), those of
nested mappings as ``PART/NAME``, and only at an episode's end: steps in between cost
nothing. Evaluations get them in the rows of their episodes, packed into `PACKED_INFO`.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from math import isfinite
from re import ASCII
from re import sub as replaced
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidemill.core.schema import Field
from tidemill.core.secrets import says_secret

Numbers = dict[str, float]

MOST = 64
"""Names that are taken of one actor's environments."""
LONGEST = 48
"""Characters of a name, parts and all; longer ones are cut."""
DEEPEST = 3
"""Mappings within one another that are looked into."""
NONE: Numbers = {}

FIELD = "info.packed"
PACKED_INFO = Field((2 + MOST * (LONGEST + 11) + 3,), "uint8")
"""The field of a row that holds the numbers: how many bytes, and these."""
_PLAIN = frozenset({bool, int, float})
# they are of somebody else, or of the step
_OBSERVATIONS = frozenset({"final_obs", "final_observation", "final_info"})


class InfoReader:
    """An info reader turns infos into numbers, and takes no more names than `MOST`;
    `notice` is called once when others are left out."""

    def __init__(self, notice: Callable[[str], None] = lambda _: None) -> None:
        self._names: set[str] = set()
        self._notice: Callable[[str], None] | None = notice

    def numbers(self, info: Any) -> Numbers:
        """Return the finite numbers of an info by name, True and False as 1 and 0;
        nothing of what is no mapping."""
        if not info or not isinstance(info, Mapping):
            return NONE
        found: dict[str, float] = {}
        _collect(info, "", DEEPEST, found)
        if found.keys() <= self._names:
            return found
        for name in sorted(found.keys() - self._names):
            if len(self._names) < MOST:
                self._names.add(name)
                continue
            del found[name]
            if self._notice is not None:
                self._notice(
                    f'the environment says more than {MOST} numbers in its infos; "{name}" and others are '
                    "left out of the metrics"
                )
                self._notice = None
        return found


def _collect(info: Mapping[Any, Any], before: str, depth: int, found: dict[str, float]) -> None:
    for key, value in info.items():
        if type(value) in _PLAIN or isinstance(value, (np.generic, np.ndarray)):
            if (
                key not in _OBSERVATIONS
                and (name := name_of(f"{before}{key}"))
                and (number := _number(value)) is not None
            ):
                found.setdefault(name, number)
        elif depth > 1 and key not in _OBSERVATIONS and isinstance(value, Mapping):
            _collect(value, f"{before}{key}/", depth - 1, found)


def _number(value: Any) -> float | None:
    if type(value) not in _PLAIN and (value.ndim or value.dtype.kind not in "fiub"):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if isfinite(number) else None


@lru_cache(maxsize=1024)
def name_of(text: str) -> str:
    """Return `text` as a part of a metric's name: letters, digits, "_" and "/". "" where
    a part of it says that it is of a secret."""
    if any(map(says_secret, text.split("/"))):
        return ""
    return replaced(r"[^\w/]", "_", text, flags=ASCII).strip("/")[:LONGEST] or "_"


def pack(numbers: Numbers) -> NDArray[np.uint8]:
    """Return numbers as the value of `PACKED_INFO`."""
    value = np.zeros(PACKED_INFO.shape, np.uint8)
    if numbers:
        data = msgspec.msgpack.encode(numbers)
        value[:2] = divmod(len(data), 256)
        value[2 : 2 + len(data)] = np.frombuffer(data, np.uint8)
    return value


def unpack(value: NDArray[np.uint8]) -> Numbers:
    """Return the numbers that `pack` packed."""
    size = int(value[0]) * 256 + int(value[1])
    return msgspec.msgpack.decode(value[2 : 2 + size].tobytes(), type=dict[str, float]) if size else NONE


def means(infos: Iterable[Numbers]) -> dict[str, float]:
    """Return the mean of each number over the episodes that said it."""
    return {name: sum(values) / len(values) for name, values in by_name(infos).items()}


def by_name(infos: Iterable[Numbers]) -> dict[str, list[float]]:
    """Return what episodes said, by name."""
    found: dict[str, list[float]] = {}
    for numbers in infos:
        for name, number in numbers.items():
            found.setdefault(name, []).append(number)
    return found
