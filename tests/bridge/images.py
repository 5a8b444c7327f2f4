"""Valid memory images, made by the writer without any file."""

import numpy as np

from tidemill.bridge.protocol.image import group_bytes, write_group, write_int
from tidemill.bridge.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tidemill.bridge.protocol.tables import LAYOUTS
from tidemill.bridge.world_side.requests import WorldRequests


def spec_of(observations, continuous=0, branches=(), agents=10):
    return BehaviorSpec(
        tuple(ObservationSpec(tuple(shape)) for shape in observations),
        ActionSpec(continuous, tuple(branches)),
        agents,
    )


def image_of(layout_name, groups, side_channel=b"", capacity=None, rows=0):
    """Return (first file, body or None) that hold these groups ({name: spec}), with
    `rows` rows each, every third one ended."""
    layout = LAYOUTS[layout_name]
    capacity = capacity or 4 + len(side_channel)
    first = bytearray(layout.header_bytes)
    place = 0
    for field in layout.header:
        if field.kind == "u8":
            first[place] = field.start
        else:
            write_int(first, place, field.start)
        place += field.bytes({})
    total = sum(group_bytes(layout, name, spec) for name, spec in groups.items())
    write_int(first, layout.offsets["capacity"], capacity)
    if layout.files == 1:
        data = first + bytearray(capacity + 4 + total)
        write_int(data, 0, len(data))
        write_int(data, layout.header_bytes + capacity, len(groups))
        channel = layout.header_bytes
        place = channel + capacity + 4
    else:
        write_int(first, layout.offsets["groups_bytes"], total)
        data = bytearray(capacity + total)
        channel, place = 0, capacity
    write_int(data, channel, len(side_channel))
    data[channel + 4 : channel + 4 + len(side_channel)] = side_channel
    for name, spec in groups.items():
        group = write_group(layout, data, place, name, spec)
        place = group.end
        requests = WorldRequests(name, spec)
        for i in range(rows):
            into = requests.ends if i % 3 == 2 else requests.asks
            row = requests.take(100 + i, into)
            into.cut[row] = i % 6 == 5
            into.reward[row] = i
            for k, array in enumerate(into.obs):
                array[row] = 10 * i + k
            into.masks[row, ::2] = 1
        requests.write(layout, data, group)
    return (bytes(data), None) if layout.files == 1 else (bytes(first), bytes(data))


def rows_of(spec, rows):
    """What `image_of` wrote: ids of those that ask, of those that ended."""
    every = np.arange(100, 100 + rows)
    return every[np.arange(rows) % 3 != 2], every[np.arange(rows) % 3 == 2]
