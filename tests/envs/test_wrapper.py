"""Wrappers hand on what they do not change."""

import inspect
from typing import Any

import numpy as np
import pytest

from tidemill.api.environment import Environment, Tick
from tidemill.core.errors import ConfigError
from tidemill.envs.step_limit import StepLimit
from tidemill.envs.wrapper import Wrapper
from tidemill.testing.scripted import Scripted

STATES = ("state", "load_state")  # to which wrappers add their own: see test_saved_states
METHODS = [
    name
    for name, _ in inspect.getmembers(Environment, inspect.isfunction)
    if name[0] != "_" and name not in STATES
]


class Listening(Environment):
    """Says what it was asked."""

    def __init__(self) -> None:
        for name in Environment.__annotations__:
            setattr(self, name, f"its {name}")


def _answer(name: str) -> Any:
    return lambda self, *arguments: (name, arguments)


for _name in METHODS:
    setattr(Listening, _name, _answer(_name))
Listening.__abstractmethods__ = frozenset()


def test_every_attribute_is_that_of_what_is_wrapped_also_where_it_changes() -> None:
    inner = Listening()
    outer = Wrapper(Wrapper(inner))
    inner.resting = inner.rests = inner.shared = "changed"  # type: ignore[assignment]
    for name in Environment.__annotations__:
        assert getattr(outer, name) == getattr(inner, name)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_reaches_what_is_wrapped(name: str) -> None:
    known = inspect.signature(getattr(Environment, name))
    arguments = tuple(f"argument {n}" for n in range(len(known.parameters) - 1))
    told: list[Any] = []
    inner = Listening()
    setattr(inner, name, lambda *given: told.append(given) or f"answer of {name}")
    answer = getattr(Wrapper(inner), name)(*arguments)
    assert told == [arguments]
    assert answer == (f"answer of {name}" if known.return_annotation else None)


@pytest.mark.parametrize(("own", "promised"), [(3, 3), (0, 4), (9, 4)])
def test_a_step_limit_is_a_promise(own: int, promised: int) -> None:
    environment = Scripted(shortest=2, longest=own or 100).build(1, 0)
    environment.max_episode_steps = own
    assert StepLimit(environment, 4).max_episode_steps == promised


def test_lanes_that_cannot_be_reset_are_not_cut() -> None:
    environment = Scripted().build(2, 0)
    environment.resets_any = False
    with pytest.raises(ConfigError, match=r"max_episode_steps = 4: .* set the limit in the environment"):
        StepLimit(environment, 4)


def test_one_agent_and_several_are_cut_alike() -> None:
    """The short way of one seat per lane, and the long one."""
    seen = []
    for groups in ([[0]], [[0], [1]]):
        inner = Scripted(agents=len(groups), kinds=len(groups), shortest=2, longest=6).build(4, 7)
        environment = StepLimit(inner, 4)
        environment.bind(groups)
        ticks = [
            Tick.allocate(environment.agents[g[0]].spaces.observation, 4, inner.info, False) for g in groups
        ]
        reset, marks = np.ones(4, np.bool_), []
        for _ in range(40):
            environment.send([{"action": np.zeros(4, np.int64)} for _ in groups], reset)
            environment.recv(ticks)
            marks.append((ticks[0].done.copy(), ticks[0].truncated.copy()))
            reset = ticks[0].done | ticks[0].truncated
        seen.append(np.array(marks))
    assert seen[0][:, 1].any() and seen[0][:, 0].any()
    assert np.array_equal(*seen)


def test_a_method_of_before_is_refused_by_its_new_name() -> None:
    with pytest.raises(TypeError, match="said is called episode_infos now"):
        type("Old", (Environment,), {"said": lambda self, group, seats: [None] * len(seats)})
