"""CartPole-v1 on separate processes: steps/s, seconds to 475, memory per worker.

    python benchmarks/cartpole.py [--runs 5]

Untuned settings: one actor with 64 lanes and inline inference, one trainer, 4 epochs. Memory is the proportional set size (PSS) of each worker
process, read while it trains.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import psutil

from tidemill.envs.resolve import environment_from
from tidemill.run.metrics import read_metrics
from tidemill.run.presets import experiment_for
from tidemill.run.session import ProcessesLauncher, train


class Watched(ProcessesLauncher):
    """Reads the workers' memory now and then."""

    pss: dict[str, float]

    def wait(self, seconds: float) -> None:
        """Wait, then look."""
        super().wait(seconds)
        for name, process in self._processes.items():
            try:
                self.pss[name] = max(self.pss.get(name, 0), psutil.Process(process.pid).memory_full_info().pss / 2**20)
            except psutil.Error:
                continue


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    speeds, seconds, steps = [], [], []
    for seed in range(1, parser.parse_args().runs + 1):
        experiment = experiment_for("CartPole-v1", environment_from("CartPole-v1")).replace(seed=seed)
        with tempfile.TemporaryDirectory() as folder:
            result = train(experiment, run_dir=Path(folder) / "run", quiet=True)
            reached = next(r for r in read_metrics(result.folder) if r["episodes"] >= 100 and r.get("return/mean", 0) >= 475)
        speeds.append(result.summary["steps_per_second"])
        seconds.append(reached["time/seconds"])
        steps.append(reached["step"])
        print(f"seed {seed}: {speeds[-1]:,.0f} steps/s over 600 k steps; 475 after {seconds[-1]:.2f} s, {steps[-1]:,.0f} env steps", flush=True)
    print(
        f"median: {statistics.median(speeds):,.0f} steps/s; 475 after {statistics.median(seconds):.2f} s, {statistics.median(steps):,.0f} env steps"
    )
    # Reading PSS costs time, so it has a run of its own.
    from tidemill.run import session

    Watched.pss = {}
    session.LAUNCHERS["watched"] = Watched
    with tempfile.TemporaryDirectory() as folder:
        experiment = experiment_for("CartPole-v1", environment_from("CartPole-v1"))
        train(experiment.replace(limits=experiment.limits.replace(steps=200_000)), launch="watched", run_dir=Path(folder) / "run", quiet=True)
    print("PSS, MB: " + ", ".join(f"{name} {size:.0f}" for name, size in Watched.pss.items()))


if __name__ == "__main__":
    main()
