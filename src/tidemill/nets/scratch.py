"""Memory for intermediate results that is used again, so that a loop over minibatches
allocates nothing."""

from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

VIEWS = 256  # kept at most: the sizes of minibatches change with every update


class Scratch:
    """A scratch holds contiguous arrays by name, zeros until they are written. What lies
    in one is void when its name is asked for with another shape; a name keeps one dtype.
    """

    def __init__(self) -> None:
        self._memory: dict[str, NDArray[Any]] = {}
        self._views: dict[tuple[str, tuple[int, ...]], NDArray[Any]] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return the array called `name`."""
        view = self._views.get((name, shape))
        return self._make(name, shape, dtype) if view is None else view

    def _make(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        size = prod(shape)
        memory = self._memory.get(name)
        if memory is None or memory.size < size or len(self._views) >= VIEWS:
            self._views.clear()  # views of what is replaced would keep it
        if memory is None or memory.size < size:
            memory = self._memory[name] = np.zeros(size, dtype)
        view = self._views[name, shape] = memory[:size].reshape(shape)
        return view
