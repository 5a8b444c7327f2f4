"""The commands that look at what was trained: ``replay-fault``, ``eval``, ``play``,
``params`` and ``plot``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tidemill.cli.arguments import File, Run, TrustFlag
from tidemill.cli.error_output import friendly, print_table, width, word
from tidemill.cli.hanging_calls import telling_what_hangs

if TYPE_CHECKING:
    from tidemill.trained.replay_step import StepReport

Seed = Annotated[int | None, typer.Option(help="Of environment and sampling; by default the experiment's.")]
Checkpoint = Annotated[
    str | None, typer.Option(help="A checkpoint's name (update-35, or 35); by default the newest.")
]
Version = Annotated[
    str | None,
    typer.Option(help="Instead of a checkpoint, a version of the parameter database: a number or a tag."),
]
Stochastic = Annotated[
    bool, typer.Option("--stochastic", help="Draw actions as in training, instead of taking the likeliest.")
]
ActorGroup = Annotated[
    str | None,
    typer.Option("--actor", help="The group of actors whose environment is played, when there are several."),
]


@friendly
def replay_fault(
    run: Run,
    number: Annotated[
        int | None,
        typer.Argument(metavar="N", help="The update, or the actor's record; by default the newest."),
    ] = None,
    worker: Annotated[
        str | None, typer.Option(help="The trainer (trainer-0) or actor, when several have a record N.")
    ] = None,
    debugger: Annotated[
        bool,
        typer.Option(
            "--pdb",
            help="Stop in Python's debugger at the first number that is not finite, or where an environment "
            "raised.",
        ),
    ] = False,
    trust: TrustFlag = False,
) -> None:
    """Do a step of an update again that was not finite, and show where that begins; or
    show a step that an environment failed in, and play it again."""
    from tidemill.trained.replay_fault import replay_fault as look
    from tidemill.trained.replay_step import StepReport

    found = look(run, number, worker=worker, debugger=debugger, trust=word(trust))
    print(f"{found.record}: {found.error}")
    if isinstance(found, StepReport):
        _show_step(found)
        return
    table = Table("", "", "largest", "not finite", box=SIMPLE_HEAD)
    for line in found.lines:
        table.add_row(line.kind, line.name, f"{line.largest:.4g}", f"{line.wrong:,} of {line.size:,}")
    print_table(table)
    if not found.where:
        print("all of it is finite this time: on this machine, or with other versions, sums differ")
        raise typer.Exit(1)
    print(f"first: {found.where}")


def _show_step(found: "StepReport") -> None:
    print(found.where)
    if found.first:
        print(f"first: {found.first}")
    if found.lines:
        table = Table("agent", "saw or chose", "", box=SIMPLE_HEAD)
        for line in found.lines:
            table.add_row(*map(Text, (line.agent, line.name, line.values)))  # brackets are no markup
        print_table(table)
    if found.traceback:
        print(found.traceback)
    print(found.again)
    if found.same is False:
        raise typer.Exit(1)


@friendly
def evaluate(
    run: Run,
    episodes: Annotated[int, typer.Option(help="Episodes to play.")] = 100,
    lanes: Annotated[int, typer.Option(help="Copies of the environment to play them in.")] = 10,
    seed: Seed = None,
    checkpoint: Checkpoint = None,
    version: Version = None,
    stochastic: Stochastic = False,
    file: File = None,
    actor: ActorGroup = None,
    trust: TrustFlag = False,
) -> None:
    """Play episodes with a run's policy and show what it reaches."""
    from tidemill.trained.evaluate import evaluate as play_episodes

    with telling_what_hangs():
        found = play_episodes(
            run,
            episodes,
            lanes=lanes,
            seed=seed,
            deterministic=not stochastic,
            checkpoint=checkpoint,
            version=version,
            file=file,
            actor=actor,
            trust=word(trust),
        )
    table = Table(
        "",
        *(spec.policy if len(found.specs) == 1 else f"{spec.policy} ({spec.agents})" for spec in found.specs),
        box=SIMPLE_HEAD,
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name, value in (
        ("checkpoint", lambda spec: f"update {spec.update:,}"),
        ("episodes", lambda spec: f"{spec.episodes:,}"),
        ("mean return", lambda spec: f"{spec.mean:,.2f}"),
        (
            "95 % interval",
            lambda spec: f"{spec.interval[0]:,.2f} … {spec.interval[1]:,.2f}" if spec.interval else "–",
        ),
        ("deviation", lambda spec: f"{spec.deviation:,.2f}"),
        ("smallest", lambda spec: f"{spec.min:,.2f}"),
        ("largest", lambda spec: f"{spec.max:,.2f}"),
        ("mean length", lambda spec: f"{spec.length_mean:,.1f}"),
    ):
        table.add_row(name, *map(value, found.specs))
    for name in dict.fromkeys(name for spec in found.specs for name in spec.info):
        table.add_row(
            f"info/{name}", *(f"{spec.info[name]:,.2f}" if name in spec.info else "–" for spec in found.specs)
        )
    print_table(table)


@friendly
def play(
    run: Run,
    video: Annotated[Path | None, typer.Option(help="The video to write, FILE.mp4.")] = None,
    episodes: Annotated[int, typer.Option(help="Episodes to play.")] = 1,
    max_seconds: Annotated[float, typer.Option(help="Length of the video at most.")] = 120.0,
    fps: Annotated[
        float | None,
        typer.Option(
            help="Frames (environment steps) per second; by default what the environment says (render_fps), "
            "or 30."
        ),
    ] = None,
    seed: Seed = None,
    checkpoint: Checkpoint = None,
    version: Version = None,
    stochastic: Stochastic = False,
    file: File = None,
    actor: ActorGroup = None,
    trust: TrustFlag = False,
) -> None:
    """Make a video of a run's policy at play."""
    from tidemill.trained.play import play as film

    with telling_what_hangs():
        made = film(
            run,
            video,
            episodes=episodes,
            max_seconds=max_seconds,
            fps=fps,
            seed=seed,
            deterministic=not stochastic,
            checkpoint=checkpoint,
            version=version,
            file=file,
            actor=actor,
            trust=word(trust),
        )
    returns = ", ".join(f"{value:.1f}" for value in made.returns) or "none"
    cut = f"; cut at {max_seconds:g} s (--max-seconds)" if made.cut else ""
    print(
        f"{made.path}: {made.frames} frames, {made.frames / made.fps:.1f} s; returns of finished episodes: "
        f"{returns}{cut}"
    )


@friendly
def params(
    run: Run,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="tag NAME VERSION | untag NAME | export VERSION FILE",
            help="What to do; nothing lists the versions.",
        ),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="A policy's name, when there are several.")] = None,
    where: Annotated[
        str | None,
        typer.Option(
            help='Which versions: "evaluation/win_rate > 0.8 and evaluation/win_rate < 0.9 order by '
            '-evaluation/elo limit 10".'
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Let export replace a file.")] = False,
) -> None:
    """List, tag and export the versions that a run's trainers have kept."""
    from tidemill.cli.params import listing, obey
    from tidemill.run.folder import RunFolder

    folder = RunFolder.open(run)
    if words:
        print(obey(folder, policy, words, force))
    else:
        print_table(listing(folder, policy, where, width()))


@friendly
def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs; those that differ by their seed alone become one line with an interval."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("plot.png"),
    y: Annotated[str, typer.Option(help="Metric to draw.")] = "return/mean",
    x: Annotated[str, typer.Option(help="step, update, or time/seconds.")] = "step",
) -> None:
    """Draw learning curves of one or more runs."""
    from tidemill.trained.plot import plot as draw

    draw(runs, out, x=x, y=y)
    print(out)
