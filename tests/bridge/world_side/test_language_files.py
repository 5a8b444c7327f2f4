"""The files that a simulator's author takes along."""

from pathlib import Path

import pytest

from tidemill.bridge.world_side.language_files import copy_sources, source_files, sources_folder
from tidemill.core.errors import ConfigError


def test_the_copies_are_the_packages_files(tmp_path: Path) -> None:
    copies = copy_sources(tmp_path / "mine")
    assert {path.relative_to(tmp_path / "mine") for path in copies} == set(source_files())
    assert {"native/tidemill.h", "native/reach.c", "native/corridor.c"} <= {
        path.as_posix() for path in source_files()
    }
    for path in copies:
        assert path.read_bytes() == (sources_folder() / path.relative_to(tmp_path / "mine")).read_bytes()


def test_a_second_copy_changes_nothing_and_one_over_other_contents_is_refused_whole(tmp_path: Path) -> None:
    copy_sources(tmp_path)
    copy_sources(tmp_path)
    mine, other = tmp_path / "native" / "trivial.c", tmp_path / "native" / "reach.c"
    mine.write_text("mine")
    other.unlink()
    with pytest.raises(ConfigError, match=r"native/trivial\.c exists and differs"):
        copy_sources(tmp_path)
    assert mine.read_text() == "mine"
    assert not other.exists()
