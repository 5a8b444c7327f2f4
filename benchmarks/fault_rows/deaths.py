"""Workers that are killed, and the main process."""

import time
from collections.abc import Callable, Iterator
from random import Random

from fault_rows.row import Row, Seen
from fault_rows.runs import (
    PATIENCE,
    BrokenPromise,
    Run,
    marked,
    processes,
    run_leaves,
    run_of,
    wait_for_spare,
)

from tidemill.run.events import read_events

IN_A_RUN = 2  # deaths: the next life of a group that dies more often within a minute waits
SAMPLE = 16 * 64  # env steps: one unfinished sample of each seat of an actor
LANES = 8  # env steps: one of each lane of a replay memory's actor


class Updates:
    """The longest time between two records of updates, looked at now and then."""

    def __init__(self, run: Run) -> None:
        self._file, self.longest = run.path / "metrics.jsonl", 0.0
        self._size, self._at = self._file.stat().st_size, time.time()

    def look(self) -> None:
        """Look whether there was another one."""
        now, size = time.time(), self._file.stat().st_size
        self.longest = max(self.longest, now - self._at)
        if size != self._size:
            self._size, self._at = size, now


def one_death(run: Run, log: str) -> Seen:
    """Kill the worker process with that log, and return what followed."""
    return after(run, processes(run.main.pid)[log].kill)


def after(run: Run, strike: Callable[[], object]) -> Seen:
    """Have workers die, and return what followed."""
    before, saved, void = len(read_events(run.path)), newest_save(run), voided(run)
    killed_at = time.time()
    strike()
    updates, deadline = Updates(run), time.time() + PATIENCE
    while True:
        events = read_events(run.path)[before:]
        died = [event for event in events if event.what == "died"]
        lives = [event for event in events if event.what == "lives"]
        if died and {event.worker for event in died} <= {event.worker for event in lives}:
            break
        if run.main.poll() is not None or time.time() > deadline:
            raise BrokenPromise(f"the run did not go on: {run.output[-400:]}")
        time.sleep(0.01)
        updates.look()
    recovered = max(event.time for event in lives)
    while time.time() < recovered + 1.0:
        time.sleep(0.01)
        updates.look()
    back = [event.steps for event in events if event.what == "went back"]
    seconds = {
        "noticed": died[0].time - killed_at,
        "lives": recovered - killed_at,
        "no update for": updates.longest,
    }
    if back:
        seconds["trained since the checkpoint"] = killed_at - saved
    begun = sum(event.steps for event in died) + (0 if back else voided(run) - void)
    return Seen(seconds, {"env steps undone": sum(back), "env steps of unfinished samples": begun})


def voided(run: Run) -> int:
    """Return how many steps of a replay memory's actors were lost."""
    return int(run.newest().get("limiter/voided", 0))


def newest_save(run: Run) -> float:
    """Return when the run's newest checkpoint was written."""
    written = [path.stat().st_mtime for path in run.path.glob("checkpoints/*/update-*/manifest.json")]
    return max(written, default=time.time())


def deaths_of(experiment: str, log: str, later: bool = False) -> Callable[[str, Random], Iterator[Seen]]:
    """Return what kills a worker of an experiment, twice in a run; `later`: each time
    when there is a process for the next life."""

    def suffer(launch: str, draw: Random) -> Iterator[Seen]:
        with run_of(experiment, launch) as run:
            for _ in range(IN_A_RUN):
                if later:
                    wait_for_spare(run)
                time.sleep(draw.uniform(0.1, 4.0))
                yield one_death(run, log)

    return suffer


def memory_trainer_dies(launch: str, draw: Random) -> Iterator[Seen]:
    """Kill the trainer of a replay memory in a process of its own, and count the
    processes of its actors that do not stay."""
    with run_of("memory_apart", launch) as run:
        for _ in range(IN_A_RUN):
            time.sleep(draw.uniform(0.1, 4.0))
            actors = {name: process for name, process in processes(run.main.pid).items() if "actor" in name}
            seen = one_death(run, "trainer-0")
            now = processes(run.main.pid)
            gone = [name for name, process in actors.items() if now.get(name) != process]
            yield Seen(seen.seconds, {**seen.lost, "actors' processes made anew": len(gone)})


def server_dies_for_good(launch: str, draw: Random) -> Iterator[Seen]:
    """Kill one of two policy workers for the last time that it may die, and look how long
    no update comes: each wants samples of its actor, too."""
    with run_of("two_servers", launch) as run:
        one_death(run, "server-0")
        run.wait_for_updates(3)
        time.sleep(draw.uniform(0.1, 4.0))
        killed_at, updates = time.time(), Updates(run)
        processes(run.main.pid)["server-0"].kill()
        while time.time() < killed_at + 2.0:
            time.sleep(0.005)
            updates.look()
        run.wait_for_updates()
        died, told = run.event("died", since=killed_at), run.event("told", "[sS]erver-1 answers", killed_at)
        back = [event.steps for event in run.events("went back", since=killed_at)]
        yield Seen(
            {
                "noticed": died.time - killed_at,
                "answered for": told.time - killed_at,
                "no update for": updates.longest,
            },
            {"env steps undone": sum(back), "env steps of unfinished samples": died.steps},
        )


def equal_dies(launch: str, draw: Random) -> Iterator[Seen]:
    """Kill one of two equal trainers, and look how long the other one's actor takes no
    step, by what its environments write down."""
    with run_of("equal", launch) as run:
        for _ in range(IN_A_RUN):
            time.sleep(draw.uniform(0.1, 4.0))
            lives = processes(run.main.pid)["actor-0+trainer-0"].pid
            since = time.time()
            seen = one_death(run, "actor-1+trainer-1")
            gaps = [line.split() for line in (run.folder / "still").read_text().splitlines()]
            still = [float(b) - float(a) for pid, a, b in gaps if int(pid) == lives and float(b) > since]
            yield Seen({**seen.seconds, "the other's actor stands still": max(still, default=0.0)}, seen.lost)


def main_dies(launch: str, draw: Random) -> Iterator[Seen]:
    """Kill the main process, see its workers end, and go on with the run."""
    with run_of("apart", launch) as run:
        time.sleep(draw.uniform(0.1, 4.0))
        workers = [pid for pid in marked(run.folder) if pid != run.main.pid]
        killed_at, first = time.time(), 0.0
        run.main.kill()
        run.main.wait()
        while left := marked(run.folder):
            if len(left) < len(workers):
                first = first or time.time() - killed_at
            if time.time() - killed_at > PATIENCE:
                raise BrokenPromise(f"processes {left} are still there after {PATIENCE:.0f} s")
        gone = time.time() - killed_at
        if files := run_leaves(run):
            raise BrokenPromise(f"it left {files}")
        done = run.newest()["step"]
        kept = run.checkpoint().facts["steps"]
        run.resume()
        run.wait_for_updates()
        run.end()
        seconds = {"the first one gone": first or gone, "all gone": gone} if workers else {"all gone": gone}
        yield Seen(seconds, {"env steps undone": max(done - kept, 0)})


PROCESSES = ("processes",)
NOTICED, CHECKPOINT = {"noticed": 0.5}, {"trained since the checkpoint": 60.0}
WAITS = {"no update for": 1.0}  # of a trainer for what is dead, where another one fills its batch

ROWS = {
    "actor": Row(
        "kill -9 of an actor of two", deaths_of("apart", "actor-0"), {**NOTICED, "lives": 2.0, **WAITS},
        {"env steps undone": 0, "env steps of unfinished samples": SAMPLE}, PROCESSES, 4,
    ),
    "server": Row(
        "kill -9 of the policy worker", deaths_of("apart", "server-0"),
        {**NOTICED, "lives": 3.0, "no update for": 3.0},
        {"env steps undone": 0, "env steps of unfinished samples": 0}, PROCESSES, 4,
    ),
    "server-later": Row(
        "… of a run that is older than 10 s, as is the life before",
        deaths_of("apart", "server-0", later=True),
        {**NOTICED, "lives": 1.0, "no update for": 1.0},
        {"env steps undone": 0, "env steps of unfinished samples": 0}, PROCESSES, 4,
    ),
    "last-server": Row(
        "kill -9 of one of two policy workers, which has no life left", server_dies_for_good,
        {**NOTICED, "answered for": 3.0, "no update for": 3.0},
        {"env steps undone": 0, "env steps of unfinished samples": 0}, PROCESSES, 4,
    ),
    "trainer": Row(
        "kill -9 of the trainer", deaths_of("apart", "trainer-0"), {**NOTICED, "lives": 10.0, **CHECKPOINT},
        {"env steps of unfinished samples": 0}, PROCESSES, 4,
    ),
    "trainer-later": Row(
        "… of a run that is older than 10 s, as is the life before",
        deaths_of("apart", "trainer-0", later=True), {**NOTICED, "lives": 1.0, **CHECKPOINT},
        {"env steps of unfinished samples": 0}, PROCESSES, 4,
    ),
    "equal": Row(
        "kill -9 of one of two processes, each an actor and an equal trainer", equal_dies,
        {**NOTICED, "lives": 10.0}, {"env steps undone": 0, "env steps of unfinished samples": SAMPLE},
        PROCESSES, 4,
    ),
    "gatherer": Row(
        "kill -9 of an actor of two with a replay memory", deaths_of("memory_apart", "actor-0"),
        {**NOTICED, "lives": 2.0, **WAITS},
        {"env steps undone": 0, "env steps of unfinished samples": LANES}, PROCESSES, 4,
    ),
    "memory-trainer": Row(
        "kill -9 of the trainer of a replay memory, in a process of its own", memory_trainer_dies,
        {**NOTICED, "lives": 10.0, **CHECKPOINT}, {}, PROCESSES, 4,
    ),
    "memory": Row(
        "kill -9 of actor and trainer with a replay memory", deaths_of("memory", "actor-0+trainer-0"),
        {**NOTICED, "lives": 10.0, **CHECKPOINT}, {}, PROCESSES, 4,
    ),
    "buffer": Row(
        "kill -9 of a buffer worker of two", deaths_of("buffered", "buffer-0"), {**NOTICED, **WAITS},
        {"env steps undone": 0}, PROCESSES, 4,
    ),
    "evaluation": Row(
        "kill -9 of an evaluation", deaths_of("judged", "evaluation-0"), {**NOTICED, **WAITS},
        {"env steps undone": 0}, PROCESSES, 4,
    ),
    "population": Row(
        "kill -9 of a population's manager", deaths_of("population", "population-0"), {**NOTICED, **WAITS},
        {"env steps undone": 0}, PROCESSES, 4,
    ),
    "main": Row(
        "kill -9 of the main process", main_dies, {"the first one gone": 1.0, "all gone": 5.0}, times=2
    ),
}  # fmt: skip
