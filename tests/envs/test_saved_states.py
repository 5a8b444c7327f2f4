"""Environments that were saved and brought back go on in every bit as if they had not
been: with other seeds, in a fresh process as it were."""

import json
from typing import Any

import gymnasium
import numpy as np
import pytest

from tidemill import Gymnasium
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


def made(config: Gymnasium, limit: int, frames: int, seed: int) -> Environment:
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
            pass
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
    "one that tells": (Gymnasium(make=Counting), 0, 1),
}


@pytest.mark.parametrize(("config", "limit", "frames"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("before", [1, 43])
def test_an_environment_that_is_brought_back_goes_on_in_every_bit(
    config: Gymnasium, limit: int, frames: int, before: int
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
