"""Convolutions with relu in torch, on a CPU, over weights that numpy arrays hold: what is
above them need not be torch's."""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tidemill.nets.convolution import Trunk
from tidemill.nets.torch_gradients import weighed
from tidemill.nets.towers import Floats


class TorchConvolutions(Trunk):
    """`convolutions` has (filters, kernel, stride) of each; images are uint8."""

    def __init__(self, convolutions: Sequence[tuple[int, int, int]], weights: dict[str, Floats]) -> None:
        self._convolutions = convolutions
        self._names = [
            f"convolution.{i}.{part}" for i in range(len(convolutions)) for part in ("weight", "bias")
        ]
        self._leaves = [torch.from_numpy(weights[name]).requires_grad_() for name in self._names]
        self._features: Tensor | None = None

    def forward(self, images: NDArray[Any]) -> Floats:
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
        assert self._features is not None
        gradients = torch.autograd.grad(weighed(self._features, torch.from_numpy(of_features)), self._leaves)
        for name, gradient in zip(self._names, gradients, strict=True):
            into[name][...] = gradient.numpy()
        self._features = None
