"""Equal runs are equal, whatever launches them; a resumed run goes on where it was."""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.run.watching import EXPERIMENTS

from tidemill import Gymnasium, Limits
from tidemill.core.errors import CheckpointError, RunError
from tidemill.core.user_code_loading import load_file
from tidemill.metrics.json_lines import read_metrics
from tidemill.presets import experiments as presets
from tidemill.store.checkpoint import read_checkpoint, read_newest
from tidemill.training.train import resume, train

experiments = load_file(EXPERIMENTS, "test")


def without_time(folder: Path) -> list[Mapping[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


def test_inline_twice_gives_equal_bytes(tmp_path: Path) -> None:
    folders = [
        train(
            experiments.ppo(), launch="inline", run_dir=tmp_path / str(i), source=EXPERIMENTS, quiet=True
        ).folder
        for i in range(2)
    ]
    checkpoints = [sorted((folder / "checkpoints" / "policy").glob("update-*")) for folder in folders]
    # those before the last one are written when it is time
    assert "update-8" == checkpoints[0][-1].name == checkpoints[1][-1].name
    for name in ("policy.safetensors", "algorithm.safetensors"):
        first, second = ((c[-1] / name).read_bytes() for c in checkpoints)
        assert first == second and len(first) > 1000
    assert without_time(folders[0]) == without_time(folders[1])
    assert len(without_time(folders[0])) == 8
    other = train(
        experiments.ppo().replace(seed=2),
        launch="inline",
        run_dir=tmp_path / "other",
        source=EXPERIMENTS,
        quiet=True,
    ).folder
    assert without_time(other) != without_time(folders[0])


def test_so_it_does_with_a_replay_memory(tmp_path: Path) -> None:
    made = presets.experiment_for("CartPole-v1", Gymnasium(id="CartPole-v1"), "dqn").replace(
        limits=Limits(steps=2_000)
    )
    weights = []
    for number in range(3):
        folder = train(made, launch="inline", run_dir=tmp_path / str(number), quiet=True).folder
        weights.append(
            {
                name: array.tobytes()
                for name, array in read_newest(folder / "checkpoints" / "policy")[1]["policy"].items()
            }
        )
    assert weights[0] == weights[1] == weights[2]


def recorded(folder: Path, stream: str) -> list[dict[str, Any]]:
    """The samples of a stream, in the order in which its trainer got them."""
    paths = sorted(folder.glob(f"{stream}-*.npz"), key=lambda path: int(path.stem.rpartition("-")[2]))
    samples = []
    for path in paths:
        with np.load(path) as arrays:
            samples.append({name: arrays[name] for name in arrays.files if name != "version"})
    return samples


def test_all_launchers_give_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for launch in ("inline", "threads", "processes"):
        rows = tmp_path / f"rows-{launch}"
        rows.mkdir()
        monkeypatch.setenv("ROWS", str(rows))
        made = experiments.rows().replace(limits=Limits(updates=9))
        train(made, launch=launch, run_dir=tmp_path / launch, source=EXPERIMENTS, quiet=True)
        found[launch] = {stream: recorded(rows, stream) for stream in ("red", "blue")}
    for stream, seats in (("red", 16), ("blue", 8)):
        first = found["inline"][stream]
        assert len(first) >= 5
        assert first[0]["obs"].shape == (13, seats, 5 if stream == "red" else 6)
        # The lanes do end at different ticks, and some agents before their lane.
        ends = np.concatenate([sample["done"] | sample["truncated"] for sample in first])
        assert len({tuple(np.flatnonzero(column)) for column in ends.T}) >= 8
        for launch in ("threads", "processes"):
            other = found[launch][stream]
            # One trainer may be as many updates behind as there are slots when the other
            # one ends the run: compare what all have seen.
            assert len(other) >= 5
            for number, (mine, theirs) in enumerate(zip(first, other, strict=False)):
                assert mine.keys() == theirs.keys()
                for name in mine:
                    np.testing.assert_array_equal(
                        mine[name], theirs[name], err_msg=f"{launch}, {stream}, sample {number}, {name}"
                    )


def test_a_resumed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = train(
        experiments.ppo(), launch="inline", run_dir=tmp_path / "run", source=EXPERIMENTS, quiet=True
    ).folder
    weights, facts = read_checkpoint(folder / "checkpoints" / "policy" / "update-8")
    before = read_metrics(folder)

    from tidemill.algorithms.ppo import PPOLearner

    began: list[Any] = []
    load_state = PPOLearner.load_state

    def spy(self: Any, state: Any) -> None:
        load_state(self, state)
        began.append(
            (
                {k: v.copy() for k, v in self.policy.parameters().items()},
                {k: v.copy() for k, v in self.state().items()},
            )
        )

    monkeypatch.setattr(PPOLearner, "load_state", spy)
    with pytest.raises(RunError, match=r"already reached its limit of 8 updates"):
        resume(folder, launch="inline", quiet=True)
    result = resume(folder, launch="inline", limits={"updates": 16}, quiet=True)
    (parameters, state) = began[0]
    for now, then in ((parameters, weights["policy"]), (state, weights["algorithm"])):
        assert now.keys() == then.keys()
        for name in now:
            np.testing.assert_array_equal(now[name], then[name])
    after = read_metrics(folder)
    assert [r["update"] for r in after] == list(range(1, 17))
    assert after[:8] == before
    for name in ("step", "episodes", "time/seconds"):
        assert all(a[name] <= b[name] for a, b in pairwise(after)), name
    assert result.summary["updates"] == 16 and result.summary["env_steps"] > facts["steps"]
    assert json.loads((folder / "config.json").read_text())["limits"]["updates"] == 16


def test_a_damaged_checkpoint_is_passed_over_and_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = experiments.cartpole()
    folder = train(
        made.replace(limits=made.limits.replace(updates=5)),
        launch="inline",
        run_dir=tmp_path / "run",
        source=EXPERIMENTS,
        quiet=True,
    ).folder
    resume(folder, launch="inline", limits={"updates": 10}, quiet=True)
    root = folder / "checkpoints" / "policy"
    assert {"update-5", "update-10"} <= {p.name for p in root.iterdir()}
    file = root / "update-10" / "policy.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    capsys.readouterr()
    result = resume(folder, launch="inline", limits={"updates": 12}, quiet=True)
    said = capsys.readouterr().err
    assert "update-10" in said and "damaged" in said and "going on from" in said and "update-" in said
    # what was measured after the good one is measured again
    assert [r["update"] for r in read_metrics(folder)] == list(range(1, 13))
    assert result.summary["updates"] == 12
    arrays, _ = read_checkpoint(root / "update-12")
    assert (arrays["policy"]["w"] == 12).all()
    assert (root / "damaged-update-10").is_dir()  # kept to be looked at, never counted as one


def test_without_any_good_checkpoint_resume_refuses(tmp_path: Path) -> None:
    made = experiments.cartpole()
    folder = train(
        made.replace(limits=made.limits.replace(updates=2)),
        launch="inline",
        run_dir=tmp_path / "run",
        source=EXPERIMENTS,
        quiet=True,
    ).folder
    for manifest in folder.glob("checkpoints/policy/*/manifest.json"):
        manifest.write_text("{")
    with pytest.raises(CheckpointError, match=r"no readable checkpoint"):
        resume(folder, launch="inline", limits={"updates": 10}, quiet=True)


def test_two_policies_resume_from_checkpoints_of_different_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROWS", str(tmp_path))
    made = experiments.rows()
    slow = made.workers["trainer-blue"].replace(samples="blue", batch_size=24 * 8)
    actor = made.workers["actor"].replace(slots=2)
    made = made.replace(workers={**made.workers, "actor": actor, "trainer-blue": slow})
    folder = train(made, launch="inline", run_dir=tmp_path / "run", source=EXPERIMENTS, quiet=True).folder
    red, blue = (read_newest(folder / "checkpoints" / name).path.name for name in ("red", "blue"))
    assert red != blue
    resume(folder, launch="inline", limits={"updates": 9}, quiet=True)
    assert (folder / "checkpoints" / "red" / "update-9").is_dir()
