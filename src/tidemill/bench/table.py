"""What `bench` prints, within 80 columns."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tidemill.bench.efficiency import Bench
from tidemill.core.clock import PLACES

PUBLISHED: dict[tuple[str, str], tuple[str, dict[str, float]]] = {
    ("Gymnasium", "CartPole-v1"): ("mlp 64×64 tanh", {"env": 6.1, "infer": 0.44, "train": 0.94}),
    ("Atari", "ALE/Pong-v5"): ("nature cnn bfloat16", {"env": 245.0, "infer": 58.0, "train": 275.0}),
}
"""(kind of environment, id) → network, and part → core-µs per unit, on `MACHINE` with
both cores loaded."""
MACHINE = "a two-core EPYC without GPU, November 2026"


def tables(found: Bench) -> Iterator[RenderableType]:
    """Yield what is printed, one after the other."""
    facts, run = found.facts, found.run
    yield Text(f"{found.experiment} on {found.cores} core{'s' * (found.cores > 1)}", "bold")
    network, published = PUBLISHED.get((facts["environment_kind"], facts["environment"]), ("", {}))
    if network != facts["network"]:  # networks of other sizes are no comparison
        published = {part: value for part, value in published.items() if part == "env"}
    costs = _table("bare cost, core-µs", "here", "lowest … highest", *(["published*"] if published else []))
    for part, unit in (
        ("env", f"environment, a step ({facts['lanes']} lanes)"),
        ("infer", f"inference, a row ({facts['batch']:,} at once)"),
        ("train", f"training, a row, an epoch ({facts['minibatch']:,})"),
    ):
        cost = found.costs[part]
        row = [unit, _micro(cost.core), f"{_micro(min(cost.each))} … {_micro(max(cost.each))}"]
        costs.add_row(
            *row, *([_micro(published[part] / 1e6) if part in published else "–"] if published else [])
        )
    times = f"{facts['epochs']} epoch{'s' * (facts['epochs'] > 1)}" + (
        f", {facts['rows_per_step']} rows" if facts["rows_per_step"] > 1 else ""
    )
    costs.add_row(
        f"all that a step needs ({times})",
        _micro(found.cores / found.bound),
        *([""] * (len(costs.columns) - 2)),
    )
    yield costs
    other = [
        f"{name} in {way} {_micro(value)}"
        for part, name in (("infer", "inference"), ("train", "training"))
        for way, value in found.costs[part].ways.items()
        if value > found.costs[part].core
    ]
    footnotes = [f"* {MACHINE}"] * bool(published) + [f"the cheapest way; {', '.join(other)}"] * bool(other)
    if footnotes:
        yield Padding(Text("\n".join(footnotes), "dim"), (0, 0, 1, 1))

    speed = _table("measured", f"{run.seconds:.1f} s, {run.updates:,} updates")
    speed.add_row("steps/s", Text(f"{run.steps_per_second:,.0f}", "bold"))
    speed.add_row(f"bound: {found.cores} / the sum above", f"{found.bound:,.0f}")
    speed.add_row("efficiency", Text(f"{found.efficiency:.2f}", "bold"))
    speed.add_row("dropped", f"{run.dropped:.1%}")
    yield speed

    workers = _table("time, %", *PLACES)
    for worker in run.workers:
        workers.add_row(worker.name, *(f"{100 * worker.shares[place]:.0f}" for place in PLACES))
    yield workers
    yield Text(found.advice.text)
    for note in found.notes:
        yield Text(f"note: {note}", "yellow")


def _table(first: str, *others: str) -> Table:
    table = Table(first, *others, box=SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _micro(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"
