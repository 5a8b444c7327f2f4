"""A mapping thread: each item once and in order, held up by a full queue, ended by stop
or by an error."""

import queue
import threading

import pytest
from tests.workers.world import Marked, World, check_samples

from tidemill.workers.actor import Actors, AgentSpec
from tidemill.workers.mapping import MappingThread

TIMEOUT = 120.0  # no test waits that long unless it fails


def test_items_are_mapped_in_order() -> None:
    upstream: queue.Queue[int] = queue.Queue()
    downstream: queue.Queue[int] = queue.Queue()
    thread = MappingThread(lambda n: n * n, upstream, downstream)
    assert not thread.is_alive()
    thread.start()
    assert thread.is_alive()
    for n in range(100):
        upstream.put(n)
    assert [downstream.get(timeout=TIMEOUT) for _ in range(100)] == [n * n for n in range(100)]
    thread.stop()
    thread.join(TIMEOUT)
    assert not thread.is_alive() and thread.error is None


def test_two_threads_make_a_line() -> None:
    first: queue.Queue[int] = queue.Queue()
    middle: queue.Queue[int] = queue.Queue(1)
    last: queue.Queue[str] = queue.Queue(1)
    threads = [MappingThread(lambda n: n + 1, first, middle), MappingThread(str, middle, last)]
    for thread in threads:
        thread.start()
    for n in range(50):
        first.put(n)
    assert [last.get(timeout=TIMEOUT) for _ in range(50)] == [str(n + 1) for n in range(50)]
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_a_full_queue_holds_the_thread_up() -> None:
    upstream: queue.Queue[int] = queue.Queue()
    downstream: queue.Queue[int] = queue.Queue(1)
    mapped = [threading.Event() for _ in range(4)]

    def note(n: int) -> int:
        mapped[n].set()
        return n

    thread = MappingThread(note, upstream, downstream)
    for n in range(4):
        upstream.put(n)
    thread.start()
    assert mapped[1].wait(TIMEOUT)  # 0 is in the queue and 1 waits for its place
    assert not mapped[2].wait(0.02)
    assert [downstream.get(timeout=TIMEOUT) for _ in range(4)] == [0, 1, 2, 3]
    thread.stop()
    thread.join(TIMEOUT)


def test_stop_ends_a_thread_that_is_held_up_and_leaves_the_rest() -> None:
    upstream: queue.Queue[int] = queue.Queue()
    downstream: queue.Queue[int] = queue.Queue(1)
    at = threading.Event()
    thread = MappingThread(lambda n: at.set() if n == 1 else n, upstream, downstream)
    for n in range(5):
        upstream.put(n)
    thread.start()
    assert at.wait(TIMEOUT)
    thread.stop()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert upstream.qsize() == 3


def test_a_sink_has_no_downstream() -> None:
    upstream: queue.Queue[int] = queue.Queue()
    seen: list[int] = []
    done = threading.Event()
    thread = MappingThread(lambda n: seen.append(n) or (n == 2 and done.set()), upstream)
    thread.start()
    for n in range(3):
        upstream.put(n)
    assert done.wait(TIMEOUT)
    assert seen == [0, 1, 2]
    thread.stop()
    thread.join(TIMEOUT)


def test_an_error_ends_the_thread_and_is_kept() -> None:
    upstream: queue.Queue[int] = queue.Queue()
    thread = MappingThread(lambda n: 1 // n, upstream)
    upstream.put(0)
    upstream.put(1)
    thread.start()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert isinstance(thread.error, ZeroDivisionError)
    assert upstream.qsize() == 1


def test_the_device_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    chosen: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    upstream: queue.Queue[int] = queue.Queue()
    downstream: queue.Queue[int] = queue.Queue()
    thread = MappingThread(lambda n: len(chosen), upstream, downstream, cuda_device=1)
    thread.start()
    upstream.put(0)
    assert downstream.get(timeout=TIMEOUT) == 1
    assert chosen == [1]
    thread.stop()
    thread.join(TIMEOUT)


def test_a_policy_worker_with_threads_is_woken_when_it_may_gather_again() -> None:
    specs = (AgentSpec(policy="p", samples="s", inference="ask-p", sample_steps=4),)
    world = World(Actors(environment=Marked(), agents=specs, lanes=2, slots=2), remote=True, threaded=True)
    world.begin()
    (server,) = world.servers
    bells = world.actor.context.endpoints.bell, server.context.endpoints.bell
    for _ in range(30):
        while not world.actor._poll().batch_count:
            assert bells[0].wait(TIMEOUT)
        world.drain()
        bells[1].wait(0)
        assert server._poll().batch_count == 1
        assert bells[1].wait(TIMEOUT)
    assert check_samples(world)
    server._close()
    assert not any(thread.is_alive() for thread in server._threads)


def test_a_policy_worker_reports_what_went_wrong_in_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = (AgentSpec(policy="p", samples="s", inference="ask-p", sample_steps=4),)
    world = World(Actors(environment=Marked(), agents=specs, lanes=2), remote=True, threaded=True)
    world.begin()
    (server,) = world.servers

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(server._service_order[0].policy, "act", fail)
    world.actor._poll()
    assert server._poll().batch_count == 1
    server._threads[0].join(TIMEOUT)
    with pytest.raises(ZeroDivisionError):
        server._poll()
    server._close()
