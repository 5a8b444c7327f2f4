"""Errors and tables as people read them on the command line."""

import os
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from tidemill.core.errors import SIGNALLED, Interrupted, TidemillError, message_of, no_exits, place
from tidemill.core.forgiving_output import forgiving_output, printable
from tidemill.core.user_code_loading import is_users_file
from tidemill.run.trust import Trust

if TYPE_CHECKING:
    from tidemill.testing.check_env import Finding

P = ParamSpec("P")


class Commands(TyperGroup):
    """The command line as a whole. Whatever becomes of its output, help and errors of
    usage included, nothing is raised."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run what the words say, and exit."""
        with forgiving_output():
            return super().main(*args, **kwargs)


def friendly(function: Callable[P, None]) -> Callable[P, None]:
    """Turn errors that users can mend into one message and status 1: those that are
    raised on purpose, and what code of theirs raises, such as a launcher's."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with no_exits():
                function(*args, **kwargs)
        except Interrupted as error:
            from tidemill.run.interrupts import exit_status

            print(error, file=sys.stderr)
            raise typer.Exit(exit_status(error.reason)) from None
        except TidemillError as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)
            raise typer.Exit(1) from None
        except FileNotFoundError:
            if _here():
                raise
            print("error: the working directory was removed; go to another one", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt as error:  # an environment of ours may have raised it, too
            print(f"interrupted: KeyboardInterrupt{printable(place(error, is_users_file))}", file=sys.stderr)
            raise typer.Exit(130) from None
        except SIGNALLED:
            raise
        except BaseException as error:
            where = place(error, is_users_file)
            if not where:
                raise
            text = f"{type(error).__name__}: {message_of(error)}{where}"
            print(f"error: {printable(text)}", file=sys.stderr)
            raise typer.Exit(1) from None

    return wrapped


def word(trust: bool) -> Trust:
    """Return the user's word for what a folder names: --trust, or else, on a terminal,
    whatever is answered when that is known."""
    if trust or not all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr)):
        return trust
    return lambda text: typer.confirm(f"{text}\nIs that to be done, now and from now on?", err=True)


def _here() -> bool:
    """True where there is a working directory."""
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def width() -> int:
    """Return how many columns a table may have."""
    console = Console()
    return console.width if console.is_terminal else 200


def print_findings(findings: "Iterable[Finding]") -> bool:
    """Print what was found, and return whether nothing failed."""
    table = Table("", "check", "what was found", "what to do", box=SIMPLE_HEAD)
    failed = False
    for finding in findings:
        failed |= finding.level == "fail"
        color = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.level]
        table.add_row(
            Text(finding.level, color), finding.name, Text(printable(finding.message)), Text(finding.cure)
        )
    print_table(table)
    return not failed


def print_table(table: RenderableType) -> None:
    """Print a table, or several, as wide as the terminal, or wide where there is none."""
    console = Console()
    console.print(table, crop=False) if console.is_terminal else Console(width=width()).print(table)
