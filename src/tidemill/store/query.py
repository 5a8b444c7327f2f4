"""Queries over versions: which of them, in what order, how many. Plain data, and the same
as a line of text::

    Query.parse("win_rate > 0.8 and win_rate < 0.9 order by -win_rate limit 10")
    Query(
        where=(("win_rate", ">", 0.8), ("win_rate", "<", 0.9)),
        order="-win_rate", limit=10,
    )

A query names fields; it is never made into a statement of another language.
"""

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, NoReturn, Self, TypeVar

from tidemill.core.config import Config
from tidemill.core.errors import ConfigError, did_you_mean

Comparison = Literal["<", "<=", ">", ">=", "==", "!="]
Condition = tuple[str, Comparison, float]
"""(field, comparison, number)"""

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne,
}  # fmt: skip
_WORDS = ("and", "order", "by", "limit")
_METADATA = re.compile(r"[A-Za-z_][A-Za-z0-9_/]{0,127}")
# metrics have names of policies and groups of workers in theirs
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,199}")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_TOKEN = re.compile(rf"\s*({_FIELD.pattern}(?![\w./-])|{_NUMBER.pattern}(?![\w.])|<=|>=|==|!=|<|>|-|\S+)")

_T = TypeVar("_T")


def check_field(name: str) -> None:
    """Raise `ConfigError` unless metadata may be called `name` (letters, digits, "_" and
    "/"; "NAME.n" is how many values its mean is of)."""
    if not _METADATA.fullmatch(name) or name in _WORDS:
        raise ConfigError(
            f'"{name}" cannot name metadata: use 1 to 128 letters, digits, "_" and "/", beginning with a '
            f"letter, and none of {', '.join(_WORDS)}"
        )


@dataclass(frozen=True, kw_only=True)
class Query(Config):
    """A query says which versions are wanted, in what order, and how many.

    where: (field, comparison, number) of each condition; all must hold. A version that
        lacks a field never fulfils a condition on it
    order: the field to sort by, smallest first; with "-" in front, largest first.
        Versions that lack it are left out. Equals: the newest first
    limit: most versions that are returned

    Fields are ``version``, ``age`` (seconds since it was pushed), the counters it was
    pushed with, and the means recorded for it; ``NAME.n`` is how many values a mean is
    of. Order by itself is the newest version first.
    """

    where: tuple[Condition, ...] = ()
    order: str = "-version"
    limit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for condition in self.where:
            field, comparison, value = condition
            _check_form("where", field)
            if comparison not in _COMPARE:
                raise ConfigError(
                    f'where: "{comparison}" in {_text(condition)} compares nothing; take one of '
                    f"{' '.join(_COMPARE)}"
                )
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
                raise ConfigError(f"where: {value!r} in {_text(condition)} is not a finite number")
        _check_form("order", self.order.removeprefix("-"))
        self.check_least(limit=1)

    def fields(self) -> tuple[str, ...]:
        """Return every field that is asked for, each once."""
        return tuple(dict.fromkeys([*(field for field, _, _ in self.where), self.order.removeprefix("-")]))

    def check(self, known: Collection[str]) -> None:
        """Raise `ConfigError` for a field that is not `known` (with ``NAME.n`` for every
        NAME; see `among`)."""
        for field in self.fields():
            if not among(field, known) and field.removesuffix(".n") not in known:
                raise ConfigError(
                    f'the query "{self}" asks for "{field}", which no version has; '
                    f"{did_you_mean(field, known)}"
                )

    def select(self, versions: Iterable[_T], values: Callable[[_T], Mapping[str, float]]) -> list[_T]:
        """Return those of `versions` that are asked for, in order. `values` gives the
        fields that one has."""
        field, sign = self.order.removeprefix("-"), -1 if self.order.startswith("-") else 1
        found: list[tuple[float, float, _T]] = []
        for version in versions:
            has = values(version)
            if field in has and all(
                name in has and _COMPARE[comparison](has[name], value)
                for name, comparison, value in self.where
            ):
                found.append((sign * has[field], -has.get("version", 0), version))
        found.sort(key=lambda item: item[:2])
        return [version for _, _, version in found[: self.limit]]

    def __str__(self) -> str:
        parts = [" and ".join(_text(condition) for condition in self.where)]
        parts += [
            f"order by {self.order}" if self.order != "-version" else "",
            f"limit {self.limit}" if self.limit is not None else "",
        ]
        return " ".join(part for part in parts if part)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the query that `text` says: ``FIELD > NUMBER and … order by [-]FIELD
        limit N``, each part optional. Raises `ConfigError`."""
        return cls(**_Reader(text).query())


def among(name: str, known: Collection[str]) -> bool:
    """Return whether `name` is `known`, or of a family that is: "info/" stands for all
    names that begin so."""
    return name in known or any(
        name.startswith(family) and name != family for family in known if family.endswith("/")
    )


def _check_form(setting: str, field: Any) -> None:
    if not isinstance(field, str) or not _FIELD.fullmatch(field) or field in _WORDS:
        raise ConfigError(f"{setting}: {field!r} cannot be a field's name")


def _text(condition: Any) -> str:
    return " ".join(repr(part) if isinstance(part, float) else str(part) for part in condition)


class _Reader:
    """Reads a query's text from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [match[1] for match in _TOKEN.finditer(text)]
        self._at = 0

    def query(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._next not in ("order", "limit", ""):
            found["where"] = tuple(self._conditions())
        if self._accept("order"):
            self._expect("by")
            found["order"] = ("-" if self._accept("-") else "") + self._field()
        if self._accept("limit"):
            token = self._take()
            if not token.isascii() or not token.isdigit():
                self._refuse("a whole number", token)
            found["limit"] = int(token)
        if self._next:
            self._refuse(
                '"and", "order by" or "limit"' if not {"order", "limit"} & found.keys() else "nothing more",
                self._next,
            )
        return found

    def _conditions(self) -> Iterable[Condition]:
        while True:
            field, comparison = self._field(), self._take()
            if comparison not in _COMPARE:
                self._refuse(f"one of {' '.join(_COMPARE)}", comparison)
            token = self._take()
            if not _NUMBER.fullmatch(token):
                self._refuse("a number", token)
            yield field, comparison, float(token)  # type: ignore[misc]
            if not self._accept("and"):
                return

    def _field(self) -> str:
        token = self._take()
        if not _FIELD.fullmatch(token) or token in _WORDS:
            self._refuse("a field", token)
        return token

    @property
    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._next
        self._at += 1
        return token

    def _accept(self, word: str) -> bool:
        taken = self._next == word
        self._at += taken
        return taken

    def _expect(self, word: str) -> None:
        if not self._accept(word):
            self._refuse(f'"{word}"', self._next)

    def _refuse(self, wanted: str, found: str) -> NoReturn:
        said = f'found "{found}"' if found else "it ends there"
        raise ConfigError(
            f'the query "{self._text}" cannot be read: expected {wanted}, {said}; write it as "win_rate > '
            '0.8 and win_rate < 0.9 order by -win_rate limit 10"'
        )
