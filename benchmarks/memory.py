"""Prints what each process of a run holds once it trains, beside the plan that was
printed at its start.

    # three presets, with inline inference and with a policy worker
    python benchmarks/memory.py
    python benchmarks/memory.py CartPole-v1 examples/policy_workers.py:experiment

PSS is a process's own memory and its share of what it shares; `own` leaves out its share
of the segments (samples, requests, parameters), which the plan counts. Linux.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tidemill import Actors, AgentSpec, Experiment, PolicyWorkers
from tidemill.presets.environment_names import environment_from
from tidemill.presets.experiments import experiment_for


def served(name: str) -> Experiment:
    """Return the preset with a policy worker instead of inline inference."""
    made = experiment_for(name, environment_from(name))
    actor = made.workers["actor"]
    assert isinstance(actor, Actors)
    agents = (AgentSpec(inference="inference", sample_steps=actor.agents[0].sample_steps),)
    return made.replace(
        workers={
            "actor": actor.replace(agents=agents),
            "policy": PolicyWorkers(),
            "trainer": made.workers["trainer"],
        }
    )


def cartpole() -> Experiment:
    return served("CartPole-v1")


def half_cheetah() -> Experiment:
    return served("HalfCheetah-v5")


def pong() -> Experiment:
    return served("ALE/Pong-v5")


DEFAULT = [
    "CartPole-v1",
    "HalfCheetah-v5",
    "ALE/Pong-v5",
    *(f"{__file__}:{function.__name__}" for function in (cartpole, half_cheetah, pong)),
]


def figures(pid: int) -> dict[str, float]:
    """Return MB by name in a process's smaps_rollup."""
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return {line[0].rstrip(":"): int(line[1]) / 1000 for line in lines}


def measure(what: str, updates: int) -> tuple[dict[str, float], list[tuple[str, dict[str, float], bool]]]:
    """Return the plan, and (process, figures, whether it has loaded torch) of the run
    after so many updates."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "tidemill.cli.main", "train", what, "--run-dir", str(run)]
        main = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            metrics = run / "metrics.jsonl"
            while not metrics.exists() or metrics.read_bytes().count(b"\n") < updates:
                if main.poll() is not None:
                    raise SystemExit(f"{what} ended with status {main.returncode} before update {updates}")
                time.sleep(0.01)
            plan = json.loads((run / "memory.json").read_text())
            found = []
            for process in (psutil.Process(main.pid), *psutil.Process(main.pid).children(recursive=True)):
                # a worker's output goes to the log of its name
                log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
                if process.pid != main.pid and log.suffix != ".log":
                    continue
                name = "main" if process.pid == main.pid else log.stem
                found.append(
                    (name, figures(process.pid), "libtorch" in Path(f"/proc/{process.pid}/maps").read_text())
                )
            return plan["needs"], found
        finally:
            main.terminate()
            main.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=DEFAULT, help="what to train, as for tidemill train")
    parser.add_argument("--updates", type=int, default=3)
    arguments = parser.parse_args()
    for what in arguments.what:
        needs, found = measure(what, arguments.updates)
        print(f"\n{what.rpartition('/')[2] if '.py:' in what else what}")
        print("  plan: " + ", ".join(f"{name} {nbytes / 1e6:.1f} MB" for name, nbytes in needs.items()))
        print(f"  {'process':<16}{'PSS MB':>8}{'own MB':>8}{'RSS MB':>8}  torch")
        for name, mb, torch in found:
            print(
                f"  {name:<16}{mb['Pss']:8.1f}{mb['Pss'] - mb['Pss_Shmem']:8.1f}{mb['Rss']:8.1f}  "
                f"{'yes' if torch else 'no'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
