"""How soon a run on a Ray that is up trains, how soon nothing is left of it, and what
becomes of it where Ray loses a node, for `benchmarks/cluster.py`."""

import importlib.util
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from threading import Timer

import psutil
from cluster_faults import figures
from cluster_runs import AGENT, WELL, WORKER, ClusterRun, Figures, running
from fault_rows.deaths import after
from fault_rows.row import Impossible
from fault_rows.runs import EXPERIMENTS
from networks import Cable, Network

from tidemill.run.folder import RunFolder

DRIVER = "tidemill.launchers.ray_driver"
UP_S = 180.0  # seconds that Ray has to be up


class Ray:
    """A Ray of two nodes, each on a host of a network, with a core each.

    address: of its head
    variables: that let a run in
    """

    def __init__(self, network: Network) -> None:
        self.variables = {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex, "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip
        head = network.addresses[0]
        self.address = f"{head}:{random.randrange(20_000, 32_000)}"
        self._network = network
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # its sockets must have short paths
        port = self.address.rpartition(":")[2]
        self.start(0, "--head", f"--port={port}", f"--temp-dir={self._folder}", "--include-dashboard=false")
        self.join()

    def start(self, host: int, *words: str) -> None:
        """Start a node of it on a host. Raises `Impossible`."""
        started = subprocess.run(
            [
                *self._network.command(host), str(Path(sys.executable).with_name("ray")), "start",
                "--num-cpus=1", f"--node-ip-address={self._network.addresses[host]}", *words,
            ],
            env={**os.environ, **self.variables}, capture_output=True, text=True, timeout=UP_S,
        )  # fmt: skip
        if started.returncode:
            self.close()
            raise Impossible(f"Ray does not start: {started.stdout[-300:]}{started.stderr[-300:]}")

    def join(self) -> None:
        """Start the node of the other host than its head's."""
        self.start(1, f"--address={self.address}")

    def raylet(self) -> psutil.Process:
        """Return the raylet of that one."""
        address = f"--node_ip_address={self._network.addresses[1]}"
        (found,) = (
            each for each in self.processes() if each.name() == "raylet" and address in each.cmdline()
        )
        return found

    def processes(self) -> list[psutil.Process]:
        """Return all of it that lives, and what runs have begun of it."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                of_this = process.environ().get("RAY_AUTH_TOKEN") == self.variables["RAY_AUTH_TOKEN"]
                if of_this and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def of_runs(self) -> list[psutil.Process]:
        """Return those of them that are runs'."""
        found = []
        for process in self.processes():
            with suppress(psutil.Error):
                if not {AGENT, WORKER, DRIVER}.isdisjoint(process.cmdline()):
                    found.append(process)
        return found

    def close(self) -> None:
        """Leave nothing of it."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(self.processes(), 10)
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def ray_of(network: Network) -> Iterator[Ray]:
    """A Ray that is up."""
    if importlib.util.find_spec("ray") is None:
        raise Impossible("Ray is not installed")
    made = Ray(network)
    try:
        yield made
    finally:
        made.close()


def start_and_end(draw: Random, short: bool) -> Iterator[Figures]:
    """Begin a run on a Ray that is up, and end it as Ctrl-C does, three times."""
    with Cable() as network, ray_of(network) as ray:
        for _ in range(1 if short else 3):
            began = time.monotonic()
            words = ("--ray-address", ray.address)
            with running(1, "cartpole", *words, network=network, launch="ray", **ray.variables) as (_, run):
                run.wait_for(run.newest, "its first update", UP_S)
                first = time.monotonic() - began
                if len(ray.of_runs()) < 3:
                    raise Impossible(f"it has not both hosts: {run.output[-400:]}")
                time.sleep(draw.uniform(0.5, 2.0))
                at = time.monotonic()
                run.interrupt()
                run.wait_for(lambda: not ray.of_runs(), "nothing is left", alive=False)
                yield {"first update": first, "nothing left": time.monotonic() - at}


@contextmanager
def apart(network: Network, draw: Random) -> Iterator[tuple[Ray, ClusterRun, Figures]]:
    """A run that trains on a Ray, of which an actor stands on the one host beside the
    runner's, and figures that are to be found of it: how soon nothing of it is left, and
    what was lost, are added."""
    with ray_of(network) as ray:
        name = socket.gethostname()  # that of both hosts
        places = (f"--place=actor-0={name}", "--place=actor-1=runner", "--place=server=runner")
        words, experiment = ("--ray-address", ray.address, *places), f"{EXPERIMENTS}:apart"
        with running(1, experiment, *words, network=network, launch="ray", **ray.variables) as (_, run):
            run.wait_for_updates()
            time.sleep(draw.uniform(0.1, 4.0))
            found: Figures = {}
            yield ray, run, found
            run.wait_for_updates(3)
            at = time.monotonic()
            run.interrupt()
            run.wait_for(lambda: not ray.of_runs(), "nothing is left", alive=False)
            found |= {"nothing left": time.monotonic() - at, "samples lost": run.lost()[0]}


def raylet_dies(draw: Random, short: bool) -> Iterator[Figures]:
    """Kill the raylet of the one host beside the runner's, and Ray's workers there, the
    first of which holds the agent. Its actor lives again with the runner, and on its own
    host once there is another raylet."""
    with Cable() as network, apart(network, draw) as (ray, run, found):
        raylet = ray.raylet()

        def strike() -> None:
            for process in (raylet, *raylet.children()):
                process.kill()

        found |= figures(after(run, strike))
        at, lives = time.monotonic(), len(run.events("lives"))
        ray.join()
        up = time.monotonic()
        run.wait_for(lambda: len(run.events("lives")) > lives, "its host has its share again")
        found |= {"raylet starts": up - at, "its host has its share": time.monotonic() - up}
    yield found


def cut_off(draw: Random, short: bool) -> Iterator[Figures]:
    """Cut that host off for 10 s, of which Ray, by its defaults, takes no notice. Its
    actor lives again, and its host has its share once it is heard again."""
    with Network(2) as network, apart(network, draw) as (_, run, found):
        heal = Timer(10.0, partial(network.set, **WELL))

        def strike() -> None:
            network.set(cut=[1])
            heal.start()

        try:
            found |= figures(after(run, strike))
        finally:
            heal.join()
        run.wait_for_updates(3)
        there = RunFolder(run.path).read("placement.json")[socket.gethostname()]["workers"]
        found["its host has its share"] = "yes" if there == ["actor-0"] else "no"
    yield found
