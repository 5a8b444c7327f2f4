"""A session's way to its server: one connection, and a second one while an answer is
late, on which the same request is sent once more.

The first is waited for all the same, and whichever settles the call counts (hedged
requests: Dean and Barroso, The Tail at Scale, 2013). The other connection is closed; what
the server does for it is its answer to a repeat (docs/rest.md).
"""

import asyncio
import threading
from contextlib import suppress

from tidemill.core.clock import awake
from tidemill.core.errors import RemoteFault
from tidemill.remote.calls import HttpAnswer, NoAnswer, Send
from tidemill.remote.connections import Address, AsyncConnection, Connection


class Hedged:
    """A blocking connection, with a second one while an answer is late. For one thread at
    a time; `interrupt` alone may be called from another."""

    def __init__(self, address: Address) -> None:
        """Connects when the first request is sent."""
        self._connection = Connection(address)
        self._wanted: Send | None = None
        self._until = 0.0
        self._repeat: _Repeat | None = None

    def send(self, wanted: Send) -> HttpAnswer | NoAnswer:
        """Send a request, again where it is late, and return what came of it. Raises
        `RemoteFault` when it was interrupted."""
        if wanted.late >= wanted.seconds:
            return self._connection.send(wanted)
        self._wanted, self._until = wanted, awake() + wanted.seconds
        try:
            reply = self._connection.send(wanted, self._send_again)
            if self._repeat is not None and not reply.settles:
                self._connection.pause(0)  # raises where it was interrupted before there was a repeat
                other = self._repeat.wait(self._until - awake())
                if other.settles:
                    self._connection.hang_up()
                    reply, self._connection, self._repeat = other, self._repeat.connection, None
            return reply
        finally:
            if self._repeat is not None:
                self._repeat.give_up()
                self._repeat = None

    def pause(self, seconds: float) -> None:
        """Wait so long. Raises `RemoteFault` when it was interrupted."""
        self._connection.pause(seconds)

    def hang_up(self) -> None:
        """Close the connection; the next request opens another."""
        self._connection.hang_up()

    def interrupt(self) -> None:
        """Have the request under way come to nothing, and refuse any other."""
        repeat = self._repeat  # looked at first: it may become the connection meanwhile
        self._connection.interrupt()
        if repeat is not None:
            repeat.connection.interrupt()

    def _send_again(self) -> None:
        wanted = self._wanted
        if wanted is not None and wanted.repeat is not None and wanted.repeat():
            self._repeat = _Repeat(self._connection, wanted._replace(seconds=self._until - awake()))


class _Repeat:
    """A request that a thread sends on a connection of its own. Where that settles the
    call it breaks the first one off."""

    def __init__(self, first: Connection, wanted: Send) -> None:
        self.connection = Connection(first.address)
        self._first, self._wanted = first, wanted
        self._reply: HttpAnswer | NoAnswer = NoAnswer("it took too long")
        self._lock = threading.Lock()
        self._abandoned = False
        self._done = threading.Event()
        threading.Thread(target=self._run, name=f"{first.address.url} repeat", daemon=True).start()

    def wait(self, seconds: float) -> HttpAnswer | NoAnswer:
        """Return what came of it within so many seconds."""
        self._done.wait(max(0.0, seconds))
        with self._lock:
            return self._reply

    def give_up(self) -> None:
        """Nobody wants it any more: the first connection is left alone from now on."""
        with self._lock:
            self._abandoned, done = True, self._done.is_set()
        self.connection.interrupt()
        if done:
            self.connection.hang_up()

    def _run(self) -> None:
        reply: HttpAnswer | NoAnswer = self._reply
        with suppress(RemoteFault):  # interrupted
            reply = self.connection.send(self._wanted)
        with self._lock:
            self._reply = reply
            self._done.set()
            if self._abandoned:
                self.connection.hang_up()
            elif reply.settles:
                self._first.break_off()


class AsyncHedged:
    """The same on an event loop: for one task at a time."""

    def __init__(self, address: Address) -> None:
        """Connects when the first request is sent."""
        self._connection = AsyncConnection(address)
        self._wanted: Send | None = None
        self._until = 0.0
        self._repeat: tuple[AsyncConnection, asyncio.Task[HttpAnswer | NoAnswer]] | None = None

    async def send(self, wanted: Send) -> HttpAnswer | NoAnswer:
        """Send a request, again where it is late, and return what came of it."""
        if wanted.late >= wanted.seconds:
            return await self._connection.send(wanted)
        self._wanted, self._until = wanted, asyncio.get_running_loop().time() + wanted.seconds
        try:
            reply = await self._connection.send(wanted, self._send_again)
            if self._repeat is not None and not reply.settles:
                connection, task = self._repeat
                other = await task  # ends at the same deadline
                if other.settles:
                    self._connection.drop()
                    reply, self._connection, self._repeat = other, connection, None
            return reply
        finally:
            if self._repeat is not None:
                (connection, task), self._repeat = self._repeat, None
                if not task.cancel():
                    connection.drop()

    async def hang_up(self) -> None:
        """Close the connection; the next request opens another."""
        self._connection.drop()

    def _send_again(self) -> None:
        wanted = self._wanted
        if wanted is not None and wanted.repeat is not None and wanted.repeat():
            loop = asyncio.get_running_loop()
            connection = AsyncConnection(self._connection.address)
            task = loop.create_task(connection.send(wanted._replace(seconds=self._until - loop.time())))
            self._repeat = connection, task
            task.add_done_callback(self._look_at)

    def _look_at(self, task: asyncio.Task[HttpAnswer | NoAnswer]) -> None:
        """Break the first request off where the other has settled the call."""
        if (
            not task.cancelled()
            and task.exception() is None
            and task.result().settles
            and self._repeat is not None
            and self._repeat[1] is task
        ):
            self._connection.break_off()
