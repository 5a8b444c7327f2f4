"""Calls into a folder that may never come back."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from types import FrameType

import pytest

from tidemill.core.folder_thread import FolderThread, Unanswered

PATIENCE = 60.0


def until(there: Callable[[], bool]) -> None:
    end = monotonic() + PATIENCE
    while not there():
        assert monotonic() < end
        sleep(0.001)


def test_a_call_returns_and_raises_as_if_it_were_made_here(tmp_path: Path) -> None:
    thread = FolderThread(tmp_path, PATIENCE)
    assert thread.do(lambda: threading.current_thread().name) == f"folder {tmp_path.name}"
    with pytest.raises(TimeoutError) as raised:  # the system's own, of a share that gives up by itself
        thread.do(lambda: fail(TimeoutError(110, "Connection timed out")))
    assert not isinstance(raised.value, Unanswered) and not thread.hangs
    assert thread.do(lambda: 3) == 3
    thread.close()


def fail(error: BaseException) -> None:
    raise error


def test_one_that_does_not_come_back_is_given_up_and_none_is_piled_on_it(tmp_path: Path) -> None:
    back, made = threading.Event(), list[int]()
    thread = FolderThread(tmp_path, 0.0)
    with pytest.raises(Unanswered, match=r"its disk, or share, does not answer since \d\d:\d\d:\d\d"):
        thread.do(lambda: back.wait(PATIENCE))
    assert thread.hangs
    for _ in range(3):
        with pytest.raises(Unanswered):
            thread.do(lambda: made.append(1))
    back.set()
    until(lambda: not thread.hangs)
    thread.seconds = PATIENCE
    thread.do(lambda: made.append(2))
    thread.close()
    assert made == [2]


def test_what_is_to_be_done_anyway_is_done_once_the_one_before_is_back(tmp_path: Path) -> None:
    back, made = threading.Event(), list[str]()
    thread = FolderThread(tmp_path, 0.0)
    with pytest.raises(Unanswered):
        thread.do(lambda: back.wait(PATIENCE) and made.append("hung"))
    with pytest.raises(Unanswered):
        thread.do(lambda: made.append("anyway"), anyway=True)
    assert thread.hangs and not made
    thread.close()
    back.set()
    until(lambda: not thread.hangs)
    assert made == ["hung", "anyway"]


def test_who_has_more_time_than_before_waits_for_one_that_was_given_up(tmp_path: Path) -> None:
    back, thread = threading.Event(), FolderThread(tmp_path, 0.0)
    with pytest.raises(Unanswered):
        thread.do(lambda: back.wait(PATIENCE))
    thread.seconds = PATIENCE
    threading.Timer(0.05, back.set).start()
    assert thread.do(lambda: 3) == 3
    thread.close()


def test_what_is_done_in_pieces_has_time_for_each_and_stops_once_nobody_waits(tmp_path: Path) -> None:
    given_up, found = threading.Event(), list[object]()
    thread = FolderThread(tmp_path, PATIENCE)

    def pieces() -> None:
        try:
            thread.go_on(PATIENCE)
            found.append("waited for")
            thread.seconds = 0.0
            thread.go_on()
            assert given_up.wait(PATIENCE)
            thread.go_on(PATIENCE)
        except Unanswered as error:
            found.append(error)

    with pytest.raises(Unanswered):
        thread.do(pieces)
    given_up.set()
    until(lambda: not thread.hangs)
    thread.close()
    first, second = found
    assert first == "waited for" and isinstance(second, Unanswered)


def test_a_signal_breaks_off_the_wait_and_the_call_is_given_up(tmp_path: Path) -> None:
    back, thread = threading.Event(), FolderThread(tmp_path, PATIENCE)

    def interrupts(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def hang() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert back.wait(PATIENCE)

    before = signal.signal(signal.SIGUSR1, interrupts)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.do(hang)
    finally:
        signal.signal(signal.SIGUSR1, before)
    # it may be about to come back, and the next one waits for that
    assert thread.busy and not thread.hangs
    back.set()
    assert thread.do(lambda: 3) == 3 and not thread.busy
    thread.close()
