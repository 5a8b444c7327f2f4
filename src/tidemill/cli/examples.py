"""What ``tidemill examples`` does."""

from pathlib import Path
from typing import Annotated

import typer

import tidemill
from tidemill.cli.error_output import friendly

_PACKAGE = Path(tidemill.__file__).parent


@friendly
def examples(
    folder: Annotated[Path, typer.Argument(help="Where to put them; made if it is not there.")] = Path(
        "examples"
    ),
) -> None:
    """Copy the examples here: experiments of every kind, each one file that trains."""
    from tidemill.bridge.world_side.language_files import copy_files

    root = _PACKAGE / "examples"  # in a wheel
    if not root.is_dir():
        root = _PACKAGE.parents[1] / "examples"  # in a checkout
    for path in copy_files(root, [Path(file.name) for file in sorted(root.glob("*.py"))], folder):
        print(path)
