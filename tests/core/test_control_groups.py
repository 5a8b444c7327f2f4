"""Limits of control groups, read from files as the kernel writes them: version 1, version
2, both, in containers and not."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks.memory_groups import NoGroup, memory_group

from tidemill.core.control_groups import MemoryKills, free_memory, free_processes, memory_kills, processors

V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755",
    "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct",
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory",
    "39 31 0:36 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset",
)
V2 = ("25 18 0:22 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate",)
HYBRID = (*V1, "41 31 0:38 {root} /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw")
OWN_V1 = "9:name=systemd:/job\n5:cpuset:/elsewhere\n4:memory:{name}\n1:cpuacct,cpu:{name}\n"
OWN = {1: OWN_V1, 2: "0::{name}\n", 3: OWN_V1 + "0::{name}\n"}
MOUNTS = {1: V1, 2: V2, 3: HYBRID}
LARGEST = "9223372036854771712"
NO_LIMIT = {1: LARGEST, 2: "max"}
ROOT_OF_GROUPS = Path("/sys/fs/cgroup")


class System:
    """The files of a system, under a folder."""

    def __init__(self, root: Path, kind: int, name: str, mounted: str = "/") -> None:
        self.root, self.version = root, min(kind, 2) if kind < 3 else 1
        self._write("proc/self/cgroup", OWN[kind].format(name=name))
        self._write("proc/self/mountinfo", "\n".join(MOUNTS[kind]).format(root=mounted) + "\n")
        self._write("proc/meminfo", "MemAvailable: 1 kB\n")

    def _write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def memory(self, group: str, limit: str | int, used: int = 0, files: int = 0, **stat: int) -> "System":
        """Limit a group, as it is mounted."""
        v1 = self.version == 1
        at = f"sys/fs/cgroup/{'memory/' if v1 else ''}{group}".rstrip("/")
        self._write(f"{at}/memory.{'limit_in_bytes' if v1 else 'max'}", f"{limit}\n")
        self._write(f"{at}/memory.{'usage_in_bytes' if v1 else 'current'}", f"{used}\n")
        lines: Mapping[str, int] = {
            "cache": 3,
            "inactive_file": 77 if v1 else files,
            "total_inactive_file": files,
            **stat,
        }
        self._write(f"{at}/memory.stat", "".join(f"{name} {value}\n" for name, value in lines.items()))
        return self

    def quota(self, group: str, quota: int | None, period: int = 100_000) -> "System":
        """Limit a group's time on processors."""
        at = f"sys/fs/cgroup/{'cpu,cpuacct/' if self.version == 1 else ''}{group}".rstrip("/")
        if self.version == 1:
            self._write(f"{at}/cpu.cfs_quota_us", f"{-1 if quota is None else quota}\n")
            self._write(f"{at}/cpu.cfs_period_us", f"{period}\n")
        else:
            self._write(f"{at}/cpu.max", f"{'max' if quota is None else quota} {period}\n")
        return self


KINDS = pytest.mark.parametrize("kind", [1, 2, 3], ids=["version 1", "version 2", "both"])


@KINDS
def test_the_tightest_group_of_all_above_counts(tmp_path: Path, kind: int) -> None:
    system = System(tmp_path, kind, "/batch/job/step")
    assert free_memory(tmp_path) is None and processors(tmp_path) is None
    none = NO_LIMIT[system.version]
    system.memory("batch", 5_000, 1_000, 500).memory("batch/job", none, 900).memory(
        "batch/job/step", 9_000, 100
    )
    system.quota("batch", None).quota("batch/job", 150_000).quota("batch/job/step", 40_000, 10_000)
    assert (free_memory(tmp_path), processors(tmp_path)) == (4_500, 1.5)
    system.memory("batch/job/step", 2_000, 900, 500).quota("batch", 50_000)
    assert (free_memory(tmp_path), processors(tmp_path)) == (1_600, 0.5)
    system.memory("batch/job/step", 2_000, 3_000)
    assert free_memory(tmp_path) == 0


@KINDS
@pytest.mark.parametrize(
    "mounted", ["/docker/abc", "/", "/other"], ids=["own group under its name", "namespace", "another name"]
)
def test_a_container_that_sees_its_own_group_alone_is_under_it(
    tmp_path: Path, kind: int, mounted: str
) -> None:
    """Its group lies where the hierarchy is mounted, whatever it is called outside."""
    name = {"/docker/abc": "/docker/abc", "/": "/", "/other": "/docker/abc"}[mounted]
    system = System(tmp_path, kind, name, mounted)
    system.memory("", 3_000, 1_000).quota("", 200_000)
    assert (free_memory(tmp_path), processors(tmp_path)) == (2_000, 2.0)


@KINDS
def test_a_group_below_what_is_mounted_is_found(tmp_path: Path, kind: int) -> None:
    system = System(tmp_path, kind, "/docker/abc/inner", "/docker/abc")
    system.memory("", 9_000).memory("inner", 3_000, 1_000).quota("", 200_000).quota("inner", 50_000)
    assert (free_memory(tmp_path), processors(tmp_path)) == (2_000, 0.5)


@KINDS
def test_a_group_outside_of_the_namespace_is_no_way_out_of_what_is_mounted(tmp_path: Path, kind: int) -> None:
    system = System(tmp_path, kind, "/../../above")
    system.memory("", 3_000, 1_000)
    (tmp_path / "sys/above").mkdir()
    assert free_memory(tmp_path) == 2_000


def test_the_group_with_fewest_processes_left_counts(tmp_path: Path) -> None:
    system = System(tmp_path, 2, "/batch/job")
    assert free_processes(tmp_path) is None
    for group, most, now in (("batch", 500, 460), ("batch/job", "max", 12)):
        system._write(f"sys/fs/cgroup/{group}/pids.max", f"{most}\n")
        system._write(f"sys/fs/cgroup/{group}/pids.current", f"{now}\n")
    assert free_processes(tmp_path) == 40
    system._write("sys/fs/cgroup/batch/job/pids.max", "11\n")  # it was set afterwards
    assert free_processes(tmp_path) == 0


def test_version_1_tells_of_limits_above_what_is_mounted(tmp_path: Path) -> None:
    System(tmp_path, 1, "/").memory("", LARGEST, 1_000, hierarchical_memory_limit=4_000)
    assert free_memory(tmp_path) == 3_000


def test_what_makes_no_sense_is_no_limit(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None and processors(tmp_path) is None  # no /proc
    system = System(tmp_path, 2, "/a").quota("a", 1, 0).memory("a", "nonsense")
    system._write("proc/self/mountinfo", "\n".join(["nonsense", "- -", *V2]).format(root="/"))
    assert free_memory(tmp_path) is None and processors(tmp_path) is None


@pytest.mark.parametrize("kind", MOUNTS)
def test_kills_for_want_of_memory_are_counted_in_the_group_and_on_the_machine(
    tmp_path: Path, kind: int
) -> None:
    System(tmp_path, kind, "/box/job").memory("box/job", 1000)
    assert memory_kills(tmp_path) == MemoryKills(0, 0)
    v1 = kind != 2
    group = tmp_path / "sys/fs/cgroup" / ("memory/box" if v1 else "box")
    file, before = (
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0") if v1 else ("memory.events", "oom 9")
    )
    (group / file).write_text(f"{before}\noom_kill 3\n")
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 7\noom_kill 5\n")
    assert memory_kills(tmp_path) == MemoryKills(3, 5)


def test_a_group_of_this_machine_is_seen(tmp_path: Path) -> None:
    """Where one can be made."""
    groups = {
        Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "1073741824"),
        Path("/sys/fs/cgroup/cpu"): ("cpu.cfs_quota_us", "50000"),
    }
    made = []
    try:
        try:
            for place, (file, limit) in groups.items():
                assert (place / file).exists()
                group = place / f"tidemill-test-{os.getpid()}"
                group.mkdir()
                made.append(group)
                (group / file).write_text(limit)
        except (OSError, AssertionError):
            pytest.skip("control groups of version 1 cannot be made here")
        words = (
            "import os, sys\nfor group in sys.argv[1:]:\n    open(group + '/cgroup.procs', "
            "'w').write(str(os.getpid()))\n"
        )
        words += (
            "from tidemill.core.control_groups import free_memory, processors\nprint(free_memory(), "
            "processors())"
        )
        said = subprocess.run(
            [sys.executable, "-c", words, *map(str, made)], capture_output=True, text=True, check=True
        ).stdout.split()
        assert 0 < int(said[0]) <= 1 << 30 and float(said[1]) == 0.5
    finally:
        for group in made:
            group.rmdir()


OUT_OF_MEMORY = """
import os, subprocess, sys
from tidemill.core.control_groups import memory_kills
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
before = memory_kills()
child = subprocess.run([sys.executable, "-c", "bytearray(1 << 28)"])
print(child.returncode, memory_kills().here - before.here)
"""


@contextmanager
def limited_group(most: int) -> Iterator[Path]:
    """Make a control group that has at most so many bytes of memory. Skip the test where
    that cannot be."""
    try:
        with memory_group() as group:
            group.limit(most)
            yield group.folder
    except NoGroup as error:
        pytest.skip(str(error))


def test_a_kill_of_this_machine_s_kernel_is_counted() -> None:
    """Where a group can be made."""
    with limited_group(1 << 27) as group:
        said = subprocess.run(
            [sys.executable, "-c", OUT_OF_MEMORY, str(group)], capture_output=True, text=True, check=True
        )
        assert said.stdout.split() == ["-9", "1"]
