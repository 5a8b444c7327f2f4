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
_BEGIN, _END = "BEGIN GENERATED", "END GENERATED"
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
    lines = [f"/* {_SAYS} */"]
    for prefix, constants in (("TM_", common_constants()), ("TM0_", constants_0()), ("TM3_", constants_3())):
        lines += [f"#define {prefix}{name.upper()} {value}" for name, value in constants]
    lines += [
        f'#define TM_DIGEST_{name.replace(".", "_")} "{layout.digest}"' for name, layout in LAYOUTS.items()
    ]
    return "\n".join(lines)


def renewed(path: Path, block: str) -> str:
    """The text of a file with `block` as what stands between its two marked lines."""
    before, begin, rest = path.read_text().partition(_BEGIN)
    old, end, after = rest.partition(_END)
    first, *_, last = old.split("\n")  # what closes and opens the comments of the marks
    return "".join((before, begin, f"{first}\n{block}\n{last}", end, after))


def _pascal(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def cs_block() -> str:
    """The constants in the C# file."""

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
    lines = [*constants(common_constants(), " " * 8), *digests]
    for name, values in (("V0", constants_0()), ("V3", constants_3())):
        lines += [
            "",
            f"        internal static class {name}",
            "        {",
            *constants(values, " " * 12),
            "        }",
        ]
    return "\n".join(lines)


def page_tables() -> str:
    """The tables of the page about the memory."""
    lines = [f"* **{symbol}**: {about}" for symbol, about in SYMBOLS.items()]
    for layout in LAYOUTS.values():
        lines += ["", *_layout_page(layout)]
    return "\n".join(lines)


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
    blocks = {HEADER: c_block(), CONSTANTS: cs_block(), PAGE: page_tables()}
    wanted = {path: renewed(path, block) for path, block in blocks.items()}
    return {path: text for path, text in wanted.items() if path.read_text() != text}


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
