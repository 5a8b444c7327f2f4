"""An update in torch, and torch's Adam: see `array_library`. Nothing in it waits for a
GPU but what `target_kl`, the sums of equal trainers, and advantages that are normalised
over each minibatch need, and the end of an epoch of recorded steps. CPU tensors share
their memory with the arrays that they are made of."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.adam import adam

from tidemill.algorithms.adam import BETAS, Optimiser
from tidemill.algorithms.array_library import Library
from tidemill.algorithms.recorded_steps import RecordedSteps
from tidemill.core.schema import Array, Arrays
from tidemill.nets.torch_copies import Staging, host_empty, torch_type
from tidemill.nets.torch_gradients import bind
from tidemill.nets.trainable import Network


class TorchLibrary(Library):
    """The torch library serves policies whose network is a torch module."""

    at_once = False

    def __init__(self, network: Network) -> None:
        self.namespace = torch
        self._network, self._device = network, network.trainable_parameters()[0].device
        self._staging = Staging(self._device) if self._device.type != "cpu" else None
        self._host = torch.empty(0)
        self._recorded: RecordedSteps | None = None

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self._device)

    def to_host(self, array: Any) -> NDArray[np.float32]:
        if self._staging is None:
            return np.asarray(array)
        if self._host.numel() < array.numel():
            self._host = host_empty((array.numel(),), torch.float32, self._device)
        host = self._host[: array.numel()].view(array.shape)
        host.copy_(array, non_blocking=True)
        self._network.settle()
        return np.asarray(host)

    def read(self, array: Any) -> Array:
        return array.detach().cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)

    def from_host(self, numbers: NDArray[np.float32], array: Any) -> None:
        if self._staging is not None:
            array.copy_(torch.from_numpy(numbers), non_blocking=True)

    def total(self, parts: Sequence[Any], weight: float, out: Any) -> None:
        numbers = [part for part in parts if not isinstance(part, Tensor)]
        measured = [part.to(out.dtype) for part in parts if isinstance(part, Tensor)]
        torch.mul(torch.stack(measured), weight, out=out[: len(measured)])
        for i, number in enumerate(numbers, len(measured)):
            out[i].fill_(number * weight)

    def host_empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.asarray(host_empty(shape, torch_type(np.empty(0, dtype)), self._device))

    def columns(self, arrays: Arrays) -> Mapping[str, Any]:
        return (
            {name: torch.from_numpy(array) for name, array in arrays.items()}
            if self._staging is None
            else self._staging(arrays)
        )

    def take(self, columns: Mapping[str, Any], rows: Any, axis: int = 0) -> dict[str, Any]:
        index = rows if isinstance(rows, Tensor) else self.columns({"rows": rows})["rows"]
        return {name: column.index_select(axis, index) for name, column in columns.items()}

    def without_gradients(self) -> AbstractContextManager[object]:
        return torch.no_grad()

    def recorded(self, step: Callable[[Any], Any]) -> Callable[[Any], Any] | None:
        if self._device.type != "cuda" or not self._network.recorded:
            return None
        self._recorded = self._recorded or RecordedSteps()
        return self._recorded.of(step)

    def optimiser(self, network: Network, gradient: Any, epsilon: float) -> Optimiser:
        return TorchAdam(network, gradient, epsilon)


class TorchAdam(Optimiser):
    """Torch's fused Adam, over as many tensors as the policy has. The function, since the
    class imports torch's compiler, which takes a second."""

    def __init__(self, network: Network, gradient: Tensor, epsilon: float) -> None:
        self._gradient, self._epsilon = gradient, epsilon
        parameters = network.trainable_parameters()
        # as `backward` does, which a trainer without rows never calls
        self._gradients = bind(parameters, gradient)
        self._parameters = [p.detach() for p in parameters]  # the same memory
        self._unusable = torch.zeros((), device=gradient.device)
        self._state: dict[str, list[Tensor]] = {
            "step": [torch.zeros((), device=p.device) for p in parameters],
            "exp_avg": [torch.zeros_like(p) for p in self._parameters],
            "exp_avg_sq": [torch.zeros_like(p) for p in self._parameters],
        }

    def begin(self) -> None:
        self._unusable.zero_()

    def descend(self, rate: float, share: float, limit: float | None, loss: Any) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(self._gradient) / share
        # What the fused step reads on the device itself: it divides by the one, and
        # leaves everything as it is where the other is not 0.
        scale = share * (norm / limit).clamp(min=1) if limit is not None else norm.new_full((), share)
        unusable = self._unusable.clamp_(min=(norm + loss).isfinite().logical_not().to(norm.dtype))
        adam(
            self._parameters,
            self._gradients,
            self._state["exp_avg"],
            self._state["exp_avg_sq"],
            [],
            self._state["step"],
            fused=True,
            grad_scale=scale,
            found_inf=unusable,
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=rate,
            weight_decay=0.0,
            eps=self._epsilon,
            maximize=False,
        )
        return norm

    def clip(self, parts: Sequence[Tensor], share: float, limit: float) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(torch.cat(list(parts))) / share
        scale = (limit / norm).clamp(max=1)
        for part in parts:
            part *= scale
        return norm

    def state(self) -> Arrays:
        return {
            f"{i}.{key}": tensor.cpu().numpy().copy()
            for key, tensors in self._state.items()
            for i, tensor in enumerate(tensors)
        }

    def load_state(self, state: Mapping[str, Array]) -> None:
        for key, tensors in self._state.items():
            for i, tensor in enumerate(tensors):
                tensor.copy_(torch.from_numpy(np.array(state[f"{i}.{key}"])))
