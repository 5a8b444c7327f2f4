"""Lanes that fail and are made anew: every cell of every sample against rows made the
slow way, from the same script of faults."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import monotonic, sleep
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from tests.workers.world import World, answer_of, code_of

from tidemill.api.control_messages import Configure, Episodes, Facts, Notice, Status, pack
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.worker import Context
from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.envs.lane_restarts import SEEDS_APART
from tidemill.envs.lanes import LaneLoop
from tidemill.testing.scripted import Scripted, ScriptedEnvironment, reward_of
from tidemill.workers import actor
from tidemill.workers.actor import Actors, AgentSpec
from tidemill.workers.sample_writers.base import Columns

STEPS = 4
# (lane, life) → number of the call of that life, counted from 0, → what goes wrong in it
Plan = dict[tuple[int, int], dict[int, str]]
PLANS: dict[str, Plan] = {
    "one lane": {(1, 0): {5: "raise"}},
    "several lanes in one tick": {(0, 0): {4: "raise"}, (1, 0): {4: "nan"}, (2, 0): {4: "raise"}},
    "all lanes in one tick": {(lane, 0): {7: "infinity"} for lane in range(3)},
    "first reset": {(0, 0): {0: "raise"}, (2, 0): {0: "nan"}},
    "first step": {(1, 0): {1: "raise"}},
    "reset after a fault": {(1, 0): {5: "raise"}, (1, 1): {0: "raise"}, (1, 2): {0: "shape"}},
    "step after a fault": {(1, 0): {5: "raise"}, (1, 1): {1: "nan"}, (1, 2): {2: "raise"}},
    "at an episode's end": {(lane, 0): {3 + lane: "nan"} for lane in range(3)},
    "the reset after an end": {(lane, 0): {4 + lane: "raise"} for lane in range(3)},
    "every few steps": {(lane, life): {3 + 2 * lane: "raise"} for lane in range(3) for life in range(9)},
    "a border row": {(0, 0): {STEPS + 1: "raise"}, (1, 0): {STEPS: "raise"}, (2, 0): {STEPS + 2: "nan"}},
}


def length_of(lane: int, episode: int) -> int:
    """The first episode of lane i has 3 + i steps, later ones other numbers."""
    return 3 + (lane + 2 * episode) % 5


def ends(lane: int, episode: int) -> bool:
    """Every third episode is cut instead."""
    return (lane + episode) % 3 != 2


class FragileLane(gymnasium.Env[Any, Any]):
    """Shows (lane, life, episode, row, call); finds out by its seed which lane it is."""

    plan: ClassVar[Plan] = {}
    lives: ClassVar[dict[int, int]] = {}

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (5,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(4)
        self.lane = self.call = self.episode = -1
        self.closed = False

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.lane = seed % SEEDS_APART
            self.life = self.lives[self.lane] = self.lives.get(self.lane, -1) + 1
        self.episode, self.row = self.episode + 1, 0
        return self._told()[0], {}

    def step(self, action):
        reward = float(reward_of(self.lane, self.life, self.episode, self.row, int(action)))
        self.row += 1
        over = self.row == length_of(self.lane, self.episode)
        done = over and ends(self.lane, self.episode)
        seen, reward = self._told(reward)
        return seen, reward, done, over and not done, {}

    def _told(self, reward=0.0):
        assert not self.closed
        self.call += 1
        seen = np.array([self.lane, self.life, self.episode, self.row, self.call], np.float32)
        match self.plan.get((self.lane, self.life), {}).get(self.call):
            case "raise":
                raise ZeroDivisionError("the pole is gone")
            case "nan":
                seen[2] = np.nan
            case "infinity":
                reward = np.inf if self.row else 0.0
            case "shape":
                seen = seen[:3]
        return seen, reward

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True, kw_only=True)
class Fragile(EnvironmentConfig):
    threads: int = 0

    def build(self, lanes: int, seed: int, render: bool = False) -> LaneLoop:
        made = LaneLoop(
            [FragileLane() for _ in range(lanes)], "Fragile", 0, self.threads, make_one=FragileLane
        )
        made.max_episode_steps = 7
        return made


@dataclass
class Row:
    seen: tuple[int, ...]
    frames: tuple[tuple[int, ...], ...]
    on_reset: bool
    done: bool = False
    truncated: bool = False
    reward: float = 0.0
    info: tuple[float, int] | None = None
    count: int = 0
    action: int = 0


@dataclass
class Lane:
    """A lane's rows, made the slow way. `finished` has the episodes that count."""

    lane: int
    plan: Plan
    stack: int = 1
    rows: list[Row] = field(default_factory=list)
    finished: list[list[Row]] = field(default_factory=list)

    def play(self, version_of: Any) -> Iterator[Row]:
        """Yield row after row; the action of each is that of `version_of(number)`."""
        life, call, episode, open_rows = 0, 0, 0, list[Row]()
        while True:
            while call in self.plan.get((self.lane, life), {}):  # the reset fails
                life, call, episode = life + 1, 0, 0
            open_rows = []
            while True:
                row = len(open_rows)
                seen = (self.lane, life, episode, row, call)
                frames = (*(open_rows[-1].frames if open_rows else (seen,) * self.stack)[1:], seen)
                made = Row(seen, frames, on_reset=not row, count=row)
                over = row == length_of(self.lane, episode)
                made.done = over and ends(self.lane, episode)
                made.truncated = over and not made.done
                if over:
                    open_rows[-1].info = (sum(r.reward for r in open_rows), row)
                open_rows.append(made)
                call += 1
                lost = not over and call in self.plan.get((self.lane, life), {})
                if lost:
                    made.truncated = True
                    made.info = (sum(r.reward for r in open_rows), row)
                number = len(self.rows)
                self.rows.append(made)
                if not made.done:
                    made.action = int(answer_of(seen, version_of(number), False)["action"])
                if not (made.done or made.truncated):
                    made.reward = float(reward_of(self.lane, life, episode, row, made.action))
                yield made
                if over:
                    self.finished.append(open_rows)
                    episode += 1
                    break
                if lost:
                    life, call, episode = life + 1, 0, 0
                    break


def lanes_of(plan: Plan, lanes: int, stack: int, rows: int, version_of=lambda number: 0) -> list[Lane]:
    made = []
    for lane in range(lanes):
        found = Lane(lane, plan, stack)
        for _, _ in zip(range(rows), found.play(version_of), strict=False):
            pass
        made.append(found)
    return made


def world_of(plan: Plan, lanes: int = 3, threads: int = 0, more=None, **settings: Any) -> World:
    FragileLane.plan, FragileLane.lives = plan, {}
    world_settings = more or {}
    inference = {"inference": "ask-p"} if world_settings.get("remote") else {}
    spec = AgentSpec(match=".*", policy="p", samples="s", **inference, **settings)
    actors = Actors(
        environment=Fragile(threads=threads),
        lanes=lanes,
        agents=(spec,),
        slots=400,
        deadline_s=120.0,  # no lane is taken for one that hangs
        lane_restarts=100,
    )
    return World(actors, **world_settings)


def gather(world: World, samples: int) -> list[dict[str, np.ndarray]]:
    world.begin()
    until = monotonic() + 120
    got: list[dict[str, np.ndarray]] = []
    while len(got) < samples:
        assert monotonic() < until, f"{len(got)} samples of {list(world.got)}"
        if not world.poll():
            sleep(1e-4)  # threads have the next move
        world.drain()
        got = world.got.get("samples/s/actor-0/0", world.got.get("samples/s/actor-0", []))
    return got


def check_rows(column: dict[str, np.ndarray], rows: list[Row], last: bool, recurrent: bool) -> None:
    """Compare a column of a sample with rows. `last`: the reward of its last row is not
    known yet, nor whether the step after it is lost."""
    for at, row in enumerate(rows):
        border = last and at == len(rows) - 1
        cell = {name: array[at] for name, array in column.items()}
        assert cell["obs"].reshape(-1, 5).tolist() == [list(frame) for frame in row.frames]
        assert (cell["on_reset"], cell["done"]) == (row.on_reset, row.done)
        if row.done:
            assert (cell["version"], cell["action"], cell["value"], cell["log_prob"]) == (-1, 0, 0, 0)
        else:
            assert cell["version"] >= 0
            answer = answer_of(row.seen, int(cell["version"]), False)
            assert {name: cell[name] for name in answer} == answer
        if recurrent:
            assert cell["state.count"] == row.count
            before = code_of(*row.seen[:3], row.seen[3] - 1) if row.count else 0
            assert cell["state.code"].tolist() == [before, -before]
        if border:
            continue
        assert cell["truncated"] == row.truncated
        assert cell["reward"] == row.reward
        assert cell["info_mask"] == (row.info is not None)
        assert (cell["info.return"], cell["info.length"]) == (row.info or (0.0, 0))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    ("threads", "stack", "recurrent", "remote"),
    [(0, 1, False, False), (2, 1, True, False), (0, 2, True, True), (0, 3, False, False)],
)
def test_rows_of_lanes_that_fail(name, threads, stack, recurrent, remote) -> None:
    plan, samples = PLANS[name], 12
    world = world_of(
        plan,
        threads=threads,
        more={"recurrent": recurrent, "remote": remote},
        sample_steps=STEPS,
        frame_stack=stack,
    )
    got = gather(world, samples)
    expected = lanes_of(plan, 3, stack, samples * STEPS + 1)
    for number, sample in enumerate(got[:samples]):
        for lane in range(3):
            rows = expected[lane].rows[number * STEPS : (number + 1) * STEPS + 1]
            check_rows({n: a[:, lane] for n, a in sample.items()}, rows, True, recurrent)
    # nobody is out of step: rows are still written as slices
    assert not isinstance(world.actor.order.agents[0][1].writer, Columns)
    told = [message for message in world.sent() if isinstance(message, Notice)]
    restarts = sum(FragileLane.lives.values())
    assert world.actor._stats()["lanes/restarts"] == restarts
    assert told
    assert len(told) <= len({kind for faults in plan.values() for kind in faults.values()}) * 2
    assert all("lane " in notice.text for notice in told)
    # lost steps are none
    ticks = len(got) * STEPS
    assert world.actor.order.steps <= 3 * (ticks + STEPS) - restarts


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("mode", ["full", "after_done", "concise"])
def test_other_modes(name, mode) -> None:
    plan = PLANS[name]
    own = {"sample_steps": STEPS} if mode == "after_done" else {}
    if mode == "concise":
        own["deterministic"] = False
    world = world_of(plan, mode=mode, **own)
    got = gather(world, 40)
    expected = lanes_of(plan, 3, 1, 400)
    seen = [[tuple(row.seen) for row in lane.rows] for lane in expected]
    at = [0, 0, 0]
    for sample in got:
        for column in range(sample["done"].shape[1]):
            cells = {n: a[:, column] for n, a in sample.items()}
            lane = int(cells["obs"][0][0])
            if mode == "concise":
                rows = expected[lane].finished[at[lane]]
                at[lane] += 1
                assert cells["obs"][0].tolist() == list(rows[0].seen)
                assert (cells["info.return"][0], cells["info.length"][0]) == rows[-2].info
                assert (cells["done"][0], cells["truncated"][0]) == (rows[-1].done, rows[-1].truncated)
                continue
            first = tuple(int(x) for x in cells["obs"][0])
            assert seen[lane].index(first) == at[lane]
            rows = expected[lane].rows[at[lane] :]
            if mode == "full":
                over = next(i for i, row in enumerate(rows) if row.done or row.truncated) + 1
                check_rows({n: a[:over] for n, a in cells.items()}, rows[:over], False, False)
                at[lane] += over
            else:
                check_rows(cells, rows[: STEPS + 1], False, False)
                at[lane] += STEPS
    assert min(at) > 0


@pytest.mark.parametrize("name", PLANS)
def test_lockstep(name) -> None:
    """All rows that a sample trains are of one version, whichever lanes fail."""
    plan, samples = PLANS[name], 10
    world = world_of(plan, more={"lockstep": ("s",)}, sample_steps=STEPS)
    world.begin()
    got: list[dict[str, np.ndarray]] = []
    for _ in range(4000):
        world.poll()
        if world.consumers and any(consumer.waiting() for consumer in world.consumers.values()):
            world.publish()
            world.drain()
            (got,) = world.got.values()
        if len(got) >= samples:
            break
    expected = lanes_of(plan, 3, 1, samples * STEPS + 1, version_of=lambda number: number // STEPS)
    for number, sample in enumerate(got[:samples]):
        trained = ~(sample["done"] | sample["truncated"])[:-1]
        assert set(sample["version"][:-1][trained].tolist()) == {number}
        for lane in range(3):
            rows = expected[lane].rows[number * STEPS : (number + 1) * STEPS + 1]
            check_rows({n: a[:, lane] for n, a in sample.items()}, rows, True, False)


def test_a_lost_episode_is_no_finished_one() -> None:
    plan = PLANS["every few steps"]
    world = world_of(plan, sample_steps=STEPS)
    gather(world, 12)
    ticks = world.actor.order.ticks
    told = [message for message in world.sent() if isinstance(message, Episodes)]
    returns = [each for message in told for each in message.returns]
    expected = [
        rows[-2].info[0]
        for lane in lanes_of(plan, 3, 1, ticks + 1)
        for rows in lane.finished
        if rows[-1] in lane.rows[:ticks]
    ]
    assert sorted(returns) == sorted(expected)
    assert len(returns) > 10


# ---- the budget ------------------------------------------------------------------------


def test_one_more_than_the_budget_ends_it_with_the_first_cause() -> None:
    FragileLane.plan = {(0, life): {2: "raise" if life == 0 else "nan"} for life in range(9)}
    FragileLane.lives = {}
    spec = AgentSpec(match=".*", policy="p", samples="s", sample_steps=STEPS)
    world = World(Actors(environment=Fragile(), lanes=2, agents=(spec,), slots=400, lane_restarts=3))
    with pytest.raises(EnvironmentFault) as raised:
        gather(world, 100)
    assert str(raised.value).startswith("Fragile: lane 0 raised ZeroDivisionError while stepping with action")
    assert "lane_restarts = 3" in str(raised.value)
    assert "the last fault: Fragile: obs of agent agent in lane 0 is not finite" in str(raised.value)
    assert FragileLane.lives == {0: 3, 1: 0}
    told = [message.text for message in world.sent() if isinstance(message, Notice)]
    assert len(told) == 2  # of each cause the first
    world.actor._on_exit()
    (late,) = [message.text for message in world.sent() if isinstance(message, Notice)]
    assert late.startswith("1 more of: Fragile: obs of agent agent in lane 0 is not finite")


def test_without_a_budget_the_first_fault_ends_it() -> None:
    FragileLane.plan, FragileLane.lives = {(1, 0): {3: "raise"}}, {}
    spec = AgentSpec(match=".*", policy="p", samples="s", sample_steps=STEPS)
    world = World(Actors(environment=Fragile(), lanes=2, agents=(spec,), lane_restarts=None))
    with pytest.raises(EnvironmentFault, match="lane 1 raised ZeroDivisionError"):
        gather(world, 10)
    assert FragileLane.lives == {0: 0, 1: 0}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lane_restarts": 0}, "lane_restarts = 0"),
        ({"lane_restarts": -2}, "lane_restarts = -2"),
        ({"lane_restarts_within_s": 0.0}, "lane_restarts_within_s = 0.0"),
        ({"lane_restarts": None, "lane_restarts_within_s": 60.0}, "lane_restarts_within_s"),
    ],
)
def test_budgets_that_cannot_be(settings, says) -> None:
    with pytest.raises(ConfigError, match=says):
        Actors(environment=Fragile(), **settings)


# ---- several agents, out of step -------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FragileTeams(EnvironmentConfig):
    """`Scripted` whose lives fail in ticks `faults`, one after the other. Lanes are
    numbered 8 · life + lane."""

    scripted: Scripted
    lives: ClassVar[int] = 0
    faults: ClassVar[tuple[int, ...]] = ()

    def build(self, lanes: int, seed: int, render: bool = False) -> "Team":
        life, FragileTeams.lives = FragileTeams.lives, FragileTeams.lives + 1
        fault = self.faults[life] if life < len(self.faults) else None
        scripted = self.scripted.replace(**({} if fault is None else {"fault": "nan", "fault_tick": fault}))
        return Team(scripted, lanes, life)


class Team(ScriptedEnvironment):
    def __init__(self, config: Scripted, lanes: int, life: int) -> None:
        super().__init__(config, lanes)
        self.life = life

    def recv(self, ticks) -> None:
        super().recv(ticks)
        for tick in ticks:
            for leaves in (tick.observation, tick.final):
                for leaf in leaves.values():
                    leaf[:, 0] += 8 * self.life


TEAMS = {
    "in step": Scripted(agents=2, shortest=3, longest=9),
    "by turns": Scripted(agents=2, turns=2, shortest=3, longest=9),
    "deaths": Scripted(agents=3, deaths=True, shortest=3, longest=9),
    "deaths by turns": Scripted(agents=3, turns=3, deaths=True, shortest=4, longest=9),
    "two rows in a tick": Scripted(agents=2, deaths=True, same_step=True, shortest=3, longest=9),
}


@pytest.mark.parametrize("faults", [(5, 1, 7), (0, 3, 1, 1, 12)])
@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("name", TEAMS)
def test_all_agents_of_all_lanes(name, lockstep, faults) -> None:
    """Every seat's rows go on without a gap, and end where its environment was lost."""
    FragileTeams.lives, FragileTeams.faults = 0, faults
    spec = AgentSpec(match=".*", policy="p", samples="s", sample_steps=STEPS)
    environment = FragileTeams(scripted=TEAMS[name])
    world = World(
        Actors(environment=environment, lanes=2, agents=(spec,), slots=400, max_episode_steps=50),
        lockstep=("s",) if lockstep else (),
    )
    world.begin()
    for _ in range(100 if lockstep else 20):  # the last life begins in the first five
        world.poll()
        if any(consumer.waiting() for consumer in world.consumers.values()):
            world.publish()
            world.drain()
    (got,) = world.got.values()
    assert len(got) > 20
    assert FragileTeams.lives == len(faults) + 1
    seats: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for sample in got:
        for column in range(sample["done"].shape[1]):
            cells = [{n: a[at, column] for n, a in sample.items()} for at in range(STEPS + 1)]
            cells = [cell for cell in cells if cell["version"] >= 0 or cell["done"] or cell["truncated"]]
            lane, agent = cells[0]["obs"][:2].astype(int).tolist()
            rows = seats.setdefault((lane % 8, agent), [])
            if rows:  # the border row, as it is known now
                assert rows[-1]["obs"].tolist() == cells[0]["obs"].tolist()
                rows.pop()
            rows += cells
    scripted, lost = TEAMS[name], 0
    for rows in seats.values():
        total, began = 0.0, 0
        for at, (row, after) in enumerate(pairwise(rows)):
            lane, agent, episode, number, tick = row["obs"][:5].astype(int).tolist()
            life, final = lane // 8, row["done"] or row["truncated"]
            began = at if row["on_reset"] else began
            total = 0.0 if row["on_reset"] else total
            if not final or after["on_reset"] or not (lockstep and scripted.turns > 1):
                assert after["on_reset"] == final
            else:
                total += row["reward"]  # who is absent where a sample ends is cut there for training alone
                continue
            assert not (row["done"] and row["truncated"])
            if not final:
                assert after["obs"][:4].tolist() in (
                    [lane, agent, episode, number + 1],
                    [lane, agent, episode, number],  # closed while absent: seen once more
                )
                total += row["reward"]
                continue
            assert row["reward"] == 0
            gone = int(after["obs"][0]) // 8 != life
            natural = row["done"] or tick >= int(scripted.length(lane % 8, episode)) or not gone
            if natural:
                assert rows[at - 1]["info_mask"] or lockstep
                continue
            lost += 1
            assert row["truncated"]
            assert row["version"] >= 0
            assert row["info_mask"]
            assert (row["info.return"], row["info.length"]) == (total, at - began)
    assert lost >= len(faults) - 1


@dataclass(frozen=True, kw_only=True)
class Connected(Fragile):
    """Fragile lanes that are mere connections."""

    remote = True
    built: ClassVar[list[LaneLoop]] = []

    def build(self, lanes: int, seed: int, render: bool = False) -> LaneLoop:
        made = super().build(lanes, seed, render)
        made.needs_maker = False
        self.built.append(made)
        return made


def test_what_a_next_life_has_made_is_closed_where_its_lanes_do_not_fit(monkeypatch) -> None:
    def full(context: Context, config: Actors, seed: int) -> None:
        raise ConfigError("no room for so many lanes")

    monkeypatch.setattr(actor, "check_lanes", full)
    Connected.built.clear()
    world = World(replace(world_of({}).actors, environment=Connected()))
    ends, link = world.ends["actor-0"]
    worker = world.actors.build(Context(world.experiment, "actor-0", world.actors, ends, life=1))
    link.send(pack(Configure(Facts())))
    until = monotonic() + 120
    while not worker.ended:
        assert monotonic() < until
        worker.run_once()
        sleep(1e-4)
    failed = world.sent()[-1]
    assert isinstance(failed, Status) and "no room" in failed.error
    (made,) = Connected.built
    assert not made.envs  # it is closed
