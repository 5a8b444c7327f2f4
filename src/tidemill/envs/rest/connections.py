"""One connection of one session to its server, blocking or on an event loop, by httpcore: httpx's own network layer.

A connection each, instead of a pool that all share: there are never more than sessions, none waits for another's, and the pool's search, which takes
longer the more connections it holds, is over one. httpx's own timeouts hold for each read, so that a server that sends a byte now and then could
hold a call for ever; here a request has one deadline.
"""

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterable
from contextlib import suppress
from time import monotonic
from typing import Any

import httpcore

from tidemill.core.errors import RemoteFault
from tidemill.envs.rest.calls import Answer, Lost, Send, answer
from tidemill.envs.rest.wire import LARGEST

_BEFORE_SENT = (httpcore.ConnectError, httpcore.ConnectTimeout, httpcore.PoolTimeout, httpcore.UnsupportedProtocol)


class _Deadline:
    until = 0.0

    def left(self, timeout: float | None) -> float:
        left = self.until - monotonic()
        if left <= 0:
            raise httpcore.ReadTimeout("deadline")
        return left if timeout is None else min(left, timeout)


class _Stream(httpcore.NetworkStream):
    """Sends headers and body in one piece, when the answer is to be read: half the system calls, on both sides."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: _Deadline) -> None:
        self._stream, self._deadline = stream, deadline
        self._written = bytearray()

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._written:
            whole, self._written = bytes(self._written), bytearray()
            self._stream.write(whole, self._deadline.left(timeout))
        return self._stream.read(max_bytes, self._deadline.left(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._written += buffer

    def close(self) -> None:
        self._stream.close()

    def start_tls(self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None) -> httpcore.NetworkStream:
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, self._deadline.left(timeout)), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _Backend(httpcore.SyncBackend):
    def __init__(self, deadline: _Deadline) -> None:
        self._deadline = deadline
        self.stream: httpcore.NetworkStream | None = None

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: str | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        self.stream = super().connect_tcp(host, port, self._deadline.left(timeout), local_address, socket_options)
        return _Stream(self.stream, self._deadline)


class Connection:
    """Blocks. For one thread at a time; `interrupt` alone may be called from another."""

    def __init__(self, url: str, headers: list[tuple[bytes, bytes]], context: ssl.SSLContext | None) -> None:
        """Connects when the first request is sent."""
        self._url, self._headers, self._context = url, headers, context
        self._deadline = _Deadline()
        self._backend = _Backend(self._deadline)
        self._pool: httpcore.ConnectionPool | None = None
        self._interrupted = threading.Event()

    def send(self, wanted: Send) -> Answer | Lost:
        """Send a request and return what came of it. Raises `RemoteFault` when it was interrupted."""
        self.pause(0)
        self._deadline.until = monotonic() + wanted.seconds
        if self._pool is None:
            self._pool = httpcore.ConnectionPool(self._context, max_connections=1, keepalive_expiry=None, network_backend=self._backend)
        timeout = dict.fromkeys(("connect", "read", "write", "pool"), wanted.seconds)
        try:
            headers = [*self._headers, (b"content-type", wanted.content_type.encode())]
            with self._pool.stream(
                wanted.method, self._url + wanted.path, headers=headers, content=wanted.body, extensions={"timeout": timeout}
            ) as response:
                body = bytearray()
                for chunk in response.iter_stream():
                    body += chunk
                    if len(body) > LARGEST:
                        self.hang_up()
                        return Lost(f"the answer has more than {LARGEST} bytes")
                return answer(response.status, response.headers, bytes(body))
        except BaseException as error:
            self.hang_up()
            return lost(error)

    def hang_up(self) -> None:
        """Close the connection; the next request opens another."""
        pool, self._pool = self._pool, None
        if pool is not None:
            with suppress(Exception):
                pool.close()

    def pause(self, seconds: float) -> None:
        """Wait so long. Raises `RemoteFault` when it was interrupted."""
        if self._interrupted.wait(seconds) if seconds else self._interrupted.is_set():
            raise RemoteFault(f"{self._url}: closed while a call was under way")

    def interrupt(self) -> None:
        """Have the request under way come to nothing, and refuse any other."""
        self._interrupted.set()
        self._deadline.until = 0.0
        if (stream := self._backend.stream) is not None and (connected := stream.get_extra_info("socket")) is not None:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)


class _AsyncStream(httpcore.AsyncNetworkStream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._written = bytearray()

    @property
    def ended(self) -> bool:
        """True when the server has closed the connection."""
        return self._reader.at_eof()

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._written:
            whole, self._written = bytes(self._written), bytearray()
            self._writer.write(whole)
            await self._writer.drain()
        return await self._reader.read(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._written += buffer

    def close(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._writer.close()

    async def aclose(self) -> None:
        self.close()

    def get_extra_info(self, info: str) -> Any:
        return self._writer.get_extra_info("socket") if info == "socket" else None


class AsyncConnection:
    """The same on an event loop: for one task at a time."""

    def __init__(self, url: str, headers: list[tuple[bytes, bytes]], context: ssl.SSLContext | None) -> None:
        """Connects when the first request is sent."""
        self._url, self._context = url, context
        at = httpcore.URL(url)
        self._origin, host = at.origin, at.host.decode("ascii")
        self._address = host.strip("[]"), self._origin.port
        shown = host if at.port is None else f"{host}:{at.port}"
        self._headers = [(b"host", shown.encode("ascii")), *headers]
        self._stream: _AsyncStream | None = None
        self._connection: httpcore.AsyncHTTP11Connection | None = None

    async def send(self, wanted: Send) -> Answer | Lost:
        """Send a request and return what came of it."""
        whole = sent = False
        try:
            async with asyncio.timeout(wanted.seconds):
                if self._connection is None or self._stream is None or self._stream.ended or not self._connection.is_idle():
                    await self._connect()
                assert self._connection is not None
                headers = [*self._headers, (b"content-type", wanted.content_type.encode()), (b"content-length", str(len(wanted.body)).encode())]
                sent = True
                request = httpcore.Request(wanted.method, self._url + wanted.path, headers=headers, content=wanted.body)
                response = await self._connection.handle_async_request(request)
                body = bytearray()
                async for chunk in response.aiter_stream():
                    body += chunk
                    if len(body) > LARGEST:
                        return Lost(f"the answer has more than {LARGEST} bytes")
                await response.aclose()
            whole = True
            return answer(response.status, response.headers, bytes(body))
        except _NETWORK as error:
            return Lost(_cause(error), sent)
        finally:
            if not whole:  # cancelled, too: half an answer must not be read as the next one's
                self._drop()

    async def hang_up(self) -> None:
        """Close the connection; the next request opens another."""
        self._drop()

    async def _connect(self) -> None:
        self._drop()
        host, port = self._address
        reader, writer = await asyncio.open_connection(host, port, ssl=self._context)
        self._stream = _AsyncStream(reader, writer)
        self._connection = httpcore.AsyncHTTP11Connection(self._origin, self._stream, keepalive_expiry=None)

    def _drop(self) -> None:
        stream, self._stream, self._connection = self._stream, None, None
        if stream is not None:
            stream.close()


_NETWORK = (TimeoutError, OSError, httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, httpcore.ConnectionNotAvailable)


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def lost(error: BaseException) -> Lost:
    """Return what a failure of the network means. Raises other errors."""
    if not isinstance(error, (*_NETWORK, httpcore.UnsupportedProtocol)):
        raise error
    return Lost(_cause(error), not isinstance(error, _BEFORE_SENT))
