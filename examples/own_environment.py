"""An environment of one's own: any gymnasium.Env, and the experiment that trains on it.

tidemill check-env examples/own_environment.py:Catch
tidemill train examples/own_environment.py:experiment
"""

import gymnasium
import numpy as np

from tidemill import PPO, ActorCritic, Actors, Experiment, Gymnasium, Limits, Trainer


class Catch(gymnasium.Env):
    """A ball falls down one of `width` columns; move the paddle under it. The return is 1
    when it is caught and -1 when it is missed."""

    def __init__(self, width: int = 7, height: int = 10) -> None:
        # ball's column, ball's height, paddle's column
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (3,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(3)  # left, stay, right
        self.width, self.height = width, height

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.ball, self.paddle = (int(column) for column in self.np_random.integers(self.width, size=2))
        self.left = self.height
        return self._observation(), {}

    def step(self, action):
        self.paddle = min(max(self.paddle + int(action) - 1, 0), self.width - 1)
        self.left -= 1
        landed = self.left == 0
        reward = (1.0 if self.ball == self.paddle else -1.0) if landed else 0.0
        return self._observation(), reward, landed, False, {}

    def _observation(self):
        return np.array(
            [self.ball / self.width, self.left / self.height, self.paddle / self.width], np.float32
        )


def experiment() -> Experiment:
    return Experiment(
        name="catch",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(environment=Gymnasium(make=f"{__file__}:Catch")),
            "trainer": Trainer(algorithm=PPO()),
        },
        limits=Limits(mean_return=0.95, window=1000, steps=500_000),
    )
