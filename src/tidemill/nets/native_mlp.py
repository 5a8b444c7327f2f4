"""Networks of plain layers that the native core computes, and the setting of policies
that says so."""

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from tidemill.api.policy import PolicyConfig
from tidemill.api.spaces import Spaces
from tidemill.core.errors import ConfigError
from tidemill.native.library import (
    INSTRUCTION_SETS,
    KernelLayers,
    Kernels,
    address,
    asked_for,
    choices,
    threads,
    unavailable,
)
from tidemill.nets.mlp import MLP, Floats, MLPShape, total


@dataclass(frozen=True, kw_only=True)
class MLPSettings(PolicyConfig):
    """The setting of policies whose plain layers, and those of what trains them, the
    native core can compute."""

    native: Literal["off", "auto", "baseline", "avx2", "avx512"] = "auto"
    """See `ActorCritic.native`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ("off", "auto", *INSTRUCTION_SETS)
        if self.native not in known:
            raise ConfigError(f'native = "{self.native}" is not known; take one of {", ".join(known)}')

    @property
    def undecided(self) -> bool:
        return self.native == "auto" and len(choices()) > 1

    def alternatives(self, spaces: Spaces) -> Sequence[Self]:
        return [self.replace(native=name) for name in choices()] if self.undecided else (self,)

    def to_play(self) -> Self:
        return self if unavailable(self.native) is None else self.replace(native="off")

    def kernels(self) -> Kernels | None:
        """Return the native core's kernels where they are to compute its layers. Raises
        `ConfigError` where they cannot be had."""
        return asked_for(self.native)


class NativeMLP(MLP):
    """An `MLP` by the native core: a call for all layers forward, and one for all
    backward."""

    def __init__(self, shape: MLPShape, flat: Floats, kernels: Kernels) -> None:
        super().__init__(shape, flat)
        self._kernels, self._widths = kernels, np.array([*shape.hidden, shape.outputs], np.int64)
        kernels.helpers(threads() - 1)
        self._net = KernelLayers(
            shape.towers, len(self._widths), shape.inputs, address(self._widths), address(flat)
        )
        self._of_net, self._into = addressof(self._net), 0
        self._allocate(0)

    def _allocate(self, n: int) -> None:
        """Make the arrays of calls with `n` rows: to find an array's address takes as
        long as a narrow layer."""
        shape = self.shape
        each, widest = shape.towers * n, max(shape.hidden, default=0)
        self._hidden: Floats = np.empty(each * sum(shape.hidden), np.float32)
        self._spare: Floats = np.empty(2 * each * widest, np.float32)
        self._out: Floats = np.empty((shape.towers, n, shape.outputs), np.float32)
        self._below: Floats = np.empty((shape.towers, n, shape.inputs), np.float32)
        arrays = self._hidden, self._out, self._spare, self._below
        self._of_hidden, self._of_out, self._of_spare, self._of_below = map(address, arrays)

    def forward(self, inputs: Floats) -> Floats:
        self._inputs: Floats = np.ascontiguousarray(inputs, np.float32)
        self._of_inputs, n = address(self._inputs), len(inputs)
        if n != self._out.shape[1]:
            self._allocate(n)
        self._kernels.forward(self._of_net, self._of_inputs, n, self._of_hidden, self._of_out)
        return self._out

    def backward(self, of_out: Floats, into: Floats | None, of_inputs: bool = False) -> Floats | None:
        if into is not None and self._gradient[0] is not into:
            self._gradient, self._into = (into, {}), address(into)
        of_out = np.ascontiguousarray(of_out, np.float32)
        self._kernels.backward(
            self._of_net,
            self._of_inputs,
            len(self._inputs),
            self._of_hidden,
            address(of_out),
            self._of_spare,
            None if into is None else self._into,
            self._of_below if of_inputs else None,
        )
        return total(self._below) if of_inputs else None


def mlp(shape: MLPShape, flat: Floats, kernels: Kernels | None) -> MLP:
    """Return the network of weights `flat`: by the native core where its `kernels` are
    given, else in numpy."""
    return MLP(shape, flat) if kernels is None else NativeMLP(shape, flat, kernels)
