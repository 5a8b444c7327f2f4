"""Lanes that fail while a replay memory is filled, and are made anew: every cell of every
arrival against rows made the slow way, what the limiter counts, and whole runs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import gymnasium
import numpy as np
import pytest
from tests.workers.test_lane_restarts import (
    PLANS,
    Fragile,
    FragileLane,
    Lane,
    Plan,
    Row,
    answer_of,
    code_of,
    lanes_of,
)
from tests.workers.world import World

import tidemill
from tidemill import Gymnasium, GymnasiumVector, ReplayActors
from tidemill.api.control_messages import Episodes
from tidemill.core.user_code_loading import load_attribute, load_file
from tidemill.store.checkpoint import read_newest
from tidemill.trained.retrain import retrain

LANES, TICKS = 3, 60
WALK = Path(__file__).parents[1] / "run" / "limited.py"
limited = load_file(WALK, "test")


def arrivals(rows: list[Row], recurrent: bool) -> list[dict[str, Any]]:
    """The arrivals of a lane: what a row says of its action comes with the next one. A
    step that was lost is voided in the first row of the episode after it."""
    made, before = list[dict[str, Any]](), None
    for row in rows:
        lost = before is not None and before.truncated and before.info is not None
        own_lost = row.truncated and row.info is not None
        arrival = {
            "obs": np.array(row.frames, np.float32),
            "on_reset": row.on_reset,
            "done": row.done,
            "truncated": row.truncated and not own_lost,
            "voided": row.on_reset and lost,
            "version": -1,
            "policy": -1,
            "action": 0,
            "log_prob": 0.0,
            "value": 0.0,
            "reward": 0.0,
            "info_mask": False,
            "info.return": 0.0,
            "info.length": 0,
        }
        if not row.on_reset:
            assert before is not None
            arrival |= {"version": 0, "policy": 0, "reward": before.reward}
            arrival |= answer_of(before.seen, 0, False)
            if before.info is not None:
                arrival |= dict(zip(("info.return", "info.length"), before.info, strict=True))
                arrival["info_mask"] = True
        if recurrent:
            code = code_of(*row.seen[:3], row.seen[3] - 1) if row.count else 0
            arrival |= {"state.count": row.count, "state.code": [code, -code]}
        made.append(arrival)
        before = row
    return made


def world_of(plan: Plan, threads: int = 0, **settings: Any) -> Callable[..., World]:
    """Return what makes a world of lanes that fail by this plan."""
    FragileLane.plan, FragileLane.lives = plan, {}
    actors = ReplayActors(
        environment=Fragile(threads=threads),
        lanes=LANES,
        ring=1,
        deadline_s=120.0,  # no lane is taken for one that hangs
        lane_restarts=100,
        **settings,
    )
    return partial(World, actors)


def play(world: World, count: int) -> list[dict[str, np.ndarray]]:
    """Play until so many samples have come, and return all."""
    until, samples = monotonic() + 120, list[dict[str, np.ndarray]]()
    while len(samples) < count:
        assert monotonic() < until, f"{len(samples)} samples of {list(world.got)}"
        if not world.poll():
            sleep(1e-4)  # threads have the next move
        world.drain()
        samples = next(iter(world.got.values()), [])
    return samples


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    ("threads", "stack", "recurrent", "remote"),
    [(0, 1, False, False), (2, 1, True, False), (0, 2, True, True)],
)
def test_arrivals_of_lanes_that_fail(name, threads, stack, recurrent, remote) -> None:
    world = world_of(PLANS[name], threads, frame_stack=stack, inference="answers" if remote else "inline")(
        recurrent=recurrent, remote=remote
    )
    world.begin()
    samples = play(world, TICKS)
    every = lanes_of(PLANS[name], LANES, stack, len(samples) + 1)
    for lane in every:
        for number, (sample, row) in enumerate(
            zip(samples, arrivals(lane.rows[: len(samples)], recurrent), strict=True)
        ):
            cell = {name: array[0, lane.lane] for name, array in sample.items()}
            cell["obs"] = cell["obs"].reshape(row["obs"].shape)
            assert {*cell} == {*row}
            for field, value in row.items():
                assert np.array_equal(cell[field], value), (
                    f"lane {lane.lane}, arrival {number}: {field} is {cell[field]}, not {value}"
                )
    restarts, order = sum(FragileLane.lives.values()), world.actor.order
    assert world.actor._stats()["lanes/restarts"] == restarts > 0
    # lost steps, and resets, are none
    assert order.steps == sum(int((sample["version"] >= 0).sum()) for sample in samples)
    told = [message for message in world.sent() if isinstance(message, Episodes)]
    returns = [each for message in told for each in message.returns]
    assert sorted(returns) == sorted(finished(every, len(samples)))


def test_episodes_count_for_the_stage_in_which_they_begin_also_those_of_lanes_made_anew() -> None:
    world = world_of(PLANS["every few steps"])()
    world.begin()
    begun = len(play(world, 20))
    world.actor.order.enter_stage(1, {})
    begun = len(play(world, begun + 20))  # by then all episodes of before are over
    assert {message.stage for message in world.sent() if isinstance(message, Episodes)} == {0, 1}
    play(world, begun + 20)
    told = [message for message in world.sent() if isinstance(message, Episodes)]
    assert {message.stage for message in told} == {1}


def finished(every: list[Lane], count: int) -> list[float]:
    """The returns of the episodes that were over, and none of those that were lost."""
    return [
        rows[-2].info[0]  # type: ignore[index]
        for lane in every
        for rows in lane.finished
        if any(rows[-1] is row for row in lane.rows[:count])
    ]


# ---- whole runs ------------------------------------------------------------------------


def run(folder: Path, environment: Any, **settings: Any) -> Any:
    """Train a policy of a replay memory on it. Return what the limiter had counted at the
    end, once that is right."""
    actor = {"lane_restarts": 1000, **settings.pop("actor", {})}
    made = limited.experiment(environment=environment, ratio="1/2", journal=True, **settings)
    made = made.replace(workers={**made.workers, "actor": made.workers["actor"].replace(**actor)})
    tidemill.train(made, launch="inline", run_dir=folder, source=WALK, quiet=True)
    n = read_newest(folder / "checkpoints" / "policy")[2]["limiter"]
    assert n["started"] == n["committed"] + n["voided"]
    assert n["tasks"] == (n["committed"] - n["waived"]) // 2
    return n


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("threads", [0, 1])
def test_a_run_that_lost_steps_is_trained_again_from_its_journal(exact, threads, tmp_path) -> None:
    load_attribute(f"{WALK}:Walk", "make").steps = 0  # of all tests in this process
    fails = {"fails": tuple(range(5, 10_000, 9))}
    walk = Gymnasium(make=f"{WALK}:Walk", kwargs=fails, threads=threads)
    n = run(tmp_path / "run", walk, exact=exact)
    again = retrain(tmp_path / "run")
    assert again.same and again.committed == n["committed"] and again.voided == n["voided"] > 3


class Together(gymnasium.vector.SyncVectorEnv):
    """Walks that step together: their eighth step raises."""

    def __init__(self, num_envs: int) -> None:
        super().__init__([limited.Walk] * num_envs)

    def step(self, actions: Any) -> Any:
        told = super().step(actions)
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == 8:
            raise RuntimeError("the arm is stuck")
        return told


def test_of_lanes_that_step_together_all_lose_their_step(tmp_path) -> None:
    n = run(tmp_path / "run", GymnasiumVector(make=f"{__file__}:Together"), lanes=3, slots=2)
    # but for those that were being reset
    assert n["committed"] >= 60 and n["voided"] >= 3
    assert retrain(tmp_path / "run").same


class Wavering(gymnasium.Env[Any, Any]):
    """Each copy tells NaN in its ninth step, and then, of all copies, every other reset
    fails, since what it connects to is away."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)
    away, tries = False, 0

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        Wavering.tries += 1
        if Wavering.away and Wavering.tries % 2:
            raise ConnectionError("nobody is there")
        Wavering.away = False
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 9:
            Wavering.away, Wavering.tries = True, 0
        told = np.nan if self.steps == 9 else self.steps
        return np.full(4, told, np.float32), 1.0, self.steps % 5 == 0, False, {}


@pytest.mark.parametrize("exact", [False, True])
def test_a_lane_whose_server_is_away_waits_and_others_go_on(exact, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("tidemill.envs.lane_restarts.FIRST_PAUSE", 0.02)
    n = run(tmp_path / "run", Gymnasium(make=f"{__file__}:Wavering"), steps=40, exact=exact)
    assert n["committed"] == 40 and n["voided"] >= 3
    assert retrain(tmp_path / "run").same
