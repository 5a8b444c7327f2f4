"""Augmentation of image observations."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidemill.api.algorithm import Sample
from tidemill.api.policy import Policy
from tidemill.api.processing import Processor, ProcessorConfig
from tidemill.core.cut import Part, generator_state, set_generator_state
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Schema
from tidemill.nets.encoders import SMALLEST_IMAGE, Image, image_of_shape


@dataclass(frozen=True, kw_only=True)
class RandomShift(ProcessorConfig):
    """Random shift moves every image of a sample by up to `pixels` in both directions,
    each by a draw of its own, its channels (a stack of frames) together; what moves in
    repeats the border. Kostrikov, Yarats, Fergus 2021, "Image Augmentation Is All You
    Need", section 3.1 (they take 4 pixels of 84).

    Log-probabilities and values stay those that the actor's policy gave to the images as
    they were; `Reanalyse` behind it gives values of the shifted ones. Images are uint8 as
    the encoder takes them (`ActorCritic.encoder`); anything else that a policy sees stays
    as it is."""

    pixels: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(pixels=1)

    def build(self, schema: Schema, policy: Policy | None, seed: int) -> Processor:
        observation = {name: field for name, field in schema.items() if name.partition(".")[0] == "obs"}
        images = {
            name: image
            for name, field in observation.items()
            if (image := image_of_shape(field.shape, field.dtype)) is not None
        }
        if not images:
            seen = ", ".join(
                f"{name} {field.dtype}{list(field.shape)}" for name, field in observation.items()
            )
            raise ConfigError(
                f"RandomShift shifts images, uint8 of 2 or 3 axes and at least {SMALLEST_IMAGE} pixels high "
                f"and wide, and the rows have none ({seen}); leave it out"
            )
        return _Shift(images, self.pixels, seed)


class _Shift(Processor):
    def __init__(self, images: dict[str, Image], pixels: int, seed: int) -> None:
        self._images, self._pixels, self._rng = images, pixels, np.random.default_rng(seed)

    def process(self, sample: Sample) -> None:
        for name, image in self._images.items():
            pictures = sample[name].reshape(-1, *sample[name].shape[2:])
            planes = pictures if image.channels_first else np.moveaxis(pictures, -1, 1)
            planes = planes if planes.ndim == 4 else planes[:, np.newaxis]
            shift(planes, self._rng.integers(-self._pixels, self._pixels + 1, (len(pictures), 2)))

    def state(self) -> Part:
        return {"random": generator_state(self._rng)}

    def load_state(self, state: Part) -> None:
        set_generator_state(self._rng, state["random"])


def shift(images: NDArray[np.uint8], shifts: NDArray[np.int64]) -> None:
    """Shift images [n, channels, height, width] in place by `shifts` [n, 2] (down,
    right); the border is repeated."""
    height, width = images.shape[2:]
    kinds, which = np.unique(shifts, axis=0, return_inverse=True)
    for kind, (down, right) in enumerate(kinds.tolist()):  # few, whatever the number of images
        alike = np.flatnonzero(which.reshape(-1) == kind)
        rows = (np.arange(height) - down).clip(0, height - 1)
        columns = (np.arange(width) - right).clip(0, width - 1)
        images[alike] = images[alike].take(rows, axis=2).take(columns, axis=3)
