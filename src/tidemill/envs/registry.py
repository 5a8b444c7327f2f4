"""Finds and makes Gymnasium environments, and says what to do when that fails."""

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.core.source import import_module

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


def find_spec(env_id: str) -> Any:
    """Return Gymnasium's entry (EnvSpec) for ``ID`` or ``module:ID``. Raises `ConfigError` with the nearest known name."""
    import gymnasium

    module, _, name = env_id.rpartition(":")
    if module:
        import_module(module, "environment")
    if name.startswith("ALE/") and name not in gymnasium.registry:
        try:
            importlib.import_module("ale_py")  # registers its games when imported
        except ImportError:
            raise ConfigError(f'environment "{env_id}" needs a package that is not installed: pip install "ale-py"') from None
    if name.startswith("MinAtar/") and name not in gymnasium.registry:
        try:
            importlib.import_module("minatar.gym").register_envs()
        except ImportError:
            raise ConfigError(f'environment "{env_id}" needs a package that is not installed: pip install "minatar"') from None
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    hint = (
        did_you_mean(name, gymnasium.registry)
        if difflib.get_close_matches(name, gymnasium.registry)
        else "gymnasium.pprint_registry() lists those that are known, and Atari games are named like ALE/Pong-v5."
    )
    raise ConfigError(
        f'no environment "{env_id}" is registered; {hint} '
        'One that a package registers when imported is named "module:ENV_ID", one that a function makes "module:FUNCTION" or "FILE.py:FUNCTION"'
    )


def call_maker(maker: Callable[..., Any], what: str, accepts: Callable[..., Any] | str | None, kwargs: Mapping[str, Any]) -> Any:
    """Call ``maker(**kwargs)`` with a copy of them, since some environments change what they are given, and turn its failures into `ConfigError`: a
    package that is missing, an argument that is unknown.

    `what` names the environment in messages; `accepts` is the constructor whose arguments `kwargs` must be (its entry point where it has a name).
    """
    import gymnasium

    try:
        return maker(**deepcopy(dict(kwargs)))
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        place = accepts if isinstance(accepts, str) else getattr(accepts, "__module__", "")
        package = next((p for start, p in _INSTALL.items() if place.startswith(start)), getattr(error, "name", None))
        cure = f'pip install "{package}"' if package else "install what it asks for"
        raise ConfigError(f"{what} needs a package that is not installed: {cure} ({error})") from error
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None:
            raise ConfigError(f"{what} cannot be made with {dict(kwargs)}: {error}") from error
        raise ConfigError(f'{what} has no argument "{unknown[1]}"; {did_you_mean(unknown[1], arguments(accepts))}') from None
    except Exception as error:
        raise ConfigError(f"{what} cannot be made with {dict(kwargs)}: {type(error).__name__}: {error}") from error


def arguments(accepts: Callable[..., Any] | str | None) -> list[str]:
    """Return the names of a constructor's arguments, [] when they cannot be told."""
    from gymnasium.envs.registration import load_env_creator

    try:
        names = list(inspect.signature(load_env_creator(accepts) if isinstance(accepts, str) else accepts).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError, ImportError, AttributeError):
        return []
    return [n for n in names if n not in ("self", "args", "kwargs", "render_mode")]


def pictures(maker: Callable[..., Any]) -> dict[str, str]:
    """Return the argument that asks `maker` for pictures, {} where it does not understand that."""
    try:
        parameters = inspect.signature(maker).parameters.values()
    except (TypeError, ValueError):
        return {}
    asks = any(p.name == "render_mode" or p.kind is p.VAR_KEYWORD for p in parameters)
    return {"render_mode": "rgb_array"} if asks else {}
