"""What all sessions of one server share within a process: what it said of itself, how
calls to it are made, and that waiting sessions stay open."""

import itertools
import math
import secrets
import threading
import weakref
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import msgspec

from tidemill.api.spaces import Spaces
from tidemill.core.errors import ConfigError, ProtocolFault, RemoteFault, RemoteUnavailable, WrongServer
from tidemill.remote.call_limits import Breaker, Budget, CallTimes
from tidemill.remote.calls import CallTerms, HttpAnswer, NoAnswer, Plan, Send, TimeLimit, call, problem_of
from tidemill.remote.connections import Address, Connection
from tidemill.remote.wire import PREFIX, PROTOCOL, VERSION, Description, SessionsCall, Values, encode

ANSWER_SECONDS = 30.0  # for that answer, where the environment has no deadline of its own
START_SECONDS = 10.0  # for a server that is starting to say what it is, at the start
# so many sessions in a row are told to be over without an answer before the others' are
# not waited for
UNANSWERED = 5
MOST_UNREPORTED = 1000  # sessions that ended while their server was not there
# seconds between two calls that keep sessions open, whatever a server says of its
# patience
SHORTEST_KEEP, LONGEST_KEEP = 0.01, 3600.0


@dataclass(frozen=True)
class Settings:
    """What tells hosts apart: see `tidemill.remote.rest_config.Rest`."""

    url: str
    token: str | None
    deadline_s: float | None
    attempt_s: float | None
    retries: float


@dataclass
class ServerKnowledge:
    """What this process has learnt of a server, also while nobody has a session there.

    answered: whether it said what it is
    proven: whether a step was answered as the protocol asks
    unreported: sessions that ended, of which it could not be told
    asking: held while somebody asks what it is, which may take long
    refusal: when that failed last, how, by which kind of error, and its cause: not the
        error, whose traceback holds who asked
    """

    answered: bool = False
    proven: bool = False
    unreported: list[str] = field(default_factory=list)
    asking: threading.Lock = field(default_factory=threading.Lock)
    refusal: tuple[float, str, type[ConfigError], BaseException | None] | None = None


class Host:
    """One environment server. Made at the start, when it must be up and say what it is;
    raises `ConfigError` otherwise."""

    def __init__(self, settings: Settings) -> None:
        """Ask the server for its description."""
        self.url, self.settings = settings.url, settings
        self.breaker, self.budget = Breaker(), Budget(settings.retries, max(10.0, 100 * settings.retries))
        self.terms = CallTerms(settings.url, settings.attempt_s, self.breaker, self.budget)
        self.paces = {kind: CallTimes() for kind in ("environment", "reset", "step")}
        self.known = _known_of(settings)
        self.unanswered = 0
        """How many sessions in a row were told to be over, and no answer came in time."""
        headers = [(b"accept", b"application/msgpack, application/json"), (b"user-agent", b"tidemill")]
        if settings.token:
            headers.append((b"authorization", f"Bearer {settings.token}".encode("latin1")))
        context: Any = None
        if settings.url.startswith("https:"):
            import httpx

            context = httpx.create_ssl_context()
        self.address = Address(settings.url, headers, context)
        self._run = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._heard: dict[str, float] = {}  # sessions: when each was last heard of
        self._players = 0  # environments that play here and are not closed
        # set when there are no sessions any more, for whoever keeps them open; None:
        # nobody does
        self._done: threading.Event | None = None
        self.description = self._ask()
        self.content_type = (
            "application/msgpack" if "msgpack" in self.description.encodings else "application/json"
        )
        self.spaces: Spaces = self.description.spaces(self.url)
        self.observations = Values(self.spaces.observation, "observation")
        self.actions = Values(self.spaces.action, "action")

    def hold(self) -> None:
        """One more environment plays here."""
        with _hosts_lock:
            self._players += 1

    def release(self) -> None:
        """One was closed. With the last of them the host is done: whoever plays there
        next asks the server anew, which may be another by then, though something may
        still refer to what was closed."""
        with _hosts_lock:
            self._players -= 1
            if not self._players and _hosts.get(self.settings) is self:
                del _hosts[self.settings]

    def connection(self) -> Connection:
        """Return a blocking connection of one's own."""
        return Connection(self.address)

    def session_name(self) -> str:
        """Return a name that no other session has: of this process, and its number in
        it."""
        return f"{self._run}.{next(self._numbers)}"

    def describe(self, limit: TimeLimit) -> Plan[Description]:
        """Plan asking the server what it is, again. Raises `RemoteFault` when it is no
        longer what it was, `RemoteUnavailable` where it is no server that answers: it is
        away then."""
        request = Send("GET", f"{PREFIX}/environment", b"", "application/json", 0.0)
        try:
            now = yield from call(
                self.terms, "what it is", request, Description, "late", self.paces["environment"], limit
            )
        except ProtocolFault as error:
            raise RemoteUnavailable(f"{error}. Something else answers in the server's place") from None
        try:
            spaces = now.spaces(self.url)
        except ConfigError as error:
            raise RemoteFault(str(error)) from None
        was = self.description
        if (now.protocol, now.version, spaces) != (was.protocol, was.version, self.spaces):
            raise RemoteFault(
                f"{self.url}: the server changed while this ran: environment {now.environment!r} with "
                f"{spaces} under {now.protocol} {now.version} is not what it was, {was.environment!r} with "
                f"{self.spaces}. Start the server as it was, or begin a new run"
            )
        return now

    def heard(self, session: str) -> None:
        """The session was just heard of: keep it from being closed as idle, if the server
        does that."""
        with self._lock:
            if session not in self._heard:
                self.budget.hold(len(self._heard) + 1)
            self._heard[session] = monotonic()
            if self._done is None and self.description.idle_seconds > 0:
                self._done = threading.Event()
                args = (
                    weakref.ref(self),
                    self._done,
                    min(max(self.description.idle_seconds / 4, SHORTEST_KEEP), LONGEST_KEEP),
                )
                threading.Thread(target=_keep, args=args, name="rest keeper", daemon=True).start()

    def forget(self, session: str) -> None:
        """The session is over."""
        with self._lock:
            self._heard.pop(session, None)
            if self._done is not None and not self._heard:
                self._done.set()
                self._done = None

    def take_unreported(self) -> list[str]:
        """Return the sessions that the server is still to be told have ended: whoever
        takes them does so."""
        with self._lock:
            unreported, self.known.unreported = self.known.unreported, []
        return unreported

    def leave_unreported(self, sessions: tuple[str, ...]) -> None:
        """Leave these to whoever opens or ends a session next: the server could not be
        told of them."""
        with self._lock:
            self.known.unreported = [*self.known.unreported, *sessions][-MOST_UNREPORTED:]

    def keep(self, connection: Connection) -> None:
        """Tell the server of the sessions that wait."""
        every = self.description.idle_seconds / 4
        since = monotonic() - every
        with self._lock:
            waiting = tuple(name for name, heard in self._heard.items() if heard < since)
        if waiting:
            body = encode(SessionsCall(sessions=waiting), self.content_type)
            connection.send(Send("POST", f"{PREFIX}/keep", body, self.content_type, min(5.0, every)))

    def _ask(self) -> Description:
        """Return the server's description. Raises `ConfigError` that says what the URL is
        instead (`WrongServer` where somebody else answers there), and where it is away
        comes from a `ConnectionError` or `TimeoutError`."""
        given = self.settings.deadline_s
        seconds = given if given is not None and given < math.inf else ANSWER_SECONDS
        connection, until = self.connection(), monotonic() + min(START_SECONDS, seconds)
        try:
            while True:
                reply = connection.send(
                    Send("GET", f"{PREFIX}/environment", b"", "application/json", seconds)
                )
                # One that answered before is starting anew, whoever answers in its place
                # meanwhile; one that never did is named at once.
                busy = (
                    reply.status in (429, 502, 503, 504) or (self.known.answered and _is_foreign(reply))
                    if isinstance(reply, HttpAnswer)
                    else reply.sent or self.known.answered
                )
                if not busy or monotonic() > until:
                    break
                threading.Event().wait(0.2)
        finally:
            connection.hang_up()
        if isinstance(reply, NoAnswer) and reply.late:
            raise ConfigError(
                f'url = "{self.url}": somebody listens there, and did not say what it is within '
                f"{seconds:g} s; see whether the server hangs, or give it longer (--env-arg "
                "deadline_s=SECONDS)"
            ) from TimeoutError(reply.cause)
        if isinstance(reply, NoAnswer):
            raise ConfigError(
                f'url = "{self.url}": nothing answers there ({reply.cause}); start a server (tidemill '
                "serve-env ENV_ID), or mend the url"
            ) from ConnectionError(reply.cause)
        if busy and _is_foreign(reply) and reply.status not in (429, 502, 503, 504):
            raise ConfigError(
                f'url = "{self.url}": something else answers in the place of the server that was there '
                f"(status {reply.status}); see why, and start the server again"
            ) from ConnectionError(f"status {reply.status}")
        if busy:
            raise ConfigError(
                f'url = "{self.url}": what answers there says that it cannot now (status {reply.status}); '
                "see whether the server behind it runs"
            ) from ConnectionError(f"status {reply.status}")
        described = _read_description(self.url, reply)
        self.known.answered = True
        return described


def _of_the_protocol(reply: HttpAnswer) -> dict[str, Any] | None:
    """Return what a server of the protocol says of itself; None of any other one."""
    try:
        plain = msgspec.json.decode(reply.body) if reply.status == 200 else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return plain if isinstance(plain, dict) and plain.get("protocol") == PROTOCOL else None


def _is_foreign(reply: HttpAnswer) -> bool:
    """True of an answer that is no environment server's."""
    if reply.status in (401, 403):
        return problem_of(reply) is None
    return _of_the_protocol(reply) is None


def _read_description(url: str, reply: HttpAnswer) -> Description:
    if reply.status in (401, 403):
        raise (WrongServer if _is_foreign(reply) else ConfigError)(
            f'url = "{url}": the server wants another token ({reply.status}); set token, or TIDEMILL_TOKEN, '
            "to what it was started with"
        )
    plain = _of_the_protocol(reply)
    if plain is None:
        raise WrongServer(
            f'url = "{url}": what answers is no environment server (status {reply.status} at '
            f"{PREFIX}/environment); name the server's address without any path of its calls, or see "
            "docs/rest.md for what it has to answer"
        )
    if plain.get("version") != VERSION:
        raise ConfigError(
            f'url = "{url}": the server speaks version {plain.get("version")!r} of {PROTOCOL}, this Tidemill '
            f"version {VERSION}; use a server of that version"
        )
    try:
        return msgspec.convert(plain, Description)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f'url = "{url}": the server does not say what it is as docs/rest.md asks: {error}'
        ) from None


def _keep(host: "weakref.ref[Host]", done: threading.Event, every: float) -> None:
    """Keep the sessions of a host open until they are done."""
    connection = None
    while not done.wait(every) and (alive := host()) is not None:
        connection = connection or alive.connection()
        alive.keep(connection)
        del alive
    if connection is not None:
        connection.hang_up()


_known: dict[Settings, ServerKnowledge] = {}
_hosts: "weakref.WeakValueDictionary[Settings, Host]" = weakref.WeakValueDictionary()
_hosts_lock = threading.Lock()


def _known_of(settings: Settings) -> ServerKnowledge:
    return _known.setdefault(settings, ServerKnowledge())


def host_of(settings: Settings) -> Host:
    """Return this process's host of that server: a new one if none is held. While one
    asks, others who want it wait for that, and nobody else; what fails fails for all of
    them."""
    known, began = _known_of(settings), monotonic()
    with known.asking:
        if known.refusal is not None and known.refusal[0] > began:
            _, text, kind, cause = known.refusal
            raise kind(text) from cause
        with _hosts_lock:
            host = _hosts.get(settings)
        if host is None:
            try:
                host = Host(settings)
            except ConfigError as error:
                known.refusal = monotonic(), str(error), type(error), error.__cause__
                raise
            with _hosts_lock:
                _hosts[settings] = host
        return host
