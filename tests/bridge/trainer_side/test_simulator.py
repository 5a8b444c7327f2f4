"""Both ends together, by every layout: what worlds request reaches the trainer, and what
it sets reaches them."""

import threading
import time

import numpy as np
import pytest
from tests.bridge.ends import both_ends

from tidemill.bridge import ActionTuple, Bridge, Simulator, World
from tidemill.bridge.protocol.tables import LAYOUTS
from tidemill.core.errors import (
    ConfigError,
    DeadlineError,
    EnvironmentFault,
    PeerLost,
    SchemaError,
    SimulatorError,
)

LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


@LAYOUT
def test_observations_and_rewards_come_and_actions_go(tmp_path, layout):
    with both_ends(tmp_path, layout) as (simulator, _):
        simulator.reset()
        for tick in range(5):
            decisions, terminals = simulator.get_steps("count")
            assert decisions.obs[0].tolist() == [[agent, tick] for agent in range(3)]
            assert (
                decisions.agent_id.tolist() == [0, 1, 2]
                and len(terminals) == 0
                and decisions.action_mask is None
            )
            assert decisions.reward.tolist() == (
                [0, 0, 0] if tick == 0 else [3 * tick, 30 * tick, 300 * tick]
            )
            action = np.array([[1, 2], [10, 20], [100, 200]], np.float32) * (tick + 1)
            simulator.set_actions("count", ActionTuple(action))
            simulator.step()
        assert simulator.exchanges == 7


@LAYOUT
def test_specs_are_what_the_world_said(tmp_path, layout):
    with both_ends(tmp_path, layout, agents=4, continuous=0, branches=(3, 2)) as (simulator, _):
        spec = simulator.behavior_specs["count"]
        assert spec.max_agents == 4 and spec.observation_specs[0].shape == (2,)
        assert spec.action_spec.continuous_size == 0 and spec.action_spec.branches == (3, 2)


@LAYOUT
def test_agents_that_got_no_action_get_zeros(tmp_path, layout):
    with both_ends(tmp_path, layout) as (simulator, world):
        simulator.reset()
        simulator.set_actions("count", ActionTuple(np.full((3, 2), 7, np.float32)))
        simulator.step()
        simulator.step()
        simulator.set_action_for_agent("count", 1, ActionTuple(np.array([5, 6], np.float32)))
        simulator.step()
        simulator.set_actions("count", ActionTuple(np.ones((3, 2), np.float32)))
        simulator.set_action_for_agent("count", 2, ActionTuple(np.array([[8, 9]], np.float32)))
        simulator.step()
        simulator.step()
    got = [continuous for _, continuous, _ in world.got]
    assert got[:3] == [[7, 7]] * 3 and got[3:6] == [[0, 0]] * 3
    assert (
        got[6:9] == [[0, 0], [5, 6], [0, 0]]
        and got[9:12] == [[1, 1], [1, 1], [8, 9]]
        and got[12:15] == [[0, 0]] * 3
    )


@LAYOUT
def test_branches_and_masks(tmp_path, layout):
    def plan(tick, bridge, world):
        world.request_decision(4).set_action_mask(0, [False, True, False]).set_action_mask(1, [True, False])
        world.request_decision(5)

    with both_ends(tmp_path, layout, continuous=0, branches=(3, 2), plan=plan) as (simulator, world):
        simulator.reset()
        decisions, _ = simulator.get_steps("count")
        assert [mask.tolist() for mask in decisions.action_mask] == [
            [[False, True, False], [False] * 3],
            [[True, False], [False] * 2],
        ]
        assert decisions.forbidden.tolist() == [[False, True, False, True, False], [False] * 5]
        simulator.set_actions("count", ActionTuple(discrete=np.array([[2, 1], [0, 1]])))
        simulator.step()
    assert [discrete for _, _, discrete in world.got[:2]] == [[2, 1], [0, 1]]


def test_continuous_and_discrete_actions_at_once_in_the_layout_that_has_both(tmp_path):
    with both_ends(tmp_path, "0.3.2", continuous=2, branches=(3,)) as (simulator, world):
        simulator.reset()
        simulator.set_actions(
            "count",
            ActionTuple(np.arange(6, dtype=np.float32).reshape(3, 2), np.array([[2], [1], [0]], np.int32)),
        )
        simulator.step()
    assert world.got[:3] == [(0, [0, 1], [2]), (1, [2, 3], [1]), (2, [4, 5], [0])]


def test_a_world_that_the_layout_cannot_hold_is_named_at_the_worlds_end(tmp_path):
    with pytest.raises(PeerLost), both_ends(tmp_path, "0", continuous=2, branches=(3,)) as (_, _):
        pass


@LAYOUT
def test_agents_come_go_end_and_are_interrupted(tmp_path, layout):
    def plan(tick, bridge, world):
        if tick == 0:
            world.end_episode(7).set_reward(1.5).set_observation(0, [7, 70])
            world.request_decision(1).set_observation(0, [1, 10])
            world.interrupt_episode(8).set_reward(2.5).set_observation(0, [8, 80])
            world.request_decision(7).set_observation(0, [7, 71])
        elif tick == 1:
            world.end_episode(1)
        else:
            world.request_decision(9)

    with both_ends(tmp_path, layout, agents=5, plan=plan) as (simulator, world):
        simulator.reset()
        decisions, terminals = simulator.get_steps("count")
        assert decisions.agent_id.tolist() == [1, 7] and decisions.obs[0].tolist() == [[1, 10], [7, 71]]
        assert terminals.agent_id.tolist() == [7, 8] and terminals.interrupted.tolist() == [False, True]
        assert terminals.reward.tolist() == [1.5, 2.5] and terminals.obs[0].tolist() == [[7, 70], [8, 80]]
        simulator.set_actions("count", ActionTuple(np.array([[1, 1], [2, 2]], np.float32)))
        simulator.step()
        decisions, terminals = simulator.get_steps("count")
        assert len(decisions) == 0 and terminals.agent_id.tolist() == [1] and decisions.obs[0].shape == (0, 2)
        simulator.set_actions("count", ActionTuple(np.zeros((0, 2), np.float32)))
        simulator.step()
        assert simulator.get_steps("count")[0].agent_id.tolist() == [9]
    assert world.got[:2] == [(1, [1, 1], []), (7, [2, 2], [])]


@LAYOUT
def test_what_is_handed_out_is_a_copy(tmp_path, layout):
    with both_ends(tmp_path, layout) as (simulator, _):
        simulator.reset()
        decisions, _ = simulator.get_steps("count")
        before = decisions.obs[0].copy()
        simulator.step()
        assert (decisions.obs[0] == before).all()
        assert simulator.get_steps("count")[0].obs[0][0, 1] == 1
        decisions.obs[0][:] = 0
        assert decisions.obs[0].flags.aligned
    assert decisions.obs[0].sum() == 0


@LAYOUT
def test_a_reset_drops_what_was_asked(tmp_path, layout):
    with both_ends(tmp_path, layout) as (simulator, world):
        simulator.reset()
        simulator.step()
        simulator.step()
        assert simulator.get_steps("count")[0].obs[0][0].tolist() == [0, 2]
        simulator.reset()
        assert simulator.get_steps("count")[0].obs[0][0].tolist() == [0, 0]
    assert world.resets == 2


@LAYOUT
def test_groups_may_appear_at_any_step(tmp_path, layout):
    def plan(tick, bridge, world):
        world.request_decision(0)
        if tick in (2, 4):
            bridge.add(World(f"late{tick}", tick, [(tick, 2)], 0, [2]))
        if tick > 2:
            bridge.world("late2").request_decision(20 + tick).set_observation(0, np.full((2, 2), tick))

    with both_ends(tmp_path, layout, plan=plan) as (simulator, _):
        simulator.reset()
        seen = []
        for _ in range(6):
            seen.append(list(simulator.behavior_specs))
            simulator.set_actions("count", ActionTuple(np.ones((1, 2), np.float32)))
            simulator.step()
        assert seen == [["count"]] * 2 + [["count", "late2"]] * 2 + [["count", "late2", "late4"]] * 2
        decisions, _ = simulator.get_steps("late2")
        assert decisions.agent_id.tolist() == [26] and (decisions.obs[0] == 6).all()
        assert simulator.behavior_specs["late4"].observation_specs[0].shape == (4, 2)


class Echo:
    """Raw channels that keep what came, and send what is queued."""

    def __init__(self):
        self.queue, self.came = [], []

    def outgoing(self):
        data, self.queue = b"".join(self.queue), []
        return data

    def incoming(self, data):
        self.came.append(data)


@LAYOUT
def test_side_channels_grow_both_ways(tmp_path, layout):
    trainer, world = Echo(), Echo()

    def plan(tick, bridge, count):
        count.request_decision(0).set_observation(0, [5, tick])
        if tick:
            world.queue = [b"w" * (50 * tick)]

    with both_ends(tmp_path, layout, trainer_channels=trainer, channels=world, plan=plan) as (simulator, _):
        simulator.reset()
        for tick in range(1, 8):
            trainer.queue = [bytes([tick]) * (30 * tick * tick)]
            simulator.set_actions("count", ActionTuple(np.full((1, 2), tick, np.float32)))
            simulator.step()
            assert simulator.get_steps("count")[0].obs[0].tolist() == [[5, tick]]
    assert world.came[:7] == [bytes([tick]) * (30 * tick * tick) for tick in range(1, 8)]
    assert trainer.came[-7:] == [b"w" * (50 * tick) for tick in range(1, 8)]


def test_a_query_exchanges_side_channels_and_steps_nothing(tmp_path):
    trainer, world = Echo(), Echo()
    with both_ends(tmp_path, "0.3.2", trainer_channels=trainer, channels=world) as (simulator, ours):
        simulator.reset()
        steps = simulator.get_steps("count")
        simulator.set_actions("count", ActionTuple(np.full((3, 2), 4, np.float32)))
        trainer.queue, world.queue = [b"question"], [b"answer"]
        simulator.query()
        assert trainer.came == [b"answer"] and world.came == [b"question"]
        assert simulator.get_steps("count") is steps and ours.got == []
        simulator.step()
    assert ours.got[:3] == [(agent, [4, 4], []) for agent in range(3)]


def test_layouts_without_a_query_say_so(tmp_path):
    with both_ends(tmp_path) as (simulator, _), pytest.raises(SimulatorError, match=r"0\.3\.2"):
        simulator.query()


@LAYOUT
def test_wrong_names_agents_and_actions_are_told_and_change_nothing(tmp_path, layout):
    with both_ends(tmp_path, layout, continuous=0, branches=(3, 2)) as (simulator, _):
        simulator.reset()
        good = np.zeros((3, 2), np.int32)
        for call, says in (
            (lambda: simulator.get_steps("cuont"), 'did you mean "count"'),
            (lambda: simulator.set_actions("x", ActionTuple()), 'no group "x"'),
            (
                lambda: simulator.set_action_for_agent("count", 3, ActionTuple(discrete=good[0])),
                r"agent 3 .*\[0, 1, 2\]",
            ),
            (lambda: simulator.set_actions("count", ActionTuple(discrete=good[:2])), r"shape \[3, 2\]"),
            (lambda: simulator.set_actions("count", ActionTuple(discrete=good.astype(float))), "int32"),
            (
                lambda: simulator.set_actions("count", ActionTuple(np.zeros((3, 1), np.float32))),
                "continuous actions of shape",
            ),
            (
                lambda: simulator.set_actions("count", ActionTuple(discrete=good + np.array([3, 0]))),
                "branch 0 has 3 actions",
            ),
            (
                lambda: simulator.set_actions("count", ActionTuple(discrete=good - np.array([0, 1]))),
                "branch 1 .* action -1",
            ),
            (
                lambda: simulator.set_actions("count", ActionTuple(discrete=good.astype(np.int64) + 2**32)),
                "branch 0 .* action 4294967296",
            ),
            (lambda: simulator.set_actions("count", good), "takes an ActionTuple .* given ndarray"),
            (
                lambda: simulator.set_action_for_agent("count", 1, good[0]),
                "takes an ActionTuple .* given ndarray",
            ),
            (
                lambda: simulator.set_actions("count", ActionTuple(discrete=[[0, 0], [0], [0, 0]])),
                "differ in length",
            ),
            (
                lambda: simulator.set_action_for_agent("count", 1, ActionTuple(discrete=[[0], [0, 0]])),
                "differ in length",
            ),
        ):
            with pytest.raises(SchemaError, match=says):
                call()
        simulator.set_actions("count", ActionTuple(discrete=good + np.array([2, 1])))
        simulator.step()
        assert simulator.get_steps("count")[0].reward.tolist() == [3, 3, 3]


@LAYOUT
def test_a_step_can_be_asked_for_one_agent(tmp_path, layout):
    def plan(tick, bridge, world):
        for agent in (9, -4):
            world.request_decision(agent).set_observation(0, [agent, tick]).set_reward(
                agent / 2
            ).set_action_mask(1, [agent == 9, False])
        world.interrupt_episode(5).set_observation(0, [5, tick]).set_reward(2.5)
        world.end_episode(6)

    with both_ends(tmp_path, layout, plan=plan, agents=4, continuous=0, branches=(3, 2)) as (simulator, _):
        decisions, terminals = simulator.get_steps("count")
        assert (
            list(decisions) == [9, -4]
            and list(terminals) == [5, 6]
            and -4 in decisions
            and 5 not in decisions
        )
        one, cut = decisions[-4], terminals[5]
        assert (one.obs[0].tolist(), one.reward, one.agent_id) == ([-4, 0], -2, -4)
        assert [mask.tolist() for mask in one.action_mask] == [[False] * 3, [False] * 2] and decisions[
            9
        ].action_mask[1].tolist() == [True, False]
        assert (cut.obs[0].tolist(), cut.reward, cut.interrupted, terminals[6].interrupted) == (
            [5, 0],
            2.5,
            True,
            False,
        )
        with pytest.raises(SchemaError, match=r"agent 5 has no row.*\[9, -4\]"):
            decisions[5]


def test_an_action_that_is_not_finite_is_refused(tmp_path):
    with both_ends(tmp_path) as (simulator, _):
        bad = np.zeros((3, 2), np.float32)
        bad[1, 0] = np.nan
        with pytest.raises(SchemaError, match="continuous action 0 in row 1"):
            simulator.set_actions("count", ActionTuple(bad))


def test_numbers_that_are_not_finite_are_told_and_the_simulator_goes_on(tmp_path):
    def plan(tick, bridge, world):
        world.request_decision(11).set_observation(0, [0, np.nan if tick == 0 else 1])

    with both_ends(tmp_path, plan=plan) as (simulator, _):
        with pytest.raises(EnvironmentFault, match='group "count": observation 0 of agent 11'):
            simulator.get_steps("count")
        simulator.step()
        assert simulator.get_steps("count")[0].obs[0].tolist() == [[0, 1]]


def test_more_requests_than_room_are_told_to_who_makes_them(tmp_path):
    seen = []

    def plan(tick, bridge, world):
        for agent in range(3):
            world.request_decision(agent)
        try:
            world.end_episode(9)
        except SchemaError as error:
            seen.append(str(error))

    with both_ends(tmp_path, plan=plan) as (simulator, _):
        simulator.reset()
        assert len(simulator.get_steps("count")[0]) == 3
    assert 'world "count"' in seen[0] and "max_agents = 3" in seen[0] and "larger max_agents" in seen[0]


@LAYOUT
def test_a_simulator_that_closes_is_told_as_that_and_nothing_stays(tmp_path, layout):
    def plan(tick, bridge, world):
        world.request_decision(0)
        if tick == 2:
            bridge.close()

    with both_ends(tmp_path, layout, plan=plan) as (simulator, _):
        simulator.step()
        with pytest.raises(PeerLost, match="closed the bridge"):
            simulator.step()
    with pytest.raises(SimulatorError, match="is closed"):
        simulator.step()
    assert list(tmp_path.iterdir()) == []


@LAYOUT
def test_nothing_stays_behind(tmp_path, layout):
    with both_ends(tmp_path, layout) as (simulator, _):
        simulator.step()
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    simulator.close()
    assert list(tmp_path.iterdir()) == []


def test_a_second_trainer_at_one_file_is_refused_and_the_first_goes_on(tmp_path):
    with both_ends(tmp_path) as (simulator, _):
        with pytest.raises(ConfigError, match=r"another trainer .* holds"):
            Simulator(memory_path=tmp_path / "memory")
        simulator.step()


def test_a_deadline_names_itself_and_what_was_awaited(tmp_path):
    with pytest.raises(DeadlineError, match=r"start_seconds = 0\.3"):
        Simulator(memory_path=tmp_path / "memory", start_seconds=0.3)
    assert list(tmp_path.iterdir()) == []


def test_a_simulator_that_asks_for_nothing_after_the_first_reset_is_told_from_one_that_never_joins(tmp_path):
    def play():
        while not (tmp_path / "memory").exists():
            time.sleep(0.01)
        bridge = Bridge(tmp_path / "memory")
        while bridge.exchange():
            time.sleep(0.01)

    game = threading.Thread(target=play)
    game.start()
    simulator = Simulator(memory_path=tmp_path / "memory", start_seconds=120.0)
    simulator._start_seconds = 1.0  # it has joined, with time
    with pytest.raises(
        DeadlineError, match="joined, but asked for no decision after the first reset within start_seconds"
    ):
        simulator.reset()
    game.join(120)
    assert not game.is_alive() and list(tmp_path.iterdir()) == []


def test_who_thinks_for_long_is_waited_for_without_a_deadline_and_without_a_core(tmp_path):
    def plan(tick, bridge, world):
        if tick == 3:
            threading.Event().wait(0.8)
        world.request_decision(0)

    with both_ends(tmp_path, plan=plan) as (simulator, _):
        simulator.reset()
        simulator.step()
        simulator.step()
        begun, used = time.monotonic(), time.thread_time()
        simulator.step()
        assert time.thread_time() - used < 0.5 * (time.monotonic() - begun)


def test_a_step_in_two_halves(tmp_path):
    with both_ends(tmp_path) as (simulator, _):
        simulator.reset()
        simulator.begin()
        with pytest.raises(SimulatorError, match="finish it"):
            simulator.get_steps("count")
        while not simulator.wait(0.01):
            pass
        simulator.finish()
        assert simulator.get_steps("count")[0].obs[0][0].tolist() == [0, 1]


def test_unknown_layouts_are_refused():
    with pytest.raises(ConfigError, match=r'did you mean "0\.3\.2"'):
        Simulator(layout="0.3.3")
