"""A run is trained again from its journal, to the same weights."""

import json
import re
import resource
import struct
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from tidemill import DQN, Gymnasium, QNetwork, Slots
from tidemill.api.stream import Offered
from tidemill.core.errors import CheckpointError, RunError
from tidemill.core.user_code_loading import load_attribute, load_file
from tidemill.replay.retrain_journal import FORMAT, JournalReader, JournalWriter, Task, journal_path
from tidemill.store.checkpoint import read_newest
from tidemill.trained import retrain as retraining
from tidemill.trained.retrain import retrain
from tidemill.training.train import resume, train

FILE = Path(__file__).parents[1] / "run" / "limited.py"
limited = load_file(FILE, "test")


def run(folder: Path, launch: str = "threads", **settings: Any) -> Any:
    walk = Gymnasium(
        make=f"{FILE}:Walk", kwargs={"latency": "random", "fails": settings.pop("fails", ())}, threads=1
    )
    made = limited.experiment(
        environment=Slots(environment=walk, backoff_s=0.001),
        ratio="3/2",
        journal=True,
        **{"steps": 60, **settings},
    )
    train(made, launch=launch, run_dir=folder, source=FILE, quiet=True)


def facts(folder: Path) -> Any:
    return read_newest(folder / "checkpoints" / "policy")[2]


@pytest.mark.parametrize(("exact", "launch"), [(False, "threads"), (True, "threads"), (False, "processes")])
def test_a_run_is_trained_again_to_the_same_weights(tmp_path: Path, exact: bool, launch: str) -> None:
    run(tmp_path / "run", launch, exact=exact, slots=4)
    again, n = retrain(tmp_path / "run"), facts(tmp_path / "run")["limiter"]
    assert again.same and (again.updates, again.committed, again.voided) == (
        n["tasks"],
        n["committed"],
        n["voided"],
    )
    assert again.updates > 50


def test_a_run_is_trained_again_with_as_many_threads_of_numeric_libraries_as_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "run", math_threads=2)
    given: list[int] = []
    monkeypatch.setattr(retraining, "limit_threads", given.append)
    assert retrain(tmp_path / "run").same and given == [2]
    path = journal_path(tmp_path / "run", "policy")
    path.write_bytes(path.read_bytes().replace(b'"math_threads": 2', b'"math_threads": -1', 1))
    with pytest.raises(CheckpointError, match="numeric libraries had -1 threads, not 1 to 1,024"):
        retrain(tmp_path / "run")


def test_of_several_journals_the_one_of_the_named_policy_is_taken(tmp_path: Path) -> None:
    made = limited.experiment(journal=True)
    (actor, trainer), both = made.workers.values(), ("one", "two")
    workers = {f"actor-{name}": actor.replace(policy=name, samples=name) for name in both}
    workers |= {f"trainer-{name}": trainer.replace(policy=name, samples=name) for name in both}
    made = made.replace(policies=dict.fromkeys(both, made.policies["policy"]), workers=workers)
    train(made, launch="threads", run_dir=tmp_path / "run", source=FILE, quiet=True)
    with pytest.raises(RunError, match="has journals of 2 policies; say which with --policy: one, two"):
        retrain(tmp_path / "run")
    with pytest.raises(RunError, match='has no journal of a policy "tow"; did you mean "two"'):
        retrain(tmp_path / "run", policy="tow")
    for name in both:
        again = retrain(tmp_path / "run", policy=name)
        newest = read_newest(tmp_path / "run" / "checkpoints" / name)
        assert again.same and again.compared == newest.facts["updates"] > 10


def test_losses_are_in_the_journal(tmp_path: Path) -> None:
    load_attribute(f"{FILE}:Walk", "make").steps = 0  # of all tests in this process
    run(tmp_path / "run", fails=tuple(range(5, 10_000, 9)))
    again = retrain(tmp_path / "run")
    assert again.same and again.voided == facts(tmp_path / "run")["limiter"]["voided"] > 3


@pytest.mark.parametrize("keep", [True, False])
def test_a_resumed_run_is_trained_again_as_a_whole(tmp_path: Path, keep: bool) -> None:
    folder = tmp_path / "run"
    run(folder, steps=50, keep_buffer=keep)
    with journal_path(folder, "policy").open("ab") as file:
        file.write(b"T" + b"\0" * 8)  # a task after the checkpoint, which the resumed run has not done
    resume(folder, launch="threads", limits={"steps": 100}, quiet=True)
    again = retrain(folder)
    assert again.same and again.committed == 100 and again.updates == facts(folder)["updates"]


def test_a_journal_that_is_shorter_than_the_checkpoint_says_is_refused_by_the_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, steps=50)
    path = journal_path(folder, "policy")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="what came before is lost; put the whole file back"):
        JournalWriter(path, [], {}, facts(folder)["journal"])
    with pytest.raises(RunError, match="put the whole file back"):
        resume(folder, launch="threads", limits={"steps": 100}, quiet=True)


def test_a_resume_with_what_a_journal_cannot_change_says_that_it_ends_being_trained_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run(folder, steps=50)
    path = folder / "config.json"
    path.write_text(re.sub(r'"batch_size": \d+', '"batch_size": 5', path.read_text()))
    resume(folder, launch="threads", limits={"steps": 70}, quiet=True)
    said = capfd.readouterr()
    assert re.search(
        r"batch_size was \d+ and is 5: the journal goes on, but the run cannot be trained again",
        said.out + said.err,
    )


def test_other_arrivals_lead_to_other_weights(tmp_path: Path) -> None:
    run(tmp_path / "run")
    path = journal_path(tmp_path / "run", "policy")
    whole, reader = path.read_bytes(), JournalReader(path)
    begin = whole.index(b"\n") + 1
    assert next(reader.records()) is None
    end, first = reader._file.tell(), reader.consume()
    reader.close()
    assert first is not None
    first["obs"][0, first["on_reset"][0].nonzero()[0][0]] += 1.0
    journal = JournalWriter(path, reader.offered(), reader.facts, end=begin)
    journal.arrival(first)
    assert journal.sync() == end
    journal.close()
    path.write_bytes(path.read_bytes() + whole[end:])
    assert not retrain(tmp_path / "run").same


def test_a_byte_that_was_changed_is_never_read_as_something_else(tmp_path: Path) -> None:
    run(tmp_path / "run")
    path = journal_path(tmp_path / "run", "policy")
    whole = path.read_bytes()

    def records() -> list[str]:
        reader = JournalReader(path)
        try:
            return [
                repr(record) if record else repr(dict(reader.consume() or {})) for record in reader.records()
            ]
        finally:
            reader.close()

    true, begin = records(), whole.index(b"\n") + 1
    damaged = 0
    for at in [*range(begin, begin + 300), *range(begin + 300, len(whole), 97)]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        try:
            # what seemed to be longer than the file
            assert (found := records()) == true[: len(found)] and len(found) < len(true)
        except CheckpointError as error:
            assert "damaged" in str(error)
            damaged += 1
    assert damaged > 300


def test_a_journal_whose_last_record_is_torn_is_read_up_to_it(tmp_path: Path) -> None:
    run(tmp_path / "run")
    path = journal_path(tmp_path / "run", "policy")
    whole = path.read_bytes()
    count = len(list(JournalReader(path).records()))
    for cut in (1, 5, 12):
        path.write_bytes(whole[:-cut])
        assert len(list(JournalReader(path).records())) == count - 1
    path.write_bytes(whole + b"?")
    with pytest.raises(CheckpointError, match="is damaged"):
        list(JournalReader(path).records())


def test_a_journal_that_goes_further_than_the_checkpoint_is_compared_where_that_was_written(
    tmp_path: Path,
) -> None:
    run(tmp_path / "run")
    before = retrain(tmp_path / "run")
    path = journal_path(tmp_path / "run", "policy")
    record = b"T" + struct.pack("<d", 1.0)
    path.write_bytes(path.read_bytes() + record + struct.pack("<I", crc32(record)))
    further = retrain(tmp_path / "run")
    assert (further.updates, further.compared, further.same) == (before.updates + 1, before.updates, True)
    assert before.same and not all(
        np.array_equal(before.parameters[n], further.parameters[n]) for n in before.parameters
    )


def test_a_journal_on_a_full_disk_is_named_with_the_cure() -> None:
    journal = JournalWriter(Path("/dev/full"), [Offered({}, (1, 1), 1, 1)], {}, None)
    with pytest.raises(
        CheckpointError,
        match=r"/dev/full cannot be written any further: No space left.*free the disk and resume",
    ):
        journal.sync()
    journal.close()


def test_a_journal_that_a_full_disk_took_in_part_goes_on_where_that_ended(tmp_path: Path) -> None:
    path = journal_path(tmp_path, "policy")
    journal = JournalWriter(path, [Offered({}, (1, 1), 1, 1)], {}, None)
    journal.task(0.0)
    end, limits = journal.sync(), resource.getrlimit(resource.RLIMIT_FSIZE)
    journal.task(1.0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (end + 5, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot be written any further"):
            journal.sync()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.task(2.0)
    journal.close()
    assert list(JournalReader(path).records()) == [Task(0.0), Task(1.0), Task(2.0)]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"schema": {"obs": [[4], "object"]}}, "'object' is no type of numbers"),
        ({"schema": {"obs": [[4], "V8"]}}, "'V8' is no type of numbers"),
        ({"schema": {"obs": [[4], ["float32"]]}}, "is no type of numbers"),
        ({"schema": {"obs": [[-4], "float32"]}}, "is no shape"),
        ({"schema": {"obs": [[2.5], "float32"]}}, "is no shape"),
        ({"schema": {"obs": [True, "float32"]}}, "True is no shape"),
        ({"leads": [[1, -1]]}, "is no shape"),
        ({"leads": [[1]]}, "not enough values"),
        ({"leads": [[1, 1 << 40]]}, "it has arrivals above"),
    ],
)
def test_a_journal_of_what_are_no_rows_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    header = {
        "format": FORMAT,
        "schema": {"obs": [[4], "float32"]},
        "leads": [[1, 1]],
        "facts": {},
        **changes,
    }
    path = tmp_path / "journal.bin"
    path.write_bytes(json.dumps(header).encode() + b"\n")
    with pytest.raises(CheckpointError, match=f"no journal can be read from .*{why}"):
        JournalReader(path)


def test_a_journal_whose_rows_are_longer_than_it_is_ends_there(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    header = {"format": FORMAT, "schema": {"obs": [[1 << 20], "float64"]}, "leads": [[1, 1]], "facts": {}}
    path.write_bytes(json.dumps(header).encode() + b"\nA\0\0\1\0" + b"\0" * 100)
    assert list(JournalReader(path).records()) == []


def test_a_run_without_a_journal_says_so(tmp_path: Path) -> None:
    train(limited.experiment(steps=30), launch="inline", run_dir=tmp_path / "run", source=FILE, quiet=True)
    with pytest.raises(RunError, match="journal=True"):
        retrain(tmp_path / "run")
    with pytest.raises(CheckpointError, match="no journal can be read"):
        JournalReader(tmp_path / "run" / "nothing")


@pytest.mark.parametrize(
    ("told", "damaged"),
    [(b'"spaces"', b'"rpaces"'), (b'"facts"', b'"gacts"'), (b'"observation"', b'"obserwation"')],
)
def test_a_header_that_was_changed_is_named(tmp_path: Path, told: bytes, damaged: bytes) -> None:
    run(tmp_path / "run")
    path = journal_path(tmp_path / "run", "policy")
    header, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(header.replace(told, damaged, 1) + b"\n" + rest)
    with pytest.raises(CheckpointError, match="journal"):
        retrain(tmp_path / "run")


def test_tasks_know_their_progress(tmp_path: Path) -> None:
    run(tmp_path / "run")
    told = [
        record.progress
        for record in JournalReader(journal_path(tmp_path / "run", "policy")).records()
        if isinstance(record, Task)
    ]
    assert told == sorted(told) and 0 < told[0] < told[-1] == 1.0


def test_moments_of_observations_are_those_of_the_run_again(tmp_path: Path) -> None:
    run(
        tmp_path / "run",
        slots=4,
        network=QNetwork(hidden=(8,), normalise_observations=True),
        algorithm=DQN(),
    )
    again = retrain(tmp_path / "run")
    assert again.same and again.parameters["observation.count"] > 50
