"""The benchmarks of faults do what they say; their times decide nothing here."""

import ast
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tidemill.core.user_code_loading import load_file
from tidemill.run.events import Event

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ALGORITHMS = BENCHMARKS.parent / "src" / "tidemill" / "algorithms"
NATIVE = BENCHMARKS.parent / "src" / "tidemill" / "native"
LOOKS = ("isfinite(", "np.errstate(", "_SILENT.copy(")


def run(script: str, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(BENCHMARKS / script), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_a_run_comes_to_its_limit_with_a_fault_as_it_saves() -> None:
    done = run("moments.py", "tracked/break", "--times", "1", "--moment", "saving")
    assert done.returncode == 0 and "1 as it is to be" in done.stdout, done.stdout + done.stderr


def test_the_row_of_a_replay_memory_s_trainer_counts_whose_processes_stay() -> None:
    done = run("faults.py", "memory-trainer", "--times", "1")
    assert "no update for" in done.stdout, done.stdout + done.stderr  # which is not among what is promised
    assert "BROKEN" not in done.stdout, done.stdout


def test_a_run_that_was_cut_is_compared_at_its_end_and_beyond() -> None:
    done = run("exact_kills.py", "one", "--launch", "threads", "--cut", "kill", "--updates", "6")
    assert done.returncode == 0 and "| equal |" in done.stdout, done.stdout + done.stderr


@pytest.fixture(scope="module")
def moments() -> Any:
    return load_file(BENCHMARKS / "moments.py", "benchmarks")


@pytest.fixture(scope="module")
def identified() -> Any:
    return load_file(BENCHMARKS / "identified.py", "benchmarks")


@pytest.fixture(scope="module")
def exact_kills() -> Any:
    return load_file(BENCHMARKS / "exact_kills.py", "benchmarks")


class Begun:
    """A run of which nothing but its folder of faults is there."""

    def __init__(self, moments: Any, folder: Path) -> None:
        self.made = moments.Run.__new__(moments.Run)
        self.made.faults, self.made.judged = folder / "faults", folder / "judged"
        self.made.main = subprocess.Popen([sys.executable, "-c", ""])
        self.made.main.wait()
        for place in (self.made.faults, self.made.judged):
            place.mkdir()


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_fault_that_finds_nobody_is_none(fault: str, moments: Any, tmp_path: Path) -> None:
    with pytest.raises(moments.NoFault):
        Begun(moments, tmp_path).made.suffer(fault, random.Random(1))


def test_an_environment_s_fault_came_once_it_was_taken(moments: Any, tmp_path: Path) -> None:
    run = Begun(moments, tmp_path).made
    run.suffer("raise", random.Random(1))
    run.ask_for("nan", of_judges=True)
    assert run.waiting() == ["nan", "raise"]
    with pytest.raises(moments.NoFault):
        run.suffer("raise", random.Random(1))
    (run.faults / "raise").unlink()
    assert run.waiting() == ["nan"]


def test_a_checkpoint_that_is_not_there_cannot_be_damaged(moments: Any, tmp_path: Path) -> None:
    run = Begun(moments, tmp_path).made
    run.path = tmp_path / "run"
    with pytest.raises(moments.NoFault):
        moments.damage(run, random.Random(1))


def test_memory_was_short_once_the_system_killed_for_it(moments: Any, tmp_path: Path) -> None:
    run = Begun(moments, tmp_path).made
    for kills in (0, 1):
        run.beside = SimpleNamespace(kills=kills)
        assert all(moments.WORKS[what][0].came(run) == bool(kills) for what in ("group", "equal-group"))


class Over(Begun):
    """One that has come to its limit, with such a status of its main process."""

    def __init__(self, moments: Any, folder: Path, status: int) -> None:
        super().__init__(moments, folder)
        self.made.path, self.made.main.returncode = folder / "run", status
        self.made.path.mkdir()
        (self.made.path / moments.SUMMARY).write_text('{"status": "completed"}')


@pytest.mark.parametrize(
    ("name", "status", "came"),
    [("TERM", 0, False), ("TERM", -15, True), ("main", 0, False), ("main", -9, True), ("damaged", -9, False)],
)
def test_what_is_to_end_a_run_does_not_come_to_one_that_was_over(
    name: str, status: int, came: bool, moments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Over(moments, tmp_path, status).made
    monkeypatch.setattr(run, "kill", lambda: None, raising=False)
    monkeypatch.setattr(run.main, "poll", lambda: None)
    for function, value in {"Run": run, "come_to": "", "ends": ([], 1.0), "goes_on": []}.items():
        monkeypatch.setattr(moments, function, lambda *_, _value=value, **__: _value)
    if came:
        assert moments._one(f"apart/{name}", "any", random.Random(1)) == (moments.WELL, 1.0)
    else:
        with pytest.raises(moments.NoFault):
            moments._one(f"apart/{name}", "any", random.Random(1))


def test_a_judge_is_told_of_only_where_it_took_its_fault(moments: Any, tmp_path: Path) -> None:
    run = Begun(moments, tmp_path).made
    run.path, run.asked = tmp_path / "run", "raise"
    run.path.mkdir()
    records = [
        {"evaluation/version": version, "evaluation/return": 9.0} for version in range(10, moments.SHORT, 10)
    ]
    (run.path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    untold = ["it did not tell what became of its judge"]
    assert moments.check_watched(run) == untold
    # just before the run's end it need not be told, nor a hang within its deadline
    cases = [("raise", 0.5, []), ("raise", 3.0, untold), ("hang", 3.0, []), ("hang", 7.0, untold)]
    for fault, seconds, wrong in cases:
        run.asked, ended = fault, {"time": run.judged.stat().st_mtime + seconds, "what": "ended"}
        (run.path / "events.jsonl").write_text(f"{json.dumps(ended)}\n")
        assert moments.check_watched(run) == wrong
    run.ask_for("raise", of_judges=True)
    assert moments.check_watched(run) == []


def test_a_run_whose_fault_did_not_come_counts_for_nothing(
    moments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [2]

    def had(kind: str, moment: str, draw: random.Random) -> tuple[str, float | None]:
        if left[0]:
            left[0] -= 1
            raise moments.NoFault
        return moments.WELL, 1.0

    monkeypatch.setattr(moments, "_one", had)
    assert moments.one("apart/raise", "any", random.Random(1)) == (moments.WELL, 1.0, 2)
    left[0] = 1000
    assert moments.one("apart/raise", "any", random.Random(1)) == (moments.NONE, None, moments.TRIES)


def keep(folder: Path, identified: Any, name: str, steps: int, **other: Any) -> None:
    """Write down that the first `steps` of copy 5's first episode were trained on, by a
    sample of each agent; and that they were played, and the next one, too."""
    kept = {}
    for agent in range(identified.AGENTS):
        at = np.arange(steps + 1)
        cells = np.stack([np.full_like(at, 5), np.zeros_like(at), at, np.full_like(at, agent)], 1)
        over = np.zeros(steps + 1, bool)
        rows = {
            "obs": cells, "action": identified.action_of(*cells.T), "value": identified.value_of(*cells.T),
            "log_prob": -identified.value_of(*cells.T),
            "reward": np.roll(identified.paid(*cells.T), -1).astype(np.float32), "done": over,
            "truncated": over, "version": np.zeros(steps + 1, int),
        }  # fmt: skip
        kept |= {f"{agent}.{name}": array for name, array in (rows | other).items()}
    (folder / "trained").mkdir(exist_ok=True)
    np.savez(folder / "trained" / name, **kept)
    (folder / "played").mkdir(exist_ok=True)
    played = identified.BEGUN + identified.TAKEN * (steps + 1)
    (folder / "played" / "5").write_bytes(played)


def test_rows_that_fit_are_known_again(identified: Any, tmp_path: Path) -> None:
    keep(tmp_path, identified, "0 trainer-0.npz", 7)
    rows = identified.found(tmp_path, 100)
    assert (rows.wrong, rows.trained, rows.tails, rows.undone) == ([], 7, 1, 0)


@pytest.mark.parametrize("torn", ["action", "log_prob", "value"])
def test_an_answer_that_is_torn_between_two_is_found(identified: Any, tmp_path: Path, torn: str) -> None:
    keep(tmp_path, identified, "0 trainer-0.npz", 7, **{torn: np.arange(8) + 3})
    assert (
        identified.found(tmp_path, 100).wrong == ["0 trainer-0.npz has rows that do not fit each other"] * 2
    )


def test_updates_that_are_undone_train_on_nothing(identified: Any, tmp_path: Path) -> None:
    keep(tmp_path, identified, "0 trainer-0.npz", 7)
    file = tmp_path / "trained" / "0 trainer-0.npz"
    file.rename(file.with_suffix(f".1{identified.UNDONE}"))
    keep(tmp_path, identified, "100 trainer-0.npz", 4)
    rows = identified.found(tmp_path, 100)
    assert (rows.wrong, rows.trained, rows.undone) == ([], 0, 11)


def test_more_that_nobody_trained_on_than_can_be_is_wrong(identified: Any) -> None:
    died = Event(1.0, "died", "actor-0", 1, steps=40)
    rows, told = identified.Rows(tails=0, failed=2), {"dropped": 1.0, "lost/steps": 40.0, "lost/samples": 0.0}
    assert identified.too_many(rows, [died], told, 1) == []
    most = 2 * 3 + identified.OF_DEATH + identified.SAMPLE + 2 * identified.IN_FLIGHT
    assert rows.most == most
    rows.tails, rows.gaps = most, 1
    assert identified.too_many(rows, [died], told, 1) == [
        f"nobody trained on {most + 1} steps, and at most {most} can be lost"
    ]
    rows.gaps = 0
    assert "and more by the metrics" in identified.too_many(rows, [died], {**told, "lost/steps": 41.0}, 1)[0]


def test_a_run_begins_anew_only_where_it_was_cut_early_and_no_whole_cut_is_there(
    exact_kills: Any, tmp_path: Path
) -> None:
    folder, made = tmp_path / "run", exact_kills.KINDS["one"](True, 1)
    last = exact_kills.EARLY["kill"]
    assert not exact_kills.may_begin_anew(folder, made, "kill", last)
    assert exact_kills.live(folder, "one", "inline", 1, "", []) == exact_kills.COMPLETED
    assert not exact_kills.may_begin_anew(folder, made, "kill", last)
    shutil.rmtree(folder / "cuts" / "actor-0")
    early = [at for at in range(last + 3) if exact_kills.may_begin_anew(folder, made, "kill", at)]
    assert early == [1, 2, 3, 4]
    assert not exact_kills.may_begin_anew(folder, made, "stop", 1)
    assert not exact_kills.may_begin_anew(folder, made, "actor", 0)


@pytest.fixture(scope="module")
def nan_cost() -> Any:
    return load_file(BENCHMARKS / "nan_cost.py", "benchmarks")


@pytest.mark.parametrize("name", ["adam", "dqn", "twin_critics", "policy_gradient"])
def test_the_copy_without_the_check_for_nan_has_none(name: str, nan_cost: Any) -> None:
    text = (ALGORITHMS / f"{name}.py").read_text()
    found = ast.unparse(ast.fix_missing_locations(nan_cost.Blind().visit(ast.parse(text))))
    compile(found, name, "exec")
    assert any(words in text for words in LOOKS) and not any(words in found for words in LOOKS)


def test_a_check_for_nan_that_is_found_nowhere_ends_the_benchmark(nan_cost: Any, tmp_path: Path) -> None:
    for file in ALGORITHMS.glob("*.py"):
        shutil.copy(file, tmp_path)
    nan_cost.blind(tmp_path.glob("*.py"))
    with pytest.raises(SystemExit, match="isfinite, "):
        nan_cost.blind(tmp_path.glob("*.py"))


def test_the_core_without_it_has_none(nan_cost: Any) -> None:
    looking = {file.name for file in NATIVE.glob("*.[ch]") if "isfinite(" in file.read_text()}
    assert looking == set(nan_cost.FILES_IN_C)
    for name in looking:
        assert "isfinite(" not in nan_cost.IN_C.sub("", (NATIVE / name).read_text())
