"""The network of a `TorchNetwork`: the user's module between raw observations and an
action distribution."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from tidemill.api.spaces import Spaces, schema_of_space
from tidemill.core.errors import ConfigError, returned
from tidemill.core.schema import allocate
from tidemill.nets.distributions import distribution_of
from tidemill.nets.masks import ActionMask
from tidemill.nets.torch_backend import TorchBackend
from tidemill.nets.torch_copies import Mirror, tensors


class ModuleNetwork(TorchBackend):
    """The network acts and trains with one torch module, whose weights stay where it has
    them: modules may share them, or count on their places. What it does is never
    recorded, since it may look at numbers on the way. Values in reward units move with
    the returns' deviation: which of the module's weights to rescale is not known here."""

    def __init__(
        self,
        make: Callable[[Spaces, int], Module],
        spaces: Spaces,
        mask: ActionMask | None,
        log_std_init: float,
        seed: np.random.SeedSequence,
        device: str,
    ) -> None:
        super().__init__(distribution_of(spaces.action), device)
        self._mask = mask
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(seed.generate_state(1)[0]))
            made = returned(make(spaces, self.distribution.size), Module, make)
        self._module = made.eval().to(self.device)
        self._log_std = (
            torch.full((self.distribution.deviations,), log_std_init).to(self.device).requires_grad_()
        )
        named = {f"network.{name}": tensor for name, tensor in self._module.state_dict().items()}
        named["log_std"] = self._log_std
        self._mirrors = {name: Mirror(tensor) for name, tensor in named.items()}
        self.weights = {name: mirror.array for name, mirror in self._mirrors.items()}
        self._check(make, spaces)

    def _check(self, make: Callable[[Spaces, int], Module], spaces: Spaces) -> None:
        """Raise `ConfigError` unless the network answers two rows as it should."""
        rows, outputs = 2, self.distribution.size
        with torch.no_grad():
            seen = tensors(allocate(schema_of_space(spaces.observation, "obs"), (rows,)))
            found = self._module({name: tensor.to(self.device) for name, tensor in seen.items()})
        shapes = [
            list(part.shape) if isinstance(part, Tensor) else type(part).__name__
            for part in (found if isinstance(found, tuple) else (found,))
        ]
        if shapes != [[rows, outputs], [rows]]:
            raise ConfigError(
                f"{make.__qualname__} gave {shapes} for {rows} rows; it must return (head [{rows}, "
                f"{outputs}], value [{rows}])"
            )

    def heads(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        head, value = self._module(inputs)
        if self._mask is not None:
            head = self._mask.taken_out(head, inputs)
        return head, value

    def log_std(self) -> Tensor:
        return self._log_std

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.trainable_parameters())

    def trained(self) -> list[tuple[str, tuple[int, ...]]]:
        named = self._module.named_parameters()
        own = [(f"network.{name}", tuple(part.shape)) for name, part in named if part.requires_grad]
        return [*own, ("log_std", tuple(self._log_std.shape))] if self._log_std.numel() else own

    def trainable_parameters(self) -> list[Tensor]:
        """Return the module's parameters that take gradients, then ``log_std`` where
        actions have one."""
        own: list[Tensor] = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        return [*own, self._log_std] if self._log_std.numel() else own
