"""Gymnasium environments of several agents."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.envs import pairs
from tests.envs.driver import Driver
from tests.testing.ticking import by_looks

import tidemill
from tidemill import Gymnasium, PettingZoo
from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.presets.environment_names import environment_from
from tidemill.testing.check_env import check_environment
from tidemill.trained.evaluate import evaluate
from tidemill.trained.play import play

PAIR = "tests.envs.pairs:Pair-v0"


def ticks(count: int, **kwargs: Any) -> list[Any]:
    driver = Driver(environment_from(f"pettingzoo:{PAIR}", kwargs).build(2, 0))
    return [driver.tick()[0] for _ in range(count)]


@pytest.mark.parametrize("ends", ["all", "each"])
def test_each_agent_has_its_part_and_all_end_together(ends: str) -> None:
    told = ticks(8, ends=ends)
    for number, at in enumerate(told[:6]):
        expected = [[0, number, agent] for agent in range(2)] * 2
        np.testing.assert_array_equal(at.tick.observation["obs"], expected)
        paid = at.actions["action"] + [0, 10, 0, 10] if number else [0, 0, 0, 0]
        np.testing.assert_array_equal(at.tick.reward, paid)
        assert at.tick.done.tolist() == [number == 5] * 4
        assert not at.tick.truncated.any()
    np.testing.assert_array_equal(told[7].tick.observation["obs"], [[1, 1, 0], [1, 1, 1]] * 2)


def test_one_number_is_paid_to_each() -> None:
    at = ticks(2, team=True)[1]
    by_lane = at.actions["action"].reshape(2, 2)
    np.testing.assert_array_equal(at.tick.reward, np.repeat(by_lane.sum(axis=1) + 10, 2))


@pytest.mark.parametrize(
    ("make", "limit"), [("tests.envs.pairs:ShortPair-v0", 0), (PAIR, 3)], ids=["gymnasium's", "ours"]
)
def test_a_step_limit_cuts_all(make: str, limit: int) -> None:
    driver = Driver(PettingZoo(make=make, max_episode_steps=limit).build(1, 0))
    told = [driver.tick()[0].tick for _ in range(4)]
    assert [at.truncated.tolist() for at in told] == [[False] * 2] * 3 + [[True] * 2]


def test_the_state_is_all_observations_in_a_row() -> None:
    environment = PettingZoo(make=PAIR, state=True).build(1, 0)
    driver = Driver(environment)
    driver.tick()
    seen = driver.tick()[0].tick.observation
    np.testing.assert_array_equal(seen["obs.global_state"], [[0, 1, 0, 0, 1, 1]] * 2)


def test_parts_that_are_missing_are_told() -> None:
    with pytest.raises(
        EnvironmentFault, match=r"Pair-v0: rewards are \[\d\]; they must have 2 parts, one fo"
    ):
        ticks(2, lacks=True)


def test_who_is_cut_as_another_ends_is_at_its_end() -> None:
    told = [at.tick for at in ticks(6, ends="both")]
    assert not any(at.done.any() or at.truncated.any() for at in told[:5])
    assert (told[5].done.tolist(), told[5].truncated.tolist()) == ([False, True] * 2, [True, False] * 2)


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ({"__all__": False}, r"terminated of agent agent_0 is \{'__all__': False\}; it must be one bool"),
        (None, "terminated of agent agent_0 is None; it must be one bool"),
        ([False] * 3, r"terminated are \[False, False, False\]; they must have 2 parts"),
    ],
)
def test_what_says_no_end_is_refused(ends: Any, says: str) -> None:
    with pytest.raises(EnvironmentFault, match=says):
        ticks(2, ends=ends)


@pytest.mark.parametrize(
    ("name", "kwargs", "says"),
    [
        ("Ragged", {}, r"reward of agent agent_0 is array.*; it must be one number"),
        ("Bare", {}, r"step returned \(.* instead of \(observations, rewards, terminated, truncated, info\)"),
        ("Bare", {"lacks": True}, r"reset returned \[.* instead of \(observations, info\)"),
    ],
)
def test_what_does_not_fit_is_told(name: str, kwargs: Any, says: str) -> None:
    def play() -> None:
        driver = Driver(PettingZoo(make=f"tests.envs.pairs:{name}", kwargs=kwargs).build(1, 0))
        driver.tick()
        driver.tick()

    with pytest.raises((EnvironmentFault, ConfigError), match=says):
        play()


def test_one_of_both_libraries_is_pettingzoos() -> None:
    environment = PettingZoo(make="tests.envs.pairs:BothKinds").build(1, 0)
    assert [agent.name for agent in environment.agents] == ["a", "b"]


def test_one_without_its_module_is_told_how_it_is_named() -> None:
    with pytest.raises(ConfigError, match=r'Pair-v0 is no module; .* registers it: "module:Pair-v0"'):
        PettingZoo(make="Pair-v0").build(1, 0)


def test_an_id_behind_a_file_is_no_id() -> None:
    with pytest.raises(ConfigError, match='has no "Pair-v0"'):
        PettingZoo(make=f"{Path(pairs.__file__)}:Pair-v0").build(1, 0)


def test_one_of_a_single_agent_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"CartPole-v1 is a gymnasium.Env, which is of several agents where"
    ):
        PettingZoo(make="gymnasium:CartPole-v1").build(1, 0)


def test_what_is_not_registered_is_told_with_what_is() -> None:
    with pytest.raises(
        ConfigError, match=r'no environment "tests.envs.pairs:Pare-v0" .* did you mean "Pair-v0"'
    ):
        PettingZoo(make="tests.envs.pairs:Pare-v0").build(1, 0)


def test_several_rewards_of_what_was_taken_for_one_agent_name_the_cure() -> None:
    driver = Driver(Gymnasium(id=PAIR).build(1, 0))
    driver.tick()
    with pytest.raises(EnvironmentFault, match=rf'several agents play: .* "pettingzoo:{PAIR}"'):
        driver.tick()


@pytest.mark.parametrize("name", [PAIR, f"{Path(pairs.__file__)}:Pair"])
def test_they_are_checked_trained_and_played(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_looks(monkeypatch)
    found = check_environment(environment_from(f"pettingzoo:{name}"), seconds=0.3)
    assert [f for f in found if f.level != "ok" and f.name not in ("speed", "training")] == []
    tidemill.train(f"pettingzoo:{name}", updates=1, run_dir=tmp_path / "run", launch="inline", quiet=True)
    assert evaluate(tmp_path / "run", episodes=2, quiet=True).mean >= 25.0  # 5 steps of 5 at least
    assert play(tmp_path / "run", tmp_path / "v.mp4", episodes=1).frames == 6
