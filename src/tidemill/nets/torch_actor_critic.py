"""The torch side of `ActorCriticPolicy`: the same weights, in the same memory, with gradients."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tidemill.core.schema import Arrays
from tidemill.nets.trainable import Evaluation

if TYPE_CHECKING:
    from tidemill.nets.actor_critic_policy import ActorCriticPolicy

Floats = NDArray[np.float32]


class TorchActorCritic:
    """Tensors over a policy's weights. Gradients of all of them land in one flat tensor, so that clipping and Adam are one call each."""

    def __init__(self, policy: "ActorCriticPolicy") -> None:
        self._policy = policy
        self.flat = torch.from_numpy(policy.flat).requires_grad_()
        self.flat.grad = torch.zeros_like(self.flat)
        self._weights: dict[str, Tensor] = {}
        start = 0
        for name, weight in policy.weights.items():
            leaf = torch.from_numpy(weight).requires_grad_()
            leaf.grad = self.flat.grad[start : start + weight.size].view(weight.shape)
            self._weights[name] = leaf
            start += weight.size
        self._hidden = [self._weights[f"hidden.{i}.{part}"] for i in range(len(policy.layers)) for part in ("weight", "bias")]

    def features(self, inputs: Arrays) -> list[Floats]:
        """Return the last layer before the heads for acting, [n, width] per tower."""
        with torch.inference_mode():
            return [h.numpy() for h in self._towers({name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in inputs.items()})]

    def evaluate(self, inputs: dict[str, Tensor], action: Tensor) -> Evaluation:
        """See `TrainablePolicy.evaluate`."""
        weights = self._weights
        towers = self._towers(inputs)
        head = functional.linear(towers[0], weights["actor.weight"], weights["actor.bias"].squeeze(1))
        value = functional.linear(towers[-1], weights["critic.weight"].unsqueeze(0), weights["critic.bias"]).squeeze(-1)
        log_prob, entropy = self._policy.distribution.evaluate(head, weights["log_std"].squeeze(1), action)
        return Evaluation(log_prob, entropy, value)

    def _towers(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        policy = self._policy
        flat = inputs.get("features")
        towers = []
        for i in range(policy.towers):
            parts = [self._convolve(name, inputs[name], i) for name in policy.encoder.images]
            if flat is not None:
                parts.append(flat)
            towers.append(torch.cat(parts, -1) if len(parts) > 1 else parts[0])
        if self._hidden:
            towers = list(_Hidden.apply(policy.activation, policy.towers, *towers, *self._hidden))  # type: ignore[no-untyped-call]
        return towers

    def _convolve(self, name: str, image: Tensor, tower: int) -> Tensor:
        """Return the 512 features of images [n, ...] uint8. Channels-last: 1.8 times as fast as channels-first, forward and backward."""
        from tidemill.nets.actor_critic_policy import CONVOLUTIONS

        if image.ndim == 3:
            image = image.unsqueeze(1)
        elif not self._policy.encoder.images[name].channels_first:
            image = image.permute(0, 3, 1, 2)
        dtype = torch.bfloat16 if self._policy.bfloat16 else torch.float32

        def weight(part: str) -> Tensor:
            return self._weights[f"cnn.{name}.{part}"][tower].to(dtype)

        x = image.contiguous(memory_format=torch.channels_last).to(dtype) / 255
        for i, (_, _, stride) in enumerate(CONVOLUTIONS):
            x = functional.conv2d(x, weight(f"{i}.weight"), weight(f"{i}.bias"), stride).relu()
        x = x.permute(0, 2, 3, 1).flatten(1)  # as it lies: nothing is copied
        return torch.addmm(weight("out.bias"), x, weight("out.weight")).relu().float()


class _Hidden(torch.autograd.Function):
    """The hidden layers of all towers, forward and backward written out, for CPU tensors.

    On a CPU numpy's tanh is some ten times as fast as torch's, and its products are at least as fast; autograd over single operations would cost more
    than the arithmetic at the sizes of these networks.
    """

    @staticmethod
    def forward(ctx: Any, activation: str, towers: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, weights = tensors[:towers], tensors[towers:]
        arrays = [w.detach().numpy() for w in weights]
        ctx.activation, ctx.weights, ctx.layers = activation, arrays[::2], []
        outputs = []
        for g in range(towers):
            h = inputs[g].detach().numpy()
            kept = [h]
            for weight, bias in zip(arrays[::2], arrays[1::2], strict=True):
                h = np.matmul(h, weight[g])
                h += bias[g]
                if activation == "tanh":
                    np.tanh(h, out=h)
                else:
                    np.maximum(h, 0, out=h)
                kept.append(h)
            ctx.layers.append(kept)
            outputs.append(torch.from_numpy(h))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        towers = len(gradients)
        into_weights: list[Tensor] = [torch.empty(w.shape) for w in ctx.weights]
        into_biases: list[Tensor] = [torch.empty(towers, 1, w.shape[2]) for w in ctx.weights]
        into_inputs: list[Tensor | None] = []
        for g, gradient in enumerate(gradients):
            kept = ctx.layers[g]
            for i in reversed(range(len(ctx.weights))):
                h = torch.from_numpy(kept[i + 1])
                if ctx.activation == "tanh":
                    through = torch.ops.aten.tanh_backward(gradient, h)
                else:
                    through = torch.ops.aten.threshold_backward(gradient, h, 0)
                np.matmul(kept[i].T, through.numpy(), out=into_weights[i][g].numpy())
                torch.sum(through, 0, out=into_biases[i][g, 0])
                if i or ctx.needs_input_grad[2 + g]:
                    gradient = torch.from_numpy(np.matmul(through.numpy(), ctx.weights[i][g].T))
            into_inputs.append(gradient if ctx.needs_input_grad[2 + g] else None)
        into_layers = [part for pair in zip(into_weights, into_biases, strict=True) for part in pair]
        return None, None, *into_inputs, *into_layers
