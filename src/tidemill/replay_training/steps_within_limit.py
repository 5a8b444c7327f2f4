"""The limit of a run's steps, where lanes step together: their last ticks bring more."""

from typing import Any

from numpy import count_nonzero

from tidemill.api.algorithm import FILLER, Sample
from tidemill.api.stream import SampleConsumer, WatchedConsumer

_NOTHING: dict[str, Any] = {**FILLER, "voided": True, "done": False, "truncated": False, "info_mask": False}


class StepsWithinLimit(WatchedConsumer):
    """A sample stream of which so many steps are taken as are `left`: all that come after
    these are void."""

    def __init__(self, source: SampleConsumer, left: int) -> None:
        super().__init__(source)
        self._left = max(left, 0)

    def _look(self, sample: Sample) -> None:
        stepped = sample["version"][0] >= 0
        self._left -= int(count_nonzero(stepped))
        if self._left >= 0:
            return
        beyond = stepped.nonzero()[0][self._left :]
        self._left = 0
        for name, value in _NOTHING.items():
            if name in sample:
                array = sample[name] = sample[name].copy()
                array[0, beyond] = value
