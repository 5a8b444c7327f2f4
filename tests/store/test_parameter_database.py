"""The parameter database: what is kept, what is collected, what several processes and
kills may do to it."""

import json
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.errors import ConfigError, DatabaseError, DeadlineError, SchemaError, VersionGone
from tidemill.core.safetensors_io import pack, unpack
from tidemill.core.untrusted_files import read_plain
from tidemill.store import parameter_database, version_files
from tidemill.store.database_locks import BUSY
from tidemill.store.parameter_database import ParameterDatabase
from tidemill.store.query import Query
from tidemill.store.versions import LATEST, Mean

KILLS = Path(__file__).with_name("kills.py")


def weights(number: float) -> dict[str, Any]:
    return {"w": np.full((2, 3), number, np.float32), "scalar": np.array(number), "empty": np.zeros((0, 4))}


def filled(folder: Path, *numbers: int, policy: str = "p") -> ParameterDatabase:
    database = ParameterDatabase(folder / "parameters")
    for number in numbers:
        database.push(policy, number, weights(number), {"env_steps": 10 * number})
    return database


def numbers(database: ParameterDatabase, policy: str = "p") -> list[int]:
    return [version.version for version in database.versions(policy)]


def files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder / "parameters").as_posix()
        for path in (folder / "parameters").rglob("*")
        if path.is_file()
    }


# ---- versions --------------------------------------------------------------------------


def test_what_is_pushed_is_loaded_by_number_and_by_tag(tmp_path: Path) -> None:
    database = filled(tmp_path, 3, 12)
    database.tag("p", "best", 3)
    for which, number in ((3, 3), ("3", 3), (12, 12), (LATEST, 12), ("best", 3)):
        arrays, version = database.load("p", which)
        assert version == number
        assert arrays.keys() == weights(0).keys()
        for name, array in weights(number).items():
            assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(arrays[name], array)


def test_versions_are_in_numeric_order_with_what_is_known_of_them(tmp_path: Path) -> None:
    before = time.time()
    database = filled(tmp_path, 9, 100, 10, 2)
    assert numbers(database) == [2, 9, 10, 100]
    database.tag("p", "best", 9)
    database.tag("p", "also", 9)
    found = database.versions("p")[1]
    assert (found.counters, found.tags, found.means) == ({"env_steps": 90.0}, ("also", "best"), {})
    assert before <= found.pushed <= time.time() and found.values()["age"] < 60
    assert database.policies() == ["p"]


def test_each_policy_has_its_own(tmp_path: Path) -> None:
    database = filled(tmp_path, 1, 2, policy="red")
    filled(tmp_path, 2, 3, policy="blue")
    database.tag("red", "best", 1)
    assert database.collect("blue", 1) == [2]
    assert database.policies() == ["blue", "red"]
    assert numbers(database, "red") == [1, 2] and numbers(database, "blue") == [3]
    assert database.tags("blue") == {LATEST: 3}


def test_what_was_never_there_is_said_and_nothing_is_made_of_it(tmp_path: Path) -> None:
    database = ParameterDatabase(tmp_path / "parameters")
    assert database.versions("p") == [] and database.policies() == [] and database.tags("p") == {}
    calls: tuple[Callable[[], Any], ...] = (
        lambda: database.load("p", 1),
        lambda: database.tag("p", "best", 1),
        lambda: database.results.add("p", 1, {"win_rate": 1.0}),
    )
    for call in calls:
        with pytest.raises(VersionGone, match="holds no versions yet"):
            call()
    assert not (tmp_path / "parameters").exists()
    filled(tmp_path, 5, 6)
    database.collect("p", 1)
    for which, message in (
        (
            5,
            r"version 5 of policy \"p\" was collected, or never pushed; tag a version to keep it\. The "
            r"newest that are kept: 6",
        ),
        ("7", r"version 7 of policy \"p\" was never pushed\. The newest that are kept: 6"),
        ("lates", r"no tag \"lates\"; did you mean \"latest\""),
    ):
        with pytest.raises(VersionGone, match=message):
            database.load("p", which)
    with pytest.raises(VersionGone, match='of a policy "red" is kept; known: p'):
        database.load("red", LATEST)


def test_files_are_the_owners_alone(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    root = tmp_path / "parameters"
    assert files(tmp_path) == {"index.sqlite", "p/1.safetensors"}
    assert stat.S_IMODE((root / "p" / "1.safetensors").stat().st_mode) == 0o600
    assert [stat.S_IMODE(path.stat().st_mode) for path in (root, root / "p")] == [0o700] * 2


@pytest.mark.parametrize("name", ["..", "../p", "a/b", "", ".p", "a" * 65])
def test_names_cannot_lead_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not a name"):
        ParameterDatabase(tmp_path / "parameters").push(name, 1, weights(1))
    assert not (tmp_path / "parameters").exists()


def test_a_version_means_one_set_of_weights(tmp_path: Path) -> None:
    database = filled(tmp_path, 1, 2)
    database.results.add("p", 1, {"win_rate": 1.0})
    database.push("p", 1, weights(1), {"env_steps": 999})
    assert database.tags("p") == {LATEST: 1}
    assert (
        database.versions("p")[0].counters == {"env_steps": 10.0}
        and database.versions("p")[0].means["win_rate"].count == 1
    )
    for other in (
        weights(1.5),
        {"w": weights(1)["w"]},
        {**weights(1), "w": weights(1)["w"].astype(np.float64)},
    ):
        with pytest.raises(DatabaseError, match='version 1 of policy "p" already means other weights'):
            database.push("p", 1, other)
    np.testing.assert_array_equal(database.load("p", 1)[0]["w"], weights(1)["w"])


def test_facts_are_finite_numbers_under_names_of_their_own(tmp_path: Path) -> None:
    database = ParameterDatabase(tmp_path / "parameters")
    for counters in (
        {"x": float("nan")},
        {"version": 1.0},
        {"age": 1.0},
        {"a b": 1.0},
        {"and": 1.0},
        {"win_rate.n": 1.0},
    ):
        with pytest.raises(ConfigError):
            database.push("p", 1, weights(1), counters)
    with pytest.raises(ConfigError, match="version = -1"):
        database.push("p", -1, weights(1))


# ---- nothing from a file is trusted ----------------------------------------------------


@pytest.mark.parametrize("change", ["cut", "bit", "other", "empty"])
def test_a_damaged_file_is_noticed_and_can_be_pushed_again(tmp_path: Path, change: str) -> None:
    database = filled(tmp_path, 1, 2)
    database.tag("p", "best", 1)
    file = tmp_path / "parameters" / "p" / "1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes({"cut": data[:-4], "bit": data, "other": pack(weights(1)), "empty": b""}[change])
    with pytest.raises(
        DatabaseError, match=r'1\.safetensors, version 1 of policy "p", is damaged \(its checksum differs\)'
    ):
        database.load("p", "best")
    database.push("p", 1, weights(1))
    assert database.load("p", "best")[1] == 1


def test_a_file_that_is_gone_is_said_and_its_row_is_removed_by_the_next_writer(tmp_path: Path) -> None:
    database = filled(tmp_path, 1, 2)
    database.tag("p", "best", 1)
    (tmp_path / "parameters" / "p" / "1.safetensors").unlink()
    with pytest.raises(DatabaseError, match=r"version 1 .* cannot be read: No such file"):
        database.load("p", 1)
    assert database.rewind("p", 2) == [
        'version 1 of policy "p", tagged best, is removed from the parameter database: its file is gone'
    ]
    assert numbers(database) == [2] and database.tags("p") == {LATEST: 2}


def test_files_without_a_row_are_removed_and_others_are_left_alone(tmp_path: Path) -> None:
    database = filled(tmp_path, 1)
    folder = tmp_path / "parameters" / "p"
    for name in ("7.safetensors", ".8.safetensors", "notes.txt", "mine.safetensors"):
        (folder / name).write_bytes(b"torn")
    assert numbers(database) == [1]
    database.tidy()
    assert files(tmp_path) == {"index.sqlite", "p/1.safetensors", "p/notes.txt", "p/mine.safetensors"}
    (folder / "7.safetensors").write_bytes(b"torn")
    database.push("p", 7, weights(7))  # in the place of one that a killed writer has left
    assert database.load("p", 7)[1] == 7


@pytest.mark.parametrize("content", [b"no database" * 200, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_damaged_index_is_said_and_nothing_is_removed(tmp_path: Path, content: bytes) -> None:
    database = filled(tmp_path, 1)
    (tmp_path / "parameters" / "index.sqlite").write_bytes(content)
    for call in (lambda: database.versions("p"), lambda: database.push("p", 2, weights(2)), database.tidy):
        with pytest.raises(DatabaseError, match=r"index\.sqlite is damaged .*move .*parameters away"):
            call()
    assert "p/1.safetensors" in files(tmp_path)


def test_an_index_of_another_format_is_refused(tmp_path: Path) -> None:
    database = filled(tmp_path, 1)
    with sqlite3.connect(tmp_path / "parameters" / "index.sqlite") as index:
        index.execute("PRAGMA user_version = 99")
    index.close()
    with pytest.raises(DatabaseError, match="has format 99; this version of tidemill reads 1"):
        database.versions("p")


def test_packed_arrays_and_text_come_back_and_anything_else_is_refused() -> None:
    arrays, text = unpack(pack(weights(3), {"a": "é"}))
    assert text == {"a": "é"} and arrays.keys() == weights(3).keys()
    assert unpack(pack(weights(3)))[1] == {}
    for data in (b"", b"\0" * 8, b"\xff" * 100, pack(weights(3))[:-1]):
        with pytest.raises(SchemaError, match="no safetensors file"):
            unpack(data)


def test_a_push_that_the_disk_does_not_take_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = filled(tmp_path, 1)

    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(version_files, "write_synced", full)
        with pytest.raises(DatabaseError, match="No space left on device; free space"):
            database.push("p", 2, weights(2))
    assert files(tmp_path) == {"index.sqlite", "p/1.safetensors"} and database.tags("p") == {LATEST: 1}
    database.push("p", 2, weights(2))


# ---- tags and collection ---------------------------------------------------------------


def test_the_newest_by_number_and_the_tagged_are_kept(tmp_path: Path) -> None:
    database = filled(tmp_path, 8, 9, 10, 11, 100)
    database.tag("p", "best", 8)
    assert database.collect("p", 2) == [9, 10]
    assert numbers(database) == [8, 11, 100]
    assert files(tmp_path) == {"index.sqlite", "p/8.safetensors", "p/11.safetensors", "p/100.safetensors"}
    database.tag("p", "best", 11)
    assert database.collect("p", 1) == [8]
    database.untag("p", "best")
    assert database.collect("p", 1) == [11]
    assert database.collect("p", 1) == []


def test_latest_is_kept_though_it_is_not_the_newest(tmp_path: Path) -> None:
    database = filled(tmp_path, 1, 2, 3)
    database.push("p", 1, weights(1))
    assert database.collect("p", 1) == [2]
    assert database.tags("p") == {LATEST: 1}


def test_what_a_tag_points_to_cannot_be_removed_by_anybody(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    index = sqlite3.connect(tmp_path / "parameters" / "index.sqlite")
    index.execute("PRAGMA foreign_keys = ON")
    with pytest.raises(sqlite3.IntegrityError):
        index.execute("DELETE FROM versions")
    index.close()


@pytest.mark.parametrize("tag", ["", "12", "1st", "a b", "x/y", LATEST])
def test_tags_have_names_that_no_version_has(tmp_path: Path, tag: str) -> None:
    database = filled(tmp_path, 1)
    for call in (lambda: database.tag("p", tag, 1), lambda: database.untag("p", tag)):
        with pytest.raises(ConfigError, match="tag"):
            call()


def test_a_tag_moves_and_goes(tmp_path: Path) -> None:
    database = filled(tmp_path, 1, 2)
    assert database.tag("p", "best", 1) == 1
    assert database.tag("p", "best", LATEST) == 2
    assert database.tags("p") == {"best": 2, LATEST: 2}
    with pytest.raises(VersionGone, match='no tag "bets"; did you mean "best"'):
        database.untag("p", "bets")
    database.untag("p", "best")
    assert database.tags("p") == {LATEST: 2}


def test_rewinding_removes_later_versions_so_that_their_numbers_can_mean_other_weights(
    tmp_path: Path,
) -> None:
    database = filled(tmp_path, 1, 9, 10, 11)
    database.tag("p", "best", 11)
    database.results.add("p", 10, {"win_rate": 1.0})
    assert database.rewind("p", 9) == [
        'version 11 of policy "p", tagged best, latest, is removed from the parameter database: the run goes '
        "on from version 9"
    ]
    assert numbers(database) == [1, 9] and database.tags("p") == {LATEST: 9}
    assert files(tmp_path) == {"index.sqlite", "p/1.safetensors", "p/9.safetensors"}
    database.push("p", 10, weights(-10))
    assert database.load("p", 10)[0]["w"][0, 0] == -10 and database.versions("p")[-1].means == {}
    assert database.rewind("p", 9) == []  # untagged ones without a word
    assert database.rewind("new", 0) == []


def test_an_exported_file_holds_all_and_says_whose_it_is(tmp_path: Path) -> None:
    database = ParameterDatabase(tmp_path / "parameters")
    database.push("p", 4, weights(4), {"env_steps": 40}, {"label": "c"})
    file = tmp_path / "out.safetensors"
    file.write_text("replaced")
    assert database.export("p", LATEST, file) == 4
    arrays, text = unpack(file.read_bytes())
    np.testing.assert_array_equal(arrays["w"], weights(4)["w"])
    assert {**text, "counters": json.loads(text["counters"])} == {
        "policy": "p",
        "version": "4",
        "counters": {"env_steps": 40.0},
        "label": "c",
    }
    with pytest.raises(DatabaseError, match="nowhere/out cannot be written: No such file"):
        database.export("p", 4, tmp_path / "nowhere" / "out")
    with pytest.raises(DatabaseError, match="is a folder; name a file in it"):
        database.export("p", 4, tmp_path / "parameters")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


# ---- metadata and queries --------------------------------------------------------------


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=5), max_size=6))
def test_a_running_mean_is_the_mean_of_all_values(batches: list[list[float]]) -> None:
    mean = Mean()
    for batch in batches:
        mean = mean.add(np.array(batch))
    every = [value for batch in batches for value in batch]
    assert mean.count == len(every)
    assert mean.mean == pytest.approx(np.mean(every) if every else 0.0, abs=1e-9)
    if len(every) < 2:
        assert mean.variance is None and mean.margin is None
    else:
        assert mean.variance == pytest.approx(np.var(every, ddof=1), abs=1e-6)
        assert mean.margin == pytest.approx(1.96 * np.std(every, ddof=1) / np.sqrt(len(every)), abs=1e-4)


def test_results_are_folded_into_running_means(tmp_path: Path) -> None:
    database = filled(tmp_path, 1)
    database.results.add("p", 1, {"win_rate": 1.0, "return": 37.0})
    database.results.add("p", 1, {"win_rate": [0.0, 1.0, 1.0]})
    (version,) = database.versions("p")
    assert (version.means["win_rate"].mean, version.means["win_rate"].count) == (0.75, 4)
    assert version.means["win_rate"].variance == pytest.approx(0.25)
    assert version.means["return"] == Mean(1, 37.0, 0.0)
    assert {k: v for k, v in version.values().items() if k != "age"} == {
        "version": 1, "env_steps": 10, "win_rate": 0.75, "win_rate.n": 4, "return": 37, "return.n": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "results",
    [{"a b": 1.0}, {"win_rate": float("inf")}, {"win_rate": [[1.0]]}, {"env_steps": 1.0}, {"version": 1.0}],
)
def test_results_that_are_none_are_refused_and_none_is_recorded(tmp_path: Path, results: Any) -> None:
    database = filled(tmp_path, 1)
    with pytest.raises(ConfigError):
        database.results.add("p", 1, {"fine": 1.0, **results})
    assert database.versions("p")[0].means == {}


def test_a_result_of_a_collected_version_is_refused(tmp_path: Path) -> None:
    database = filled(tmp_path, 1, 2)
    database.results.add("p", 1, {"win_rate": 1.0})
    database.collect("p", 1)
    with pytest.raises(
        VersionGone, match=r'version 1 of policy "p" was collected.*The newest that are kept: 2'
    ):
        database.results.add("p", 1, {"win_rate": 1.0})


def test_the_best_ten_by_win_rate(tmp_path: Path) -> None:
    database = filled(tmp_path, *range(22))
    for version in range(20):
        database.results.add("p", version, {"win_rate": [((version * 7) % 20) / 20] * (version + 1)})
    best = [
        (v.version, v.means["win_rate"].mean) for v in database.query("p", Query(order="-win_rate", limit=10))
    ]
    assert [mean for _, mean in best] == pytest.approx([0.05 * i for i in range(19, 9, -1)])
    some = database.query(
        "p", Query.parse("win_rate > 0.62 and win_rate < 0.78 and win_rate.n >= 5 order by version")
    )
    assert [v.version for v in some] == [5, 19]  # 0.75 and 0.65
    assert [v.version for v in database.query("p", Query.parse("env_steps >= 190 and age < 1000"))] == [
        21,
        20,
        19,
    ]


def test_a_misspelt_field_is_refused_and_a_declared_one_waits(tmp_path: Path) -> None:
    database = filled(tmp_path, 1)
    with pytest.raises(
        ConfigError, match='asks for "env_step", which no version has; did you mean "env_steps"'
    ):
        database.query("p", Query.parse("env_step > 3"))
    with pytest.raises(ConfigError, match='asks for "win_rate"'):
        database.query("p", Query.parse("win_rate > 0.5"))
    assert (
        database.query("p", Query.parse("win_rate > 0.5 order by -win_rate.n"), declared=("win_rate",)) == []
    )


# ---- several processes, and kills ------------------------------------------------------


def test_threads_and_processes_share_it(tmp_path: Path) -> None:
    """Writers of two policies, one of results, and readers, none of whom loses
    anything."""
    database = filled(tmp_path, 0, policy="a")
    filled(tmp_path, 0, policy="b")
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    def push(policy: str) -> None:
        for number in range(1, 15):
            database.push(policy, number, weights(number))
            database.collect(policy, 2)

    def read() -> None:
        for _ in range(60):
            arrays, version = database.load("a", LATEST)
            assert arrays["scalar"] == version

    code = f"""
from pathlib import Path
from tidemill.store.parameter_database import ParameterDatabase
for _ in range(20):
    ParameterDatabase(Path({str(tmp_path / "parameters")!r})).results.add("b", 0, {{"win_rate": 1.0}})
"""
    database.tag("b", "first", 0)
    other = subprocess.Popen([sys.executable, "-c", code])
    threads = [run(lambda: push("a")), run(lambda: push("b")), run(read)]
    for thread in threads:
        thread.join()
    assert other.wait(120) == 0 and errors == []
    assert numbers(database, "a") == [13, 14] and numbers(database, "b") == [0, 13, 14]
    assert database.versions("b")[0].means["win_rate"] == Mean(20, 1.0, 0.0)


def test_a_lock_that_is_not_freed_ends_the_wait_and_names_its_holder(tmp_path: Path) -> None:
    database = ParameterDatabase(filled(tmp_path, 1).folder, patience=0.05)
    index = sqlite3.connect(tmp_path / "parameters" / "index.sqlite", isolation_level=None)
    index.execute("BEGIN EXCLUSIVE")
    for call in (
        lambda: database.load("p", 1),
        lambda: database.tag("p", "best", 1),
        lambda: database.push("p", 2, weights(2)),
    ):
        with pytest.raises(
            DeadlineError,
            match=rf"index\.sqlite was not free within 0\.05 s: process {os.getpid()} holds its lock",
        ):
            call()
    index.execute("COMMIT")
    index.close()
    with (
        version_files.writing(database.folder, "p", BUSY),
        pytest.raises(
            DeadlineError, match=rf"parameters/p was not free .*process {os.getpid()} holds its lock"
        ),
    ):
        database.collect("p", 1)
    database.push("p", 2, weights(2))
    assert files(tmp_path) == {"index.sqlite", "p/1.safetensors", "p/2.safetensors"}


@pytest.mark.parametrize("which", [LATEST, 1])
def test_what_is_collected_while_it_is_read_is_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int | str
) -> None:
    database, moved = filled(tmp_path, 1), [False]

    def meanwhile(path: Path) -> bytes:
        if not moved[0]:
            moved[0] = True
            database.push("p", 2, weights(2))
            database.collect("p", 1)
        return read_plain(path)

    monkeypatch.setattr(parameter_database, "read_plain", meanwhile)
    if which == LATEST:
        assert database.load("p", which)[1] == 2
    else:
        with pytest.raises(VersionGone, match='version 1 of policy "p" was collected'):
            database.load("p", which)


@pytest.mark.parametrize("how", ["everywhere", "anywhere"])
def test_a_writer_that_is_killed_leaves_whole_versions_and_nothing_else(tmp_path: Path, how: str) -> None:
    result = subprocess.run(
        [sys.executable, KILLS, how, tmp_path / "parameters"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    kills, newest = (
        int(word) for word in result.stdout.replace(",", "").split() if word.lstrip("-").isdigit()
    )
    assert kills >= 50 and newest >= 2, result.stdout


def test_a_process_that_is_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    """An environment may fork at any time; its child inherits all descriptors."""
    database = ParameterDatabase(filled(tmp_path, 1).folder, patience=0.05)
    with version_files.writing(database.folder, "p", BUSY) as folder:
        (lock,) = (
            name
            for name in os.listdir("/proc/self/fd")
            if os.path.realpath(f"/proc/self/fd/{name}") == str(folder.resolve())
        )
        inherited = os.dup(int(lock))  # the same open file, as a fork's
    database.collect("p", 1)
    os.close(inherited)
