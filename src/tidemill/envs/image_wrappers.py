"""Wrappers of single Gymnasium environments that change images: an observation that is
one, or each part of a Dict that is. Numpy only, where Gymnasium's need OpenCV.
"""

from abc import abstractmethod
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from tidemill.core.errors import ConfigError
from tidemill.nets.encoders import SMALLEST_IMAGE, Image, image_of_shape

LUMINANCE = np.array([0.2125, 0.7154, 0.0721], np.float32)
"""Shares of red, green and blue in how light a colour is: ITU-R BT.709's, with the digits
that Gymnasium's `GrayscaleObservation` has."""
ALONE = ""
"""Key of an observation that is no Dict."""
Bytes = NDArray[np.uint8]


class ImageWrapper(gymnasium.ObservationWrapper[Any, Any, Any]):
    """The base of wrappers that change images: uint8 Boxes [height, width], [height,
    width, channels] or [channels, height, width]; of a Dict those parts alone of which
    both sides are at least 36, since smaller ones are boards. Everything else stays.

    Raises `ConfigError` where an observation has no image that `changes` takes.

    name: what messages call the wrapper
    """

    def __init__(self, env: Any, name: str) -> None:
        super().__init__(env)
        space = env.observation_space
        self._alone = not isinstance(space, spaces.Dict)
        parts: dict[Any, Any] = {ALONE: space} if self._alone else dict(space.spaces)
        self._images: dict[Any, Image] = {}
        for key, part in parts.items():
            image = _image(part, self._alone)
            if image and self.changes(image):
                self._images[key] = image
                shape = self._changed(np.zeros(part.shape, np.uint8), image).shape
                parts[key] = spaces.Box(0, 255, shape, np.uint8)
        if not self._images:
            part = "" if self._alone else f", as a part of a Dict of at least {SMALLEST_IMAGE} pixels a side"
            raise ConfigError(f"the wrapper {name} takes {self.takes}{part}, and there is none in {space}")
        self.observation_space = parts[ALONE] if self._alone else spaces.Dict(parts)

    takes = "an image (a uint8 Box of two or three axes)"
    """Which images `changes` takes, for messages."""

    def changes(self, image: Image) -> bool:
        """Return whether images that lie so are changed."""
        return True

    @abstractmethod
    def change(self, image: Bytes) -> Bytes:
        """Return an image [height, width, channels] changed."""

    def observation(self, observation: Any) -> Any:
        """Return it with its images changed."""
        parts = {ALONE: observation} if self._alone else dict(observation)
        for key, image in self._images.items():
            parts[key] = self._changed(np.asarray(parts[key]), image)
        return parts[ALONE] if self._alone else parts

    def _changed(self, image: Bytes, lies: Image) -> Bytes:
        if image.ndim == 2:
            return self.change(image[..., None])[..., 0]
        if lies.channels_first:
            return np.moveaxis(self.change(np.moveaxis(image, 0, -1)), -1, 0)
        return self.change(image)


class ResizedImages(ImageWrapper):
    """Resized images have other sides: each new pixel is the mean of the area that it
    covers, as of OpenCV's `INTER_AREA` where sides shrink.

    shape: new height and width, or one number for both
    """

    def __init__(self, env: Any, shape: Any = (64, 64)) -> None:
        sides = (shape, shape) if type(shape) is int else shape
        if (
            not isinstance(sides, tuple | list)
            or [type(side) for side in sides] != [int, int]
            or min(sides) < 1
        ):
            raise ConfigError(
                f"shape = {shape!r} must be a height and a width, as (84, 84), or one number for both"
            )
        self._sides = tuple(sides)
        self._lines: dict[tuple[int, int], AreaMeans] = {}
        super().__init__(env, "resize")

    def change(self, image: Bytes) -> Bytes:
        changed: NDArray[Any] = image
        for axis, side in enumerate(self._sides):
            line = (image.shape[axis], side)
            if line not in self._lines:
                self._lines[line] = area_means(*line)
            changed = self._lines[line].along(changed, axis)
        return _levels(changed)


class GrayImages(ImageWrapper):
    """Gray images have the luminance of images of three colours.

    keep_dim: whether an axis of one channel stays
    """

    takes = "an image of three colours (a uint8 Box of three axes)"

    def __init__(self, env: Any, keep_dim: bool = True) -> None:
        self._keep_dim = keep_dim
        super().__init__(env, "grayscale")

    def changes(self, image: Image) -> bool:
        return image.channels == len(LUMINANCE)

    def change(self, image: Bytes) -> Bytes:
        return _levels(image @ LUMINANCE[:, None])

    def _changed(self, image: Bytes, lies: Image) -> Bytes:
        changed = super()._changed(image, lies)
        return changed if self._keep_dim else changed.reshape(lies.height, lies.width)


class AreaMeans(NamedTuple):
    """Area means make a line of new pixels of a line of old ones.

    first: int [new], the first old pixel of each new one
    shares: float32 [k, new], what the k old pixels from there on have in it; columns add
        up to 1
    """

    first: NDArray[np.int64]
    shares: NDArray[np.float32]

    def along(self, values: NDArray[Any], axis: int) -> NDArray[np.float32]:
        """Return `values` with new pixels in place of the old ones of an axis."""
        columns = (-1, *(1,) * (values.ndim - axis - 1))
        last = values.shape[axis] - 1
        means = np.zeros(1, np.float32)
        for k, shares in enumerate(self.shares):
            means = means + shares.reshape(columns) * values.take(np.minimum(self.first + k, last), axis)
        return means


def area_means(size: int, new: int) -> AreaMeans:
    """Return the means of `new` pixels that cover a line of `size`."""
    edges = np.arange(new + 1) * size / new
    first = np.floor(edges[:-1]).astype(np.int64)
    pixels = first + np.arange(size // new + 2)[:, None]
    shares = np.minimum(edges[1:], pixels + 1) - np.maximum(edges[:-1], pixels)
    return AreaMeans(first, (np.maximum(shares, 0) * new / size).astype(np.float32))


def _levels(values: NDArray[Any]) -> Bytes:
    levels: Bytes = np.rint(values).astype(np.uint8)
    return levels


def _image(space: Any, alone: bool) -> Image | None:
    """Return how an image of this space lies; None where it is none."""
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8:
        return None
    found = image_of_shape(space.shape, "uint8")
    if found or not alone or len(space.shape) not in (2, 3):
        return found
    # what is no part of a Dict may be a small image
    if len(space.shape) == 3 and space.shape[0] in (1, 3, 4) and space.shape[2] > 4:
        return Image(*space.shape, channels_first=True)
    height, width, channels = (*space.shape, 1)[:3]
    return Image(channels, height, width, channels_first=False)
