"""Worlds, as authors of simulators use them: without a trainer, from many threads, with
callbacks, and what wrong use is told."""

import sys
import tempfile
import threading

import numpy as np
import pytest
from tests.bridge.ends import both_ends

from tidemill.bridge import ActionTuple, Bridge, World
from tidemill.core.errors import ConfigError, SchemaError, SimulatorError


@pytest.fixture(autouse=True)
def _nobody_waits(tmp_path, monkeypatch):
    """No trainer waits at the default file, and none is named on the command line."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["world"])


def test_without_a_trainer_nothing_acts_where_there_is_no_heuristic():
    bridge = Bridge()
    world = bridge.add(World("w", 3, [(2,)], continuous_size=2))
    assert not bridge.has_trainer and bridge.reason == "there is no trainer"
    for _ in range(3):
        world.request_decision(5)
        world.end_episode(6)
        assert bridge.exchange()
        assert [
            (event.agent_id, event.continuous.tolist(), event.discrete.tolist()) for event in world.actions()
        ] == [(5, [0, 0], [])]


def test_without_a_trainer_the_heuristic_acts():
    def heuristic(agents, observations):
        return ActionTuple(discrete=np.stack([agents, observations[0].sum(axis=1)], axis=1))

    bridge = Bridge()
    world = bridge.add(World("w", 3, [(2,)], branches=[10, 10], heuristic=heuristic))
    world.request_decision(1).set_observation(0, [2, 3])
    world.request_decision(4).set_observation(0, [1, 1])
    assert bridge.exchange()
    assert [event.discrete.tolist() for event in world.actions()] == [[1, 5], [4, 2]]


def test_a_heuristic_of_a_wrong_shape_is_told():
    bridge = Bridge()
    world = bridge.add(
        World(
            "w",
            3,
            [(2,)],
            branches=[4],
            heuristic=lambda agents, observations: ActionTuple(discrete=np.zeros((1, 2), np.int32)),
        )
    )
    world.request_decision(1)
    with pytest.raises(SchemaError, match='world "w": its heuristic'):
        bridge.exchange()


def test_once_the_trainer_has_closed_the_heuristic_goes_on(tmp_path):
    kept = {}

    def plan(tick, bridge, world):
        kept["bridge"], kept["world"] = bridge, world
        world.request_decision(0)

    with both_ends(tmp_path, plan=plan) as (simulator, _):
        simulator.step()
    bridge, world = kept["bridge"], kept["world"]
    assert not bridge.has_trainer and bridge.reason == "the trainer closed the bridge"
    world.request_decision(8)
    assert not bridge.exchange()
    assert [event.agent_id for event in world.actions()] == [8]


@pytest.mark.parametrize("layout", ["0", "0.3.2"])
def test_a_trainer_that_closes_out_of_turn_is_heard(tmp_path, layout):
    thinking, going_on = threading.Event(), threading.Event()

    def plan(tick, bridge, world):
        if tick == 1:
            thinking.set()
            going_on.wait(60)
        world.request_decision(0)

    with both_ends(tmp_path, layout, plan=plan) as (simulator, world):
        simulator.begin()
        assert thinking.wait(60)
        simulator.close()
        going_on.set()
    assert world.bridge.reason == "the trainer closed the bridge"


def test_without_requests_there_is_no_exchange(tmp_path):
    ticks = []

    def plan(tick, bridge, world):
        ticks.append(tick)
        if tick % 10 == 9:
            world.request_decision(0).set_observation(0, [tick, 0])

    with both_ends(tmp_path, plan=plan) as (simulator, _):
        assert len(simulator.get_steps("count")[0]) == 0  # the very first step alone is answered without
        simulator.step()
        assert simulator.get_steps("count")[0].obs[0].tolist() == [[9, 0]]
        simulator.step()
        assert simulator.get_steps("count")[0].obs[0].tolist() == [[19, 0]]
    assert ticks[:20] == list(range(20))


def test_a_world_that_nobody_asked_for_anything_is_there_with_no_agents(tmp_path):
    def plan(tick, bridge, world):
        if tick == 0:
            bridge.add(World("quiet", 5, [(3,)], 1))
        world.request_decision(0)

    with both_ends(tmp_path, plan=plan) as (simulator, _):
        assert [len(steps) for steps in simulator.get_steps("quiet")] == [0, 0]
        simulator.step()


@pytest.mark.parametrize("layout", ["0", "0.3.2"])
def test_threads_make_requests_at_once_and_each_gets_its_row(tmp_path, layout):
    agents, threads = 400, 8

    def ask(world, start, tick):
        for agent in range(start, agents, threads):
            ask = world.request_decision if agent % 5 else world.end_episode
            ask(agent).set_reward(agent + tick).set_observation(0, [agent, 2 * agent])

    def plan(tick, bridge, world):
        several = [threading.Thread(target=ask, args=(world, start, tick)) for start in range(threads)]
        for thread in several:
            thread.start()
        for thread in several:
            thread.join()

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with both_ends(tmp_path, layout, agents=agents, plan=plan) as (simulator, _):
            for tick in range(4):
                decisions, terminals = simulator.get_steps("count")
                together = np.concatenate([decisions.agent_id, terminals.agent_id])
                assert sorted(together) == list(range(agents)) and set(terminals.agent_id) == set(
                    range(0, agents, 5)
                )
                for steps in (decisions, terminals):
                    assert (steps.reward == steps.agent_id + tick).all()
                    assert (steps.obs[0] == np.stack([steps.agent_id, 2 * steps.agent_id], axis=1)).all()
                simulator.step()
    finally:
        sys.setswitchinterval(switching)


def test_many_at_once_are_what_one_by_one_is(tmp_path):
    def plan(tick, bridge, world):
        mask = np.arange(12).reshape(4, 3) % 2 == 1
        world.request_decision(50)
        world.request_decisions([1, 2, 3, 4], [1.0, 2, 3, 4], [np.arange(8).reshape(4, 2)], [mask])
        world.end_episodes([5, 6], [5.0, 6], [np.ones((2, 2))], [True, False])

    with both_ends(tmp_path, agents=8, continuous=0, branches=(3,), plan=plan) as (simulator, _):
        for _ in range(2):
            decisions, terminals = simulator.get_steps("count")
            assert decisions.agent_id.tolist() == [50, 1, 2, 3, 4] and decisions.reward.tolist() == [
                0,
                1,
                2,
                3,
                4,
            ]
            assert decisions.obs[0].tolist() == [[0, 0], [0, 1], [2, 3], [4, 5], [6, 7]]
            assert decisions.forbidden.tolist() == [
                [False] * 3,
                *(np.arange(12).reshape(4, 3) % 2 == 1).tolist(),
            ]
            assert (
                terminals.agent_id.tolist() == [5, 6]
                and terminals.interrupted.tolist() == [True, False]
                and terminals.reward.tolist() == [5, 6]
            )
            simulator.step()


def test_actions_can_be_called_back(tmp_path):
    called = []
    bridge = Bridge()
    world = bridge.add(World("w", 2, [(1,)], 1, on_action=lambda event: called.append(event.agent_id)))
    world.request_decision(3)
    world.request_decision(4)
    bridge.exchange()
    assert called == [3, 4] and world.action_arrays()[0].tolist() == [3, 4]


def test_nothing_of_a_row_stays_for_the_next(tmp_path):
    def plan(tick, bridge, world):
        if tick % 2 == 0:
            world.interrupt_episode(7).set_reward(5).set_observation(0, [6, 6])
            world.request_decision(8).set_reward(5).set_observation(0, [6, 6]).set_action_mask(
                0, [True, False]
            )
        else:
            world.request_decision(9)
            world.end_episode(9)

    with both_ends(tmp_path, continuous=0, branches=(2,), plan=plan) as (simulator, _):
        simulator.step()
        decisions, terminals = simulator.get_steps("count")
        assert (
            decisions.reward.tolist() == [0]
            and decisions.obs[0].tolist() == [[0, 0]]
            and decisions.forbidden.tolist() == [[False, False]]
        )
        assert terminals.reward.tolist() == [0] and terminals.interrupted.tolist() == [False]


def test_observations_are_taken_by_shape_or_by_size():
    world = World("w", 4, [(2, 3), (1,)], 1)
    world.request_decision(0).set_observation(0, np.arange(6)).set_observation(1, 7.0)
    world.request_decision(1).set_observation(0, np.arange(6).reshape(2, 3))
    assert (world.requests.asks.obs[0][:2] == np.arange(6).reshape(2, 3)).all()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda world: world.request_decision(0).set_observation(0, [1, 2, 3]),
            r"observation 0 takes numbers of shape \[2\], not \[3\]",
        ),
        (lambda world: world.request_decision(0).set_observation(1, [1, 2]), "no observation 1"),
        (lambda world: world.request_decision(0).set_action_mask(1, [True]), "no branch 1"),
        (lambda world: world.request_decision(0).set_action_mask(0, [True]), "each of 3 actions"),
        (lambda world: world.request_decisions([1], [0], []), "1 observations, not 0"),
        (lambda world: world.request_decisions(range(5), np.zeros(5), [np.zeros((5, 2))]), "max_agents = 4"),
    ],
)
def test_wrong_requests_are_told(call, says):
    with pytest.raises(SchemaError, match=says):
        call(World("w", 4, [(2,)], branches=[3]))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda world: world.request_decisions([1, 2], np.zeros(2), [np.zeros(2)]),
            r"observation 0 of 2 agents must be of shape \[2, 2\], not \[2\]",
        ),
        (
            lambda world: world.request_decisions([1, 2], np.zeros(1), [np.zeros((2, 2))]),
            r"the rewards of 2 agents must be of shape \[2\], not \[1\]",
        ),
        (
            lambda world: world.request_decisions([1], [0], [np.zeros((1, 2))], [[True] * 3]),
            r"masks of 1 agents are of shapes \[\(1, 3\)\]",
        ),
        (
            lambda world: world.end_episodes([1, 2], [0, 0], [np.zeros((2, 2))], [True]),
            "a bool for all agents, or one for each",
        ),
        (
            lambda world: world.request_decisions(np.array([2**40]), [0], [np.zeros((1, 2))]),
            "1099511627776 cannot be an agent's id",
        ),
        (lambda world: world.request_decisions([1.5], [0], [np.zeros((1, 2))]), "agent ids are integers"),
        (lambda world: world.request_decision(2**31), "2147483648 cannot be an agent's id"),
        (lambda world: world.end_episode(np.int64(-(2**31) - 1)), "cannot be an agent's id"),
    ],
)
def test_what_cannot_be_a_row_is_told_and_takes_none(call, says):
    world = World("w", 4, [(2,)], branches=[3])
    with pytest.raises(SchemaError, match=says):
        call(world)
    assert len(world.requests) == 0


def test_worlds_are_fetched_by_name_and_named_once():
    bridge = Bridge()
    world = bridge.add(World("w", 1, [(1,)], 1))
    assert bridge.world("w") is world
    with pytest.raises(SchemaError, match='no world "v"'):
        bridge.world("v")
    with pytest.raises(ConfigError, match='a world "w" already'):
        bridge.add(World("w", 1, [(1,)], 1))


def test_a_memory_that_is_not_there_is_told(tmp_path):
    with pytest.raises(SimulatorError, match="cannot be opened"):
        Bridge(tmp_path / "none")


def test_a_second_simulator_is_refused(tmp_path):
    with both_ends(tmp_path) as (simulator, _):
        (tmp_path / "memory").write_bytes((tmp_path / "memory_").read_bytes())  # where it looks first
        with pytest.raises(ConfigError, match=r"another simulator .* has joined"):
            Bridge(tmp_path / "memory")
        simulator.step()


@pytest.mark.parametrize("given", [["--memory-path", "sub/name"], ["--memory-path=sub/name"]])
def test_the_command_line_names_a_file_in_the_shared_folder(tmp_path, monkeypatch, given):
    monkeypatch.setattr(sys, "argv", ["world", *given])
    with pytest.raises(SimulatorError, match=str(tmp_path / "ml-agents" / "sub" / "name")):
        Bridge()
