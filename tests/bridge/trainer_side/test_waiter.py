"""The thread that waits for simulators."""

import pytest

from tidemill.bridge.trainer_side.waiter import Waiter


def broken(seconds: float) -> bool:
    raise OSError("the memory is gone")


@pytest.mark.parametrize("again", ["join", "begin"])
def test_what_a_wait_raises_is_told_to_who_asks_next_and_the_thread_goes_on(again: str) -> None:
    waiter = Waiter("test")
    waiter.begin([broken])
    waiter._over.wait(60)
    with pytest.raises(OSError, match="the memory is gone"):
        waiter.join() if again == "join" else waiter.begin([])
    asked: list[float] = []
    waiter.begin([lambda seconds: bool(asked.append(seconds)) or True])
    waiter.join()
    assert len(asked) == 1
    waiter.close()
