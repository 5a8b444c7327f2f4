"""For tests of environments over HTTP: nothing waits longer than it must, and nothing is
given up because the machine is slow."""

import pytest


@pytest.fixture(autouse=True)
def quick_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.remote.calls.FIRST_PAUSE", 0.001)
    for patience in (
        "session.CLOSE_SECONDS",
        "openenv.CLOSE_SECONDS",
        "server.FIRST_SECONDS",
        "server.REQUEST_SECONDS",
    ):
        monkeypatch.setattr(f"tidemill.remote.{patience}", 60.0)
    for lanes in ("lane_threads", "lane_coroutines", "asynchronous"):
        monkeypatch.setattr(f"tidemill.envs.{lanes}.CLOSE_SECONDS", 60.0)


@pytest.fixture(autouse=True)
def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of a server from one of an earlier test, which may have had the
    same port."""
    monkeypatch.setattr("tidemill.remote.host._known", {})
