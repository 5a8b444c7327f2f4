"""Who waits for whom in a run that makes no progress, in words."""

from collections.abc import Callable, Mapping
from typing import Protocol

from tidemill.api.control_messages import State
from tidemill.api.edges import Role
from tidemill.api.experiment import Experiment, WorkerConfig
from tidemill.core.clock import awake

SILENT = 2.0  # seconds: a running worker reports four times a second

_AWAITED: dict[Role, tuple[str, Role]] = {
    "consume": ("samples of", "produce"),
    "produce": ("room at", "consume"),
    "ask": ("answers of", "serve"),
    "serve": ("requests of", "ask"),
    "sum": ("its equals among", "sum"),
}


class _Member(Protocol):
    config: WorkerConfig
    state: State
    shares: dict[str, float]
    heard: float


def explain_stall(
    experiment: Experiment, members: Mapping[str, _Member], condition: Callable[[str], str]
) -> str:
    """Return what each worker does, e.g. "trainer-0 waits for samples of actor-0; actor-0
    is silent for 28 s, stuck in its environment".

    A worker that is stuck is silent: its loop no longer turns. One that waits says so,
    since its loop looks again all the time. `condition` says of one by name what keeps it
    still that its environment has nothing to do with, or "".
    """
    return "; ".join(
        f"{name} {doing(experiment, member, condition(name))}" for name, member in members.items()
    )


def doing(experiment: Experiment, member: _Member, condition: str) -> str:
    """Return what one worker does, or waits for. `condition`: as `explain_stall` asks for
    it."""
    silent = awake() - member.heard
    if condition:
        return condition
    if member.state is not State.RUNNING:
        return f"is {member.state.value}"
    if silent > SILENT:
        where = " in its environment" if member.config.owns_environment else ""
        return f"is silent for {silent:.0f} s, stuck{where}"
    busiest = max(member.shares, key=lambda place: member.shares[place], default="wait")
    if busiest != "wait":
        return f"works ({member.shares[busiest]:.0%} {busiest})"
    sources = []
    for port in member.config.ports():
        if port.role in _AWAITED:
            what, role = _AWAITED[port.role]
            sources.append(f"{what} {', '.join(experiment.holders(port.stream, role))}")
    if member.config.owns_environment:
        sources.append("its environment")
    return f"waits for {' or '.join(sources) or 'nobody'}"
