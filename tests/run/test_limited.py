"""Runs with a limiter: exact ratios, whatever launches them and however long environments and training take."""

from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidemill.api.algorithm import ARRIVAL_FIELDS, Sample
from tidemill.api.buffer import Demand
from tidemill.api.experiment import Experiment
from tidemill.api.stream import Offered
from tidemill.core.checkpoint import read_newest
from tidemill.core.schema import Field, allocate
from tidemill.core.seeding import derive_seed
from tidemill.core.source import load_file
from tidemill.run.metrics import read_metrics
from tidemill.run.session import train

FILE = Path(__file__).with_name("limited.py")
limited = load_file(FILE, "test")


def run(experiment: Experiment, folder: Path, launch: str = "inline") -> dict[str, Any]:
    """Train to the end. Return the facts of the final checkpoint, with the weights as `w` and what the replay holds."""
    result = train(experiment, launch=launch, run_dir=folder, source=FILE, quiet=True)
    assert result.summary["status"] == "completed", result.summary
    path, arrays, facts, _ = read_newest(folder / "checkpoints" / "policy")
    memory = {file.name: np.load(file) for file in sorted((path / "buffer").glob("*.npy"))}
    return {**facts, "w": arrays["policy"]["w"], "memory": memory}


def check_counts(facts: dict[str, Any], ratio: Fraction, steps: int) -> None:
    """The run ended at a quiescent cut (G3)."""
    n = facts["limiter"]
    assert n["committed"] == facts["steps"] == steps
    assert n["started"] == n["committed"] + n["voided"]
    assert n["tasks"] == facts["updates"] == floor(max(0, n["committed"] - n["waived"]) * ratio) > 0


@pytest.mark.parametrize("ratio", ["1/4", "1", "3/2", "8"])
@pytest.mark.parametrize("launch", ["inline", "threads"])
def test_the_ratio_is_exact_to_the_last_step_of_the_budget(tmp_path: Path, ratio: str, launch: str) -> None:
    facts = run(limited.experiment(steps=61, ratio=ratio), tmp_path / "run", launch)
    check_counts(facts, Fraction(ratio), 61)
    last = read_metrics(tmp_path / "run")[-1]
    assert last["limiter/committed"] == last["step"] == 61 and last["update"] == facts["updates"]
    assert last["limiter/in_flight"] == last["limiter/debt"] == 0


def test_several_actors_in_processes_share_the_credits(tmp_path: Path) -> None:
    facts = run(limited.experiment(steps=200, slots=2, actors=2, ratio="1/4"), tmp_path / "run", "processes")
    check_counts(facts, Fraction(1, 4), 200)
    seeds = np.unique(facts["memory"]["row.obs.npy"][..., 3])
    assert len(seeds[seeds != 0]) == 4  # all slots stepped


def test_lanes_of_a_target_step_together(tmp_path: Path) -> None:
    facts = run(limited.experiment(steps=64, slots=2, lanes=3, threads=0, ratio="1"), tmp_path / "run")
    assert 64 <= facts["steps"] < 64 + 6  # a tick is not cut short
    check_counts(facts, Fraction(1), facts["steps"])


PROFILES = ("none", "constant", "random", "first")


def test_an_exact_run_is_the_same_to_the_last_bit_whatever_takes_how_long(tmp_path: Path) -> None:
    """Four profiles of latencies, of environments and of training, by two launchers; the replay is the same, too."""
    reference: dict[str, Any] = {}
    for number, latency in enumerate(PROFILES):
        algorithm = limited.Mixing(seconds=0.002 * (number % 2))
        made = limited.experiment(steps=120, slots=4, latency=latency, exact=True, ratio="3/2", algorithm=algorithm)
        facts = run(made, tmp_path / latency, "inline" if number == 0 else "processes" if number == 3 else "threads")
        check_counts(facts, Fraction(3, 2), 120)
        reference = reference or facts
        assert facts["w"].tobytes() == reference["w"].tobytes()
        assert facts["memory"].keys() == reference["memory"].keys()
        for name, array in facts["memory"].items():
            assert array.tobytes() == reference["memory"][name].tobytes(), name


def test_a_run_that_is_not_exact_does_depend_on_latencies(tmp_path: Path) -> None:
    """So that the test above says something."""
    weights = [
        run(limited.experiment(steps=120, slots=4, latency=latency, ratio="3/2"), tmp_path / latency, "threads")["w"].tobytes()
        for latency in ("none", "first")
    ]
    assert weights[0] != weights[1]


def test_an_exact_run_of_one_slot_is_the_plain_loop(tmp_path: Path) -> None:
    """Step, store, train; step, store, train: as anybody would write it, with the same parts."""
    steps, ratio = 80, Fraction(3, 2)
    made = limited.experiment(steps=steps, slots=1, exact=True, ratio=str(ratio), latency="random")
    facts = run(made, tmp_path / "run", "threads")
    weights, rows = plain_loop(made, steps, ratio)
    assert facts["w"].tobytes() == weights.tobytes()
    stored = facts["memory"]["row.obs.npy"].reshape(-1, 4)
    np.testing.assert_array_equal(stored[: len(rows)], rows)


def plain_loop(experiment: Experiment, steps: int, ratio: Fraction) -> tuple[Any, Any]:
    """Return the weights, and the rows that were stored."""
    config = experiment.workers["trainer"]
    env = limited.Walk()
    policy = limited.DrawingPolicy(derive_seed(experiment.seed, "actor-0", "policy", "policy"))
    source = Arrivals()
    algorithm = config.algorithm.build(policy, 0)
    memory = config.buffer.build(source, Demand(config.batch_size, 1, seed=derive_seed(experiment.seed, "trainer-0", "buffer")))
    seed: int | None = derive_seed(experiment.seed, "actor-0", "target", 0)
    committed = tasks = 0
    waived: int | None = None
    done, rows = True, []
    out = {"action": np.zeros(1, np.int64)}
    while committed < steps:
        if done:
            observation, _ = env.reset(seed=seed)
            seed, done = None, False
            memory_row = {"on_reset": True, "version": -1, "policy": -1}
        else:
            policy.act({"obs": observation[None]}, {}, False, out)
            observation, reward, ended, cut, _ = env.step(out["action"][0])
            done = ended or cut
            memory_row = {"action": out["action"][0], "reward": reward, "done": ended, "truncated": cut and not ended, "version": tasks, "policy": 0}
        rows.append(observation)
        source.put({"obs": observation, **memory_row})
        committed += sum(received.committed for received in memory.receive())
        if memory.sampleable and waived is None:
            waived = committed
        while waived is not None and floor((committed - waived) * ratio) > tasks:
            algorithm.update([held.sample for held in memory.take(tasks)], 0.0)
            memory.release()
            tasks += 1
            policy.version = tasks
    return policy.parameters()["w"], np.array(rows)


class Arrivals:
    """Where the plain loop puts its rows."""

    def __init__(self) -> None:
        self.schema = {"obs": Field((4,), "float32"), **ARRIVAL_FIELDS, "action": Field((), "int64")}
        self.waiting: list[Sample] = []

    def offered(self) -> list[Offered]:
        return [Offered(self.schema, (1, 1), 2, 1)]

    def put(self, row: dict[str, Any]) -> None:
        arrays = allocate(self.schema, (1, 1))
        for name, value in row.items():
            arrays[name][0, 0] = value
        sample = Sample(arrays)
        sample.bootstrap = 0
        self.waiting.append(sample)

    def consume(self) -> Sample | None:
        return self.waiting.pop(0) if self.waiting else None

    def release(self) -> None:
        pass
