"""Layer normalisation in numpy, forward and backward: Ba et al. 2016, "Layer
Normalization", eq. 3 and 4."""

import numpy as np
from numpy.typing import NDArray

from tidemill.nets.scratch import Scratch

Floats = NDArray[np.float32]

EPSILON = 1e-5
"""Added to the variance of a row."""


class LayerNorm:
    """What normalises the sums of one layer, [towers, n, width], each row by itself."""

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._normal: Floats = np.empty(0, np.float32)
        self._factor: Floats = self._normal

    def forward(self, sums: Floats, scale: Floats, shift: Floats) -> None:
        """Replace sums x by scale · (x - mean) / √(variance + ε) + shift. What `backward`
        needs is kept."""
        width = np.float32(sums.shape[-1])
        self._normal = normal = self._scratch("normal", sums.shape)
        np.subtract(sums, np.add.reduce(sums, axis=-1, keepdims=True) / width, out=normal)
        variance = np.einsum("tnw,tnw->tn", normal, normal)[..., np.newaxis] / width
        self._factor = 1 / np.sqrt(variance + np.float32(EPSILON))
        np.multiply(normal, self._factor, out=normal)
        np.multiply(normal, scale, out=sums)
        np.add(sums, shift, out=sums)

    def backward(
        self, of_out: Floats, scale: Floats, of_scale: Floats | None, of_shift: Floats | None
    ) -> None:
        """Replace the gradient of what the last `forward` gave by that of the sums; write
        those of scale and shift, unless they are None.

        With z = (x - mean) / deviation and g = scale · of_out, the gradient of x is (g -
        mean g - z · mean (g z)) / deviation.
        """
        width, normal = np.float32(of_out.shape[-1]), self._normal
        if of_scale is not None and of_shift is not None:
            np.einsum("tnw,tnw->tw", of_out, normal, out=of_scale[:, 0])
            np.add.reduce(of_out, axis=1, out=of_shift, keepdims=True)
        np.multiply(of_out, scale, out=of_out)
        along = np.einsum("tnw,tnw->tn", of_out, normal)[..., np.newaxis] / width
        np.subtract(of_out, np.add.reduce(of_out, axis=-1, keepdims=True) / width, out=of_out)
        np.subtract(of_out, np.multiply(normal, along, out=normal), out=of_out)
        np.multiply(of_out, self._factor, out=of_out)
