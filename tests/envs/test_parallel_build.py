"""Environments that take long to make."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tidemill.api.environment import Environment
from tidemill.core.errors import EnvironmentFault
from tidemill.envs import parallel_build as making
from tidemill.envs.parallel_build import MOST, QUICK, make_all


class Made(Environment):
    """Knows who made it, and whether it was closed."""

    def __init__(self, number: int, voids: bool) -> None:
        self.number, self.voids, self.thread, self.closed = (
            number,
            voids,
            threading.get_ident(),
            threading.Event(),
        )

    def close(self) -> None:
        self.closed.set()

    def bind(self, groups: Any) -> None: ...
    def send(self, actions: Any, reset: Any) -> None: ...
    def ready(self) -> bool:
        return True

    def recv(self, ticks: Any) -> None: ...


class Maker:
    """Makes slow ones, once `gate` is open but for the first; counts how many were being
    made at a time."""

    def __init__(
        self, voids: bool = True, slow: bool = True, fails: dict[int, BaseException] | None = None
    ) -> None:
        self.voids, self.slow, self.fails = voids, slow, fails or {}
        self.gate = threading.Event()
        self.made: list[Made] = []
        self.at_once = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, number: int) -> Environment:
        with self._lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        if self.slow and number == 0:
            time.sleep(2 * QUICK)
        elif self.slow and self.voids:
            assert self.gate.wait(60)
        with self._lock:
            self.at_once -= 1
            if number in self.fails:
                raise self.fails[number]
            self.made.append(Made(number, self.voids))
            return self.made[-1]

    def numbers(self, count: int, opens: bool = True) -> Iterator[int]:
        """Yield so many, each once those before it are being made: of what is given up
        before a thread has begun with it nothing is made. Then the gate `opens`."""
        for number in range(count):
            yield number
            wait_for(lambda number=number: self.at_once == number)
        if opens:
            self.gate.set()


def wait_for(what: Any) -> None:
    deadline = time.monotonic() + 60
    while not what() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert what()


@pytest.mark.parametrize("needs_maker", [True, False])
def test_a_thread_outlives_what_it_made_only_where_that_needs_it(monkeypatch: Any, needs_maker: bool) -> None:
    monkeypatch.setattr(Made, "needs_maker", needs_maker)
    maker = Maker()
    maker.gate.set()
    made = list(make_all(maker, range(4)))
    others = {environment.thread for environment in made[1:] if isinstance(environment, Made)}

    def alive() -> int:
        return sum(thread.ident in others for thread in threading.enumerate())

    if needs_maker:
        assert alive() == len(others) == 3
    else:
        wait_for(lambda: alive() == 0)
        assert alive() == 0


def test_slow_ones_that_may_be_are_made_side_by_side_and_come_in_order() -> None:
    maker = Maker()
    found = make_all(maker, range(MOST + 5))
    numbers = [next(found).number]  # type: ignore[attr-defined]

    def open_gate() -> None:
        wait_for(lambda: maker.at_once == MOST)
        maker.gate.set()

    opener = threading.Thread(target=open_gate)
    opener.start()
    numbers += [environment.number for environment in found]  # type: ignore[attr-defined]
    opener.join()
    assert numbers == list(range(MOST + 5))
    assert maker.most == MOST
    assert not any(made.closed.is_set() for made in maker.made)


@pytest.mark.parametrize(("voids", "slow"), [(False, True), (True, False)])
def test_quick_ones_and_those_of_one_thread_are_made_by_the_thread_that_wants_them(
    voids: bool, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not slow:  # also on a busy machine
        monkeypatch.setattr(making, "QUICK", 60.0)
    maker = Maker(voids=voids, slow=slow)
    assert [environment.thread for environment in make_all(maker, range(4))] == [threading.get_ident()] * 4  # type: ignore[attr-defined]


def test_numbers_are_asked_for_only_when_they_are_needed() -> None:
    maker = Maker()
    maker.gate.set()
    most = 10
    numbers = (number for number in range(100) if number < most)
    for _ in (found := make_all(maker, iter(numbers))):
        most = 3
        break
    assert len(list(found)) == 2


@pytest.mark.parametrize("error", [ValueError("no room"), SystemExit(3)])
def test_what_making_raises_is_raised_and_the_others_are_closed(error: BaseException) -> None:
    maker = Maker(fails={2: error})
    found = make_all(maker, maker.numbers(6))
    handed = [next(found), next(found)]
    with pytest.raises(
        type(error) if isinstance(error, Exception) else EnvironmentFault, match=r"no room|SystemExit: 3"
    ):
        next(found)
    wait_for(lambda: len(maker.made) == 5)
    wait_for(lambda: all(made.closed.is_set() for made in maker.made if made not in handed))
    assert not any(made.closed.is_set() for made in maker.made if made in handed)


def test_the_thread_that_made_one_lives_as_long_as_that_does() -> None:
    maker = Maker()
    maker.gate.set()
    _, second = make_all(maker, range(2))
    maker.made.clear()
    (thread,) = (thread for thread in threading.enumerate() if thread.ident == second.thread)  # type: ignore[attr-defined]
    assert thread.is_alive()
    del second
    thread.join(60)
    assert not thread.is_alive()


def test_who_wants_no_more_has_the_rest_closed_also_those_still_being_made() -> None:
    maker = Maker()
    found = make_all(maker, maker.numbers(5))
    first = next(found)
    second = next(found)
    found.close()  # type: ignore[attr-defined]
    wait_for(lambda: len(maker.made) == 5)
    wait_for(lambda: all(made.closed.is_set() for made in maker.made if made not in (first, second)))
    assert not first.closed.is_set() and not second.closed.is_set()  # type: ignore[attr-defined]


def test_one_that_is_never_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker()
    found = make_all(maker, maker.numbers(3, opens=False))
    next(found)
    monkeypatch.setattr(making, "LONGEST", 0.01)
    with pytest.raises(EnvironmentFault, match=r"not made within 0\.01 s"):
        next(found)
    maker.gate.set()
    wait_for(lambda: len(maker.made) == 3 and all(made.closed.is_set() for made in maker.made[1:]))
