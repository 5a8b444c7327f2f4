"""The limiter's promises, at every instant of random schedules and with real threads (see
the module's text for the letters):

G1: 0 ≤ D(C) - K ≤ Qt
G2: some step, commit, void or task can always happen
G3: after a drain I = 0, K = D(C), S = C + V
G4: the slots' counters sum to the global ones
"""

import random
import threading
from fractions import Fraction
from math import ceil, floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.errors import ConfigError
from tidemill.replay.limiter import Limiter, LimiterCounts, check_slack, parse_ratio, tasks_at_once

RATIOS = [Fraction(1, 4), Fraction(1), Fraction(3, 2), Fraction(8)]


def debt(counts: LimiterCounts, steps: int, ratio: Fraction, at_once: int = 1) -> int:
    owed = 0 if counts.waived is None else max(0, steps - counts.waived) * ratio
    return floor(owed / at_once) * at_once


def check(limiter: Limiter, ratio: Fraction, slack: int, at_once: int = 1) -> None:
    n = limiter.counts
    queue = max(ceil(slack * ratio), ceil(ratio), at_once)
    flight = n.started - n.committed - n.voided
    assert flight >= 0
    assert 0 <= debt(n, n.committed, ratio, at_once) - n.tasks <= queue  # G1
    assert limiter.owed == debt(n, n.committed, ratio, at_once) - n.tasks
    can_start = debt(n, n.committed + flight + 1, ratio, at_once) - n.tasks <= queue
    assert can_start or flight or limiter.owed  # G2


class Slots:
    """What slots do: each has a step in flight or not; whole episodes become samplable at
    once."""

    def __init__(self, limiter: Limiter, count: int, whole: bool, warm_up: int, least: int = 0) -> None:
        self.limiter, self.whole, self.warm_up, self.least = limiter, whole, warm_up, least
        self.started, self.committed, self.voided = [0] * count, [0] * count, [0] * count
        self.open, self.samplable = [0] * count, 0

    def start(self, slot: int) -> bool:
        if self.started[slot] > self.committed[slot] + self.voided[slot] or not self.limiter.start():
            return False
        self.started[slot] += 1
        return True

    def finish(self, slot: int, lost: bool, ends: bool) -> bool:
        if self.started[slot] == self.committed[slot] + self.voided[slot]:
            return False
        if lost:
            self.voided[slot] += 1
            self.limiter.void()
        else:
            self.committed[slot] += 1
            self.open[slot] += 1
            self.limiter.commit()
        if ends or lost or not self.whole:
            self.samplable += self.open[slot]
            self.open[slot] = 0
        if self.samplable >= self.warm_up:
            self.limiter.sampleable(self.least)
        return True

    def check(self) -> None:
        n = self.limiter.counts
        # G4
        assert (sum(self.started), sum(self.committed), sum(self.voided)) == (
            n.started,
            n.committed,
            n.voided,
        )


@settings(max_examples=150)
@given(
    ratio=st.sampled_from(RATIOS),
    at_once=st.sampled_from([1, 1, 2, 8]),
    slack=st.integers(1, 9),
    count=st.integers(1, 6),
    whole=st.booleans(),
    warm_up=st.integers(0, 12),
    least=st.integers(0, 6),
    budget=st.none() | st.integers(0, 40),
    moves=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=150),
)
def test_what_the_limiter_promises_holds_at_every_instant_of_any_schedule(
    ratio, at_once, slack, count, whole, warm_up, least, budget, moves
):
    limiter = Limiter(ratio, slack, at_once=at_once)
    limiter.begin_phase(budget)
    slots = Slots(limiter, count, whole, warm_up, least)
    if not warm_up:  # pre-filled
        limiter.sampleable(least)
    for who, what in moves:
        before = limiter.counts
        gate = (
            debt(before, before.started - before.voided + 1, ratio, at_once) - before.tasks <= limiter.queue
            and before.started - before.voided != budget
        )
        if what < 4:
            free = who < count and slots.started[who] == slots.committed[who] + slots.voided[who]
            assert slots.start(who % count) == gate or not free
        elif what < 8:
            slots.finish(who % count, lost=what == 7, ends=who % 3 == 0)
        elif limiter.owed:
            limiter.finish_task()
        else:
            with pytest.raises(ValueError, match="none was owed"):
                limiter.finish_task()
        check(limiter, ratio, slack, at_once)
        slots.check()
        assert budget is None or limiter.counts.committed + limiter.in_flight <= budget
    limiter.drain()
    assert not limiter.start(5)
    for slot in range(count):
        slots.finish(slot, lost=slot % 2 == 0, ends=False)
        check(limiter, ratio, slack, at_once)
    while limiter.owed:
        limiter.finish_task()
        check(limiter, ratio, slack, at_once)
    n = limiter.counts
    # G3
    assert limiter.drained and n.started == n.committed + n.voided
    assert n.tasks == debt(n, n.committed, ratio, at_once)
    slots.check()


def test_a_ratio_that_is_not_reduced_owes_so_many_at_once():
    limiter = Limiter(parse_ratio("8/16"), 4, at_once=tasks_at_once("8/16"))
    limiter.sampleable()
    owed = []
    for _ in range(40):
        assert limiter.start() == 1
        limiter.commit()
        owed.append(limiter.owed)
        while limiter.owed:
            limiter.finish_task()
    assert owed == ([0] * 15 + [8]) * 2 + [0] * 8
    # it holds actors back when a burst is owed and the next one would be, too
    assert limiter.start(100) == 23 and limiter.start() == 0
    assert [tasks_at_once(ratio) for ratio in ("1/2", "8/16", "3/2", "6/4", 8, "8", "64/128")] == [
        1, 8, 1, 2, 1, 1, 64,
    ]  # fmt: skip


@settings(max_examples=100)
@given(
    ratio=st.sampled_from(RATIOS),
    slack=st.integers(1, 9),
    most=st.integers(1, 30),
    tasks=st.integers(0, 20),
    warm=st.integers(0, 5),
)
def test_many_steps_start_at_once_exactly_when_they_would_one_by_one(ratio, slack, most, tasks, warm):
    together, alone = Limiter(ratio, slack), Limiter(ratio, slack)
    for limiter in (together, alone):
        limiter.start(warm)
        limiter.sampleable()
        limiter.commit(warm)
        for _ in range(tasks):
            limiter.start()
            limiter.commit(limiter.in_flight)
            if limiter.owed:
                limiter.finish_task()
    assert together.start(most) == sum(alone.start() for _ in range(most))


@pytest.mark.parametrize("ratio", RATIOS, ids=str)
def test_the_ratio_is_exact_however_long_it_runs(ratio):
    limiter = Limiter(ratio, 3)
    limiter.start(3)
    limiter.sampleable()
    for steps in range(1, 4_001):
        limiter.commit()
        while limiter.owed:
            limiter.finish_task()
        limiter.start()
        assert limiter.counts.tasks == floor(max(0, steps - 3) * ratio)


@pytest.mark.parametrize("ratio", RATIOS, ids=str)
def test_the_promises_hold_with_real_threads(ratio):
    limiter, slack, count, budget = Limiter(ratio, 4), 4, 6, 400
    limiter.begin_phase(budget)
    slots = Slots(limiter, count, whole=True, warm_up=30)
    guard, errors = threading.Lock(), []

    def run(body) -> threading.Thread:
        def guarded() -> None:
            try:
                body()
            except BaseException as error:
                errors.append(error)
                limiter.stop(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    def let_others() -> None:
        """Let others come to Python's lock: whoever keeps it sees nothing change."""
        threading.Event().wait(0.0002)

    def gather(slot: int) -> None:
        draw = random.Random(slot)
        while limiter.counts.committed < budget:
            with guard:
                started = slots.start(slot)
            if started:
                if draw.random() < 0.3:
                    threading.Event().wait(draw.random() / 2000)
                with guard:
                    assert slots.finish(slot, lost=draw.random() < 0.1, ends=draw.random() < 0.2)
            else:
                limiter.wait(
                    lambda: bool(
                        limiter.counts.committed + limiter.in_flight < budget
                        or limiter.counts.committed == budget
                    ),
                    0.01,
                )
                let_others()

    def train() -> None:
        while limiter.counts.committed < budget or limiter.owed:
            if limiter.wait(lambda: limiter.owed > 0, 0.01):
                limiter.finish_task()

    def watch() -> None:
        while limiter.counts.committed < budget:
            n = limiter.counts
            assert 0 <= debt(n, n.committed, ratio) - n.tasks <= limiter.queue
            assert (
                n.started >= n.committed + n.voided
                and n.committed + (n.started - n.committed - n.voided) <= budget
            )
            let_others()

    threads = [run(lambda slot=slot: gather(slot)) for slot in range(count)] + [run(train), run(watch)]
    for thread in threads:
        thread.join(240)
    assert not errors and not any(thread.is_alive() for thread in threads)
    check(limiter, ratio, slack)
    slots.check()
    n = limiter.counts
    assert (
        limiter.drained
        and n.committed == budget
        and n.voided > 0
        and n.tasks == debt(n, n.committed, ratio) > 0
    )


def test_whoever_waits_is_woken_with_the_cause_when_training_stops():
    limiter, caught = Limiter(Fraction(1), 1), []

    def wait() -> None:
        try:
            limiter.wait(lambda: False)
        except ArithmeticError as error:
            caught.append(error)

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    cause = ArithmeticError("the trainer raised")
    limiter.stop(cause)
    for thread in threads:
        thread.join(60)
    assert caught == [cause] * 3
    assert not limiter.start()


def test_what_was_in_flight_at_a_cut_is_voided_and_no_work_bursts_after_a_resume():
    limiter = Limiter(Fraction(1), 5)
    limiter.sampleable()
    limiter.start(5)
    limiter.commit(3)
    limiter.finish_task()
    again = Limiter(Fraction(1), 5, limiter.counts)
    n = again.counts
    assert (
        (n.started, n.committed, n.voided, n.tasks) == (5, 3, 2, 1)
        and again.in_flight == 0
        and again.owed == 2
    )
    again.warm_up_again()
    assert again.owed == 0 and again.start(100) == 100
    again.commit(60)
    assert again.owed == 0
    again.sampleable()
    again.commit(40)
    assert again.owed == 0 and again.start(100) == 5 and again.counts.waived == 103
    again.commit(2)
    assert again.owed == 2 and again.counts.tasks == 1


def test_the_next_phase_goes_on_where_the_budget_of_the_last_one_ended():
    limiter = Limiter(Fraction(1, 4), 10)
    limiter.begin_phase(6)
    assert limiter.start(10) == 6
    limiter.void(2)
    assert limiter.start(10) == 2  # lost ones are made up for
    limiter.commit(6)
    assert limiter.start(10) == 0
    limiter.begin_phase(9)
    assert limiter.start(10) == 3


def test_training_waits_while_nothing_is_owed_whether_the_gate_is_shut_or_not():
    now = 0.0
    limiter = Limiter(Fraction(1), 2, clock=lambda: now)
    limiter.start(2)
    now = 5.0  # not to be sampled yet: nobody is held back
    limiter.commit(2)
    limiter.sampleable()
    limiter.start(2)
    limiter.commit(0)
    now = 7.0  # nothing is owed, and the gate is shut, since all that may be in flight is, for 2 s
    limiter.commit(2)
    assert limiter.report()["limiter/training_waited"] == 2.0
    now = 9.0  # two tasks are owed
    limiter.finish_task()
    limiter.finish_task()
    assert limiter.report()["limiter/training_waited"] == 0.0
    now = 12.0
    told = limiter.report()
    assert told["limiter/training_waited"] == 3.0
    assert (told["limiter/debt"], told["limiter/debt_min"], told["limiter/debt_max"]) == (0, 0, 0)


@pytest.mark.parametrize("ratio", [0, -1, "0/4", "1/0", "-1/4", "0.25", 0.25, "", "a", "1/2/3", True, "1/-4"])
def test_a_ratio_that_is_no_fraction_above_zero_is_refused(ratio):
    with pytest.raises(ConfigError, match="ratio = "):
        parse_ratio(ratio)


@pytest.mark.parametrize(
    ("ratio", "cure"), [(0.25, "1/4"), (1e-9, "1/1000000000"), ("1e-4", "1/10000"), (2.5e-5, "1/40000")]
)
def test_what_is_offered_for_a_number_is_taken(ratio, cure):
    with pytest.raises(ConfigError, match=f'is ratio = "{cure}"$'):
        parse_ratio(ratio)
    assert parse_ratio(cure) == Fraction(cure)


@pytest.mark.parametrize("ratio", [-0.5, 0.0, "-1e-9"])
def test_nothing_is_offered_for_a_number_that_is_not_above_zero(ratio):
    with pytest.raises(ConfigError, match=r"; it must be above 0$"):
        parse_ratio(ratio)


def test_ratios_are_read():
    assert [parse_ratio(ratio) for ratio in ("1/4", "3/2", 8, "8", " 2 / 4 ")] == [
        Fraction(1, 4),
        Fraction(3, 2),
        8,
        8,
        Fraction(1, 2),
    ]
    with pytest.raises(ConfigError, match=r'0.25 is ratio = "1/4"'):
        parse_ratio("0.25")


def test_a_slack_that_can_deadlock_is_refused():
    check_slack(1, 0)
    check_slack(4, 3)
    for slack, holding in ((0, 0), (-1, 0), (3, 3)):
        with pytest.raises(ConfigError, match="slack = "):
            check_slack(slack, holding)


def test_what_is_in_flight_stays_so_where_a_run_goes_on_as_if_it_had_not_been_cut():
    limiter = Limiter(Fraction(1), 5)
    limiter.start(4)
    limiter.commit()
    limiter.void()
    for lost, flight in ((True, 0), (False, 2)):
        again = Limiter(Fraction(1), 5, limiter.counts, lost)
        assert again.in_flight == flight and again.counts.voided == 3 - flight
    again.sampleable()
    assert again.counts.waived == 3


def test_the_warm_up_ends_where_it_does_whether_a_phase_is_about_to_end_or_not():
    for started in (2, 4):
        limiter = Limiter(Fraction(1), 5)
        limiter.start(started)
        limiter.commit(2)
        limiter.sampleable(least=2)
        assert limiter.counts.waived == 4
