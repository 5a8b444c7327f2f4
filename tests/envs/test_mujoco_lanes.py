"""Gymnasium's MuJoCo environments computed for all lanes at once are Gymnasium's, number
by number."""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from tests.envs.driver import Driver

from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.envs.lanes import LaneLoop
from tidemill.envs.plain_gymnasium import Gymnasium

mujoco = pytest.importorskip("mujoco")

from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv  # noqa: E402

from tidemill.envs.mujoco_lanes import MujocoLanes  # noqa: E402
from tidemill.envs.mujoco_simulations import (  # noqa: E402
    Apart,
    SimulationFailed,
    Together,
    simulations,
)

NAMES = (
    "HalfCheetah", "Hopper", "Walker2d", "Swimmer", "Ant", "Humanoid", "HumanoidStandup",
    "InvertedPendulum", "InvertedDoublePendulum", "Reacher", "Pusher",
)  # fmt: skip
WIDE = {"forward_reward_weight": 2.0, "ctrl_cost_weight": 0.03, "reset_noise_scale": 0.02}
SHOWN = {"exclude_current_positions_from_observation": False}
ARGUMENTS = (
    ("HalfCheetah-v5", WIDE | SHOWN | {"frame_skip": 2}),
    ("HalfCheetah-v4", WIDE),
    ("Hopper-v5", WIDE | SHOWN | {"healthy_reward": 0.3, "healthy_z_range": (0.9, 1.4)}),
    ("Hopper-v5", {"terminate_when_unhealthy": False, "healthy_state_range": (-2.0, 2.0)}),
    ("Hopper-v4", {"terminate_when_unhealthy": False, "healthy_angle_range": (-0.05, 0.05)}),
    ("Walker2d-v5", WIDE | {"xml_file": "walker2d.xml", "healthy_angle_range": (-0.1, 0.1)}),
    ("Swimmer-v5", WIDE | SHOWN),
    ("Ant-v5", WIDE | SHOWN | {"include_cfrc_ext_in_observation": False, "main_body": "torso"}),
    ("Ant-v5", {"contact_cost_weight": 0.1, "contact_force_range": (-0.2, 0.3), "main_body": 2}),
    ("Ant-v4", {"use_contact_forces": True, "healthy_z_range": (0.5, 0.9)}),
    ("Humanoid-v5", {"include_cinert_in_observation": False, "contact_cost_range": (0.0, 1e-6)}),
    ("Humanoid-v4", WIDE | SHOWN),
    ("HumanoidStandup-v5", {"include_cvel_in_observation": False, "uph_cost_weight": 1, **SHOWN}),
    ("InvertedPendulum-v5", {"reset_noise_scale": 0.05}),
    ("InvertedDoublePendulum-v5", {"healthy_reward": 3.0, "reset_noise_scale": 0.3}),
    ("Reacher-v5", {"reward_dist_weight": 2.0, "reward_control_weight": 0.5}),
    ("Pusher-v5", {"reward_near_weight": 2.0, "reward_dist_weight": 0.1, "reward_control_weight": 1.0}),
)


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """Have what parts from Gymnasium's environments fail a test, not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def both(env_id: str, lanes: int, **settings) -> tuple[Driver, Driver]:
    config = Gymnasium(id=env_id, **settings)
    fast, slow = config.build(lanes, 7), config.replace(vectorized=False).build(lanes, 7)
    assert isinstance(fast, MujocoLanes) and type(slow) is LaneLoop
    assert fast.agents == slow.agents
    assert (fast.max_episode_steps, fast.render_fps) == (slow.max_episode_steps, slow.render_fps)
    return Driver(fast), Driver(slow)


def play(fast: Driver, slow: Driver, ticks: int) -> tuple[int, int]:
    """Play both with the same actions, and return how many episodes ended and how many
    were cut."""
    ended = cut = 0
    rng = np.random.default_rng(3)
    lanes = fast.environment.lanes
    for tick in range(ticks):
        reset = fast.over[0].all(axis=1)
        if tick % 5 == 3:
            reset &= np.arange(lanes) > 0  # lane 0 stays as it is for a while
        if tick % 40 == 39:
            reset[-1] = True  # in the middle of an episode
        (one,), (other,) = (driver.tick(reset.copy()) for driver in (fast, slow))
        for name, values in vars(one.tick).items():
            if not isinstance(values, dict):
                np.testing.assert_array_equal(values, getattr(other.tick, name), f"{name}, tick {tick}")
        seen, expected = one.tick.observation["obs"], other.tick.observation["obs"]
        np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-9, err_msg=f"tick {tick}")
        seats = rng.permutation(lanes).tolist()
        infos = [driver.environment.episode_infos(0, seats) for driver in (fast, slow)]
        for info, told in zip(*infos, strict=True):
            assert (info is None) == (told is None)
            if info is not None:
                assert info.keys() == told.keys()
                for name in info:
                    np.testing.assert_allclose(info[name], told[name], rtol=0, atol=1e-9, err_msg=name)
        ended, cut = ended + int(one.tick.done.sum()), cut + int(one.tick.truncated.sum())
    return ended, cut


@pytest.mark.parametrize("env_id", [f"{name}-v{version}" for version in (5, 4) for name in NAMES][:-1])
def test_ticks_are_those_of_gymnasiums_own_steps(env_id: str) -> None:
    drivers = both(env_id, 3, max_episode_steps=45)
    ended, cut = play(*drivers, 60 if env_id.startswith(("Human", "Ant")) else 100)
    assert ended or cut


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "InvertedDoublePendulum-v5"])
def test_so_are_those_of_a_mujoco_that_has_no_batches(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco.batch", None)
    play(*both(env_id, 3), 60)


@pytest.mark.parametrize("contact_forces", [False, True])
def test_a_simulation_that_fails_is_named(contact_forces: bool) -> None:
    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><body><joint/><geom size='1'/></body></worldbody></mujoco>"
    )
    model.opt.integrator = 99
    found = simulations(model, 3, 1, ("qpos",), contact_forces)
    assert type(found) is (Apart if contact_forces else Together)
    for chosen, number in ((None, 0), ([1, 2], 1)):
        with pytest.raises(SimulationFailed, match="integrator") as caught:
            found.step(np.zeros((3, 0), np.float32), chosen)
        assert caught.value.number == number


ENDLESS = ("HalfCheetah-v5", "Swimmer-v5", "Ant-v5", "HumanoidStandup-v5")
"""Episodes of the others are over within 100 steps or so, by their ends or their
limits: numbers begin anew."""


@pytest.mark.parametrize("env_id", [f"{name}-v5" for name in NAMES])
def test_they_stay_so_over_a_thousand_steps_or_several_episodes(env_id: str) -> None:
    ended, cut = play(*both(env_id, 2), 1_050 if env_id in ENDLESS else 250)
    assert ended or cut
    assert env_id != "HalfCheetah-v5" or (ended, cut) == (0, 1)


@pytest.mark.parametrize(("env_id", "kwargs"), ARGUMENTS)
def test_arguments_of_the_constructor_act(env_id: str, kwargs: dict) -> None:
    play(*both(env_id, 2, kwargs=kwargs), 60)


def test_lanes_are_seeded_one_by_one_whenever_they_are_told() -> None:
    first, again = (Driver(Gymnasium(id="Hopper-v5").build(3, seed)) for seed in (11, 12))
    (one,), (other,) = first.tick(), again.tick()
    assert np.array_equal(one.tick.observation["obs"][1:], other.tick.observation["obs"][:2])
    again.environment.seed(10)
    (other,) = again.tick(np.array([False, True, False]))
    assert np.array_equal(one.tick.observation["obs"][0], other.tick.observation["obs"][1])


class Lighter(HalfCheetahEnv):
    """A cheetah of a user's own."""


def test_whatever_is_not_gymnasiums_own_class_steps_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    cheetah = "gymnasium.envs.mujoco.half_cheetah_v5:HalfCheetahEnv"
    gymnasium.register("Lighter-v0", entry_point=f"{__name__}:Lighter")
    wrapped = gymnasium.envs.registration.WrapperSpec("ClipAction", "gymnasium.wrappers:ClipAction", {})
    gymnasium.register("Wrapped-v0", entry_point=cheetah, additional_wrappers=(wrapped,))
    gymnasium.register("Renamed-v0", entry_point=cheetah, kwargs={"ctrl_cost_weight": 0.0})
    try:
        configs = {
            "a class of one's own": Gymnasium(id="Lighter-v0"),
            "wrappers": Gymnasium(id="Wrapped-v0"),
            "threads": Gymnasium(id="HalfCheetah-v5", threads=1),
            "made by a name": Gymnasium(make=cheetah),
        }
        assert type(Gymnasium(id="HalfCheetah-v5").build(1, 0)) is LaneLoop  # as fast, and simpler
        for what, config in configs.items():
            environment = config.build(2, 0)
            assert type(environment) is LaneLoop, what
            environment.close()
        play(*both("Renamed-v0", 2), 20)  # of no limit, and with arguments of its entry
    finally:
        for env_id in ("Lighter-v0", "Wrapped-v0", "Renamed-v0"):
            del gymnasium.registry[env_id]


def test_pictures_are_gymnasiums() -> None:
    made = []

    class Noted(Gymnasium):
        def make_one(self, render: bool = False) -> gymnasium.Env:
            made.append(render)
            return super().make_one()

    environment = Noted(id="HalfCheetah-v5").build(2, 0, render=True)
    assert made == [True, False] and type(environment) is LaneLoop


def test_a_gymnasium_of_other_numbers_steps_itself_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    step = HalfCheetahEnv.step

    def generous(self, action):
        observation, reward, *rest = step(self, action)
        return observation, reward + 1e-6, *rest

    monkeypatch.setattr(HalfCheetahEnv, "step", generous)
    with pytest.warns(
        UserWarning, match=r"half_cheetah_v5: this version of Gymnasium computes other numbers"
    ):
        environment = Gymnasium(id="HalfCheetah-v5").build(2, 0)
    assert type(environment) is LaneLoop


def test_wrong_arguments_are_told_as_ever() -> None:
    with pytest.raises(ConfigError, match=r'has no argument "forward_weight"; did you mean'):
        Gymnasium(id="HalfCheetah-v5", kwargs={"forward_weight": 1.0}).build(1, 0)
    with pytest.raises(ConfigError, match=r"nowhere\.xml does not exist"):
        Gymnasium(id="HalfCheetah-v5", kwargs={"xml_file": "/nowhere.xml"}).build(1, 0)


def test_an_action_that_is_no_number_is_a_fault_of_its_lane(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # where MuJoCo writes its log
    driver = Driver(Gymnasium(id="HalfCheetah-v5").build(2, 0))
    driver.tick()
    action = np.zeros((2, 6), np.float32)
    action[1, 2] = np.nan
    with pytest.raises(
        EnvironmentFault, match=r"HalfCheetah-v5: reward of agent agent in lane 1 is not finite: nan"
    ):
        driver.tick(actions=[{"action": action}])


def test_a_clock_that_somebody_set_for_mujoco_stays() -> None:
    calls = []

    def clock() -> float:
        calls.append(None)
        return 0.0

    mujoco.set_mjcb_time(clock)
    try:
        Driver(Gymnasium(id="InvertedPendulum-v5").build(2, 0)).tick()
        assert mujoco.get_mjcb_time() is clock and calls
    finally:
        mujoco.set_mjcb_time(None)
