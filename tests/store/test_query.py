"""Queries: text and data are the same, and what is misspelt is said."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.config import decode, encode
from tidemill.core.errors import ConfigError
from tidemill.store.query import Query

BETWEEN = Query(where=(("win_rate", ">", 0.8), ("win_rate", "<", 0.9)), order="-win_rate", limit=10)
VERSIONS: list[dict[str, float]] = [
    {"version": v, "win_rate": v / 10, "games": 10 - v} for v in range(10)
] + [{"version": 10}]


def chosen(query: Query) -> list[float]:
    return [version["version"] for version in query.select(VERSIONS, lambda version: version)]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("", Query()),
        ("win_rate > 0.8 and win_rate < 0.9 order by -win_rate limit 10", BETWEEN),
        ("win_rate>.8 and win_rate<9e-1 order by - win_rate limit 10", BETWEEN),
        ("return/mean >= -1.5", Query(where=(("return/mean", ">=", -1.5),))),
        ("win_rate.n == 3 and age != +7", Query(where=(("win_rate.n", "==", 3), ("age", "!=", 7)))),
        ("order by version", Query(order="version")),
        ("limit 3", Query(limit=3)),
        (
            "limits > 1 and orders < 2 and android <= 3",
            Query(where=(("limits", ">", 1), ("orders", "<", 2), ("android", "<=", 3))),
        ),
    ],
)
def test_text_says_what_data_says(text: str, query: Query) -> None:
    assert Query.parse(text) == query
    assert Query.parse(str(query)) == query


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("win_rate > 0.8 or win_rate < 0.1", 'expected "and", "order by" or "limit", found "or"'),
        ("win_rate", "expected one of < <= > >= == !=, it ends there"),
        ("win_rate = 1", 'expected one of < <= > >= == !=, found "="'),
        ("win_rate > x", 'expected a number, found "x"'),
        ("win_rate > nan", 'expected a number, found "nan"'),
        ("win_rate > 1_000", 'expected a number, found "1_000"'),
        ("win_rate > 0.8 and", "expected a field, it ends there"),
        ("0.8 < win_rate", 'expected a field, found "0.8"'),
        ("win_rate > 1; DROP TABLE versions", 'expected "and", "order by" or "limit", found ";"'),
        ("version' > 1", 'expected one of < <= > >= == !=, found "\'"'),
        ("order win_rate", 'expected "by", found "win_rate"'),
        ("order by", "expected a field, it ends there"),
        ("order by version, age", 'expected nothing more, found ","'),
        ("limit -1", 'expected a whole number, found "-1"'),
        ("limit 0", "limit = 0 must be at least 1"),
        ("limit 3 order by version", 'expected nothing more, found "order"'),
        ("win_rate > 1e999", "not a finite number"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Query.parse(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"where": (("win rate", ">", 1.0),)}, "win rate"),
        ({"where": (("win_rate", "=>", 1.0),)}, '"=>"'),
        ({"where": (("win_rate", ">", float("nan")),)}, "nan"),
        ({"where": (("win_rate", ">", True),)}, "True"),
        ({"order": "win_rate desc"}, "win_rate desc"),
        ({"order": ""}, "''"),
        ({"limit": 0}, "limit = 0"),
    ],
)
def test_what_cannot_be_asked_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Query(**settings)
    assert message in str(error.value)


def test_a_query_is_plain_data() -> None:
    assert decode(Query, encode(BETWEEN)) == BETWEEN
    with pytest.raises(ConfigError, match="where"):
        decode(Query, {"kind": "Query", "where": [["win_rate", ">"]]})


def test_conditions_order_and_limit() -> None:
    assert chosen(Query()) == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert chosen(Query.parse("win_rate > 0.2 and win_rate <= 0.5")) == [5, 4, 3]
    assert chosen(Query.parse("order by -win_rate limit 3")) == [9, 8, 7]
    assert chosen(Query.parse("games != 5 order by games limit 2")) == [9, 8]


def test_what_lacks_a_field_fulfils_no_condition_on_it_and_is_not_sorted_by_it() -> None:
    assert 10 not in chosen(Query.parse("win_rate != 0.3"))
    assert 10 not in chosen(Query.parse("order by win_rate"))


def test_equals_come_newest_first() -> None:
    equals = [{"version": v, "win_rate": 0.5} for v in (1, 10, 9)]
    assert [v["version"] for v in Query(order="win_rate").select(equals, lambda v: v)] == [10, 9, 1]


def test_a_misspelt_field_is_said_with_the_nearest_one() -> None:
    known = {"version", "age", "env_steps", "win_rate"}
    BETWEEN.check(known)
    Query.parse("win_rate.n > 20").check(known)
    for text in ("winrate > 0.8", "order by -winrate", "winrate.n > 0.8"):
        with pytest.raises(ConfigError, match=r'asks for "winrate.*did you mean "win_rate"'):
            Query.parse(text).check(known)
    with pytest.raises(ConfigError, match="known: age, env_steps, version, win_rate"):
        Query.parse("zzz > 1").check(known)


FIELDS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_/]{0,10}(\.n)?", fullmatch=True).filter(
    lambda s: s not in ("and", "order", "by", "limit")
)
CONDITIONS = st.tuples(
    FIELDS,
    st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
    st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
)


@settings(max_examples=50)
@given(
    where=st.lists(CONDITIONS, max_size=3).map(tuple),
    order=st.tuples(st.sampled_from(["", "-"]), FIELDS).map("".join),
    limit=st.none() | st.integers(1, 10**6),
)
def test_every_query_is_its_own_text(where: Any, order: str, limit: int | None) -> None:
    where = tuple((field, comparison, float(value)) for field, comparison, value in where)
    query = Query(where=where, order=order, limit=limit)
    assert Query.parse(str(query)) == query


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        query = Query.parse(text)
    except ConfigError:
        return
    assert Query.parse(str(query)) == query
