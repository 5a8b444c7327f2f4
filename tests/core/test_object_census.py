"""What grows in a process is told by who holds it, of what it is, and how much."""

import gc
import queue
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tidemill.core import object_census
from tidemill.core.memory import kinds_of_memory
from tidemill.core.object_census import take_census

MB = 1 << 20


class Episode:
    """An episode: what one keeps of each of its steps."""

    def __init__(self, arm: "Arm", steps: int) -> None:
        self.arm, self.rows = arm, [{"seen": np.ones(64, np.float32)} for _ in range(steps)]


class Node:
    """A link of a chain."""

    __slots__ = ("before", "numbers")

    def __init__(self, before: "Node | None") -> None:
        self.before, self.numbers = before, np.ones(64)


class Arm:
    """What may keep too much."""

    def __init__(self) -> None:
        self.kept, self.episodes, self.last = list[Any](), list[Episode](), Node(None)
        self.answers, self.numbers, self.inbox = dict[int, Any](), dict[int, int](), queue.Queue[Any]()
        self.trace = np.ones(8, np.uint8)
        self.kind = type("Kind", (), {"everything": []})  # what tests import is not listed
        self.module = types.ModuleType("rows_of_arms")
        self.module.rows = {"all": {7: []}}  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOKING", "WEIGHING", "NAMING"):  # this process has more objects than most
        monkeypatch.setattr(object_census, name, 60.0)


def arrays(count: int, nbytes: int = 1 << 16) -> list[Any]:
    return [np.ones(nbytes, np.uint8) for _ in range(count)]


def chain(arm: Arm) -> None:
    for _ in range(100_000):
        arm.last = Node(arm.last)


WAYS: dict[str, tuple[Callable[[Arm], Any], str]] = {
    "list": (
        lambda arm: arm.kept.extend(arrays(1000)),
        "the list `kept` of test_object_census.py:Arm (1,500 entries, 1,000 of them new, about 66 MB of "
        "numpy arrays)",
    ),
    "a dict that the collector does not list": (
        lambda arm: arm.answers.update(enumerate(arrays(1000))),
        "the dict `answers` of test_object_census.py:Arm (1,000 entries, about 66 MB of numpy arrays)",
    ),
    "numbers": (
        lambda arm: arm.numbers.update({n: 1000 * n for n in range(1000, 700_000)}),
        "the dict `numbers` of test_object_census.py:Arm (699,000 entries, about ",
    ),
    "objects": (
        lambda arm: arm.episodes.extend(Episode(arm, 100) for _ in range(1000)),
        "the list `episodes` of test_object_census.py:Arm (1,000 entries, about ",
    ),
    "queue": (
        lambda arm: [arm.inbox.put(each) for each in arrays(1000)],
        "the deque `inbox.queue` of test_object_census.py:Arm (1,000 entries, about 66 MB of numpy arrays)",
    ),
    "class": (
        lambda arm: arm.kind.everything.extend(bytes(1 << 16) for _ in range(1000)),  # type: ignore[attr-defined]
        "the list `everything` of test_object_census.py:Kind (1,000 entries, about 66 MB of bytes)",
    ),
    "module": (
        lambda arm: arm.module.rows["all"][7].extend(arrays(1000)),
        "the list `rows['all']['7']` of rows_of_arms (1,000 entries, about 66 MB of numpy arrays)",
    ),
    "one array": (
        lambda arm: setattr(arm, "trace", np.ones(64 * MB, np.uint8)),
        "test_object_census.py:Arm (67 MB of large arrays, 1 of them)",
    ),
    "few arrays": (
        lambda arm: arm.kept.__setitem__(slice(None), arrays(20, 3 * MB)),
        "the list `kept` of test_object_census.py:Arm (63 MB of large arrays, 20 of them)",
    ),
    "chain": (chain, " more test_object_census.py:Node objects (about "),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_has_grown_is_told_with_who_holds_it(way: str) -> None:
    arm = Arm()
    arm.kept += arrays(500, 8)
    before, nothing = take_census()
    assert nothing == "" and before.whole
    grow, told = WAYS[way]
    grow(arm)
    _, text = take_census(before, 66 * MB)
    assert told in text, text
    # as a dict grows it leaves memory free, which may stay with the process
    assert way == "numbers" or "in no object" not in text, text


def test_without_a_first_census_it_tells_what_holds_most() -> None:
    arm = Arm()
    arm.kept += arrays(2000, 1 << 17)
    _, text = take_census(None, 250 * MB)
    holder = "the list `kept` of test_object_census.py:Arm"
    assert text.startswith(f"it holds {holder} (2,000 entries, about 262 MB")


def test_memory_that_several_share_counts_once() -> None:
    arm = Arm()
    before, _ = take_census()
    whole = np.ones(64 * MB, np.uint8)
    arm.kept += [whole[n:] for n in range(5000)]
    _, text = take_census(before, 66 * MB)
    assert "GB" not in text, text


NATIVE = """
import ctypes
from tidemill.core.object_census import take_census
before, _ = take_census()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
ctypes.memset(library.malloc(64 << 20), 1, 64 << 20)
print(take_census(before, 64 << 20)[1])
"""


def test_memory_without_an_object_is_native() -> None:
    # in a process of its own: this one gives memory of earlier tests back meanwhile
    done = subprocess.run([sys.executable, "-c", NATIVE], capture_output=True, text=True, timeout=60)
    text = done.stdout
    assert "MB in no object of Python" in text and "native memory" in text, text + done.stderr
    assert " entries" not in text, text
    assert " MB of private memory, in it about " in text or not kinds_of_memory()


def test_a_census_keeps_nothing_alive() -> None:
    arm = Arm()
    census, _ = take_census(take_census()[0], MB)
    gone = weakref.ref(arm)
    del arm
    gc.collect()
    assert gone() is None and census.lengths


def test_an_object_that_raises_when_it_is_looked_at_is_passed_over() -> None:
    class Odd:
        __class__ = property(lambda self: 1 / 0)  # type: ignore[assignment]

        def __getattr__(self, name: str) -> Any:
            raise ZeroDivisionError

    arm = Arm()
    before, _ = take_census()
    arm.kept += [Odd() for _ in range(1000)]
    assert take_census(before, MB)[1]


class Restless(list[Any]):
    """A list whose entries have no end when they are asked for as usual."""

    def __iter__(self) -> Any:
        while True:
            yield None


class Nameless:
    """A class without a module's name, of objects that cannot tell their size."""

    def __sizeof__(self) -> int:
        raise ZeroDivisionError


class Key:
    """What cannot be shown."""

    def __str__(self) -> str:
        raise ZeroDivisionError


Nameless.__module__ = ["no name"]  # type: ignore[assignment]
SECRET = "sk-" + 20 * "0123"


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (lambda rows: Restless([rows]), "the list `holder[0]` of"),
        (lambda rows: {Key(): rows}, "['(test_object_census.py:Key)']"),
        (lambda rows: {SECRET: rows}, "['(str)']"),  # in part it would not be masked
        (lambda rows: {"a": {SECRET[:45]: rows}}, "the list `holder…` of"),
    ],
)
def test_what_users_make_of_their_classes_is_not_asked_and_names_are_whole_or_left_out(
    holder: Callable[[list[Any]], Any], name: str
) -> None:
    arm = Arm()
    arm.holder = holder(rows := list[Any]())  # type: ignore[attr-defined]
    before, _ = take_census()
    rows += [(np.ones(1 << 16, np.uint8), Nameless()) for _ in range(1000)]
    text = take_census(before, MB)[1]
    assert name in text and "1,000 entries" in text and SECRET[:20] not in text
