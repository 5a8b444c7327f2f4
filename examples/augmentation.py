"""Buffer workers between actors and trainer: images are shifted at random, and valued
anew by the newest policy, before they are trained on.

tidemill train examples/augmentation.py:experiment
"""

import gymnasium
import numpy as np

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Buffers,
    Experiment,
    Gymnasium,
    Limits,
    RandomShift,
    Reanalyse,
    Trainer,
)

SIZE, STEP = 40, 4  # pixels


class Catch(gymnasium.Env):
    """A ball falls; the paddle at the bottom pays 1 for catching it."""

    observation_space = gymnasium.spaces.Box(0, 255, (1, SIZE, SIZE), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.ball, self.paddle = [0, int(self.np_random.integers(SIZE // STEP))], SIZE // STEP // 2
        return self.picture(), {}

    def step(self, action):
        self.paddle = min(max(self.paddle + int(action) - 1, 0), SIZE // STEP - 1)
        self.ball[0] += 1
        over = self.ball[0] == SIZE // STEP - 1
        return self.picture(), float(over and self.ball[1] == self.paddle), over, False, {}

    def picture(self):
        cells = np.zeros((SIZE // STEP, SIZE // STEP), np.uint8)
        cells[tuple(self.ball)] = cells[-1, self.paddle] = 255
        return np.kron(cells, np.ones((STEP, STEP), np.uint8))[None]


def experiment() -> Experiment:
    return Experiment(
        name="augmentation",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(
                environment=Gymnasium(make=f"{__file__}:Catch"),
                lanes=32,
                agents=(AgentSpec(samples="gathered", sample_steps=32),),
            ),
            "buffers": Buffers(process=(RandomShift(pixels=2), Reanalyse()), policy="policy"),
            "trainer": Trainer(algorithm=PPO(minibatch_size=256, epochs=4)),
        },
        limits=Limits(steps=200_000, mean_return=0.95),
    )
