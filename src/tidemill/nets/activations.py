"""Activations of hidden layers in numpy: what they make of sums, and their slopes.

The slopes of tanh, relu and elu follow from their results; gelu and silu need the sums.
"""

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tidemill.nets.scratch import Scratch

Floats = NDArray[np.float32]

Activation = Literal["tanh", "relu", "elu", "gelu", "silu"]
"""elu: Clevert et al. 2016, with α = 1. gelu: Hendrycks & Gimpel 2016, its form with
tanh, which is JAX's default and torch's ``approximate="tanh"``. silu: x σ(x), of the same
paper."""
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
"""All of them, as activations.h in the native core counts them."""
OF_SUMS = ("gelu", "silu")
"""Those whose slopes need the sums."""
CUBIC, ROOT = np.float32(0.044715), np.float32(np.sqrt(2 / np.pi))
HALF, ONE = np.float32(0.5), np.float32(1)


def activate(activation: str, sums: Floats, out: Floats, scratch: Scratch) -> None:
    """Write the activation of `sums` into `out`, which may be the same array but for
    those in `OF_SUMS`."""
    match activation:
        case "tanh":
            np.tanh(sums, out=out)
        case "relu":  # with an array of zeros: a quarter of what it takes with a scalar
            np.maximum(sums, scratch("zeros", sums.shape), out=out)
        case "elu":  # e^x - 1 > x below 0
            below = np.minimum(sums, scratch("zeros", sums.shape), out=scratch("below", sums.shape))
            np.maximum(sums, np.expm1(below, out=below), out=out)
        case _:
            _gate(activation, sums, out)
            np.multiply(out, sums, out=out)


def write_slope(activation: str, sums: Floats, out: Floats, scratch: Scratch) -> None:
    """Write the slope of the activation into `out`, which holds its results of
    `sums`."""
    match activation:
        case "tanh":
            np.multiply(out, out, out=out)
            np.subtract(1, out, out=out)
        case "relu":  # np.sign branches on each element
            np.greater(out, 0, out=out, casting="unsafe")
        case "elu":
            np.add(np.minimum(out, scratch("zeros", out.shape), out=out), ONE, out=out)
        case _:
            # x g(x) has the slope g + x g', and g' = g (1 - g) s', σ(s) being g
            gate = scratch("gate", sums.shape)
            _gate(activation, sums, gate)
            np.multiply(out, ONE - gate, out=out)
            if activation == "gelu":
                out *= 2 * ROOT * (ONE + 3 * CUBIC * sums * sums)
            np.add(out, gate, out=out)


def _gate(activation: str, sums: Floats, out: Floats) -> None:
    """Write what gelu and silu multiply `sums` with: σ(s) = ½ + ½ tanh(s / 2)."""
    if activation == "gelu":
        np.multiply(sums, sums, out=out)
        np.multiply(out, ROOT * CUBIC, out=out)
        np.add(out, ROOT, out=out)
        np.multiply(out, sums, out=out)
    else:
        np.multiply(sums, HALF, out=out)
    np.tanh(out, out=out)
    np.multiply(out, HALF, out=out)
    np.add(out, HALF, out=out)
