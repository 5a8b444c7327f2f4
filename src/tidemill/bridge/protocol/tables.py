"""The memory layouts as tables: one `TableField` per field, in the order in which they
lie in memory.

Everything that knows a layout takes it from here: the reader and the writer (`image`),
the constants of the C and C# libraries, the page docs/simulator-memory.md and the digests
(`generate`). Everything is little-endian and packed, so that nothing is aligned but by
chance.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["u8", "i32", "f32", "word"]
# word: f32 of continuous, i32 of discrete actions
SIZES: dict[Kind, int] = {"u8": 1, "i32": 4, "f32": 4, "word": 4}

# What counts may refer to: values of fields read before.
SYMBOLS = {
    "C": "capacity of the side channel in bytes, with the 4 bytes of its length",
    "M": "max_agents",
    "K": "number of observations",
    "P": "floats of one agent's observations: the sum over observations of the product of the shape's "
    "numbers above 0",
    "c": "continuous actions of an agent",
    "nb": "number of branches",
    "B": "sum of the branch sizes",
    "a": "action_size",
}


@dataclass(frozen=True)
class TableField:
    """A field: `count` items of `kind`. A count is a product of numbers and `SYMBOLS`;
    "C-4" alone is a difference."""

    name: str
    kind: Kind
    count: str = "1"
    about: str = ""
    start: int = 0  # its value in a new file

    def items(self, symbols: dict[str, int]) -> int:
        """Return how many items it has where the symbols have these values."""
        if self.count == "C-4":
            return symbols["C"] - 4
        product = 1
        for factor in self.count.split("*"):
            product *= int(factor) if factor.isdigit() else symbols[factor]
        return product

    def bytes(self, symbols: dict[str, int]) -> int:
        """Return its size in bytes."""
        return SIZES[self.kind] * self.items(symbols)


def places_of(
    fields: Sequence[TableField], symbols: dict[str, int], start: int = 0
) -> tuple[dict[str, int], int]:
    """Return where each field lies, one behind the other from `start` on, by name, and
    the place behind the last."""
    found = {}
    for field in fields:
        found[field.name] = start
        start += field.bytes(symbols)
    return found, start


@dataclass(frozen=True)
class MemoryLayout:
    """A layout. `header` lies at the start of the first file; `side_channel`, and then
    the groups, follow it or lie in a file of their own.

    files: 1: everything in one file that CHANGE FILE replaces; 2: a header that stays,
        and a body that is replaced
    word: offset of the aligned four bytes with the turn, on which both sides sleep
    spec: what a group is; `agents` (decisions, or all rows), `terminations` and `actions`
        follow it
    hybrid: whether a group may have continuous and discrete actions at once
    """

    name: str
    files: int
    version: tuple[int, ...]
    word: int
    header: tuple[TableField, ...]
    side_channel: tuple[TableField, ...]
    spec: tuple[TableField, ...]
    agents: tuple[TableField, ...]
    terminations: tuple[TableField, ...]
    actions: tuple[TableField, ...]
    hybrid: bool = False

    @property
    def group(self) -> tuple[TableField, ...]:
        """All fields of a group."""
        return self.spec + self.agents + self.terminations + self.actions

    @cached_property
    def header_bytes(self) -> int:
        """Size of the header."""
        return places_of(self.header, {})[1]

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where the fields of the header lie, by name."""
        return places_of(self.header, {})[0]

    @property
    def queries(self) -> bool:
        """Whether side channels may be exchanged without a step."""
        return "query" in self.offsets

    @property
    def digest(self) -> str:
        """Return eight hexadecimal digits that change when what lies in memory does.
        Descriptions do not count."""
        rows = [(self.name, self.files, self.version, self.word, self.hybrid)]
        parts = [self.header, self.side_channel, self.spec, self.agents, self.terminations, self.actions]
        fields = [[(f.name, f.kind, f.count, f.start) for f in part] for part in parts]
        return hashlib.sha256(repr((rows, fields)).encode()).hexdigest()[:8]


NAME_BYTES = 64  # of a name in layout 0: a length byte and at most 63 characters
SHAPE_NUMBERS = 3
SPEC_NUMBERS = 7  # of an observation in layout 0.3.2: shape, a property per dimension, type

STEP, RESET, CHANGE_FILE, CLOSE = range(4)
COMMANDS = ("step", "reset", "change_file", "close")
QUERY = 4  # no command of layout 0: a flag of layout 0.3.2
TRAINER, SIMULATOR = 0, 1  # the turn byte of layout 0: whose turn it is

_SIDE_CHANNEL = (
    TableField("side_channel_bytes", "i32", about="bytes of side-channel data now"),
    TableField("side_channel", "u8", "C-4", "side-channel data"),
)
_MASKS = TableField("masks", "u8", "M*B", "1: forbidden; a row per agent, branches side by side")
_ROWS = (
    TableField("obs", "f32", "M*P", "a block per observation, one after another, each of M rows in C order"),
    TableField("reward", "f32", "M", "since the agent's last decision"),
)

_LAYOUT_0 = MemoryLayout(
    name="0",
    files=1,
    version=(0,),
    word=8,
    header=(
        TableField("file_bytes", "i32", about="length of the file; written when a file is made", start=22),
        TableField("version", "i32", about="of the layout"),
        TableField("turn", "u8", about="1: the simulator's, 0: the trainer's"),
        TableField("command", "u8", about="0 step, 1 reset, 2 change file, 3 close"),
        TableField("capacity", "i32", about="C", start=4),
    ),
    side_channel=(
        *_SIDE_CHANNEL,
        TableField("groups", "i32", about="number of groups, which follow back to back"),
    ),
    spec=(
        TableField("name", "u8", "64", "length (at most 63), ASCII characters, zeros"),
        TableField("max_agents", "i32", about="M"),
        TableField("continuous", "u8", about="1 continuous, 0 discrete actions"),
        TableField("action_size", "i32", about="a: number of continuous actions, or of branches"),
        TableField("branches", "i32", "nb", "branch sizes; none with continuous actions"),
        TableField("observations", "i32", about="K"),
        TableField("shapes", "i32", "K*3", "three numbers each; 0: no such dimension"),
    ),
    agents=(
        TableField("agents", "i32", about="rows 0 to agents − 1 of what follows mean something, at most M"),
        *_ROWS,
        TableField("done", "u8", "M", "the episode ended"),
        TableField("max_step", "u8", "M", "and was interrupted; such rows are done, too"),
        TableField("agent_id", "i32", "M"),
        _MASKS,
    ),
    terminations=(),
    actions=(TableField("actions", "word", "M*a", "a row per agent; the trainer writes them"),),
)

_HEADER_3 = (
    TableField("major", "i32"),
    TableField("minor", "i32", start=3),
    TableField("patch", "i32"),
    TableField("simulator_blocked", "u8", about="the simulator waits"),
    TableField("trainer_blocked", "u8", about="the trainer waits"),
    TableField("reset", "u8", about="the trainer asks for a reset; the simulator clears it"),
    TableField("closed", "u8", about="either side has closed"),
    TableField(
        "body", "i32", about="number of the body file: the header's name and as many underscores", start=1
    ),
    TableField("capacity", "i32", about="C", start=20),
    TableField("groups_bytes", "i32", about="bytes of the groups, which end where these are used up"),
)
_NAME_3 = (
    TableField("name_bytes", "u8", about="length of the name"),
    TableField("name", "u8", "name_bytes", "ASCII characters"),
)
_DECISIONS = (
    TableField("agents", "i32", about="agents that ask for a decision, at most M"),
    *_ROWS,
    TableField("agent_id", "i32", "M"),
    _MASKS,
)
_TERMINATIONS = (
    TableField("ended", "i32", about="agents whose episode ended, at most M"),
    TableField("ended_obs", "f32", "M*P", "as above"),
    TableField("ended_reward", "f32", "M"),
    TableField("interrupted", "u8", "M", "1: interrupted, 0: ended"),
    TableField("ended_id", "i32", "M"),
)

_LAYOUT_3_0 = MemoryLayout(
    name="0.3.0",
    files=2,
    version=(0, 3, 0),
    word=12,
    header=_HEADER_3,
    side_channel=_SIDE_CHANNEL,
    spec=(*_NAME_3, *_LAYOUT_0.spec[1:]),
    agents=_DECISIONS,
    terminations=_TERMINATIONS,
    actions=_LAYOUT_0.actions,
)

_LAYOUT_3_2 = MemoryLayout(
    name="0.3.2",
    files=2,
    version=(0, 3, 2),
    word=12,
    header=(
        *_HEADER_3[:2],
        TableField("patch", "i32", start=2),
        *_HEADER_3[3:],
        TableField("query", "u8", about="exchange side channels without a step; the simulator clears it"),
    ),
    side_channel=_SIDE_CHANNEL,
    spec=(
        *_NAME_3,
        TableField("max_agents", "i32", about="M"),
        TableField("observations", "i32", about="K"),
        TableField(
            "observation_specs",
            "i32",
            "K*7",
            "each: shape (3; 0: no such dimension), a property of each dimension (3), type (1)",
        ),
        TableField("continuous_size", "i32", about="c"),
        TableField("branch_count", "i32", about="nb"),
        TableField("branches", "i32", "nb", "branch sizes"),
    ),
    agents=_DECISIONS,
    terminations=_TERMINATIONS,
    actions=(
        TableField("continuous_actions", "f32", "M*c", "a row per agent; the trainer writes them"),
        TableField("discrete_actions", "i32", "M*nb", "likewise"),
    ),
    hybrid=True,
)

LAYOUTS = {layout.name: layout for layout in (_LAYOUT_0, _LAYOUT_3_0, _LAYOUT_3_2)}
