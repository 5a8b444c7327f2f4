"""Finds and makes Gymnasium environments, and says what to do when that fails."""

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from errno import EADDRINUSE, EAGAIN, EBUSY, EEXIST
from pathlib import Path
from typing import Any

from tidemill.api.external_code import Outside, called, names_nothing, quoted
from tidemill.core.errors import ConfigError, did_you_mean, fault_of, message_of
from tidemill.core.secrets import hide, known, mask, reveal
from tidemill.core.user_code_loading import import_module, is_installed, load_attribute, module_file

_INSTALL = {  # by the start of an entry point: what pip installs
    "ale_py": "ale-py",
    "shimmy.atari": "ale-py",
    "gymnasium.envs.box2d": "gymnasium[box2d]",
    "gymnasium.envs.mujoco": "gymnasium[mujoco]",
    "gymnasium.envs.phys2d": "gymnasium[jax]",
    "gymnasium.envs.tabular": "gymnasium[jax]",
    "gymnasium.envs.toy_text": "gymnasium[toy-text]",
    "gymnasium.envs.classic_control": "gymnasium[classic-control]",
}
_REGISTERED_BY = (
    (r"ALE/.+", "ale-py", "ale_py"),
    (r"MinAtar/.+", "minatar", "minatar.gym"),
    (r"(MiniGrid|BabyAI)-.+", "minigrid", "minigrid"),
    (r"Panda\w+-v\d+", "panda-gym", "panda_gym"),
    (r"\w+BulletEnv-v\d+", "pybullet-envs-gymnasium", "pybullet_envs_gymnasium"),
)
"""By names of environments: what pip installs, and the module whose import registers
them."""

MOST_NAMED = 20  # of a package's environments, where an unknown one is asked for

_ANOTHER = (
    ". Another copy of it may have that: a run makes one for each lane, and one more to know its spaces; "
    "give each copy its own, or close the one before"
)


def is_id(name: str) -> bool:
    """Return whether `name` can only be an environment's id: it ends in a version, or
    stands in a namespace, as no name of a class or function does."""
    return re.fullmatch(r".*-v\d+|.+/.+", name) is not None


def is_registered(name: str) -> bool:
    """Return whether `name` is "module:ENV_ID"."""
    module, _, env_id = name.rpartition(":")
    return bool(module) and not module.endswith(".py") and is_id(env_id)


def find_spec(env_id: str) -> Any:
    """Return Gymnasium's entry (EnvSpec) for ``ID`` or ``module:ID``. Raises
    `ConfigError` with the nearest known name."""
    import gymnasium

    module, _, name = env_id.rpartition(":")
    if module:
        import_module(module, "environment")
    for names, package, source in _REGISTERED_BY:
        if re.fullmatch(names, name) and name not in gymnasium.registry:
            try:
                registering = importlib.import_module(source)
            except ImportError:
                raise ConfigError(
                    f'environment "{env_id}" needs a package that is not installed: pip install "{package}"'
                ) from None
            if package == "minatar":
                registering.register_envs()
    if not module and (now := _of_today(name)):
        raise ConfigError(f'no environment is called "{env_id}" here; take {now}')
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    if difflib.get_close_matches(name, gymnasium.registry):
        hint = did_you_mean(name, gymnasium.registry)
    elif module:
        hint = _named_by(module, name)
    else:
        hint = "gymnasium.pprint_registry() lists those that are known, and Atari games are named like "
        hint += "ALE/Pong-v5."
    raise ConfigError(
        f'no environment "{env_id}" is registered; {hint} One that a package registers when imported is '
        'named "module:ENV_ID", one that a function makes "module:FUNCTION" or "FILE.py:FUNCTION"'
    )


def _named_by(module: str, name: str) -> str:
    """Return what to say of a module that has been imported, and registers no `name`."""
    import gymnasium

    package = module.partition(".")[0]
    own = [
        known
        for known, spec in gymnasium.registry.items()
        if str(spec.entry_point).startswith((f"{package}.", f"{package}:"))
    ]
    if own:
        return f"{package} registers {', '.join(sorted(own)[:MOST_NAMED])}{', …' * (len(own) > MOST_NAMED)}."
    return (
        f"importing {module} registers none of its own: name the module that does, as its documentation "
        f'says (of many packages it is "{package}.envs:{name}").'
    )


def _of_today(name: str) -> str:
    """Return what to take in place of an environment whose id has been left behind, ""
    for all others: games of Atari as single frames, MuJoCo by its old bindings,
    environments of several agents."""
    import gymnasium

    base, _, version = name.rpartition("-v")
    old = gymnasium.registry.get(name)
    if old is None and re.fullmatch(r"\w+_v\d+", name):
        return f'"pettingzoo:{name}" if it is of several agents'
    if version in ("2", "3") and old is not None and f"{base}-v5" in gymnasium.registry:
        return f'"{base}-v5", or "{base}-v4"; the old bindings of MuJoCo are in gymnasium-robotics'
    if version not in ("0", "4") or (old is not None and "ale_py" not in str(old.entry_point)):
        return ""
    with suppress(ImportError):
        importlib.import_module("ale_py")  # which registers its games
    game = f"ALE/{re.sub('(NoFrameskip|Deterministic)$', '', base)}-v5"
    return f'"{game}": frames skipped, small and grey, four in a row' if game in gymnasium.registry else ""


def outside(settings: Mapping[str, Any]) -> list[Outside]:
    """Return what is `Outside` in settings called id, make and kwargs."""
    env_id, make, kwargs = settings.get("id"), settings.get("make"), settings.get("kwargs")
    if make is not None:
        return [called(make, kwargs)]
    module = str(env_id).rpartition(":")[0]
    if module and not _is_plugin(module):
        return [
            Outside(
                f"imports {quoted(module)} for {quoted(env_id)}"
                + (f" with {quoted(kwargs)}" if kwargs else ""),
                module,
            )
        ]
    return [] if names_nothing(kwargs) else [Outside(f"makes {quoted(env_id)} with {quoted(kwargs)}")]


def _is_plugin(module: str) -> bool:
    """True for an installed package that Gymnasium imports by itself, as those that
    register environments have it do."""
    from importlib.metadata import entry_points  # which takes long to import, and is rarely asked for

    plugins = {point.module.partition(".")[0] for point in entry_points(group="gymnasium.envs")}
    return module in plugins and all(is_installed(Path(file)) for file in module_file(module) or ("",))


def load_maker(name: str, returns: str, setting: str = "make") -> Callable[..., Any]:
    """Return the class or function that `name`, the value of `setting`, names. Raises
    `ConfigError` where it is none, and says what it must return."""
    maker = load_attribute(name, setting)
    if not callable(maker):
        raise ConfigError(
            f"{setting}: {name} is {maker!r}; it must be a class or function that returns {returns}"
        )
    return maker  # type: ignore[no-any-return]


def call_maker(
    maker: Callable[..., Any], what: str, accepts: Callable[..., Any] | str | None, kwargs: Mapping[str, Any]
) -> Any:
    """Call ``maker(**kwargs)`` with a copy of them, since some environments change what
    they are given, and turn its failures into `ConfigError`: a package that is missing,
    an argument that is unknown.

    `what` names the environment in messages; `accepts` is the constructor whose arguments
    `kwargs` must be (its entry point where it has a name).
    """
    import gymnasium

    given = dict(kwargs)
    try:
        return maker(**reveal(deepcopy(given)))
    except ConfigError as error:
        raise ConfigError(f"{what}: {mask(str(error), known(given))}") from None
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        place = accepts if isinstance(accepts, str) else getattr(accepts, "__module__", "")
        package = next(
            (p for start, p in _INSTALL.items() if place.startswith(start)), getattr(error, "name", None)
        )
        cure = f'pip install "{package}"' if package else "install what it asks for"
        raise ConfigError(f"{what} needs a package that is not installed: {cure} ({error})") from error
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None:
            raise ConfigError(
                f"{what} cannot be made{f' with {hide(given)}' if given else ''}: "
                f"{mask(str(error), known(given))}"
            ) from error
        raise ConfigError(
            f'{what} has no argument "{unknown[1]}"; {did_you_mean(unknown[1], arguments(accepts))}'
        ) from None
    except BaseException as error:
        fault_of(error)  # raises what is none
        raise ConfigError(
            f"{what} cannot be made{f' with {hide(given)}' if given else ''}: {type(error).__name__}: "
            f"{mask(message_of(error), known(given))}{_ANOTHER if _is_taken(error) else ''}"
        ) from error


def _is_taken(error: BaseException) -> bool:
    """True where an error says that somebody has what there is but one of."""
    return isinstance(error, OSError) and error.errno in (EADDRINUSE, EAGAIN, EBUSY, EEXIST)


def arguments(accepts: Callable[..., Any] | str | None) -> list[str]:
    """Return the names of a constructor's arguments, [] when they cannot be told."""
    from gymnasium.envs.registration import load_env_creator

    try:
        names = list(
            inspect.signature(load_env_creator(accepts) if isinstance(accepts, str) else accepts).parameters  # type: ignore[arg-type]
        )
    except (TypeError, ValueError, ImportError, AttributeError):
        return []
    return [n for n in names if n not in ("self", "args", "kwargs", "render_mode")]


def fps_of(env: Any) -> float:
    """Return the pictures per second at which an environment of Gymnasium or PettingZoo
    says that it is to be watched, 0 where it does not."""
    metadata = getattr(env, "metadata", None)
    fps = metadata.get("render_fps") if isinstance(metadata, Mapping) else None
    return float(fps) if isinstance(fps, (int, float)) and 0 < fps <= 1000 else 0.0


def pictures(maker: Callable[..., Any]) -> dict[str, str]:
    """Return the argument that asks `maker` for pictures, {} where it does not understand
    that."""
    try:
        parameters = inspect.signature(maker).parameters.values()
    except (TypeError, ValueError):
        return {}
    asks = any(p.name == "render_mode" or p.kind is p.VAR_KEYWORD for p in parameters)
    return {"render_mode": "rgb_array"} if asks else {}
