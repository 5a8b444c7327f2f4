"""The reference server: any Gymnasium environment over HTTP, as docs/rest.md says. What
`tidemill serve-env` runs.

A thread per connection: an environment that computes or waits holds up nobody else. HTTP
is parsed by h11, which is strict about what ends a message.
"""

import math
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import h11
import msgspec

from tidemill.core.errors import ConfigError
from tidemill.remote.fault_injection import Fault, Faults
from tidemill.remote.server_sessions import Caller, RefusedCall, Sessions
from tidemill.remote.wire import ENCODINGS, PREFIX, ResetCall, SessionsCall, StepCall, decode, encode

HEADER_BYTES = 16 * 1024
FIRST_SECONDS = 10.0  # a connection's first request, which shows the token, is received within so long
REQUEST_SECONDS = 30.0  # a later one, from its first byte on, and any answer
# a connection on which nothing was asked for so long is closed, where sessions are never
# idle
WAITING_SECONDS = 600.0

_NOTHING = Fault()


@dataclass
class _Request:
    method: str
    path: str
    headers: dict[bytes, bytes]
    body: bytes


class _Line(Caller):
    """A connection, as the server looks after it."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.until = time.monotonic() + FIRST_SECONDS
        """When what is waited for must be there."""
        self.known = False
        """A request of it was let in, with the token if there is one."""
        self.idle_since = time.monotonic()
        """Since when nothing was asked of a known one, infinite while something is; when
        an unknown one was opened."""
        self.hung_up = False
        """It was closed from this side."""

    def receive(self) -> bytes:
        """Return what has come. Raises `OSError` when the other end has closed it."""
        came = self.socket.recv(65536)
        if not came:
            raise ConnectionError("closed")
        if self.known:
            self.idle_since = math.inf
        self.until = min(self.until, time.monotonic() + REQUEST_SECONDS)
        return came

    def hang_up(self) -> None:
        """Close it from this side. Whoever waits for it is woken."""
        self.hung_up = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Server:
    """A server serves `sessions` from threads of its own, from `start` to `close`.

    token: what ``Authorization: Bearer …`` must say; None: nothing is asked for, which
        only a loopback address allows
    max_body_bytes: larger bodies are refused with 413
    faults: what goes wrong on purpose: a `FaultSampler`, or anything with its
        `draw(path)`
    """

    def __init__(
        self,
        sessions: Sessions,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        max_body_bytes: int = 1 << 20,
        faults: Any = None,
    ) -> None:
        if token is None and not _is_loopback(host):
            raise ConfigError(
                f"host = {host} can be reached by others, so that a token is needed: give --token, or set "
                "TIDEMILL_TOKEN; or listen on 127.0.0.1"
            )
        if token is not None and (
            len(token) < 8 or not token.isascii() or not token.isprintable() or " " in token
        ):
            raise ConfigError("the token must have at least 8 printable ASCII characters and no spaces")
        if max_body_bytes < 1024:
            raise ConfigError(f"max_body_bytes = {max_body_bytes} must be at least 1024")
        self.sessions, self.faults = sessions, faults
        self._host, self._port = host, port
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._max_body = max_body_bytes
        self._waiting = min(WAITING_SECONDS, sessions.idle_seconds or WAITING_SECONDS)
        self._lines: set[_Line] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._down = False
        self._listener: socket.socket | None = None
        self._posts: dict[str, tuple[type[Any], Callable[[Any, Caller], Any]]] = {
            f"{PREFIX}/reset": (ResetCall, sessions.reset),
            f"{PREFIX}/step": (StepCall, sessions.step),
            f"{PREFIX}/close": (SessionsCall, sessions.close),
            f"{PREFIX}/keep": (SessionsCall, sessions.keep),
        }

    @property
    def url(self) -> str:
        """Where it is reached."""
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"

    def start(self) -> "Server":
        """Listen. Raises `ConfigError` when that is not possible."""
        self._listen()
        threading.Thread(target=self._look_after, name="serve-env idle sessions", daemon=True).start()
        plan = getattr(self.faults, "faults", None)
        if isinstance(plan, Faults) and plan.restart_every:
            threading.Thread(
                target=self._restarts, args=(plan,), name="serve-env restarts", daemon=True
            ).start()
        return self

    def wait(self) -> None:
        """Return once it was closed."""
        while not self._closed.wait(1.0):
            pass

    def close(self) -> None:
        """Stop listening, close all connections and sessions. May be called twice."""
        self._closed.set()
        self._hang_up()
        self.sessions.forget()

    def restart(self, seconds: float = 0.0) -> None:
        """Forget all sessions and connections, and refuse connections for a while, as a
        server that is started anew does."""
        self._hang_up()
        self.sessions.forget()
        self._closed.wait(seconds)
        if not self._closed.is_set():
            self._listen()

    def _listen(self) -> None:
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = socket.create_server((self._host, self._port), family=family, backlog=1024)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._host} port {self._port}: {error.strerror or error}; choose another "
                "--host or --port"
            ) from None
        self._port = listener.getsockname()[1]
        with self._lock:
            self._listener, self._down = listener, False
        threading.Thread(target=self._accept, args=(listener,), name="serve-env", daemon=True).start()

    def _hang_up(self) -> None:
        with self._lock:
            listener, self._listener, self._down = self._listener, None, True
            lines = list(self._lines)
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for line in lines:
            line.hang_up()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._listener is not listener or self._closed.is_set():
                    return
                self._closed.wait(0.05)  # out of file descriptors, say: it passes
                continue
            line = _Line(connection)
            with self._lock:
                if self._down or not self._make_room():
                    connection.close()
                    continue
                self._lines.add(line)
            threading.Thread(
                target=self._serve, args=(line,), name="serve-env connection", daemon=True
            ).start()

    def _make_room(self) -> bool:
        """Make room for one connection more, and return whether there is: one that has
        asked for nothing yet gives way, else one on which nothing was asked for longest.
        Only for who holds the lock."""
        if len(self._lines) < 2 * self.sessions.limit + 16:
            return True
        idle = [line for line in self._lines if line.idle_since < math.inf]
        if idle:
            line = min(idle, key=lambda line: (line.known, line.idle_since))
            self._lines.remove(line)
            line.hang_up()
        return bool(idle)

    def _look_after(self) -> None:
        while not self._closed.wait(min(1.0, self.sessions.idle_seconds / 4 or 1.0)):
            with suppress(RefusedCall):
                self.sessions.close_idle()
            now = time.monotonic()
            with self._lock:
                late = [line for line in self._lines if line.until < now]
            for line in late:
                line.hang_up()

    def _restarts(self, plan: Faults) -> None:
        while not self._closed.wait(plan.restart_every):
            self.restart(plan.restart_seconds)

    def _serve(self, line: _Line) -> None:
        """Answer the requests of one connection, one after the other, until either side
        ends it."""
        state = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_BYTES)
        try:
            line.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wait = FIRST_SECONDS
            while self._exchange(state, line, wait):
                state.start_next_cycle()
                wait = self._waiting
        except OSError:
            line.gone = not line.hung_up
        except h11.ProtocolError:
            pass
        finally:
            with self._lock:
                self._lines.discard(line)
            line.socket.close()

    def _exchange(self, state: h11.Connection, line: _Line, wait: float) -> bool:
        """Receive a request, for which to wait so many seconds, and answer it. True when
        another one may follow."""
        fault = _NOTHING
        try:
            request = self._receive(state, line, wait)
            if request is None:
                return False
            line.until = math.inf  # environments take their time
            encoding, answer, fault = self._answer(request, line)
            status, retry_after = 200, 0.0
        except (RefusedCall, h11.RemoteProtocolError) as error:
            refused = (
                error
                if isinstance(error, RefusedCall)
                else RefusedCall(error.error_status_hint, "bad_request", f"that is no HTTP: {error}")
            )
            if refused.status == 0:  # a connection that is closed on purpose
                return False
            self.sessions.count("refused")
            encoding, answer = "application/json", refused.problem
            status, retry_after = refused.status, refused.retry_after
        if state.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return False
        more: bool = state.their_state in (h11.DONE,)
        body = encode(answer, encoding)
        headers = [("content-type", encoding), ("content-length", str(len(body)))]
        headers += [("retry-after", f"{retry_after:g}")] if retry_after else []
        headers += [] if more else [("connection", "close")]
        parts = (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
        said = b"".join(state.send(part) or b"" for part in parts)
        if fault.kind == "stall":
            self._closed.wait(self.faults.faults.stall_seconds)
        elif fault.kind == "reply_lost":
            return False
        line.until = time.monotonic() + REQUEST_SECONDS
        if fault.kind == "reply_torn":
            line.socket.sendall(said[: len(said) // 2])
            return False
        elif fault.kind == "reply_repeated":
            said += said
        line.socket.sendall(said)
        return more

    def _receive(self, state: h11.Connection, line: _Line, wait: float) -> _Request | None:
        """Return the next request, None when there can be none. Raises `RefusedCall` for
        one without the token, or too large, and `OSError` when the client has gone or was
        too slow."""
        request: h11.Request | None = None
        body, now = bytearray(), time.monotonic()
        line.until = now + wait
        if line.known:
            line.idle_since = now
        while True:
            event = state.next_event()
            if event is h11.NEED_DATA:
                if state.they_are_waiting_for_100_continue:
                    line.socket.sendall(
                        state.send(h11.InformationalResponse(status_code=100, headers=[])) or b""
                    )
                state.receive_data(line.receive())
            elif isinstance(event, h11.Request):
                request = event
                said = dict(event.headers).get(b"authorization", b"")
                if self._authorization is not None and not secrets.compare_digest(said, self._authorization):
                    raise RefusedCall(
                        401, "unauthorized", "the token is missing or wrong: send Authorization: Bearer TOKEN"
                    )
                line.known, line.idle_since = True, math.inf
                if int(dict(event.headers).get(b"content-length", b"0")) > self._max_body:
                    raise self._too_large()
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > self._max_body:
                    raise self._too_large()
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                path = request.target.decode("ascii").partition("?")[0]
                return _Request(request.method.decode("ascii"), path, dict(request.headers), bytes(body))
            else:
                return None

    def _too_large(self) -> RefusedCall:
        return RefusedCall(
            413, "too_large", f"the body has more than {self._max_body} bytes (--max-body-bytes)"
        )

    def _answer(self, request: _Request, line: _Line) -> tuple[str, Any, Fault]:
        """Return encoding, answer, and what is to go wrong with it. Raises
        `RefusedCall`."""
        if request.path in (f"{PREFIX}/environment", f"{PREFIX}/counts"):
            if request.method != "GET":
                raise RefusedCall(405, "bad_method", f"{request.path} is read with GET")
            answer = (
                self.sessions.describe(self._max_body)
                if request.path.endswith("environment")
                else self.sessions.counts()
            )
            return "application/json", answer, _NOTHING
        if request.path not in self._posts:
            raise RefusedCall(
                404,
                "unknown_path",
                f"there is no {request.path}; known: GET {PREFIX}/environment, {PREFIX}/counts, POST "
                f"{', '.join(self._posts)}",
            )
        if request.method != "POST":
            raise RefusedCall(405, "bad_method", f"{request.path} is called with POST")
        encoding = (
            request.headers.get(b"content-type", b"").decode("latin1").partition(";")[0].strip().lower()
        )
        if encoding not in ENCODINGS:
            raise RefusedCall(415, "bad_type", f"content-type {encoding!r} is none of {', '.join(ENCODINGS)}")
        kind, act = self._posts[request.path]
        try:
            call = decode(request.body, encoding, kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RefusedCall(400, "bad_body", f"the body is no {kind.__name__}: {error}") from None
        fault: Fault = _NOTHING
        if self.faults is not None and kind in (ResetCall, StepCall):
            fault = self.faults.draw(request.path)
            self._before(fault, call.session)
        return encoding, act(call, line), fault

    def _before(self, fault: Fault, session: str) -> None:
        """What goes wrong before anything is applied."""
        if fault.seconds:
            self._closed.wait(fault.seconds)
        if fault.kind == "request_lost":
            raise RefusedCall(0, "", "")
        if fault.kind == "session_lost":
            self.sessions.forget(session)
        elif fault.kind in ("too_many", "unavailable"):
            status, wait = 429 if fault.kind == "too_many" else 503, self.faults.faults.retry_after
            raise RefusedCall(status, fault.kind, "on purpose (--fault)", retry_after=wait)


def _is_loopback(host: str) -> bool:
    import ipaddress

    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
