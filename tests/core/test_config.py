"""Configurations: what was encoded is decoded to an equal value; everything else is
refused with the path, the value and the cure."""

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.config import Config, decode, encode, members, set_path
from tidemill.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Brain(Config):
    """A family."""


@dataclass(frozen=True, kw_only=True)
class Small(Brain):
    size: int = 64
    rate: float = 1e-3

    def __post_init__(self) -> None:
        if self.size <= 0:
            raise ConfigError(f"size = {self.size}: must be positive")


@dataclass(frozen=True, kw_only=True)
class Deep(Brain):
    widths: tuple[int, ...] = (64, 64)
    inner: Brain | None = None


@dataclass(frozen=True, kw_only=True)
class Plan(Config):
    name: str
    brain: Brain = field(default_factory=Small)
    brains: tuple[Brain, ...] = ()
    spare: tuple[Brain, ...] | None = None
    by_name: Mapping[str, Brain] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    seed: int | str = 0
    fast: bool = False
    pace: Literal["slow", "quick"] = "slow"


numbers = st.floats(allow_nan=False, allow_infinity=False)
smalls = st.builds(Small, size=st.integers(1, 2**53), rate=numbers | st.just(math.inf))
brains: st.SearchStrategy[Brain] = st.recursive(
    smalls,
    lambda inner: st.builds(Deep, widths=st.lists(st.integers(1, 512)).map(tuple), inner=st.none() | inner),
    max_leaves=3,
)
names = st.text(st.characters(categories=["L", "N"]), min_size=1)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | numbers | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
plans = st.builds(
    Plan,
    name=st.text(),
    brain=brains,
    brains=st.lists(brains, max_size=3).map(tuple),
    spare=st.none() | st.lists(brains, max_size=2).map(tuple),
    by_name=st.dictionaries(names, brains, max_size=3),
    options=st.dictionaries(names, plain, max_size=3),
    limit=st.none() | st.integers(0, 2**40),
    seed=st.integers(0, 2**40) | st.text(),
    fast=st.booleans(),
    pace=st.sampled_from(["slow", "quick"]),
)


@given(plans)
def test_what_is_encoded_is_decoded_to_an_equal_value_through_json(plan: Plan) -> None:
    assert decode(Plan, msgspec.json.decode(msgspec.json.encode(encode(plan)))) == plan


@given(
    st.dictionaries(
        st.sampled_from(
            ["kind", "name", "brain", "brains", "spare", "by_name", "options", "limit", "seed", "x"]
        ),
        plain,
    )
    | plain
)
def test_any_plain_data_is_decoded_or_refused(data: Any) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(decode(Plan, data), Plan)


def test_a_configuration_says_its_kind_and_holds_plain_data() -> None:
    assert encode(Plan(name="a", brain=Deep(inner=Small()))) == {
        "kind": "Plan",
        "name": "a",
        "brain": {"kind": "Deep", "widths": [64, 64], "inner": {"kind": "Small", "size": 64, "rate": 0.001}},
        "brains": [],
        "spare": None,
        "by_name": {},
        "options": {},
        "limit": None,
        "seed": 0,
        "fast": False,
        "pace": "slow",
    }


def test_members_of_members_belong_to_the_family() -> None:
    assert {"Brain": Brain, "Small": Small, "Deep": Deep}.items() <= members(Brain).items()
    assert "Plan" not in members(Brain)


def test_a_setting_that_hides_a_method_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Hiding(Brain):
        replace: int = 3  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"setting replace of Hiding hides the method Config.replace\(\)"):
        Hiding()


def test_a_configuration_cannot_be_changed_and_its_copy_is_checked_again() -> None:
    small = Small()
    with pytest.raises(FrozenInstanceError):
        small.size = 3  # type: ignore[misc]
    assert small.replace(size=3) == Small(size=3)
    with pytest.raises(ConfigError, match="must be positive"):
        small.replace(size=0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "a", "limt": 3}, 'experiment.limt: Plan has no setting "limt"; did you mean "limit"?'),
        (
            {"name": "a", "brain": {"kind": "Smal"}},
            'experiment.brain.kind: no Brain is called "Smal"; did you mean "Small"?',
        ),
        (
            {"name": "a", "brain": {"kind": "Plan", "name": "b"}},
            'experiment.brain.kind: no Brain is called "Plan"',
        ),
        ({"name": "a", "brain": {"kind": ["Small"]}}, "experiment.brain.kind"),
        (
            {"name": "a", "brains": [{"kind": "Small"}, {"kind": "Small", "size": 0}]},
            "experiment.brains[1]: size = 0: must be positive",
        ),
        ({"name": "a", "spare": [{"kind": "Small", "width": 0}]}, "experiment.spare[0].width"),
        (
            {"name": "a", "by_name": {"x": {"kind": "Small", "size": 1.5}}},
            "experiment.by_name.x.size = 1.5: expected `int`, got `float`",
        ),
        ({"name": "a", "by_name": [1]}, "experiment.by_name must be a table, not [1]"),
        ({"name": "a", "brains": {}}, "experiment.brains must be a list, not {}"),
        ({"name": "a", "limit": "3"}, "experiment.limit = '3': expected `int`, got `str`"),
        ({"name": "a", "limit": "\ud800"}, r"experiment.limit = '\ud800': "),
        ({"name": "a", "limit": True}, "experiment.limit = True: expected `int`, got `bool`"),
        ({"name": "a", "fast": 1}, "experiment.fast = 1: expected `bool`, got `int`"),
        ({"name": "a", "pace": "quik"}, "experiment.pace = 'quik'; did you mean \"quick\"?"),
        ({"name": "a", "pace": 3}, "experiment.pace = 3; known: quick, slow"),
        ({"name": "a", "pace": ["slow"]}, "experiment.pace = ['slow']"),
        ({"name": 3}, "experiment.name = 3: expected `str`, got `int`"),
        ({}, "name"),
        ([], "experiment must be a table of settings, not []"),
    ],
)
def test_a_mistake_is_named_with_its_path(data: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(Plan, data)
    assert message in str(caught.value)
    assert "experiment" in str(caught.value)


def test_a_whole_number_is_a_float() -> None:
    assert decode(Small, {"kind": "Small", "rate": 1}) == Small(rate=1.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: 0, r"experiment\.options\.make\[0\] is a function .*FILE\.py:NAME"),
        (object(), r"options\.make\[0\] is a object"),
        ({1}, "is a set"),
    ],
)
def test_what_is_no_plain_data_is_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        encode(Plan(name="a", options={"make": [value]}))


PLAN = Plan(
    name="a", brain=Deep(inner=Small()), brains=(Small(), Small()), by_name={"x": Small()}, options={"lr": 1}
)


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("limit", "4", PLAN.replace(limit=4)),
        ("limit", "null", PLAN),
        ("name", "b c", PLAN.replace(name="b c")),
        ("name", '"b"', PLAN.replace(name="b")),
        ("name", "5", PLAN.replace(name="5")),
        ("fast", "true", PLAN.replace(fast=True)),
        ("fast", "True", PLAN.replace(fast=True)),
        ("limit", "None", PLAN),
        ("name", "None", PLAN.replace(name="None")),
        ("brain.widths", "[1, 2]", PLAN.replace(brain=Deep(widths=(1, 2), inner=Small()))),
        ("brain.inner.size", "8", PLAN.replace(brain=Deep(inner=Small(size=8)))),
        ("brains.1.rate", "0.5", PLAN.replace(brains=(Small(), Small(rate=0.5)))),
        ("by_name.x.size", "8", PLAN.replace(by_name={"x": Small(size=8)})),
        ("by_name.y", '{"kind": "Small"}', PLAN.replace(by_name={"x": Small(), "y": Small()})),
        ("options.lr", "2", PLAN.replace(options={"lr": 2})),
        ("options.new", "[1]", PLAN.replace(options={"lr": 1, "new": [1]})),
        ("brain", '{"kind": "Small", "size": 2}', PLAN.replace(brain=Small(size=2))),
    ],
)
def test_set_changes_one_field(path: str, text: str, expected: Plan) -> None:
    assert set_path(PLAN, path, text) == expected


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("limt", "4", '--set limt: Plan has no "limt"; did you mean "limit"?'),
        ("brain.inner.sise", "4", '--set brain.inner.sise: brain.inner has no "sise"; did you mean "size"?'),
        (
            "brain.inner.size.x",
            "4",
            '--set brain.inner.size.x: brain.inner.size is 64, which has no "x" inside',
        ),
        ("brains.2.size", "4", '--set brains.2.size: brains is a list of 2; "2" is not one of its places'),
        ("brains.-1.size", "4", '"-1" is not one of its places'),
        ("by_name.y.size", "4", '--set by_name.y.size: by_name has no "y"; known: x'),
        ("brain.inner.size", "0", "experiment.brain.inner: size = 0: must be positive"),
        ("brain.inner.size", "big", "experiment.brain.inner.size = 'big': expected `int`, got `str`"),
        ("name", "null", "experiment.name = None: expected `str`, got `null`"),
        ("limit", "1.5", "experiment.limit = 1.5: expected `int`, got `float`"),
        ("", "4", '--set : Plan has no ""'),
    ],
)
def test_a_mistake_in_set_is_named(path: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        set_path(PLAN, path, text)
    assert message in str(caught.value)


@given(st.text(), st.text())
def test_any_set_is_done_or_refused(path: str, text: str) -> None:
    with contextlib.suppress(ConfigError):
        set_path(PLAN, path, text)


def test_set_leaves_the_original_alone() -> None:
    before = json.dumps(encode(PLAN))
    set_path(PLAN, "options.new", "1")
    assert json.dumps(encode(PLAN)) == before


def test_a_setting_whose_type_nobody_knows_is_told_by_its_class() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Misspelt(Brain):
        size: "flaot" = 1  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ConfigError, match=r"^plan: .* setting of Misspelt cannot be read: name 'flaot'"):
        decode(Brain, encode(Misspelt()), "plan")


def test_a_setting_of_listed_values_takes_no_other_one_in_whatever_class():
    @dataclass(frozen=True, kw_only=True)
    class Chosen(Config):
        colour: Literal["red", "blue"] = "red"
        maybe: Literal["a", "b"] | None = None

    assert Chosen(colour="blue", maybe="b").maybe == "b"
    for settings in ({"colour": "green"}, {"maybe": "c"}, {"colour": None}):
        with pytest.raises(ConfigError, match=r"is not known; take one of (red, blue|a, b, None)$"):
            Chosen(**settings)


def test_numbers_of_numpy_are_saved_as_plain_ones() -> None:
    made = encode(Small(size=np.int64(3), rate=np.float32(0.5)))  # type: ignore[arg-type]
    assert made == {"kind": "Small", "size": 3, "rate": 0.5} and type(made["size"]) is int
    with pytest.raises(ConfigError, match="is a ndarray"):
        encode(Plan(name="x", options={"goal": np.zeros(2)}))
