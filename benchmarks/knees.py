"""Where the cost of a row bends: PPO along one setting at a time, with environments that
cost nothing, so that what remains is Tidemill's.

    python benchmarks/knees.py [AXIS ...] [--seconds 2] [--native off avx512]

Told are processor µs per row (an agent's step) in one process: acting, learning (four
epochs), the rest (`books`), and all; of several actors, in processes, µs of the clock. A
knee is a value at which they grow faster than the work does. Of kernels named by
`--native` each value is run with one after the other; by numpy where none is named.
"""

import argparse
import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import process_time
from typing import Any

import gymnasium
import numpy as np
import pettingzoo

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Impala,
    Limits,
    PettingZoo,
    RecurrentActorCritic,
    RunControl,
    RunError,
    Trainer,
    train,
)
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.policy import PolicyConfig
from tidemill.bench.efficiency import ENDLESS
from tidemill.testing.scripted import Free

ROWS = 4096  # of a batch


class ManyParts(gymnasium.Env[Any, Any]):
    """An environment whose observation is a Dict of many parts, and costs nothing."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, parts: int = 1) -> None:
        """Prepare the only answer."""
        each = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
        self.observation_space = gymnasium.spaces.Dict({f"part{i}": each for i in range(parts)})
        self._seen = {f"part{i}": np.zeros(4, np.float32) for i in range(parts)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Return zeros."""
        return self._seen, {}

    def step(self, action: Any) -> Any:
        """Return zeros."""
        return self._seen, 1.0, False, False, {}


class ManyAgents(pettingzoo.ParallelEnv[str, Any, Any]):  # type: ignore[misc]
    """A parallel environment with many agents, which costs nothing."""

    metadata: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, agents: int = 2) -> None:
        """Prepare the only answers."""
        self.possible_agents = [f"agent{i}" for i in range(agents)]
        self.agents: list[str] = []
        self._space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
        zeros = np.zeros(4, np.float32)
        self._seen = dict.fromkeys(self.possible_agents, zeros)
        self._paid = dict.fromkeys(self.possible_agents, 1.0)
        self._over = dict.fromkeys(self.possible_agents, False)
        self._infos: dict[str, dict[str, Any]] = {name: {} for name in self.possible_agents}

    def observation_space(self, agent: str) -> Any:
        """Return four numbers."""
        return self._space

    def action_space(self, agent: str) -> Any:
        """Return two actions."""
        return gymnasium.spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Return zeros."""
        self.agents = list(self.possible_agents)
        return self._seen, self._infos

    def step(self, actions: Any) -> Any:
        """Return zeros."""
        return self._seen, self._paid, self._over, self._over, self._infos

    def close(self) -> None:
        """Hold nothing."""


def made(
    environment: EnvironmentConfig,
    policy: PolicyConfig | None = None,
    lanes: int = 64,
    agents: int = 1,
    count: int = 1,
    minibatch: int = 1024,
    rows: int = ROWS,
    algorithm: Any = None,
) -> Experiment:
    """Return the experiment: batches of `rows`, or of 16 steps if that is more."""
    steps = max(rows // (lanes * agents * count), 16)
    return Experiment(
        name="knee",
        policies={"policy": policy or ActorCritic(normalise_observations=False)},
        workers={
            "actor": Actors(
                environment=environment,
                lanes=lanes,
                count=count,
                slots=2,
                agents=(AgentSpec(sample_steps=steps),),
            ),
            "trainer": Trainer(
                algorithm=algorithm or PPO(minibatch_size=minibatch, epochs=4, clip_apart=False)
            ),
        },
    )


@dataclass(frozen=True)
class Axis:
    """A setting that is turned: `make` makes the experiment of a value."""

    values: Sequence[Any]
    make: Callable[[Any], Experiment]
    launch: str = "inline"
    agents: Callable[[Any], int] = lambda value: 1


AXES = {
    "lanes": Axis((1, 2, 4, 8, 16, 64, 256, 1024), lambda n: made(Free(), lanes=n)),
    "observation": Axis(
        (4, 40, 400, 4_000, 40_000), lambda n: made(Free(shape=(n,)), lanes=16 if n > 4_000 else 64)
    ),
    "width": Axis(
        (64, 128, 256, 512, 1024, 2048),
        lambda n: made(Free(), ActorCritic(hidden=(n, n), normalise_observations=False)),
    ),
    "minibatch": Axis((32, 64, 128, 256, 512, 1024, 4096), lambda n: made(Free(), minibatch=n)),
    "actions": Axis((2, 18, 100, 1_000), lambda n: made(Free(actions=n))),
    "lstm": Axis(
        (16, 64, 256),
        lambda n: made(
            Free(), RecurrentActorCritic(cell="lstm", hidden=(n,), width=n, normalise_observations=False)
        ),
    ),
    "image": Axis(
        ("nature_cnn", "impala_cnn"),
        lambda name: made(
            Free(shape=(4, 84, 84), dtype="uint8"),
            ActorCritic(encoder=name, convolutions="float32"),
            lanes=16,
            minibatch=256,
            rows=1024,
        ),
    ),
    "impala": Axis(
        (4, 64, 256), lambda n: made(Free(), lanes=n, algorithm=Impala(minibatch_size=2048, clip_apart=False))
    ),
    "parts": Axis(
        (1, 4, 16, 64), lambda n: made(Gymnasium(make=f"{__file__}:ManyParts", kwargs={"parts": n}), lanes=16)
    ),
    "agents": Axis(
        (1, 10, 50, 200),
        lambda n: made(PettingZoo(make=f"{__file__}:ManyAgents", kwargs={"agents": n}), lanes=4, agents=n),
        agents=lambda n: n,
    ),
    "actors": Axis((1, 2, 4, 16, 64), lambda n: made(Free(), lanes=8, count=n), launch="processes"),
}


def cost(experiment: Experiment, seconds: float, launch: str, agents: int) -> dict[str, float]:
    """Return the µs per row of a run, after its first update."""
    seen: list[tuple[float, float, dict[str, float]]] = []

    def note(metrics: dict[str, float], run: RunControl) -> None:
        seen.append((process_time(), metrics["step"] * agents, metrics))

    with tempfile.TemporaryDirectory(prefix="tidemill-knees-") as folder:
        limits = Limits(seconds=seconds, updates=ENDLESS)
        train(
            experiment.replace(limits=limits),
            run_dir=f"{folder}/run",
            source=__file__,
            quiet=True,
            launch=launch,
            layout="given",
            on_update=note,
        )
    if len(seen) < 2:
        raise RunError(f"{len(seen)} updates in {seconds:g} s; give it longer: --seconds N")
    (begin, before, first), (end, after, last) = seen[0], seen[-1]
    rows, wall = after - before, last["time/seconds"] - first["time/seconds"]
    if launch != "inline":
        return {"wall": wall / rows * 1e6}
    whole = (end - begin) / rows * 1e6
    # shares are of a worker's last quarter second: of a few updates they say nothing
    places = (("time/actor-0/inference", "acting"), ("time/trainer-0/train", "learning"))
    told = [metrics for _, _, metrics in seen if all(name in metrics for name, _ in places)]
    parts = {said: whole * sum(m[name] for m in told) / len(told) for name, said in places if len(told) > 4}
    return {"all": whole} | parts | ({"books": whole - sum(parts.values())} if parts else {})


def main() -> None:
    """Print a table for each axis."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("axes", nargs="*", default=list(AXES), metavar="AXIS")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--native", nargs="+", default=["auto"], metavar="KERNEL")
    given = parser.parse_args()
    for name in given.axes:
        axis = AXES[name]
        print(f"\n{name}: µs per row", flush=True)
        for value, kernel in itertools.product(axis.values, given.native):
            print(f"  {value:>10}  {kernel:8}  ", end="", flush=True)
            try:
                experiment = axis.make(value)
                policy = experiment.policies["policy"].replace(native=kernel)
                experiment = experiment.replace(policies={"policy": policy})
                found = cost(experiment, given.seconds, axis.launch, axis.agents(value))
            except Exception as error:  # the next value may be possible
                print(f"{type(error).__name__}: {error}", flush=True)
                continue
            print("  ".join(f"{k} {v:8.2f}" for k, v in found.items()), flush=True)


if __name__ == "__main__":
    main()
