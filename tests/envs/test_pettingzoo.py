"""PettingZoo's environments: every row and tick against plain loops over PettingZoo's own
interface."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pettingzoo.utils import BaseParallelWrapper, BaseWrapper
from tests.envs import zoo
from tests.envs.driver import Driver
from tests.envs.raw import Book, Stuck, raw_parallel, raw_turns, same
from tests.testing.ticking import by_looks
from tests.workers.world import World, answer_of

import tidemill
from tidemill import Actors, AgentSpec, Experiment, Limits, PettingZoo
from tidemill.api.spaces import Box, Dict, Discrete, leaves
from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.core.seeding import derive_seed
from tidemill.envs.aec import AECLanes
from tidemill.envs.parallel import ParallelLanes
from tidemill.presets.experiments import experiment_for
from tidemill.presets.ppo import kinds_of
from tidemill.testing.check_env import check_environment
from tidemill.trained.evaluate import evaluate
from tidemill.trained.load import LoadedPolicy
from tidemill.trained.play import play

ZOO = str(Path(zoo.__file__))
SPREAD = "mpe2.simple_spread_v3"
FOUR = "pettingzoo.classic.connect_four_v3"
BASE = derive_seed(1, "actor-0", "target", 0)  # what the first target of `World` is seeded with


# ---- rows, through an actor ------------------------------------------------------------


def world_of(
    environment: PettingZoo, agents: int, lanes: int, split: bool, steps: int = 3, limit: int = 0
) -> World:
    specs = [AgentSpec(match="a_.*", policy="p", samples="a", sample_steps=steps)]
    if split and agents > 1:
        specs.append(AgentSpec(match="b_.*", policy="q", samples="b", sample_steps=steps))
    else:
        specs = [specs[0].replace(match=".*")]
    return World(Actors(environment=environment, agents=tuple(specs), lanes=lanes, max_episode_steps=limit))


def chosen(agent: str, observation: Any) -> int:
    """What the policy of `World` answers."""
    return int(answer_of(np.array(observation, np.int64), 0, 0)["action"])


def check_rows(world: World, books: list[dict[str, Book]]) -> int:
    """Compare every cell of every sample with the lanes' books; return how many rows were
    compared."""
    world.begin()
    for _ in range(15):
        world.poll()
        world.drain()
    counts: dict[tuple[int, int], int] = {}
    compared = 0
    for edge, samples in world.got.items():
        (spec,) = (spec for spec in world.actors.agents if spec.samples == edge.split("/")[1])
        for sample in samples:
            for column in range(sample["done"].shape[1]):
                cells = {name: array[:, column] for name, array in sample.items()}
                lane, agent = (int(v) for v in cells["obs"][0][:2])
                number = counts[lane, agent] = counts.get((lane, agent), -1) + 1
                expected = [*books[lane].values()][agent].rows[number * spec.sample_steps :][: spec.rows]
                assert len(expected) == spec.rows, "the books end too early"
                check_column(cells, expected, f"lane {lane}, agent {agent}, sample {number}")
                compared += spec.rows
    return compared


def check_column(cells: dict[str, np.ndarray], expected: list[dict[str, Any]], place: str) -> None:
    for t, row in enumerate(expected):
        where = f"{place}, row {t}"
        assert (cells["obs"][t] == row["obs"]).all(), f"{where}: {cells['obs'][t]} is not {row['obs']}"
        last = t == len(expected) - 1  # committed before its reward came
        acted = {} if row["done"] else answer_of(np.array(row["obs"], np.int64), 0, 0)
        wanted = {name: row[name] for name in ("on_reset", "done", "truncated")} | {
            "reward": 0.0 if last else row["reward"]
        }
        wanted |= {name: acted.get(name, 0) for name in ("action", "log_prob", "value")}
        wanted |= {"version": -1 if row["done"] else 0}
        wanted |= {"info_mask": not last and (expected[t + 1]["done"] or expected[t + 1]["truncated"])}
        for name, value in wanted.items():
            assert cells[name][t] == value, f"{where}: {name} is {cells[name][t]}, not {value}"


def meadow(script: list[str], **kwargs: Any) -> PettingZoo:
    return PettingZoo(make=f"{ZOO}:Meadow", kwargs={"script": script, "base": BASE, **kwargs})


def check_meadow(
    script: list[str], lanes: int = 2, split: bool = False, limit: int = 0, own_limit: int = 0
) -> int:
    config = meadow(script).replace(max_episode_steps=own_limit)
    games = 250 // max(1, min(limit or own_limit or 99, *(len(text) for text in script))) + 2
    books = [
        raw_parallel(zoo.Meadow(script, BASE), BASE + lane, chosen, games, limit or own_limit)
        for lane in range(lanes)
    ]
    return check_rows(world_of(config, len(script), lanes, split, limit=limit), books)


letters = st.text("oh.DTdt", min_size=1, max_size=7)


@given(
    st.lists(letters, min_size=1, max_size=3),
    st.integers(2, 6),
    st.sampled_from("DTdt"),
    st.integers(1, 2),
    st.booleans(),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_rows_of_parallel_agents_that_die_appear_late_leave_and_return(others, length, end, lanes, split):
    script = ["o" * length + end, *others]
    try:
        raw_parallel(zoo.Meadow(script), 0, chosen, 1)
    except Stuck:
        assume(False)
    assert check_meadow(script, lanes, split) > 0


@pytest.mark.parametrize(
    "script",
    [
        ["ooD", "..ooD"],  # one appears in the tick in which the other dies
        ["oooT", "o.oD"],  # leaves and comes back within its episode
        ["oooooD", "oD.oT"],  # comes back after its end: a new episode
        ["oooD", "oo.."],  # leaves for good: its episode ends with the game
        ["oooT", "oo.."],  # … or is cut with it
        ["ohhoD", "oooot"],
        ["oooood", "ohDDoD", "...D"],  # the last one is finished before it was ever seen
    ],
)
@pytest.mark.parametrize("split", [False, True])
def test_rows_of_some_parallel_lives(script, split):
    assert check_meadow(script, split=split) > 20


@pytest.mark.parametrize(("limit", "own"), [(2, 0), (0, 2), (3, 0), (0, 3)])
def test_a_lane_is_cut_at_the_limit_and_nobody_begins_then(limit, own):
    """By the actor's step limit as by the environment's setting."""
    assert check_meadow(["oooooD", "oo.ooD", "..oooD"], limit=limit, own_limit=own) > 20


def table(players: int, events: list[str], **kwargs: Any) -> PettingZoo:
    return PettingZoo(
        make=f"{ZOO}:Table", kwargs={"players": players, "events": events, "base": BASE, **kwargs}
    )


words = st.builds(lambda kind, player: f"{kind}{player}", st.sampled_from("DT++"), st.integers(0, 2))


@given(
    st.lists(st.lists(words, max_size=2).map(" ".join), min_size=1, max_size=9),
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 2),
    st.booleans(),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_rows_of_agents_that_act_in_turn(events, there, cuts, lanes, split):
    kwargs = {"there": tuple(range(there)), "cuts": cuts}
    books = [
        raw_turns(zoo.Table(3, events, base=BASE, **kwargs), BASE + lane, chosen, 160)
        for lane in range(lanes)
    ]
    # with fewer a game, a sample takes too long
    assume(all(len(book.rows) > 200 or not book.rows for book in books[0].values()))
    assert check_rows(world_of(table(3, events, **kwargs), 3, lanes, split), books) > 0


def test_one_that_is_finished_before_its_first_turn_has_no_row():
    driver = Driver(table(2, ["+1 D1", "D0"], base=0).build(1, 0))
    driver.tick()
    (told,) = driver.tick()
    assert told.tick.present.tolist() == [True, False]
    assert not told.tick.done.any()
    (told,) = driver.tick()
    assert told.tick.done.tolist() == [True, False]
    assert driver.over[0].all()


def test_who_leaves_without_a_last_turn_ends_with_the_game():
    driver = Driver(table(3, ["", "", "", ""], there=(0, 1, 2), empties=True, base=0).build(1, 0))
    for _ in range(4):
        driver.tick()
    (told,) = driver.tick()
    assert told.tick.done.all() and not told.tick.present.any()
    assert (told.tick.reward > 0).all()
    assert driver.over[0].all()


# ---- ticks, of real games --------------------------------------------------------------


def whole(observation: dict[str, np.ndarray], seat: int) -> Any:
    """One seat's observation as the environment gave it."""
    parts = {name.removeprefix("obs").lstrip("."): array[seat] for name, array in observation.items()}
    return parts.get("", parts)


def ledger(driver: Driver, choose: Any, ticks: int) -> list[dict[str, Book]]:
    """Drive an environment by `choose`, and keep each seat's books by what the ticks
    tell."""
    environment = driver.environment
    names = [agent.name for agent in environment.agents]
    books = [{name: Book() for name in names} for _ in range(environment.lanes)]
    actions = [np.zeros(environment.lanes * len(group), np.int64) for group in driver.groups]
    for _ in range(ticks):
        for group, told in enumerate(driver.tick(actions=[{"action": array} for array in actions])):
            for seat, final in enumerate(told.tick.done | told.tick.truncated):
                lane, place = divmod(seat, len(driver.groups[group]))
                name = names[driver.groups[group][place]]
                book, present = books[lane][name], told.tick.present[seat]
                seen = whole(told.tick.observation, seat) if present else None
                book.pay(told.tick.reward[seat])
                if final:
                    book.end(seen, bool(told.tick.done[seat]))
                elif present:
                    actions[group][seat] = book.act(choose, name, seen)
    return books


def check_books(found: list[dict[str, Book]], wanted: list[dict[str, Book]], least: int) -> None:
    for lane, books in enumerate(found):
        for name, book in books.items():
            assert len(book.rows) >= least
            for number, row in enumerate(book.rows[:-1]):  # the last one may not have been paid yet
                expected, place = wanted[lane][name].rows[number], f"lane {lane}, {name}, row {number}"
                assert same(row["obs"], expected["obs"]), place
                assert np.float32(expected["reward"]) == np.float32(row["reward"]), place
                for field in ("action", "on_reset", "done", "truncated"):
                    assert row[field] == expected[field], f"{place}: {field}"


def by_sum(agent: str, observation: Any) -> int:
    """An action that the observation alone decides, among those that are allowed."""
    mask = observation.get("action_mask") if isinstance(observation, dict) else None
    values = observation["observation"] if mask is not None else observation
    allowed = range(5) if mask is None else np.flatnonzero(mask).tolist()
    total = int(np.floor(np.asarray(values, np.float64).sum() * 1000)) + 7 * len(allowed)
    return int(allowed[total % len(allowed)]) if len(allowed) else 0


@pytest.mark.parametrize("make", [SPREAD, "mpe2.simple_tag_v3", "mpe2.simple_speaker_listener_v4"])
def test_particle_environments_are_those_of_mpe2_step_for_step(make):
    import importlib

    lanes, seed = 3, 11
    environment = PettingZoo(make=make, kwargs={"max_cycles": 7}).build(lanes, seed)
    assert isinstance(environment, ParallelLanes)
    kinds = kinds_of(environment.agents)
    groups = [
        [i for i, agent in enumerate(environment.agents) if re.fullmatch(match, agent.name)]
        for match in kinds.values()
    ]
    choose = (
        by_sum if make != "mpe2.simple_speaker_listener_v4" else lambda agent, seen: by_sum(agent, seen) % 3
    )
    found = ledger(Driver(environment, groups), choose, 40)
    raw = importlib.import_module(make).parallel_env
    check_books(found, [raw_parallel(raw(max_cycles=7), seed + lane, choose, 8) for lane in range(lanes)], 30)


@pytest.mark.parametrize("make", [FOUR, "pettingzoo.classic.tictactoe_v3"])
def test_board_games_are_those_of_pettingzoo_move_for_move(make):
    import importlib

    lanes = 3
    environment = PettingZoo(make=make).build(lanes, 0)
    assert isinstance(environment, AECLanes)
    size = environment.agents[0].spaces.action.n
    assert environment.agents[0].spaces.observation.spaces["action_mask"] == Box(
        (size,), "int8", (0.0,), (1.0,)
    )
    games: dict[str, int] = {}

    def choose(agent: str, seen: Any) -> int:
        games[agent] = games.get(agent, 0) + 1
        return by_sum(agent, seen)

    found = ledger(Driver(environment), by_sum, 100)
    raw = importlib.import_module(make).env
    wanted = [raw_turns(raw(), lane, by_sum, 30) for lane in range(lanes)]
    check_books(found, wanted, 40)
    rewards = {row["reward"] for books in found for book in books.values() for row in book.rows}
    assert {1.0, -1.0} <= rewards  # the loser's, too, has reached the row of its last move
    assert all(
        row["reward"] == 0 for books in found for book in books.values() for row in book.rows if row["done"]
    )


def test_an_illegal_move_ends_the_game_for_both():
    driver = Driver(PettingZoo(make=FOUR).build(1, 0))
    driver.tick()

    def first_column() -> Any:
        return [{"action": np.zeros(2, np.int64)}]

    for _ in range(6):
        (told,) = driver.tick(actions=first_column())
        assert told.tick.present.sum() == 1
    assert told.tick.observation["obs.action_mask"][0].tolist() == [0, 1, 1, 1, 1, 1, 1]
    (told,) = driver.tick(actions=first_column())
    assert told.tick.done.all() and told.tick.present.all()
    assert told.tick.reward.tolist() == [-1.0, 0.0]
    (told,) = driver.tick(actions=first_column())
    assert told.reset.all()
    assert told.tick.present.tolist() == [True, False]
    assert told.tick.observation["obs.action_mask"][0].all()


# ---- what is added, and what is refused ------------------------------------------------


def test_the_global_state_is_a_part_of_every_observation():
    environment = PettingZoo(make=SPREAD, state=True).build(2, 5)
    spaces = environment.agents[0].spaces
    assert {name: leaf.shape for name, leaf in leaves(spaces.observation, "obs").items()} == {
        "obs.observation": (18,),
        "obs.global_state": (54,),
    }
    driver = Driver(environment)
    for _ in range(30):
        (told,) = driver.tick()
        seen = told.tick.observation
        # the state of simple_spread: what all agents see
        by_lane = seen["obs.observation"].reshape(2, 3 * 18)
        assert (seen["obs.global_state"].reshape(2, 3, 54) == by_lane[:, None]).all()


def test_the_state_joins_the_parts_of_a_dict_and_follows_every_move():
    environment = PettingZoo(make=f"{ZOO}:Branches", state=True).build(2, 0)
    driver = Driver(environment, [[0], [1]])
    assert isinstance(environment.agents[1].spaces.observation, Dict)
    for step in (0, 1, 2, 3, 4, 0):
        told = driver.tick()
        for part in told:
            assert (part.tick.observation["obs.global_state"][:, 0, 1] == step).all()


def test_masks_in_infos_become_parts_and_what_they_leave_out_is_allowed():
    environment = PettingZoo(make=f"{ZOO}:Branches").build(2, 0)
    seen = [[*leaves(agent.spaces.observation, "obs")] for agent in environment.agents]
    assert seen == [["obs.observation", "obs.action_mask"], ["obs"]]  # continuous actions have no mask
    driver = Driver(environment, [[0], [1]])
    for step in range(5):
        (told, _) = driver.tick(
            actions=[{"action": np.array([[0, 2], [1, 1]])}, {"action": np.full((2, 2), 3, np.float32)}]
        )
        expected = [1, 0, 0, 1, 1] if step % 2 == 0 else [1] * 5
        assert told.tick.observation["obs.action_mask"].tolist() == [expected] * 2
        assert told.tick.observation["obs.observation"][0].tolist() == [0, 0, 0, step, 0]
    given = environment.envs[1].given
    assert given["a"].tolist() == [1, 1]
    assert given["b"].tolist() == [1, 1]  # clipped to the bounds


def test_masks_of_actions_with_parts_lie_side_by_side():
    environment = PettingZoo(make=f"{ZOO}:Nested").build(2, 0)
    masks = [agent.spaces.observation.spaces["action_mask"].shape for agent in environment.agents]
    assert masks == [(7,), (3,)]
    driver = Driver(environment, [[0], [1]])
    for step in range(5):
        both = driver.tick(
            actions=[
                {
                    "action.aim": np.full((2, 2), -0.5, np.float32),
                    "action.kind": np.array([[0, 2], [1, 1]]),
                    "action.more": np.array([1, 0]),
                },
                {"action.0": np.array([2, 1]), "action.1": np.full((2, 2), 3, np.float32)},
            ]
        )
        seen = [told.tick.observation["obs.action_mask"].tolist() for told in both]
        some = [[1, 0, 0, 1, 1, 1, 1]] * 2, [[0, 1, 1]] * 2
        assert seen == ([*some] if step % 2 == 0 else [[[1] * 7] * 2, [[1] * 3] * 2])
    given = environment.envs[1].given
    assert {name: np.asarray(part).tolist() for name, part in given["a"].items()} == {
        "aim": [-0.5, -0.5],
        "kind": [1, 1],
        "more": 0,
    }
    assert given["b"][0] == 1 and given["b"][1].tolist() == [1, 1]


def test_a_team_is_paid_the_mean():
    driver = Driver(PettingZoo(make=f"{ZOO}:Branches", team_reward=True).build(1, 0), [[0], [1]])
    driver.tick()
    assert [told.tick.reward.tolist() for told in driver.tick()] == [[2.5], [2.5]]
    own = Driver(meadow(["oooD", "oD", "..oD"], base=0).build(1, 0))
    team = Driver(meadow(["oooD", "oD", "..oD"], base=0).replace(team_reward=True).build(1, 0))
    for alive in (3, 2, 1, 2):  # at first nobody is paid
        (mine,), (ours,) = own.tick(), team.tick()
        paid = mine.tick.reward[mine.tick.reward != 0]
        if len(paid):
            assert ours.tick.reward[mine.tick.reward != 0].tolist() == [np.float32(paid.mean())] * len(
                paid
            ), alive
    turns = Driver(table(2, ["", "", "", ""], there=(0, 1), base=0).replace(team_reward=True).build(1, 0))
    turns.tick()
    (told,) = turns.tick(actions=[{"action": np.array([3, 0])}])
    assert told.tick.reward.tolist() == [3 + 16 + 2, 0]  # the other has not acted yet: there is no row to pay


def test_a_game_is_cut_at_the_limit_where_agents_act_in_turn():
    driver = Driver(PettingZoo(make=FOUR, max_episode_steps=3).build(1, 0))
    for _ in range(3):
        (told,) = driver.tick()
        assert not told.tick.truncated.any()
    (told,) = driver.tick()
    assert told.tick.truncated.all() and not told.tick.done.any()
    assert told.tick.present.tolist() == [False, True]
    assert driver.tick()[0].reset.all()


def test_a_finished_lane_idles_until_its_reset():
    driver = Driver(meadow(["oD"], base=0).build(2, 0))
    nothing = np.zeros(2, bool)
    driver.tick()
    driver.tick()
    (told,) = driver.tick(reset=nothing)
    assert not told.tick.present.any() and not told.tick.done.any()
    assert (told.tick.observation["obs"] == 0).all()
    (told,) = driver.tick(reset=np.array([True, False]))
    assert told.tick.observation["obs"].tolist() == [[0, 0, 1, 0, 0], [0] * 5]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            "raise",
            r"Meadow: lane 0 raised ZeroDivisionError while stepping with actions a_0: \d, b_1: \d: the wolf "
            r"came",
        ),
        ("panic", r"Meadow: lane 0 raised Panic while stepping with actions a_0: \d, b_1: \d: the wolf came"),
        ("shape", r"lane 0: obs of agent b_1 has shape \(3,\); the observation space says \(5,\)"),
        ("nan", r"obs of agent b_1 in lane 0 is not finite"),
        ("reward", r"lane 0: reward of agent b_1 is 'much'; it must be one number"),
        (
            "unpaid",
            "lane 0: step returned an observation of agent b_1, and no reward; return one for every agent "
            "that acted",
        ),
        ("endless", "lane 0: step returned an observation of agent b_1, and no termination"),
        ("uncut", "lane 0: step returned an observation of agent b_1, and no truncation"),
        (
            "old",
            r"lane 0: step returned .* instead of \(observations, rewards, terminations, truncations, "
            r"infos\)",
        ),
        ("unknown", r"lane 0 has an agent 'stranger' that is not among its possible_agents \(a_0, b_1\)"),
        ("blind", r"lane 0: b_1 live \(env.agents\), but no agent has an observation"),
    ],
)
def test_faults_name_lane_agent_and_cause(fault, says):
    script = ["oooooD", "oooooD"] if fault != "blind" else ["ooD", "hhooD"]
    driver = Driver(meadow(script, base=0, fault=fault).build(1, 0))
    driver.tick()
    driver.tick()
    with pytest.raises(EnvironmentFault, match=says):
        driver.tick()


def test_faults_of_turns_name_the_agent():
    driver = Driver(table(2, [""] * 5, there=(0, 1), base=0, fault="raise").build(1, 0))
    driver.tick()
    driver.tick()
    with pytest.raises(
        EnvironmentFault,
        match=r"Table: lane 0 raised ZeroDivisionError while stepping: agent b_1, action \d: the table fell",
    ):
        driver.tick()
    driver = Driver(table(2, ["D1", ""], there=(0, 1), base=0, fault="undead").build(1, 0))
    driver.tick()
    with pytest.raises(EnvironmentFault, match="finished agents do not leave"):
        driver.tick()
    driver = Driver(table(2, ["", "D1", ""], there=(0, 1), base=0, fault="reborn").build(1, 0))
    driver.tick()
    driver.tick()
    with pytest.raises(
        EnvironmentFault, match="the episode of agent b_1 ended and another began within one step"
    ):
        driver.tick()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"make": "mpe2.simple_sprad_v3"},
            'there is no module "mpe2.simple_sprad_v3"; did you mean "mpe2.simple_spread_v3"',
        ),
        ({"make": "mpe2.simple_spread_v3:paralel_env"}, 'did you mean "parallel_env"'),
        ({"make": "mpe2.simple_spread_v3.parallel_env"}, 'write "mpe2.simple_spread_v3:parallel_env"'),
        (
            {"make": "pettingzoo.mpe.simple_spread_v3"},
            "have a package of their own now: mpe2.simple_spread_v3",
        ),
        ({"make": "nosuchzoo.games"}, 'needs the module "nosuchzoo", which is not installed'),
        ({"make": f"{ZOO}:not_an_env"}, "neither a pettingzoo.ParallelEnv nor a pettingzoo.AECEnv"),
        ({"make": "tests.envs.games"}, 'neither "parallel_env" nor "env"'),
        ({"make": "games.py"}, 'which of its functions makes the environment: "games.py:NAME"'),
        ({"make": f"{ZOO}:anonymous"}, "its possible_agents must name all"),
        (
            {"make": SPREAD, "kwargs": {"max_cycle": 3}},
            'has no argument "max_cycle"; did you mean "max_cycles"',
        ),
        ({"make": FOUR, "state": True}, r"has no state\(\)"),
        (
            {"make": f"{ZOO}:parallel_env", "kwargs": {"fault": "reset"}},
            "raised RuntimeError at its first reset: no grass",
        ),
        (
            {"make": f"{ZOO}:parallel_env", "kwargs": {"fault": "infos"}},
            "the infos of its first reset are None; they must be a mapping, by agent",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_with_a_cure(config, says):
    with pytest.raises(ConfigError, match=says):
        PettingZoo(**config).build(1, 0)


def test_an_environment_of_the_registry_is_made_by_its_id():
    registered = PettingZoo(
        make="pettingzoo:make", kwargs={"env_type": "aec", "id": "classic/tictactoe-v3"}
    ).build(1, 0)
    assert [agent.name for agent in registered.agents] == ["player_1", "player_2"]


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="max_episode_steps = -1"):
        PettingZoo(make=SPREAD, max_episode_steps=-1)
    with pytest.raises(ConfigError, match="lanes = 0"):
        PettingZoo(make=SPREAD).build(0, 0)
    with pytest.raises(ConfigError, match='agents "adversary_0" and "agent_0" have different spaces'):
        PettingZoo(make="mpe2.simple_adversary_v3").build(1, 0).bind([[0, 1, 2]])


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    for name in [name for name in sys.modules if name.startswith("mpe2")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        ConfigError, match=r'needs the module "pygame.*", which is not installed: pip install "mpe2"'
    ):
        PettingZoo(make=SPREAD).build(1, 0)


def test_importing_the_configuration_imports_no_simulator():
    imports = "{'pettingzoo', 'gymnasium', 'pygame', 'torch'} & {*sys.modules}"
    code = f"import sys, tidemill; tidemill.PettingZoo(make='mpe2.simple_spread_v3'); print({imports})"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "set()\n"
    )


# ---- from the command line to a video --------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        PettingZoo(make=SPREAD, state=True),
        PettingZoo(make=FOUR),
        PettingZoo(make="mpe2.simple_adversary_v3:env"),
        PettingZoo(make=f"{ZOO}:Meadow", kwargs={"script": ["oooooD", "oD.oT", "..ohoD"]}),
        PettingZoo(
            make=f"{ZOO}:Table",
            kwargs={"players": 3, "events": ["", "+2", "D1", "", "T0", ""], "there": (0, 1)},
        ),
    ],
    ids=lambda config: config.make.rpartition("/")[2],
)
def test_check_env_finds_nothing_wrong(config, monkeypatch):
    by_looks(monkeypatch)
    findings = check_environment(config, seconds=0.3)
    assert [f for f in findings if f.level != "ok" and f.name != "speed"] == []


def test_agents_of_equal_spaces_share_a_policy():
    (spread,) = experiment_for(f"pettingzoo:{SPREAD}", PettingZoo(make=SPREAD)).policies
    assert spread == "policy"
    tag = experiment_for("pettingzoo:mpe2.simple_tag_v3", PettingZoo(make="mpe2.simple_tag_v3"))
    tag.check()
    assert {spec.policy: spec.match for spec in tag.workers["actor"].agents} == {
        "adversary": r"adversary_?\d*",
        "agent": r"agent_?\d*",
    }
    assert tag.name == "mpe2-simple_tag_v3"
    world = PettingZoo(make="mpe2.simple_world_comm_v3").build(1, 0)
    assert [*kinds_of(world.agents)] == ["leadadversary", "adversary", "agent"]
    mixed = [
        tidemill.AgentInfo(name, tidemill.api.spaces.Spaces(Discrete(n), Discrete(2)))
        for name, n in (("a_0", 2), ("a_1", 3), ("1", 4))
    ]
    assert kinds_of(mixed) == {"kind0": "a_0", "kind1": "a_1", "kind2": "1"}


def train(experiment: Experiment, folder: Path, updates: int) -> Any:
    small = experiment.workers["actor"].replace(lanes=4)
    small = small.replace(agents=tuple(spec.replace(sample_steps=16) for spec in small.agents))
    experiment = experiment.replace(
        workers={**experiment.workers, "actor": small}, limits=Limits(updates=updates)
    )
    return tidemill.train(experiment, launch="inline", run_dir=folder, quiet=True)


@pytest.mark.parametrize("make", [SPREAD, "mpe2.simple_adversary_v3", f"{SPREAD}:env"])
def test_training_evaluation_and_play(make, tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    result = train(experiment_for(make, PettingZoo(make=make)), tmp_path / "run", 3)
    assert result.summary["status"] == "completed" and result.summary["updates"] == 3
    found = evaluate(tmp_path / "run", 4, lanes=2, quiet=True)
    agents = {SPREAD: [12], f"{SPREAD}:env": [12], "mpe2.simple_adversary_v3": [4, 8]}[make]
    assert [spec.episodes for spec in found.specs] == agents
    assert all(spec.length_min == spec.length_max == 25 for spec in found.specs)
    video = play(tmp_path / "run", tmp_path / "v.mp4", episodes=1)
    assert video.frames == (76 if make.endswith(":env") else 26)


def test_a_policy_of_a_run_acts_for_one_agent(tmp_path):
    train(experiment_for(SPREAD, PettingZoo(make=SPREAD)), tmp_path / "run", 1)
    policy = tidemill.load(tmp_path / "run")
    assert isinstance(policy, LoadedPolicy)
    assert 0 <= policy.act(np.zeros(18, np.float32)) < 5


def test_masked_policies_never_play_an_illegal_move(tmp_path):
    """An illegal move pays -1 and its opponent nothing; in every other game what one wins
    the other loses."""
    result = train(experiment_for(FOUR, PettingZoo(make=FOUR)), tmp_path / "run", 6)
    assert result.summary["updates"] == 6
    (found,) = evaluate(tmp_path / "run", 40, lanes=4, quiet=True, deterministic=False).specs
    assert found.episodes == 80 and sum(found.returns) == 0
    assert found.length_max > found.length_min >= 3


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (zoo.parallel_env(script=["ooD"]), "lane 1 has other possible_agents than lane 0"),
        (zoo.Choosy(), r"action_space of a_0 is Discrete\(9\) in lane 1, and Discrete\(4\) in lane 0"),
    ],
)
def test_a_lane_of_other_spaces_is_refused(other, says, monkeypatch):
    made = iter((zoo.parallel_env(), other))
    monkeypatch.setattr(PettingZoo, "_make_one", lambda *_: next(made))
    with pytest.raises(ConfigError, match=says):
        PettingZoo(make=f"{ZOO}:parallel_env").build(2, 0)


# ---- wrappers --------------------------------------------------------------------------


class Doubled(BaseParallelWrapper):
    """Shows everything so many times as large."""

    def __init__(self, env, by=2):
        super().__init__(env)
        self.by = by

    def step(self, actions):
        seen, *others = super().step(actions)
        return {agent: self.by * each for agent, each in seen.items()}, *others


class Shortened(BaseWrapper):
    """Shows the first part of everything."""

    def observation_space(self, agent):
        return spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observe(self, agent):
        seen = super().observe(agent)
        return None if seen is None else seen[:2]


def nothing(env):
    return None


def test_wrappers_go_around_each_copy_the_first_one_inside():
    plain = PettingZoo(make=SPREAD).build(2, 0)
    wrapped = PettingZoo(make=SPREAD, wrap=(Doubled, f"{__file__}:Doubled(by=3)")).build(2, 0)
    books = []
    for environment in (plain, wrapped):
        driver = Driver(environment)
        driver.tick()
        rows = driver.groups[0]
        acted = [{"action": np.zeros(2 * len(group), np.int64)} for group in driver.groups]
        assert rows
        books.append([tick.tick.observation["obs"].copy() for tick in driver.tick(actions=acted)])
        environment.close()
    for one, six in zip(*books, strict=True):
        np.testing.assert_allclose(6 * one, six, rtol=1e-6)
        assert one.any()


def test_wrappers_of_agents_that_act_in_turn_do_too():
    game = {"players": 2, "events": ["", "D0 D1"], "there": (0, 1)}
    environment = PettingZoo(make=f"{ZOO}:Table", kwargs=game, wrap=(Shortened,))
    built = environment.build(1, 0)
    assert {agent.spaces.observation for agent in built.agents} == {Box((2,), "float32")}
    built.close()


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        ("resize(84)", 'is of several, go SuperSuit\'s and your own: "supersuit:resize_v1\\(84, 84\\)"'),
        ("rescale-action", "and your own, FILE.py:NAME"),
        ("resise", 'no wrapper is called "resise"; did you mean "resize"'),
        (f"{__file__}:nothing", "returned None, which is no pettingzoo.ParallelEnv and no pettingzoo.AECEnv"),
        (f"{__file__}:Nobody", "Nobody"),
    ],
)
def test_a_wrapper_that_does_not_fit_is_refused(wrap, says):
    with pytest.raises(ConfigError, match=says):
        PettingZoo(make=SPREAD, wrap=(wrap,)).build(1, 0)
