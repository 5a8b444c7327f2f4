"""The command line."""

import sys
from inspect import isfunction, signature
from pathlib import Path
from traceback import extract_tb
from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.api.environment import EnvironmentConfig
from tidemill.api.experiment import Experiment
from tidemill.cli.friendly import friendly
from tidemill.cli.simulator import simulator
from tidemill.core.config import set_path
from tidemill.core.errors import ConfigError, TidemillError
from tidemill.core.source import load_attribute
from tidemill.workers.actor import Actors

app = typer.Typer(
    name="tidemill",
    help="Train reinforcement-learning agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(simulator, name="simulator")


def pairs(what: str, items: list[str]) -> dict[str, str]:
    """Return ``k=v`` items as a dict."""
    found = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"{what} {item}: write {what} NAME=VALUE")
        found[key] = value
    return found


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def resolve(what: str, env_args: dict[str, Any], algorithm: str | None = None) -> tuple[Experiment, Path | None]:
    """Return the experiment that `what` names (ENV_ID, module:ENV_ID, FILE.py:FUNCTION) and the file it came from, if any."""
    from tidemill.run.presets import experiment_for
    from tidemill.run.resolve import environment_from, is_named

    source, colon, _ = what.rpartition(":")
    if colon and source.endswith(".py") and not is_named(what):
        made = load_attribute(what, "experiment")
        try:
            experiment = made() if callable(made) else made
        except TidemillError:
            raise
        except Exception as error:
            lines = [frame.lineno for frame in extract_tb(error.__traceback__) if Path(frame.filename).name == Path(source).name]
            where = f" (line {lines[-1]})" if lines else ""
            raise ConfigError(f"{what} raised {type(error).__name__}: {error}{where}; it is called without arguments") from error
        if not isinstance(experiment, Experiment):
            raise ConfigError(f"{what} gives a {type(experiment).__name__}, not an Experiment; let the function return tidemill.Experiment(…)")
        if env_args:
            raise ConfigError(
                "--env-arg goes with an environment's name; in an experiment file, use --set workers.actor.environment.kwargs.NAME=VALUE"
            )
        if algorithm is not None:
            raise ConfigError(f"--algorithm {algorithm} goes with an environment's name; an experiment file has its own")
        return experiment, Path(source)
    return experiment_for(what, environment_from(what, env_args), algorithm or "ppo"), None


def experiment_from(what: str, env_arg: list[str] | None, changes: list[str] | None, algorithm: str | None = None) -> tuple[Experiment, Path | None]:
    """Return what `resolve` does, with the settings of --env-arg and --set."""
    experiment, source = resolve(what, {k: _json(v) for k, v in pairs("--env-arg", env_arg or []).items()}, algorithm)
    for path, text in pairs("--set", changes or []).items():
        experiment = set_path(experiment, path, text)
    return experiment, source


Checkpoint = Annotated[str | None, typer.Option(help="A checkpoint's name (update-35, or 35); by default the newest.")]
Version = Annotated[str | None, typer.Option(help="Instead of a checkpoint, a version of the parameter database: a number or a tag.")]
Stochastic = Annotated[bool, typer.Option("--stochastic", help="Draw actions as in training, instead of taking the likeliest.")]
File = Annotated[Path | None, typer.Option(help="The experiment's file, when it has changed.")]
ActorGroup = Annotated[str | None, typer.Option("--actor", help="The group of actors whose environment is played, when there are several.")]
EnvArg = Annotated[list[str] | None, typer.Option(help="Argument of the environment's constructor, NAME=VALUE. Repeatable.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Change a setting, e.g. workers.trainer.algorithm.epochs=8. Repeatable.")]
Lay = Annotated[
    str,
    typer.Option(
        "--layout",
        help="How many actors, trainers, lanes, …: auto (from costs that are measured once), measure (anew), given (the experiment's own), "
        "or all of one, as it is shown at the start.",
    ),
]
Launch = Annotated[str, typer.Option("--launch", help="processes, threads or inline (one thread, deterministic).")]


@app.command()
@friendly
def train(
    what: Annotated[str, typer.Argument(metavar="ENV_ID | module:ENV_ID | FILE.py:FUNCTION | http://HOST:PORT", help="What to train on.")],
    launch: Launch = "processes",
    seed: Annotated[int | None, typer.Option(help="Root of every random stream.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run; by default a new one under runs/.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="End after so many env steps.")] = None,
    stop_at_return: Annotated[float | None, typer.Option(help="End when the last 100 episodes' mean return reaches this.")] = None,
    layout: Lay = "auto",
    algorithm: Annotated[str | None, typer.Option(help="ppo (the default), dqn or sac: whose settings for that environment to take.")] = None,
    slots: Annotated[int | None, typer.Option(help="Environments that step at the same time, in threads, and may fail (replay memories).")] = None,
    ratio: Annotated[str | None, typer.Option(help="Training tasks per env step, exactly: 1/4, 3/2, 8 (replay memories).")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="The same weights however long environments take (with --slots).")] = False,
    env_arg: EnvArg = None,
    set_: Set = None,
) -> None:
    """Train an agent."""
    from tidemill.run.session import train as run

    experiment, source = experiment_from(what, env_arg, None, algorithm)
    if slots is not None or ratio is not None or exact:
        from tidemill.run.runners import with_slots

        experiment, layout = with_slots(experiment, slots, ratio, launch, **({"exact": True} if exact else {})), "given"
    for path, text in pairs("--set", set_ or []).items():  # of what is run, slots and all
        experiment = set_path(experiment, path, text)
    if seed is not None:
        experiment = experiment.replace(seed=seed)
    limits = {"steps": max_steps, "mean_return": stop_at_return}
    experiment = experiment.replace(limits=experiment.limits.replace(**{k: v for k, v in limits.items() if v is not None}))
    fixed = pairs("--set", set_ or [])
    _exit(run(experiment, launch=launch, run_dir=run_dir, source=source, layout=layout, fixed=fixed).summary)


def _exit(summary: dict[str, Any]) -> None:
    if summary["status"] == "interrupted":
        from tidemill.run.interrupts import exit_status

        raise typer.Exit(exit_status(summary["reason"]))


@app.command()
@friendly
def resume(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    launch: Launch = "processes",
    file: Annotated[Path | None, typer.Option(help="The experiment's file, when it has changed.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="A new limit of env steps.")] = None,
    stop_at_return: Annotated[float | None, typer.Option(help="A new mark for the mean return.")] = None,
) -> None:
    """Go on with a run from its last checkpoint."""
    from tidemill.run.session import resume as go_on

    limits = {k: v for k, v in {"steps": max_steps, "mean_return": stop_at_return}.items() if v is not None}
    _exit(go_on(run, launch=launch, file=file, limits=limits).summary)


@app.command()
@friendly
def retrain(run: Annotated[Path, typer.Argument(help="The run's folder; its trainer has written a journal (journal = true).")]) -> None:
    """Train a run again from its journal, and compare the weights with its newest checkpoint's."""
    from tidemill.run.retrain import retrain as again

    found = again(run)
    weights = "the same weights" if found.same else "other weights"
    if found.updates < found.compared:
        weights = f"the journal ends before the {found.compared:,} of the newest checkpoint"
    elif found.updates > found.compared:
        weights += f" after the {found.compared:,} of the newest checkpoint"
    print(f"{found.committed:,} steps stored, {found.voided:,} lost, {found.updates:,} updates: {weights}")
    raise typer.Exit(0 if found.same else 1)


def _tell(run: Path, command: str) -> None:
    from tidemill.run.control import tell
    from tidemill.run.folder import RunFolder

    print(tell(RunFolder.open(run).path, command))


@app.command()
@friendly
def pause(run: Annotated[Path, typer.Argument(help="The run's folder.")]) -> None:
    """Pause a run that is going on."""
    _tell(run, "pause")


@app.command()
@friendly
def start(run: Annotated[Path, typer.Argument(help="The run's folder.")]) -> None:
    """Start a paused run again."""
    _tell(run, "start")


@app.command()
@friendly
def save(run: Annotated[Path, typer.Argument(help="The run's folder.")]) -> None:
    """Write a checkpoint of a run that is going on, now."""
    _tell(run, "save")


@app.command()
@friendly
def stop(run: Annotated[Path, typer.Argument(help="The run's folder.")]) -> None:
    """End a run that is going on, with a final checkpoint."""
    _tell(run, "stop")


@app.command("eval")
@friendly
def evaluate(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    episodes: Annotated[int, typer.Option(help="Episodes to play.")] = 100,
    lanes: Annotated[int, typer.Option(help="Copies of the environment to play them in.")] = 10,
    seed: Annotated[int | None, typer.Option(help="Of environment and sampling; by default the experiment's.")] = None,
    checkpoint: Checkpoint = None,
    version: Version = None,
    stochastic: Stochastic = False,
    file: File = None,
    actor: ActorGroup = None,
) -> None:
    """Play episodes with a run's policy and show what it reaches."""
    from tidemill.run.evaluate import evaluate as play_episodes

    found = play_episodes(
        run, episodes, lanes=lanes, seed=seed, deterministic=not stochastic, checkpoint=checkpoint, version=version, file=file, actor=actor
    )
    table = Table("", *(spec.policy if len(found.specs) == 1 else f"{spec.policy} ({spec.agents})" for spec in found.specs), box=SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, value in (
        ("checkpoint", lambda spec: f"update {spec.update:,}"),
        ("episodes", lambda spec: f"{spec.episodes:,}"),
        ("mean return", lambda spec: f"{spec.mean:,.2f}"),
        ("95 % interval", lambda spec: f"{spec.interval[0]:,.2f} … {spec.interval[1]:,.2f}" if spec.interval else "–"),
        ("deviation", lambda spec: f"{spec.deviation:,.2f}"),
        ("smallest", lambda spec: f"{spec.min:,.2f}"),
        ("largest", lambda spec: f"{spec.max:,.2f}"),
        ("mean length", lambda spec: f"{spec.length_mean:,.1f}"),
    ):
        table.add_row(name, *map(value, found.specs))
    _print_table(table)


@app.command()
@friendly
def play(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    video: Annotated[Path | None, typer.Option(help="The video to write, FILE.mp4.")] = None,
    episodes: Annotated[int, typer.Option(help="Episodes to play.")] = 1,
    max_seconds: Annotated[float, typer.Option(help="Length of the video at most.")] = 120.0,
    fps: Annotated[int, typer.Option(help="Frames (environment steps) per second.")] = 30,
    seed: Annotated[int | None, typer.Option(help="Of environment and sampling; by default the experiment's.")] = None,
    checkpoint: Checkpoint = None,
    version: Version = None,
    stochastic: Stochastic = False,
    file: File = None,
    actor: ActorGroup = None,
) -> None:
    """Make a video of a run's policy at play."""
    from tidemill.run.play import play as film

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
    )
    returns = ", ".join(f"{value:.1f}" for value in made.returns) or "none"
    cut = f"; cut at {max_seconds:g} s (--max-seconds)" if made.cut else ""
    print(f"{made.path}: {made.frames} frames, {made.frames / made.fps:.1f} s; returns of finished episodes: {returns}{cut}")


@app.command()
@friendly
def params(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="tag NAME VERSION | untag NAME | export VERSION FILE", help="What to do; nothing lists the versions."),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="A policy's name, when there are several.")] = None,
    where: Annotated[
        str | None, typer.Option(help='Which versions: "evaluation/win_rate > 0.8 and evaluation/win_rate < 0.9 order by -evaluation/elo limit 10".')
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
        _print_table(listing(folder, policy, where, _width()))


@app.command("check-env")
@friendly
def check_env(
    what: Annotated[str, typer.Argument(metavar="ENV_ID | module:NAME | FILE.py:NAME", help="An environment, or a function of an experiment.")],
    env_arg: EnvArg = None,
    seed: Annotated[int, typer.Option(help="Of the environment and of the random actions.")] = 0,
) -> None:
    """Look an environment over before training on it: spaces, values, resets, determinism, speed."""
    from tidemill.envs.check import check_environment

    environments = _environments(what, {k: _json(v) for k, v in pairs("--env-arg", env_arg or []).items()})
    failed = False
    for environment in environments:
        table = Table("", "check", "what was found", "what to do", box=SIMPLE_HEAD)
        for finding in check_environment(environment, seed):
            failed |= finding.level == "fail"
            color = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.level]
            table.add_row(Text(finding.level, color), finding.name, Text(finding.message), Text(finding.cure))
        _print_table(table)
    if failed:
        raise typer.Exit(1)


@app.command("serve-env")
@friendly
def serve_env(
    what: Annotated[str, typer.Argument(metavar="ENV_ID | module:NAME | FILE.py:NAME", help="A Gymnasium environment.")],
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback ones need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any that is free.", min=0, max=65535)] = 8477,
    token: Annotated[str | None, typer.Option(envvar="TIDEMILL_TOKEN", help="What clients must send. Better set as the variable.")] = None,
    max_sessions: Annotated[int, typer.Option(help="Most environments at a time.")] = 256,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request.")] = 1 << 20,
    idle_seconds: Annotated[float, typer.Option(help="Close sessions that are not heard of for so long; 0: never.")] = 300.0,
    fault: Annotated[list[str] | None, typer.Option(help="Go wrong on purpose, e.g. reply_lost=0.05 (docs/rest.md). Repeatable.")] = None,
    env_arg: EnvArg = None,
) -> None:
    """Serve an environment over HTTP, for tidemill train http://HOST:PORT here or elsewhere, until Ctrl-C."""
    from tidemill.cli.remote import serve

    faults = pairs("--fault", fault or [])
    args = {k: _json(v) for k, v in pairs("--env-arg", env_arg or []).items()}
    serve(what, args, host, port, token, max_sessions, max_body_bytes, idle_seconds, faults)


doctor = typer.Typer(name="doctor", help="Look over what a run depends on.", no_args_is_help=True)
app.add_typer(doctor)


@doctor.command("env")
@friendly
def doctor_env(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of an environment server.")],
    token: Annotated[str, typer.Option(help='What the server asks for; "$NAME" is read from the environment variable NAME.')] = "$TIDEMILL_TOKEN",
    seconds: Annotated[float, typer.Option(help="About how long to look.", min=1)] = 10.0,
    most: Annotated[int, typer.Option(help="Most sessions to open at a time.", min=1)] = 64,
) -> None:
    """Look an environment server over: latency, how much at a time, repeats, determinism; and say how many slots and which deadlines fit."""
    from tidemill.envs.rest.config import Rest
    from tidemill.envs.rest.doctor import examine

    table = Table("", "check", "what was found", "what to do", box=SIMPLE_HEAD)
    failed = False
    for finding in examine(Rest(url=url.removeprefix("rest:"), token=token), seconds, most):
        failed |= finding.level == "fail"
        color = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.level]
        table.add_row(Text(finding.level, color), finding.name, Text(finding.message), Text(finding.cure))
    _print_table(table)
    if failed:
        raise typer.Exit(1)


def _environments(what: str, env_args: dict[str, Any]) -> list[EnvironmentConfig]:
    """Return what `what` names: an environment, or those of an experiment (a function that returns one, or an `EnvironmentConfig`)."""
    from tidemill.run.resolve import environment_from, is_named

    if what.rpartition(":")[0].endswith(".py") and not is_named(what):
        made = load_attribute(what, "environment")
        if isfunction(made) and not signature(made).parameters:
            made = made()
        if isinstance(made, EnvironmentConfig):
            return [made]
        if isinstance(made, Experiment):
            return [worker.environment for worker in made.workers.values() if isinstance(worker, Actors)]
        if callable(close := getattr(made, "close", None)) and not isinstance(made, type):
            close()  # it was an environment's maker
    return [environment_from(what, env_args)]


def _width() -> int:
    """Return how many columns a table may have."""
    console = Console()
    return console.width if console.is_terminal else 200


def _print_table(table: Table) -> None:
    console = Console()
    console.print(table, crop=False) if console.is_terminal else Console(width=_width()).print(table)


@app.command()
@friendly
def bench(
    what: Annotated[str, typer.Argument(metavar="ENV_ID | module:ENV_ID | FILE.py:FUNCTION", help="What to measure, as for train.")],
    seconds: Annotated[float, typer.Option(help="Length of the run that is measured, after its start-up.")] = 20.0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to this file.")] = None,
    layout: Lay = "auto",
    env_arg: EnvArg = None,
    set_: Set = None,
) -> None:
    """Measure how fast an experiment runs, how fast this machine could run it, and what holds it back."""
    from tidemill.bench.measure import bench as measure
    from tidemill.bench.table import tables
    from tidemill.run.arrange import arrange

    experiment, source = experiment_from(what, env_arg, set_)
    experiment.check()
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json {json_file}: there is no folder {json_file.parent}; make it first")
    if json_file is not None and json_file.is_dir():
        raise ConfigError(f"--json {json_file} is a folder; name a file in it")
    arranged = arrange(experiment, source, layout, pairs("--set", set_ or []))
    if arranged.told:
        print(arranged.told, file=sys.stderr)
    found = measure(arranged.experiment, source, seconds, lambda text: print(text, file=sys.stderr))
    for part in tables(found):
        Console().print(part)
    if json_file is not None:
        try:
            json_file.write_bytes(msgspec.json.format(msgspec.json.encode(found.plain()), indent=2) + b"\n")
        except OSError as error:
            raise ConfigError(f"--json {json_file}: cannot be written: {error.strerror}") from error


@app.command()
@friendly
def tune(
    what: Annotated[str, typer.Argument(metavar="ENV_ID | module:ENV_ID | FILE.py:FUNCTION", help="What to tune, as for train.")],
    seconds: Annotated[float, typer.Option(help="Length of a run, after its start-up; the first of each layout takes half of that.")] = 6.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE.py", help="Write the experiment, laid out as was fastest, to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    env_arg: EnvArg = None,
    set_: Set = None,
) -> None:
    """Try layouts (how many actors, trainers, lanes, …) around the one that train would choose, and say which is fastest here."""
    from rich.live import Live

    from tidemill.bench.tune import Tuning, check_out, table, write
    from tidemill.bench.tune import tune as search
    from tidemill.run.folder import command

    experiment, source = experiment_from(what, env_arg, set_)
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
    _print_table(table(found))
    print(f"fastest: --layout {found.best.layout}")
    if out is not None:
        write(found, out, source)
        print(f"written to {out}; train with it: {command()} train {out}:experiment")


@app.command()
@friendly
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; those of one experiment are drawn as mean and band.")],
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("plot.png"),
    y: Annotated[str, typer.Option(help="Metric to draw.")] = "return/mean",
    x: Annotated[str, typer.Option(help="step, update, or time/seconds.")] = "step",
) -> None:
    """Draw learning curves of one or more runs."""
    from tidemill.run.plot import plot as draw

    draw(runs, out, x=x, y=y)
    print(out)


if __name__ == "__main__":
    app()
