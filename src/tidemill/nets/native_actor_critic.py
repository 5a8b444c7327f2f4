"""The actor-critic network for MLPs on a CPU that the native core computes. Weights lie
as numpy's do, and what is not in the core is numpy's."""

from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tidemill.core.schema import Array, Arrays, zeros
from tidemill.native.library import KernelActing, KernelLeaf, KernelNetwork, Kernels, address, threads
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

KINDS: Mapping[type[Distribution], int] = {
    Categorical: 0,
    MultiCategorical: 0,
    Bernoulli: 1,
    DiagonalGaussian: 2,
}
"""What kernels.c calls the distributions."""
MOST_SIZES = 64  # of batches that are acted on, whose arrays are kept


class _Leaf:
    """A leaf of the action as the core has it.

    place: its columns among all branches
    """

    def __init__(self, name: str, distribution: Distribution, first: int) -> None:
        self.name, self.distribution = name, distribution
        self.box = distribution if isinstance(distribution, DiagonalGaussian) else None
        match distribution:
            case Categorical():
                sizes: tuple[int, ...] = (distribution.size,)
            case MultiCategorical():
                sizes = distribution.nvec
            case _:
                sizes = (2,) * distribution.size
        self._sizes = np.array(sizes, np.int64)
        self.branches = len(sizes)
        self.place = slice(first, first + self.branches)
        self.kernel = KernelLeaf(
            KINDS[type(distribution)], distribution.size, self.branches, address(self._sizes)
        )

    def encode(self, action: Array) -> NDArray[Any]:
        """Return actions [n, ...] as the core takes them: int32 [n, branches], all
        possible ones; of a Box float32 [n, elements] in units of half its range."""
        rows = action.reshape(len(action), -1)
        if self.box is not None:
            units = np.empty(rows.shape, np.float32)
            np.subtract(rows, self.box.centre, out=units, casting="same_kind")
            units /= self.box.half
            return units
        return np.clip(rows, 0, self._sizes - 1).astype(np.int32)


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
        self._leaves: list[_Leaf] = []
        self._branches = 0
        for name, distribution in self._distribution.leaves().items():
            self._leaves.append(_Leaf(name, distribution, self._branches))
            self._branches += self._leaves[-1].branches
        self._of_leaves = (KernelLeaf * len(self._leaves))(*(leaf.kernel for leaf in self._leaves))
        self._kept: list[NDArray[Any]] = [
            np.array(shape.hidden, np.int64),
            np.array(shape.critic_hidden or (), np.int64),
        ]
        self._acting_network, self.training = self._described(), self._described()
        self._of_acting_network = addressof(self._acting_network)
        self._acting_arrays: dict[int, _ActingArrays] = {}  # by number of rows
        self._features: Floats = flat[:0]  # the rows that were acted on last
        self._of_features = 0  # where they lie

    def _described(self) -> KernelNetwork:
        """Return the network with scratch memory of its own."""
        shape, encoder = self.shape, self.shape.encoder
        network = KernelNetwork(
            shape.towers,
            len(shape.hidden),
            encoder.width,
            encoder.seen if encoder.critic_only else encoder.width,
            ACTIVATIONS.index(shape.activation),
            len(self._leaves),
            self._distribution.size,
            self._branches,
            self._distribution.deviations,
            -1 if shape.critic_hidden is None else len(shape.critic_hidden),
            *map(address, self._kept[:2]),
            addressof(self._of_leaves),
            address(self.flat),
        )
        scratch = zeros(self.kernels.scratch(addressof(network)), "float32")
        self._kept.append(scratch)
        network.scratch = address(scratch)
        return network

    def encode(self, actions: Mapping[str, Array]) -> NDArray[Any]:
        """Return rows of actions, by their leaves' names, as the core takes them: 4 bytes
        for each branch, of a Box those of a float32."""
        each = [leaf.encode(actions[leaf.name]) for leaf in self._leaves]
        return each[0] if len(each) == 1 else np.concatenate([part.view(np.int32) for part in each], 1)

    def begin(
        self, inputs: Arrays, deterministic: bool | Array, rng: Generator, scale: np.float32, out: Arrays
    ) -> Callable[[], None]:
        """See `Network.begin`. Everything is done at once."""
        features = inputs["features"]
        n = len(features)
        work = self._acting_arrays.get(n)
        if work is None:  # episodes that end leave fewer rows for a tick
            if len(self._acting_arrays) >= MOST_SIZES:
                self._acting_arrays.clear()
            work = self._acting_arrays[n] = _ActingArrays(n, self._leaves)
        rows = work.rows
        if features is not self._features:  # the policy hands in the same ones again and again
            self._features, self._of_features = features, address(features)
        rows.features = self._of_features
        if deterministic is not True:
            for normal, noise in work.noise:
                (rng.standard_normal if normal else rng.random)(None, np.float32, noise)
        modes = None if isinstance(deterministic, bool) else np.array(deterministic, np.bool_)
        forbidden = inputs.get("forbidden")
        rows.modes = None if modes is None else address(modes)
        rows.forbidden = None if forbidden is None else address(forbidden)
        rows.mode, rows.scale = deterministic is True, scale
        self.kernels.act(self._of_acting_network, work.of_rows)
        for name, box, action in work.actions:
            if box is not None:
                action *= box.half
                action += box.centre
            place = out[name][:n]
            place[...] = action.reshape(place.shape)
        out["log_prob"][:n], out["value"][:n] = work.log_prob, work.value
        return nothing


class _ActingArrays:
    """The arrays that acting on `n` rows takes, made once: to find an array's address
    takes as long as a layer.

    noise: of each leaf whether its random numbers are normal, and where they go
    actions: of each leaf its name, the Box that it is, and where the core writes it, [n,
        branches]
    rows: what the core is handed
    of_rows: its address
    """

    def __init__(self, n: int, leaves: Sequence[_Leaf]) -> None:
        branches = leaves[-1].place.stop
        words: NDArray[np.int32] = np.empty((n, branches), np.int32)
        drawn: Floats = np.empty(branches * n, np.float32)
        self.noise: list[tuple[bool, Floats]] = []
        for leaf in leaves:
            own = drawn[leaf.place.start * n : leaf.place.stop * n]
            form = (n, leaf.branches) if leaf.box else (leaf.branches, n)
            self.noise.append((leaf.box is not None, own.reshape(form)))
        self.actions: list[tuple[str, DiagonalGaussian | None, NDArray[Any]]] = [
            (leaf.name, leaf.box, (words.view(np.float32) if leaf.box else words)[:, leaf.place])
            for leaf in leaves
        ]
        self._kept = words, drawn
        self.log_prob, self.value = np.empty((2, n), np.float32)
        self.rows = KernelActing(n=n, noise=address(drawn), action=address(words))
        for name in ("log_prob", "value"):
            setattr(self.rows, name, address(getattr(self, name)))
        self.of_rows = addressof(self.rows)
