"""Environments with `async def` reset and step: hundreds of them wait on one event loop,
in the thread of whoever plays them."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tidemill.api.environment import EnvironmentConfig
from tidemill.api.external_code import Outside, called
from tidemill.core.clock import awake
from tidemill.core.config import check_counts
from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.core.step_deadlines import MORE_TIME, StepTimes
from tidemill.core.user_code_loading import Code, name_of_code
from tidemill.envs.gymnasium_registry import call_maker, load_maker
from tidemill.envs.lane_answers import Result
from tidemill.envs.lane_coroutines import LaneCoroutines
from tidemill.envs.lane_threads import CLOSE_SECONDS
from tidemill.envs.lanes import LaneLoop
from tidemill.envs.reset_options import reset_env


@dataclass(frozen=True, kw_only=True)
class Asynchronous(EnvironmentConfig):
    """An `Asynchronous` config builds an environment of one's own whose `reset` and
    `step` are `async def`, with arguments and results as Gymnasium's have.

    make: "module:NAME" or "FILE.py:NAME": a class or function that returns one, with
        `observation_space`, `action_space`, ``async def reset(self, *, seed=None,
        options=None)`` and ``async def step(self, action)``, and may have a `close`. All
        copies live on the event loop of the actor's own thread: what computes or blocks
        long without an await holds up the others, and the actor;
        `await asyncio.to_thread(…)` has a thread for each call
    kwargs: arguments of it
    max_episode_steps: a promise: no episode has more steps; 0 where that is not known
    deadline_s: seconds for a reset or a step, after which it is broken off; None: as the
        actor's `deadline_s` says
    """

    renamed: ClassVar[Mapping[str, str]] = {"deadline": "deadline_s"}

    make: Code
    kwargs: dict[str, Any] = field(default_factory=dict)
    max_episode_steps: int = 0
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "make", name_of_code(self.make))
        self.check_least(max_episode_steps=0)
        self.check_deadlines("deadline_s")

    timed_calls = True

    @classmethod
    def outside(cls, settings: Mapping[str, Any]) -> Sequence[Outside]:
        return [called(settings.get("make"), settings.get("kwargs"))]

    def build(self, lanes: int, seed: int, render: bool = False) -> "AsyncLanes":
        """Return `lanes` copies as one environment."""
        check_counts(lanes=lanes)
        maker = load_maker(self.make, "an environment")
        envs = [call_maker(maker, self.make, maker, self.kwargs) for _ in range(lanes)]
        for name in ("reset", "step"):
            if not inspect.iscoroutinefunction(getattr(envs[0], name, None)):
                raise ConfigError(
                    f"make: {self.make} has no async def {name}; one with plain functions is trained on as "
                    "Gymnasium(make=…)"
                )
        for name in ("observation_space", "action_space"):
            if not hasattr(envs[0], name):
                raise ConfigError(f"make: {self.make} has no {name}; give it one of Gymnasium's spaces")
        made = AsyncLanes(envs, self.make, seed, StepTimes(self.deadline_s))
        made.max_episode_steps = self.max_episode_steps
        return made


class AsyncLanes(LaneLoop):
    """L environments with `async def` reset and step, each in a task of the event loop of
    whoever plays them.

    times: of their steps, with the deadline
    sees_to_it: the environments break off their calls by these times themselves
    """

    def __init__(
        self, envs: Sequence[Any], name: str, seed: int, times: StepTimes, sees_to_it: bool = False
    ) -> None:
        """Take over `envs`, equal ones; `name` is what messages call them."""
        self._tasks = LaneCoroutines(len(envs))
        self._times, self._own, self._sees_to_it = times, times.given, sees_to_it
        super().__init__(envs, name, seed, stepper=self._tasks)
        self.times = (times,)
        if not sees_to_it:
            self._steps = [self._timed(lane, env.step) for lane, env in enumerate(envs)]

    def watch(self, deadline_s: float | None) -> None:
        if self._own is None:
            self._times.given = deadline_s

    def close(self) -> None:
        """Break off what is under way, and close every lane that ended; one that does so
        later is closed then, as long as its loop goes on."""
        envs, self.envs = self.envs, []
        self._aliases.close()
        if not envs:
            return
        closings: set[asyncio.Task[None]] = set()  # the loop alone would not keep them

        def leave(lane: int) -> None:
            closings.add(closing := self._tasks.loop.loop.create_task(_close([envs[lane]])))
            closing.add_done_callback(closings.discard)

        stuck = self._tasks.close(leave)
        with suppress(TimeoutError, RuntimeError):
            self._tasks.loop.do(
                _close([env for lane, env in enumerate(envs) if lane not in stuck]), 2 * CLOSE_SECONDS
            )
        self._tasks.loop.give_back()

    def _beginner(self, lane: int) -> Callable[[Any], Any]:
        env, seed = self.envs[lane], self._seeds.pop(lane, None)

        async def begin(_: Any) -> Result:
            return self._begun(lane, await reset_env(env, seed, self._options))

        return begin if self._sees_to_it else self._timed(lane, begin, resetting=True)

    def _copying(self) -> list[Callable[[Any], Any]]:
        def copier(lane: int, step: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Any]:
            async def call(action: Any) -> Any:
                return self._copied(lane, await step(action))

            return call

        return [copier(lane, step) for lane, step in enumerate(self._steps)]

    def _timed(
        self, lane: int, call: Callable[[Any], Awaitable[Any]], resetting: bool = False
    ) -> Callable[[Any], Any]:
        times = self._times

        async def timed(action: Any) -> Any:
            seconds, began = times.deadline(resetting), awake()
            try:
                async with asyncio.timeout(seconds) as limit:
                    answer = await call(action)
            except TimeoutError as error:
                if not limit.expired():  # its own
                    raise
                raise EnvironmentFault(
                    f"{self.name}: lane {lane} did not answer within {seconds:.4g} s (deadline_s); see what "
                    f"it awaits, or {MORE_TIME}"
                ) from error
            if not resetting:
                times.add(awake() - began)
            return answer

        return timed


def is_asynchronous(made: Any) -> bool:
    """True for an environment whose steps are `async def`, and for a class of such."""
    return inspect.iscoroutinefunction(getattr(made, "step", None))


async def _close(envs: Sequence[Any]) -> None:
    closings = []
    for env in envs:
        if callable(close := getattr(env, "close", None)) and inspect.isawaitable(closing := close()):
            closings.append(closing)
    await asyncio.gather(*closings, return_exceptions=True)
