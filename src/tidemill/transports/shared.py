"""The transport between processes of one Linux machine: memfd segments, eventfd bells, a
socket pair for control. All by inherited descriptor.

The launcher makes an empty memfd per edge, before anybody knows a schema. Who owns the
schema (a producer, a writer) sizes the memory when it `offer`s; the other end `attach`es
and checks what it finds described there.
"""

import os
import select
import socket
from array import array
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from threading import get_ident

from tidemill.api.edges import Edge, ends_by_worker
from tidemill.api.transport import Bell, Handle, Link, Transport
from tidemill.core.bell_batching import ring
from tidemill.core.errors import SchemaError
from tidemill.core.memory import MemfdSegment
from tidemill.core.thread_loop import own
from tidemill.transports.ordered_words import check_order
from tidemill.transports.slots import SlotEndpoints

MESSAGE_LIMIT = 64 << 20  # bytes of one control message
_PACKET = 1 << 15  # bytes of it that go into one packet: several fit a socket's buffer
MOST_DESCRIPTORS = 250  # that go with a message, of the 253 that Linux allows
_ANCILLARY = socket.CMSG_SPACE(4 * MOST_DESCRIPTORS)
_LAST, _MORE = b"\0", b"\1"  # a packet's first byte: whether more of the message follows


class EventBell(Bell):
    """A bell on an eventfd. The owner may also be woken by further descriptors (its
    control link). Rung by the owner's own thread, on behalf of those that take turns in
    it, it makes the next wait return without a call of the system."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._owner = 0  # the thread that has waited, while it does not
        self._rung = False  # by it
        self._poll = select.poll()
        self._also = [descriptor]
        self._poll.register(descriptor, select.POLLIN)

    def also(self, descriptor: int) -> None:
        """Wake, too, when `descriptor` becomes readable or hangs up."""
        self._also.append(descriptor)
        self._poll.register(descriptor, select.POLLIN)

    def ring(self) -> None:
        if self._owner == get_ident():
            self._rung = True
        else:
            ring(self._ring)

    def _ring(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def wait(self, seconds: float) -> bool:
        self._owner = 0  # before a look: what a signal or a task rings from now on ends the wait
        came, self._rung = self._rung, False
        if came:
            seconds = 0.0
        if (loop := own.loop) is not None:
            loop.watch(self._also)
            came, seconds = loop.run(seconds) or came, 0.0
        came = self.hear(seconds) or came
        self._owner = get_ident()
        return came

    def hear(self, seconds: float) -> bool:
        """Wait likewise, but let a loop of this thread stand meanwhile."""
        events = self._poll.poll(seconds * 1000)
        for descriptor, _ in events:
            if descriptor == self.descriptor:
                os.eventfd_read(descriptor)  # readable, and only the owner reads: never blocks
        return bool(events)


class SocketLink(Link):
    """One end of a control link on a SEQPACKET socket: a message is one packet or, where
    it is long, several."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.descriptors = deque[int]()
        """Those that came with messages, in order."""
        self._unsent = deque[tuple[bytes, Sequence[int]]]()  # packets, and the descriptors that go with them
        self._begun: list[bytes] = []  # what has come of a message whose last packet has not
        self._begun_bytes = 0
        self._gone = self._reset = False

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> bool:
        """See `Link.send`. The other end gets copies of `descriptors`,
        `MOST_DESCRIPTORS` of them at most."""
        if len(message) > MESSAGE_LIMIT:
            raise SchemaError(
                f"a control message of {len(message)} bytes is longer than {MESSAGE_LIMIT}; are an "
                "environment's spaces that large?"
            )
        if self._gone:  # nobody reads it, nor takes the descriptors
            return False
        last = max(len(message) - 1, 0) // _PACKET * _PACKET
        copies: list[int] = []  # until it is sent
        try:
            for descriptor in descriptors:
                copies.append(os.dup(descriptor))
        except OSError:  # too many open files: nothing of it is sent
            _close(copies)
            raise
        for start in range(0, last, _PACKET):
            self._unsent.append((_MORE + message[start : start + _PACKET], ()))
        self._unsent.append((_LAST + message[last:], copies))
        return self._flush()

    def _flush(self) -> bool:
        while self._unsent and not self._gone:
            try:
                packet, descriptors = self._unsent[0]
                if descriptors:
                    socket.send_fds(self.connection, [packet], descriptors)
                else:
                    self.connection.send(packet)
            except BlockingIOError:
                break  # the reader is behind; what is left goes out with the next send or receive
            except (BrokenPipeError, ConnectionResetError):
                self._gone = True
                break
            self._unsent.popleft()
            _close(descriptors)
        return not self._gone

    def finish(self) -> None:
        """Send what is left, however long the other end takes to read it: it may be
        stopped. Hangs up, for that end alone, when it is gone."""
        writable = select.poll()
        writable.register(self.connection, select.POLLOUT)
        while self._flush() and self._unsent:
            writable.poll(100)
        with suppress(OSError):  # the other end was quicker
            self.connection.shutdown(socket.SHUT_WR)

    def receive(self) -> list[bytes] | None:
        if self._unsent:
            self._flush()
        messages: list[bytes] = []
        while True:
            try:
                packet, ancillary, _, _ = self.connection.recvmsg(1 + _PACKET, _ANCILLARY)
            except BlockingIOError:
                return messages
            except ConnectionResetError:
                # it went before it had read all that it was sent; its own last words come
                # after this error
                if not self._reset:
                    self._reset = True
                    continue
                packet, ancillary = b"", []
            for _, _, data in ancillary:
                for descriptor in array("i", data):
                    os.set_inheritable(descriptor, False)
                    self.descriptors.append(descriptor)
            if not packet:
                self._gone = True
                return messages or None
            self._begun.append(packet[1:])
            self._begun_bytes += len(packet) - 1
            if self._begun_bytes > MESSAGE_LIMIT:
                raise SchemaError(f"a control message is longer than {MESSAGE_LIMIT} bytes")
            if packet[:1] == _LAST:
                messages.append(b"".join(self._begun))
                self._begun, self._begun_bytes = [], 0

    def close(self) -> None:
        """Hang up."""
        self._gone = True
        self.connection.close()
        while self._unsent:
            _close(self._unsent.popleft()[1])


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _memory(edge: Edge) -> int:
    return os.memfd_create(f"tidemill {edge.name}"[:200])


class SharedTransport(Transport):
    """Channels and cells in memory that processes share: a memfd for each edge."""

    renews = True

    def __init__(self, edges: Sequence[Edge], bells: Mapping[str, int]) -> None:
        check_order()
        self._edges, self._ends, self._bells = edges, ends_by_worker(edges), bells
        self._segments: dict[str, int] = {}
        try:
            for edge in edges:
                self._segments[edge.name] = _memory(edge)
        except OSError:  # too many open files, say
            self.close()
            raise

    def handles(self, worker: str) -> dict[str, Handle]:
        return {
            name: Handle((self._segments[name], *(self._bells[other] for other in others)))
            for name, others in self._ends[worker].items()
        }

    def renew(self, workers: Collection[str], edges: Collection[str] = ()) -> dict[str, dict[str, Handle]]:
        told: dict[str, dict[str, Handle]] = {}
        for edge in self._edges:
            if not {*workers}.isdisjoint(edge.begins_with) or edge.name in edges:
                segment = _memory(edge)
                os.close(self._segments[edge.name])
                self._segments[edge.name] = segment
                for other in {edge.source, *edge.targets}.difference(workers):
                    told.setdefault(other, {})[edge.name] = Handle((segment,))
        return told

    @staticmethod
    def endpoints(bell: Bell, link: Link, handles: Mapping[str, Handle]) -> SlotEndpoints:
        ends = {}

        def bell_of(descriptor: int) -> Bell:  # those who take turns in a thread share its bell
            shared = isinstance(bell, EventBell) and bell.descriptor == descriptor
            return bell if shared else EventBell(descriptor)

        for name, handle in handles.items():
            segment, *others = handle.descriptors
            ends[name] = MemfdSegment(segment), [bell_of(descriptor) for descriptor in others]

        def come(_: Handle) -> MemfdSegment:
            assert isinstance(link, SocketLink)
            return MemfdSegment(link.descriptors.popleft())

        return SlotEndpoints(bell, link, ends, come)

    def close(self) -> None:
        while self._segments:
            os.close(self._segments.popitem()[1])
