"""The environment contract: what a class of one's own may be."""

from typing import Generic, TypeVar

import pytest

from tidemill.api.environment import Environment

Kind = TypeVar("Kind")


def test_an_environment_may_be_generic_and_take_keywords() -> None:
    class Named:
        def __init_subclass__(cls, *, title: str = "", **keywords: object) -> None:
            super().__init_subclass__(**keywords)
            cls.title = title  # type: ignore[attr-defined]

    class Mine(Environment, Named, Generic[Kind], title="mine"):
        pass

    assert Mine[int].__origin__ is Mine and Mine.title == "mine"  # type: ignore[attr-defined]


def test_a_method_by_its_old_name_is_refused_with_the_new_one() -> None:
    with pytest.raises(TypeError, match=r"Mine\.said is called episode_infos now"):
        type("Mine", (Environment,), {"said": None})
