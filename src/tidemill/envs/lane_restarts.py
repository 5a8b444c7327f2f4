"""Lanes that are made anew after a fault, within a budget: `ActorConfig.lane_restarts`.

The step that failed is void. What it would have told is not known, so that its episode is
cut after the observation from which it started, and the next one begins in the same tick
(`Tick.voided`). Environments that can make single lanes anew do so themselves
(`Environment.restart_lanes`), simulators and slots among them; of all others all are made
anew (`RestartedTogether`).
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import Environment, Tick
from tidemill.core.clock import awake
from tidemill.core.cores import every_core
from tidemill.core.cut import Part
from tidemill.core.errors import DeadlineError, EnvironmentFault, EnvironmentHangs, ProtocolFault
from tidemill.core.schema import Arrays
from tidemill.envs.wrapper import Wrapper

SEEDS_APART = 1_000_003
"""Distance between the seeds of an environment and of the one that takes its place."""
_NUMBERED = re.compile(r"\w*\d[\w.]*")


def cause_of(text: str) -> str:
    """Return what a fault says, in whichever lane, slot, step or session it was."""
    return _NUMBERED.sub("", text)


class LaneRestarts:
    """The restarts of an actor's lanes: at most `most` within `within_s` seconds; 0: the
    first fault ends the run, inf: any number.

    tell: function that takes a text for the user
    count: number of restarts so far
    """

    def __init__(self, most: float, within_s: float, tell: Callable[[str], None]) -> None:
        self._most, self._within_s, self._tell = most, within_s, tell
        self._lately: deque[tuple[float, str]] = deque()
        self._again: Counter[str] = Counter()  # by cause: faults that were not told
        self._first: dict[str, str] = {}  # by cause: the text that was told
        self.count = 0

    def __call__(self, fault: Exception, where: str = "") -> int:
        """Permit one restart for `fault`, and return its number; `where`: in which target
        of several. Raises `EnvironmentFault` with the first cause and the last where
        there were too many."""
        if not self._most:
            raise fault
        if isinstance(fault, ProtocolFault) and fault.first:
            raise fault
        if isinstance(fault, EnvironmentHangs) and fault.too_many:
            raise fault
        now, text = awake(), where + text_of(fault)
        while self._lately and now - self._lately[0][0] > self._within_s:
            self._lately.popleft()
        if len(self._lately) >= self._most:
            raise self._spent(text) from fault
        self._lately.append((now, text))
        self.count += 1
        if (cause := cause_of(text)) in self._first:
            self._again[cause] += 1
        else:
            self._first[cause] = text
            self._tell(
                f"{text}; the step is void, its episode is cut before it, and the environment is made anew "
                f"({self._budget()}later ones of this cause are counted)"
            )
        return self.count

    def _budget(self) -> str:
        if self._most == inf:
            return ""
        most = f"{self._most:g} within {self._within_s:g} s, lane_restarts"
        return f"restart {len(self._lately)} of at most {most}; "

    def _spent(self, text: str) -> EnvironmentFault:
        first = self._lately[0][1]
        other = f"; the last fault: {text}" if cause_of(text) != cause_of(first) else ""
        return EnvironmentFault(
            f"{first}. Its actor's lanes were made anew {self._most:g} times within {self._within_s:g} s "
            f"already, which is all that lane_restarts = {self._most:g} allows{other}. Mend the environment, "
            "or allow more (--set workers.actor.lane_restarts=N)"
        )

    def stats(self) -> dict[str, float]:
        """Return how many restarts there were, where there were any."""
        return {"lanes/restarts": float(self.count)} if self.count else {}

    def end(self) -> None:
        """Tell how often what was told once happened again."""
        for cause, count in self._again.items():
            self._tell(f"{count} more of: {self._first[cause]}")
        self._again.clear()


def text_of(fault: Exception) -> str:
    """Return what a fault says, with its lane where that is known, an exception of
    somebody else's with its type."""
    if not isinstance(fault, (EnvironmentFault, DeadlineError)):
        return f"{type(fault).__name__}: {fault}"
    text, lane = str(fault), getattr(fault, "lane", None)
    return text if lane is None or f"lane {lane}" in text else f"lane {lane}: {text}"


def made_again(make: Callable[[], Any], who: str, fault: Exception) -> Any:
    """Return what `make` returns, in place of `who`, which failed by `fault`. Raises
    `EnvironmentFault` where it cannot be made a second time."""
    try:
        with every_core():  # a simulator that it starts is no part of this process
            return make()
    except Exception as error:
        raise EnvironmentFault(
            f"{who} failed, and cannot be made a second time ({type(error).__name__}: {error}); let its "
            "close() free what the next one needs, see whether what it connects to is there, or end runs "
            "with the first fault (lane_restarts=None). "
            f"It failed by this: {text_of(fault)}"
        ) from error


class RestartedTogether(Wrapper):
    """An environment whose lanes are all made anew when one of them fails."""

    def __init__(
        self, inner: Environment, build: Callable[[int], Environment], permit: Callable[[Exception], int]
    ) -> None:
        """`build` returns another such environment, given what is to be added to its
        seed; `permit` is asked before (see `Environment.restart_lanes`)."""
        super().__init__(inner)
        self._name = str(getattr(inner, "name", type(inner).__name__))
        self._build, self._permit = build, permit
        self._groups: Sequence[Sequence[int]] = ()
        self._wake: Callable[[], None] | None = None
        self._options: list[Mapping[str, Any]] = []  # of all stages so far
        self._sent: Sequence[Arrays] = ()
        self._reset: NDArray[np.bool_] = np.ones(self.lanes, np.bool_)
        # the tick under way is the first of an environment that was made anew
        self._anew = self._flagged = False
        self._keeps = False

    def keep_episodes(self) -> None:
        self._keeps = True
        super().keep_episodes()

    def _own_state(self) -> Part:
        return {"flagged": self._flagged}

    def _load_own_state(self, state: Part) -> None:
        self._flagged = state["flagged"]

    def bind(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = groups
        super().bind(groups)

    def on_ready(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        super().on_ready(wake)

    def enter_stage(self, options: Mapping[str, Any]) -> None:
        self._options.append(options)
        super().enter_stage(options)

    def send(self, actions: Sequence[Arrays], reset: NDArray[np.bool_]) -> None:
        self._sent, self._anew = actions, False
        self._reset[:] = reset
        try:
            self._inner.send(actions, reset)
        except Exception as error:
            self._restart(error)

    def ready(self) -> bool:
        try:
            return self._inner.ready()
        except Exception as error:
            self._restart(error)
            return False

    def recv(self, ticks: Sequence[Tick]) -> None:
        while True:
            try:
                self._inner.recv(ticks)
                break
            except Exception as error:
                self._restart(error)
        if self._anew or self._flagged:
            for tick in ticks:
                lost = np.repeat(~self._reset & self._anew, len(tick.reward) // self.lanes)
                tick.voided[:] = lost
                tick.restarted |= lost
            self._flagged = self._anew

    def _restart(self, fault: Exception) -> None:
        """Make the environment anew, and begin the tick again, with a reset of all
        lanes."""
        while True:
            number = self._permit(fault)
            with suppress(Exception):
                self._inner.close()
            made: Environment = made_again(lambda: self._build(SEEDS_APART * number), self._name, fault)  # noqa: B023
            if made.agents != self.agents:
                made.close()
                raise EnvironmentFault(
                    f"{self._name} came back with other spaces than it had: it is another environment, or "
                    f"another version of it, now. It failed by this: {text_of(fault)}"
                )
            made.bind(self._groups)
            if self._wake is not None:
                made.on_ready(self._wake)
            if self._keeps:
                made.keep_episodes()
            for options in self._options if self._keeps else self._options[-1:]:
                made.enter_stage(options)  # what is played again is told by their order
            self._inner, self._anew = made, True
            try:
                made.send(self._sent, np.ones(self.lanes, np.bool_))
                return
            except Exception as error:
                fault = error
