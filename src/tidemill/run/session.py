"""The Python front: `train` an experiment, `resume` a run."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import strftime
from typing import Any

from rich.console import Console

from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Job, Launcher
from tidemill.core.checkpoint import read_newest
from tidemill.core.errors import ConfigError, RunError, TidemillError, did_you_mean
from tidemill.launchers.inline import InlineLauncher
from tidemill.launchers.processes import ProcessesLauncher
from tidemill.launchers.threads import ThreadsLauncher
from tidemill.run.control import ControlSocket
from tidemill.run.controller import Controller
from tidemill.run.folder import SUMMARY, RunFolder, Source
from tidemill.run.live import Snapshot, View, WorkerView, make_view
from tidemill.run.metrics import MetricsWriter

LAUNCHERS: dict[str, Callable[[], Launcher]] = {"inline": InlineLauncher, "threads": ThreadsLauncher, "processes": ProcessesLauncher}


@dataclass(frozen=True)
class Result:
    """How a run ended: its folder, and what its summary.json says (status, env_steps, seconds, steps_per_second, updates, mean_return, …)."""

    folder: Path
    summary: dict[str, Any]


def train(
    experiment: Experiment,
    *,
    launch: str = "processes",
    run_dir: str | Path | None = None,
    source: str | Path | None = None,
    quiet: bool = False,
) -> Result:
    """Train `experiment` to its limits and return how it ended.

    launch    "processes", "threads" or "inline"
    run_dir   the run's folder; by default a new one under ./runs
    source    the file that defines the experiment's own classes; by default that of the main script, where it defines any
    quiet     show nothing

    Raises `ConfigError` or `RunError`. Ctrl-C and SIGTERM end the run cleanly, with a final checkpoint (status "interrupted").
    """
    launcher = make_launcher(launch)
    experiment.check()
    path = Path(run_dir) if run_dir is not None else _new_folder(experiment)
    known = Source.of(Path(source)) if source is not None else _own_source(experiment)
    existed = path.exists()
    folder = RunFolder.create(path, experiment, known)
    try:
        return _run(folder, Job(experiment, known.file if known else None, str(path.resolve())), launcher, None, quiet)
    except TidemillError:
        if not existed and not folder.has_checkpoints() and not any((path / "logs").glob("*.log")):
            shutil.rmtree(path, ignore_errors=True)  # it never began
        raise


def resume(
    run: str | Path, *, launch: str = "processes", file: str | Path | None = None, limits: dict[str, Any] | None = None, quiet: bool = False
) -> Result:
    """Go on with a run from its last good checkpoint: weights, optimiser, normalisers, counters.

    file     the experiment's file, when it has changed since
    limits   limits to change, e.g. ``{"steps": 2_000_000}``
    """
    launcher = make_launcher(launch)
    folder = RunFolder.open(Path(run))
    experiment, source = folder.experiment(Path(file) if file is not None else None)
    if limits:
        experiment = experiment.replace(limits=experiment.limits.replace(**limits))
    policies = [p.stream for c in experiment.workers.values() for p in c.ports() if p.role == "publish"]
    names, steps = set(), 0
    for policy in policies:
        path, _, facts, warnings = read_newest(folder.checkpoints(policy))
        names.add(path.name)
        steps = max(steps, int(facts["steps"]))
        for warning in warnings:
            print(f"warning: {warning}; going on from {path}", file=sys.stderr)
    if len(names) != 1:
        raise RunError(f"the policies' newest checkpoints are of different updates: {', '.join(sorted(names))}")
    folder.lock()
    job = Job(experiment, source.file if source else None, str(folder.path.resolve()), names.pop())
    return _run(folder, job, launcher, steps, quiet)


def make_launcher(name: str) -> Launcher:
    """Return the launcher called `name`."""
    if name not in LAUNCHERS:
        raise ConfigError(f'--launch {name}: no launcher is called "{name}"; {did_you_mean(name, LAUNCHERS)}')
    return LAUNCHERS[name]()


def _run(folder: RunFolder, job: Job, launcher: Launcher, resume_at: int | None, quiet: bool) -> Result:
    metrics = MetricsWriter(folder.path, resume_at)
    control = ControlSocket(folder.path)
    view = None if quiet else make_view(Console())
    shown = 0

    def watch(controller: Controller) -> None:
        nonlocal shown
        _obey(control, controller)
        for notice in controller.notices[shown:]:
            print(f"note: {notice}", file=sys.stderr)
        shown = len(controller.notices)
        if view is not None:
            view.show(_snapshot(controller))

    controller = Controller(job, launcher, metrics.write, watch)
    error: TidemillError | None = None
    try:
        if view is None:
            controller.run()
        else:
            with view:
                controller.run()
    except TidemillError as caught:
        error = caught
    finally:
        metrics.close()
        control.close()
        summary = _summary(controller, error)
        folder.write(SUMMARY, summary)
        folder.unlock()
    if error is not None:
        for notice in controller.notices[shown:]:
            (folder.path / "logs").mkdir(exist_ok=True)
            with (folder.path / "logs" / "traceback.log").open("a") as log:
                log.write(notice + "\n")
        raise error
    if view is not None:
        _show_end(view, folder.path, summary)
    return Result(folder.path, summary)


def _summary(controller: Controller, error: TidemillError | None) -> dict[str, Any]:
    progress = controller.progress
    status = "failed" if error is not None else "interrupted" if controller.interrupted else "completed"
    return {
        "status": status,
        "reason": str(error) if error is not None else controller.reason,
        "env_steps": progress.steps,
        "seconds": round(progress.seconds, 3),
        "steps_per_second": round(progress.steps / progress.seconds, 1) if progress.seconds else 0.0,
        "updates": progress.updates,
        "mean_return": progress.mean_return,
        "episodes": progress.episodes,
        "dropped": progress.dropped,
    }


def _obey(control: ControlSocket, controller: Controller) -> None:
    for command, connection in control.commands():
        match command:
            case "pause":
                controller.pause()
                control.reply(connection, "paused")
            case "start":
                controller.resume()
                control.reply(connection, "running")
            case "stop":
                controller.stop("tidemill stop")
                control.reply(connection, "stopping: a final checkpoint is written")
            case _:
                control.reply(connection, f'unknown command "{command[:40]}"')


def _snapshot(controller: Controller) -> Snapshot:
    progress = controller.progress
    return Snapshot(
        run=controller.job.experiment.name,
        seconds=progress.seconds,
        steps=progress.steps,
        limit=controller.job.experiment.limits.steps,
        steps_per_second=progress.steps / max(progress.seconds, 1e-9),
        mean_return=progress.mean_return,
        episodes=progress.episodes,
        updates=progress.updates,
        lag=progress.metrics.get("lag/mean"),
        dropped=progress.dropped,
        workers=tuple(WorkerView(name, m.state.value, m.shares, m.rate) for name, m in controller.members.items()),
        state="paused" if controller.paused else "running",
    )


def _show_end(view: View, path: Path, summary: dict[str, Any]) -> None:
    run = _display(path)
    commands = {
        "evaluate": f"tidemill eval {run}",
        "watch it play": f"tidemill play {run} --video {path.name}.mp4",
        "plot": f"tidemill plot {run} --out {path.name}.png",
        "go on": f"tidemill resume {run} --max-steps N",
    }
    view.end({**summary, "folder": run}, commands)


def _display(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _new_folder(experiment: Experiment) -> Path:
    stem = f"{experiment.name}-s{experiment.seed}-{strftime('%Y%m%d-%H%M%S')}"[:60]
    path, number = Path("runs") / stem, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{stem}-{number}"
    return path


def _own_source(experiment: Experiment) -> Source | None:
    """The main script, when classes of the experiment are defined in it (worker processes must load it)."""
    classes = {type(c) for c in (*experiment.policies.values(), *experiment.workers.values())}
    for worker in experiment.workers.values():
        classes |= {type(value) for value in vars(worker).values()}
    files = {sys.modules[c.__module__].__file__ for c in classes if c.__module__ == "__main__" or c.__module__.startswith("tidemill_file_")}
    files.discard(None)
    return Source.of(Path(str(files.pop()))) if files else None
