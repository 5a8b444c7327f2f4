"""Hosts with a network each: namespaces of this machine, joined by a switch that can
delay, lose and slow what it carries, and cut hosts off. Tests and benchmarks have it.

    with Network(2) as network:
        network.set(delay=0.05, loss=0.01, rate=10e6)
        subprocess.run([*network.command(1), "ping", "-c1", network.addresses[0]])

A process of its own (`python networks.py COUNT`) makes the namespaces, which have no name
and go with it, and is the switch: each host's one interface is a TAP that it reads and
writes. It ends with its standard input, so that nothing is left, however its user ends.
Linux, and root, are needed; ``/dev/net/tun``, too.
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_TAP = 0x0002 | 0x1000  # IFF_TAP, IFF_NO_PI
_UP = 0x1 | 0x40  # IFF_UP, IFF_RUNNING
_SET_TAP, _SET_FLAGS, _SET_ADDRESS, _SET_MASK, _SET_MAC = 0x400454CA, 0x8914, 0x8916, 0x891C, 0x8924
_FRAME = 1 << 16  # bytes of a frame, at most
_BROADCAST = 1  # the bit of a MAC that is not one host's
_libc = ctypes.CDLL(None, use_errno=True)


class NotAllowed(RuntimeError):
    """No namespaces can be made here; it says why."""


def address(host: int) -> str:
    """Return the address of host number `host`, the same in every network."""
    return f"10.0.0.{host + 1}"


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


class Network:
    """A network of hosts.

    addresses: of its hosts
    spaces: their namespaces, as files
    """

    def __init__(self, hosts: int) -> None:
        """Raises `NotAllowed`."""
        self.addresses = [address(host) for host in range(hosts)]
        self._switch = subprocess.Popen(
            [sys.executable, __file__, str(hosts)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        told = self._hear()
        if "error" in told:
            self.close()
            raise NotAllowed(f"network namespaces cannot be made here: {told['error']}")
        self.spaces: list[str] = told["spaces"]

    def _hear(self) -> Any:
        assert self._switch.stdout is not None
        return json.loads(self._switch.stdout.readline() or b'{"error": "the switch has ended"}')

    def command(self, host: int) -> tuple[str, ...]:
        """Return what is put before a command that is to run on a host."""
        return ("nsenter", f"--net={self.spaces[host]}", "--")

    @contextmanager
    def on(self, host: int) -> Iterator[None]:
        """Let this thread be on a host, and whatever it starts meanwhile."""
        with open("/proc/thread-self/ns/net") as home, open(self.spaces[host]) as space:
            _check(_libc.setns(space.fileno(), _NEW_NETWORK), "setns")
            try:
                yield
            finally:
                _check(_libc.setns(home.fileno(), _NEW_NETWORK), "setns")

    def set(self, **line: Any) -> dict[str, int]:
        """Change what the switch does from now on: `delay` (s), `loss` (a share of
        frames), `rate` (bytes/s that a host can send; None: as many as it can),
        `cut` (numbers of the hosts that are cut off), `apart` (pairs of numbers, of hosts
        that do not reach each other). Return how many frames it carried and lost."""
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps(line).encode() + b"\n")
        self._switch.stdin.flush()
        counts: dict[str, int] = self._hear()
        if "error" in counts:
            raise RuntimeError(str(counts["error"]))
        return counts

    def close(self) -> None:
        """Remove it."""
        for pipe in (self._switch.stdin, self._switch.stdout):
            assert pipe is not None
            pipe.close()
        self._switch.wait()

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Cable(Network):
    """Two hosts, joined by a veth pair: quicker than a `Network`'s switch, and never
    anything but well."""

    def __init__(self) -> None:
        """Raises `NotAllowed`."""
        super().__init__(2)
        self.addresses = ["10.231.7.1", "10.231.7.2"]
        try:
            pair = ["ip", "link", "add", "veth0", "netns", self.spaces[0], "type", "veth"]
            subprocess.run([*pair, "peer", "veth0", "netns", self.spaces[1]], check=True)
            for host, own in enumerate(self.addresses):
                for words in (["addr", "add", f"{own}/24", "dev", "veth0"], ["link", "set", "veth0", "up"]):
                    subprocess.run([*self.command(host), "ip", *words], check=True)
        except BaseException:
            self.close()
            raise


# What the process does.


def _in_thread(work: Callable[[], T]) -> T:
    """Do work in a thread, of which alone the namespace is another one then."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _make_host(host: int) -> tuple[int, int]:
    """Make a namespace with an interface; return their descriptors."""
    _check(_libc.unshare(_NEW_NETWORK), "unshare")
    space = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _SET_TAP, struct.pack("16sH22x", b"eth0", _TAP))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

        def set_(what: int, name: bytes, form: str, *values: Any) -> None:
            fcntl.ioctl(control, what, struct.pack("16s" + form, name, *values).ljust(40, b"\0"))

        set_(_SET_MAC, b"eth0", "H6s", 1, bytes([2, 0, 0, 0, 0, host]))  # ARPHRD_ETHER
        for what, value in ((_SET_ADDRESS, address(host)), (_SET_MASK, "255.255.255.0")):
            set_(what, b"eth0", "HH4s", socket.AF_INET, 0, socket.inet_aton(value))
        for name in (b"lo", b"eth0"):
            set_(_SET_FLAGS, name, "H", _UP)
    return space, tap


class Switch:
    """A switch carries frames between hosts, in order for each pair of them."""

    def __init__(self, taps: Sequence[int]) -> None:
        self._taps = taps
        self.delay = self.loss = 0.0
        self.rate: float | None = None
        self.cut: Sequence[int] = ()
        self.apart: Sequence[Sequence[int]] = ()
        self.frames = self.lost = 0
        self._chance = random.Random(0)
        self._under_way: list[tuple[float, int, int, bytes]] = []  # due, number, to whom
        self._free = [0.0] * len(taps)  # when a host's line can carry the next frame
        self._due = [0.0] * len(taps)  # of the last frame from a host

    def run(self) -> None:
        """Carry until standard input ends."""
        said = b""
        while True:
            wait = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
            for ready in select.select([0, *self._taps], [], [], wait)[0]:
                if ready:
                    self._read(self._taps.index(ready))
                    continue
                part = os.read(0, 1 << 12)
                if not part:
                    return
                *lines, said = (said + part).split(b"\n")
                for line in lines:
                    for name, value in json.loads(line).items():
                        setattr(self, name, value)
                    print(json.dumps({"frames": self.frames, "lost": self.lost}), flush=True)
            self._deliver()

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, _, host, frame = heapq.heappop(self._under_way)
            try:
                os.write(self._taps[host], frame)
            except BlockingIOError:
                self.lost += 1

    def _read(self, host: int) -> None:
        for _ in range(64):  # so that one host does not keep others waiting
            try:
                frame = os.read(self._taps[host], _FRAME)
            except BlockingIOError:
                return
            known = not frame[0] & _BROADCAST and frame[5] < len(self._taps)
            for other in [frame[5]] if known else range(len(self._taps)):
                if other != host:
                    self._carry(host, other, frame)

    def _carry(self, host: int, other: int, frame: bytes) -> None:
        self.frames += 1
        cut = host in self.cut or other in self.cut or any({host, other} == {*pair} for pair in self.apart)
        if cut or self._chance.random() < self.loss:
            self.lost += 1
            return
        now = time.monotonic()
        if self.rate is not None:
            now = self._free[host] = max(self._free[host], now) + len(frame) / self.rate
        due = self._due[host] = max(now + self.delay, self._due[host])
        heapq.heappush(self._under_way, (due, self.frames, other, frame))


def main(hosts: int) -> None:
    """Be the switch of so many hosts."""
    try:
        made = [_in_thread(lambda host=host: _make_host(host)) for host in range(hosts)]  # type: ignore[misc]
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    spaces = [f"/proc/{os.getpid()}/fd/{space}" for space, _ in made]
    print(json.dumps({"spaces": spaces}), flush=True)
    Switch([tap for _, tap in made]).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
