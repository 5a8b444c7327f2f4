"""What `tidemill doctor cluster` finds: of hosts that are well, and of each lack."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from benchmarks.networked import NETWORK, settings
from benchmarks.networks import Network
from tests.hosts.hosts import needs_namespaces, networked
from tests.launchers.host_launchers import allowed
from tests.launchers.test_hosts import LAUNCHERS
from tests.run.watching import wait_until

from tidemill.core.errors import ConfigError
from tidemill.launchers import examine_cluster
from tidemill.launchers.examine_cluster import examine_cluster as examine
from tidemill.testing.check_env import Finding

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
AGENT = "tidemill.launchers.host"
NETWORKED = f"{BENCHMARKS / 'networked.py'}:Networked"


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    with networked(3) as network:
        for name, value in settings(network).items():
            monkeypatch.setenv(name, value)
        yield network


def by_name(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_hosts_that_are_well_and_the_lines_between_each_two(network: Network, tmp_path: Path) -> None:
    network.set(delay=0.008)
    words = ["doctor", "cluster", "--launch", NETWORKED, "--run-dir", str(tmp_path / "run")]
    with network.on(0):
        done = subprocess.run(
            [sys.executable, "-m", "tidemill.cli.main", *words], capture_output=True, text=True, timeout=240
        )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
    levels = {" ".join(line[1:4]): line[0] for line in lines}
    for line in ("runner – h1", "runner – h2", "h1 – h2"):
        assert levels[line] == "warn"  # 16 ms to and fro
    assert (
        "3: runner, h1, h2" in done.stdout
        and min(map(float, re.findall(r"round trip ([\d.]+) ms", done.stdout))) >= 16
    )
    assert levels["versions of h1"] == levels["versions of h2"] == "ok" and "all hosts see" in done.stdout
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: not agents(), 60, "no agent is left")


def agents() -> list[psutil.Process]:
    """Return the agents of this test's network that live."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ours = process.environ().get(NETWORK) == os.environ[NETWORK]
            if ours and AGENT in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_hosts_that_do_not_reach_each_other_are_named(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    with network.on(0):
        for finding in examine(NETWORKED, tmp_path):
            found[finding.name] = finding
            if finding.name == "host h1":
                monkeypatch.setattr(examine_cluster, "_ANSWER_S", 5.0)
                network.set(cut=[2])
    assert found["hosts"].level == found["host h1"].level == "ok"
    assert (
        found["host h2"].level == "fail" and "does not call this host at 10.0.0.1" in found["host h2"].message
    )
    assert found["runner – h1"].level != "fail" and "runner – h2" not in found
    network.set(cut=[])
    wait_until(lambda: not agents(), 60, "no agent is left")


def test_a_line_that_breaks_is_named(network: Network, tmp_path: Path) -> None:
    with network.on(0):
        found = {}
        for finding in examine(NETWORKED, tmp_path):
            found[finding.name] = finding
            if finding.name == "clocks":
                network.set(cut=[2])
    assert found["runner – h1"].level != "fail" and "h1 – h2" not in found
    assert found["runner – h2"].level == "fail" and "all ports" in found["runner – h2"].cure


def test_what_hosts_lack_is_named_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = examine_cluster.versions()
    monkeypatch.setattr(examine_cluster, "versions", lambda: {**ours, "numpy": "1.0", "python": "3.99"})
    monkeypatch.setattr(examine_cluster, "CLOCK_S", -1.0)
    monkeypatch.setattr(examine_cluster, "FEW_FILES", 1 << 62)
    found = by_name(examine(f"{LAUNCHERS}:TwoHosts", tmp_path / "a" / "b"))
    assert (
        found["versions of b"].level == "fail"
        and found["versions of b"].cure == "there: pip install numpy==1.0"
    )
    assert "python 3." in found["versions of b"].message
    assert found["clocks"].level == "warn" and "b by " in found["clocks"].message
    assert found["host b"].level == "warn" and "ulimit" in found["host b"].cure
    assert found["folder"].message == f"all hosts see {tmp_path}"
    assert "MB/s, encrypted; round trip" in found["runner – b"].message


def test_the_gpus_of_each_host_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := allowed():
        needs_namespaces(why)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # here; host b has its own
    found = by_name(examine(f"{LAUNCHERS}:TwoGpus", tmp_path))
    assert re.match(r"\d+ cores?, no GPU, ", found["host runner"].message)
    assert re.match(r"\d+ cores?, 2 GPUs, ", found["host b"].message)


def test_a_host_without_tidemill_is_named(tmp_path: Path) -> None:
    found = by_name(examine(f"{LAUNCHERS}:NoTidemill", tmp_path))
    assert found["hosts"].level == "fail" and "is Tidemill installed in its Python" in found["hosts"].message


def test_a_launcher_of_this_machine_alone_has_nothing_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has this machine alone"):
        list(examine("processes", tmp_path))


def test_a_login_node_without_slurm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = by_name(examine("slurm", tmp_path))
    assert found["Slurm"].level == "fail" and "sbatch" in found["Slurm"].message


@pytest.mark.parametrize(
    ("mode", "token", "access", "level", "said"),
    [
        ("", None, 0, "warn", "the Ray at a:1 asks for none: whoever reaches it runs code on its hosts"),
        ("token", None, 0, "fail", "there is none"),
        ("token", "x", 0o644, "warn", "others may read"),
        ("token", "x", 0o600, "ok", "only you may read"),
    ],
)
def test_ray_s_token(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    token: str | None,
    access: int,
    level: str,
    said: str,
) -> None:
    path = tmp_path / "auth_token"
    monkeypatch.setattr(examine_cluster, "asks_for_token", lambda address: bool(mode))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    if token is not None:
        path.write_text(token)
        path.chmod(access)
    (finding,) = examine_cluster._authentication("a:1")
    assert finding.level == level and said in finding.message
