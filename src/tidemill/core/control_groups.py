"""Linux's control groups, of version 1, 2 or both: the limits of memory, processors and
processes that this process, and all above it, are under."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")
_UNLIMITED = 1 << 60  # bytes: version 1 writes the largest number of whole pages


class _Hierarchy(NamedTuple):
    """Where a hierarchy of groups is mounted, and which group it is that lies there."""

    place: Path
    group: PurePosixPath
    version: int


def free_memory(root: Path = ROOT) -> int | None:
    """Return the bytes that can still be filled in the group that has least left, None
    without a limit. Shared memory counts in groups, too.

    root: where the system's files are looked for
    """
    rooms = [_room(group, version) for group, version in _groups(root, "memory")]
    return min((room for room in rooms if room is not None), default=None)


class MemoryKills(NamedTuple):
    """How often the system has killed a process for want of memory, since it was started:
    in this process's control groups, and anywhere on the machine."""

    here: int
    anywhere: int


def memory_kills(root: Path = ROOT) -> MemoryKills:
    """Return these counts, 0 where nothing counts them."""
    here = 0
    for group, version in _groups(root, "memory"):
        file = group / ("memory.events" if version == 2 else "memory.oom_control")
        here = max(here, _count(file, "oom_kill"))  # a group counts what those below it do
    return MemoryKills(here, _count(root / "proc/vmstat", "oom_kill"))


def _count(file: Path, name: str) -> int:
    with suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            if line.split()[:1] == [name]:
                return int(line.split()[1])
    return 0


def processors(root: Path = ROOT) -> float | None:
    """Return how many processors' time the group with the smallest quota may use, None
    without one."""
    quotas = [_quota(group, version) for group, version in _groups(root, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def free_processes(root: Path = ROOT) -> int | None:
    """Return how many more processes and threads may be started in the group that has
    least left, None without a limit."""
    rooms = [_left(group) for group, _ in _groups(root, "pids")]
    return min((room for room in rooms if room is not None), default=None)


def _left(group: Path) -> int | None:
    with suppress(OSError, ValueError):  # the root has no such files, and an unlimited one says "max"
        return max(int((group / "pids.max").read_text()) - int((group / "pids.current").read_text()), 0)
    return None


def _room(group: Path, version: int) -> int | None:
    limited, used, idle = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    with suppress(OSError, ValueError):  # the root has no such files, and an unlimited one says "max"
        limit, now = int((group / limited).read_text()), int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = int(stat.get(idle, 0))  # that were read and can be dropped again
        # version 1: of groups above it, mounted or not
        limit = min(limit, int(stat.get("hierarchical_memory_limit", limit)))
        return None if limit >= _UNLIMITED else max(limit - now + files, 0)
    return None


def _quota(group: Path, version: int) -> float | None:
    with suppress(OSError, ValueError, ZeroDivisionError):
        if version == 2:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None  # version 1: -1 is none
    return None


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folder of each group that this process is in by way of its hierarchies
    for `controller`, the innermost first, and its version."""
    with suppress(OSError):
        own = [
            line.split(":", 2)
            for line in (root / "proc/self/cgroup").read_text().splitlines()
            if line.count(":") >= 2
        ]
        for hierarchy in _hierarchies(root, controller):
            for _, controllers, name in own:  # version 2 has one line for all, without their names
                if (controllers == "") if hierarchy.version == 2 else (controller in controllers.split(",")):
                    yield from _upwards(hierarchy, PurePosixPath(name))


def _hierarchies(root: Path, controller: str) -> Iterator[_Hierarchy]:
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        version = {"cgroup": 1, "cgroup2": 2}.get(kind[0], 0)
        if version == 2 or (version == 1 and controller in kind[2].split(",")):
            yield _Hierarchy(root / fields[4].lstrip("/"), PurePosixPath(fields[3]), version)


def _upwards(hierarchy: _Hierarchy, name: PurePosixPath) -> Iterator[tuple[Path, int]]:
    """Yield the group called `name` and all above it that are mounted. Where a container
    mounts its own group under the name that it has outside, or sees none of that name, it
    is what is mounted."""
    inner = name.relative_to(hierarchy.group) if name.is_relative_to(hierarchy.group) else PurePosixPath()
    if ".." in inner.parts:  # outside of the namespace of groups
        inner = PurePosixPath()
    for part in (inner, *inner.parents):
        yield hierarchy.place / part, hierarchy.version
