"""`make bench`: Tidemill beside other systems, on the same works, in alternating runs;
then the other benchmark scripts.

    python benchmarks/compare.py                          # everything: hours on two cores
    python benchmarks/compare.py cartpole pong --runs 3   # some works
    python benchmarks/compare.py slots.py neighbour.py    # some of the other scripts
    # works in float32 as on a processor with AVX2 and no more, for all systems alike
    python benchmarks/compare.py --avx2
    # keeps what finished runs have written, does the rest
    python benchmarks/compare.py --continue
    # does it run at all? CartPole, Tidemill alone, one run of 1.5 s
    python benchmarks/compare.py --quick

Each system is installed from its package into its own environment under `.bench/`. Each
run is a process of its own with a deadline: `seconds` of training after a warm-up,
steps/s over env steps that entered training. Results are written run by run to
docs/results/bench/WORK.json, so that a bench that was stopped goes on with `--continue`;
tables and plots of docs/benchmarks.md, and README's table, come from these files
(`--report` writes them anew, without a run). A run that fails is told in the table, and
tried again by `--continue`. How long all of it will take is told first, from what runs
have taken before.
"""

import argparse
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import pairs
from avx2 import AVX2

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ENVIRONMENTS = ROOT / ".bench"
TIDEMILL, INLINE = "tidemill", "inline"

Run = dict[str, Any]


@dataclass(frozen=True)
class System:
    """One competitor: `peers/NAME.py`, run by the interpreter of the environment that
    `peers/requirements/NAME.txt` makes."""

    name: str
    title: str
    package: str  # whose version the table shows


@dataclass(frozen=True)
class Work:
    """One row of the comparison: a function of `works.py` and an argument of the peers.
    Systems left out cannot do it without code of ours."""

    name: str
    title: str
    systems: tuple[str, ...]
    unit: str = "steps/s"
    data_type: str = "float32"  # of convolutions; README shows the systems that have it
    target: bool = False  # seconds to 475 are measured
    inline: str = ""  # the work that is the same with inline inference, which takes turns with it
    bound: bool = True  # what PPO's parts cost bare is measured


SYSTEMS = {
    system.name: system
    for system in (
        System(TIDEMILL, "Tidemill", "tidemill"),
        System("stable_baselines3", "Stable-Baselines3", "stable_baselines3"),
        System("sample_factory", "Sample Factory", "sample-factory"),
        System("cleanrl_style", "CleanRL-style file", "torch"),
        System("pufferlib", "PufferLib", "pufferlib"),
        System("fused_jax", "PPO as one program of JAX", "jax"),
        System(INLINE, "Tidemill, inference inline", "tidemill"),
    )
}
ALL = (TIDEMILL, "stable_baselines3", "sample_factory", "cleanrl_style")
PLAIN = (*ALL, "pufferlib")
NATIVE = (TIDEMILL, "cleanrl_style", "fused_jax")
BFLOAT16 = (TIDEMILL, "cleanrl_style")
SERVED = (TIDEMILL, INLINE)
FEW = (TIDEMILL, "stable_baselines3", "cleanrl_style")
SMALL = (TIDEMILL, "stable_baselines3", "cleanrl_style", "pufferlib")
WORKS = {
    work.name: work
    for work in (
        Work("cartpole", "CartPole-v1, plain Gymnasium environments", PLAIN, target=True),
        Work(
            "cartpole_vector",
            "CartPole-v1, Gymnasium's native vector environment",
            NATIVE,
            target=True,
        ),
        Work(
            "cartpole_vector_small",
            "CartPole-v1, native vector environment, 8 lanes of 256 rows, minibatches of 64, 10 epochs",
            NATIVE,
            target=True,
        ),
        Work("half_cheetah", "HalfCheetah-v5", PLAIN),
        Work("cartpole_small", "CartPole-v1, 8 lanes of 256 rows, minibatches of 64, 10 epochs", SMALL),
        Work("cartpole_one", "CartPole-v1, one lane of 2,048 rows, minibatches of 64, 10 epochs", FEW),
        Work("hopper_one", "Hopper-v5, one lane of 2,048 rows, minibatches of 64, 10 epochs", FEW),
        Work("hopper_small", "Hopper-v5, 8 lanes of 256 rows, minibatches of 64, 10 epochs", SMALL),
        Work(
            "half_cheetah_small", "HalfCheetah-v5, 8 lanes of 256 rows, minibatches of 64, 10 epochs", SMALL
        ),
        Work("pong_float32", "ALE/Pong-v5, 4 epochs, float32", ALL, "agent steps/s"),
        Work("pong_one_epoch_float32", "ALE/Pong-v5, 1 epoch, float32", ALL, "agent steps/s"),
        Work("pong", "ALE/Pong-v5, 4 epochs, bfloat16", BFLOAT16, "agent steps/s", "bfloat16"),
        Work("pong_one_epoch", "ALE/Pong-v5, 1 epoch, bfloat16", BFLOAT16, "agent steps/s", "bfloat16"),
        Work("cartpole_served", "CartPole-v1 with policy workers", SERVED, inline="cartpole"),
        Work(
            "dqn",
            "CartPole-v1, DQN, an update of 64 rows for every second step",
            (TIDEMILL, "stable_baselines3"),
            bound=False,
        ),
        Work(
            "sac",
            "HalfCheetah-v5, SAC, an update of 256 rows for every step",
            (TIDEMILL, "stable_baselines3"),
            bound=False,
        ),
        Work(
            "pong_served",
            "ALE/Pong-v5, 4 epochs, bfloat16, with policy workers",
            SERVED,
            "agent steps/s",
            "bfloat16",
            inline="pong",
        ),
    )
}
# the other benchmarks, each with its arguments, and the seconds that it takes, about
Scripts = dict[tuple[str, ...], float]
SCRIPTS: Scripts = {
    ("transports.py",): 60,
    ("actor.py",): 60,
    ("learner.py",): 60,
    ("learner.py", "--images", "--rows", "1024", "--minibatch", "256", "--epochs", "1"): 60,
    ("compiled.py",): 40,
    ("start.py",): 150,
    ("synthetic.py",): 60,
    ("sleeping.py",): 220,
    ("slots.py",): 120,
    ("neighbour.py",): 220,
    ("memory.py",): 60,
    ("scaling.py",): 900,
}
SCRIPT_DEADLINE = 3600.0
# seconds that a run of Tidemill, and one of another system, takes beside training,
# warm-up and bare costs
AROUND = {True: 12.0, False: 10.0}
INSTALLING = 120.0  # seconds for the environment of another system
LEGS = ("", "avx2/")  # with all that the processor has, and with AVX2: folders of results
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class Failed(Exception):
    """A run that gave no figure, and why."""


_refused: dict[str, Failed] = {}  # systems that could not be installed: once is enough


# ---- set-up ----------------------------------------------------------------------------


def prepare(name: str, title: str) -> Path:
    """Return the interpreter of a peer's own environment, made anew when its requirements
    have changed."""
    folder, files = ENVIRONMENTS / name, sorted((HERE / "peers" / "requirements").glob(f"{name}.*"))
    files.sort(key=lambda file: file.suffix, reverse=True)  # .txt before .py
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    ready, python = folder / "ready", folder / "bin" / "python"
    if ready.exists() and ready.read_text() == digest:
        return python
    say(f"installing {title} into {folder.relative_to(ROOT)}")
    shutil.rmtree(folder, ignore_errors=True)
    command([sys.executable, "-m", "venv", str(folder)], 300)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    for file in files:
        if file.suffix == ".py":  # it installs what no list can
            command([str(python), str(file)], 1800)
            continue
        alone = "without-dependencies" in file.name
        torch = re.search(r"^torch==.*$", file.read_text(), re.MULTILINE)
        if torch and shutil.which("nvidia-smi") is None:  # the CPU build, as in install.sh
            for source in (["--no-index"], ["--index-url", "https://download.pytorch.org/whl/cpu"]):
                try:
                    command([*pip, "--no-deps", *source, torch[0]], 1800)
                    break
                except Failed:
                    continue
        command([*pip, *(["--no-deps"] if alone else []), "--requirement", str(file)], 1800)
    ready.write_text(digest)
    return python


def command(words: list[str], deadline: float, **environment: str) -> str:
    """Run a command in a session of its own and return its standard output. Raises
    `Failed`; at the deadline all its processes are killed."""
    # What it leaves in its temporary folder when it is killed goes with ours; its last
    # processes may still write there.
    with (
        tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile("w+") as errors,
    ):
        child = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            cwd=folder,
            env={**os.environ, "TMPDIR": folder, **environment},
        )
        try:
            output, _ = child.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            raise Failed(f"no end after {deadline:.0f} s") from None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
        if child.returncode:
            errors.seek(0)
            lines = [line for line in (errors.read() + output).splitlines() if line.strip()]
            raise Failed(f"status {child.returncode}: {lines[-1].strip()[:300] if lines else 'no message'}")
    return output


# ---- runs ------------------------------------------------------------------------------


def run_peer(system: str, work: str, seconds: float, seed: int) -> Run:
    """One run of another system."""
    if system in _refused:
        raise _refused[system]
    try:
        python = prepare(system, SYSTEMS[system].title)
    except Failed as failure:
        _refused[system] = Failed(f"it could not be installed: {failure}")
        raise _refused[system] from None
    output = command(
        [str(python), str(HERE / "peers" / f"{system}.py"), work, f"--seconds={seconds}", f"--seed={seed}"],
        6 * seconds + 240,
    )
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise Failed("it printed no figures")
    return json.loads(lines[-1])


def run_tidemill(work: Work, seconds: float, seed: int) -> Run:
    """One run of Tidemill: its bench, and with a target the same experiment until it is
    reached."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        if not work.bound:
            return train_tidemill(work, seconds, seed, Path(folder))
        file = Path(folder) / "bench.json"
        own_command("bench", work, seconds, f"--seconds={seconds}", f"--json={file}", f"--set=seed={seed}")
        found = json.loads(file.read_text())
        result = {
            "steps": round(found["run"]["steps_per_second"] * found["run"]["seconds"]),
            "seconds": found["run"]["seconds"],
            "steps_per_second": found["run"]["steps_per_second"],
            "core_seconds": (found["run"]["busy_cores"] or math.nan) * found["run"]["seconds"],
            "computes": computes_text(found["facts"]),
            "updates": found["run"]["updates"],
            "bound": found["bound"],
            "efficiency": found["efficiency"],
            "dropped": found["run"]["dropped"],
            "costs": {part: cost["core"] for part, cost in found["costs"].items()},
            "notes": found["notes"],
            "settings": {
                "workers": ", ".join(worker["name"] for worker in found["run"]["workers"]),
                "lanes": found["facts"]["lanes"],
            },
            "versions": {"python": found["versions"]["python"], **found["versions"]["packages"]},
        }
        if work.target:
            started = time.perf_counter()
            own_command(
                "train",
                work,
                seconds,
                f"--seed={seed}",
                "--stop-at-return=475",
                f"--run-dir={folder}/run",
                f"--set=limits.seconds={seconds}",
            )
            result["command_seconds"] = time.perf_counter() - started
            ended = json.loads((Path(folder) / "run" / "summary.json").read_text())
            result["seconds_to_475"] = ended["seconds"] if ended["reason"].startswith("mean return") else None
    return result


def computes_text(facts: dict[str, Any]) -> str:
    """Return the data type, and what computes the networks where it is not numpy or
    torch."""
    text = "float32"
    for policy in facts["policies"].values():
        if facts["network"].startswith("nature") and policy.get("convolutions") == "bfloat16":
            text += ", convolutions bfloat16"
        native = os.environ.get("TIDEMILL_NATIVE") or policy.get("native", "off")
        if facts["network"].startswith("mlp") and native not in ("off", "auto"):  # undecided: numpy
            text += f", native core {native}"
    return text


def train_tidemill(work: Work, seconds: float, seed: int, folder: Path) -> Run:
    """One run whose steps are those that its metrics tell of, behind the warm-up of the
    other systems."""
    warm = min(2.0, seconds / 5)
    seen, done = list[tuple[int, float]](), threading.Event()  # env steps, and core-seconds by then

    def look() -> None:
        while not done.wait(pairs.LOOK):
            steps, at = pairs.so_far(folder / "run")
            if at < warm or (seen and steps <= seen[-1][0]):
                continue
            used = pairs.processor_seconds(os.getpid())
            if not seen or used > seen[-1][1]:  # less: its workers have ended
                seen.append((steps, used))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        own_command(
            "train",
            work,
            seconds,
            f"--seed={seed}",
            f"--run-dir={folder / 'run'}",
            f"--set=limits.seconds={warm + seconds}",
        )
    finally:
        done.set()
        watcher.join()
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    told = [
        (record["time/seconds"], record["step"], record["update"])
        for record in records
        if record.get("time/seconds", 0.0) >= warm
    ]
    if len(told) < 2:
        raise Failed("fewer than two records behind the warm-up: give it more seconds")
    (began, first, before), (ended, last, after) = told[0], told[-1]
    experiment = json.loads((folder / "run" / "config.json").read_text())
    workers = experiment["workers"]
    steps, used = (seen[-1][i] - seen[0][i] for i in (0, 1)) if seen else (0, 0.0)
    return {
        "steps": last - first,
        "core_seconds": used * (last - first) / steps if steps else 0.0,
        "computes": computes_text({"network": "mlp", "policies": experiment["policies"]}),
        "seconds": ended - began,
        "steps_per_second": (last - first) / (ended - began),
        "updates": after - before,
        "notes": [],
        "settings": {
            "workers": ("+" if experiment["together"] else ", ").join(workers),
            "lanes": workers["actor"]["lanes"],
        },
        "versions": {"python": platform.python_version(), "tidemill": importlib.metadata.version("tidemill")},
    }


def own_command(what: str, work: Work, seconds: float, *words: str) -> None:
    """Run one of Tidemill's commands on a work."""
    tool = Path(sys.executable).with_name("tidemill")
    cli = [str(tool)] if tool.exists() else [sys.executable, "-m", "tidemill.cli.main"]
    command([*cli, what, f"{HERE / 'works.py'}:{work.name}", *words], 6 * seconds + 240)


def measure(work: Work, runs: int, seconds: float, systems: tuple[str, ...], store: "Store") -> None:
    """Alternate: a run of each system, and again, until each has `runs`. What the store
    holds is not run again."""
    for number in range(1, runs + 1):
        for system in systems:
            if store.has(system, number):
                continue
            try:
                started = time.perf_counter()
                if system == TIDEMILL:
                    found = run_tidemill(work, seconds, number)
                elif system == INLINE:
                    found = run_tidemill(replace(WORKS[work.inline], target=False), seconds, number)
                else:
                    found = run_peer(system, work.name, seconds, number)
                found["took"] = time.perf_counter() - started
                found |= {"at": time.strftime("%Y-%m-%d %H:%M"), "commit": commit()}
                say(
                    f"{work.name} {number}/{runs} {SYSTEMS[system].title}: {found['steps_per_second']:,.0f} "
                    f"{work.unit}"
                )
            except (Failed, OSError, ValueError, KeyError, TypeError) as failure:
                # whatever it answered, the others are to be measured
                found = {
                    "failed": plain(
                        str(failure)
                        if isinstance(failure, Failed)
                        else f"{type(failure).__name__}: {failure}"
                    )
                }
                say(f"{work.name} {number}/{runs} {SYSTEMS[system].title} failed: {found['failed']}")
            store.add(system, number, found)


def commit() -> str:
    """Return the commit of what is measured, and whether its files differ from it; ""
    where git does not know."""
    git = ["git", "-C", str(ROOT)]
    try:
        words = (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", "src", "benchmarks"])
        found, changed = (
            subprocess.run(
                [*git, *each], capture_output=True, text=True, check=True, timeout=60
            ).stdout.strip()
            for each in words
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{found}-dirty" if changed else found


def expected(store: "Store", runs: int, systems: tuple[str, ...]) -> float:
    """Return the seconds that the runs will take that the `store` of their work does not
    have yet."""
    seconds, total = store.data["seconds"], 0.0
    for system in systems:
        left = sum(not store.has(system, number) for number in range(1, runs + 1))
        known = [run["took"] for run in store.data["runs"].get(system, {}).values() if "took" in run]
        own = system in (TIDEMILL, INLINE)
        around = min(2.0, seconds / 5) + AROUND[own]
        # bare costs: three or five parts, in six rounds, beside starts
        bare = 20 * min(seconds / 40, 1.0) if own else 0.0
        total += left * (statistics.median(known) if known else seconds + around + bare)
    return total


def ordinary(work: Work) -> bool:
    """Whether a work is run on AVX2 as well where none is named: all in float32 are."""
    return work.data_type == "float32"


def times_as_long(work: str) -> int:
    """Return by how much a run of that work is longer than others."""
    return 3 if work.startswith("pong") else 1


def minutes(seconds: float) -> str:
    """Return a time in words."""
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


class Store:
    """The runs of one work, in one JSON file that is written after each. Runs of other
    lengths, or of another machine, are not mixed: they are dropped."""

    def __init__(self, file: Path, seconds: float, keep: bool) -> None:
        self.file = file
        self.data: dict[str, Any] = {"seconds": seconds, "machine": machine(), "runs": {}}
        if file.exists():
            old = json.loads(file.read_text())
            if keep and (old["seconds"], old["machine"]) == (seconds, self.data["machine"]):
                self.data = old

    def has(self, system: str, number: int) -> bool:
        """Whether that run has a figure; failed ones are tried again."""
        return "steps_per_second" in self.data["runs"].get(system, {}).get(str(number), {})

    def add(self, system: str, number: int, run: Run) -> None:
        """Keep one run, at once."""
        self.data["runs"].setdefault(system, {})[str(number)] = run
        self.data["date"] = date.today().isoformat()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(self.data, indent=1) + "\n")
        part.replace(self.file)


def machine() -> dict[str, Any]:
    """Return what figures depend on besides versions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return {
        "processor": names[0] if names else platform.processor(),
        "features": features(),
        "cores": cores,
        "gpu": shutil.which("nvidia-smi") is not None,
    }


def features() -> str:
    """Return what the processor has for arithmetic, as far as programs are let use it."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return platform.machine()
    if "avx512f" in flags and os.environ.get("ONEDNN_MAX_CPU_ISA") == AVX2["ONEDNN_MAX_CPU_ISA"]:
        return "AVX2: AVX-512 and bfloat16 kept out"
    names = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "bfloat16", "asimd": "NEON"}
    return ", ".join(name for flag, name in names.items() if flag in flags)


# ---- report ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One system's line of a work's table."""

    system: System
    speeds: list[float]
    reached: list[float | None]
    good: list[Run]
    failures: list[str]

    @property
    def median(self) -> float:
        """Of steps/s; 0 when every run failed."""
        return statistics.median(self.speeds) if self.speeds else 0.0

    @property
    def per_core_second(self) -> float:
        """Median of the steps of a processor second; 0 where no run told it."""
        told = [run["steps"] / run["core_seconds"] for run in self.good if run.get("core_seconds", 0) > 0]
        return statistics.median(told) if told else 0.0

    @property
    def computes(self) -> str:
        """The data type, and what computes in it; empty where Tidemill's run did not tell
        it."""
        ours = self.system.package == "tidemill"
        return self.good[-1].get("computes", "" if ours else "float32") if self.good else ""


def lines_of(data: dict[str, Any]) -> list[Line]:
    """Return a line per system that was run, the fastest first."""
    lines = []
    for name, runs in data["runs"].items():
        good = [run for run in runs.values() if "failed" not in run]
        speeds = [run["steps_per_second"] for run in good]
        reached = [run.get("seconds_to_475") for run in good]
        lines.append(
            Line(
                SYSTEMS[name],
                speeds,
                reached,
                good,
                [run["failed"] for run in runs.values() if "failed" in run],
            )
        )
    return sorted(lines, key=lambda line: -line.median)


def row_of(work: Work, data: dict[str, Any]) -> str:
    """Return a work's row of README's table: Tidemill beside all that were measured with
    the same data type, the fastest first. Empty where there is nothing to compare."""
    own, others = None, []
    for line in lines_of(data):
        if line.system.name == TIDEMILL:
            own = line
        elif line.speeds and (work.data_type in line.computes or line.system.name == INLINE):
            others.append(line)
    if own is None or not own.speeds or not others:
        return ""
    beside = [f"{line.system.title} {speed_text(line)}: {own.median / line.median:.2f} ×" for line in others]
    facts = data["machine"]
    machine = f"{facts['cores']} × {facts['processor']}; {facts.get('features', '')}".rstrip("; ")
    cells = [work.title, own.computes or work.data_type, speed_text(own), "<br>".join(beside)]
    cells.append(f"{machine}; {data['date']}; {counts_text((own, *others))} × {data['seconds']:g} s")
    return "| " + " | ".join(cells) + " |"


def counts_text(lines: Sequence[Line]) -> str:
    """Return how many runs systems have: one number, or from the least to the most."""
    counts = sorted({len(line.speeds) for line in lines}) or [0]
    return " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))


def speed_text(line: Line) -> str:
    """Return steps/s, and in brackets those of a core-second, where runs told them."""
    of_core = f" ({figure(line.per_core_second)})" if line.per_core_second else ""
    return figure(line.median) + of_core


def overview(docs: Path) -> str:
    """Return README's table: a row for each work with all that the processor has, then
    those on AVX2."""
    head = ("work", "computes in", "Tidemill", "others, and how many times as fast Tidemill is", "on; runs")
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for leg in LEGS:
        for work in WORKS.values():
            file = docs / "results" / "bench" / f"{leg}{work.name}.json"
            if file.exists():
                rows.append(row_of(work, json.loads(file.read_text())))
    return "\n".join(filter(None, rows))


def same_settings(docs: Path) -> str:
    """Return the table of steps/s where all have the settings that Stable-Baselines3 has
    by default, by one lane and by eight; "" where nothing of it was measured."""
    systems = [SYSTEMS[name] for name in FEW]
    head = ("task", "lanes × rows", *(f"{system.title}, steps/s" for system in systems), "on")
    rows = []
    for task in dict.fromkeys(name.rpartition("_")[0] for name in WORKS if name.endswith("_one")):
        for name, lanes in ((f"{task}_one", "1 × 2,048"), (f"{task}_small", "8 × 256")):
            file = docs / "results" / "bench" / f"{name}.json"
            if not file.exists():
                continue
            data = json.loads(file.read_text())
            lines = {line.system.name: line for line in lines_of(data) if line.speeds}
            own = lines.get(TIDEMILL)
            cells = [WORKS[name].title.partition(",")[0], lanes]
            for system in systems:
                line = lines.get(system.name)
                ratio = f"; {own.median / line.median:.1f} ×" if line and own and line is not own else ""
                cells.append(f"{speed_text(line)}{ratio}" if line else "")
            facts = data["machine"]
            cells.append(f"{facts['cores']} × {facts['processor']}; {data['date']}")
            rows.append("| " + " | ".join(cells) + " |")
    if not rows:
        return ""
    text = (
        "### The same settings for all",
        "",
        "PPO with minibatches of 64 rows and 10 epochs over 2,048, as Stable-Baselines3 has them; MLP 64×64 "
        "tanh. Medians, in brackets steps of a core-second, then how many times as fast Tidemill is; each "
        "row's own table stands below, with its command.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    )
    return "\n".join([*text, *rows])


def section_of(work: Work, data: dict[str, Any], leg: str) -> str:
    """Return the text of a work: table, sentence, plot. `leg` is one of `LEGS`."""
    lines, seconds = lines_of(data), data["seconds"]
    own = next((line for line in lines if line.system.name == TIDEMILL), None)
    others = [line for line in lines if line.system.name not in (TIDEMILL, INLINE)]
    best = max((line.median for line in others), default=0.0)
    head = ["system", "version", "layout", "computes in", f"{work.unit}, median (lowest … highest)"]
    head += ["of a core-second"]
    head += ["Tidemill is"] * bool(own) + [
        "475 after, s of training: median (of how many runs)"
    ] * work.target
    runs = max((len(found) for found in data["runs"].values()), default=0)
    words = (
        f"{'--avx2 ' * bool(leg)}{work.name} --runs {runs} --seconds {seconds / times_as_long(work.name):g}"
    )
    asked = f"`python benchmarks/compare.py {words}`"
    all_runs = [run for found in data["runs"].values() for run in found.values()]
    commits = dict.fromkeys(run["commit"] for run in all_runs if run.get("commit"))
    of = f", of {', '.join(commits)}" if commits else ""
    text = [
        f"### {work.title}{', on AVX2' * bool(leg)}",
        "",
        f"{asked} · {seconds:g} s a run, {data['date']}{of}, {machine_text(data['machine'])}.",
        "",
    ]
    text += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for line in lines:
        latest = line.good[-1] if line.good else {}
        cells = [
            line.system.title,
            latest.get("versions", {}).get(line.system.package, "") if line.good else "",
            layout_text(latest.get("settings")),
            line.computes,
        ]
        if line.system.package == "torch" and cells[1]:
            cells[1] = f"torch {cells[1]}"
        cells.append(
            f"{figure(line.median)} ({figure(min(line.speeds))} … {figure(max(line.speeds))})"
            if line.speeds
            else "failed"
        )
        if line.failures:
            cells[-1] += (
                f"; {len(line.failures)} of {len(line.failures) + len(line.good)} runs failed: "
                f"{line.failures[-1]}"
            )
        cells.append(figure(line.per_core_second) if line.per_core_second else "")
        if own:
            cells.append(f"{own.median / line.median:.2f} ×" if line.median and line is not own else "")
        if work.target:
            cells.append(target_text(line.reached, seconds))
        text.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    if own and own.good and not work.bound and 0 < best < own.median:
        text += ["", f"Best other system: {own.median / best:.2f} times slower."]
    if own and own.good and work.bound:
        bounds, parts = [run["bound"] for run in own.good], [run["efficiency"] for run in own.good]
        text += [
            "",
            f"Bound {figure(statistics.median(bounds))}; efficiency {statistics.median(parts):.2f} "
            f"({min(parts):.2f} … {max(parts):.2f}).",
        ]
        if beyond := sum(part > 1 for part in parts):
            text[-1] += (
                f" The bound did not hold in {beyond} of {len(parts)} runs: what is above 1 is no figure."
            )
        text[-1] += (
            f" Best other system: {own.median / best:.2f} times slower." if best and own.median > best else ""
        )
        for line in lines:
            if line.system.name == INLINE and line.median:
                text[-1] += f" {own.median / line.median:.2f} of what inline inference makes ({work.inline})."
        frugal = max((line.per_core_second for line in others), default=0.0)
        if frugal and own.per_core_second:
            text[-1] += f" Of a core-second {own.per_core_second / frugal:.2f} × the most of any other."
        if took := [run["command_seconds"] for run in own.good if run.get("seconds_to_475") is not None]:
            text[-1] += f" 475 by the whole command: {statistics.median(took):.1f} s."
        notes = dict.fromkeys(note for run in own.good for note in run["notes"])
        text += [f"Note: {note}." for note in list(notes)[:3]]
    return "\n".join([*text, "", f"![{work.title}](results/bench/{leg}{work.name}.png)"])


def target_text(reached: list[float | None], seconds: float) -> str:
    """Return the median of the seconds to 475 over the runs that reached it, and how many
    did."""
    times = [value for value in reached if value is not None]
    if not times:
        return f"not in {seconds:g} s" if reached else ""
    return f"{statistics.median(times):.1f} ({len(times)} of {len(reached)})"


def layout_text(settings: dict[str, Any] | None) -> str:
    """Return a layout in words."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in (settings or {}).items())


def machine_text(facts: dict[str, Any]) -> str:
    """Return the machine in words."""
    features = f"; {facts['features']}" if "features" in facts else ""
    return f"{facts['cores']} cores ({facts['processor']}{features}), {'with' if facts['gpu'] else 'no'} GPU"


def figure(value: float) -> str:
    """Return steps/s as people write them."""
    return f"{value:,.0f}"


def plain(text: str) -> str:
    """Return a message without this machine's folders."""
    for folder, word in ((str(ROOT), "."), (str(Path.home()), "~"), (tempfile.gettempdir(), "TMP")):
        text = text.replace(folder, word)
    return text


def draw(work: Work, data: dict[str, Any], file: Path) -> None:
    """Draw steps/s per system: the median as a bar, each run as a dot, the bound as a
    line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = lines_of(data)[::-1]
    bounds = [run["bound"] for line in lines for run in line.good if "bound" in run]
    paper = Figure(figsize=(7.2, 1.15 + 0.46 * len(lines)), layout="constrained")
    FigureCanvasAgg(paper)
    axes = paper.subplots()
    places = range(len(lines))
    colours = ["#0b7285" if line.system.name == TIDEMILL else "#adb5bd" for line in lines]
    axes.barh(places, [line.median for line in lines], height=0.62, color=colours)
    widest = max(
        [line.median for line in lines]
        + [max(line.speeds) for line in lines if line.speeds]
        + bounds[:1]
        + [1.0]
    )
    for place, line in zip(places, lines, strict=True):
        axes.plot(
            line.speeds,
            [place] * len(line.speeds),
            "o",
            ms=3.2,
            mfc="white",
            mec="#343a40",
            mew=0.8,
            zorder=3,
        )
        end = max([line.median, *line.speeds], default=0)
        axes.text(
            end + 0.012 * widest,
            place,
            figure(line.median) if line.speeds else "failed",
            va="center",
            fontsize=9,
            color="#212529",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    if bounds:
        bound = statistics.median(bounds)
        axes.axvline(bound, color="#c92a2a", lw=1.2, ls=(0, (4, 3)), zorder=1)
        axes.text(
            bound,
            len(lines) - 0.5,
            f"bound {figure(bound)} ",
            color="#c92a2a",
            fontsize=8.5,
            ha="right",
            va="bottom",
        )
    axes.set_yticks(list(places), [line.system.title for line in lines], fontsize=9.5)
    axes.set_xlim(0, 1.16 * widest)
    axes.set_ylim(-0.5, len(lines) - 0.5)
    axes.xaxis.set_major_formatter(lambda value, _: figure(value))
    axes.tick_params(axis="x", labelsize=8.5, color="#adb5bd")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e9ecef", zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#adb5bd")
    axes.set_title(work.title, fontsize=11, loc="left", pad=16 if bounds else 8)
    axes.set_xlabel(
        f"{work.unit}, median of {counts_text(lines)} alternating runs of {data['seconds']:g} s", fontsize=9
    )
    paper.savefig(file, dpi=130)


INTRODUCTION = """## Beside other systems

Written by `make bench` ([compare.py](../benchmarks/compare.py), [peers](../benchmarks/peers)); edit nothing
between its marks. PPO (Sample Factory: APPO) with the same network (MLP 64×64 tanh, actor and critic apart;
Nature CNN), rollout 128, the same learning rate, γ, λ, clipping and coefficients, a quarter of a batch as
minibatch, nothing normalised but each batch's advantages; each system in its own environment of packages,
with the best layout found for it on two cores. A run ends after the same seconds of training behind a
warm-up; steps/s are env steps that entered training. Systems take turns: first run of each, second run of
each; runs that `--continue` added came later. Pong in bfloat16 is compared with a file in CleanRL's style
under torch's autocast, channels last; older tables of it show others in float32. PufferLib clips rewards at
±1 and draws whole segments. The reference behind "bound" keeps its buffers and cuts minibatches as
equal trainers do since November 22nd; an efficiency above 1 is no figure (the bound did not hold), and older
ones are too high. 475 is the mean of the last 100 training episodes. DQN and SAC: uniform draws, MLP 64×64
and 256×256 relu, targets as they were published, 8 environments, one process (Tidemill) or the better of one
and two threads of torch."""


def put(document: str, name: str, text: str) -> str:
    """Return `document` with the generated part `name` replaced, or added at its end."""
    begin, end = f"<!-- make bench: {name} -->", f"<!-- end of {name} -->"
    block = f"{begin}\n{text}\n{end}"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    return (
        pattern.sub(lambda _: block, document)
        if pattern.search(document)
        else document.rstrip() + "\n\n" + block + "\n"
    )


def parts_of(docs: Path) -> Iterator[tuple[str, str]]:
    """Yield every generated part, in order, and draw the plots."""
    results = docs / "results" / "bench"
    yield "introduction", INTRODUCTION
    if table := same_settings(docs):
        yield "same settings", table
    for work in WORKS.values():
        for leg in LEGS:
            file = results / f"{leg}{work.name}.json"
            if not file.exists():
                continue
            data = json.loads(file.read_text())
            draw(work, data, file.with_suffix(".png"))
            yield f"{leg}{work.name}", section_of(work, data, leg)
    file = results / "scripts.json"
    if file.exists():
        for words, found in json.loads(file.read_text()).items():
            text = found["output"] if "output" in found else f"failed: {found['failed']}"
            yield (
                words,
                f"### `python benchmarks/{words}`\n\n{found['date']}, {found['seconds']:.0f} "
                f"s\n\n```\n{text.strip()}\n```",
            )


def report(docs: Path) -> None:
    """Write docs/benchmarks.md's generated parts, README's table and the plots from the
    JSON files."""
    file = docs / "benchmarks.md"
    document = file.read_text() if file.exists() else "# Benchmarks\n"
    for name, text in parts_of(docs):
        document = put(document, name, text)
    file.write_text(document)
    readme = docs.parent / "README.md"
    if readme.exists() and "<!-- make bench: overview -->" in readme.read_text():
        readme.write_text(put(readme.read_text(), "overview", overview(docs)))


def known_scripts(docs: Path) -> dict[str, Run]:
    """Return what the other benchmarks have answered so far."""
    file = docs / "results" / "bench" / "scripts.json"
    found: dict[str, Run] = json.loads(file.read_text()) if file.exists() else {}
    return found


def run_scripts(docs: Path, scripts: Scripts) -> None:
    """Run other benchmarks one after the other."""
    file, found = docs / "results" / "bench" / "scripts.json", known_scripts(docs)
    for words in scripts:
        name, started = " ".join(words), time.perf_counter()
        say(f"python benchmarks/{name}")
        try:
            if not (HERE / words[0]).exists():
                raise Failed("there is no such script")
            entry: Run = {
                "output": plain(
                    command([sys.executable, str(HERE / words[0]), *words[1:]], SCRIPT_DEADLINE, **ONE_THREAD)
                )
            }
        except (Failed, OSError) as failure:
            entry = {"failed": plain(str(failure))}
            say(f"  failed: {failure}")
        found[name] = {**entry, "seconds": time.perf_counter() - started, "date": date.today().isoformat()}
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(found, indent=1) + "\n")
        part.replace(file)
        report(docs)


def foretell(
    stores: dict[str, Store], chosen: dict[str, tuple[str, ...]], runs: int, docs: Path, scripts: Scripts
) -> None:
    """Say how long all will take. `docs`: where other benchmarks, the `scripts`, are
    written."""
    works = sum(expected(store, runs, chosen[name]) for name, store in stores.items())
    others = {system for names in chosen.values() for system in names} - {TIDEMILL, INLINE}
    installing = INSTALLING * sum(not (ENVIRONMENTS / system / "ready").exists() for system in others)
    before = known_scripts(docs)
    left = sum(before.get(" ".join(words), {}).get("seconds", seconds) for words, seconds in scripts.items())
    parts = {"runs": works, "other benchmarks": left, "installing other systems": installing}
    told = ", ".join(f"{name} {minutes(seconds)}" for name, seconds in parts.items() if seconds)
    say(f"this will take about {minutes(sum(parts.values()))} ({told or 'all is there'})")


def say(text: str) -> None:
    """Tell the user what happens."""
    print(time.strftime("%H:%M:%S"), plain(text), flush=True)


def main() -> None:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "works",
        nargs="*",
        metavar="WORK",
        help=f"{', '.join(WORKS)}, or another benchmark, {', '.join(dict.fromkeys(w[0] for w in SCRIPTS))}; "
        "all of them when none is named",
    )
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), help="all of them by default")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="of training in each run, after its warm-up; Pong has three times as many",
    )
    parser.add_argument("--continue", dest="keep", action="store_true", help="keep finished runs")
    parser.add_argument("--quick", action="store_true", help="CartPole, Tidemill alone, one run of 1.5 s")
    parser.add_argument(
        "--avx2",
        action="store_true",
        help="keep AVX-512 and bfloat16 from all systems (avx2.py); works in float32 when none is named",
    )
    parser.add_argument("--report", action="store_true", help="only write tables and plots anew")
    parser.add_argument(
        "--docs",
        type=Path,
        default=ROOT / "docs",
        metavar="FOLDER",
        help="where benchmarks.md and results/bench/ are written",
    )
    given = parser.parse_args()
    if unknown := set(given.works) - {*WORKS, *(words[0] for words in SCRIPTS)}:
        parser.error(f"there is no work {', '.join(sorted(unknown))}: choose from {', '.join(WORKS)}")
    if given.runs < 1 or not 0 < given.seconds < 86400:
        parser.error("--runs and --seconds must be above 0, and a run shorter than a day")
    every = [name for name in WORKS if not given.avx2 or ordinary(WORKS[name])]
    works = [name for name in given.works if name in WORKS] if given.works else every
    systems = tuple(given.systems or SYSTEMS)
    runs = given.runs
    seconds = given.seconds
    if given.quick:
        works, systems, runs, seconds = ["cartpole"], (TIDEMILL,), 1, 1.5
    docs, leg = given.docs.resolve(), "avx2/" * given.avx2
    if given.avx2:
        os.environ.update(AVX2)
    if not given.report:
        stores = {}
        for name in works:
            stores[name] = Store(
                docs / "results" / "bench" / f"{leg}{name}.json", seconds * times_as_long(name), given.keep
            )
        chosen = {name: tuple(s for s in WORKS[name].systems if s in systems) for name in works}
        all_of_it = not (given.works or given.quick or given.avx2)
        done = [name for name, found in known_scripts(docs).items() if given.keep and "output" in found]
        scripts = {
            words: seconds
            for words, seconds in SCRIPTS.items()
            if (all_of_it or words[0] in given.works) and " ".join(words) not in done and not given.avx2
        }
        if given.avx2 and (others := [name for name in given.works if name not in WORKS]):
            say(f"not run in the leg on AVX2: {', '.join(others)}")
        foretell(stores, chosen, runs, docs, scripts)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run in hand ends with us, as at Ctrl-C
        try:
            for name, store in stores.items():
                measure(WORKS[name], runs, store.data["seconds"], chosen[name], store)
                report(docs)
            run_scripts(docs, scripts)
        except KeyboardInterrupt:
            report(docs)
            say("stopped; what was measured is kept, and the same command with --continue goes on from there")
            sys.exit(130)
    report(docs)
    say(f"written: {docs / 'benchmarks.md'}")


if __name__ == "__main__":
    main()
