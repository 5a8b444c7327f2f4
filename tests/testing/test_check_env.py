from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from tests.envs import games
from tests.testing.ticking import by_looks

from tidemill.api.environment import AgentInfo, Environment, EnvironmentConfig
from tidemill.api.spaces import Box, Discrete, Spaces, to_gymnasium
from tidemill.core.errors import ConfigError
from tidemill.envs.asynchronous import Asynchronous
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.envs.spaces import from_gymnasium
from tidemill.envs.vector import GymnasiumVector
from tidemill.presets.fitting_algorithms import training
from tidemill.testing.check_env import _determinism, check_environment, sample_actions
from tidemill.testing.scripted import Free, Scripted

GAMES = str(Path(games.__file__))


@pytest.fixture(autouse=True)
def as_many_ticks_on_any_machine(monkeypatch):
    by_looks(monkeypatch)


class Prompt(games.Counter):
    async def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)

    async def step(self, action):
        return super().step(action)


def levels(config):
    return {finding.name: finding.level for finding in check_environment(config, seconds=0.2)}


@pytest.mark.parametrize(
    "config",
    [
        Gymnasium(id="CartPole-v1"),
        Gymnasium(make=f"{GAMES}:Nested"),
        GymnasiumVector(id="CartPole-v1"),
        Scripted(agents=3, kinds=2, deaths=True, turns=2),
        Scripted(agents=3, deaths=True, same_step=True),
    ],
)
def test_sound_environments_pass(config):
    found = levels(config)
    assert {
        name: level
        for name, level in found.items()
        if level == "fail" or (level == "warn" and name != "speed")
    } == {}
    assert {"build", "spaces", "play", "bounds", "reset and step", "episodes", "determinism", "speed"} <= set(
        found
    )


@pytest.mark.parametrize("fault", ["raise", "shape", "nan", "reward", "old", "reset"])
def test_faulty_ones_fail_with_the_fault(fault):
    findings = check_environment(Gymnasium(make=f"{GAMES}:Counter", kwargs={"fault": fault}), seconds=0.2)
    assert "fail" in [finding.level for finding in findings]
    assert "lane" in next(finding for finding in findings if finding.level == "fail").message


class Rebound(Environment):
    """An environment of one's own that puts arrays of its own in place of those that it
    is given."""

    agents, lanes = (AgentInfo("agent", Spaces(Box((3,), "float32"), Discrete(2))),), 2

    def bind(self, groups):
        pass

    def send(self, actions, reset):
        self.reset = reset

    def ready(self):
        return True

    def recv(self, ticks):
        (tick,) = ticks
        tick.observation = {"obs": np.zeros((2, 3), np.float32)}
        tick.reward[:], tick.done[:], tick.truncated[:], tick.present[:] = 0, ~self.reset, False, True

    def close(self):
        pass


def test_arrays_that_are_put_in_the_place_of_given_ones_are_noticed():
    class Config(EnvironmentConfig):
        def build(self, lanes, seed, render=False):
            return Rebound()

    findings = check_environment(Config(), seconds=0.2)
    (finding,) = (finding for finding in findings if finding.level == "fail")
    assert "lane 0 was given what is not finite, or nothing" in finding.message


def test_a_reset_of_the_old_kind_is_told_what_it_must_be():
    findings = check_environment(Gymnasium(make=f"{GAMES}:Counter", kwargs={"fault": "reset"}), seconds=0.2)
    found = next(finding for finding in findings if finding.name == "raw observation")
    assert (
        found.level == "fail"
        and "reset(self, *, seed=None, options=None), and return (observation, info)" in found.cure
    )


def test_an_unknown_environment_is_one_finding():
    (finding,) = check_environment(Gymnasium(id="CartPol-v1"))
    assert (finding.name, finding.level) == ("build", "fail")
    assert "CartPole-v1" in finding.message


def test_an_environment_that_never_ends_is_warned_of():
    assert levels(Free())["episodes"] == "warn"


def test_numbers_drawn_elsewhere_are_noticed():
    assert levels(Gymnasium(make=f"{GAMES}:Unseeded"))["determinism"] == "warn"


@pytest.mark.parametrize(
    "config", [Asynchronous(make=f"{__file__}:Prompt"), Gymnasium(make=f"{GAMES}:Counter", threads=2)]
)
def test_speed_is_what_the_environment_takes_and_not_how_often_somebody_looks(config, monkeypatch):
    def sleep(_):
        raise AssertionError("who sleeps is not woken by the answer")

    monkeypatch.setattr("time.sleep", sleep)
    assert levels(config)["play"] == "ok" and "speed" in levels(config)


def test_determinism_is_looked_at_however_long_building_takes():
    found = _determinism(Gymnasium(id="CartPole-v1"), 0, 2, 0.0)
    assert found.level == "ok" and "the same 5 ticks" in found.message


def test_observations_outside_their_bounds_are_noticed():
    findings = check_environment(Gymnasium(make=f"{GAMES}:Outside"), seconds=0.2)
    (bounds,) = (finding for finding in findings if finding.name == "bounds")
    assert bounds.level == "warn"
    assert bounds.message == "obs[0] is 2000000.0, outside of its space (-1000000.0 … 1000000.0)"


class Emulator(gymnasium.Env):
    """An environment of which a process can have one at a time."""

    observation_space, action_space = spaces.Box(0, 255, (224, 320, 3), np.uint8), spaces.Discrete(2)
    alive: int = 0

    def __init__(self):
        if Emulator.alive:
            raise RuntimeError("one emulator per process")
        Emulator.alive += 1

    def reset(self, *, seed=None, options=None):
        self.ticks = 0
        super().reset(seed=seed)
        return np.full((224, 320, 3), self.np_random.integers(256), np.uint8), {}

    def step(self, action):
        self.ticks += 1
        return np.full((224, 320, 3), self.np_random.integers(256), np.uint8), 1.0, self.ticks == 5, False, {}

    def close(self):
        Emulator.alive -= 1


def test_what_a_process_can_have_but_once_is_looked_at_alone():
    config = Gymnasium(make=Emulator)
    findings = {finding.name: finding for finding in check_environment(config, seconds=0.2)}
    assert findings["build"].level == "warn"
    assert "1 lane, and no second one" in findings["build"].message
    assert "one emulator per process" in findings["build"].message
    assert "--set workers.actor.lanes=1 --set workers.actor.count=8" in findings["build"].message
    assert findings["determinism"].level == findings["play"].level == "ok"
    assert "fail" not in {finding.level for finding in findings.values()}
    assert Emulator.alive == 0
    with pytest.raises(ConfigError, match="The first of 3 lanes was made"):
        config.build(3, 0)
    assert Emulator.alive == 0


def test_large_images_are_told_with_what_makes_them_smaller():
    def found(environment):
        built = environment.build(1, 0)
        try:
            return [finding for finding in training(environment, built) if finding.name == "images"]
        finally:
            built.close()

    (images,) = found(Gymnasium(make=Emulator))
    # 224 × 320 are 71,680; 84 × 84 are 7,056
    assert images.level == "warn" and "71,680 pixels, 10 times" in images.message
    assert images.cure == '--wrap "resize(84)" makes them so'
    assert found(Gymnasium(make=Emulator, wrap=("resize(84)",))) == []
    assert found(Gymnasium(id="CartPole-v1")) == []


def test_a_dtype_that_is_converted_is_noticed():
    assert levels(Gymnasium(make=f"{GAMES}:Double"))["raw observation"] == "warn"


def test_sampled_actions_lie_in_their_space():
    theirs = games.Nested.action_space.spaces[0]
    ours = from_gymnasium(theirs)
    actions = sample_actions(ours, np.random.default_rng(0), 50)["action"]
    assert all(to_gymnasium(ours).contains(action) for action in actions)


class Held(games.Counter):
    """It cannot be closed."""

    def close(self):
        raise ValueError("the arm is held")


class Few(games.Counter):
    """There may be two of it at a time, and none after them."""

    made = 0

    def __init__(self):
        super().__init__()
        Few.made += 1
        if Few.made > 2:
            raise ValueError("no more licences")


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        (Held, "close", "ValueError: the arm is held"),
        (Few, "raw observation", "ValueError: no more licences"),
    ],
)
def test_what_was_found_before_an_error_is_told_with_it(kind, name, says, monkeypatch):
    monkeypatch.setattr(Few, "made", 0)
    found = {finding.name: finding for finding in check_environment(Gymnasium(make=kind), seconds=0.2)}
    assert found["play"].level == "ok"
    assert found[name].level == "fail" and says in found[name].message
