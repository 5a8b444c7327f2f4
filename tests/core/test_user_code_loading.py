"""Code that the user names."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidemill.core.errors import ConfigError
from tidemill.core.user_code_loading import load_attribute, load_file, own_path, travel


def test_a_file_can_import_what_lies_beside_it_where_nothing_installed_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "tides_beside.py").write_text("HEIGHT = 5")
    (tmp_path / "tides_later.py").touch()
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('the one that is installed is meant')")
    (tmp_path / "mine.py").write_text(
        "import colorsys\nfrom tides_beside import HEIGHT\ndef later():\n    import tides_later\n    return "
        "tides_later"
    )
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert load_attribute(f"{tmp_path}/mine.py:HEIGHT", "test") == 5
    assert load_file(tmp_path / "mine.py", "test").later() is sys.modules["tides_later"]
    (tmp_path / "other.py").write_text("")
    load_file(tmp_path / "other.py", "test")
    assert sys.path.count(str(tmp_path)) == 1


def test_what_has_travelled_comes_last_and_what_lies_beside_a_file_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    own, folders = [*sys.path], [tmp_path / name for name in ("first", "second", "beside", "later")]
    for folder in folders:
        folder.mkdir()
        (folder / "file.py").touch()
    first, second, beside, later = map(str, folders)
    travel([first, own[-1], second, beside])
    assert sys.path == [*own, first, second, beside]
    load_file(folders[2] / "file.py", "test")
    assert sys.path == [*own, beside, first, second]
    load_file(folders[3] / "file.py", "test")
    load_file(folders[2] / "file.py", "test")
    assert sys.path == [*own, beside, later, first, second]
    monkeypatch.chdir(tmp_path)
    sys.path[:0] = ["", "first"]
    assert own_path()[:2] == [str(tmp_path), first]


def test_a_thread_that_asks_for_a_file_which_another_is_running_gets_the_whole_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(0.2)\nclass Late: pass")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: load_attribute(f"{tmp_path}/slow.py:Late", "test"), range(2))
    assert first is second


def test_a_file_that_fails_is_run_anew_when_it_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(
        ConfigError, match=r"test: running .*broken.py failed: ZeroDivisionError: division by zero"
    ):
        load_file(tmp_path / "broken.py", "test")
    (tmp_path / "broken.py").write_text("MENDED = True")
    assert load_attribute(f"{tmp_path}/broken.py:MENDED", "test")


def test_a_name_that_a_file_has_not_is_told_with_those_that_it_defines(tmp_path: Path) -> None:
    file = tmp_path / "arm.py"
    file.write_text("import os\nfrom pathlib import *\nclass Hand: ...\ndef grip(): ...\nspeed = 3\n")
    with pytest.raises(ConfigError, match=r'arm.py has no "Motor"; known: Hand, grip, speed$'):
        load_attribute(f"{file}:Motor", "make")
    file.with_name("others.py").write_text("from pathlib import Path, PurePath\n")
    with pytest.raises(ConfigError, match=r'has no "Motor"; known: Path, PurePath$'):
        load_attribute(f"{file.with_name('others.py')}:Motor", "make")
