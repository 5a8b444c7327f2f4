"""What ``tidemill simulator`` does: tools for those who join an engine to Tidemill."""

from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.friendly import friendly

simulator = typer.Typer(help="Join a simulator to Tidemill.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@simulator.callback()
def commands() -> None:
    """Join a simulator to Tidemill (docs/simulators.md)."""


@simulator.command()
@friendly
def sources(folder: Annotated[Path, typer.Argument(help="Where to put them; made if it is not there.")]) -> None:
    """Copy the simulator's side of the bridge here: the C header, the Unity package (C#), and example worlds."""
    from tidemill.bridge.sources import copy_sources

    for path in copy_sources(folder):
        print(path)


@simulator.command("dump")
@friendly
def look_inside(
    file: Annotated[Path, typer.Argument(help="A memory file of layout 0, or a body file of layout 0.3.0 or 0.3.2.")],
    header: Annotated[Path | None, typer.Option(help="The header file that belongs to the body.")] = None,
) -> None:
    """Print what a memory file holds, as JSON. It is only read, also while a simulator runs."""
    from tidemill.bridge.dump import dump, text_of

    print(text_of(dump(file, header)))


Path_ = Annotated[str, typer.Argument(metavar="PATH", help="The simulator: an executable, FILE.py or FILE.exe (Mono).")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="[-- ARGUMENT...]", help="Its arguments, after --.")]
Layout = Annotated[str, typer.Option(help="Of the memory: 0, 0.3.0 or 0.3.2.")]
Deadline = Annotated[float, typer.Option(help="Seconds that it may take for an answer.")]
Framing = Annotated[str, typer.Option(help="Of side channels: uuid, or type in older engines.")]


@simulator.command()
@friendly
def check(
    path: Path_,
    arguments: Arguments = None,
    layout: Layout = "0",
    seconds: Annotated[float, typer.Option(help="Length of the plain play, in which ends, masks, late groups and so on are waited for.")] = 5.0,
    deadline: Deadline = 30.0,
    framing: Framing = "uuid",
    only: Annotated[list[str] | None, typer.Option(help="A point's name, to see only that. Repeatable.")] = None,
) -> None:
    """Play a simulator through everything that the bridge asks of it, and tell what it does, point by point."""
    from tidemill.bridge.channels import framing_of
    from tidemill.bridge.check import check_simulator
    from tidemill.bridge.play import Program

    points = check_simulator(Program(path, tuple(arguments or ()), layout, deadline), seconds, framing_of(framing), only or ())
    for point in points:
        print(f"{point.verdict:<10}{point.name:<19}{_indented(point.what)}")
        if point.cure:
            print(f"{'':<10}{'':<19}→ {point.cure}")
    numbers = [f"{sum(point.verdict == verdict for point in points)} {verdict}" for verdict in ("pass", "fail", "not seen")]
    print(f"{len(points)} points: {', '.join(numbers)}")
    if any(point.verdict == "fail" for point in points):
        raise typer.Exit(1)


def _indented(text: str) -> str:
    return text.replace("\n", "\n" + " " * 29)
