"""What ``tidemill simulator`` does: tools for those who join an engine to Tidemill."""

from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.error_output import friendly

simulator = typer.Typer(
    help="Join a simulator to Tidemill.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@simulator.callback()
def commands() -> None:
    """Join a simulator to Tidemill (docs/simulators.md)."""


@simulator.command()
@friendly
def sources(
    folder: Annotated[Path, typer.Argument(help="Where to put them; made if it is not there.")],
) -> None:
    """Copy the simulator's side of the bridge here: the C header, the Unity package (C#),
    and example worlds."""
    from tidemill.bridge.world_side.language_files import copy_sources

    for path in copy_sources(folder):
        print(path)


@simulator.command("dump")
@friendly
def look_inside(
    file: Annotated[
        Path, typer.Argument(help="A memory file of layout 0, or a body file of layout 0.3.0 or 0.3.2.")
    ],
    header: Annotated[Path | None, typer.Option(help="The header file that belongs to the body.")] = None,
) -> None:
    """Print what a memory file holds, as JSON. It is only read, also while a simulator
    runs."""
    from tidemill.bridge.kit.dump import dump, text_of

    print(text_of(dump(file, header)))


Path_ = Annotated[
    str, typer.Argument(metavar="PATH", help="The simulator: an executable, FILE.py or FILE.exe (Mono).")
]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ARGUMENT...]", help="Its arguments, after --.")
]
Layout = Annotated[str, typer.Option(help="Of the memory: 0, 0.3.0 or 0.3.2.")]
Deadline = Annotated[float, typer.Option(help="Seconds that it may take for an answer.")]
Framing = Annotated[str, typer.Option(help="Of side channels: uuid, or type in older engines.")]


@simulator.command()
@friendly
def check(
    path: Path_,
    arguments: Arguments = None,
    layout: Layout = "0",
    seconds: Annotated[
        float,
        typer.Option(
            help="Length of the plain play, in which ends, masks, late groups and so on are waited for."
        ),
    ] = 5.0,
    deadline: Deadline = 30.0,
    framing: Framing = "uuid",
    only: Annotated[
        list[str] | None, typer.Option(help="A point's name, to see only that. Repeatable.")
    ] = None,
) -> None:
    """Play a simulator through everything that the bridge asks of it, and tell what it
    does, point by point."""
    from tidemill.bridge.kit.check import check_simulator
    from tidemill.bridge.kit.trial_trainer import Program
    from tidemill.bridge.protocol.side_channels import framing_of

    points = check_simulator(
        Program(path, tuple(arguments or ()), layout, deadline), seconds, framing_of(framing), only or ()
    )
    for point in points:
        print(f"{point.verdict:<10}{point.name:<19}{_indented(point.what)}")
        if point.cure:
            print(f"{'':<10}{'':<19}→ {point.cure}")
    numbers = [
        f"{sum(point.verdict == verdict for point in points)} {verdict}"
        for verdict in ("pass", "fail", "not seen")
    ]
    print(f"{len(points)} points: {', '.join(numbers)}")
    if any(point.verdict == "fail" for point in points):
        raise typer.Exit(1)


def _indented(text: str) -> str:
    return text.replace("\n", "\n" + " " * 29)


@simulator.command()
@friendly
def record(
    path: Path_,
    arguments: Arguments = None,
    out: Annotated[Path, typer.Option(help="The recording to write.")] = Path("simulator.recording"),
    steps: Annotated[int, typer.Option(help="Steps to play, after a reset.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the actions, which are drawn at random.")] = 0,
    layout: Layout = "0",
    deadline: Deadline = 30.0,
    force: Annotated[bool, typer.Option("--force", help="Replace a file.")] = False,
) -> None:
    """Play a simulator at random and write all that goes to and fro into a file, which
    `replay` plays again."""
    from tidemill.bridge.kit.record import record as play
    from tidemill.bridge.kit.trial_trainer import Program

    print(
        f"{out}: {play(Program(path, tuple(arguments or ()), layout, deadline), out, steps, seed, force)} "
        "exchanges"
    )


@simulator.command()
@friendly
def replay(
    file: Annotated[Path, typer.Argument(help="A recording.")],
    arguments: Arguments = None,
    memory_path: Annotated[
        str | None,
        typer.Option(help="Where the trainer waits; trainers give it when they start this as a simulator."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="A simulator to play it into, with what follows -- as its arguments."
        ),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="Of the memory, with --against; as recorded unless it is given.")
    ] = None,
    deadline: Deadline = 30.0,
    tolerance: Annotated[
        float, typer.Option(help="By which numbers may differ from the recorded ones.")
    ] = 0.0,
) -> None:
    """Play a recording to a trainer, in the place of the simulator; or, with --against,
    into a simulator to see whether it answers alike."""
    from tidemill.bridge.kit.playback import replay as play
    from tidemill.bridge.kit.recording import Recording
    from tidemill.bridge.kit.replay_recording import compare
    from tidemill.bridge.kit.trial_trainer import Program

    if against is None:
        played = play(file, memory_path)
        print(
            f"{played.exchanges} exchanges of {played.recorded}; in {played.differing} steps the actions "
            "were others than the recorded ones"
        )
        return
    with Recording(file) as recording:
        alike = compare(
            recording,
            Program(against, tuple(arguments or ()), layout or recording.head.layout, deadline),
            tolerance,
        )
        print(f"{alike} of {len(recording)} exchanges were answered as recorded")
        if alike < len(recording):
            raise typer.Exit(1)
