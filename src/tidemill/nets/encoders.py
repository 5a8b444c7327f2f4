"""From observations to network inputs: which leaves are images and which are flattened,
and the flattening. Numpy only."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.api.policy import PolicyConfig
from tidemill.api.spaces import Box, Discrete, MultiDiscrete, Space, flat_width, leaves
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array, Arrays
from tidemill.nets.masks import lacks

USUAL_STATE = "global_state"
AT_A_TIME = 32  # images copied
USUAL_SIDE = 84  # pixels, of Atari's images since Mnih et al. 2015
LARGE = 4  # times as many pixels as usual
SMALLEST_IMAGE = 36  # pixels: the convolutions of Mnih et al. 2015 leave 1 × 1 of it

Floats = NDArray[np.float32]


class Image(NamedTuple):
    """How an image leaf lies: [height, width, channels], [channels, height, width], or
    [height, width] (channels_first, 1 channel)."""

    channels: int
    height: int
    width: int
    channels_first: bool


def image_of(space: Space) -> Image | None:
    """Return the layout of `space` when it is an image (see `ActorCritic.encoder`), else
    None."""
    return image_of_shape(space.shape, space.dtype) if isinstance(space, Box) else None


def image_of_shape(shape: tuple[int, ...], dtype: str) -> Image | None:
    """Return the layout of arrays of this shape when they are images, else None."""
    if dtype != "uint8":
        return None
    match shape:
        case (height, width):
            image = Image(1, height, width, True)
        case (a, b, c):
            image = Image(a, b, c, True) if a <= c else Image(c, a, b, False)
        case _:
            return None
    return image if min(image.height, image.width) >= SMALLEST_IMAGE else None


def pixels_of(space: Space) -> int:
    """Return how many pixels the largest image of an observation has, 0 without one."""
    images = filter(None, map(image_of, leaves(space, "obs").values()))
    return max((image.height * image.width for image in images), default=0)


def large_images(pixels: int) -> str:
    """Return what to say of images of so many pixels where a run would spend most of its
    time on what smaller ones may show as well; "" where it would not."""
    usual = USUAL_SIDE**2
    if pixels < LARGE * usual:
        return ""
    return (
        f"images have {pixels:,} pixels, {pixels / usual:.0f} times as many as those of {USUAL_SIDE} × "
        f"{USUAL_SIDE} that most train on, and cost as much more"
    )


def channels_last(images: Array, channels_first: bool) -> Array:
    """Return images [n, channels, height, width] (`channels_first`), [n, height, width,
    channels] or [n, height, width] as the second, contiguous.

    Copied by planes of a few images, which stay in the cache: 10 µs for four of 84 x 84
    on a core, where torch takes 25 and numpy 40.
    """
    if images.ndim == 3 or not channels_first:
        return np.ascontiguousarray(images).reshape(*images.shape[:3], *(images.shape[3:] or (1,)))
    n, channels, *sides = images.shape
    out = np.empty((n, *sides, channels), images.dtype)
    for start in range(0, n, AT_A_TIME):
        for channel in range(channels):
            out[start : start + AT_A_TIME, ..., channel] = images[start : start + AT_A_TIME, channel]
    return out


ScaledBytes = Literal["images", "all"]


@dataclass(frozen=True, kw_only=True)
class BytesSetting(PolicyConfig):
    """The base of policies that are told what bytes in observations mean."""

    scaled_bytes: ScaledBytes = "images"
    """Which uint8 Boxes are divided by 255: ``images``, of two or three axes of which two
    are at least 36, so that small grids, whose bytes are kinds and colours, are seen as
    they are; or ``all``."""

    @classmethod
    def of_today(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return saved settings in today's form: what was saved without this one divided
        all bytes. See `Config.of_today`."""
        return {"scaled_bytes": "all", **super().of_today(data)}


class ObservationEncoder:
    """An observation encoder flattens the leaves of an observation that are no images
    into rows of `width` float32; images are listed in `images`. The leaves `masks` are
    left out: the network does not see them. Columns of the parts `critic_only` come last:
    the actor sees the first `seen` ones.

    Box: its elements (those of `scaled` leaves / 255); Discrete and MultiDiscrete:
    one-hot per branch; MultiBinary: its bits.
    """

    def __init__(
        self,
        space: Space,
        encoder: str,
        masks: Collection[str] = (),
        critic_only: tuple[str, ...] = (),
        scaled_bytes: ScaledBytes = "images",
    ) -> None:
        parts = {name: leaf for name, leaf in leaves(space, "obs").items() if name not in masks}
        for part in critic_only:
            if part != USUAL_STATE and not any(f"{name}.".startswith(f"obs.{part}.") for name in parts):
                raise ConfigError(f'critic_only names "{part}", but {lacks(part, parts)}')
        self.critic_only = [
            name for name in parts if any(f"{name}.".startswith(f"obs.{part}.") for part in critic_only)
        ]
        """Leaves that the actor does not see."""
        self.scaled = {
            name
            for name, leaf in parts.items()
            if isinstance(leaf, Box) and leaf.dtype == "uint8" and (scaled_bytes == "all" or image_of(leaf))
        }
        """Leaves whose bytes are divided by 255."""
        self.images: dict[str, Image] = {}
        self.width = self.seen = 0
        self._parts: list[tuple[str, Space, slice]] = []
        for name, leaf in sorted(parts.items(), key=lambda item: item[0] in self.critic_only):
            image = image_of(leaf) if encoder != "mlp" else None
            if image and name in self.critic_only:
                raise ConfigError(
                    f"critic_only names {name}, an image; the critic alone can see what is flattened only: "
                    'leave it out, or take encoder = "mlp"'
                )
            if image:
                self.images[name] = image
                continue
            size = flat_width(leaf)
            self._parts.append((name, leaf, slice(self.width, self.width + size)))
            self.width += size
            self.seen = self.seen if name in self.critic_only else self.width
        self.names = [*self.images, *(name for name, _, _ in self._parts)]
        if encoder not in ("auto", "mlp") and not self.images:
            raise ConfigError(
                f'encoder = "{encoder}" needs a uint8 image of at least {SMALLEST_IMAGE}×{SMALLEST_IMAGE}, '
                f'but the observation is {space}; take "auto" or "mlp", or resize in a wrapper'
            )
        if not self.images and not self.width:
            besides = f" besides the action mask {', '.join(masks)}" if masks else ""
            raise ConfigError(
                f"the observation {space} has no element{besides}, so there is nothing to decide by"
            )
        if not self.images and not self.seen:
            raise ConfigError(
                f"the critic alone sees {', '.join(self.critic_only)}, so the actor has nothing to go by; "
                "take some out of critic_only"
            )

    @property
    def boxes(self) -> bool:
        """Whether a normaliser applies to any column."""
        return any(isinstance(leaf, Box) for _, leaf, _ in self._parts)

    @property
    def numbers(self) -> bool:
        """Whether any column is of a Box of more than truth values: only these are worth
        a normaliser. Rare marks on a board would become as large as they are rare."""
        return any(isinstance(leaf, Box) and leaf.dtype != "bool" for _, leaf, _ in self._parts)

    @cached_property
    def normalised(self) -> NDArray[np.bool_]:
        """Which columns a normaliser applies to: those of Boxes."""
        columns = np.zeros(self.width, np.bool_)
        for _, leaf, part in self._parts:
            columns[part] = isinstance(leaf, Box)
        return columns

    def flat(self, observation: Arrays, of: str = "obs", out: Floats | None = None) -> Floats:
        """Return raw observations [n], whose leaves begin with `of`, in `out` [n, width],
        a new array unless it is given."""
        if of != "obs":
            observation = {name: observation[of + name.removeprefix("obs")] for name in self.names}
        if out is None:
            out = np.empty((len(observation[self.names[0]]), self.width), np.float32)
        self.encode(observation, out)
        return out

    def encode(self, observation: Arrays, out: Floats) -> None:
        """Write n rows of raw observations into `out` [n, width]."""
        for name, leaf, part in self._parts:
            value, columns = observation[name], out[:, part]
            match leaf:
                case Box():
                    columns[...] = value.reshape(columns.shape)
                    if name in self.scaled:
                        columns *= np.float32(1 / 255)
                case Discrete():
                    np.equal(value.reshape(-1, 1), np.arange(leaf.n), out=columns, casting="unsafe")
                case MultiDiscrete():
                    branch = np.repeat(np.arange(len(leaf.nvec)), leaf.nvec)
                    index = np.concatenate([np.arange(n) for n in leaf.nvec])
                    np.equal(value[:, branch], index, out=columns, casting="unsafe")
                case _:
                    columns[...] = value
