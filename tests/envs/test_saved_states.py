"""Environments that were saved and brought back go on in every bit as if they had not
been: with other seeds, in a fresh process as it were."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from tests.envs import zoo

from tidemill import Gymnasium, GymnasiumVector, PettingZoo
from tidemill.api.environment import Environment, Tick
from tidemill.api.spaces import leaves, schema_of_space
from tidemill.core.cut import flatten, unflatten
from tidemill.core.safetensors_io import pack, unpack
from tidemill.core.schema import Arrays, allocate
from tidemill.envs.frame_stack import FrameStack
from tidemill.envs.step_limit import StepLimit

LANES = 5


class Counting(gymnasium.Env[Any, Any]):
    """Its episodes follow from what it remembers of all of them, which it tells."""

    observation_space = gymnasium.spaces.Discrete(100_000)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self) -> None:
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.count, {}

    def step(self, action: Any) -> Any:
        self.count += 1 + int(action)
        return self.count, float(self.count), self.count % 11 == 0, False, {}

    def tidemill_state(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_tidemill_state(self, state: Any) -> None:
        self.count = state["count"]


class Elsewhere(Counting):
    """It does not tell, so that its episodes are played again, which is another one."""

    tidemill_state = None  # type: ignore[assignment]


def made(config: Gymnasium | GymnasiumVector, limit: int, frames: int, seed: int) -> Environment:
    environment: Environment = config.build(LANES, seed)
    if limit:
        environment = StepLimit(environment, limit)
    if frames > 1:
        environment = FrameStack(environment, [frames])
    environment.bind([[0]])
    environment.keep_episodes()
    return environment


def play(environment: Environment, tick: Tick, reset: Any, actions: list[Arrays], seen: list[bytes]) -> Any:
    """Play so many ticks; note what they bring. Return which lanes are to be reset."""
    for action in actions:
        environment.send([action], reset)
        while not environment.ready():
            time.sleep(1e-4)  # its threads have the next move
        environment.recv([tick])
        told = {**tick.observation, "reward": tick.reward, "done": tick.done, "truncated": tick.truncated}
        seen += [array.tobytes() for array in told.values()]
        reset = tick.done | tick.truncated
    return reset


def draw(environment: Environment, count: int) -> list[Arrays]:
    space, rng = environment.agents[0].spaces.action, np.random.default_rng(4)
    blank = allocate(schema_of_space(space, "action"), (LANES,))
    assert len(leaves(space, "action")) == 1
    (name,) = blank
    drawn = rng.uniform(-1, 1, (count, *blank[name].shape)) * 0.4
    if blank[name].dtype.kind == "i":
        drawn = rng.integers(space.n, size=(count, *blank[name].shape))  # type: ignore[union-attr]
    return [{name: each.astype(blank[name].dtype)} for each in drawn]


KINDS = {
    "CartPole": (Gymnasium(id="CartPole-v1"), 0, 1),
    "CartPole, limited": (Gymnasium(id="CartPole-v1", max_episode_steps=30), 20, 1),
    "Pendulum": (Gymnasium(id="Pendulum-v1", max_episode_steps=35), 0, 3),
    "MountainCar": (Gymnasium(id="MountainCar-v0"), 25, 1),
    "MountainCarContinuous": (Gymnasium(id="MountainCarContinuous-v0"), 25, 2),
    "Acrobot": (Gymnasium(id="Acrobot-v1"), 25, 1),
    "Hopper": (Gymnasium(id="Hopper-v5"), 0, 1),
    "Ant": (Gymnasium(id="Ant-v5", max_episode_steps=30), 0, 1),
    "HumanoidStandup": (Gymnasium(id="HumanoidStandup-v5"), 20, 1),
    "Pusher": (Gymnasium(id="Pusher-v5"), 20, 1),
    "LunarLander, played again": (Gymnasium(id="LunarLander-v3"), 50, 2),
    "LunarLander in threads": (Gymnasium(id="LunarLander-v3", threads=2), 50, 1),
    "FrozenLake, played again": (Gymnasium(id="FrozenLake-v1"), 0, 1),
    "CartPole one by one": (Gymnasium(id="CartPole-v1", vectorized=False), 0, 1),
    "an Atari game, played again": (
        Gymnasium(
            id="ale_py:ALE/Breakout-v5", max_episode_steps=40, kwargs={"obs_type": "ram", "frameskip": 1}
        ),
        0,
        1,
    ),
    "one that tells": (Gymnasium(make=Counting), 0, 1),
    "CartPole's vector form": (GymnasiumVector(id="CartPole-v1", max_episode_steps=30), 0, 2),
}


DEAR = "an Atari game, played again", "HumanoidStandup"
"""What is brought back after a single step as others of their kind are."""
CUTS = {
    f"{before}-{name}": (*kind, before)
    for before in (1, 43)
    for name, kind in KINDS.items()
    if before > 1 or name not in DEAR
}


@pytest.mark.parametrize(("config", "limit", "frames", "before"), CUTS.values(), ids=CUTS)
def test_an_environment_that_is_brought_back_goes_on_in_every_bit(
    config: Gymnasium | GymnasiumVector, limit: int, frames: int, before: int
) -> None:
    first, second = made(config, limit, frames, 1), made(config, limit, frames, 77)
    actions = draw(first, before + 120)
    tick, other = (
        Tick.allocate(each.agents[0].spaces.observation, LANES, {}, False) for each in (first, second)
    )
    reset = play(first, tick, np.ones(LANES, np.bool_), actions[:before], [])
    state = first.state()
    assert state is not None
    arrays, facts = flatten(state)
    back = unflatten(unpack(pack(arrays))[0], json.loads(json.dumps(facts)))
    assert second.load_state(back) == {}
    seen, again = list[bytes](), list[bytes]()
    play(first, tick, reset.copy(), actions[before:], seen)
    state = second.state()  # a cut right after a resume is no other one
    assert state is not None
    third = made(config, limit, frames, 5)
    assert third.load_state(state) == {}
    for each in (second, third):
        again.clear()
        play(each, other, reset.copy(), actions[before:], again)
        assert again == seen
    for each in (first, second, third):
        each.close()


def test_an_episode_that_does_not_follow_from_its_seed_is_named_and_cut() -> None:
    config = Gymnasium(make=Elsewhere)
    first, second = made(config, 0, 1, 1), made(config, 0, 1, 77)
    tick = Tick.allocate(first.agents[0].spaces.observation, LANES, {}, False)
    actions = draw(first, 300)
    reset = play(first, tick, np.ones(LANES, np.bool_), actions[:30], [])
    state = first.state()
    assert state is not None
    lost = second.load_state(state)
    assert lost and {*lost} <= {*range(LANES)} - {*reset.nonzero()[0].tolist()}
    assert all("does not follow from these alone" in why for why in lost.values())
    reset[[*lost]] = True
    play(second, tick, reset, actions[30:], [])


def test_nothing_is_kept_where_nobody_asked_for_it() -> None:
    environment = Gymnasium(id="FrozenLake-v1").build(LANES, 1)
    environment.bind([[0]])
    tick = Tick.allocate(environment.agents[0].spaces.observation, LANES, {}, False)
    play(environment, tick, np.ones(LANES, np.bool_), draw(environment, 3), [])
    assert environment._kept is None  # type: ignore[union-attr]


ZOO = str(Path(zoo.__file__))
SEVERAL: dict[str, tuple[PettingZoo, list[list[int]]]] = {
    "two kinds, alone each": (
        PettingZoo(make="mpe2.simple_speaker_listener_v4", kwargs={"max_cycles": 30}),
        [[1], [0]],
    ),
    "teams, limited": (PettingZoo(make="mpe2.simple_tag_v3", max_episode_steps=17), [[0, 1, 2], [3]]),
    "in turn, with masks": (PettingZoo(make="pettingzoo.classic.tictactoe_v3"), [[0, 1]]),
    "some absent": (PettingZoo(make=f"{ZOO}:Meadow", kwargs={"script": ["oohooD", "o.oohT"]}), [[0], [1]]),
    "masks in parts, and a state": (PettingZoo(make=f"{ZOO}:Nested", state=True), [[0], [1]]),
}


def several(config: PettingZoo, groups: list[list[int]], seed: int) -> tuple[Environment, list[Tick]]:
    environment = config.build(LANES, seed)
    environment.bind(groups)
    environment.keep_episodes()
    spaces = [environment.agents[group[0]].spaces.observation for group in groups]
    ticks = [
        Tick.allocate(space, LANES * len(group), {}, False)
        for space, group in zip(spaces, groups, strict=True)
    ]
    return environment, ticks


def play_several(
    environment: Environment, ticks: Sequence[Tick], reset: Any, finished: list[Any], rng: Any, count: int
) -> tuple[Any, list[bytes]]:
    """Play so many ticks by actions that are drawn. Return which lanes are to be reset,
    and what the ticks brought; `finished` is of the seats, group by group."""
    seen = list[bytes]()
    spaces = [environment.agents[group.seats[0]].spaces.action for group in environment._groups]  # type: ignore[attr-defined]
    for _ in range(count):
        actions = []
        for space, tick in zip(spaces, ticks, strict=True):
            blank = allocate(schema_of_space(space, "action"), (len(tick.reward),))
            for (name, array), leaf in zip(blank.items(), leaves(space, "action").values(), strict=True):
                most = np.array(getattr(leaf, "n", getattr(leaf, "choices", 2)))
                array[:] = rng.random(array.shape) * most
                assert name
            actions.append(blank)
        environment.send(actions, reset)
        environment.recv(ticks)
        for group, tick in enumerate(ticks):
            told = {name: array[tick.present] for name, array in tick.observation.items()}
            told |= {name: getattr(tick, name) for name in ("reward", "done", "truncated", "present")}
            seen += [array.tobytes() for array in told.values()]
            finished[group] = ~tick.present & finished[group] | tick.done | tick.truncated
        reset = np.logical_and.reduce([each.reshape(LANES, -1).all(axis=1) for each in finished])
    return reset, seen


@pytest.mark.parametrize(("config", "groups"), SEVERAL.values(), ids=SEVERAL)
def test_games_of_several_are_played_again_and_go_on_in_every_bit(
    config: PettingZoo, groups: list[list[int]]
) -> None:
    (first, ticks), (second, others) = several(config, groups, 1), several(config, groups, 77)
    rng, finished = np.random.default_rng(3), [np.ones(len(tick.reward), np.bool_) for tick in ticks]
    reset, _ = play_several(first, ticks, np.ones(LANES, np.bool_), finished, rng, 38)
    state = first.state()
    assert state is not None
    arrays, facts = flatten(state)
    assert second.load_state(unflatten(unpack(pack(arrays))[0], json.loads(json.dumps(facts)))) == {}
    state = second.state()  # a cut right after a resume is no other one
    assert state is not None
    third, _ = several(config, groups, 5)
    assert third.load_state(state) == {}
    later = rng.bit_generator.state
    _, seen = play_several(first, ticks, reset.copy(), [*finished], rng, 40)
    for each in (second, third):
        rng.bit_generator.state = later
        assert play_several(each, others, reset.copy(), [*finished], rng, 40)[1] == seen
    for each in (first, second, third):
        each.close()
