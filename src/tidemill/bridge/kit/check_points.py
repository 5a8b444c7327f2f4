"""The points of the conformance kit: what is asked of a simulator, and what was found."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from tidemill.bridge.kit.trial_trainer import Program, SimulatorPlay
from tidemill.bridge.protocol.image import read_header, read_int
from tidemill.bridge.protocol.side_channels import Framing
from tidemill.bridge.protocol.tables import CHANGE_FILE, CLOSE
from tidemill.core.errors import ConfigError, ImageError, TidemillError

Verdict = Literal["pass", "fail", "not seen"]

# Every point: what a simulator is expected to do, and what to do where it does not.
POINTS = {
    "start": (
        "it joins and answers the first command",
        "open the file named by --memory-path, wait for the turn, answer with the command step (0) and the "
        "turn byte",
    ),
    "groups": (
        "it has groups of agents, and what they are can be read",
        "write a group's name, sizes and shapes as docs/simulator-memory.md has them, before or after the "
        "first reset",
    ),
    "steps": ("it answers step after step", "answer every hand-over; a deadline is set by --deadline"),
    "commands": (
        "it hands back with the command step, and clears the flags that it has read",
        "write the command 0 before the turn byte (layout 0); clear reset and query (layout 0.3)",
    ),
    "turns": (
        "it writes nothing while it is the trainer's turn",
        "write the data first, then the command, then the turn; then wait",
    ),
    "patience": (
        "a trainer may think for a while",
        "wait for the trainer as long as it lives, without a limit of time",
    ),
    "sleep": (
        "it leaves the core while the trainer thinks",
        "spin for less than a millisecond, then sleep: on the futex, or in naps of 50 µs to 1 ms",
    ),
    "agents": (
        "rows are as many as there is room for, and an agent has one",
        "make max_agents larger; ask once per agent and exchange",
    ),
    "varying agents": (
        "the agents that ask vary, and only those that asked end",
        "keep an agent's id from its first decision to its end",
    ),
    "whole rows": (
        "every row is written whole: rewards, observations and masks of the step before do not stay",
        "write every field of a row in every exchange, or clear rows before filling them",
    ),
    "numbers": (
        "observations and rewards are finite",
        "find where the simulator divides by zero or overflows",
    ),
    "masks": (
        "forbidden actions leave a choice in every branch",
        "leave at least one action of each branch free (0), and write 0 or 1",
    ),
    "ends": ("episodes end", "write done as 0 or 1"),
    "interruptions": (
        "episodes are interrupted",
        "write max_step (interrupted) as 0 or 1, and 1 only for agents that are done",
    ),
    "reset": (
        "a reset is answered, also amid episodes and twice in a row, and drops what was asked before",
        "drop all pending requests at a reset, begin anew, and ask for decisions again",
    ),
    "late groups": (
        "groups that appear later leave those before as they were",
        "add groups behind the others, and never change or remove one",
    ),
    "growth": (
        "where room is short it goes on in a larger file",
        "make PATH_ (the next body), copy, set the command on the old file, and go on in the new one",
    ),
    "one change": (
        "it changes the body at most once in a turn (layouts 0.3)",
        "make one body for all groups that are new in a turn, and for its side-channel data: the original "
        "trainer dies of a second one",
    ),
    "trainer's growth": (
        "it follows a trainer that goes on in a larger file",
        "at the command change file (a new body number), open the file that is one underscore longer, read "
        "offsets anew, delete the old file",
    ),
    "side channel": (
        "what it sends by side channels can be read",
        "write key, length and so many bytes per message, in the framing of --framing",
    ),
    "unknown channel": (
        "messages for channels that it does not know are skipped",
        "skip as many bytes as the message has",
    ),
    "query": (
        "side channels are exchanged without a step (layout 0.3.2)",
        "at a query answer the side channel alone; leave the rows as they are",
    ),
    "close": (
        "at the trainer's close it ends by itself, with exit code 0",
        "leave the loop at the command close (closed = 1) and quit",
    ),
    "start capacity": (
        "it plays with a side channel of whatever capacity the trainer begins with",
        "take the capacity from the header: any from 4 on; in layouts 0.3 a 0, as the original trainer "
        "writes it, means the 4 of its body",
    ),
    "deleting": (
        "at the close of a trainer of another make it deletes the memory's files",
        "at the trainer's close remove the files, unless PATH.trainer is there: the side that has not closed "
        "deletes",
    ),
    "hasty close": (
        "a trainer that closes while the simulator thinks is noticed, too",
        "look for the command close (closed = 1) before and after handing over, and quit",
    ),
    "trainer's death": (
        "it notices the trainer's death and ends",
        "while waiting look every 0.2 s whether the trainer's process lives (its lock, or the parent "
        "process)",
    ),
    "wrong actions": (
        "actions that are not finite, or outside their branch, are refused or survived",
        "check actions before using them as numbers or indices",
    ),
    "unknown command": (
        "a command that it does not know is refused or survived (layout 0)",
        "check the command byte; end with an error",
    ),
    "torn side channel": (
        "side-channel bytes that are torn are refused or survived",
        "check each length against the bytes that are left",
    ),
    "wrong lengths": (
        "a length beyond the file is refused or survived",
        "check every length and offset against the file before reading",
    ),
}


@dataclass(frozen=True)
class Point:
    """What was found at one point. `what` is the cause where it fails; `cure` is empty
    where it does not."""

    name: str
    verdict: Verdict
    what: str
    cure: str = ""


class SimulatorUnplayable(Exception):
    """The simulator cannot be played any further."""


class Findings:
    """What was seen so far."""

    def __init__(self) -> None:
        self._good: dict[str, str] = {}
        self._bad: dict[str, str] = {}

    def good(self, name: str, what: str) -> None:
        """A point was seen, and all was well."""
        self._good[name] = what

    def bad(self, name: str, what: str) -> None:
        """A point was violated; the first violation counts."""
        self._bad.setdefault(name, what)

    def point(self, name: str) -> Point:
        """Return what is known of a point."""
        about, cure = POINTS[name]
        if name in self._bad:
            return Point(name, "fail", self._bad[name], cure)
        return Point(name, "pass", self._good[name]) if name in self._good else Point(name, "not seen", about)

    @contextmanager
    def during(self, name: str, play: SimulatorPlay | None = None) -> Iterator[None]:
        """Blame what goes wrong on a point, or on another one where the memory tells
        more; `SimulatorUnplayable` afterwards."""
        try:
            yield
        except ConfigError:
            raise
        except TidemillError as error:
            self.bad(
                _blamed(play, name) if play is not None and isinstance(error, ImageError) else name,
                str(error),
            )
            raise SimulatorUnplayable from None


def _blamed(play: SimulatorPlay, name: str) -> str:
    """Return the point at which an image that cannot be is to be seen."""
    memory, layout = play.memory, play.layout
    if memory.data.closed:
        return "growth"
    if layout.files == 1:
        command = memory.data[layout.offsets["command"]]
        if command > CLOSE:
            return "commands"
        if command == CHANGE_FILE or play.changed_in_place:
            return "growth"
    try:
        capacity = read_header(layout, play.memory.path.read_bytes())["capacity"]
    except ImageError:  # of another version, say
        return name
    if not 0 <= read_int(memory.data, layout.header_bytes if layout.files == 1 else 0)[0] <= capacity - 4:
        return "side channel"
    return "groups"


Trial = Callable[[Program, Findings, float, Framing], None]
