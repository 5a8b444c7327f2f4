"""The Python front: `train` an experiment, `resume` a run."""

from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Job, Launcher
from tidemill.core.config import check_name, decode, encode
from tidemill.core.errors import RunError
from tidemill.core.output import forgiving_output
from tidemill.core.shortage import why
from tidemill.core.user_code import refuse_while_loading
from tidemill.launchers.table import LAUNCHERS, make_launcher
from tidemill.layouts.auto_layout import AUTO, LAYOUT, arrange, check_layout
from tidemill.layouts.memory_plan import check_processes
from tidemill.metrics.writer import DEFAULT, SINKS, Sinks, find_sinks, split
from tidemill.run.folder import LAUNCHER, RunFolder
from tidemill.run.interrupts import BrokenOff, Interrupts, signal_name
from tidemill.run.remarks import remarks
from tidemill.run.resume_point import Past, without_reached_mark
from tidemill.run.run_lifecycle import Life, never_began
from tidemill.run.source_info import check_other_processes, own_source, source_file
from tidemill.run.trust import Trust


@dataclass(frozen=True)
class Result:
    """How a run ended: its folder, and what its summary.json says (status, env_steps,
    seconds, steps_per_second, updates, mean_return, …)."""

    folder: Path
    summary: dict[str, Any]


@forgiving_output()
def train(
    experiment: Experiment,
    *,
    launch: str | type[Launcher] = "processes",
    run_dir: str | Path | None = None,
    source: str | Path | None = None,
    quiet: bool = False,
    layout: str = AUTO,
    fixed: Collection[str] = (),
    log: Sinks = DEFAULT,
) -> Result:
    """Train `experiment` to its limits and return how it ended.

    launch: "processes", "threads" or "inline"; or a launcher of one's own, a class or
        where it is ("FILE.py:NAME")
    run_dir: the run's folder; by default a new one under ./runs
    source: the file that defines the experiment's own classes; by default that of the
        main script, where it defines any
    quiet: show nothing
    layout: how many actors and trainers there are, and so on: "auto" has it follow from
        measured costs where the experiment says nothing of it (processes only), "measure"
        measures them anew, "given" takes the experiment as it is; or a layout's text, as
        it was shown
    fixed: paths of settings that are not to be changed, e.g. "workers.actor.lanes"
    log: what metrics are written to besides metrics.jsonl: "tensorboard", "csv", "wandb",
        or sinks of one's own; several as a list, or with commas between

    Raises `ConfigError` or `RunError`. Ctrl-C and SIGTERM end the run cleanly, with a
    final checkpoint (status "interrupted").
    """
    refuse_while_loading("tidemill.train(…)")
    launcher, sinks = make_launcher(launch), find_sinks(log)
    decode(Experiment, encode(experiment))  # what workers will do: raises for what they could not read
    experiment.check()
    if launcher.processes:
        check_other_processes(experiment)
    known = source_file(Path(source)) if source is not None else own_source(experiment)
    with Interrupts() as interrupts, ExitStack() as stack:
        # before anything is measured
        folder = RunFolder.create(Path(run_dir) if run_dir is not None else None, experiment, known)
        stack.callback(folder.discard)
        try:
            with interrupts.at_once():
                arranged = arrange(experiment, known, layout, fixed, launcher.processes)
        except BrokenOff:
            return Result(folder.path, never_began(signal_name(interrupts.first)))
        experiment = arranged.experiment
        experiment.check()
        _check_processes(launcher, experiment)
        if not quiet:
            for told in filter(None, (arranged.told, *(f"note: {remark}" for remark in remarks(experiment)))):
                Console().print(Text(told), soft_wrap=True)
        try:
            folder.write_experiment(experiment, known)
            folder.write(LAUNCHER, _launched(launch, log))
        except OSError as error:
            raise RunError(
                f"run folder {folder.path} cannot be written: {why(error)}; free the disk, or name another "
                "with --run-dir"
            ) from None
        if arranged.told:
            with suppress(OSError):  # a full disk does not stop training
                folder.write(LAYOUT, arranged.plain())
        stack.pop_all()  # from now on its life says what is kept
        job = Job(experiment, str(known) if known else None, str(folder.path.resolve()))
        return Result(folder.path, Life(folder, None, quiet, sinks).lead(job, launcher, interrupts))


@forgiving_output()
def resume(
    run: str | Path,
    *,
    launch: str | type[Launcher] | None = None,
    file: str | Path | None = None,
    limits: dict[str, Any] | None = None,
    quiet: bool = False,
    trust: Trust = False,
    log: Sinks | None = None,
) -> Result:
    """Go on with a run from its last good checkpoint: weights, optimiser, normalisers,
    counters.

    launch: as of `train`; None: what it was launched by last
    file: the experiment's file, when it has changed since
    limits: limits to change, e.g. ``{"steps": 2_000_000}``
    trust: True: run what the folder names (code, programs, addresses), though this user
        never has
    log: as of `train`; None: what it logged to last
    """
    refuse_while_loading("tidemill.resume(…)")
    folder = RunFolder.open(Path(run))
    launch = launch or folder.launcher(LAUNCHERS)
    log = folder.logged(SINKS, DEFAULT) if log is None else log
    launcher, sinks = make_launcher(launch), find_sinks(log)
    experiment, source, files = folder.experiment(
        Path(file) if file is not None else None, trust, writes=True
    )
    if limits:
        experiment = experiment.replace(limits=experiment.limits.replace(**limits))
    experiment = without_reached_mark(folder, experiment, limits or {})
    experiment.check_judged()
    _check_processes(launcher, experiment)
    with Interrupts() as interrupts:
        folder.lock()
        try:
            folder.tidy()
            past = Past.of(folder, experiment)
            past.refuse_reached(folder.path, experiment.limits)
            folder.write_experiment(experiment, source)
            folder.write(LAUNCHER, _launched(launch, log))
        except OSError as error:
            folder.unlock()
            raise RunError(
                f"run folder {folder.path} cannot be written: {error.strerror}; free the disk, or let "
                "yourself write there"
            ) from error
        except BaseException:
            folder.unlock()
            raise
        job = Job(
            experiment, str(source) if source else None, str(folder.path.resolve()), past.checkpoint, files
        )
        return Result(folder.path, Life(folder, past.progress, quiet, sinks).lead(job, launcher, interrupts))


def check_words(launch: str, run_dir: str | Path | None, layout: str, log: str) -> None:
    """Raise `ConfigError` for what `train` would refuse whatever is trained: before an
    environment is built to see what that is."""
    make_launcher(launch)
    find_sinks(log)
    if run_dir is not None:
        check_name("run", Path(run_dir).resolve().name)
    check_layout(layout)


def _check_processes(launcher: Launcher, experiment: Experiment) -> None:
    if launcher.processes:
        check_processes(len(experiment.processes()))
    launcher.check(experiment)


def _launched(launch: str | type[Launcher], log: Sinks) -> dict[str, Any]:
    """Return what a run's folder keeps of how it was launched. Names of a user's own code
    are not kept: a folder never names what a resumed run is to run."""
    return {
        "launcher": launch if isinstance(launch, str) else launch.__name__,
        "log": [sink for sink in split(log) if sink in SINKS],
    }
