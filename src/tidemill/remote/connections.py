"""One connection of one session to its server, blocking or on an event loop, by httpcore:
httpx's own network layer.

A connection each, instead of a pool that all share: there are never more than sessions,
none waits for another's, and the pool's search, which takes longer the more connections
it holds, is over one. httpx's own timeouts hold for each read, so that a server that
sends a byte now and then could hold a call for ever; here a request has one deadline.
"""

import asyncio
import math
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import httpcore

from tidemill.core.clock import awake
from tidemill.core.errors import RemoteFault
from tidemill.remote.calls import HttpAnswer, NoAnswer, Send, answer
from tidemill.remote.wire import LARGEST


class Address:
    """An address says where a server is reached, and how requests to it look: prepared
    once, since httpcore looks at each URL and each header again."""

    def __init__(self, url: str, headers: list[tuple[bytes, bytes]], context: ssl.SSLContext | None) -> None:
        """`headers` are those of every request; `context` is for https."""
        self.url, self.context = url, context
        at = httpcore.URL(url)
        self.origin, host = at.origin, at.host.decode("ascii")
        self.host, self.port = host.strip("[]"), self.origin.port
        shown = host if at.port is None else f"{host}:{at.port}"
        self._headers = [(b"host", shown.encode("ascii")), *headers]
        self._urls: dict[str, httpcore.URL] = {}

    def request(self, wanted: Send, seconds: float) -> httpcore.Request:
        """Return the request, whose single reads and writes may take `seconds`."""
        url = self._urls.get(wanted.path) or self._urls.setdefault(
            wanted.path, httpcore.URL(self.url + wanted.path)
        )
        headers = [
            *self._headers,
            (b"content-type", wanted.content_type.encode()),
            (b"content-length", str(len(wanted.body)).encode()),
        ]
        timeout = {"read": seconds, "write": seconds}
        return httpcore.Request(
            wanted.method.encode(), url, headers=headers, content=wanted.body, extensions={"timeout": timeout}
        )


CONNECT_SECONDS = 10.0  # for a connection to be made: nothing is under way before


class _Deadline:
    """Until when a request may take, and what is to be done at which time before."""

    until = late = 0.0
    at_late: Callable[[], None] | None = None

    def left(self, timeout: float | None) -> float:
        left = self.until - awake()
        if left <= 0:
            raise TimeoutError(OVER)
        return left if timeout is None else min(left, timeout)


class _Stream(httpcore.NetworkStream):
    """Sends headers and body in one piece, when the answer is to be read: half the system
    calls, on both sides."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: _Deadline) -> None:
        self._stream, self._deadline = stream, deadline
        self._written = bytearray()

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        deadline = self._deadline
        if self._written:
            whole, self._written = bytes(self._written), bytearray()
            self._stream.write(whole, deadline.left(timeout))
        if deadline.at_late is not None:
            try:
                return self._stream.read(
                    max_bytes, min(deadline.left(timeout), max(0.001, deadline.late - awake()))
                )
            except httpcore.ReadTimeout:
                at_late, deadline.at_late = deadline.at_late, None
                if deadline.late < deadline.until:
                    at_late()
        try:
            return self._stream.read(max_bytes, deadline.left(timeout))
        except httpcore.ReadTimeout:
            raise TimeoutError(OVER) from None

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._written += buffer

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class Connection:
    """A blocking connection to a server. For one thread at a time; `interrupt` alone may
    be called from another."""

    def __init__(self, address: Address) -> None:
        """Connects when the first request is sent."""
        self.address = address
        self._deadline = _Deadline()
        self._stream: _Stream | None = None
        self._connection: httpcore.HTTP11Connection | None = None
        self._interrupted = threading.Event()

    def send(self, wanted: Send, at_late: Callable[[], None] | None = None) -> HttpAnswer | NoAnswer:
        """Send a request and return what came of it. Call `at_late` when it is late.
        Raises `RemoteFault` when it was interrupted."""
        since = awake()
        deadline = self._deadline
        deadline.until, deadline.late, deadline.at_late = since + wanted.seconds, since + wanted.late, at_late
        self.pause(0)
        whole = sent = False
        try:
            connection = self._connection
            if connection is None or not connection.is_idle() or connection.has_expired():
                connection = self._connect()
            sent = True
            response = connection.handle_request(self.address.request(wanted, wanted.seconds))
            body = bytearray()
            for chunk in response.iter_stream():
                body += chunk
                if len(body) > LARGEST:
                    return NoAnswer(f"the answer has more than {LARGEST} bytes")
            response.close()
            whole = True
            return answer(response.status, response.headers, bytes(body), awake() - since)
        except _NETWORK as error:
            return _lost(error, sent)
        finally:
            if not whole:  # half an answer must not be read as the next one's
                self.hang_up()

    def hang_up(self) -> None:
        """Close the connection; the next request opens another."""
        stream, self._stream, self._connection = self._stream, None, None
        if stream is not None:
            with suppress(Exception):
                stream.close()

    def pause(self, seconds: float) -> None:
        """Wait so long. Raises `RemoteFault` when it was interrupted."""
        if self._interrupted.wait(seconds) if seconds else self._interrupted.is_set():
            raise RemoteFault(f"{self.address.url}: closed while a call was under way")

    def interrupt(self) -> None:
        """Have the request under way come to nothing, and refuse any other."""
        self._interrupted.set()
        self.break_off()

    def break_off(self) -> None:
        """Have the request under way come to nothing."""
        self._deadline.until = 0.0
        if (stream := self._stream) is not None and (
            connected := stream.get_extra_info("socket")
        ) is not None:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def _connect(self) -> httpcore.HTTP11Connection:
        self.hang_up()
        address = self.address
        stream = httpcore.SyncBackend().connect_tcp(
            address.host, address.port, self._deadline.left(CONNECT_SECONDS)
        )
        if address.context is not None:
            stream = stream.start_tls(address.context, address.host, self._deadline.left(CONNECT_SECONDS))
        self._stream = _Stream(stream, self._deadline)
        self._connection = httpcore.HTTP11Connection(address.origin, self._stream, keepalive_expiry=None)
        return self._connection


class _AsyncStream(asyncio.Protocol, httpcore.AsyncNetworkStream):
    """The same on an event loop. Its reads have no timeouts: `give_up` ends them."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._written, self._came = bytearray(), bytearray()
        self._waiting: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._ended = False

    @property
    def spent(self) -> bool:
        """True when the server has closed the connection, or sent what nobody asked
        for."""
        return self._ended or bool(self._came)

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._written and self._transport is not None:
            self._transport.write(bytes(self._written))
            self._written.clear()
        if not self._came and not self._ended:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        if not self._came and self._error is not None:
            raise self._error
        came = bytes(self._came[:max_bytes])
        del self._came[:max_bytes]
        return came

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._written += buffer

    def give_up(self, error: Exception) -> None:
        """Have the read under way, and each that follows, raise: also while something
        comes all the time."""
        self._ended, self._error = True, error
        self._came.clear()
        self._wake()

    def close(self) -> None:
        self._ended = True
        if self._transport is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._transport.abort()

    async def aclose(self) -> None:
        self.close()

    def get_extra_info(self, info: str) -> Any:
        return (
            self._transport.get_extra_info("socket")
            if info == "socket" and self._transport is not None
            else None
        )

    # ---- what the event loop calls -----------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._came += data
        self._wake()

    def eof_received(self) -> None:
        self._ended = True
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._ended, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class _OneTask(httpcore.AsyncHTTP11Connection):
    """A connection of one task, which needs no lock against others: each time that one is
    taken costs a round of the loop, free as it is."""

    def __init__(self, origin: httpcore.Origin, stream: httpcore.AsyncNetworkStream) -> None:
        super().__init__(origin, stream, keepalive_expiry=None)
        self._state_lock = nullcontext()  # type: ignore[assignment]  # its own: where there is no such thing any more this does nothing


class AsyncConnection:
    """The same on an event loop: for one task at a time."""

    def __init__(self, address: Address) -> None:
        """Connects when the first request is sent."""
        self.address = address
        self._stream: _AsyncStream | None = None
        self._connection: httpcore.AsyncHTTP11Connection | None = None
        self._until = math.inf  # when the request under way is given up
        self._late = math.inf  # when it is late
        self._at_late: Callable[[], None] | None = None
        self._alarm: asyncio.TimerHandle | None = None

    async def send(self, wanted: Send, at_late: Callable[[], None] | None = None) -> HttpAnswer | NoAnswer:
        """Send a request and return what came of it. Call `at_late` when it is late."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        self._until = since + wanted.seconds
        if at_late is not None:
            self._late, self._at_late = since + wanted.late, at_late
        whole = sent = False
        try:
            connection = self._connection
            if connection is None or self._stream is None or self._stream.spent or not connection.is_idle():
                connection = await self._connect(wanted.seconds)
            self._set_alarm(loop)
            sent = True
            response = await connection.handle_async_request(self.address.request(wanted, wanted.seconds))
            body = bytearray()
            async for chunk in response.aiter_stream():
                body += chunk
                if len(body) > LARGEST:
                    return NoAnswer(f"the answer has more than {LARGEST} bytes")
            await response.aclose()
            whole = True
            return answer(response.status, response.headers, bytes(body), loop.time() - since)
        except _NETWORK as error:
            return _lost(error, sent)
        finally:
            self._until = self._late = math.inf
            self._at_late = None
            if not whole:  # cancelled, too: half an answer must not be read as the next one's
                self.drop()

    def drop(self) -> None:
        """Close the connection; the next request opens another."""
        stream, self._stream, self._connection = self._stream, None, None
        if stream is not None:
            stream.close()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def break_off(self) -> None:
        """Have the request under way come to nothing."""
        if self._stream is not None:
            self._stream.give_up(TimeoutError(OVER))

    async def _connect(self, seconds: float) -> httpcore.AsyncHTTP11Connection:
        self.drop()
        address = self.address
        async with asyncio.timeout(min(seconds, CONNECT_SECONDS)):
            _, self._stream = await asyncio.get_running_loop().create_connection(
                _AsyncStream, address.host, address.port, ssl=address.context
            )
        self._connection = _OneTask(address.origin, self._stream)
        return self._connection

    def _set_alarm(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the request given up when its time is over. One alarm serves many
        requests: it is set again when it rings before their time."""
        at = min(self._until, self._late)
        if self._alarm is None or self._alarm.when() > at:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = loop.call_at(at, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._alarm = None
        if self._stream is not None and self._until < math.inf:
            now = loop.time()
            if now >= self._until:
                self.break_off()
                return
            if now >= self._late and self._at_late is not None:
                self._late = math.inf
                self._at_late()
            self._set_alarm(loop)


_NETWORK = (
    TimeoutError,
    OSError,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.TimeoutException,
    httpcore.ConnectionNotAvailable,
)


OVER = "its time is over"


def _lost(error: BaseException, sent: bool) -> NoAnswer:
    cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return NoAnswer(cause, sent, late=sent and isinstance(error, TimeoutError) and str(error) == OVER)
