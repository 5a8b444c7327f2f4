import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.bridge.ends import Counting
from tests.run.watching import wait_until

from tidemill.api.environment import Tick
from tidemill.api.spaces import Box, Dict, Discrete, MultiDiscrete, field_of, leaves
from tidemill.bridge.protocol import handover
from tidemill.bridge.protocol.tables import LAYOUTS
from tidemill.bridge.trainer_side import process
from tidemill.bridge.trainer_side import simulator as simulators
from tidemill.bridge.trainer_side.environment import SimulatorEnvironment
from tidemill.bridge.trainer_side.simulator import Simulator
from tidemill.bridge.trainer_side.spaces import Group
from tidemill.core import step_deadlines
from tidemill.core.errors import ConfigError, EnvironmentFault, TidemillError
from tidemill.core.schema import allocate, poison
from tidemill.core.tally import summary
from tidemill.envs.fault_tolerant import Slots
from tidemill.envs.lane_restarts import LaneRestarts

PATIENCE = 120.0
SIMULATORS = str(Path(__file__).parents[1] / "simulators.py")


def simulator(kind, **settings):
    return SimulatorEnvironment(path=SIMULATORS, arguments=(kind,), **settings)


class Played:
    """An environment that is played a tick at a time, each group of the simulator a group
    of the tick. `tick` returns the ticks."""

    def __init__(self, config, lanes=1, groups=None, restarts=None, deadline_s=None):
        """With `restarts` as an actor plays it that has so many."""
        self.environment = environment = config.build(lanes, 5)
        self.told = []
        if restarts is not None:
            environment.watch(deadline_s)
            assert environment.restart_lanes(LaneRestarts(restarts, 600.0, self.told.append))
        by_group, first = [], 0
        for count in environment.groups.values():
            by_group.append(list(range(first, first + count)))
            first += count
        self.groups = groups or by_group
        environment.bind(self.groups)
        spaces = [environment.agents[group[0]].spaces for group in self.groups]
        self.ticks = [
            Tick.allocate(s.observation, lanes * len(g), {}, environment.same_step)
            for s, g in zip(spaces, self.groups, strict=True)
        ]
        self.actions = []
        for s, group in zip(spaces, self.groups, strict=True):
            schema = {name: field_of(leaf) for name, leaf in leaves(s.action, "action").items()}
            self.actions.append(allocate(schema, (lanes * len(group),)))
        self.over = [np.ones((lanes, len(group)), bool) for group in self.groups]

    def tick(self):
        lanes = self.environment.lanes
        for tick in self.ticks:
            poison(
                {
                    **tick.observation,
                    **({f"final {k}": v for k, v in tick.final.items()}),
                    "reward": tick.reward,
                }
            )
        self.environment.send(self.actions, np.logical_and.reduce([over.all(axis=1) for over in self.over]))
        self.environment.recv(self.ticks)
        for over, tick in zip(self.over, self.ticks, strict=True):
            ends = tick.done | tick.truncated
            over |= ends.reshape(lanes, -1)
            over &= ~((tick.present & ~ends) | tick.restarted).reshape(lanes, -1)
        return self.ticks

    def play(self, ticks):
        for _ in range(ticks):
            self.tick()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.environment.close()


@pytest.mark.parametrize("kind", ["episodes", "after"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_every_row_of_every_episode_arrives_once_in_the_seat_of_its_agent(kind, lanes):
    """Whole episodes are put together from ticks as an actor's agent does it, and
    compared with what the simulator plays."""
    with Played(simulator(kind), lanes) as played:
        seats = len(played.ticks[0].done)
        rows, found, restarts = {}, [], 0
        for _ in range(40):
            (tick,) = played.tick()
            restarts += tick.restarted.sum()
            assert (tick.present | ~tick.restarted).all() and not (tick.done & tick.truncated).any()
            for seat in range(seats):
                ends = tick.done[seat] or tick.truncated[seat]
                if not (tick.present[seat] or ends):
                    continue
                if seat in rows:
                    rows[seat].append(
                        (
                            *(tick.final if tick.restarted[seat] else tick.observation)["obs"][seat].tolist(),
                            tick.reward[seat],
                        )
                    )
                if ends:
                    found.append((seat // (seats // lanes), bool(tick.truncated[seat]), rows.pop(seat)))
                if tick.present[seat] and (not ends or tick.restarted[seat]) and seat not in rows:
                    rows[seat] = [(*tick.observation["obs"][seat].tolist(), 0.0)]
        agents = [[episode[0][0] for _, _, episode in found].count(agent) for agent in range(3)]
        assert min(agents) >= 7 * lanes
        for _, truncated, episode in found:
            agent, number = episode[0][:2]
            length = 2 + (agent + number) % 3
            assert episode == [
                (agent, number, row, 100 * agent + 10 * number + row if row else 0.0)
                for row in range(int(length) + 1)
            ]
            assert truncated == (number % 3 == 2)
        assert restarts == 0  # the next episodes found other seats free
        if kind == "after":
            assert set(rows) <= set(range(seats))


def test_an_agent_whose_next_episode_must_take_its_seat_is_restarted():
    with Played(simulator("episodes", seats={"group": 3})) as played:
        seen = 0
        for _ in range(12):
            (tick,) = played.tick()
            assert tick.present.all()
            for seat in np.flatnonzero(tick.restarted).tolist():
                seen += 1
                agent, episode, row = tick.final["obs"][seat].tolist()
                assert row == 2 + (agent + episode) % 3 and tick.done[seat] != tick.truncated[seat]
                assert (
                    tick.observation["obs"][seat, 2] == 0
                    and tick.reward[seat] == 100 * agent + 10 * episode + row
                )
        assert seen >= 6


def test_same_step_false_refuses_what_it_says_never_happens():
    with (
        Played(simulator("episodes", same_step=False, seats={"group": 3})) as played,
        pytest.raises(
            EnvironmentFault, match=r'simulator 0 \(simulators.py\): group "group".*same_step = False'
        ),
    ):
        played.play(12)


def test_agents_that_ask_for_no_decision_are_absent_and_keep_their_seats():
    with Played(simulator("alternating")) as played:
        present = [tuple(played.tick()[0].present.tolist()) for _ in range(5)]
        assert present[:3] == [(True, True, False), (False, False, True), (True, True, False)]


def test_observations_masks_and_actions_are_those_of_the_space():
    with Played(simulator("rich")) as played:
        spaces = played.environment.agents[0].spaces
        assert spaces.action == MultiDiscrete((3, 2))
        assert list(spaces.observation.spaces) == ["observation_0", "observation_1", "action_mask"]
        assert spaces.observation.spaces["observation_1"].shape == (2, 3, 1)
        (tick,) = played.tick()
        assert tick.observation["obs.observation_0"].tolist() == [[0, 0], [1, 0]]
        assert tick.observation["obs.observation_1"][1].ravel().tolist() == [10, 11, 12, 13, 14, 15]
        # 1: allowed
        assert tick.observation["obs.action_mask"].tolist() == [[1, 0, 0, 1, 1], [1, 1, 0, 1, 1]]
        played.actions[0]["action"][:] = [[2, 1], [1, 0]]
        (tick,) = played.tick()
        assert tick.reward.tolist() == [21, 10] and tick.observation["obs.action_mask"][0].tolist() == [
            1,
            0,
            0,
            0,
            1,
        ]


def test_hybrid_actions_are_a_dict():
    with Played(simulator("hybrid", layout="0.3.2")) as played:
        action = played.environment.agents[0].spaces.action
        assert action == Dict({"continuous": Box((2,), "float32", (-1.0,), (1.0,)), "discrete": Discrete(4)})
        played.tick()
        played.actions[0]["action.continuous"][:] = [0.5, 7.0]  # clipped to 1
        played.actions[0]["action.discrete"][:] = 3
        assert played.tick()[0].reward.tolist() == [4.5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_late_group_is_refused_unless_it_was_declared(layout):
    with (
        Played(simulator("late", layout=layout)) as played,
        pytest.raises(
            EnvironmentFault, match=r'group "late" appeared after the start.*groups=\(Group\(name=.late'
        ),
    ):
        played.play(10)
    late = Group(name="late", max_agents=2, observations=((2,),), branches=(2,))
    with Played(simulator("late", layout=layout, groups=(late,))) as played:
        present = [[tick.present.tolist() for tick in played.tick()] for _ in range(8)]
        assert [early for early, _ in present] == [[True]] * 8
        assert [late for _, late in present] == [[False, False]] * 5 + [[True, False]] * 3
    with (
        Played(simulator("late", layout=layout, groups=(late.replace(max_agents=3),))) as played,
        pytest.raises(EnvironmentFault, match=r'"late" is .*max_agents=2.*max_agents=3.* was declared'),
    ):
        played.play(10)


def test_a_lane_begins_with_somebody_however_long_that_takes():
    with Played(simulator("slow")) as played:
        assert played.tick()[0].present.tolist() == [True]


@pytest.mark.parametrize("layout", ["0", "0.3.2"])
def test_agents_that_only_a_reset_makes_are_trained(layout):
    with Simulator(
        sys.executable, [SIMULATORS, "born"], layout=layout, start_seconds=PATIENCE, deadline_s=PATIENCE
    ) as one:
        assert list(one.behavior_specs) == ["group"] and len(one.get_steps("group")[0]) == 0
        one.reset()
        for _ in range(3):
            assert one.get_steps("group")[0].obs[0].tolist() == [[1], [1]]
            one.step()
    with Played(simulator("born", layout=layout, start_seconds=PATIENCE)) as played:
        assert played.tick()[0].present.tolist() == [True, True]


def test_more_agents_than_seats_are_named_with_the_cure():
    with Played(simulator("crowd")) as played, pytest.raises(EnvironmentFault, match=r"seats=\{.group.: 3\}"):
        played.play(3)
    with Played(simulator("crowd", seats={"group": 4})) as played:
        played.tick()
        assert played.tick()[0].present.tolist() == [False, True, True, False]
    with pytest.raises(ConfigError, match='did you mean "group"'):
        simulator("crowd", seats={"grup": 4}).build(1, 0)
    with pytest.raises(ConfigError, match="group"):
        simulator("crowd", seats={"group": 0}).build(1, 0)


def test_the_end_of_a_simulator_is_an_error_with_the_tail_of_its_output():
    with (
        Played(simulator("mortal")) as played,
        pytest.raises(
            EnvironmentFault, match=r"(?s)simulator 0 \(simulators.py\): .*exit code 3.*the sky fell"
        ),
    ):
        played.play(20)


def test_a_simulator_that_is_started_again_cuts_its_episodes_and_is_told_everything_again():
    with Played(simulator("mortal", parameters={"level": 3}), restarts=1) as played:
        cuts, rows = 0, []
        for _ in range(20):
            (tick,) = played.tick()
            absent = ~tick.present
            assert not (absent & tick.done).any()
            cuts += (absent & tick.truncated).sum()
            rows += tick.observation["obs"][tick.present].tolist()
        assert cuts == 1 and len(rows) == 19
        assert {(seed, level) for _, seed, level in rows} == {(5, 3)}
        (told,) = played.told
        assert "the sky fell" in told and "(restart 1 of at most 1 within 600 s, lane_restarts" in told
        with pytest.raises(EnvironmentFault, match=r"(?s)the sky fell.*made anew 1 times.*lane_restarts = 1"):
            played.play(20)


def test_a_simulator_that_is_killed_is_replaced_and_the_others_go_on():
    with Played(simulator("napping"), 2, restarts=1) as played:
        played.tick()
        os.kill(played.environment._lanes[0].simulator._process.pid, signal.SIGKILL)
        seen = []
        for _ in range(4):
            (tick,) = played.tick()
            seen.append((tick.present.tolist(), tick.truncated.tolist(), tick.observation["obs"][1].tolist()))
        cut = [lane for _, truncated, _ in seen for lane in range(2) if truncated[lane]]
        assert len(cut) == 1 and played.environment.lanes == 2
        other = 1 - cut[0]
        assert all(present[other] for present, _, _ in seen)


def test_lanes_work_at_the_same_time(tmp_path):
    """Each of four simulators answers once the others are at the same exchange: one after
    the other would come to no end."""
    meeting = SimulatorEnvironment(
        path=SIMULATORS, arguments=("meeting", str(tmp_path), "4", "{lane}"), start_seconds=240.0
    )
    with Played(meeting, 4) as played:
        for number in range(3):
            assert played.tick()[0].observation["obs"][:, 0].tolist() == [number] * 4


def test_a_slow_simulator_is_waited_for_elsewhere_and_rings(tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    gated = SimulatorEnvironment(path=SIMULATORS, arguments=("gated", str(gate)))
    with Played(gated, 2) as played:
        rung = threading.Event()
        played.environment.on_ready(rung.set)
        played.tick()
        gate.unlink()
        played.environment.send(played.actions, np.zeros(2, bool))
        assert not played.environment.ready()
        gate.touch()
        answered = False
        while not answered:  # it may have rung for the tick before
            assert rung.wait(60)
            rung.clear()
            answered = played.environment.ready()
        played.environment.recv(played.ticks)
        assert played.ticks[0].present.all()


def test_statistics_are_kept_until_they_are_taken():
    with Played(simulator("mortal"), 2) as played:
        played.play(5)
        told = summary(played.environment.statistics())
        assert told["t"] == 4 and told["exchanges"] >= 10
        assert played.environment.statistics() == {}


def test_statistics_that_come_with_an_episode_s_end_are_what_was_said_of_it():
    with Played(simulator("telling"), 2) as played:
        infos = []
        for t in range(9):
            (tick,) = played.tick()
            assert tick.done.tolist() == [t % 3 == 2] * 2
            infos += played.environment.episode_infos(0, [0, 1]) if tick.done.any() else []
        assert infos == [{"score": 10 * t + 1} for t in (2, 5, 8) for _ in range(2)]
        assert played.environment.statistics()["score"][2] >= 2 * 2 * 9  # and all of them are metrics


def test_agent_specs_may_share_out_and_join_groups_as_they_like():
    with Played(simulator("rich"), 2, groups=[[1], [0]]) as played:
        ticks = played.tick()
        assert [tick.observation["obs.observation_0"][:, 0].tolist() for tick in ticks] == [[1, 1], [0, 0]]
        played.actions[0]["action"][:], played.actions[1]["action"][:] = [2, 1], [1, 0]
        assert [tick.reward.tolist() for tick in played.tick()] == [[21, 21], [10, 10]]


def test_a_stage_of_a_curriculum_sets_environment_parameters():
    with Played(simulator("mortal")) as played:
        played.environment.enter_stage({"level": 2})
        assert played.tick()[0].observation["obs"].tolist() == [[0, 5, 2]]
        with pytest.raises(ConfigError, match="level"):
            played.environment.enter_stage({"level": "hard"})


def test_a_simulator_that_tells_nan_is_started_again_and_that_exchange_is_void():
    with Played(simulator("notanumber"), restarts=2) as played:
        cuts = 0
        for _ in range(6):
            (tick,) = played.tick()
            assert np.isfinite(tick.observation["obs"][tick.present]).all() and np.isfinite(tick.reward).all()
            cuts += (tick.truncated & ~tick.present).sum()
        (told,) = played.told
        assert cuts == 1 and 'group "group": observation 0 of agent 0' in told


def test_a_simulator_that_begins_with_nan_is_started_again_too(tmp_path):
    blind = tmp_path / "blind"
    config = SimulatorEnvironment(path=SIMULATORS, arguments=("notanumber", str(blind)))
    with Played(config, restarts=1) as played:
        blind.touch()
        seen = [played.tick()[0].observation["obs"].tolist() for _ in range(3)]
        assert seen == [[[0]], [[1]], [[2]]]
        (told,) = played.told
        assert told.startswith("simulator 0 (simulators.py): group") and "is not finite" in told


def test_what_is_not_finite_is_named_and_nothing_is_left_running():
    before = {child.pid for child in psutil.Process().children()}
    with (
        Played(simulator("notanumber")) as played,
        pytest.raises(EnvironmentFault, match=r'simulator 0 .*: group "group": observation 0 of agent 0'),
    ):
        played.play(5)
    assert {
        child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE
    } <= before


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"path": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"path": "/nowhere/world.py"}, "no file"),
        ({"path": SIMULATORS, "layout": "0.2"}, "layout"),
        (
            {"path": SIMULATORS, "restarts": 1},
            "no setting restarts any more: .*workers.actor.lane_restarts=N",
        ),
        ({"path": SIMULATORS, "deadline": 1.0}, "no setting deadline any more: it is called deadline_s"),
        ({"path": SIMULATORS, "start_seconds": 0}, "start_seconds"),
        ({"path": SIMULATORS, "parameters": {"a": "b"}}, 'parameter "a"'),
        ({"path": SIMULATORS, "parameters": {"a": {"uniform": [2, 1]}}}, "low"),
        ({"path": SIMULATORS, "engine": {"timescale": 2}}, 'did you mean "time_scale"'),
        ({"path": SIMULATORS, "arguments": ("nosuchkind",)}, "KeyError"),
        ({"arguments": ("x",)}, "path"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_left_behind(settings, said):
    with pytest.raises(TidemillError, match=said):
        SimulatorEnvironment(**settings).build(1, 0)


def test_an_editor_is_one_lane():
    with pytest.raises(ConfigError, match="lanes = 1"):
        SimulatorEnvironment().build(2, 0)
    assert SimulatorEnvironment().single and not simulator("rich").single


def test_a_simulator_that_hangs_is_ended_and_with_a_deadline_started_again():
    before = {child.pid for child in psutil.Process().children()}
    with Played(simulator("deaf")) as played:
        played.play(3)
        played.environment.send(played.actions, np.zeros(1, bool))
        assert not played.environment.ready()
    assert {child.pid for child in psutil.Process().children()} <= before
    with Played(simulator("deaf", deadline_s=120.0), restarts=1, deadline_s=1000.0) as played:
        played.play(3)
        (lane,) = played.environment._lanes
        lane.times.given = 0.5  # it hangs by then
        told = [played.tick()[0].truncated.tolist()]
        lane.times.given = 120.0
        told += [played.tick()[0].truncated.tolist() for _ in range(2)]
        assert told == [[True], [False], [False]]


def test_a_simulator_that_can_be_started_again_has_a_deadline_by_what_its_steps_took(monkeypatch):
    with Played(simulator("deaf"), restarts=1) as played:
        played.play(3)
        (lane,) = played.environment._lanes
        with monkeypatch.context() as patch:
            patch.setattr(step_deadlines, "FIRST", 0.5)
            patch.setattr(step_deadlines, "LEAST", 0.25)
            assert played.tick()[0].truncated.tolist() == [True]
        assert [played.tick()[0].truncated.tolist() for _ in range(2)] == [[False], [False]]
        assert len(lane.simulator._times._newest) == 3  # of both: nothing is known anew


@pytest.mark.parametrize("kind", ["lingering", "outlived"])
def test_a_simulator_that_lingers_is_not_waited_for_by_who_plays(kind, monkeypatch):
    assert handover._LOOK + simulators._LAST_WORDS + process._QUIET < 1.0  # as is promised
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with Played(simulator(kind, start_seconds=240.0), restarts=2) as played:
        (lane,) = played.environment._lanes
        with monkeypatch.context() as patch:
            patch.setattr(simulators, "_LINGERS", 1000.0)
            played.play(3)
            started = {child.pid for child in psutil.Process().children(recursive=True)} - before
            assert played.tick()[0].truncated.tolist() == [True] and lane.starting
            assert len(played.told) == 1 and played.environment.away
            if kind == "lingering":  # it has its time to end by itself, and its end is waited for elsewhere
                assert "closed the bridge" in played.told[0]
                assert not lane._ended.wait(0.2) and started <= {
                    child.pid for child in psutil.Process().children(recursive=True)
                }
                for pid in started:
                    os.kill(pid, signal.SIGKILL)
            else:
                assert "ended with exit code 3" in played.told[0]
            assert played.tick()[0].observation["obs"].tolist() == [[0.0]]
        played.play(2)
        assert played.tick()[0].truncated.tolist() == [True]
        assert played.tick()[0].observation["obs"].tolist() == [[0.0]]
        lane.close()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_an_editor_in_slots_is_waited_for_but_where_a_deadline_is_set(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(step_deadlines, "FIRST", 0.05)
    monkeypatch.setattr(step_deadlines, "LEAST", 0.02)
    monkeypatch.setattr("tidemill.envs.fault_tolerant.GRACE", 0.0)
    stopped = threading.Event()

    def plan(t, bridge, world):
        if t == 3:
            stopped.wait(PATIENCE)
        world.request_decision(0).set_observation(0, [0, t])

    editor = Counting(tmp_path / "ml-agents" / "default", agents=1, plan=plan)
    editor.thread.start()
    played = SimulatorEnvironment(same_step=False, start_seconds=PATIENCE)
    slot = Slots(environment=played).build(1, 0)
    try:
        slot.watch(None)
        slot.restart_lanes(lambda fault: 1)
        slot.bind([[0]])
        space = slot.agents[0].spaces
        tick = Tick.allocate(space.observation, 1, {}, False)
        actions = [
            allocate({name: field_of(leaf) for name, leaf in leaves(space.action, "action").items()}, (1,))
        ]
        for number in range(4):
            slot.send(actions, np.full(1, number == 0))
            if number == 3:
                break
            wait_until(slot.ready, PATIENCE, "it answers")
            slot.recv([tick])
            assert tick.observation["obs"].tolist() == [[0, number]]
        until = time.monotonic() + 0.5  # ten times what anything else would have
        while time.monotonic() < until:
            assert not slot.ready() and slot.faults == []
        slot.watch(0.05)
        wait_until(slot.ready, PATIENCE, "it is given up")
        assert "0.05 s" in slot.faults[0]
    finally:
        stopped.set()
        slot.close()
        editor.thread.join(PATIENCE)


def test_an_editor_that_nobody_opened_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(
        TidemillError,
        match=r"an editor.* did not join .*press play there while this waits, or raise start_seconds$",
    ):
        SimulatorEnvironment(start_seconds=0.2).build(1, 1)


def test_an_editor_that_is_open_joins_the_trainer_that_waits(tmp_path, monkeypatch):
    """Somebody presses play once the trainer waits: the world finds it without being told
    where, and a second trainer is refused."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    refused = []

    def press_play():
        lock = tmp_path / "ml-agents" / "default.trainer"
        while not lock.exists() or not lock.stat().st_size:  # what is in it is there once it is held
            time.sleep(0.01)
        try:
            SimulatorEnvironment().build(1, 0)
        except ConfigError as error:
            refused.append(str(error))
        editor.append(subprocess.Popen([sys.executable, SIMULATORS, "rich"]))

    editor = []
    player = threading.Thread(target=press_play)
    player.start()
    with Played(SimulatorEnvironment(parameters={"level": 2})) as played:
        player.join(120)
        assert played.tick()[0].present.all() and played.environment.groups == {"rich": 2}
        assert "another trainer" in refused[0]
    assert editor[0].wait(120) == 0 and not list((tmp_path / "ml-agents").iterdir())


def test_an_agent_that_ends_twice_in_one_exchange_is_told():
    """Which of the two rewards is its episode's nobody could say."""
    with (
        Played(simulator("twice")) as played,
        pytest.raises(EnvironmentFault, match=r'simulator 0 .*: group "group": agent 7 ends two episodes'),
    ):
        played.play(5)


def test_agents_that_see_nothing_are_refused():
    with pytest.raises(ConfigError, match="without any observation"):
        simulator("blind").build(1, 0)


def test_example_worlds_play_alone():
    from tidemill.bridge.worlds import corridor, reach

    for world, least in ((reach, 1.85), (corridor, 0.9199)):
        told = subprocess.run(
            [sys.executable, world.__file__, "--episodes", "60"], capture_output=True, text=True, check=True
        ).stdout
        assert float(told.split()[2]) >= least, told
