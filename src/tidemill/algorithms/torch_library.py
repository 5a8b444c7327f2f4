"""An update in torch: see `library`. CPU tensors share their memory with the arrays that they are made of."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tidemill.algorithms.adam import BETAS, Optimiser
from tidemill.algorithms.library import Library
from tidemill.core.schema import Array, Arrays
from tidemill.nets.torch_gradients import bind
from tidemill.nets.trainable import TrainablePolicy


class TorchLibrary(Library):
    """For policies whose network is a torch module."""

    def __init__(self) -> None:
        self.namespace = torch

    def columns(self, arrays: Arrays) -> Mapping[str, Any]:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def take(self, columns: Mapping[str, Any], rows: NDArray[np.intp], axis: int = 0) -> dict[str, Any]:
        index = torch.from_numpy(rows)
        return {name: column.index_select(axis, index) for name, column in columns.items()}

    def without_gradients(self) -> AbstractContextManager[object]:
        return torch.no_grad()

    def optimiser(self, policy: TrainablePolicy, gradient: NDArray[np.float32], epsilon: float) -> Optimiser:
        return TorchAdam(policy, gradient, epsilon)


class TorchAdam(Optimiser):
    """Torch's fused Adam, over as many tensors as the policy has."""

    def __init__(self, policy: TrainablePolicy, gradient: NDArray[np.float32], epsilon: float) -> None:
        self._parameters = policy.trainable_parameters()
        self._gradient = gradient
        bind(self._parameters, torch.from_numpy(gradient))  # as `backward` does, which a trainer without rows never calls
        self._adam = torch.optim.Adam(self._parameters, betas=BETAS, eps=epsilon, fused=True)
        for p in self._parameters:  # made now, not at the first step, so that `state` always has them
            self._adam.state[p] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def step(self, rate: float, scale: float) -> None:
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._gradient *= np.float32(scale)  # the parameters' `.grad` are views of it
        self._adam.step()

    def state(self) -> Arrays:
        return {f"{i}.{k}": v.detach().numpy().copy() for i, p in enumerate(self._parameters) for k, v in self._adam.state[p].items()}

    def load_state(self, state: Mapping[str, Array]) -> None:
        for i, p in enumerate(self._parameters):
            for key, tensor in self._adam.state[p].items():
                tensor.copy_(torch.from_numpy(np.array(state[f"{i}.{key}"])))
