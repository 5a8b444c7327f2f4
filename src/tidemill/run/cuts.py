"""Cuts of a run that resumes exactly (`Experiment.exact_resume`): all workers but those
that watch are held between two polls, trainers write their checkpoints, the others their
parts of the cut, and all go on as if nothing had been.

Of a run inline a cut lies between two rounds of turns. In lockstep it may lie anywhere:
what each worker does next depends on nothing but what it holds and what it was sent.
Samples in flight are their producers' to keep, since slots that nobody has given back are
theirs.
"""

from collections.abc import Callable, Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Any

from tidemill.api.control_messages import (
    ENDED,
    Hold,
    Holding,
    Save,
    Saved,
    SaveDue,
    WorkerStatistics,
)
from tidemill.api.experiment import Experiment
from tidemill.core.clock import awake
from tidemill.core.errors import CheckpointError
from tidemill.run.folder import RunFolder
from tidemill.run.member import Member
from tidemill.run.run_state import RunState
from tidemill.store.checkpoint import FoundCheckpoint, checkpoint_name, checkpoints, put_aside, readable
from tidemill.workers.cut_files import (
    CUTS,
    RUNNER,
    actors_with_part,
    drains,
    has_part,
    number_of,
    watchers,
)
from tidemill.workers.trainer_config import TrainerConfig

PATIENCE = 600.0
"""Seconds until a cut is given up for which somebody does not come to rest: an
environment may take minutes for a step, and an actor that it holds for good lives again
before."""
BEHIND = 10.0
"""Seconds that a trainer has at the end for the update that another one has done."""


class Cuts:
    """The cuts of a run.

    takes_turns: workers take turns in one thread
    hear: function that reads what they have told; it hands `take` each message
    keep: function that writes what is known of the run as a whole, as a part of a cut:
        its number, and with which checkpoints it goes
    number: number of the first one

    due: it is time for one
    """

    def __init__(
        self,
        experiment: Experiment,
        takes_turns: bool,
        state: RunState,
        hear: Callable[[], None],
        keep: Callable[[int, Mapping[str, int]], None],
        number: int = 1,
    ) -> None:
        self._policies, self._watchers = experiment.trained(), watchers(experiment)
        self._state, self._members, self._hear, self._keep = state, state.members, hear, keep
        # trainers end after equally many updates
        self._even = experiment.exact_resume and not takes_turns
        self.number = number
        """Number of the cut that is being made, or comes next. It stays where the run is
        to end meanwhile: then its end is that cut, of which some have written their part
        already."""
        self.due = False
        self.checkpoints: dict[str, int] = {}
        """By policy, after how many updates its newest checkpoint was written; of those
        whose checkpoint is of now."""
        self._held: set[str] = set()
        self._updates: dict[str, int] = {}  # of each trainer, as far as it has told
        self._until: float | None = None  # who is behind is waited for at the end

    def take(self, name: str, message: Any) -> None:
        """Take in a message of a worker's."""
        config = self._members[name].config
        match message:
            case SaveDue():
                self.due = True
            case Holding(cut=self.number):  # not late, for one that was given up
                self._held.add(name)
            case Saved():
                self.checkpoints[message.policy] = message.updates
            case WorkerStatistics(update=True) if isinstance(config, TrainerConfig):
                self.checkpoints.pop(config.policy, None)
                self._updates[name] = int(message.values["update"])

    def forget(self) -> None:
        """Forget what trainers have told of updates that are undone, and that the dead
        were at rest."""
        self.due, self._until = False, None
        self._held -= {name for name, member in self._members.items() if member.buried}
        self.checkpoints.clear()
        self._updates.clear()

    @property
    def whole(self) -> bool:
        """True when there is a checkpoint of now of every policy."""
        return self.checkpoints.keys() == {*self._policies}

    def one_is_behind(self) -> bool:
        """True while a trainer is to do one more update, which another one has ended with
        in lockstep: so each policy has the same number of them in the end, whoever was
        quicker. Its samples are there by then."""
        ended = [self._updates.get(name, 0) for name, m in self._members.items() if m.state in ENDED]
        living = [
            self._updates[name]
            for name, m in self._members.items()
            if name in self._updates and m.state not in ENDED
        ]
        if not (self._even and any(count + 1 == max(ended, default=0) for count in living)):
            return False
        self._until = self._until or awake() + BEHIND
        return awake() < self._until

    @property
    def _parties(self) -> dict[str, Member]:
        """All but the watchers, and those that have ended."""
        return {
            name: member
            for name, member in self._members.items()
            if name not in self._watchers and member.state not in ENDED
        }

    @property
    def at_rest(self) -> bool:
        """True when everybody who has not ended is held, but for who watches, or
        drains."""
        return all(name in self._held or drains(m.config) for name, m in self._parties.items())

    @property
    def agreed(self) -> bool:
        """True when some rest by agreement, which they come to only while they run."""
        return any(member.config.limited and member.config.count > 1 for member in self._members.values())

    def hold(self) -> None:
        """Have everybody stay as they are, but for who watches."""
        self._held.clear()
        for member in self._parties.values():
            member.send(Hold(cut=self.number))

    def hold_for_good(self) -> None:
        """Have everybody stay as they are at the run's end, but for who watches, and for
        a replay memory's trainer and actors, which drain."""
        self._held.clear()
        for member in self._parties.values():
            member.send(Hold(on=not drains(member.config), cut=self.number))

    def go_on(self) -> None:
        """Have everybody go on."""
        self.number += 1
        self._held.clear()
        for member in self._parties.values():
            member.send(Hold(on=False, cut=self.number))

    def cut(self) -> None:
        """Cut the run. Given up where it ends, or somebody dies: the cut before stays."""
        self.due = False
        parties = self._parties
        limited = [name for name, member in parties.items() if member.config.limited]
        others = [name for name in parties if name not in limited]
        self.hold()
        # to a checkpoint that could not be written nothing belongs
        written = self._await(parties) and self._save(limited, {}) and self.whole
        if written:
            self._keep(self.number, self.checkpoints)  # before the others' parts make the cut whole
            self._save(others, self.checkpoints)
        if not self._state.reason:
            self.go_on()

    def have_parts_written(self) -> None:
        """Have all that are held write their parts of the run's last cut, but for
        trainers, which have. None is at rest until it has."""
        self._tell_to_save(
            [name for name in self._members if name in self._held and not self._members[name].config.limited],
            self.checkpoints,
        )

    def _save(self, names: Iterable[str], with_checkpoints: Mapping[str, int]) -> bool:
        names = list(names)
        self._tell_to_save(names, with_checkpoints)
        return self._await(names)

    def _tell_to_save(self, names: Iterable[str], with_checkpoints: Mapping[str, int]) -> None:
        for name in names:
            self._held.discard(name)
            self._members[name].send(Save(dict(with_checkpoints)))

    def _await(self, names: Iterable[str]) -> bool:
        """Wait until these are held. False where that will not be."""
        names, until = set(names), awake() + PATIENCE
        while late := names - self._held:
            if awake() > until:
                self._state.report.notify(
                    f"no checkpoint is written: {', '.join(sorted(late))} did not come to rest within "
                    f"{PATIENCE:.0f} s; training goes on, and this is tried again"
                )
                return False
            self._hear()
            if self._state.reason or any(
                self._members[name].buried or not self._members[name].runs
                for name in (*names, *self._parties)
            ):
                return False
        return True


def newest_whole_cut(folder: RunFolder, experiment: Experiment) -> dict[Path, Path]:
    """Return the checkpoints and parts of the newest whole cut of a run that resumes
    exactly, by the folders in which those of their kind are; {} for another run, and for
    one without checkpoints. Raises `CheckpointError` where it has some, but no whole
    cut."""
    policies = experiment.trained()
    with_part = _with_part(experiment)
    if not with_part or not folder.has_checkpoints(policies):
        return {}
    parts = {name: _by_number(folder.path / CUTS / name) for name in dict.fromkeys([*with_part, RUNNER])}
    of_runner = min(parts[RUNNER], default=inf)  # earlier versions wrote none
    for cut, part in parts[actors_with_part(experiment)[0]].items():  # the newest first
        goes_with = part.facts.get("checkpoints", {})
        own = [held for name, held in parts.items() if name in with_part or cut >= of_runner]
        same = [held[cut] for held in own if cut in held]
        agree = all(each.facts.get("checkpoints", {}).items() <= goes_with.items() for each in same)
        named = {policy: checkpoint_name(goes_with.get(policy, -1)) for policy in policies}
        paths = [folder.checkpoints(policy) / name for policy, name in named.items()]
        if (
            agree
            and len(same) == len(own)
            and all(any(found.path == path for found in readable(path.parent)) for path in paths)
        ):
            return {path.parent: path for path in (*paths, *(each.path for each in same))}
    raise CheckpointError(
        f"{folder.path} has checkpoints, but no whole cut to resume exactly from: the run ended before all "
        "its workers had written the first one. Train anew (--anew); or set exact_resume to false in its "
        "config.json, and it goes on from its newest checkpoint with new episodes"
    )


def can_go_on(folder: RunFolder, experiment: Experiment) -> bool:
    """Return whether a run has what a resume goes on from: checkpoints and, of one that
    resumes exactly, a whole cut."""
    try:
        newest_whole_cut(folder, experiment)
        return folder.has_checkpoints(experiment.trained())
    except (CheckpointError, OSError):
        return False


def go_back_to_cut(folder: RunFolder, experiment: Experiment, or_begin: bool = False) -> None:
    """Put aside the checkpoints and parts that are newer than the newest whole cut of a
    run that resumes exactly. Where there is none all of them, to `or_begin` anew; else
    raises `CheckpointError`."""
    with_part = _with_part(experiment)
    try:
        cut = newest_whole_cut(folder, experiment)
    except CheckpointError:
        if not or_begin:
            raise
        cut = {}
    if not with_part or not (cut or or_begin):
        return
    parts = [folder.path / CUTS / name for name in dict.fromkeys([*with_part, RUNNER])]
    for place in (*map(folder.checkpoints, experiment.trained()), *parts):
        written = checkpoints(place)
        put_aside(written[written.index(cut[place]) + 1 :] if place in cut else written)


def _by_number(folder: Path) -> dict[int, FoundCheckpoint]:
    """Return a worker's parts of cuts by their numbers, the newest first, and of one that
    it was about to replace when it was killed the newer one."""
    found = dict[int, FoundCheckpoint]()
    for part in readable(folder):
        found.setdefault(number_of(part.path), part)
    return found


def _with_part(experiment: Experiment) -> list[str]:
    """Return whose parts make a cut whole; none where a run resumes otherwise."""
    if not experiment.exact_resume or not actors_with_part(experiment):
        return []
    with_part = [name for name, _ in experiment.members() if has_part(experiment, name)]
    return with_part + [RUNNER] * bool(experiment.curriculum)
