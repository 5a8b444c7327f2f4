"""What a reference server does wrong on purpose, so that clients can be tried against
it."""

import math
import random
import threading
from collections import Counter
from dataclasses import dataclass, fields

from tidemill.core.config import Config, acting
from tidemill.core.errors import ConfigError, did_you_mean

KINDS = (
    "too_many",
    "unavailable",
    "request_lost",
    "reply_lost",
    "reply_torn",
    "reply_repeated",
    "stall",
    "session_lost",
)
"""Shares of calls, by what happens to them. Before anything is applied: ``too_many``
answers 429, ``unavailable`` 503, ``request_lost`` closes the connection, ``session_lost``
forgets the session. After it: ``reply_lost`` closes the connection without an answer,
``reply_torn`` in the middle of it, ``reply_repeated`` sends it twice, ``stall`` sends it
`stall_seconds` later."""

LONGEST = 1e6
"""Seconds of anything."""


@dataclass(frozen=True, kw_only=True)
class Faults(Config):
    """What goes wrong, how often. All shares are of the calls of reset and step, from 0
    to 1, and exclude one another.

    latency: seconds that each call takes longer: "0.05", "uniform:LOW:HIGH", or
        "lognormal:MEDIAN:SIGMA"; "" for none
    too_many … session_lost: see `KINDS`
    retry_after: seconds that 429 and 503 ask clients to wait; 0: they do not say
    stall_seconds: how long a stalled reply is held back
    restart_every: seconds between restarts of the whole server, in which it forgets all
        sessions; 0: none
    restart_seconds: how long a restart takes, in which connections are refused
    seed: seed of all that is drawn
    """

    latency: str = ""
    too_many: float = 0.0
    unavailable: float = 0.0
    request_lost: float = 0.0
    reply_lost: float = 0.0
    reply_torn: float = 0.0
    reply_repeated: float = 0.0
    stall: float = 0.0
    session_lost: float = 0.0
    retry_after: float = acting(
        0.0,
        lambda faults: faults.too_many + faults.unavailable > 0,
        "without too_many or unavailable: nobody is asked to wait",
    )
    stall_seconds: float = acting(
        5.0, lambda faults: faults.stall > 0, "without stall: no reply is held back"
    )
    restart_every: float = 0.0
    restart_seconds: float = acting(
        0.5, lambda faults: faults.restart_every > 0, "without restart_every: the server never restarts"
    )
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, float) and not 0 <= value <= LONGEST:
                raise ConfigError(
                    f"fault {each.name} = {value} must be 0 or more, and no more than {LONGEST:g}"
                )
        if (total := sum(getattr(self, kind) for kind in KINDS)) > 1:
            raise ConfigError(
                f"the shares of faults add up to {total:g}; they exclude one another, so that they can be 1 "
                "together at most"
            )
        _latency(self.latency)

    @classmethod
    def from_words(cls, words: dict[str, str]) -> "Faults":
        """Return the faults that ``NAME=VALUE`` words ask for. Raises `ConfigError`."""
        known = {each.name: each.type for each in fields(cls)}
        given: dict[str, str | float | int] = {}
        for name, text in words.items():
            if name not in known:
                raise ConfigError(
                    f'--fault {name}={text}: there is no fault "{name}"; {did_you_mean(name, known)}'
                )
            try:
                given[name] = text if name == "latency" else int(text) if name == "seed" else float(text)
            except ValueError:
                raise ConfigError(f"--fault {name}={text}: {text!r} is no number") from None
        return cls(**given)  # type: ignore[arg-type]


def _latency(text: str) -> tuple[str, list[float]]:
    """Return the kind of a distribution and its numbers."""
    kind, *numbers = text.split(":") if ":" in text else ["constant", text or "0"]
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    wanted = {"constant": 1, "uniform": 2, "lognormal": 2}.get(kind)
    if wanted != len(values) or any(not 0 <= value <= LONGEST for value in values):
        raise ConfigError(
            f'latency = "{text}" is no distribution of seconds; write "0.05", "uniform:0.01:0.1" or '
            '"lognormal:0.05:0.5"'
        )
    return kind, values


@dataclass(frozen=True)
class Fault:
    """What happens to one call: one of `KINDS`, or "" for nothing, and how many seconds
    the call takes longer."""

    kind: str = ""
    seconds: float = 0.0


class FaultSampler:
    """A fault sampler draws what happens to each call. Calls of it are counted by kind in
    `drawn`. Used by many threads."""

    def __init__(self, faults: Faults) -> None:
        """Draw from the seed that `faults` has."""
        self.faults = faults
        self.drawn: Counter[str] = Counter()
        self._random, self._lock = random.Random(faults.seed), threading.Lock()
        self._shares = [(kind, getattr(faults, kind)) for kind in KINDS]
        self._latency, self._numbers = _latency(faults.latency)

    def draw(self, path: str) -> Fault:
        """Return what happens to a call of `path`."""
        with self._lock:
            at, seconds, kind = self._random.random(), self._seconds(), ""
            for name, share in self._shares:
                if at < share:
                    kind = name
                    break
                at -= share
            self.drawn[kind] += 1
        return Fault(kind, seconds)

    def _seconds(self) -> float:
        match self._latency:
            case "uniform":
                return self._random.uniform(*self._numbers)
            case "lognormal":
                return self._random.lognormvariate(math.log(max(1e-9, self._numbers[0])), self._numbers[1])
        return self._numbers[0]
