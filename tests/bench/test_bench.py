"""The bench runs, and tells what it should. No timing decides anything here."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from rich.console import Console
from tests.run.watching import wait_until
from typer.testing import CliRunner

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    GymnasiumVector,
    Impala,
    PolicyWorkers,
    Scripted,
    Trainer,
)
from tidemill.api.algorithm import AlgorithmConfig
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.spaces import Discrete
from tidemill.bench import efficiency, table
from tidemill.bench.advice import Advice, WorkerShares
from tidemill.bench.bare_kernels import BareKernels, best_kernels
from tidemill.bench.efficiency import (
    Bench,
    Cost,
    Run,
    bench,
    beyond,
    bound_of,
    cost_of,
    in_threads,
    notes_of,
    run_of,
)
from tidemill.bench.plain_mlps import PlainMLPs
from tidemill.bench.reference import (
    ReferenceNetwork,
    log_prob_entropy,
    loss_of,
    parts_of,
    torch_step,
    weights_of,
)
from tidemill.bench.table import tables
from tidemill.cli.main import app
from tidemill.core.clock import PLACES
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.user_code_loading import load_attribute
from tidemill.layouts import auto_layout as lay_out
from tidemill.native.library import VARIABLE, Kernels
from tidemill.nets.encoders import ObservationEncoder
from tidemill.training.train import Result


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    if os.environ.get(VARIABLE) == "off":  # as tests have it by default
        monkeypatch.delenv(VARIABLE)
    if (found := best_kernels()) is None:
        pytest.skip("the native core is not to be had here")
    return found


def experiment(environment: EnvironmentConfig, lanes: int = 8, inference: str = "inline") -> Experiment:
    workers = {
        "actor": Actors(
            environment=environment, lanes=lanes, agents=(AgentSpec(sample_steps=16, inference=inference),)
        ),
        "trainer": Trainer(algorithm=PPO(minibatch_size=64)),
    }
    if inference != "inline":
        workers["policy"] = PolicyWorkers(stream=inference)
    return Experiment(name="small", policies={"policy": ActorCritic(hidden=(8,))}, workers=workers)


def test_the_bound_is_cores_over_what_a_step_costs() -> None:
    costs = {"env": 6.1e-6, "infer": 0.44e-6, "train": 0.94e-6}
    assert bound_of(2, costs, 1, 4) == pytest.approx(2 / 10.3e-6)  # 194 k, as published
    assert bound_of(1, {"env": 1.0, "infer": 2.0, "train": 3.0}, rows_per_step=5, epochs=2) == pytest.approx(
        1 / 41
    )


def test_a_cost_is_the_median_of_processor_seconds_per_unit() -> None:
    answers = [
        {"units": 10, "core": 1.0, "wall": 2.0},
        {"units": 10, "core": 3.0, "wall": 3.0},
        {"units": 10, "core": 2.0, "wall": 9.0},
    ]
    assert cost_of({"": answers}) == Cost(0.2, 0.3, (0.1, 0.3, 0.2), {})


def test_the_cheaper_way_counts() -> None:
    cost = cost_of(
        {
            "torch": [{"units": 10, "core": 1.0, "wall": 1.0}],
            "numpy": [{"units": 10, "core": 0.5, "wall": 0.75}],
        }
    )
    assert cost == Cost(0.05, 0.075, (0.05,), {"torch": 0.1, "numpy": 0.05})


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("environment", "activation"), [("CartPole-v1", "tanh"), ("CartPole-v1", "relu"), ("Pendulum-v1", "tanh")]
)
def test_both_ways_of_the_reference_have_the_same_gradient(
    environment: str, activation: Any, shared: bool
) -> None:
    torch.manual_seed(1)
    policy = ActorCritic(hidden=(16, 8), activation=activation, shared_critic=shared)
    spaces = Gymnasium(id=environment).build(1, 0).agents[0].spaces
    ppo = PPO(entropy_coefficient=0.3, value_coefficient=0.7, max_gradient_norm=None)
    encoder = ObservationEncoder(spaces.observation, "auto")
    outputs = spaces.action.n if isinstance(spaces.action, Discrete) else 1
    network = ReferenceNetwork(policy, encoder, outputs)
    network.log_std.data += 0.3
    part = {name: torch.randn(50) for name in ("advantage", "target")} | {
        "input": torch.randn(50, encoder.width)
    }
    part["action"] = (
        torch.randint(outputs, (50,)) if isinstance(spaces.action, Discrete) else torch.randn(50, 1)
    )

    def evaluate(part: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        head, value = network(part["input"])
        return *log_prob_entropy(head, network.log_std, part["action"]), value

    part["log_prob"] = evaluate(part)[0].detach() + 0.3 * torch.randn(50)  # some ratios are clipped
    plain = PlainMLPs(weights_of(network), policy, ppo)
    columns = {name: column.numpy() for name, column in part.items()}
    plain.gradient(columns)
    plain.gradient(columns)  # in memory that holds something by now
    torch_step(ppo, loss_of(ppo, evaluate), list(network.parameters()))(part)
    by_torch = [
        torch.zeros(()) if p.grad is None else p.grad.T if p.ndim == 2 else p.grad
        for p in network.parameters()
    ]
    found = [plain.gradients.log_std]
    for tower, (weight, bias) in enumerate(plain.gradients.heads):
        found += [
            part[tower].reshape(part.shape[-1] if part.shape[1] == 1 else part.shape[1:])
            for layer in plain.gradients.hidden
            for part in layer
        ]
        found += [weight, bias[:, 0]]
    for ours, theirs in zip(found, by_torch, strict=True):
        np.testing.assert_allclose(ours, np.broadcast_to(theirs.numpy(), ours.shape), atol=1e-6)
    plain.step(columns)  # torch's step is done
    log_std, first, *_ = network.parameters()
    for stepped, theirs in ((plain.weights.log_std, log_std), (plain.weights.hidden[0][0][0], first.T)):
        np.testing.assert_allclose(stepped, theirs.detach(), atol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("environment", "activation"), [("CartPole-v1", "tanh"), ("CartPole-v1", "relu"), ("Pendulum-v1", "tanh")]
)
def test_the_kernels_called_bare_compute_the_gradient_and_the_step_of_plain_numpy(
    environment: str, activation: Any, shared: bool, kernels: Kernels
) -> None:
    torch.manual_seed(1)
    policy = ActorCritic(hidden=(16, 8), activation=activation, shared_critic=shared)
    spaces = Gymnasium(id=environment).build(1, 0).agents[0].spaces
    ppo = PPO(entropy_coefficient=0.3, value_coefficient=0.7, clip_apart=False)
    discrete = isinstance(spaces.action, Discrete)
    encoder, outputs = ObservationEncoder(spaces.observation, "auto"), 2 if discrete else 1
    network = ReferenceNetwork(policy, encoder, outputs)
    rng = np.random.default_rng(2)
    columns = {name: rng.standard_normal(50, np.float32) for name in ("log_prob", "advantage", "target")} | {
        "input": rng.standard_normal((50, encoder.width), np.float32)
    }
    columns["action"] = (
        rng.integers(outputs, size=50, dtype=np.int32)
        if discrete
        else rng.standard_normal((50, 1), np.float32)
    )
    columns["log_prob"] -= 1.2  # some ratios are clipped
    given = [weight.copy() for weight in weights_of(network)]
    plain = PlainMLPs(given, policy, ppo)
    bare = BareKernels(given, policy, ppo, discrete, kernels)
    bare.act(columns["input"])
    begun = bare.weights.copy()
    assert bare.epoch(50, columns) == 50
    plain.gradient(columns)

    def flat(parts: Any) -> np.ndarray:  # as the kernels have it
        if shared:
            ((weight, bias),) = parts.heads
            heads = [weight[:, :-1].T, bias[:-1], weight[:, -1:].T, bias[-1:]]
        else:
            heads = [array.T for head in parts.heads for array in head]
        arrays = [array for layer in parts.hidden for array in layer] + heads
        return np.concatenate([np.ravel(a) for a in arrays + ([] if discrete else [parts.log_std])])

    np.testing.assert_array_equal(begun, flat(plain.weights))
    np.testing.assert_allclose(bare.gradient[: bare.weights.size], flat(plain.gradients), atol=2e-6)
    plain.step(columns)
    # where a gradient is next to nothing its rounding is in the step
    clear = np.abs(bare.gradient[: bare.weights.size]) > 1e-4
    assert clear.mean() > 0.5
    np.testing.assert_allclose(bare.weights[clear], flat(plain.weights)[clear], atol=2e-6)


def test_the_bound_knows_the_kernels_where_they_can_be_had(
    monkeypatch: pytest.MonkeyPatch, kernels: Kernels
) -> None:
    named = {f"{part} {kernels.instruction_set}" for part in ("infer", "train")}
    ways = {f"{part} {way}" for part in ("infer", "train") for way in ("torch", "numpy")}
    _, parts = parts_of(experiment(Gymnasium(id="CartPole-v1")))
    assert set(parts) == {"env"} | ways | named
    assert all(work() for work in parts.values())
    monkeypatch.setenv(VARIABLE, "off")
    _, parts = parts_of(experiment(Gymnasium(id="CartPole-v1")))
    assert set(parts) == {"env"} | ways


def test_an_efficiency_above_1_is_said_to_be_none() -> None:
    assert beyond(1.0) == () and "the bound did not hold" in beyond(1.01)[0]


@pytest.mark.parametrize(("trainers", "rows", "minibatch"), [(1, 128, 64), (2, 128, 32)])
def test_minibatches_are_cut_as_equal_trainers_cut_them(trainers: int, rows: int, minibatch: int) -> None:
    made = experiment(Gymnasium(id="CartPole-v1"))
    workers = {name: worker.replace(count=trainers) for name, worker in made.workers.items()}
    facts, _ = parts_of(made.replace(workers=workers))
    assert (facts["rows"], facts["minibatch"]) == (rows, minibatch)


def test_speed_counts_trained_steps_and_shares_are_weighted_by_time() -> None:
    def record(seconds: float, step: float, dropped: float, wait: float) -> dict[str, float]:
        shares = {f"time/trainer-0/{place}": 0.0 for place in PLACES} | {
            "time/trainer-0/wait": wait,
            "time/trainer-0/train": 1 - wait,
        }
        return {"time/seconds": seconds, "step": step, "update": step / 100, "dropped": dropped, **shares}

    found = run_of(
        experiment(Gymnasium(id="CartPole-v1")),
        [record(2, 1000, 1, 0.9), record(3, 1500, 1, 0.2), record(6, 3000, 2, 0.6)],
    )
    assert (found.steps_per_second, found.seconds, found.updates) == (500, 4, 20)
    assert found.dropped == pytest.approx(128 / 2128)  # one sample of 8 lanes × 16 steps
    (trainer,) = found.workers
    assert (trainer.name, trainer.kind) == ("trainer-0", "trainer")
    assert trainer.shares["wait"] == pytest.approx((0.2 + 3 * 0.6) / 4)


def test_evaluations_between_updates_are_no_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(seconds: float) -> dict[str, float]:
        return {"step": 100 * seconds, "update": seconds, "dropped": 0, "time/seconds": seconds}

    records = [
        record(1),
        {"step": 150, "eval/return/mean": 9.0},
        record(2),
        record(3),
        {"step": 300, "eval/return/mean": 9.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    monkeypatch.setattr(efficiency, "train", lambda *_, **__: Result(tmp_path, {"status": "completed"}))
    found = efficiency.run_for(experiment(Gymnasium(id="CartPole-v1")), None, 4.0)
    assert (found.steps_per_second, found.updates) == (100, 2)


def test_shares_of_workers_in_one_process_are_its_own() -> None:
    def record(seconds: float) -> dict[str, float]:
        shares = {
            f"time/{name}-{i}/{place}": 0.0
            for name in ("actor", "trainer")
            for i in range(2)
            for place in PLACES
        }
        for i in range(2):
            shares |= {
                f"time/actor-{i}/environment": 0.6,
                f"time/actor-{i}/wait": 0.4,
                f"time/trainer-{i}/train": 0.3,
                f"time/trainer-{i}/wait": 0.7,
            }
        return {"time/seconds": seconds, "step": seconds, "update": seconds, "dropped": 0, **shares}

    made = experiment(Gymnasium(id="CartPole-v1"))
    turns = made.replace(
        workers={name: config.replace(count=2) for name, config in made.workers.items()},
        together=("actor", "trainer"),
    )
    found = run_of(turns, [record(1), record(2)])
    assert [(w.name, w.kind) for w in found.workers] == [
        ("actor-0+trainer-0", "turns"),
        ("actor-1+trainer-1", "turns"),
    ]
    assert found.workers[0].shares == pytest.approx(
        {**dict.fromkeys(PLACES, 0.0), "environment": 0.6, "train": 0.3, "wait": 0.1}
    )


LONGER = (1, 4, 16)  # seconds of a run, on a machine so busy that it tells nothing in fewer


def measured(made: Experiment, workers: set[str]) -> Bench:
    """Measure for a second, or for longer where that was too short."""
    for seconds in LONGER:
        with suppress(RunError) if seconds < LONGER[-1] else nullcontext():
            found = bench(made, seconds=seconds)
            if {worker.name for worker in found.run.workers} == workers:
                break
    return found


def check(found: Bench, workers: set[str]) -> None:
    assert set(found.costs) == {"env", "infer", "train"} and all(
        cost.core > 0 for cost in found.costs.values()
    )
    assert (
        found.bound > 0
        and found.run.steps_per_second > 0
        and found.efficiency == pytest.approx(found.run.steps_per_second / found.bound)
    )
    assert {worker.name for worker in found.run.workers} == workers
    for worker in found.run.workers:
        assert set(worker.shares) == set(PLACES) and sum(worker.shares.values()) == pytest.approx(1)
    json.dumps(found.plain())


def test_the_command_prints_tables_of_80_columns_and_writes_all_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = ["bench", "CartPole-v1", "--json", str(file), "--set", "workers.actor.lanes=8"]
    for seconds in LONGER:
        result = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*words, "--seconds", str(seconds)])
        if "fewer than two updates" not in result.output and "actor-0" in result.output:
            break
    assert result.exit_code == 0, result.output
    for word in (
        "steps/s",
        "bound",
        "efficiency",
        "dropped",
        "environment",
        "November 2026",
        "actor-0",
        "trainer-0",
        *PLACES,
    ):
        assert word in result.output
    found = json.loads(file.read_bytes())
    assert found["facts"]["lanes"] == 8 and found["facts"]["network"] == "mlp 64×64 tanh"
    assert found["efficiency"] == pytest.approx(found["run"]["steps_per_second"] / found["bound"])
    assert found["advice"]["verdict"] and found["versions"]["packages"]
    assert len(found["costs"]["env"]["each"]) == 6 * found["cores"]


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy measures: each imports torch, and that they are as many as cores is seen
    elsewhere."""
    monkeypatch.setattr(efficiency, "available_cores", lambda: 1)


@pytest.mark.usefixtures("one_core")
def test_policy_workers_are_measured_too_and_environments_of_another_kind_through_the_contract() -> None:
    workers = {"actor-0", "policy-0", "trainer-0"}
    found = measured(experiment(Scripted(agents=2), inference="inference"), workers)
    check(found, workers)
    assert found.facts["rows_per_step"] == 2


def test_a_native_vector_environment_is_measured_as_it_is() -> None:
    facts, parts = parts_of(experiment(GymnasiumVector(id="CartPole-v1")))
    assert facts["environment_kind"] == "GymnasiumVector" and parts["env"]() > 0


def test_the_tables_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {
        "environment": "ALE/Pong-v5",
        "environment_kind": "Atari",
        "lanes": 1024,
        "rows_per_step": 64,
        "batch": 65536,
        "minibatch": 16384,
    }
    facts |= {"network": "nature cnn bfloat16", "epochs": 10}
    shares = dict.fromkeys(PLACES, 1 / 6)
    workers = tuple(WorkerShares(name, "actor", shares) for name in ("actor-0", "a-rather-long-name-0"))
    cost = Cost(1234.5e-6, 1.0, (1000e-6, 2000e-6), {"torch": 1234.5e-6, "numpy": 2e-3})
    run = Run(1_234_567.0, 1234.5, 123_456, 0.5, workers)
    costs = dict.fromkeys(("env", "infer", "train"), cost)
    found = Bench(
        "experiment", 64, facts, costs, 1e7, run, 0.12, Advice("balanced", "word " * 40), ("note " * 40,)
    )
    console = Console(width=80)
    for part in tables(found):
        console.print(part)
    printed = capsys.readouterr().out
    assert "…\n" not in printed and "1,234,567" in printed and "1,000 … 2,000" in printed
    assert all(len(line) <= 80 for line in printed.splitlines())


@pytest.mark.parametrize("name", ["slow_environment", "slow_network", "slow_learner"])
def test_the_synthetic_experiments_are_sound(name: str) -> None:
    file = Path(__file__).parents[2] / "benchmarks" / "synthetic.py"
    load_attribute(f"{file}:{name}", "experiment")().check()


@pytest.mark.usefixtures("one_core")
def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="--seconds 0"):
        bench(experiment(Gymnasium(id="CartPole-v1")), seconds=0)
    with pytest.raises(ConfigError, match="no environment"):
        bench(experiment(Gymnasium(id="CartPoll-v1")), seconds=1)


BROKEN = """
import subprocess
from pathlib import Path

import gymnasium


class Broken(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        server = subprocess.Popen(["sleep", "600"])
        with open(Path(__file__).with_name("servers"), "a") as file:
            print(server.pid, file=file)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        raise ValueError("the ball is lost")
"""


@pytest.mark.usefixtures("one_core")
def test_an_environment_that_raises_is_told_in_a_line_and_what_it_started_ends(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    with pytest.raises(RunError, match=r"bare costs ended with status 1: ValueError: the ball is lost$"):
        bench(experiment(Gymnasium(make=f"{tmp_path}/broken.py:Broken"), lanes=1), seconds=1)
    await_end(tmp_path)


@pytest.mark.usefixtures("one_core")
def test_an_environment_whose_step_never_returns_is_told_and_what_it_started_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def patience(copies: Any, write: Any, errors: Any, seconds: float) -> Any:
        await_begin(tmp_path)
        return [], [], []  # and then has no answer for as long as anybody waits

    monkeypatch.setattr(efficiency, "select", patience)
    (tmp_path / "broken.py").write_text(
        BROKEN.replace('raise ValueError("the ball is lost")', "__import__('time').sleep(600)")
    )
    with pytest.raises(RunError, match=r"180 s after it was told .* does not return"):
        bench(experiment(Gymnasium(make=f"{tmp_path}/broken.py:Broken"), lanes=1), seconds=1)
    await_end(tmp_path)


EXPERIMENT = """

def made():
    from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Gymnasium, Trainer

    environment = Gymnasium(make=f"{__file__}:Broken")
    actors = Actors(environment=environment, lanes=1, agents=(AgentSpec(sample_steps=8),))
    workers = {"actor": actors, "trainer": Trainer(algorithm=PPO())}
    return Experiment(name="made", policies={"policy": ActorCritic()}, workers=workers)
"""


@pytest.mark.parametrize(
    "step", ["__import__('time').sleep(600)", "return self.observation_space.sample(), 1.0, False, False, {}"]
)
def test_what_a_killed_bench_has_started_ends(tmp_path: Path, step: str) -> None:
    (tmp_path / "broken.py").write_text(
        BROKEN.replace('raise ValueError("the ball is lost")', step) + EXPERIMENT
    )
    words = ["bench", f"{tmp_path}/broken.py:made", "--layout", "given", "--seconds", "60"]
    main = subprocess.Popen(
        [sys.executable, "-m", "tidemill.cli.main", *words],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    await_begin(tmp_path)
    copies = psutil.Process(main.pid).children()
    main.kill()
    main.wait()
    wait_until(
        lambda: not any(lives(copy.pid) for copy in copies), 60, "those that measure bare costs have ended"
    )
    await_end(tmp_path)


def await_begin(folder: Path) -> None:
    """Wait until an environment was built there, and told what it has started."""
    servers = folder / "servers"
    wait_until(lambda: servers.exists() and servers.stat().st_size, 60, "an environment was built")


def await_end(folder: Path) -> None:
    """Wait until all that `BROKEN` has started there is gone."""
    servers = [int(line) for line in (folder / "servers").read_text().split()]
    assert servers
    wait_until(lambda: not any(lives(server) for server in servers), 60, "its servers ended")


def lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_file_of_figures_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    for place, why in ((tmp_path, "is a folder"), (tmp_path / "none" / "x.json", "there is no folder")):
        result = CliRunner().invoke(app, ["bench", "CartPole-v1", "--json", str(place)])
        assert result.exit_code == 1 and why in result.output


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "86400"])
def test_a_length_that_cannot_be_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, seconds: str
) -> None:
    monkeypatch.setattr(lay_out, "probe", lambda *_: pytest.fail("measured"))
    result = CliRunner().invoke(app, ["bench", "CartPole-v1", "--layout", "measure", "--seconds", seconds])
    assert (
        result.exit_code == 1
        and result.output == f"error: --seconds {float(seconds):g} must be above 0, and less than a day\n"
    )


def test_why_numpy_computes_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measures(*_: Any) -> Any:
        raise RunError("enough")

    monkeypatch.delenv("TIDEMILL_NATIVE", raising=False)
    monkeypatch.setattr("tidemill.native.library.BUILT", tmp_path / "libkernels.so.1")
    monkeypatch.setattr("tidemill.bench.efficiency._Copies", measures)
    told: list[str] = []
    with pytest.raises(RunError, match="enough"):
        efficiency.bench(experiment(Gymnasium(id="CartPole-v1"), lanes=1), tell=told.append)
    (line,) = told
    assert line.startswith("note: numpy computes MLPs, since the native core cannot be used: ")


@pytest.mark.parametrize(("algorithm", "epochs"), [(PPO(epochs=3), 3), (Impala(), 1)])
def test_an_algorithm_is_counted_with_the_epochs_that_it_has(algorithm: AlgorithmConfig, epochs: int) -> None:
    made = experiment(Gymnasium(id="CartPole-v1"), lanes=1)
    facts, _ = parts_of(made.replace(workers={**made.workers, "trainer": Trainer(algorithm=algorithm)}))
    assert facts["epochs"] == epochs


@pytest.mark.parametrize(
    ("environment", "policy", "network"),
    [
        (GymnasiumVector(id="CartPole-v1"), ActorCritic(hidden=(8,)), "mlp 8 tanh"),
        (
            GymnasiumVector(id="CartPole-v1"),
            ActorCritic(hidden=(8,), shared_critic=True),
            "mlp 8 tanh, shared",
        ),
        (Gymnasium(make=f"{__file__}:Camera"), ActorCritic(), "nature cnn float32"),
        (Gymnasium(make=f"{__file__}:Camera"), ActorCritic(shared_critic=False), "own"),
        (Gymnasium(make=f"{__file__}:Camera"), ActorCritic(encoder="impala_cnn"), "own"),
    ],
)
def test_the_network_that_is_measured_shares_as_many_layers_as_the_policy_s(
    environment: EnvironmentConfig, policy: ActorCritic, network: str
) -> None:
    made = experiment(environment, lanes=2).replace(policies={"policy": policy})
    facts, parts = parts_of(made)
    assert facts["network"] == network
    for name, part in parts.items():
        assert name == "env" or part() == facts["rows" if name.startswith("train") else "batch"]


class Camera(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(0, 255, (36, 36, 1), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return np.zeros((36, 36, 1), np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros((36, 36, 1), np.uint8), 0.0, False, False, {}


def test_figures_are_in_their_file_before_tables_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen_enough(_: Any) -> Any:
        raise BrokenPipeError

    monkeypatch.setattr(efficiency, "bench", lambda *_: SimpleNamespace(plain=lambda: {"bound": 5}))
    monkeypatch.setattr(table, "tables", seen_enough)
    CliRunner().invoke(app, ["bench", "CartPole-v1", "--layout", "given", "--json", str(tmp_path / "x.json")])
    assert json.loads((tmp_path / "x.json").read_bytes()) == {"bound": 5}


def test_a_bench_that_a_signal_ends_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: Any, **__: Any) -> Result:
        return Result(Path(), {"status": "interrupted", "reason": "SIGTERM"})

    monkeypatch.setattr(efficiency, "train", ended)
    monkeypatch.setattr(efficiency, "bench", lambda *given: efficiency.run_for(*given[:3]))
    result = CliRunner().invoke(app, ["bench", "CartPole-v1", "--layout", "given"])
    assert result.exit_code == 143 and "interrupted by SIGTERM: nothing was measured" in result.output


def test_a_bound_of_cores_beside_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficiency, "choose_device", lambda device, _: "cpu" if device == "cpu" else "cuda:0")
    made, facts = experiment(Gymnasium(id="CartPole-v1")), {"network": "mlp 8 tanh"}
    cost = Cost(1e-6, 1e-6, (1e-6,), {})
    costs, run = dict.fromkeys(("env", "infer", "train"), cost), Run(1.0, 1.0, 100, 0.0, ())
    assert notes_of(made, facts, costs, run) == ()
    on_gpu = made.replace(workers={**made.workers, "trainer": made.workers["trainer"].replace(device="cuda")})
    (note,) = notes_of(on_gpu, facts, costs, run)
    assert "GPU" in note and "cores alone" in note


def test_another_algorithm_is_told_to_be_counted_as_ppo() -> None:
    made = experiment(Gymnasium(id="CartPole-v1"))
    impala = made.replace(workers={**made.workers, "trainer": Trainer(algorithm=Impala())})
    costs = dict.fromkeys(("env", "infer", "train"), Cost(1e-6, 1e-6, (1e-6,), {}))
    (note,) = notes_of(impala, {"network": "mlp 8 tanh", "epochs": 4}, costs, Run(1.0, 1.0, 100, 0.0, ()))
    assert note == "the reference knows PPO alone: Impala is counted as 4 epochs of that"


@pytest.mark.parametrize(("threads", "told"), [(0, False), (8, True)])
def test_lanes_in_threads_are_known_to_make_their_actor_wait(threads: int, told: bool) -> None:
    actors = Actors(
        environment=Gymnasium(id="CartPole-v1", threads=threads), lanes=8, agents=(AgentSpec(sample_steps=8),)
    )
    workers = {"actor": actors, "trainer": Trainer(algorithm=PPO())}
    assert in_threads(Experiment(name="some", policies={"policy": ActorCritic()}, workers=workers)) is told
