"""What all networks do that are made of torch operations, on a CPU or a GPU: acting, and
the two halves of training."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from tidemill.core.schema import Array, Arrays
from tidemill.nets.distributions import Distribution
from tidemill.nets.gpu_acting import DeviceActing
from tidemill.nets.torch_copies import Mirror, tensors
from tidemill.nets.torch_gradients import bind, weighed
from tidemill.nets.torch_trace import OperationTrace
from tidemill.nets.trainable import ActionEvaluation, LibraryName, Network, nothing


class TorchBackend(Network):
    """On a CPU it acts and trains in the memory that `weights` view, and draws by numpy.
    On a GPU weights lie and actions are drawn there, while `pull` and `push` copy. Each
    network has streams of its own, so that several share a GPU; nothing is set for the
    whole process."""

    library: LibraryName = "torch"
    _mirrors: dict[str, Mirror]  # of what has weights

    def __init__(self, distribution: Distribution, device: str) -> None:
        self.distribution, self.device = distribution, torch.device(device)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._bound: Tensor | None = None  # where `backward` wrote last
        self._saved: ActionEvaluation | None = None
        self._acting: DeviceActing | None = None

    @abstractmethod
    def heads(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (head [n, size], value [n]) of what `prepare` gives (and of states), as
        tensors on the device."""

    def next_state(self) -> dict[str, Tensor]:
        """Return the state after the rows of the last `heads` that acted, ``state.*`` [n,
        ...]; {} of a feed-forward network."""
        return {}

    @abstractmethod
    def log_std(self) -> Tensor:
        """Return the log standard deviations [deviations]."""

    def place(self) -> AbstractContextManager[object]:
        """See `Network.place`."""
        return torch.cuda.stream(self._stream)

    def pull(self) -> None:
        """See `Network.pull`."""
        with self.place():
            for mirror in self._mirrors.values():
                mirror.pull()
        self.settle()

    def push(self) -> None:
        """See `Network.push`."""
        with self.place():
            for mirror in self._mirrors.values():
                mirror.push()
        self.settle()

    def settle(self) -> None:
        """See `Network.settle`."""
        if self._stream is not None:
            self._stream.synchronize()
        if self._acting is not None:
            self._acting.wait()

    def begin(
        self, inputs: Arrays, deterministic: bool | Array, rng: Generator, scale: np.float32, out: Arrays
    ) -> Callable[[], None]:
        """See `Network.begin`. On a CPU everything is done at once."""
        if self.device.type != "cpu":
            if self._acting is None:
                self._acting = DeviceActing(self, int(rng.integers(1 << 63)), self.recorded)
            return self._acting.begin(inputs, deterministic, float(scale), out)
        with torch.inference_mode():
            head, value = self.heads(tensors(inputs))
            log_std, n = self.log_std().numpy()[:, None], len(value)
            for name, part in self.next_state().items():
                out[name][:n] = part.numpy()
        np.multiply(value.numpy(), scale, out=out["value"][:n])
        numbers = np.ascontiguousarray(head.numpy().T)
        action = self.distribution.action_of(out, slice(n))
        out["log_prob"][:n] = self.distribution.sample(numbers, log_std, deterministic, rng, action)
        return nothing

    def evaluate(self, inputs: dict[str, Tensor], action: dict[str, Tensor]) -> ActionEvaluation:
        """See `TrainablePolicy.evaluate`."""
        head, value = self.heads(inputs)
        given = self.distribution.action_of(action)
        log_prob, entropy = self.distribution.evaluate(head, self.log_std(), given)
        return ActionEvaluation(log_prob, entropy, value)

    def forward(self, inputs: Mapping[str, Any], action: Mapping[str, Any]) -> ActionEvaluation:
        """See `Network.forward`."""
        self._saved = self.evaluate(dict(inputs), dict(action))
        return ActionEvaluation(*(tensor.detach() for tensor in self._saved))

    def trace(self, inputs: Mapping[str, Any], action: Mapping[str, Any]) -> Iterator[tuple[str, Array, int]]:
        """See `Network.trace`."""
        with OperationTrace() as traced, torch.no_grad():
            found = self.evaluate(dict(inputs), dict(action))
        harmless = traced.masks and all(bool(part.isfinite().all()) for part in found)
        return iter(() if harmless else traced.found)

    def backward(self, of_log_prob: Any, of_entropy: Any, of_value: Any, out: Any) -> None:
        """See `Network.backward`."""
        assert self._saved is not None
        if self._bound is not out:
            self._bound = out
            self._bind(out)
        out.zero_()
        pairs = zip(self._saved, (of_log_prob, of_entropy, of_value), strict=True)
        wanted = [(tensor, factor) for tensor, factor in pairs if factor is not None and tensor.requires_grad]
        torch.autograd.backward([weighed(tensor, factor) for tensor, factor in wanted])
        self._saved = None

    def _bind(self, gradient: Tensor) -> None:
        """Make autograd add into `gradient` [size]."""
        bind(self.trainable_parameters(), gradient)
