"""Actions of several kinds at once: a stroke of golf is a choice of the club (Discrete)
and how hard it swings (Box). Neither is worth much without the other. In the rough the
driver is not to be used: the mask says so.

tidemill check-env examples/hybrid_actions.py:Golf
tidemill train examples/hybrid_actions.py:experiment
"""

import gymnasium
import numpy as np

from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Gymnasium, Limits, Trainer

REACHES = np.array([200.0, 60.0, 8.0])  # of driver, iron and putter, in metres at full swing
HOLE = 1.0  # a ball that comes to lie so near is in


class Golf(gymnasium.Env):
    """A ball has 150 to 350 m to go. A stroke sends it as far as the club reaches times
    the swing, and a tenth of that off; each costs 1, up to 20 of them."""

    def __init__(self, rough: float = 30.0) -> None:
        spaces = gymnasium.spaces
        self.observation_space = spaces.Dict(
            {"lie": spaces.Box(0.0, 2.0, (3,), np.float32), "action_mask": spaces.MultiBinary(3)}
        )
        self.action_space = spaces.Dict({"club": spaces.Discrete(3), "swing": spaces.Box(0.0, 1.0, (1,))})
        self.rough = rough  # metres around the hole

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left, self.strokes = self.np_random.uniform(150, 350), 0
        return self._observation(), {}

    def step(self, action):
        flown = REACHES[action["club"]] * float(action["swing"][0])
        self.left = abs(self.left - flown * (1 + 0.1 * self.np_random.normal()))
        self.strokes += 1
        return self._observation(), -1.0, bool(self.left < HOLE), self.strokes == 20, {}

    def _observation(self):
        lie = np.minimum(self.left / REACHES, 2).astype(np.float32)
        return {"lie": lie, "action_mask": np.array([self.left > self.rough, 1, 1], np.int8)}


def experiment() -> Experiment:
    return Experiment(
        name="golf",
        policies={"policy": ActorCritic(log_std_init=-0.5)},
        workers={
            "actor": Actors(
                environment=Gymnasium(make=f"{__file__}:Golf"),
                lanes=16,
                agents=(AgentSpec(sample_steps=128),),
            ),
            "trainer": Trainer(algorithm=PPO(learning_rate=1e-3, minibatch_size=256, epochs=4)),
        },
        limits=Limits(mean_return=-3.5, window=500, steps=500_000),
    )
