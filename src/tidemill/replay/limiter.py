"""The limiter: how often a replay memory is trained on for each step that is stored in
it, exactly, for ever.

It counts, in integers that only grow, under one condition variable:

S started steps, C committed ones (their answers are stored), V voided ones (lost), I = S
- C - V in flight, K finished training tasks. A task is one update; the ratio a/b is tasks
per committed step. W is C + I at the moment when the memory could first be sampled: what
was started before then owes nothing. Tasks are owed g at once, the greatest common
divisor of the ratio as it is written ("8/16": 8 after each 16 steps, "1/2": 1 after each
2). Debt D(x) = g·floor((x - W)·a/(b·g)) for x committed steps beyond W, 0 before. Slack
is how many steps gathering may be ahead of training, in tasks Qt = max(ceil(slack·a/b),
ceil(a/b), g).

* a step may start only if D(C + I + 1) - K ≤ Qt;
* a training task may run only if D(C) - K ≥ 1.

So 0 ≤ D(C) - K ≤ Qt at every instant: training is never ahead of what is stored,
gathering never more than the slack ahead. W is C + I and not C, since all that is in
flight commits without another look at the gate.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import gcd
from threading import Condition, RLock

from tidemill.core.clock import awake
from tidemill.core.errors import ConfigError


def parse_ratio(ratio: str | int) -> Fraction:
    """Return training tasks per committed step: an integer, or two with a slash. Raises
    `ConfigError` for anything else.

    >>> parse_ratio("3/2"), parse_ratio(8)
    (Fraction(3, 2), Fraction(8, 1))
    """
    tasks, slash, steps = str(ratio).partition("/")
    parts = [part.strip() for part in ((tasks, steps) if slash else (tasks, "1"))]
    if isinstance(ratio, bool) or not all(
        part.isascii() and part.removeprefix("-").isdigit() for part in parts
    ):
        near = ""
        with suppress(ValueError, OverflowError):
            near, number = "; it must be above 0", Fraction(ratio)
            if number > 0:
                meant = number.limit_denominator(1000) or Fraction(1, round(1 / number))
                near = f'; {float(ratio):g} is ratio = "{meant}"'
        raise ConfigError(
            f'ratio = {ratio!r} is no fraction of integers: write training tasks per step, like "1/4" (a '
            f'task for every 4 steps), "3/2" or 8{near}'
        )
    above, below = map(int, parts)
    if above < 1 or below < 1:
        raise ConfigError(
            f'ratio = "{ratio}" must be above 0: training tasks per committed step, like "1/4", "3/2" or 8'
        )
    return Fraction(above, below)


def tasks_at_once(ratio: str | int) -> int:
    """Return how many tasks a ratio as `parse_ratio` takes it owes at once.

    >>> tasks_at_once("1/2"), tasks_at_once("8/16"), tasks_at_once(8)
    (1, 8, 1)
    """
    parse_ratio(ratio)
    above, _, below = str(ratio).partition("/")
    return gcd(int(above), int(below or 1))


def check_slack(slack: int, holding: int) -> None:
    """Raise `ConfigError` for a slack that can deadlock: `holding` steps can be granted,
    all over the run, to targets that need more before they can begin a tick (one less
    than its lanes, for each actor)."""
    if slack < 1:
        raise ConfigError(
            f"slack = {slack} lets no step start before the one before it was trained on, so that none ever "
            "would; make it at least 1"
        )
    if slack <= holding:
        raise ConfigError(
            f"slack = {slack} can deadlock: a tick of a target begins once all of its lanes may step, and "
            f"actors can hold {holding} steps that wait for others of their tick; make slack at least "
            f"{holding + 1}, or lanes 1"
        )


@dataclass
class LimiterCounts:
    """The counts of a limiter: S, C, V, K and W (see the module's text). `base` is K
    where W was set last: debts count from there."""

    started: int = 0
    committed: int = 0
    voided: int = 0
    tasks: int = 0
    waived: int | None = None
    base: int = 0


class Limiter:
    """A limiter holds gathering or training back, so that the two stay at their ratio,
    and counts both. Any thread may call anything.

    ratio: training tasks per committed step
    slack: steps that gathering may be ahead of training
    counts: the counts that it goes on from
    lost: whether what was in flight then is lost, and counted as voided; else it is in
        flight again
    clock: the clock of what is reported, in seconds
    at_once: tasks that are owed at once, g
    """

    def __init__(
        self,
        ratio: Fraction,
        slack: int,
        counts: LimiterCounts | None = None,
        lost: bool = True,
        clock: Callable[[], float] = awake,
        at_once: int = 1,
    ) -> None:
        check_slack(slack, 0)
        self.ratio, self.slack = ratio, slack
        self._a, self._b = ratio.numerator, ratio.denominator
        self._at_once = at_once
        self.queue = max(-(-slack * self._a // self._b), -(-self._a // self._b), at_once)
        """Qt."""
        self._n = LimiterCounts(**asdict(counts or LimiterCounts()))
        if lost:
            self._n.voided = self._n.started - self._n.committed
        self._budget: int | None = None
        self._draining = False
        self._cause: BaseException | None = None
        self._lock = RLock()
        self._changed = Condition(self._lock)
        self._waiting = 0  # threads
        self._clock, self._since = clock, clock()
        self._idle = 0.0  # seconds that nothing was owed
        self._extremes = [0, 0]  # of debt - K
        self._flown = 0.0  # seconds that steps were in flight, summed over them

    # ---- what is known -----------------------------------------------------------------

    @property
    def counts(self) -> LimiterCounts:
        """A copy of the counters, all of one instant."""
        with self._lock:
            return LimiterCounts(**vars(self._n))

    @property
    def in_flight(self) -> int:
        """I."""
        with self._lock:
            return self._n.started - self._n.committed - self._n.voided

    @property
    def owed(self) -> int:
        """D(C) - K: training tasks that may run now."""
        with self._lock:
            return self._debt(self._n.committed) - self._n.tasks

    @property
    def drained(self) -> bool:
        """True when nothing is in flight and nothing owed: a quiescent cut."""
        with self._lock:
            return (
                self._n.started == self._n.committed + self._n.voided
                and self._debt(self._n.committed) == self._n.tasks
            )

    def _debt(self, steps: int) -> int:
        n = self._n
        return (
            n.base
            if n.waived is None or steps <= n.waived
            else n.base + (steps - n.waived) * self._a // (self._b * self._at_once) * self._at_once
        )

    def _room(self) -> int:
        """Return how many steps the gate lets start now, -1 for any number."""
        n = self._n
        if n.waived is None:
            return -1
        # D(x) - K <= Qt up to the last x with (x - W)·a < (floor(tasks / g) + 1)·b·g
        bursts = (self.queue + n.tasks - n.base) // self._at_once + 1
        last = (bursts * self._at_once * self._b - 1) // self._a
        return max(0, n.waived + last - (n.started - n.voided))

    # ---- steps -------------------------------------------------------------------------

    def start(self, most: int = 1) -> int:
        """Start as many steps as may start now, at most `most`, and return how many these
        are."""
        with self._lock:
            self._tick()
            room = 0 if self._draining or self._cause is not None else most
            if self._budget is not None:
                room = min(room, self._budget - (self._n.started - self._n.voided))
            if room > 0 and (gate := self._room()) >= 0:
                room = min(room, gate)
            room = max(room, 0)
            self._n.started += room
            return room

    def commit(self, steps: int = 1) -> None:
        """Say that the answers of so many steps in flight are stored."""
        self._finish(steps, 0)

    def void(self, steps: int = 1) -> None:
        """Say that so many steps in flight are lost."""
        self._finish(0, steps)

    def _finish(self, committed: int, voided: int) -> None:
        with self._lock:
            self._tick()
            n = self._n
            if min(committed, voided) < 0 or committed + voided > n.started - n.committed - n.voided:
                raise ValueError(
                    f"{committed} steps committed and {voided} voided, but "
                    f"{n.started - n.committed - n.voided} are in flight"
                )
            n.committed += committed
            n.voided += voided
            self._note()

    # ---- training ----------------------------------------------------------------------

    def sampleable(self, least: int = 0) -> None:
        """Say that the memory can be sampled from. The first time sets W: debts begin.
        `least` steps count as in flight then, also where fewer are since a phase is about
        to end, so that W does not depend on that."""
        with self._lock:
            if self._n.waived is None:
                self._tick()
                self._n.waived = max(self._n.started - self._n.voided, self._n.committed + least)
                self._n.base = self._n.tasks
                self._note()

    def warm_up_again(self) -> None:
        """Say that the memory is empty (it was not kept over a resume). No task is owed
        before it can be sampled from again."""
        with self._lock:
            self._n.waived, self._n.base = None, self._n.tasks
            self._note()

    def finish_task(self) -> None:
        """Say that a training task is finished; one must have been owed."""
        with self._lock:
            self._tick()
            if self._debt(self._n.committed) <= self._n.tasks:
                raise ValueError("a training task is finished, but none was owed")
            self._n.tasks += 1
            self._note()

    # ---- phases and ends ---------------------------------------------------------------

    def begin_phase(self, budget: int | None) -> None:
        """Let steps start until C + I = `budget` (None: without end), also after a
        drain."""
        with self._lock:
            self._budget, self._draining = budget, False
            self._note()

    def drain(self) -> None:
        """Let no more steps start. What is in flight commits or is voided, what is owed
        is trained: then it is `drained`."""
        with self._lock:
            self._draining = True
            self._note()

    def stop(self, cause: BaseException) -> None:
        """Let no more steps start, and wake all who wait, with `cause`."""
        with self._lock:
            self._cause = self._cause or cause
            self._note()

    def wait(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until `condition`, which may look at the limiter, holds; False when that
        takes longer than `seconds`. Raises the cause of a stop."""
        with self._lock:
            self._waiting += 1
            try:
                held = self._changed.wait_for(lambda: self._cause is not None or condition(), seconds)
            finally:
                self._waiting -= 1
            if self._cause is not None:
                raise self._cause
            return held

    # ---- what is reported --------------------------------------------------------------

    def _note(self) -> None:
        owed = self._debt(self._n.committed) - self._n.tasks
        low, high = self._extremes
        self._extremes = [min(low, owed), max(high, owed)]
        if self._waiting:
            self._changed.notify_all()

    def _tick(self) -> None:
        """Count the time up to now for the state up to now."""
        now = self._clock()
        self._flown += (now - self._since) * (self._n.started - self._n.committed - self._n.voided)
        if self._n.waived is not None and self._debt(self._n.committed) == self._n.tasks:
            self._idle += now - self._since
        self._since = now

    def report(self) -> dict[str, float]:
        """Return the counters by metric name, the debt now, and since the last report its
        least and largest value, the seconds that training waited since nothing was owed,
        and those that steps were in flight, summed over them. What gathering waits only
        who gathers knows: a shut gate holds nobody back while all slots step."""
        with self._lock:
            self._tick()
            n, owed = self._n, self._debt(self._n.committed) - self._n.tasks
            (low, high), training = self._extremes, self._idle
            flown, self._flown = self._flown, 0.0
            self._extremes, self._idle = [owed, owed], 0.0
            return {
                "limiter/started": n.started, "limiter/committed": n.committed, "limiter/voided": n.voided,
                "limiter/tasks": n.tasks,
                "limiter/in_flight": n.started - n.committed - n.voided,
                "limiter/debt": owed, "limiter/debt_min": low, "limiter/debt_max": high,
                "limiter/training_waited": training, "limiter/flown": flown,
            }  # fmt: skip
