"""How a run ends: its trainers are told to finish and have a while for it, then all
others are, and who does not come to an end is named."""

from collections.abc import Callable, Collection
from functools import cached_property

from tidemill.api.control_messages import ENDED, Exit, Hurry, State, pack, unpack_up
from tidemill.api.edges import group_of
from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Launcher
from tidemill.core.clock import awake
from tidemill.core.errors import RunError, TidemillError
from tidemill.core.thread_stacks import whereabouts
from tidemill.run.conditions import Conditions
from tidemill.run.cuts import Cuts
from tidemill.run.member import Member, turn
from tidemill.run.run_state import RunState
from tidemill.run.silence import CLOSING
from tidemill.run.stall_report import SILENT
from tidemill.run.stall_watch import LONGEST_WORK, Stalls
from tidemill.run.worker_messages import WorkerMessages
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.cut_files import go_back_together

EXIT_DEADLINE = 12.0  # seconds in which none of the trainers that are told to finish is at work
SLOW_TICK = 6.0  # seconds from which on a tick is said to have kept a trainer from its turn
CLOSE_DEADLINE = 4.0  # seconds that workers have to report their end, and again to be gone
SAVE_DEADLINE = 60.0  # that a trainer has besides which writes its checkpoint by then


class Ending:
    """The ending of a run.

    deadline: second of `awake` until which trainers have, once they were told to finish;
        those that are at work then have all of their time again
    patience: seconds that the launcher gives workers that still live when all is over
    """

    def __init__(
        self,
        experiment: Experiment,
        launcher: Launcher,
        state: RunState,
        cuts: Cuts,
        stalls: Stalls,
        conditions: Conditions,
    ) -> None:
        self._exact, self._launcher, self._state = experiment.exact_resume, launcher, state
        self._together = together = go_back_together(experiment)
        actors = (experiment.workers[group] for group in dict.fromkeys(map(group_of, together)))
        self._remote = any(
            isinstance(config, ActorConfig) and config.environment.bare().remote for config in actors
        )
        members = dict(experiment.members())
        turns = [[*members]] if launcher.takes_turns else experiment.processes()
        self._turns = [names for names in turns if any(members[name].limited for name in names)]
        self._cuts, self._stalls, self._conditions = cuts, stalls, conditions
        state.interrupts.grace += max((config.farewell_s for _, config in experiment.members()), default=0.0)
        self._grace = state.interrupts.grace
        self.deadline: float | None = None
        self._late = False  # it was over at the last look
        self._told_at = 0.0  # when trainers were told to finish
        self.patience = 0.1
        self._hurried = False  # trainers were told to finish at once
        self._hosts_know = False  # that the run is to end

    @cached_property
    def _limited(self) -> dict[str, Member]:
        """Those that end the run: trainers."""
        return {name: member for name, member in self._state.members.items() if member.config.limited}

    # ---- trainers ----------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """True when no trainer is to be waited for any longer, and nobody begins another
        life with whom they go back, to come to their end again."""
        if any(member.buried and self.goes_back(name) for name, member in self._state.members.items()):
            return False
        return all(
            member.state in ENDED or (self.deadline is not None and self._left(name))
            for name, member in self._limited.items()
        )

    def look(self) -> None:
        """Tell trainers to finish once the run has a reason to end. Raises `RunError` for
        who has not in time."""
        if (ends := bool(self._state.reason)) is not self._hosts_know:
            self._hosts_know = ends
            self._launcher.tell_of_end(ends)
        if not ends:
            self.deadline = None  # it had one, and all went back behind that
        if self._state.reason and self.deadline is None and not self._cuts.one_is_behind():
            self._extend()
            self._told_at = awake()
            if self._exact:
                self._cuts.hold_for_good()
            for member in self._limited.values():
                member.send(Exit(self._state.reason))
        self.hurry()
        if self.deadline is None:
            return
        begins = any(member.begins and not self._left(name) for name, member in self._limited.items())
        if begins and awake() - self._told_at < LONGEST_WORK:
            self._extend()  # the supervisor has deadlines for those that are to live again
        elif awake() <= self.deadline:
            self._late = False
        elif not self._late:  # what has come is heard first: a callback may have taken long
            self._late = True
        else:
            self._late = False
            self._look_who_is_late()

    def _extend(self) -> None:
        """Give trainers that are to finish all of their time again: they hear it once
        actors that they take turns with are through their ticks."""
        members = self._state.members
        ticks = max((turn(members[name] for name in names) for names in self._turns), default=0.0)
        self.deadline = awake() + EXIT_DEADLINE + ticks
        self._state.interrupts.grace = self._grace + ticks

    def hurry(self) -> None:
        """Tell trainers where a signal's time is running out. Another thread does it,
        too, where they take turns in this one; there all others are told, but in exact
        runs, whose bits depend on how long turns are."""
        if self._state.interrupts.urgent and not self._hurried:
            self._hurried = True
            everybody = self._launcher.takes_turns and not self._exact
            for member in self._state.members.values():
                if (everybody or member.config.limited) and member.state not in ENDED:
                    member.send(Hurry())

    def _look_who_is_late(self) -> None:
        living = {
            name: member
            for name, member in self._limited.items()
            if member.state not in ENDED and not self._left(name)
        }
        silent = [name for name, member in living.items() if not member.works(EXIT_DEADLINE)]
        seconds = awake() - self._told_at
        at_work = all(map(self._stalls.trains, silent)) and any(map(self._stalls.works, living))
        most = EXIT_DEADLINE + max((member.config.farewell_s for member in living.values()), default=0.0)
        if (at_work and seconds < LONGEST_WORK) or (not silent and seconds < most):
            self._extend()
            return
        raise RunError(
            f"{', '.join(living)} did not finish within {seconds:.0f} s after it was told to "
            f"({self._state.reason}){self._stalls.conditions_of(living)}{self._slow_turns(living)}"
        )

    def _slow_turns(self, living: Collection[str]) -> str:
        """Return what helps where trainers have had no turn yet, since an actor of their
        thread takes long; else ""."""
        ticks = {
            name: self._state.members[name].tick
            for names in self._turns
            if not {*names}.isdisjoint(living)
            for name in names
        }
        slowest = max(ticks, key=ticks.__getitem__, default="")
        if ticks.get(slowest, 0.0) < SLOW_TICK:
            return ""
        return (
            f". A tick of {slowest} takes {ticks[slowest]:.3g} s, in which nobody else of its thread has a "
            "turn: take fewer lanes, have them step in threads (threads of Gymnasium), or have the trainer "
            "in a process of its own (--launch processes --layout actors=1,trainers=1)"
        )

    def goes_back(self, name: str) -> bool:
        """True where the death of `name` leads all back to the newest cut although the
        run has reached its limit, to come there again: without that worker's part its
        last cut would be none. One that is stopped has the cut before, and the weights of
        its end; so has one whose host is gone, as another may not be found, and one that
        plays on a server, whose open episodes would be cut there, if it is there."""
        together = name in self._together and self._state.comes_again
        return together and not (self._remote or self._launcher.gone_with(name))

    def _left(self, name: str) -> bool:
        """True of a trainer that is dead, begins another life or is silent, and whose
        equal has finished: that has saved what all of them know. A silent one hangs, most
        likely in the environment of an actor that it takes turns with. `finish` tells,
        and ends it. So does one whose next life waits for an actor's, which waits for a
        server: it would go on from its newest checkpoint, and come to nothing new."""
        member = self._state.members[name]
        if member.begins and self._away:
            return True
        away = member.begins or awake() - member.heard > SILENT
        return away and self.saved_by_equal(name)

    @property
    def _away(self) -> bool:
        """True while somebody's next life waits for what its environment connects to."""
        return any(each.begins and each.pauses for each in self._state.members.values())

    def saved_by_equal(self, name: str) -> bool:
        """True of a trainer if it, or an equal one, has finished."""
        group, members = name.rpartition("-")[0], self._state.members.items()
        return any(m.state is State.COMPLETED for n, m in members if n.rpartition("-")[0] == group)

    def cut(self, hear: Callable[[], None]) -> None:
        """Have the parts of the last cut of a run that resumes exactly written, which go
        with its last checkpoints, once all are at rest: hear workers until they are, for
        a while, and until they have written them. Returns at once where the run is not
        over any more, since somebody has died and all go back, and where somebody waits
        for a server, who would come to no rest: the cut before is the newest whole one
        then."""
        if not self._exact:
            return
        if self.deadline is None:  # its trainers have ended by themselves
            self._cuts.hold_for_good()
        self._hear_until_rest(hear)
        if self.over and self._cuts.whole and self._cuts.at_rest:
            # before the others' parts make the cut whole
            self._conditions.save(self._cuts.number, self._cuts.checkpoints)
            self._cuts.have_parts_written()
            try:
                self._hear_until_rest(hear)
            except RunError as error:  # the run is over, and trained; the cut before stays
                self._state.report.notify(str(error))

    def _hear_until_rest(self, hear: Callable[[], None]) -> None:
        until = awake() + CLOSE_DEADLINE
        while self.over and not (self._cuts.at_rest or self._away) and awake() < until:
            hear()

    # ---- all workers -------------------------------------------------------------------

    def finish(
        self, messages: WorkerMessages, wait: Callable[[float], None], look: Callable[[], None]
    ) -> None:
        """Tell whoever still lives to finish, and wait for them. What goes wrong now is a
        notice: the cause came before. `wait`: function that waits for a message, so many
        seconds at most; `look`: function that is called after each time."""
        self._state.finishing = True
        for member in self._state.members.values():
            if member.buried:
                member.state = State.FAILED
        for member in self._state.members.values():
            if member.state not in ENDED:
                member.link.send(pack(Exit(self._state.reason)))
        deadline = awake() + CLOSE_DEADLINE
        while living := {n: member for n, member in self._state.members.items() if member.state not in ENDED}:
            longer = (
                max(SAVE_DEADLINE * member.saving, member.config.farewell_s * member.works(CLOSE_DEADLINE))
                for member in living.values()
            )
            if awake() > deadline + max(longer):
                break
            try:
                wait(0.1)
            except RunError as error:
                self._state.report.notify(str(error))
                return
            self._hear_last(messages)
            if self._launcher.takes_turns and any(member.state in ENDED for member in living.values()):
                deadline = awake() + CLOSE_DEADLINE  # the others have had no turn meanwhile
            look()
        if not living:
            self.patience = CLOSE_DEADLINE  # they have reported their end
        for name, member in living.items():
            self._state.report.notify_of(name, self._why_forced(name, member))

    def await_closed(self) -> None:
        """Wait for environments that workers close which have reported their end, and
        tell which of them do not let themselves be closed in time; a signal shortens it.
        Of workers that take turns `TurnWatch` tells it."""
        if self.patience < CLOSE_DEADLINE or self._launcher.takes_turns:
            return
        began, members = awake(), {n: m for n, m in self._state.members.items() if not m.buried}
        # all are listened to: one that has hung up would wake for ever whoever waits
        while closing := [
            name for name, m in members.items() if m.link.receive() is not None and m.config.owns_environment
        ]:
            if awake() - began > (CLOSE_DEADLINE if self._state.interrupts.first else CLOSING):
                break
            self._launcher.wait(0.1)
        for name in closing:
            self.patience = 0.1
            calls = self._launcher.stack(name)
            self._state.report.notify_of(
                name,
                f"{name}: an environment does not let itself be closed, for {awake() - began:.0f} s: "
                f"{whereabouts(calls) or 'nobody knows where'}; it is left, and ends with its process",
            )

    def _hear_last(self, messages: WorkerMessages) -> None:
        """Take in what all have said, also of who has ended: one that has hung up would
        wake for ever whoever waits."""
        for name, member in self._state.members.items():
            unread = None if member.buried else member.link.receive()
            if unread is None and member.state not in ENDED:
                member.state = State.FAILED
                self._state.report.notify_of(name, f"{name} did not finish: {self._launcher.obituary(name)}")
            for data in unread or ():
                try:
                    messages.take(name, unpack_up(data, name))
                except TidemillError as error:
                    self._state.report.notify(str(error))

    def _why_forced(self, name: str, member: Member) -> str:
        """Return what is told of a worker that has not ended in time."""
        if condition := self._launcher.condition(name):
            return f"{name} {condition}; the run is over, and it was ended by force"
        if member.state is State.CONFIGURING:
            return f"{name} had not started yet when the run ended: it was ended by force"
        if member.saving:
            return (
                f"{name} was still writing its checkpoint {CLOSE_DEADLINE + SAVE_DEADLINE:.0f} s after the "
                "run was over; it was ended by force, and the checkpoint before is the newest"
            )
        if self._stalls.trains(name):
            return (
                f"{name} was in an update, which did not end within {CLOSE_DEADLINE:.0f} s after the "
                "run had; it was ended by force, and that update is lost"
            )
        if awake() - member.heard < member.tick:
            return (
                f"{name} was in a tick of its environments, which have taken {member.tick:.3g} s; the run is "
                "over, and it was ended by force"
            )
        where = ", most likely in its environment" if member.config.owns_environment else ""
        return (
            f"{name} hangs{where}: it did not end within {CLOSE_DEADLINE:.0f} s after it was told to, "
            f"and was last heard {awake() - member.heard:.0f} s ago; it was ended by force"
        )
