"""For all tests."""

import gc
import os
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tidemill.core.blas_threads import limit_threads
from tidemill.envs.hanging_threads import HANGING

# No test depends on how busy the machine is, and all runs of the tests look at the same
# examples.
settings.register_profile(
    "tidemill", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tidemill")


MEMORY = Path("/dev/shm")
ROOM = 4 << 30  # bytes that must be free there: many times what all tests together have at a time


def pytest_configure() -> None:
    """Folders of tests are in memory where there is room and programs may be started:
    most of a short run is waiting for the disk, for as long as others use it."""
    with suppress(OSError):
        found = os.statvfs(MEMORY)
        if found.f_bavail * found.f_frsize >= ROOM and not found.f_flag & os.ST_NOEXEC:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported for all tests stays: nobody looks for garbage among it, neither
    meanwhile nor, again and again, while they run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep measured costs out of the user's cache, and what tests have had done out of
    what the user has. Matplotlib keeps its fonts in that cache, and goes on with them.
    Numpy computes unless a test or whoever starts it says otherwise, so that no run
    measures first which is quicker. No run asks git what has changed in this checkout,
    which takes as long as many a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEMILL_NATIVE", os.environ.get("TIDEMILL_NATIVE", "off"))
        if "MPLCONFIGDIR" not in os.environ:
            home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
            patch.setenv("MPLCONFIGDIR", str(home / "matplotlib"))
        patch.setenv("GIT_DIR", os.devnull)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _patient_commands() -> Iterator[None]:
    """Have what tells a run something wait long for its answer: a busy machine may keep
    the run from hearing it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tidemill.run.control_socket._TIMEOUT", 120.0)
        patch.setattr("tidemill.run.control_folder.ANSWER_S", 120.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Have numeric libraries compute with one thread: processes of tests that each take
    every core would mostly wait for one another."""
    limit_threads(1)


@pytest.fixture(autouse=True)
def _own_hanging_threads() -> Iterator[None]:
    """Have no test count threads that tests before it have left in what hangs. Not by the
    fixture `monkeypatch`, which would then outlive the folders of tests that use it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HANGING, "_hanging", set())
        patch.setattr(HANGING, "_stepping", 0)
        yield
