"""An Atari game that was cut in mid-episode is brought back from a state of its console
that is some steps old, and goes on in every bit as if it had not been cut."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ale_py.env import AtariEnv
from tests.envs.test_saved_states import draw, play

from tidemill import Gymnasium
from tidemill.api.environment import Environment, Tick
from tidemill.core.cut import Part, flatten, unflatten
from tidemill.core.errors import CheckpointError
from tidemill.core.safetensors_io import pack, unpack
from tidemill.envs import episode_replay

LANES, APART = 1, 20  # to make a game takes a second
PONG = Gymnasium(id="ale_py:ALE/Pong-v5", kwargs={"obs_type": "grayscale"})  # with sticky actions


class OneOfItsOwn(AtariEnv):
    """It has a state that its console does not know of."""

    def __init__(self) -> None:
        super().__init__("pong", obs_type="ram")
        self.count = 0

    def step(self, action: Any) -> Any:
        self.count += 1
        seen, reward, *rest = super().step(action)
        return seen, reward + self.count, *rest


@pytest.fixture(autouse=True)
def stepped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the steps of all games; states of consoles are not far apart."""
    counted, step = [0], AtariEnv.step

    def counting(self: AtariEnv, action: Any) -> Any:
        counted[0] += 1
        return step(self, action)

    monkeypatch.setattr(AtariEnv, "step", counting)
    monkeypatch.setattr(episode_replay, "APART", APART)
    return counted


def made(config: Gymnasium, seed: int) -> Environment:
    environment = config.build(LANES, seed)
    environment.bind([[0]])
    environment.keep_episodes()
    return environment


def tick_of(environment: Environment) -> Tick:
    return Tick.allocate(environment.agents[0].spaces.observation, LANES, {}, False)


def kept(environment: Environment) -> Part:
    """Return where it is, as a file has it."""
    state = environment.state()
    assert state is not None
    arrays, facts = flatten(state)
    return unflatten(unpack(pack(arrays))[0], json.loads(json.dumps(facts)))


def goes_on_alike(
    config: Gymnasium, before: int, stepped: list[int], change: Callable[[Part], None] = lambda _: None
) -> tuple[list[Part], int]:
    """Assert that a game that is cut after so many ticks, and brought back elsewhere,
    goes on for hundreds of steps as the one that goes straight on. Return the episodes
    that the cut has, and how many steps it took to bring them back. `change` is what
    happens to the cut meanwhile."""
    first, second = made(config, 1), made(config, 77)
    actions = draw(first, before + 200)
    reset = play(first, tick_of(first), np.ones(LANES, np.bool_), actions[:before], [])
    state = kept(first)
    change(state)
    stepped[0] = 0
    assert second.load_state(state) == {}
    took = stepped[0]
    seen, again = list[bytes](), list[bytes]()
    play(first, tick_of(first), reset.copy(), actions[before:], seen)
    play(second, tick_of(second), reset.copy(), actions[before:], again)
    assert again == seen
    (arrays, facts), (others, other_facts) = flatten(kept(first)), flatten(kept(second))
    assert facts == other_facts  # the next cut is the same, too
    bits, other_bits = ({name: array.tobytes() for name, array in each.items()} for each in (arrays, others))
    assert bits == other_bits
    first.close()
    second.close()
    return [lane["episode"] for lane in state["lanes"].values()], took


GAMES = {
    "sticky actions": PONG,
    "in threads": PONG.replace(threads=2),
    "frames by chance, and ends": Gymnasium(
        id="ale_py:ALE/Breakout-v5",
        kwargs={"obs_type": "ram", "frameskip": (2, 5)},
        max_episode_steps=130,
    ),
}


@pytest.mark.parametrize("config", GAMES.values(), ids=GAMES)
def test_a_game_is_brought_back_from_a_state_of_its_console(config: Gymnasium, stepped: list[int]) -> None:
    episodes, took = goes_on_alike(config, 4 * APART + 8, stepped)
    assert [len(each["consoles"]) for each in episodes] == [2] * LANES
    assert APART * LANES <= took < 2 * APART * LANES < sum(each["steps"] for each in episodes)


def test_a_console_that_does_not_tell_all_of_it_makes_no_difference(stepped: list[int]) -> None:
    """Up to ale-py 0.12.1 that of Qbert comes out elsewhere."""
    config = Gymnasium(id="ale_py:ALE/Qbert-v5", kwargs={"obs_type": "grayscale"})
    goes_on_alike(config, 2 * APART + 8, stepped)


def test_one_that_comes_out_elsewhere_is_played_again_from_its_beginning(stepped: list[int]) -> None:
    def change(state: Part) -> None:
        for lane in state["lanes"].values():
            consoles = lane["episode"]["consoles"]
            older, newer = consoles
            consoles[older] = consoles[newer]

    episodes, took = goes_on_alike(PONG, 4 * APART + 8, stepped, change)
    assert took > sum(each["steps"] for each in episodes)


@pytest.mark.parametrize(
    "config",
    [
        PONG.replace(wrap=("sticky-action", "frame-stack(2)")),
        Gymnasium(make=OneOfItsOwn),
        PONG.replace(kwargs={"obs_type": "ram", "repeat_action_probability": 0.9}),
        PONG.replace(id="ale_py:ALE/MiniatureGolf-v5"),
    ],
    ids=["in wrappers", "of a class of its own", "sticky for long", "counts in secret"],
)
def test_others_are_played_again_from_their_beginning(config: Gymnasium, stepped: list[int]) -> None:
    episodes, took = goes_on_alike(config, 2 * APART + 8, stepped)
    assert not any("consoles" in each for each in episodes)
    assert took == sum(each["steps"] for each in episodes)


def test_a_console_of_another_game_is_named_and_its_episode_cut() -> None:
    pong, breakout = made(PONG, 1), made(PONG.replace(id="ale_py:ALE/Breakout-v5"), 1)
    play(pong, tick_of(pong), np.ones(LANES, np.bool_), draw(pong, 3), [])
    state = kept(pong)
    drawn = state["lanes"]["0"]["generator"]
    with pytest.raises(CheckpointError, match=r"is that of pong of ale-py .*, and this is breakout of"):
        episode_replay.draw_from(breakout.envs[0], drawn)  # type: ignore[attr-defined]
    drawn["console_of"] = "pong of ale-py 0.0"
    lost = pong.load_state(state)
    assert "CheckpointError" in lost[0] and "pong of ale-py 0.0" in lost[0]
    play(pong, tick_of(pong), np.ones(LANES, np.bool_), draw(pong, 3), [])
    pong.close()
    breakout.close()
