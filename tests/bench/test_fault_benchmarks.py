"""The benchmarks of faults do what they say; their times decide nothing here."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tidemill.core.user_code_loading import load_file

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ALGORITHMS = BENCHMARKS.parent / "src" / "tidemill" / "algorithms"
NATIVE = BENCHMARKS.parent / "src" / "tidemill" / "native"
LOOKS = ("isfinite(", "np.errstate(", "_SILENT.copy(")
RIGHTS = ("a share of its own needs", "control groups cannot be made", "have no limit of memory")


def run(script: str, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(BENCHMARKS / script), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("kind", ["tracked/break", "share/hang", "group/eat"])
def test_a_run_comes_to_its_limit_with_a_fault_as_it_saves(kind: str) -> None:
    done = run("moments.py", kind, "--times", "1", "--moment", "saving")
    if done.returncode and any(words in done.stderr for words in RIGHTS):
        pytest.skip(done.stderr)
    assert done.returncode == 0 and "1 as it is to be" in done.stdout, done.stdout + done.stderr


def test_the_row_of_a_replay_memory_s_trainer_counts_whose_processes_stay() -> None:
    done = run("faults.py", "memory-trainer", "--times", "1")
    assert "no update for" in done.stdout, done.stdout + done.stderr  # which is not among what is promised
    assert "BROKEN" not in done.stdout, done.stdout


def test_a_run_that_was_cut_is_compared_at_its_end_and_beyond() -> None:
    done = run("exact_kills.py", "one", "--launch", "threads", "--cut", "kill", "--updates", "3")
    assert done.returncode == 0 and "| equal |" in done.stdout, done.stdout + done.stderr


@pytest.fixture(scope="module")
def nan_cost() -> Any:
    return load_file(BENCHMARKS / "nan_cost.py", "benchmarks")


@pytest.mark.parametrize("name", ["adam", "dqn", "twin_critics", "policy_gradient", "policy_gradient_loss"])
def test_the_copy_without_the_check_for_nan_has_none(name: str, nan_cost: Any) -> None:
    text = (ALGORITHMS / f"{name}.py").read_text()
    found = ast.unparse(ast.fix_missing_locations(nan_cost.Blind().visit(ast.parse(text))))
    compile(found, name, "exec")
    assert any(words in text for words in LOOKS) and not any(words in found for words in LOOKS)


def test_the_core_without_it_has_none(nan_cost: Any) -> None:
    looking = {file.name for file in NATIVE.glob("*.[ch]") if "isfinite(" in file.read_text()}
    assert looking == set(nan_cost.FILES_IN_C)
    for name in looking:
        assert "isfinite(" not in nan_cost.IN_C.sub("", (NATIVE / name).read_text())
