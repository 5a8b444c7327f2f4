"""The weights of the built-in networks: their shapes, how they lie in one flat array, and
their first values."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tidemill.api.policy import check_parameters
from tidemill.core.schema import Array, Arrays, schema_of
from tidemill.nets.cells import Memory
from tidemill.nets.encoders import Image, ObservationEncoder

Floats = NDArray[np.float32]

CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""(channels, kernel, stride) of Mnih et al. 2015, "Human-level control through deep
reinforcement learning", Methods."""
IMAGE_FEATURES = 512  # width of the layer after them
ROOT_TWO = float(np.sqrt(2))


def views(flat: Floats, shapes: dict[str, tuple[int, ...]]) -> dict[str, Floats]:
    """Return arrays of `shapes` that lie in `flat` one after the other."""
    named, start = {}, 0
    for name, shape in shapes.items():
        end = start + int(np.prod(shape))
        named[name] = flat[start:end].reshape(shape)
        start = end
    return named


def load_parameters(own: Arrays, parameters: Mapping[str, Array]) -> None:
    """Copy `parameters` into a network's `own`. Raises `SchemaError` when a name, shape
    or dtype does not fit; nothing is changed then."""
    check_parameters(schema_of(own), parameters)
    for name, array in own.items():
        np.copyto(array, parameters[name])


def weight_shapes(
    encoder: ObservationEncoder,
    towers: int,
    hidden: tuple[int, ...],
    outputs: int,
    deviations: int,
    memory: Memory | None = None,
) -> dict[str, tuple[tuple[int, ...], float]]:
    """Return the shape and the orthogonal gain (0: starts as zeros) of each weight, in
    the order in which they lie."""
    shapes: dict[str, tuple[tuple[int, ...], float]] = {}
    width = encoder.width
    for name, image in encoder.images.items():
        channels = image.channels
        for i, (filters, kernel, _) in enumerate(CONVOLUTIONS):
            shapes[f"cnn.{name}.{i}.weight"] = ((towers, filters, channels, kernel, kernel), ROOT_TWO)
            shapes[f"cnn.{name}.{i}.bias"] = ((towers, filters), 0)
            channels = filters
        shapes[f"cnn.{name}.out.weight"] = ((towers, image_size(image), IMAGE_FEATURES), ROOT_TWO)
        shapes[f"cnn.{name}.out.bias"] = ((towers, IMAGE_FEATURES), 0)
        width += IMAGE_FEATURES
    for i, units in enumerate(hidden):
        shapes[f"hidden.{i}.weight"] = ((towers, width, units), ROOT_TWO)
        shapes[f"hidden.{i}.bias"] = ((towers, 1, units), 0)
        width = units
    if memory is not None:
        shapes |= memory.cell.shapes(towers, width, memory.units)
        width = memory.units
    # A small gain makes the first policy nearly uniform: Andrychowicz et al. 2021, "What
    # Matters in On-Policy RL", section 3.2.
    shapes["actor.weight"] = ((outputs, width), 0.01)
    shapes["actor.bias"] = ((outputs, 1), 0)
    shapes["critic.weight"] = ((width,), 1.0)
    shapes["critic.bias"] = ((1,), 0)
    shapes["log_std"] = ((deviations, 1), 0)
    return shapes


def image_size(image: Image) -> int:
    """Return the number of values that the convolutions leave of an image."""
    height, width = image.height, image.width
    for _, kernel, stride in CONVOLUTIONS:
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
    return height * width * CONVOLUTIONS[-1][0]


def orthogonal(weight: Floats, gain: float, rng: np.random.Generator, towers: int) -> None:
    """Fill `weight` with `gain` × an orthogonal matrix, one for each of its towers (0: it
    has no such axis).

    Saxe et al. 2014, "Exact solutions to the nonlinear dynamics of learning in deep
    linear neural networks".
    """
    for part in weight if towers else (weight,):
        rows = len(part) if part.ndim > 1 else 1
        matrix = rng.standard_normal((rows, part.size // rows))
        tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
        if len(tall) < 2 * tall.shape[1]:
            q, r = np.linalg.qr(tall)
            q *= np.sign(np.diag(r))  # makes the draw uniform
        else:  # far from singular: Cholesky's way to the same Q takes less than half the time
            q = tall @ np.linalg.inv(np.linalg.cholesky(tall.T @ tall).T)
        part[...] = gain * (q if tall is matrix else q.T).reshape(part.shape)
