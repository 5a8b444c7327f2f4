"""Orders to a run on two hosts, by the command line of either of them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.networked import settings
from benchmarks.networks import Network
from tests.hosts.hosts import networked
from tests.launchers.test_hosts import agents_of, events
from tests.run.watching import Run, wait_until
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.metrics.json_lines import read_metrics
from tidemill.store.checkpoint import read_newest

NETWORKED = Path(__file__).parents[2] / "benchmarks" / "networked.py"
PATIENT = """
from tidemill.launchers import agents
from tidemill.run import control_folder
agents.VOID_S = 60.0
control_folder._EVERY = 0.05
"""


class Told:
    """A run whose runner is on the first host of a network, and its commands on any."""

    def __init__(self, run: Run, network: Network) -> None:
        self.run, self._network = run, network

    def order(self, host: int, word: str, *options: str) -> str:
        """Return what the command says."""
        with self._network.on(host):
            done = CliRunner().invoke(app, [word, str(self.run.path), *options])
        assert done.exit_code == 0, done.output
        return done.stdout.strip()

    def updates(self) -> int:
        return len(read_metrics(self.run.path))

    def saved(self) -> int:
        """Return the update of the newest checkpoint."""
        return int(read_newest(self.run.path / "checkpoints" / "policy").facts["updates"])

    def goes_on(self, after: int) -> None:
        wait_until(lambda: self.updates() > after + 2, 120, "updates go on")

    def rests(self, host: int) -> dict[str, str]:
        """Wait until all workers rest, and return where each does."""
        found: dict[str, str] = {}

        def look() -> bool:
            told = self.order(host, "status")
            found.update(re.findall(r"^ +(\S+-0) +(\S+) +\d+ +paused +is paused ", told, re.M))
            return len(found) == 3

        wait_until(look, 120, "all workers rest")
        return found


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    with networked(2) as network:
        for name, value in settings(network).items():
            monkeypatch.setenv(name, value)
        seldom = "--set=workers.trainer.checkpoint_seconds=10000"
        with network.on(0):
            launch = f"{NETWORKED}:Networked"
            run = Run(tmp_path, "cartpole", "--layout=given", seldom, launch=launch, code=PATIENT)
        try:
            run.wait_for_updates()
            yield Told(run, network)
        finally:
            run.kill_all()


def test_a_run_is_paused_saved_and_stopped_from_either_host(told: Told) -> None:
    """The second one sees the run's folder, and no socket of the first one's."""
    run, apart = told.run, {"trainer-0": "runner", "actor-0": "h1", "server-0": "h1"}
    assert told.order(1, "pause") == "paused" and told.rests(1) == apart
    rested = told.updates()
    wait_until(lambda: told.saved() == rested, 60, "what was trained is saved")
    assert told.order(0, "save") == "saving: a checkpoint is written" and told.rests(0) == apart
    assert told.updates() == rested
    assert told.order(1, "start") == "running"
    told.goes_on(rested)
    assert told.order(1, "save") == "saving: a checkpoint is written"
    wait_until(lambda: told.saved() > rested, 120, "it is saved")
    # a host may be lost in a pause: its workers live again, and rest
    assert told.order(0, "pause") == "paused" and told.rests(0) == apart
    rested = told.updates()
    agents_of(run.processes())["h1"].kill()
    wait_until(lambda: len(events(run, "lives")) == 2, 120, "its workers live again")
    assert set(told.rests(1)) == set(apart) and told.updates() == rested
    assert told.order(0, "start") == "running"
    told.goes_on(rested)
    assert told.order(1, "stop") in ("stopping: a final checkpoint is written", "the run has ended")
    status, text = run.ended()
    assert status == 0 and "h1 " in text, text
    summary = run.summary()
    assert (summary["status"], summary["reason"]) == ("completed", "tidemill stop")
    assert told.saved() == summary["updates"] == told.updates()
    ended = told.order(1, "status")
    assert "episodes" in told.order(1, "eval", "--episodes", "1")
    told.order(1, "plot", "--out", str(run.folder / "plot.png"))
    assert (run.folder / "plot.png").stat().st_size > 1000
    assert "tidemill stop" in ended and re.search(r"^runner .* trainer-0, actor-0, server-0$", ended, re.M)
    run.nothing_is_left()
