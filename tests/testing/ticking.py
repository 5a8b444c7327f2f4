"""A clock that goes on by looks at it: what is done for so many seconds is done as often
on any machine, however busy it is."""

import itertools
import time
from types import SimpleNamespace

import pytest

from tidemill.testing import check_env


def by_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `check_environment` look at such a clock, by which a tick takes a
    millisecond."""
    looks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(looks) * 1e-3, perf_counter=time.perf_counter)
    monkeypatch.setattr(check_env, "time", clock)
