"""Disks that are full, shares that hang, checkpoints that are damaged, and trackers that
are away."""

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random

from fault_rows.row import Impossible, Row, Seen
from fault_rows.runs import EXPERIMENTS, BrokenPromise, marked, run_of
from shares import NoShare, share_in

from tidemill.run.folder import RunFolder
from tidemill.store.checkpoint import read_newest

MEGABYTES = 8  # of the disk


@contextmanager
def disk() -> Iterator[Path]:
    """A small disk of its own, in memory."""
    with tempfile.TemporaryDirectory(prefix="tidemill-disk-") as place:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m,mode=0700", "tmpfs", place]
        if subprocess.run(mount, capture_output=True).returncode:
            raise Impossible("a disk of its own needs the right to mount one (root)")
        try:
            yield Path(place)
        finally:
            subprocess.run(["umount", "-l", place], check=True)


def fill(place: Path) -> None:
    """Leave no room on a disk."""
    with (place / "filler").open("ab", buffering=0) as file:
        for size in (1 << 16, 512):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)


def disk_is_full(launch: str, draw: Random) -> Iterator[Seen]:
    """The disk of the run's folder is full for some seconds. What is freed in these is
    taken, too."""
    with disk() as place, run_of("plain", launch, "--log", "tensorboard", path=place / "run") as run:
        time.sleep(draw.uniform(1.0, 3.0))
        at, before = time.time(), run.newest()["update"]
        told = "checkpoint .* cannot be written: No space left"
        while not re.search(told, run.output):
            fill(place)
            if time.time() - at > 60.0:
                raise BrokenPromise("that no checkpoint can be written is not told")
            time.sleep(0.05)
        noticed = time.time()
        while time.time() < noticed + 3.0:
            fill(place)
            time.sleep(0.1)
        trained = run.wait_for(run.status, "its status")["updates"] - before
        if trained < 10:
            raise BrokenPromise(f"training stands still on a full disk: {trained} updates")
        read_newest(run.path / "checkpoints" / "policy")  # raises where none is whole
        freed = time.time()
        (place / "filler").unlink()
        run.wait_for(lambda: "checkpoints are written again" in run.output, "checkpoints are written again")
        again = time.time()
        run.end()
        updates = run.updates_told()
        wanted = list(range(1, updates[-1] + 1))
        missing = len(set(wanted) - set(updates)) if len(wanted) < 900 else 0  # then not each has one
        done = int(run.checkpoint().facts["updates"])
        yield Seen(
            {"noticed": noticed - at, "written again": again - freed},
            {"records lost": missing, "updates lost": updates[-1] - done},
        )


def share_hangs(launch: str, draw: Random) -> Iterator[Seen]:
    """The share of the run's folder does not answer for some seconds, and then as the run
    is to end."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemill-share-")))
        try:
            share = stack.enter_context(share_in(folder))
        except NoShare as error:
            raise Impossible(str(error)) from None
        run = stack.enter_context(run_of("plain", launch, path=share.place / "run"))
        stack.callback(share.go_on)
        time.sleep(draw.uniform(1.0, 3.0))
        at = time.time()
        share.stop()
        told = "checkpoint .* cannot be written: its disk, or share, does not answer"
        run.wait_for(lambda: re.search(told, run.output), "that is told")
        noticed = time.time()
        time.sleep(3.0)
        share.go_on()
        back = time.time()
        again = r"metrics.jsonl is written again, with the ([\d,]+) records that waited"
        run.wait_for(lambda: "checkpoints are written again" in run.output, "checkpoints are written again")
        waited = run.wait_for(lambda: re.search(again, run.output), "metrics are written again")
        caught_up = time.time()
        if (trained := int(waited[1].replace(",", ""))) < 10:
            raise BrokenPromise(f"training stands still while a share hangs: {trained} updates")
        run.wait_for_updates(2)
        share.stop()
        time.sleep(draw.uniform(0.0, 2.0))
        ending = time.time()
        run.end()
        ended = time.time()
        share.go_on()
        RunFolder(run.path).tidy()  # what was being written as its process ended; a resume does the same
        updates = run.updates_told()
        (refuge,) = (run.folder / "tmp").glob("tidemill-run-*")
        summary = json.loads((refuge / "summary.json").read_text())
        kept = int(read_newest(refuge / "checkpoints" / "policy").facts["updates"])
        shutil.rmtree(refuge)
        missing = set(range(1, updates[-1] + 1)) - set(updates) if updates[-1] < 900 else ()
        yield Seen(
            {"noticed": noticed - at, "caught up": caught_up - back, "ended": ended - ending},
            {"records lost": len(missing), "updates lost": summary["updates"] - kept},
        )


def flip(path: Path) -> None:
    """Change one byte in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Cut a file in half."""
    os.truncate(path, path.stat().st_size // 2)


def damaged(file: str, damage: Callable[[Path], None]) -> Callable[[str, Random], Iterator[Seen]]:
    """Return what damages a file of the newest checkpoint of a run that was killed, and
    has it go on."""

    def suffer(launch: str, draw: Random) -> Iterator[Seen]:
        with run_of("plain", launch) as run:
            run.wait_for(lambda: len(run.checkpoints()) > 2, "three checkpoints")
            time.sleep(draw.uniform(0.0, 1.0))
            run.main.kill()
            run.wait_for(lambda run=run: not marked(run.folder), "all are gone", alive=False)
            *_, before, newest = run.checkpoints()
            damage(newest / file)
            at = time.time()
            run.resume()
            run.wait_for(lambda: f"going on from {before}" in run.output, "it says what it goes on from")
            told = time.time()
            run.wait_for_updates()
            undone = int(newest.name.removeprefix("update-")) - int(before.name.removeprefix("update-"))
            yield Seen({"told": told - at, "trains": time.time() - at}, {"updates undone": undone})

    return suffer


def tracker_is_away(launch: str, draw: Random) -> Iterator[Seen]:
    """Nobody answers a tracker for some seconds."""
    with run_of("plain", launch, "--log", f"{EXPERIMENTS}:Away") as run:
        time.sleep(draw.uniform(0.5, 2.0))
        at = time.time()
        (run.path.parent / "away").touch()
        run.wait_for(lambda: "the tracker cannot be written" in run.output, "that is told")
        noticed, before = time.time(), run.newest()["update"]
        time.sleep(3.0)
        if run.newest()["update"] < before + 10:
            raise BrokenPromise("training stands still while a tracker is away")
        back = time.time()
        (run.path.parent / "away").unlink()
        run.wait_for(
            lambda: "it is written again, with what it missed" in run.output, "it has what it missed"
        )
        again = time.time()
        run.end()
        tracked = {int(line) for line in (run.path.parent / "tracked").read_text().split()}
        missing = set(run.updates_told()) - tracked
        yield Seen({"noticed": noticed - at, "caught up": again - back}, {"records lost": len(missing)})


def tracker_hangs(launch: str, draw: Random) -> Iterator[Seen]:
    """A call of a tracker does not come back for some seconds, and later one never
    does."""
    with run_of("plain", launch, "--log", f"{EXPERIMENTS}:Away") as run:
        hangs, tracked = run.path.parent / "hangs", run.path.parent / "tracked"

        def written() -> set[int]:
            return {int(line) for line in tracked.read_text().split()}

        time.sleep(draw.uniform(0.5, 2.0))
        at, before = time.time(), run.newest()["update"]
        hangs.touch()
        run.wait_for(lambda: "the tracker has not come back for 10 s" in run.output, "that is told")
        noticed = time.time()
        if run.newest()["update"] < before + 10:
            raise BrokenPromise("training stands still while a tracker hangs")
        asked = time.time()
        run.wait_for(run.status, "a command is answered")
        back = time.time()
        hangs.unlink()
        run.wait_for(
            lambda: "it is written again, with what it missed" in run.output, "it has what it missed"
        )
        again, newest = time.time(), int(run.newest()["update"])
        run.wait_for(lambda: newest in written(), "it has the newest record")
        missing = {update for update in run.updates_told() if update <= newest} - written()
        hangs.touch()
        run.wait_for_updates(2)
        ending = time.time()
        run.end()
        ended = time.time()
        if "the tracker has not come back within 10 s of the run's end, and is left" not in run.output:
            raise BrokenPromise(f"that it is left is not told: {run.output[-400:]}")
        yield Seen(
            {"noticed": noticed - at, "a command answered": back - asked, "caught up": again - back,
             "ended": ended - ending},
            {"records lost": len(missing)},
        )  # fmt: skip


def tracker_breaks(launch: str, draw: Random) -> Iterator[Seen]:
    """A tracker raises what is no matter of time."""
    with run_of("plain", launch, "--log", f"{EXPERIMENTS}:Away") as run:
        time.sleep(draw.uniform(0.5, 2.0))
        at = time.time()
        (run.path.parent / "broken").touch()
        run.wait_for(lambda: "the tracker: no more is written there" in run.output, "that is told")
        noticed, before = time.time(), run.newest()["update"]
        run.wait_for(lambda: run.newest()["update"] >= before + 20, "training goes on")
        yield Seen({"noticed": noticed - at})


WEIGHTS = "policy.safetensors"

ROWS = {
    "disk-full": Row(
        "the disk is full for some seconds", disk_is_full, {"noticed": 10.0, "written again": 10.0},
        {"records lost": 0, "updates lost": 0}, times=1,
    ),
    "share-hangs": Row(
        "the share of the run's folder does not answer for some seconds, and then as the run is to end",
        share_hangs, {"noticed": 11.0, "caught up": 10.0, "ended": 20.0},
        {"records lost": 0, "updates lost": 0}, times=1,
    ),
    "corrupt-checkpoint": Row(
        "a byte of the newest checkpoint is another one", damaged(WEIGHTS, flip), times=1
    ),
    "truncated-checkpoint": Row("the newest checkpoint is cut in half", damaged(WEIGHTS, cut), times=1),
    "truncated-manifest": Row("its manifest is cut in half", damaged("manifest.json", cut), times=1),
    "tracker-away": Row(
        "nobody answers a tracker for some seconds", tracker_is_away, {"noticed": 1.0, "caught up": 11.0},
        {"records lost": 0}, times=1,
    ),
    "tracker-hangs": Row(
        "a call of a tracker does not come back for some seconds, and later one never does", tracker_hangs,
        {"noticed": 11.0, "a command answered": 1.0, "caught up": 1.0, "ended": 20.0}, {"records lost": 0},
        times=1,
    ),
    "tracker-breaks": Row("a tracker raises another error", tracker_breaks, {"noticed": 1.0}, times=1),
}  # fmt: skip
