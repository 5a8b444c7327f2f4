import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.envs.driver import Driver

from tidemill.api.environment import Tick
from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.testing.scripted import Free, Scripted, reward_of

CONFIGS = st.builds(
    lambda turns, shortest, extra, **rest: Scripted(
        turns=turns,
        shortest=max(shortest, turns),
        longest=max(shortest, turns) + extra,
        same_step=False,
        **rest,
    ),
    agents=st.integers(1, 5),
    kinds=st.integers(1, 2),
    turns=st.integers(1, 3),
    shortest=st.integers(1, 5),
    extra=st.integers(0, 6),
    truncations=st.booleans(),
    deaths=st.booleans(),
)


def groups_of(config):
    return [g for g in (list(range(k, config.agents, config.kinds)) for k in range(config.kinds)) if g]


@settings(max_examples=40)
@given(config=CONFIGS, lanes=st.integers(1, 4), seed=st.integers(0, 9))
def test_every_seat_tells_its_known_story(config, lanes, seed):
    """Follow each seat on its own, as plainly as can be, and compare each of its
    numbers."""
    driver = Driver(config.build(lanes, 0), groups_of(config), seed)
    episode = [-1] * lanes
    ticks = [0] * lanes
    row, owed = {}, {}
    alive, open_ = {}, {}
    for _ in range(40):
        told = driver.tick()
        for lane in range(lanes):
            if told[0].reset[lane]:
                episode[lane] += 1
                ticks[lane] = 0
            else:
                ticks[lane] += 1
            over = ticks[lane] >= config.length(lane, episode[lane])
            cut = over and config.cut(lane, episode[lane])
            for group, said in zip(driver.groups, told, strict=True):
                for place, agent in enumerate(group):
                    seat, key, tick = lane * len(group) + place, (lane, agent), said.tick
                    if said.reset[lane]:
                        row[key], owed[key], alive[key], open_[key] = 0, 0, True, False
                    elif not alive[key]:
                        assert not tick.present[seat] and not tick.done[seat] and not tick.truncated[seat]
                        continue
                    elif open_[key]:
                        owed[key] += reward_of(
                            lane, agent, episode[lane], row[key], said.actions["action"][seat]
                        )
                        row[key] += 1
                    dies = ticks[lane] >= config.death(lane, agent, episode[lane])
                    on_turn = ticks[lane] % config.turns == agent % config.turns
                    assert tick.present[seat] == (on_turn or dies)
                    assert tick.done[seat] == (dies or (over and not cut))
                    assert tick.truncated[seat] == (bool(cut) and not dies)
                    ends = tick.done[seat] or tick.truncated[seat]
                    if tick.present[seat]:
                        seen = [lane, agent, episode[lane], row[key], ticks[lane]]
                        assert tick.observation["obs"][seat, :5].tolist() == seen
                    assert tick.reward[seat] == (owed[key] if tick.present[seat] or ends else 0)
                    if tick.present[seat] or ends:
                        owed[key] = 0
                    open_[key] = bool(tick.present[seat])
                    alive[key] = not ends


@settings(max_examples=20)
@given(agents=st.integers(1, 3), deaths=st.booleans(), lanes=st.integers(1, 3))
def test_same_step_tells_the_same_rows_in_fewer_ticks(agents, deaths, lanes):
    def rows(same_step):
        driver = Driver(Scripted(agents=agents, deaths=deaths, same_step=same_step).build(lanes, 0))
        story = [[] for _ in range(lanes * agents)]
        for _ in range(60):
            (said,) = driver.tick(actions=[{"action": np.zeros(lanes * agents, np.int64)}])
            tick = said.tick
            for seat, seen in enumerate(story):
                if tick.restarted[seat]:
                    seen.append(
                        (*tick.final["obs"][seat], tick.reward[seat], tick.done[seat], tick.truncated[seat])
                    )
                    seen.append((*tick.observation["obs"][seat], 0, False, False))
                elif tick.present[seat]:
                    seen.append(
                        (
                            *tick.observation["obs"][seat],
                            tick.reward[seat],
                            tick.done[seat],
                            tick.truncated[seat],
                        )
                    )
        return story

    for there, here in zip(rows(True), rows(False), strict=True):
        assert len(there) >= len(here)
        assert there[: len(here)] == here


def test_rewards_tell_rows_apart_exactly():
    lane, agent, episode, row, action = np.meshgrid(
        np.arange(8), np.arange(16), np.arange(4), np.arange(20), np.arange(4), indexing="ij"
    )
    rewards = reward_of(lane, agent, episode, row, action).ravel()
    assert len(np.unique(rewards)) == rewards.size
    assert np.array_equal(rewards.astype(np.float32).astype(np.int64), rewards)


def test_lanes_end_at_different_ticks_and_in_both_ways():
    config = Scripted()
    lengths = config.length(np.arange(8)[:, None], np.arange(20)[None, :])
    assert lengths.min() >= config.shortest
    assert lengths.max() <= config.longest
    assert len(np.unique(lengths[:, 0])) >= 4


@pytest.mark.parametrize("fault", ["raise", "shape", "nan", "reward"])
def test_faults_come_when_they_are_due(fault):
    driver = Driver(Scripted(agents=2, fault=fault, fault_tick=3).build(2, 0))
    for _ in range(3):
        driver.tick()
    with pytest.raises(EnvironmentFault, match="lane 1"):
        driver.tick()


def test_a_hang_is_never_ready_and_ends_with_close():
    environment = Scripted(fault="hang", fault_tick=0).build(1, 0)
    driver = Driver(environment)
    environment.send([{"action": np.zeros(1, np.int64)}], np.ones(1, bool))
    assert not environment.ready()
    threading.Timer(0.05, environment.close).start()
    with pytest.raises(EnvironmentFault, match="hung"):
        environment.recv(driver.ticks)


def test_a_slow_tick_is_not_ready_at_once_and_rings():
    environment = Scripted(delay=0.2).build(1, 0)
    driver = Driver(environment)
    rung = threading.Event()
    environment.on_ready(rung.set)
    began = time.monotonic()
    environment.send([{"action": np.zeros(1, np.int64)}], np.ones(1, bool))
    assert rung.wait(60)
    assert time.monotonic() - began >= 0.19
    environment.recv(driver.ticks)
    assert driver.ticks[0].observation["obs"].tolist() == [[0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    "settings_",
    [
        {"agents": 0},
        {"kinds": 3},
        {"shortest": 5, "longest": 4},
        {"turns": 4},
        {"same_step": True, "turns": 2},
    ],
)
def test_impossible_settings_are_refused(settings_):
    with pytest.raises(ConfigError):
        Scripted(**settings_)


def test_free_agents_die_at_the_given_rate_and_lanes_begin_again():
    environment = Free(agents=16, death_rate=0.05).build(8, 0)
    driver = Driver(environment)
    deaths = seats = resets = 0
    alive = np.zeros(128, bool)
    for _ in range(400):
        (said,) = driver.tick()
        alive |= np.repeat(said.reset, 16)
        assert np.array_equal(said.tick.present, alive)
        assert not np.any(said.tick.done & ~alive)
        assert not np.any(said.tick.observation["obs"])
        alive &= ~said.tick.done
        deaths = deaths + int(said.tick.done.sum())
        seats = seats + int(said.tick.present.sum())
        resets = resets + int(said.reset.sum())
    assert 0.03 < deaths / seats < 0.07
    assert resets > 8


def test_free_without_deaths_never_ends():
    environment = Free(agents=2).build(3, 0)
    driver = Driver(environment)
    for k in range(5):
        (said,) = driver.tick()
        assert said.reset.all() == (k == 0)
        assert said.tick.present.all()


def test_ticks_are_not_kept():
    """The buffers of the next tick may be others."""
    environment = Scripted().build(2, 0)
    driver = Driver(environment)
    driver.tick()
    kept = driver.ticks[0]
    before = kept.observation["obs"].copy()
    driver.ticks = [Tick.allocate(driver.spaces[0].observation, 2, {}, False)]
    driver.ticks[0].observation["obs"] = np.zeros((4, 5), np.float32)[::2]  # apart in memory
    (said,) = driver.tick(reset=np.zeros(2, bool))
    assert said.tick.observation["obs"][:, 3].tolist() == [1, 1]
    assert np.array_equal(kept.observation["obs"], before)
