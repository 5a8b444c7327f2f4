"""Eight simulators that are killed at random while they are trained on: does training go
on, and does anything leak?

    python benchmarks/bridge_kills.py [--minutes 10] [--every 5] [--world PATH]

One actor with eight simulators of the world "reach" (ten agents each; the Python one by
default), restarted when they die, and a trainer, on processes. Every few seconds one of
the simulators, chosen at random, gets SIGKILL. At the end: steps trained in each quarter
of the time, restarts, the actor's memory, open files and threads early and late, and what
was left behind (processes, and folders of the bridge).
"""

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import psutil

import tidemill
from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Limits, SimulatorEnvironment, Trainer
from tidemill.bridge.protocol.files import PeerWatch, shared_folder
from tidemill.bridge.worlds import reach
from tidemill.metrics.json_lines import read_metrics

SIMULATORS = 8


def simulators(world):
    """Return the processes that run the world."""
    found = []
    for process in psutil.process_iter():
        try:
            if world in process.cmdline() and "--memory-path" in process.cmdline():
                found.append(process)
        except psutil.Error:
            pass
    return found


def folders():
    """Return the bridge's folders."""
    roots = [Path(tempfile.gettempdir()), Path("/dev/shm"), shared_folder()]
    return {path for root in roots if root.is_dir() for path in root.glob("tidemill-*")}


def lives(folder):
    """Return whether whoever made a folder lives: it is somebody else's then."""
    watch = PeerWatch.find(folder / "memory.trainer")
    try:
        return watch is not None and watch.alive()
    finally:
        if watch is not None:
            watch.close()


class Killer(threading.Thread):
    """Kills, and looks at the actor."""

    def __init__(self, world, every, seconds):
        """Begin with `start`."""
        super().__init__(daemon=True)
        self.world, self.every, self.until = world, every, time.monotonic() + seconds
        self.kills, self.looks = 0, []

    def run(self):
        """Kill until the time is over."""
        rng = random.Random(1)
        while time.monotonic() < self.until:
            time.sleep(self.every * (0.5 + rng.random()))
            if running := simulators(self.world):
                os.kill(rng.choice(running).pid, signal.SIGKILL)
                self.kills += 1
                self.look(running[0])

    def look(self, simulator):
        """Note the memory, open files and threads of whoever started the simulators."""
        try:
            actor = simulator.parent()
            self.looks.append((actor.memory_info().rss, actor.num_fds(), actor.num_threads()))
        except (psutil.Error, AttributeError):
            pass


def main():
    """Print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between kills, on average")
    # as its command line has it
    parser.add_argument("--world", default=reach.__file__, type=lambda path: str(Path(path).resolve()))
    given = parser.parse_args()
    seconds = 60 * given.minutes
    environment = SimulatorEnvironment(path=given.world)
    experiment = Experiment(
        name="kills",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(
                environment=environment,
                lanes=SIMULATORS,
                slots=2,
                agents=(AgentSpec(sample_steps=64),),
                lane_restarts=1_000_000,
            ),
            "trainer": Trainer(algorithm=PPO(minibatch_size=512, epochs=4)),
        },
        limits=Limits(seconds=seconds),
    )
    before = folders()
    killer = Killer(given.world, given.every, seconds)
    killer.start()
    with tempfile.TemporaryDirectory() as folder:
        result = tidemill.train(experiment, run_dir=Path(folder) / "run", quiet=True, layout="given")
        records = read_metrics(result.folder)
    last = records[-1]
    marks = [
        max((r["step"] for r in records if r["time/seconds"] <= seconds * part / 4), default=0)
        for part in range(5)
    ]
    restarts = max(r.get("time/actor-0/lanes/restarts", 0) for r in records)
    print(
        f"{result.summary['status']}: {last['step']:,.0f} env steps in {last['time/seconds']:.0f} s, mean "
        f"return {last['return/mean']:.2f}"
    )
    print(
        "steps by quarters of the time: "
        f"{', '.join(f'{after - early:,.0f}' for early, after in pairwise(marks))}"
    )
    print(f"{killer.kills} simulators killed, {restarts:.0f} started again")
    if killer.looks:
        for name, unit, column in (("memory", 1e6, 0), ("open files", 1, 1), ("threads", 1, 2)):
            values = [look[column] / unit for look in killer.looks]
            quarter = max(len(values) // 4, 1)
            early, late = sorted(values[:quarter])[quarter // 2], sorted(values[-quarter:])[quarter // 2]
            print(f"the actor's {name}: {early:,.0f} in the first quarter, {late:,.0f} in the last (medians)")
    time.sleep(1.0)
    print(
        f"left behind: {len(simulators(given.world))} processes, "
        f"{len([path for path in folders() - before if not lives(path)])} folders"
    )


if __name__ == "__main__":
    main()
