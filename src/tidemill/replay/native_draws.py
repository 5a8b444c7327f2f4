"""Drawing by the native core: places that begin transitions, and what these are, equal to
numpy's in every bit."""

from ctypes import addressof
from typing import Any

import numpy as np

from tidemill.api.algorithm import Sample
from tidemill.core.schema import Array
from tidemill.native.library import KernelCopied, KernelDrawn, KernelMemory, Kernels, address
from tidemill.replay.row_storage import Store
from tidemill.replay.sequences import Ints, Sequences

FIRST_ROW, NEXT_ROW, LAST_ROW = range(3)
"""Of a transition, as in replay.c."""


class NativeSequences(Sequences):
    """`Sequences` in which the native core finds what is drawn."""

    def __init__(self, kernels: Kernels, *settings: Any) -> None:
        super().__init__(*settings)
        self.kernels = kernels
        self._ends: Ints = np.zeros(self.lanes, np.int64)
        self._memory = KernelMemory(
            self.lanes, self.length, address(self.heads), address(self.span), address(self._ends)
        )
        self.of_memory = addressof(self._memory)
        """The address of what kernels take for the rows."""

    def _count_rows(self) -> int:
        rows: int = self.kernels.held_rows(self.of_memory)
        return rows

    def _find(self, drawn: Ints, places: Ints) -> int:
        found: int = self.kernels.find_places(
            self.of_memory, len(drawn), drawn.ctypes.data, places.ctypes.data
        )
        return found


class NativeDraws:
    """Gathers `count` transitions of up to `steps` steps from the rows of `store` at a
    time, always into the same arrays. Stacked observations are left to the caller, who
    finds them by `places`."""

    def __init__(self, sequences: NativeSequences, store: Store, steps: int, count: int) -> None:
        self._kernel = sequences.kernels.gather
        self.places: Ints = np.zeros((3, count), np.int64)
        """[3, count]: the rows where transitions begin, those behind them, and their last
        ones."""
        self._sample = Sample()
        self._sample.bootstrap = 0
        copied: list[KernelCopied] = []

        def copy(row: int, name: str, into: str) -> None:
            array = store.arrays[name]
            self._sample[into] = found = np.zeros((1, count, *array.shape[1:]), array.dtype)
            if name not in store.frames:
                copied.append(KernelCopied(row, found.nbytes // count, address(array), address(found)))

        for name in store.arrays:
            if name.startswith("obs"):
                copy(FIRST_ROW, name, name)
                copy(LAST_ROW, name, f"next.{name}")
            elif name.startswith("action"):
                copy(NEXT_ROW, name, name)
        self._sample["rewards"] = rewards = np.zeros((1, count, steps), np.float32)
        self._sample["steps"] = spans = np.zeros((1, count), np.int32)
        copy(LAST_ROW, "done", "done")
        copy(NEXT_ROW, "version", "version")
        self._copied = (KernelCopied * len(copied))(*copied)
        self._drawn = KernelDrawn(
            memory=sequences.of_memory,
            reach=steps,
            fields=len(copied),
            copied=addressof(self._copied),
            reward=address(store.arrays["reward"]),
            version=address(store.arrays["version"]),
            steps=address(spans),
            rewards=address(rewards),
        )
        drawn = self._drawn
        drawn.first, drawn.next, drawn.last = map(address, self.places)
        # what the addresses are of
        self._held: tuple[Sequences, dict[str, Array]] = sequences, store.arrays
        self._of_drawn = addressof(self._drawn)

    def gather(self, places: Ints) -> tuple[Sample, int, int]:
        """Return the transitions that begin at `places`, the oldest of the versions that
        acted, and their sum."""
        self.places[FIRST_ROW] = places
        self._kernel(self._of_drawn, len(places))
        sample = Sample(self._sample)
        sample.bootstrap = 0
        return sample, self._drawn.oldest, self._drawn.stamps
