"""The wire between two hosts beside bare pyzmq with CURVE, for `benchmarks/cluster.py`.

Two hosts are two namespaces joined by a veth pair; without root, and with `--loopback`,
they are processes on loopback, and the output says so. Each has a process that pumps; two
more are the workers that hold the ends of the channel. Bare is two processes, PUSH to
PULL. Both by turns, medians over the rounds. Delay is one way, of a lone slot of 2 kB,
100 times a second.
"""

import ctypes
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time

import numpy as np
import zmq
from networks import Cable

from tidemill.core.memory import MemfdSegment, keep_freed
from tidemill.core.schema import Field
from tidemill.hosts.pumps import IncomingChannel, OutgoingChannel
from tidemill.hosts.wire import Wire
from tidemill.transports.shared import EventBell
from tidemill.transports.slots import SlotConsumer, SlotProducer

SIZES = {"1.8 MB": (64 * 4 * 84 * 84, 4), "2 kB": (2048, 64)}  # bytes of a slot, slots of the channel
HEAR_S = 60.0  # seconds that a process has to say something
NEW_NETWORK = 0x40000000  # CLONE_NEWNET


# What the processes do. Each has what it is to know as a line on standard input.


def say(**facts):
    print(json.dumps(facts), flush=True)


def hear():
    return json.loads(sys.stdin.readline())


def enter(space):
    if space:
        with open(space) as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"network namespace {space} cannot be entered")


def host(space, address, sends, segment, bell, worker):
    enter(space)
    wire = Wire("a" if sends else "b", EventBell(bell))
    say(key=wire.keys.public.decode())
    order = hear()
    key = order["key"].encode()
    if sends:
        peer, ports = wire.listen("b", key, address)
        peer.send(OutgoingChannel(0, 1, SlotConsumer(MemfdSegment(segment), EventBell(worker))))
        say(ports=ports)
    else:
        peer = wire.call("a", key, order["address"], tuple(order["ports"]))
        peer.receive(IncomingChannel(0, 1, SlotProducer(MemfdSegment(segment), EventBell(worker))))
    while True:
        wire.turn(1.0)


def send_slots(segment, bell, pump, nbytes, slots, pause):
    channel, own = SlotProducer(MemfdSegment(segment), EventBell(pump)), EventBell(bell)
    channel.offer({"time": Field((), "int64"), "data": Field((nbytes - 64,), "uint8")}, (), slots)
    say(ready=True)
    while True:
        while (slot := channel.reserve()) is None:
            own.wait(1.0)
        slot["time"][...] = time.monotonic_ns()
        channel.commit()
        if pause:
            time.sleep(pause)


def measure(take, seconds):
    """Return messages per second, and the median of their delays in µs. `take` waits for
    the next one and returns when it was sent."""
    take()
    start, delays = time.monotonic_ns(), []
    while (now := time.monotonic_ns()) - start < seconds * 1e9:
        delays.append(-take() + time.monotonic_ns())
    say(rate=len(delays) / (now - start) * 1e9, delay=statistics.median(delays) / 1e3)


def take_slots(segment, bell, pump, seconds):
    channel, own = SlotConsumer(MemfdSegment(segment), EventBell(pump)), EventBell(bell)
    while not channel.attach():
        own.wait(0.1)

    def take():
        while (slot := channel.take()) is None:
            own.wait(1.0)
        sent = int(slot["time"])
        channel.release()
        return sent

    measure(take, seconds)


def send_bare(space, address, nbytes, slots, pause):
    enter(space)
    keep_freed()
    socket = zmq.Context().socket(zmq.PUSH)
    socket.curve_publickey, socket.curve_secretkey = public, _ = zmq.curve_keypair()
    socket.curve_server, socket.sndhwm, socket.linger = True, slots, 0
    say(port=socket.bind_to_random_port(f"tcp://{address}"), key=public.decode())
    buffer = np.zeros(nbytes, "uint8")
    while True:
        buffer[:8] = np.frombuffer(time.monotonic_ns().to_bytes(8, "little"), "uint8")
        socket.send(buffer, copy=False)
        if pause:
            time.sleep(pause)


def take_bare(space, address, port, key, slots, seconds):
    enter(space)
    keep_freed()
    socket = zmq.Context().socket(zmq.PULL)
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey, socket.rcvhwm = key.encode(), slots
    socket.connect(f"tcp://{address}:{port}")
    measure(lambda: int.from_bytes(socket.recv(copy=False).buffer[:8], "little"), seconds)


ROLES = {role.__name__: role for role in (host, send_slots, take_slots, send_bare, take_bare)}


class Process:
    """One of them. `alive`: all that are to live."""

    alive: "list[Process]" = []  # noqa: RUF012

    def __init__(self, role, fds=(), **facts):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "role", role.__name__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
        )
        self.alive.append(self)
        self.tell(**facts)

    def tell(self, **facts):
        print(json.dumps(facts), file=self.process.stdin, flush=True)

    def hear(self):
        deadline = time.monotonic() + HEAR_S
        while not select.select([self.process.stdout], [], [], 0.2)[0]:  # it says a line at a time
            if dead := [each.process.args[3] for each in self.alive if each.process.poll() is not None]:
                raise SystemExit(f"ended: {', '.join(dead)}; what its error was stands above")
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.process.args[3]} said nothing for {HEAR_S:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"ended: {self.process.args[3]}; what its error was stands above")
        return json.loads(line)

    def end(self):
        self.alive.remove(self)
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def over_wire(ends, nbytes, slots, seconds, pause=0.0):
    (a, at_a), (b, at_b) = ends
    near, far = os.memfd_create("near"), os.memfd_create("far")
    bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(4)]  # of a, its worker, b and its worker
    started = []

    def start(role, fds, **facts):
        started.append(Process(role, fds, **facts))
        return started[-1]

    try:
        first = start(
            host,
            (near, *bells[:2]),
            space=a,
            address=at_a,
            sends=True,
            segment=near,
            bell=bells[0],
            worker=bells[1],
        )
        second = start(
            host,
            (far, *bells[2:]),
            space=b,
            address=at_b,
            sends=False,
            segment=far,
            bell=bells[2],
            worker=bells[3],
        )
        key = first.hear()["key"]
        first.tell(key=second.hear()["key"])
        second.tell(key=key, address=at_a, ports=first.hear()["ports"])
        start(
            send_slots,
            (near, *bells[:2]),
            segment=near,
            bell=bells[1],
            pump=bells[0],
            nbytes=nbytes,
            slots=slots,
            pause=pause,
        ).hear()
        return start(
            take_slots, (far, *bells[2:]), segment=far, bell=bells[3], pump=bells[2], seconds=seconds
        ).hear()
    finally:
        for process in started:
            process.end()
        for descriptor in (near, far, *bells):
            os.close(descriptor)


def over_bare(ends, nbytes, slots, seconds, pause=0.0):
    (a, at_a), (b, _) = ends
    sender = Process(send_bare, space=a, address=at_a, nbytes=nbytes, slots=slots, pause=pause)
    try:
        taker = Process(take_bare, space=b, address=at_a, slots=slots, seconds=seconds, **sender.hear())
        try:
            return taker.hear()
        finally:
            taker.end()
    finally:
        sender.end()


def a_round(ends, seconds):
    """Measure both once, and return what was found, by what it is."""
    found = {}
    for size, (nbytes, slots) in SIZES.items():
        bare, ours = (way(ends, nbytes, slots, seconds)["rate"] for way in (over_bare, over_wire))
        found |= {f"bare slots of {size} a second": bare, f"slots of {size} a second": ours}
        found[f"of bare, slots of {size}"] = ours / bare
    bare, ours = (way(ends, 2048, 64, seconds, pause=0.01)["delay"] for way in (over_bare, over_wire))
    return found | {"bare delay, µs": bare, "delay, µs": ours, "added delay, µs": ours - bare}


def rounds(count, seconds, loopback=False):
    """Yield what so many rounds found."""
    if loopback or os.geteuid() != 0:
        print("two processes on loopback", flush=True)
        for _ in range(count):
            yield a_round([("", "127.0.0.1")] * 2, seconds)
        return
    print("two network namespaces", flush=True)
    with Cable() as cable:
        for _ in range(count):
            yield a_round(list(zip(cable.spaces, cable.addresses, strict=True)), seconds)


def wire(count, seconds, loopback):
    """Print the medians of so many rounds, and from where to where they went."""
    found = list(rounds(count, seconds, loopback))
    for name in found[0]:
        values = sorted(each[name] for each in found)
        print(f"{name}: {statistics.median(values):,.2f} ({values[0]:,.2f} to {values[-1]:,.2f})")


if __name__ == "__main__" and sys.argv[1:2] == ["role"]:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with who has started it
    if os.getppid() == int(sys.argv[3]):
        ROLES[sys.argv[2]](**hear())
