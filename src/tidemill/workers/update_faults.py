"""What a trainer does about updates that are not finite: it writes down what led to each,
and says when training is to go back to a checkpoint.

A record (``update-N``, see `fault_records`) has the failing minibatch, the weights and
the learner as they were before that step, and in its manifest what failed and the
algorithm's settings of that moment.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from tidemill.api.algorithm import Algorithm, UpdateFault
from tidemill.api.policy import Policy
from tidemill.core.clock import awake
from tidemill.core.schema import Array
from tidemill.store.checkpoint import checkpoint_name
from tidemill.workers.fault_records import FaultRecords

IN_A_ROW = 3
"""So many updates one after the other that are not finite send training back."""
MOST_RETURNS = 5
"""So often training goes back to a checkpoint within `RETURNS_S` seconds, or within
`RETURNS_UPDATES` updates, whichever are longer."""
RETURNS_S, RETURNS_UPDATES = 600.0, 1000


class UpdateFaults:
    """The faults of one trainer's updates.

    in_a_row: updates that were left out since the last one that was done
    """

    def __init__(self, records: FaultRecords) -> None:
        self._records = records
        self._told = False
        self._returns = deque[tuple[float, int]]()  # when, and after how many updates
        self.in_a_row = 0

    @property
    def go_back(self) -> bool:
        """True where training is to go back to a checkpoint."""
        return self.in_a_row >= IN_A_ROW

    @property
    def left_out(self) -> str:
        """What was left out, in words. An update that spoilt the weights by itself is
        noted on top of `IN_A_ROW`."""
        return (
            f"{IN_A_ROW} updates in a row were left out"
            if self.in_a_row == IN_A_ROW
            else "an update was left out"
        )

    def too_often(self, updates: int) -> str:
        """Return how often training has gone back by now, after so many `updates`, where
        once more would be too often; else ""."""
        now, lately = awake(), self._returns
        while lately and now - lately[0][0] > RETURNS_S and updates - lately[0][1] > RETURNS_UPDATES:
            lately.popleft()
        if len(lately) < MOST_RETURNS:
            return ""
        since, before = lately[0]
        return (
            f"training has gone back to a checkpoint {len(lately)} times in {now - since:.0f} s and "
            f"{updates - before:,} updates, which has not helped"
        )

    def went_back(self, updates: int) -> None:
        """Take note that training has gone back to a checkpoint, after so many
        `updates`."""
        self._returns.append((awake(), updates))
        self.in_a_row = 0

    def note(
        self, fault: UpdateFault, updates: int, policy: Policy, algorithm: Algorithm, facts: Mapping[str, Any]
    ) -> str:
        """Count an update that was left out, the one after so many `updates`, and write
        down what led to it, where that is known here; `facts` go with it. Return what
        the user should read: of the first one, else ""."""
        self.in_a_row += 1
        look = ""
        if self._write(fault, updates, policy, algorithm, facts):
            look = f" What led to it is recorded: tidemill replay-fault RUN {updates + 1}."
        if self._told:
            return ""
        self._told = True
        # more than those in a row: it has spoilt the weights by itself
        back = f"{IN_A_ROW} in a row lead" if self.in_a_row <= IN_A_ROW else "what spoils the weights leads"
        return (
            f'update {updates + 1} was cut short. {fault}.{look} Such updates are counted as "skipped"; '
            f"training goes on, and {back} back to a checkpoint"
        )

    def _write(
        self,
        fault: UpdateFault,
        updates: int,
        policy: Policy,
        algorithm: Algorithm,
        facts: Mapping[str, Any],
    ) -> bool:
        if not fault.minibatch:
            return False
        arrays = {"policy": policy.parameters(), "algorithm": algorithm.state(), "minibatch": fault.minibatch}
        more = {"update": updates + 1, "stage": fault.stage, "error": str(fault)}
        return self._records.write(checkpoint_name(updates + 1), arrays, {**facts, **more})


def not_finite(arrays: Mapping[str, Array], infinite: Mapping[str, Array] | None = None) -> str:
    """Return the first name of `arrays` that hold NaN, or infinity but where `infinite`
    has True under that name; "" where none does."""
    for name, array in arrays.items():
        if array.dtype.kind != "f" or (fine := np.isfinite(array)).all():
            continue
        known = (infinite or {}).get(name)
        if known is None or np.isnan(array).any() or not (fine | known).all():
            return name
    return ""


def infinities(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return where `arrays` hold infinity, of those that do."""
    found = {name: np.isinf(array) for name, array in arrays.items() if array.dtype.kind == "f"}
    return {name: where for name, where in found.items() if where.any()}
