"""The policy that a `TorchNetwork` describes: the user's module between raw observations and an action distribution."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.api.spaces import Spaces, schema_of_space
from tidemill.core.errors import ConfigError, SchemaError
from tidemill.core.schema import Array, Arrays, allocate, schema_of
from tidemill.nets.distributions import distribution_of
from tidemill.nets.normaliser import RunningMoments
from tidemill.nets.torch_gradients import add_gradients, bind, detached
from tidemill.nets.torch_network import TorchNetwork
from tidemill.nets.trainable import Evaluation, TrainablePolicy

Floats = NDArray[np.float32]


class TorchNetworkPolicy(TrainablePolicy):
    """Acts and trains with one module, on the CPU. Its parameters are numpy views of the module's own memory."""

    def __init__(self, config: TorchNetwork, spaces: Spaces, seed: int) -> None:
        weights_seed, sampling_seed = np.random.SeedSequence(seed).spawn(2)
        self._rng = np.random.default_rng(sampling_seed)
        self._distribution = distribution_of(spaces.action)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(weights_seed.generate_state(1)[0]))
            self._network = config.network(spaces, self._distribution.size).eval()
        self._log_std = torch.full((self._distribution.deviations,), config.log_std_init, requires_grad=True)
        self._returns = RunningMoments("returns", ())
        self._bound: Floats | None = None  # where `backward` wrote last
        self._kept: Evaluation | None = None
        self._check(config, spaces)

    def _check(self, config: TorchNetwork, spaces: Spaces) -> None:
        """Raise `ConfigError` unless the network answers two rows as it should."""
        rows, outputs = 2, self._distribution.size
        with torch.no_grad():
            found = self._network(_tensors(allocate(schema_of_space(spaces.observation, "obs"), (rows,))))
        shapes = [list(part.shape) if isinstance(part, Tensor) else part for part in (found if isinstance(found, tuple) else (found,))]
        if shapes != [[rows, outputs], [rows]]:
            raise ConfigError(
                f"the network of {type(config).__name__} gave {shapes} for {rows} rows; it must return (head [{rows}, {outputs}], value [{rows}])"
            )

    def act(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        """See `Policy.act`; `state` is not read."""
        n = len(next(iter(observation.values())))
        if n == 0:
            return
        with torch.inference_mode():
            head, value = self._network(_tensors(observation))
        np.multiply(value.numpy(), np.float32(self.value_scale), out=out["value"][:n])
        if not isinstance(deterministic, bool):
            some = bool(deterministic.any())
            deterministic = deterministic if deterministic.ndim and some else some
        log_std = self._log_std.detach().numpy()[:, None]
        head_first = np.ascontiguousarray(head.numpy().T)
        self._distribution.sample(head_first, log_std, deterministic, self._rng, out["action"][:n], out["log_prob"][:n])

    def parameters(self) -> Arrays:
        """Return the module's parameters and buffers (``network.*``), ``log_std`` where actions have one, and the statistics ``returns.*``."""
        named = {f"network.{name}": tensor.detach().numpy() for name, tensor in self._network.state_dict().items()}
        if self._log_std.numel():
            named["log_std"] = self._log_std.detach().numpy()
        return named | self._returns.parameters()

    def load(self, parameters: Mapping[str, Array], version: int) -> None:
        """See `Policy.load`. Nothing is changed when a name, shape or dtype does not fit."""
        own = self.parameters()
        here, given = schema_of(own), schema_of(parameters)
        if here != given:
            wrong = sorted(name for name in here.keys() | given.keys() if here.get(name) != given.get(name))
            raise SchemaError(f"these parameters are of another network: {', '.join(wrong)} differ; build the policy as it was when it was trained")
        for name, array in own.items():
            np.copyto(array, parameters[name])
        self.version = version

    def prepare(self, observation: Arrays) -> Arrays:
        """Return the observation: the module takes it raw."""
        return dict(observation)

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.trainable_parameters())

    def forward(self, inputs: Mapping[str, Any], action: Mapping[str, Any]) -> Evaluation:
        self._kept = self.evaluate(dict(inputs), dict(action))
        return detached(self._kept)

    def backward(self, of_log_prob: Any, of_entropy: Any, of_value: Any, out: Floats) -> None:
        assert self._kept is not None
        if self._bound is not out:
            self._bound = out
            bind(self.trainable_parameters(), torch.from_numpy(out))
        out.fill(0)
        add_gradients(self._kept, of_log_prob, of_entropy, of_value)
        self._kept = None

    def evaluate(self, inputs: dict[str, Tensor], action: dict[str, Tensor]) -> Evaluation:
        """See `TrainablePolicy.evaluate`."""
        head, value = self._network(inputs)
        log_prob, entropy = self._distribution.evaluate(head, self._log_std, action["action"])
        return Evaluation(log_prob, entropy, value)

    def trainable_parameters(self) -> list[Tensor]:
        """Return the module's parameters that take gradients, then ``log_std`` where actions have one."""
        own: list[Tensor] = [parameter for parameter in self._network.parameters() if parameter.requires_grad]
        return [*own, self._log_std] if self._log_std.numel() else own

    @property
    def value_scale(self) -> float:
        """The running deviation of the λ-returns: reward units per unit of the network's value."""
        return self._returns.deviation()

    def moments(self, observation: Arrays, returns: Array | None) -> NDArray[np.float64]:
        return self._returns.moments(returns)

    def fold_moments(self, moments: NDArray[np.float64]) -> None:
        """See `TrainablePolicy.fold_moments`. Values in reward units move with the deviation: which of the module's weights to rescale is not
        known here."""
        self._returns.fold(moments)


def _tensors(arrays: Arrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
