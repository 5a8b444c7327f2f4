"""Policies that gradient algorithms can train, and the network that each of them has.
Importing this file imports no torch; calling its methods may."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tidemill.api.policy import Policy
from tidemill.core.cut import Part, generator_state, set_generator_state
from tidemill.core.moved import Gone
from tidemill.core.schema import Array, Arrays
from tidemill.native.library import Kernels
from tidemill.nets.masks import ActionMask
from tidemill.nets.normaliser import RunningMoments
from tidemill.nets.weights import load_parameters

if TYPE_CHECKING:
    from torch import Tensor

LibraryName = Literal["numpy", "torch"]


class ActionEvaluation(NamedTuple):
    """What a policy thinks of n rows: tensors with gradients from `evaluate`, plain
    arrays of the network's library from `forward`."""

    log_prob: Any
    """Log-probability of the rows' actions under the present weights, float32 [n], in the
    unit of the answer's ``log_prob``."""
    entropy: Any
    """Entropy of the action distribution, float32 [n], nats."""
    value: Any
    """Value, float32 [n]; times `TrainablePolicy.value_scale` it is in reward units."""


class Network(ABC):
    """The weights of a policy and all that is computed with them: actions, for acting;
    log-probabilities, entropies and values with their gradients, for training.

    A backend is a subclass: plain numpy, torch on a CPU or a GPU, a torch module of the
    user's own. All backends of one configuration have the same `weights`, so that one
    file of parameters fits each of them. Inputs are what `TrainablePolicy.prepare`
    returns, and the state of a recurrent policy.
    """

    library: LibraryName
    """Whose arrays `forward` and `backward` take and return."""
    recurrent: bool = False
    """Whether it has a state, and is evaluated on stretches of rows."""
    kernels: Kernels | None = None
    """Of a network that the native core computes."""
    recorded: bool = False
    """Whether a GPU may record what it does with a number of rows, and repeat that with
    other rows (see `gpu_acting` and `recorded_steps`)."""
    images_as_seen: bool = False
    """Whether it lays out images itself, so that `prepare` hands them on as they were
    observed; else it is given them channels-last."""
    forward_count: int = 0
    """Of a network with a backward pass of its own: it counts what changes the
    intermediate results that `backward` needs."""
    towers: Sequence[Sequence[slice]] = ((slice(None),),)
    """Where the weights of the actor lie among all weights, and where the critic's; only
    one of them, all, where they share some."""
    weights: Arrays
    """The weights by name, as arrays on the host: the network's own memory, or a copy of
    it (see `pull` and `push`)."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of trainable weights."""

    @abstractmethod
    def begin(
        self, inputs: Arrays, deterministic: bool | Array, rng: Generator, scale: np.float32, out: Arrays
    ) -> Callable[[], None]:
        """Begin to answer n ≥ 1 rows by what `rng` draws; what is returned ends it, as of
        `Policy.begin`. Actions, their ``log_prob``, values times `scale` and the next
        state are written into ``out[name][:n]``."""

    @abstractmethod
    def forward(self, inputs: Mapping[str, Any], action: Mapping[str, Any]) -> ActionEvaluation:
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

    @abstractmethod
    def evaluate(self, inputs: "dict[str, Tensor]", action: "dict[str, Tensor]") -> ActionEvaluation:
        """See `TrainablePolicy.evaluate`."""

    @abstractmethod
    def trainable_parameters(self) -> "list[Tensor]":
        """See `TrainablePolicy.trainable_parameters`."""

    def trained(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return name and shape of each trainable weight, in the order in which their
        gradients lie. By default all are one."""
        return [("weights", (self.size,))]

    def trace(self, inputs: Mapping[str, Any], action: Mapping[str, Any]) -> Iterator[tuple[str, Array, int]]:
        """Do what `forward` does; yield each layer's name, what it gives, and along which
        axis the rows lie. Of torch's operations, the first one whose numbers are not all
        finite. By default nothing is told of layers."""
        return iter(())

    def flat_weights(self) -> NDArray[np.float32]:
        """Return all trainable weights as one array [size] that views the network's own
        memory; of networks whose `library` is numpy."""
        raise TypeError(f"the weights of a {type(self).__name__} are tensors: see trainable_parameters")

    def rescale_value(self, ratio: np.float32) -> None:
        """Multiply all values by `ratio` from now on, where it is known which weights do
        that; else do nothing."""

    def pull(self) -> None:
        """Bring `weights` up to date."""

    def push(self) -> None:
        """Compute with what was written into `weights`."""

    def place(self) -> AbstractContextManager[object]:
        """Return a context in which what is done with the network's tensors is done on
        its device, in its order of operations. Never held while other networks work."""
        return nullcontext()

    def settle(self) -> None:
        """Wait until the device has done all that was begun."""


class TrainablePolicy(Policy):
    """A policy that gradient algorithms can train: it has a `network`, makes its inputs
    of observations, and scales its values. An update goes, in torch::

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
    of the network's `library`::

        network.forward(inputs[minibatch], action[minibatch]) → derivatives of the loss
        network.backward(of_log_prob, of_entropy, of_value, gradient)

    Between equal trainers ``moments`` are summed before ``fold_moments``, in place of
    ``fold``.

    A recurrent policy is evaluated on m stretches of L rows, of which
    k are asked for. Its inputs are those of all L·m rows, time first (row t of stretch i
    is t·m + i), and besides them::

        on_reset: bool [L, m]: rows that begin an episode; the state before them is the
            default one
        state.*: [m, ...]: the state before the first row of each stretch, as rows hold it
        rows: integers [k]: the rows asked for; `action` and what is returned are of
            these, in their order

    Inputs of rows that are not asked for must be finite all the same.
    """

    forward, backward = Gone("network.forward"), Gone("network.backward")
    flat_weights, library = Gone("network.flat_weights"), Gone("network.library")
    place, settle, size = Gone("network.place"), Gone("network.settle"), Gone("network.size")

    def __init__(self, network: Network, mask: ActionMask | None, rng: Generator) -> None:
        self.network, self.mask, self._rng = network, mask, rng
        self._returns = RunningMoments("returns", ())
        self._refresh()

    @property
    def recurrent(self) -> bool:
        """Whether it has a state, and is evaluated on stretches of rows."""
        return self.network.recurrent

    def reseed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def random_state(self) -> Part:
        return generator_state(self._rng)

    def set_random_state(self, state: Part) -> None:
        set_generator_state(self._rng, state)

    def act(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        """See `Policy.act`."""
        self.begin(observation, state, deterministic, out)()

    def begin(
        self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays
    ) -> Callable[[], None]:
        """See `Policy.begin`."""
        n = len(next(iter(observation.values())))
        if n == 0:
            return nothing
        if not isinstance(deterministic, bool):
            some = bool(deterministic.any())
            deterministic = deterministic if deterministic.ndim and some else some
        inputs = self._prepare_to_act(observation, n)
        if state:
            inputs |= state
        return self.network.begin(inputs, deterministic, self._rng, self._scale, out)

    @abstractmethod
    def prepare(self, observation: Arrays) -> Arrays:
        """Return new arrays of n rows each, made from raw observations with the
        statistics last published: the network's inputs, which stay the same through all
        epochs of an update. Image leaves stay uint8 and may be the arrays that were
        handed in."""

    def _prepare_to_act(self, observation: Arrays, n: int) -> Arrays:
        """Return what `prepare` returns, of n rows, in arrays that the next call may
        rewrite."""
        return self.prepare(observation)

    def check(self, observation: Arrays) -> None:
        """Raise `EnvironmentFault` when raw observations [n], on all of which an agent
        acted, leave it no action. Algorithms call this before they train on them: to
        answer such a row is no fault, since it may be a final one, asked for its value
        alone."""
        if self.mask is not None:
            self.mask.check(observation)

    def evaluate(self, inputs: "dict[str, Tensor]", action: "dict[str, Tensor]") -> ActionEvaluation:
        """Return the evaluation of n rows: `inputs` as `prepare` made them, `action` by
        leaf name as stored in rows."""
        return self.network.evaluate(inputs, action)

    def trainable_parameters(self) -> "list[Tensor]":
        """Return the leaf tensors to optimise, always the same ones. Their memory is the
        network's own; where `.grad` is set already, gradients are added into it, so clear
        them with zeros."""
        return self.network.trainable_parameters()

    def parameters(self) -> Arrays:
        """Return the weights and the statistics ``returns.*`` (float64), and
        ``observation.*`` where observations are normalised. From a GPU they are copied;
        the next call rewrites them."""
        self.network.pull()
        return self._named()

    def _named(self) -> Arrays:
        named = dict(self.network.weights)
        if not named["log_std"].size:  # actions without a deviation
            del named["log_std"]
        return named | self._returns.parameters()

    def load(self, parameters: Mapping[str, Array], version: int) -> None:
        """See `Policy.load`. Waits for what is being answered with the weights so far.
        Nothing is changed when a name, shape or dtype does not fit."""
        self.network.settle()
        load_parameters(self._named(), parameters)
        self.network.push()
        self.version = version
        self._refresh()

    def _refresh(self) -> None:
        """Derive what acting multiplies with from the statistics."""
        self._scale = np.float32(self._returns.deviation())

    @property
    def value_scale(self) -> float:
        """What `ActionEvaluation.value` is multiplied by to give reward units: the
        running standard deviation of the λ-returns."""
        return float(self._scale)

    def moments(self, observation: Arrays, returns: Array | None) -> NDArray[np.float64]:
        """Return what the normalisers need of the raw observations [n] and (unless None)
        the λ-returns [n], in reward units, of one update: sums, which may be added to
        those of other rows. For no rows `observation` may be empty."""
        return self._returns.moments(returns)

    def fold_moments(self, moments: NDArray[np.float64]) -> None:
        """Merge (sums of) `moments` into the normalisers; none must have been folded in
        since they were taken. The network's values are rescaled so that none changes in
        reward units when that deviation does (van Hasselt et al. 2016, "Learning values
        across many orders of magnitude", eq. 2-3, without the shift)."""
        before = self._returns.deviation()
        self._returns.fold(moments[:3])
        if moments[0]:
            self.network.rescale_value(np.float32(before / self._returns.deviation()))
        self._refresh()

    def fold(self, observation: Arrays, returns: Array | None) -> None:
        """Merge the raw observations [n] and (unless None) the λ-returns [n] of one
        update into the normalisers."""
        self.fold_moments(self.moments(observation, returns))


def nothing() -> None:
    """What is left to do of answers that are complete."""
