"""`tidemill doctor` tells what the machine has, and what mends what it lacks."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from tests.run.watching import wait_until

from tidemill.core.control_groups import MemoryKills
from tidemill.core.errors import RunError
from tidemill.core.temporary_folders import temporary_folder
from tidemill.run import examine_machine as examined
from tidemill.run.examine_machine import examine_machine
from tidemill.testing.check_env import Finding


def found() -> dict[str, Finding]:
    return {finding.name: finding for finding in examine_machine()}


def test_a_machine_that_trains_has_no_failure() -> None:
    findings = found()
    assert {
        "versions",
        "cores",
        "load",
        "memory",
        "native core",
        "numpy",
        "torch",
        "extras",
    } <= findings.keys()
    assert all(finding.level != "fail" for finding in findings.values())
    assert all(finding.cure for finding in findings.values() if finding.level == "warn")
    assert "openblas" in findings["numpy"].message or "mkl" in findings["numpy"].message


def test_what_is_lacking_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: a driver\nand more\n")
    monkeypatch.setitem(examined.EXTRAS, "hosts", "no_such_module")
    monkeypatch.setattr(examined, "_DRIVER", driver)
    monkeypatch.setattr(examined, "available", lambda: 1 << 30)
    monkeypatch.setattr(examined, "unavailable", lambda setting: "there is no libkernels")
    monkeypatch.setattr(examined, "LITTLE_SHARED", 1 << 60)
    monkeypatch.setattr(examined, "FEW_FILES", 1 << 60)
    monkeypatch.setattr(examined, "free_processes", lambda: 199)
    monkeypatch.setattr("shutil.which", lambda name: None)
    findings = found()
    assert "hosts" in findings["extras"].message and "hosts" in findings["extras"].cure
    assert "built without CUDA, beside a driver (NVRM version: a driver)" in findings["torch"].message
    assert findings["memory"].level == findings["shared memory"].level == findings["limits"].level == "warn"
    assert (
        findings["threads"].level == "warn"
        and "199 more in this control group" in findings["threads"].message
    )
    assert "no libkernels" in findings["native core"].message
    assert findings["native core"].cure.startswith("install a compiler")
    monkeypatch.setattr(examined, "memory_kills", lambda: MemoryKills(3, 4))
    assert "killed 3 processes" in found()["memory"].message


def test_who_has_numpy_compute_reads_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examined, "unavailable", lambda setting: None)
    monkeypatch.setenv("TIDEMILL_NATIVE", "off")
    finding = found()["native core"]
    assert (finding.level, finding.cure) == ("warn", "unset TIDEMILL_NATIVE")
    assert finding.message == "numpy computes the networks: TIDEMILL_NATIVE = off"


def test_every_extra_is_looked_for() -> None:
    told = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert examined.EXTRAS.keys() == told["project"]["optional-dependencies"].keys() - {"dev"}


ORPHAN = """
import sys
from tidemill.launchers.worker_process import COMMAND, WorkerProcess, environment
words = [sys.executable, "-c", "import time; time.sleep(600)", COMMAND[-1]]
print(WorkerProcess(words, environment(1)).process.pid)
"""


def test_a_worker_whose_run_is_gone_is_found() -> None:
    pid = int(
        subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, check=True).stdout
    )
    try:
        wait_until(lambda: found()["processes"].level == "warn", 60, "it is found")
        assert str(pid) in found()["processes"].cure
    finally:
        os.kill(pid, signal.SIGKILL)


FIRST = """
import ctypes, os, subprocess, sys, time
from tidemill.launchers.worker_process import COMMAND, WorkerProcess, environment
from tidemill.run.examine_machine import _leftovers

assert os.getpid() == 1
ctypes.CDLL(None).prctl(15, b"tidemill", 0, 0, 0)
words = [sys.executable, "-c", "import time; time.sleep(600)", COMMAND[-1]]
own = WorkerProcess(words, environment(1)).process.pid
other = int(subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, check=True).stdout)
until = time.monotonic() + 60
while open(f"/proc/{other}/stat").read().split()[3] != "1":
    assert time.monotonic() < until
print(own, other, *[finding.cure for finding in _leftovers(mend=False)], sep=",")
"""
"""What a container's first process does: it is a run, and adopts another one's worker."""


def in_container(tmp_path: Path, *words: str) -> str:
    """Return what Python prints as the first process of a container, whose temporary
    files are in `tmp_path`."""
    container = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    tried = [*container, "true"]
    if shutil.which("unshare") is None or subprocess.run(tried, capture_output=True).returncode:
        pytest.skip("no process can be the first of its own container here")
    done = subprocess.run(
        [*container, sys.executable, "-c", *words],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_workers_of_a_containers_first_process_are_not_left_over_and_those_that_it_adopted_are(
    tmp_path: Path,
) -> None:
    own, other, *cures = in_container(tmp_path, FIRST, ORPHAN).strip().split(",")
    assert own != other and f"kill -9 {other}" in cures


def test_where_no_temporary_files_can_be_made_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_is_usable() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none_is_usable)
    found = {finding.name: finding for finding in examine_machine()}["temporary files"]
    assert found.level == "warn" and "No usable temporary directory" in found.message
    assert "TMPDIR" in found.cure
    with pytest.raises(RunError, match=r"can be made: No usable temporary directory .*; let the environment"):
        temporary_folder()


def test_a_run_that_was_kept_elsewhere_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tidemill-run-0123" / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    kept = found()["kept run"]
    assert "tidemill-run-0123" in kept.message and kept.cure.startswith("tidemill resume")


MEETING = """
import os
from tidemill.bridge.protocol.files import Rendezvous, create_file
meeting = Rendezvous.own(1)
create_file(meeting.path, 10).close()
print(meeting.path.parent, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looked for on Linux alone")
def test_memory_files_of_a_trainer_that_was_killed_are_named() -> None:
    said = subprocess.run([sys.executable, "-c", MEETING], capture_output=True, text=True)
    folder = Path(said.stdout.strip())
    try:
        cures = [finding.cure for finding in examine_machine() if finding.name == "memory files"]
        # unless another test's trainer was quicker to remove it
        assert f"rm -r {folder} (the next run with a simulator does it, too)" in cures or not folder.exists()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


DIES = """
import os
from tidemill.core.temporary_folders import temporary_folder
made = temporary_folder()
print(made.name, flush=True)
os.kill(os.getpid(), 9)
"""
MENDED = """
import json, os, subprocess, sys, time
from pathlib import Path
from tidemill.bridge.protocol.files import Rendezvous
from tidemill.core.run_marks import left_alone
from tidemill.core.temporary_folders import temporary_folder
from tidemill.launchers.worker_process import COMMAND, WorkerProcess, environment
from tidemill.run.examine_machine import _leftovers

def said(*words):
    return subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True).stdout

orphan, meeting, dies = sys.argv[1:]
worker = WorkerProcess([sys.executable, "-c", "import time; time.sleep(600)", COMMAND[-1]], environment(1))
own, exchanged = temporary_folder(), Rendezvous.own(1)
kept = Path(own.name).parent / "tidemill-run-0123"
(kept / "checkpoints").mkdir(parents=True)
lost = int(said("-c", orphan))
gone = [Path(said("-c", code).strip()) for code in (meeting, dies)]
until = time.monotonic() + 60
while left_alone() != [lost]:
    assert time.monotonic() < until
named = [finding.cure for finding in _leftovers(mend=False)]
before = left_alone(), gone[1].exists()
mended = said("-m", "tidemill.cli.main", "doctor", "--mend")
ended = os.waitstatus_to_exitcode(os.waitpid(lost, 0)[1])
stays = [worker.process.poll() is None, *(p.exists() for p in (Path(own.name), exchanged.path.parent, kept))]
exchanged.leave()
left = [folder.exists() for folder in gone]
print(json.dumps([lost, str(gone[1]), before, named, ended, left, stays, mended]))
"""


def test_mend_ends_and_removes_what_runs_have_left_and_nothing_that_lives(tmp_path: Path) -> None:
    told = json.loads(in_container(tmp_path, MENDED, ORPHAN, MEETING, DIES))
    lost, folder, before, named, ended, left, stays, mended = told
    assert {f"kill -9 {lost}", f"rm -r {folder}"} <= {*named} and before == [[lost], True]
    assert ended == -9 and left == [False, False]
    assert stays == [True] * 4
    assert f"ended 1 workers, or what they started, whose run was gone: {lost}" in mended
    assert "removed" in mended and "kill -9" not in mended and mended.count("rm -r") == 1
