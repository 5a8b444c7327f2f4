"""An environment that is slow because it waits: 32 copies wait on one event loop, and
training keeps its ratio to what they have done.

# iterations of training and evaluation, by AsyncTrainRunner
python examples/slow_environment.py
tidemill train examples/slow_environment.py:experiment --slots 32 --ratio 1/4 --launch threads
"""  # noqa: W505

import asyncio

import gymnasium
import numpy as np

from tidemill import (
    DQN,
    Asynchronous,
    AsyncTrainRunner,
    Experiment,
    Limits,
    LinearSchedule,
    QNetwork,
    Replay,
    ReplayActors,
    ReplayTrainer,
)


class Seek:
    """Go to a mark on a line of `width` places: each step costs 0.1, the mark is worth 1.
    A step takes `seconds`, as one of a far server does."""

    def __init__(self, width: int = 11, seconds: float = 0.01) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)  # where it is, and the mark
        self.action_space = gymnasium.spaces.Discrete(3)  # left, stay, right
        self.width, self.seconds, self.rng = width, seconds, np.random.default_rng()

    async def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.place, self.mark = (int(place) for place in self.rng.choice(self.width, 2, replace=False))
        self.left = 20
        await asyncio.sleep(self.seconds)
        return self._observation(), {}

    async def step(self, action):
        await asyncio.sleep(self.seconds)  # here it would ask a server, a device, a simulator
        self.place = min(max(self.place + int(action) - 1, 0), self.width - 1)
        self.left -= 1
        there = self.place == self.mark
        return self._observation(), 1.0 if there else -0.1, there, self.left == 0 and not there, {}

    def _observation(self):
        return np.array([self.place, self.mark], np.float32) / (self.width - 1)


def experiment() -> Experiment:
    return Experiment(
        name="seek",
        policies={"policy": QNetwork(hidden=(64, 64))},
        workers={
            "actor": ReplayActors(
                environment=Asynchronous(make=f"{__file__}:Seek", max_episode_steps=20),
            ),
            "trainer": ReplayTrainer(
                algorithm=DQN(
                    learning_rate=2e-3, target_steps=400, epsilon=LinearSchedule(1, 0.05, to_step=1_500)
                ),
                buffer=Replay(capacity=20_000, warm_up=300),
                batch_size=64,
                ratio="1/4",
            ),
        },
        limits=Limits(steps=4_000),
    )


def runner(iterations: int = 4) -> AsyncTrainRunner:
    return AsyncTrainRunner(
        experiment(), num_slots=32, num_iterations=iterations, training_steps=1_000, evaluation_steps=100
    )


if __name__ == "__main__":
    seek = runner()
    result = seek.run()
    for iteration in seek.iterations:
        print(
            f"{iteration['step']:6,.0f} steps: return "
            f"{iteration.get('iteration/evaluation_return', float('nan')):.2f} in the evaluation"
        )
    print(
        f"the run is in {result.folder}; runner(8).run({str(result.folder)!r}, resume=True) would go on with "
        "it"
    )
