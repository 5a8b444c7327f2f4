"""All commands by name, and the command line's entry."""

from typing import Annotated

import typer

from tidemill.cli.cluster import doctor_cluster
from tidemill.cli.control_commands import COMMANDS, command, status
from tidemill.cli.environment_commands import (
    check_env,
    check_resume,
    doctor_env,
    doctor_machine,
    doctor_run,
    serve_env,
)
from tidemill.cli.error_output import Commands, friendly
from tidemill.cli.examples import examples
from tidemill.cli.measuring import bench, tune
from tidemill.cli.simulator import simulator
from tidemill.cli.slurm import follow
from tidemill.cli.trained_commands import evaluate, params, play, plot, replay_fault
from tidemill.cli.training_commands import resume, retrain, train

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


app.command()(train)
app.command()(resume)
app.command()(friendly(follow))
app.command()(retrain)
app.command("replay-fault")(replay_fault)
for _word, _help in COMMANDS.items():
    app.command(_word, help=_help)(command(_word))
app.command()(status)
app.command("eval")(evaluate)
app.command()(play)
app.command()(params)
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
app.command()(plot)


if __name__ == "__main__":
    app()
