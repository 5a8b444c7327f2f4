"""One convolution of stride 1 with relu, forward and backward written out in numpy: for
images of a few pixels, such as MinAtar's. Larger ones: `torch_convolutions`."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.nets.scratch import Scratch
from tidemill.nets.towers import Floats


class Trunk(ABC):
    """What a network begins with that sees images, [n, height, width, channels]. Its
    weights, ``convolution.I.weight`` [kernel · kernel · channels, filters] and
    ``convolution.I.bias``, lie in the caller's memory."""

    @abstractmethod
    def forward(self, images: NDArray[Any]) -> Floats:
        """Return the flattened features [n, width], which are void after the next
        `forward`; what `backward` needs is kept."""

    @abstractmethod
    def backward(self, of_features: Floats, into: dict[str, Floats]) -> None:
        """Write the gradients of the weights into `into`, given that of the features of
        the last `forward`. May overwrite `of_features`."""


class Convolution(Trunk):
    """See the module's text."""

    def __init__(self, kernel: int, weights: dict[str, Floats]) -> None:
        self._kernel = kernel
        self._weight = weights["convolution.0.weight"]
        self._bias = weights["convolution.0.bias"]
        self._scratch = Scratch()
        self._kept: tuple[Floats, Floats] = self._bias, self._bias  # patches and results

    def forward(self, images: NDArray[Any]) -> Floats:
        kernel, (n, height, across, channels) = self._kernel, images.shape
        rows, columns = height - kernel + 1, across - kernel + 1
        patches = self._scratch("patches", (n, rows, columns, kernel, kernel * channels))
        images = np.ascontiguousarray(images)
        image, row, pixel, one = images.strides
        # A row of a patch lies in one piece.
        np.copyto(
            patches,
            np.lib.stride_tricks.as_strided(
                images, patches.shape, (image, row, pixel, row, one), writeable=False
            ),
        )
        flat = patches.reshape(n * rows * columns, -1)
        found = np.matmul(flat, self._weight, out=self._scratch("found", (len(flat), self._bias.size)))
        found += self._bias
        # a quarter of what it takes with a scalar
        np.maximum(found, self._scratch("zeros", found.shape), out=found)
        self._kept = flat, found
        return found.reshape(n, -1)

    def backward(self, of_features: Floats, into: dict[str, Floats]) -> None:
        patches, found = self._kept
        of_found = of_features.reshape(found.shape)
        of_found *= found > 0
        np.matmul(patches.T, of_found, out=into["convolution.0.weight"])
        np.add.reduce(of_found, axis=0, out=into["convolution.0.bias"])
