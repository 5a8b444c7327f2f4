"""What is said of where time went, with numbers written out."""

import pytest

from tidemill.bench.advice import WAITS, WorkerShares, advise
from tidemill.core.clock import PLACES


def worker(kind: str, **shares: float) -> WorkerShares:
    """A worker whose remaining time is Python's."""
    assert set(shares) <= set(PLACES)
    return WorkerShares(
        f"{kind}-0",
        kind,
        {**dict.fromkeys(PLACES, 0.0), "python": 1 - sum(shares.values()), **shares},  # type: ignore[arg-type]
    )


def test_a_busy_actor_and_a_waiting_trainer_mean_a_slow_environment() -> None:
    advice = advise(
        [worker("actor", environment=0.95, inference=0.03), worker("trainer", train=0.1, wait=0.88)]
    )
    assert advice.verdict == "environment"
    assert (
        "trainer waits 88% of the time" in advice.text
        and "spend 95% of theirs in the environment" in advice.text
    )


def test_an_actor_busy_with_its_network_means_slow_inference() -> None:
    advice = advise(
        [worker("actor", environment=0.1, inference=0.8), worker("trainer", train=0.4, wait=0.55)]
    )
    assert advice.verdict == "inference" and "80% of theirs in the network" in advice.text


def test_busy_policy_workers_mean_slow_inference_although_actors_wait() -> None:
    workers = [
        worker("actor", environment=0.2, wait=0.7),
        worker("policy", inference=0.9),
        worker("trainer", train=0.3, wait=0.6),
    ]
    advice = advise(workers)
    assert advice.verdict == "inference" and "policy workers are at work" in advice.text


def test_waiting_actors_and_a_busy_trainer_mean_a_slow_learner() -> None:
    advice = advise([worker("actor", environment=0.2, wait=0.75), worker("trainer", train=0.95, wait=0.01)])
    assert advice.verdict == "learner" and "at work 99% of the time while actors wait 75%" in advice.text


def test_a_busy_trainer_that_hardly_trains_is_told_of_its_overhead() -> None:
    advice = advise(
        [worker("actor", environment=0.2, wait=0.75), worker("trainer", train=0.3, copy=0.3, wait=0.1)]
    )
    assert advice.verdict == "python" and "trainer" in advice.text


def test_an_actor_busy_with_python_is_told_of_its_overhead() -> None:
    advice = advise(
        [worker("actor", environment=0.2, inference=0.2, copy=0.1), worker("trainer", train=0.3, wait=0.6)]
    )
    assert advice.verdict == "python" and "spend 60% of theirs with Python and copying" in advice.text


def test_waits_on_both_sides_mean_too_few_lanes_or_slots() -> None:
    workers = [worker("actor", environment=0.3, wait=0.5), worker("trainer", train=0.5, wait=0.4)]
    assert advise(workers).verdict == "waits"
    assert "slots" in advise(workers).text and "lanes" in advise(workers).text


def test_where_the_environment_steps_elsewhere_such_waits_are_waits_for_it() -> None:
    workers = [worker("actor", inference=0.1, wait=0.85), worker("trainer", train=0.5, wait=0.45)]
    assert advise(workers, elsewhere=True).verdict == "environment"


def test_no_waits_are_balance_and_the_largest_work_is_named() -> None:
    advice = advise(
        [worker("actor", environment=0.6, inference=0.3, wait=0.05), worker("trainer", train=0.9, wait=0.1)]
    )
    assert advice.verdict == "balanced"
    assert "with training" in advice.text and "(49%)" in advice.text  # 0.9 of 0.95 + 0.9


@pytest.mark.parametrize(("wait", "verdict"), [(WAITS - 0.01, "balanced"), (WAITS, "learner")])
def test_the_threshold_is_where_it_is_said_to_be(wait: float, verdict: str) -> None:
    assert (
        advise([worker("actor", environment=0.2, wait=wait), worker("trainer", train=1.0)]).verdict == verdict
    )


def test_workers_of_one_kind_count_by_their_mean() -> None:
    workers = [
        worker("actor", environment=0.9),
        worker("actor", environment=0.3, wait=0.6),
        worker("trainer", train=0.9),
    ]
    assert advise(workers).verdict == "learner"  # 0.3 on average


def test_processes_that_take_turns_are_balanced_unless_they_wait() -> None:
    advice = advise([worker("turns", environment=0.5, inference=0.1, train=0.35)] * 2)
    assert advice.verdict == "balanced" and "by turns, most of it (50%) with the environment" in advice.text
    advice = advise([worker("turns", environment=0.2, train=0.1, wait=0.65)] * 2)
    assert advice.verdict == "waits" and "wait 65% of the time" in advice.text


@pytest.mark.parametrize(
    ("place", "verdict"), [("environment", "environment"), ("inference", "inference"), ("train", "learner")]
)
def test_processes_that_do_mostly_one_thing_are_slow_at_that(place: str, verdict: str) -> None:
    advice = advise([worker("turns", **{place: 0.8, "wait": 0.05})] * 2)
    assert advice.verdict == verdict and advice.text.startswith(f"Slow {verdict}: every process")


def test_a_trainer_of_its_own_beside_turns_is_seen() -> None:
    advice = advise([worker("turns", environment=0.2, wait=0.75), worker("trainer", train=0.97, wait=0.01)])
    assert "Waiting: processes" not in advice.text
