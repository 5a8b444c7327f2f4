"""Augmentation of image observations."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidemill.api.algorithm import Sample
from tidemill.api.policy import Policy
from tidemill.api.processing import Processor, ProcessorConfig
from tidemill.core.errors import ConfigError
from tidemill.nets.encoders import image_of_shape


@dataclass(frozen=True, kw_only=True)
class RandomShift(ProcessorConfig):
    """Shifts every image of a sample by up to `pixels` in both directions, each by a draw of its own; what moves in repeats the border. Kostrikov,
    Yarats, Fergus 2021, "Image Augmentation Is All You Need", section 3.1 (they take 4 pixels of 84)."""

    pixels: int = 4

    def __post_init__(self) -> None:
        if self.pixels < 1:
            raise ConfigError(f"pixels = {self.pixels} must be at least 1; 4 is usual for images of 84")

    def build(self, policy: Policy | None, seed: int) -> Processor:
        return _Shift(self.pixels, seed)


class _Shift(Processor):
    def __init__(self, pixels: int, seed: int) -> None:
        self._pixels, self._rng = pixels, np.random.default_rng(seed)

    def process(self, sample: Sample) -> None:
        for name, array in sample.items():
            if name.partition(".")[0] == "obs" and (image := image_of_shape(array.shape[2:], str(array.dtype))) is not None:
                images = array.reshape(-1, *array.shape[2:])
                planes = images if image.channels_first else np.moveaxis(images, -1, 1)
                planes = planes if planes.ndim == 4 else planes[:, np.newaxis]
                shifts = self._rng.integers(-self._pixels, self._pixels + 1, (len(images), 2))
                shift(planes, shifts)


def shift(images: NDArray[np.uint8], shifts: NDArray[np.int64]) -> None:
    """Shift images [n, channels, height, width] in place by `shifts` [n, 2] (down, right); the border is repeated."""
    _, _, height, width = images.shape
    for image, (down, right) in zip(images, shifts.tolist(), strict=True):
        rows, columns = (np.arange(height) - down).clip(0, height - 1), (np.arange(width) - right).clip(0, width - 1)
        image[...] = image[:, rows[:, np.newaxis], columns]
