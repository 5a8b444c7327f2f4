"""The records of faults: what led to an update that was left out, or to a step that was
lost, in ``faults/WORKER`` of the run's folder.

A record is written as checkpoints are (see `store.checkpoint`), and read with as little
trust. `tidemill replay-fault` shows it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tidemill.api.worker import Context
from tidemill.core.config import encode
from tidemill.core.errors import CheckpointError
from tidemill.core.schema import Array
from tidemill.core.secrets import known, mask
from tidemill.store.checkpoint import checkpoints, write_checkpoint

FAULTS = "faults"
"""The folder of records in a run's."""


class FaultRecords:
    """The records of one worker's faults.

    keep: how many of them stay, the newest; 0: none is written
    notice: function that is called with what the user should read
    instead: what becomes of faults that cannot be recorded, for that

    folder: where they are; None: nothing is written down
    """

    def __init__(self, context: Context, keep: int, notice: Callable[[str], None], instead: str) -> None:
        written = context.folder is not None and keep > 0
        self.folder = Path(context.folder or "") / FAULTS / context.name if written else None
        self._keep, self._notice, self._instead = keep, notice, instead
        self._refused = False
        self._secrets = known(encode(context.experiment)) if written else set[str]()

    def next_number(self) -> int:
        """Return a number above those of all records that are there, of earlier lives,
        too."""
        numbers = [int(path.stem.rpartition("-")[2]) for path in checkpoints(self.folder or Path())]
        return max(numbers, default=0) + 1

    def write(self, name: str, arrays: Mapping[str, Mapping[str, Array]], facts: Mapping[str, Any]) -> bool:
        """Write a record. False where it cannot be written, which is told once, and once
        more when it can be again. Raises `Overtaken`."""
        if self.folder is None:
            return False
        try:
            write_checkpoint(self.folder, name, arrays, self._masked(facts), self._keep)
            if self._refused:
                self._notice(f"what leads to faults is recorded again: {self.folder / name}")
            self._refused = False
            return True
        except CheckpointError as error:  # training goes on
            if not self._refused:
                self._notice(f"{error}. {self._instead}")
            self._refused = True
            return False

    def _masked(self, facts: Any) -> Any:
        """Return plain data without the secrets of the experiment: an environment may say
        them in what it raises, or tells."""
        if isinstance(facts, str):
            return mask(facts, self._secrets)
        if isinstance(facts, Mapping):
            return {self._masked(key): self._masked(value) for key, value in facts.items()}
        if isinstance(facts, (list, tuple)):
            return [self._masked(value) for value in facts]
        return facts
