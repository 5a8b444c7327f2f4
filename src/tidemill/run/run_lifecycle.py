"""A life of a run: it is led by a controller in the run's folder, shown and told what to
do on the way, and summed up at its end."""

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import time
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.text import Text

from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Job, Launcher
from tidemill.api.metric_sink import LoggedRun, MetricSink
from tidemill.core.config import encode
from tidemill.core.errors import BrokenOff, Interrupted, Overtaken, RunError, TidemillError
from tidemill.core.folder_thread import FolderThread, Unanswered
from tidemill.core.forgiving_output import printable, unawaited_output
from tidemill.core.private_files import private
from tidemill.core.resource_shortage import why
from tidemill.core.secrets import hide
from tidemill.metrics.json_lines import PATIENCE, each_record
from tidemill.metrics.writer import MetricsWriter
from tidemill.run.control_folder import ControlFolder
from tidemill.run.control_socket import ControlSocket
from tidemill.run.controller import Controller
from tidemill.run.cuts import can_go_on, go_back_to_cut
from tidemill.run.events import Event, EventLog
from tidemill.run.folder import CONFIG, EPISODES, MEMORY, PLACES, SUMMARY, RunFolder, as_typed, command
from tidemill.run.host_places import HostPlace, table_of_places
from tidemill.run.interrupts import Interrupts, signal_name
from tidemill.run.live_view import make_view
from tidemill.run.progress import Progress
from tidemill.run.resume_point import ResumePoint
from tidemill.run.run_control import OnUpdate, RunControl
from tidemill.run.snapshot import snapshot
from tidemill.run.status import status_of
from tidemill.store.checkpoint import LATER
from tidemill.store.fence import check
from tidemill.store.refuge import kept_in, refuge_of
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.cut_files import number_of
from tidemill.workers.fault_records import FAULTS

T = TypeVar("T")

LOGS = "logs"
TRACEBACKS = f"{LOGS}/traceback.log"
LAST, HURRIED = 30.0, 6.0
"""Seconds that the disk has for each call once the run is over, and once a signal has
come."""


class RunLifecycle:
    """The lifecycle of a run in the locked `folder`. `resumed`: how far the run was, None
    for a new one. `quiet`: nothing is shown. `sinks`: what metrics are written to besides
    the folder's file. `on_update`: see `RunControl`."""

    def __init__(
        self,
        folder: RunFolder,
        resumed: Progress | None,
        quiet: bool,
        sinks: Collection[type[MetricSink]] = (),
        on_update: OnUpdate | None = None,
    ) -> None:
        self._folder, self._resumed, self._sinks = folder, resumed, sinks
        self._on_update = on_update
        self._raised: BaseException | None = None  # by `on_update`, which is not called again
        self._raised_first = False  # before anything else ended the run
        self._console = Console()
        self._view = None if quiet else make_view(self._console)
        self._noticed = 0  # how many notices were shown
        self._planned = False  # the memory plan was written
        self._places: Mapping[str, HostPlace] = {}  # as they were written
        self._refuge: Path | None = None  # where workers write what the folder does not take at the end
        self._kept_before: set[tuple[Path, int]] = set()  # what an earlier life left there
        self._elsewhere = ""  # what to do with the last checkpoint that its own folder did not take
        self._thread = FolderThread(folder.path, PATIENCE)  # in which this process writes there
        self._events = EventLog(folder.path, self._thread)
        # lost: nothing is there that is worth keeping, but for what is called kept
        self._lost = resumed is None
        self._discard_except: Sequence[str] = ()

    def lead(self, job: Job, launcher: Launcher, interrupts: Interrupts) -> dict[str, Any]:
        """Lead the run to its end, let others have the folder, and return the summary.
        Raises the error that ended it; `Overtaken` where the folder is another runner's
        by now. A new run that never began leaves nothing; one that failed before an
        update, its logs."""
        folder, resumed, view = self._folder, self._resumed, self._view
        check(folder.path)
        with ExitStack() as stack:
            stack.callback(self._thread.close)
            stack.callback(
                lambda: self._in_folder(
                    partial(folder.discard, self._discard_except) if self._lost else folder.unlock,
                    anyway=True,
                )
            )
            try:
                for name in (SUMMARY, PLACES):  # of the life before
                    if (folder.path / name).exists():
                        (folder.path / name).unlink()
            except OSError as broken:  # its disk has just become read-only
                raise RunError(_unwritable(broken, folder.path)) from None
            with suppress(OSError):
                self._refuge = refuge_of(folder.path)
                self._kept_before = kept_in(self._refuge)
            try:
                with interrupts.at_once():  # a sink may hang as it is made
                    self._metrics = metrics = MetricsWriter(
                        self._logged(job.experiment), self._sinks, self._thread
                    )
            except BrokenOff:
                name = signal_name(interrupts.first)
                if not self._lost:
                    raise Interrupted(name, "the run did not go on, since its sinks were not made") from None
                return never_began(name)
            close_metrics = partial(metrics.close, lambda: bool(interrupts.first))
            stack.callback(close_metrics)
            self._control = stack.enter_context(closing(ControlSocket(folder.path)))
            self._orders = ControlFolder(folder.path)
            stack.callback(self._in_folder, self._orders.close)

            def record(values: dict[str, float]) -> None:
                metrics.write(values)
                if self._on_update is not None and "update" in values:
                    control = RunControl(controller, metrics.write)
                    try:
                        self._on_update(dict(values), control)
                    except (Exception, SystemExit) as raised:
                        # from here it would break off an end that has begun
                        self._on_update, self._raised = None, raised
                        self._raised_first = not controller.state.finishing
                        controller.state.end(f"on_update raised {type(raised).__name__}")

            def go_back(policies: Sequence[str], others: Progress) -> Progress:
                try:
                    check(folder.path)
                    go_back_to_cut(folder, job.experiment, or_begin=True)
                    saved = [policy for policy in policies if folder.has_checkpoints([policy])]
                except OSError as error:  # a share whose server has gone, say
                    raise RunError(
                        f"{folder.path} cannot be read or written: {why(error)}, and a worker has died that "
                        "goes back to what lies there: the run ends"
                    ) from None
                point = ResumePoint.of(folder, job.experiment, saved).progress
                self._resumed = Progress(
                    max(point.steps, others.steps),
                    max(point.updates, others.updates),
                    policy_updates={**dict.fromkeys(policies, 0), **point.policy_updates},
                )
                metrics.go_back(self._logged(job.experiment))
                return point

            controller = Controller(
                job, launcher, record, self._watch, interrupts, resumed, go_back, self._alarm
            )
            controller.state.report.notices += _returns_notice(job.experiment)
            newer = max((number_of(path) for path, _ in self._kept_before), default=0)
            if resumed is not None and newer > resumed.updates:
                controller.state.report.notices.append(
                    f"{self._refuge} has a later checkpoint of this run, of update {newer}, which its folder "
                    f"had not taken; to go on from that, end this: {command()} resume {self._refuge}"
                )
            error: BaseException | None = None
            try:
                with unawaited_output(), view or nullcontext():
                    with _same_directory():
                        controller.run()
                    if view is not None and controller.state.began:
                        view.show(snapshot(controller))  # what was told last
            except BaseException as caught:
                error = caught
            self._thread.seconds = HURRIED if interrupts.first else LAST
            later = self._raised
            if later is not None and (error is None or self._raised_first):
                error, later = later, error
            if later is not None:
                controller.state.report.notices.append(f"besides: {type(later).__name__}: {later}")
            try:
                self._in_folder(partial(check, folder.path))
            except Overtaken:
                self._lost = False  # all of it is the other one's
                raise
            close_metrics()
            if error is None:
                controller.state.progress.keep_last()
            self._keep_episodes(controller.state.progress)
            status = (
                "failed"
                if error is not None
                else "interrupted"
                if controller.state.interrupted
                else "completed"
            )
            reason = (str(error) or type(error).__name__) if error is not None else controller.state.reason
            summary = _summary(controller.state.progress, status, reason)
            # all began anew, and failed then; what cannot be looked at is kept, too
            undone = self._in_folder(lambda: any(folder.path.glob(f"checkpoints/*/{LATER}*"))) is not False
            failed_first = error is not None and not controller.state.progress.updates and not undone
            self._lost = resumed is None and (failed_first or not controller.state.began)
            self._discard_except = (LOGS, FAULTS) if controller.state.began else ()
            error = self._write_down(controller, summary, error)
            self._in_folder(folder.tidy)
            if not self._lost:
                controller.state.report.events.append(Event(time(), "ended", cause=f"{status}: {reason}"))
                self._keep_events(controller)
        if status == "completed" and job.experiment.trained() and not controller.state.progress.updates:
            controller.state.report.notices.append(
                "nothing was trained: the run ended before an update had enough to begin with (batch_size, "
                "or the memory's warm_up)"
            )
        # whoever wants the end waits for no reader
        with unawaited_output() if controller.state.interrupted else nullcontext():
            self._show_notices(controller)
            if isinstance(error, TidemillError):
                raise type(error)(f"{error}{self._cure(controller)}") from error
            if error is not None:
                raise error
            if self._lost:
                never_began(controller.state.reason)
            elif view is not None:
                view.end({**summary, "folder": as_typed(folder.path)}, self._next(job))
        return summary

    def complete(self, job: Job, reason: str) -> dict[str, Any]:
        """Write down that the resumed run is complete, which had reached its limit before
        it was killed or interrupted, let others have the folder, and return the summary.
        """
        folder, progress = self._folder, self._resumed or Progress()
        with ExitStack() as stack:
            stack.callback(folder.unlock)
            stack.callback(self._thread.close)
            self._thread.seconds = LAST
            progress.begin(job.experiment)
            with closing(MetricsWriter(self._logged(job.experiment), self._sinks, self._thread)) as metrics:
                told = max((record.get("update", 0) for record in each_record(folder.path)), default=0)
                if told < progress.updates:  # killed before its last line
                    metrics.write(progress.record({}))
            summary = _summary(progress, "completed", reason)
            try:
                folder.write(SUMMARY, summary)
            except OSError as error:
                raise RunError(_unwritable(error, folder.path)) from None
            self._events.write([Event(time(), "ended", cause=f"completed: {reason}")])
        if self._view is not None:
            self._view.end({**summary, "folder": as_typed(folder.path)}, self._next(job))
        return summary

    def _logged(self, experiment: Experiment) -> LoggedRun:
        run = LoggedRun(self._folder.path, hide(encode(experiment)))
        if (resumed := self._resumed) is None:
            return run
        by_trainer = {
            trainer: updates
            for policy, updates in resumed.policy_updates.items()
            for trainer in experiment.holders(policy, "publish")
        }
        return replace(run, resume_at=resumed.steps, updates=resumed.updates, by_trainer=by_trainer)

    # ---- on the way --------------------------------------------------------------------

    def _watch(self, controller: Controller) -> None:
        if controller.state.plan is not None and not self._planned:
            self._planned = True
            self._in_folder(partial(self._folder.write, MEMORY, controller.state.plan))
        if controller.places != self._places:
            self._keep_places(controller.places)
        self._metrics.look()
        self._keep_episodes(controller.state.progress)
        self._obey(controller)
        self._keep_events(controller)
        self._show_notices(controller)
        if self._view is not None:
            self._view.show(snapshot(controller))
            if controller.state.suspended:
                self._view.close()  # the terminal is somebody else's

    def _alarm(self, text: str) -> None:
        """Tell what the controller cannot, which hangs. Called in another thread."""
        with suppress(Overtaken):  # whoever leads the run finds it out, too
            self._events.write([Event(time(), "told", cause=text)])
        print(f"note: {printable(text)}", file=sys.stderr)

    def _keep_places(self, places: Mapping[str, HostPlace]) -> None:
        """Write down where workers stand, and show it the first time."""
        if not self._places and self._view is not None:
            self._console.print(Text(printable(table_of_places(places))), soft_wrap=True)
        self._places = places
        self._in_folder(partial(self._folder.write, PLACES, msgspec.to_builtins(places)))

    def _keep_episodes(self, progress: Progress) -> None:
        if progress.unsaved and not self._thread.hangs:
            progress.unsaved = False
            self._in_folder(partial(self._folder.write, EPISODES, progress.checkpoint_episodes))

    def _in_folder(self, work: Callable[[], T], anyway: bool = False) -> T | None:
        """Do what is to be done in the folder, and need not: a disk that is full, or that
        hangs, does not stop training. `anyway`: it is done once it answers. Raises
        `Overtaken`."""
        with suppress(OSError):
            return self._thread.do(work, anyway)
        return None

    def _keep_events(self, controller: Controller) -> None:
        """Write down what has happened, and what the user is about to be told."""
        report = controller.state.report
        new = report.notices[self._noticed :]
        told = [Event(time(), "told", cause=text) for text in new if text not in report.of_events]
        self._events.write([*report.events, *told])
        report.events.clear()

    def _show_notices(self, controller: Controller) -> None:
        """Print the notices that are new: above the live view where there is one."""
        for notice in map(printable, controller.state.report.notices[self._noticed :]):
            if self._view is not None and self._console.is_terminal:
                self._console.print(Text(f"note: {notice}"), soft_wrap=True)
            else:
                print(f"note: {notice}", file=sys.stderr)
        self._noticed = len(controller.state.report.notices)

    def _obey(self, controller: Controller) -> None:
        for order, connection in self._control.commands():
            self._control.reply(connection, self._answer(controller, order))
        for request in self._in_folder(lambda: [*self._orders.commands()]) or ():
            answer = self._answer(controller, request.order)
            self._in_folder(partial(self._orders.reply, request.number, answer))

    def _answer(self, controller: Controller, order: str) -> str:
        """Do what an order says, and return what is answered."""
        match order:
            case "pause":
                controller.pause()
                return "paused"
            case "start":
                controller.resume()
                return "running"
            case "status":
                return msgspec.json.encode(status_of(controller)).decode()
            case "save" if controller.save():
                if controller.saves_later:
                    return (
                        "saving once the run goes on: its equal trainers come to rest together only then "
                        "(exact_resume); let it go on by: tidemill start"
                    )
                return "saving: a checkpoint is written"
            case "save":
                return "nothing to save: the run is starting or ending"
            case "stop":
                controller.state.end("tidemill stop")
                return "stopping: a final checkpoint is written"
        return f'unknown command "{order[:40]}"'

    # ---- at the end --------------------------------------------------------------------

    def _write_down(
        self, controller: Controller, summary: dict[str, Any], error: BaseException | None
    ) -> BaseException | None:
        """Write down how it ended, and return the error that ended it: the first
        cause."""
        job, path, refuge, text = controller.job, self._folder.path, self._refuge, ""
        elsewhere = refuge is not None and kept_in(refuge) != self._kept_before

        def write() -> None:
            if controller.state.report.tracebacks and (controller.state.began or self._resumed is not None):
                (path / LOGS).mkdir(mode=0o700, exist_ok=True)
                with open(path / TRACEBACKS, "a", opener=private) as log:
                    log.writelines(each + "\n" for each in controller.state.report.tracebacks)
            if not self._lost:
                said = {"status": "failed", "reason": text} if text and error is None else {}
                self._folder.write(SUMMARY, summary | said)

        if elsewhere:  # there was room for this alone
            text = f"{path} did not take the run's last checkpoint"
        try:
            self._thread.do(write)
        except OSError as broken:
            text = _unwritable(broken, path)
        if not text:
            return error
        if refuge is not None and elsewhere:
            self._elsewhere = _in_refuge(refuge, summary["status"] == "completed")
            with suppress(OSError):
                if not (refuge / CONFIG).exists():  # the run's own was gone before
                    source = Path(job.source) if job.source else None
                    RunFolder(refuge).write_experiment(job.experiment.replace(exact_resume=False), source)
                RunFolder(refuge).write(SUMMARY, summary)
        if error is None:
            return RunError(text)
        controller.state.report.notices.append(text)
        return error

    def _cure(self, controller: Controller) -> str:
        path = as_typed(self._folder.path)
        if self._elsewhere:
            return f"\n{self._elsewhere}"
        if self._thread.hangs:
            return ""
        resumable = can_go_on(self._folder, controller.job.experiment)
        where = (
            f"\nWhere it happened: {path}/{TRACEBACKS}"
            if controller.state.report.tracebacks and os.path.isfile(self._folder.path / TRACEBACKS)
            else ""
        )
        return where + (
            "\nIts checkpoints are kept; once that is mended, go on from the last one by: "
            f"{command()} resume {path}"
            if resumable
            else ""
        )

    def _next(self, job: Job) -> dict[str, str]:
        """Return what to type next: purpose → command."""
        path, typed = self._folder.path, command()
        run = as_typed(path)
        draws = any(
            isinstance(worker, ActorConfig) and worker.environment.draws
            for worker in job.experiment.workers.values()
        )
        go_on = {"go on": f"{typed} resume {run} --max-steps N"}
        return {
            "evaluate": f"{typed} eval {run}",
            **({"watch it play": f"{typed} play {run} --video {path.name}.mp4"} if draws else {}),
            "plot": f"{typed} plot {run} --out {path.name}.png",
            **(go_on if can_go_on(self._folder, job.experiment) else {}),
        }


def _unwritable(error: OSError, path: Path) -> str:
    cure = "free the disk, or let yourself write there"
    if isinstance(error, Unanswered):
        cure = "look whether its server, or device, is well"
    return f"{error.filename or path} cannot be written: {error.strerror}; {cure}"


def _in_refuge(refuge: Path, complete: bool) -> str:
    """Return what to do with a run's last checkpoint, and summary, in its `refuge`."""
    if complete:
        return (
            f"The run is complete but for that, and its last checkpoint is in {refuge}: move that folder to "
            f"where it may stay, or go further from there, with a higher limit, by: {command()} resume "
            f"{refuge} --max-steps N"
        )
    return f"Its last checkpoint is elsewhere; go on from it by: {command()} resume {refuge}"


def never_began(reason: str) -> dict[str, Any]:
    """Say so, and return the summary that there would be."""
    print(f"{reason} before the run began: nothing is kept", file=sys.stderr)
    return _summary(Progress(), "interrupted", reason)


def _returns_notice(experiment: Experiment) -> list[str]:
    """Say what the returns are of that may end the run, where that is not plain."""
    limits = experiment.limits
    played = [config for config in experiment.groups(ActorConfig).values() if config.plays()]
    if limits.mean_return is None and "return/" not in limits.until:
        return []
    told = dict.fromkeys(config.environment.rewarded for config in played)
    return [
        f"the return that ends this run is of {text}: a condition may name that (limits.until)"
        for text in told
        if text
    ]


@contextmanager
def _same_directory() -> Iterator[None]:
    """Come back to the working directory, even one that was removed: an environment may
    take this process to another one, and what to type next is told as seen from here."""
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield
    finally:
        with suppress(OSError):
            os.fchdir(here)
        os.close(here)


def _summary(progress: Progress, status: str, reason: str) -> dict[str, Any]:
    stage = {"stage": progress.where} if progress.where else {}
    told = progress.limiters.values()
    counts = (
        {name: int(sum(limiter[name] for limiter in told)) for name in ("started", "committed", "voided")}
        if told
        else {}
    )
    return {
        "status": status,
        "reason": reason,
        "env_steps": progress.steps,
        "seconds": round(progress.seconds, 3),
        "steps_per_second": round(progress.steps / progress.seconds, 1) if progress.seconds else 0.0,
        "updates": progress.updates,
        "mean_return": progress.mean_return,
        **({"mean_returns": several} if (several := progress.mean_returns) and "" not in several else {}),
        "episodes": progress.episodes,
        "dropped": progress.dropped,
        **counts,
        **stage,
    }
