import threading
from copy import deepcopy

import gymnasium
import numpy as np
import pytest
from tests.envs.driver import Driver

from tidemill.api.environment import Tick
from tidemill.core.cut import flatten, unflatten
from tidemill.core.errors import ConfigError
from tidemill.envs.atari import Atari, Games, Lives

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
    assert game.rewarded == (
        "rewards clipped to -1, 0 and 1 and of one life, where a game has several; the game's score is "
        "info/score"
    )
    assert not game.scored().rewarded


def test_a_lost_life_ends_the_episode_and_the_game_goes_on_with_fire():
    game = Atari(id="breakout", num_threads=1)
    environment, raw = game.build(2, 1), game._games(2)
    rng, began = np.random.default_rng(1), np.ones(2, bool)
    seen, infos = raw.reset(seed=1)
    lives, score, ends = infos["lives"], np.zeros(2), {"life": 0, "game": 0}
    over, age = np.ones(2, bool), np.full(2, 9)
    tick = Tick.allocate(environment.agents[0].spaces.observation, 2, environment.info, environment.same_step)
    environment.bind([[0]])
    for number in range(400):
        actions = rng.integers(0, 4, 2)
        environment.send([{"action": actions}], began)
        environment.recv([tick])
        paid = np.zeros(2)
        if number:
            # the library begins games that are over by itself, whatever it is told
            seen, paid, done, _, infos = raw.step(np.where(began & ~over, 1, actions))
            lost = (infos["lives"] < lives) & ~done & ~over
            age = np.where(began & ~over, 0, age + 1)
            score = np.where(over, 0, score + paid)
            over, lives = done, infos["lives"]
            assert tick.done.tolist() == (lost | done).tolist()
            for lane in np.flatnonzero(lost | done).tolist():
                told = environment.episode_infos(0, [lane])[0]
                ends["game" if done[lane] else "life"] += 1
                assert told.get("score") == (score[lane] if done[lane] else None)
        else:
            over = np.zeros(2, bool)
        for lane, since in enumerate(age.tolist()):
            # frames of the life before are blank, as those before a game's first are
            shown = np.array([frame >= 3 - since for frame in range(4)])[:, None, None]
            np.testing.assert_array_equal(tick.observation["obs"][lane], seen[lane] * shown)
        np.testing.assert_array_equal(tick.reward, np.where(began, 0, paid))
        began = tick.done.copy()
    assert ends["life"] >= 4 * ends["game"] > 0
    environment.close()
    raw.close()


def test_whole_games_of_who_was_trained_by_lives_have_fire_at_each_one():
    """Who never had to press it would wait for ever."""
    config = Atari(id="breakout", num_threads=1)
    environment = config.scored().build(2, 1)
    one, driver = config.scored().make_one(), Driver(environment)
    one.reset(seed=1)

    def idle(driver):
        return driver.tick(actions=[{"action": np.zeros(driver.environment.lanes, np.int64)}])[0].tick

    idle(driver)
    ended, ticks = np.zeros(2, bool), 0
    while not ended.all():
        tick, ticks = idle(driver), ticks + 1
        if not ended[0]:
            shown, _, over, _, _ = one.step(0)
            np.testing.assert_array_equal(tick.observation["obs"][0], shown)
            assert tick.done[0] == over
        ended |= tick.done
        assert ticks < 400
    assert ticks > 60, "five lives, none of which ended the episode"
    environment.close()
    one.close()
    without = config.scored().replace(fire_lives=False).build(1, 1)
    driver = Driver(without)
    assert not any(idle(driver).done.any() for _ in range(400))
    without.close()
    assert not Atari(id="breakout", episodic_life=False).scored().fire_lives


def test_what_begins_by_a_seed_is_a_new_game_in_the_midst_of_one_too():
    """Exact runs play an episode again from its seed alone."""
    environment = Atari(id="breakout", num_threads=1).build(1, 1)
    driver, begun, begins = Driver(environment), [], True
    for _ in range(200):
        if begins:
            environment.seed(7)
        (told,) = driver.tick()
        if begins:
            begun.append(told.tick.observation["obs"].tobytes())
        begins = bool(told.tick.done[0])
    assert len(begun) > 3 and len(set(begun)) == 1
    environment.close()


def test_a_game_that_somebody_else_cuts_has_the_score_so_far():
    environment = Atari(id="ms_pacman", num_threads=1).build(1, 1)
    driver, paid = Driver(environment), 0.0
    for _ in range(110):
        (told,) = driver.tick()
        paid += told.tick.reward[0]
    assert not told.tick.done[0]
    assert environment.episode_infos(0, [0])[0]["score"] >= 10 * paid > 0
    environment.close()


def test_a_lane_that_is_reset_has_lost_no_life():
    """What the library tells with the step are the lives of the game before."""

    class Two(Script):
        def __init__(self):
            super().__init__([])
            self.num_envs, self.shown = 2, np.zeros((2, 1, 84, 84), np.uint8)
            self.lives = np.array([4, 3])

        def reset(self, *, seed=None, options=None):
            if options is not None:  # one lane alone
                self.lives = np.array([3, 3])
            return self.shown, {}

        def recv(self):
            nothing = np.zeros(2, np.bool_)
            return self.shown, np.zeros(2), nothing, nothing, {"lives": self.lives.copy()}

    games = Games(Two(), "script", 0, clip=False, lives=Lives(True, 1), picture=None)
    driver = Driver(games)
    for reset in ([True, True], [False, False], [True, False], [False, False], [False, False]):
        (told,) = driver.tick(reset=np.array(reset))
        assert not told.tick.done.any()
    games.close()


class Script(gymnasium.vector.VectorEnv):
    """A vector of one game, whose steps tell what `told` says: lives, reward, and whether
    the game is over. It begins the next game with the step after."""

    def __init__(self, told):
        self.num_envs, self.told, self.acted = 1, iter(told), []
        self.single_observation_space = gymnasium.spaces.Box(0, 255, (1, 84, 84), np.uint8)
        self.single_action_space = gymnasium.spaces.Discrete(4)
        self.shown = np.zeros((1, 1, 84, 84), np.uint8)

    def reset(self, *, seed=None, options=None):
        return self.shown, {"lives": np.array([3])}

    def send(self, actions):
        self.acted += actions.tolist()

    def recv(self):
        lives, reward, over = next(self.told)
        return (
            self.shown,
            np.array([reward]),
            np.array([over]),
            np.array([False]),
            {"lives": np.array([lives])},
        )


def test_a_game_that_ends_as_its_next_life_begins_is_told_a_step_later():
    script = Script([(3, 5.0, False), (2, 1.0, False), (0, 7.0, True), (3, 2.0, False), (0, 4.0, True)])
    games = Games(script, "script", 0, clip=False, lives=Lives(True, 1), picture=None)
    games.bind([[0]])
    tick = Tick.allocate(games.agents[0].spaces.observation, 1, games.info, games.same_step)
    told, reset = [], np.ones(1, bool)
    for _ in range(7):
        games.send([{"action": np.array([3])}], reset)
        games.recv([tick])
        reset = tick.done | tick.truncated
        score = games.episode_infos(0, [0])[0].get("score") if reset[0] else None
        told.append((tick.reward[0], bool(reset[0]), score))
    assert told == [
        (0, False, None),
        (5, False, None),
        (1, True, None),  # a life is lost
        (0, False, None),  # the next one begins, and the game is over
        (0, True, 13.0),  # another one has begun
        (0, False, None),  # which goes on
        (4, True, 6.0),
    ]
    assert script.acted == [3, 3, 1, 1, 3]
    games.close()


def test_one_game_for_a_server_says_its_score_and_goes_on_after_a_lost_life():
    config = Atari(id="breakout", num_threads=1)
    game, raw = config.make_one(), config.scored().make_one()
    first, seen = game.reset(seed=1)[0], raw.reset(seed=1)[0]
    np.testing.assert_array_equal(first, seen)
    rng, lives = np.random.default_rng(0), 0
    while True:
        action = rng.integers(4)
        shown, paid, done, _, info = game.step(action)
        seen, reward, over, _, said = raw.step(action)
        np.testing.assert_array_equal(shown, seen)
        assert paid == np.clip(reward, -1, 1)
        if over:
            break
        if done:
            lives += 1
            assert "score" not in info
            np.testing.assert_array_equal(game.reset()[0], raw.step(1)[0])
    assert lives == 4 and done and info["score"] == said["score"]
    again = game.reset()[0]
    assert game.step(0)[4] == {} and again.shape == (4, 84, 84)
    game.close()
    raw.close()
