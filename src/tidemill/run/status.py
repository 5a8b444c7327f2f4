"""What `tidemill status RUN` tells: of a run that is going on as it is now, by its
socket; of one that is over how it ended; and of either what happened last."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tidemill.core.clock import PLACES as DOINGS
from tidemill.core.errors import RunError
from tidemill.core.forgiving_output import printable
from tidemill.metrics.json_lines import last_records
from tidemill.run.control_socket import NoRun, tell
from tidemill.run.controller import Controller
from tidemill.run.events import Event, read_events
from tidemill.run.folder import CONFIG, PLACES, SUMMARY, RunFolder
from tidemill.run.host_places import HostPlace, table_of_places
from tidemill.run.host_table import table_of_hosts
from tidemill.run.host_watch import HostView
from tidemill.run.member import LONGEST_CAUSE
from tidemill.run.snapshot import short, snapshot
from tidemill.run.stall_report import doing
from tidemill.store.fence import taken_at

EVENTS = 10  # that are shown, the last ones
MOST = 1000  # workers of a group that are shown of a run that is over


class WorkerStatus(msgspec.Struct, frozen=True):
    """A worker of a run that is going on: its state, the number of its life, from 1, what
    it does, in words, where its time goes and, of several, the host that it lives on, ""
    for none."""

    name: str
    state: str
    life: int
    does: str
    shares: dict[str, float]
    host: str = ""


class RunStatus(msgspec.Struct, frozen=True):
    """A run that is going on: see `Snapshot`. `stalled`: why it makes no progress, "" of
    one that does."""

    state: str
    seconds: float
    steps: int
    limit: int | None
    steps_per_second: float
    updates: int
    episodes: int
    mean_returns: dict[str, float | None]
    lag: float | None
    dropped: int
    crash_cost: tuple[float, int]
    workers: list[WorkerStatus]
    stalled: str = ""
    hosts: dict[str, HostView] = {}
    lost_samples: int = 0
    lost_steps: int = 0


def status_of(controller: Controller) -> RunStatus:
    """Return the run as it is now."""
    now = snapshot(controller)
    awaited = controller.stalls.awaited()
    homes = {worker: host for host, place in controller.places.items() for worker in place.workers}
    workers = [
        WorkerStatus(
            name,
            "dead" if member.buried else member.state.value,
            member.life + 1,
            "" if member.buried else doing(member, awaited[name], controller.launcher.condition(name)),
            member.shares,
            homes.get(name, ""),
        )
        for name, member in controller.state.members.items()
    ]
    return RunStatus(
        now.state,
        now.seconds,
        now.steps,
        now.limit,
        now.steps_per_second,
        now.updates,
        now.episodes,
        dict(now.mean_returns),
        now.lag,
        now.dropped,
        now.crash_cost,
        workers,
        controller.stalls.why(),
        dict(now.hosts),
        controller.state.progress.lost_samples,
        controller.state.progress.lost_steps,
    )


def read_status(folder: RunFolder) -> RunStatus | None:
    """Return the status of the run in `folder`; None where none is going on. Raises
    `RunError` where it does not answer, or is of another version."""
    try:
        answer = tell(folder.path, "status")
    except NoRun:
        return None
    try:
        return msgspec.json.decode(answer, type=RunStatus)
    except msgspec.DecodeError:
        raise RunError(f"{folder.path}: the run is of another version: {answer[:200]}") from None


def render_status(folder: RunFolder) -> RenderableType:
    """Return what the user is shown of the run in `folder`."""
    status, events = read_status(folder), read_events(folder.path)
    parts = _over(folder, events) if status is None else _now(status)
    try:
        folder.read(CONFIG)
    except RunError as error:
        parts += [Text(printable(f"\nIts configuration is damaged: {error}. `resume` needs it"), "bold")]
    if events:
        parts += [Text("\nWhat happened last", "bold"), _events(events[-EVENTS:])]
    return Group(*parts)


def _now(status: RunStatus) -> list[RenderableType]:
    limit = "" if status.limit is None else f" of {status.limit:,}"
    returns = ", ".join(
        f"{policy} {mean:,.1f}".strip() for policy, mean in status.mean_returns.items() if mean is not None
    )
    seconds, steps = status.crash_cost
    facts = {
        "state": status.state,
        "env steps": f"{status.steps:,}{limit}, {short(status.steps_per_second)} per second",
        "updates": f"{status.updates:,}",
        "mean return": returns or "–",
        "lag": "–" if status.lag is None else f"{status.lag:.1f} versions on average",
        "dropped": f"{status.dropped:,} samples",
        "trained for": f"{status.seconds:,.0f} s",
        "a crash would cost": f"{seconds:.0f} s, {steps:,} env steps",
    } | ({"stalled": status.stalled} if status.stalled else {})
    if status.lost_samples or status.lost_steps:
        facts["lost"] = (
            f"{status.lost_samples:,} samples on their way, {status.lost_steps:,} env steps of others"
        )
    on_hosts = ("host",) if status.hosts else ()
    table = Table("worker", *on_hosts, "life", "state", "does", "time", box=SIMPLE_HEAD)
    for worker in status.workers:
        host = (worker.host or "–",) if status.hosts else ()
        table.add_row(
            worker.name, *host, str(worker.life), worker.state, worker.does, _in_words(worker.shares)
        )
    hosts: list[RenderableType] = [Text(), table_of_hosts(status.hosts)] if status.hosts else []
    return [_facts(facts), *hosts, table]


def _in_words(shares: Mapping[str, float]) -> str:
    """Return where a worker's time goes, the most first."""
    largest = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share:.0%}" for name, share in largest if share >= 0.005)


def _over(folder: RunFolder, events: list[Event]) -> list[RenderableType]:
    if folder.led():
        return [
            Text(
                "its runner is there, and has no workers: it is starting (its layout is measured, say), "
                "or ending"
            )
        ]
    updates = [each for each in last_records(folder.path) if any(map(_is_update, each))]
    record = updates[-1] if updates else {}
    workers = _workers(folder, events, record)
    summary: Any = None
    with suppress(RunError):
        summary = folder.read(SUMMARY)
    if not isinstance(summary, dict) or not summary:  # torn, or there is none
        again = folder.how_to_go_on()
        cure = (
            f"go on from its last checkpoint by: {again}"
            if again
            else "no checkpoint is there: begin anew by the same command with --anew"
        )
        killed = Text(f"no run is going on there, and none has ended: it was killed; {cure}")
        last = [Text("\nWhat it recorded last", "bold"), _facts(_recorded(record))] if record else []
        return [killed, *last, *workers]
    told = {str(name).replace("_", " "): str(value) for name, value in summary.items()}
    facts = _facts({**told, **({"lag": _lag(record)} if record else {})})
    with suppress(RunError, ValueError, msgspec.ValidationError):  # none of a run on this machine alone
        places = msgspec.convert(folder.read(PLACES), dict[str, HostPlace])
        return [
            facts,
            Text("\nWhere its workers stood last", "bold"),
            Text(printable(table_of_places(places))),
            *workers,
        ]
    return [facts, *workers]


def _is_update(name: str) -> bool:
    return name.rpartition("/")[2] == "update"


def _recorded(record: dict[str, float]) -> dict[str, str]:
    """Return how far the run was at a record of an update."""
    counts = {"step": "env steps", "update": "updates", "episodes": "episodes", "dropped": "dropped"}
    returns = {
        f"mean return {name[len('return') : -len('/mean')].strip('/')}".strip(): value
        for name, value in record.items()
        if name.startswith("return/") and name.endswith("/mean")
    }
    return {
        **{words: f"{record[name]:,.0f}" for name, words in counts.items() if name in record},
        **{words: f"{value:,.1f}" for words, value in returns.items()},
        "lag": _lag(record),
        "trained for": f"{record.get('time/seconds', 0.0):,.0f} s",
    }


def _lag(record: dict[str, float]) -> str:
    """Return the lag that trainers told, each its own where there are several kinds."""
    told = {name.removesuffix("lag/mean"): lag for name, lag in record.items() if name.endswith("lag/mean")}
    return ", ".join(f"{whose.rstrip('/')} {lag:.1f}".strip() for whose, lag in told.items()) + (
        " versions on average" if told else "–"
    )


def _workers(folder: RunFolder, events: list[Event], record: dict[str, float]) -> list[RenderableType]:
    """Return the workers that a run had in its last command: in which life each was, of
    what it had died last, and where its time went before the last `record`."""
    began = max((number for number, event in enumerate(events) if event.what == "began"), default=0)
    since = taken_at(folder.path)  # some may have died before all had begun
    lives, died = Counter[str](), dict[str, list[Event]]()
    for event in (each for n, each in enumerate(events) if n >= began or each.time >= since):
        if event.what in ("died", "lost", "lives") and event.worker:
            lives[event.worker] = max(lives[event.worker], event.life)
        if event.what == "died":
            died.setdefault(event.worker, []).append(event)
    names = sorted({*lives, *_named(folder)}, key=_by_group)
    if not names:
        return []
    table = Table("worker", "life", "deaths", "the last one", "time, when last recorded", box=SIMPLE_HEAD)
    for name in names:
        deaths = died.get(name, [])
        last = f"{_clock(deaths[-1].time)} {_shortly(deaths[-1].cause)}" if deaths else ""
        shares = {place: record.get(f"time/{name}/{place}", 0.0) for place in DOINGS}
        words = name, str(lives[name] or 1), str(len(deaths) or ""), last, _in_words(shares)
        table.add_row(*(Text(printable(word)) for word in words))
    return [Text("\nIts workers", "bold"), table]


def _named(folder: RunFolder) -> list[str]:
    """Return the workers that the run's configuration names, as far as it can be read."""
    with suppress(RunError, AttributeError, KeyError, TypeError):
        groups = folder.read(CONFIG)["workers"].items()
        return [f"{group}-{i}" for group, config in groups for i in range(min(config["count"], MOST))]
    return []


def _by_group(name: str) -> tuple[str, int]:
    group, _, number = name.rpartition("-")
    return group, int(number[:9]) if number.isdecimal() else 0


def _facts(facts: dict[str, str]) -> Text:
    width = max(map(len, facts))
    return Text(printable("\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())))


def _events(events: list[Event]) -> Table:
    table = Table("when", "what", "who", "life", "why", box=SIMPLE_HEAD)
    for event in events:
        cause = _shortly(event.cause)
        if event.what == "lives":
            cause = f"it did not run for {event.seconds:.1f} s"
        elif event.what == "went back":
            where = f"to its beginning, since {cause}" if cause else "to its newest checkpoint"
            cause = f"{event.policy} {where}: {event.steps:,} env steps are undone"
        elif event.what == "told":
            cause = _shortly(event.cause.removeprefix(f"{event.worker}: "))
            if event.steps:
                cause += f" ({event.steps:,} env steps)"
        words = (_clock(event.time), event.what, event.worker or event.policy, str(event.life or ""), cause)
        table.add_row(*(Text(printable(word)) for word in words))  # brackets are no markup
    return table


def _shortly(cause: str) -> str:
    return cause if len(cause) <= LONGEST_CAUSE else f"{cause[:LONGEST_CAUSE]}…"


def _clock(seconds: float) -> str:
    """Return a time of a file's as a clock shows it."""
    with suppress(OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(seconds).strftime("%H:%M:%S")
    return "?"
