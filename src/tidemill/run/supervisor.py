"""The supervisor of a run decides what follows from a worker's death: a new life, or the
end of the run.

A death is the end of a worker's process that nobody asked for; an error that a worker
reports is none, since it would come again. With a worker die those that cannot go on
without it: all that share its process; with the trainer of a replay memory whoever
gathers for it, or plays its policy, where these cannot outlive it (`Port.outlived`; on
several hosts none can); of a run that resumes exactly all workers, which go back to its
newest cut. All of them begin their next life together. Each is told to be what the one
before was told to be; trainers go back to their newest checkpoint, but for equal ones, of
which those that live keep what they know (`run/equal_lives.py`). Where a worker has used
up its lives (`run/restart_budget.py`) the run ends, or goes on without workers that have
run before, where it can: `WorkerConfig.goes_on_without` says so, or other policy workers
answer for them (`run/who_answers.py`). A next life that the system refuses, or that hangs
before it runs, is one more death.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import time
from typing import Literal

from tidemill.api.control_messages import AnsweredBy, Configure, Down, Start, State, TryAgain, pack
from tidemill.api.experiment import Experiment
from tidemill.api.launcher import DEBUGGED, Launcher
from tidemill.core.clock import awake
from tidemill.core.errors import RunError, TidemillError, returned
from tidemill.core.resource_shortage import cause_of
from tidemill.core.thread_stacks import whereabouts
from tidemill.run.equal_lives import EqualLives
from tidemill.run.events import Event
from tidemill.run.losses import Losses
from tidemill.run.next_lives import NextLives
from tidemill.run.restart_budget import NoLifeLeft, RestartBudget
from tidemill.run.run_state import RunState
from tidemill.workers.cut_files import go_back_together, watchers

# seconds for workers to become READY, since the last word of any that is not (of
# environments that it has made, say)
READY_DEADLINE = 120.0
# the states of a worker that is to become READY, or RUNNING, and has not yet
_SHORT_OF = {
    State.READY: (State.CONFIGURING,),
    State.RUNNING: (State.CONFIGURING, State.READY),
}
# what is told besides where training waits for who has no life left
WAITED_FOR = (
    "\nTraining waits for what it decides, or records, after so many updates, so that the run ends. Resumed, "
    "the run has all lives again; restarts allows more of them, and with updates = None nobody waits for it"
)


def live_together(experiment: Experiment, outlive: bool) -> dict[str, list[str]]:
    """Return, by worker, all those that die with it and begin their next life together,
    in order. `outlive`: workers may outlive the trainer of a replay memory."""
    taken = {name: {*names} for names in experiment.processes() for name in names}
    ends, edges = [*experiment.ends()], experiment.edges()
    grants = {name: port for name, port in ends if port.role == "grant"}
    for edge in edges:
        kind, port = edge.name.partition("/")[0], grants.get(edge.source)
        if port is None or kind not in ("credits", "parameters"):
            continue
        if not (outlive and port.outlived):
            taken[edge.source].update(edge.targets)
        if kind == "credits" and port.in_turn:  # what is in flight cannot be void
            taken[edge.targets[0]].add(edge.source)
    exact = go_back_together(experiment)
    for name in exact:
        taken[name].update(exact)
    for names in taken.values():
        while more := {other for name in names for other in taken[name]} - names:
            names |= more
    order = [name for name, _ in experiment.members()]
    return {name: sorted(taken[name], key=order.index) for name in order}


@dataclass
class Burial:
    """Workers that are to begin their next life together, and the second (of `awake`) at
    which they do.

    staying: trainers that wait for equal ones among them
    hung: whether some of them have not ended yet
    died: the one whose death it was, of several the first
    refused: whether the system has not let them begin before
    """

    names: Sequence[str]
    at: float
    staying: Sequence[str]
    hung: bool
    died: str
    refused: bool = False


@dataclass
class Birth:
    """Workers whose next life has begun.

    rounds: who is to become what, a round after another
    told: what each was told to become last, and the second (of `awake`) of the last word
    late: whether the last look found that nobody had said anything for too long
    """

    names: Sequence[str]
    rounds: Sequence[tuple[State, Sequence[str]]]
    told: dict[str, State] = field(default_factory=dict)
    told_at: float = 0.0
    late: bool = False


def levels(experiment: Experiment) -> list[list[str]]:
    """Return the workers that are configured together, in order: owners of environments,
    those who send samples on, all others. Each is told what those before know."""
    forwarders, every = experiment.forwarders(), dict(experiment.members())
    owners = [name for name, config in every.items() if config.owns_environment]
    others = every.keys() - set(owners).union(*forwarders)
    return [owners, *map(list, forwarders), [name for name in every if name in others]]


def fillers(experiment: Experiment) -> dict[str, list[str]]:
    """Return, by worker that sends samples on, or grants steps, those who fill what it
    takes from: it is configured once these have made their slots."""
    edges = experiment.edges()
    takers = {name for level in experiment.forwarders() for name in level}
    takers |= {edge.source for edge in edges if edge.name.startswith("credits/")}
    found: dict[str, list[str]] = {name: [] for name in takers}
    for edge in edges:
        if edge.name.startswith("samples/"):
            for target in takers.intersection(edge.targets):
                found[target].append(edge.source)
    return found


def _answer_for(heirs: Sequence[AnsweredBy]) -> str:
    """Return who answers from now on, in words."""
    servers = list(dict.fromkeys(order.server for order in heirs))
    return f"From now on {' and '.join(servers)} answer{'s' * (len(servers) == 1)} for it"


class Supervisor:
    """The supervisor of an experiment's workers.

    launcher: who begins their lives
    next_lives: what they go on from, and are told
    """

    def __init__(
        self,
        experiment: Experiment,
        launcher: Launcher,
        state: RunState,
        losses: Losses,
        next_lives: NextLives,
    ) -> None:
        self._launcher, self._state, self._members = launcher, state, state.members
        self._losses, self._next_lives = losses, next_lives
        self._processes = {name: names for names in experiment.processes() for name in names}
        # on several hosts there are no such edges
        self._together = live_together(experiment, launcher.lays_spare_edges)
        self._equals = EqualLives(experiment, state.members, launcher.condition, launcher.stack)
        self._budget = RestartBudget(launcher, state.members)
        self._buried: list[Burial] = []
        self._births: list[Birth] = []
        self._ran = set[str]()  # in any of their lives
        watching = watchers(experiment)
        self._goes_on_without = {
            name: "it only watches" if name in watching else config.goes_on_without
            for name, config in experiment.members()
        }
        self._awaited = {
            name for name, config in experiment.members() if any(map(config.awaited, experiment.policies))
        }
        self.given_up = set[str]()
        """Those without whom the run goes on."""
        self._levels = levels(experiment)
        self._fillers = fillers(experiment)

    def with_it(self, name: str) -> Sequence[str]:
        """Return the workers that die with `name`, itself among them."""
        names = {other for dead in self.dead_with(name) for other in self._together[dead]}
        return [other for other in self._members if other in names]

    def dead_with(self, name: str) -> Sequence[str]:
        """Return the workers that are dead as `name` is: all of its process, or of its
        host where that is gone."""
        return self._launcher.gone_with(name) or self._processes[name]

    def died(self, name: str, cause: str, hangs: bool = False) -> None:
        """Bury worker `name`, and all that die with it; `hangs`: it has not ended. Raises
        `RunError` where they are to have no other life."""
        said, now = f"{name} is gone: {cause}", awake()
        member, dead = self._members[name], self.dead_with(name)
        # a host's end says nothing of whether its workers can run
        lost = bool(self._launcher.gone_with(name))
        ran = member.runs or lost
        begun = sum(self._members[other].unsent for other in dead)
        for other in dead:
            self._bury(other, "died", cause)
        names, staying = self._with_equals(self.with_it(name))
        self._unbear(names)
        void = f"; {begun:,} env steps of samples that were begun are lost" if begun else ""
        for earlier in self._buried:
            if self._with_mates([*earlier.names, *earlier.staying]) >= {*names}:
                # it goes with those that died before it: one death more costs nothing
                before = [each for each in earlier.names if each != name]
                self._state.report.notify_of_event(
                    f"{said}; life {member.life + 2} of {name} begins with {', '.join(before)}{void}"
                )
                self._bury_with(Burial(names, now, staying, hangs, name))
                return
        try:
            pause = self._budget.spend(name, dead, cause, ran)
        except NoLifeLeft as error:
            self._go_on_without(name, names, error)
            return
        self._bury_with(Burial(names, now + pause, staying, hangs, name))
        with_it = [other for other in names if other != name]
        goes = f" (and {', '.join(with_it)} with it)" if with_it else ""
        if staying:
            goes += f", for which {' and '.join(staying)} wait{'s' * (len(staying) == 1)},"
        when = "once a host has its place" if lost else f"in {pause:.0f} s" if pause else "now"
        self._state.report.notify_of_event(
            f"{said}; life {member.life + 2} of {name}{goes} begins {when}{void}"
        )

    def _go_on_without(self, name: str, names: Sequence[str], error: NoLifeLeft) -> None:
        """Have the run go on without these, which have no life left since `name` has
        none. Raises the `error` where it cannot."""
        heirs = self._heirs(names)
        spared = {other for other in names if self._goes_on_without[other]}
        spared |= {other for other in names if heirs and self._state.who_answers.answers(other)}
        if not spared & self._ran >= {*names}:
            if not self._awaited.isdisjoint(names):
                raise NoLifeLeft(f"{error}{WAITED_FOR}") from None
            raise error
        self._give_up(names)
        self._have_answer(heirs)
        why = self._goes_on_without[name].capitalize() or _answer_for(heirs)
        said = f"{error}. {why}: the run goes on without {', '.join(names)}"
        self._losses.note(Event(time(), "told", name, self._members[name].life + 1, cause=said))
        self._state.report.notify_of_event(said)

    def _give_up(self, names: Collection[str]) -> None:
        """Have the run go on without these: they begin no other life with anybody."""
        self.given_up.update(names)
        for name, mates in self._together.items():
            if name not in names:
                self._together[name] = [mate for mate in mates if mate not in names]

    def _heirs(self, names: Collection[str]) -> list[AnsweredBy]:
        """Return who could answer what these are asked: see `WhoAnswers.heirs`."""
        laid = self._launcher.lays_spare_edges
        return self._state.who_answers.heirs(names, self.given_up) if laid else []

    def _have_answer(self, heirs: Sequence[AnsweredBy]) -> None:
        """Have these answer from now on."""
        self._state.who_answers.move(heirs)
        for order in heirs:
            for other in (order.server, order.asker):
                self._members[other].send(order)

    def _bury(self, name: str, what: Literal["died", "lost"], cause: str) -> None:
        member = self._members[name]
        self._losses.note(Event(time(), what, name, member.life + 1, cause=cause, steps=member.unsent))
        member.bury(cause)

    def _bury_with(self, burial: Burial) -> None:
        """Have these begin their next life, together with all whom a lost host, or the
        death of one that waited, has added to those that were buried before."""
        self._equals.ask(burial.names, burial.staying)
        for other in list(self._buried):
            if {*other.names, *other.staying} & {*burial.names, *burial.staying}:
                self._buried.remove(other)
                names = {*other.names, *burial.names}
                staying = {*other.staying, *burial.staying} - names
                burial = Burial(
                    self._in_order(names),
                    max(burial.at, other.at),
                    self._in_order(staying),
                    burial.hung or other.hung,
                    other.died,
                    burial.refused or other.refused,
                )
        self._buried.append(burial)

    def _in_order(self, names: Collection[str]) -> list[str]:
        return [name for name in self._members if name in names]

    def _with_mates(self, names: Iterable[str]) -> set[str]:
        """Return all that die with any of these."""
        return {mate for name in names for mate in self._together[name]}

    def _with_equals(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return `names`, with all equal to trainers among them that do not run, and the
        equal trainers that do."""
        equals = [name for each in self._equals.among(names) for name in each]
        still = [name for name in equals if not self._members[name].runs]
        gone = self._with_mates([*names, *still])
        return self._in_order(gone), [name for name in equals if name not in gone]

    def _unbear(self, names: Collection[str]) -> None:
        """Bring these up no further: they begin another life."""
        for name in names:
            self._members[name].reviving = False
        self._births = [
            replace(birth, names=left)
            for birth in self._births
            if (left := [name for name in birth.names if name not in names])
        ]

    def let_rest(self) -> None:
        """Begin no life any more: what the dead were to do is done, and would be undone
        with those who go back with them."""
        self._buried.clear()
        for member in self._members.values():
            if member.buried:
                member.state = State.FAILED

    def look(self) -> dict[str, str]:
        """Begin the lives that are due, and bring those that have begun further. None
        waits longer where the run is ending, but for what the system refuses. Return who
        counts as dead, and why: trainers that cannot wait for the next lives of equal
        ones, and who hangs before it runs."""
        gone: dict[str, str] = {}
        for burial in list(self._buried):
            settled = self._equals.settle(burial.names, burial.staying)
            due = burial.at <= awake() or (bool(self._state.reason) and not burial.refused)
            gone |= settled or {}
            if settled == {} and due and self._launcher.ready(burial.names):
                self._buried.remove(burial)
                self._revive(burial)
        self._births = [birth for birth in self._births if not self._bring_up(birth, gone)]
        return gone

    def _revive(self, burial: Burial) -> None:
        names = burial.names
        self._unbear(names)
        members = {name: self._members[name] for name in names}
        for name, member in members.items():
            if member.unsent:
                self._bury(name, "lost", "with one that it cannot go on without")
            else:
                member.bury(member.cause if member.buried else "with one that it cannot go on without")
        try:
            links = returned(self._launcher.restart(names), dict, self._launcher.restart)
        except TidemillError:
            raise
        except OSError as error:
            self._refuse(burial, cause_of(error))
            return
        except Exception as error:
            text = f"the next life of {', '.join(names)} cannot be started: {cause_of(error)}"
            raise RunError(text) from error
        policies = dict.fromkeys(
            port.stream for m in members.values() for port in m.config.ports() if port.role == "publish"
        )
        sure = not (burial.hung or self._launcher.each_host())
        joins, undone = self._equals.join(names, burial.staying, sure)
        if back := [name for name in policies if name in undone or name not in self._equals.policies]:
            self._next_lives.go_back(back, burial.died)
        for name, link in links.items():
            members[name].begin_life(link)
            if name in joins:
                link.send(pack(joins[name]))
        rounds = [(State.READY, level) for level in self._levels]
        for order in sorted({member.config.order for member in members.values()}):
            rounds.append(
                (State.RUNNING, [n for n, member in members.items() if member.config.order == order])
            )
        self._births.append(Birth(names, rounds))

    def _refuse(self, burial: Burial, cause: str) -> None:
        """Count one more death of the one that died, and of those that are dead with it,
        whose next lives the system has refused to start, and have them wait for another
        try. Raises `RunError` where they are to have none."""
        died, cause = burial.died, self._state.report.mask(cause)
        dead, now = self.dead_with(died), awake()
        said = f"{died} is gone: {self._members[died].cause}; its next life cannot be started: {cause}"
        for name in burial.names:
            self._members[name].life += 1
        for name in dead:
            life = self._members[name].life + 1
            self._losses.note(Event(time(), "died", name, life, cause=f"it cannot be started: {cause}"))
        try:
            pause = self._budget.spend_on_start(dead, said)
        except NoLifeLeft as error:
            self._go_on_without(died, burial.names, error)
            return
        self._buried.append(replace(burial, at=now + pause, refused=True))
        self._state.report.notify_of_event(f"{said}; this is tried again in {pause:.0f} s")

    def _bring_up(self, birth: Birth, gone: dict[str, str]) -> bool:
        """Have each become what the one before was told to be, one after another as at
        the start. True when all are. Who does not for too long is `gone`."""
        for state, names in birth.rounds:
            short = _SHORT_OF[state]
            waiting = {
                name: member
                for name in names
                if name in birth.names
                and (member := self._members[name]).state in short
                and member.wanted not in short
            }
            awaited = list(waiting.values())
            for name, member in waiting.items():
                unready = [
                    filler
                    for other in self._fillers.get(name, ())
                    if (filler := self._members[other]).state in _SHORT_OF[State.READY]
                ]
                awaited += unready  # they live again themselves
                if birth.told.get(name) is not state and not unready:
                    birth.told[name], birth.told_at = state, awake()
                    before, after = self._next_lives.orders(name)
                    tries = bool(self._state.reason) or not self._state.paused
                    orders: list[Down] = (
                        [
                            TryAgain(tries),
                            Configure(self._state.facts),
                            *self._state.who_answers.orders(name),
                        ]
                        if state is State.READY
                        else [*before, Start(), *after]
                    )
                    for order in orders:
                        member.link.send(pack(order))
                    if state is State.RUNNING:
                        member.reviving = False
                        self._equals.starts(name)
            if waiting:
                last = max(birth.told_at, *(member.heard for member in awaited))
                # what they have said since the last look may not be read yet
                was, birth.late = birth.late, awake() - last > READY_DEADLINE
                if was and birth.late:
                    gone |= {name: why for name in waiting if (why := self._why_late(birth, name, state))}
                return False
        for name in birth.names:
            self._members[name].reviving = False
        return True

    def _why_late(self, birth: Birth, name: str, state: State) -> str:
        """Return why a worker that has not become `state` in its next life is dead; ""
        where it is not: it was not told to, since it waits for others, or a debugger
        holds it."""
        condition = self._launcher.condition(name)
        if birth.told.get(name) is not state or condition.startswith(DEBUGGED):
            return ""
        if condition:
            where = f"its process {condition.partition(';')[0]}"
        else:
            where = whereabouts(self._launcher.stack(name)) or "where it is cannot be seen"
        return f"it did not become {state.value}, and said nothing for {READY_DEADLINE:.0f} s: {where}"

    def voided(self, name: str, samples: int) -> None:
        """Take note that so many samples of a worker's last life are void."""
        self._losses.note_voided(name, self._members[name].life, samples)

    def entered(self, name: str, state: State) -> None:
        """Take note of a worker's new state."""
        member = self._members[name]
        if state is State.RUNNING:
            self._ran.add(name)
            self._budget.note_running(name)
        if state is State.RUNNING and member.died_at:
            gone = awake() - member.died_at
            self._losses.note(Event(time(), "lives", name, member.life + 1, seconds=round(gone, 3)))
            member.died_at = 0.0
