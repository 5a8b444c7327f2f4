"""The Python front: `train` an experiment, `resume` a run."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tidemill.api.algorithm import AlgorithmConfig
from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Job, Launcher
from tidemill.core.config import check_name, decode, encode
from tidemill.core.errors import BrokenOff, ConfigError, DatabaseError, RunError
from tidemill.core.forgiving_output import forgiving_output
from tidemill.core.resource_shortage import why
from tidemill.core.user_code_loading import refuse_while_loading, without_arguments
from tidemill.launchers.table import LAUNCHERS, make_launcher, with_options
from tidemill.layouts.auto_layout import AUTO, GIVEN, LAYOUT, check_layout, kept_paces, lay_out
from tidemill.metrics.json_lines import FILE, last_records
from tidemill.metrics.writer import DEFAULT, SINKS, Sinks, find_sinks, split
from tidemill.run.check_exact import check_exact
from tidemill.run.conditions import each_to_its_limit
from tidemill.run.cuts import go_back_to_cut, newest_whole_cut
from tidemill.run.folder import LAUNCHER, MOMENT, RunFolder, as_typed
from tidemill.run.interrupts import Interrupts, signal_name
from tidemill.run.resume_point import ResumePoint, before_torn_end, without_met_limit
from tidemill.run.run_control import OnUpdate
from tidemill.run.run_lifecycle import RunLifecycle, never_began
from tidemill.run.same_run import GIVEN as ASKED
from tidemill.run.same_run import (
    asked_before,
    cut_short,
    digest_of,
    left_unfinished,
    put_aside,
    unfinished,
)
from tidemill.run.source_info import check_other_processes, own_source, source_file
from tidemill.run.start_remarks import remarks
from tidemill.run.trust import Trust
from tidemill.store.checkpoint import checkpoints
from tidemill.store.checkpoint import put_aside as put_checkpoints_aside
from tidemill.store.parameter_database import PARAMETERS
from tidemill.training.experiment_from import Trainable, make_experiment, with_settings
from tidemill.training.replay_slots import by_turns, with_slots
from tidemill.training.result import Result, Summary


@forgiving_output()
def train(
    experiment: Trainable,
    *,
    algorithm: str | AlgorithmConfig | None = None,
    steps: int | None = None,
    seed: int | None = None,
    launch: str | type[Launcher] = "processes",
    run_dir: str | Path | None = None,
    source: str | Path | None = None,
    quiet: bool = False,
    layout: str = AUTO,
    fixed: Collection[str] = (),
    log: Sinks = DEFAULT,
    on_update: OnUpdate | None = None,
    slots: int | None = None,
    ratio: str | int | None = None,
    exact: bool = False,
    wrap: Any = (),
    anew: bool = False,
    **settings: Any,
) -> Result:
    """Train an agent to the limits of its run, and return what came of it.

        result = tidemill.train("CartPole-v1", steps=100_000)
        result = tidemill.train(MyEnv, epochs=4, lanes=32, mean_return=475)

    experiment: an `Experiment`, or an environment: its name ("CartPole-v1",
        "module:NAME", "FILE.py:NAME", whatever ``tidemill train`` takes), a class or
        function that makes it, or a configuration such as `Gymnasium`
    algorithm: with an environment: "ppo" (the default), "dqn" or "sac", with what is
        tuned for it, or settings such as ``PPO(epochs=4)``, which are taken whole
    steps: end with the update that reaches so many env steps
    seed: root of every random stream
    launch: "processes", "threads", "inline", "ray" or "slurm", with options as in
        ``"ray(hosts=4)"``; or a launcher of one's own, a class or where it is
        ("FILE.py:NAME")
    run_dir: the run's folder; by default a new one under ./runs, which says so where the
        last run there was this one, unfinished. Where it holds this very run (the same
        experiment, configuration and layout), interrupted or killed, that goes on; any
        other run there is refused
    source: the file that defines the experiment's own classes; by default that of the
        main script, where it defines any
    quiet: show nothing
    layout: how many actors and trainers there are, and so on: "auto" has it follow from
        measured costs where the experiment says nothing of it (processes only), "measure"
        measures them anew, "given" takes the experiment as it is; or a layout's text, as
        it was shown
    fixed: paths of settings that are not to be changed, e.g. "workers.actor.lanes"
    log: what metrics are written to besides metrics.jsonl: "tensorboard" (the default),
        "csv", "wandb", or `MetricSink`s of one's own (a class, or "FILE.py:NAME");
        several as a list, or with commas between
    on_update: called in this process with each record of updates and a `RunControl`: it
        may log, save, stop the run, or change a limit
    slots: with a replay memory: number of environments that step at the same time, each
        in a thread of its own, and may fail (`Slots`)
    ratio: with a replay memory: updates per env step, exactly: "1/4", "3/2", 8
    exact: with a replay memory: whether the weights are the same however long
        environments take (`ReplayTrainer.exact`)
    wrap: with an environment: wrappers around it, the first one inside: names, as
        ``["flatten", "frame-skip(4)"]``, "module:NAME(argument=value)", or classes and
        functions that take the environment (see `Gymnasium`)
    anew: start anew in `run_dir`: a run that is there is put aside, renamed
    settings: any setting of the experiment by its name (``lanes=32``,
        ``learning_rate=1e-3``, ``mean_return=475``), or by its path: one whose name is a
        parameter here (`Actors.slots`), or is that of settings of several kinds
        (`count`), as ``**{"workers.actor.slots": 3}``

    Raises `ConfigError` for what cannot be run, `RunError` or another `TidemillError`
    for a run that failed, and what `on_update` raised, as it is. Ctrl-C and SIGTERM end
    the run cleanly, with a final checkpoint (status "interrupted").
    """
    refuse_while_loading("tidemill.train(…)")
    check_words(launch, run_dir, layout, log)  # before an environment is built to see what it is
    if not (on_update is None or callable(on_update)):
        raise ConfigError(f"on_update = {on_update!r} must be a function, of metrics and a RunControl")
    made, found = make_experiment(experiment, algorithm, wrap)
    asked = {"limits.steps": steps, "seed": seed}
    asked = {name: value for name, value in asked.items() if value is not None} | settings
    if slots is not None or ratio is not None or exact:
        made = with_slots(made, slots, ratio, **({"exact": True} if exact else {}))
        layout = GIVEN
    made, paths = with_settings(made, asked)
    if slots is not None and isinstance(launch, str):
        made = by_turns(made, launch)
    fixed = [*fixed, *paths]
    return _train(
        made, launch, run_dir, found if source is None else source, quiet, layout, fixed, log, on_update, anew
    )


def _train(
    experiment: Experiment,
    launch: str | type[Launcher],
    run_dir: str | Path | None,
    source: str | Path | None,
    quiet: bool,
    layout: str,
    fixed: Collection[str],
    log: Sinks,
    on_update: OnUpdate | None,
    anew: bool,
) -> Result:
    launcher, sinks = make_launcher(launch), find_sinks(log)
    decode(Experiment, encode(experiment))  # what workers will do: raises for what they could not read
    experiment.check()
    if launcher.processes:
        check_other_processes(experiment)
    known = source_file(Path(source)) if source is not None else own_source(experiment)
    asked = digest_of(experiment, known, layout)
    if run_dir is None and anew:
        raise ConfigError("anew (--anew) is for a folder that has a run: name it by run_dir (--run-dir)")
    if run_dir is not None and anew and (aside := put_aside(Path(run_dir))) is not None:
        _say(f"the run that was in {run_dir} is in {as_typed(aside)} now", quiet)
    elif run_dir is not None and (ended := unfinished(Path(run_dir), experiment, asked)):
        if not RunFolder(Path(run_dir)).led():  # else it lives, and is refused
            _say(f"goes on with this run, which was {ended} (--anew starts anew)", quiet)
        return resume(run_dir, launch=launch, quiet=quiet, log=log, on_update=on_update)
    elif run_dir is None and (told := left_unfinished(experiment, asked)):
        _say(told, quiet)
    with Interrupts() as interrupts, ExitStack() as stack:
        # before anything is measured
        folder = RunFolder.create(Path(run_dir) if run_dir is not None else None, experiment, known)
        stack.callback(folder.discard)
        try:
            with interrupts.at_once():
                hosts = launcher.hosts(str(folder.path.resolve())) if layout != GIVEN else ()
                if hosts:
                    stack.callback(launcher.close, 0.0)
                laid_out = lay_out(
                    experiment, known, layout, fixed, launcher.processes, hosts, launcher.measure
                )
        except BrokenOff:
            return _result(folder, never_began(signal_name(interrupts.first)))
        given, experiment = experiment, laid_out.experiment
        experiment.check()
        launcher.check(experiment)
        check_exact(experiment, launcher.takes_turns)
        if not quiet:
            for line in filter(None, (laid_out.note, *(f"note: {remark}" for remark in remarks(experiment)))):
                Console().print(Text(line), soft_wrap=True)
        try:
            if experiment != given:
                folder.write_experiment(experiment, known)
            folder.write(LAUNCHER, _launched(launch, log) | {ASKED: asked})
        except OSError as error:
            raise RunError(
                f"run folder {folder.path} cannot be written: {why(error)}; free the disk, or name another "
                "with --run-dir"
            ) from None
        if laid_out.note:
            with suppress(OSError):  # a full disk does not stop training
                folder.write(LAYOUT, laid_out.plain())
        stack.pop_all()  # from now on its life says what is kept
        folder.from_root()
        source = str(known) if known else None
        path = str(folder.path.resolve())
        job = Job(experiment, source, path, epoch=folder.epoch, paces=laid_out.paces)
        life = RunLifecycle(folder, None, quiet, sinks, on_update)
        return _result(folder, life.lead(job, launcher, interrupts))


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
    on_update: OnUpdate | None = None,
    options: Mapping[str, Any] | None = None,
) -> Result:
    """Continue the run in folder `run` from its newest checkpoint that is whole: weights,
    optimiser, normalisers, counters.

    launch: as of `train`; None: what it was launched by last
    file: the experiment's file, when it has changed since
    limits: limits to change, e.g. ``{"steps": 2_000_000}``
    trust: True: run what the folder names (code, programs, addresses), though this user
        never has
    log: as of `train`; None: what it logged to last
    on_update: as of `train`
    options: of the launcher, e.g. ``{"hosts": 4}``; a folder keeps none

    Raises `RunError` (a folder that is not trusted, or is in use), `CheckpointError` or
    `ConfigError`; what ends the run is raised as by `train`.
    """
    refuse_while_loading("tidemill.resume(…)")
    folder = RunFolder.open(Path(run))
    launch = launch or folder.launcher(LAUNCHERS)
    launch = with_options(launch, options or {}) if isinstance(launch, str) else launch
    log = folder.logged(SINKS, DEFAULT) if log is None else log
    launcher, sinks = make_launcher(launch), find_sinks(log)
    experiment, source, files = folder.experiment(file, trust, writes=True)
    before = experiment.limits
    if limits:
        experiment = experiment.replace(limits=before.replace(**limits))
    others = experiment.limits != before  # else it is gone on with by words that it has heard already
    experiment = without_met_limit(folder, experiment, limits or {})
    experiment.check_judged()
    launcher.check(experiment)
    check_exact(experiment, launcher.takes_turns)
    with Interrupts() as interrupts:
        folder.lock()
        try:
            # who is refused takes the run from nobody
            by_all = each_to_its_limit(experiment, launcher.takes_turns)
            ended = "" if others else cut_short(folder)
            torn = before_torn_end(folder, experiment, ended)
            cut = torn or newest_whole_cut(folder, experiment)
            seen = ResumePoint.of(folder, experiment, leads=False, cut=cut)
            seen.limit_reached(folder.path, experiment.limits, by_all, ended)
            folder.lead()
            folder.tidy()
            go_back_to_cut(folder, experiment)
            for place, path in torn.items():
                put_checkpoints_aside((written := checkpoints(place))[written.index(path) + 1 :])
            past = ResumePoint.of(folder, experiment)
            reached = past.limit_reached(folder.path, experiment.limits, by_all, ended)
            folder.write_experiment(experiment, source)
            # with other limits it is not what was asked for
            folder.write(LAUNCHER, _launched(launch, log) | ({} if others else asked_before(folder)))
        except OSError as error:
            folder.unlock()
            raise RunError(
                f"run folder {folder.path} cannot be written: {error.strerror}; free the disk, or let "
                "yourself write there"
            ) from error
        except BaseException:
            folder.unlock()
            raise
        paces: dict[str, float] = {}
        with suppress(RunError):  # without the file, or with a torn one, cores alone count
            paces = kept_paces(folder.read(LAYOUT))
        folder.from_root()
        job = Job(
            experiment,
            str(source) if source else None,
            str(folder.path.resolve()),
            past.checkpoint,
            files,
            folder.epoch,
            paces,
        )
        life = RunLifecycle(folder, past.progress, quiet, sinks, on_update)
        if torn:
            _say(
                f"it was {ended} between the last checkpoints of its policies: "
                f"{', '.join(place.name for place in torn)}, which had reached the limit, goes back to the "
                "one before",
                quiet,
            )
        for text in _lost_history(folder) if past.progress.updates else ():
            _say(f"{text}: those of before update {past.progress.updates + 1:,} are missing", quiet)
        if reached:
            _say(f"it was {ended} once it had reached {reached}: it is complete now", quiet)
            return _result(folder, life.complete(job, f"it has reached {reached}"))
        with suppress(ConfigError):  # which workers raise
            for remark in () if quiet else remarks(experiment):
                _say(remark, quiet)
        return _result(folder, life.lead(job, launcher, interrupts))


def _lost_history(folder: RunFolder) -> Iterator[str]:
    """Yield which of a run's files have nothing in them of the updates that it has
    done."""
    if not last_records(folder.path):
        yield f"{folder.path / FILE} has no records"
    with suppress(DatabaseError):  # what is wrong with it is said to whoever uses it
        if (folder.path / PARAMETERS).exists() and not folder.database(MOMENT).policies():
            yield f"{folder.path / PARAMETERS} holds no versions"


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        Console().print(Text(f"note: {text}"), soft_wrap=True)


def _result(folder: RunFolder, summary: dict[str, Any]) -> Result:
    return Result(folder.path, Summary(**summary))


def check_words(launch: str | type[Launcher], run_dir: str | Path | None, layout: str, log: Sinks) -> None:
    """Raise `ConfigError` for what `train` would refuse whatever is trained: before an
    environment is built to see what that is."""
    make_launcher(launch)
    find_sinks(log)
    if run_dir is not None:
        check_name("run", Path(run_dir).resolve().name)
    check_layout(layout)


def _launched(launch: str | type[Launcher], log: Sinks) -> dict[str, Any]:
    """Return what a run's folder keeps of how it was launched. Names of a user's own code
    do not count in a resumed run, and options, addresses among them, are not kept: a
    folder never names what a resumed run is to run."""
    return {
        "launcher": without_arguments(launch) if isinstance(launch, str) else launch.__name__,
        "log": [sink for sink in split(log) if sink in SINKS],
    }
