"""Workers that have died, or hang: whether the run goes on, which is the supervisor's to
bring about."""

from collections.abc import Mapping

from tidemill.api.control_messages import ENDED, State, unpack_up
from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Launcher
from tidemill.core.errors import RunError
from tidemill.run.ending import Ending
from tidemill.run.member import Member
from tidemill.run.run_state import RunState
from tidemill.run.supervisor import Supervisor
from tidemill.run.worker_messages import WorkerMessages
from tidemill.workers.cut_files import go_back_together


class Deaths:
    """The deaths of a run's workers.

    trainers_live_again: a trainer's death does not end the run
    """

    def __init__(
        self,
        experiment: Experiment,
        launcher: Launcher,
        state: RunState,
        supervisor: Supervisor,
        messages: WorkerMessages,
        ending: Ending,
        trainers_live_again: bool,
    ) -> None:
        self._launcher, self._state = launcher, state
        self._supervisor, self._messages, self._ending = supervisor, messages, ending
        self._trainers_live_again = trainers_live_again
        self._exact = go_back_together(experiment)
        self._held = set[str]()  # workers whose environments hold them, which was told

    def bury(self, name: str, cause: str = "", hangs: bool = False) -> None:
        """Take note of a worker that has died, with what it and those that die with it
        have still told. `hangs`: it has not ended. Raises `RunError` where it ends the
        run."""
        # a batch system tells all at once, and others may be quicker to end
        self._state.note_signal()
        cause = self._state.report.mask(cause or self._launcher.obituary(name))
        with_it = {other: self._state.members[other] for other in self._supervisor.with_it(name)}
        for other, member in with_it.items():
            if other != name and not member.buried:
                for data in member.link.receive() or ():
                    self._messages.take(other, unpack_up(data, other))
        limited = [  # `name`: also a trainer that has ended, and cannot wait for an equal one
            other
            for other, member in with_it.items()
            if member.config.limited and (other == name or member.state not in ENDED)
        ]
        if limited and not self._trainers_live_again:
            self._state.members[name].state = State.FAILED
            raise RunError(f"{name} is gone: {cause}")
        ends = self._state.running and bool(self._state.reason)
        dead = {other: with_it[other] for other in self._supervisor.dead_with(name)}
        trains = any(m.config.limited and m.state not in ENDED for m in dead.values())
        # nothing that was trained goes with it
        spared = ends and (
            (name in self._exact and not trains) or all(map(self._ending.saved_by_equal, limited))
        )
        if spared and not (self._trainers_live_again and self._ending.goes_back(name)):
            self._leave(dead, name, cause)
            return
        try:
            self._supervisor.died(name, cause, hangs)
        except RunError:
            if spared:  # the run is at its limit all the same
                self._leave(dead, name, cause)
                return
            self._state.members[name].state = State.FAILED
            raise

    def _leave(self, dead: Mapping[str, Member], name: str, cause: str) -> None:
        """Have the run end without those that are dead with `name`."""
        if self._state.members[name].state is not State.COMPLETED:
            self._state.report.notify_of(name, f"{name} is gone, as the run ended: {cause}")
        for other, member in dead.items():
            if member.buried or (other == name and member.state not in ENDED):
                member.state, member.buried = State.FAILED, False

    def hangs(self, name: str, cause: str) -> None:
        """Take a worker that something holds for dead, where it may live again; else tell
        the cure, once."""
        if self._launcher.restarts and not self._state.reason:
            self.bury(name, cause, hangs=True)
        elif name not in self._held:
            self._held.add(name)
            if self._launcher.restarts:
                self._state.report.notify_of(name, f"{name}: {cause}; the run ends, which ends it by force")
                return
            cure = "with --launch processes it would live again"
            if self._state.members[name].config.owns_environment:
                cure = (
                    "Gymnasium(threads=1) has lanes step in threads of their own, which are left where they "
                    f"hang, and {cure}"
                )
            self._state.report.notify_of(name, f"{name}: {cause}; nobody can end its thread. {cure}")
