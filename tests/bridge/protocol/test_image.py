"""Images of every layout: their sizes, that they are read as they were written, and that
what cannot be is told and not followed."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bridge.images import image_of, rows_of, spec_of

from tidemill.bridge.protocol.image import check_spec, group_bytes, layout_of, read_image
from tidemill.bridge.protocol.tables import LAYOUTS
from tidemill.bridge.trainer_side.steps import StepReader
from tidemill.core.errors import ConfigError, EnvironmentFault, ImageError

SEVERAL = {
    "first": spec_of([(2,), (3, 2)], branches=(3, 2), agents=7),
    "second": spec_of([(4,)], continuous=2, agents=5),
}


def read_all(layout, first, body):
    """Read all there is, as a trainer and a viewer do."""
    image = read_image(layout, first, body)
    data = first if body is None else body
    return image, [StepReader(layout, group).read(data) for group in image.groups]


def test_sizes_are_those_that_the_layout_promises():
    zero = LAYOUTS["0"]
    sizes = [
        group_bytes(zero, "a", spec_of([(4,)], continuous=2)),
        group_bytes(zero, "a", spec_of([(9,)], branches=(3, 2))),
        group_bytes(zero, "a", spec_of([(2,), (3,)], continuous=2)),
    ]
    assert sizes == [433, 691, 485]
    assert len(image_of("0", {})[0]) == 22
    assert len(image_of("0", {"a": spec_of([(4,)], continuous=2)}, capacity=20)[0]) == 471
    assert [LAYOUTS[name].header_bytes for name in ("0.3.0", "0.3.2")] == [28, 29]


def test_a_new_file_of_layout_0_is_what_others_begin_with():
    assert image_of("0", {})[0] == struct.pack("<iiBBiii", 22, 0, 0, 0, 4, 0, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_read_as_they_were_written(layout):
    first, body = image_of(layout, SEVERAL, side_channel=b"hello", rows=5)
    image, steps = read_all(LAYOUTS[layout], first, body)
    assert layout_of(first) == layout
    assert image.side_channel == b"hello"
    assert {group.name: (group.spec.max_agents, group.spec.action_spec) for group in image.groups} == {
        name: (spec.max_agents, spec.action_spec) for name, spec in SEVERAL.items()
    }
    for group, (decisions, terminals, _) in zip(image.groups, steps, strict=True):
        asking, ended = rows_of(group.spec, 5)
        assert (
            decisions.agent_id.tolist() == asking.tolist() and terminals.agent_id.tolist() == ended.tolist()
        )
        assert (
            decisions.reward.tolist() == (asking - 100).tolist()
            and terminals.reward.tolist() == (ended - 100).tolist()
        )
        for k, spec in enumerate(group.spec.observation_specs):
            assert decisions.obs[k].shape == (len(asking), *spec.shape)
            assert (decisions.obs[k] == (10 * (asking - 100) + k).reshape(-1, *[1] * len(spec.shape))).all()
        assert terminals.interrupted.tolist() == [False] * len(ended)
        if group.name == "first":
            assert [mask[0].tolist() for mask in decisions.action_mask] == [
                [True, False, True],
                [False, True],
            ]


SHAPES = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), max_size=3)


@settings(max_examples=60)
@given(st.data())
def test_any_group_is_read_as_it_was_written(data):
    layout = LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)))]
    branches = data.draw(st.lists(st.integers(1, 4), max_size=3))
    continuous = data.draw(st.integers(0, 3)) if layout.hybrid or not branches else 0
    names = data.draw(st.lists(st.text("abc XYZ?09", min_size=1, max_size=63), max_size=3, unique=True))
    groups = {
        name: spec_of(data.draw(SHAPES), continuous, branches, data.draw(st.integers(1, 6))) for name in names
    }
    image, _ = read_all(layout, *image_of(layout.name, groups, data.draw(st.binary(max_size=40))))
    assert [group.name for group in image.groups] == names
    for group in image.groups:
        assert (
            group.spec.action_spec == groups[group.name].action_spec
            and group.spec.max_agents == groups[group.name].max_agents
        )
        assert [spec.shape for spec in group.spec.observation_specs] == [
            spec.shape for spec in groups[group.name].observation_specs
        ]


def in_bounds(read):
    """Run it: it either answers or raises a typed error."""
    try:
        read()
    except (ImageError, EnvironmentFault):
        return False
    return True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_a_flipped_byte_is_read_or_refused_by_a_typed_error(layout, flip):
    files = [part for part in image_of(layout, SEVERAL, side_channel=b"hello", rows=4) if part is not None]
    refused = 0
    for which, part in enumerate(files):
        for i in range(len(part)):
            changed = [bytearray(other) for other in files]
            changed[which][i] ^= flip
            refused += not in_bounds(
                lambda changed=changed: read_all(
                    LAYOUTS[layout], bytes(changed[0]), bytes(changed[1]) if len(changed) > 1 else None
                )
            )
    assert refused > 40


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_truncated_image_is_refused(layout):
    first, body = image_of(layout, SEVERAL, side_channel=b"hello", rows=4)
    for length in range(len(first)):
        assert not in_bounds(lambda n=length: read_all(LAYOUTS[layout], first[:n], body))
    for length in range(len(body or b"")):
        assert not in_bounds(lambda n=length: read_all(LAYOUTS[layout], first, body[:n]))


HOSTILE = [-(2**31), -1, 0, 1, 63, 64, 255, 65536, 2**24, 2**30, 2**31 - 1]


@settings(max_examples=200)
@given(st.sampled_from(sorted(LAYOUTS)), st.data())
def test_hostile_lengths_and_counts_end_in_a_typed_error(layout, data):
    files = [
        bytearray(part)
        for part in image_of(layout, SEVERAL, side_channel=b"hello", rows=4)
        if part is not None
    ]
    for _ in range(data.draw(st.integers(1, 3))):
        part = data.draw(st.sampled_from(files))
        struct.pack_into(
            "<i", part, data.draw(st.integers(0, len(part) - 4)), data.draw(st.sampled_from(HOSTILE))
        )
    in_bounds(lambda: read_all(LAYOUTS[layout], bytes(files[0]), bytes(files[1]) if len(files) > 1 else None))


@settings(max_examples=200)
@given(st.sampled_from(sorted(LAYOUTS)), st.binary(max_size=300), st.binary(max_size=300))
def test_any_bytes_end_in_a_typed_error(layout, first, body):
    in_bounds(lambda: read_all(LAYOUTS[layout], first, body))


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (18 + 4, -5, "-5 groups"),
        (26 + 64, 0, "max_agents = 0"),
        (26 + 69, -1, "action_size = -1"),
        (26 + 73, -7, "a branch size = -7"),
        (4, 3, "version"),
    ],
)
def test_what_cannot_be_is_named(place, value, says):
    image = bytearray(image_of("0", {"x": spec_of([(2,)], branches=(2,))}, capacity=8)[0])
    struct.pack_into("<i", image, place, value)
    with pytest.raises(ImageError, match=says):
        read_all(LAYOUTS["0"], bytes(image), None)


def test_more_agents_than_there_is_room_for_are_refused_by_name():
    image, _ = image_of("0", {"x": spec_of([(2,)], continuous=1, agents=3)}, rows=3)
    group = read_image(LAYOUTS["0"], image).groups[0]
    changed = bytearray(image)
    struct.pack_into("<i", changed, group.places["agents"], 4)
    with pytest.raises(ImageError, match=r'group "x": 4 agents .* max_agents = 3'):
        StepReader(LAYOUTS["0"], group).read(bytes(changed))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("obs", "observation 1 of agent 101"),
        ("reward", "reward of agent 101"),
        ("ended_reward", "reward of agent 102"),
    ],
)
def test_numbers_that_are_not_finite_name_group_agent_and_field(bad, field, says):
    layout = LAYOUTS["0.3.0"]
    first, body = image_of("0.3.0", {"x": spec_of([(2,), (3,)], continuous=1, agents=5)}, rows=4)
    group = read_image(layout, first, body).groups[0]
    changed = bytearray(body)
    place = {"obs": 4 * 5 * 2 + 4 * 3, "reward": 4, "ended_reward": 0}[field]
    struct.pack_into("<f", changed, group.places[field] + place, bad)
    with pytest.raises(EnvironmentFault, match=f'group "x": {says} is not finite'):
        StepReader(layout, group).read(bytes(changed))


def test_agents_that_ended_may_lie_among_those_that_ask():
    layout = LAYOUTS["0"]
    # 100, 101, 103, and 102, which ended
    image, _ = image_of("0", {"x": spec_of([(2,)], continuous=1, agents=5)}, rows=4)
    group = read_image(layout, image).groups[0]
    changed = bytearray(image)
    changed[group.places["done"] : group.places["done"] + 4] = bytes([0, 1, 0, 1])
    decisions, terminals, asking = StepReader(layout, group).read(bytes(changed))
    assert decisions.agent_id.tolist() == [100, 103] and terminals.agent_id.tolist() == [101, 102]
    assert (
        decisions.reward.tolist() == [0, 3]
        and terminals.obs[0].tolist() == [[10, 10], [20, 20]]
        and asking.tolist() == [0, 2]
    )


def test_rows_behind_the_last_may_hold_anything():
    layout = LAYOUTS["0"]
    image, _ = image_of("0", {"x": spec_of([(2,)], continuous=1, agents=5)}, rows=2)
    group = read_image(layout, image).groups[0]
    changed = bytearray(image)
    struct.pack_into("<f", changed, group.places["obs"] + 4 * 2 * 2, float("nan"))
    struct.pack_into("<f", changed, group.places["reward"] + 4 * 2, float("nan"))
    assert len(StepReader(layout, group).read(bytes(changed))[0]) == 2


@pytest.mark.parametrize(
    ("layout", "name", "spec", "says"),
    [
        ("0", "x" * 64, spec_of([(2,)]), "1 to 63"),
        ("0", "é", spec_of([(2,)]), "ASCII"),
        ("0", "x", spec_of([(2,)], agents=0), "max_agents = 0"),
        ("0", "x", spec_of([(2, 0)]), "observation's shape"),
        ("0", "x", spec_of([(1, 2, 3, 4)]), "observation's shape"),
        ("0.3.0", "x", spec_of([(2,)], continuous=1, branches=(2,)), "0.3.2 takes both"),
        ("0.3.2", "x", spec_of([(2,)], branches=(0,)), "branches"),
        ("0", "x", spec_of([(1000, 1000, 3)], agents=10**6), "lower max_agents"),
    ],
)
def test_impossible_groups_are_refused_before_anything_is_written(layout, name, spec, says):
    with pytest.raises(ConfigError, match=says):
        check_spec(LAYOUTS[layout], name, spec)
