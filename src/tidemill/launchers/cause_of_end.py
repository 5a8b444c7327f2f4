"""Why a worker's process has ended, in words."""

import signal

from tidemill.core.control_groups import MemoryKills

_CAUSES: dict[int, str] = {  # of a process that a signal ended
    signal.SIGBUS: " (a file that it had mapped became shorter: a simulator cut its memory, say)",
}


def cause_of_end(code: int, before: MemoryKills, now: MemoryKills) -> str:
    """Return how a process ended that left the status `code`, below 0 that of a signal.
    `before`, `now`: what the system had killed for want of memory when it began, and has
    now."""
    if code >= 0:
        return f"its process ended with status {code}"
    more = killer(before, now) if code == -signal.SIGKILL else _CAUSES.get(-code, "")
    return f"its process was killed by {_signal_name(-code)}{more}"


def killer(before: MemoryKills, now: MemoryKills) -> str:
    """Return who most likely sent a SIGKILL, of what the system's counts were when the
    process began, and are."""
    cure = "make lanes, slots or counts smaller, or give it more"
    if now.here > before.here:
        return f" (by the system, out of memory: its control group has no more; {cure})"
    if now.anywhere > before.anywhere:
        return f" (most likely by the system, out of memory: it killed a process meanwhile; {cure})"
    return " (by hand, or by another program: the system counts no kill for want of memory)"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
