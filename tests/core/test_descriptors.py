"""How many descriptors a process may have open."""

import os
import resource

import pytest

from tidemill.core.descriptors import allow_descriptors
from tidemill.core.errors import ConfigError


def test_the_limit_is_raised_by_what_is_open_and_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, limits = len(os.listdir("/proc/self/fd")), list[tuple[int, int]]()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (opened + 100, opened + 300))
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.append(given))
    allow_descriptors(10, "this and that", "take fewer")
    assert limits == []
    allow_descriptors(200, "this and that", "take fewer")
    assert limits == [(opened + 300, opened + 300)]  # not twice of what is needed: no more may be
    with pytest.raises(ConfigError, match=r"250 of this and that, .* are allowed; take fewer, or have the"):
        allow_descriptors(250, "this and that", "take fewer")


def test_what_is_open_is_counted_where_no_folder_can_be_opened_or_there_is_no_proc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = len(os.listdir("/proc/self/fd")) - 1  # but for the one of the look itself

    def none(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "listdir", none)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, opened + 40))
    with pytest.raises(ConfigError, match=rf" {opened} that are open"):
        allow_descriptors(100, "this and that", "take fewer")
