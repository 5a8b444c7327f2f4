"""The commands that train: ``train``, ``resume`` and ``retrain``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tidemill.cli.arguments import (
    EnvArg,
    File,
    Lay,
    NamedArgument,
    Run,
    Set,
    TrustFlag,
    Wrap,
    changed,
    experiment_from,
    pairs,
)
from tidemill.cli.cluster import Hosts, Insecure, Place, RayAddress, places
from tidemill.cli.error_output import friendly, word
from tidemill.cli.slurm import (
    CpusPerHost,
    GpusPerHost,
    JobOptions,
    Partition,
    Sbatch,
    Script,
    Time,
)
from tidemill.core.errors import ConfigError
from tidemill.launchers.table import LAUNCHERS, with_options
from tidemill.metrics.writer import SINKS
from tidemill.presets.experiments import ALGORITHMS

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
    max_updates: Annotated[int | None, typer.Option(help="End with this update.")] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="End so many seconds after training has begun, pauses not counted.")
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
    # outside of an allocation Slurm's launcher is looked at once the experiment is known
    check_words("processes" if job.submits(launch) else launch, run_dir, layout, log)
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
    limits = _limits(max_steps, max_updates, max_seconds, stop_at_return, return_of)
    experiment = experiment.replace(limits=experiment.limits.replace(**limits))
    if print_config:
        from tidemill.run.config_file import config_text

        print(config_text(experiment, source))
        return
    if job.submits(launch):
        from tidemill.launchers.slurm_job import check_options
        from tidemill.run.folder import new_folder

        experiment.check()
        check_options(launch, experiment)
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


def _limits(
    steps: int | None,
    updates: int | None,
    seconds: float | None,
    mean_return: float | None,
    return_of: str | None,
) -> dict[str, Any]:
    """Return the limits that were given."""
    given = {
        "steps": steps,
        "updates": updates,
        "seconds": seconds,
        "mean_return": mean_return,
        "return_of": return_of,
    }
    return {name: value for name, value in given.items() if value is not None}


def _exit(summary: Mapping[str, Any]) -> None:
    if summary["status"] == "interrupted":
        from tidemill.run.interrupts import exit_status

        raise typer.Exit(exit_status(summary["reason"]))


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
    max_updates: Annotated[int | None, typer.Option(help="A new limit of updates.")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="A new limit of seconds, of all starts.")] = None,
    stop_at_return: Annotated[float | None, typer.Option(help="A new mark for the mean return.")] = None,
    return_of: ReturnOf = None,
    log: Annotated[
        str | None, typer.Option("--log", help="As of train; by default what the run logged to last.")
    ] = None,
    trust: TrustFlag = False,
) -> None:
    """Go on with a run from its last checkpoint."""
    from tidemill.training.train import resume as go_on

    limits = _limits(max_steps, max_updates, max_seconds, stop_at_return, return_of)
    job = JobOptions(time, partition, cpus_per_host, gpus_per_host, sbatch or (), script)
    job.check(launch)
    options = {"hosts": hosts, "address": ray_address, "insecure": insecure or None, "place": places(place)}
    if job.submits(launch):
        from tidemill.launchers.slurm_job import check_options
        from tidemill.run.folder import RunFolder

        check_options(with_options(launch or "slurm", options))
        raise typer.Exit(job.submit(RunFolder.open(run).path, hosts))
    _exit(
        go_on(
            run, launch=launch, options=options, file=file, limits=limits, trust=word(trust), log=log
        ).summary
    )


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
