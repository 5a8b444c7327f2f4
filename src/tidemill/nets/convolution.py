"""Convolutions with relu over weights that numpy arrays hold: one of stride 1, forward
and backward written out in numpy, for images of a few pixels, such as MinAtar's; several,
for larger images, by torch, which is imported by these alone."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tidemill.nets.scratch import Scratch

if TYPE_CHECKING:
    from torch import Tensor
from tidemill.nets.mlp import Floats


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
    """One convolution of stride 1, in numpy."""

    def __init__(self, kernel: int, weights: dict[str, Floats]) -> None:
        self._kernel = kernel
        self._weight = weights["convolution.0.weight"]
        self._bias = weights["convolution.0.bias"]
        self._scratch = Scratch()
        self._saved: tuple[Floats, Floats] = self._bias, self._bias  # patches and results

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
        self._saved = flat, found
        return found.reshape(n, -1)

    def backward(self, of_features: Floats, into: dict[str, Floats]) -> None:
        patches, found = self._saved
        of_found = of_features.reshape(found.shape)
        of_found *= found > 0
        np.matmul(patches.T, of_found, out=into["convolution.0.weight"])
        np.add.reduce(of_found, axis=0, out=into["convolution.0.bias"])


class TorchConvolutions(Trunk):
    """Several convolutions, in torch on a CPU: (filters, kernel, stride) of each. Images
    are uint8."""

    def __init__(self, convolutions: Sequence[tuple[int, int, int]], weights: dict[str, Floats]) -> None:
        import torch

        self._convolutions = convolutions
        self._names = [
            f"convolution.{i}.{part}" for i in range(len(convolutions)) for part in ("weight", "bias")
        ]
        self._leaves = [torch.from_numpy(weights[name]).requires_grad_() for name in self._names]
        self._features: Tensor | None = None

    def forward(self, images: NDArray[Any]) -> Floats:
        import torch
        from torch.nn import functional

        x = torch.from_numpy(images).permute(0, 3, 1, 2).float()
        for i, (filters, kernel, stride) in enumerate(self._convolutions):
            weight, bias = self._leaves[2 * i : 2 * i + 2]
            if not i:
                weight = weight / 255  # of few weights instead of many pixels
            x = functional.conv2d(
                x, weight.view(kernel, kernel, -1, filters).permute(3, 2, 0, 1), bias, stride
            ).relu_()
        self._features = x.permute(0, 2, 3, 1).flatten(1)
        features: Floats = self._features.detach().numpy()
        return features

    def backward(self, of_features: Floats, into: dict[str, Floats]) -> None:
        import torch

        from tidemill.nets.torch_gradients import weighed

        assert self._features is not None
        gradients = torch.autograd.grad(weighed(self._features, torch.from_numpy(of_features)), self._leaves)
        for name, gradient in zip(self._names, gradients, strict=True):
            into[name][...] = gradient.numpy()
        self._features = None
