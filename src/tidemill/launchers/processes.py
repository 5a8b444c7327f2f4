"""The processes launcher: every worker in a process of its own, or several by turns in
one. Linux only (memfd, eventfd).

Bells and control links are created here, what joins the workers by a transport; all is
handed over by descriptor, together with a worker's configuration (`worker_process`). With
shared memory nothing has a name in the system, so nothing is left behind however a
process ends.
"""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import BinaryIO

import msgspec

from tidemill.api.control_messages import Renew, pack
from tidemill.api.edges import Edge
from tidemill.api.experiment import Experiment
from tidemill.api.launcher import DEBUGGED, Call, Job, Launcher
from tidemill.api.transport import Handle, Link, Transport
from tidemill.core import memory
from tidemill.core.config import encode
from tidemill.core.control_groups import MemoryKills, free_processes, memory_kills
from tidemill.core.cores import cores
from tidemill.core.descriptors import allow_descriptors
from tidemill.core.errors import DeadlineError, RunError, returned
from tidemill.core.folder_thread import FolderThread, Unanswered
from tidemill.core.killed_processes import KILLED, await_end, kill_session, living_groups
from tidemill.core.memory import Need, check_memory, size
from tidemill.core.private_files import private
from tidemill.core.run_marks import end_marked, end_orphans
from tidemill.core.temporary_folders import temporary_folder
from tidemill.core.user_code_loading import own_path
from tidemill.launchers.cause_of_end import cause_of_end
from tidemill.launchers.log_files import MOST_BYTES, remove_empty, shorten, tail
from tidemill.launchers.process_setup import ProcessSetup, WorkerEnds
from tidemill.launchers.runner_link import RunnerBell, RunnerLink
from tidemill.launchers.worker_group import WorkerGroup, log_name
from tidemill.launchers.worker_process import COMMAND, EARLY, Spares, WorkerProcess, environment
from tidemill.launchers.worker_stack import stack_of
from tidemill.transports.shared import MOST_DESCRIPTORS
from tidemill.transports.table import find_transport
from tidemill.workers.actor_config import ActorConfig

# seconds of polling before a sleep, where every worker has a core of its own: two
# wake-ups' worth
SPIN = 100e-6
LEAST_MEMORY = 25_000_000  # bytes that a process shares with none: Python, numpy and what it builds
_LOGS_S = 1.0  # seconds between two looks at how long logs are
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # what the system lacks, and not the log
AWAY_S = 2.0
"""Seconds that the disk, or share, has on which logs are."""
SPARE_AFTER_S = 10.0
"""Seconds without a new life after which a process is started for the next one. What a
run, or a life, begins with it has for itself."""
_SPARE_BYTES = 4 * LEAST_MEMORY  # without so much memory there is none
_SPARE_PLACES = 64  # nor without so many more processes and threads that a control group allows
_AFTER = 1.0  # seconds that what an environment started has to end once its worker is gone


@dataclass(frozen=True)
class HostShare:
    """A host's share is what this machine has of an experiment that several have.

    workers: names of the workers that live here
    edges: what joins them, as it is seen from here: at its other end is a worker, or the
        name of a guest
    guests: those who carry edges on to other hosts, by name: the eventfd that wakes each
    logs: folder of what workers write; None: the run's
    lives: how often workers had died before, elsewhere
    """

    workers: Collection[str]
    edges: Sequence[Edge]
    guests: Mapping[str, int]
    logs: Path | None = None
    lives: Mapping[str, int] = field(default_factory=dict)


def layer_threads(experiment: Experiment, names: Sequence[str], processes: Sequence[Sequence[str]]) -> int:
    """Return how many cores none of the other `processes` uses while these workers
    compute: 0 where processes are more than cores. Actors of one slot that take turns
    with trainers wait while these learn, and so do those of their group that have no
    trainer."""
    turns, waiting = experiment.together, 0
    if len(names) == len(turns) and all(
        actors.slots == 1 for actors in experiment.groups(ActorConfig).values()
    ):
        waiting = sum(len(each) < len(turns) and each[0].rpartition("-")[0] in turns for each in processes)
    return cores() // (len(processes) - waiting)


class ProcessesLauncher(Launcher):
    """The launcher of processes starts one per worker, or per group of workers that take
    turns. It needs Linux and memory that processes share."""

    transport = "shared"
    """What joins the workers: a name of `transports/table.py`, or, of a `Transport` of
    one's own, "module:NAME" or "FILE.py:NAME"."""
    processes = True
    outlives_stops = True

    def __init__(self, share: HostShare | None = None) -> None:
        """`share`: what is started here, None: all workers."""
        if not sys.platform.startswith("linux"):
            raise RunError(
                f"--launch processes needs Linux (memfd, eventfd), and this is {sys.platform}; use --launch "
                "threads or --launch inline"
            )
        self._share = share
        self._groups: list[WorkerGroup] = []
        self._group_of: dict[str, WorkerGroup] = {}
        self._links: dict[str, RunnerLink] = {}
        self._notices: list[str] = []
        self._look_at_logs, self._long = 0.0, set[Path]()  # logs that were too long
        self._descriptors: list[int] = []
        self._spares, self._spare_at, self._spare_kills = Spares(), inf, MemoryKills(0, 0)
        self._started = Counter[tuple[tuple[str, ...], int]]()  # commands and threads of all lives
        self._transport: Transport | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def launch(self, job: Job) -> dict[str, Link]:
        experiment, self._job = job.experiment, job
        share, processes = self._share_of(experiment)
        self._processes = processes
        end_orphans()  # whom runs have left that were killed with all of their processes
        self._bell = RunnerBell(self._keep(os.eventfd(0)))
        self._bells = {
            name: bell for names in processes for bell in [self._keep(os.eventfd(0))] for name in names
        }
        self._transport = find_transport(self.transport)(share.edges, {**self._bells, **share.guests})
        if (logs := share.logs) is None:
            if job.folder is None:
                self._temporary = temporary_folder()
            logs = Path(job.folder or self._temporary.name) / "logs"  # type: ignore[union-attr]
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._logs, self._disk = logs, FolderThread(logs, AWAY_S)
        # The runner sleeps mostly, and where some take turns all wait for nobody but each
        # other, and shortly: they need not leave it a core.
        own_cores = len(processes) < cores() + any(len(names) > 1 for names in processes)
        self._text = json.dumps(encode(experiment))
        for names, core in zip(processes, self._cores(experiment, processes), strict=True):
            spin = SPIN if own_cores and core is None else 0.0
            lives = share.lives.get(names[0], 0)
            asked = self._keep(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
            stacks = self._keep(os.memfd_create("tidemill stacks"))
            group = WorkerGroup(names, logs / log_name(names), core, spin, asked, stacks, lives - 1)
            if not lives:
                group.log.unlink(missing_ok=True)
            self._groups.append(group)
            self._group_of |= dict.fromkeys(names, group)
            self._live(group, job)
        EARLY.end()
        return {name: self._links[name] for name, _ in experiment.members() if name in self._links}

    def _share_of(self, experiment: Experiment) -> tuple[HostShare, list[list[str]]]:
        """Return what is started here, and the workers of each of its processes."""
        share = self._share or HostShare(
            dict(experiment.members()), [*experiment.edges(), *experiment.spare_edges()], {}
        )
        return share, [names for names in experiment.processes() if names[0] in share.workers]

    def handles(self, guest: str) -> dict[str, Handle]:
        """Return how a guest, in this process, reaches its ends, by the edge's name."""
        assert self._transport is not None
        return self._transport.handles(guest)

    @property
    def bell(self) -> int:
        """The eventfd that ends `wait`."""
        return self._bell.descriptor

    def _live(self, group: WorkerGroup, job: Job) -> None:
        """Begin the next life of a group of workers."""
        self._spare_at = monotonic() + SPARE_AFTER_S
        transport, names, experiment = self._transport, group.names, job.experiment
        assert transport is not None
        group.life += 1
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in names]
        ends = [
            WorkerEnds(name, theirs.fileno(), transport.handles(name))
            for name, (_, theirs) in zip(names, pairs, strict=True)
        ]
        math_threads = experiment.math_threads(names)
        order = ProcessSetup(
            ends,
            self.transport,
            self._text,
            job.source,
            job.folder,
            job.epoch,
            job.resume,
            group.spin,
            math_threads,
            max(math_threads, layer_threads(experiment, names, self._processes)) if group.core is None else 1,
            group.core,
            dict(job.files),
            self._bells[names[0]],
            group.asked,
            group.stacks,
            own_path(),
            group.life,
            {name: job.gpus[name] for name in names if name in job.gpus},
            {equal: place for name in names for equal, place in job.places_of_equals(name).items()},
            self._mark_of(group),
        )
        for name, (ours, _) in zip(names, pairs, strict=True):
            self._links[name] = RunnerLink(ours, self._bells[name], self._bell)
        group.kills, group.cause = memory_kills(), ""
        try:
            process = group.process = self._spawn(order, group.log)
        finally:
            for _, theirs in pairs:
                theirs.close()
        group.pidfd = os.pidfd_open(process.pid)
        for name in names:
            self._links[name].watch(group.pidfd)

    @property
    def lays_spare_edges(self) -> bool:
        return self._share is None

    @property
    def restarts(self) -> bool:
        return self._transport is not None and self._transport.renews

    def ready(self, workers: Sequence[str]) -> bool:
        """See `Launcher.ready`. A life begins in the run's folder: not while that
        hangs."""
        try:
            if not self._group_of.keys().isdisjoint(workers):
                self._disk.do(self._logs.exists)
        except Unanswered:
            return False
        except OSError:  # a folder that is gone holds nobody up
            pass
        return True

    def restart(self, workers: Sequence[str], edges: Collection[str] = ()) -> dict[str, Link]:
        """See `Launcher.restart`. Some of `workers` may live elsewhere: `edges` are those
        that guests write here for them."""
        assert self._transport is not None
        groups = [group for group in self._groups if group.names[0] in workers]
        for group in groups:
            self._forget(group)
        try:
            self._renew(workers, edges)
            for group in groups:
                self._live(group, self._job)
        except OSError:
            for group in groups:  # none of them begins without the others
                self._forget(group)
            raise
        return {name: self._links[name] for name in workers if name in self._links}

    def _renew(self, workers: Sequence[str], edges: Collection[str]) -> None:
        """Join what begins with these workers anew, and tell those at other ends."""
        assert self._transport is not None
        told = self._transport.renew(workers, edges)
        for reader in self._links.keys() & told:
            each = list(told[reader].items())
            for first in range(0, len(each), MOST_DESCRIPTORS):
                some = dict(each[first : first + MOST_DESCRIPTORS])
                descriptors = [d for handle in some.values() for d in handle.descriptors]
                self._links[reader].send(pack(Renew(some)), descriptors)

    def _mark_of(self, group: WorkerGroup) -> str:
        return f"{group.mark}/{group.names[0]}/{group.life}"

    def _forget(self, group: WorkerGroup) -> None:
        """End what is left of a group's life: its process, where it hangs, and what its
        environment started."""
        for name in group.names:
            self._links[name].close()
        if (process := group.process) is not None:
            if process.returncode is None:  # else its number may be another process's by now
                kill_session(process.pid)
            await_end(process, ", ".join(group.names))
            self._notices += [
                f"{stray}, which an environment of {', '.join(group.names)} had started, was ended with it"
                for stray in end_marked(self._mark_of(group), process.pid)
            ]
            group.process = None
        if group.pidfd >= 0:
            os.close(group.pidfd)
            group.pidfd = -1

    def notices(self) -> Sequence[str]:
        notices, self._notices = self._notices, []
        return notices

    def check(self, experiment: Experiment) -> None:
        share, processes = self._share_of(experiment)
        count = len(processes)
        least = Need("worker processes", LEAST_MEMORY, f"{size(LEAST_MEMORY)} at least")
        check_memory([least] * count, memory.available())
        edges = find_transport(self.transport).descriptors_per_edge * len(share.edges)
        allow_descriptors(
            edges + 3 * count + 3 * len(share.workers),
            "shared memory, bells and links",
            "make a count smaller (of n equal trainers each has a channel to each other)",
        )

    def command(self, workers: Sequence[str]) -> list[str]:
        """Return the command of the process of these workers. A subclass may put another
        before it that ends by becoming it, as `nice` and `taskset` do. Where all have the
        same, one more process has it, for the next life of any."""
        return list(COMMAND)

    @staticmethod
    def _cores(experiment: Experiment, processes: list[list[str]]) -> list[int | None]:
        """Return the core that each process keeps to, or None: another one for each, as
        far as there are so many. The first is any one, since other runs do the same."""
        workers, free, turn = dict(experiment.members()), sorted(os.sched_getaffinity(0)), count(os.getpid())
        return [
            free[next(turn) % len(free)] if any(workers[name].one_core for name in names) else None
            for names in processes
        ]

    def _keep(self, descriptor: int) -> int:
        self._descriptors.append(descriptor)
        return descriptor

    def _spawn(self, order: ProcessSetup, log: Path) -> "subprocess.Popen[bytes]":
        command = returned(self.command([end.worker for end in order.ends]), list, self.command)
        variables = environment(order.math_threads)
        self._started[tuple(command), order.math_threads] += 1
        with self._open(log, order.life) as output:
            worker = EARLY.take(command, variables) or self._spares.take(command, variables)
            worker = worker or WorkerProcess(command, variables, output.fileno())
            worker.send(msgspec.json.encode(order), [output.fileno(), *order.descriptors()])
        return worker.process

    def _open(self, log: Path, life: int) -> BinaryIO:
        """Open the log of a group, which its lives share. Where it cannot be, later ones
        do without: their output is lost."""
        try:
            return open(log, "ab", opener=private)
        except OSError as error:
            if not life or error.errno in _SHORT:
                raise
            lost = f"what life {life + 1} of {log.stem} prints is lost"
            self._notices.append(f"{log} cannot be written: {error.strerror}; {lost}")
            return open(os.devnull, "ab")

    def tell_of_end(self, ends: bool) -> None:
        self._spare_at = inf if ends else monotonic() + SPARE_AFTER_S

    def wait(self, seconds: float, least: float = 0.0) -> None:
        sleep(least)
        self._bell.wait(seconds)
        if monotonic() > self._spare_at:
            self._have_spare()
        if monotonic() > self._look_at_logs:
            self._shorten_logs()

    def _shorten_logs(self) -> None:
        """Keep what workers print from filling the disk, now and then."""
        self._look_at_logs = monotonic() + _LOGS_S
        with contextlib.suppress(OSError):  # a share that hangs, which others tell of: at the next look
            for log in self._disk.do(partial(shorten, [group.log for group in self._groups])):
                if log not in self._long:
                    self._long.add(log)
                    self._notices.append(
                        f"{log} has over {MOST_BYTES >> 20} MB of what {log.stem} prints (an environment, "
                        f"mostly): its middle is taken out, now and whenever it is as long again"
                    )

    def _have_spare(self) -> None:
        """Have a process wait for whoever dies next, with as many math threads as most,
        whose life need not wait for Python and its libraries then. Where it cannot be
        started, or dies, there is none before the next life."""
        if not self.ready([*self._group_of]):  # what a process is started from may hang, too
            self._spare_at = monotonic() + SPARE_AFTER_S
            return
        self._spare_at = inf
        members = self._job.experiment.members()
        lives = self.restarts and any(each.restarts for name, each in members if name in self._group_of)
        (command, math_threads), _ = self._started.most_common(1)[0]
        # a command of a worker's own may name it
        alike = all(other == command for other, _ in self._started)
        variables, places = environment(math_threads), free_processes()
        room = memory.available() > _SPARE_BYTES and (places is None or places > _SPARE_PLACES)
        if lives and alike and room and not self._spares.has(command, variables):
            with contextlib.suppress(OSError):
                self._spares.start(command, variables)
                self._spare_kills = memory_kills()

    def obituary(self, worker: str) -> str:
        group = self._group_of[worker]
        if group.process is None:
            return "its process could not be started"
        if not group.cause:
            if (status := group.status()) is None:
                return "it hung up, but its process still runs"
            group.cause = self._cause_of_end(group, status)
        try:
            last = self._disk.do(partial(tail, group.log))
        except OSError as error:
            return f"{group.cause}; its output cannot be read: {group.log}: {error.strerror}"
        return group.cause + (f"; its last output:\n{last}" if last else "")

    def _cause_of_end(self, group: WorkerGroup, status: int) -> str:
        """Return how a process ended, once for each. A kill for want of memory that
        explains it explains no other one's end."""
        now = memory_kills()
        if self._spares.drop_killed():
            self._count_explained(self._spare_kills, now)
        before = group.kills
        if status == -signal.SIGKILL:
            self._count_explained(before, now)
        return cause_of_end(status, before, now)

    def _count_explained(self, before: MemoryKills, now: MemoryKills) -> None:
        """Count the kill for want of memory that explains the end of a process, which had
        `before` as it began, for all others."""
        here, anywhere = now.here > before.here, now.anywhere > before.anywhere
        for each in self._groups:  # one that began since has counted it
            each.kills = MemoryKills(
                min(each.kills.here + here, now.here), min(each.kills.anywhere + anywhere, now.anywhere)
            )

    def stack(self, worker: str) -> Sequence[Call]:
        group = self._group_of[worker]
        if group.process is None:
            return ()
        return stack_of(group.pidfd, group.asked, group.stacks)

    def own_bytes(self, worker: str) -> int | None:
        process = self._group_of[worker].process
        return memory.own_bytes(process.pid) if process is not None else None

    def condition(self, worker: str) -> str:
        process = self._group_of[worker].process
        pid = process.pid if process is not None else 0
        with contextlib.suppress(OSError, IndexError):  # proc(5): the name may have spaces and brackets
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "T":
                return f"is stopped (by SIGSTOP, or from a terminal); let it go on by: kill -CONT {pid}"
            if state == "t":
                return f"{DEBUGGED} (process {pid})"
        return ""

    def close(self, seconds: float) -> None:
        with contextlib.ExitStack() as stack:  # all of it, whatever a transport raises
            stack.callback(self._remove_empty_logs)
            # workers may not have waited for their simulators; imported where there are
            if (bridge := sys.modules.get("tidemill.bridge.protocol.files")) is not None:
                stack.callback(bridge.remove_folders_of_the_dead)
            if self._temporary is not None:
                stack.callback(self._temporary.cleanup)
            stack.callback(self._close_descriptors)
            if self._transport is not None:
                stack.callback(self._transport.close)
                self._transport = None
            stack.callback(self._spares.end)
            self._end_processes(seconds)

    def _end_processes(self, seconds: float) -> None:
        for link in self._links.values():
            link.close()  # whoever was not told to exit notices this
        deadline = monotonic() + seconds
        left = set[int]()  # those who began the process groups
        for group in self._groups:
            if (process := group.process) is None:
                continue
            if group.status(max(deadline - monotonic(), 0.01)) is None:
                kill_session(process.pid)
                group.status(KILLED)  # `_forget` tells
            if process.returncode is None:  # else its number may be another process's by now
                left.add(process.pid)
        # What an environment started, and what that left to itself (a resource tracker,
        # say), ends by itself, or is ended.
        deadline = monotonic() + _AFTER
        while left := living_groups(left):
            if monotonic() > deadline:
                for leader in left:
                    kill_session(leader)
                break
            sleep(0.005)
        held: list[DeadlineError] = []
        for group in self._groups:
            try:
                self._forget(group)
            except DeadlineError as error:
                held.append(error)
        self._groups.clear()
        self._links.clear()
        if held:
            raise held[0]

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _remove_empty_logs(self) -> None:
        if self._group_of:
            logs = [group.log for group in self._group_of.values()]
            with contextlib.suppress(OSError):
                self._disk.do(partial(remove_empty, logs, self._logs))
            self._disk.close()
