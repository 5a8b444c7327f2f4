"""Which of torch's operations gives the first number that is not finite."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tidemill.core.schema import Array


class OperationTrace(TorchFunctionMode):
    """While it is entered, an operation trace looks at what each of torch's operations
    gives, those of modules of a user's own included.

    found: name and place of the first one whose result is not finite, that result, and
        the axis of its rows, taken for the first; [] while all are finite. One of which
        nothing is NaN or +inf may be a mask, and is given up for a later one that is none
    masks: whether what was found may be a mask
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Array, int]] = []
        self.masks = True

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.masks and isinstance(result, Tensor) and result.is_floating_point() and result.ndim:
            numbers = result.detach().float().cpu().numpy()
            masks = bool((numbers < np.inf).all())
            if not np.isfinite(numbers).all() and not (masks and self.found):
                frame = sys._getframe(1)
                name = f"{func.__name__} ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"
                self.found, self.masks = [(name, numbers, 0)], masks
        return result
