"""What every peer shares: the works' hyper-parameters, the command line, and the stop
rule. Standard library alone: it runs in each peer's own environment.

A peer is a script that its own interpreter runs,
``python NAME.py WORK --seconds S --seed N``; the last line of its standard output is one
JSON object: steps, seconds, steps_per_second, core_seconds (processor time of all
processes of its session), updates, seconds_to_475 (None where it was not reached, or is
not asked), mean_return of the last 100 episodes, settings, computes (the data type),
versions.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any


@dataclass(frozen=True)
class Work:
    """What is trained, the same for all systems. Adam; nothing is normalised but each
    batch's advantages."""

    environment: str
    network: str  # "mlp": 64×64 tanh, actor and critic apart; "nature": Nature CNN, one trunk
    epochs: int
    learning_rate: float
    clip: float = 0.2
    entropy_coefficient: float = 0.0
    gamma: float = 0.99
    gae_lambda: float = 0.95
    value_coefficient: float = 0.5
    max_gradient_norm: float = 0.5
    adam_epsilon: float = 1e-5
    rollout: int = 128
    minibatches: int = 4  # of each epoch
    target: float | None = None  # mean return of the last 100 training episodes


_CARTPOLE = Work("CartPole-v1", "mlp", epochs=4, learning_rate=3e-3, target=475.0)
_PONG = Work("ALE/Pong-v5", "nature", epochs=4, learning_rate=2.5e-4, clip=0.1, entropy_coefficient=0.01)
_SMALL = Work("", "mlp", epochs=10, learning_rate=3e-4, rollout=256, minibatches=32)
WORKS = {
    "cartpole": _CARTPOLE,
    "cartpole_vector": _CARTPOLE,
    "half_cheetah": Work("HalfCheetah-v5", "mlp", epochs=4, learning_rate=3e-4),
    "pong_float32": _PONG,
    "pong_one_epoch_float32": replace(_PONG, epochs=1),
    "pong": _PONG,  # in bfloat16
    "pong_one_epoch": replace(_PONG, epochs=1),
    # batches as Stable-Baselines3 has them: 8 lanes of 256 rows, minibatches of 64
    "cartpole_small": replace(_SMALL, environment="CartPole-v1", target=475.0),
    "cartpole_one": replace(_SMALL, environment="CartPole-v1", rollout=2048),
    "hopper_one": replace(_SMALL, environment="Hopper-v5", rollout=2048),
    "cartpole_vector_small": replace(_SMALL, environment="CartPole-v1", target=475.0),
    "hopper_small": replace(_SMALL, environment="Hopper-v5"),
    "half_cheetah_small": replace(_SMALL, environment="HalfCheetah-v5"),
}


@dataclass(frozen=True)
class OffPolicyWork:
    """What is trained from a replay memory, the same for all systems: uniform draws,
    plain targets, Adam. Layers have relu."""

    environment: str
    algorithm: str  # "DQN" (not double, not duelling, ε-greedy) or "SAC" (its temperature is learnt)
    hidden: tuple[int, ...]
    batch: int
    updates: int  # for each step of all `envs`
    learning_rate: float
    target_rate: float  # of the way that target weights go
    target_updates: int  # in every so many updates
    max_gradient_norm: float | None
    envs: int = 8
    gamma: float = 0.99
    capacity: int = 100_000
    warm_up: int = 1_000
    target: None = None


OFF_POLICY = {
    "dqn": OffPolicyWork("CartPole-v1", "DQN", (64, 64), 64, 4, 5e-4, 1.0, 500, 10.0),
    "sac": OffPolicyWork("HalfCheetah-v5", "SAC", (256, 256), 256, 8, 3e-4, 0.005, 1, None),
}


def session_seconds() -> float:
    """Return the processor seconds so far of all processes of this session."""
    ticks, session = 0, os.getsid(0)
    for process in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = process.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


class Meter:
    """The stop rule: `seconds` of training after a warm-up; only env steps count that
    have been trained on."""

    def __init__(self, seconds: float, target: float | None) -> None:
        self.warm, self.seconds, self.target = min(2.0, seconds / 5), seconds, target
        self.reached: float | None = None
        self.mean_return: float | None = None
        self._start = self._first = self._last = perf_counter()
        self._first_steps: int | None = None
        self._last_steps = self._updates = 0
        self._first_core = self._core_seconds = 0.0

    def start(self) -> None:
        """Training begins now."""
        self._start = perf_counter()

    def update(self, steps: int, mean_return: float | None = None) -> bool:
        """All `steps` so far have been trained on; return whether that was long enough.
        `mean_return` is that of 100 episodes, or None before."""
        now, self.mean_return = perf_counter(), mean_return
        if (
            self.reached is None
            and self.target is not None
            and mean_return is not None
            and mean_return >= self.target
        ):
            self.reached = now - self._start
        if now - self._start < self.warm:
            return False
        if self._first_steps is None:
            self._first, self._first_steps, self._first_core = now, steps, session_seconds()
            return False
        self._last, self._last_steps, self._updates = now, steps, self._updates + 1
        over = now - self._first >= self.seconds
        if over:
            self._core_seconds = session_seconds() - self._first_core
        return over

    def report(self, settings: dict[str, Any], packages: tuple[str, ...], computes: str = "float32") -> None:
        """Print the JSON line."""
        if self._first_steps is None or not self._updates:
            raise SystemExit("fewer than two updates were finished: give it more seconds")
        steps, seconds = self._last_steps - self._first_steps, self._last - self._first
        found = {
            "steps": steps,
            "seconds": seconds,
            "steps_per_second": steps / seconds,
            "core_seconds": self._core_seconds,
            "updates": self._updates,
            "seconds_to_475": self.reached,
            "mean_return": self.mean_return,
            "settings": settings,
            "computes": computes,
            "versions": {
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in packages},
            },
        }
        sys.stderr.flush()
        print("\n" + json.dumps(found), flush=True)


def arguments(layouts: dict[str, dict[str, Any]]) -> tuple[argparse.Namespace, Any, dict[str, Any]]:
    """Return the command line, the work, and the system's layout for it: `layouts` (work
    → names and values), changed by ``--layout NAME=VALUE``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=list(layouts))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--layout", action="append", default=[], metavar="NAME=VALUE", help="to look for a better layout"
    )
    found = parser.parse_args()
    layout = dict(layouts[found.work])
    for change in found.layout:
        name, _, value = change.partition("=")
        layout[name] = json.loads(value)
    return found, {**WORKS, **OFF_POLICY}[found.work], layout
