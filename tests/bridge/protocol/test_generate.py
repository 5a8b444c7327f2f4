"""What is made from the tables says what the tables say."""

import dataclasses

import pytest

from tidemill.bridge.protocol import generate, tables


def test_c_constants_csharp_constants_and_page_are_made_from_the_tables():
    assert generate.outdated() == {}


def test_whatever_changes_in_a_table_changes_the_digest_and_what_is_made(monkeypatch):
    layout = tables.LAYOUTS["0"]
    changed = dataclasses.replace(layout, header=(*layout.header, tables.TableField("more", "i32")))
    assert changed.digest != layout.digest
    monkeypatch.setitem(generate.LAYOUTS, "0", changed)
    assert set(generate.outdated()) == {generate.HEADER, generate.CONSTANTS, generate.PAGE}
    assert generate.main(["--check"]) == 1


def test_descriptions_do_not_count():
    layout = tables.LAYOUTS["0.3.2"]
    described = dataclasses.replace(
        layout, header=tuple(dataclasses.replace(field, about="otherwise") for field in layout.header)
    )
    assert described.digest == layout.digest


@pytest.mark.parametrize(
    ("name", "digest"), [("0", "b08a2094"), ("0.3.0", "804e0ed8"), ("0.3.2", "e0c41017")]
)
def test_layouts_are_the_published_ones(name, digest):
    assert tables.LAYOUTS[name].digest == digest
