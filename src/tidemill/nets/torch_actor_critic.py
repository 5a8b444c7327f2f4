"""The actor-critic network in torch: with images, and whatever is to compute on a GPU.
The same weights in the same order as in numpy; the way back through time is autograd's.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tidemill.nets.cells import check_stretches
from tidemill.nets.layer_norm import EPSILON
from tidemill.nets.masks import FORBIDDEN
from tidemill.nets.mlp import Floats
from tidemill.nets.torch_backend import TorchBackend
from tidemill.nets.torch_convolutions import convolved
from tidemill.nets.torch_copies import Mirror, convolution_type
from tidemill.nets.torch_gradients import bind, leaf
from tidemill.nets.trainable import ActionEvaluation
from tidemill.nets.weights import ActorCriticShape, views

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "elu": functional.elu,
    "gelu": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}
"""Those of `activations`."""
State = list[Tensor]
"""The parts of a cell's state, each [G, m, w]; letters as in `cells`."""


class TorchActorCritic(TorchBackend):
    """All weights are one flat tensor on the device and all gradients another, so that
    clipping and Adam are one call each. `flat` and `weights` are the host's side: on a
    CPU the same memory, else what `pull` copied last."""

    recorded = True

    def __init__(self, shape: ActorCriticShape, flat: Floats, device: str = "cpu") -> None:
        super().__init__(shape.distribution, device)
        self.shape, self.towers = shape, shape.places()
        self._convolution_type = convolution_type(shape.convolutions, self.device)
        self.images_as_seen = self.device.type != "cpu"  # a GPU moves their channels in no time
        with self.place():
            self._leaf = leaf(torch.from_numpy(flat).to(self.device))
        # another one with each `push`, so that nobody keeps in it what was before
        self._saved_weights: dict[tuple[str, int], Tensor] = {}
        self._lent = False
        self._mirrors = {"flat": Mirror(self._leaf)}
        self.flat: Floats = self._mirrors["flat"].array
        self.weights = views(self.flat, shape.forms())
        whole, start = self._leaf.detach(), 0
        self._tensors: dict[str, Tensor] = {}
        for name, form in shape.forms().items():
            size = prod(form)
            self._tensors[name] = whole[start : start + size].view(form).requires_grad_()
            start += size
        assert self._leaf.grad is not None
        self._bind(self._leaf.grad)
        self.recurrent = shape.memory is not None
        if shape.memory is not None:
            parts = shape.memory.cell.parts
            self._state_names = [f"state.{part}" for part in parts]
            self._advance = _lstm if len(parts) == 2 else _gru
        self._after: State = []  # the state after the rows that acted last
        self.pull()

    @property
    def size(self) -> int:
        return self.flat.size

    def trainable_parameters(self) -> list[Tensor]:
        """Return one float32 tensor: all weights, flat, with `.grad` in place."""
        self._lent = True
        return [self._leaf]

    def trained(self) -> list[tuple[str, tuple[int, ...]]]:
        return list(self.shape.forms().items())

    def _bind(self, gradient: Tensor) -> None:
        self._leaf.grad = gradient
        bind(list(self._tensors.values()), gradient)

    def push(self) -> None:
        """See `Network.push`."""
        self._saved_weights = {}
        super().push()

    def rescale_value(self, ratio: np.float32) -> None:
        with self.place(), torch.no_grad():
            for part in ("weight", "bias"):
                self._tensors[f"critic.{part}"].mul_(float(ratio))

    def log_std(self) -> Tensor:
        return self._tensors["log_std"].squeeze(1)

    def heads(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See `TorchBackend.heads`. With a memory: of the rows asked for, when training;
        acting, of each row, which is a stretch by itself."""
        weights, forbidden = self._tensors, inputs.get("forbidden")
        towers = self._towers(inputs)
        actor, critic = towers[0], towers[-1]
        if self.recurrent:
            given = self._remember(torch.stack(towers), inputs)
            actor, critic = given[0], given[-1]
            if forbidden is not None and "rows" in inputs:
                forbidden = forbidden.index_select(0, inputs["rows"])
        head = functional.linear(actor, weights["actor.weight"], weights["actor.bias"].squeeze(1))
        if forbidden is not None:
            head = head.masked_fill(forbidden, FORBIDDEN)
        return head, torch.addmv(weights["critic.bias"], critic, weights["critic.weight"])

    def evaluate(self, inputs: dict[str, Tensor], action: dict[str, Tensor]) -> ActionEvaluation:
        if self.recurrent:
            check_stretches(inputs)
        return super().evaluate(inputs, action)

    def _remember(self, below: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return what the cell gives, [G, rows, w], from the layers below it."""
        state = [inputs[name].transpose(0, 1) for name in self._state_names]
        share = torch.baddbmm(self._tensors["cell.bias"], below, self._tensors["cell.weight"])
        if "on_reset" not in inputs:
            self._after = self._advance(self._tensors, share, state)
            return self._after[0]
        on_reset, given = inputs["on_reset"], []
        rows = share.view(len(share), *on_reset.shape, -1)
        for row, begins in zip(rows.unbind(1), on_reset.unsqueeze(-1).unbind(0), strict=True):
            state = self._advance(self._tensors, row, [part.masked_fill(begins, 0) for part in state])
            given.append(state[0])
        return torch.stack(given, 1).flatten(1, 2).index_select(1, inputs["rows"])

    def next_state(self) -> dict[str, Tensor]:
        if not self.recurrent:
            return {}
        return {name: part.transpose(0, 1) for name, part in zip(self._state_names, self._after, strict=True)}

    def _towers(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        flat, encoder = inputs.get("features"), self.shape.encoder
        towers = []
        for i in range(self.shape.towers):
            parts = [self._convolve(name, inputs[name], i) for name in encoder.images]
            if flat is not None:
                parts.append(flat if i or not encoder.critic_only else flat[:, : encoder.seen])
            towers.append(torch.cat(parts, -1) if len(parts) > 1 else parts[0])
        activate, names = ACTIVATIONS[self.shape.activation], [("hidden", self.shape.hidden)]
        if self.shape.critic_hidden is not None:
            names.append(("critic_hidden", self.shape.critic_hidden))
        given: list[Tensor] = []
        for name, hidden in names:
            below = towers[len(given) : len(towers) if len(names) == 1 else len(given) + 1]
            for i in range(len(hidden)):
                weight, bias = (self._tensors[f"{name}.{i}.{part}"] for part in ("weight", "bias"))
                norms: Sequence[tuple[Tensor, Tensor] | None] = [None] * len(weight)
                if self.shape.layer_norm:
                    scale, shift = (self._tensors[f"{name}.{i}.{part}"] for part in ("scale", "shift"))
                    norms = list(zip(scale, shift, strict=True))
                # the actor's inputs may be fewer than the critic's
                layers = [
                    (w if len(w) == x.shape[1] else w[: x.shape[1]], b)
                    for w, b, x in zip(weight, bias, below, strict=True)
                ]
                below = [
                    activate(_normalised(torch.addmm(b, x, w), norm))
                    for (w, b), x, norm in zip(layers, below, norms, strict=True)
                ]
            given += below
        return given

    def _convolve(self, name: str, image: Tensor, tower: int) -> Tensor:
        """Return the features of images [n, height, width, channels] uint8, on a GPU of
        images as they were observed. Channels-last: 1.8 times as fast as channels-first,
        forward and backward, on a CPU."""
        network, seen = self.shape.image_network, self.shape.encoder.images[name]
        count = sum(1 for _ in network.convolutions(seen.channels))
        *layers, (weight, bias) = [
            (
                self._converted(f"cnn.{name}.{i}.weight", tower),
                self._converted(f"cnn.{name}.{i}.bias", tower),
            )
            for i in (*range(count), "out")
        ]
        dtype = weight.dtype  # bytes, which both types have exactly
        if self.images_as_seen:
            first = seen.channels_first
            x = image.unsqueeze(1) if image.ndim == 3 else image if first else image.permute(0, 3, 1, 2)
            x = x.to(dtype, memory_format=torch.channels_last)
        else:
            x = image.permute(0, 3, 1, 2).to(dtype)
        x = convolved(network, x, layers).permute(0, 2, 3, 1).flatten(1)  # as it lies: nothing is copied
        return torch.addmm(bias, x, weight).relu_().float()

    def _converted(self, name: str, tower: int) -> Tensor:
        """Return a weight of the convolutions as they take it. Those that act on a CPU
        are kept until `load`: for 16 rows, to convert them is half of the work. Whoever
        has `trainable_parameters` may change them at any time, and torch's fused
        optimisers count no versions: nothing is kept."""
        acts = torch.is_inference_mode_enabled() and self.device.type == "cpu"
        kept = self._saved_weights if acts and not self._lent else {}
        weight = kept.get((name, tower))
        if weight is None:
            weight = self._tensors[name][tower]
            if name.endswith(".0.weight"):
                weight = weight / 255  # few weights instead of many pixels
            weight = weight.to(self._convolution_type)
            if acts and weight.ndim == 4:
                weight = weight.contiguous(memory_format=torch.channels_last)
            kept[name, tower] = weight
        return weight


def _normalised(sums: Tensor, norm: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return a layer's sums [n, width] by its scale and shift, [1, width]: see
    `layer_norm`."""
    if norm is None:
        return sums
    scale, shift = norm
    return functional.layer_norm(sums, sums.shape[1:], scale[0], shift[0], EPSILON)


def _lstm(weights: Mapping[str, Tensor], share: Tensor, state: State) -> State:
    """Return the state after a row whose inputs have this share in the gates: see
    `cells.LSTM`."""
    hidden, cell = state
    output, into, forget, new = torch.baddbmm(share, hidden, weights["cell.recurrent"]).chunk(4, -1)
    cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
    return [output.sigmoid() * cell.tanh(), cell]


def _gru(weights: Mapping[str, Tensor], share: Tensor, state: State) -> State:
    """As `_lstm`: see `cells.GRU`."""
    (hidden,) = state
    new, reset, keep = share.chunk(3, -1)
    of_reset, of_keep, of_new = torch.bmm(hidden, weights["cell.recurrent"]).chunk(3, -1)
    new = (new + (reset + of_reset).sigmoid() * (of_new + weights["cell.candidate"])).tanh()
    return [new + (keep + of_keep).sigmoid() * (hidden - new)]
