"""The policy that a `TorchNetwork` describes: the user's module between raw observations
and an action distribution."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.api.spaces import Spaces, schema_of_space
from tidemill.core.errors import ConfigError, SchemaError
from tidemill.core.schema import Array, Arrays, allocate, schema_of
from tidemill.nets.distributions import distribution_of
from tidemill.nets.masks import FORBIDDEN, mask_of
from tidemill.nets.normaliser import RunningMoments
from tidemill.nets.torch_device import Mirror, tensors
from tidemill.nets.torch_network import TorchNetwork
from tidemill.nets.torch_policy import TorchPolicy


class TorchNetworkPolicy(TorchPolicy):
    """Acts and trains with one module, whose weights stay where it has them: modules may
    share them, or count on their places. What it does is never recorded, since it may
    look at numbers on the way."""

    def __init__(self, config: TorchNetwork, spaces: Spaces, seed: int, device: str = "cpu") -> None:
        self._place(device)
        weights_seed, sampling_seed = np.random.SeedSequence(seed).spawn(2)
        self._rng = np.random.default_rng(sampling_seed)
        self.distribution = distribution_of(spaces.action)
        self.mask = mask_of(spaces, config.action_mask)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(weights_seed.generate_state(1)[0]))
            self._network = config.network(spaces, self.distribution.size).eval().to(self.device)
        self._log_std = (
            torch.full((self.distribution.deviations,), config.log_std_init).to(self.device).requires_grad_()
        )
        self._returns = RunningMoments("returns", ())
        named = {f"network.{name}": tensor for name, tensor in self._network.state_dict().items()}
        if self._log_std.numel():
            named["log_std"] = self._log_std
        self._mirrors = {name: Mirror(tensor) for name, tensor in named.items()}
        self._check(config, spaces)

    def _check(self, config: TorchNetwork, spaces: Spaces) -> None:
        """Raise `ConfigError` unless the network answers two rows as it should."""
        rows, outputs = 2, self.distribution.size
        with torch.no_grad():
            seen = tensors(allocate(schema_of_space(spaces.observation, "obs"), (rows,)))
            found = self._network({name: tensor.to(self.device) for name, tensor in seen.items()})
        shapes = [
            list(part.shape) if isinstance(part, Tensor) else part
            for part in (found if isinstance(found, tuple) else (found,))
        ]
        if shapes != [[rows, outputs], [rows]]:
            raise ConfigError(
                f"the network of {type(config).__name__} gave {shapes} for {rows} rows; it must return (head "
                f"[{rows}, {outputs}], value [{rows}])"
            )

    def heads(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        head, value = self._network(inputs)
        return head if self.mask is None else head.masked_fill(inputs[self.mask.name] == 0, FORBIDDEN), value

    def log_std(self) -> Tensor:
        return self._log_std

    def parameters(self) -> Arrays:
        """Return the module's parameters and buffers (``network.*``), ``log_std`` where
        actions have one, and the statistics ``returns.*``."""
        with self.place():
            for mirror in self._mirrors.values():
                mirror.pull()
        self.settle()
        return self._named()

    def _named(self) -> Arrays:
        return {name: mirror.array for name, mirror in self._mirrors.items()} | self._returns.parameters()

    def load(self, parameters: Mapping[str, Array], version: int) -> None:
        """See `Policy.load`. Nothing is changed when a name, shape or dtype does not
        fit."""
        own = self._named()
        here, given = schema_of(own), schema_of(parameters)
        if here != given:
            wrong = sorted(name for name in here.keys() | given.keys() if here.get(name) != given.get(name))
            raise SchemaError(
                f"these parameters are of another network: {', '.join(wrong)} differ; build the policy as it "
                "was when it was trained"
            )
        self.settle()
        for name, array in own.items():
            np.copyto(array, parameters[name])
        with self.place():
            for mirror in self._mirrors.values():
                mirror.push()
        self.settle()
        self.version = version

    def prepare(self, observation: Arrays) -> Arrays:
        """Return the observation: the module takes it raw."""
        return dict(observation)

    def check(self, observation: Arrays) -> None:
        if self.mask is not None:
            self.mask.check(observation)

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.trainable_parameters())

    def trainable_parameters(self) -> list[Tensor]:
        """Return the module's parameters that take gradients, then ``log_std`` where
        actions have one."""
        own: list[Tensor] = [parameter for parameter in self._network.parameters() if parameter.requires_grad]
        return [*own, self._log_std] if self._log_std.numel() else own

    @property
    def value_scale(self) -> float:
        """The running deviation of the λ-returns: reward units per unit of the network's
        value."""
        return self._returns.deviation()

    def moments(self, observation: Arrays, returns: Array | None) -> NDArray[np.float64]:
        return self._returns.moments(returns)

    def fold_moments(self, moments: NDArray[np.float64]) -> None:
        """See `TrainablePolicy.fold_moments`. Values in reward units move with the
        deviation: which of the module's weights to rescale is not known here."""
        self._returns.fold(moments)
