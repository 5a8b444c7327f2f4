"""Round trips through Channel, Cell and Bell on shared memory, beside bare slot indices
over the same memory.

    python benchmarks/transports.py

Two processes. The request carries the payload (64 bytes, or 64 observations of 4x84x84
uint8 = 1.8 MB) in place: the producer touches one byte of it and commits; the answer is a
64-byte slot. "Bare" passes the slot number alone, through one word each way, with the
same way of waiting.
"""

import os
import statistics
import subprocess
import sys
import time

import numpy as np

from tidemill.core.memory import MemfdSegment
from tidemill.core.schema import Field
from tidemill.transports.shared import EventBell
from tidemill.transports.slots import SlotConsumer, SlotProducer, SlotReader, SlotWriter

PAYLOADS = {"64 B": Field((64,), "uint8"), "1.8 MB": Field((64, 4, 84, 84), "uint8")}
ANSWER = {"x": Field((64,), "uint8")}
SLOTS = 4


def wait_for(check, bell, spin):
    """Return `check()` once it is not None."""
    while True:
        found = check()
        if found is not None:
            return found
        if not spin:
            bell.wait(1.0)


def channel_client(fds, payload, spin, rounds):
    request = SlotProducer(MemfdSegment(fds[0]), EventBell(fds[3]))
    request.offer({"x": PAYLOADS[payload]}, (), SLOTS)
    answer = SlotConsumer(MemfdSegment(fds[1]), EventBell(fds[3]))
    bell = EventBell(fds[2])
    while not answer.attach():
        bell.wait(0.1)
    times = []
    reserve = request.reserve
    commit = request.commit
    take = answer.take
    release = answer.release
    clock = time.perf_counter_ns
    wait = bell.wait
    for _ in range(rounds):
        start = clock()
        reserve()["x"].flat[0] = 1
        commit()
        while take() is None:
            if not spin:
                wait(1.0)
        release()
        times.append(clock() - start)
    return times


def channel_server(fds, payload, spin, rounds):
    answer = SlotProducer(MemfdSegment(fds[1]), EventBell(fds[2]))
    answer.offer(ANSWER, (), SLOTS)
    request = SlotConsumer(MemfdSegment(fds[0]), EventBell(fds[2]))
    bell = EventBell(fds[3])
    while not request.attach():
        bell.wait(0.1)
    reserve = answer.reserve
    commit = answer.commit
    take = request.take
    release = request.release
    wait = bell.wait
    for _ in range(rounds):
        while take() is None:
            if not spin:
                wait(1.0)
        reserve()
        commit()
        release()


def bare_words(fds):
    os.ftruncate(fds[0], 1 << 22)
    return MemfdSegment(fds[0]).attach().cast("Q")


def bare_client(fds, payload, spin, rounds):
    words, times, clock = bare_words(fds), [], time.perf_counter_ns
    data = np.frombuffer(words, np.uint8, offset=4096)
    mine, theirs = EventBell(fds[2]), EventBell(fds[3])
    wait, ring = mine.wait, theirs.ring
    for i in range(1, rounds + 1):
        start = clock()
        data.flat[0] = 1
        words[8] = i
        if not spin:
            ring()
        while words[16] != i:
            if not spin:
                wait(1.0)
        times.append(clock() - start)
    return times


def bare_server(fds, payload, spin, rounds):
    words = bare_words(fds)
    mine, theirs = EventBell(fds[3]), EventBell(fds[2])
    wait, ring = mine.wait, theirs.ring
    for i in range(1, rounds + 1):
        while words[8] != i:
            if not spin:
                wait(1.0)
        words[16] = i
        if not spin:
            ring()


def cell_client(fds, payload, spin, rounds):
    writer = SlotWriter(MemfdSegment(fds[0]), [EventBell(fds[3])])
    writer.offer({"x": PAYLOADS[payload]})
    value = {"x": np.ones(PAYLOADS[payload].shape, np.uint8)}
    EventBell(fds[2]).wait(60.0)  # the reader has attached
    times = []
    for i in range(rounds):
        start = time.perf_counter_ns()
        writer.write(value, i)
        times.append(time.perf_counter_ns() - start)
    return times


def cell_server(fds, payload, spin, rounds):
    reader, bell = SlotReader(MemfdSegment(fds[0])), EventBell(fds[3])
    while not reader.attach():
        bell.wait(0.1)
    value = {"x": np.empty(PAYLOADS[payload].shape, np.uint8)}
    EventBell(fds[2]).ring()
    newest, times = -1, []
    while newest < rounds - 1:
        if reader.newest() > newest:
            start = time.perf_counter_ns()
            newest = reader.read(value)
            times.append(time.perf_counter_ns() - start)
    print(
        f"cell read  {payload}: {statistics.median(times) / 1000:.2f} us ({len(times)} of {rounds} values "
        "seen, the rest overtaken)",
        flush=True,
    )


def measure(kind, payload, spin, rounds):
    """Return the median round trip in microseconds."""
    fds = [os.memfd_create("a"), os.memfd_create("b"), os.eventfd(0), os.eventfd(0)]
    command = [sys.executable, __file__, "serve", kind, payload, str(int(spin)), str(rounds), *map(str, fds)]
    with subprocess.Popen(command, pass_fds=fds) as server:
        times = globals()[f"{kind}_client"](fds, payload, spin, rounds)
        if server.wait(60) != 0:
            raise SystemExit("the server process failed")
    for fd in fds:
        os.close(fd)
    return statistics.median(times[len(times) // 10 :]) / 1000


def main():
    if sys.argv[1:2] == ["serve"]:
        kind, payload, spin, rounds, *fds = sys.argv[2:]
        globals()[f"{kind}_server"](list(map(int, fds)), payload, spin == "1", int(rounds))
        return
    print("round trip, us (median of 5 runs; the client touches the payload in place)")
    print(f"{'payload':8} {'waiting':9} {'bare index':>11} {'channel':>9} {'above':>7}")
    for payload in PAYLOADS:
        for spin in (True, False):
            rounds = 50_000 if spin else 10_000
            pairs = [
                (measure("bare", payload, spin, rounds), measure("channel", payload, spin, rounds))
                for _ in range(5)
            ]
            bare, channel = (statistics.median(p[i] for p in pairs) for i in (0, 1))
            above = statistics.median(c - b for b, c in pairs)
            print(
                f"{payload:8} {'spinning' if spin else 'sleeping':9} {bare:11.2f} {channel:9.2f} {above:7.2f}"
            )
    for payload in PAYLOADS:
        print(
            f"cell write {payload}: "
            f"{measure('cell', payload, True, 20_000 if payload == '64 B' else 2000):.2f} us"
        )


if __name__ == "__main__":
    main()
