"""Frame stacks: spaces, and frames of environments that do all that environments do. What
rows hold of them is in test_rows."""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import pytest
from tests.run.watching import wait_until

from tidemill.api.environment import AgentInfo, Environment, EnvironmentConfig, Tick
from tidemill.api.spaces import Box, Dict, Discrete, MultiBinary, Space, Spaces, Tuple, schema_of_space
from tidemill.core.schema import poison
from tidemill.core.thread_loop import run_ready
from tidemill.core.user_code_loading import load_attribute
from tidemill.envs.asynchronous import Asynchronous
from tidemill.envs.fault_tolerant import Slots
from tidemill.envs.frame_stack import stacked
from tidemill.envs.parallel_build import close_all
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.replay_training.actor_config import ReplayActors
from tidemill.workers.actor import Actors, AgentSpec
from tidemill.workers.actor_environments import build_environment

LOW, HIGH = (0.0, 1.0, 2.0), (3.0, 4.0, 5.0)


@pytest.mark.parametrize(
    ("space", "wanted"),
    [
        (Box((4,), "float32"), Box((3, 4), "float32")),
        (Box((), "float32", (0.0,), (9.0,)), Box((3,), "float32", (0.0,), (9.0,))),
        (Box((3,), "float32", LOW, HIGH), Box((3, 3), "float32", LOW * 3, HIGH * 3)),
        (Box((84, 84), "uint8"), Box((3, 84, 84), "uint8")),
        (Box((84, 84, 2), "uint8"), Box((84, 84, 6), "uint8")),
        (Box((2, 84, 84), "uint8"), Box((6, 84, 84), "uint8")),
        (Box((2, 84, 84), "float32"), Box((3, 2, 84, 84), "float32")),
        (Discrete(5), Discrete(5)),
        (Tuple((Box((2,), "float64"), MultiBinary(3))), Tuple((Box((3, 2), "float64"), MultiBinary(3)))),
        (
            Dict({"see": Box((2,), "float32"), "action_mask": Box((4,), "int8")}),
            Dict({"see": Box((3, 2), "float32"), "action_mask": Box((4,), "int8")}),
        ),
        (Dict({"action_mask": Dict({"kind": Box((4,), "int8")})}),) * 2,
    ],
)
def test_boxes_are_stacked(space: Space, wanted: Space) -> None:
    assert stacked(space, 3) == wanted
    assert stacked(space, 1) == space


def test_bounds_of_images_go_with_their_channels() -> None:
    box = Box((3, 2, 1), "uint8", tuple(range(6)), (255.0,))  # type: ignore[arg-type]
    assert stacked(box, 2) == Box((3, 2, 2), "uint8", (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5), (255.0,))


@dataclass(frozen=True, kw_only=True)
class Film(EnvironmentConfig):
    """Two agents whose every element is the number of the tick; `script` has for each
    tick which of the seats are (present, done, restarted)."""

    space: Any = None
    script: Any = None

    def build(self, lanes: int, seed: int, render: bool = False) -> "Showing":
        return Showing(self, lanes)


class Showing(Environment):
    def __init__(self, config: Film, lanes: int) -> None:
        self.config, self.lanes, self.tick = config, lanes, 0
        self.agents = tuple(AgentInfo(f"agent_{i}", Spaces(config.space, Discrete(2))) for i in range(2))
        self.same_step = any(restarted for row in config.script for _, _, restarted in row)

    def bind(self, groups: Sequence[Sequence[int]]) -> None:
        assert list(map(list, groups)) == [[0, 1]]

    def send(self, actions: Any, reset: Any) -> None:
        self.tick += 1

    def ready(self) -> bool:
        return True

    def recv(self, ticks: Sequence[Tick]) -> None:
        (tick,) = ticks
        for leaf in (*tick.observation.values(), *tick.final.values()):
            leaf[...] = 0
        for seat, (present, done, restarted) in enumerate(self.config.script[self.tick - 1]):
            tick.present[seat], tick.done[seat], tick.restarted[seat] = present, done, restarted
            for name, leaf in tick.observation.items():
                leaf[seat] = 10 * self.tick + seat if present else 99
                if restarted:
                    tick.final[name][seat] = 10 * self.tick + 5 + seat
        tick.reward[:], tick.truncated[:] = 0, False

    def close(self) -> None:
        pass


def watch(
    space: Space, script: list[list[tuple[int, int, int]]], resets: Sequence[int] = (0,), frames: int = 3
) -> list[tuple[Any, Any]]:
    """What agents see in each tick, and at the end of restarted episodes."""
    actors = Actors(
        environment=Film(space=space, script=script), agents=(AgentSpec(frame_stack=frames),), lanes=1
    )
    environment = build_environment(actors, 1, 0)
    environment.bind([[0, 1]])
    (agent, _) = environment.agents
    tick = Tick.allocate(agent.spaces.observation, 2, {}, environment.same_step)
    seen = []
    for number in range(len(script)):
        poison(tick.observation)
        environment.send([{}], np.array([number in resets]))
        environment.recv([tick])
        seen.append(tuple({n: a.copy() for n, a in part.items()} for part in (tick.observation, tick.final)))
    return seen


HERE, AWAY, ENDS, AGAIN = (1, 0, 0), (0, 0, 0), (1, 1, 0), (1, 1, 1)


def test_the_newest_frames_stand_last_and_a_first_one_stands_for_those_before_it() -> None:
    seen = watch(Box((2,), "float32"), [[HERE, HERE]] * 4)
    assert [obs["obs"][0, :, 0].tolist() for obs, _ in seen] == [
        [10, 10, 10],
        [10, 10, 20],
        [10, 20, 30],
        [20, 30, 40],
    ]
    assert [obs["obs"][1, :, 1].tolist() for obs, _ in seen] == [
        [11, 11, 11],
        [11, 11, 21],
        [11, 21, 31],
        [21, 31, 41],
    ]


def test_an_absent_seat_keeps_its_frames() -> None:
    seen = watch(Box((2,), "float32"), [[HERE, HERE], [AWAY, HERE], [HERE, AWAY], [HERE, HERE]])
    assert [seen[t][0]["obs"][0, :, 0].tolist() for t in (0, 2, 3)] == [
        [10, 10, 10],
        [10, 10, 30],
        [10, 30, 40],
    ]
    assert [seen[t][0]["obs"][1, :, 0].tolist() for t in (0, 1, 3)] == [
        [11, 11, 11],
        [11, 11, 21],
        [11, 21, 41],
    ]


def test_a_seat_that_comes_late_begins_with_its_own_first_frame() -> None:
    seen = watch(Box((2,), "float32"), [[HERE, AWAY], [HERE, AWAY], [HERE, HERE], [HERE, HERE]])
    assert [seen[t][0]["obs"][1, :, 0].tolist() for t in (2, 3)] == [[31, 31, 31], [31, 31, 41]]


def test_frames_do_not_go_from_one_episode_into_the_next() -> None:
    seen = watch(
        Box((2,), "float32"), [[HERE, HERE], [ENDS, HERE], [HERE, ENDS], [HERE, HERE]], resets=(0, 2)
    )
    assert [obs["obs"][0, :, 0].tolist() for obs, _ in seen] == [
        [10, 10, 10],
        [10, 10, 20],
        [30, 30, 30],
        [30, 30, 40],
    ]
    # a seat may begin again without a reset of its lane
    seen = watch(Box((2,), "float32"), [[HERE, HERE], [ENDS, HERE], [HERE, HERE]])
    assert seen[2][0]["obs"][0, :, 0].tolist() == [30, 30, 30]


def test_an_episode_that_ends_and_one_that_begins_in_a_tick_have_frames_of_their_own() -> None:
    seen = watch(Box((2,), "float32"), [[HERE, HERE], [HERE, HERE], [AGAIN, HERE], [HERE, HERE]])
    assert seen[2][1]["obs"][0, :, 0].tolist() == [10, 20, 35]
    assert seen[2][0]["obs"][0, :, 0].tolist() == [30, 30, 30]
    assert seen[3][0]["obs"][0, :, 0].tolist() == [30, 30, 40]
    assert seen[3][0]["obs"][1, :, 0].tolist() == [21, 31, 41]


@pytest.mark.parametrize("shape", [(6, 5, 2), (2, 5, 6)])
def test_images_are_stacked_along_their_channels(shape: tuple[int, ...]) -> None:
    seen = watch(Box(shape, "uint8"), [[HERE, HERE]] * 3)
    image = seen[2][0]["obs"][0]
    assert image.shape == (6, 5, 6) and image.dtype == np.uint8  # 3 frames of 2 channels, last or first
    if shape[0] == 2:
        image = image.transpose(1, 2, 0)
    assert (image == [10, 10, 20, 20, 30, 30]).all()


def test_what_is_not_stacked_is_the_newest() -> None:
    space = Dict({"see": Box((1,), "float32"), "action_mask": Box((2,), "int8"), "pick": Discrete(99)})
    seen = watch(space, [[HERE, HERE], [HERE, HERE], [AGAIN, HERE]])
    assert {n: a.shape[1:] for n, a in seen[0][0].items()} == {
        n: f.shape for n, f in schema_of_space(stacked(space, 3), "obs").items()
    }
    assert seen[1][0]["obs.see"][0, :, 0].tolist() == [10, 10, 20]
    assert seen[1][0]["obs.action_mask"][0].tolist() == [20, 20] and seen[1][0]["obs.pick"].tolist() == [
        20,
        21,
    ]
    assert seen[2][1]["obs.action_mask"][0].tolist() == [35, 35] and seen[2][1]["obs.see"][
        0, :, 0
    ].tolist() == [10, 20, 35]


def test_masks_of_parts_are_not_stacked() -> None:
    space = Dict({"see": Box((1,), "float32"), "action_mask": Dict({"kind": Box((2,), "int8")})})
    seen = watch(space, [[HERE, HERE], [HERE, HERE]])
    assert seen[1][0]["obs.action_mask.kind"][0].tolist() == [20, 20]


def test_an_environment_of_specs_without_stacks_is_left_as_it_is() -> None:
    assert isinstance(
        build_environment(Actors(environment=Film(space=Discrete(2), script=[])), 1, 0), Showing
    )


class Clinging(gymnasium.Env[Any, Any]):
    """Its steps hang until they are `freed`."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    freed = threading.Event()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.freed.wait()
        return np.zeros(2, np.float32), 0.0, False, False, {}


class AsyncClinging:
    """Its steps end once those of all copies are broken off."""

    observation_space, action_space = Clinging.observation_space, Clinging.action_space
    made = broken_off = closed = 0

    def __init__(self) -> None:
        AsyncClinging.made += 1

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    async def step(self, action: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            AsyncClinging.broken_off += 1
            while AsyncClinging.broken_off < AsyncClinging.made:
                await asyncio.sleep(0.001)

    def close(self) -> None:
        AsyncClinging.closed += 1


@pytest.mark.parametrize("kind", ["threads", "loop"])
def test_environments_that_hang_are_waited_for_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("tidemill.envs.lane_threads.CLOSE_SECONDS", 3.0)
    for module in ("lane_coroutines", "asynchronous"):  # which end once they are broken off
        monkeypatch.setattr(f"tidemill.envs.{module}.CLOSE_SECONDS", 60.0)
    inner = (
        Gymnasium(make=f"{__file__}:Clinging", threads=1)
        if kind == "threads"
        else Asynchronous(make=f"{__file__}:AsyncClinging")
    )
    actors = ReplayActors(environment=Slots(environment=inner), frame_stack=2)
    environments = [build_environment(actors, 1, seed) for seed in range(40)]
    for environment in environments:
        environment.bind([[0]])
        environment.send([{"action": np.zeros(1, np.int64)}], np.ones(1, np.bool_))
    wait_until(lambda: all(environment.ready() for environment in environments), 60, "resets")
    for environment in environments:
        environment.send([{"action": np.zeros(1, np.int64)}], np.zeros(1, np.bool_))
    run_ready()
    since = time.monotonic()
    close_all(environments)
    assert time.monotonic() - since < 100  # one after the other would take 120 s
    if kind == "threads":
        load_attribute(f"{__file__}:Clinging", "make").freed.set()
    else:
        copies = load_attribute(f"{__file__}:AsyncClinging", "make")
        assert copies.made == copies.broken_off == copies.closed == 40
