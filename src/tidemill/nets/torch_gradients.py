"""Between autograd and flat gradient arrays, both ways."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tidemill.nets.trainable import Evaluation

if TYPE_CHECKING:
    from tidemill.nets.actor_critic_policy import ActorCriticPolicy


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


def detached(evaluation: Evaluation) -> Evaluation:
    """Return the same numbers without gradients."""
    return Evaluation(*(tensor.detach() for tensor in evaluation))


def add_gradients(
    evaluation: Evaluation, of_log_prob: Tensor, of_entropy: Tensor | None, of_value: Tensor
) -> None:
    """Add the gradient of Σ (of_log_prob · log_prob + …) to `.grad` of all parameters
    that `evaluation` came from."""
    pairs = zip(evaluation, (of_log_prob, of_entropy, of_value), strict=True)
    wanted = [(tensor, factor) for tensor, factor in pairs if factor is not None and tensor.requires_grad]
    torch.autograd.backward([weighed(tensor, factor) for tensor, factor in wanted])


def weighed(tensor: Tensor, factor: Tensor) -> Tensor:
    """Return Σ tensor · factor, whose gradient is `factor`. Autograd takes gradients of
    tensors as well, but to look at their shapes it imports the symbolic mathematics of
    torch's compiler, a third of a second at the first update."""
    return torch.dot(tensor.flatten(), factor.flatten())


def evaluate(
    policy: "ActorCriticPolicy", weights: Tensor, inputs: dict[str, Tensor], action: dict[str, Tensor]
) -> Evaluation:
    """Return the evaluation by a policy whose library is numpy, with gradients for
    `weights`, its `trainable_parameters`."""
    arrays = [
        {name: tensor.detach().numpy() for name, tensor in tensors.items()} for tensors in (inputs, action)
    ]
    return Evaluation(*_Evaluate.apply(policy, *arrays, weights))  # type: ignore[no-untyped-call]


class _Evaluate(torch.autograd.Function):
    """`forward` and `backward` of a policy, as one node of a graph."""

    @staticmethod
    def forward(
        ctx: Any, policy: "ActorCriticPolicy", inputs: Any, action: Any, weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.policy, ctx.inputs, ctx.action = policy, inputs, action
        found = policy.forward(inputs, action)
        ctx.turn = policy.turn
        return tuple(torch.from_numpy(array.copy()) for array in found)

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[Any, ...]:
        policy = ctx.policy
        if policy.turn != ctx.turn:  # what was kept is gone
            policy.forward(ctx.inputs, ctx.action)
        gradient = np.empty(policy.size, np.float32)
        policy.backward(*(np.ascontiguousarray(factor.numpy()) for factor in factors), gradient)
        return None, None, None, torch.from_numpy(gradient)
