"""OpenEnv servers as environments: a session is a WebSocket, over which resets, steps and
observations go as JSON maps.

Their protocol has no spaces, so that whoever trains says how its maps become arrays; it
has no step numbers, and ends a session with its connection, so that a lost reply always
costs the episode. It does not tell cut episodes from ended ones.
"""

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import NoneType, SimpleNamespace
from typing import Any, ClassVar

import msgspec

from tidemill.api.environment import EnvironmentConfig
from tidemill.api.external_code import Outside, called
from tidemill.core.clock import awake
from tidemill.core.config import check_counts
from tidemill.core.errors import (
    ConfigError,
    ProtocolFault,
    RemoteFault,
    RemoteTimeout,
    RemoteUnavailable,
    ReplyLost,
    SessionLost,
    needing,
)
from tidemill.core.secrets import reveal
from tidemill.core.step_deadlines import MORE_TIME, StepTimes
from tidemill.core.user_code_loading import name_of_code
from tidemill.envs.asynchronous import AsyncLanes
from tidemill.envs.gymnasium_registry import call_maker, load_maker
from tidemill.envs.space_values import brief
from tidemill.remote.rest_config import check_url, connection, token_of

CLOSE_SECONDS = 1.0
SCHEMES = ("http", "https", "ws", "wss")
LARGEST = 256 << 20  # bytes of an answer, also of what a compressed one says
_answered = set[str]()  # addresses where a server of the protocol has answered in this process


@dataclass(frozen=True, kw_only=True)
class OpenEnv(EnvironmentConfig):
    """An `OpenEnv` config plays on an OpenEnv server (package openenv-core). Each lane is
    a session of its own; all wait on one event loop.

    url: "http://HOST:PORT" or "https://HOST/PATH"
    translate: "module:NAME" or "FILE.py:NAME": a class or function that returns an object
        with `observation_space` and `action_space` (Gymnasium's), ``observation(map)``,
        which turns the server's observation into a value of the former, and
        ``action(value)``, which turns a value of the latter into the map that the server
        takes
    kwargs: arguments of it
    reset: what resets send besides the seed
    max_episode_steps: an episode is cut after that many steps; 0: none
    token: sent as ``Authorization: Bearer …`` when a session is opened, for what stands
        before the server (it asks for none itself); "$NAME" is read from the environment
        variable NAME, so that the token is not saved with the run; unset it means none
    deadline_s: seconds for a step or a reset; where no session is open, that is done in
        it, too: a server that answered once and is gone is tried again for so long. None:
        as the actor's `deadline_s` says
    """

    renamed: ClassVar[Mapping[str, str]] = {"deadline": "deadline_s"}

    url: str
    translate: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    reset: dict[str, Any] = field(default_factory=dict)
    max_episode_steps: int = 0
    token: str = "$TIDEMILL_TOKEN"
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "translate", name_of_code(self.translate))
        check_url(self.url, SCHEMES)
        self.check_least(max_episode_steps=0)
        self.check_deadlines("deadline_s")

    draws = False
    timed_calls = True
    remote = True

    @classmethod
    def outside(cls, settings: Mapping[str, Any]) -> Sequence[Outside]:
        return [connection(cls, settings), called(settings.get("translate"), settings.get("kwargs"))]

    def build(self, lanes: int, seed: int, render: bool = False) -> AsyncLanes:
        """Return `lanes` sessions as one environment; each is opened by its first
        reset."""
        check_counts(lanes=lanes)
        with needing("OpenEnv servers need", 'pip install "tidemill[openenv]"'):
            import websockets  # noqa: F401
        maker = load_maker(self.translate, "a translator", "translate")
        translators = [call_maker(maker, self.translate, maker, self.kwargs) for _ in range(lanes)]
        for name in ("observation_space", "action_space", "observation", "action"):
            if not hasattr(translators[0], name):
                raise ConfigError(
                    f"translate: {self.translate} has no {name}; it needs observation_space, action_space, "
                    "observation and action"
                )
        times = StepTimes(self.deadline_s)
        sessions = [OpenEnvSession(self, translator, times) for translator in translators]
        made = AsyncLanes(sessions, self.url, seed, times, sees_to_it=True)
        made.needs_maker = False
        return made


class OpenEnvSession:
    """One session as an environment with `async def` calls. What fails raises a
    `RemoteFault` and closes it; the next reset opens another."""

    def __init__(self, config: OpenEnv, translator: Any, times: StepTimes) -> None:
        """Nothing is sent before the first reset."""
        self._config, self._translator, self._times = config, translator, times
        self._url = "ws" + check_url(config.url, SCHEMES).removeprefix("http").removeprefix("ws") + "/ws"
        self.observation_space, self.action_space = translator.observation_space, translator.action_space
        self.spec = SimpleNamespace(id=config.url, max_episode_steps=config.max_episode_steps)
        token = token_of(config.token)
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._socket: Any = None
        self._steps, self._answered, self._proven = 0, False, False

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. Raises `RemoteFault`."""
        asked = {**reveal(self._config.reset), **(options or {}), **({} if seed is None else {"seed": seed})}
        reply = await self._call("reset", asked)
        self._steps = 0
        return self._translator.observation(reply["observation"]), {}

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step, once: it is never sent again. Raises `RemoteFault`."""
        if self._socket is None:
            raise SessionLost(f"{self._config.url}: a step without a session; reset opens one")
        began = awake()
        reply = await self._call("step", self._translator.action(action))
        self._times.add(awake() - began)
        self._steps += 1
        reward, done = self._read_step(reply)
        return (
            self._translator.observation(reply["observation"]),
            reward,
            done,
            not done and self._steps == self._config.max_episode_steps,
            {},
        )

    def _read_step(self, reply: dict[str, Any]) -> tuple[float, bool]:
        """Return a step's reward and end. A reward of null is their way to say that there
        was none. Raises `ProtocolFault`."""
        for name, right in (("reward", (int, float, NoneType)), ("done", (bool,))):
            if name not in reply or not isinstance(reply[name], right):
                is_ = f"is {brief(reply[name])}" if name in reply else "is missing"
                raise self._wrong(
                    f"{name} {is_}; it must be "
                    f"{'a number, or null where there is none' if name == 'reward' else 'true or false'}"
                )
        if not math.isfinite(reward := float(reply["reward"] or 0.0)):
            raise self._wrong(
                f"reward is not finite but {reward}; find where the environment divides by zero or "
                "overflows, or clip there"
            )
        self._proven = True
        return reward, reply["done"]

    def _wrong(self, why: str) -> ProtocolFault:
        error = ProtocolFault(f"{self._config.url}: step {self._steps}: {why}. See the server's environment")
        error.first = not self._proven
        return error

    async def close(self) -> None:
        """End the session."""
        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(Exception):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await socket.send('{"type":"close"}')
                    await socket.close()

    async def _call(self, what: str, data: Any) -> dict[str, Any]:
        """Return the answer's data. Whatever goes wrong, cancelling included, ends the
        session: what comes later answers nobody."""
        import websockets

        where, sent, whole, opens = f"{self._config.url}: {what}", False, False, self._socket is None
        seconds = self._times.deadline(resetting=what == "reset")
        try:
            async with asyncio.timeout(seconds):
                if opens:
                    self._socket = await self._open()
                sent = True
                await self._socket.send(msgspec.json.encode({"type": what, "data": data}).decode())
                reply = msgspec.json.decode(await self._socket.recv())
            if (
                not isinstance(reply, dict)
                or not isinstance(answer := reply.get("data"), dict)
                or reply.get("type") not in ("observation", "error")
            ):
                raise self._foreign(
                    f"{where}: what was answered is not of OpenEnv's protocol: {brief(reply)}", opens
                )
            if reply["type"] == "error":
                raise RemoteFault(
                    f"{where}: answered {answer.get('code', 'an error')}: {answer.get('message', '')}; see "
                    "the server's environment"
                )
            if not isinstance(answer.get("observation"), dict):
                raise RemoteFault(f"{where}: what was answered has no observation: {brief(answer)}")
            whole = self._answered = True
            _answered.add(self._url)
            return answer
        except TimeoutError as error:
            if not sent:
                raise RemoteUnavailable(
                    f"{where}: no session could be opened within {seconds:.4g} s (deadline_s)"
                ) from error
            raise RemoteTimeout(
                f"{where}: no answer within {seconds:.4g} s (deadline_s), though it was waited for all the "
                f"while: {MORE_TIME}, or see why the server does not answer"
            ) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._foreign(f"{where}: what was answered is no JSON: {error}", opens) from error
        except (OSError, websockets.WebSocketException) as error:
            if not sent:
                raise RemoteUnavailable(
                    f"{where}: no session could be opened ({error}); see whether an OpenEnv server runs "
                    "there, and takes this token"
                ) from error
            raise ReplyLost(
                f"{where}: the connection was lost, and with it the session and its episode ({error})"
            ) from error
        finally:
            if not whole:
                broken, self._socket = self._socket, None
                if broken is not None:
                    broken.transport.abort()

    def _foreign(self, text: str, opens: bool) -> RemoteFault:
        """Return the fault of an answer that is not of the protocol. In place of a server
        that has answered in this process something else does so, where it is the first
        answer of a session: the server is away."""
        if opens and self._url in _answered:
            return RemoteUnavailable(f"{text}. Something else answers in the server's place")
        return RemoteFault(text)

    async def _open(self) -> Any:
        """Return the connection of a new session. Nothing has been applied yet, so that a
        server which starts again may be tried again."""
        import websockets

        pause = 0.1
        while True:
            try:
                return await websockets.connect(
                    self._url,
                    additional_headers=self._headers,
                    max_size=LARGEST,
                    open_timeout=None,
                    ping_timeout=None,
                )
            except OSError:
                if not self._answered:  # a wrong URL, more likely
                    raise
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, 2.0)
