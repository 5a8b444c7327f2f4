"""The trials of the conformance kit: how a simulator is played so that each point of
`check` can be seen."""

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import count as counted
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from tidemill.bridge.kit.check_points import POINTS, Findings, SimulatorUnplayable, Trial
from tidemill.bridge.kit.trial_trainer import Program, SimulatorPlay
from tidemill.bridge.kit.watcher import Watcher
from tidemill.bridge.protocol.files import Rendezvous
from tidemill.bridge.protocol.image import GroupImage, groups_place, write_int
from tidemill.bridge.protocol.side_channels import Channels, EnvironmentParameters, Framing, RawBytes
from tidemill.bridge.protocol.tables import LAYOUTS, QUERY, RESET, STEP
from tidemill.bridge.trainer_side.steps import complete, count, write_actions
from tidemill.core.errors import PeerLost, TidemillError

# seconds in which a simulator is to end where its trainer has died: one for noticing, and
# for its own end
_SOON = 3.0
_IMPORTS = 60.0  # seconds that a process of ours may take to start
_NO_CHANNEL = "8bf0f3bb-5f1c-4a9c-9f7a-6a2d2e0f6c11"  # a side channel that nobody has
_TRIES = 300  # exchanges in which agents are to ask after a reset
_A_TURN = 0.005  # seconds: who has run for so long has slept in between, unless it never sleeps


def _begin(program: Program, found: Findings, framing: Framing) -> Watcher:
    """Start a simulator and reset it; the caller closes its play."""
    begun = time.monotonic()
    with found.during("start"):
        play = SimulatorPlay(program)
    try:
        watcher = Watcher(play, found, framing)
        with found.during("start", play):
            data = play.answer()
        found.good("start", f"after {time.monotonic() - begun:.2f} s")
        watcher.look(data)
        watcher.exchange("reset", RESET)
        _await_agents(watcher)
    except BaseException:
        play.close()
        raise
    return watcher


def _await_agents(watcher: Watcher) -> None:
    """Step until an agent asks."""
    for _ in range(_TRIES):
        if watcher.asking:
            return
        watcher.exchange("steps")
    if not watcher.play.memory.groups:
        watcher.found.bad("groups", f"there are none after a reset and {_TRIES} steps")
    else:
        watcher.found.bad("reset", f"no agent asks for a decision in {_TRIES} steps after a reset")
    raise SimulatorUnplayable


# ---- plain play ------------------------------------------------------------------------


def plays(program: Program, found: Findings, seconds: float, framing: Framing) -> None:
    """Everything that a well-behaved trainer does."""
    watcher = _begin(program, found, framing)
    with watcher.play:
        slowest, begun = 0.0, time.monotonic()
        for steps in counted(1):
            now = time.monotonic()
            if now - begun > seconds and steps > 20:
                break
            watcher.act()
            watcher.exchange("steps")
            slowest = max(slowest, time.monotonic() - now)
        found.good(
            "steps",
            f"{steps - 1} steps, {(steps - 1) / (now - begun):,.0f} a second, the slowest after "
            f"{slowest * 1e3:.1f} ms",
        )
        _thinks(watcher, min(2.0, max(0.2, seconds / 5)))
        _grows(watcher, framing)
        _resets(watcher)
        if watcher.play.layout.queries:
            _queries(watcher)
        _spoils(watcher)
        _closes(watcher)


def _thinks(watcher: Watcher, pause: float) -> None:
    """Think for a while: the simulator writes nothing meanwhile, burns nothing, and is
    still there."""
    play, found = watcher.play, watcher.found
    before = play.snapshot()
    time.sleep(0.1)
    running = _running(play)
    time.sleep(pause)
    ran = _running(play)
    if before == (after := play.snapshot()):
        found.good("turns", f"nothing changed within {pause:.1f} s")
    else:
        place = next(
            (i for i, (one, other) in enumerate(zip(before, after, strict=False)) if one != other),
            len(before),
        )
        found.bad("turns", f"byte {place} of the memory changed while it was the trainer's turn")
    shares = [ran[task].share(was) for task, was in running.items() if task in ran]
    if shares:
        (found.bad if max(shares) > 0.5 else found.good)(
            "sleep", f"it ran for {max(shares):.0%} of the {pause:.1f} s that the trainer thought"
        )
    watcher.act()
    watcher.exchange("patience")
    found.good("patience", f"it waited for {pause:.1f} s")


@dataclass(frozen=True)
class _Ran:
    """A thread at a second of the clock: seconds that it ran and that it waited for a
    core, how often it went to sleep, and whether it is runnable."""

    at: float
    run: float
    wait: float
    sleeps: int
    runnable: bool

    def share(self, was: "_Ran") -> float:
        """Return the share of its time since it was so that it ran, but for the seconds
        in which it waited for a core."""
        if was.runnable and self.runnable and was.sleeps == self.sleeps:
            # it never slept; what it waits now is not counted yet, so that the quotient
            # would say less. One that had hardly a turn says nothing
            return float(self.run - was.run > _A_TURN)
        return (self.run - was.run) / max(self.at - was.at - (self.wait - was.wait), 1e-3)


def _running(play: SimulatorPlay) -> dict[str, _Ran]:
    """Return how each thread of the simulator ran until now; nothing where that cannot be
    known."""
    found = {}
    try:
        process = psutil.Process(play.process.pid)
        for number in [process.pid, *(child.pid for child in process.children(recursive=True))]:
            for task in Path(f"/proc/{number}/task").iterdir():
                at = time.monotonic()
                run, wait, _ = (task / "schedstat").read_text().split()
                status = dict(
                    line.split(":\t", 1)
                    for line in (task / "status").read_text().splitlines()
                    if ":\t" in line
                )
                found[task.name] = _Ran(
                    at,
                    int(run) / 1e9,
                    int(wait) / 1e9,
                    int(status["voluntary_ctxt_switches"]),
                    status["State"].startswith("R"),
                )
    except (psutil.Error, OSError, ValueError, KeyError):
        return {}
    return found


def _grows(watcher: Watcher, framing: Framing) -> None:
    """Send more and more by a side channel that all may know, then by one that nobody
    knows."""
    for number in (4, 40, 400):
        parameters = EnvironmentParameters()
        for i in range(number):
            parameters.set(f"tidemill_check_{i}", i)
        watcher.exchange("trainer's growth", STEP, Channels([parameters], framing).outgoing())
        watcher.exchange("trainer's growth")
    watcher.found.good("trainer's growth", "it followed three times")
    stranger = RawBytes(_NO_CHANNEL, 999)
    stranger.send(bytes(range(100)))
    stranger.send(b"")
    watcher.exchange("unknown channel", STEP, Channels([stranger], framing).outgoing())
    watcher.exchange("unknown channel")
    watcher.found.good("unknown channel", "it went on")


def _resets(watcher: Watcher) -> None:
    for _ in range(2):
        for _ in range(3):
            watcher.act()
            watcher.exchange("steps")
        watcher.exchange("reset", RESET)
        watcher.exchange("reset", RESET)
        _await_agents(watcher)
    watcher.found.good("reset", "5 resets, amid episodes and twice in a row")


def _queries(watcher: Watcher) -> None:
    memory = watcher.play.memory
    before = memory.data[groups_place(memory.layout, watcher.play.header()) :]
    with watcher.found.during("query", watcher.play):
        watcher.play.exchange(QUERY)
    after = memory.data[groups_place(memory.layout, watcher.play.header()) :]
    if watcher.play.header()["query"]:
        watcher.found.bad("query", "it handed back and left the flag as it was")
    elif before != after:
        watcher.found.bad("query", "rows changed, as if it had stepped")
    else:
        watcher.found.good("query", "it answered, and the rows stayed")


def _spoils(watcher: Watcher) -> None:
    """Overwrite what the simulator is to write whole, and see whether it does."""
    play, found = watcher.play, watcher.found
    looked = 0
    for _ in range(5):
        watcher.act()
        for group in play.memory.groups:
            for _, _, place, width, _ in _written(group):
                size = group.spec.max_agents * width
                play.memory.data[place : place + size] = b"\xff" * size
        with found.during("whole rows", play):
            data = play.exchange()
        for group in play.memory.groups:
            looked += _whole(watcher, group)
        watcher.look(data)
    if looked:
        found.good("whole rows", f"{looked} rows")


def _written(group: GroupImage) -> Iterator[tuple[str, str, int, int, Any]]:
    """Yield for observations, rewards and masks: which counter has their rows, what they
    are, where they lie, how many bytes a row has, and the type of its values."""
    for counter, prefix in (("agents", ""), ("ended", "ended_")):
        if counter in group.places:
            for k, (place, one) in enumerate(group.observations(prefix)):
                yield counter, f"observation {k}", place, 4 * one.size, np.uint32
            yield counter, "the reward", group.places[prefix + "reward"], 4, np.uint32
    if width := group.symbols.get("B", 0):
        yield "agents", "the mask", group.places["masks"], width, np.uint8


def _whole(watcher: Watcher, group: GroupImage) -> int:
    """Complain of values that were left as they had been spoilt; return how many rows
    there are."""
    data = watcher.play.memory.data
    for counter, what, place, width, kind in _written(group):
        rows = count(data, group, counter)
        size = rows * width
        values = np.frombuffer(data[place : place + size], kind).reshape(rows, width // kind().itemsize)
        left = (values == np.iinfo(kind).max).any(axis=1)
        if left.any():
            watcher.found.bad(
                "whole rows", f'group "{group.name}": {what} of row {int(left.argmax())} was not written'
            )
            data[place : place + size] = bytes(size)
    return sum(count(data, group, counter) for counter in ("agents", "ended") if counter in group.places)


def _closes(watcher: Watcher) -> None:
    how = watcher.play.leaves()
    if how is None:
        watcher.found.bad("close", "it did not end within 5 s")
    elif how != "ended with exit code 0":
        watcher.found.bad("close", f"it {how}{watcher.play.process.output()}")
    else:
        watcher.found.good("close", f"it {how}")


def differs(program: Program, found: Findings, seconds: float, framing: Framing) -> None:
    """A trainer of another make: its side channel begins otherwise, and it leaves
    deleting to the side that has not closed."""
    with found.during("start capacity"):
        play = SimulatorPlay(program, other=True)
    watcher = Watcher(play, Findings(), framing)
    with play:
        with found.during("start capacity", play):
            watcher.look(play.answer())
            for command in (RESET, STEP, STEP, STEP):
                watcher.act()
                watcher.look(play.exchange(command), command)
        found.good("start capacity", f"it answered {watcher.exchanges} times")
        if play.leaves() is not None:
            left = play.left()
            (found.bad if left else found.good)(
                "deleting", f"it left {', '.join(left)}" if left else "nothing is left"
            )


# ---- bad moves -------------------------------------------------------------------------


def dies(program: Program, found: Findings, seconds: float, framing: Framing) -> None:
    """A trainer that is killed: another process plays, and is."""
    settings = msgspec.json.encode(asdict(program)).decode()
    code = "from tidemill.bridge.kit.trials import doomed; doomed()"
    limit = _IMPORTS + 3 * program.deadline  # for a start, a reset and a step
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, settings], capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        raise SimulatorUnplayable from None
    if done.returncode != -signal.SIGKILL:
        raise SimulatorUnplayable  # told by the trial of plain play
    number, begun = int(done.stdout), time.monotonic()
    while _lives(number) and time.monotonic() - begun < _SOON + 0.1 * program.deadline:
        time.sleep(0.02)
    after = f"{time.monotonic() - begun:.1f} s after its trainer was killed"
    if _lives(number):
        found.bad("trainer's death", f"it still runs {after}")
        os.killpg(number, signal.SIGKILL)
    else:
        found.good("trainer's death", f"it ended {after}")
    Rendezvous.own(LAYOUTS[program.layout].files).leave()  # removes what the dead left


def doomed() -> None:
    """Be the trainer that is killed, with its simulator's settings on the command line;
    tell the simulator's process."""
    play = SimulatorPlay(msgspec.json.decode(sys.argv[1], type=Program))
    play.answer()
    play.exchange(RESET)
    play.memory.hand_over(STEP)
    play.answer()
    play.process.unguard()  # it is to notice by itself
    print(play.process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _lives(number: int) -> bool:
    try:
        return bool(psutil.Process(number).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def hurries(program: Program, found: Findings, seconds: float, framing: Framing) -> None:
    """A trainer that closes out of turn."""
    watcher = _begin(program, Findings(), framing)
    with watcher.play as play:
        watcher.act()
        play.memory.hand_over(STEP)
        time.sleep(0.01)
        how = play.leaves()
        if how is None or play.crashed:
            found.bad("hasty close", f"it {how or 'did not end within 5 s'}{play.process.output()}")
        else:
            found.good("hasty close", f"it {how}")


def misleads(point: str, harm: Callable[[Watcher], bool]) -> Trial:
    """Return a trial in which the trainer does harm, and the simulator is to go on or to
    end with an error: neither to crash nor to hang."""

    def trial(program: Program, found: Findings, seconds: float, framing: Framing) -> None:
        watcher = _begin(program, Findings(), framing)
        with watcher.play:
            watcher.act()
            if not harm(watcher):
                return
            try:
                watcher.play.answer()
                watcher.look(b"")
                if watcher.found.point("numbers").verdict == "fail":
                    found.bad(
                        point, f"what it did not check comes back: {watcher.found.point('numbers').what}"
                    )
                else:
                    found.good(point, "it went on")
            except PeerLost as error:
                text = str(error)
                if watcher.play.crashed:
                    found.bad(point, text)
                else:
                    found.good(point, " … ".join(dict.fromkeys((text.split(". ")[0], text.splitlines()[-1]))))
            except TidemillError as error:
                found.bad(point, str(error))

    return trial


def _wrong_actions(watcher: Watcher) -> bool:
    acted = False
    for group, decisions, terminals, asks in watcher.rows.values():
        actions = group.spec.action_spec
        whole = complete(group, len(decisions), actions.zeros(len(decisions)))
        assert whole.continuous is not None and whole.discrete is not None
        if len(decisions) and (actions.continuous_size or actions.branches):
            acted = True
            whole.continuous[...] = np.nan
            whole.discrete[...] = 1_000_000_000
            write_actions(watcher.play.memory.data, group, whole, asks, len(decisions) + len(terminals))
    watcher.play.memory.hand_over(STEP)
    return acted


def _unknown_command(watcher: Watcher) -> bool:
    if watcher.play.layout.files == 1:
        watcher.play.memory.hand_over(77)
        return True
    return False


def _torn_channel(watcher: Watcher) -> bool:
    watcher.play.memory.put(b"\x01" * 16 + struct.pack("<i", 1_000_000) + b"torn")
    watcher.play.memory.hand_over(STEP)
    return True


def _wrong_lengths(watcher: Watcher) -> bool:
    layout, memory = watcher.play.layout, watcher.play.memory
    write_int(memory.data, layout.header_bytes if layout.files == 1 else 0, 2**31 - 1)
    memory.hand_over(STEP)
    return True


_ON_PURPOSE: dict[Trial, tuple[str, ...]] = {
    differs: ("start capacity", "deleting"),
    hurries: ("hasty close",),
    dies: ("trainer's death",),
    misleads("wrong actions", _wrong_actions): ("wrong actions",),
    misleads("unknown command", _unknown_command): ("unknown command",),
    misleads("torn side channel", _torn_channel): ("torn side channel",),
    misleads("wrong lengths", _wrong_lengths): ("wrong lengths",),
}
# plain play, which comes first, shows every point that no other trial does
TRIALS: dict[Trial, tuple[str, ...]] = {
    plays: tuple(name for name in POINTS if not any(name in points for points in _ON_PURPOSE.values())),
    **_ON_PURPOSE,
}
