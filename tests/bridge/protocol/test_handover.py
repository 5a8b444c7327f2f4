"""Taking turns: nobody burns a core while the other side thinks, a wake is not lost,
spinning is given up where it does not pay."""

import itertools
import mmap
import threading
import time
from functools import partial

import pytest

from tidemill.bridge.protocol import handover as turns
from tidemill.bridge.protocol.handover import Futex, Handover

WORD, TURN, CLOSED = 8, 8, 11


def side(memory, mine, closed=None):
    made = Handover(WORD, TURN, mine, closed)
    made.attach(memory)
    return made


def look():
    """Nothing to be seen."""


def test_a_sleeper_is_woken():
    memory = mmap.mmap(-1, 4096)
    futex = Futex(memory, WORD)
    woken = []
    sleeper = threading.Thread(target=lambda: woken.append(futex.sleep(0, 120.0)))
    sleeper.start()
    while sleeper.is_alive():
        futex.wake()
        time.sleep(0.001)
    assert woken == [True]


def test_who_looks_at_an_old_word_does_not_sleep():
    memory = mmap.mmap(-1, 4096)
    memory[WORD] = 1
    assert not Futex(memory, WORD).sleep(0, 30.0)


def test_a_mapping_can_be_closed_after_it_was_used():
    memory = mmap.mmap(-1, 4096)
    one = side(memory, 0)
    assert one.wait(look)
    memory.close()


def test_turns_are_exchanged_between_two_threads():
    memory = mmap.mmap(-1, 4096)
    one, two = side(memory, 0), side(memory, 1)
    rounds = 500

    def other():
        for i in range(rounds):
            two.wait(look)
            assert memory[0] == i % 256
            memory[1] = 255 - memory[0]
            memory[TURN] = 0
            two.wake()

    thread = threading.Thread(target=other)
    thread.start()
    for i in range(rounds):
        memory[0] = i % 256
        memory[TURN] = 1
        one.wake()
        assert one.wait(look)
        assert memory[1] == 255 - i % 256
    thread.join(60)
    assert not thread.is_alive()


def test_a_peer_that_never_wakes_is_noticed_all_the_same():
    memory = mmap.mmap(-1, 4096)
    memory[TURN] = 1

    def other():
        time.sleep(0.05)
        memory[TURN] = 0

    threading.Thread(target=other).start()
    assert side(memory, 0).wait(look, 60)


def test_a_wait_ends_when_its_time_is_up_and_goes_on_later():
    memory = mmap.mmap(-1, 4096)
    memory[TURN] = 1
    one = side(memory, 0)
    assert not one.wait(look, 0.01)
    memory[TURN] = 0
    assert one.wait(look, 0.01)


def test_a_close_ends_a_wait():
    memory = mmap.mmap(-1, 4096)
    memory[TURN], memory[CLOSED] = 1, 1
    assert side(memory, 0, CLOSED).wait(look)


def test_what_looking_finds_ends_a_wait_also_one_in_short_pieces():
    memory = mmap.mmap(-1, 4096)
    memory[TURN] = 1
    one = side(memory, 0)

    def gone():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        one.wait(gone)
    looks = []
    while len(looks) < 4:
        one.wait(lambda: looks.append(time.perf_counter()), 0.01)
    # from one look on, which may be seen late, the next but one is so far away at least
    assert all(third - first > 0.99 * turns._LOOK for first, third in zip(looks, looks[2:], strict=False))


def test_waiting_burns_no_core():
    memory = mmap.mmap(-1, 4096)
    memory[TURN] = 1
    one = side(memory, 0)
    begun, used = time.monotonic(), time.thread_time()
    one.wait(look, 0.5)
    assert time.thread_time() - used < 0.5 * (time.monotonic() - begun)


class Later:
    """Memory whose turn comes at the fourth look."""

    looks = 0

    def __getitem__(self, _):
        self.looks += 1
        return int(self.looks < 4)


@pytest.fixture
def spins(monkeypatch):
    """Return a side, and a call that has it wait so often, answered soon or never, and
    returns at which of the waits it spun. A look takes 1 µs."""
    monkeypatch.setattr(turns.time, "perf_counter", partial(next, itertools.count(0.0, 1e-6)))
    memory = mmap.mmap(-1, 4096)
    memory[TURN] = 1
    one = side(memory, 0)
    asked = []
    ask = one._spins
    monkeypatch.setattr(one, "_spins", lambda: asked.append(ask()) or asked[-1])
    monkeypatch.setattr(one, "_sleep", lambda *_: True)

    def wait(times, answered=False):
        del asked[:]
        for _ in range(times):
            one._memory = Later() if answered else memory
            assert one.wait(look)
        return [number for number, spun in enumerate(asked) if spun]

    return one, wait


def test_spinning_that_does_not_pay_is_given_up_and_tried_again_ever_more_rarely(spins):
    one, wait = spins
    spun = wait(1000)
    assert spun[:2] == [0, 1] and len(spun) < 8
    apart = [later - sooner for sooner, later in itertools.pairwise(spun[1:])]
    assert apart == [64, 128, 256, 512]
    one._memory[TURN] = 0
    assert one.wait(look)


def test_one_answer_that_takes_long_does_not_end_spinning_that_pays(spins):
    _, wait = spins
    assert wait(20, answered=True) == [*range(20)]
    assert wait(1) == [0] and wait(20, answered=True) == [*range(20)]


def test_spinning_that_pays_once_is_taken_up_again(spins):
    one, wait = spins
    wait(100)
    one._idle = one._pause
    assert wait(20, answered=True) == [*range(20)]


def test_who_is_answered_soon_spins_shortly_and_longer_where_that_is_not_enough(spins):
    one, wait = spins
    wait(100, answered=True)
    assert one._spin < 2 * turns._SHORTEST_SPIN
    wait(2)
    assert 2 * turns._SHORTEST_SPIN < one._spin <= turns._LONGEST_SPIN
