"""What a death costs: workers of runs in processes are killed at random moments, and
what follows is timed.

    python benchmarks/deaths.py                # 20 deaths of each kind: some 15 minutes
    python benchmarks/deaths.py --times 5 actor equal

Of each kind it prints the median and the longest time from a kill until the run has
noticed, until all that died runs again, and between two updates meanwhile; how many env
steps are undone; and what is left behind (processes, temporary files). `soak.py` has all
kinds of faults, for an hour.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tidemill import (
    DQN,
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Limits,
    PolicyWorkers,
    QNetwork,
    Replay,
    ReplayActors,
    ReplayTrainer,
    Trainer,
)
from tidemill.run.events import read_events

CARTPOLE = Gymnasium(id="CartPole-v1")
ENDLESS = Limits(updates=100_000_000)
IN_A_RUN = 2  # deaths: the next life of a group that dies more often within a minute waits


def _lasting(made: Experiment) -> Experiment:
    workers = {name: config.replace(restarts=1000) for name, config in made.workers.items()}
    return made.replace(workers=workers)


def apart() -> Experiment:
    """Two actors, a policy worker and a trainer, each in a process of its own."""
    return _lasting(
        Experiment(
            name="apart",
            policies={"policy": ActorCritic()},
            workers={
                "actor": Actors(
                    count=2,
                    environment=CARTPOLE,
                    lanes=16,
                    agents=(AgentSpec(inference="inference", sample_steps=64),),
                ),
                "server": PolicyWorkers(stream="inference"),
                "trainer": Trainer(algorithm=PPO(minibatch_size=512)),
            },
            limits=ENDLESS,
        )
    )


def equal() -> Experiment:
    """Two processes, each an actor and a trainer by turns: the usual layout."""
    return _lasting(
        Experiment(
            name="equal",
            policies={"policy": ActorCritic()},
            workers={
                "actor": Actors(
                    count=2, environment=CARTPOLE, lanes=16, agents=(AgentSpec(sample_steps=64),)
                ),
                "trainer": Trainer(count=2, algorithm=PPO(minibatch_size=512)),
            },
            together=("actor", "trainer"),
            limits=ENDLESS,
        )
    )


def memory() -> Experiment:
    """An actor and a trainer with a replay memory by turns."""
    return _lasting(
        Experiment(
            name="memory",
            policies={"policy": QNetwork()},
            workers={
                "actor": ReplayActors(environment=CARTPOLE, lanes=8),
                "trainer": ReplayTrainer(
                    algorithm=DQN(), buffer=Replay(capacity=50_000, warm_up=500), batch_size=64, ratio="1/8"
                ),
            },
            together=("actor", "trainer"),
            limits=ENDLESS,
        )
    )


KINDS: dict[str, tuple[Callable[[], Experiment], str]] = {
    "actor": (apart, "actor-0"),
    "server": (apart, "server-0"),
    "trainer": (apart, "trainer-0"),
    "equal": (equal, "actor-1+trainer-1"),
    "memory": (memory, "actor-0+trainer-0"),
}
"""Of each kind of death: the experiment, and the log of the process that is killed."""


def processes(main: int) -> dict[str, psutil.Process]:
    """Return the run's worker processes, by the names of their logs."""
    found = {}
    for process in psutil.Process(main).children():
        try:
            found[Path(os.readlink(f"/proc/{process.pid}/fd/1")).stem] = process
        except OSError:
            continue
    return found


@contextmanager
def run_of(function: Callable[[], Experiment], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run of an experiment of this file, in processes, that has begun to train."""
    command = ["tidemill", "train", f"{__file__}:{function.__name__}", "--launch", "processes"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with (folder / "output.txt").open("wb") as output:
        main = subprocess.Popen(
            [*command, "--layout", "given", "--run-dir", str(folder / "run")],
            stdout=output, stderr=output, env=environment,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (folder / "run" / "metrics.jsonl").exists():
            if main.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the run did not begin:\n{(folder / 'output.txt').read_text()}")
            time.sleep(0.05)
        yield main
    finally:
        main.send_signal(signal.SIGTERM)
        main.wait(60)


class Updates:
    """The longest time between two records of updates, looked at now and then."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "metrics.jsonl"
        self.longest = 0.0
        self._size, self._at = self._file.stat().st_size, time.time()

    def look(self) -> None:
        """Look whether there was another one."""
        now, size = time.time(), self._file.stat().st_size
        self.longest = max(self.longest, now - self._at)
        if size != self._size:
            self._size, self._at = size, now


def one_death(folder: Path, main: subprocess.Popen[bytes], log: str) -> tuple[float, float, float, int]:
    """Kill a process of the run. Return the seconds until that was noticed, until all
    that died runs again and the longest between two updates, and the steps undone."""
    before, killed_at = len(read_events(folder)), time.time()
    processes(main.pid)[log].kill()
    updates, deadline = Updates(folder), time.time() + 60
    while True:
        events = read_events(folder)[before:]
        died = [event for event in events if event.what == "died"]
        lives = [event for event in events if event.what == "lives"]
        if died and {event.worker for event in died} <= {event.worker for event in lives}:
            break
        if main.poll() is not None or time.time() > deadline:
            sys.exit(f"the run did not go on:\n{(folder.parent / 'output.txt').read_text()}")
        time.sleep(0.01)
        updates.look()
    recovered = max(event.time for event in lives)
    while time.time() < recovered + 1.0:
        time.sleep(0.01)
        updates.look()
    undone = sum(event.steps for event in events if event.what == "went back")
    return died[0].time - killed_at, recovered - killed_at, updates.longest, undone


def left_behind(folder: Path) -> str:
    """Return what the run has left: processes that name its folder, temporary files."""
    named = str(folder).encode()
    alive = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and named in b"\0".join(a.encode() for a in process.cmdline()):
                alive.append(process.pid)
        except psutil.Error:
            continue
    files = [path.name for path in folder.iterdir() if path.name not in ("run", "output.txt")]
    return f"{len(alive)} processes, {len(files)} files"


def deaths(kind: str, times: int, draw: random.Random) -> None:
    """Kill a worker of one kind so often, and print what followed."""
    function, log = KINDS[kind]
    found, left = [], set()
    for _ in range(0, times, IN_A_RUN):
        with tempfile.TemporaryDirectory() as name:
            with run_of(function, Path(name)) as main:
                for _ in range(IN_A_RUN):
                    time.sleep(draw.uniform(0.1, 4.0))
                    found.append(one_death(Path(name) / "run", main, log))
            left.add(left_behind(Path(name)))
    noticed, recovered, between, undone = (list(column) for column in zip(*found, strict=True))
    print(
        f"{kind:<8} {len(found):>3} deaths of {log}: noticed {statistics.median(noticed):.2f} "
        f"({max(noticed):.2f}) s, lives {statistics.median(recovered):.2f} ({max(recovered):.2f}) s, "
        f"between updates {statistics.median(between):.2f} ({max(between):.2f}) s, env steps undone "
        f"{statistics.median(undone):,.0f} ({max(undone):,}); left: {'; '.join(sorted(left))}",
        flush=True,
    )


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], default=[])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    for kind in given.kinds or KINDS:
        deaths(kind, given.times, draw)


if __name__ == "__main__":
    main()
