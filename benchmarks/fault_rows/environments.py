"""Environments that hang, and simulators that die or never return the turn."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import psutil
from fault_rows.row import Row, Seen
from fault_rows.runs import BrokenPromise, Run, marked, run_of

from tidemill.run import control_socket
from tidemill.run.folder import SUMMARY

DEADLINE = 2.0  # seconds that a step may take (experiments.py)
LOOK = 1.0  # seconds within which what is overdue must be told
SILENT = 5.0  # seconds after which an environment that nobody can break off is told
AGAIN = 3.0  # seconds likewise, of what hangs again and again
LIVES = 3
HANGS = "its environment has not come back"
GOES_ON = 20  # updates that follow, and have no further fault


def made_anew(experiment: str, fault: str, told: str) -> Callable[[str, Random], Iterator[Seen]]:
    """Return what has a fault in one lane or slot, which must be made anew alone."""

    def suffer(launch: str, draw: Random) -> Iterator[Seen]:
        with run_of(experiment, launch) as run:
            time.sleep(draw.uniform(0.5, 2.0))
            at = run.suffer(fault)
            noticed = run.event("told", told, at).time
            anew, others = restarts(run)
            if others:
                raise BrokenPromise(f"{others} more were made anew with it")
            run.wait_for_updates(GOES_ON)
            if restarts(run)[1] or run.events("died"):
                raise BrokenPromise(f"more than that one suffered: {run.output[-400:]}")
            yield Seen({"noticed": noticed - at, "made anew": anew - at})

    return suffer


def restarts(run: Run) -> tuple[float, float]:
    """Wait until a record says that one was made anew, and return when, and how many
    others."""

    def count() -> float:
        return max((v for name, v in run.newest().items() if name.endswith("lanes/restarts")), default=0)

    run.wait_for(lambda: count() >= 1, "one is made anew")
    return time.time(), count() - 1


def hangs_in_a_process(launch: str, draw: Random) -> Iterator[Seen]:
    """A step that never comes back in the actor's own thread, in a process of its own."""
    with run_of("lanes", launch) as run:
        time.sleep(draw.uniform(0.5, 2.0))
        at = run.suffer("hang")
        noticed = run.event("died", HANGS, at).time
        lives = run.event("lives", since=at).time
        run.wait_for_updates()
        yield Seen({"noticed": noticed - at, "lives": lives - at})


def hangs_where_nobody_can_end_it(launch: str, draw: Random) -> Iterator[Seen]:
    """Likewise in threads and inline: it is told, and a signal ends the run. What hangs
    in the main thread is left."""
    with run_of("lanes", launch) as run:
        time.sleep(draw.uniform(0.5, 2.0))
        at = run.suffer("hang")
        noticed = run.event("told", "has not come back.*lane \\d", at).time
        asked = time.time()
        run.main.send_signal(signal.SIGTERM)
        run.ended()
        ended = time.time() - asked
        lost = run.updates_told()[-1] - int(run.checkpoint().facts["updates"])
        yield Seen({"told": noticed - at, "ended": ended}, {"updates undone": lost})


def hangs_in_each_life(launch: str, draw: Random) -> Iterator[Seen]:
    """A step hangs in the actor's own thread in each of its lives, until it has no other:
    that ends the run, by one error with the cause."""
    words = (f"--set=workers.actor.deadline_s={AGAIN:g}", f"--set=workers.actor.restarts={LIVES - 1}")
    with run_of("lanes", launch, *words) as run:
        for life in range(1, LIVES + 1):
            time.sleep(draw.uniform(0.5, 2.0))
            at = run.suffer("hang")
            yield Seen({"noticed": run.event("died", HANGS, at).time - at})
            if life < LIVES:
                yield Seen({"lives": run.event("lives", since=at).time - at})
                run.wait_for_updates()
        yield ended_by_an_error(run, at, f"{HANGS}.*That is death {LIVES} of actor")


def hangs_until_all_is_spent(launch: str, draw: Random) -> Iterator[Seen]:
    """Steps hang in lanes' threads, one more often than they may be made anew."""
    words = (f"--set=workers.actor.deadline_s={AGAIN:g}", f"--set=workers.actor.lane_restarts={LIVES - 1}")
    with run_of("lanes_in_threads", launch, *words) as run:
        for number in range(1, LIVES + 1):
            time.sleep(draw.uniform(0.5, 2.0))
            at = run.suffer("hang")
            if number < LIVES:
                run.wait_for(lambda number=number: restarts(run)[1] >= number - 1, "it is made anew")
                yield Seen({"made anew": time.time() - at})
        yield ended_by_an_error(run, at, f"has not come back from a step.*lane_restarts = {LIVES - 1} allows")


def ended_by_an_error(run: Run, at: float, words: str) -> Seen:
    """Wait until a run ends, which must be by one error that says so."""
    status, said = run.ended(), run.output
    errors = re.findall("^error: ", said, re.MULTILINE)
    if status != 1 or len(errors) != 1 or not re.search(words, said, re.DOTALL):
        raise BrokenPromise(f"status {status}, {len(errors)} errors: {said[-800:]}")
    lost = run.updates_told()[-1] - int(run.checkpoint().facts["updates"])
    return Seen({"ended": time.time() - at}, {"updates undone": lost})


def does_not_close(launch: str, draw: Random) -> Iterator[Seen]:
    """An environment's `close` never comes back, as the run ends."""
    with run_of("unclosable", launch) as run:
        time.sleep(draw.uniform(0.5, 2.0))
        at = time.time()
        control_socket.tell(run.path, "stop")
        told = run.event("told", "does not let itself be closed", at)
        status = run.ended()
        lost = run.updates_told()[-1] - int(run.checkpoint().facts["updates"])
        if status or not (run.path / SUMMARY).exists():
            raise BrokenPromise(f"status {status}: {run.output[-400:]}")
        yield Seen({"told": told.time - at, "ended": time.time() - at}, {"updates undone": lost})


def simulator_killed(launch: str, draw: Random) -> Iterator[Seen]:
    """kill -9 of one simulator of two."""
    with run_of("simulators", launch) as run:
        time.sleep(draw.uniform(0.5, 2.0))
        victims = simulators_of(run)
        if len(victims) != 2:
            raise BrokenPromise(f"{len(victims)} simulators are there, not 2")
        at = time.time()
        os.kill(victims[0], signal.SIGKILL)
        yield another_simulator(run, victims, at, "SIGKILL")


def simulator_hangs(launch: str, draw: Random) -> Iterator[Seen]:
    """One simulator of two never returns the turn."""
    with run_of("simulators", launch) as run:
        time.sleep(draw.uniform(0.5, 2.0))
        victims = simulators_of(run)
        yield another_simulator(run, victims, run.suffer("hang"), "simulator")


def another_simulator(run: Run, victims: list[int], at: float, told: str) -> Seen:
    """Wait until another one is in a simulator's place, and return what was seen."""
    noticed = run.event("told", told, at).time
    anew, others = restarts(run)
    run.wait_for_updates()
    left = set(simulators_of(run))
    if others or len(left) != 2 or len(left & set(victims)) != 1:
        raise BrokenPromise(
            f"of the simulators {victims} there are {left} now, and {others:.0f} more restarts"
        )
    return Seen({"noticed": noticed - at, "made anew": anew - at})


def simulators_of(run: Run) -> list[int]:
    """Return the processes of a run that are simulators."""
    world = str(Path(__file__).with_name("world.py"))
    return [pid for pid in marked(run.folder) if world in psutil.Process(pid).cmdline()]


OVERDUE = {"noticed": DEADLINE + LOOK}

ROWS = {
    "lane-hangs": Row(
        f"a step hangs in a lane's thread (deadline {DEADLINE:.0f} s)",
        made_anew("lanes_in_threads", "hang", "has not come back from a step"), OVERDUE,
    ),
    "slot-hangs": Row(
        f"a step hangs in a slot (deadline {DEADLINE:.0f} s)",
        made_anew("slots", "hang", "slot \\d"), OVERDUE,
    ),
    "memory-lane": Row(
        "a lane raises that fills a replay memory, without slots",
        made_anew("memory_of_lanes", "raise", "lane \\d.*the pole is gone.*step is void"), {"noticed": 1.0},
    ),
    "process-hangs": Row(
        f"a step hangs in the actor's own thread (deadline {DEADLINE:.0f} s)", hangs_in_a_process,
        {**OVERDUE, "lives": DEADLINE + LOOK + 2.0}, launches=("processes",),
    ),
    "process-hangs-again": Row(
        f"a step hangs there in each of its {LIVES} lives (deadline {AGAIN:.0f} s)", hangs_in_each_life,
        {"noticed": AGAIN + LOOK, "lives": AGAIN + LOOK + 3.0, "ended": AGAIN + LOOK + 20.0},
        {"updates undone": 0}, ("processes",), 1,
    ),
    "thread-hangs": Row(
        "a step hangs in the actor's own thread, which nobody can end", hangs_where_nobody_can_end_it,
        {"told": SILENT + LOOK, "ended": 20.0}, {"updates undone": 0}, ("threads", "inline"),
    ),
    "lane-hangs-again": Row(
        f"steps hang in a lane's thread, {LIVES} times (deadline {AGAIN:.0f} s)", hangs_until_all_is_spent,
        {"made anew": AGAIN + LOOK, "ended": AGAIN + LOOK + 20.0}, {"updates undone": 0}, times=1,
    ),
    "never-closes": Row(
        "an environment's `close` never comes back", does_not_close, {"told": 35.0, "ended": 40.0},
        {"updates undone": 0}, times=1,
    ),
    "simulator-dies": Row("kill -9 of a simulator of two", simulator_killed, {"noticed": 1.0}),
    "simulator-hangs": Row(
        f"a simulator of two never returns the turn (deadline {DEADLINE:.0f} s)", simulator_hangs, OVERDUE
    ),
}  # fmt: skip
