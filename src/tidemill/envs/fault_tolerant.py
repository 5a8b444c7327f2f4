"""Slots: environments that may fail. A step that raises or takes too long is voided, its
episode is cut there, and the environment is made anew, as often as the actor's
`lane_restarts` allow.

Nothing is made up: what the lost step would have told is not known, so that the episode
ends after its last known observation, never terminally (`Tick.voided`). One that keeps
failing rests, for longer each time, while the others go on.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import Environment, EnvironmentConfig, Tick
from tidemill.api.external_code import Outside
from tidemill.core.clock import awake
from tidemill.core.cores import every_core
from tidemill.core.cut import Part
from tidemill.core.errors import (
    ConfigError,
    DeadlineError,
    EnvironmentFault,
    ProtocolFault,
    fault_of,
    forgiving,
)
from tidemill.core.schema import Arrays
from tidemill.core.step_deadlines import StepTimes, take_over
from tidemill.core.tally import TallyEntry
from tidemill.envs.hanging_threads import HANGING
from tidemill.envs.lane_restarts import text_of
from tidemill.envs.parallel_build import EnvironmentMaker
from tidemill.envs.wrapper import Wrapper

GRACE = 5.0
"""Seconds that an environment which breaks off its calls itself has for that."""


@dataclass(frozen=True, kw_only=True)
class Slots(EnvironmentConfig):
    """Slots wrap an `environment` whose steps may fail, hang or be slow. A step that
    raises or exceeds `deadline_s` is voided: its episode is cut before it, the
    environment is made anew, and the other slots go on. Each slot is a target of one lane
    of `ReplayActors` (lanes = 1, ring = the number of slots). The environment should step
    in a thread of its own (`Gymnasium(threads=1)`) or on an event loop, so that slots do
    not wait for each other.

    environment: the environment that may fail
    deadline_s: most seconds that a step, a reset, or making the environment may take;
        inf: any time. None: as the actor's `deadline_s` says, an editor any time where
        that is None, too. What breaks its calls off itself (servers, simulators) goes by
        the same number, and has 5 s more for that; a simulator has `start_seconds` for
        its start. A step in the actor's own thread (`Gymnasium(threads=0)`) is not broken
        off: nobody looks at the time meanwhile
    backoff_s: seconds before a failed environment is made anew, varied by half, so that
        slots that fail together do not come back together
    failures: number of failures among the last `window_steps` steps from which on it
        rests: the seconds of `backoff_s` double with that failure and each further one,
        and halve with each step that succeeds
    window_steps: number of steps that `failures` looks back on. Attempts to make it anew
        or to reset it count where they fail
    max_backoff_s: most seconds of a rest
    max_episode_seconds: an episode is cut (truncated) with the first step that answers so
        many seconds after its reset did; None: it takes what it takes. A step that is
        under way is waited for, up to its deadline
    """

    retired: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "window_s": (
            60.0,
            "faults count against steps, not seconds; a slot rests after `failures` among its last "
            "window_steps steps",
        )
    }

    environment: EnvironmentConfig
    deadline_s: float | None = None
    backoff_s: float = 0.5
    max_backoff_s: float = 300.0
    failures: int = 5
    window_steps: int = 20
    max_episode_seconds: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.environment, Slots):
            raise ConfigError(
                "Slots in Slots: write Slots(environment=…) once, around the environment itself"
            )
        self.check_deadlines("deadline_s")
        self.check_above_zero("max_episode_seconds")
        if not 0 <= self.backoff_s <= self.max_backoff_s:  # nor NaN
            raise ConfigError(
                f"backoff_s = {self.backoff_s} must not be negative, nor above max_backoff_s = "
                f"{self.max_backoff_s}"
            )
        if not 1 <= self.failures <= self.window_steps:
            raise ConfigError(
                f"failures = {self.failures} among the last window_steps = {self.window_steps} steps cannot "
                "be: take 1 to window_steps; a slot that never rests for longer than backoff_s has "
                "max_backoff_s = backoff_s"
            )

    usual_restarts = inf

    @property
    def draws(self) -> bool:
        return self.environment.draws

    def bare(self) -> EnvironmentConfig:
        return self.environment

    @classmethod
    def outside(cls, settings: Mapping[str, Any]) -> Sequence[Outside]:
        return ()

    def build(self, lanes: int, seed: int, render: bool = False) -> "SlotEnvironment":
        """Return the environment of one slot. What cannot be made at all raises here, at
        the start."""
        if lanes != 1:
            raise ConfigError(
                f"lanes = {lanes}: a slot is a target of one lane, so that it fails alone; take "
                f"ReplayActors(lanes=1, ring={lanes})"
            )
        made = SlotEnvironment(self, seed, render)
        if made.timed and not made.resets_any:
            made.close()
            raise ConfigError(
                f"max_episode_seconds = {self.max_episode_seconds}: this environment resets finished lanes "
                "by itself and no others, so that we "
                "cannot cut its episodes; set a limit in the environment"
            )
        return made


class SlotEnvironment(Wrapper):
    """The environment that `Slots` describes."""

    _inner: Environment | None  # type: ignore[assignment]  # None while it is made anew
    away = False  # no tick waits: its step is void
    resting = False
    rests = 0
    shared = False

    def __init__(self, config: Slots, seed: int, render: bool) -> None:
        super().__init__(config.environment.build(1, seed, render))
        self._config, self._seed, self._render = config, seed, render
        self.voids, self.timed = True, config.max_episode_seconds is not None
        self.faults: list[str] = []
        self._wake: Callable[[], None] = lambda: None
        self._groups: Sequence[Sequence[int]] = ()
        self._ticks: list[Tick] = []
        self._options: Mapping[str, Any] | None = None
        self._reset_seed: int | None = None
        self._chance = Random(seed)
        # of each of the last steps, whether it failed
        self._lately: deque[bool] = deque(maxlen=config.window_steps)
        self._doubled = self._made = 0  # how often its pause is doubled, environments made
        self._sent: Sequence[Arrays] = ()
        self._reset: NDArray[np.bool_] = np.ones(1, np.bool_)
        self._answered = self._void = False
        inner = config.environment
        own = config.deadline_s
        if own is None and inner.timed_calls:
            own = getattr(inner, "deadline_s", None)
        # an editor is waited for: somebody may have stopped it there
        self._by_itself = inf if inner.single else None
        self._own, self._times = own, StepTimes(self._by_itself if own is None else own)
        self._grace = GRACE if inner.timed_calls else 0.0
        self._starting = float(getattr(inner, "start_seconds", 0.0))  # a simulator's, whatever its steps have
        self._permit: Callable[[Exception], int] = lambda fault: 0
        self._since = self._began_at = 0.0
        self._lost: list[Environment] = []  # that may not be closed yet
        self._mending: EnvironmentMaker | None = None
        self._closed = threading.Event()

    def bind(self, groups: Sequence[Sequence[int]]) -> None:
        assert self._inner is not None
        self._groups = groups
        self._inner.bind(groups)
        self._ticks = [
            Tick.allocate(self.agents[group[0]].spaces.observation, len(group), self.info, False)
            for group in groups
        ]

    def on_ready(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        if self._inner is not None:
            self._inner.on_ready(wake)

    def seed(self, seed: int) -> None:
        self._reset_seed = seed

    def enter_stage(self, options: Mapping[str, Any]) -> None:
        self._options = options
        if self._inner is not None:
            self._inner.enter_stage(options)

    def send(self, actions: Sequence[Arrays], reset: NDArray[np.bool_]) -> None:
        self._sent, self._reset = actions, reset.copy()
        self._answered, self._void = False, False
        self._since = awake()
        if self._inner is None:
            self._mend()
        else:
            self._begin(self._inner)

    def _begin(self, inner: Environment) -> None:
        try:
            # that of a reset which fails is that of the next attempt
            if self._reset[0] and self._reset_seed is not None:
                inner.seed(self._reset_seed)
            inner.send(self._sent, self._reset)
        except BaseException as error:
            self._fail(fault_of(error))

    def ready(self) -> bool:
        if self._answered or self._void:
            return True
        if self._mending is not None:
            self._look_at_mending()
        if self._inner is not None and self._look(self._inner):
            return True
        if not (self._answered or self._void):
            self._look_at_time()
        return self._answered or self._void

    def _look_at_time(self) -> None:
        """Give up what takes too long."""
        waited = awake() - self._since
        if waited <= self._times.least:
            return
        at = self._mending if self._inner is None else self._inner
        limit = self._times.deadline(bool(self._reset[0]))
        if at is self._mending:
            limit = max(limit, self._starting)
        limit += self._grace
        if waited <= limit:
            return
        doing = "" if at is None else at.doing()
        what = "it did not answer" if at is self._inner else "another one was not made"
        text = f"{what} within {limit:.3g} s{f': {doing}' * bool(doing)}"
        HANGING.check(text)
        self._fail(DeadlineError(text))

    def _look(self, inner: Environment) -> bool:
        """True when it has answered."""
        try:
            if inner.ready():
                # one that fails is tried again, so that nobody may be told before it is
                # there
                if self._reset[0]:
                    inner.recv(self._ticks)
                    self._began_at = awake()
                else:
                    self._times.add(awake() - self._since)
                self._answered = True
        except BaseException as error:
            self._fail(fault_of(error))
        return self._answered

    def recv(self, ticks: Sequence[Tick]) -> None:
        inner = self._inner
        if inner is not None and not self._reset[0] and not self._void:
            try:
                inner.recv(ticks)
                for tick in ticks:
                    tick.voided.fill(False)
                self._lately.append(False)
                if self.resting or self._doubled:
                    self.resting, self._doubled = False, max(0, self._doubled - 1)
                if self.timed and awake() - self._began_at >= (self._config.max_episode_seconds or 0.0):
                    for tick in ticks:
                        tick.truncated |= ~tick.done
                return
            except BaseException as error:
                self._fail(fault_of(error))
        for own, tick in zip(self._ticks, ticks, strict=True):
            for name, leaf in tick.observation.items():
                leaf[:] = 0 if self._void else own.observation[name]
            for name, array in tick.info.items():
                array[:] = own.info[name]
            tick.voided.fill(self._void)
            tick.restarted.fill(False)
            for name in ("reward", "done", "truncated"):
                getattr(tick, name)[:] = 0 if self._void else getattr(own, name)
            tick.present[:] = self._void | own.present

    def watch(self, deadline_s: float | None) -> None:
        if self._own is None:
            self._times.given = self._by_itself if deadline_s is None else deadline_s
        if self._inner is not None:
            self._pass_on(self._inner)

    def _pass_on(self, inner: Environment) -> None:
        """Tell the deadline to an environment that breaks its calls off itself; of others
        nobody else is to look at the time."""
        if self._config.environment.timed_calls:
            inner.watch(self._times.given)

    def restart_lanes(self, permit: Callable[[Exception], int]) -> bool:
        self._permit = permit
        return True

    def begin_close(self) -> None:
        self._closed.set()
        if self._inner is not None:
            self._inner.begin_close()

    def close(self) -> None:
        self._closed.set()
        if self._mending is not None:
            self._mending.give_up()
        inner, self._inner = self._inner, None
        if inner is not None:
            self._lost.append(inner)
            # it was to end anyway: what it did until now holds, as when it is made anew
            with forgiving():
                inner.close()

    def wait_closed(self, seconds: float) -> bool:
        until = awake() + seconds
        return all(lost.wait_closed(max(0.0, until - awake())) for lost in self._lost)

    def episode(self, lane: int) -> Part | None:
        return None if self._inner is None else self._inner.episode(lane)

    def episode_infos(self, group: int, seats: Sequence[int]) -> Sequence[Any]:
        return (
            [None] * len(seats)
            if self._inner is None or self._void
            else self._inner.episode_infos(group, seats)
        )

    def statistics(self) -> dict[str, TallyEntry]:
        return {} if self._inner is None else self._inner.statistics()

    def render(self) -> NDArray[np.uint8] | None:
        return None if self._inner is None else self._inner.render()

    # ---- faults ------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        """A step or a reset is lost, and the environment with it. Raises what no other
        environment would mend."""
        if isinstance(error, ProtocolFault) and error.first:
            raise error
        config = self._config
        what = "reset" if self._reset[0] else "step"
        self.faults.append(f"a {what} is lost: {text_of(error)}")
        fault = EnvironmentFault(self.faults[-1])
        fault.__cause__ = error
        self._permit(fault)
        self._lately.append(True)
        if sum(self._lately) >= config.failures:
            self.rests += not self.resting
            self.resting, self._doubled = True, self._doubled + 1
        lost, self._inner = self._inner, None
        self._lost = [other for other in self._lost if not other.wait_closed(0)] + (
            [] if lost is None else [lost]
        )
        if self._mending is not None:
            self._mending.give_up()
        middle = min(
            config.backoff_s * 2 ** min(self._doubled, 30), max(config.max_backoff_s / 1.5, config.backoff_s)
        )
        pause = min(middle * self._chance.uniform(0.5, 1.5), config.max_backoff_s)
        self._made += 1
        self._mending = EnvironmentMaker(
            partial(self._remake, self._made), self._wake, lost, pause, self._closed
        )
        if self._reset[0]:
            self._mend()
        else:
            self._void = True

    def _mend(self) -> None:
        """A reset is asked for while the environment is being made anew; that has its own
        time."""
        self._since = awake() + (self._mending.pause if self._mending is not None else 0.0)

    def _remake(self, number: int) -> Environment:
        with every_core():  # a simulator that it starts is no part of this process
            made = self._config.environment.build(1, self._seed + 1_000_003 * number, self._render)
        if made.agents != self.agents:
            made.close()
            raise EnvironmentFault(
                "it came back with other spaces than it had: it is another environment, or another version "
                "of it, now"
            )
        self._pass_on(made)
        made.bind(self._groups)
        made.on_ready(self._wake)
        if self._options is not None:
            made.enter_stage(self._options)
        return made

    def _look_at_mending(self) -> None:
        assert self._mending is not None
        made = self._mending.made()
        if made is None:
            return
        self._mending = None
        if isinstance(made, Environment):
            take_over(made.times, self.times)
            self.times = made.times
            self._inner, self._since = made, awake()
            self._begin(made)
        else:
            self._fail(made)
