"""What all policies do whose network is made of torch operations, on a CPU or a GPU:
acting, and the two halves of training."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.core.schema import Array, Arrays
from tidemill.nets.device_acting import DeviceActing
from tidemill.nets.distributions import Distribution
from tidemill.nets.torch_device import tensors
from tidemill.nets.torch_gradients import add_gradients, bind, detached
from tidemill.nets.trainable import Evaluation, LibraryName, TrainablePolicy


class TorchPolicy(TrainablePolicy):
    """On a CPU it acts and trains in the memory that its arrays view, and draws by numpy.
    On a GPU weights lie and actions are drawn there, while `parameters` and `load` copy.
    Each policy has streams of its own, so that several share a GPU; nothing is set for
    the whole process."""

    library: LibraryName = "torch"
    recorded = False
    """Whether a GPU may record what `heads` does for a number of rows, and repeat that
    with other rows (see `device_acting`)."""
    distribution: Distribution
    device: torch.device
    _rng: np.random.Generator

    def _place(self, device: str) -> None:
        """Say where the tensors lie, before there are any."""
        self.device = torch.device(device)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._bound: Tensor | None = None  # where `backward` wrote last
        self._kept: Evaluation | None = None
        self._acting: DeviceActing | None = None

    @abstractmethod
    def heads(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (head [n, size], value [n]) of what `prepare` gives (and of states), as
        tensors on the device."""

    def next_state(self) -> dict[str, Tensor]:
        """Return the state after the rows of the last `heads` that acted, ``state.*`` [n,
        ...]; {} of a policy that remembers nothing."""
        return {}

    @abstractmethod
    def log_std(self) -> Tensor:
        """Return the log-deviations [deviations]."""

    def place(self) -> AbstractContextManager[object]:
        """See `TrainablePolicy.place`."""
        return torch.cuda.stream(self._stream)

    def settle(self) -> None:
        """Wait until the device has done all that was begun."""
        if self._stream is not None:
            self._stream.synchronize()
        if self._acting is not None:
            self._acting.wait()

    def reseed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def act(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        """See `Policy.act`."""
        if self.device.type == "cpu":
            self._act_here(observation, state, deterministic, out)
        else:
            self.begin(observation, state, deterministic, out)()

    def begin(
        self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays
    ) -> Callable[[], None]:
        """See `Policy.begin`."""
        if self.device.type == "cpu":
            return super().begin(observation, state, deterministic, out)
        if not len(next(iter(observation.values()))):
            return lambda: None
        if self._acting is None:
            self._acting = DeviceActing(self, int(self._rng.integers(1 << 63)), self.recorded)
        return self._acting.begin(self.prepare(observation) | state, deterministic, self.value_scale, out)

    def _act_here(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        n = len(next(iter(observation.values())))
        if n == 0:
            return
        with torch.inference_mode():
            head, value = self.heads(tensors(self.prepare(observation) | state))
            log_std = self.log_std().numpy()[:, None]
            for name, part in self.next_state().items():
                out[name][:n] = part.numpy()
        np.multiply(value.numpy(), np.float32(self.value_scale), out=out["value"][:n])
        if not isinstance(deterministic, bool):
            some = bool(deterministic.any())
            deterministic = deterministic if deterministic.ndim and some else some
        self.distribution.sample(
            np.ascontiguousarray(head.numpy().T),
            log_std,
            deterministic,
            self._rng,
            out["action"][:n],
            out["log_prob"][:n],
        )

    def evaluate(self, inputs: dict[str, Tensor], action: dict[str, Tensor]) -> Evaluation:
        """See `TrainablePolicy.evaluate`."""
        head, value = self.heads(inputs)
        log_prob, entropy = self.distribution.evaluate(head, self.log_std(), action["action"])
        return Evaluation(log_prob, entropy, value)

    def forward(self, inputs: Mapping[str, Any], action: Mapping[str, Any]) -> Evaluation:
        """See `TrainablePolicy.forward`."""
        self._kept = self.evaluate(dict(inputs), dict(action))
        return detached(self._kept)

    def backward(self, of_log_prob: Any, of_entropy: Any, of_value: Any, out: Any) -> None:
        """See `TrainablePolicy.backward`."""
        assert self._kept is not None
        if self._bound is not out:
            self._bound = out
            self._bind(out)
        out.zero_()
        add_gradients(self._kept, of_log_prob, of_entropy, of_value)
        self._kept = None

    def _bind(self, gradient: Tensor) -> None:
        """Make autograd add into `gradient` [size]."""
        bind(self.trainable_parameters(), gradient)
