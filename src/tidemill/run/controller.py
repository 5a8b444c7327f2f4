"""The controller of a run: configures the workers, starts them in order, watches them,
records what they report, and ends them.

The controller watches the mean return, since only it hears of all actors' episodes;
steps, updates and seconds are the trainer's to watch. Both end in the trainer's final
checkpoint.

A worker that dies begins a new life (`run/supervisor.py`), until its group has used up
those that it has; an error that a worker reports ends the run: there is one cause to
read, and a checkpoint to resume from.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Any

from tidemill.api.conditions import holds
from tidemill.api.control_messages import (
    ENDED,
    ChangeSettings,
    Configure,
    Down,
    EnterStage,
    EnvironmentStatistics,
    Episodes,
    Exit,
    Facts,
    Hold,
    Holding,
    Hurry,
    Measured,
    Notice,
    Pause,
    Relay,
    RoundOver,
    SampleFacts,
    Save,
    Saved,
    Saving,
    Start,
    State,
    Status,
    Staying,
    WorkerStatistics,
    pack,
    unpack_up,
)
from tidemill.api.edges import group_of
from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Job, Launcher
from tidemill.core.clock import awake, noticing_stops
from tidemill.core.config import encode
from tidemill.core.errors import (
    CheckpointError,
    ConfigError,
    RunError,
    TidemillError,
    did_you_mean,
    place,
    returned,
)
from tidemill.core.resource_shortage import why
from tidemill.core.secrets import known, mask
from tidemill.layouts.memory_plan import MemoryPlan, make_plan
from tidemill.metrics.record_pace import RecordPace
from tidemill.run.cuts import Cuts
from tidemill.run.events import Event
from tidemill.run.host_watch import HostView, HostWatch
from tidemill.run.interrupts import BrokenOff, Interrupts, signal_name
from tidemill.run.memory_watch import MemoryWatch
from tidemill.run.progress import Member, Progress
from tidemill.run.silence import SilenceWatch, TurnWatch, in_update
from tidemill.run.stall_report import SILENT, explain_stall, stall_limit
from tidemill.run.stall_watch import LONGEST_WORK, StallWatch
from tidemill.run.supervisor import READY_DEADLINE, Supervisor, levels
from tidemill.run.training_warnings import TrainingWarnings
from tidemill.store.query import Query, among
from tidemill.workers.cut_files import RUNNER, go_back_together, newest_cut, watchers, write_part_of
from tidemill.workers.population import Population

# seconds from the order to finish to every trainer's final checkpoint, but for one that
# works and may need longer
EXIT_DEADLINE = 12.0
CLOSE_DEADLINE = 4.0  # seconds that workers have to report their end, and again to be gone
# seconds that workers are left alone at a time, once they update: being woken by each
# word costs more than to read it
UNHEARD = 0.05
# seconds before the last progress of a worker in which what others told may still be why
# it waits: they tell now and then
BEFORE = 10.0
STALL = 30.0  # seconds without an update, everything alive, before the run says so


class _Cut(Exception):
    """The run is to end before it began."""


class Controller:
    """The controller runs one job on one launcher.

    record: function that is called with the metrics of updates: of each one, or of
        several together where a `RecordPace` holds them back
    watch: function that is called about ten times a second, for views and remote commands
    go_back: function that is called with the policies whose trainers have died, and begin
        a new life at their newest checkpoints, and with how far the other trainers are;
        it drops what was recorded since either, and returns how far the run was at the
        checkpoints. None: a trainer's death ends the run
    alarm: function that tells the user at once, from another thread, what the controller
        cannot: it hangs in an environment itself
    interrupts: the signals that end the run
    progress: where a resumed run goes on from

    Afterwards `reason` says how the run ended, `began` whether every worker became ready,
    `notices` what the user should read, `events` what happened besides training, and
    `tracebacks` what a developer should read.
    """

    def __init__(
        self,
        job: Job,
        launcher: Launcher,
        record: Callable[[dict[str, float]], None],
        watch: Callable[["Controller"], None],
        interrupts: Interrupts | None = None,
        progress: Progress | None = None,
        go_back: Callable[[Sequence[str], Progress], Progress] | None = None,
        alarm: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.job, self._launcher, self._record, self._watch = job, launcher, record, watch
        self._undo = go_back
        self.progress = progress or Progress()
        self.progress.begin(job.experiment)
        self.members: dict[str, Member] = {}
        self.notices: list[str] = []
        self.events: list[Event] = []
        self.of_events = set[str]()
        """Notices of what `events` hold."""
        self.tracebacks: list[str] = []
        self.paused = self.began = self.suspended = False
        self.reason = ""
        self.plan: MemoryPlan | None = None
        """The memory that the run takes, once every worker is READY."""
        self.interrupted = 0
        """The signal that ended the run, 0 for none."""
        self._interrupts = interrupts or Interrupts()
        self._farewell = max((config.farewell_s for _, config in job.experiment.members()), default=0.0)
        self._interrupts.grace += self._farewell
        self._facts = Facts()
        self._supervisor = Supervisor(
            job.experiment,
            self.members,
            launcher,
            self._note,
            self._tell,
            self._go_back,
            lambda: self._facts,
            self._orders,
        )
        # when, by which worker, and what notices said
        self._worker_notices: list[tuple[float, str, str]] = []
        self._silence = SilenceWatch(
            job.experiment.processes(), launcher.stack, launcher.condition, self._say, self._hangs
        )
        self._turns = TurnWatch(lambda text: alarm(mask(text, self._secrets)), self._hurry)
        every = [[name for name, _ in job.experiment.members()]]  # in one process
        self._memory = MemoryWatch(
            job.experiment.processes() if launcher.processes else every, launcher.own_bytes, self._say
        )
        self._hosts = HostWatch(launcher.each_host)
        self._cuts = Cuts(
            job.experiment.trained(),
            self.members,
            self._send,
            self._hear_and_look,
            lambda: bool(self.reason),
            self._say,
            self._keep_progress,
            watchers(job.experiment),
            job.experiment.exact_resume and not launcher.takes_turns,
            1 + (newest_cut(Path(job.folder)) if job.folder else 0),
        )
        self._several, self._judged = job.experiment.measured_by_several(), job.experiment.judged()
        self._pace = RecordPace()
        self._warnings = TrainingWarnings(encode(job.experiment), whole=not self.progress.updates)
        # what infos say was compared with what conditions wait for
        self._listened = not job.experiment.players()
        self._secrets = known(encode(job.experiment))  # nothing that is told, or written down, holds them
        self._running = False  # every worker was told to start
        self._finishing = False  # and to finish
        self._hurried = False  # and to do so at once
        self._deadline: float | None = None  # until which trainers have, once they were told to
        self._patience = 0.1  # seconds that the launcher gives workers
        self._last_watch = 0.0
        self._stalled = False  # that no update comes was told
        # by group: what was changed, in order, and not changed again
        self._changed = dict[str, list[ChangeSettings]]()
        self._stall = StallWatch(stall_limit(job.experiment), lambda: any(map(self._trains, self.members)))
        self._begun = dict[tuple[str, int], int]()  # env steps that were lost of samples, by worker and life
        self._held = set[str]()  # workers whose environments hold them, which was told

    @property
    def steps_per_second(self) -> float:
        """Env steps per second over the last few seconds."""
        return self.progress.rate.per_second(awake())

    @property
    def hosts(self) -> Mapping[str, HostView]:
        """The hosts of the run by name, where there are several."""
        return self._hosts.hosts

    @property
    def phase(self) -> str:
        """What the run does: starting, running, paused or ending."""
        if self.reason or self._finishing:
            return "ending"
        return "starting" if not self._running else "paused" if self.paused else "running"

    def run(self) -> None:
        """Run to the end. Raises `RunError` with the first cause when a worker fails;
        whatever happens, nothing is left behind."""
        self._interrupts.armed = True
        try:
            with (
                noticing_stops(),
                self._interrupts.noting_ctrl_z() if self._launcher.outlives_stops else nullcontext(),
            ):
                try:
                    self._live()
                finally:
                    if self._interrupts.armed:
                        self._finish()
        except BrokenOff:
            name = signal_name(self._interrupts.first)
            how = (
                f"{self._interrupts.grace:.0f} s after {name}"
                if self._interrupts.overdue
                else f"by {name} for the second time"
            )
            self.reason = f"broken off {how}"
            raise RunError(f"broken off {how}, without a final checkpoint") from None
        finally:
            self._interrupts.armed = False
            self._close_launcher()
            self._record_rest()

    def _close_launcher(self) -> None:
        """Have the launcher end what still lives. What it raises is a notice: the run is
        over."""
        try:
            self._launcher.close(self._patience)
        except Exception as error:
            self.notices.append(f"{type(self._launcher).__name__} could not tidy up: {_cause(error)}")

    def _live(self) -> None:
        try:
            try:
                links = returned(self._launcher.launch(self.job), dict, self._launcher.launch)
            except TidemillError:
                raise
            except Exception as error:
                raise RunError(f"the workers cannot be started: {_cause(error)}") from error
            configs = dict(self.job.experiment.members())
            if wrong := ", ".join(sorted(configs.keys() ^ links.keys())):
                what = f"{type(self._launcher).__name__}.launch()"
                raise RunError(f"{what} must return a link for each worker, and no more: {wrong}")
            self.members.update((name, Member(configs[name], link)) for name, link in links.items())
            self._configure()
            self.began = True
            self._start()
        except _Cut:
            return
        with self._turns if self._launcher.takes_turns else nullcontext():
            self._loop()

    def _finish(self) -> None:
        """Tell whoever still lives to finish, and wait for them. What goes wrong now is a
        notice: the cause came before."""
        self._finishing = True
        for member in self.members.values():
            if member.buried:
                member.state = State.FAILED
        # what they hold goes with the last checkpoints, where these are of now
        exact = self.job.experiment.exact_resume and self._cuts.whole and self._cuts.at_rest
        checkpoints = self._cuts.checkpoints if exact else {}
        for member in self.members.values():
            if member.state not in ENDED:
                member.link.send(pack(Exit(self.reason, checkpoints=checkpoints)))
        deadline = awake() + CLOSE_DEADLINE
        while living := {name: member for name, member in self.members.items() if member.state not in ENDED}:
            if awake() > deadline + max(
                member.config.farewell_s * member.works(CLOSE_DEADLINE) for member in living.values()
            ):
                break
            try:
                self._wait(0.1)
            except RunError as error:
                self.notices.append(str(error))
                return
            for name, member in living.items():
                messages = member.link.receive()
                if messages is None:
                    member.state = State.FAILED
                    self.notices.append(
                        f"{name} did not finish: {mask(self._launcher.obituary(name), self._secrets)}"
                    )
                for data in messages or ():
                    try:
                        self._take(name, member, unpack_up(data, name))
                    except TidemillError as error:
                        self.notices.append(str(error))
            self._look()
        if exact and not living:
            self._keep_progress(self._cuts.number, checkpoints)
        if not living:
            self._patience = CLOSE_DEADLINE  # they have reported their end, and close their environments
        for name, member in living.items():
            if condition := self._launcher.condition(name):
                self.notices.append(f"{name} {condition}; the run is over, and it was ended by force")
                continue
            if member.state is State.CONFIGURING:
                self.notices.append(f"{name} had not started yet when the run ended: it was ended by force")
                continue
            if self._trains(name):
                self.notices.append(
                    f"{name} was in an update, which did not end within {CLOSE_DEADLINE:.0f} s after the "
                    "run had; it was ended by force, and that update is lost"
                )
                continue
            where = ", most likely in its environment" if member.config.owns_environment else ""
            self.notices.append(
                f"{name} hangs{where}: it did not end within {CLOSE_DEADLINE:.0f} s after it was told to, "
                f"and was last heard {awake() - member.heard:.0f} s ago; it was ended by force"
            )

    # ---- start -------------------------------------------------------------------------

    def _configure(self) -> None:
        for names in levels(self.job.experiment):
            for name in names:
                self._send(name, Configure(self._facts))
            self._await(names, State.READY)
        self.plan = make_plan(need for member in self.members.values() for need in member.needs)
        self._watch(self)  # so that it is told before any of it is taken

    def _start(self) -> None:
        for name in self.members:
            self._tell_stages(name)
        exact = self.job.experiment.exact_resume
        if exact:  # nobody is ahead of who starts last
            self._cuts.hold()
        orders = sorted({member.config.order for member in self.members.values()})
        for order in orders:
            names = [name for name, member in self.members.items() if member.config.order == order]
            for name in names:
                self._send(name, Start())
            self._await(names, State.RUNNING)
        if exact:
            self._cuts.go_on()
        self._running = True
        self._look_at_rounds()
        self.events.append(Event(time(), "began"))
        self.progress.mark()
        if self.paused:
            self._tell_all(Pause())

    def _stages(self, name: str) -> list[Down]:
        """Return what a worker is told of the curriculum's stages."""
        curriculum, rounds = self.job.experiment.curriculum, self.progress.rounds
        if not curriculum:
            return []
        by_round = None if rounds is None else rounds.stages_for(name)
        if by_round is None:
            return [EnterStage(self.progress.stage, curriculum[self.progress.stage].options)]
        return [EnterStage(stage, curriculum[stage].options, number) for number, stage in by_round.items()]

    def _tell_stages(self, name: str, newest: bool = False) -> None:
        """Tell a worker of the curriculum's stages, or of the `newest` alone."""
        for message in self._stages(name)[-1 if newest else 0 :]:
            self._send(name, message)

    def _await(self, names: list[str], state: State) -> None:
        asked = awake()
        while waiting := [
            name
            for name in names
            if self.members[name].state is not state and name not in self._supervisor.given_up
        ]:
            self._look_for_signal()
            if self.reason:
                raise _Cut
            if awake() - max(asked, *(self.members[name].heard for name in waiting)) > READY_DEADLINE:
                raise RunError(
                    f"{', '.join(waiting)} did not become {state.value}, and said nothing for "
                    f"{READY_DEADLINE:.0f} s; a worker becomes ready once its environment or network is "
                    f"built: look into the run's logs{self._still(waiting)}"
                )
            self._hear()

    def _send(self, name: str, message: Down) -> None:
        member = self.members[name]
        if isinstance(message, (Configure, Start)):
            member.wanted = State.READY if isinstance(message, Configure) else State.RUNNING
        if not (member.buried or self._supervisor.bears(name)):  # its next life is told
            member.link.send(pack(message))

    # ---- watch -------------------------------------------------------------------------

    def _loop(self) -> None:
        limited = {name: member for name, member in self.members.items() if member.config.limited}
        while not all(
            member.state in ENDED or (self._deadline is not None and self._left(name))
            for name, member in limited.items()
        ):
            self._look_for_signal()
            if not self.reason:
                self._look_at_returns()
            if self.reason and self._deadline is None and not self._cuts.one_is_behind():
                self._deadline = awake() + EXIT_DEADLINE
                if self.job.experiment.exact_resume:
                    self._cuts.hold()
                for name, member in self.members.items():
                    if member.config.limited:
                        self._send(name, Exit(self.reason))
            self._hurry()
            if self._deadline is not None and awake() > self._deadline:
                living = {
                    name: member
                    for name, member in limited.items()
                    if member.state not in ENDED and not self._left(name)
                }
                late = [name for name, member in living.items() if not member.works(EXIT_DEADLINE)]
                if late and all(map(self._trains, late)):  # an update takes as long as it does
                    self._deadline = awake() + EXIT_DEADLINE
                elif late or awake() > self._deadline + self._farewell:
                    seconds = EXIT_DEADLINE + awake() - self._deadline
                    raise RunError(
                        f"{', '.join(living)} did not finish within {seconds:.0f} s after it was told to "
                        f"({self.reason}){self._still(living)}"
                    )
            alone = self.progress.updates and not self.reason and self.progress.rounds is None
            self._hear(UNHEARD if alone else 0.0)
            if self._cuts.due and not self.reason and not (self.paused and self._cuts.agreed):
                self._cuts.cut()
            self._look_for_stall()
        until = awake() + CLOSE_DEADLINE
        while self.job.experiment.exact_resume and not self._cuts.at_rest and awake() < until:
            self._hear()  # parts are written once nobody does anything any more

    def _hurry(self) -> None:
        """Tell trainers where a signal's time is running out. Another thread does it,
        too, where they take turns in this one."""
        if self._interrupts.urgent and not self._hurried:
            self._hurried = True
            for name, member in self.members.items():
                if member.config.limited and member.state not in ENDED:
                    self._send(name, Hurry())

    def _hear_and_look(self) -> None:
        self._hear()
        self._look_for_signal()

    def _left(self, name: str) -> bool:
        """True of a silent trainer whose equal has finished, and so has saved what all of
        them know: its process hangs, most likely in the environment of an actor that it
        takes turns with. `_finish` tells, and ends it."""
        group = name.rpartition("-")[0]
        finished = any(
            m.state is State.COMPLETED for n, m in self.members.items() if n.rpartition("-")[0] == group
        )
        return finished and awake() - self.members[name].heard > SILENT

    def _wait(self, seconds: float, least: float = 0.0) -> None:
        try:
            self._launcher.wait(seconds, least)
        except Exception as error:
            raise RunError(f"{type(self._launcher).__name__} cannot wait: {_cause(error)}") from error
        if seconds := self._turns.turn():
            self._say(f"the environment has come back, after {seconds:.0f} s")

    def _hear(self, least: float = 0.0) -> None:
        self._wait(0.1, least)
        self._supervisor.look(ending=bool(self.reason))
        for name, member in self.members.items():
            if member.buried:
                continue
            messages = member.link.receive()
            if messages is None:
                if member.state not in ENDED:
                    self._bury(name)
                continue
            unread = (unpack_up(data, name) for data in messages)
            try:
                for message in unread:
                    self._take(name, member, message)
            except BaseException:
                # that the worker has ended, say, is not lost behind what was raised
                states = [message.state for message in unread if isinstance(message, Status)]
                member.state = [member.state, *states][-1]
                raise
        self._look()

    def _hangs(self, name: str, cause: str) -> None:
        """Take a worker that something holds for dead, where it may live again; else tell
        the cure, once."""
        if self._launcher.restarts and not self.reason:
            self._bury(name, cause, hangs=True)
        elif name not in self._held:
            self._held.add(name)
            cure = "with --launch processes it would live again"
            if self.members[name].config.owns_environment:
                cure = (
                    "Gymnasium(threads=1) has lanes step in threads of their own, which are left where they "
                    f"hang, and {cure}"
                )
            self._say(f"{name}: {cause}; nobody can end its thread. {cure}")

    def _bury(self, name: str, cause: str = "", hangs: bool = False) -> None:
        """Take note of a worker that has died, with what it and those that die with it
        have still told."""
        self._note_signal()  # a batch system tells all at once, and others may be quicker to end
        cause = mask(cause or self._launcher.obituary(name), self._secrets)
        with_it = {other: self.members[other] for other in self._supervisor.with_it(name)}
        for other, member in with_it.items():
            if other != name and not member.buried:
                for data in member.link.receive() or ():
                    self._take(other, member, unpack_up(data, other))
        limited = any(member.config.limited and member.state not in ENDED for member in with_it.values())
        if limited and self._undo is None:
            self.members[name].state = State.FAILED
            raise RunError(f"{name} is gone: {cause}")
        exact = name in go_back_together(self.job.experiment)
        if self.reason and self._running and exact and self.members[name].config.limited:
            self.members[name].state = State.FAILED
            raise RunError(f"{name} is gone as the run ended, which it did not come to: {cause}")
        if self.reason and self._running and (exact or not limited):
            self.members[name].state = State.FAILED
            self.notices.append(f"{name} is gone, as the run ended: {cause}")
            return
        try:
            self._supervisor.died(name, cause, hangs)
        except RunError:
            self.members[name].state = State.FAILED
            raise
        if self._deadline is not None:  # the next life ends the run as this one would have
            self._deadline = awake() + EXIT_DEADLINE

    def _note(self, event: Event) -> None:
        """Take note of an event, and of what was lost with it."""
        self.events.append(event)
        life = event.worker, event.life
        if event.what == "lost" or (event.what == "died" and life not in self._begun):
            self.progress.lost_samples += event.samples
            # what was known before may have been less, or was sent since
            self.progress.lost_steps += event.steps - self._begun.get(life, 0)
            self._begun[life] = event.steps

    def _look_for_losses(self) -> None:
        """Tell what is known by now to be lost with hosts."""
        for worker, life, host, samples, exact in self._launcher.losses():
            known = self._begun.get((worker, life), 0)
            steps = known if exact is None else exact
            if samples or steps != known:
                way = f"{samples:,} samples that were on their way" if samples else ""
                begun = f"{steps:,} env steps of samples that were begun" if steps else ""
                cause = f"with host {host}: {' and '.join(filter(None, (way, begun))) or 'nothing'}"
                self._note(Event(time(), "lost", worker, life, cause=cause, steps=steps, samples=samples))
                if samples:
                    self._tell(f"of {worker} is lost {cause}")

    def _say(self, text: str) -> None:
        self.notices.append(mask(text, self._secrets))

    def _tell(self, text: str) -> None:
        """Tell the user of what stands among the events."""
        self.notices.append(mask(text, self._secrets))
        self.of_events.add(self.notices[-1])

    def _go_back(self, policies: Sequence[str]) -> None:
        """Go back to the newest checkpoints of `policies`, whose trainers begin a new
        life there."""
        assert self._undo is not None  # `_bury` has seen to that
        self._record_rest()
        before, others = Progress(), Progress()
        for member in self.members.values():
            if member.update.update:
                (before if member.buried else others).count(member.update)
            if member.buried:
                member.forget_updates()
        point = self._undo(policies, others)
        self._cuts.forget()
        self.progress.go_back(point, others, policies)
        if self.progress.rounds is not None:
            self._look_at_rounds()
            for name in self.members:
                self._tell_stages(name)
        undone = max(before.steps - point.steps, 0)
        names = " and ".join(policies)
        self.events.append(Event(time(), "went back", policy=names, steps=undone))
        self._tell(f"{names} goes back to its newest checkpoint: {undone:,} env steps are undone")

    def _orders(self, name: str) -> tuple[list[Down], list[Down]]:
        """Return what a worker of a later life is told before it starts, and after."""
        before: list[Down] = [*self._changed.get(group_of(name), ())]
        if self.job.experiment.exact_resume:
            before.append(Hold(on=False, cut=self._cuts.number))
        before += self._stages(name)
        after: list[Down] = [Exit(self.reason)] if self.reason else [Pause()] if self.paused else []
        return before, after

    def _keep_progress(self, cut: int, checkpoints: Mapping[str, int]) -> None:
        """Write what decides when stages of the curriculum begin, as a part of a cut."""
        if not (self.job.experiment.curriculum and self.job.folder):
            return
        try:
            write_part_of(Path(self.job.folder), RUNNER, self.progress.state(), cut, checkpoints)
        except CheckpointError as error:
            self._say(f"{error}. Training goes on; a resumed run goes on from the cut before")

    def _record_when_due(self) -> None:
        if not self.progress.recorded and self._pace.allows():
            self._record_rest()

    def _record_rest(self) -> None:
        if not self.progress.recorded:
            record = self.progress.record(self.members) | self._hosts.metrics()
            self._record(record)
            self.notices += map(str, self._warnings.add(record))

    def _look(self) -> None:
        if awake() - self._last_watch >= 0.1:
            self._last_watch = awake()
            self._look_for_losses()
            if self._running and not (self.paused or self._finishing):
                self._silence.look(self.members)
                self._memory.look(self.members)
                self._hosts.look(self.members)
            self._record_when_due()
            self._watch(self)

    def _look_for_signal(self) -> None:
        if self._interrupts.suspend:
            self._suspend()
        self._note_signal()

    def _note_signal(self) -> None:
        if self._interrupts.first and not self.reason:
            self.interrupted = self._interrupts.first
            self.reason = signal_name(self.interrupted)

    def _take(self, name: str, member: Member, message: Any) -> None:
        member.heard, member.saving = awake(), isinstance(message, Saving)
        if isinstance(message, (Status, Episodes, Measured, Saving, Saved, Holding, Staying)):
            self._stall.move()
        self._cuts.take(name, message)
        kept = self.progress.rounds is not None and self.progress.rounds.take(name, message)
        match message:
            case Saving():
                self.progress.keep(message.policy, message.updates)
                # a run that goes on from there keeps all records until there, and drops
                # the others
                self._record_rest()
            case Saved():
                self.progress.note_saved(message.policy, message.steps)
            case Staying():
                member.awaits = message
            case Status():
                self._take_status(name, member, message)
            case WorkerStatistics():
                self._take_statistics(name, member, message)
            case Measured():
                self._take_measured(name, message)
            case Episodes() if not kept:
                self.progress.count_episodes(group_of(name), message)
                self._look_at_infos()
            case RoundOver():
                self._look_at_rounds()
            case EnvironmentStatistics():
                self.progress.environment_statistics.merge(message.values)
            case Relay(policy=policy):
                for other, told in self.members.items():
                    if any((port.stream, port.role) == (policy, "publish") for port in told.config.ports()):
                        self._send(other, message.message)
            case Notice():
                self.notices.append(f"{name}: {mask(message.text, self._secrets)}")
                self._worker_notices.append((member.heard, name, self.notices[-1]))

    def _take_status(self, name: str, member: Member, message: Status) -> None:
        """Note what a worker has become. Raises `RunError` where it failed."""
        member.state = message.state
        self._supervisor.entered(name, message.state)
        if message.state is State.FAILED:
            if message.details:
                self.tracebacks.append(f"{name}: {mask(message.details, self._secrets)}")
            still = self._still(self.members) if message.waited else ""
            raise RunError(
                f"{name}{f' (life {member.life + 1})' * bool(member.life)}: "
                f"{mask(message.error, self._secrets)}{self._causes(name, message.waited)}{still}"
            )
        if message.state is State.READY:
            member.needs = message.facts.memory
            self._merge(name, message.facts)
        if message.state is State.COMPLETED and not (self.reason or self._finishing):
            if not member.config.limited:
                said = f": {message.reason}" if message.reason else ""
                raise RunError(
                    f"{name} ended before it was told to{said}; only workers of a configuration with "
                    "limited = True may"
                )
            if not self._others_go_on():
                self.reason = message.reason

    def _others_go_on(self) -> bool:
        """True while other members of a population go on to limits of their own, in a run
        that resumes exactly: else time would say how far they come."""
        exact = self.job.experiment.exact_resume and not self._launcher.takes_turns
        return (
            exact
            and bool(self.job.experiment.groups(Population))
            and any(member.config.limited and member.state not in ENDED for member in self.members.values())
        )

    def _take_statistics(self, name: str, member: Member, message: WorkerStatistics) -> None:
        """Count an update that a trainer has finished, or note what any worker tells of
        its time."""
        if message.update or message.progress != member.progress:
            self._stall.move()
        if message.update:
            self._stalled = False
            first = not self.members[name].update.update
            self.progress.count_update(name, message, self.members)
            self._record_when_due()
            if first:
                self._look_at_conditions()
            self._advance()
        else:
            member.note_statistics(message)

    def _take_measured(self, name: str, message: Measured) -> None:
        """Record what an evaluation, or another worker, has measured."""
        group = name.rpartition("-")[0]
        values = {
            f"{group}/{metric}" if among(metric, self._several) else metric: value
            for metric, value in message.values.items()
        }
        self._record({"step": float(message.step), **values})
        self.progress.note_iteration(message.step, message.values)
        if message.stage == self.progress.stage:  # else it was on its way when the stage changed
            self.progress.measured |= values
            # what comes at any time begins no stage of a run that resumes exactly
            if not (self.job.experiment.exact_resume and self.members[name].config.watches):
                self._advance()
        self._look_at_rounds()

    def _causes(self, failed: str, waited: float) -> str:
        """Return the first and the last of what others told while a worker waited until
        it failed; "" if it did not wait, or they told nothing."""
        since = awake() - waited - BEFORE
        texts = [text for at, name, text in self._worker_notices if waited and at >= since and name != failed]
        if not texts:
            return ""
        return f".\nMeanwhile, first: {texts[0]}" + (f"\nand last: {texts[-1]}" if len(texts) > 1 else "")

    def _look_at_returns(self) -> None:
        """End the run where a mean return has reached the limit."""
        target, windows = self.job.experiment.limits.mean_return, self.progress.windows
        if target is None or windows is None:
            return
        for who in self._judged:
            if windows.full(who) and (mean := windows.means(who)["return"]) >= target:
                self.reason = (
                    f"mean return {mean:.1f} of the last {windows.count(who)} "
                    f"episodes{f' of {who}' if who else ''}"
                )
                return

    def _look_at_infos(self) -> None:
        """Say so, once as many episodes have ended as the window holds, where a condition
        waits for what no info has said."""
        windows = self.progress.windows
        texts = [self.job.experiment.limits.until, *(stage.until for stage in self.job.experiment.curriculum)]
        if self._listened or windows is None or not any(texts) or not windows.all_full():
            return
        self._listened, known = True, windows.metrics()
        said = [name for name in known if name.startswith("info/")]
        for text in filter(None, texts):
            for name in Query.parse(text).fields():
                if name.startswith("info/") and name not in known:
                    self.notices.append(
                        f'"{text}" waits for "{name}", which no info of the episodes so far has said; '
                        f"{did_you_mean(name, said)}"
                    )

    def _still(self, names: Iterable[str]) -> str:
        """Return which of these workers something keeps still that they cannot tell
        themselves, to follow a message."""
        return "".join(
            f".\n{name} {condition}" for name in names if (condition := self._launcher.condition(name))
        )

    def _look_at_conditions(self) -> None:
        """Say so when one waits for what nobody measures, where that was not known
        before."""
        try:
            self.job.experiment.check_conditions(self.progress.metrics)
        except ConfigError as error:
            self.notices.append(f"{error}. It will never hold")

    def _advance(self) -> None:
        """End the run, or go over to the curriculum's next stage, where the condition for
        that holds; where stages begin at rounds `_look_at_rounds` does."""
        limits, known = self.job.experiment.limits, self.progress.known()
        if limits.until and holds(limits.until, known):
            self.reason = self.reason or limits.until
        if self._running and self.progress.rounds is None and self._end_stage():
            for name in self.members:
                self._tell_stages(name)

    def _end_stage(self) -> bool:
        """Go over to the curriculum's next stage where the condition for that holds. True
        where it does."""
        stages, progress = self.job.experiment.curriculum, self.progress
        if not stages or not (until := stages[progress.stage].until) or not holds(until, progress.known()):
            return False
        progress.enter_stage(progress.stage + 1)
        self.notices.append(
            f"curriculum: stage {progress.stage + 1} of {len(stages)} begins after {progress.steps:,} "
            "env steps"
        )
        return True

    def _look_at_rounds(self) -> None:
        """Say in which stage the next round is, once all is known that decides it."""
        rounds = self.progress.rounds
        while rounds is not None and rounds.due:
            for name, message in rounds.episodes():
                self.progress.count_episodes(group_of(name), message)
                self._look_at_infos()
            ended = self._end_stage()
            rounds.tell(self.progress.stage)
            for name in self.members if ended else rounds.parties:
                self._tell_stages(name, newest=True)

    def _merge(self, name: str, facts: Facts) -> None:
        for policy, spaces in facts.spaces.items():
            known = self._facts.spaces.setdefault(policy, spaces)
            if known != spaces:
                raise RunError(
                    f'{name} plays policy "{policy}" in spaces that differ from those of another worker; '
                    f"give each kind of agents a policy: {spaces} and {known}"
                )
        for stream, blocks in facts.samples.items():
            other = self._facts.samples.setdefault(stream, blocks)
            if other != blocks:
                fields = [
                    field
                    for field in SampleFacts.__struct_fields__
                    if getattr(blocks, field) != getattr(other, field)
                ]
                ours, theirs = (
                    ", ".join(f"{field} = {getattr(facts, field)}" for field in fields)
                    for facts in (blocks, other)
                )
                raise RunError(
                    f'{name} fills sample stream "{stream}" with samples of {ours}, another worker with '
                    f"samples of {theirs}; one stream has one shape of samples: give each kind of actors a "
                    "stream"
                )

    def condition(self, worker: str) -> str:
        """Return what keeps a worker still that it cannot tell itself; "" for nothing."""
        return self._launcher.condition(worker)

    def _look_for_stall(self) -> None:
        """Tell that no update comes, and end the run where nothing has progressed for
        too long."""
        if not self._stalled and (why := self.stalled()):
            self._stalled = True
            self._say(why)
        if still := self._stall.look(self._running and not (self.paused or self.reason)):
            why = explain_stall(self.job.experiment, self.members, self._launcher.condition)
            raise RunError(
                f"nothing has progressed for {still:.0f} s (limits.stall_s = "
                f"{self.job.experiment.limits.stall_s:g}): {mask(why, self._secrets)}"
            )

    def _trains(self, name: str) -> bool:
        """True of a silent trainer that writes a checkpoint, or is in an update, for less
        than an hour."""
        member = self.members[name]
        silent = awake() - member.heard
        if not member.config.limited or member.buried or silent > LONGEST_WORK:
            return False
        return member.saving or (
            silent > SILENT and not self._launcher.condition(name) and in_update(self._launcher.stack(name))
        )

    def stalled(self) -> str:
        """Return why there is no update, "" as long as one may come."""
        silent = awake() - self.progress.last_update
        if self.paused or not self._running or silent < STALL:
            return ""
        why = explain_stall(self.job.experiment, self.members, self._launcher.condition)
        return f"no update for {silent:.0f} s: {why}"

    # ---- commands ----------------------------------------------------------------------

    def pause(self) -> None:
        """Pause every worker, or all of them as soon as they run. At the run's end there
        is nothing to pause."""
        if self.reason:
            return
        if not self.paused and self._running:
            self._tell_all(Pause())
        self.paused = True

    def resume(self) -> None:
        """Start every worker again."""
        if self.paused and self._running:
            self._tell_all(Start())
        self.paused = False
        self.progress.last_update = awake()

    def _suspend(self) -> None:
        """Do as Ctrl-Z asks: stop, until somebody lets this process go on. The workers,
        which the terminal does not reach, pause meanwhile."""
        paused = self.paused
        self.pause()
        self.suspended = True
        self._watch(self)
        self.suspended = False
        self._interrupts.stop_here()
        if not paused:
            self.resume()

    def change(self, experiment: Experiment, settings: Mapping[str, dict[str, float | None]]) -> None:
        """Go on with `experiment`, in which the limits `mean_return` and `until`, and
        `settings` of algorithms, by group of workers, may be others. Raises `ConfigError`
        for limits that cannot be."""
        experiment.check_judged()
        self.progress.changes += 1
        orders = {group: ChangeSettings(new, self.progress.changes) for group, new in settings.items()}
        for group, order in orders.items():
            # later lives are told, too: what they go on from may be of before
            earlier = [
                ChangeSettings(left, before.number)
                for before in self._changed.get(group, ())
                if (left := {name: v for name, v in before.settings.items() if name not in order.settings})
            ]
            self._changed[group] = [*earlier, order]
        for name in self.members:
            if group_of(name) in orders:
                self._send(name, orders[group_of(name)])
        self.job = replace(self.job, experiment=experiment)
        self._judged = experiment.judged()

    def stop(self, reason: str) -> None:
        """End the run cleanly, with a final checkpoint."""
        self.reason = self.reason or reason

    def save(self) -> bool:
        """Write a checkpoint now. False while there is nothing to write: before the run
        and at its end, which writes one by itself."""
        if self.phase in ("starting", "ending"):
            return False
        if self.job.experiment.exact_resume:
            self._cuts.due = True
            return True
        for name, member in self.members.items():
            if member.config.limited:
                self._send(name, Save())
        return True

    @property
    def saves_later(self) -> bool:
        """True where the checkpoint that was asked for is written once the run goes on
        again: equal trainers of a run that resumes exactly rest by agreement, to which
        they do not come in a pause."""
        return self.paused and self._cuts.due and self._cuts.agreed

    def _tell_all(self, message: Down) -> None:
        for name in self.members:
            self._send(name, message)


def _cause(error: Exception) -> str:
    """Return what a user reads of what a launcher has raised: of the system's errors what
    they say and of which file, of others where they come from, too."""
    if isinstance(error, OSError) or why(error) != str(error):
        file = getattr(error, "filename", None)
        return f"{why(error)}: {file}" if file else why(error)
    return f"{type(error).__name__}: {error}{place(error)}"
