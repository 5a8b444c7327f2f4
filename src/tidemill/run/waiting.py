"""Whom each worker of a run waits for: by its edges, and by how far each one is."""

from collections.abc import Container, Iterable, Mapping, Sequence

from tidemill.api.control_messages import ENDED
from tidemill.api.edges import Edge
from tidemill.api.experiment import Experiment
from tidemill.run.member import Member
from tidemill.run.rounds import Rounds

SAMPLES, ROOM, REQUESTS, ANSWERS = "samples of", "room at", "requests of", "answers of"
SUMS, CREDITS = "a sum's part of", "leave to step of"
RECORDED, VERSION, ROUND = "what is recorded by", "a version of", "the end of a round of"

_AWAITED = {
    "samples": (SAMPLES, ROOM),
    "requests": (REQUESTS, ""),
    "answers": (ANSWERS, ""),
    "sums": (SUMS, ""),
    "credits": (CREDITS, ""),
}
"""By the kind of an edge: what its reader waits for, and its writer, "" where that is
never told."""


def whom_each_awaits(experiment: Experiment, edges: Iterable[Edge]) -> dict[str, dict[str, str]]:
    """Return whom each worker may ever wait for, and for what, as these edges join
    them."""
    found: dict[str, dict[str, str]] = {name: {} for name, _ in experiment.members()}
    for edge in edges:
        brought, room = _AWAITED.get(edge.name.partition("/")[0], ("", ""))
        for target in edge.targets:
            if brought:
                found[target].setdefault(edge.source, brought)
            if room:
                found[edge.source].setdefault(target, room)
    for name, config in experiment.members():
        for policy in experiment.trained():
            for trainer in experiment.holders(policy, "publish") if config.awaited(policy) else ():
                found[trainer].setdefault(name, RECORDED)
                found[name].setdefault(trainer, VERSION)
    return found


def trainers_of(experiment: Experiment) -> list[str]:
    """Return the workers whose updates a run is about: those that publish a policy, or
    all that end it where none does."""
    limited = [name for name, config in experiment.members() if config.limited]
    publish = {name for policy in experiment.trained() for name in experiment.holders(policy, "publish")}
    return [name for name in limited if name in publish] or limited


class Waiting:
    """Whom the workers of one experiment, joined by `edges`, may wait for as they are at
    a time."""

    def __init__(self, experiment: Experiment, edges: Sequence[Edge]) -> None:
        self.edges = edges
        self._ever = whom_each_awaits(experiment, edges)
        self.servers = {
            source for each in self._ever.values() for source, what in each.items() if what == ANSWERS
        }
        """Those who answer. What they do for others brings on nobody who waits."""
        self.asked = {
            name: {other: what for other, what in each.items() if what == REQUESTS}
            for name, each in self._ever.items()
        }
        """Who asks each of them, and what for."""
        # by policy and what may be due of its versions (see `WorkerStatistics`): whose
        # work that is
        self._brings: dict[tuple[str, str], list[str]] = {}
        for name, config in experiment.members():
            for port in config.ports():
                brought = ("",) if port.role == "publish" else config.records()
                for what in brought if port.role in ("publish", "store", "draw") else ():
                    self._brings.setdefault((port.stream, what), []).append(name)
        # by who records and trainer: after how many updates each that is awaited
        self._recorded: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, config in experiment.members():
            for policy in experiment.trained():
                if every := tuple(config.awaited(policy).values()):
                    for trainer in experiment.holders(policy, "publish"):
                        self._recorded.setdefault(name, {})[trainer] = every

    def now(
        self, members: Mapping[str, Member], updating: Container[str], rounds: Rounds | None = None
    ) -> dict[str, dict[str, str]]:
        """Return whom each worker may wait for now, and for what. Nobody waits for room
        at a trainer that makes updates (`updating`), or for its leave to step. A trainer
        waits for what is recorded only at versions of which that is due, and for nothing
        else while another one has not come as far; so does who is through with its round,
        for those who are not. Who lacks what is due waits for whoever is to bring it. Who
        answers is nobody's cause by what it waits for."""
        found = {
            name: {
                other: what
                for other, what in each.items()
                if what != REQUESTS and not (what in (ROOM, CREDITS) and other in updating)
            }
            for name, each in self._ever.items()
        }
        for recorder, trainers in self._recorded.items():
            counts = {trainer: members[trainer].update.values.get("update") for trainer in trainers}
            known = [count for count in counts.values() if count is not None]
            for trainer, every in trainers.items():
                # one that has told no update since it was resumed may be anywhere
                if (now := counts[trainer]) is None:
                    continue
                if max(known) > now or all(now % updates for updates in every):
                    found[trainer].pop(recorder, None)
                elif min(known) < now:
                    found[trainer] = {recorder: RECORDED}
        for name, member in members.items():
            for due in member.due.items():
                for other in self._brings.get(due, ()):
                    if other != name and members[other].state not in ENDED:
                        found[name][other] = RECORDED if due[1] else VERSION
        for name in rounds.parties if rounds is not None else ():
            if rounds is not None and (lacking := rounds.lacking(name)):
                found[name] = dict.fromkeys(lacking, ROUND)
        return found


def chains_from(
    root: str, awaited: Mapping[str, Mapping[str, str]], through: Container[str]
) -> dict[str, list[str]]:
    """Return the shortest chain from `root` to each of whom it waits for, by way of
    others that are in `through`, or not, and to itself."""
    chains, front = {root: [root]}, [root]
    while front:
        name = front.pop(0)
        for other in awaited[name] if name in through else ():
            if other not in chains:
                chains[other] = [*chains[name], other]
                front.append(other)
    return chains
