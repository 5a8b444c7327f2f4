"""Logs of workers that are too long are shortened, and that is told."""

import os
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import gymnasium
import numpy as np
import pytest

from tidemill import PPO, ActorCritic, Actors, Experiment, Gymnasium, Limits, Trainer, train
from tidemill.launchers import log_files, processes
from tidemill.launchers.log_files import shorten
from tidemill.run.events import read_events


def test_a_log_that_is_too_long_keeps_its_beginning_and_its_end_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "KEPT_BYTES", 1 << 10)
    long, short = tmp_path / "long.log", tmp_path / "short.log"
    short.write_bytes(b"all of it")
    with long.open("ab", buffering=0) as writer:
        writer.write(b"first".ljust(1 << 10, b"."))
        writer.write(bytes(log_files.MOST_BYTES))
        writer.write(b"last".rjust(1 << 10, b"."))
        link = tmp_path / "link.log"
        link.symlink_to(tmp_path / ("far" * 20))
        assert shorten([link, tmp_path / "none.log", short, long]) == [long]
        writer.write(b", and more")
    first, said, last = long.read_bytes().split(b"\n")
    assert (first.strip(b"."), last.strip(b".")) == (b"first", b"last, and more")
    assert said == b"[... 64 MB that were printed here are taken out ...]"
    assert short.read_bytes() == b"all of it" and shorten([long, short]) == []


class Printing(gymnasium.Env[Any, Any]):
    """Each step prints 100 kB, and waits while its log is too long, so that whoever looks
    at that has the time."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin."""
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        """Print."""
        print("." * 100_000, flush=True)
        until = monotonic() + 60
        while os.fstat(1).st_size > 3 << 20 and monotonic() < until:
            sleep(0.01)
        return np.zeros(1, np.float32), 1.0, False, False, {}


def test_an_environment_that_prints_without_end_is_told_and_does_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "MOST_BYTES", 2 << 20)
    monkeypatch.setattr(log_files, "KEPT_BYTES", 1 << 10)
    monkeypatch.setattr(processes, "_LOGS_S", 0.1)
    experiment = Experiment(
        name="printing",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(environment=Gymnasium(make=f"{__file__}:Printing"), lanes=1),
            "trainer": Trainer(algorithm=PPO(minibatch_size=64, epochs=1), batch_size=256),
        },
        limits=Limits(steps=256),
    )
    run = tmp_path / "run"
    result = train(experiment, launch="processes", layout="given", run_dir=run, quiet=True)
    told = [event.cause for event in read_events(run) if event.what == "told" and "taken out" in event.cause]
    log = run / "logs" / "actor-0.log"
    assert result.summary["status"] == "completed"
    assert len(told) == 1 and str(log) in told[0]
    assert b"that were printed here are taken out" in log.read_bytes()
    assert log.stat().st_size < 4 << 20 < 1e5 * result.summary["env_steps"]
