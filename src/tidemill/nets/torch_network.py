"""A policy whose network is a torch module of one's own. Imports no torch; `network`
does."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tidemill.api.policy import PolicyConfig
from tidemill.api.spaces import Spaces
from tidemill.core.schema import Arrays, Field
from tidemill.nets.actor_critic import check_deviation
from tidemill.nets.masks import mask_of
from tidemill.nets.trainable import TrainablePolicy
from tidemill.nets.weights import valued_answer

if TYPE_CHECKING:
    from torch.nn import Module


@dataclass(frozen=True, kw_only=True)
class TorchNetwork(PolicyConfig):
    """A torch network is a feed-forward policy with a network of one's own. Subclass it,
    with the network's settings as fields, and implement `network`.

    Sampling, log-probabilities, parameters and checkpoints are done by the base, for
    every action space of `ActorCritic`.
    """

    log_std_init: float = 0.0
    """See `ActorCritic.log_std_init`."""
    action_mask: str | None = "action_mask"
    """See `ActorCritic.action_mask`. The network sees this part, too, but need do nothing
    about it: what is forbidden is taken out of its head."""

    @abstractmethod
    def network(self, spaces: Spaces, outputs: int) -> "Module":
        """Return the network. It is called with the raw observations of n rows by leaf
        name (``{"obs": Tensor}`` unless the space is nested; float32, or the integers
        that rows hold) and returns (head float32 [n, outputs], value float32 [n]).

        outputs: width of the head, which follows from the action space: a logit for each
            choice of a Discrete or MultiDiscrete and each bit of a MultiBinary, a mean
            for each number of a float Box; those of a Dict's or Tuple's leaves side by
            side, in their order

        The value is the expected return, divided by the running standard deviation of
        returns (`TrainablePolicy.value_scale`; 1 without `normalise_returns`), so that a
        plain linear head will do: nothing needs to be scaled here. The module stays in
        eval mode, so that acting and training see one function. Its weights are drawn
        from the run's seed. It is built on the CPU and moved to the worker's device:
        tensors that it needs besides its parameters are to be its buffers."""

    def answer(self, spaces: Spaces) -> dict[str, Field]:
        """Return ``action`` (its space's own field), ``log_prob`` and ``value`` (float32,
        value in reward units)."""
        check_deviation(self, spaces)
        return valued_answer(spaces)

    def build(self, spaces: Spaces, seed: int) -> TrainablePolicy:
        """Return the policy. Weights and samples come from two independent streams of
        `seed`."""
        return self.build_on("cpu", spaces, seed)

    def build_on(self, device: str, spaces: Spaces, seed: int) -> TrainablePolicy:
        """Return the policy; its first weights are the same on every device."""
        from tidemill.nets.torch_module import ModuleNetwork

        weights_seed, sampling_seed = np.random.SeedSequence(seed).spawn(2)
        mask = mask_of(spaces, self.action_mask)
        network = ModuleNetwork(self.network, spaces, mask, self.log_std_init, weights_seed, device)
        return TorchNetworkPolicy(network, mask, np.random.default_rng(sampling_seed))


class TorchNetworkPolicy(TrainablePolicy):
    """The policy of a `TorchNetwork`: it hands raw observations to a module of the user's
    own. Its parameters are the module's parameters and buffers (``network.*``),
    ``log_std`` where actions have one, and the statistics ``returns.*``."""

    def prepare(self, observation: Arrays) -> Arrays:
        """Return the observation: the module takes it raw."""
        return dict(observation)
