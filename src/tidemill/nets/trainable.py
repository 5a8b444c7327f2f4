"""What gradient algorithms ask of a policy besides acting. Importing this file imports no torch; calling its methods may."""

from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from tidemill.api.policy import Policy
from tidemill.core.schema import Array, Arrays

if TYPE_CHECKING:
    from torch import Tensor


class Evaluation(NamedTuple):
    """What a policy thinks of n rows, with gradients."""

    log_prob: "Tensor"
    """Of the rows' actions under the present weights, float32 [n], in the unit of the answer's ``log_prob``."""
    entropy: "Tensor"
    """Of the action distribution, float32 [n], nats."""
    value: "Tensor"
    """float32 [n], in units of `value_scale`: times it, reward units."""


class TrainablePolicy(Policy):
    """A policy that gradient algorithms can train. An update goes::

    inputs = policy.prepare(observation)                   # once
    for each minibatch:
        policy.evaluate(inputs[minibatch], action[minibatch]) → loss.backward()
        optimiser over policy.trainable_parameters()       # in place: act() sees the new weights at once
    policy.fold(observation, returns)                      # once, after the last epoch
    """

    @abstractmethod
    def prepare(self, observation: Arrays) -> Arrays:
        """Return new arrays of n rows each, made from raw observations with the statistics last published: the network's inputs, which stay
        the same through all epochs of an update. Image leaves stay uint8 and may be the arrays that were handed in."""

    @abstractmethod
    def evaluate(self, inputs: "dict[str, Tensor]", action: "dict[str, Tensor]") -> Evaluation:
        """Return the evaluation of n rows: `inputs` as `prepare` made them, `action` by leaf name as stored in rows."""

    @abstractmethod
    def trainable_parameters(self) -> "list[Tensor]":
        """Return the leaf tensors to optimise, always the same ones. Their memory is the policy's own; where `.grad` is set already,
        gradients are added into it, so clear them with zeros."""

    @property
    @abstractmethod
    def value_scale(self) -> float:
        """What `Evaluation.value` is multiplied by to give reward units."""

    @abstractmethod
    def fold(self, observation: Arrays, returns: Array | None) -> None:
        """Merge the raw observations [n] and (unless None) the λ-returns [n], in reward units, of one update into the normalisers."""
