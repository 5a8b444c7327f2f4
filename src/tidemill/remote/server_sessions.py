"""The sessions of a reference server: what reset, step and close do, whichever way the
calls came."""

import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import numpy as np

from tidemill.core.config import check_counts
from tidemill.core.errors import ConfigError, EnvironmentFault, forgiving, message_of
from tidemill.envs.space_values import brief
from tidemill.envs.spaces import spaces_of
from tidemill.envs.tick_check import check_flag, check_number
from tidemill.remote.wire import (
    PROTOCOL,
    VERSION,
    Description,
    FoundSessions,
    Problem,
    ResetCall,
    ServerCounts,
    SessionsCall,
    StepCall,
    StepResult,
    Values,
    space_to_wire,
)

BUSY_SECONDS = 60.0  # how long a call waits for the one before it in the same session
# of a session, besides the newest one: a call may come on two connections, and others
# keep the session open
CALLERS = 2
# names of ended sessions that are remembered: the reset that opens one may come after its
# end, on a connection that its client has given up
ENDED_NAMES = 4096
FORGET_SECONDS = 2.0  # how long all sessions together are waited for, when they are forgotten


class RefusedCall(Exception):
    """A call that is not done: its status, and what is told about it."""

    def __init__(
        self,
        status: int,
        error: str,
        message: str,
        episode: int | None = None,
        step: int | None = None,
        retry_after: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.problem = Problem(error=error, message=message, episode=episode, step=step)
        self.status, self.retry_after = status, retry_after


class Caller:
    """Who calls: a connection, say."""

    gone = False
    """It has hung up: it cannot call any more, and the same client only as another
    caller."""


class _Session:
    def __init__(self, caller: Caller) -> None:
        self.lock = threading.Lock()
        # the last ones that named it: a client may have sent a call twice, and send the
        # next one on either connection
        self.callers = [caller]
        self.env: Any = None
        self.episode, self.step = -1, 0
        self.over = self.closed = False
        self.reply: StepResult | None = None
        self.raised: RefusedCall | None = None  # what its environment raised, and with that its end
        self.used = time.monotonic()

    @property
    def left(self) -> bool:
        """Nobody who has called can do so again."""
        return all(caller.gone for caller in self.callers)

    def named(self, caller: Caller) -> None:
        """Somebody has called it."""
        self.used = time.monotonic()
        if self.callers[-1] is not caller:
            self.callers = [*(other for other in self.callers[-CALLERS:] if other is not caller), caller]

    def shut(self) -> None:
        """Close the environment. Only for who holds the lock."""
        env, self.env = self.env, None
        with forgiving():  # it is gone all the same, and others are still to be closed
            if env is not None:
                env.close()


class Sessions:
    """Up to `limit` sessions, each an environment of its own that `make` returned. Called
    from many threads; calls of one session take turns.

    idle_seconds: a session that is not heard of for so long is closed; 0: never
    left_seconds: while all sessions are taken, one whose callers are gone, and that was
        not heard of for so long, gives way to a new one
    """

    def __init__(
        self,
        make: Callable[[], Any],
        name: str,
        limit: int = 64,
        idle_seconds: float = 300.0,
        left_seconds: float = 10.0,
    ) -> None:
        """Make one environment to learn its spaces, and close it. Raises
        `ConfigError`."""
        check_counts(max_sessions=limit)
        for what, seconds in (("idle_seconds", idle_seconds), ("left_seconds", left_seconds)):
            if not 0 <= seconds < math.inf:
                raise ConfigError(f"{what} = {seconds:g} must be a finite number of at least 0")
        self._make = make
        self.name = name
        self.limit = limit
        self.idle_seconds = idle_seconds
        self._left_seconds = left_seconds
        env = make()
        self.spaces = spaces_of(env, name)
        self._max_episode_steps = getattr(env.spec, "max_episode_steps", None) or 0
        env.close()
        self._observations = Values(self.spaces.observation, "observation")
        self._actions = Values(self.spaces.action, "action")
        self._lock = threading.Lock()
        self._open: dict[str, _Session] = {}
        self._ended: dict[str, None] = {}  # names whose clients ended them, the oldest first
        self._counts = ServerCounts(sessions=0, opened=0, resets=0, applied=0, repeated=0, refused=0)
        self.instance = secrets.token_hex(8)

    def describe(self, max_body_bytes: int) -> Description:
        """Return what clients are told."""
        return Description(
            protocol=PROTOCOL,
            version=VERSION,
            instance=self.instance,
            environment=self.name,
            observation_space=space_to_wire(self.spaces.observation),
            action_space=space_to_wire(self.spaces.action),
            max_episode_steps=self._max_episode_steps,
            repeats="remembered",
            idle_seconds=self.idle_seconds,
            max_sessions=self.limit,
            max_body_bytes=max_body_bytes,
            encodings=("json", "msgpack"),
        )

    def counts(self) -> ServerCounts:
        """Return how often what was done so far."""
        with self._lock:
            return msgspec.structs.replace(self._counts, sessions=len(self._open))

    def count(self, what: str) -> None:
        """Count a call: what became of it, as `ServerCounts` names it."""
        with self._lock:
            setattr(self._counts, what, getattr(self._counts, what) + 1)

    def reset(self, call: ResetCall, caller: Caller) -> StepResult:
        """Begin an episode; episode 0 opens the session. Raises `RefusedCall`."""
        with self._taken(call.session, caller, opens=call.episode == 0) as session:
            if call.episode == session.episode and session.step == 0 and session.reply is not None:
                return self._again(session.reply)
            if call.episode <= session.episode:
                raise _out_of_order(call.session, session, f"reset to episode {call.episode}")
            options = {} if call.options is None else {"options": call.options}

            def begun() -> dict[str, Any]:
                if session.env is None:
                    session.env = self._make()
                observation, info = session.env.reset(seed=call.seed, **options)
                seen = {"observation": self._observations.write(observation), "info": _plain(info)}
                return {**seen, "reward": 0.0, "terminated": False, "truncated": False}

            answer = self._run(call.session, session, begun)
            session.episode, session.step, session.over = call.episode, 0, False
            return self._reply(call.session, session, "resets", answer)

    def step(self, call: StepCall, caller: Caller) -> StepResult:
        """Apply a step, once. Raises `RefusedCall`."""
        with self._taken(call.session, caller, opens=False) as session:
            if (
                (call.episode, call.step) == (session.episode, session.step)
                and call.step > 0
                and session.reply is not None
            ):
                return self._again(session.reply)
            if (call.episode, call.step) != (session.episode, session.step + 1) or session.over:
                raise _out_of_order(call.session, session, f"step {call.step} of episode {call.episode}")
            try:
                action = self._actions.read(call.action)
            except EnvironmentFault as error:
                raise RefusedCall(400, "bad_action", str(error)) from None

            def stepped() -> dict[str, Any]:
                observation, reward, terminated, truncated, info = session.env.step(action)
                check_number(reward, "reward", self.name)
                check_flag(terminated, "terminated", self.name)
                check_flag(truncated, "truncated", self.name)
                seen = {"observation": self._observations.write(observation), "info": _plain(info)}
                ends = {"terminated": bool(terminated), "truncated": bool(truncated)}
                return {**seen, "reward": float(reward), **ends}

            answer = self._run(call.session, session, stepped)
            session.step += 1
            session.over = answer["terminated"] or answer["truncated"]
            return self._reply(call.session, session, "applied", answer)

    def close(self, call: SessionsCall, caller: Caller) -> FoundSessions:
        """End sessions, also before they are open: no reset that comes late opens them.
        Raises `RefusedCall` when one is busy for too long."""
        with self._lock:
            self._ended.update(dict.fromkeys(call.sessions))
            while len(self._ended) > ENDED_NAMES:
                del self._ended[next(iter(self._ended))]
        return FoundSessions(sessions=tuple(name for name in call.sessions if self._end(name)))

    def keep(self, call: SessionsCall, caller: Caller) -> FoundSessions:
        """Keep sessions from being closed as idle, and have them be this caller's."""
        with self._lock:
            here = tuple(name for name in call.sessions if name in self._open)
            for name in here:
                self._open[name].named(caller)
        return FoundSessions(sessions=here)

    def close_idle(self) -> None:
        """End sessions that were not heard of for `idle_seconds`."""
        if not self.idle_seconds:
            return
        since = time.monotonic() - self.idle_seconds
        with self._lock:
            idle = [
                name
                for name, session in self._open.items()
                if session.used < since and not session.lock.locked()
            ]
        for name in idle:
            self._end(name)

    def forget(self, name: str | None = None) -> None:
        """Lose a session, or all, as a server that starts anew does. What is busy for
        long is closed when it is done."""
        with self._lock:
            names = [name] if name is not None else list(self._open)
            if name is None:
                self.instance = secrets.token_hex(8)
        until = time.monotonic() + FORGET_SECONDS
        for each in names:
            with suppress(RefusedCall):
                self._end(each, max(0.0, until - time.monotonic()))

    @contextmanager
    def _taken(self, name: str, caller: Caller, opens: bool) -> Any:
        """Hold a session, which nobody else does meanwhile."""
        left = None
        with self._lock:
            session = self._open.get(name)
            if session is None:
                if not opens or name in self._ended:
                    raise RefusedCall(
                        404,
                        "unknown_session",
                        f"there is no session {name!r}; it was closed, or was left and gave way to another, "
                        "or the server started anew. Reset a new one to episode 0",
                    )
                left = self._make_room()
                session = self._open[name] = _Session(caller)
                self._counts.opened += 1
            session.named(caller)
        if left is not None:
            self._shut(left)
        if not session.lock.acquire(timeout=BUSY_SECONDS):
            raise RefusedCall(503, "busy", f"session {name!r} is still at the call before")
        try:
            if session.closed:
                raise session.raised or RefusedCall(
                    404, "unknown_session", f"session {name!r} was just closed"
                )
            yield session
            session.used = time.monotonic()
        finally:
            if session.closed:
                session.shut()
            session.lock.release()

    def _make_room(self) -> _Session | None:
        """Make room for one session more. Return the one that gave way, which is to be
        shut. Raises `RefusedCall`. Only for who holds the lock."""
        if len(self._open) < self.limit:
            return None
        since = time.monotonic() - self._left_seconds
        left = [
            (one.used, name)
            for name, one in self._open.items()
            if one.left and one.used <= since and not one.lock.locked()
        ]
        if not left:
            why = (
                f"all {self.limit} sessions are taken: play in fewer at a time, or start the server with a "
                "higher limit (--max-sessions); those of clients that hung up give way "
                f"{self._left_seconds:g} s after their last call"
            )
            raise RefusedCall(429, "too_many_sessions", why, retry_after=1.0)
        return self._open.pop(min(left)[1])

    def _run(self, name: str, session: _Session, call: Callable[[], Any]) -> Any:
        """Call the environment. One that raises, or answers what cannot be sent, is done
        with, and so is its session."""
        try:
            return call()
        except BaseException as error:
            # SystemExit, too: it would end the connection's thread, and the call would be
            # sent, and applied, again
            with self._lock:
                self._open.pop(name, None)
            session.closed = True
            session.raised = RefusedCall(
                500,
                "environment_raised",
                f"the environment raised {type(error).__name__}: {_sendable(message_of(error))}",
            )
            raise session.raised from error

    def _reply(self, name: str, session: _Session, what: str, answer: dict[str, Any]) -> StepResult:
        self.count(what)
        session.reply = StepResult(session=name, episode=session.episode, step=session.step, **answer)
        return session.reply

    def _again(self, reply: StepResult) -> StepResult:
        self.count("repeated")
        return reply

    def _end(self, name: str, seconds: float = BUSY_SECONDS) -> bool:
        with self._lock:
            session = self._open.pop(name, None)
        if session is None:
            return False
        if not self._shut(session, seconds):
            raise RefusedCall(
                503,
                "busy",
                f"session {name!r} is still at a call; it is forgotten, and its environment closed when that "
                "ends",
            )
        return True

    def _shut(self, session: _Session, seconds: float = 0.0) -> bool:
        """Shut a session that is not in the table any more. False when it is still at a
        call after so long: then it is shut when that ends."""
        session.closed = True
        if not session.lock.acquire(timeout=seconds):
            return False
        try:
            session.shut()
        finally:
            session.lock.release()
        return True


def _plain(info: Any, depth: int = 3) -> dict[str, Any]:
    """Return what of an environment's info is sent: numbers and texts, numpy's among
    them, as Python's own; and maps of such, to that depth."""
    said: dict[str, Any] = {}
    for key, value in (info or {}).items():
        plain = value.item() if isinstance(value, np.generic) else value
        if isinstance(plain, int) and not isinstance(plain, bool):
            plain = int(plain) if -(1 << 63) <= plain < 1 << 64 else None  # as MessagePack has them
        elif isinstance(plain, float):
            plain = float(plain)
        elif isinstance(plain, str):
            plain = _sendable(plain)
        elif isinstance(plain, Mapping):
            plain = _plain(plain, depth - 1) if depth > 1 else None
        elif not isinstance(plain, bool):
            plain = None
        if plain is not None:
            said[_sendable(str(key))] = plain
    return said


def _sendable(text: str) -> str:
    """Return a text without what UTF-8 has no bytes for."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _out_of_order(name: str, session: _Session, asked: str) -> RefusedCall:
    state = f"at step {session.step} of episode {session.episode}" + (
        ", which is over" if session.over else ""
    )
    return RefusedCall(
        409,
        "out_of_order",
        f"{asked} cannot be next: session {brief(name)} is {state}",
        session.episode,
        session.step,
    )
