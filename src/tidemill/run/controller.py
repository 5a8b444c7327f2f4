"""The controller of a run: hears its workers from their beginning (`run/beginning.py`) to
their end (`run/ending.py`), and does what views and commands ask for meanwhile.

What is known of the run stands in `run/run_state.py`. What workers report is taken by
`run/worker_messages.py`; what follows is looked at by `run/conditions.py` (limits on
returns, stages of a curriculum), `run/deaths.py` and `run/stall_watch.py`.

A worker that dies begins a new life (`run/supervisor.py`), until its group has used up
those that it has; an error that a worker reports ends the run: there is one cause to
read, and a checkpoint to resume from.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from tidemill.api.control_messages import ENDED, Pause, Save, Start, State, TryAgain
from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Job, Launcher
from tidemill.core.clock import awake, noticing_stops
from tidemill.core.errors import BrokenOff, HangLeft, RunError, place
from tidemill.core.resource_shortage import cause_of
from tidemill.core.run_marks import marking_own
from tidemill.core.user_code_loading import is_users_file
from tidemill.run.beginning import Beginning
from tidemill.run.conditions import Conditions
from tidemill.run.cuts import Cuts
from tidemill.run.deaths import Deaths
from tidemill.run.ending import Ending
from tidemill.run.enough_actors import EnoughActors
from tidemill.run.host_places import HostPlace, crowded
from tidemill.run.host_watch import HostView, HostWatch
from tidemill.run.interrupts import Interrupts, signal_name
from tidemill.run.losses import Losses
from tidemill.run.memory_watch import MemoryWatch
from tidemill.run.next_lives import NextLives
from tidemill.run.progress import Progress
from tidemill.run.recorder import Recorder
from tidemill.run.run_state import RunState
from tidemill.run.silence import SilenceWatch, TurnWatch
from tidemill.run.stall_watch import Stalls
from tidemill.run.supervisor import Supervisor
from tidemill.run.worker_messages import WorkerMessages
from tidemill.workers.cut_files import newest_cut

# seconds that workers are left alone at a time, once they update: being woken by each
# word costs more than to read it
UNHEARD = 0.05


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

    state: what is known of the run
    stalls: why there is no update, where none comes
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
        self.job, self.launcher, self._watch = job, launcher, watch
        self.state = state = RunState(job.experiment, interrupts, progress)
        experiment, report = job.experiment, state.report
        self.stalls = Stalls(experiment, launcher, state)
        self._hosts = HostWatch(launcher.each_host)
        self._recorder = Recorder(experiment, state, self._hosts, record)
        self._conditions = Conditions(experiment, job.folder, state, record)
        number = 1 + (newest_cut(Path(job.folder)) if job.folder else 0)
        self._cuts = Cuts(
            experiment, launcher.takes_turns, state, self._hear_and_look, self._conditions.save, number
        )
        self._losses = Losses(launcher, state)
        self._next_lives = NextLives(
            experiment.exact_resume, state, self._recorder, self._conditions, self._cuts, go_back
        )
        self._supervisor = Supervisor(experiment, launcher, state, self._losses, self._next_lives)
        self._enough_actors = EnoughActors(experiment, state, self._supervisor.given_up, self.stalls.begin)
        self._messages = WorkerMessages(
            experiment,
            launcher.takes_turns,
            state,
            self._recorder,
            self._conditions,
            self._cuts,
            self.stalls,
            self._supervisor,
        )
        self._beginning = Beginning(
            job,
            launcher,
            state,
            self.stalls,
            self._conditions,
            self._cuts,
            self._supervisor,
            self._hear,
            self._look_for_signal,
            self._look_at_hosts,
            lambda: watch(self),
        )
        self._ending = Ending(experiment, launcher, state, self._cuts, self.stalls, self._conditions)
        self._deaths = Deaths(
            experiment,
            launcher,
            state,
            self._supervisor,
            self._messages,
            self._ending,
            trainers_live_again=go_back is not None,
        )
        processes = experiment.processes()
        self._silence = SilenceWatch(
            processes, launcher.stack, launcher.condition, report.notify_of, self._deaths.hangs
        )
        self._turns = TurnWatch(
            lambda text: alarm(report.mask(text)),
            self._ending.hurry if launcher.takes_turns else lambda: None,
            lambda: state.running,
            state.interrupts,
            lambda worker: worker in state.members and not state.members[worker].config.limited,
            lambda: bool(state.reason),
        )
        if launcher.takes_turns:
            state.interrupts.tell = alarm
        every = [[name for name, _ in experiment.members()]]  # in one process
        self._memory = MemoryWatch(
            processes if launcher.processes else every, launcher.own_bytes, report.notify_of
        )
        self._last_watch = 0.0

    @property
    def steps_per_second(self) -> float:
        """Env steps per second over the last few seconds."""
        return self.state.progress.rate.per_second(awake())

    @property
    def hosts(self) -> Mapping[str, HostView]:
        """The hosts of the run by name, where there are several."""
        return self._hosts.hosts

    @property
    def places(self) -> Mapping[str, HostPlace]:
        """What each of these hosts has, and which workers live there."""
        return self._hosts.places

    # ---- from the start to the end -----------------------------------------------------

    def run(self) -> None:
        """Run to the end. Raises `RunError` with the first cause when a worker fails;
        whatever happens, nothing is left behind."""
        with (
            self._turns,
            nullcontext() if self.launcher.processes else marking_own(),
        ):
            self._run()

    def _run(self) -> None:
        interrupts = self.state.interrupts
        interrupts.armed = True
        try:
            with (
                noticing_stops(),
                interrupts.noting_ctrl_z() if self.launcher.outlives_stops else nullcontext(),
            ):
                try:
                    self._live()
                finally:
                    if interrupts.armed:
                        self._ending.finish(self._messages, self._wait, self._look)
        except BrokenOff as broken:
            name = signal_name(interrupts.first)
            how = (
                f"{interrupts.grace:.0f} s after {name}"
                if interrupts.overdue
                else f"by {name} for the second time"
            )
            self.state.reason = f"broken off {how}"
            left = [n for n, member in self.state.members.items() if member.config.limited]
            raise RunError(
                f"broken off {how}{place(broken, is_users_file)}, without a final checkpoint"
                f"{self.stalls.conditions_of(left)}"
            ) from None
        finally:
            interrupts.armed = False
            self._close_launcher()
            self.state.progress.count_saved()
            self._recorder.record_rest()

    def _close_launcher(self) -> None:
        """Have the launcher end what still lives. What it raises is a notice: the run is
        over."""
        try:
            self._ending.await_closed()
            self.launcher.close(self._ending.patience)
        except HangLeft:
            self._close_launcher()  # the others' environments are still to be closed
        except Exception as error:
            self.state.report.notify(f"{type(self.launcher).__name__} could not tidy up: {cause_of(error)}")
        self.state.report.notify_all(self.launcher.notices())

    def _live(self) -> None:
        if self._beginning.begin():
            self._watch(self)  # inline the first turn may be in an update of minutes
            self._loop()

    def _loop(self) -> None:
        while not self._ending.over:
            self._hear_trainers()
            self._supervisor.let_rest()
            self._ending.cut(self._hear)

    def _hear_trainers(self) -> None:
        """Hear all workers until the run's trainers have come to their end."""
        while not self._ending.over:
            self._look_for_signal()
            if not self.state.reason:
                self._conditions.look_at_returns()
            self._ending.look()
            alone = (
                self.state.progress.updates and not self.state.reason and self.state.progress.rounds is None
            )
            self._hear(UNHEARD if alone else 0.0)
            if self._cuts.due and not self.state.reason and not (self.state.paused and self._cuts.agreed):
                self._cuts.cut()
            self.stalls.look()

    # ---- hear and look -----------------------------------------------------------------

    def _hear(self, least: float = 0.0) -> None:
        """Wait for what workers report, take it, and see to those that have died."""
        self._wait(0.1, least)
        for name, cause in self._supervisor.look().items():
            if not self.state.members[name].buried:
                self._deaths.bury(name, cause, hangs=True)
        for name, member in self.state.members.items():
            if not member.buried and not self._messages.read(name) and member.state not in ENDED:
                self._deaths.bury(name)
        self._look()

    def _wait(self, seconds: float, least: float = 0.0) -> None:
        try:
            self.launcher.wait(seconds, least)
        except HangLeft as left:  # that was told
            self._turns.turn()
            if left.worker:
                self._messages.read(left.worker)
                self.state.members[left.worker].state = State.FAILED
            return
        except Exception as error:
            raise RunError(f"{type(self.launcher).__name__} cannot wait: {cause_of(error)}") from error
        if told := self._turns.turn():
            self.state.report.notify(told)

    def _look(self) -> None:
        if awake() - self._last_watch >= 0.1:
            self._last_watch = awake()
            self._losses.look()
            self.state.report.notify_all(self.launcher.notices())
            self._enough_actors.look()
            if self.state.running and not (self.state.paused or self.state.finishing):
                self._silence.look(self.state.members)
                self._memory.look(self.state.members)
                self._hosts.look(self.state.members)
            self._recorder.record_when_due()
            self._watch(self)

    def _look_at_hosts(self) -> None:
        """Have the user see on which hosts workers stand, before they begin."""
        self._hosts.look(self.state.members)
        if not self.places:
            return
        if text := crowded(self.places, self.job.experiment.processes()):
            self.state.report.notify(text)
        self._watch(self)

    def _hear_and_look(self) -> None:
        self._hear()
        self._look_for_signal()

    def _look_for_signal(self) -> None:
        if self.state.interrupts.suspend:
            self._suspend()
        self.state.note_signal()

    def _suspend(self) -> None:
        """Do as Ctrl-Z asks: stop, until somebody lets this process go on. The workers,
        which the terminal does not reach, pause meanwhile."""
        paused = self.state.paused
        self.pause()
        self.state.suspended = True
        self._watch(self)
        self.state.suspended = False
        self.state.interrupts.stop_here()
        if not paused:
            self.resume()

    # ---- commands ----------------------------------------------------------------------

    def pause(self) -> None:
        """Pause every worker, or all of them as soon as they run. At the run's end there
        is nothing to pause."""
        if self.state.reason:
            return
        if not self.state.paused:
            self._have_tried(False)
            if self.state.running:
                self.state.send_all(Pause())
            self.state.progress.pause()
        self.state.paused = True

    def resume(self) -> None:
        """Start every worker again."""
        if self.state.paused:
            self._have_tried(True)
            if self.state.running:
                self.state.send_all(Start())
            self.state.progress.go_on()
        self.state.paused = False
        self.stalls.begin()

    def _have_tried(self, on: bool) -> None:
        """Tell workers that do not run yet whether to try again what is away."""
        for member in self.state.members.values():
            if member.begins:
                member.send(TryAgain(on))

    def change(self, experiment: Experiment, settings: Mapping[str, dict[str, float | None]]) -> None:
        """Go on with `experiment`, in which the limits `mean_return` and `until`, and
        `settings` of algorithms, by group of workers, may be others. Raises `ConfigError`
        for limits that cannot be."""
        experiment.check_judged()
        self._next_lives.change(settings)
        self.job = replace(self.job, experiment=experiment)
        self._conditions.change(experiment)

    def save(self) -> bool:
        """Write a checkpoint now. False while there is nothing to write: before the run
        and at its end, which writes one by itself."""
        if self.state.phase in ("starting", "ending"):
            return False
        if self.job.experiment.exact_resume:
            self._cuts.due = True
            return True
        for member in self.state.members.values():
            if member.config.limited:
                member.send(Save())
        return True

    @property
    def saves_later(self) -> bool:
        """True where the checkpoint that was asked for is written once the run goes on
        again: equal trainers of a run that resumes exactly rest by agreement, to which
        they do not come in a pause."""
        return self.state.paused and self._cuts.due and self._cuts.agreed
