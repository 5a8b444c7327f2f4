"""What gradient algorithms ask of a policy besides acting. Importing this file imports no
torch; calling its methods may."""

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.api.policy import Policy
from tidemill.core.schema import Array, Arrays

if TYPE_CHECKING:
    from torch import Tensor

LibraryName = Literal["numpy", "torch"]


class Evaluation(NamedTuple):
    """What a policy thinks of n rows: tensors with gradients from `evaluate`, plain
    arrays of the policy's library from `forward`."""

    log_prob: Any
    """Of the rows' actions under the present weights, float32 [n], in the unit of the
    answer's ``log_prob``."""
    entropy: Any
    """Of the action distribution, float32 [n], nats."""
    value: Any
    """float32 [n], in units of `value_scale`: times it, reward units."""


class TrainablePolicy(Policy):
    """A policy that gradient algorithms can train. An update goes, in torch::

    # once
    policy.check(observation)
    inputs = policy.prepare(observation)
    for each minibatch:
        policy.evaluate(inputs[minibatch], action[minibatch]) → loss.backward()
        # in place: act() sees the new weights at once
        optimiser over policy.trainable_parameters()
    # once, after the last epoch
    policy.fold(observation, returns)

    or, without autograd around the policy (for an MLP on a CPU: without torch), in arrays
    of its `library`::

        policy.forward(inputs[minibatch], action[minibatch]) → derivatives of the loss
        policy.backward(of_log_prob, of_entropy, of_value, gradient)

    Between equal trainers ``moments`` are summed before ``fold_moments``, in place of
    ``fold``.

    A policy that remembers (`recurrent`) is evaluated on m stretches of L rows, of which
    k are asked for. Its inputs are those of all L·m rows, time first (row t of stretch i
    is t·m + i), and besides them::

        on_reset: bool [L, m]: rows that begin an episode; the state before them is the
            default one
        state.*: [m, ...]: the state before the first row of each stretch, as rows hold it
        rows: integers [k]: the rows asked for; `action` and what is returned are of
            these, in their order

    Inputs of rows that are not asked for must be finite all the same.
    """

    library: LibraryName = "torch"
    """Whose arrays `forward` and `backward` take and give."""
    recurrent: bool = False
    """Whether it has a state, and is evaluated on stretches of rows."""

    def place(self) -> AbstractContextManager[object]:
        """Return a context in which what is done with the policy's tensors is done on its
        device, in its order of operations. Never held while other policies work."""
        return nullcontext()

    def settle(self) -> None:
        """Wait until the device has done all that was begun."""

    @abstractmethod
    def prepare(self, observation: Arrays) -> Arrays:
        """Return new arrays of n rows each, made from raw observations with the
        statistics last published: the network's inputs, which stay the same through all
        epochs of an update. Image leaves stay uint8 and may be the arrays that were
        handed in."""

    def check(self, observation: Arrays) -> None:
        """Raise `EnvironmentFault` when raw observations [n], on all of which an agent
        acted, leave it no action. Algorithms call this before they train on them: to
        answer such a row is no fault, since it may be a final one, asked for its value
        alone."""

    @abstractmethod
    def evaluate(self, inputs: "dict[str, Tensor]", action: "dict[str, Tensor]") -> Evaluation:
        """Return the evaluation of n rows: `inputs` as `prepare` made them, `action` by
        leaf name as stored in rows."""

    @abstractmethod
    def trainable_parameters(self) -> "list[Tensor]":
        """Return the leaf tensors to optimise, always the same ones. Their memory is the
        policy's own; where `.grad` is set already, gradients are added into it, so clear
        them with zeros."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of trainable weights."""

    def flat_weights(self) -> NDArray[np.float32]:
        """Return all trainable weights as one array [size] that views the policy's own
        memory; of policies whose `library` is numpy."""
        raise TypeError(f"the weights of a {type(self).__name__} are tensors: see trainable_parameters")

    @abstractmethod
    def forward(self, inputs: Mapping[str, Any], action: Mapping[str, Any]) -> Evaluation:
        """Return what `evaluate` returns, as plain arrays that the next `forward` may
        rewrite. What `backward` needs is kept."""

    @abstractmethod
    def backward(self, of_log_prob: Any, of_entropy: Any, of_value: Any, out: Any) -> None:
        """Write (not add) the gradient of Σ (of_log_prob · log_prob + of_entropy ·
        entropy + of_value · value) over the rows of the last `forward` into `out`,
        float32 [size], in the order of the weights; once for each `forward`. All are
        arrays of the library, the factors [n]; None for `of_entropy` stands for zeros.
        Hand in the same `out` each time: finding every weight's place in another one
        takes time."""

    @property
    @abstractmethod
    def value_scale(self) -> float:
        """What `Evaluation.value` is multiplied by to give reward units."""

    @abstractmethod
    def moments(self, observation: Arrays, returns: Array | None) -> NDArray[np.float64]:
        """Return what the normalisers need of the raw observations [n] and (unless None)
        the λ-returns [n], in reward units, of one update: sums, which may be added to
        those of other rows. For no rows `observation` may be empty."""

    @abstractmethod
    def fold_moments(self, moments: NDArray[np.float64]) -> None:
        """Merge (sums of) `moments` into the normalisers; none must have been folded in
        since they were taken."""

    def fold(self, observation: Arrays, returns: Array | None) -> None:
        """Merge the raw observations [n] and (unless None) the λ-returns [n] of one
        update into the normalisers."""
        self.fold_moments(self.moments(observation, returns))
