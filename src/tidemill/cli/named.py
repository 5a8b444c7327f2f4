"""What the words of a command line name: experiments, environments and their settings."""

from inspect import iscoroutinefunction, isfunction, signature
from pathlib import Path
from traceback import extract_tb
from typing import Annotated, Any

import typer

from tidemill.api.environment import EnvironmentConfig
from tidemill.api.experiment import Experiment
from tidemill.core.config import read_setting, set_path
from tidemill.core.errors import ConfigError, TidemillError
from tidemill.core.secrets import says_secret
from tidemill.core.user_code import load_attribute
from tidemill.presets.environment_names import FORMS, environment_from, is_named
from tidemill.workers.actor_config import ActorConfig

KINDS = (
    f"{', '.join(FORMS)}; the last may name an environment of your own, or a function that returns an "
    "experiment."
)
Trained = Annotated[str, typer.Argument(metavar="ENVIRONMENT | FILE.py:FUNCTION", help=KINDS)]
EnvArg = Annotated[
    list[str] | None, typer.Option(help="Argument of the environment's constructor, NAME=VALUE. Repeatable.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting, e.g. workers.trainer.algorithm.epochs=8. Repeatable."),
]
Lay = Annotated[
    str,
    typer.Option(
        "--layout",
        help="How many actors, trainers, lanes, …: auto (from costs that are measured once), measure (anew), "
        "given (the experiment's own), "
        "or all of one, as it is shown at the start.",
    ),
]


def pairs(what: str, items: list[str]) -> dict[str, str]:
    """Return ``k=v`` items as a dict."""
    found = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"{what} {item}: write {what} NAME=VALUE")
        found[key] = value
    return found


def settings(env_arg: list[str] | None) -> dict[str, Any]:
    """Return the arguments that --env-arg gives. Secrets are text."""
    return {
        name: text if says_secret(name) else read_setting(text)
        for name, text in pairs("--env-arg", env_arg or []).items()
    }


def resolve(
    what: str, env_args: dict[str, Any], algorithm: str | None = None
) -> tuple[Experiment, Path | None]:
    """Return the experiment that `what` names (FILE.py:FUNCTION, or an environment) and
    the file it came from, if any."""
    from tidemill.presets.experiments import experiment_for

    source, colon, _ = what.rpartition(":")
    if colon and source.endswith(".py") and not is_named(what):
        made = load_attribute(what, "experiment")
        if _is_environment(made):
            return _in_file(what, env_args, algorithm, made), None
        try:
            experiment = made() if callable(made) else made
        except TidemillError:
            raise
        except Exception as error:
            lines = [
                frame.lineno
                for frame in extract_tb(error.__traceback__)
                if Path(frame.filename).name == Path(source).name
            ]
            where = f" (line {lines[-1]})" if lines else ""
            raise ConfigError(
                f"{what} raised {type(error).__name__}: {error}{where}; it is called without arguments"
            ) from error
        if _is_environment(type(experiment)):
            _close(experiment)
            return _in_file(what, env_args, algorithm, experiment), None
        if not isinstance(experiment, Experiment):
            raise ConfigError(
                f"{what} gives a {type(experiment).__name__}, neither an Experiment nor an environment (a "
                "gymnasium.Env, or what has async def reset "
                "and step); return tidemill.Experiment(…)"
            )
        if env_args:
            raise ConfigError(
                "--env-arg goes with an environment's name; in an experiment file, use --set "
                "workers.actor.environment.kwargs.NAME=VALUE"
            )
        if algorithm is not None:
            raise ConfigError(
                f"--algorithm {algorithm} goes with an environment's name; an experiment file has its own"
            )
        return experiment, Path(source)
    return experiment_for(what, environment_from(what, env_args), algorithm or "ppo"), None


def _is_environment(made: Any) -> bool:
    import gymnasium

    from tidemill.envs.asynchronous import is_asynchronous

    return isinstance(made, type) and (issubclass(made, gymnasium.Env) or is_asynchronous(made))


def _close(made: Any) -> None:
    """Close what was made to see what it is."""
    if callable(close := getattr(made, "close", None)) and not isinstance(made, type):
        if iscoroutinefunction(close):
            from asyncio import run

            run(close())
        else:
            close()


def _in_file(what: str, env_args: dict[str, Any], algorithm: str | None, made: Any) -> Experiment:
    """Return the experiment for an environment of the user's own, FILE.py:NAME. It is
    called NAME, and resumes from any folder."""
    from tidemill.presets.experiments import experiment_for

    file, _, name = what.rpartition(":")
    return experiment_for(
        name, environment_from(f"{Path(file).absolute()}:{name}", env_args, made), algorithm or "ppo"
    )


def experiment_from(
    what: str, env_arg: list[str] | None, changes: list[str] | None, algorithm: str | None = None
) -> tuple[Experiment, Path | None]:
    """Return what `resolve` does, with the settings of --env-arg and --set."""
    experiment, source = resolve(what, settings(env_arg), algorithm)
    return changed(experiment, changes), source


def changed(experiment: Experiment, changes: list[str] | None) -> Experiment:
    """Return the experiment with the settings of --set, in whichever order goes: some are
    allowed only once another has been made."""
    waiting = list(pairs("--set", changes or []).items())
    while waiting:
        refused: list[tuple[str, str]] = []
        first: ConfigError | None = None
        for path, text in waiting:
            try:
                experiment = set_path(experiment, path, text)
            except ConfigError as error:
                refused.append((path, text))
                first = first or error
        if first is not None and len(refused) == len(waiting):
            raise first
        waiting = refused
    return experiment


def environments(what: str, env_arg: list[str] | None) -> list[EnvironmentConfig]:
    """Return what `what` names: an environment, or those of an experiment (a function
    that returns one, or an `EnvironmentConfig`)."""
    if what.rpartition(":")[0].endswith(".py") and not is_named(what):
        made = load_attribute(what, "environment")
        if isfunction(made) and all(
            parameter.default is not parameter.empty for parameter in signature(made).parameters.values()
        ):
            made = made()
        if isinstance(made, EnvironmentConfig):
            return [made]
        if isinstance(made, Experiment):
            return [worker.environment for worker in made.workers.values() if isinstance(worker, ActorConfig)]
        _close(made)  # it was an environment's maker
        return [environment_from(what, settings(env_arg), made)]
    return [environment_from(what, settings(env_arg))]
