"""Memory images read and written by the tables. Every length, count and offset in them is
checked before it is used."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from struct import Struct, unpack

from tidemill.bridge.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tidemill.bridge.protocol.tables import (
    LAYOUTS,
    NAME_BYTES,
    SHAPE_NUMBERS,
    SPEC_NUMBERS,
    MemoryLayout,
    places_of,
)
from tidemill.core.errors import ConfigError, ImageError

Memory = bytes | bytearray | mmap.mmap
_INT = Struct("<i")
read_int = _INT.unpack_from
write_int = _INT.pack_into
LARGEST = 2**31 - 1  # file, in bytes
LONGEST_NAME = NAME_BYTES - 1


@dataclass(frozen=True)
class GroupImage:
    """A group as it lies in memory: `places` has the offset of each field, `end` is the
    offset behind it."""

    name: str
    spec: BehaviorSpec
    symbols: Mapping[str, int]
    places: Mapping[str, int]
    end: int

    def observations(self, prefix: str) -> list[tuple[int, ObservationSpec]]:
        """Return where the rows of each observation begin, those of agents that ask
        (prefix "") or end ("ended_"), and what it is."""
        sizes = [4 * self.spec.max_agents * one.size for one in self.spec.observation_specs]
        starts = accumulate(sizes[:-1], initial=self.places[f"{prefix}obs"])
        return list(zip(starts, self.spec.observation_specs, strict=False))


def check_spec(layout: MemoryLayout, name: str, spec: BehaviorSpec) -> None:
    """Raise ConfigError where no group of that layout can be so."""
    actions = spec.action_spec
    what = f'world "{name}"'
    if not 0 < len(name) <= LONGEST_NAME or not name.isascii() or not name.isprintable():
        raise ConfigError(
            f"{what}: a name has 1 to {LONGEST_NAME} printable ASCII characters, this one has {len(name)}"
        )
    if spec.max_agents < 1:
        raise ConfigError(f"{what}: max_agents = {spec.max_agents} must be at least 1")
    for observation in spec.observation_specs:
        if not 1 <= len(observation.shape) <= SHAPE_NUMBERS or min(observation.shape) < 1:
            raise ConfigError(
                f"{what}: an observation's shape has one to three numbers from 1 up, not {observation.shape}"
            )
    if actions.continuous_size < 0 or any(size < 1 for size in actions.branches):
        raise ConfigError(
            f"{what}: {actions.continuous_size} continuous actions and branches of {actions.branches} "
            "actions cannot be"
        )
    if actions.continuous_size and actions.branches and not layout.hybrid:
        raise ConfigError(
            f"{what} has continuous actions and branches; layout {layout.name} takes one of them only, 0.3.2 "
            "takes both"
        )
    if group_bytes(layout, name, spec) > LARGEST:
        raise ConfigError(
            f"{what}: {spec.max_agents} agents do not fit a file of {LARGEST} bytes; lower max_agents, or "
            "make observations smaller"
        )


def symbols_of(name: str, spec: BehaviorSpec) -> dict[str, int]:
    """Return the values of the tables' symbols for a group."""
    actions = spec.action_spec
    return {
        "name_bytes": len(name),
        "M": spec.max_agents,
        "K": len(spec.observation_specs),
        "P": sum(observation.size for observation in spec.observation_specs),
        "c": actions.continuous_size,
        "nb": len(actions.branches),
        "B": sum(actions.branches),
        "a": len(actions.branches) or actions.continuous_size,
    }


def group_bytes(layout: MemoryLayout, name: str, spec: BehaviorSpec) -> int:
    """Return the size of a group."""
    return places_of(layout.group, symbols_of(name, spec))[1]


def write_group(
    layout: MemoryLayout, memory: bytearray | mmap.mmap, start: int, name: str, spec: BehaviorSpec
) -> GroupImage:
    """Write what a group is at `start`, where all is zero as yet."""
    check_spec(layout, name, spec)
    actions, observations = spec.action_spec, spec.observation_specs
    symbols = symbols_of(name, spec)
    text = name.encode("ascii")
    shapes = [[*o.shape, *[0] * (SHAPE_NUMBERS - len(o.shape))] for o in observations]
    properties = [[*o.properties, *[0] * (SHAPE_NUMBERS - len(o.properties)), o.kind] for o in observations]
    values: dict[str, bytes | int | list[int]] = {
        "name": text if layout.files == 2 else bytes([len(text)]) + text,
        "name_bytes": bytes([len(text)]),
        "max_agents": spec.max_agents,
        "continuous": bytes([not actions.branches]),
        "action_size": symbols["a"],
        "branches": list(actions.branches),
        "observations": len(observations),
        "shapes": [number for shape in shapes for number in shape],
        "observation_specs": [
            number for pair in zip(shapes, properties, strict=True) for part in pair for number in part
        ],
        "continuous_size": actions.continuous_size,
        "branch_count": len(actions.branches),
    }
    places, end = places_of(layout.group, symbols, start)
    for field, place in places.items():
        value = values.get(field)
        if isinstance(value, bytes):
            memory[place : place + len(value)] = value
        else:
            for i, number in enumerate([value] if isinstance(value, int) else value or ()):
                write_int(memory, place + 4 * i, number)
    return GroupImage(name, spec, symbols, places, end)


def read_group(layout: MemoryLayout, memory: Memory, start: int, limit: int) -> GroupImage:
    """Read the group at `start`, which must end at or before `limit`; ImageError where it
    cannot be one."""
    symbols: dict[str, int] = {}
    values: dict[str, tuple[int, ...]] = {}
    places: dict[str, int] = {}
    place = start
    for field in layout.group:
        size = field.bytes(symbols)
        if size > limit - place:
            raise ImageError(
                f'the group at byte {start} cannot be read by layout {layout.name}: its "{field.name}" would '
                f"be {size} bytes from byte {place} on, and the memory ends at {limit}. Do both sides use "
                "the same layout?"
            )
        places[field.name] = place
        if field in layout.spec:
            raw = memory[place : place + size]
            values[field.name] = tuple(raw) if field.kind == "u8" else unpack(f"<{size // 4}i", raw)
            try:
                _learn(field.name, values, symbols)
            except ValueError as error:
                raise ImageError(
                    f"the group at byte {start} cannot be read by layout {layout.name}: {error}. Do both "
                    "sides use the same layout?"
                ) from None
        place += size
    observations = _observations(values)
    spec = BehaviorSpec(observations, ActionSpec(symbols["c"], values["branches"]), symbols["M"])
    return GroupImage(_name(values["name"], layout), spec, symbols, places, place)


def _learn(name: str, values: Mapping[str, tuple[int, ...]], symbols: dict[str, int]) -> None:
    """Take from the field just read what the sizes of later ones depend on; ValueError
    where it cannot be."""
    value = values[name][0] if values[name] else 0
    match name:
        case "name_bytes":
            symbols["name_bytes"] = value
        case "max_agents":
            symbols["M"] = _at_least(1, name, value)
        case "action_size":
            continuous = bool(values["continuous"][0])
            symbols["a"] = _at_least(0, name, value)
            symbols["c"], symbols["nb"] = (value, 0) if continuous else (0, value)
        case "continuous_size":
            symbols["c"] = _at_least(0, name, value)
        case "branch_count":
            symbols["nb"] = _at_least(0, name, value)
        case "branches":
            symbols["B"] = sum(_at_least(1, "a branch size", size) for size in values[name])
        case "observations":
            symbols["K"] = _at_least(0, name, value)
        case "shapes" | "observation_specs":
            symbols["P"] = sum(observation.size for observation in _observations(values))


def _at_least(least: int, name: str, value: int) -> int:
    if value < least:
        raise ValueError(f"{name} = {value} must be at least {least}")
    return value


def _name(raw: tuple[int, ...], layout: MemoryLayout) -> str:
    text = bytes(raw) if layout.files == 2 else bytes(raw[1 : 1 + raw[0]])
    whole = layout.files == 2 or raw[0] == len(text)
    if (
        not whole
        or not 0 < len(text) <= LONGEST_NAME
        or not text.isascii()
        or not text.decode("ascii").isprintable()
    ):
        raise ImageError(
            f"a group's name {text[:80]!r} has not 1 to {LONGEST_NAME} printable ASCII characters. Do both "
            "sides use the same layout?"
        )
    return text.decode("ascii")


def _observations(values: Mapping[str, tuple[int, ...]]) -> tuple[ObservationSpec, ...]:
    if "observation_specs" in values:
        numbers, step = values["observation_specs"], SPEC_NUMBERS
    else:
        numbers, step = values["shapes"], SHAPE_NUMBERS
    found = []
    for i in range(0, len(numbers), step):
        sizes, rest = numbers[i : i + SHAPE_NUMBERS], numbers[i + SHAPE_NUMBERS : i + step]
        shape = tuple(size for size in sizes if size)
        if not shape or min(shape) < 0:
            raise ValueError(f"an observation's shape is {sizes}")
        found.append(ObservationSpec(shape, rest[:-1], rest[-1] if rest else 0))
    return tuple(found)


@dataclass(frozen=True)
class MemoryImage:
    """What memory holds at one moment.

    header, body: the fields of the header and of the side channel; `side_channel` are the
        data themselves
    groups: images of the groups, in their order
    end: offset behind the last group, in the file that holds them
    """

    layout: MemoryLayout
    header: Mapping[str, int]
    side_channel: bytes
    groups: tuple[GroupImage, ...]
    end: int


def read_header(layout: MemoryLayout, memory: Memory) -> dict[str, int]:
    """Read the header and check that it is one of this layout; ImageError otherwise."""
    if len(memory) < layout.header_bytes:
        raise ImageError(
            f"{len(memory)} bytes are too few for a header of layout {layout.name}, which has "
            f"{layout.header_bytes}"
        )
    header = {
        field.name: memory[place] if field.kind == "u8" else int(read_int(memory, place)[0])
        for field, place in zip(layout.header, layout.offsets.values(), strict=True)
    }
    version = tuple(
        header[name] for name in (("version",) if layout.files == 1 else ("major", "minor", "patch"))
    )
    if version != layout.version:
        raise ImageError(
            f"the memory is of version {_dotted(version)}, and layout {layout.name} was chosen; choose the "
            "layout that both sides know"
        )
    if layout.files == 2 and not header["capacity"] and not header["groups_bytes"]:
        # as the original trainer begins: its body has these four bytes, of which its
        # header does not tell
        header["capacity"] = 4
    if header["capacity"] < 4:
        raise ImageError(
            f"the side channel's capacity is {header['capacity']}, and 4 bytes of it are its length"
        )
    if layout.files == 1 and not layout.header_bytes + header["capacity"] + 4 <= header["file_bytes"] <= len(
        memory
    ):
        raise ImageError(
            f"the header says {header['file_bytes']} bytes with a side channel of {header['capacity']}; the "
            f"file has {len(memory)}"
        )
    if layout.files == 2 and (header["groups_bytes"] < 0 or header["body"] < 1):
        raise ImageError(
            f"the header says that body {header['body']} has groups of {header['groups_bytes']} bytes"
        )
    return header


def layout_of(memory: Memory) -> str:
    """Return the name of the layout that a first file is of."""
    for layout in LAYOUTS.values():
        place = layout.offsets["version" if layout.files == 1 else "major"]
        numbers = memory[place : place + 4 * len(layout.version)]
        same = (
            len(memory) >= layout.header_bytes
            and unpack(f"<{len(layout.version)}i", numbers) == layout.version
        )
        # a file of two begins with 0, the file of one with its length
        if same and (layout.files == 2 or read_int(memory, 0)[0]):
            return layout.name
    begin = bytes(memory[: min(len(memory), 12) & ~3])
    starts = ", ".join(map(str, unpack(f"<{len(begin) // 4}i", begin)))
    raise ImageError(
        f"the memory is of none of the layouts {', '.join(LAYOUTS)}: it has {len(memory)} bytes and begins "
        f"with {starts or 'nothing'}. Trainer and simulator must know one layout, of versions of Tidemill "
        "that fit"
    )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def groups_place(layout: MemoryLayout, header: Mapping[str, int]) -> int:
    """Return where the first group begins, in the file that holds them."""
    return layout.header_bytes + header["capacity"] + 4 if layout.files == 1 else header["capacity"]


def read_groups(layout: MemoryLayout, header: Mapping[str, int], body: Memory) -> tuple[GroupImage, ...]:
    """Read what all groups are, from the file that holds them."""
    place = groups_place(layout, header)
    groups: dict[str, GroupImage] = {}
    if layout.files == 1:
        limit, count = header["file_bytes"], int(read_int(body, place - 4)[0])
        if count < 0:
            raise ImageError(f"the memory says that it has {count} groups")
    else:
        limit, count = place + header["groups_bytes"], None
        if limit > len(body):
            raise ImageError(
                f"the header says {limit} bytes of side channel and groups, and the body file has {len(body)}"
            )
    while place < limit if count is None else len(groups) < count:
        group = read_group(layout, body, place, limit)
        if group.name in groups:
            raise ImageError(f'two groups are called "{group.name}"')
        groups[group.name] = group
        place = group.end
    return tuple(groups.values())


def read_side_channel(layout: MemoryLayout, header: Mapping[str, int], body: Memory) -> bytes:
    """Return the side channel's data."""
    place = layout.header_bytes if layout.files == 1 else 0
    if place + header["capacity"] > len(body):
        raise ImageError(f"a side channel of {header['capacity']} bytes does not fit a file of {len(body)}")
    length = int(read_int(body, place)[0])
    if not 0 <= length <= header["capacity"] - 4:
        raise ImageError(f"the side channel has {length} bytes, and room for {header['capacity'] - 4}")
    return bytes(body[place + 4 : place + 4 + length])


def read_image(layout: MemoryLayout, first: Memory, body: Memory | None = None) -> MemoryImage:
    """Read an image: the file (layout 0), or header and body file."""
    header = read_header(layout, first)
    rest = first if layout.files == 1 else body
    if rest is None:
        raise ImageError(f"layout {layout.name} has two files: the header, and a body")
    groups = read_groups(layout, header, rest)
    return MemoryImage(
        layout,
        header,
        read_side_channel(layout, header, rest),
        groups,
        groups[-1].end if groups else groups_place(layout, header),
    )
