"""The actor-critic network for MLPs on a CPU that the native core computes. Weights lie
as numpy's do, and what is not in the core is numpy's."""

from collections.abc import Callable
from ctypes import addressof
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tidemill.core.schema import Array, Arrays
from tidemill.native.library import KernelNetwork, Kernels, address
from tidemill.nets.distributions import Bernoulli, Categorical, DiagonalGaussian, MultiCategorical
from tidemill.nets.mlp import Floats
from tidemill.nets.numpy_actor_critic import NumpyActorCritic
from tidemill.nets.trainable import nothing
from tidemill.nets.weights import ActorCriticShape

KINDS = {Categorical: 0, MultiCategorical: 0, Bernoulli: 1, DiagonalGaussian: 2}
"""What kernels.c calls the distributions."""


class NativeActorCritic(NumpyActorCritic):
    """Acts by the core, without a memory; see `tidemill.algorithms.native_ppo` for what
    learns with it. Actions are drawn from the random numbers that numpy's would take.

    training: the network as the core's learning takes it
    """

    kernels: Kernels

    def __init__(self, shape: ActorCriticShape, flat: Floats, kernels: Kernels) -> None:
        super().__init__(shape, flat)
        assert shape.memory is None
        self.kernels = kernels
        given = self._distribution
        self._box = given if isinstance(given, DiagonalGaussian) else None
        sizes = given.nvec if isinstance(given, MultiCategorical) else (given.size,)
        self._branches = given.size if self._box or isinstance(given, Bernoulli) else len(sizes)
        self._most = np.array(sizes, np.int64) - 1 if KINDS[type(given)] == 0 else np.ones(1, np.int64)
        self._kept: list[NDArray[Any]] = [np.array(shape.hidden, np.int64), np.array(sizes, np.int64)]
        self._acting_network, self.training = self._described(), self._described()

    def _described(self) -> KernelNetwork:
        """Return the network with scratch memory of its own."""
        shape, encoder = self.shape, self.shape.encoder
        network = KernelNetwork(
            shape.towers,
            len(shape.hidden),
            encoder.width,
            encoder.seen if encoder.critic_only else encoder.width,
            shape.activation == "relu",
            KINDS[type(self._distribution)],
            self._distribution.size,
            self._branches,
            address(self._kept[0]),
            address(self._kept[1]),
            address(self.flat),
        )
        scratch = np.zeros(self.kernels.scratch(addressof(network)), np.float32)
        self._kept.append(scratch)
        network.scratch = address(scratch)
        return network

    def encode(self, action: Array) -> NDArray[Any]:
        """Return actions [n, ...] as the core takes them: int32 [n, branches], all
        possible ones; of a Box float32 [n, elements] in units of half its range."""
        rows = action.reshape(len(action), -1)
        if self._box is not None:
            units = np.empty(rows.shape, np.float32)
            np.subtract(rows, self._box.centre, out=units, casting="same_kind")
            units /= self._box.half
            return units
        return np.clip(rows, 0, self._most).astype(np.int32)

    def begin(
        self, inputs: Arrays, deterministic: bool | Array, rng: Generator, scale: np.float32, out: Arrays
    ) -> Callable[[], None]:
        """See `Network.begin`. Everything is done at once."""
        features = np.ascontiguousarray(inputs["features"], np.float32)
        n, given, box = len(features), self._distribution, self._box
        noise = modes = None
        if deterministic is not True:
            shape = (n, given.size) if given.normal else (given.draws, n)
            noise = (rng.standard_normal if given.normal else rng.random)(shape, np.float32)
            modes = None if deterministic is False else np.array(deterministic, np.bool_)
        forbidden = inputs.get("forbidden")
        numbers = np.empty((2, n), np.float32)
        action = np.empty((n, self._branches), np.int32 if box is None else np.float32)
        self.kernels.act(
            addressof(self._acting_network),
            address(features),
            None if forbidden is None else address(forbidden),
            n,
            None if noise is None else address(noise),
            deterministic is True,
            None if modes is None else address(modes),
            scale,
            address(action),
            address(numbers[0]),
            address(numbers[1]),
        )
        place = out["action"][:n]
        place[...] = (action if box is None else action * box.half + box.centre).reshape(place.shape)
        out["log_prob"][:n], out["value"][:n] = numbers
        return nothing
