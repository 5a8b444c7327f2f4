"""The actor-critic network for MLPs on a CPU: forward and backward in numpy; only
`evaluate` imports torch, over the same memory.

Layers of the actor and of the critic that have the same shapes (but for the heads) lie
stacked along a first axis "towers" (2, or 1 when the critic shares them) and run as one
batched product.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tidemill.core.schema import Array, Arrays
from tidemill.nets.cells import check_stretches
from tidemill.nets.masks import forbid
from tidemill.nets.mlp import BatchedMLPs, Floats, Layer, SeparateMLPs, layers_of
from tidemill.nets.scratch import Scratch
from tidemill.nets.state_dependent_exploration import StateDependentGaussian
from tidemill.nets.trainable import ActionEvaluation, LibraryName, Network, nothing
from tidemill.nets.weights import ActorCriticShape, views

if TYPE_CHECKING:
    from torch import Tensor


class NumpyActorCritic(Network):
    """The network computes in numpy with the weights in `flat`, which stay there, for any
    number of rows."""

    library: LibraryName = "numpy"

    def __init__(self, shape: ActorCriticShape, flat: Floats) -> None:
        self.flat, self.weights = flat, views(flat, shape.forms())
        """All weights, one after the other, and the same by name."""
        self.recurrent = shape.memory is not None
        self.shape, self._distribution, self.towers = shape, shape.distribution, shape.places()
        # two of each, so that acting leaves alone what a `backward` is going to need
        self._acting, self._training = (hidden_layers(shape, self.weights) for _ in range(2))
        if shape.memory is not None:
            self._acting_cell, self._training_cell = (shape.memory.cell(self.weights) for _ in range(2))
        self._scratch = Scratch()  # of training
        # what `forward` kept: what the heads see, [towers, n, width] or [n, width] each
        self._last: Floats | tuple[Floats, Floats] = flat[:0]
        self._forbidden: NDArray[np.bool_] | None = None  # likewise, where there is a mask: [n, actions]
        # where `backward` wrote last, and its views
        self._gradient: tuple[Floats | None, dict[str, Floats]] = None, {}
        self._leaf: Tensor | None = None  # all weights as torch sees them

    @property
    def size(self) -> int:
        return self.flat.size

    def flat_weights(self) -> Floats:
        return self.flat

    def begin(
        self, inputs: Arrays, deterministic: bool | Array, rng: Generator, scale: np.float32, out: Arrays
    ) -> Callable[[], None]:
        """See `Network.begin`. Everything is done at once."""
        weights, last = self.weights, self._acting.forward(inputs["features"])
        n = len(last[0])
        if self.recurrent:
            assert not isinstance(last, tuple)
            last = self._remember(last, inputs, out)
        head = np.matmul(weights["actor.weight"], last[0].T)
        head += weights["actor.bias"]
        if "forbidden" in inputs:
            forbid(head, inputs["forbidden"])
        if isinstance(self._distribution, StateDependentGaussian):
            next_state = out["state.noise"][:n]
            self._distribution.explore(last[0], inputs["state.noise"], deterministic, rng, next_state)
        value = np.matmul(last[-1], weights["critic.weight"])
        value += weights["critic.bias"]
        np.multiply(value, scale, out=out["value"][:n])
        action = self._distribution.action_of(out, slice(n))
        out["log_prob"][:n] = self._distribution.sample(head, weights["log_std"], deterministic, rng, action)
        return nothing

    def _remember(self, last: Floats, inputs: Arrays, out: Arrays) -> Floats:
        """Return what the cell makes of the `last` hidden layers of rows, and write the
        next state into `out`."""
        cell, n = self._acting_cell, last.shape[1]
        state = {part: inputs[f"state.{part}"] for part in cell.parts}
        outputs = cell.forward(last, state, np.zeros((1, n), np.bool_))
        for part, array in cell.state().items():
            out[f"state.{part}"][:n] = array
        return outputs

    def forward(self, inputs: Mapping[str, Any], action: Mapping[str, Any]) -> ActionEvaluation:
        self.forward_count += 1
        weights, self._forbidden = self.weights, inputs.get("forbidden")
        self._last = last = self._training.forward(inputs["features"])
        if self.recurrent:
            assert not isinstance(last, tuple)
            self._last = last = self._unroll(last, inputs)
            self._forbidden = None if self._forbidden is None else self._forbidden[inputs["rows"]]
        n = len(last[0])
        size = self._distribution.size
        # a third of what the product of the transposed ones takes
        rows = np.matmul(last[0], weights["actor.weight"].T, out=self._scratch("head rows", (n, size)))
        head = np.add(rows.T, weights["actor.bias"], out=self._scratch("head", (size, n)))
        if self._forbidden is not None:
            forbid(head, self._forbidden)
        if isinstance(self._distribution, StateDependentGaussian):
            self._distribution.see(last[0])
        value = np.matmul(last[-1], weights["critic.weight"], out=self._scratch("value", (n,)))
        value += weights["critic.bias"]
        given = self._distribution.action_of(action)
        return ActionEvaluation(*self._distribution.forward(head, weights["log_std"], given), value)

    def trained(self) -> list[tuple[str, tuple[int, ...]]]:
        return list(self.shape.forms().items())

    def trace(self, inputs: Mapping[str, Any], action: Mapping[str, Any]) -> Iterator[tuple[str, Array, int]]:
        found = self.forward(inputs, action)
        names = [f"hidden.{i}" for i in range(len(self.shape.hidden))]
        names += [f"critic_hidden.{i}" for i in range(len(self.shape.critic_hidden or ()))]
        for name, layer in zip(names, self._training.layers(), strict=True):
            yield name, layer, 1
        if self.recurrent:
            yield "cell", np.asarray(self._last), 1
        yield "actor", self._scratch("head", (self._distribution.size, len(found.value))), 1
        yield "critic", found.value, 0

    def _unroll(self, last: Floats, inputs: Mapping[str, Any]) -> Floats:
        """Run the cell through whole stretches; return what it gives in the rows that are
        asked for."""
        check_stretches(inputs)
        cell = self._training_cell
        state = {part: inputs[f"state.{part}"] for part in cell.parts}
        outputs = cell.forward(last, state, inputs["on_reset"])
        self._rows, self._outputs_shape = inputs["rows"], outputs.shape
        seen = self._scratch("seen", (len(outputs), len(self._rows), outputs.shape[2]))
        # mode: with "raise" numpy would write to a copy of `out` first
        return outputs.take(self._rows, axis=1, out=seen, mode="clip")

    def backward(self, of_log_prob: Any, of_entropy: Any, of_value: Any, out: Floats) -> None:
        self.forward_count += 1
        if self._gradient[0] is not out:
            self._gradient = out, views(out, self.shape.forms())
        weights, gradient, last, n = self.weights, self._gradient[1], self._last, len(of_value)
        of_head = self._scratch("of head", (self._distribution.size, n))
        self._distribution.backward(of_log_prob, of_entropy, of_head, gradient["log_std"])
        if self._forbidden is not None:
            np.copyto(of_head, 0, where=self._forbidden.T)
        np.matmul(of_head, last[0], out=gradient["actor.weight"])
        np.add.reduce(of_head, axis=1, out=gradient["actor.bias"], keepdims=True)
        np.matmul(of_value, last[-1], out=gradient["critic.weight"])
        np.add.reduce(of_value, axis=0, out=gradient["critic.bias"], keepdims=True)
        if isinstance(last, tuple):
            of_actor, of_critic = (self._scratch(f"of last {i}", last[i].shape) for i in range(2))
            np.matmul(of_head.T, weights["actor.weight"], out=of_actor)
            np.multiply(of_value[:, np.newaxis], weights["critic.weight"], out=of_critic)
            assert isinstance(self._training, SeparateMLPs)
            self._training.backward((of_actor, of_critic), *separate_layers(self.shape, gradient))
            return
        layers = len(self.shape.hidden)
        if not layers and not self.recurrent:
            return
        of_last = self._scratch("of last", last.shape)
        np.matmul(of_head.T, weights["actor.weight"], out=of_last[0])
        shared = self.shape.towers == 1
        of_critic = self._scratch("of critic", last.shape[1:]) if shared else of_last[1]
        np.multiply(of_value[:, np.newaxis], weights["critic.weight"], out=of_critic)
        if shared:
            of_last[0] += of_critic
        below = self._roll_back(of_last, gradient) if self.recurrent else of_last
        if below is not None:
            assert isinstance(self._training, BatchedMLPs)
            self._training.backward(below, layers_of(gradient, layers))

    def _roll_back(self, of_last: Floats, gradient: dict[str, Floats]) -> Floats | None:
        """Write the gradients of the cell's weights; return that of its inputs, unless
        there is no layer below it."""
        of_outputs = self._scratch("of outputs", self._outputs_shape)
        of_outputs.fill(0)
        of_outputs[:, self._rows] = of_last
        return self._training_cell.backward(of_outputs, gradient, bool(self.shape.hidden))

    def evaluate(self, inputs: "dict[str, Tensor]", action: "dict[str, Tensor]") -> ActionEvaluation:
        from tidemill.nets.torch_gradients import evaluate

        return evaluate(self, self.trainable_parameters()[0], inputs, action)

    def trainable_parameters(self) -> "list[Tensor]":
        """Return one float32 tensor: all weights, flat, with `.grad` in place."""
        if self._leaf is None:
            import torch

            from tidemill.nets.torch_gradients import leaf

            self._leaf = leaf(torch.from_numpy(self.flat))
        return [self._leaf]

    def rescale_value(self, ratio: np.float32) -> None:
        self.weights["critic.weight"] *= ratio
        self.weights["critic.bias"] *= ratio


def hidden_layers(shape: ActorCriticShape, weights: dict[str, Floats]) -> BatchedMLPs | SeparateMLPs:
    """Return the hidden layers of actor and critic, which have these `weights`."""
    encoder = shape.encoder
    if shape.critic_hidden is not None:
        return SeparateMLPs(*separate_layers(shape, weights), shape.activation, encoder.seen)
    seen = encoder.seen if encoder.critic_only else None
    return BatchedMLPs(layers_of(weights, len(shape.hidden)), shape.activation, seen)


def separate_layers(shape: ActorCriticShape, named: dict[str, Floats]) -> tuple[list[Layer], list[Layer]]:
    """Return the hidden layers of an actor and a critic that are unlike each other, or
    their gradients."""
    assert shape.critic_hidden is not None
    return (
        layers_of(named, len(shape.hidden)),
        layers_of(named, len(shape.critic_hidden), "critic_hidden"),
    )
