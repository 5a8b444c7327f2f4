"""Cores: how many there are, and staying on one of them."""

import os
import threading
from collections.abc import Callable

import pytest

from tidemill.core.cores import cores, every_core, keep_to, same_cores


@pytest.mark.parametrize(("quota", "least"), [(None, 1000), (0.2, 1), (1.5, 2), (1000.0, 1000)])
def test_a_quota_of_cores_counts(monkeypatch: pytest.MonkeyPatch, quota: float | None, least: int) -> None:
    monkeypatch.setattr("tidemill.core.cores.processors", lambda: quota)
    assert cores() == min(len(os.sched_getaffinity(0)), least)


def in_a_thread(call: Callable[[], object]) -> object:
    """An affinity is a thread's own; what it starts inherits it."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_keeps_to_a_core_and_what_must_not_inherit_that_has_every_core() -> None:
    every = os.sched_getaffinity(0)
    core = max(every)

    def mine() -> set[int]:
        return os.sched_getaffinity(0)

    def work() -> list[object]:
        seen: list[object] = []
        keep_to(core)
        seen.append(mine())
        with every_core():
            move = same_cores()
            with every_core():
                seen += [mine(), in_a_thread(mine), in_a_thread(lambda: [move(), mine()][1])]
        seen += [mine(), in_a_thread(mine)]
        keep_to(None)
        return [*seen, mine(), in_a_thread(mine)]

    assert in_a_thread(work) == [{core}, every, every, {core}, {core}, {core}, every, every]
    with every_core():  # nobody keeps to anything
        same_cores()()
        assert mine() == every
