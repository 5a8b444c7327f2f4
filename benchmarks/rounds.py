"""What two promises cost while nothing happens: a curriculum's rounds, and `hurried()`.

    python benchmarks/rounds.py                   # two minutes
    python benchmarks/rounds.py --pairs 3 --updates 400

In lockstep with `exact_resume` nobody begins a round of a curriculum before the runner
has said its stage (`workers/stages.py`). Told is how many milliseconds an update of
CartPole takes with a curriculum (whose first stage never ends) and without, by each
launcher, an actor and a trainer, 8 lanes × 32 steps and two steps of learning, so that a
round is short: medians of runs by turns, and the median of the differences with its 95 %
interval.

Then the nanoseconds of `hurried()`, which PPO and IMPALA ask between two minibatches
whether a signal's time is running out, as its trainer's algorithm asks it in a run.
"""

import argparse
import tempfile
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from pairs import interval

import tidemill
from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Gymnasium, Limits, Trainer
from tidemill.api.curriculum import Stage
from tidemill.launchers.inline import InlineLauncher
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.run_control import RunControl
from tidemill.workers.trainer import TrainerWorker

WARM = 50  # updates that do not count
NEVER = (Stage(until="update > 100000000"), Stage())
CALLS = 200_000


def lockstep(updates: int, staged: bool, exact: bool = True) -> Experiment:
    """An actor and a trainer in lockstep, with a curriculum or without."""
    return Experiment(
        name="rounds",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(
                environment=Gymnasium(id="CartPole-v1"), lanes=8, agents=(AgentSpec(sample_steps=32),)
            ),
            "trainer": Trainer(algorithm=PPO(epochs=2, minibatch_size=256), max_policy_lag=0),
        },
        limits=Limits(updates=updates),
        curriculum=NEVER if staged else (),
        exact_resume=exact,
    )


@contextmanager
def folder() -> Iterator[Path]:
    """A folder for a run."""
    with tempfile.TemporaryDirectory(prefix="tidemill-rounds-") as name:
        yield Path(name) / "run"


def per_update(launch: str, updates: int, staged: bool) -> float:
    """Return the milliseconds of an update."""
    with folder() as run:
        made = lockstep(updates, staged)
        tidemill.train(made, launch=launch, run_dir=run, layout="given", log="", quiet=True)
        at = {int(record["update"]): record["time/seconds"] for record in read_metrics(run)}
    return 1000 * (at[updates] - at[WARM]) / (updates - WARM)


def of_hurried() -> float:
    """Return the nanoseconds of a call, in a run inline."""
    found: list[float] = []

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if metrics["update"] == WARM:
            launcher = control._controller.launcher
            assert isinstance(launcher, InlineLauncher)
            trainer = launcher._workers["trainer-0"]
            assert isinstance(trainer, TrainerWorker)
            hurried = trainer.learner.algorithm.hurried
            found.append(min(timeit.repeat(hurried, number=CALLS, repeat=5)) / CALLS * 1e9)

    with folder() as run:
        made = lockstep(WARM, staged=False, exact=False)
        tidemill.train(
            made, launch="inline", run_dir=run, layout="given", log="", quiet=True, on_update=on_update
        )
    return found[0]


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--updates", type=int, default=500, help="of a run, 900 at most")
    parser.add_argument("--launch", nargs="*", default=("processes", "threads", "inline"))
    given = parser.parse_args()
    for launch in given.launch:
        seen: dict[bool, list[float]] = {False: [], True: []}
        for pair in range(given.pairs):
            for staged in (pair % 2 == 0, pair % 2 == 1):
                seen[staged].append(per_update(launch, given.updates, staged))
        more = [with_ - without for with_, without in zip(seen[True], seen[False], strict=True)]
        low, high = interval(more)
        print(
            f"{launch:<10} an update takes {median(seen[False]):.2f} ms without a curriculum, "
            f"{median(seen[True]):.2f} ms with one: {median(more):+.2f} ms ({low:+.2f} to {high:+.2f}), "
            f"{given.pairs} pairs",
            flush=True,
        )
    print(f"hurried()  takes {of_hurried():.0f} ns")


if __name__ == "__main__":
    main()
