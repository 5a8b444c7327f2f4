"""From what a user wants trained to an experiment: an environment, however it is named,
an algorithm, and settings by name."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from inspect import iscoroutinefunction
from pathlib import Path
from traceback import extract_tb
from typing import Any

from tidemill.api.algorithm import AlgorithmConfig
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.experiment import Experiment
from tidemill.api.schedule import LinearSchedule
from tidemill.core.config import encode, set_path
from tidemill.core.errors import ConfigError, TidemillError, did_you_mean
from tidemill.core.foreign_names import WITHOUT_NAMES
from tidemill.core.user_code_loading import load_attribute, name_of_code
from tidemill.presets.base import run_name
from tidemill.presets.environment_names import environment_from, in_wrappers, is_named
from tidemill.presets.experiments import ALGORITHMS, experiment_for
from tidemill.workers.actor_config import ActorConfig

Trainable = Experiment | EnvironmentConfig | str | Callable[..., Any]
"""What can be trained: an experiment, an environment's configuration or name, or the
class or function that makes one."""


def make_experiment(
    what: Trainable, algorithm: str | AlgorithmConfig | None = None, wrap: Any = ()
) -> tuple[Experiment, Path | None]:
    """Return the experiment for `what` by `algorithm` ("ppo", "dqn", "sac", or settings
    such as ``PPO(epochs=4)``), and the file it came from, if any. An environment is in
    the wrappers `wrap`."""
    if not (algorithm is None or isinstance(algorithm, (str, AlgorithmConfig))):
        raise ConfigError(
            f'algorithm = {algorithm!r}: write a name, as "ppo", which has what is tuned for the environment '
            "(single settings go by their names, as epochs = 4), or settings, as PPO(epochs=4), which are "
            "taken whole"
        )
    settings = algorithm if isinstance(algorithm, AlgorithmConfig) else None
    name = algorithm if isinstance(algorithm, str) else None
    if settings is not None:
        kinds = (kind.__name__.lower() for kind in type(settings).__mro__)  # a derived one runs as its base
        name = next((kind for kind in kinds if kind in ALGORITHMS), "ppo")
    source = None
    match what:
        case Experiment():
            if name is not None and settings is None:
                raise ConfigError(f'algorithm = "{name}" goes with an environment; an experiment has its own')
            _refuse_wrappers(wrap)
            experiment = what
        case EnvironmentConfig():
            called = getattr(what, "id", None) or getattr(what, "make", None) or type(what).__name__
            experiment = experiment_for(_last(called), in_wrappers(what, wrap), name or "ppo")
        case str():
            experiment, source = resolve(what, {}, name, wrap)
        case _ if callable(what):
            code = name_of_code(what)
            environment = environment_from(code, made=what, wrap=wrap)
            experiment = experiment_for(_last(code), environment, name or "ppo")
        case _:
            raise ConfigError(
                f"{what!r} cannot be trained; give an environment (its name, class, function or "
                "configuration) or an experiment"
            )
    return (experiment if settings is None else _with_algorithm(experiment, settings)), source


def environments_of(what: Trainable) -> list[EnvironmentConfig]:
    """Return the environments of `what`: one, or those of an experiment's actors."""
    if isinstance(what, EnvironmentConfig):
        return [what]
    if callable(what) and not isinstance(what, (str, Experiment)):
        return [environment_from(name_of_code(what), made=what)]
    if isinstance(what, str) and not what.rpartition(":")[0].endswith(".py"):
        return [environment_from(what)]
    actors = make_experiment(what)[0].groups(ActorConfig)
    return [config.environment for config in actors.values()]


def _last(called: str) -> str:
    """Return what a run is called by the name of its environment's code or id."""
    return called if ":" not in called else run_name(called.rpartition(":")[2])


def _with_algorithm(experiment: Experiment, algorithm: AlgorithmConfig) -> Experiment:
    trainers = {
        name: worker
        for name, worker in experiment.workers.items()
        if isinstance(getattr(worker, "algorithm", None), AlgorithmConfig)
    }
    trained = {name: worker.replace(algorithm=algorithm) for name, worker in trainers.items()}
    return experiment.replace(workers={**experiment.workers, **trained})


def with_settings(experiment: Experiment, settings: Mapping[str, Any]) -> tuple[Experiment, list[str]]:
    """Return `experiment` with these settings, and their paths. A setting is named by its
    path ("workers.trainer.algorithm.epochs") or by its last word, where only one kind of
    configuration has it; of several trainers, say, each gets it. Raises `ConfigError`."""
    known: dict[str, list[tuple[str, str]]] = {}
    for owner, path in _paths(encode(experiment), ""):
        known.setdefault(path.rpartition(".")[2], []).append((owner, path))
    paths: list[str] = []
    for name, value in settings.items():
        places = [("", name)] if "." in name else known.get(name, [])
        if not places:
            raise ConfigError(f"nothing here has a setting {name}; {did_you_mean(name, known)}")
        if name == "policy" and re.fullmatch(r"\w*Policy", str(value)):
            raise ConfigError(f"{name} = {value!r} is not needed here: {WITHOUT_NAMES[name]}")
        if len({owner for owner, _ in places}) > 1:
            raise ConfigError(
                f"several settings are called {name}; give the path of the one that is meant, as "
                f'**{{"{places[0][1]}": …}}: {", ".join(path for _, path in places)}'
            )
        for _, path in places:
            try:
                experiment = set_path(experiment, path, json.dumps(encode(value, path)))
            except ConfigError as error:
                raise ConfigError(str(error).removeprefix("--set ")) from None
            paths.append(path)
    return experiment, paths


def _paths(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the kind that has it and the path of every setting of encoded data."""
    if isinstance(value, dict) and value.get("kind") != LinearSchedule.__name__:
        for name, inner in value.items():
            below = f"{path}.{name}" if path else name
            if name != "kind" and "kind" in value:
                yield value["kind"], below
            yield from _paths(inner, below)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _paths(inner, f"{path}.{place}")


def resolve(
    what: str, env_args: dict[str, Any], algorithm: str | None = None, wrap: Any = ()
) -> tuple[Experiment, Path | None]:
    """Return the experiment that `what` names (FILE.py:FUNCTION, or an environment) and
    the file it came from, if any. An environment is in the wrappers `wrap`."""
    source, colon, _ = what.rpartition(":")
    if colon and source.endswith(".py") and not is_named(what):
        made = load_attribute(what, "experiment")
        if _is_environment(made):
            return _in_file(what, env_args, algorithm, made, wrap), None
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
            where = f" (line {lines[-1]})" if lines else "; it is called without arguments"
            raise ConfigError(f"{what} raised {type(error).__name__}: {error}{where}") from error
        if _is_environment(type(experiment)):
            close_made(experiment)
            return _in_file(what, env_args, algorithm, experiment, wrap), None
        if not isinstance(experiment, Experiment):
            raise ConfigError(
                f"{what} gives a {type(experiment).__name__}, neither an Experiment nor an environment (a "
                "gymnasium.Env, or what has async def reset and step); return tidemill.Experiment(…)"
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
        _refuse_wrappers(wrap)
        return experiment, Path(source)
    return experiment_for(what, environment_from(what, env_args, wrap=wrap), algorithm or "ppo"), None


def _refuse_wrappers(wrap: Any) -> None:
    if wrap:
        raise ConfigError(
            "wrappers go with an environment's name; in an experiment, write them to its environment, "
            'Gymnasium(id=…, wrap=("flatten",))'
        )


def _is_environment(made: Any) -> bool:
    if not isinstance(made, type) or made is Experiment:
        return False  # without the imports: most files have a function that returns an experiment
    import gymnasium

    from tidemill.envs.asynchronous import is_asynchronous

    return issubclass(made, gymnasium.Env) or is_asynchronous(made)


def close_made(made: Any) -> None:
    """Close what was made to see what it is."""
    if callable(close := getattr(made, "close", None)) and not isinstance(made, type):
        if iscoroutinefunction(close):
            from asyncio import run

            run(close())
        else:
            close()


def _in_file(what: str, env_args: dict[str, Any], algorithm: str | None, made: Any, wrap: Any) -> Experiment:
    """Return the experiment for an environment of the user's own, FILE.py:NAME. It is
    called NAME, and resumes from any folder."""
    file, _, name = what.rpartition(":")
    environment = environment_from(f"{Path(file).absolute()}:{name}", env_args, made, wrap)
    return experiment_for(name, environment, algorithm or "ppo")
