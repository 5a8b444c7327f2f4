"""Measures an experiment's bare costs, the bound that they set on this machine, and how
near to it the experiment runs."""

import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from select import select
from statistics import median
from time import monotonic, perf_counter
from typing import IO, Any

import psutil

from tidemill.algorithms.ppo import PPO
from tidemill.api.experiment import Experiment
from tidemill.api.limits import Limits
from tidemill.api.worker import WorkerConfig
from tidemill.bench.advice import Advice, Kind, WorkerShares, advise
from tidemill.core.clock import PLACES
from tidemill.core.config import encode
from tidemill.core.cores import cores as available_cores
from tidemill.core.errors import ConfigError, Interrupted, RunError
from tidemill.core.killed_processes import kill_session
from tidemill.core.temporary_folders import temporary_folder
from tidemill.core.user_code_loading import refuse_while_loading
from tidemill.launchers.measuring import order_of, start
from tidemill.metrics.json_lines import read_metrics
from tidemill.nets.choose_device import choose_device
from tidemill.run.run_control import RunControl
from tidemill.run.source_info import versions
from tidemill.run.start_remarks import numpy_instead
from tidemill.training.train import train
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.policy import PolicyWorkers
from tidemill.workers.trainer_config import TrainerConfig

PARTS = ("env", "infer", "train")
ROUNDS = 3  # before the run, and as many after it: what the machine does meanwhile is in the medians
# seconds in which a copy must answer: building an environment, or a second of each part
# with a slow step
QUIET = 180.0
MOST_DROPPED = 0.01  # share of steps; more, and steps/s is not what the experiment is meant to reach
MOST_LOAD = 1.15  # wall seconds per processor second of computing; more, and somebody else uses the cores


@dataclass(frozen=True)
class Cost:
    """What one unit of a part costs, in the cheapest of the ways in which the reference
    does it: medians over copies and rounds.

    core: processor seconds per unit: env step, row acted on, row and epoch
    wall: seconds per unit that passed in one copy
    each: every single measurement, core
    ways: way → core, of all ways where there are several
    """

    core: float
    wall: float
    each: tuple[float, ...]
    ways: dict[str, float]


@dataclass(frozen=True)
class Run:
    """What the run reached after its start-up. `seconds` and `updates` are those
    measured; shares are averages over them. `busy_cores`: processor seconds per second of
    all its processes, None where the run was too short to tell."""

    steps_per_second: float
    seconds: float
    updates: int
    dropped: float
    workers: tuple[WorkerShares, ...]
    busy_cores: float | None = None


@dataclass(frozen=True)
class Bench:
    """A bench is all that `bench` found. `facts` says what was measured (see
    `reference.parts_of`), `notes` what a reader must know besides."""

    experiment: str
    cores: int
    facts: dict[str, Any]
    costs: dict[str, Cost]
    bound: float
    run: Run
    efficiency: float
    advice: Advice
    notes: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """Return everything as plain data, with the versions of what it depends on."""
        return {**asdict(self), "versions": versions()}


def bench(
    experiment: Experiment,
    source: Path | None = None,
    seconds: float = 20.0,
    tell: Callable[[str], None] = lambda _: None,
) -> Bench:
    """Measure `experiment` for `seconds` on processes, between two halves of the
    reference; `source` is the file that it came from.

    Raises `ConfigError` where there is nothing to compare with, `RunError` when the run
    fails or is too short.
    """
    refuse_while_loading("bench(…)")
    check_seconds(seconds)
    experiment.check()
    for remark in numpy_instead(experiment):
        tell(f"note: {remark}")
    cores = available_cores()
    piece = min(max(seconds / 40, 0.02), 1.0)
    with _Copies(experiment, source, cores) as copies:
        tell(f"bare costs, one copy on each of {cores} core{'s' * (cores > 1)} …")
        measured = [copies.round(piece) for _ in range(ROUNDS)]
        tell(f"{experiment.name} for {seconds:g} s …")
        run = run_for(experiment, source, seconds)
        tell("bare costs again …")
        measured += [copies.round(piece) for _ in range(ROUNDS)]
        facts = {
            **copies.facts,
            "policies": {name: encode(policy) for name, policy in experiment.policies.items()},
        }
    joined = {part: [answer for found in measured for answer in found[part]] for part in facts["parts"]}
    costs = {
        part: cost_of({name[len(part) + 1 :]: a for name, a in joined.items() if name.split()[0] == part})
        for part in PARTS
    }
    bound = bound_of(
        cores, {part: cost.core for part, cost in costs.items()}, facts["rows_per_step"], facts["epochs"]
    )
    efficiency = run.steps_per_second / bound
    advice = advise(run.workers, facts["elsewhere"] or in_threads(experiment))
    notes = (*beyond(efficiency), *notes_of(experiment, facts, costs, run))
    return Bench(experiment.name, cores, facts, costs, bound, run, efficiency, advice, notes)


def check_seconds(seconds: float) -> None:
    """Raise `ConfigError` where a run cannot be measured for so long."""
    if not 0 < seconds < 86400:
        raise ConfigError(f"--seconds {seconds:g} must be above 0, and less than a day")


def bound_of(cores: int, core_seconds: dict[str, float], rows_per_step: int, epochs: int) -> float:
    """Return the env steps/s that `cores` could make if they did nothing but what must be
    done."""
    return cores / (
        core_seconds["env"] + rows_per_step * (core_seconds["infer"] + epochs * core_seconds["train"])
    )


def cost_of(ways: dict[str, Sequence[dict[str, float]]]) -> Cost:
    """Return the cost of a unit from what the copies answered, by way."""
    each = {
        way: tuple(answer["core"] / max(answer["units"], 1) for answer in answers)
        for way, answers in ways.items()
    }
    core = {way: median(costs) for way, costs in each.items()}
    best = min(core, key=lambda way: core[way])
    wall = median(answer["wall"] / max(answer["units"], 1) for answer in ways[best])
    return Cost(core[best], wall, each[best], core if len(core) > 1 else {})


class _Copies:
    """A reference process per core, doing what they are told at the same time."""

    def __init__(self, experiment: Experiment, source: Path | None, cores: int) -> None:
        self._order = order_of(experiment, source)
        self._cores = cores
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[str]] = []  # one each: they may raise at the same time
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> "_Copies":
        for _ in range(self._cores):
            log = tempfile.TemporaryFile("w+", errors="replace")
            self._logs.append(log)
            process = start("tidemill.bench.reference", log)
            self._processes.append(process)
        try:
            (self.facts, *_) = self._ask(self._order)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            kill_session(process.pid)
            process.communicate()
        for log in self._logs:
            log.close()

    def round(self, seconds: float) -> dict[str, list[dict[str, float]]]:
        """Let all copies do each part for `seconds`; return part → their answers."""
        return {part: self._ask(f"{seconds} {part}\n".encode()) for part in self.facts["parts"]}

    def _ask(self, line: bytes) -> list[dict[str, Any]]:
        answers, deadline = [], monotonic() + QUIET
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it died: it will not answer
        for process, log in zip(self._processes, self._logs, strict=True):
            assert process.stdout is not None
            if not select([process.stdout], [], [], max(deadline - monotonic(), 0))[0]:
                raise RunError(
                    f"{QUIET:g} s after it was told what to measure, the process that measures bare costs "
                    "has not answered: a step or a reset of the environment does not return, or it takes "
                    "longer to build than that"
                )
            text = process.stdout.readline()
            if not text:
                log.seek(0)
                # of a traceback: what was raised
                (*_, why) = ["no word of why", *filter(None, map(str.strip, log))]
                raise RunError(
                    f"the process that measures bare costs ended with status {process.wait()}: {why[:500]}"
                )
            answers.append(json.loads(text))
            if "error" in answers[-1]:
                raise ConfigError(answers[-1]["error"])
        return answers


# updates, which a run does not reach: learning rates that fall with the run stay as they
# are at its start
ENDLESS = 10**12


def run_for(experiment: Experiment, source: Path | None, seconds: float) -> Run:
    """Run `experiment`, changed in nothing but its limits, for `seconds` after a
    start-up, and return what it reached. Raises `Interrupted` when a signal ends it."""
    warm = min(2.0, seconds / 5)
    limited = experiment.replace(limits=Limits(seconds=seconds + warm, updates=ENDLESS))
    used: list[tuple[float, float]] = []

    def look(record: dict[str, float], _: RunControl) -> None:
        if record.get("time/seconds", 0) >= warm and (
            not used or perf_counter() - used[-1][0] >= min(seconds / 10, 1.0)
        ):
            used.append((perf_counter(), processor_seconds()))

    with temporary_folder() as folder:
        place = Path(folder) / "run"
        result = train(limited, run_dir=place, source=source, quiet=True, layout="given", on_update=look)
        if result.summary["status"] == "interrupted":
            raise Interrupted(result.summary["reason"])
        # updates: evaluations have records of their own
        records = [r for r in read_metrics(result.folder) if "time/seconds" in r]
    steady = [r for r in records if r["time/seconds"] >= warm]
    run = run_of(experiment, steady if len(steady) > 1 else records)
    if len(used) < 2:
        return run
    (first, before), (last, after) = used[0], used[-1]
    return replace(run, busy_cores=(after - before) / (last - first))


def processor_seconds() -> float:
    """Return the processor seconds so far of this process and all that descend from
    it."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            total += sum(process.cpu_times()[:4])
    return total


def run_of(experiment: Experiment, records: Sequence[dict[str, float]]) -> Run:
    """Return what the records say from the first to the last."""
    if len(records) < 2:
        raise RunError(
            "fewer than two updates were finished, so that there is no speed to tell; give it longer: "
            "--seconds N"
        )
    first, last = records[0], records[-1]
    seconds = last["time/seconds"] - first["time/seconds"]
    steps = last["step"] - first["step"]
    dropped = (last["dropped"] - first["dropped"]) * _steps_per_sample(experiment)
    spans = [(b, b["time/seconds"] - a["time/seconds"]) for a, b in pairwise(records)]
    configs = dict(experiment.members())
    workers = []
    for names in experiment.processes():
        told = [(r, span) for r, span in spans if all(f"time/{name}/wait" in r for name in names)]
        total = sum(span for _, span in told)
        if not total:
            continue
        shares = {
            place: sum(r[f"time/{name}/{place}"] * span for r, span in told for name in names) / total
            for place in PLACES
        }
        # one's wait is the other's turn
        shares["wait"] = max(0.0, 1 - sum(share for place, share in shares.items() if place != "wait"))
        workers.append(
            WorkerShares("+".join(names), kind_of(configs[names[0]]) if len(names) == 1 else "turns", shares)
        )
    return Run(
        steps / seconds,
        seconds,
        int(last["update"] - first["update"]),
        dropped / max(dropped + steps, 1),
        tuple(workers),
    )


def _steps_per_sample(experiment: Experiment) -> float:
    """Return the env steps of a sample: dropped ones are counted in samples."""
    actors = experiment.groups(ActorConfig).values()
    sizes = [c.lanes * s.sample_steps for c in actors for s in c.agents if s.samples]
    return sum(sizes) / max(len(sizes), 1)


def kind_of(config: WorkerConfig) -> Kind:
    """Return which side of the run a worker is on."""
    if isinstance(config, ActorConfig):
        return "actor"
    if isinstance(config, PolicyWorkers):
        return "policy"
    return "trainer" if config.limited else "other"


def in_threads(experiment: Experiment) -> bool:
    """Return whether lanes step in threads of their own, so that an actor which waits may
    be waiting for its environment."""
    return any(
        bool(getattr(config.environment, "threads", 0)) for config in experiment.groups(ActorConfig).values()
    )


def beyond(efficiency: float) -> tuple[str, ...]:
    """Return what to say of an efficiency above 1: nothing of one that is not."""
    if efficiency <= 1:
        return ()
    return (
        "the bound did not hold: bare costs were measured while the machine was slower, or are too dear; the "
        "efficiency is no figure",
    )


def notes_of(
    experiment: Experiment, facts: dict[str, Any], costs: dict[str, Cost], run: Run
) -> tuple[str, ...]:
    """Return what a reader of the figures must know besides them."""
    notes = []
    if run.dropped >= MOST_DROPPED:
        notes.append(
            f"{run.dropped:.1%} of the steps were dropped as too old, and are not in steps/s; 1 % is the "
            "most that a fair figure may have"
        )
    load = max(costs[part].wall / max(costs[part].core, 1e-12) for part in ("infer", "train"))
    if load > MOST_LOAD:
        notes.append(
            f"the machine was busy with something else: computing took {load:.2f} times its processor time, "
            "so do not trust these figures"
        )
    elif costs["env"].wall > 2 * costs["env"].core:
        notes.append(
            f"the environment waits: a step takes {costs['env'].wall * 1e6:,.0f} µs, of which "
            f"{costs['env'].core * 1e6:,.1f} on a core; the bound knows cores alone"
        )
    devices = {str(getattr(config, "device", "cpu")) for config in experiment.workers.values()}
    if any(choose_device(device, 0) != "cpu" for device in devices):
        notes.append(
            "part of this runs on a GPU; the costs, and the bound that they make, are those of cores alone"
        )
    if facts["network"] == "own":
        notes.append(
            "the reference has no network like this policy's: inference and training are measured with the "
            "policy's own code"
        )
    others = sorted(
        {
            type(c.algorithm).__name__
            for c in experiment.groups(TrainerConfig).values()
            if not isinstance(c.algorithm, PPO)
        }
    )
    if others:
        notes.append(
            f"the reference knows PPO alone: {', '.join(others)} is counted as {facts['epochs']} "
            f"epoch{'s' * (facts['epochs'] > 1)} of that"
        )
    if len(experiment.groups(ActorConfig)) + sum(c.limited for c in experiment.workers.values()) > 2:
        notes.append("the bound is that of the first group of actors and its trainer alone")
    if run.updates < 5:
        notes.append(
            f"only {run.updates} updates were measured; {ceil(10 * run.seconds / run.updates)} s would give "
            "ten"
        )
    return tuple(notes)
