"""What becomes of equal trainers where one dies: the others wait for its next life.

They undo the update that it has left them alone with, and one of them writes a checkpoint
of then (`Stay`, `Staying`), which the next life goes on from; as that starts all go on
together (`Rejoin`). Who of them does not answer in time, or lacks an update that another
one has done, begins a next life, too. One that is in an update has longer: none of its
samples is lost then, and the others would wait for it anyway. Where nobody is left who
waits all begin at the newest checkpoint there is.

Versions of those that wait stay what they are where one has died alone: it has published
none that they do not have (`streams.all_reduce`). Of two, of one that hangs, or where
parts of sums may be lost on their way from a host, or within torch, that cannot be said:
all go on as a later life then, with the weights and the samples that they have.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from tidemill.api.control_messages import Rejoin, Stay, Staying, pack
from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Call
from tidemill.api.policy import VERSIONS_OF_LIFE
from tidemill.core.clock import awake
from tidemill.core.thread_stacks import whereabouts
from tidemill.run.member import Member, turn
from tidemill.run.silence import HUNG, TIMES, in_update
from tidemill.workers.cut_files import go_back_together
from tidemill.workers.trainer_config import TORCH, Trainer

# seconds that a trainer has to answer once an equal one has died, and while it writes a
# checkpoint; one that is in an update has as long again and again, up to `HUNG`, or so
# many `TIMES` its longest poll so far
ANSWER, SAVING = 5.0, 60.0


@dataclass
class _Question:
    """What a trainer was asked last: its number, when, and until when an answer is waited
    for."""

    number: int
    at: float
    until: float


class EqualLives:
    """The lives of an experiment's equal trainers; none of a run that resumes exactly,
    where all go back to a cut.

    members: what the controller knows of each worker, by name
    condition, stack: functions that return what keeps a worker still that it cannot tell
        itself, and where its thread is (see `Launcher`)
    """

    def __init__(
        self,
        experiment: Experiment,
        members: Mapping[str, Member],
        condition: Callable[[str], str],
        stack: Callable[[str], Sequence[Call]],
    ) -> None:
        self._members, self._condition, self._stack = members, condition, stack
        policies = [] if go_back_together(experiment) else experiment.trained()
        equals = {policy: experiment.holders(policy, "sum") for policy in policies}
        self._equals = {policy: names for policy, names in equals.items() if names}
        trainers = experiment.groups(Trainer).values()
        self._by_torch = {config.policy for config in trainers if config.sums == TORCH}
        self.policies = self._equals.keys()
        """Those that equal trainers train."""
        self._company = {name: names for names in experiment.processes() for name in names}
        self._told = {policy: Rejoin(0, 0, 0) for policy in self._equals}  # last
        self._asked: dict[str, _Question] = {}
        self._count = 0  # how often anybody was asked
        self._late = set[str]()  # whose answer had not come when that was over
        self._joining: dict[str, Rejoin] = {}  # what who waits is told once the others start

    def among(self, names: Collection[str]) -> list[list[str]]:
        """Return all equal trainers of each policy that some of `names` train."""
        return [equals for equals in self._equals.values() if not set(equals).isdisjoint(names)]

    def ask(self, dead: Collection[str], staying: Sequence[str], save: bool = False) -> None:
        """Tell trainers that equal ones are dead. `save`: one of them that writes a
        checkpoint; a single one does anyway."""
        for equals in self.among(staying):
            lost = tuple(name for name in equals if name in dead)
            asked = [name for name in equals if name in staying]
            for name in asked:
                self._count += 1
                # who takes turns with actors hears it once these are through their ticks
                ticks = turn(self._members[other] for other in self._company[name])
                self._asked[name] = _Question(self._count, awake(), awake() + ANSWER + ticks)
                self._joining.pop(name, None)
                self._late.discard(name)
                self._members[name].link.send(pack(Stay(self._count, lost, save or len(asked) == 1)))

    def settle(self, dead: Collection[str], staying: Sequence[str]) -> dict[str, str] | None:
        """Bring those that wait to where the dead can join them. Return who begins a next
        life, too, and why: nobody once the others have saved what they know, None as long
        as an answer is waited for."""
        for equals in self.among(staying):
            waits = [name for name in equals if name in staying]
            answers = {name: answer for name in waits if (answer := self._answer(name)) is not None}
            newest = max((answer.updates for answer in answers.values()), default=0)
            died = f"{' and '.join(name for name in equals if name in dead)} died"
            gone = dict[str, str]()
            for name in waits:
                if not self._members[name].runs:
                    gone[name] = f"it had ended when {died}"
                elif name not in answers and (late := self._why_late(name)):
                    gone[name] = f"it has not answered {late} since {died}"
                elif len(answers) == len(waits) and answers[name].updates < newest:
                    gone[name] = f"it lacks an update that another one had done when {died}"
            if gone:
                return gone
            if len(answers) < len(waits):
                return None
            saved = {answer.saved for answer in answers.values()}
            if True not in saved and False in saved:
                return dict.fromkeys(waits, f"what it knows could not be saved when {died}")
            if True not in saved:
                self.ask(dead, waits[:1], save=True)
                return None
        return {}

    def _why_late(self, name: str) -> str:
        """Return for how long an answer has not come, and where its trainer is, where
        that is too long, else "". It is so at the second time that this is asked: what
        has come is heard in between, and a callback may have taken long."""
        asked, member, now = self._asked[name], self._members[name], awake()
        if now <= asked.until + SAVING * member.saving:
            return ""
        if name not in self._late:
            self._late.add(name)
            return ""
        why = self._condition(name)
        calls = () if why else self._stack(name)
        most = max(HUNG, TIMES * member.statistics.get("longest_poll", 0.0))
        if in_update(calls) and now - asked.at < most:
            self._late.discard(name)
            asked.until = now + ANSWER
            return ""
        where = why or whereabouts(calls)
        return f"for {now - asked.at:.0f} s{f' ({where})' if where else ''}"

    def _answer(self, name: str) -> Staying | None:
        """Return what a trainer has answered to what it was asked last."""
        answer = self._members[name].awaits
        return answer if answer is not None and answer.number == self._asked[name].number else None

    def join(
        self, dead: Collection[str], staying: Collection[str], sure: bool
    ) -> tuple[dict[str, Rejoin], list[str]]:
        """Return how those of the dead join that are equal trainers, by name; and the
        policies of which updates are undone. `sure`: whether all that the dead have sent
        has come, and no more is to come."""
        joins, undone = dict[str, Rejoin](), list[str]()
        for policy, equals in self._equals.items():
            begin = [name for name in equals if name in dead]
            if not begin:
                continue
            waits = [name for name in equals if name in staying]
            updates = max((answer.updates for name in waits if (answer := self._answer(name))), default=0)
            first = self._told[policy].first
            if len(begin) > 1 or not (waits and sure) or policy in self._by_torch:
                first += VERSIONS_OF_LIFE
            told = Rejoin(self._told[policy].number + 1, first, first + updates)
            self._told[policy] = told
            joins |= dict.fromkeys(begin, told)
            for name in begin:  # it may have waited for another one before it died
                self._joining.pop(name, None)
            self._joining |= dict.fromkeys(waits, told)
            if not waits or updates < max(
                self._members[name].update.values.get("update", 0) for name in equals
            ):
                undone.append(policy)
        return joins, undone

    def starts(self, name: str) -> None:
        """Let those go on that wait for trainer `name`, which was told to start: what was
        told to one of them before all know."""
        for equals in self.among([name]):
            for other in equals:
                if (told := self._joining.pop(other, None)) is not None:
                    self._members[other].link.send(pack(told))
