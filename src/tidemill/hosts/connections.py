"""Encrypted connections between two hosts, over ZeroMQ.

Both ends prove who they are (CURVE): who calls knows the key of whom it calls, and who
listens lets in the one key that is on its list for this connection. A connection has a
socket of its own at each end, so that closing it ends that connection and no other.
"""

import errno
import select
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from tidemill.core.errors import ConfigError, TooManyFiles
from tidemill.core.resource_shortage import why
from tidemill.hosts.messages import FRAME_LIMIT

TOO_MANY = errno.EMFILE, errno.ENFILE
"""Errors of a system that has no more open files to give."""
_NAME = b"host"  # the caller's, in the listening socket
_ALL = ("", "*", "0.0.0.0", "::")
_QUEUED = 64  # messages that wait to be read, at most: beyond them the sender waits
_MOST_REFUSED = 100  # texts that are kept of those who were not let in: strangers must fill no memory
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Keys(NamedTuple):
    """The key pair of a host and life, in Z85. The secret one never leaves its
    process."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> "Keys":
        """Return a new pair."""
        return cls(*zmq.curve_keypair())


class Door:
    """The door of a host: it is asked about each key that wants to be let in (ZeroMQ's
    ZAP), and knows of each connection the one that is.

    refused: what was told of those that were not, and how often
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")
        self.admitted: dict[bytes, bytes] = {}
        self.refused: dict[str, int] = {}

    def answer(self) -> None:
        """Answer who asks now."""
        with suppress(zmq.Again):
            while True:
                version, request, domain, address, _, mechanism, *credentials = self.socket.recv_multipart(
                    zmq.NOBLOCK
                )
                key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
                if fits := bool(key) and self.admitted.get(domain) == key:
                    status = [b"200", b"OK", domain, b""]
                else:
                    status = [b"400", b"this key is not on the list", b"", b""]
                self.socket.send_multipart([version, request, *status])
                if not fits:
                    who, where = domain.decode(errors="replace"), address.decode(errors="replace")
                    text = f"{where} wants to be {who}, and its key {key.decode()} is not on the list"
                    if text not in self.refused and len(self.refused) >= _MOST_REFUSED:
                        text = "others, too, whose keys are not on the list"
                    self.refused[text] = self.refused.get(text, 0) + 1


def _set(socket: "zmq.Socket[bytes]", options: Mapping[int, int | bytes]) -> None:
    for option, value in options.items():
        socket.set(option, value)


class HostConnection:
    """A connection is one end of an encrypted line to one other host.

    socket: its socket, which is another one after each call
    descriptor: what wakes whoever is to read, -1 while it is not open
    name: what errors call it, also the name under which it is let in
    open: whether it waits to be called, or calls
    """

    socket: "zmq.Socket[bytes]"

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        keys: Keys,
        name: str,
        thread: int,
        poll: select.epoll,
    ) -> None:
        """`thread`: which of the context's threads carries it. `poll`: where its
        descriptor is registered while it is open."""
        self._context, self._keys, self.name, self._thread = context, keys, name, thread
        self._poll, self.descriptor, self._unread = poll, -1, False
        self._prefix: list[bytes] = []
        self._monitor: zmq.Socket[bytes] | None = None
        self._admitted: tuple[Door, bytes] | None = None
        self.open = False

    def _make(self, kind: int) -> "zmq.Socket[bytes]":
        self.socket = socket = self._context.socket(kind)
        self.open = True
        options: dict[int, int | bytes] = {
            zmq.AFFINITY: 1 << self._thread,
            zmq.CURVE_PUBLICKEY: self._keys.public,
            zmq.CURVE_SECRETKEY: self._keys.secret,
            zmq.HANDSHAKE_IVL: 2000,
            zmq.LINGER: 0,
            zmq.MAXMSGSIZE: FRAME_LIMIT,
            zmq.RCVHWM: _QUEUED,
            zmq.SNDHWM: 0,  # what is in flight is bounded by whoever sends
            zmq.IPV6: 1,
        }
        _set(socket, options)
        self.descriptor, self._unread = socket.fileno(), True
        self._poll.register(self.descriptor, select.EPOLLIN)
        return socket

    @property
    def unread(self) -> bool:
        """Whether something is to be read of which its descriptor tells nothing any more:
        ZeroMQ takes note of what has come whenever it is called, to send, say."""
        if self._unread:
            self._unread = self.open and bool(int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN)
        return self._unread

    def listen(self, address: str, door: Door, key: bytes) -> int:
        """Wait to be called at `address` by whoever has this public key, and by nobody
        else. Return the port. Raises `ConfigError`."""
        if address in _ALL:
            raise ConfigError(
                f'address "{address}" is all of this host\'s; give the one by which the others reach it'
            )
        options: dict[int, int | bytes] = {
            zmq.CURVE_SERVER: 1,
            zmq.ZAP_DOMAIN: self.name.encode(),
            zmq.ROUTER_MANDATORY: 1,  # sending to nobody fails
            zmq.ROUTER_HANDOVER: 1,  # a new call takes the place of the one before
        }
        host = f"[{address}]" if ":" in address else address
        try:
            socket = self._make(zmq.ROUTER)
            self._prefix = [_NAME]
            door.admitted[self.name.encode()] = key
            self._admitted = door, key
            _set(socket, options)
            socket.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self.close()
            if error.errno in TOO_MANY:
                cause = why(OSError(error.errno, error.strerror))
                raise TooManyFiles(f"no connection can be waited for: {cause}") from None
            raise ConfigError(
                f'no connection can be waited for at address "{address}": {error}; give the address of this '
                "host by which the others reach it"
            ) from None
        return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def call(self, address: str, port: int, key: bytes) -> None:
        """Call whoever waits there and has this public key: once, and anew if there is a
        call already."""
        self.close()
        socket = self._make(zmq.DEALER)
        options: dict[int, int | bytes] = {
            zmq.CURVE_SERVERKEY: key,
            zmq.ROUTING_ID: _NAME,
            zmq.RECONNECT_IVL: -1,  # who holds this calls anew
        }
        _set(socket, options)
        self._monitor = socket.get_monitor_socket(_REFUSED | _LOST)
        host = f"[{address}]" if ":" in address else address
        socket.connect(f"tcp://{host}:{port}")

    def lost(self) -> str:
        """Return why a call ended, "" as long as it has not."""
        why = ""
        with suppress(zmq.Again):
            while self._monitor is not None:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
                why = "it does not let this host's key in" if event == _REFUSED else why or "it hung up"
        return why

    def send(self, *frames: bytes | memoryview) -> bool:
        """Send a message. False where nobody is connected, who will say hello again."""
        if not self.open:
            return False
        self._unread = True
        try:  # copied: to have ZeroMQ tell when it needs a frame no more takes longer
            self.socket.send_multipart([*self._prefix, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        return True

    def receive(self, hear: Callable[[Sequence[zmq.Frame]], None], most: int) -> None:
        """Hand the frames of what has come to `hear`, a message at a time and not more
        than `most` of them."""
        self._unread = True
        for _ in range(most):
            if not self.unread:  # asked before: what ZeroMQ raises takes as long as a message
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:  # who had sent it has hung up
                return
            hear(frames[len(self._prefix) :])
            self._unread = True

    def close(self) -> None:
        """Hang up, and be called no more."""
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor = None
        if self._admitted is not None:
            (door, key), self._admitted = self._admitted, None
            if door.admitted.get(self.name.encode()) == key:  # no other host has the name by now
                del door.admitted[self.name.encode()]
        if self.open:
            self._poll.unregister(self.descriptor)  # ZeroMQ closes it, but later
            self.socket.close(0)
            self.open, self.descriptor = False, -1
