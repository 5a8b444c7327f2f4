"""Who waits for whom in a run that makes no progress, in words."""

from collections.abc import Callable, Mapping
from datetime import datetime
from itertools import pairwise
from time import time
from typing import Protocol

from tidemill.api.control_messages import ENDED, State
from tidemill.api.experiment import Experiment
from tidemill.api.worker import WorkerConfig
from tidemill.core.clock import awake

SILENT = 2.0  # seconds: a running worker reports four times a second

_AWAITED = {
    "samples": ("samples of", "room at"),
    "requests": ("requests of", ""),
    "answers": ("answers of", ""),
    "sums": ("a sum's part of", ""),
    "credits": ("leave to step of", ""),
}
"""By the kind of an edge: what its reader waits for, and its writer, "" where that is
never told."""
_TIMES = {0: "", 1: ", restarted once", 2: ", restarted twice"}  # by lives before


class _Member(Protocol):
    config: WorkerConfig
    state: State
    shares: dict[str, float]
    heard: float
    life: int
    buried: bool
    died_at: float
    cause: str
    away: str
    pauses: bool


BESIDES = 60.0  # seconds by which a run's own end comes after what its workers wait for


def stall_limit(experiment: Experiment) -> float | None:
    """Return after how many seconds without any progress a run ends, None: never. What
    its workers wait for by settings of their own has its time before."""
    stall = experiment.limits.stall_s
    if stall is None:
        return None
    longer = [
        float(seconds)
        for worker in experiment.workers.values()
        for config in (worker, getattr(worker, "environment", None))
        for name in ("deadline_s", "max_no_progress_s")
        if isinstance(seconds := getattr(config, name, None), (int, float))
    ]
    return max([stall, *(seconds + BESIDES for seconds in longer)])


def explain_stall(
    experiment: Experiment, members: Mapping[str, _Member], condition: Callable[[str], str]
) -> str:
    """Return why trainers make no progress, a chain for each: "trainer-0 waits for
    samples ← actor-3 waits for answers ← server-0 died at 12:01:33 (killed by SIGKILL),
    restarted twice".

    A chain ends with who does not wait for another worker: the dead first, then who is
    held, as by a server that is away, or silent, has not begun, or works. A worker that
    is stuck is silent: its loop no longer turns. One that waits says so, since its loop
    looks again all the time.
    `condition` says of one by name what keeps it still that its environment has nothing
    to do with, or "".
    """
    awaited = whom_each_awaits(experiment)
    conditions = {name: condition(name) for name in members}
    standing = {name: _stand(member, conditions[name]) for name, member in members.items()}

    def does(name: str) -> str:
        return f"{name} {doing(members[name], awaited[name], conditions[name])}"

    chains, told = list[str](), set[str]()
    for name, member in members.items():
        if member.config.limited and (chain := _chain(name, members, awaited, standing))[-1] not in told:
            told.update(chain)
            links = [
                f"{waits} waits for {awaited[waits][other].rpartition(' ')[0]}"
                for waits, other in pairwise(chain)
            ]
            chains.append(" ← ".join([*links, does(chain[-1])]))
    besides = [does(name) for name in members if standing[name] < _BEGINS and name not in told]
    return "; ".join([*chains, *(f"besides, {text}" for text in besides)])


def waits_for_pause(experiment: Experiment, members: Mapping[str, _Member]) -> bool:
    """Return whether each trainer waits, by way of others or not, for an actor that tries
    again at a known time what is away. So does one that begins another life: for that the
    supervisor has deadlines."""
    awaited = whom_each_awaits(experiment)
    standing = {name: _stand(member, "") for name, member in members.items()}

    def waits(name: str) -> bool:
        reached = [members[other] for other in _chains(name, awaited, standing)]
        return any(each.pauses and awake() - each.heard <= SILENT for each in reached)

    trainers = {name: member for name, member in members.items() if member.config.limited}
    return all(
        member.state in (State.CONFIGURING, State.READY, *ENDED) or waits(name)
        for name, member in trainers.items()
    )


_DEAD, _HELD, _SILENT, _BEGINS, _WORKS, _WAITS = range(6)
"""What a worker may be in, by how much it explains."""


def _stand(member: _Member, condition: str) -> int:
    if member.buried:
        return _DEAD
    if condition or (member.away and _busiest(member) == "wait"):
        return _HELD
    if member.state is not State.RUNNING:
        return _BEGINS
    if awake() - member.heard > SILENT:
        return _SILENT
    return _WAITS if _busiest(member) == "wait" else _WORKS


def _busiest(member: _Member) -> str:
    return max(member.shares, key=lambda place: member.shares[place], default="wait")


def whom_each_awaits(experiment: Experiment) -> dict[str, dict[str, str]]:
    """Return whom each worker may wait for, and for what."""
    found: dict[str, dict[str, str]] = {name: {} for name, _ in experiment.members()}
    for edge in experiment.edges():
        brought, room = _AWAITED.get(edge.name.partition("/")[0], ("", ""))
        for target in edge.targets:
            if brought:
                found[target].setdefault(edge.source, brought)
            if room:
                found[edge.source].setdefault(target, room)
    for name, config in experiment.members():
        for policy in experiment.trained():
            for trainer in experiment.holders(policy, "publish") if config.awaited(policy) else ():
                found[trainer].setdefault(name, "what is recorded by")
                found[name].setdefault(trainer, "a version of")
    return found


def _chains(
    root: str,
    awaited: Mapping[str, Mapping[str, str]],
    standing: Mapping[str, int],
) -> dict[str, list[str]]:
    """Return the shortest chain from `root` to each of whom it waits for, by way of
    others that wait or not, and to itself."""
    chains, front = {root: [root]}, [root]
    while front:
        name = front.pop(0)
        for other in awaited[name] if standing[name] == _WAITS else ():
            if other not in chains:
                chains[other] = [*chains[name], other]
                front.append(other)
    return chains


def _chain(
    root: str,
    members: Mapping[str, _Member],
    awaited: Mapping[str, Mapping[str, str]],
    standing: Mapping[str, int],
) -> list[str]:
    """Return the shortest chain from `root` to whoever explains most why it waits. Where
    all wait for each other, this is the nearest one with an environment: it may wait for
    that."""
    chains = _chains(root, awaited, standing)
    owners = [name for name in chains if members[name].config.owns_environment]
    best = min(chains, key=lambda name: standing[name])
    if standing[best] == _WAITS:
        best = owners[0] if owners else root
    return chains[best]


def doing(member: _Member, awaited: Mapping[str, str], condition: str) -> str:
    """Return what one worker does, or waits for. `awaited`: whom it may wait for, and for
    what; `condition`: what `explain_stall` asks for."""
    silent = awake() - member.heard
    if member.buried:
        when = datetime.fromtimestamp(time() - (awake() - member.died_at)).strftime("%H:%M:%S")
        return f"died at {when} ({member.cause}){_TIMES.get(member.life, f', restarted {member.life} times')}"
    if condition:
        return condition
    if member.away and _busiest(member) == "wait":
        return f"waits for what its environment connects to, which is away: {member.away}"
    if member.state is not State.RUNNING:
        return f"is {member.state.value}"
    if silent > SILENT:
        where = " stuck in its environment" if member.config.owns_environment else " stuck"
        if member.config.limited:  # it waits for nobody in a poll
            where = " most likely in an update"
        return f"is silent for {silent:.0f} s,{where}"
    if (busiest := _busiest(member)) != "wait":
        return f"works ({member.shares[busiest]:.0%} {busiest})"
    sources = [
        f"{what} {', '.join(other for other, its in awaited.items() if its == what)}"
        for what in dict.fromkeys(awaited.values())
    ]
    if member.config.owns_environment:
        sources.append("its environment")
    return f"waits for {' or '.join(sources) or 'nobody'}"
