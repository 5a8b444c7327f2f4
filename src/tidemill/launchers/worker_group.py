"""Workers of one process, over all of its lives."""

import contextlib
import os
import select
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.core.control_groups import MemoryKills, memory_kills
from tidemill.core.run_marks import new_mark

_ENDING_S = 1.0  # seconds that a process has to end once it has hung up


@dataclass
class WorkerGroup:
    """Workers that take turns in a process, and the process of their present life.

    log: file of its output
    core: the one that it keeps to, or None
    spin: seconds to poll without sleeping (see `Context`)
    asked: eventfd by which the process is asked where its workers' thread is
    stacks: memfd that it writes down where its threads are in: no log, which may be on a
        share that hangs, as may whoever is asked
    mark: how the marks of its lives begin
    pidfd: what tells of its end
    kills: what the system had killed for want of memory when it began, and of others
        since
    cause: how it ended, in words, once that has been asked
    """

    names: list[str]
    log: Path
    core: int | None
    spin: float
    asked: int
    stacks: int
    life: int
    mark: str = field(default_factory=new_mark)
    process: "subprocess.Popen[bytes] | None" = None
    pidfd: int = -1
    kills: MemoryKills = field(default_factory=memory_kills)
    cause: str = ""

    def status(self, seconds: float = _ENDING_S) -> int | None:
        """Return the status with which the process ended, below 0 that of a signal; None
        where it has not within so many seconds. It keeps its number, as a zombie, until
        `_forget`: else that could be another process's by then, which would be killed in
        its place."""
        assert self.process is not None
        if self.process.returncode is None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            if not poll.poll(1000 * seconds):
                return None
            with contextlib.suppress(ChildProcessError):  # who ignores SIGCHLD has no zombies
                ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None:
                    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return self.process.poll()


def log_name(names: Sequence[str]) -> str:
    """Return the name of the file that a process of these workers writes its log to."""
    return f"{'+'.join(names)}.log"
