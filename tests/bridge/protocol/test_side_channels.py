import random
import struct
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.bridge.protocol.messages import ChannelError
from tidemill.bridge.protocol.samplers import Gaussian, MultiRange, Uniform
from tidemill.bridge.protocol.side_channels import (
    Channels,
    EngineSettings,
    EnvironmentParameters,
    FloatProperties,
    RawBytes,
    SideChannel,
    Statistics,
)
from tidemill.core.errors import ConfigError
from tidemill.core.tally import summary

OWN = "621f0a70-4f87-11ea-a6bf-784f4387d1f7"


def ends():
    """All channels, for one end."""
    return [EngineSettings(), EnvironmentParameters(), Statistics(), FloatProperties(), RawBytes(OWN, 7)]


@pytest.fixture(params=["uuid", "type"])
def bridge(request):
    """(trainer's channels, simulator's), by kind, and what hands over from the one to the
    other and back."""
    sides = [ends(), ends()]
    joined = [Channels(side, request.param) for side in sides]

    def hand_over():
        joined[1].incoming(joined[0].outgoing())
        joined[0].incoming(joined[1].outgoing())

    return *({type(channel): channel for channel in side} for side in sides), hand_over


def test_everything_that_is_sent_arrives_in_both_framings(bridge):
    trainer, simulator, hand_over = bridge
    trainer[EngineSettings].set(width=640, height=480, quality_level=2, time_scale=20.0, target_frame_rate=-1)
    trainer[EnvironmentParameters].set("gravity", 9.5)
    trainer[EnvironmentParameters].set("mass", MultiRange(((1.0, 2.0), (5.0, 6.0))), seed=3)
    trainer[FloatProperties].set("shared", 0.25)
    trainer[RawBytes].send(b"\x00\xff")
    simulator[Statistics].add("score", 1.0)
    simulator[Statistics].add("score", 4.0)
    simulator[Statistics].add("level", 2.0, "most_recent")
    simulator[Statistics].add("level", 1.0, "most_recent")
    simulator[Statistics].add("deaths", 2.0, "sum")
    simulator[Statistics].add("deaths", 3.0, "sum")
    simulator[FloatProperties].set("back", 2.0)
    hand_over()
    settings = simulator[EngineSettings].settings
    assert (
        settings.width,
        settings.height,
        settings.quality_level,
        settings.time_scale,
        settings.target_frame_rate,
    ) == (640, 480, 2, 20.0, -1)
    assert simulator[EnvironmentParameters].get("gravity", 0.0) == 9.5
    assert simulator[EnvironmentParameters].get("other", 1.5) == 1.5
    draws = [simulator[EnvironmentParameters].get("mass", 0.0) for _ in range(200)]
    assert all(1 <= d < 2 or 5 <= d < 6 for d in draws) and min(draws) < 2 and max(draws) > 5
    assert (
        simulator[FloatProperties].get("shared", 0.0) == 0.25
        and trainer[FloatProperties].get("back", 0.0) == 2.0
    )
    assert simulator[RawBytes].take() == [b"\x00\xff"] and simulator[RawBytes].take() == []
    assert summary(trainer[Statistics].tally.take()) == {"score": 2.5, "level": 1.0, "deaths": 5.0}
    assert trainer[Statistics].tally.take() == {}


def test_the_bytes_are_those_that_such_engines_write():
    channels = Channels([parameters := EnvironmentParameters()])
    parameters.set("g", Gaussian(1.0, 0.5), seed=7)
    body = struct.pack("<i1siiiff", 1, b"g", 1, 7, 1, 1.0, 0.5)
    key = bytes.fromhex("1e894c530f81ea11a9d0822485860400")  # the first three parts of the UUID turned round
    assert channels.outgoing() == key + struct.pack("<i", len(body)) + body
    assert channels.outgoing() == b""
    older = Channels([engine := EngineSettings()], "type")
    engine.set(width=100, height=50)
    engine.set(time_scale=2.0)
    assert older.outgoing() == struct.pack("<ii", 2, 20) + struct.pack("<iiifi", 100, 50, 1, 2.0, -1)


def test_capture_frame_rate_and_each_setting_come_alone():
    seen = []
    trainer, simulator = EngineSettings(), EngineSettings(on_change=seen.append)
    trainer.set(capture_frame_rate=30, time_scale=3)
    Channels([simulator]).incoming(Channels([trainer]).outgoing())
    assert [(s.time_scale, s.capture_frame_rate) for s in seen] == [(3.0, None), (3.0, 30)]


def test_samplers_draw_from_what_they_say_and_again_the_same_with_the_same_seed():
    parameters = EnvironmentParameters()

    def draws(sampler):
        parameters.set("x", sampler, seed=5)
        return [parameters.get("x", 0.0) for _ in range(500)]

    assert all(2 <= d < 3 for d in draws(Uniform(2.0, 3.0))) and draws(Uniform(2.0, 3.0)) == draws(
        Uniform(2.0, 3.0)
    )
    normal = draws(Gaussian(10.0, 2.0))
    assert abs(sum(normal) / 500 - 10) < 0.5 and 1.5 < (sum((d - 10) ** 2 for d in normal) / 500) ** 0.5 < 2.5
    wide = draws(MultiRange(((0.0, 3.0), (10.0, 11.0))))
    assert 0.65 < sum(d < 3 for d in wide) / 500 < 0.85  # in proportion to the widths
    assert draws(MultiRange(((4.0, 4.0),)))[0] == 4.0


def test_messages_for_unknown_channels_are_skipped_and_counted():
    sender, receiver = (
        Channels([RawBytes(OWN), properties := FloatProperties()]),
        Channels([known := FloatProperties()]),
    )
    next(iter(sender)).send(b"lost")
    properties.set("kept", 1.0)
    receiver.incoming(sender.outgoing())
    assert known.values == {"kept": 1.0} and receiver.unknown == {UUID(OWN).bytes_le: 1}


def test_a_channel_of_ones_own_is_a_subclass():
    class Echo(SideChannel):
        def receive(self, data):
            self.send(data[::-1])

    here, there = RawBytes(OWN), Echo(OWN)
    mine, theirs = Channels([here]), Channels([there])
    here.send(b"abc")
    theirs.incoming(mine.outgoing())
    mine.incoming(theirs.outgoing())
    assert here.take() == [b"cba"]


KEY = FloatProperties().uuid.bytes_le


@pytest.mark.parametrize(
    "data",
    [
        KEY[:5],
        KEY + b"\x01\x00",
        KEY + struct.pack("<i", -1),
        KEY + struct.pack("<i", 2**31 - 1) + b"x",
        KEY + struct.pack("<i", 8) + struct.pack("<if", 100, 1.0),  # a name longer than its message
        KEY + struct.pack("<i", 4) + struct.pack("<i", -4),
        KEY + struct.pack("<i", 9) + struct.pack("<icf", 1, b"\xff", 1.0),
        KEY + struct.pack("<i", 9) + struct.pack("<icf", 1, b"a", float("nan")),
        KEY + struct.pack("<i", 13) + struct.pack("<icff", 1, b"a", 1.0, 2.0),  # more than the format has
        EngineSettings().uuid.bytes_le + struct.pack("<iii", 8, 9, 1),
        EnvironmentParameters().uuid.bytes_le + struct.pack("<iiciii", 17, 1, b"a", 1, 0, 9),
        EnvironmentParameters().uuid.bytes_le + struct.pack("<iicif", 13, 1, b"a", 2, 1.0),
        # half a range
        EnvironmentParameters().uuid.bytes_le + struct.pack("<iiciiiif", 25, 1, b"a", 1, 0, 2, 1, 1.0),
        # low above high
        EnvironmentParameters().uuid.bytes_le + struct.pack("<iiciiiff", 25, 1, b"a", 1, 0, 0, 3.0, 2.0),
        Statistics().uuid.bytes_le + struct.pack("<iicfi", 13, 1, b"a", 1.0, 3),
    ],
)
def test_torn_and_hostile_bytes_are_typed_errors(data):
    with pytest.raises(ChannelError):
        Channels(ends()).incoming(data)


@given(st.binary(max_size=64), st.sampled_from([c.uuid.bytes_le for c in ends()]), st.integers(-5, 70))
def test_no_bytes_raise_anything_else(body, key, length):
    try:
        Channels(ends()).incoming(key + struct.pack("<i", length) + body)
    except ChannelError as error:
        assert str(error)


@given(st.randoms())
def test_every_message_cut_short_or_changed_in_a_byte_is_read_or_refused(rng: random.Random):
    parameters, statistics, engine = EnvironmentParameters(), Statistics(), EngineSettings()
    parameters.set("a", MultiRange(((1.0, 2.0), (3.0, 4.0))))
    statistics.add("b", 1.0)
    engine.set(width=1, height=2, time_scale=1.0)
    data = bytearray(Channels([parameters, statistics, engine]).outgoing())
    data[rng.randrange(len(data))] = rng.randrange(256)
    data = data[: rng.randrange(len(data) + 1)]
    try:
        Channels(ends()).incoming(data)
    except ChannelError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: EngineSettings().set(time_scal=2.0), 'did you mean "time_scale"'),
        (lambda: EngineSettings().set(width=2), "both"),
        (lambda: EngineSettings().set(quality_level=1.5), "integer"),
        (lambda: EnvironmentParameters().set("ü", 1.0), "ASCII"),
        (lambda: EnvironmentParameters().set("a", "b"), "number or a sampler"),
        (lambda: EnvironmentParameters().set("a", float("nan")), "finite"),
        (lambda: Uniform(2.0, 1.0), "low"),
        (lambda: MultiRange(()), "at least one"),
        (lambda: Gaussian(1.0, -1.0), "negative"),
        (lambda: Statistics().add("a", 1.0, "mean"), "how"),
        (lambda: SideChannel("no uuid"), "UUID"),
        (lambda: RawBytes(OWN, 1000), "number"),
        (lambda: Channels([FloatProperties(), FloatProperties()]), "one key"),
        (lambda: Channels([RawBytes(OWN)], "type"), "without a type"),
        (lambda: Channels([RawBytes(number=1)]), "without a UUID"),
        (lambda: Channels(framing="guid"), "framing"),
    ],
)
def test_what_cannot_be_said_is_refused_before_it_is_sent(act, said):
    with pytest.raises(ConfigError, match=said):
        act()


def test_ends_of_different_framings_are_told_of_theirs():
    ours, theirs = Statistics(), Statistics()
    theirs.add("reward", 1.0)
    with pytest.raises(ChannelError, match='framing "type" here'):
        Channels([ours], "type").incoming(Channels([theirs], "uuid").outgoing())
