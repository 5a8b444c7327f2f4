"""One session as its client sees it, and the two objects that play it: blocking, and with
`async def`.

Each call names session, episode and step, which the server counts too: so a lost step is
sent again only where the server says what it does with one that it has. Else the episode
is given up by a `RemoteFault`, which `Slots` turns into a voided step.
"""

import math
from types import SimpleNamespace
from typing import Any

from msgspec import UNSET

from tidemill.api.spaces import to_gymnasium
from tidemill.core.clock import awake
from tidemill.core.errors import EnvironmentFault, ProtocolFault, RemoteFault
from tidemill.core.seeding import derive_seed
from tidemill.core.step_deadlines import StepTimes
from tidemill.remote.calls import (
    Again,
    HttpAnswer,
    NoAnswer,
    Plan,
    Send,
    Sleep,
    TimeLimit,
    call,
    drive,
    drive_async,
    within,
)
from tidemill.remote.hedging import AsyncHedged, Hedged
from tidemill.remote.host import UNANSWERED, Host
from tidemill.remote.wire import (
    PREFIX,
    Problem,
    Repeats,
    ResetCall,
    SessionsCall,
    StepCall,
    StepResult,
    encode,
)

CLOSE_SECONDS = 0.5  # each: `UNANSWERED` of them end within the seconds that an actor has to close
HURRIED_SECONDS = 0.05  # each of the others: enough to say so
# when a step may be sent again
AGAIN: dict[Repeats, Again] = {"remembered": "late", "refused": "lost", "applied": "never"}

Step = tuple[Any, float, bool, bool, dict[str, Any]]


class Session:
    """A session counts episodes and steps, and plans the calls. A failure breaks the
    session: it can only be closed, and the next reset opens another.

    times: of steps, with the deadline of each step and reset
    """

    def __init__(self, host: Host, times: StepTimes) -> None:
        self.host, self.times = host, times
        self.name = ""  # "": none is open
        self.episode, self.step = -1, 0
        self.broken = False
        self._seed: int | None = None
        self._opened = 0
        self._last: StepCall | None = None

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Plan[tuple[Any, dict[str, Any]]]:
        """Plan the beginning of an episode. Without a seed a new session takes one that
        was derived from the last."""
        limit = within(self.times.deadline(resetting=True))
        if self.broken and self.name:
            yield from self.close()
        if not self.name:
            yield from self.host.describe(limit)
            yield from self._tell_ended()
            self.name, self.episode, self.broken = self.host.session_name(), -1, False
            if seed is None and self._seed is not None:
                seed = derive_seed(self._seed, "session", self._opened)
            self._opened += 1
        if self._seed is None:
            self._seed = seed
        self.broken, self.step = True, 0
        self.episode += 1
        asked = ResetCall(session=self.name, episode=self.episode, seed=seed, options=options)
        again: Again = "late" if self.host.description.repeats == "remembered" else "lost"
        result = yield from self._call("reset", f"reset to episode {self.episode}", asked, again, limit)
        if result.terminated is True or result.truncated is True:
            raise self._wrong(
                "reset", "the answer says that the episode is over, which none is at its beginning"
            )
        observation = self._observation(result)
        self.broken = False
        return observation, result.info

    def take_step(self, action: Any) -> Plan[Step]:
        """Plan one step."""
        if self.broken or not self.name:
            raise RemoteFault(
                f"{self.host.url}: a step before reset; the session's last call failed, or none was made"
            )
        self.broken, began = True, awake()
        self.step += 1
        self._last = StepCall(
            session=self.name, episode=self.episode, step=self.step, action=self.host.actions.write(action)
        )
        limit = within(self.times.deadline(resetting=False))
        result = yield from self._call(
            "step", f"step {self.step}", self._last, AGAIN[self.host.description.repeats], limit
        )
        step = self._read_step(result)
        self.times.add(awake() - began)
        self.host.known.proven, self.broken = True, False
        return step

    def _read_step(self, result: StepResult) -> Step:
        """Return a step's answer as Gymnasium's. Raises `ProtocolFault` for what is
        missing or wrong in it."""
        reward, terminated, truncated = result.reward, result.terminated, result.truncated
        if reward is UNSET or terminated is UNSET or truncated is UNSET:
            raise self._wrong(
                f"step {self.step}",
                f"the answer has no {' and no '.join(result.missing)}. The answer to a step must have reward "
                "(a number), terminated and truncated (true or false each): let the server write all three, "
                "also where nothing is earned and nothing ends (docs/rest.md)",
            )
        if reward is None or not math.isfinite(reward):
            raise self._wrong(
                f"step {self.step}",
                f"reward is not finite but {reward}: NaN or infinite (null in JSON), or none at all. "
                "Tidemill trains on finite numbers only; find where the environment divides by zero or "
                "overflows, or write 0 where nothing is earned",
            ).telling(self._told(result))
        return self._observation(result), reward, terminated, truncated, result.info

    def repeat(self) -> Plan[Step]:
        """Plan sending the last step once more, to see what the server does with it."""
        self.broken = True
        assert self._last is not None
        limit = within(self.times.deadline(resetting=False))
        result = yield from self._call("step", f"step {self.step}, once more", self._last, "lost", limit)
        step = self._read_step(result)
        self.broken = False
        return step

    def close(self) -> Plan[None]:
        """Plan the end of the session. Where the server is not there, it is told with the
        next session that is opened or ends."""
        name, self.name, self.broken = self.name, "", False
        if name:
            self.host.forget(name)
            yield from self._tell_ended(name)

    def _tell_ended(self, *names: str) -> Plan[None]:
        """Plan telling the server of sessions that ended: of `names`, and of those of
        which it could not be told."""
        host, breaker = self.host, self.host.breaker
        ended = (*host.take_unreported(), *names)
        if not ended:
            return
        seconds = CLOSE_SECONDS if host.unanswered < UNANSWERED else HURRIED_SECONDS
        body = encode(SessionsCall(sessions=ended), host.content_type)
        reply, tried, until = None, False, awake() + seconds
        try:
            # a breaker that opened just now is waited for: nobody may come after this one
            while (pause := breaker.wait()) > 0:
                if awake() + pause > until:
                    return
                yield Sleep(pause)
            tried = True
            reply = yield Send("POST", f"{PREFIX}/close", body, host.content_type, seconds)
        finally:
            if reply is None or not reply.settles:
                host.leave_unreported(ended)
            if isinstance(reply, HttpAnswer):
                host.unanswered = 0
                breaker.succeeded()
            elif isinstance(reply, NoAnswer) and not reply.late:
                breaker.failed()
            elif tried:
                host.unanswered += 1
                breaker.gave_up()

    def _call(
        self, path: str, what: str, asked: ResetCall | StepCall, again: Again, limit: TimeLimit
    ) -> Plan[StepResult]:
        host = self.host
        request = Send("POST", f"{PREFIX}/{path}", encode(asked, host.content_type), host.content_type, 0.0)
        what = f"{what} ({self._key()})"
        try:
            result: StepResult = yield from call(
                host.terms,
                what,
                request,
                StepResult,
                again,
                host.paces[path],
                limit,
                self._stale,
                self._applied,
            )
        except ProtocolFault as error:
            error.first = not host.known.proven
            raise
        host.unanswered = 0
        host.heard(self.name)
        return result

    def _stale(self, result: StepResult) -> str | None:
        if (result.session, result.episode, result.step) == (self.name, self.episode, self.step):
            return None
        return f"what came answers step {result.step} of episode {result.episode} in session {result.session}"

    def _applied(self, problem: Problem) -> bool:
        return self.step > 0 and (problem.episode, problem.step) == (self.episode, self.step)

    def _observation(self, result: StepResult) -> Any:
        try:
            return self.host.observations.read(result.observation)
        except EnvironmentFault as error:
            raise self._wrong(
                f"step {self.step}",
                f"{error}. The server must answer what its spaces say: mend its environment, or start it "
                "anew with one environment only",
            ).telling(self._told(result)) from None

    def _told(self, result: StepResult) -> dict[str, dict[str, Any]]:
        """Return what an answer tells, for its fault; an observation that cannot be read
        as it came."""
        try:
            seen = {"obs": self.host.observations.read(result.observation)}
        except EnvironmentFault:
            seen = {"observation": result.observation}
        flags = {"terminated": result.terminated, "truncated": result.truncated}
        return {"agent": {**seen, "reward": result.reward, **flags}}

    def _key(self) -> str:
        return f"session {self.name}, episode {self.episode}"

    def _wrong(self, what: str, why: str) -> ProtocolFault:
        error = ProtocolFault(f"{self.host.url}: {what} ({self._key()}): {why}")
        error.first = not self.host.known.proven
        return error


class _Played:
    """What Gymnasium's environments have besides their calls."""

    render_mode = None

    def __init__(self, host: Host, times: StepTimes | None = None) -> None:
        self.session = Session(host, times or StepTimes(host.settings.deadline_s))
        host.hold()
        self._held = True
        self.observation_space = to_gymnasium(host.spaces.observation)
        self.action_space = to_gymnasium(host.spaces.action)
        self.spec = SimpleNamespace(
            id=host.description.environment, max_episode_steps=host.description.max_episode_steps
        )

    def _release(self) -> None:
        """The host need not be there for this one any more."""
        if self._held:
            self._held = False
            self.session.host.release()


class RemoteEnv(_Played):
    """A session as a Gymnasium environment: reset and step block, at most for the
    deadline of `times`. For one thread at a time; `interrupt` is for any."""

    def __init__(self, host: Host, times: StepTimes | None = None) -> None:
        """Nothing is sent before the first reset."""
        super().__init__(host, times)
        self._connection = Hedged(host.address)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. Raises `RemoteFault`."""
        return drive(self.session.reset(seed, options), self._connection)

    def step(self, action: Any) -> Step:
        """Take a step. Raises `RemoteFault`, after which only reset and close may be
        called."""
        return drive(self.session.take_step(action), self._connection)

    def repeat(self) -> Step:
        """Send the last step once more. Raises `RemoteFault`."""
        return drive(self.session.repeat(), self._connection)

    def interrupt(self) -> None:
        """Have the call under way, and all later ones, raise `RemoteFault` at once."""
        self._connection.interrupt()

    def close(self) -> None:
        """End the session."""
        self._connection.hang_up()
        farewell = self.session.host.connection()  # the other one may have been interrupted
        drive(self.session.close(), farewell)
        farewell.hang_up()
        self._release()


class AsyncRemoteEnv(_Played):
    """The same with `async def`: for one task at a time, on one event loop."""

    def __init__(self, host: Host, times: StepTimes | None = None) -> None:
        """Nothing is sent before the first reset."""
        super().__init__(host, times)
        self._connection = AsyncHedged(host.address)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. Raises `RemoteFault`."""
        return await drive_async(self.session.reset(seed, options), self._connection)

    async def step(self, action: Any) -> Step:
        """Take a step. Raises `RemoteFault`, after which only reset and close may be
        called."""
        return await drive_async(self.session.take_step(action), self._connection)

    async def close(self) -> None:
        """End the session."""
        try:
            await drive_async(self.session.close(), self._connection)
        finally:
            self._release()
            await self._connection.hang_up()
