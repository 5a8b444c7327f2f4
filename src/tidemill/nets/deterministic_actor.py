"""Deterministic policies that press actions into their bounds by tanh, and explore by
noise that is added: the configuration, and the policy that it describes, in numpy."""

from dataclasses import dataclass

import numpy as np

from tidemill.api.policy import Policy
from tidemill.api.spaces import Spaces, schema_of_space
from tidemill.core.schema import Array, Arrays, Field
from tidemill.nets.bounded_actor import BoundedActor, BoundedPolicy
from tidemill.nets.mlp import Floats


@dataclass(frozen=True, kw_only=True)
class DeterministicActor(BoundedActor):
    """A deterministic actor acts in bounded Box spaces by centre + half · tanh(u), u from
    a network that sees the flattened observation (Lillicrap et al. 2016, "Continuous
    Control with Deep Reinforcement Learning"). To explore it adds normal noise to tanh(u)
    and clips the sum to [-1, 1], or draws the action uniformly: `TD3` says which, and
    sends that with the weights. It is for `TD3`, whose critics are its own; it answers
    neither a log-probability nor a value.
    """

    def weights(self, spaces: Spaces) -> dict[str, Field]:
        """Return the network's weights, ``noise`` and ``epsilon``."""
        return {**super().weights(spaces), "noise": Field((), "float32"), "epsilon": Field((), "float32")}

    def answer(self, spaces: Spaces) -> dict[str, Field]:
        """Return ``action``."""
        return schema_of_space(spaces.action, "action")

    def build(self, spaces: Spaces, seed: int) -> Policy:
        """Return the policy. Weights, and what it draws when it acts, come from two
        independent streams of `seed`."""
        return DeterministicPolicy(self, spaces, seed)


class DeterministicPolicy(BoundedPolicy):
    """The policy that `DeterministicActor` describes."""

    config: DeterministicActor

    def __init__(self, config: DeterministicActor, spaces: Spaces, seed: int) -> None:
        super().__init__(config, spaces, seed)
        self.noise: Floats = np.zeros((), np.float32)
        """Standard deviation of the noise, of actions in [-1, 1]."""
        self.epsilon: Floats = np.ones((), np.float32)
        """Probability of an action that is drawn uniformly."""
        self._named |= {"noise": self.noise, "epsilon": self.epsilon}

    def act(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        inputs = self.features(observation)
        n = len(inputs)
        if n == 0:
            return
        action = np.tanh(self._acting.forward(inputs)[0])
        action = np.clip(action + self.noise * self._noise(action.shape, deterministic), -1, 1)
        if self.epsilon and deterministic is not True:
            drawn = (self._rng.random(n) < self.epsilon) & ~np.broadcast_to(deterministic, n)
            action[drawn] = self._rng.uniform(-1, 1, action.shape).astype(np.float32)[drawn]
        out["action"][:n] = self.scaled(action)
