"""Who waits for whom in a run that makes no progress, in words."""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from itertools import pairwise
from time import time
from typing import Protocol

from tidemill.api.control_messages import ENDED, State
from tidemill.api.experiment import Experiment
from tidemill.api.worker import WorkerConfig
from tidemill.core.clock import awake
from tidemill.run.waiting import chains_from

SILENT = 2.0  # seconds: a running worker reports four times a second

_TIMES = {0: "", 1: ", restarted once", 2: ", restarted twice"}  # by lives before


class _Member(Protocol):
    config: WorkerConfig
    state: State
    shares: dict[str, float]
    heard: float
    where: str
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
    trainers: Iterable[str],
    members: Mapping[str, _Member],
    awaited: Mapping[str, Mapping[str, str]],
    condition: Callable[[str], str],
) -> str:
    """Return why `trainers` make no progress, a chain for each: "trainer-0 waits for
    samples ← actor-3 waits for answers ← server-0 died at 12:01:33 (killed by SIGKILL),
    restarted twice".

    A chain ends with who does not wait for another worker: the dead first, then who is
    held, as by a server that is away, or silent, has not begun, or works. A worker that
    is stuck is silent: its loop no longer turns. One that waits says so, since its loop
    looks again all the time.
    `awaited` says whom each one may wait for now, and for what; `condition` of one by
    name what keeps it still that its environment has nothing to do with, or "".
    """
    conditions = {name: condition(name) for name in members}
    standing = {name: _stand(member, conditions[name]) for name, member in members.items()}

    def does(name: str) -> str:
        return f"{name} {doing(members[name], awaited[name], conditions[name])}"

    chains, told = list[str](), set[str]()
    for name in trainers:
        if (chain := _chain(name, members, awaited, standing))[-1] not in told:
            told.update(chain)
            links = [
                f"{waits} waits for {awaited[waits][other].rpartition(' ')[0]}"
                for waits, other in pairwise(chain)
            ]
            chains.append(" ← ".join([*links, does(chain[-1])]))
    besides = [does(name) for name in members if standing[name] < _BEGINS and name not in told]
    return "; ".join([*chains, *(f"besides, {text}" for text in besides)])


def who_explains(
    trainer: str,
    members: Mapping[str, _Member],
    awaited: Mapping[str, Mapping[str, str]],
    condition: Callable[[str], str],
) -> str:
    """Return who ends the chain of `trainer`: see `explain_stall`."""
    standing = {name: _stand(member, condition(name)) for name, member in members.items()}
    return _chain(trainer, members, awaited, standing)[-1]


def concerns(
    trainer: str, members: Mapping[str, _Member], awaited: Mapping[str, Mapping[str, str]]
) -> set[str]:
    """Return all whose work may bring `trainer` on: itself, and whom it waits for, by way
    of others that are heard or not."""
    heard = {name for name, member in members.items() if _stand(member, "") in (_WORKS, _WAITS)}
    return {*chains_from(trainer, awaited, heard)}


def waits_for_pause(
    trainer: str, members: Mapping[str, _Member], awaited: Mapping[str, Mapping[str, str]]
) -> bool:
    """Return whether `trainer` waits, by way of others or not, for an actor that tries
    again at a known time what is away. So does one that begins another life: for that the
    supervisor has deadlines."""
    if members[trainer].state in (State.CONFIGURING, State.READY, *ENDED):
        return True
    waiting = {name for name, member in members.items() if _stand(member, "") == _WAITS}
    found = [members[other] for other in chains_from(trainer, awaited, waiting)]
    return any(each.pauses and awake() - each.heard <= SILENT for each in found)


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


def _chain(
    root: str,
    members: Mapping[str, _Member],
    awaited: Mapping[str, Mapping[str, str]],
    standing: Mapping[str, int],
) -> list[str]:
    """Return the shortest chain from `root` to whoever explains most why it waits. Where
    all wait for each other, this is the nearest one with an environment: it may wait for
    that."""
    chains = chains_from(root, awaited, {name for name, stands in standing.items() if stands == _WAITS})
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
        return f"waits for {member.away}"
    if member.state is not State.RUNNING:
        return f"is {member.state.value}"
    if silent > SILENT:
        if not (where := f": {member.where}" if member.where else ""):
            # a trainer waits for nobody in a poll
            where = ", most likely in an update" if member.config.limited else ", where cannot be seen"
        return f"is silent for {silent:.0f} s{where}"
    if (busiest := _busiest(member)) != "wait":
        return f"works ({member.shares[busiest]:.0%} {busiest})"
    sources = [
        f"{what} {', '.join(other for other, its in awaited.items() if its == what)}"
        for what in dict.fromkeys(awaited.values())
    ]
    if member.config.owns_environment:
        sources.append("its environment")
    return f"waits for {' or '.join(sources) or 'nobody'}"
