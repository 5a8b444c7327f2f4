"""The bridge between torch's autograd and gradients as flat arrays, both ways."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.nets.trainable import ActionEvaluation, Network


def leaf(weights: Tensor) -> Tensor:
    """Return `weights`, which take gradients now, with `.grad` in place."""
    tensor = weights.requires_grad_()
    tensor.grad = torch.zeros_like(tensor)
    return tensor


def bind(parameters: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """Make `.grad` of each parameter a view of `gradient` [sum of their sizes], one after
    the other, and return these views."""
    views, start = [], 0
    for parameter in parameters:
        parameter.grad = gradient[start : start + parameter.numel()].view(parameter.shape)
        views.append(parameter.grad)
        start += parameter.numel()
    return views


def weighed(tensor: Tensor, factor: Tensor) -> Tensor:
    """Return Σ tensor · factor, whose gradient is `factor`. Autograd takes gradients of
    tensors as well, but to look at their shapes it imports the symbolic mathematics of
    torch's compiler, a third of a second at the first update."""
    return torch.dot(tensor.flatten(), factor.flatten())


def evaluate(
    network: Network, weights: Tensor, inputs: dict[str, Tensor], action: dict[str, Tensor]
) -> ActionEvaluation:
    """Return the evaluation by a network whose library is numpy, with gradients for
    `weights`, its `trainable_parameters`."""
    arrays = [
        {name: tensor.detach().numpy() for name, tensor in tensors.items()} for tensors in (inputs, action)
    ]
    return ActionEvaluation(*_Evaluate.apply(network, *arrays, weights))  # type: ignore[no-untyped-call]


class _Evaluate(torch.autograd.Function):
    """`forward` and `backward` of a network, as one node of a graph."""

    @staticmethod
    def forward(ctx: Any, network: Network, inputs: Any, action: Any, weights: Tensor) -> tuple[Tensor, ...]:
        ctx.network, ctx.inputs, ctx.action = network, inputs, action
        found = network.forward(inputs, action)
        ctx.count = network.forward_count
        return tuple(torch.from_numpy(array.copy()) for array in found)

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[Any, ...]:
        network = ctx.network
        if network.forward_count != ctx.count:  # what was kept is gone
            network.forward(ctx.inputs, ctx.action)
        gradient = np.empty(network.size, np.float32)
        network.backward(*(np.ascontiguousarray(factor.numpy()) for factor in factors), gradient)
        return None, None, None, torch.from_numpy(gradient)
