"""What the words of a command line name: experiments, environments and their settings."""

from inspect import isfunction, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from tidemill.api.environment import EnvironmentConfig
from tidemill.api.experiment import Experiment
from tidemill.core.config import read_setting, set_path
from tidemill.core.errors import ConfigError
from tidemill.core.secrets import says_secret
from tidemill.core.user_code_loading import load_attribute
from tidemill.envs.wrapping import WRAPPERS
from tidemill.presets.environment_names import FORMS, environment_from, is_named
from tidemill.workers.actor_config import ActorConfig


def _run_named(text: str) -> Path:
    """Return the folder that a word names. An empty one, of a variable that is not set,
    say, is none: it would be this very folder."""
    if not text:
        raise typer.BadParameter("an empty path names no run; write . for the folder that you are in")
    return Path(text)


Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.", parser=_run_named)]
KINDS = (
    f"{', '.join(FORMS)}; the last may name an environment of your own, or a function that returns an "
    "experiment."
)
NamedArgument = typer.Argument(metavar="ENVIRONMENT | FILE.py:FUNCTION", help=KINDS)
Trained = Annotated[str, NamedArgument]
EnvArg = Annotated[
    list[str] | None, typer.Option(help="Argument of the environment's constructor, NAME=VALUE. Repeatable.")
]
Wrap = Annotated[
    list[str] | None,
    typer.Option(
        help="A wrapper around the environment: a name, as frame-skip(4), or module:NAME or FILE.py:NAME, "
        "with plain arguments in brackets. Repeatable, the first one inside. By name, of one agent: "
        f"{', '.join(WRAPPERS)}. Of several agents: SuperSuit's, as supersuit:frame_stack_v1(4)."
    ),
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
        "given (the experiment's own), or all of one, as it is shown at the start.",
    ),
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


def experiment_from(
    what: str,
    env_arg: list[str] | None,
    changes: list[str] | None,
    algorithm: str | None = None,
    wrap: list[str] | None = None,
) -> tuple[Experiment, Path | None]:
    """Return what `resolve` does, with the settings of --env-arg, --wrap and --set."""
    from tidemill.training.experiment_from import resolve

    experiment, source = resolve(what, settings(env_arg), algorithm, wrap or ())
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


def environments(what: str, env_arg: list[str] | None, wrap: list[str] | None) -> list[EnvironmentConfig]:
    """Return what `what` names: an environment, or those of an experiment (a function
    that returns one, or an `EnvironmentConfig`)."""
    from tidemill.training.experiment_from import close_made

    if what.rpartition(":")[0].endswith(".py") and not is_named(what):
        made = load_attribute(what, "environment")
        if isfunction(made) and all(
            parameter.default is not parameter.empty for parameter in signature(made).parameters.values()
        ):
            made = made()
        if isinstance(made, EnvironmentConfig):
            return [made]
        if isinstance(made, Experiment):
            return [actors.environment for actors in made.groups(ActorConfig).values()]
        close_made(made)  # it was an environment's maker
        return [environment_from(what, settings(env_arg), made, wrap or ())]
    return [environment_from(what, settings(env_arg), wrap=wrap or ())]
