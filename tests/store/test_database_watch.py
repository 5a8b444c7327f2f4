"""Who waits for what is written into a parameter database looks into it when it was."""

import os
from pathlib import Path

import pytest

from tidemill.store import database_watch
from tidemill.store.database_watch import LATER, SOON, DatabaseWatch
from tidemill.store.parameter_database import ParameterDatabase
from tidemill.store.version_index import INDEX


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(database_watch, "monotonic", lambda: self.now)

    def looks(self, watch: DatabaseWatch, seconds: float, step: float = 0.001) -> int:
        """Return in how many of the polls of so many seconds one is to look."""
        count = 0
        for _ in range(round(seconds / step)):
            self.now += step
            count += watch.due()
        return count


def test_one_looks_once_for_each_write_and_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, watch = Clock(monkeypatch), DatabaseWatch(tmp_path)
    assert watch.due()  # whatever is there
    assert not watch.due()
    database = ParameterDatabase(tmp_path)
    database.push("policy", 0, {}, {"env_steps": 0.0})
    assert watch.due() and not watch.due()
    for number in range(20):  # however quickly one comes after the other
        database.results.add("policy", 0, {"reached": float(number)})
        assert watch.due() and not watch.due()
    assert database.versions("policy") and not watch.due()  # nobody writes
    os.utime(tmp_path / INDEX, ns=(5, 5))
    assert watch.due() and not watch.due()
    assert clock.looks(watch, SOON * 1.1) == 1  # a file's times are coarse: another write may have the same
    clock.looks(watch, 1.0)
    assert clock.looks(watch, 10 * LATER) in (9, 10)  # a share may tell them late


def test_a_write_is_seen_at_once_however_long_one_has_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, watch = Clock(monkeypatch), DatabaseWatch(tmp_path)
    clock.looks(watch, 10.0)
    ParameterDatabase(tmp_path).push("policy", 0, {}, {"env_steps": 0.0})
    assert watch.due()
