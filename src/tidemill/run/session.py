"""The Python front: `train` an experiment, `resume` a run."""

import sys
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from time import strftime
from typing import Any

from rich.console import Console
from rich.text import Text

from tidemill.api.experiment import Experiment, Limits
from tidemill.api.launcher import Job, Launcher
from tidemill.core.checkpoint import checkpoints, read_newest
from tidemill.core.config import Config, decode, encode
from tidemill.core.errors import CheckpointError, ConfigError, RunError, TidemillError, did_you_mean
from tidemill.launchers.inline import InlineLauncher
from tidemill.launchers.processes import ProcessesLauncher, allow_descriptors
from tidemill.launchers.threads import ThreadsLauncher
from tidemill.run.arrange import AUTO, LAYOUT, arrange
from tidemill.run.control import ControlSocket
from tidemill.run.controller import Controller
from tidemill.run.folder import CONFIG, MEMORY, SUMMARY, RunFolder, Source, command
from tidemill.run.interrupts import BrokenOff, Interrupts, signal_name
from tidemill.run.live import LimiterView, Snapshot, View, WorkerView, evaluations_of, make_view
from tidemill.run.metrics import MetricsWriter, read_metrics
from tidemill.run.plan import check_processes
from tidemill.run.progress import Progress
from tidemill.workers.actor import Actors
from tidemill.workers.trainer_config import Trainer

LAUNCHERS: dict[str, Callable[[], Launcher]] = {"inline": InlineLauncher, "threads": ThreadsLauncher, "processes": ProcessesLauncher}

LOGS = "logs"
TRACEBACKS = f"{LOGS}/traceback.log"


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
    layout: str = AUTO,
    fixed: Collection[str] = (),
) -> Result:
    """Train `experiment` to its limits and return how it ended.

    launch    "processes", "threads" or "inline"
    run_dir   the run's folder; by default a new one under ./runs
    source    the file that defines the experiment's own classes; by default that of the main script, where it defines any
    quiet     show nothing
    layout    how many actors and trainers there are, and so on: "auto" has it follow from measured costs where the experiment says nothing of it
              (processes only), "measure" measures them anew, "given" takes the experiment as it is; or a layout's text, as it was shown
    fixed     paths of settings that are not to be changed, e.g. "workers.actor.lanes"

    Raises `ConfigError` or `RunError`. Ctrl-C and SIGTERM end the run cleanly, with a final checkpoint (status "interrupted").
    """
    launcher = make_launcher(launch)
    decode(Experiment, encode(experiment))  # what workers will do: raises for what they could not read
    experiment.check()
    path = Path(run_dir) if run_dir is not None else new_folder(experiment)
    known = Source.of(Path(source)) if source is not None else _own_source(experiment)
    with Interrupts() as interrupts:
        try:
            with interrupts.at_once():
                arranged = arrange(experiment, Path(known.file) if known else None, layout, fixed, isinstance(launcher, ProcessesLauncher))
        except BrokenOff:
            return Result(path, _never_began(signal_name(interrupts.first)))
        experiment = arranged.experiment
        experiment.check()
        _check_processes(launcher, experiment)
        if arranged.told and not quiet:
            Console().print(Text(arranged.told), soft_wrap=True)
        folder = RunFolder.create(path, experiment, known)
        if arranged.told:
            with suppress(OSError):  # a full disk does not stop training
                folder.write(LAYOUT, arranged.plain())
        job = Job(experiment, known.file if known else None, str(path.resolve()))
        return _run(folder, job, launcher, interrupts, None, quiet)


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
    experiment = _drop_reached_mark(folder, experiment, limits or {})
    _check_processes(launcher, experiment)
    with Interrupts() as interrupts:
        folder.lock()
        try:
            folder.tidy()
            name, progress, unfinished = _go_on_from(folder, experiment)
            _refuse_reached(folder, experiment, progress, unfinished)
            folder.write(CONFIG, encode(experiment))
            folder.write_source(source, encode(experiment))
        except OSError as error:
            folder.unlock()
            raise RunError(f"run folder {folder.path} cannot be written: {error.strerror}; free the disk, or let yourself write there") from error
        except BaseException:
            folder.unlock()
            raise
        job = Job(experiment, source.file if source else None, str(folder.path.resolve()), name)
        return _run(folder, job, launcher, interrupts, progress, quiet)


def _check_processes(launcher: Launcher, experiment: Experiment) -> None:
    if isinstance(launcher, ProcessesLauncher):
        check_processes(len(experiment.processes()))
        allow_descriptors(experiment)


def _trained(experiment: Experiment) -> list[str]:
    return [port.stream for config in experiment.workers.values() for port in config.ports() if port.role == "publish"]


def _go_on_from(folder: RunFolder, experiment: Experiment) -> tuple[str, Progress, bool]:
    """Return the newest good checkpoint's name, how far the run was then, and whether its last iteration or phase was still to be ended. Damaged
    ones are renamed, so that they are never counted again."""
    progress, name, unfinished = Progress(), "", False
    for policy in _trained(experiment):
        if not folder.has_checkpoints([policy]):
            raise CheckpointError(
                f'no checkpoint of policy "{policy}" in {folder.checkpoints(policy)}: the run was killed before its trainer wrote the first one '
                "(checkpoint_seconds), so that there is nothing to go on from; train anew, in another folder"
            )
        path, _, facts, warnings = read_newest(folder.checkpoints(policy))
        newer = checkpoints(path.parent)
        for damaged in newer[newer.index(path) + 1 :]:
            damaged.rename(damaged.with_name(f"damaged-{damaged.name}"))
        for warning in warnings:
            print(f"warning: {warning}; going on from {path}", file=sys.stderr)
        try:
            progress.steps = max(progress.steps, int(facts["steps"]))
            progress.updates = max(progress.updates, int(facts["updates"]))
            progress.dropped += int(facts["dropped"])
            progress.seconds = max(progress.seconds, float(facts["seconds"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint {path} does not say how far its run was ({error!r}); it is of another version or kind") from None
        name, unfinished = path.name, unfinished or "iteration_end" in facts or "finishing" in facts
    with suppress(RunError):  # no metrics: the run ended before its first update
        before = [r for r in read_metrics(folder.path) if r.get("step", 0) <= progress.steps and r.get("update", 0) <= progress.updates]
        progress.episodes = max((int(r.get("episodes", 0)) for r in before), default=0)
        stage = max((int(r.get("curriculum/stage", 1)) for r in before), default=1)
        progress.stage = max(min(stage, len(experiment.curriculum)), 1) - 1
    return name, progress, unfinished


def _drop_reached_mark(folder: RunFolder, experiment: Experiment, given: Collection[str]) -> Experiment:
    """Return the experiment without the mark that its run ended by reaching, unless another is `given`: it would end at once again."""
    limits = experiment.limits
    summary: Any = {}
    with suppress(RunError):  # none: the run was killed
        summary = folder.read(SUMMARY)
    reason = str(summary.get("reason")) if isinstance(summary, dict) and summary.get("status") == "completed" else ""
    if reason.startswith("mean return ") and limits.mean_return is not None and "mean_return" not in given:
        mark, another, without = f"a mean return of {limits.mean_return:g}", "--stop-at-return X", limits.replace(mean_return=None)
    elif limits.until and reason == limits.until and "until" not in given:
        mark, another, without = limits.until, "limits={'until': …} (Python)", limits.replace(until="")
    else:
        return experiment
    if without == Limits(window=limits.window):
        raise RunError(
            f"{folder.path} has already reached its mark, {mark}, and has no other limit; "
            f"go further with a higher one: {another}, or with --max-steps N"
        )
    print(f"note: the run has reached its mark, {mark}, and goes on without one ({another} sets another)", file=sys.stderr)
    return experiment.replace(limits=without)


def _refuse_reached(folder: RunFolder, experiment: Experiment, progress: Progress, unfinished: bool) -> None:
    for setting, option, done in (
        ("steps", "--max-steps N", progress.steps),
        ("updates", "limits={'updates': N} (Python)", progress.updates),
        ("seconds", "limits={'seconds': N} (Python)", progress.seconds),
    ):
        limit = getattr(experiment.limits, setting)
        if limit is not None and done >= limit and not (setting == "steps" and unfinished):
            raise RunError(
                f"{folder.path} has already reached its limit of {limit:,} {setting} ({done:,.0f}); go further with a higher one: {option}"
            )


def make_launcher(name: str) -> Launcher:
    """Return the launcher called `name`."""
    if name not in LAUNCHERS:
        raise ConfigError(f'--launch {name}: no launcher is called "{name}"; {did_you_mean(name, LAUNCHERS)}')
    return LAUNCHERS[name]()


def _run(folder: RunFolder, job: Job, launcher: Launcher, interrupts: Interrupts, resumed: Progress | None, quiet: bool) -> Result:
    """Run the job in its locked folder, and unlock it. A new run that never began leaves nothing; one that failed before an update, its logs."""
    (folder.path / SUMMARY).unlink(missing_ok=True)
    console = Console()
    view = None if quiet else make_view(console)
    planned = False
    shown, lost, kept = 0, resumed is None, ""  # lost: nothing is there that is worth keeping, but for what is called kept

    def watch(controller: Controller) -> None:
        nonlocal shown, planned
        if controller.plan is not None and not planned:
            planned = True
            with suppress(OSError):  # a full disk does not stop training
                folder.write(MEMORY, controller.plan)
        _obey(control, controller)
        shown = _show_notices(controller, shown, None if view is None else console)
        if view is not None:
            view.show(_snapshot(controller))

    with ExitStack() as stack:
        stack.callback(lambda: folder.discard(kept) if lost else folder.unlock())
        metrics = stack.enter_context(closing(MetricsWriter(folder.path, *((resumed.steps, resumed.updates) if resumed else ()))))
        control = stack.enter_context(closing(ControlSocket(folder.path)))
        controller = Controller(job, launcher, metrics.write, watch, interrupts, resumed)
        error: BaseException | None = None
        try:
            with view or nullcontext():
                controller.run()
                if view is not None and controller.began:
                    view.show(_snapshot(controller))  # what was told last
        except BaseException as caught:
            error = caught
        metrics.close()
        folder.tidy()
        status = "failed" if error is not None else "interrupted" if controller.interrupted else "completed"
        reason = (str(error) or type(error).__name__) if error is not None else controller.reason
        summary = _summary(controller.progress, status, reason)
        failed_first = error is not None and not controller.progress.updates
        lost = resumed is None and (failed_first or not controller.began)
        kept = LOGS if controller.began else ""
        try:
            if controller.began or resumed is not None:
                _write_tracebacks(folder, controller)
            if not lost:
                folder.write(SUMMARY, summary)
        except OSError as broken:
            text = f"{broken.filename or folder.path} cannot be written: {broken.strerror}; free the disk, or let yourself write there"
            if error is None:
                error = RunError(text)
            else:  # which is the first cause
                controller.notices.append(text)
    _show_notices(controller, shown, None if view is None else console)
    if isinstance(error, TidemillError):
        raise type(error)(f"{error}{_cure(folder, controller)}") from error
    if error is not None:
        raise error
    if lost:
        _never_began(controller.reason)
    elif view is not None:
        _show_end(view, folder.path, controller.job.experiment, summary)
    return Result(folder.path, summary)


def _show_notices(controller: Controller, shown: int, console: Console | None) -> int:
    """Print the notices that are new: above the live view where there is one."""
    for notice in controller.notices[shown:]:
        if console is not None and console.is_terminal:
            console.print(Text(f"note: {notice}"), soft_wrap=True)
        else:
            print(f"note: {notice}", file=sys.stderr)
    return len(controller.notices)


def _write_tracebacks(folder: RunFolder, controller: Controller) -> None:
    if controller.tracebacks:
        (folder.path / LOGS).mkdir(exist_ok=True)
        with (folder.path / TRACEBACKS).open("a") as log:
            log.writelines(text + "\n" for text in controller.tracebacks)


def _cure(folder: RunFolder, controller: Controller) -> str:
    path, kept = _display(folder.path), folder.has_checkpoints(_trained(controller.job.experiment))
    where = f"\nWhere it happened: {path}/{TRACEBACKS}" if controller.tracebacks and (folder.path / TRACEBACKS).is_file() else ""
    return where + (f"\nIts checkpoints are kept; go on from the last one by: {command()} resume {path}" if kept else "")


def _never_began(reason: str) -> dict[str, Any]:
    """Say so, and return the summary that there would be."""
    print(f"{reason} before the run began: nothing is kept", file=sys.stderr)
    return _summary(Progress(), "interrupted", reason)


def _summary(progress: Progress, status: str, reason: str) -> dict[str, Any]:
    stage = {"stage": progress.where} if progress.where else {}
    told = progress.limiters.values()
    counts = {name: int(sum(limiter[name] for limiter in told)) for name in ("started", "committed", "voided")} if told else {}
    return {
        "status": status,
        "reason": reason,
        "env_steps": progress.steps,
        "seconds": round(progress.seconds, 3),
        "steps_per_second": round(progress.steps / progress.seconds, 1) if progress.seconds else 0.0,
        "updates": progress.updates,
        "mean_return": progress.mean_return,
        "episodes": progress.episodes,
        "dropped": progress.dropped,
        **counts,
        **stage,
    }


def _obey(control: ControlSocket, controller: Controller) -> None:
    for order, connection in control.commands():
        match order:
            case "pause":
                controller.pause()
                control.reply(connection, "paused")
            case "start":
                controller.resume()
                control.reply(connection, "running")
            case "save":
                saving = controller.save()
                control.reply(connection, "saving: a checkpoint is written" if saving else "nothing to save: the run is starting or ending")
            case "stop":
                controller.stop("tidemill stop")
                control.reply(connection, "stopping: a final checkpoint is written")
            case _:
                control.reply(connection, f'unknown command "{order[:40]}"')


def _snapshot(controller: Controller) -> Snapshot:
    progress = controller.progress
    return Snapshot(
        run=controller.job.experiment.name,
        seconds=progress.seconds,
        steps=progress.steps,
        limit=controller.job.experiment.limits.steps,
        steps_per_second=controller.steps_per_second,
        mean_return=progress.mean_return,
        episodes=progress.episodes,
        updates=progress.updates,
        lag=progress.metrics.get("lag/mean"),
        dropped=progress.dropped,
        workers=tuple(WorkerView(name, m.state.value, m.shares, m.rate) for name, m in controller.members.items()),
        state=controller.phase,
        memory=str(controller.plan or ""),
        stage=progress.where,
        evaluations=evaluations_of(progress.measured),
        limiters={name: _limiter_view(controller, name) for name in progress.limiters},
        iterations=progress.iterations,
    )


def _limiter_view(controller: Controller, trainer: str) -> LimiterView:
    """Of a trainer, and the slots whose steps it stores."""
    told, config = controller.progress.limiters[trainer], controller.members[trainer].config
    assert isinstance(config, Trainer)
    actors = [
        m.told for m in controller.members.values() if isinstance(m.config, Actors) and any(config.samples in a.streams for a in m.config.agents)
    ]
    healthy, quarantined = (int(sum(actor.get(f"slots/{kind}", 0.0) for actor in actors)) for kind in ("healthy", "quarantined"))
    return LimiterView(
        committed=int(told["committed"]),
        tasks=int(told["tasks"]),
        debt=int(told["debt"]),
        gathering_waited=told["gathering_waited"],
        training_waited=told["training_waited"],
        balance=told.get("balance"),
        healthy=healthy,
        slots=healthy + quarantined,
    )


def _show_end(view: View, path: Path, experiment: Experiment, summary: dict[str, Any]) -> None:
    run, typed = _display(path), command()
    draws = any(isinstance(worker, Actors) and worker.environment.draws for worker in experiment.workers.values())
    commands = {
        "evaluate": f"{typed} eval {run}",
        **({"watch it play": f"{typed} play {run} --video {path.name}.mp4"} if draws else {}),
        "plot": f"{typed} plot {run} --out {path.name}.png",
        "go on": f"{typed} resume {run} --max-steps N",
    }
    view.end({**summary, "folder": run}, commands)


def _display(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def new_folder(experiment: Experiment) -> Path:
    """Return a run's folder under ./runs that is not there yet."""
    stem = f"{experiment.name}-s{experiment.seed}-{strftime('%Y%m%d-%H%M%S')}"[:60]
    path, number = Path("runs") / stem, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{stem}-{number}"
    return path


def _own_source(experiment: Experiment) -> Source | None:
    """The main script, when classes of the experiment are defined in it (worker processes must load it)."""
    classes = _classes(experiment)
    files = {sys.modules[c.__module__].__file__ for c in classes if c.__module__ == "__main__" or c.__module__.startswith("tidemill_file_")}
    files.discard(None)
    return Source.of(Path(str(files.pop()))) if files else None


def _classes(value: Any) -> set[type]:
    """Return the classes of all configurations that a configuration holds, itself among them."""
    match value:
        case Config():
            return {type(value)}.union(*map(_classes, vars(value).values()))
        case dict():
            return set().union(*map(_classes, value.values()))
        case tuple():
            return set().union(*map(_classes, value))
    return set()
