"""The commands that look things over, ``check-env``, ``check-resume``, ``doctor``,
``doctor env`` and ``doctor run``, and ``serve-env``."""

import signal
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.arguments import (
    EnvArg,
    Run,
    Set,
    Trained,
    Wrap,
    changed,
    environments,
    experiment_from,
    pairs,
    settings,
)
from tidemill.cli.error_output import friendly, print_findings
from tidemill.cli.hanging_calls import telling_what_hangs
from tidemill.core.errors import ConfigError, needing
from tidemill.launchers.table import LAUNCHERS
from tidemill.presets.experiments import ALGORITHMS

if TYPE_CHECKING:
    pass


MOST_DIFFERENCES = 5


@friendly
def check_env(
    what: Trained,
    env_arg: EnvArg = None,
    wrap: Wrap = None,
    seed: Annotated[int, typer.Option(help="Of the environment and of the random actions.")] = 0,
) -> None:
    """Look an environment over before training on it: spaces, what can be trained,
    values, resets, determinism, speed."""
    from tidemill.presets.fitting_algorithms import training
    from tidemill.testing.check_env import check_environment

    with telling_what_hangs():
        failed = [
            not print_findings(check_environment(environment, seed, look=training))
            for environment in environments(what, env_arg, wrap)
        ]
    if any(failed):
        raise typer.Exit(1)


@friendly
def check_resume(
    what: Trained,
    updates: Annotated[
        int | None, typer.Option(help="Of each run: 8, and with a replay memory 200.", min=2)
    ] = None,
    launch: Annotated[str, typer.Option(help=f"{' | '.join(LAUNCHERS)}.")] = "inline",
    algorithm: Annotated[str | None, typer.Option(help=" | ".join(ALGORITHMS))] = None,
    env_arg: EnvArg = None,
    wrap: Wrap = None,
    set_: Set = None,
) -> None:
    """Prove that an experiment resumes exactly: two short runs, one of which is ended and
    resumed half-way, must leave the same in every bit."""
    from tidemill.training.check_resume import check_resume as check

    experiment, source = experiment_from(what, env_arg, None, algorithm, wrap)
    found = check(changed(experiment, set_), updates=updates, launch=launch, source=source)
    runs = f"{found.updates} updates, and {found.ended} resumed for {found.updates - found.ended} more"
    if found.exact:
        print(f"exact: {runs} leave the same in every bit ({found.compared:,} arrays and numbers compared)")
        if found.made_anew:
            print(
                f"But {found.made_anew}, and the episodes that were open there are cut: mend the "
                "environment, and check again"
            )
        return
    for text in found.differences[:MOST_DIFFERENCES]:
        print(text)
    if (more := len(found.differences) - MOST_DIFFERENCES) > 0:
        print(f"and {more:,} more")
    print(f"not exact: {runs} differ in {len(found.differences):,} of {found.compared:,} arrays and numbers.")
    print(f"Likely cause: {found.cause}")
    raise typer.Exit(1)


@friendly
def serve_env(
    what: Annotated[
        str, typer.Argument(metavar="ENV_ID | module:NAME | FILE.py:NAME", help="A Gymnasium environment.")
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback ones need a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0: any that is free.", min=0, max=65535)
    ] = 8477,
    token: Annotated[
        str | None,
        typer.Option(envvar="TIDEMILL_TOKEN", help="What clients must send. Better set as the variable."),
    ] = None,
    max_sessions: Annotated[int, typer.Option(help="Most environments at a time.")] = 256,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request.")] = 1 << 20,
    idle_seconds: Annotated[
        float, typer.Option(help="Close sessions that are not heard of for so long; 0: never.")
    ] = 300.0,
    left_seconds: Annotated[
        float,
        typer.Option(
            help="While all sessions are taken, one whose client hung up, and asked nothing for so long, "
            "gives way to a new one."
        ),
    ] = 10.0,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="Go wrong on purpose, e.g. reply_lost=0.05 (docs/rest.md). Repeatable."),
    ] = None,
    env_arg: EnvArg = None,
    wrap: Wrap = None,
) -> None:
    """Serve an environment over HTTP, for tidemill train http://HOST:PORT here or
    elsewhere, until Ctrl-C."""
    from tidemill.presets.environment_names import environment_from

    environment = environment_from(what, settings(env_arg), wrap=wrap or ())
    with needing("serving environments needs", 'pip install "tidemill[rest]"'):
        from tidemill.remote.fault_injection import Faults, FaultSampler
        from tidemill.remote.server import Server
        from tidemill.remote.server_sessions import Sessions
    faults = pairs("--fault", fault or [])
    dice = FaultSampler(Faults.from_words(faults)) if faults else None
    sessions = Sessions(environment.make_one, what, max_sessions, idle_seconds, left_seconds)
    server = Server(sessions, host, port, token or None, max_body_bytes, dice).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    asked = "asks for a token" if token else "no token: every user of this machine can reach it"
    print(f"{what} at {server.url} ({asked}); train with: tidemill train {server.url}", flush=True)
    try:
        server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        counts = sessions.counts()
        server.close()
    print(
        f"{counts.opened:,} sessions, {counts.resets:,} resets, {counts.applied:,} steps applied, "
        f"{counts.repeated:,} replies given again"
    )


@friendly
def doctor_env(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of an environment server.")],
    token: Annotated[
        str,
        typer.Option(help='What the server asks for; "$NAME" is read from the environment variable NAME.'),
    ] = "$TIDEMILL_TOKEN",
    seconds: Annotated[float, typer.Option(help="About how long to look.", min=1)] = 10.0,
    most: Annotated[int, typer.Option(help="Most sessions to open at a time.", min=1)] = 64,
    deadline: Annotated[float, typer.Option(help="Seconds that a call may take.")] = 30.0,
) -> None:
    """Look an environment server over: latency, how much at a time, repeats, determinism;
    and say how many slots and which deadlines fit."""
    from tidemill.remote.rest_config import Rest

    with needing("asking servers needs", 'pip install "tidemill[rest]"'):
        from tidemill.remote.doctor import examine
    if not print_findings(
        examine(Rest(url=url.removeprefix("rest:"), token=token, deadline_s=deadline), seconds, most)
    ):
        raise typer.Exit(1)


@friendly
def doctor_machine(
    context: typer.Context,
    mend: Annotated[
        bool,
        typer.Option(
            "--mend",
            help="End and remove what your runs have left that are over: processes, memory files of "
            "simulators, temporary files. Nothing of what lives, and no run that was kept.",
        ),
    ] = False,
) -> None:
    """Look over this machine: cores, memory, limits, builds, GPU, leftovers; or, by a
    command, a run, a server or a cluster."""
    from tidemill.run.examine_machine import examine_machine

    if context.invoked_subcommand is not None:
        if mend:
            raise ConfigError("--mend is of this machine alone: tidemill doctor --mend")
        return
    if not print_findings(examine_machine(mend)):
        raise typer.Exit(1)


@friendly
def doctor_run(run: Run) -> None:
    """Look a run over, finished or going on: how it stands, what it reaches, who waits,
    what is odd about its training, its last error."""
    from tidemill.run.examine_run import examine_run
    from tidemill.run.folder import RunFolder

    if not print_findings(examine_run(RunFolder.open(run))):
        raise typer.Exit(1)
