"""Folders and files that anybody may have written: one typed error for whatever is wrong
with them, no hang, and nothing large allocated for them."""

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import tidemill
from tidemill import ActorCritic, Actors, Experiment, Limits, Scripted, Trainer
from tidemill.api.control_messages import Status, pack, unpack_down, unpack_up
from tidemill.api.plain_spaces import read_spaces
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.api.weights_header import HEADER, read_header, write_header
from tidemill.cli.main import app
from tidemill.core import safetensors_io as packed
from tidemill.core.errors import (
    CheckpointError,
    ConfigError,
    DatabaseError,
    RunError,
    SchemaError,
    TidemillError,
    VersionGone,
)
from tidemill.store.checkpoint import MANIFEST, read_checkpoint
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase
from tidemill.trained.plot import plot

SPACES, POLICY = Spaces(Box((2,), "float32"), Discrete(2)), ActorCritic(hidden=(4,))
DEEP = "[" * 100_000
LARGE = 20_000_000  # bytes: a network of four units and its files take a hundredth


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experiment = Experiment(
        name="good",
        policies={"policy": POLICY},
        workers={
            "actor": Actors(environment=Scripted(), lanes=2),
            "trainer": Trainer(algorithm=tidemill.PPO()),
        },
        limits=Limits(updates=1),
    )
    return tidemill.train(
        experiment, launch="inline", run_dir=tmp_path_factory.mktemp("runs") / "good", quiet=True
    ).folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def checkpoint(run: Path) -> Path:
    return next((run / "checkpoints" / "policy").glob("update-*"))


def change(path: Path, edit: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def weights(run: Path, data: bytes) -> None:
    """Put these bytes in the place of the policy's weights, with their checksum."""
    (checkpoint(run) / "policy.safetensors").write_bytes(data)
    change(
        checkpoint(run) / MANIFEST,
        lambda manifest: manifest["sha256"].update({"policy.safetensors": sha256(data).hexdigest()}),
    )


def resume(run: Path) -> object:
    return tidemill.resume(run, launch="inline", limits={"updates": 2}, quiet=True)


def small(call: Callable[[], object]) -> object:
    """Return what `call` does, if that allocates no more than a small policy needs."""
    tracemalloc.start()
    try:
        return call()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < LARGE, f"{peak:,} bytes"


@pytest.mark.parametrize("place", ["config.json", "source.json", "manifest.json", "policy.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "device", "link"])
def test_nothing_but_plain_files_is_read(place: str, kind: str, run: Path, tmp_path: Path) -> None:
    path = checkpoint(run) / place if (checkpoint(run) / place).exists() else run / place
    if path.exists():
        shutil.move(path, tmp_path / "kept")
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "kept")
    if kind == "link" and place == "source.json":
        return  # leads nowhere: there is none
    for use in (tidemill.load, resume):
        with pytest.raises((RunError, CheckpointError)):
            use(run)


@pytest.mark.parametrize("place", ["metrics.jsonl", "summary.json", "episodes.json"])
def test_what_a_resumed_run_looks_at_besides_does_not_hang_it(place: str, run: Path) -> None:
    (run / place).unlink(missing_ok=True)
    os.mkfifo(run / place)
    with suppress(TidemillError):
        resume(run)
    if place == "metrics.jsonl":
        with pytest.raises(RunError, match="it is a FIFO, and not a plain file"):
            plot([run], run / "curve.png")


def test_a_checkpoint_that_is_a_link_is_refused(run: Path, tmp_path: Path) -> None:
    path = checkpoint(run)
    shutil.move(path, tmp_path / "kept")
    path.symlink_to(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"update-1 is a link; put the folder itself there"):
        tidemill.load(run)
    assert tidemill.load(run, checkpoint=tmp_path / "kept").update == 1


@pytest.mark.parametrize("name", ["config.json", "source.json", "manifest.json"])
def test_json_of_absurd_depth_is_one_error(name: str, run: Path) -> None:
    path = checkpoint(run) / name if name == MANIFEST else run / name
    path.write_text(f'{{"format": {DEEP}')
    with pytest.raises((RunError, CheckpointError), match="nested deeper than 64 levels"):
        tidemill.load(run)


@pytest.mark.parametrize(
    "line",
    [
        f'{{"a": {DEEP}',
        '{"step": "one"}',
        '{"episodes": null}',
        '{"curriculum/stage": 1e999, "episodes": -1e999}',
        "[]",
        "\x00" * 100,
    ],
)
def test_metrics_that_are_none_are_one_error_or_nothing(line: str, run: Path) -> None:
    (run / "metrics.jsonl").write_text(f"{line}\n{{}}\n")
    for use in (resume, lambda run: plot([run], run / "curve.png")):
        with suppress(RunError):
            use(run)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_wherever_they_are_read(
    value: float, run: Path, tmp_path: Path
) -> None:
    arrays, _ = packed.unpack((checkpoint(run) / "policy.safetensors").read_bytes())
    arrays["actor.weight"][0] = value
    weights(run, packed.pack(arrays))
    with pytest.raises(CheckpointError, match=r"parameter actor\.weight holds NaN or infinity"):
        tidemill.load(run)
    with pytest.raises(RunError, match=r"parameter actor\.weight holds NaN or infinity"):
        resume(run)
    database = ParameterDatabase(run / PARAMETERS)
    database.push("policy", 7, arrays, text=packed.unpack(database.read("policy", 1)[0])[1])
    if np.isnan(value):
        with pytest.raises(DatabaseError, match=r"7\.safetensors: parameter actor\.weight holds NaN"):
            database.load("policy", 7)
    with pytest.raises(DatabaseError, match=r"parameter actor\.weight holds NaN or infinity"):
        tidemill.load(run, version=7)
    own = {name: array.copy() for name, array in POLICY.build(SPACES, 1).parameters().items()}
    own["actor.weight"][0] = value
    exported(tmp_path / "p", POLICY, SPACES, arrays=own)
    with pytest.raises(DatabaseError, match=r"parameter actor\.weight holds NaN or infinity"):
        tidemill.load(tmp_path / "p")


FACTS = [
    lambda facts: facts["spaces"]["observation"].update(shape=[10**11]),
    lambda facts: facts["spaces"]["observation"].update(shape=[-2]),
    lambda facts: facts["spaces"]["observation"].update(dtype="V2000000000"),
    lambda facts: facts["spaces"]["action"].update(n=10**15),
    lambda facts: facts.update(spaces=None),
    lambda facts: facts.update(updates=float("inf")),
    lambda facts: facts.update(updates="x" * 10),
    lambda facts: facts.update(steps=None),
    lambda facts: facts.clear(),
]


@pytest.mark.parametrize("number", range(len(FACTS)))
def test_facts_that_cannot_be_are_one_error(number: int, run: Path) -> None:
    change(checkpoint(run) / MANIFEST, lambda manifest: FACTS[number](manifest["facts"]))
    with pytest.raises(CheckpointError):
        small(lambda: tidemill.load(run))


@pytest.mark.parametrize("facts", [{"adopted": "x"}, {"rows": None}, {"reused": 1e999}, {"evicted": True}])
def test_counters_that_are_none_are_one_error(facts: dict[str, Any], run: Path) -> None:
    change(checkpoint(run) / MANIFEST, lambda manifest: manifest["facts"].update(facts))
    with pytest.raises(RunError, match=f"says {next(iter(facts))} = .*, which is no count"):
        resume(run)


def test_an_index_of_anything_is_one_error(run: Path) -> None:
    import sqlite3

    database = ParameterDatabase(run / PARAMETERS)
    database.results.add("policy", 1, {"evaluation/return": [1.0, 2.0]})
    for change_it in (
        "UPDATE versions SET counters = '[1, 2]'",
        f"UPDATE versions SET counters = '{DEEP}'",
        "UPDATE means SET count = 'many'",
        "UPDATE versions SET pushed = 'once'",
    ):
        before = (run / PARAMETERS / "index.sqlite").read_bytes()
        with sqlite3.connect(run / PARAMETERS / "index.sqlite") as db:
            db.execute(change_it)
        db.close()
        with pytest.raises(DatabaseError, match=r"index.sqlite is damaged"):
            database.versions("policy")
        (run / PARAMETERS / "index.sqlite").write_bytes(before)
    with pytest.raises(ConfigError, match="is not a name"):
        database.read("../../elsewhere", 1)
    with pytest.raises(VersionGone, match="was never pushed"):
        database.read("policy", "9" * 30)


ENDLESS = (
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT 'policy' AS policy, x AS "
    "version, '' AS sha256 FROM c"
)


@pytest.mark.parametrize(
    "change_it",
    [
        ["UPDATE tags SET tag = '[/bold]'"],
        ["UPDATE tags SET tag = x'ff'"],
        ["UPDATE versions SET policy = '[/x]' || char(27) || '[31m'"],
        ["UPDATE tags SET version = '../../elsewhere'"],
        ["DROP TABLE tags", "DROP TABLE means", "DROP TABLE versions", f"CREATE VIEW versions AS {ENDLESS}"],
        ["CREATE TRIGGER more AFTER INSERT ON tags BEGIN DELETE FROM versions; END"],
    ],
)
def test_what_an_index_says_is_looked_at_before_it_is_used(change_it: list[str], run: Path) -> None:
    import sqlite3

    database = ParameterDatabase(run / PARAMETERS)
    db = sqlite3.connect(run / PARAMETERS / "index.sqlite", isolation_level=None)
    for statement in change_it:
        db.execute(statement)
    db.close()
    told = []
    for use in (
        lambda: [database.versions(name) for name in database.policies()],
        lambda: database.read("policy", "latest"),
    ):
        try:
            use()
        except (DatabaseError, VersionGone) as error:
            told.append(str(error))
    assert any("index.sqlite is damaged" in text for text in told)


def test_a_journal_of_several_databases_removes_no_file(run: Path, tmp_path: Path) -> None:
    import sqlite3

    index, other = run / PARAMETERS / "index.sqlite", tmp_path / "precious"
    other.write_text("precious")
    db = sqlite3.connect(index, isolation_level=None)
    db.execute("BEGIN")
    db.execute("UPDATE versions SET pushed = 5")
    magic, name = bytes.fromhex("d9d505f920a163d7"), os.fsencode(other)
    journal = magic + bytes(4) + Path(f"{index}-journal").read_bytes()[12:]  # as of a commit that was begun
    db.execute("ROLLBACK")
    db.close()
    last = (
        (2**30 // 4096 + 1).to_bytes(4, "big")
        + name
        + len(name).to_bytes(4, "big")
        + sum(name).to_bytes(4, "big")
        + magic
    )
    Path(f"{index}-journal").write_bytes(journal + last)
    with pytest.raises(DatabaseError, match=r"index.sqlite-journal is of several databases"):
        ParameterDatabase(run / PARAMETERS).versions("policy")
    assert other.exists()


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-journal", "index.sqlite-wal"])
def test_an_index_is_plain_files(name: str, run: Path, tmp_path: Path) -> None:
    (run / PARAMETERS / name).unlink(missing_ok=True)
    (run / PARAMETERS / "index.sqlite").touch()
    (run / PARAMETERS / name).unlink(missing_ok=True)
    (run / PARAMETERS / name).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").touch()
    with pytest.raises(DatabaseError, match=rf"{name} is a link, and not a plain file"):
        ParameterDatabase(run / PARAMETERS).versions("policy")


# ---- exported policies -----------------------------------------------------------------


def exported(path: Path, config: Any, spaces: Spaces, arrays: Any = None, **text: str) -> Path:
    arrays = POLICY.build(SPACES, 1).parameters() if arrays is None else arrays
    path.write_bytes(
        packed.pack(
            arrays, {**write_header(config, spaces), "policy": "p", "version": "1", "counters": "{}", **text}
        )
    )
    return path


@pytest.mark.parametrize(
    ("config", "spaces", "text"),
    [
        (ActorCritic(hidden=(60_000, 60_000)), SPACES, {}),  # which asked for 27 GiB
        (POLICY, Spaces(Box((50_000_000,), "float32"), Discrete(2)), {}),
        (POLICY, Spaces(Discrete(5 * 10**9), Discrete(2)), {}),
        (POLICY, Spaces(Box((2,), "float32"), Box((3 * 10**9,), "float32", (-1.0,), (1.0,))), {}),
        (ActorCritic(), Spaces(Box((3, 4000, 4000), "uint8"), Discrete(2)), {}),
        (POLICY, Spaces(Box((2,), "object"), Discrete(2)), {}),
        (POLICY, Spaces(Box((2,), "float32", (0.0, 0.0, 0.0)), Discrete(2)), {}),
        (POLICY, SPACES, {HEADER: DEEP}),
        (POLICY, SPACES, {HEADER: "{}"}),
        (POLICY, SPACES, {"counters": DEEP}),
        (POLICY, SPACES, {"counters": '{"env_steps": 1e999}'}),
        (POLICY, SPACES, {"version": "9" * 5000}),
    ],
)
def test_a_small_file_allocates_little(
    config: Any, spaces: Spaces, text: dict[str, str], tmp_path: Path
) -> None:
    exported(tmp_path / "p", config, spaces, **text)
    with pytest.raises(DatabaseError, match=r"/p is no exported policy"):
        small(lambda: tidemill.load(tmp_path / "p"))


def test_an_error_tells_a_terminal_nothing_that_it_obeys(run: Path) -> None:
    change(run / "config.json", lambda config: config.update({"\x1b]0;mine\x07": 1}))
    told = CliRunner().invoke(app, ["eval", str(run)])
    assert (
        told.exit_code == 1 and r'no setting "\x1b]0;mine\x07"' in told.output and "\x1b" not in told.output
    )


# ---- anything at all -------------------------------------------------------------------

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["box", "discrete", "float32", "O", "M8[ns]"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
SOME = settings(max_examples=150)


def mutated(data: bytes, cuts: list[tuple[int, bytes]]) -> bytes:
    """Return the bytes with others in the place of some."""
    for place, other in cuts:
        place %= len(data) + 1
        data = data[:place] + other + data[place + len(other) :]
    return data


CUTS = st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=9)), min_size=1, max_size=4)


def put(content: Any, path: list[str | int], value: Any) -> Any:
    """Return plain data with `value` at `path`, as far as there is one."""
    if not path or not isinstance(content, dict) or not content:
        return value
    key = sorted(content)[hash(path[0]) % len(content)]
    return {**content, key: put(content[key], path[1:], value)}


PATHS = st.lists(st.integers(0, 50), min_size=1, max_size=5)


@SOME
@given(path=PATHS, value=PLAIN)
def test_any_manifest_is_read_or_a_checkpoint_error(trained: Path, path: list[str | int], value: Any) -> None:
    place = trained.parent / "manifests" / "update-1"
    if not place.exists():
        shutil.copytree(checkpoint(trained), place)
    manifest = json.loads((checkpoint(trained) / MANIFEST).read_text())
    (place / MANIFEST).write_text(json.dumps(put(manifest, path, value)))

    def use() -> None:
        _, facts = read_checkpoint(place)
        read_spaces(facts.get("spaces"))

    with suppress(CheckpointError, SchemaError):
        small(use)


@SOME
@given(cuts=CUTS)
def test_any_bytes_for_a_manifest_or_weights_are_a_checkpoint_error(
    trained: Path, cuts: list[tuple[int, bytes]]
) -> None:
    place = trained.parent / "bytes" / "update-1"
    if not place.exists():
        shutil.copytree(checkpoint(trained), place)
    for name in (MANIFEST, "policy.safetensors"):
        whole = (checkpoint(trained) / name).read_bytes()
        (place / name).write_bytes(mutated(whole, cuts))
        with suppress(CheckpointError):
            small(lambda: read_checkpoint(place))
        (place / name).write_bytes(whole)


@SOME
@given(path=PATHS, value=PLAIN)
def test_any_label_is_read_or_a_schema_error(path: list[str | int], value: Any) -> None:
    content = json.loads(write_header(POLICY, SPACES)[HEADER])
    with suppress(SchemaError):
        small(lambda: read_header({HEADER: json.dumps(put(content, path, value))}))


@SOME
@given(path=PATHS, value=PLAIN, cuts=st.none() | CUTS)
def test_any_exported_file_is_a_policy_or_one_error(
    tmp_path_factory: pytest.TempPathFactory,
    path: list[str | int],
    value: Any,
    cuts: list[tuple[int, bytes]] | None,
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    label = json.loads(write_header(POLICY, SPACES)[HEADER])
    exported(file, POLICY, SPACES, **{HEADER: json.dumps(put(label, path, value) if cuts is None else label)})
    if cuts is not None:
        file.write_bytes(mutated(file.read_bytes(), cuts))
    with suppress(DatabaseError, ConfigError, RunError):
        small(lambda: tidemill.load(file))


@SOME
@given(
    data=st.binary(max_size=300) | PLAIN.map(lambda value: msgspec.msgpack.encode(_sendable(value))),
    cuts=CUTS,
)
def test_any_control_message_is_read_or_a_schema_error(data: bytes, cuts: list[tuple[int, bytes]]) -> None:
    whole = pack(
        Status(
            tidemill.api.control_messages.State.READY,
            facts=tidemill.api.control_messages.Facts(spaces={"policy": SPACES}),
        )
    )
    for message in (
        data,
        mutated(whole, cuts),
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x82\xa4type\xa5Start" + data,
    ):
        for read in (unpack_up, unpack_down):
            with suppress(SchemaError):
                small(lambda read=read, message=message: read(message))


def _sendable(value: Any) -> Any:
    match value:
        case int():
            return value % 2**63
        case dict():
            return {key: _sendable(part) for key, part in value.items()}
        case list():
            return list(map(_sendable, value))
    return value
