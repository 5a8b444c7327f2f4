"""The memory plan of a run: what it will fill, what its processes hold already, and what
there is. Shown at the start, refused when it cannot fit.

What streams take only their owners know, who say it when they are READY (`Facts.memory`);
by then the processes have what they need for themselves. Sample slots and all else that
is offered is address space until the first row is written, so that nothing has to be
given back.
"""

from collections.abc import Iterable

import msgspec

from tidemill.api.experiment import Experiment
from tidemill.core import memory
from tidemill.core.memory import Need, check_memory, resident_bytes, size

LEAST_SHOWN = 100_000  # bytes; less is not worth a word


class MemoryPlan(msgspec.Struct, frozen=True):
    """What a run needs: still to be filled, in bytes by what it is for; held already by
    its processes, each; and free when it was about to start."""

    needs: dict[str, int]
    processes: tuple[int, ...]
    free: int

    def __str__(self) -> str:
        """One line for people."""
        needs = [f"{what} {size(nbytes)}" for what, nbytes in self.needs.items() if nbytes >= LEAST_SHOWN]
        count = len(self.processes)
        if count:  # the system may not tell
            needs.append(f"{count} process{'es' * (count > 1)} {size(sum(self.processes))} so far")
        return f"memory: {', '.join(needs) or 'little'}; {size(self.free)} available"


def make_plan(needs: Iterable[Need]) -> MemoryPlan:
    """Return the plan of a run whose workers are READY. Raises `ConfigError`, with the
    sums, when what they need is not there."""
    needs, free = list(needs), memory.available()
    check_memory(needs, free)
    total: dict[str, int] = {}
    for need in needs:
        total[need.what] = total.get(need.what, 0) + need.nbytes
    return MemoryPlan(total, tuple(resident_bytes(children=True)), free)


def check_least_memory(experiment: Experiment) -> None:
    """Raise `ConfigError`, with the sums, when what workers say of their least memory
    cannot fit, however they are laid out: before anything is measured."""
    needs = [need for config in experiment.workers.values() for need in config.least_memory()]
    check_memory(needs, memory.available())
