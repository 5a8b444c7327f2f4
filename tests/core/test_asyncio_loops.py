"""Loops of threads: they run while their thread waits at a bell, and what came while they
stood still came in time."""

import asyncio
import os
import socket
import threading

import pytest

from tidemill.core import asyncio_loops
from tidemill.core.asyncio_loops import Loop
from tidemill.core.thread_loop import own
from tidemill.transports.local import LocalBell
from tidemill.transports.shared import EventBell


@pytest.fixture
def loop():
    taken = Loop.take()
    yield taken
    taken.give_back()
    assert own.loop is None


@pytest.fixture(params=["local", "event"])
def bell(request):
    if request.param == "local":
        yield LocalBell()
        return
    descriptor = os.eventfd(0)
    yield EventBell(descriptor)
    os.close(descriptor)


def test_whoever_waits_at_a_bell_runs_the_loop_until_it_is_rung(loop, bell):
    done = asyncio.Event()
    threads = []

    async def work():
        await asyncio.sleep(0)
        threads.append(threading.get_ident())
        done.set()
        bell.ring()

    loop.loop.create_task(work())
    assert bell.wait(60) and done.is_set() and threads == [threading.get_ident()]
    assert not bell.wait(0.01)  # that ring was heard


def test_another_thread_s_ring_ends_the_wait_as_does_one_before_it(loop, bell):
    bell.ring()
    assert bell.wait(60)
    assert not bell.wait(0.01)
    ringer = threading.Timer(0.02, bell.ring)
    ringer.start()
    assert bell.wait(60)
    ringer.join()
    assert not bell.wait(0.01)


def test_a_bell_s_further_descriptors_end_the_wait(loop):
    descriptor = os.eventfd(0)
    bell, (ours, theirs) = EventBell(descriptor), socket.socketpair()
    bell.also(ours.fileno())
    assert not bell.wait(0.01)
    theirs.send(b"x")
    assert bell.wait(60) and bell.wait(60)  # until it is read
    ours.recv(1)
    assert not bell.wait(0.01)
    loop.loop.remove_reader(ours.fileno())
    for each in (ours, theirs):
        each.close()
    os.close(descriptor)


def test_one_turn_deals_with_all_that_has_come_and_never_waits(loop):
    pairs, got = [socket.socketpair() for _ in range(5)], []

    async def read(ours):
        got.append(await loop.loop.sock_recv(ours, 1))

    for ours, _ in pairs:
        ours.setblocking(False)
        loop.loop.create_task(read(ours))
    loop.run_ready()
    assert got == []
    for _, theirs in pairs[1:]:
        theirs.send(b"x")
    loop.run_ready()
    assert got == [b"x"] * 4
    for pair in pairs:
        for each in pair:
            loop.loop.remove_reader(each.fileno())
            each.close()


def test_a_deadline_leaves_out_the_time_in_which_nobody_ran_the_loop(loop, monkeypatch):
    now, (ours, theirs), got = [100.0], socket.socketpair(), []
    monkeypatch.setattr(asyncio_loops, "monotonic", lambda: now[0])
    loop._left = now[0]
    ours.setblocking(False)

    async def read():
        try:
            async with asyncio.timeout(10):
                got.append(await loop.loop.sock_recv(ours, 1))
        except TimeoutError:
            got.append("too late")

    for away, sent, told in ((3600.0, b"x", [b"x"]), (0.5, b"", [b"x"])):
        task = loop.loop.create_task(read())
        loop.run_ready()
        now[0] += away
        if sent:
            theirs.send(sent)
        loop.run_ready()
        assert got == told
    for _ in range(20):  # short ones count
        now[0] += 0.9
        loop.run_ready()
    assert got == [b"x", "too late"] and task.done()
    for each in (ours, theirs):
        each.close()


def test_each_call_that_blocks_has_a_thread_that_holds_up_no_end(loop):
    all_there = threading.Barrier(50)

    def call():
        all_there.wait(120)
        return threading.current_thread().daemon

    async def calls():
        return await asyncio.gather(*(asyncio.to_thread(call) for _ in range(50)))

    assert loop.do(calls(), 120) == [True] * 50


def test_it_runs_within_a_notebook_s_loop(bell):
    async def cell():
        loop, ran = Loop.take(), []

        async def work():
            await asyncio.sleep(0)
            ran.append(asyncio.get_running_loop() is loop.loop)
            bell.ring()

        loop.loop.create_task(work())
        assert bell.wait(60)
        loop.give_back()
        assert ran == [True]
        await asyncio.sleep(0)  # in the notebook's again

    asyncio.run(cell())
    assert own.loop is None


def test_another_thread_has_work_done_and_gives_the_loop_back(bell):
    loop, did = Loop.take(), []

    async def work():
        return threading.get_ident()

    def other():
        did.append(loop.do(work(), 120))
        loop.give_back()
        bell.ring()

    thread = threading.Thread(target=other)
    thread.start()
    while thread.is_alive() or own.loop is not None:
        bell.wait(0.05)
    assert did == [threading.get_ident()]
    with pytest.raises(RuntimeError, match="closed"):
        loop.do(work(), 120)
    loop.wake(), loop.give_back()  # from whoever did not know


def test_a_wait_after_a_long_stand_takes_no_longer_than_it_may(loop, monkeypatch):
    monkeypatch.setattr(asyncio_loops, "LONG", -1.0)  # however short it stood
    monkeypatch.setattr(loop, "_left", loop._left - 1000.0)
    alarms = []
    call_later = loop.loop.call_later
    monkeypatch.setattr(
        loop.loop, "call_later", lambda seconds, call: alarms.append(call_later(seconds, call)) or alarms[-1]
    )
    assert not loop.run(0.01)
    assert alarms[0].when() <= loop.loop.time()


def test_what_is_no_exception_in_a_callback_reaches_whoever_runs_the_loop(loop):
    class Broken(BaseException):
        pass

    def broken():
        raise Broken

    loop.loop.call_soon(broken)
    with pytest.raises(Broken):
        loop.run(120)
    assert not loop.run(0.0)  # and once


def test_a_turn_that_was_ended_early_does_not_shorten_the_next_ones(loop):
    rounds = []

    async def count():
        while True:
            rounds.append(1)
            await asyncio.sleep(0)

    loop.run_ready()
    loop.wake()  # ends the first round of the next turn
    loop.run_ready()
    task = loop.loop.create_task(count())
    loop.run_ready()
    assert len(rounds) == 2
    task.cancel()


def test_an_end_waits_for_no_generator_that_does_not_end(monkeypatch):
    monkeypatch.setattr(asyncio_loops, "LONG", 0.0)  # it has begun to end all the same
    taken, began = Loop.take(), []

    async def endless():
        try:
            yield 1
        finally:
            began.append(1)
            await asyncio.sleep(3600)

    generator = endless()

    async def first():
        return await anext(generator)

    assert taken.do(first(), 120) == 1
    taken.give_back()
    assert began and own.loop is None and taken.loop.is_closed()
