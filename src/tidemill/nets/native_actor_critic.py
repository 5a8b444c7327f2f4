"""The actor-critic network for MLPs on a CPU that the native core computes. Weights lie
as numpy's do, and what is not in the core is numpy's."""

from collections.abc import Callable
from ctypes import addressof
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tidemill.core.schema import Array, Arrays
from tidemill.native.library import KernelActing, KernelNetwork, Kernels, address, threads
from tidemill.nets.activations import ACTIVATIONS
from tidemill.nets.distributions import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Distribution,
    MultiCategorical,
)
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
        kernels.helpers(threads() - 1)
        given = self._distribution
        self._box = given if isinstance(given, DiagonalGaussian) else None
        sizes = given.nvec if isinstance(given, MultiCategorical) else (given.size,)
        self._branches = given.size if self._box or isinstance(given, Bernoulli) else len(sizes)
        self._most = np.array(sizes, np.int64) - 1 if KINDS[type(given)] == 0 else np.ones(1, np.int64)
        self._kept: list[NDArray[Any]] = [
            np.array(shape.hidden, np.int64),
            np.array(shape.critic_hidden or (), np.int64),
        ]
        self._kept.append(np.array(sizes, np.int64))
        self._acting_network, self.training = self._described(), self._described()
        self._of_acting_network = addressof(self._acting_network)
        self._acting_arrays = _ActingArrays(0, self._branches, self._distribution)

    def _described(self) -> KernelNetwork:
        """Return the network with scratch memory of its own."""
        shape, encoder = self.shape, self.shape.encoder
        network = KernelNetwork(
            shape.towers,
            len(shape.hidden),
            encoder.width,
            encoder.seen if encoder.critic_only else encoder.width,
            ACTIVATIONS.index(shape.activation),
            KINDS[type(self._distribution)],
            self._distribution.size,
            self._branches,
            -1 if shape.critic_hidden is None else len(shape.critic_hidden),
            *map(address, self._kept[:3]),
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
        features, box = inputs["features"], self._box
        n = len(features)
        if n != len(self._acting_arrays.action):
            self._acting_arrays = _ActingArrays(n, self._branches, self._distribution)
        work = self._acting_arrays
        rows = work.rows
        if features is not work.features:  # the policy hands in the same ones again and again
            work.features, rows.features = features, address(features)
        if deterministic is not True:
            (rng.standard_normal if box else rng.random)(None, np.float32, work.noise)
        modes = None if isinstance(deterministic, bool) else np.array(deterministic, np.bool_)
        forbidden = inputs.get("forbidden")
        rows.modes = None if modes is None else address(modes)
        rows.forbidden = None if forbidden is None else address(forbidden)
        rows.mode, rows.scale = deterministic is True, scale
        self.kernels.act(self._of_acting_network, work.of_rows)
        action, place = work.action, out["action"][:n]
        if box is not None:
            action *= box.half
            action += box.centre
        place[...] = action.reshape(place.shape)
        out["log_prob"][:n], out["value"][:n] = work.log_prob, work.value
        return nothing


class _ActingArrays:
    """The arrays that acting on `n` rows takes, made once: to find an array's address
    takes as long as a layer.

    features: the rows that were acted on last
    rows: what the core is handed
    of_rows: its address
    """

    def __init__(self, n: int, branches: int, distribution: Distribution) -> None:
        normal = distribution.normal
        self.noise: Floats = np.empty(
            (n, distribution.size) if normal else (distribution.draws, n), np.float32
        )
        self.action: NDArray[Any] = np.empty((n, branches), np.float32 if normal else np.int32)
        self.log_prob, self.value = np.empty((2, n), np.float32)
        self.features = np.empty(0, np.float32)
        self.rows = KernelActing(n=n, noise=address(self.noise))
        for name in ("action", "log_prob", "value"):
            setattr(self.rows, name, address(getattr(self, name)))
        self.of_rows = addressof(self.rows)
