"""`ActorCritic` in torch: with images, and whatever is to compute on a GPU. The same
weights in the same order as in numpy."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tidemill.api.spaces import Spaces
from tidemill.core.schema import Array, Arrays
from tidemill.nets.actor_critic_policy import ActorCriticPolicy
from tidemill.nets.encoders import channels_last
from tidemill.nets.masks import FORBIDDEN
from tidemill.nets.torch_device import Mirror, convolution_type
from tidemill.nets.torch_gradients import bind, leaf
from tidemill.nets.torch_policy import TorchPolicy
from tidemill.nets.weights import CONVOLUTIONS, views

if TYPE_CHECKING:
    from tidemill.nets.actor_critic import ActorCritic


class TorchActorCriticPolicy(TorchPolicy, ActorCriticPolicy):
    """All weights are one flat tensor on the device and all gradients another, so that
    clipping and Adam are one call each. `flat` and `weights` are the host's side: on a
    CPU the same memory, else what `parameters` copied last."""

    recorded = True

    def __init__(self, config: "ActorCritic", spaces: Spaces, seed: int, device: str = "cpu") -> None:
        ActorCriticPolicy.__init__(self, config, spaces, seed)
        self._place(device)
        self._convolution_type = convolution_type(config.convolutions, self.device)
        with self.place():
            self._leaf = leaf(torch.from_numpy(self.flat).to(self.device))
        # another one with each `load`, so that nobody keeps in it what was before
        self._kept_weights: dict[tuple[str, int], Tensor] = {}
        self._lent = False
        self._mirror = Mirror(self._leaf)
        self.flat = self._mirror.array
        self.weights = views(self.flat, self._shapes)
        whole, start = self._leaf.detach(), 0
        self._tensors: dict[str, Tensor] = {}
        for name, shape in self._shapes.items():
            size = int(np.prod(shape))
            self._tensors[name] = whole[start : start + size].view(shape).requires_grad_()
            start += size
        assert self._leaf.grad is not None
        self._bind(self._leaf.grad)
        self.parameters()

    def trainable_parameters(self) -> list[Tensor]:
        """Return one float32 tensor: all weights, flat, with `.grad` in place."""
        assert self._leaf is not None
        self._lent = True
        return [self._leaf]

    def _bind(self, gradient: Tensor) -> None:
        assert self._leaf is not None
        self._leaf.grad = gradient
        bind(list(self._tensors.values()), gradient)

    def parameters(self) -> Arrays:
        """See `ActorCriticPolicy.parameters`. From a GPU they are copied; the next call
        rewrites them."""
        with self.place():
            self._mirror.pull()
        self.settle()
        return self._named()

    def load(self, parameters: Mapping[str, Array], version: int) -> None:
        """See `Policy.load`. Waits for what is being answered with the weights so far."""
        self.settle()
        super().load(parameters, version)
        self._kept_weights = {}
        with self.place():
            self._mirror.push()
        self.settle()

    def _rescale_critic(self, ratio: np.float32) -> None:
        with self.place(), torch.no_grad():
            for part in ("weight", "bias"):
                self._tensors[f"critic.{part}"].mul_(float(ratio))

    def log_std(self) -> Tensor:
        return self._tensors["log_std"].squeeze(1)

    def heads(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        weights, towers = self._tensors, self._towers(inputs)
        head = functional.linear(towers[0], weights["actor.weight"], weights["actor.bias"].squeeze(1))
        if self.mask is not None:
            head = head.masked_fill(inputs["forbidden"], FORBIDDEN)
        return head, torch.addmv(weights["critic.bias"], towers[-1], weights["critic.weight"])

    def _towers(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        flat = inputs.get("features")
        towers = []
        for i in range(self.towers):
            parts = [self._convolve(name, inputs[name], i) for name in self.encoder.images]
            if flat is not None:
                parts.append(flat if i or not self.encoder.critic_only else flat[:, : self.encoder.seen])
            towers.append(torch.cat(parts, -1) if len(parts) > 1 else parts[0])
        activate = torch.tanh if self.activation == "tanh" else torch.relu
        for i in range(len(self.layers)):
            weight, bias = (self._tensors[f"hidden.{i}.{part}"] for part in ("weight", "bias"))
            # the actor's inputs may be fewer than the critic's
            layers = [
                (w if len(w) == x.shape[1] else w[: x.shape[1]], b)
                for w, b, x in zip(weight, bias, towers, strict=True)
            ]
            towers = [activate(torch.addmm(b, x, w)) for (w, b), x in zip(layers, towers, strict=True)]
        return towers

    def prepare(self, observation: Arrays) -> Arrays:
        """See `ActorCriticPolicy.prepare`. Images lie [n, height, width, channels]: once
        for all epochs."""
        inputs = super().prepare(observation)
        return inputs | {
            name: channels_last(inputs[name], image.channels_first)
            for name, image in self.encoder.images.items()
        }

    def _convolve(self, name: str, image: Tensor, tower: int) -> Tensor:
        """Return the 512 features of images [n, height, width, channels] uint8.
        Channels-last: 1.8 times as fast as channels-first, forward and backward, on a
        CPU."""
        weights = [
            self._converted(f"cnn.{name}.{i}.{part}", tower)
            for i in (*range(len(CONVOLUTIONS)), "out")
            for part in ("weight", "bias")
        ]
        x = image.permute(0, 3, 1, 2).to(weights[0].dtype)  # bytes, which both types have exactly
        for i, (_, _, stride) in enumerate(CONVOLUTIONS):
            x = functional.conv2d(x, weights[2 * i], weights[2 * i + 1], stride).relu_()
        x = x.permute(0, 2, 3, 1).flatten(1)  # as it lies: nothing is copied
        return torch.addmm(weights[-1], x, weights[-2]).relu_().float()

    def _converted(self, name: str, tower: int) -> Tensor:
        """Return a weight of the convolutions as they take it. Those that act on a CPU
        are kept until `load`: for 16 rows, to convert them is half of the work. Whoever
        has `trainable_parameters` may change them at any time, and torch's fused
        optimisers count no versions: nothing is kept."""
        acts = torch.is_inference_mode_enabled() and self.device.type == "cpu"
        kept = self._kept_weights if acts and not self._lent else {}
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
