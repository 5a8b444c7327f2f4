"""Wrappers that a user names: how they are read, what they do, and that they are kept."""

import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from tests.envs import wrappers
from tests.envs.driver import Driver

from tidemill.core.config import decode, encode
from tidemill.core.errors import ConfigError
from tidemill.core.user_code_loading import named_files, named_modules, without_arguments
from tidemill.envs.batch_lanes import BatchLanes
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.envs.wrapping import WRAPPERS, outside_wrappers, read_wrapper
from tidemill.presets.environment_names import environment_from

OWN = str(Path(wrappers.__file__))


@pytest.mark.parametrize(
    ("text", "place", "args", "kwargs"),
    [
        ("flatten", "gymnasium.wrappers:FlattenObservation", [], {}),
        ("frame-skip(3)", "tidemill.envs.single_wrappers:FrameSkip", [3], {}),
        ("rescale-action(-2)", "gymnasium.wrappers:RescaleAction", [-2], {"max_action": 1.0}),
        ("resize(shape=(8, 8))", "tidemill.envs.image_wrappers:ResizedImages", [], {"shape": (8, 8)}),
        (
            "gymnasium.wrappers:TimeLimit(max_episode_steps=200)",
            "gymnasium.wrappers:TimeLimit",
            [],
            {"max_episode_steps": 200},
        ),
        ("minigrid.wrappers.FlatObsWrapper", "minigrid.wrappers:FlatObsWrapper", [], {}),
        ("my (own)/w.py:W(x='a:b(c)')", "my (own)/w.py:W", [], {"x": "a:b(c)"}),
    ],
)
def test_a_wrapper_is_a_name_with_plain_arguments(text, place, args, kwargs):
    call = read_wrapper(text)
    assert (call.text, call.place, call.args, call.kwargs) == (text, place, args, kwargs)


@pytest.mark.parametrize(
    "text",
    [
        "flatten(x=__import__('os'))",
        "flatten(**{'x': 1})",
        "flatten()(1)",
        "flatten(1,,2)",
        f"flatten({'(' * 900}1{')' * 900})",
    ],
)
def test_nothing_but_plain_values_is_read(text):
    with pytest.raises(ConfigError, match=r"with plain values"):
        read_wrapper(text)


def test_a_long_text_is_refused_at_once():
    for text in ("m:f(" * 300_000, "flatten(" + "1, " * 300_000, ":" * 300_000):
        with pytest.raises(ConfigError, match="characters; 2,000 may be there"):
            read_wrapper(text)
        assert outside_wrappers([text])


def test_an_unknown_wrapper_is_told_with_the_alternatives():
    with pytest.raises(ConfigError, match='no wrapper is called "flaten"; did you mean "flatten"'):
        Gymnasium(id="CartPole-v1", wrap=("flaten",))
    with pytest.raises(ConfigError, match='no "TimeLimt"; did you mean "TimeLimit"'):
        Gymnasium(id="CartPole-v1", wrap=("gymnasium.wrappers:TimeLimt(3)",)).build(1, 0)
    with pytest.raises(ConfigError, match='Here it is called "frame-skip"'):
        Gymnasium(id="CartPole-v1", wrap=("rl_zoo3.wrappers.FrameSkip(skip=2)",)).build(1, 0)
    with pytest.raises(ConfigError, match='has no argument "skp"; did you mean "skip"'):
        Gymnasium(id="CartPole-v1", wrap=("frame-skip(skp=2)",)).build(1, 0)
    with pytest.raises(ConfigError, match=r"no gymnasium\.Env"):
        Gymnasium(id="CartPole-v1", wrap=("builtins:id",)).build(1, 0)
    with pytest.raises(ConfigError, match="this is Atari"):
        environment_from("ALE/Pong-v5", wrap=["flatten"])


def test_the_first_wrapper_is_the_inner_one():
    env = Gymnasium(
        id="Taxi-v4", wrap=["flatten", "frame-stack(2)", "time-limit(5)", wrappers.Doubled]
    ).make_one()
    names = []
    while isinstance(env, gymnasium.Wrapper):
        names.append(type(env).__name__)
        env = env.env
    assert names[:4] == ["Doubled", "TimeLimit", "StackedFrames", "FlattenObservation"]


def test_a_wrapper_of_ones_own_is_kept_by_its_name():
    config = Gymnasium(id="CartPole-v1", wrap=[wrappers.Doubled, f"{OWN}:Doubled(times=3)"])
    assert config.wrap == ("tests.envs.wrappers:Doubled", f"{OWN}:Doubled(times=3)")
    saved = encode(config)
    assert decode(Gymnasium, saved, "environment") == config
    assert named_files(saved) == [OWN] and OWN in named_modules(saved)
    assert without_arguments(f"{OWN}:Doubled(times=3)") == f"{OWN}:Doubled"
    one = config.make_one()
    one.reset(seed=0)
    assert one.step(0)[1] == 6.0


def test_rows_are_those_of_gymnasiums_wrappers():
    config = Gymnasium(id="CartPole-v1", wrap=("frame-stack(3)", "time-limit(7)"))
    lanes = config.build(5, seed=3)
    assert not isinstance(lanes, BatchLanes) and config.slowed_by_wrappers
    assert lanes.max_episode_steps == 7
    driver = Driver(lanes)
    raw = [
        gymnasium.wrappers.FrameStackObservation(
            gymnasium.make("CartPole-v1", max_episode_steps=7), 3, padding_type="reset"
        )
        for _ in range(5)
    ]
    seen = [env.reset(seed=3 + lane)[0] for lane, env in enumerate(raw)]
    tick = driver.tick()[0].tick
    for step in range(20):
        np.testing.assert_array_equal(tick.observation["obs"], np.stack(seen))
        begins = tick.done | tick.truncated
        actions = np.arange(5) % 2 if step % 3 else (np.arange(5) + 1) % 2
        ends = []
        for lane, env in enumerate(raw):
            if begins[lane]:
                seen[lane] = env.reset()[0]
                ends.append((False, False))
            else:
                seen[lane], _, done, cut, _ = env.step(actions[lane])
                ends.append((bool(done), bool(cut and not done)))
        tick = driver.tick(actions=[{"action": actions}])[0].tick
        assert [*zip(tick.done.tolist(), tick.truncated.tolist(), strict=True)] == ends


def test_skipped_frames_add_up_and_stop_at_the_end():
    env = Gymnasium(id="CartPole-v1", wrap=("frame-skip(4)",)).make_one()
    raw = gymnasium.make("CartPole-v1")
    env.reset(seed=1), raw.reset(seed=1)
    over = False
    while not over:
        observation, reward, over, _, _ = env.step(1)
        steps = 0
        for _ in range(4):
            expected, _, end, _, _ = raw.step(1)
            steps += 1
            if end:
                break
        np.testing.assert_array_equal(observation, expected)
        assert reward == steps and over == end
    assert steps < 4, "the last of them was cut short"


def test_images_stack_along_their_channels():
    env = Gymnasium(id="CarRacing-v3", wrap=("grayscale", "frame-stack(2)"))
    pytest.importorskip("Box2D")
    assert env.make_one().observation_space.shape == (96, 96, 2)


def test_a_history_has_observations_and_actions():
    env = Gymnasium(id="Pendulum-v1", wrap=("history(2)",)).make_one()
    first, _ = env.reset(seed=0)
    assert first.shape == env.observation_space.shape == (8,)
    assert not first[:3].any() and not first[6:].any()
    second = env.step(np.array([0.5], np.float32))[0]
    np.testing.assert_array_equal(second[:3], first[3:6])
    np.testing.assert_array_equal(second[6:], [0, 0.5])
    assert not env.reset(seed=1)[0][6:].any()


def test_velocities_are_hidden():
    env = Gymnasium(id="CartPole-v1", wrap=("mask-velocity",)).make_one()
    env.reset(seed=0)
    observation = env.step(0)[0]
    assert observation[[0, 2]].all() and not observation[[1, 3]].any()
    with pytest.raises(ConfigError, match="does not know which numbers are velocities in Acrobot"):
        Gymnasium(id="Acrobot-v1", wrap=("mask-velocity",)).make_one()


def test_every_named_wrapper_is_where_it_is_said():
    pytest.importorskip("minigrid")
    pytest.importorskip("Box2D")
    fits = {"minigrid-flat": "MiniGrid-Empty-5x5-v0", "minigrid-image": "MiniGrid-Empty-5x5-v0"}
    fits |= dict.fromkeys(("clip-action", "rescale-action", "history", "mask-velocity"), "Pendulum-v1")
    fits |= {"filter": fits["minigrid-image"]} | dict.fromkeys(("resize", "grayscale"), "CarRacing-v3")
    own = {"time-limit": "time-limit(9)", "filter": 'filter(["image"])'}
    for name in WRAPPERS:
        built = Gymnasium(id=fits.get(name, "CartPole-v1"), wrap=(own.get(name, name),)).build(2, 0)
        Driver(built).tick()
        built.close()


def test_what_a_strangers_folder_wraps_is_asked_about():
    assert not outside_wrappers(["flatten", "frame-skip(4)", "resize(shape=(8, 8))"])
    (own,) = outside_wrappers([f"{OWN}:Doubled(times=3)"])
    assert own.code == f"{OWN}:Doubled" and "Doubled(times=3)" in own.does
    assert outside_wrappers(["gymnasium.wrappers:RecordVideo(video_folder='/home')"])
    assert all(outside_wrappers(each) for each in ([3], "os:system", {"x": 1}, ["flatten(", [["x"]]]))
    assert [each.code for each in Gymnasium.outside({"id": "CartPole-v1", "wrap": ["os:system"]})] == [
        "os:system"
    ]
    assert "tests.envs.no_wrappers" not in sys.modules


def test_a_mission_in_words_is_answered_with_the_wrappers_that_leave_it_out():
    pytest.importorskip("minigrid")
    with pytest.raises(ConfigError, match="--wrap minigrid-image, picture and mission"):
        Gymnasium(id="MiniGrid-Empty-5x5-v0").build(1, 0)
    assert Gymnasium(id="MiniGrid-Empty-5x5-v0", wrap="minigrid-flat").build(1, 0).lanes == 1
