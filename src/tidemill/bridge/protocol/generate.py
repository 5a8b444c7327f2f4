"""What is made from the tables: constants for C and C#, and the page about the memory.
`python -m tidemill.bridge.protocol.generate [--check]`."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tidemill.bridge.protocol.image import LONGEST_NAME
from tidemill.bridge.protocol.tables import (
    CHANGE_FILE,
    CLOSE,
    LAYOUTS,
    NAME_BYTES,
    RESET,
    SIMULATOR,
    STEP,
    SYMBOLS,
    TRAINER,
    MemoryLayout,
    TableField,
)

_BRIDGE = Path(__file__).parents[1]
HEADER = _BRIDGE / "native" / "tidemill.h"
CONSTANTS = _BRIDGE / "csharp" / "Runtime" / "Layout.cs"
PAGE = _BRIDGE.parents[2] / "docs" / "simulator-memory.md"
_BEGIN, _END = "/* BEGIN GENERATED */", "/* END GENERATED */"
_SAYS = "by `python -m tidemill.bridge.protocol.generate` from src/tidemill/bridge/protocol/tables.py"

# What the C and C# libraries call the fields, where that is not the table's name.
_CALLED = {
    "file_bytes": "file_length",
    "capacity": "side_capacity",
    "patch": "bug",
    "body": "body_number",
    "groups_bytes": "rl_bytes",
}
_CALLED_3 = {**_CALLED, "capacity": "side_bytes"}


def common_constants() -> list[tuple[str, int]]:
    """Constants of all layouts, by name in lower case with underscores."""
    commands = {"step": STEP, "reset": RESET, "change_file": CHANGE_FILE, "close": CLOSE}
    return [
        ("turn_trainer", TRAINER),
        ("turn_simulator", SIMULATOR),
        *((f"command_{name}", value) for name, value in commands.items()),
        ("name_size", NAME_BYTES),
        ("max_name", LONGEST_NAME),
    ]


def constants_0() -> list[tuple[str, int]]:
    """Offsets of layout 0."""
    layout = LAYOUTS["0"]
    base = layout.header_bytes
    offsets = [(_CALLED.get(name, name), place) for name, place in layout.offsets.items()]
    size = base + 8
    return [
        *offsets,
        ("side_base", base),
        ("side_length", base),
        ("side_data", base + 4),
        ("header_size", size),
        ("empty_size", size),
    ]


def constants_3() -> list[tuple[str, int]]:
    """Offsets of the headers of layouts 0.3.0 and 0.3.2."""
    older, newer = LAYOUTS["0.3.0"], LAYOUTS["0.3.2"]
    offsets = [(_CALLED_3.get(name, name), place) for name, place in newer.offsets.items()]
    return [*offsets, ("header_size_0", older.header_bytes), ("header_size_2", newer.header_bytes)]


def c_block() -> str:
    """The block of constants in the C header."""
    lines = [_BEGIN, f"/* {_SAYS} */"]
    for prefix, constants in (("TM_", common_constants()), ("TM0_", constants_0()), ("TM3_", constants_3())):
        lines += [f"#define {prefix}{name.upper()} {value}" for name, value in constants]
    lines += [
        f'#define TM_DIGEST_{name.replace(".", "_")} "{layout.digest}"' for name, layout in LAYOUTS.items()
    ]
    return "\n".join([*lines, _END])


def c_header(text: str) -> str:
    """The C header with the block as it should be."""
    start, end = text.index(_BEGIN), text.index(_END) + len(_END)
    return text[:start] + c_block() + text[end:]


def _pascal(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def cs_file() -> str:
    """The C# file of constants."""

    def constants(values: list[tuple[str, int]], indent: str) -> Iterator[str]:
        for name, value in values:
            called = {"TurnTrainer": "TrainerTurn", "TurnSimulator": "SimulatorTurn"}.get(
                _pascal(name), _pascal(name)
            )
            yield f"{indent}public const int {called} = {value};"

    digests = [
        f'        public const string Digest{name.replace(".", "")} = "{layout.digest}";'
        for name, layout in LAYOUTS.items()
    ]
    lines = [
        f"// Made {_SAYS}. Do not edit.",
        "namespace Tidemill",
        "{",
        "    internal static class Layout",
        "    {",
        *constants(common_constants(), " " * 8),
        *digests,
    ]
    for name, values in (("V0", constants_0()), ("V3", constants_3())):
        lines += [
            "",
            f"        internal static class {name}",
            "        {",
            *constants(values, " " * 12),
            "        }",
        ]
    return "\n".join([*lines, "    }", "}", ""])


_TURNS = """\
## Taking turns

The trainer makes the files and passes `--memory-path` to the simulator: the full path of the first file
(layout 0), or its name in `ml-agents` in the temporary directory (layouts 0.3). An editor that is open
already looks for `ml-agents/default` there. The layout is seen from the file: layouts 0.3 begin with a 0,
layout 0 with its length.

* **Hand over**: write the data, then the command, then the turn (release order), then wake (`FUTEX_WAKE`,
  shared, not private) whoever sleeps on the four bytes. In layout 0 the turn is the byte `turn`, and the
  simulator hands back with command 0. In layouts 0.3 each side has a byte: a side writes 1 to its own, and 0
  to the other's last; the trainer sets `reset` or `query` before.
* **Wait**: spin briefly where that mostly pays, then sleep (`FUTEX_WAIT`) with the word as it was read. A
  peer that never woke anybody is waited for in naps of 50 µs to 1 ms.
* **First turn**: the trainer's first command is a step, without side-channel data. A simulator may answer it
  with data, or with no group at all, and then answer the reset that follows. New groups may come with any
  later answer.
* **Room**: what does not fit needs a new file, larger, with one underscore more in its name (layouts 0.3: a
  new body). In layout 0 the side that makes it copies all, sets the command to change file and hands over *in
  the old file*, and goes on with the new one, where it still has the turn; the other side opens the new file
  and deletes the old one. A side channel of length L becomes one of capacity 2·L + 20. File names end at 255
  characters, and so do changes.
* **Close**: either side; the one that has not closed deletes the files, but a trainer with a companion file
  (below) deletes them itself.

What peers of other makes need, and what ours do, the trainer and the Worlds in Python, C and C# (`tidemill
simulator check` looks at it):

* **Start capacity**: the trainer begins with 4 in layout 0 and with 20 in layouts 0.3, where the original
  simulator dies of 4 at its first answer. Every World takes any capacity from 4 on, and in layouts 0.3 a
  header that says 0, as the original trainer writes it: its body has 4 bytes.
* **Changes in one turn**: the trainer makes one at most, and follows any number. In layouts 0.3 every World
  makes one body at most, for all groups that are new and for the side channel, since the original trainer
  dies of a second one; in layout 0 each new group is one change.
* **Close**: whoever closes leaves the files to the other side. (To a simulator of another make that it has
  not started, the trainer leaves them for 2 s.) Where the other side has closed or died, every end deletes
  them; a World only those of a trainer without a companion file, and those in a dead trainer's own folder.

## Companion files

Beside the first file PATH (its first name, whatever it grew to) peers of this kind keep `PATH.trainer` and
`PATH.simulator`. Each holds its owner's process id in ASCII and a line feed, written once its owner holds a
lock (`flock`, exclusive) on it for as long as it lives. Who waits tries a shared lock on the other's file
about five times a second: getting it means that the other side is dead, however it died. Peers of other makes
ignore both; a trainer without one is dead when the simulator's parent process has changed.
"""


def page() -> str:
    """The page about the memory."""
    lines = [
        "# Memory of the simulator bridge",
        "",
        f"Made {_SAYS}; do not edit.",
        "What the two sides do with it: [simulators.md](simulators.md).",
        "",
        "Everything is little-endian and packed, without any alignment. Each side writes while it has the "
        "turn. In counts and sizes:",
        "",
        *(f"* **{symbol}**: {about}" for symbol, about in SYMBOLS.items()),
    ]
    for layout in LAYOUTS.values():
        lines += ["", *_layout_page(layout)]
    return "\n".join([*lines, "", _TURNS])


def _layout_page(layout: MemoryLayout) -> Iterator[str]:
    where = "one file" if layout.files == 1 else "a header file and a body file"
    yield f"## Layout {layout.name}"
    yield ""
    yield (
        f"Version digest `{layout.digest}`. Lies in {where}; both sides may sleep on the four bytes at "
        f"offset {layout.word}."
    )
    tables = [
        ("Header", layout.header, 0),
        (
            "Side channel, " + ("behind the header" if layout.files == 1 else "at the start of the body"),
            layout.side_channel,
            None,
        ),
        ("A group", layout.spec, None),
        ("… its rows" if layout.files == 1 else "… agents that ask for a decision", layout.agents, None),
        ("… agents whose episode is over", layout.terminations, None),
        ("… actions", layout.actions, None),
    ]
    for title, fields, start in tables:
        if fields:
            yield ""
            yield from _table(title, fields, start)


def _table(title: str, fields: Sequence[TableField], start: int | None) -> Iterator[str]:
    offset = start
    yield f"**{title}**"
    yield ""
    yield "| offset | type | count | field | |" if start is not None else "| type | count | field | |"
    yield "|---|---|---|---|---|" if start is not None else "|---|---|---|---|"
    for field in fields:
        kind = "f32 or i32" if field.kind == "word" else field.kind
        about = field.about + (f"; {field.start} at the start" if field.start else "")
        place = f"| {offset} " if offset is not None else ""
        yield (
            f"{place}| {kind} | {field.count.replace('*', '·').replace('-', ' − ')} | `{field.name}` | "
            f"{about.lstrip('; ')} |"
        )
        if offset is not None:
            offset += field.bytes({})


def outdated() -> dict[Path, str]:
    """Return what should stand in the files that say something else now."""
    wanted = {HEADER: c_header(HEADER.read_text()), CONSTANTS: cs_file(), PAGE: page()}
    return {path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text}


def main(arguments: Sequence[str]) -> int:
    """Write what is outdated, or with `--check` only name it and return 1."""
    found = outdated()
    for path, text in found.items():
        print(f"{path} {'differs from the tables' if '--check' in arguments else 'written'}")
        if "--check" not in arguments:
            path.write_text(text)
    return 1 if found and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
