"""Kills a process that writes a parameter database, and looks at what it leaves. `python
kills.py everywhere|anywhere FOLDER`, see `test_versions`.

everywhere: one kill before each call that can change a file, in turn: every state between
    two steps of a push, a result, a tag, a collection
anywhere: kills after random times, which come in the middle of a call, too
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.store.parameter_database import ParameterDatabase

SIZE = 30_000
KEEP = 3
CHANGES = {"open", "connect", "execute", "close", "write", "flush", "fsync", "rename", "unlink", "mkdir"}


def weights(version: int) -> dict[str, Any]:
    return {"w": np.full(SIZE, version, np.float64), "n": np.array(version)}


def life(folder: Path, rounds: int) -> None:
    """What a trainer and its evaluation do to a database. A version's arrays hold its
    number; "best" and "old" point somewhere."""
    database = ParameterDatabase(folder)
    first = max((v.version for v in database.versions("p")), default=-1)
    database.rewind("p", first)
    for version in range(first + 1, first + 1 + rounds):
        database.push("p", version, weights(version), {"env_steps": 10 * version})
        database.results.add("p", version, {"win_rate": [0.0, 1.0]})
        database.tag("p", ("best", "old")[version % 2], version)
        database.collect("p", KEEP)
        if version % 7 == 0 and "old" in database.tags("p"):
            database.untag("p", "old")


def check(folder: Path) -> int:
    """Check what a killed process has left: first as it lies there, then tidied up.
    Return the newest version."""
    database = ParameterDatabase(folder)
    for tidy in (False, True):
        if tidy:
            database.tidy()
        versions = database.versions("p")
        assert [v.version for v in versions] == sorted(v.version for v in versions)
        for version in versions:
            arrays, number = database.load("p", version.version)  # checks the checksum
            assert (
                number == version.version
                and arrays["n"] == number
                and (arrays["w"] == number).all()
                and len(arrays["w"]) == SIZE
            )
            assert version.counters == {"env_steps": 10 * number}
            assert not version.means or (version.means["win_rate"].mean, version.means["win_rate"].count) == (
                0.5,
                2,
            )
        numbers = {v.version for v in versions}
        assert set(database.tags("p").values()) <= numbers
        assert not versions or database.tags("p")["latest"] == max(numbers)
    left = (
        {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        if folder.exists()
        else set()
    )
    assert left - {"index.sqlite"} == {f"p/{number}.safetensors" for number in numbers}, left
    return max(numbers, default=-1)


def die(child: Callable[[], None], parent: Callable[[int], None] = lambda process: None) -> bool:
    """Run `child` in a process that `parent` may kill. True when it was killed."""
    process = os.fork()
    if not process:
        try:
            child()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    parent(process)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed by itself"
    return os.WIFSIGNALED(status)


def everywhere(folder: Path) -> str:
    died = 0
    while True:

        def child(last: int = died) -> None:
            calls = 0

            def count(frame: Any, event: str, what: Any) -> None:
                nonlocal calls
                if event == "c_call" and what.__name__ in CHANGES:
                    if calls == last:
                        os.kill(os.getpid(), signal.SIGKILL)
                    calls += 1

            sys.setprofile(count)
            life(folder, 1)

        if not die(child):
            break
        died += 1
        if check(folder) >= 0:
            ParameterDatabase(folder).collect("p", KEEP)  # most die before they come to it
    return f"{died} kills, newest {check(folder)}"


def anywhere(folder: Path, kills: int = 60) -> str:
    rng, seconds, newest, died = random.Random(1), 0.1, -1, 0

    def kill(process: int) -> None:
        time.sleep(rng.uniform(0.0, seconds))
        os.kill(process, signal.SIGKILL)

    while died < kills or newest < 2:  # a slow machine comes to something, too
        assert die(lambda: life(folder, 1_000_000), kill)
        died, newest = died + 1, check(folder)
        if died >= kills:
            seconds *= 1.5
    return f"{died} kills, newest {newest}"


if __name__ == "__main__":
    print({"everywhere": everywhere, "anywhere": anywhere}[sys.argv[1]](Path(sys.argv[2])))
