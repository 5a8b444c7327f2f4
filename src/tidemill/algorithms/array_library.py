"""What an update does with a policy's arrays in the library that they belong to: numpy
here, torch in `torch_library`, imported when it is needed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.algorithms.adam import Adam, NativeAdam, Optimiser
from tidemill.core.schema import Array, Arrays, zeros
from tidemill.nets.scratch import Scratch
from tidemill.nets.trainable import Network


class Library(ABC):
    """Columns hold a batch; a minibatch is what `take` picks of them."""

    namespace: ModuleType
    """numpy or torch."""

    at_once: bool
    """Whether a number can be read without waiting for anything. Else all of an update
    are better read together, at its end."""

    @abstractmethod
    def zeros(self, *shape: int) -> Any:
        """Return an array of float32 zeros."""

    @abstractmethod
    def to_host(self, array: Any) -> NDArray[np.float32]:
        """Return the numbers of `array` as numpy's, in its own memory where that is the
        host's; else in memory that the next call rewrites."""

    @abstractmethod
    def read(self, array: Any) -> Array:
        """Return an array of any type as numpy's, for looking at it."""

    @abstractmethod
    def from_host(self, numbers: NDArray[np.float32], array: Any) -> None:
        """Put into `array` what became of `numbers`, which `to_host` made of it."""

    @abstractmethod
    def total(self, parts: Sequence[Any], weight: float, out: Any) -> None:
        """Write `parts`, scalars of the library or plain numbers, times `weight` into
        `out`."""

    def host_empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return memory of the host that `columns` is quick to bring into this library;
        what is written there must stay until the update has ended."""
        return np.empty(shape, dtype)

    @abstractmethod
    def columns(self, arrays: Arrays) -> Mapping[str, Any]:
        """Return `arrays` in this library."""

    @abstractmethod
    def take(self, columns: Mapping[str, Any], rows: Any, axis: int = 0) -> dict[str, Any]:
        """Return copies of `rows` (indices, of the library or numpy's) of each column, in
        memory that the next call for columns of the same names may rewrite."""

    @abstractmethod
    def without_gradients(self) -> AbstractContextManager[object]:
        """Return a context in which `Network.forward` keeps nothing for
        `backward`."""

    def recorded(self, step: Callable[[Any], Any]) -> Callable[[Any], Any] | None:
        """Return what does `step`, of the pieces of a minibatch, as a device has recorded
        it: as often as it is called, with any pieces. None where nothing records."""
        return None

    @abstractmethod
    def optimiser(self, network: Network, gradient: Any, epsilon: float) -> Optimiser:
        """Return Adam over the network's weights; `gradient` is where
        `Network.backward` writes."""


class NumpyLibrary(Library):
    """Everything is a numpy array already."""

    at_once = True

    def __init__(self) -> None:
        self.namespace = np
        self._scratch = Scratch()

    def zeros(self, *shape: int) -> NDArray[np.float32]:
        return zeros(shape, "float32")

    def to_host(self, array: Any) -> NDArray[np.float32]:
        numbers: NDArray[np.float32] = array
        return numbers

    def read(self, array: Any) -> Array:
        return np.asarray(array)

    def from_host(self, numbers: NDArray[np.float32], array: Any) -> None:
        """Do nothing: on the host both are the same."""

    def total(self, parts: Sequence[Any], weight: float, out: Any) -> None:
        out[:] = [float(part) * weight for part in parts]

    def columns(self, arrays: Arrays) -> Mapping[str, Any]:
        return arrays

    def take(self, columns: Mapping[str, Any], rows: Any, axis: int = 0) -> dict[str, Any]:
        taken = {}
        for name, column in columns.items():
            out = self._scratch(
                name, (*column.shape[:axis], len(rows), *column.shape[axis + 1 :]), column.dtype
            )
            # mode: with "raise" numpy would write to a copy of `out` first; the indices
            # are in range
            taken[name] = column.take(rows, axis, out, "clip")
        return taken

    def without_gradients(self) -> AbstractContextManager[object]:
        return nullcontext()

    def optimiser(self, network: Network, gradient: NDArray[np.float32], epsilon: float) -> Optimiser:
        if network.kernels is not None:
            return NativeAdam(network.flat_weights(), gradient, epsilon, network.kernels)
        return Adam(network.flat_weights(), gradient, epsilon)
