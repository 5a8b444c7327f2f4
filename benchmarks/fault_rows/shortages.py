"""Runs in which nothing comes any more, and memory that is not there."""

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random

from fault_rows.deaths import SAMPLE, WAITS, Updates
from fault_rows.row import Impossible, Row, Seen
from fault_rows.runs import BrokenPromise, processes, run_of, started
from memory_groups import NoGroup, memory_group

from tidemill.run.events import Event

NO_UPDATE = 30.0  # seconds without one after which the run says why
ROOM = 300 << 20  # bytes that a control group has more than the run takes


def stopped_worker(launch: str, draw: Random) -> Iterator[Seen]:
    """SIGSTOP of the only actor, for as long as it takes until that is told."""
    with run_of("plain", launch) as run:
        time.sleep(draw.uniform(0.5, 2.0))
        actor = processes(run.main.pid)["actor-0"]
        at = time.time()
        actor.suspend()
        try:
            silent = run.event("told", "actor-0 is silent for .*stopped", at).time
            chain = run.event("told", "no update for", at)
        finally:
            actor.resume()
        if "trainer-0 waits for samples ← actor-0 is stopped" not in chain.cause:
            raise BrokenPromise(f"the chain is: {chain.cause}")
        run.wait_for_updates()
        yield Seen({"silence told": silent - at, "chain told": chain.time - at})


def stopped_actor_of_two(launch: str, draw: Random) -> Iterator[Seen]:
    """SIGSTOP of one actor of two, for as long as it takes until that is told: the other
    one goes on, and nobody dies of it."""
    with run_of("apart", launch) as run:
        time.sleep(draw.uniform(0.5, 2.0))
        actor = processes(run.main.pid)["actor-0"]
        at, updates = time.time(), Updates(run)

        def told() -> list[Event]:
            updates.look()
            return run.events("told", "actor-0 is silent for .*stopped", at)

        actor.suspend()
        try:
            silent = run.wait_for(told, "that it is silent is told")[0].time
        finally:
            actor.resume()
        run.event("told", "actor-0 speaks again", at)
        run.wait_for_updates()
        if chains := run.events("told", "no update", at):
            raise BrokenPromise(f"it goes on, and this is told: {chains[0].cause}")
        if run.events("died"):
            raise BrokenPromise(f"somebody died of it: {run.output[-400:]}")
        yield Seen({"silence told": silent - at, "no update for": updates.longest})


def hanging_thread(launch: str, draw: Random) -> Iterator[Seen]:
    """An environment that never comes back, in an actor's thread that waits for it."""
    with run_of("patient", launch) as run:
        time.sleep(draw.uniform(0.5, 2.0))
        at = run.suffer("hang")
        silent = run.event("told", "actor-0 is silent for .*lane \\d", at).time
        chain = run.event("told", "no update for", at)
        if not re.search("trainer-0 waits for samples ← actor-0 is silent for .*lane \\d", chain.cause):
            raise BrokenPromise(f"the chain is: {chain.cause}")
        yield Seen({"silence told": silent - at, "chain told": chain.time - at})


def starving_trainer(launch: str, draw: Random) -> Iterator[Seen]:
    """Likewise of one of two trainers, while the other one learns as ever."""
    with run_of("starving", launch) as run:
        time.sleep(draw.uniform(0.5, 2.0))
        at = run.suffer("hang")
        chain = run.event("told", "no update of trainer-0 for", at)
        if not re.search("trainer-0 waits for samples ← actor-0 is silent for .*lane \\d", chain.cause):
            raise BrokenPromise(f"the chain is: {chain.cause}")
        if "other_" in chain.cause:
            raise BrokenPromise(f"the chain names who learns as ever: {chain.cause}")
        run.wait_for_updates()
        yield Seen({"chain told": chain.time - at})


def out_of_memory(launch: str, draw: Random) -> Iterator[Seen]:
    """An environment takes all memory that the run's control group allows, and the system
    kills its process."""
    with ExitStack() as stack:
        try:
            group = stack.enter_context(memory_group())
        except NoGroup as error:
            raise Impossible(str(error)) from None
        run = stack.enter_context(run_of("lanes", launch, group=group.folder))
        time.sleep(draw.uniform(0.5, 2.0))
        group.limit(group.used + ROOM)
        at = run.suffer("eat")
        run.wait_for(lambda: group.kills, "the system kills it")  # once it has eaten all
        killed = time.time()
        died = run.event("died", since=at)
        lives = run.event("lives", since=at).time
        if died.worker != "actor-0" or "out of memory: its control group has no more" not in died.cause:
            raise BrokenPromise(f"{died.worker}: {died.cause}")
        run.wait_for_updates()
        yield Seen(
            {"noticed": died.time - killed, "lives": lives - killed},
            {"env steps of unfinished samples": died.steps},
        )


def too_large(launch: str, draw: Random) -> Iterator[Seen]:
    """A plan that cannot fit."""
    at = time.time()
    with started("too_large", launch) as run:
        status = run.ended()
        told = time.time()
        sums = re.search("this needs .* of memory, and .* are available", run.output.replace("\n", " "))
        if status != 1 or not sums or run.path.exists():
            raise BrokenPromise(f"status {status}: {run.output[-400:]}")
        yield Seen({"refused": told - at})


TOLD = {"silence told": 7.0, "chain told": NO_UPDATE + 2.0}

ROWS = {
    "stopped-worker": Row("SIGSTOP of the only actor", stopped_worker, TOLD, {}, ("processes",), 1),
    "stopped-of-two": Row(
        "SIGSTOP of one actor of two", stopped_actor_of_two, {"silence told": 7.0, **WAITS}, {},
        ("processes",), 1,
    ),
    "hanging-thread": Row("a step never comes back, without a deadline", hanging_thread, TOLD, {},
                          ("threads",), 1),
    "starving-trainer": Row(
        "… while another trainer learns as ever", starving_trainer,
        {"chain told": NO_UPDATE + 2.0}, {}, ("processes", "threads"), 1,
    ),
    "out-of-memory": Row(
        "an actor takes more memory than there is", out_of_memory, {"noticed": 0.5},
        {"env steps of unfinished samples": SAMPLE}, ("processes",), 2,
    ),
    "too-large": Row("a plan that cannot fit", too_large, times=1),
}  # fmt: skip
