"""Launchers and transports of a user's own that raise: one line says what and where, and
nothing is left behind."""

import os
import tempfile
from pathlib import Path

import pytest
from tests.run.watching import wait_until
from typer.testing import CliRunner

import tidemill
from tidemill import ConfigError, Gymnasium, RunError
from tidemill.cli.main import app
from tidemill.launchers.inline import InlineLauncher
from tidemill.presets.ppo import ppo

OWN = """
from tidemill import ProcessesLauncher
from tidemill.api.launcher import Launcher
from tidemill.launchers.inline import InlineLauncher
from tidemill.transports.shared import SharedTransport

class Lacks(Launcher):
    def launch(self, job):
        return {}

class Makes(InlineLauncher):
    def __init__(self):
        raise ValueError("no cluster")

class Checks(InlineLauncher):
    def check(self, experiment):
        raise KeyError("no room")

class Launches(InlineLauncher):
    def launch(self, job):
        raise ValueError("no node")

class Waits(InlineLauncher):
    def wait(self, seconds, least=0.0):
        raise ValueError("no answer")

class NoProgram(ProcessesLauncher):
    def command(self, workers):
        return ["/no/such/program"]

class Ends(SharedTransport):
    def close(self):
        super().close()
        raise ValueError("no end")

class OverEnds(ProcessesLauncher):
    transport = f"{__file__}:Ends"

class NoEnds(SharedTransport):
    @staticmethod
    def endpoints(bell, link, handles):
        raise ValueError("no ends")

class OverNoEnds(ProcessesLauncher):
    transport = f"{__file__}:NoEnds"
"""


def small() -> tidemill.Experiment:
    return ppo("small", Gymnasium(id="CartPole-v1"), lanes=4, sample_steps=16, updates=1)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Lacks", "--launch Lacks: it cannot be made: TypeError: Can't instantiate abstract class Lacks"),
        ("Makes", "--launch Makes: it cannot be made: ValueError: no cluster ({own}, line 13, in __init__)"),
        ("Checks", "KeyError: 'no room' ({own}, line 17, in check)"),
        ("Launches", "the workers cannot be started: ValueError: no node ({own}, line 21, in launch)"),
        ("Waits", "Waits cannot wait: ValueError: no answer ({own}, line 25, in wait)"),
        ("NoProgram", "the workers cannot be started: No such file or directory: /no/such/program"),
    ],
)
def test_what_a_launcher_raises_is_one_line_and_no_folder_stays(name: str, told: str, tmp_path: Path) -> None:
    own, folder = tmp_path / "own.py", tmp_path / "run"
    own.write_text(OWN)
    given = ["--launch", f"{own}:{name}", "--run-dir", str(folder), "--layout", "given", "--max-steps", "99"]
    result = CliRunner().invoke(app, ["train", "CartPole-v1", *given])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    errors = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith(f"error: {told.format(own=own)}")
    assert "Traceback" not in result.output and not folder.exists()


def test_a_transport_that_cannot_close_costs_neither_the_run_nor_what_is_tidied_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    open_before = set(os.listdir("/proc/self/fd"))
    result = tidemill.train(small(), launch=f"{own}:OverEnds", run_dir=tmp_path / "run", layout="given")
    assert result.summary.status == "completed" and result.summary.updates == 1
    assert f"OverEnds could not tidy up: ValueError: no end ({own}" in capsys.readouterr().err
    assert not (tmp_path / "run" / "logs").exists()  # which were empty
    wait_until(
        lambda: {each for each in os.listdir("/proc/self/fd") if _leads(each)} <= open_before,
        60,
        "nothing stays open",
    )


def test_what_a_transport_raises_in_a_worker_s_process_says_where(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    with pytest.raises(RunError, match=rf"-0: ValueError: no ends \({own}, line 42, in endpoints\)$"):
        tidemill.train(small(), launch=f"{own}:OverNoEnds", run_dir=tmp_path / "run", layout="given")


def _leads(descriptor: str) -> bool:
    """False of the one by which the list was made."""
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def test_a_launcher_that_cannot_close_does_not_hide_why_a_run_failed(tmp_path: Path) -> None:
    class Neither(InlineLauncher):
        def launch(self, job: object) -> dict[str, object]:  # type: ignore[override]
            raise ValueError("the first cause")

        def close(self, seconds: float) -> None:
            raise ValueError("the second")

    with pytest.raises(RunError, match="the first cause"):
        tidemill.train(small(), launch=Neither, run_dir=tmp_path / "run", quiet=True)


def test_a_launcher_says_by_a_config_error_what_it_misses() -> None:
    class Picky(InlineLauncher):
        def __init__(self) -> None:
            raise ConfigError("no licence; get one")

    with pytest.raises(ConfigError, match="no licence; get one"):
        tidemill.train(small(), launch=Picky)
