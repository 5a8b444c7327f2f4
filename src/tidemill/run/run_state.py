"""What is known of a run: its workers, how far it is, what it does and why it ends, and
what it reports."""

from tidemill.api.control_messages import Down, Facts
from tidemill.api.experiment import Experiment
from tidemill.layouts.memory_plan import MemoryPlan
from tidemill.run.interrupts import Interrupts, signal_name
from tidemill.run.member import Member
from tidemill.run.progress import Progress
from tidemill.run.report import RunReport
from tidemill.run.who_answers import WhoAnswers


class RunState:
    """The state of a run: from its start, by way of pauses, to its end.

    interrupts: the signals that end the run
    members: what is known of each worker, by name; none before they are launched
    progress: how far the run is
    who_answers: who answers whom
    report: what its user should read, and what happened besides training
    facts: what owners of environments have told, which the others are configured with
    plan: the memory that the run takes; None before every worker is READY
    reason: why the run ends; "" as long as it goes on. The first reason stays
    reached: it ends since it has reached a limit, and nobody has asked for it
    asked: why it was asked to end besides, once it had reached a limit
    interrupted: the signal that ends it, 0 for none
    began: every worker has become ready
    running: every worker was told to start
    paused: all of them were told to pause, or are to be as soon as they run
    suspended: this process is about to stop, as Ctrl-Z asks
    finishing: every worker was told to finish
    """

    def __init__(
        self, experiment: Experiment, interrupts: Interrupts | None = None, progress: Progress | None = None
    ) -> None:
        self.interrupts = interrupts or Interrupts()
        self.members: dict[str, Member] = {}
        self.progress = progress or Progress()
        self.progress.begin(experiment)
        self.who_answers = WhoAnswers(experiment)
        self.report = RunReport(experiment, self.members)
        self.facts = Facts()
        self.plan: MemoryPlan | None = None
        self.reason = self.asked = ""
        self.reached = False
        self.interrupted = 0
        self.began = self.running = self.paused = self.suspended = self.finishing = False

    @property
    def phase(self) -> str:
        """What the run does: starting, running, paused or ending."""
        if self.reason or self.finishing:
            return "ending"
        return "starting" if not self.running else "paused" if self.paused else "running"

    def end(self, reason: str, reached: bool = False) -> None:
        """Have the run end for this reason, unless it ends already."""
        if not self.reason:
            self.reason, self.reached = reason, reached
        elif self.reached and not (reached or self.asked):
            self.asked = reason

    @property
    def comes_again(self) -> bool:
        """True where the run would come to its end again, to the same bits, if all of it
        went back: it has reached a limit, and nobody wants it to end besides."""
        return self.reached and not (self.asked or self.interrupts.first)

    def go_on(self) -> None:
        """Have the run go on where all of it goes back behind what it had reached, unless
        it was asked to end besides: then it ends for that."""
        if self.reached:
            self.reason, self.reached = self.asked, False

    def send_all(self, message: Down) -> None:
        """Tell all workers what to do."""
        for member in self.members.values():
            member.send(message)

    def note_signal(self) -> None:
        """Have the run end where a signal has come."""
        if not self.interrupts.first:
            return
        self.interrupts.heard = True
        if not self.reason:
            self.interrupted = self.interrupts.first
            self.reason = signal_name(self.interrupted)
