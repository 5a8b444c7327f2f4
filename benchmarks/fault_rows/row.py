"""A row of the table of faults: what is promised of a fault, and what was seen."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random

ANYWHERE = ("processes", "threads", "inline")


class Impossible(Exception):
    """A fault that cannot be had on this machine, and why."""


@dataclass(frozen=True)
class Seen:
    """What followed from one fault.

    seconds: times by what was timed
    lost: numbers of what was lost, by what that is
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    lost: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A fault.

    fault: what it is, in words
    suffer: function that has it happen in a run by a launcher, with random numbers for
        the moment, and yields what was seen of one or several. Raises `BrokenPromise`,
        and `Impossible`
    promised: most seconds, by what is timed; of other times nothing is promised
    lost: most of what may be lost, likewise
    launches: launchers by which it can happen
    times: how often it happens with each
    """

    fault: str
    suffer: Callable[[str, Random], Iterable[Seen]]
    promised: Mapping[str, float] = field(default_factory=dict)
    lost: Mapping[str, float] = field(default_factory=dict)
    launches: tuple[str, ...] = ANYWHERE
    times: int = 2
