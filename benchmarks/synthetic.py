"""Three experiments that one thing each holds back, to see whether `bench` says so.

# all three, and the sentence of each
python benchmarks/synthetic.py [--seconds 4]
# or slow_network, slow_learner
tidemill bench benchmarks/synthetic.py:slow_environment
"""

import argparse
from pathlib import Path
from time import perf_counter

import gymnasium
import numpy as np

from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Gymnasium, Limits, Trainer
from tidemill.core.user_code_loading import load_attribute


class Burn(gymnasium.Env):
    """Each step computes for 200 µs; an episode has 50."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        until = perf_counter() + 200e-6
        while perf_counter() < until:
            pass
        self.steps += 1
        return np.full(4, action, np.float32), 1.0, self.steps == 50, False, {}


def _experiment(name, environment, policy, algorithm, lanes, sample_steps, **trainer):
    return Experiment(
        name=name,
        policies={"policy": policy},
        workers={
            "actor": Actors(
                environment=environment, lanes=lanes, slots=2, agents=(AgentSpec(sample_steps=sample_steps),)
            ),
            "trainer": Trainer(algorithm=algorithm, **trainer),
        },
        limits=Limits(steps=1_000_000),
    )


def slow_environment():
    """An environment that computes 200 µs a step, an easy network, one epoch."""
    return _experiment(
        "slow-environment",
        Gymnasium(make=f"{__file__}:Burn"),
        ActorCritic(),
        PPO(epochs=1, minibatch_size=256),
        8,
        32,
    )


def slow_network():
    """A big network that acts for two lanes at a time, which uses it badly, and learns
    from each row once, in large minibatches. With the size of its batch set it is run as
    it is given; by turns, inference and training would hardly differ."""
    policy = ActorCritic(hidden=(1024, 1024), normalise_observations=False)
    return _experiment(
        "slow-network",
        Gymnasium(id="CartPole-v1"),
        policy,
        PPO(epochs=1, minibatch_size=512),
        2,
        256,
        batch_size=512,
    )


def slow_learner():
    """A quick environment, an easy network, and forty epochs of small minibatches."""
    return _experiment(
        "slow-learner", Gymnasium(id="CartPole-v1"), ActorCritic(), PPO(epochs=40, minibatch_size=128), 16, 64
    )


def main():
    """Print what `bench` says of each."""
    from tidemill.bench.efficiency import bench
    from tidemill.layouts.auto_layout import lay_out

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=4.0)
    seconds, file = parser.parse_args().seconds, Path(__file__)
    for name in ("slow_environment", "slow_network", "slow_learner"):
        made = load_attribute(f"{file}:{name}", "experiment")()
        found = bench(lay_out(made, file).experiment, file, seconds)
        print(f"{name}: {found.advice.text}", flush=True)


if __name__ == "__main__":
    main()
