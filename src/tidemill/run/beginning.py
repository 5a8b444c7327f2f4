"""How a run begins: its workers are launched, configured one level after another, and
started in order."""

from collections.abc import Callable, Sequence
from time import time

from tidemill.api.control_messages import Configure, Pause, Start, State
from tidemill.api.launcher import Job, Launcher
from tidemill.core.clock import awake
from tidemill.core.errors import RunError, TidemillError, returned
from tidemill.core.resource_shortage import cause_of
from tidemill.layouts.memory_plan import make_plan
from tidemill.run.conditions import Conditions
from tidemill.run.cuts import Cuts
from tidemill.run.events import Event
from tidemill.run.member import Member
from tidemill.run.run_state import RunState
from tidemill.run.stall_watch import Stalls
from tidemill.run.supervisor import READY_DEADLINE, Supervisor, levels


class Beginning:
    """The beginning of a run.

    hear: function that waits for what workers report, and takes it
    look_for_signal: function that looks whether a signal has come
    look_at_hosts: function that is called once workers were launched, before any is
        configured
    look_at_plan: function that is called once the run's memory is planned, before any of
        it is taken
    """

    def __init__(
        self,
        job: Job,
        launcher: Launcher,
        state: RunState,
        stalls: Stalls,
        conditions: Conditions,
        cuts: Cuts,
        supervisor: Supervisor,
        hear: Callable[[], None],
        look_for_signal: Callable[[], None],
        look_at_hosts: Callable[[], None],
        look_at_plan: Callable[[], None],
    ) -> None:
        self._job, self._launcher, self._state, self._stalls = job, launcher, state, stalls
        self._conditions, self._cuts, self._supervisor = conditions, cuts, supervisor
        self._hear, self._look_for_signal = hear, look_for_signal
        self._look_at_hosts, self._look_at_plan = look_at_hosts, look_at_plan

    def begin(self) -> bool:
        """Begin the run. False where it is to end before every worker runs. Raises
        `RunError` where that cannot be, or takes too long."""
        self._launch()
        self._look_at_hosts()
        return self._configure() and self._start()

    def _launch(self) -> None:
        try:
            links = returned(self._launcher.launch(self._job), dict, self._launcher.launch)
        except TidemillError:
            raise
        except Exception as error:
            raise RunError(f"the workers cannot be started: {cause_of(error)}") from error
        configs = dict(self._job.experiment.members())
        if wrong := ", ".join(sorted(configs.keys() ^ links.keys())):
            what = f"{type(self._launcher).__name__}.launch()"
            raise RunError(f"{what} must return a link for each worker, and no more: {wrong}")
        self._state.members.update((name, Member(configs[name], link)) for name, link in links.items())

    def _configure(self) -> bool:
        members = self._state.members
        for names in levels(self._job.experiment):
            for name in names:
                members[name].send(Configure(self._state.facts))
            if not self._await(names, State.READY):
                return False
        self._state.plan = make_plan(need for member in members.values() for need in member.needs)
        self._look_at_plan()
        self._state.began = True
        return True

    def _start(self) -> bool:
        members, exact = self._state.members, self._job.experiment.exact_resume
        self._conditions.tell_all_stages()
        if exact:  # nobody is ahead of who starts last
            self._cuts.hold()
        for order in sorted({member.config.order for member in members.values()}):
            names = [name for name, member in members.items() if member.config.order == order]
            for name in names:
                members[name].send(Start())
            if not self._await(names, State.RUNNING):
                return False
        if exact:
            self._cuts.go_on()
        self._state.running = True
        self._conditions.look_at_rounds()
        self._state.report.events.append(Event(time(), "began"))
        self._state.progress.mark()
        self._stalls.begin()
        if self._state.paused:
            self._state.send_all(Pause())
        return True

    def _await(self, names: Sequence[str], state: State) -> bool:
        """Wait until these have become `state`. False where the run is to end before."""
        members, asked = self._state.members, awake()
        while waiting := [
            name
            for name in names
            if members[name].state is not state and name not in self._supervisor.given_up
        ]:
            self._look_for_signal()
            if self._state.reason:
                return False
            late = awake() - max(asked, *(members[name].heard for name in waiting)) > READY_DEADLINE
            # the supervisor has deadlines for next lives
            if late and not all(members[name].life for name in waiting):
                raise RunError(
                    f"{', '.join(waiting)} did not become {state.value}, and said nothing for "
                    f"{READY_DEADLINE:.0f} s; a worker becomes ready once its environment or network is "
                    f"built: look into the run's logs{self._stalls.conditions_of(waiting)}"
                )
            self._hear()
        return True
