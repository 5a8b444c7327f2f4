"""What a run shows while it goes on: a live view on a terminal, a line every few seconds
elsewhere, and what to type next at the end.

The loop that calls it (the run controller does)::

    view = make_view(Console())
    # whatever happens, the terminal is left as it was
    with view:
        while running:
            # as often as it likes: a view draws no more often than it can be read
            view.show(snapshot)
    view.end(summary, {"evaluate": f"tidemill eval {run}"})
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tidemill.core.forgiving_output import printable
from tidemill.run.host_places import MOST
from tidemill.run.host_table import table_of_hosts
from tidemill.run.snapshot import EvaluationView, Snapshot, WorkerView, short

SHARES = {
    "environment": "green",
    "inference": "cyan",
    "train": "magenta",
    "copy": "yellow",
    "python": "blue",
    "wait": "bright_black",
}
"""Where a worker's time goes, in the order and the colours in which it is drawn."""
STATES = {"running": "green", "paused": "yellow", "failed": "red"}
LINE_EVERY = 5.0  # seconds between plain lines
MOST_RETURNS = 8  # policies whose return is shown
DRAW_EVERY = 0.2  # seconds between frames on a terminal


class View(ABC):
    """A view shows snapshots. A context manager: leaving it closes it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._iterations = 0  # that were told

    @abstractmethod
    def show(self, snapshot: Snapshot) -> None:
        """Show the run as it is now."""

    def _tell_iterations(self, snapshot: Snapshot) -> None:
        """A line for each that has ended since."""
        for values in snapshot.iterations[self._iterations :]:
            self._line(_iteration(values))
        self._iterations = len(snapshot.iterations)

    @abstractmethod
    def close(self) -> None:
        """Stop drawing and give the terminal back. May be called twice."""

    def end(self, summary: Mapping[str, object], next_commands: Mapping[str, str]) -> None:
        """Close, then say how the run ended (`summary`, as in summary.json) and what to
        type next (purpose → command)."""
        self.close()
        self._line("")
        width = max((len(name) for name in [*summary, *next_commands]), default=0)
        for name, value in summary.items():
            self._line(
                f"{_words(name):<{width}}  {_value(name, value)}", style="bold" if name == "status" else ""
            )
        if next_commands:
            self._line("")
            self._line("Next:", style="bold")
        for purpose, command in next_commands.items():
            self._line(f"{purpose:<{width}}  {command}")

    def _line(self, text: str, style: str = "") -> None:
        # Never wrapped, marked up or coloured in parts: a command must survive copy and
        # paste.
        self._console.print(Text(printable(text), style), soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def make_view(console: Console) -> View:
    """Return a live view when `console` is a terminal that can redraw, else one that
    prints lines."""
    # rich also takes FORCE_COLOR for a terminal, but a log file is not to be filled with
    # frames.
    return LiveView(console) if console.is_interactive and console.file.isatty() else PlainView(console)


class PlainView(View):
    """One line every few seconds of the run's own clock, the first snapshot and each
    change of state or stage at once."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._last: Snapshot | None = None
        self._memory = ""  # as it was told

    def show(self, snapshot: Snapshot) -> None:
        last = self._last
        self._tell_iterations(snapshot)
        if snapshot.memory != self._memory:
            self._memory = snapshot.memory
            self._line(snapshot.memory)
        if (
            last
            and (snapshot.state, snapshot.stage) == (last.state, last.stage)
            and abs(snapshot.seconds - last.seconds) < LINE_EVERY  # a run may go back
        ):
            return
        self._last = snapshot
        values = _figures(snapshot)
        if snapshot.state != "running":
            values = {"state": snapshot.state, **values}
        elif last and snapshot.updates == last.updates:  # much has to be gathered for each
            values["gathered/s"] = short(snapshot.gathered_per_second)
        for name, evaluation in snapshot.evaluations.items():
            values[name] = str(evaluation)
        self._line(
            f"{_clock(snapshot.seconds):>8}  "
            + "  ".join(f"{name} {value}" for name, value in values.items())
        )
        for limiter in _limiters(snapshot):
            self._line(f"{'':>8}  " + "  ".join(f"{name} {value}" for name, value in limiter.items()))

    def close(self) -> None:
        pass


class LiveView(View):
    """A picture of the run that is redrawn in place. It starts no thread: it is drawn
    within `show`."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live: Live | None = None
        self._last: Snapshot | None = None
        self._drawn: Snapshot | None = None

    def show(self, snapshot: Snapshot) -> None:
        self._last = snapshot
        self._tell_iterations(snapshot)
        if (
            self._drawn
            and snapshot.state == self._drawn.state
            and abs(snapshot.seconds - self._drawn.seconds) < DRAW_EVERY
        ):
            return
        self._draw(snapshot)

    def close(self) -> None:
        if self._live is None:
            return
        if self._last is not None and self._last is not self._drawn:
            self._draw(self._last)  # the frame that stays is the newest
        self._live.stop()
        self._live = None

    def _draw(self, snapshot: Snapshot) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._drawn = snapshot
        self._live.update(picture(snapshot, self._console.width, self._console.height), refresh=True)


def picture(snapshot: Snapshot, width: int, height: int) -> RenderableType:
    """Return the live view's frame for a terminal of `width` columns and `height`
    lines."""
    head = Text.assemble(
        (snapshot.run, "bold"),
        "  ",
        (snapshot.state, STATES.get(snapshot.state, "")),
        f"  {_clock(snapshot.seconds)}",
    )
    parts: list[RenderableType] = [head]
    if snapshot.memory:
        parts.append(Text(snapshot.memory, "bright_black", no_wrap=True, overflow="ellipsis"))
    if snapshot.limit:
        parts.append(_progress(snapshot.steps / snapshot.limit, min(width - 6, 66)))
    figures = _tables_of(_figures(snapshot), width)
    for limiter in _limiters(snapshot):
        figures += _tables_of(limiter, width)
    parts += [Text(), *figures]
    parts += [_table_of_evaluations(snapshot.evaluations)] if snapshot.evaluations else []
    parts += [Text()]
    hosts = min(len(snapshot.hosts), MOST, max(height // 3, 1))
    if hosts:
        parts += [table_of_hosts(snapshot.hosts, hosts), Text()]
    if snapshot.workers:
        others = (
            7
            + (hosts + 2 if hosts else 0)
            + 2 * len(figures)
            + bool(snapshot.memory)
            + len(snapshot.evaluations)
            + _legend().cell_len // width
        )
        rows = max(height - others, 1)  # what a terminal cannot show below the other lines is only counted
        parts.append(_table_of_workers(snapshot.workers[:rows]))
        if len(snapshot.workers) > rows:
            parts.append(Text(f"and {len(snapshot.workers) - rows} more", "bright_black"))
        parts.append(_legend())
    return Group(*parts)


def _progress(share: float, width: int) -> Text:
    done = min(int(share * width), width)
    return Text.assemble(
        ("━" * done, "green"), ("─" * (width - done), "bright_black"), f" {min(share, 1.0):4.0%}"
    )


def _tables_of(figures: Mapping[str, str], width: int) -> list[Table]:
    """Return them in lines that fit."""
    lines: list[dict[str, str]] = [{}]
    left = width
    for name, value in figures.items():
        wide = max(len(name), len(value)) + 3
        if wide > left + 3 and lines[-1]:  # nothing follows the last one
            lines.append({})
            left = width
        lines[-1][name] = value
        left -= wide
    return [_table_of(line) for line in lines]


def _table_of(figures: Mapping[str, str]) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    for name in figures:
        table.add_column(name)
    table.add_row(*(Text(name, "bright_black") for name in figures))
    table.add_row(*(Text(value, "bold") for value in figures.values()))
    return table


def _table_of_evaluations(evaluations: Mapping[str, EvaluationView]) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    for name, evaluation in evaluations.items():
        table.add_row(
            Text(name, "bright_black", no_wrap=True),
            Text(str(evaluation), "bold", no_wrap=True, overflow="ellipsis"),
        )
    return table


def _table_of_workers(workers: tuple[WorkerView, ...]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(4):
        table.add_column(no_wrap=True)
    table.add_column()  # the one that a narrow terminal cuts
    for worker in workers:
        largest = sorted(worker.shares.items(), key=lambda share: -share[1])[:2]
        busiest = ", ".join(f"{name} {share:.0%}" for name, share in largest if share >= 0.005)
        table.add_row(
            Text(worker.name),
            Text(worker.state, STATES.get(worker.state, "")),
            Text(f"{short(worker.rate)}/s", justify="right"),
            _bar(worker.shares, 24),
            Text(busiest, no_wrap=True, overflow="ellipsis"),
        )
    return table


def _bar(shares: Mapping[str, float], width: int) -> Text:
    """Return shares as one line of blocks. Ends are rounded, not lengths, so that
    rounding never adds up."""
    text, behind, drawn = Text(), 0.0, 0
    for name in [*SHARES, *(set(shares) - set(SHARES))]:
        behind = min(behind + max(shares.get(name, 0.0), 0.0), 1.0)
        end = round(behind * width)
        text.append("█" * (end - drawn), SHARES.get(name, "white"))
        drawn = end
    return text.append("·" * (width - drawn), "bright_black")


def _legend() -> Text:
    return Text("  ").join(
        Text.assemble(("█ ", colour), (name, "bright_black")) for name, colour in SHARES.items()
    )


def _figures(snapshot: Snapshot) -> dict[str, str]:
    return {
        "steps": f"{snapshot.steps:,}" + (f" of {snapshot.limit:,}" if snapshot.limit else ""),
        "steps/s": short(snapshot.steps_per_second),
        **_returns(snapshot.mean_returns),
        "episodes": f"{snapshot.episodes:,}",
        "updates": f"{snapshot.updates:,}",
        "lag": "–" if snapshot.lag is None else f"{snapshot.lag:.1f}",
        "dropped": f"{snapshot.dropped:,}",
        **({"stage": snapshot.stage} if snapshot.stage else {}),
    }


def _returns(mean_returns: Mapping[str, float | None]) -> dict[str, str]:
    """Of each policy; of many the lowest and the highest."""
    if len(mean_returns) <= MOST_RETURNS:
        return {
            f"return {who}".strip(): "–" if mean is None else f"{mean:.1f}"
            for who, mean in mean_returns.items()
        }
    known = [mean for mean in mean_returns.values() if mean is not None]
    return {f"returns of {len(mean_returns)}": f"{min(known):.1f} … {max(known):.1f}" if known else "–"}


def _limiters(snapshot: Snapshot) -> list[dict[str, str]]:
    """Return the figures of each; a single one needs no name."""
    several = len(snapshot.limiters) > 1
    return [
        {**({"trainer": name} if several else {}), **limiter.figures()}
        for name, limiter in snapshot.limiters.items()
    ]


def _iteration(values: Mapping[str, float]) -> str:
    """Return what an iteration came to, in a line."""
    parts = []
    for kind in ("evaluation", "training"):
        if (episodes := values.get(f"{kind}_episodes")) is not None:
            value = values.get(f"{kind}_return")
            mean = "–" if value is None else f"{value:,.1f}"
            parts.append(f"{kind} {mean} ({episodes:,.0f} episode{'s' * (episodes != 1)})")
    return f"iteration {values['number']:.0f} at {values['step']:,.0f} steps: {', '.join(parts)}"


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _value(name: str, value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(key, each)}" for key, each in value.items())
    if isinstance(value, float):
        return _clock(value) if name == "seconds" and value >= 60 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
