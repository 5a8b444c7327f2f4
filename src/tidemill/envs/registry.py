"""Finds and makes Gymnasium environments, and says what to do when that fails."""

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tidemill.core.errors import ConfigError, did_you_mean

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


def load_attribute(name: str, setting: str = "make") -> Any:
    """Return what ``module:NAME`` or ``FILE.py:NAME`` names. Raises `ConfigError` when there is no such thing."""
    source, colon, attribute = name.rpartition(":")
    if not colon or not source or not attribute:
        raise ConfigError(f'{setting} = "{name}" must have the form "module:NAME" or "FILE.py:NAME"')
    module = _load_file(Path(source), setting) if source.endswith(".py") else import_module(source, setting)
    try:
        return getattr(module, attribute)
    except AttributeError:
        names = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(f'{setting}: {source} has no "{attribute}"; {did_you_mean(attribute, names)}') from None


def import_module(name: str, setting: str) -> Any:
    """Import a module of the user's; what fails inside it is reported as its own error."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(f'{setting}: there is no module "{error.name}"; install it, or start where it can be imported (PYTHONPATH)') from None
        raise ConfigError(
            f'{setting}: importing "{name}" needs the module "{error.name}", which is not installed: pip install {error.name}'
        ) from error
    except Exception as error:
        raise ConfigError(f'{setting}: importing "{name}" failed: {type(error).__name__}: {error}') from error


def _load_file(path: Path, setting: str) -> Any:
    if not path.is_file():
        raise ConfigError(f"{setting}: there is no file {path}")
    name = f"tidemill_file_{path.stem}_{abs(hash(str(path.resolve())))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses inside look themselves up by module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{setting}: running {path} failed: {type(error).__name__}: {error}") from error
    return module


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
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    hint = (
        did_you_mean(name, gymnasium.registry)
        if difflib.get_close_matches(name, gymnasium.registry)
        else "gymnasium.pprint_registry() lists those that are known"
    )
    raise ConfigError(
        f'no environment "{env_id}" is registered; {hint} '
        'One that a package registers when imported is named "module:ENV_ID", one that a function makes "module:FUNCTION" or "FILE.py:FUNCTION"'
    )


def call_maker(maker: Callable[..., Any], what: str, accepts: Callable[..., Any] | str | None, kwargs: Mapping[str, Any]) -> Any:
    """Call ``maker(**kwargs)``, and turn its failures into `ConfigError`: a package that is missing, an argument that is unknown.

    `what` names the environment in messages; `accepts` is the constructor whose arguments `kwargs` must be (its entry point where it has a name).
    """
    import gymnasium

    try:
        return maker(**kwargs)
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
