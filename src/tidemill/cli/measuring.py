"""What the command line measures: ``bench``, ``tune``."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from tidemill.cli.arguments import EnvArg, Lay, Set, Trained, Wrap, experiment_from, pairs
from tidemill.cli.error_output import friendly, print_table
from tidemill.core.errors import ConfigError


@friendly
def bench(
    what: Trained,
    seconds: Annotated[
        float, typer.Option(help="Length of the run that is measured, after its start-up.")
    ] = 20.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to this file.")
    ] = None,
    layout: Lay = "auto",
    env_arg: EnvArg = None,
    wrap: Wrap = None,
    set_: Set = None,
) -> None:
    """Measure how fast an experiment runs, how fast this machine could run it, and what
    holds it back."""
    from tidemill.bench.efficiency import bench as measure
    from tidemill.bench.efficiency import check_seconds
    from tidemill.bench.table import tables
    from tidemill.layouts.auto_layout import lay_out

    check_seconds(seconds)
    experiment, source = experiment_from(what, env_arg, set_, wrap=wrap)
    experiment.check()
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json {json_file}: there is no folder {json_file.parent}; make it first")
    if json_file is not None and json_file.is_dir():
        raise ConfigError(f"--json {json_file} is a folder; name a file in it")
    laid_out = lay_out(experiment, source, layout, pairs("--set", set_ or []))
    if laid_out.note:
        print(laid_out.note, file=sys.stderr)
    found = measure(laid_out.experiment, source, seconds, lambda text: print(text, file=sys.stderr))
    try:
        if json_file is not None:  # first: whoever reads the tables may have seen enough (head)
            json_file.write_bytes(msgspec.json.format(msgspec.json.encode(found.plain()), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"--json {json_file}: cannot be written: {error.strerror}") from error
    finally:
        for part in tables(found):
            Console().print(part)


@friendly
def tune(
    what: Trained,
    seconds: Annotated[
        float,
        typer.Option(
            help="Length of a run, after its start-up; the first of each layout takes half of that."
        ),
    ] = 6.0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.py", help="Write the experiment, laid out as was fastest, to this file."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    env_arg: EnvArg = None,
    wrap: Wrap = None,
    set_: Set = None,
) -> None:
    """Try layouts (how many actors, trainers, lanes, …) around the one that train would
    choose, and say which is fastest here.

    Ctrl-C ends the search, with the fastest of what has run by then."""
    from rich.live import Live

    from tidemill.bench.tune import Tuning, check_out, table, write
    from tidemill.bench.tune import tune as search
    from tidemill.run.folder import command
    from tidemill.run.interrupts import exit_status

    experiment, source = experiment_from(what, env_arg, set_, wrap=wrap)
    if out is not None:
        check_out(out, force, source)
    console = Console(stderr=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def tell(tuning: Tuning) -> None:
            if console.is_terminal:
                live.update(table(tuning), refresh=True)
            elif tuning.now:
                print(f"run {tuning.done + 1} of {tuning.runs}, {tuning.now}", file=sys.stderr)

        found = search(experiment, source, seconds, tell)
    print_table(table(found))
    print(f"fastest: --layout {found.best.layout}")
    if out is not None:
        write(found, out, source)
        print(f"written to {out}; train with it: {command()} train {out}:experiment")
    if found.interrupted:
        print(
            f"{found.interrupted} ended the search: {found.done} of {found.runs} runs were finished",
            file=sys.stderr,
        )
        raise typer.Exit(exit_status(found.interrupted))
