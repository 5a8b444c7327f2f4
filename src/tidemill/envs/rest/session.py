"""One session as its client sees it, and the two objects that play it: blocking, and with `async def`."""

import math
from types import SimpleNamespace
from typing import Any

from tidemill.core.errors import EnvironmentFault, RemoteFault
from tidemill.core.seeding import derive_seed
from tidemill.envs.rest.calls import Answer, Plan, Send, call, drive, drive_async
from tidemill.envs.rest.connections import AsyncConnection
from tidemill.envs.rest.host import Host
from tidemill.envs.rest.wire import PREFIX, Problem, ResetCall, Result, SessionsCall, StepCall, encode
from tidemill.envs.spaces import to_gymnasium

CLOSE_SECONDS = 0.5  # each: five that get no answer open the breaker, within the seconds that an actor has to close

Step = tuple[Any, float, bool, bool, dict[str, Any]]


class Session:
    """Counts episodes and steps, and plans the calls. A failure breaks the session: it can only be closed, and the next reset opens another."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.name = ""  # "": none is open
        self.episode, self.step = -1, 0
        self.broken = False
        self._seed: int | None = None
        self._opened = 0
        self._last: StepCall | None = None

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Plan[tuple[Any, dict[str, Any]]]:
        """Plan the beginning of an episode. Without a seed a new session takes one that was derived from the last."""
        if self.broken and self.name:
            yield from self.close()
        if not self.name:
            yield from self.host.describe()
            self.name, self.episode, self.broken = self.host.session_name(), -1, False
            if seed is None and self._seed is not None:
                seed = derive_seed(self._seed, "session", self._opened)
            self._opened += 1
        if self._seed is None:
            self._seed = seed
        self.broken, self.step = True, 0
        self.episode += 1
        asked = ResetCall(session=self.name, episode=self.episode, seed=seed, options=options)
        result = yield from self._call("reset", f"reset to episode {self.episode}", asked, True)
        if result.terminated or result.truncated:
            raise RemoteFault(f"{self._where('reset')}: the answer says that the episode is over, which none is at its beginning")
        observation = self._observation(result)
        self.broken = False
        return observation, result.info

    def take_step(self, action: Any) -> Plan[Step]:
        """Plan one step."""
        if self.broken or not self.name:
            raise RemoteFault(f"{self.host.url}: a step before reset; the session's last call failed, or none was made")
        self.broken = True
        self.step += 1
        self._last = StepCall(session=self.name, episode=self.episode, step=self.step, action=self.host.actions.write(action))
        result = yield from self._call("step", f"step {self.step}", self._last, self.host.description.repeats != "applied")
        if result.reward is None or not math.isfinite(result.reward):
            raise RemoteFault(
                f"{self._where(f'step {self.step}')}: reward is not finite (NaN or infinite). Tidemill trains on finite numbers only; find where the "
                "environment divides by zero or overflows, or clip there"
            )
        observation = self._observation(result)
        self.broken = False
        return observation, result.reward, result.terminated, result.truncated, result.info

    def repeat(self) -> Plan[Step]:
        """Plan sending the last step once more, to see what the server does with it."""
        self.broken = True
        assert self._last is not None
        result = yield from self._call("step", f"step {self.step}, once more", self._last, True)
        self.broken = False
        return self._observation(result), result.reward or 0.0, result.terminated, result.truncated, result.info

    def close(self) -> Plan[None]:
        """Plan the end of the session: told once, whatever comes of it, since the server closes idle ones by itself."""
        name, self.name, self.broken = self.name, "", False
        if not name:
            return
        self.host.forget(name)
        if self.host.breaker.wait() == 0:
            body = encode(SessionsCall(sessions=(name,)), self.host.content_type)
            told = False
            try:
                told = isinstance((yield Send("POST", f"{PREFIX}/close", body, self.host.content_type, CLOSE_SECONDS)), Answer)
            finally:
                self.host.breaker.succeeded() if told else self.host.breaker.failed()

    def _call(self, path: str, what: str, asked: ResetCall | StepCall, again: bool) -> Plan[Result]:
        host = self.host
        request = Send("POST", f"{PREFIX}/{path}", encode(asked, host.content_type), host.content_type, 0.0)
        result: Result = yield from call(host.terms, f"{what} ({self._key()})", request, Result, again, self._stale, self._applied)
        host.heard(self.name)
        return result

    def _stale(self, result: Result) -> str | None:
        if (result.session, result.episode, result.step) == (self.name, self.episode, self.step):
            return None
        return f"what came answers step {result.step} of episode {result.episode} in session {result.session}"

    def _applied(self, problem: Problem) -> bool:
        return self.step > 0 and (problem.episode, problem.step) == (self.episode, self.step)

    def _observation(self, result: Result) -> Any:
        try:
            return self.host.observations.read(result.observation)
        except EnvironmentFault as error:
            raise RemoteFault(
                f"{self._where(f'step {self.step}')}: {error}. The server must answer what its spaces say: mend its environment, or start it "
                "anew with one environment only"
            ) from None

    def _key(self) -> str:
        return f"session {self.name}, episode {self.episode}"

    def _where(self, what: str) -> str:
        return f"{self.host.url}: {what} ({self._key()})"


class _Played:
    """What Gymnasium's environments have besides their calls."""

    render_mode = None

    def __init__(self, host: Host) -> None:
        self.session = Session(host)
        self.observation_space, self.action_space = to_gymnasium(host.spaces.observation), to_gymnasium(host.spaces.action)
        self.spec = SimpleNamespace(id=host.description.environment, max_episode_steps=host.description.max_episode_steps)


class RemoteEnv(_Played):
    """A session as a Gymnasium environment: reset and step block, at most for `deadline`. For one thread at a time; `interrupt` is for any."""

    def __init__(self, host: Host) -> None:
        """Nothing is sent before the first reset."""
        super().__init__(host)
        self._connection = host.connection()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. Raises `RemoteFault`."""
        return drive(self.session.reset(seed, options), self._connection)

    def step(self, action: Any) -> Step:
        """Take a step. Raises `RemoteFault`, after which only reset and close may be called."""
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


class AsyncRemoteEnv(_Played):
    """The same with `async def`: for one task at a time, on one event loop."""

    def __init__(self, host: Host) -> None:
        """Nothing is sent before the first reset."""
        super().__init__(host)
        self._connection = AsyncConnection(host.address)

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. Raises `RemoteFault`."""
        return await drive_async(self.session.reset(seed, options), self._connection)

    async def step(self, action: Any) -> Step:
        """Take a step. Raises `RemoteFault`, after which only reset and close may be called."""
        return await drive_async(self.session.take_step(action), self._connection)

    async def close(self) -> None:
        """End the session."""
        try:
            await drive_async(self.session.close(), self._connection)
        finally:
            await self._connection.hang_up()
