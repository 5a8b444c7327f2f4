"""The commands that train, look at and change runs, and the command line's entry."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tidemill.cli.arguments import EnvArg, Lay, NamedArgument, Run, Set, Wrap, changed, experiment_from, pairs
from tidemill.cli.cluster import Hosts, Insecure, Place, RayAddress, doctor_cluster, places
from tidemill.cli.environment_commands import (
    check_env,
    check_resume,
    doctor_env,
    doctor_machine,
    doctor_run,
    serve_env,
)
from tidemill.cli.error_output import Commands, friendly, print_table, width, word
from tidemill.cli.examples import examples
from tidemill.cli.measuring import bench, tune
from tidemill.cli.simulator import simulator
from tidemill.cli.slurm import (
    CpusPerHost,
    GpusPerHost,
    JobOptions,
    Partition,
    Sbatch,
    Script,
    Time,
    follow,
    submits,
)
from tidemill.core.errors import ConfigError
from tidemill.launchers.table import LAUNCHERS, with_options
from tidemill.metrics.writer import SINKS
from tidemill.presets.experiments import ALGORITHMS

if TYPE_CHECKING:
    from tidemill.trained.replay_step import StepReport

app = typer.Typer(
    name="tidemill",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(simulator, name="simulator")
doctor = typer.Typer(name="doctor", help="Look over this machine, a run, a server, or a cluster.")
app.add_typer(doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"tidemill {version('tidemill')}")
        raise typer.Exit


@app.callback(help="Train reinforcement-learning agents.")
def tidemill(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Options of the command itself."""


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
File = Annotated[
    Path | None,
    typer.Option(
        help="The experiment's file, when it has changed or is elsewhere: your word for this file, not for "
        "what else the folder names."
    ),
]
TrustFlag = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Run what the folder names (code, programs, addresses) though you never have: only where you "
        "know who made it. Without it, you are told what that is.",
    ),
]
ActorGroup = Annotated[
    str | None,
    typer.Option("--actor", help="The group of actors whose environment is played, when there are several."),
]
ReturnOf = Annotated[
    str | None,
    typer.Option(
        help="Whose, with --stop-at-return and several policies: a policy, POLICY/AGENTS, or any for the "
        "first that reaches it."
    ),
]
Launch = Annotated[
    str,
    typer.Option(
        "--launch",
        help=f"{' | '.join(LAUNCHERS)} (inline: one thread, deterministic), or a launcher of your own, "
        "FILE.py:NAME.",
    ),
]

Log = Annotated[
    str,
    typer.Option(
        "--log",
        help="What metrics are written to besides metrics.jsonl, with commas between: "
        f'{", ".join(SINKS)}, or a sink of your own, FILE.py:NAME; "" for nothing.',
    ),
]


@app.command()
@friendly
def train(
    what: Annotated[str | None, NamedArgument] = None,
    launch: Launch = "processes",
    hosts: Hosts = None,
    ray_address: RayAddress = None,
    insecure: Insecure = False,
    place: Place = None,
    time: Time = None,
    partition: Partition = None,
    cpus_per_host: CpusPerHost = None,
    gpus_per_host: GpusPerHost = None,
    sbatch: Sbatch = None,
    script: Script = False,
    seed: Annotated[int | None, typer.Option(help="Root of every random stream.")] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run; by default a new one under runs/. This very run goes on there, if it "
            "was interrupted or killed."
        ),
    ] = None,
    anew: Annotated[
        bool, typer.Option("--anew", help="Start anew there: a run that --run-dir has is put aside, renamed.")
    ] = False,
    max_steps: Annotated[
        int | None, typer.Option(help="End with the update that reaches so many env steps.")
    ] = None,
    stop_at_return: Annotated[
        float | None, typer.Option(help="End when the last 100 episodes' mean return reaches this.")
    ] = None,
    return_of: ReturnOf = None,
    layout: Lay = "auto",
    log: Log = "tensorboard",
    algorithm: Annotated[
        str | None,
        typer.Option(
            help=f"{' | '.join(ALGORITHMS)} (default: ppo): whose settings for that environment to take."
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            help="Environments that step at the same time, in threads, and may fail (replay memories)."
        ),
    ] = None,
    ratio: Annotated[
        str | None, typer.Option(help="Training tasks per env step, exactly: 1/4, 3/2, 8 (replay memories).")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="The same weights however long environments take (with --slots).")
    ] = False,
    env_arg: EnvArg = None,
    wrap: Wrap = None,
    set_: Set = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Instead of an environment: a file with what --print-config has printed."),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print what would be trained, settings and all, and end.")
    ] = False,
    trust: TrustFlag = False,
) -> None:
    """Train an agent."""
    from tidemill.training.train import check_words
    from tidemill.training.train import train as run

    fixed = pairs("--set", set_ or [])
    job = JobOptions(time, partition, cpus_per_host, gpus_per_host, sbatch or (), script)
    job.check(launch)
    options = {"hosts": hosts, "address": ray_address, "insecure": insecure or None, "place": places(place)}
    launch = with_options(launch, options)
    check_words("processes" if submits(launch) else launch, run_dir, layout, log)
    if (what is None) == (config is None):
        raise ConfigError("name what to train: an environment, FILE.py:FUNCTION, or --config FILE")
    if config is not None and (env_arg or wrap or algorithm is not None):
        raise ConfigError(
            "--env-arg, --wrap and --algorithm go with an environment's name; with --config use --set"
        )
    if config is not None:
        from tidemill.run.config_file import read_config

        experiment, source = read_config(config, word(trust))
    else:
        experiment, source = experiment_from(str(what), env_arg, None, algorithm, wrap)
    if slots is not None or ratio is not None or exact:
        from tidemill.training.replay_slots import by_turns, with_slots

        experiment = with_slots(experiment, slots, ratio, **({"exact": True} if exact else {}))
        layout = "given"
        experiment = changed(experiment, set_)  # what is run, slots and all
        if slots is not None and not any(path.partition(".")[0] == "together" for path in fixed):
            experiment = by_turns(experiment, launch)
    else:
        experiment = changed(experiment, set_)
    if seed is not None:
        experiment = experiment.replace(seed=seed)
    limits = _limits(max_steps, stop_at_return, return_of)
    experiment = experiment.replace(limits=experiment.limits.replace(**limits))
    if print_config:
        from tidemill.run.config_file import config_text

        print(config_text(experiment, source))
        return
    if submits(launch):
        from tidemill.run.folder import new_folder

        experiment.check()
        folder = run_dir or (Path("runs") / experiment.name if script else new_folder(experiment))
        raise typer.Exit(job.submit(folder, hosts, launch, experiment, anew))
    result = run(
        experiment,
        launch=launch,
        run_dir=run_dir,
        source=source,
        layout=layout,
        fixed=fixed,
        log=log,
        anew=anew,
    )
    _exit(result.summary)


def _limits(steps: int | None, mean_return: float | None, return_of: str | None) -> dict[str, Any]:
    """Return the limits that were given."""
    given = {"steps": steps, "mean_return": mean_return, "return_of": return_of}
    return {name: value for name, value in given.items() if value is not None}


def _exit(summary: Mapping[str, Any]) -> None:
    if summary["status"] == "interrupted":
        from tidemill.run.interrupts import exit_status

        raise typer.Exit(exit_status(summary["reason"]))


@app.command()
@friendly
def resume(
    run: Run,
    launch: Annotated[
        str | None,
        typer.Option(
            help=f"{' | '.join(LAUNCHERS)} or FILE.py:NAME; by default what the run was launched by last."
        ),
    ] = None,
    hosts: Hosts = None,
    ray_address: RayAddress = None,
    insecure: Insecure = False,
    place: Place = None,
    time: Time = None,
    partition: Partition = None,
    cpus_per_host: CpusPerHost = None,
    gpus_per_host: GpusPerHost = None,
    sbatch: Sbatch = None,
    script: Script = False,
    file: File = None,
    max_steps: Annotated[int | None, typer.Option(help="A new limit of env steps.")] = None,
    stop_at_return: Annotated[float | None, typer.Option(help="A new mark for the mean return.")] = None,
    return_of: ReturnOf = None,
    log: Annotated[
        str | None, typer.Option("--log", help="As of train; by default what the run logged to last.")
    ] = None,
    trust: TrustFlag = False,
) -> None:
    """Go on with a run from its last checkpoint."""
    from tidemill.training.train import resume as go_on

    limits = _limits(max_steps, stop_at_return, return_of)
    job = JobOptions(time, partition, cpus_per_host, gpus_per_host, sbatch or (), script)
    job.check(launch)
    options = {"hosts": hosts, "address": ray_address, "insecure": insecure or None, "place": places(place)}
    if submits(launch):
        from tidemill.run.folder import RunFolder

        raise typer.Exit(job.submit(RunFolder.open(run).path, hosts))
    _exit(
        go_on(
            run, launch=launch, options=options, file=file, limits=limits, trust=word(trust), log=log
        ).summary
    )


app.command()(friendly(follow))


@app.command()
@friendly
def retrain(
    run: Run,
    policy: Annotated[str | None, typer.Option(help="A policy's name, when there are several.")] = None,
    trust: TrustFlag = False,
) -> None:
    """Train a run again from its journal, which its trainer has written (journal = true),
    and compare the weights with its newest checkpoint's."""
    from tidemill.trained.retrain import retrain as again

    found = again(run, policy=policy, trust=word(trust))
    weights = "the same weights" if found.same else "other weights"
    if found.updates < found.compared:
        weights = f"the journal ends before the {found.compared:,} of the newest checkpoint"
    elif found.updates > found.compared:
        weights += f" after the {found.compared:,} of the newest checkpoint"
    print(f"{found.committed:,} steps stored, {found.voided:,} lost, {found.updates:,} updates: {weights}")
    raise typer.Exit(0 if found.same else 1)


@app.command("replay-fault")
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


COMMANDS = {
    "pause": "Pause a run that is going on.",
    "start": "Start a paused run again.",
    "save": "Write a checkpoint of a run that is going on, now.",
    "stop": "End a run that is going on, with a final checkpoint.",
}
"""What a run that is going on can be told, and what that does."""


def _command(word: str) -> Callable[[Path], None]:
    @friendly
    def tell(run: Run) -> None:
        from tidemill.run import control_socket
        from tidemill.run.folder import RunFolder

        print(control_socket.tell(RunFolder.open(run).path, word))

    return tell


for _word, _help in COMMANDS.items():
    app.command(_word, help=_help)(_command(_word))


@app.command()
@friendly
def status(run: Run) -> None:
    """Show a run: as it is now, or how it ended, and what happened last."""
    from tidemill.run.folder import RunFolder
    from tidemill.run.status import render_status

    print_table(render_status(RunFolder.open(run)))


@app.command("eval")
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


@app.command()
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


@app.command()
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


app.command("check-env")(check_env)
app.command("check-resume")(check_resume)
app.command("serve-env")(serve_env)
doctor.callback(invoke_without_command=True)(doctor_machine)
doctor.command("env")(doctor_env)
doctor.command("run")(doctor_run)
doctor.command("cluster")(doctor_cluster)
app.command()(bench)
app.command()(tune)
app.command()(examples)


@app.command()
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


if __name__ == "__main__":
    app()
