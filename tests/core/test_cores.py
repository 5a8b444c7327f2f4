"""Cores: how many there are, and staying on one of them."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from tidemill.core.cores import _quotas, cores, every_core, keep_to, kept


def test_a_quota_of_cores_counts(tmp_path: Path) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "sys"
    (root / "a" / "b").mkdir(parents=True)
    own.write_text("1:cpu:/old\n0::/a/b\n")
    assert _quotas(own, root) == []
    (root / "a" / "cpu.max").write_text("150000 100000\n")
    (root / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert _quotas(own, root) == [2]
    (root / "cpu.max").write_text("nonsense\n")
    assert _quotas(own, root) == [2]
    assert 1 <= cores() <= (os.cpu_count() or 1)


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
            move = kept()
            with every_core():
                seen += [mine(), in_a_thread(mine), in_a_thread(lambda: [move(), mine()][1])]
        seen += [mine(), in_a_thread(mine)]
        keep_to(None)
        return [*seen, mine(), in_a_thread(mine)]

    assert in_a_thread(work) == [{core}, every, every, {core}, {core}, {core}, every, every]
    with every_core():  # nobody keeps to anything
        kept()()
        assert mine() == every
