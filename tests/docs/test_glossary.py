"""The glossary and the pages beside it: words stand once and are used, words that went
stay gone, and what the pages name is there."""

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS, LIBRARY = ROOT / "docs", ROOT / "src" / "tidemill"
FILES = sorted(LIBRARY.rglob("*.py"))
RETIRED = frozenset(
    (
        "account", "ages", "arrange", "crew", "gang", "given", "held", "intake", "kept",
        "limited", "making", "packed", "past", "peers", "provenance", "pusher", "reached",
        "rings", "said", "shares", "stepwise", "sums", "told", "turns",
    )
)  # fmt: skip
"""Words of before, for which the glossary's last table has others."""
STILL_RETIRED = set[str]()
"""Names that are such a word as yet. This list only shrinks."""
STILL_SHARED = set[str]()
"""Names that several public classes have as yet. This list only shrinks."""


def words() -> list[str]:
    """Return the words that the glossary explains."""
    table = (DOCS / "glossary.md").read_text().split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ", table, re.MULTILINE)
    return [word.strip() for row in rows[1:] for word in row.split(";")]


@cache
def definitions() -> list[tuple[Path, str, str, str]]:
    """Return each class and function of the library: file, indentation, "class" or "def",
    name."""
    line = re.compile(r"^( *)(?:async )?(class|def) (\w+)[(:]", re.MULTILINE)
    return [(path, *found) for path in FILES for found in line.findall(path.read_text())]


def test_each_word_stands_once() -> None:
    found = [word.strip().lower() for word in words() if word != "`Agent`"]
    twice = {word for word in found if found.count(word) > 1}
    assert len(found) > 40
    assert not twice


def test_words_that_are_explained_are_used_in_the_library() -> None:
    text = re.sub(r"[\s_]+", " ", " ".join(path.read_text() for path in FILES)).lower()
    unused = [word for word in words() if word.strip("`").lower() not in text]
    assert not unused


def test_retired_words_name_nothing() -> None:
    modules = {path.relative_to(LIBRARY).as_posix() for path in FILES if path.stem in RETIRED}
    names = {name for *_, name in definitions() if name.lower() in RETIRED and not name.startswith("_")}
    assert modules | names == STILL_RETIRED


def test_public_classes_have_names_of_their_own() -> None:
    places: dict[str, list[Path]] = defaultdict(list)
    for path, indentation, kind, name in definitions():
        if kind == "class" and not indentation and not name.startswith("_"):
            places[name].append(path)
    assert {name for name, found in places.items() if len(found) > 1} == STILL_SHARED


@pytest.mark.parametrize("page", ["architecture.md", "glossary.md", "waits.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (DOCS / page).read_text()
    named = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md))`", text))
    named |= set(re.findall(r"\| ((?:[\w-]+/)+[\w-]+\.py)(?= |,)", text))
    assert named
    missing = [
        name for name in named if not any((base / name).exists() for base in (LIBRARY, LIBRARY.parent, ROOT))
    ]
    assert not missing


def test_the_architecture_is_one_page() -> None:
    lines = (DOCS / "architecture.md").read_text().splitlines()
    assert len(lines) <= 200
    assert max(map(len, lines)) <= 110
