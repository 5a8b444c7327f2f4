"""Remote environments as a configuration: what `tidemill train http://HOST:PORT`
makes."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from tidemill.api.environment import EnvironmentConfig
from tidemill.api.external_code import Outside, quoted
from tidemill.core.config import check_counts, decode
from tidemill.core.errors import ConfigError, needing
from tidemill.core.secrets import known, mask, reveal
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
    deadline: seconds for a call, retries and pauses included. A call that is under way is
        not given up before
    attempt: seconds without an answer after which a call is sent once more, on another
        connection, while the first one is still waited for: where the server says that
        repeats are "remembered". None: twice what the slowest call of its kind took of
        late, 1 at least
    retries: share of the calls that may be tried again (a few at a time always
        may be); 0: none but these
    """

    url: str
    token: str = "$TIDEMILL_TOKEN"
    form: Literal["loop", "threads"] = "loop"
    deadline: float = 30.0
    attempt: float | None = None
    retries: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url(self.url)
        if not (math.isfinite(self.deadline) and self.deadline > 0):
            raise ConfigError(f"deadline = {self.deadline} must be a number of seconds above 0")
        if self.attempt is not None and not (math.isfinite(self.attempt) and self.attempt > 0):
            raise ConfigError(
                f"attempt = {self.attempt} must be a number of seconds above 0, or None, for what calls take"
            )
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
        if self.form == "loop":
            made = AsyncLanes([AsyncRemoteEnv(host) for _ in range(lanes)], self.url, seed)
        else:
            made = RemoteLanes([RemoteEnv(host) for _ in range(lanes)], self.url, seed, lanes)
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
            Settings(check_url(self.url), token_of(self.token), self.deadline, self.attempt, self.retries)
        )


class RemoteLanes(LaneLoop):
    """Sessions in threads. Closing it does not wait for calls under way."""

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
