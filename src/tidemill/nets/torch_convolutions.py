"""The convolutions of `image_networks`, computed by torch."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from tidemill.nets.image_networks import ImageNetwork, PlainConvolutions, ResidualConvolutions

Layer = tuple[Tensor, Tensor]
"""A convolution's weight [filters, channels, kernel, kernel] and bias [filters]."""


def convolved(network: ImageNetwork, images: Tensor, layers: Sequence[Layer]) -> Tensor:
    """Return what the convolutions leave of images [n, channels, height, width], [n,
    filters, height, width], no value of which is below 0. `layers`: those of
    `network.convolutions`."""
    if isinstance(network, PlainConvolutions):
        return _plain(network, images, layers)
    return _residual(network, images, layers)


def _plain(network: PlainConvolutions, x: Tensor, layers: Sequence[Layer]) -> Tensor:
    for (weight, bias), (_, _, stride) in zip(layers, network.layers, strict=True):
        x = functional.conv2d(x, weight, bias, stride).relu_()
    return x


def _residual(network: ResidualConvolutions, x: Tensor, layers: Sequence[Layer]) -> Tensor:
    remaining = iter(layers)
    for _ in network.sections:
        x = functional.max_pool2d(functional.conv2d(x, *next(remaining), padding=1), 3, 2, 1)
        for _ in range(network.blocks):
            inner = functional.conv2d(x.relu(), *next(remaining), padding=1).relu_()
            x = x + functional.conv2d(inner, *next(remaining), padding=1)
    return x.relu()
