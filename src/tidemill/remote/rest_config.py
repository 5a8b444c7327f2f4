"""Remote environments as a configuration: what `tidemill train http://HOST:PORT`
makes."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

from tidemill.api.environment import EnvironmentConfig
from tidemill.api.external_code import Outside, quoted
from tidemill.core.config import check_counts, decode
from tidemill.core.errors import ConfigError, needing
from tidemill.core.secrets import known, mask, reveal
from tidemill.core.step_deadlines import StepTimes
from tidemill.envs.asynchronous import AsyncLanes
from tidemill.envs.lanes import LaneLoop

if TYPE_CHECKING:
    from tidemill.remote.host import Host


@dataclass(frozen=True, kw_only=True)
class Rest(EnvironmentConfig):
    """Rest configures an environment that a server plays, over HTTP as docs/rest.md says.
    Each lane is a session of its own, with a connection of its own.

    url: URL of the server, "http://HOST:PORT" or "https://HOST/PATH"
    token: what the server asks for. "$NAME" is read from the environment variable NAME
        when the environment is made, so that the token itself is not saved with the run;
        unset it means none ("env:NAME": an error). "file:PATH" is what that file holds
    form: "loop": all lanes of an actor are tasks of one event loop, in its own thread;
        "threads": each lane is a thread that waits for its server, best where there are
        few of them and the actor keeps to one core (`Actors.one_core`)
    deadline_s: seconds for a step or a reset, retries and pauses included: what is under
        way is not given up before; inf: any time. None: as the actor's `deadline_s` says
    attempt_s: seconds without an answer after which a call is sent once more, on another
        connection, while the first one is still waited for: where the server says that
        repeats are "remembered". None: twice what the slowest call of its kind took of
        late, 1 at least
    retries: share of the calls that may be tried again (a few at a time always
        may be); 0: none but these
    """

    renamed: ClassVar[Mapping[str, str]] = {"deadline": "deadline_s", "attempt": "attempt_s"}

    url: str
    token: str = "$TIDEMILL_TOKEN"
    form: Literal["loop", "threads"] = "loop"
    deadline_s: float | None = None
    attempt_s: float | None = None
    retries: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url(self.url)
        self.check_deadlines("deadline_s")
        self.check_above_zero("attempt_s")
        self.check_shares("retries")

    draws = False
    remote = True
    timed_calls = True

    @classmethod
    def from_name(cls, name: str, settings: Mapping[str, Any]) -> EnvironmentConfig:
        url = name.removeprefix("rest:")
        return decode(cls, {"kind": cls.__name__, "url": url, **settings}, "environment")

    @classmethod
    def outside(cls, settings: Mapping[str, Any]) -> Sequence[Outside]:
        return [connection(cls, settings)]

    def build(self, lanes: int, seed: int, render: bool = False) -> LaneLoop:
        """Return `lanes` sessions as one environment. Raises `ConfigError` when no server
        of the protocol answers."""
        check_counts(lanes=lanes)
        host = self.host()
        from tidemill.remote.session import AsyncRemoteEnv, RemoteEnv

        made: LaneLoop
        times = StepTimes(self.deadline_s)
        if self.form == "loop":
            sessions = [AsyncRemoteEnv(host, times) for _ in range(lanes)]
            made = AsyncLanes(sessions, self.url, seed, times, sees_to_it=True)
        else:
            made = RemoteLanes([RemoteEnv(host, times) for _ in range(lanes)], self.url, seed, times)
        made.most_lanes, made.needs_maker = host.description.max_sessions, False
        return made

    def preset_name(self, name: str) -> str:
        return self.host().description.environment

    def host(self) -> "Host":
        """Return what the sessions of this server share in this process. Raises
        `ConfigError` when no server of the protocol answers."""
        with needing("remote environments need", 'pip install "tidemill[rest]"'):
            from tidemill.remote.host import Settings, host_of
        return host_of(
            Settings(check_url(self.url), token_of(self.token), self.deadline_s, self.attempt_s, self.retries)
        )


class RemoteLanes(LaneLoop):
    """Sessions in threads, which break off their calls by `times`. Closing it does not
    wait for calls under way."""

    def __init__(self, envs: Sequence[Any], name: str, seed: int, times: StepTimes) -> None:
        super().__init__(envs, name, seed, len(envs))
        self._times, self._own, self.times = times, times.given, (times,)

    def watch(self, deadline_s: float | None) -> None:
        if self._own is None:
            self._times.given = deadline_s

    def begin_close(self) -> None:
        for env in self.envs:
            env.interrupt()
        super().begin_close()

    def close(self) -> None:
        self.begin_close()
        super().close()


def connection(kind: type[EnvironmentConfig], settings: Mapping[str, Any]) -> Outside:
    """Return that an environment of this kind connects to the `url` of its settings, and
    may send it a token."""
    token = settings.get("token", kind.__dataclass_fields__["token"].default)
    if not isinstance(token, str) or not token.startswith(("$", "env:", "file:")):
        return Outside(f"connects to {quoted(settings.get('url'))}")
    kind_of, name = ("$", token[1:]) if token.startswith("$") else token.split(":", 1)
    sent = (
        f"what is in the file {quoted(name)}"
        if kind_of == "file"
        else f"the environment variable {quoted(name)}, if that is set"
    )
    return Outside(f"connects to {quoted(settings.get('url'))}, and sends it {sent}")


def token_of(setting: str) -> str | None:
    """Return what the setting `token` stands for. Raises `ConfigError` for what no header
    can carry."""
    token = os.environ.get(setting[1:]) if setting.startswith("$") else reveal({"token": setting})["token"]
    if token and not (token.isascii() and token.isprintable()):
        raise ConfigError(
            "the token holds a line break or other characters that cannot be sent: it is printable ASCII"
        )
    return token or None


def check_url(url: str, schemes: Sequence[str] = ("http", "https")) -> str:
    """Return a server's URL without a slash at its end, its scheme in small letters.
    Raises `ConfigError`."""
    url = url.strip()
    shown = mask(url, known([url]) - {url})
    try:
        parts = urlsplit(url)
        good = (
            parts.scheme in schemes
            and bool(parts.hostname)
            and not parts.query
            and not parts.fragment
            and parts.port != 0
        )
        (parts.hostname or "").encode("idna")  # as it is looked up: no label may be empty or too long
    except ValueError:
        good = False
    if not good:
        raise ConfigError(
            f'url = "{shown}" is no address of a server; write "http://HOST:PORT" or "https://HOST"'
        )
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(
            f'url = {shown!r} holds characters that no address has; write a name of a host as "xn--…", and '
            'others as "%20"'
        )
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            "url holds a user or password, which would be saved with the run; give token instead"
        )
    return parts.scheme + url[len(parts.scheme) :].rstrip("/")
