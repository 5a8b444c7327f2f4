"""Evaluations at the end of iterations: how many environments play, what of it counts,
and that training is what it is without them."""

from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from tests.remote.served import client, serving
from tests.run.test_limited import FILE, limited, run
from tests.run.watching import wait_until

from tidemill import Asynchronous, Experiment, Gymnasium, Slots
from tidemill.api.environment import EnvironmentConfig
from tidemill.metrics.json_lines import read_metrics
from tidemill.replay_training import iteration_evaluation
from tidemill.replay_training.iteration_evaluation import _counted
from tidemill.replay_training.trainer import ReplayTrainerWorker

LAUNCHES = ("inline", "threads", "processes")


def iterated(environment: EnvironmentConfig, slots: int = 3, **trainer: Any) -> Experiment:
    """An experiment of two iterations."""
    settings = {"iteration_steps": 30, "evaluation_steps": 40, "exact": True, **trainer}
    made: Experiment = limited.experiment(environment=Slots(environment=environment), slots=slots, **settings)
    return made


def found(folder: Path) -> list[tuple[float, ...]]:
    """What the evaluations of a run came to."""
    names = ("steps", "episodes", "return")
    return [
        tuple(told.get(f"iteration/evaluation_{name}", 0.0) for name in names)
        for told in read_metrics(folder)
        if "iteration/evaluation_steps" in told
    ]


@pytest.mark.parametrize("launch", LAUNCHES)
def test_an_evaluation_has_an_environment_for_each_slot(tmp_path: Path, launch: str) -> None:
    """Of those with `async def`, which live on the loop of the thread that plays them.
    Training is what it is without them."""
    results, cases = {}, [(0, 3), (40, 3 + 2 * 3), (2, 3 + 2 * 2)]
    if launch == "processes":  # the same workers, which count as they do elsewhere
        cases = cases[:2]
    for steps, made in cases:
        log = tmp_path / f"{steps}.log"
        environment = Asynchronous(make=f"{FILE}:Errand", kwargs={"log": str(log)})
        results[steps] = run(iterated(environment, evaluation_steps=steps), tmp_path / str(steps), launch)
        assert len(log.read_text().splitlines()) == made
        assert [told[0] for told in found(tmp_path / str(steps))] == ([steps, steps] if steps else [])
    assert len({result["w"].tobytes() for result in results.values()}) == 1


@pytest.mark.parametrize("launch", LAUNCHES)
def test_an_evaluation_has_as_many_sessions_of_a_server_as_there_is_room_for(
    tmp_path: Path, launch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.remote.session.CLOSE_SECONDS", 20.0)
    weights, evaluations = set(), []
    cases = [(0, 64, 3), (40, 64, 3 + 2 * 3), (40, 5, 3 + 2 * 2), (40, 4, 3 + 2 * 1)]
    if launch == "processes":  # the same workers, which count as they do elsewhere
        cases = [cases[0], cases[-1]]
    for steps, limit, opened in cases:
        folder = tmp_path / f"{steps}-{limit}"
        with serving(limited.Strolling, limit=limit) as server:
            weights.add(
                run(iterated(client(server, form="loop"), evaluation_steps=steps), folder, launch)[
                    "w"
                ].tobytes()
            )
            # the last ones are told of in passing
            wait_until(lambda counts=server.sessions.counts: not counts().sessions, 60, "all sessions end")
            assert server.sessions.counts().opened == opened
        evaluations.append(found(folder))
    assert len(weights) == 1
    assert [[told[0] for told in each] for each in evaluations] == [[], *[[40, 40]] * (len(cases) - 1)]


@pytest.mark.parametrize("exact", [True, False])
def test_what_an_evaluation_of_an_exact_run_finds_does_not_depend_on_latencies(
    tmp_path: Path, exact: bool
) -> None:
    """Nor does the number of steps that count, in others."""
    told = []
    for latency in limited.PROFILES:
        walk = Gymnasium(make=f"{FILE}:Strolling", kwargs={"latency": latency}, threads=1)
        run(iterated(walk, slots=4, exact=exact, evaluation_steps=150), tmp_path / latency, "threads")
        told.append(found(tmp_path / latency))
    assert all([each[0] for each in evaluations] == [150, 150] for evaluations in told)
    assert not exact or all(evaluations == told[0] for evaluations in told)


def test_episodes_count_by_turns_however_far_each_environment_is() -> None:
    """So that long ones count as often as short ones, but for the last one."""
    quick = SimpleNamespace(ended=[(1.0, 5), (2.0, 5), (4.0, 5)], open=1)
    slow = SimpleNamespace(ended=[], open=4)

    def counted(steps: int) -> list[float] | None:
        return _counted([quick, slow], steps)  # type: ignore[list-item]

    assert counted(4) == [] and counted(5) == counted(8) == counted(9) == [1.0]
    assert counted(10) is None  # it may be over within its next step, or not
    slow.ended, slow.open = [(3.0, 7)], 0
    assert (
        counted(10) == counted(11) == [1.0]
        and counted(12) == counted(16) == [1.0, 3.0]
        and counted(17) == [1.0, 3.0, 2.0]
    )
    assert counted(18) is None


@pytest.mark.parametrize("kwargs", [{"fails": [31]}, {"hangs": [31]}])
def test_an_evaluation_goes_on_without_an_environment_that_fails(
    tmp_path: Path, kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # it is an evaluation's patience that is looked at, and not training's
    monkeypatch.setattr(ReplayTrainerWorker, "_look_for_progress", lambda worker: None)
    passed, looked = 0.0, monotonic()

    def awake() -> float:  # a machine that is busy elsewhere tries nobody's patience
        nonlocal passed, looked
        before, looked = looked, monotonic()
        passed += min(looked - before, 0.2)
        return passed

    monkeypatch.setattr(iteration_evaluation, "awake", awake)
    walk = Gymnasium(make=f"{FILE}:Walk", kwargs=kwargs, threads=1)
    environment = Slots(environment=walk, failures=1)
    made = limited.experiment(
        environment=environment, iteration_steps=30, evaluation_steps=40, max_no_progress_s=3.0
    )
    assert run(made, tmp_path / "run")["limiter"]["committed"] == 60
    assert [told[0] for told in found(tmp_path / "run")] == [40, 40]
