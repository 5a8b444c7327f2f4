"""For tests of launchers."""

import pytest

from tidemill.launchers import agents


@pytest.fixture(autouse=True)
def patient_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this process is the runner, it takes no host for lost that a busy machine
    keeps still."""
    monkeypatch.setattr(agents, "VOID_S", 60.0)
