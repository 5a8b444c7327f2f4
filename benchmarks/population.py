"""Trains examples/population.py with and without its population manager, over seeds,
evaluates every member, and writes docs/results/population.md.

    python benchmarks/population.py                  # about five minutes on two cores
    python benchmarks/population.py --seeds 2 --runs runs/population

Both runs of a seed have the same members, starts, seed and step limit; a run ends when
its first member reaches the limit. The evaluation plays 50 episodes of each member's
final checkpoint, deterministically.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from tidemill.api.experiment import Experiment
from tidemill.core.user_code_loading import load_attribute
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.source_info import versions
from tidemill.trained.evaluate import evaluate
from tidemill.training.train import train
from tidemill.workers.population_config import Population

ROOT = Path(__file__).parent.parent
EXAMPLE, RESULT = ROOT / "examples" / "population.py", ROOT / "docs" / "results" / "population.md"
KINDS = {"experiment": "with the manager", "alone": "without"}
EPISODES = 50
TRIAL = """The example's settings were chosen after one trial on seeds 1 and 2 with 200,000 env steps and a
probability of 0.25: seed 1 reached 301.9 beside 103.6 without the manager (best member), seed 2 139.9 beside
116.0, since in nine decisions no learning rate was drawn anew."""


def run(kind: str, seed: int, folder: Path) -> tuple[list[float], list[int], int]:
    """Train one seed (or take the finished run that is there). Return what each member's
    final checkpoint reaches, the env steps that it has trained, and how often a member
    went on from another."""
    make: Callable[[], Experiment] = load_attribute(f"{EXAMPLE}:{kind}", "experiment")
    experiment = make().replace(seed=seed)
    if not (folder / "summary.json").exists():
        train(experiment, run_dir=folder, source=EXAMPLE, quiet=True)
    actors = [name for name in experiment.workers if name.startswith("actor-")]
    played = [
        evaluate(folder, EPISODES, actor=actor, seed=1000 + seed, quiet=True).specs[0] for actor in actors
    ]
    adoptions = sum(any(name.endswith("/from") for name in record) for record in read_metrics(folder))
    return [spec.mean for spec in played], [spec.steps for spec in played], adoptions


def row(seed: int, kind: str, means: Sequence[float], steps: Sequence[int], adoptions: int) -> str:
    """Return the table's line of one run."""
    of_members = ", ".join(f"{mean:.0f}" for mean in means)
    adopted = str(adoptions) if kind == "experiment" else "–"
    return (
        f"| {seed} | {KINDS[kind]} | {of_members} | {max(means):.1f} | {median(means):.1f} | {min(steps):,} "
        f"… {max(steps):,} | {adopted} |"
    )


def main() -> None:
    """Run what was asked for and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=Path("runs/population"))
    arguments = parser.parse_args()
    runs = [
        (seed, kind, *run(kind, seed, arguments.runs / f"{kind}-s{seed}"))
        for seed in range(1, arguments.seeds + 1)
        for kind in KINDS
    ]
    experiment: Experiment = load_attribute(f"{EXAMPLE}:experiment", "experiment")()
    starts: list[dict[str, float]] = load_attribute(f"{EXAMPLE}:STARTS", "list")
    manager, facts = experiment.workers["population"], versions()
    assert isinstance(manager, Population)
    lines = [
        "# Population-based training: CartPole-v1 with bad starting learning rates",
        "",
        "Command: `python benchmarks/population.py` (`examples/population.py`: `experiment` and `alone`). "
        f"{len(starts)} members that begin with the",
        f"learning rates {', '.join(f'{value:g}' for start in starts for value in start.values())}, "
        f"{experiment.limits.steps:,} env steps each;",
        "a run ends when its first member has trained them.",
        f"The manager decides every {manager.steps:,} env steps: the worst quarter goes on from the best "
        f"quarter's weights, its learning rate times {' or '.join(map(str, manager.factors))},",
        f"or, with probability {manager.resample}, drawn anew from "
        f"{' to '.join(map(str, manager.explore['learning_rate']))}.",
        f"The evaluation plays {EPISODES} episodes of each member's final checkpoint, deterministically.",
        f"Python {facts['python']}, {facts['cores']} cores, at the lowest priority beside other work.",
        "",
        f"| seed | run | evaluation of members 0 … {len(starts) - 1} | best member | median member | env "
        "steps of members | went on from another |",
        "|---|---|---|---|---|---|---|",
        *(row(*values) for values in runs),
        "",
    ]
    for what, of in (("best", max), ("median", median)):
        medians = {kind: median(of(means) for _, made, means, _, _ in runs if made == kind) for kind in KINDS}
        told = ", ".join(f"{medians[kind]:.1f} {how}" for kind, how in KINDS.items())
        lines.append(f"Median over {arguments.seeds} seeds of the {what} member's evaluation: {told}.")
    lines += ["", TRIAL]
    RESULT.write_text("\n".join([*lines, ""]))
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
