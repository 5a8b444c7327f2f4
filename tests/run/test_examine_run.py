"""``tidemill doctor run``: what a run's folder tells, of a run that is over, goes on or
failed, and of one that is not to be trusted."""

import json
import os
import re
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from tests.cli.test_cli import tidemill as command

import tidemill
from tidemill.core.errors import RunError
from tidemill.run.examine_run import examine_run
from tidemill.run.folder import RunFolder
from tidemill.store.checkpoint import write_checkpoint


class Failing(gymnasium.Env):
    """Raises in its 700th step."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 700:
            raise ValueError("out of \x1b[2J petrol")
        return np.zeros(2, np.float32), 1.0, self.steps % 7 == 0, False, {}


def run_in(folder: Path, environment="CartPole-v1", **settings) -> Path:
    sizes = {"lanes": 4, "sample_steps": 32, "minibatch_size": 64}
    tidemill.train(environment, launch="inline", quiet=True, log=(), run_dir=folder, **sizes, **settings)
    return folder


def findings(folder: Path) -> dict[str, tuple[str, str, str]]:
    return {each.name: (each.level, each.message, each.cure) for each in examine_run(RunFolder.open(folder))}


class Slow(gymnasium.Wrapper):
    """Steps that take so long that workers report in between, however quick the
    machine is."""

    def step(self, action):
        time.sleep(5e-4)
        return self.env.step(action)


def slow_cart_pole():
    return Slow(gymnasium.make("CartPole-v1"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return run_in(tmp_path_factory.mktemp("finished") / "run", slow_cart_pole, steps=30 * 128, clip=1e-6)


def test_a_finished_run_is_told_with_what_is_odd_about_it(finished):
    found = findings(finished)
    assert [*found][:2] == ["run", "pace"]
    assert sorted(found) == ["actor", "pace", "returns", "run", "trainer", "training"]
    assert found["run"][0] == "ok" and "completed" in found["run"][1]
    assert "env steps, 3" in found["pace"][1] and "steps/s" in found["pace"][1]
    # Where a worker spends its time is the machine's matter, and may be waits alone.
    for kind in ("actor", "trainer"):
        assert re.fullmatch(r"\d+% \w+(, \d+% \w+)*", found[kind][1])
    assert found["training"][0] == "warn"
    assert "clip = 1e-06 is so narrow" in found["training"][1]
    assert found["training"][2] == "--set workers.trainer.algorithm.clip=0.2 is usual"
    told = command("doctor", "run", finished)
    assert told.exit_code == 0 and "at step 2," in told.output and "so narrow" in told.output


def test_a_failed_run_is_told_with_its_last_error(tmp_path):
    with pytest.raises(RunError):
        run_in(tmp_path / "run", Failing, steps=100_000)
    found = findings(tmp_path / "run")
    assert found["run"][0] == "fail" and "resume" in found["run"][2]
    assert found["last error"][0] == "fail" and "petrol" in found["last error"][1]
    assert "\x1b" not in str([*found.values()])
    assert command("doctor", "run", tmp_path / "run").exit_code == 1


def test_a_run_that_goes_on_is_told_from_one_that_was_cut_off(finished, tmp_path):
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    level, text, cure = findings(tmp_path)["run"]
    said = "it was cut off: there is no whole summary.json, and nobody holds the folder"
    assert (level, text) == ("warn", said)
    assert cure == ""  # there is nothing to go on from
    write_checkpoint(tmp_path / "checkpoints" / "policy", "update-1", {}, {}, 1)
    assert findings(tmp_path)["run"][2].endswith(f" resume {tmp_path}")
    for torn in ('{"status": "comp', "[1]", "{}"):
        (tmp_path / "summary.json").write_text(torn)
        assert findings(tmp_path)["run"][1] == said
    (tmp_path / "summary.json").unlink()
    holder = RunFolder.open(tmp_path)
    holder.lock()
    assert findings(tmp_path)["run"][1] == "it is going on"
    assert findings(tmp_path)["pace"][0] == "ok"
    os.utime(tmp_path / "metrics.jsonl", (0, 0))
    assert findings(tmp_path)["pace"][0] == "warn" and "no record for" in findings(tmp_path)["pace"][1]
    holder.unlock()


def test_a_folder_of_somebody_elses_is_data_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"workers": {"\\u001b[2J": {"algorithm": {"clip": 0.2}}}}')
    (tmp_path / "summary.json").write_text('{"status": "completed", "reason": "\\u001b]0;x"}')
    record = {"update": 1, "step": 1e12, "clip_fraction": 0.9, "kl": 1, "learning_rate": 1, "\x1b": 1}
    record |= {"return/mean": 1, "time/\x1b-0/train": 1, "time/seconds": None}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(record)}\n" * 30)
    found = findings(tmp_path)
    assert "clipped" in found["training"][1]
    assert all(text.isprintable() for each in found.values() for text in each)
    (tmp_path / "metrics.jsonl").write_text("no record\nno record\n")
    assert findings(tmp_path)["records"][0] == "warn"
    (tmp_path / "metrics.jsonl").unlink()
    assert "no metrics.jsonl" in findings(tmp_path)["records"][1]
    with pytest.raises(RunError, match="not a run's folder"):
        RunFolder.open(tmp_path / "nothing")
