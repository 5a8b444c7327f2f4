"""Code that the user names."""

import sys
from pathlib import Path

import pytest

from tidemill.core.source import load_attribute, load_file


def test_a_file_can_import_what_lies_beside_it_where_nothing_installed_has_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "tides_beside.py").write_text("HEIGHT = 5")
    (tmp_path / "tides_later.py").touch()
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('the one that is installed is meant')")
    (tmp_path / "mine.py").write_text(
        "import colorsys\nfrom tides_beside import HEIGHT\ndef later():\n    import tides_later\n    return tides_later"
    )
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert load_attribute(f"{tmp_path}/mine.py:HEIGHT", "test") == 5
    assert load_file(tmp_path / "mine.py", "test").later() is sys.modules["tides_later"]
    (tmp_path / "other.py").write_text("")
    load_file(tmp_path / "other.py", "test")
    assert sys.path.count(str(tmp_path)) == 1
