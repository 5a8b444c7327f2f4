"""Trains the experiments of an example to their limits, over seeds, evaluates the final
checkpoints, and prints a table for docs/results/.

    python benchmarks/examples.py masked_cartpole experiment feed_forward
    python benchmarks/examples.py impala experiment served --seeds 5

Each run is what `tidemill train examples/NAME.py:FUNCTION --seed SEED` does. The
evaluation plays 100 episodes of the final checkpoint, by the modes of its distributions,
and 100 more by samples of them. The picture goes to docs/results/NAME.png.
"""

import argparse
import json
from pathlib import Path

from tidemill.core.user_code_loading import load_attribute
from tidemill.run.source_info import versions
from tidemill.trained.evaluate import SpecEvaluation, evaluate
from tidemill.trained.plot import plot
from tidemill.training.train import train

HERE = Path(__file__).parent
RESULTS = HERE.parent / "docs" / "results"


def run(file: Path, function: str, seed: int, runs: Path) -> tuple[Path, str]:
    """Train one seed (or take the finished run that is there), evaluate it, and return
    its folder and its line of the table."""
    folder = runs / f"{file.stem}-{function}-s{seed}"
    if not (folder / "summary.json").exists():
        experiment = load_attribute(f"{file}:{function}", "experiment")()
        train(experiment.replace(seed=seed), run_dir=folder, source=file, quiet=True)
    summary = json.loads((folder / "summary.json").read_text())
    best, drawn = (
        evaluate(folder, 100, seed=1000 + seed, deterministic=mode, file=file, quiet=True).specs[0]
        for mode in (True, False)
    )
    cells = [
        function,
        seed,
        f"{summary['env_steps']:,}",
        f"{summary['mean_return']:.2f}",
        words(best),
        words(drawn),
        f"{summary['seconds']:.0f}",
    ]
    return folder, f"| {' | '.join(map(str, cells))} |"


def words(played: SpecEvaluation) -> str:
    """Return the mean of an evaluation and its 95 % interval."""
    low, high = played.interval or (played.mean, played.mean)
    return f"{played.mean:.2f} ({low:.2f} … {high:.2f})"


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("example")
    parser.add_argument("functions", nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/examples"))
    arguments = parser.parse_args()
    file, facts = HERE.parent / "examples" / f"{arguments.example}.py", versions()
    print(f"Python {facts['python']}, torch {facts['packages']['torch']}, {facts['cores']} cores.\n")
    print(
        "| experiment | seed | env steps trained | last 100 training episodes | evaluation by modes (95 %) | "
        "by samples (95 %) | seconds |"
    )
    print("|---|---|---|---|---|---|---|")
    folders = []
    for function in arguments.functions:
        for seed in range(1, arguments.seeds + 1):
            folder, line = run(file, function, seed, arguments.runs)
            folders.append(folder)
            print(line, flush=True)
    plot(folders, RESULTS / f"{file.stem}.png")


if __name__ == "__main__":
    main()
