"""Whole runs by the native core: what computes is kept with them, in all their processes
and lives, and who goes on with another is told, or refused."""

import re
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
from tidemill.workers.other_bits import other_bits

pytestmark = pytest.mark.skipif(unavailable("baseline") is not None, reason="no native core here")


@pytest.fixture(autouse=True)
def policies_say_who_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the processor is not told to lack AVX2."""
    monkeypatch.delenv(VARIABLE, raising=False)
    for kernels in (library.choose("baseline"), library.named("baseline")):
        monkeypatch.setattr(kernels, "best", "avx2")


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
    assert re.search(r"goes on from checkpoint update-\d+: the native core \(baseline\) computed it", told)
    assert "and numpy does now, with other last bits; TIDEMILL_NATIVE=baseline has it go on as before" in told
    assert computed_by(run.folder) == "numpy"


def test_an_exact_run_does_not_go_on_with_another_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(experiment(0, 2), launch="inline", run_dir=tmp_path / "run", quiet=True)
    monkeypatch.setenv(VARIABLE, "baseline")
    refused = r"numpy computed it until then, .* exact_resume .*: without the environment .*\.json"
    with pytest.raises(TidemillError, match=refused):
        resume(run.folder, limits={"updates": 4}, quiet=True)
    monkeypatch.delenv(VARIABLE)
    assert resume(run.folder, limits={"updates": 4}, quiet=True).summary.status == "completed"


def test_nor_does_one_that_is_to_be_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(dqn(100, native="auto", journal=True), launch="inline", run_dir=tmp_path / "run", quiet=True)
    monkeypatch.setenv(VARIABLE, "baseline")
    with pytest.raises(TidemillError, match=r"a run that is exact, or has a journal, goes on in every bit"):
        resume(run.folder, limits={"steps": 120}, quiet=True)


@pytest.mark.parametrize(
    ("before", "now", "named", "variable", "said"),
    [
        ("numpy", "numpy", "off", None, ""),
        ("", "avx2", "avx2", None, ""),  # a checkpoint of before
        ("numpy", "avx2", "avx2", None, "TIDEMILL_NATIVE=off has it go on as before"),
        (
            "baseline",
            "numpy",
            "baseline",
            "off",
            "without the environment variable TIDEMILL_NATIVE",
        ),
        (
            "numpy",
            "baseline",
            "off",
            "baseline",
            "without the environment variable TIDEMILL_NATIVE",
        ),
        ("baseline", "numpy", "off", None, "TIDEMILL_NATIVE=baseline has it go on as before"),
        ("lost", "numpy", "off", None, "lost has it go on as before"),
        ("torch (cuda)", "numpy", "off", None, "torch (cuda) has it go on as before"),
    ],
)
def test_what_has_a_run_go_on_as_before_follows_from_why_it_does_not(
    before: str, now: str, named: Any, variable: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    differs, cure = other_bits(before, now, ActorCritic(native=named))
    assert bool(differs) == bool(said) and cure.startswith(said)


def test_no_cure_is_named_that_this_machine_does_not_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "BUILT", tmp_path / "libkernels.so.1")
    _, cure = other_bits("avx512", "numpy", ActorCritic(native="auto"))
    assert (
        cure.startswith("it can go on as before only where avx512 is to be had: ") and "was not built" in cure
    )


def test_without_the_library_a_run_in_processes_goes_on_by_numpy_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = experiment(None, 2).replace(exact_resume=False)
    monkeypatch.setattr(library, "BUILT", tmp_path / "libkernels.so.1")  # processes have it, and do not ask
    run = train(made, launch="processes", run_dir=tmp_path / "run", layout="given")
    assert run.summary.status == "completed" and computed_by(run.folder) == "numpy"
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
    for processor, lacks in (("baseline", "this processor has no"), ("avx2", "the core was built without")):
        monkeypatch.setattr(kernels, "processor", processor)
        (told,) = remarks(made)
        assert f"the native core (baseline), in code for any processor ({lacks} AVX2), computes" in told


@pytest.mark.parametrize("policy", [SquashedGaussian, QNetwork, ActorCritic])
def test_what_computes_is_known_of_every_policy_that_the_core_has(policy: Any) -> None:
    from tidemill.api.spaces import Box, Discrete, Spaces

    bounds = ((-1.0,), (1.0,))
    action = Box((1,), "float32", *bounds) if policy is SquashedGaussian else Discrete(2)
    spaces = Spaces(Box((3,), "float32"), action)
    for native, name in (("baseline", "baseline"), ("off", "numpy")):
        assert policy(native=native).build(spaces, 0).computed_by == name
