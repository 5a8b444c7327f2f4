"""The benchmarks of scaling, of sleeping environments and of compiled networks run; their
figures decide nothing here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_scaling_benchmark_writes_a_table_a_plot_and_json_per_curve(tmp_path):
    names = ["actors", "seats"]
    command = [sys.executable, str(BENCHMARKS / "scaling.py"), "--quick", "--only", ",".join(names)]
    command += ["--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for name in names:
        points = json.loads((tmp_path / f"{name}.json").read_text())["points"]
        assert all(point["steps_per_second"] > 0 and point["left"] == 0 for point in points)
        assert (tmp_path / f"{name}.md").read_text().startswith(f"# {name}")
        assert (tmp_path / f"{name}.png").stat().st_size > 1000


def test_the_benchmark_of_sleeping_environments_runs():
    command = [
        sys.executable,
        str(BENCHMARKS / "sleeping.py"),
        "--runs",
        "1",
        "--seconds",
        "0.5",
        "--splits",
        "4x16",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "bare threads" in done.stdout
    assert "4 x 16" in done.stdout


@pytest.mark.parametrize("splits", ["4x4", "8x", "64", "4x4x4"])
def test_splits_of_other_than_its_environments_are_refused(splits):
    command = [sys.executable, str(BENCHMARKS / "sleeping.py"), "--splits", splits]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and f"--splits {splits}: each is RxL" in done.stderr


def test_the_benchmark_of_compiled_networks_runs():
    # Without the compiling itself, which takes the better part of a minute.
    words = ["--rounds", "1", "--minibatches", "16", "--backend", "aot_eager"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "compiled.py"), *words], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert all(way in done.stdout for way in ("minibatch 16", "autograd", "compiled", "numpy"))
