"""Trains the tuned presets to their marks, over seeds, evaluates the final checkpoints,
and writes docs/results/.

    # all of them: about 25 minutes on two cores
    python benchmarks/marks.py
    python benchmarks/marks.py CartPole-v1 --seeds 2

Each run has the preset's whole step limit, on separate processes. "Reached at" is the
first update after which the mean return of the last 100 training episodes was at the
mark; the evaluation plays 100 episodes of the final checkpoint, deterministically.
"""

import argparse
import json
import statistics
from pathlib import Path

from tidemill.metrics.json_lines import read_metrics
from tidemill.presets.environment_names import environment_from
from tidemill.presets.experiments import experiment_for
from tidemill.run.source_info import versions
from tidemill.trained.evaluate import evaluate
from tidemill.trained.plot import plot
from tidemill.training.train import train

MARKS = {  # environment: (mark, seeds)
    "CartPole-v1": (475.0, 5),
    "Acrobot-v1": (-100.0, 5),
    "Pendulum-v1": (-250.0, 5),
    "LunarLander-v3": (200.0, 5),
    "HalfCheetah-v5": (3000.0, 3),
}
RESULTS = Path(__file__).parent.parent / "docs" / "results"


def run(name: str, mark: float, seed: int, runs: Path) -> dict[str, float | None]:
    """Train one seed (or take the finished run that is there) and evaluate it."""
    folder = runs / f"{name}-s{seed}"
    experiment = experiment_for(name, environment_from(name)).replace(seed=seed)
    if not (folder / "summary.json").exists():
        train(experiment, run_dir=folder, quiet=True)
    summary = json.loads((folder / "summary.json").read_text())
    records = read_metrics(folder)
    reached = next(
        (r["step"] for r in records if r["episodes"] >= 100 and r.get("return/mean", mark - 1) >= mark), None
    )
    played = evaluate(folder, episodes=100, seed=1000 + seed).specs[0]
    return {
        "seed": seed,
        "reached": reached,
        "last": summary["mean_return"],
        "evaluation": played.mean,
        "low": played.interval[0] if played.interval else played.mean,
        "high": played.interval[1] if played.interval else played.mean,
        "seconds": summary["seconds"],
        "speed": summary["steps_per_second"],
    }


def main() -> None:
    """Run what was asked for and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environments", nargs="*", default=list(MARKS))
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--runs", type=Path, default=Path("runs/marks"))
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in arguments.environments:
        mark, seeds = MARKS[name]
        seeds = arguments.seeds or seeds
        rows = [run(name, mark, seed, arguments.runs) for seed in range(1, seeds + 1)]
        limit = experiment_for(name, environment_from(name)).limits.steps
        facts = versions()
        lines = [
            f"# {name}",
            "",
            f"Mark: mean return {mark:g} within {limit:,} env steps. Command: `python benchmarks/marks.py "
            f"{name}`.",
            f"Python {facts['python']}, torch {facts['packages']['torch']}, {facts['cores']} cores.",
            "",
            "| seed | mark reached at env step | last 100 training episodes | evaluation, 100 episodes (95 % "
            "interval) | seconds | steps/s |",
            "|---|---|---|---|---|---|",
        ]
        for r in rows:
            reached = f"{r['reached']:,.0f}" if r["reached"] is not None else "not"
            lines.append(
                f"| {r['seed']} | {reached} | {r['last']:.1f} | {r['evaluation']:.1f} ({r['low']:.1f} … "
                f"{r['high']:.1f}) | {r['seconds']:.1f} | {r['speed']:,.0f} |"
            )
        count = sum(r["reached"] is not None for r in rows)
        mean = statistics.mean(r["evaluation"] for r in rows)
        lines += [
            "",
            f"Reached by {count} of {len(rows)} seeds; mean of the evaluations {mean:.1f}.",
            "",
            f"![curves]({name}.png)",
            "",
        ]
        (RESULTS / f"{name}.md").write_text("\n".join(lines))
        plot([arguments.runs / f"{name}-s{seed}" for seed in range(1, seeds + 1)], RESULTS / f"{name}.png")
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
