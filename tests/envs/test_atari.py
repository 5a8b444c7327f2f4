import threading
from copy import deepcopy

import numpy as np
import pytest
from tests.envs.driver import Driver

from tidemill.api.environment import Tick
from tidemill.core.cut import flatten, unflatten
from tidemill.core.errors import ConfigError
from tidemill.envs.atari import Atari

pytest.importorskip("ale_py")


def test_frames_are_stacked_bytes_and_games_are_cut_at_the_limit():
    environment = Atari(id="ALE/Pong-v5", max_episode_steps=5, num_threads=1).build(2, 0)
    try:
        driver = Driver(environment)
        ends = []
        for _ in range(13):
            (told,) = driver.tick()
            seen = told.tick.observation["obs"]
            assert seen.shape == (2, 4, 84, 84)
            assert seen.dtype == np.uint8
            assert not told.tick.done.any()
            ends.append(bool(told.tick.truncated.all()))
        assert [k for k, end in enumerate(ends) if end] == [5, 11]
    finally:
        environment.close()
        environment.close()


def test_a_game_can_be_reset_while_the_others_go_on():
    environment = Atari(id="breakout", num_threads=1).build(2, 3)
    try:
        assert environment.resets_any
        driver = Driver(environment)
        for _ in range(6):
            (before,) = driver.tick()
        (told,) = driver.tick(reset=np.array([True, False]))
        newest, older = told.tick.observation["obs"][1, :3], before.tick.observation["obs"][1, 1:]
        assert np.array_equal(newest, older)  # lane 1's frames moved on by one
        assert not np.array_equal(told.tick.observation["obs"][0, :3], before.tick.observation["obs"][0, 1:])
    finally:
        environment.close()


def test_the_second_half_rings_when_it_is_ready():
    environment = Atari(id="pong", num_threads=1).build(1, 0)
    try:
        driver = Driver(environment)
        driver.tick()
        rung = threading.Event()
        environment.on_ready(rung.set)
        environment.send([{"action": np.zeros(1, np.int64)}], np.zeros(1, bool))
        assert rung.wait(60)
        assert environment.ready()
        environment.recv(driver.ticks)
    finally:
        environment.close()


def test_the_same_seed_gives_the_same_game():
    streams = []
    for _ in range(2):
        environment = Atari(id="pong", num_threads=2).build(2, 5)
        driver = Driver(environment, seed=1)
        streams.append([driver.tick()[0].tick.observation["obs"].tobytes() for _ in range(20)])
        environment.close()
    assert streams[0] == streams[1]


def test_open_games_are_played_again():
    game = Atari(
        id="breakout",
        num_threads=1,
        repeat_action_probability=0.25,
        max_episode_steps=16,
        noop_max=8,
        episodic_life=True,
    )
    actions, forced = np.random.default_rng(0).integers(0, 4, (50, 2)), {9: [1], 20: [0]}

    def play(environment, tick, reset, steps):
        seen = []
        for step in steps:
            reset = reset.copy()
            reset[forced.get(step, [])] = True
            environment.send([{"action": actions[step]}], reset)
            environment.recv([tick])
            reset = tick.done | tick.truncated
            seen.append((tick.observation["obs"].copy(), tick.reward.copy(), reset))
        return seen, reset

    def make(seed):
        environment = game.build(2, seed)
        environment.bind([[0]])
        environment.keep_episodes()
        space = environment.agents[0].spaces.observation
        return environment, Tick.allocate(space, 2, environment.info, environment.same_step)

    (first, tick), (second, other) = make(7), make(8)  # a resumed run has other seeds
    try:
        _, reset = play(first, tick, np.ones(2, bool), range(25))
        state = unflatten(*deepcopy(flatten(first.state())))
        assert len({each["steps"] for each in state["episodes"].values()}) == 2
        assert second.load_state(state) == {}
        ours, _ = play(first, tick, reset, range(25, 50))
        theirs, _ = play(second, other, reset, range(25, 50))
        assert sum(end.sum() for *_, end in ours) >= 2
        for one, another in zip(ours, theirs, strict=True):
            assert all(np.array_equal(mine, yours) for mine, yours in zip(one, another, strict=True))
        state["seen"]["0"][0] += 1
        assert [*second.load_state(state)] == [0]
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"id": "ALE/Pnog-v5"}, 'did you mean "pong"'),
        ({"id": "pong", "stack": 0}, "stack = 0"),
        ({"id": "pong", "repeat_action_probability": 2.0}, "between 0 and 1"),
    ],
)
def test_bad_settings(settings, says):
    with pytest.raises(ConfigError, match=says):
        Atari(**settings).build(1, 0)


@pytest.mark.parametrize(
    "name", ["ALE/MsPacman-v5", "ms_pacman", "MsPacman", "ALE/UpNDown-v5", "ALE/TicTacToe3D-v5"]
)
def test_games_go_by_both_kinds_of_name(name):
    Atari(id=name).build(1, 0).close()


def heard(environment, ticks):
    """Play at random; return the rewards' sum and what was said of each lane's episodes,
    in order."""
    sums, found, driver = np.zeros(2), [], Driver(environment)
    for _ in range(ticks):
        (told,) = driver.tick()
        sums += told.tick.reward
        for lane in (told.tick.done | told.tick.truncated).nonzero()[0].tolist():
            found.append((lane, sums[lane], environment.episode_infos(0, [lane])[0]))
            sums[lane] = 0
    environment.close()
    return found


def test_a_games_score_is_said_at_its_end_whatever_its_rewards_are():
    game = Atari(id="ms_pacman", num_threads=1, max_episode_steps=120)
    clipped, own = heard(game.build(2, 1), 122), heard(game.scored().build(2, 1), 122)
    assert len(clipped) == len(own) == 2
    for (lane, paid, episode_infos), (other, score, also) in zip(clipped, own, strict=True):
        assert lane == other and episode_infos["score"] == also["score"] == score
        assert score >= 10 * paid > 0 and episode_infos["lives"] == 3
    assert (
        game.rewarded == "rewards clipped to -1, 0 and 1; the game's score is info/score"
        and not game.scored().rewarded
    )


def test_of_an_episode_that_a_lost_life_ends_no_score_is_said():
    found = heard(
        Atari(id="ms_pacman", num_threads=1, episodic_life=True, max_episode_steps=250).build(2, 1), 252
    )
    lost = [episode_infos for _, _, episode_infos in found if episode_infos["lives"] == 2]
    assert lost and all("score" not in episode_infos for episode_infos in lost)
    lives = Atari(id="ms_pacman", episodic_life=True)
    assert (
        lives.rewarded == "rewards clipped to -1, 0 and 1 and of one life"
        and lives.replace(reward_clipping=False).rewarded == "rewards of one life"
    )


def test_one_game_for_a_server_says_its_score_too():
    game = Atari(id="ms_pacman", num_threads=1).make_one()
    game.reset(seed=1)
    steps = [game.step(step % 9) for step in range(140)]
    rewards, infos = [step[1] for step in steps], [step[4] for step in steps]
    assert set(rewards) == {0.0, 1.0} and infos[-1]["score"] >= 10 * sum(rewards) > 0
    game.close()
