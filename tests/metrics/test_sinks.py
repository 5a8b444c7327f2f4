"""Metric sinks: each has the records that metrics.jsonl has, a resumed run goes on, and
one that fails stops alone."""

import csv
import json
import logging
import math
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.run import experiments

import tidemill
from tidemill import ConfigError, Gymnasium, Limits, LoggedRun, MetricSink
from tidemill.api.metric_sink import viewer_name
from tidemill.core.errors import RunError
from tidemill.metrics.csv_file import CSV
from tidemill.metrics.json_lines import read_metrics
from tidemill.metrics.writer import MetricsWriter, find_sinks
from tidemill.presets.ppo import ppo

EXPERIMENTS = Path(experiments.__file__)


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def write(run: LoggedRun, sinks: list[type[MetricSink]], *records: dict[str, float]) -> None:
    writer = MetricsWriter(run, sinks)
    for record in records:
        writer.write(record)
    writer.close()


def test_a_csv_file_has_a_column_for_each_name_and_nothing_where_a_record_has_none(tmp_path: Path) -> None:
    write(
        LoggedRun(tmp_path),
        [CSV],
        {"step": 1, "loss": math.nan},
        {"step": 2, "loss": 0.5, "api_key": 3.0},
        {"step": 3, "return/mean": 21.0},
        {"step": 4, "loss": 0.25},
    )
    assert rows(tmp_path) == [
        {"step": "1.0", "loss": "nan", "return/mean": ""},
        {"step": "2.0", "loss": "0.5", "return/mean": ""},
        {"step": "3.0", "loss": "", "return/mean": "21.0"},
        {"step": "4", "loss": "0.25", "return/mean": ""},
    ]
    assert [path.name for path in tmp_path.iterdir()].count("metrics.csv.tmp") == 0


def test_a_resumed_run_has_the_same_rows_in_both_files(tmp_path: Path) -> None:
    write(LoggedRun(tmp_path), [CSV], *({"step": step, "update": step} for step in range(1, 6)))
    write(LoggedRun(tmp_path, resume_at=3, updates=3), [CSV], {"step": 4, "update": 4, "new": 1.0})
    assert [float(row["step"]) for row in rows(tmp_path)] == [1, 2, 3, 4]
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]


class Failing(MetricSink):
    title = "a failing sink"

    def write(self, record: object) -> None:
        raise ValueError("no")

    def close(self) -> None:
        raise ValueError("neither")


class Counting(MetricSink):
    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self.file = run.folder / "count"
        self.file.write_text(f"{run.resume_at} ")

    def write(self, record: object) -> None:
        self.file.write_text(self.file.read_text() + ".")


def test_a_sink_that_fails_stops_alone_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(LoggedRun(tmp_path, resume_at=0), [Failing, Counting], {"step": 1}, {"step": 2})
    assert (tmp_path / "count").read_text() == "0 .."
    assert [record.message for record in caplog.records] == [
        "a failing sink: no more is written there (ValueError('no')); metrics.jsonl has all metrics",
        "a failing sink cannot be closed: ValueError('neither')",
    ]


@pytest.mark.parametrize("raised", [SystemExit(3), ValueError("no more")])
@pytest.mark.parametrize("when", ["write", "close"])
def test_a_sink_costs_no_run_whatever_it_raises(when: str, raised: BaseException, tmp_path: Path) -> None:
    class Raising(MetricSink):
        def write(self, record: Mapping[str, float]) -> None:
            if when == "write":
                raise raised

        def close(self) -> None:
            raise raised

    made = ppo("small", Gymnasium(id="CartPole-v1"), lanes=4, sample_steps=16, updates=2)
    done = tidemill.train(made, launch="inline", run_dir=tmp_path / "run", quiet=True, log=[Raising, "csv"])
    assert done.summary.status == "completed" and len(read_metrics(done.folder)) == 2
    assert (done.folder / "metrics.csv").read_text().count("\n") == 3


def test_a_sink_that_cannot_be_made_says_where_and_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    class Made(MetricSink):
        def __init__(self, run: LoggedRun) -> None:
            raise OSError("no such server")

        def write(self, record: Mapping[str, float]) -> None: ...

    with pytest.raises(ConfigError, match=f"--log Made: it cannot be made: OSError: no such.*{__file__}"):
        tidemill.train("CartPole-v1", launch="inline", run_dir=tmp_path / "run", quiet=True, log=[Made])
    assert not (tmp_path / "run").exists()


def test_a_sink_that_is_named_twice_is_written_to_once() -> None:
    assert [sink.__name__ for sink in find_sinks("csv, tensorboard,csv")] == ["CSV", "TensorBoard"]


def test_a_run_writes_to_a_sink_of_ones_own_and_a_resumed_one_to_those_of_before(tmp_path: Path) -> None:
    folder, made = tmp_path / "run", experiments.cartpole().replace(limits=Limits(steps=2_000))
    tidemill.train(
        made, launch="inline", run_dir=folder, source=EXPERIMENTS, quiet=True, log=["csv", Counting]
    )
    written = len(read_metrics(folder))
    assert written == len(rows(folder)) == (folder / "count").read_text().count(".") > 0
    assert not list(folder.glob("*tfevents*"))
    tidemill.resume(folder, limits={"steps": 4_000}, quiet=True, file=EXPERIMENTS)
    assert len(rows(folder)) == len(read_metrics(folder)) > written
    assert (folder / "count").read_text().startswith("None ")  # it is not run by what a folder says


def test_a_name_that_is_no_sink_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r'--log cvs: no MetricSink is called "cvs"; did you mean "csv"'):
        find_sinks("tensorboard,cvs")
    with pytest.raises(ConfigError, match=r"no subclass of MetricSink"):
        find_sinks("json:dumps")
    assert find_sinks("") == []


def test_viewers_fold_the_times_of_workers_away_from_the_runs_own() -> None:
    assert viewer_name("time/actor-0/wait") == "workers/actor-0/wait"
    assert [viewer_name(name) for name in ("time/seconds", "loss/policy")] == ["time/seconds", "loss/policy"]


def test_a_missing_wandb_is_told_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RunError, match=r'pip install "tidemill\[wandb\]"'):
        tidemill.train(
            experiments.cartpole(), launch="inline", run_dir=tmp_path / "run", quiet=True, log="wandb"
        )
    assert not (tmp_path / "run").exists()


WANDB = """
import sys, math
from pathlib import Path
from tidemill.api.metric_sink import LoggedRun
from tidemill.metrics.wandb import WeightsAndBiases
from tidemill.metrics.writer import MetricsWriter
for resume_at in (None, 3):
    run = LoggedRun(Path(sys.argv[1]), {"seed": 7}, resume_at)
    writer = MetricsWriter(run, [WeightsAndBiases])
    for step in (4, 5) if resume_at else (1, 2, 3):
        writer.write({"step": step, "return/mean": step + 0.5, "time/actor-0/wait": 0.25, "loss": math.nan})
    writer.close()
"""


def test_weights_and_biases_gets_the_records_offline_and_no_command_line(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_CACHE_DIR": str(tmp_path / "cache")}
    words = [sys.executable, "-c", WANDB, str(tmp_path / "run"), "token=a-secret-word"]
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, check=False, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1  # one run there, resumed
    told = [logged(file) for file in files]
    assert [record["step"] for records in told for record in records] == [1, 2, 3, 4, 5]
    assert told[0][0]["return/mean"] == 1.5 and told[0][0]["workers/actor-0/wait"] == 0.25
    assert "loss" not in told[0][0]
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or b"a-secret-word" not in path.read_bytes(), path


class _WandbServer(BaseHTTPRequestHandler):
    """Takes a run as the server of Weights & Biases does, and answers none of its records
    until `released`."""

    released = threading.Event()
    records = threading.Event()

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["content-length"]))
        if not self.path.endswith("/graphql"):
            self.records.set()
            self.released.wait(100)
            return
        entity = {"id": "e", "name": "me"}
        run = {
            "id": "r",
            "name": "run",
            "config": "{}",
            "project": {"id": "p", "name": "p", "entity": entity},
        }
        answer = {
            "UpsertBucket": {"upsertBucket": {"bucket": run, "inserted": True}},
            "CreateRunFiles": {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []}},
        }.get(json.loads(asked)["operationName"], {"viewer": entity, "model": None})
        data = json.dumps({"data": answer}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


LAST_RECORDS = """
import logging, sys
from pathlib import Path
from tidemill.api.metric_sink import LoggedRun
from tidemill.metrics import wandb
from tidemill.metrics.writer import MetricsWriter
logging.basicConfig()
wandb.LAST_RECORDS = 1.0
writer = MetricsWriter(LoggedRun(Path(sys.argv[1])), [wandb.WeightsAndBiases])
writer.write({"step": 1})
writer.close()
"""


def test_a_server_that_takes_no_records_is_not_waited_for_longer_than_said(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    with ThreadingHTTPServer(("127.0.0.1", 0), _WandbServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {
            **os.environ,
            "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}",
            "WANDB_API_KEY": "0" * 40,
            "WANDB_CACHE_DIR": str(tmp_path / "cache"),
            "WANDB_CONFIG_DIR": str(tmp_path / "config"),
        }
        words = [sys.executable, "-c", LAST_RECORDS, str(tmp_path / "run")]
        (tmp_path / "run").mkdir()
        try:
            done = subprocess.run(
                words, env=environment, capture_output=True, text=True, check=False, timeout=240, cwd=tmp_path
            )
        finally:
            _WandbServer.released.set()
            server.shutdown()
    assert done.returncode == 0 and _WandbServer.records.is_set(), done.stderr
    assert re.search(
        r"Weights & Biases cannot be closed: its server has not taken all records within 1 s .* wandb sync "
        + re.escape(str(tmp_path)),
        done.stderr,
    )


def logged(file: Path) -> list[dict[str, float]]:
    """Return the records in a file that wandb would send: a log of LevelDB's format,
    pieces of records in blocks of 32 KiB, behind 7 bytes of its own."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole, found = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # all of one, or its last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                items = {
                    "".join(item.nested_key) or item.key: item.value_json for item in record.history.item
                }
                found.append({k: json.loads(v) for k, v in items.items() if not k.startswith("_")})
    return found


def test_the_log_option_names_where_the_records_went(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tidemill.train(
            experiments.cartpole().replace(limits=Limits(steps=500)),
            launch="inline",
            run_dir=tmp_path / "run",
            source=EXPERIMENTS,
            quiet=True,
            log="tensorboard, csv",
        )
    assert (tmp_path / "run" / "metrics.csv").exists() and list((tmp_path / "run").glob("*tfevents*"))
    assert not caplog.records
