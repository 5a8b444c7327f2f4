"""What images go through before they are features: two families of convolutions, as the
shapes of their weights. `torch_convolutions` computes them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt

ROOT_TWO = sqrt(2)
Form = tuple[int, int, int]
"""Filters, channels and side of a convolution's kernels."""


@dataclass(frozen=True)
class PlainConvolutions:
    """Convolutions without padding, one after the other, each with relu; then a layer."""

    layers: tuple[tuple[int, int, int], ...]
    """Filters, kernel and stride of each."""
    features: int
    """Width of the layer behind them."""

    def convolutions(self, channels: int) -> Iterator[tuple[Form, float]]:
        """Yield the form and the orthogonal gain of each convolution."""
        for filters, kernel, _ in self.layers:
            yield (filters, channels, kernel), ROOT_TWO
            channels = filters

    def values(self, height: int, width: int) -> int:
        """Return how many values the convolutions leave of an image."""
        for _, kernel, stride in self.layers:
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        return height * width * self.layers[-1][0]


@dataclass(frozen=True)
class ResidualConvolutions:
    """Sections of a convolution, max-pooling of 3 × 3 with stride 2, and two residual
    blocks x + conv(relu(conv(relu(x)))) each, all of kernels of 3 × 3 with padding; then
    relu, and a layer."""

    sections: tuple[int, ...]
    """Filters of each section."""
    features: int
    """Width of the layer behind them."""
    blocks = 2
    """Residual blocks of a section."""
    kernel = 3

    def convolutions(self, channels: int) -> Iterator[tuple[Form, float]]:
        """Yield the form and the orthogonal gain of each convolution. What a block adds
        is divided by the root of their number, so that the sum over all of them stays
        within a factor √e of its first part (after Zhang et al. 2019, "Fixup
        Initialization")."""
        added = 1 / sqrt(self.blocks * len(self.sections))
        for filters in self.sections:
            yield (filters, channels, self.kernel), ROOT_TWO
            channels = filters
            for _ in range(self.blocks):
                yield (filters, filters, self.kernel), ROOT_TWO
                yield (filters, filters, self.kernel), added

    def values(self, height: int, width: int) -> int:
        """Return how many values the convolutions leave of an image."""
        for _ in self.sections:
            height, width = (height + 1) // 2, (width + 1) // 2
        return height * width * self.sections[-1]


ImageNetwork = PlainConvolutions | ResidualConvolutions
NATURE = PlainConvolutions(((32, 8, 4), (64, 4, 2), (64, 3, 1)), features=512)
"""Mnih et al. 2015, "Human-level control through deep reinforcement learning"."""
IMPALA = ResidualConvolutions((16, 32, 32), features=256)
"""Espeholt et al. 2018, "IMPALA", figure 3, right, without its LSTM."""
IMAGE_NETWORKS: Mapping[str, ImageNetwork] = {"auto": NATURE, "nature_cnn": NATURE, "impala_cnn": IMPALA}
"""What `ActorCritic.encoder` may name for images."""
