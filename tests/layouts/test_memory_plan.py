"""The memory plan: it is true, it is told, and a run that cannot fit is refused."""

import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from tests.run.watching import EXPERIMENTS, Run

from tidemill.core import memory
from tidemill.core.errors import ConfigError
from tidemill.core.memory import MemfdSegment, Need
from tidemill.core.schema import Field
from tidemill.core.user_code_loading import load_file
from tidemill.layouts.memory_plan import MemoryPlan, make_plan
from tidemill.run.folder import RunFolder
from tidemill.training.train import train
from tidemill.transports.local import LocalBell
from tidemill.transports.slots import SlotProducer

experiments = load_file(EXPERIMENTS, "test")


def test_the_plan_in_a_line() -> None:
    plan = MemoryPlan(
        {"samples": 66_300_000, "parameters": 123_456, "batches": 99},
        (30_000_000, 310_000_000),
        21_300_000_000,
    )
    assert (
        str(plan) == "memory: samples 66 MB, parameters 0.1 MB, 2 processes 340 MB so far; 21.3 GB available"
    )
    assert str(MemoryPlan({}, (1_000_000,), 1)) == "memory: 1 process 1.0 MB so far; 0.0 MB available"


def test_all_workers_needs_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 100)
    needs = [Need("samples", 40), Need("samples", 40), Need("batches", 20)]
    assert make_plan(needs).needs == {"samples": 80, "batches": 20}
    with pytest.raises(ConfigError, match="are available; make"):
        make_plan([*needs, Need("parameters", 1)])


def test_a_run_that_cannot_fit_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of the whole run: the actor finds that its own part fits
    monkeypatch.setattr(memory, "available", lambda: 5_000)
    with pytest.raises(
        ConfigError, match=r"(?s)^this needs 0\.0 MB .*samples: .* = 1 slot x 17 rows x 4 seats x \d+ bytes"
    ):
        train(experiments.cartpole(), launch="inline", run_dir=tmp_path / "run", source=EXPERIMENTS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux")
def test_more_processes_than_fit_are_refused_before_any_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: 1_000_000_000)
    made = experiments.cartpole()
    many = made.replace(workers={**made.workers, "actor": made.workers["actor"].replace(count=100)})
    with pytest.raises(ConfigError, match=r"worker processes: 2\.\d GB = 102 x 25 MB at least"):
        train(many, run_dir=tmp_path / "run", source=EXPERIMENTS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc, and processes need Linux")
def test_the_plan_is_what_the_segments_take(tmp_path: Path) -> None:
    # without a process for the next life
    run = Run(
        tmp_path, "cartpole", code="from tidemill.launchers import processes; processes.SPARE_AFTER_S = 1e9"
    )
    try:
        run.wait_for_updates()
        sizes: Counter[str] = Counter()
        descriptors = Path(f"/proc/{run.main.pid}/fd")
        for descriptor in descriptors.iterdir():
            with suppress(FileNotFoundError):  # it was open for a moment only
                name = os.readlink(descriptor)
                if "memfd:tidemill " in name:
                    sizes[name.partition("memfd:tidemill ")[2].split("/")[0]] += descriptor.stat().st_size
        plan = RunFolder(run.path).read("memory.json")
    finally:
        run.main.terminate()
        _, output = run.ended()
    page = 4096 + 256  # of each segment: counters and a description
    rounding = 64 * 20 * 2  # each field of a slot begins on a cache line
    assert sizes["samples"] == plan["needs"]["samples"] + page
    planned = plan["needs"]["requests and answers"]
    assert planned < sizes["requests"] + sizes["answers"] <= planned + 2 * (page + rounding)
    assert len(plan["processes"]) == 4 and all(5e6 < held < 1e9 for held in plan["processes"])
    (line,) = [line for line in output.splitlines() if line.startswith("memory: ")]
    assert line.endswith(" GB available") and "4 processes" in line


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfd needs Linux")
def test_what_is_offered_takes_no_memory_before_it_is_written() -> None:
    descriptor = os.memfd_create("test")
    try:
        producer = SlotProducer(MemfdSegment(descriptor), LocalBell())
        producer.offer({"obs": Field((1000,), "float32")}, (1000, 1000), 10)
        assert os.fstat(descriptor).st_size > 40_000_000_000
        assert os.fstat(descriptor).st_blocks * 512 < 100_000
    finally:
        os.close(descriptor)


MANY = """
import resource, sys
from tidemill import *
from tests.run import experiments

if __name__ == "__main__":
    count, soft, hard = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    made = experiments.equal()
    workers = {name: config.replace(count=count) for name, config in made.workers.items()}
    train(made.replace(workers=workers, limits=Limits(updates=2)), run_dir="run", source=experiments.__file__)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes need Linux")
@pytest.mark.parametrize(
    ("trainers", "error"),
    [("3", ""), ("16", r"this needs \d+ open files .* and 200 are allowed; make a count smaller")],
)
def test_the_limit_of_open_files_is_raised_as_far_as_may_be(
    tmp_path: Path, trainers: str, error: str
) -> None:
    (tmp_path / "many.py").write_text(MANY)
    place = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    done = subprocess.run(
        [sys.executable, "many.py", trainers, "30", "200"],
        cwd=tmp_path,
        env=place,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert re.search(error, done.stderr) and (done.returncode == 0) == (not error), done.stderr
    assert (tmp_path / "run").exists() == (not error)
