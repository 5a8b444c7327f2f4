"""Whole runs by the native core: what computes is kept with them, in all their processes
and lives, and who goes on with another is told, or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.run.cut_experiments import experiment

from tidemill import (
    DQN,
    ActorCritic,
    Experiment,
    Gymnasium,
    Limits,
    QNetwork,
    Replay,
    ReplayActors,
    ReplayTrainer,
    SquashedGaussian,
    TidemillError,
    check_resume,
    resume,
    train,
)
from tidemill.native import library
from tidemill.native.library import VARIABLE, unavailable
from tidemill.nets.native_setting import NativeSetting
from tidemill.run.start_remarks import remarks
from tidemill.store.checkpoint import read_newest
from tidemill.trained.retrain import retrain

pytestmark = pytest.mark.skipif(unavailable("baseline") is not None, reason="no native core here")


@pytest.fixture(autouse=True)
def policies_say_who_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def dqn(steps: int, native: Any = "baseline", **trainer: Any) -> Experiment:
    return Experiment(
        name="native",
        policies={"policy": QNetwork(hidden=(16, 16), native=native)},
        workers={
            "actor": ReplayActors(environment=Gymnasium(id="CartPole-v1"), lanes=2),
            "trainer": ReplayTrainer(
                algorithm=DQN(), buffer=Replay(capacity=500, warm_up=16), batch_size=8, ratio="1/2", **trainer
            ),
        },
        limits=Limits(steps=steps),
    )


def weights(run: Path) -> np.ndarray:
    arrays = read_newest(run / "checkpoints" / "policy").arrays["policy"]
    return np.concatenate([arrays[name].ravel() for name in sorted(arrays)])


def computed_by(run: Path) -> str:
    return str(read_newest(run / "checkpoints" / "policy").facts["computed_by"])


@pytest.mark.parametrize(("launch", "trainers"), [("inline", 1), ("processes", 2)])
def test_runs_by_the_core_resume_in_every_bit(launch: str, trainers: int) -> None:
    """Of a trainer alone the core has whole epochs; equal trainers sum its gradients."""
    policy = ActorCritic(hidden=(16,), native="baseline")
    made = experiment(0, policy=policy, trainers=trainers, count=trainers)
    found = check_resume(made, launch=launch)
    assert not found.differences and found.compared > 10


def test_a_run_is_trained_again_by_the_core_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(dqn(200, journal=True), launch="processes", run_dir=tmp_path / "run", quiet=True)
    assert computed_by(tmp_path / "run") == "baseline"
    assert retrain(tmp_path / "run").same
    monkeypatch.setattr(library, "BUILT", tmp_path / "libkernels.so.1")
    library.named.cache_clear()
    try:
        with pytest.raises(TidemillError, match=r'native = "baseline", but .* was not built'):
            retrain(tmp_path / "run")
    finally:
        library.named.cache_clear()


@pytest.mark.parametrize("kind", ["ppo", "dqn"])
def test_who_goes_on_with_another_core_is_told(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = experiment(None, 2).replace(exact_resume=False) if kind == "ppo" else dqn(100, native="auto")
    monkeypatch.setenv(VARIABLE, "baseline")
    run = train(made, launch="inline", run_dir=tmp_path / "run", quiet=True, layout="given")
    assert computed_by(run.folder) == "baseline"
    limits = {"updates": 3} if kind == "ppo" else {"steps": 120}
    capsys.readouterr()
    again = resume(run.folder, limits=limits)  # with the same: nothing is said but who computes
    told = " ".join("".join(capsys.readouterr()).split())
    assert "the native core (baseline) computes policy policy" in told and "last bits" not in told
    monkeypatch.delenv(VARIABLE)
    limits = {"updates": 4} if kind == "ppo" else {"steps": 140}
    assert resume(again.folder, limits=limits).summary.status == "completed"
    told = " ".join("".join(capsys.readouterr()).split())
    assert "the native core (baseline) computed policy policy until checkpoint update-" in told
    assert "and numpy does now, with other last bits; TIDEMILL_NATIVE=baseline has it go on as before" in told
    assert computed_by(run.folder) == ""


def test_an_exact_run_does_not_go_on_with_another_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(experiment(0, 2), launch="inline", run_dir=tmp_path / "run", quiet=True)
    monkeypatch.setenv(VARIABLE, "baseline")
    with pytest.raises(TidemillError, match=r"numpy computed policy .* in every bit: TIDEMILL_NATIVE=off"):
        resume(run.folder, limits={"updates": 4}, quiet=True)
    monkeypatch.setenv(VARIABLE, "off")
    assert resume(run.folder, limits={"updates": 4}, quiet=True).summary.status == "completed"


def test_without_the_library_a_run_in_processes_goes_on_by_numpy_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = experiment(None, 2).replace(exact_resume=False)
    monkeypatch.setattr(library, "BUILT", tmp_path / "libkernels.so.1")  # processes have it, and do not ask
    run = train(made, launch="processes", run_dir=tmp_path / "run", layout="given")
    assert run.summary.status == "completed" and computed_by(run.folder) == ""
    assert "note: numpy computes MLPs, since the native core cannot be used" in capsys.readouterr().out


def test_a_processor_without_avx2_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made = experiment().replace(policies={"policy": ActorCritic(native="baseline")})
    (told,) = remarks(made)
    assert told == "the native core (baseline) computes policy policy where it is an MLP on a CPU"
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    policy = made.policies["policy"]
    assert isinstance(policy, NativeSetting)
    kernels = policy.kernels()
    assert kernels is not None
    monkeypatch.setattr(kernels, "best", "baseline")
    (told,) = remarks(made)
    assert (
        "(baseline), in code for any processor (this one, or the core as it was built, has no AVX2)" in told
    )


@pytest.mark.parametrize("policy", [SquashedGaussian, QNetwork, ActorCritic])
def test_what_computes_is_known_of_every_policy_that_the_core_has(policy: Any) -> None:
    from tidemill.api.spaces import Box, Discrete, Spaces

    bounds = ((-1.0,), (1.0,))
    action = Box((1,), "float32", *bounds) if policy is SquashedGaussian else Discrete(2)
    spaces = Spaces(Box((3,), "float32"), action)
    for native, name in (("baseline", "baseline"), ("off", "")):
        assert policy(native=native).build(spaces, 0).computed_by == name
