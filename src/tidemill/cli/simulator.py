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
