"""What becomes of equal trainers where one dies: the others wait for its next life.

They undo the update that it has left them alone with, and one of them writes a checkpoint
of then (`Stay`, `Staying`), which the next life goes on from; as that starts all go on
together (`Rejoin`). Who of them does not answer, or lacks an update that another one has
done, begins a next life, too. Where nobody is left who waits all begin at the newest
checkpoint there is.

Versions of those that wait stay what they are where one has died alone: it has published
none that they do not have (`streams.all_reduce`). Of two, of one that hangs, or where
parts of sums may be lost on their way from a host, that cannot be said: all go on as a
later life then, with the weights and the samples that they have.
"""

from collections.abc import Collection, Mapping, Sequence

from tidemill.api.control_messages import Rejoin, State, Stay, Staying, pack
from tidemill.api.experiment import Experiment
from tidemill.api.policy import VERSIONS_OF_LIFE
from tidemill.core.clock import awake
from tidemill.run.member import Member
from tidemill.workers.cut_files import go_back_together

# seconds that a trainer has to answer once an equal one has died, and while it writes a
# checkpoint
ANSWER, SAVING = 5.0, 60.0
_RUN = (State.RUNNING, State.PAUSED)


class EqualLives:
    """The lives of an experiment's equal trainers; none of a run that resumes exactly,
    where all go back to a cut.

    members: what the controller knows of each worker, by name
    """

    def __init__(self, experiment: Experiment, members: Mapping[str, Member]) -> None:
        self._members = members
        policies = [] if go_back_together(experiment) else experiment.trained()
        equals = {policy: experiment.holders(policy, "sum") for policy in policies}
        self._equals = {policy: names for policy, names in equals.items() if names}
        self.policies = self._equals.keys()
        """Those that equal trainers train."""
        self._told = {policy: Rejoin(0, 0, 0) for policy in self._equals}  # last
        self._asked: dict[str, tuple[int, float]] = {}  # by number, and until when an answer is waited for
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
                self._asked[name] = self._count, awake() + ANSWER
                self._joining.pop(name, None)
                self._late.discard(name)
                self._members[name].link.send(pack(Stay(self._count, lost, save or len(asked) == 1)))

    def settle(self, dead: Collection[str], staying: Sequence[str]) -> list[str] | None:
        """Bring those that wait to where the dead can join them. Return who begins a next
        life, too: [] once the others have saved what they know, None as long as an answer
        is waited for."""
        for equals in self.among(staying):
            waits = [name for name in equals if name in staying]
            answers = {name: answer for name in waits if (answer := self._answer(name)) is not None}
            newest = max((answer.updates for answer in answers.values()), default=0)
            gone = [
                name
                for name in waits
                if self._members[name].state not in _RUN
                or (name not in answers and self._is_late(name))
                or (len(answers) == len(waits) and answers[name].updates < newest)
            ]
            if gone:
                return gone
            if len(answers) < len(waits):
                return None
            saved = {answer.saved for answer in answers.values()}
            if True not in saved and False in saved:  # it cannot be
                return waits
            if True not in saved:
                self.ask(dead, waits[:1], save=True)
                return None
        return []

    def _is_late(self, name: str) -> bool:
        """True where an answer is late for the second time that this is asked: what has
        come is heard in between, and a callback may have taken long."""
        late = awake() > self._asked[name][1] + SAVING * self._members[name].saving
        again = late and name in self._late
        if late:
            self._late.add(name)
        return again

    def _answer(self, name: str) -> Staying | None:
        """Return what a trainer has answered to what it was asked last."""
        answer = self._members[name].awaits
        return answer if answer is not None and answer.number == self._asked[name][0] else None

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
            if len(begin) > 1 or not (waits and sure):
                first += VERSIONS_OF_LIFE
            told = Rejoin(self._told[policy].number + 1, first, first + updates)
            self._told[policy] = told
            joins |= dict.fromkeys(begin, told)
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
