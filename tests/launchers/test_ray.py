"""Hosts that Ray gives: two of its nodes on this machine."""

import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from tests.launchers.test_hosts import AGENT, experiment, weights
from tests.run.watching import Run, wait_until

from tidemill import resume, train
from tidemill.core.errors import ConfigError, RunError
from tidemill.launchers.examine_cluster import examine_cluster
from tidemill.launchers.table import make_launcher, with_options
from tidemill.store.checkpoint import read_newest
from tidemill.training.check_resume import compare

if importlib.util.find_spec("ray") is None:  # which takes long to import
    if os.environ.get("TIDEMILL_REQUIRE_CLUSTER") == "1":
        raise RuntimeError("TIDEMILL_REQUIRE_CLUSTER=1, and Ray is not installed")
    pytest.skip("Ray is not installed", allow_module_level=True)

from tidemill.launchers import ray_driver
from tidemill.launchers.ray import RayEngine
from tidemill.launchers.ray_driver import (
    Back,
    BroughtHost,
    Ended,
    NoHosts,
    RayHosts,
    Wanted,
    asks_for_token,
    check_reach,
    check_token,
)

DRIVER = "tidemill.launchers.ray_driver"
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}


def ray_start(*options: str) -> None:
    command = Path(sys.executable).with_name("ray")
    words = [str(command), "start", "--num-cpus=1", "--disable-usage-stats", *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def free_port(address: str) -> int:
    """Return a port that nobody has, nor gets before it is taken, seconds later: of those
    between Ray's own and those that Linux gives by itself."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind((address, port))
            return port


@pytest.fixture(scope="module")
def ray() -> Iterator[str]:
    """The address of a Ray of two nodes with a core each."""
    from ray.util import get_node_ip_address

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # its sockets must have short paths
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TOKEN.items():
            patch.setenv(name, value)
        own = get_node_ip_address()
        port = free_port(own)
        try:
            ray_start(
                "--head", f"--node-ip-address={own}", f"--port={port}", f"--temp-dir={folder}",
                "--include-dashboard=false",
            )  # fmt: skip
            ray_start(f"--address={own}:{port}", f"--node-ip-address={own}")
            yield f"{own}:{port}"
        finally:
            of_ray = of_token()
            for process in of_ray:
                process.kill()
            psutil.wait_procs(of_ray, 10)
            shutil.rmtree(folder, ignore_errors=True)


def of_token() -> list[psutil.Process]:
    """Return what lives and was started with this Ray's token: all of it, and all that
    runs have begun. (Not all of Ray's processes name its folder.)"""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            of_this = process.environ().get("RAY_AUTH_TOKEN") == TOKEN["RAY_AUTH_TOKEN"]
            if of_this and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def ours() -> list[psutil.Process]:
    """Return what runs of Tidemill have begun of this Ray, and on its hosts."""
    return of_module(AGENT, DRIVER, "tidemill.launchers.entry")


def of_module(*names: str) -> list[psutil.Process]:
    """Return those of them that run one of these modules."""
    found = []
    for process in of_token():
        with suppress(psutil.Error):  # it has ended meanwhile
            if not {*names}.isdisjoint(process.cmdline()):
                found.append(process)
    return found


def test_hosts_that_ray_gives_learn_what_processes_of_one_learn(ray: str, tmp_path: Path) -> None:
    alone = weights(experiment(), "processes", tmp_path / "alone")
    launch = with_options("ray", {"hosts": 2, "address": ray})
    compared, differing = compare("policy", alone, weights(experiment(), launch, tmp_path / "together"))
    assert compared > 15 and differing == []
    logs = [log.name for log in (tmp_path / "together" / "logs").iterdir()]
    assert logs in ([], ["ray.log"])  # nobody had anything to say, but Ray, on a busy machine

    # a folder names the launcher and no address: that is the user's to say again
    assert '"ray"' in (tmp_path / "together" / "launcher.json").read_text()
    again = resume(tmp_path / "together", limits={"updates": 8}, options={"address": ray}, quiet=True)
    assert again.summary["updates"] == 8


def test_hosts_that_ray_gives_are_looked_over(ray: str, tmp_path: Path) -> None:
    launch = with_options("ray", {"address": ray})
    found = {finding.name: finding for finding in examine_cluster(launch, tmp_path)}
    message = found["Ray's token"].message
    assert message.startswith("it is asked for, and stands in RAY_AUTH_TOKEN. Ray itself encrypts nothing")
    assert message.endswith("keys of hosts are as safe as its network")
    assert found["hosts"].message.startswith("2: runner, ") and found["folder"].level == "ok"
    (line,) = (finding for name, finding in found.items() if name.startswith("runner – "))
    assert "MB/s, encrypted; round trip" in line.message
    wait_until(lambda: not ours(), 60, "nothing is left")


@pytest.fixture
def run(ray: str, tmp_path: Path) -> Iterator[Callable[[], Run]]:
    runs: list[Run] = []

    def begin() -> Run:
        made = Run(tmp_path, "cartpole", "--layout", "given", "--ray-address", ray, launch="ray")
        runs.append(made)
        made.wait_for_updates()
        return made

    yield begin
    for each in runs:
        each.kill_all()


def agents() -> list[psutil.Process]:
    """Return the agents that are there, those of stand-ins among them."""
    return of_module(AGENT)


def events(run: Run) -> str:
    path = run.path / "events.jsonl"
    return path.read_text() if path.exists() else ""


def test_a_host_whose_agent_ends_is_taken_in_again_and_ray_keeps_nothing_of_a_run_that_was_killed(
    run: Callable[[], Run], ray: str
) -> None:
    begun = run()
    (own,) = agents()
    own.kill()

    def is_back() -> bool:
        there = agents()
        with suppress(psutil.Error):
            return any(p.parent() in there for p in there)
        return False

    wait_until(is_back, 100, "an agent of its own host has its share")
    before = events(begun).count('"lives"')
    wait_until(lambda: events(begun).count('"lives"') >= max(before, 2), 100, "its workers live there")
    assert len(ours()) >= 3
    os.kill(begun.main.pid, signal.SIGKILL)
    wait_until(lambda: not ours(), 60, "nothing is left")
    done = int(read_newest(begun.path / "checkpoints" / "policy").facts["updates"])
    again = resume(begun.path, limits={"updates": done + 3}, options={"address": ray}, quiet=True)
    assert again.summary["updates"] == done + 3
    wait_until(lambda: not ours(), 60, "nothing is left")


def test_a_host_that_is_told_to_leave_is_not_taken_in_again_at_once(run: Callable[[], Run]) -> None:
    begun = run()
    (own,) = agents()
    own.terminate()
    wait_until(lambda: events(begun).count('"lives"') >= 2, 60, "its workers live again")
    wait_until(lambda: own not in agents(), 60, "its agent ends")
    (stand_in,) = agents()
    time.sleep(5.0)  # one that had died would be back by now
    assert agents() == [stand_in] and stand_in.ppid() == begun.main.pid
    os.killpg(begun.main.pid, signal.SIGINT)
    status, text = begun.ended()
    assert status == 130, text
    wait_until(lambda: not ours(), 60, "nothing is left")


def test_a_ray_that_is_gone_leaves_the_runner_s_host(run: Callable[[], Run]) -> None:
    begun = run()
    (driver,) = of_module(DRIVER)
    driver.kill()
    wait_until(lambda: events(begun).count('"lives"') >= 2, 60, "its workers live again")
    assert "the process that speaks to Ray" in events(begun)
    os.killpg(begun.main.pid, signal.SIGINT)
    status, text = begun.ended()
    assert status == 130, text
    wait_until(lambda: not ours(), 60, "nothing is left")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hosts": 7}, "the cluster has 2 that have cores for workers"),
        ({"address": "ray://127.0.0.1:10001"}, "ray job submit"),
        ({"address": "http://127.0.0.1:8265"}, "ray job submit"),
        ({"address": "127.0.0.1"}, "write HOST:PORT"),
        ({"address": "127.0.0.1:1"}, "nobody answers at 127.0.0.1:1"),
    ],
)
def test_what_ray_cannot_give_is_said(ray: str, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    launch = with_options("ray", {"address": ray} | options)
    with pytest.raises(RunError, match=said):
        train(experiment(), launch=launch, layout="given", run_dir=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "checkpoints").exists()
    wait_until(lambda: not ours(), 60, "nothing is left")


def test_a_ray_that_whoever_likes_reaches_is_refused_wherever_it_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_driver, "asks_for_token", {"open:1": False, "away:1": None, "asks:1": True}.get)
    nodes = [
        {"NodeID": name, "NodeManagerAddress": address, "Alive": True, "Resources": {"CPU": 1.0}}
        for name, address in (("a", "127.0.0.1"), ("b", "8.8.8.8"))
    ]
    hosts = RayHosts()
    here = SimpleNamespace(get_node_id=lambda: "a")
    hosts._ray = SimpleNamespace(nodes=lambda: nodes, get_runtime_context=lambda: here)
    with pytest.raises(NoHosts, match=r"8\.8\.8\.8 is an address of the internet"):
        hosts._give(Wanted("", None, False), "open:1")
    where = ip_address("8.8.8.8")
    check_reach(where, "8.8.8.8", insecure=True, address="open:1")
    check_reach(where, "8.8.8.8", insecure=False, address="asks:1")
    with pytest.raises(NoHosts, match="an address of the internet"):
        check_reach(where, "8.8.8.8", insecure=False, address="away:1")


@pytest.mark.parametrize("named", ["", "auto"])
@pytest.mark.parametrize("written", [False, True])
def test_where_there_is_no_ray_a_run_has_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch, named: str, written: bool
) -> None:
    """Also where one that has ended is still written down."""

    def found(address: str) -> str:
        if not written:
            raise ConnectionError("Could not find any running Ray instance")
        return "127.0.0.1:1"

    monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address", found)
    monkeypatch.setenv("RAY_ADDRESS", named)
    assert RayHosts().bring(Wanted("", None, False)).alone
    with pytest.raises(NoHosts, match="--hosts 2: there is no Ray here; start one"):
        RayHosts().bring(Wanted(named, 2, False))


@pytest.mark.parametrize("named", [True, False])
def test_a_wrong_token_is_named(
    ray: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Of the Ray that this machine is of, too: the run does not go on alone."""
    assert asks_for_token(ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", uuid.uuid4().hex)
    launch = with_options("ray", {"address": ray} if named else {})
    with pytest.raises(RunError, match=r"does not let us in: .*InvalidAuthToken.*; is its token the one"):
        train(experiment(), launch=launch, layout="given", run_dir=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists() and not ours()


def test_a_token_that_is_nowhere_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with pytest.raises(
        NoHosts, match=f"no token to show to a:1: neither RAY_AUTH_TOKEN nor {tmp_path}/token"
    ):
        check_token("a:1")


def test_who_has_joined_no_ray_starts_none_as_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    asked = list[object]()
    monkeypatch.setattr(ray, "wait", lambda *words, **_: asked.append(words))
    hosts = RayHosts()
    hosts._ray = ray  # as where its address, or its token, was refused
    hosts.close()
    assert asked == []


def test_an_agent_that_has_ended_before_it_was_asked_for_is_not_given() -> None:
    engine = RayEngine(Wanted("", None, False))
    engine._driver = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert engine._driver.stdin is not None
    back = Back("b", BroughtHost("10.0.0.2", 1, "key"))
    try:
        for told in (Ended("b", "once"), back, Ended("b", "twice")):
            engine._driver.stdin.write(msgspec.json.encode(told) + b"\n")
            engine._driver.stdin.flush()
        wait_until(lambda: engine.ended("b") == "twice", 30, "it is heard")
        assert engine.again("b") is None
        engine._driver.stdin.write(msgspec.json.encode(back) + b"\n")
        engine._driver.stdin.flush()
        wait_until(lambda: engine.again("b") is not None, 30, "another one is")
        assert engine.ended("b") == ""
    finally:
        engine.close()


def test_once_nobody_speaks_to_ray_no_host_comes_back() -> None:
    """Then a share that must have a GPU waits for none: see test_gpus_of_hosts.py."""
    engine = RayEngine(Wanted("", None, False))
    engine._driver = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert engine.restarts
    engine._driver.kill()
    engine._driver.wait(60)
    assert not engine.restarts
    engine.close()


def test_options_that_cannot_be_are_said() -> None:
    for launch, said in (
        ("ray(hosts=0)", "at least 1"),
        ("ray(hosts=True)", "whole number"),
        ("ray(host=2)", 'did you mean "hosts"'),
        ("inline(hosts=2)", "it takes no options"),
        ("ray(hosts=os)", "plain values"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_launcher(launch)
