"""From what a user types to an environment's configuration."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tidemill.api.environment import EnvironmentConfig
from tidemill.bridge.trainer_side.environment import SimulatorEnvironment
from tidemill.core.config import decode
from tidemill.core.errors import ConfigError
from tidemill.core.user_code import load_attribute
from tidemill.envs.asynchronous import Asynchronous, is_asynchronous
from tidemill.envs.atari import Atari
from tidemill.envs.lanes import Gymnasium
from tidemill.envs.pettingzoo import PettingZoo
from tidemill.remote.rest_config import Rest


def environment_from(
    text: str, kwargs: Mapping[str, Any] | None = None, made: Any = None
) -> EnvironmentConfig:
    """Return the configuration for `text`, with `kwargs` for the environment. `made` is
    what `text` names, or what that has returned, where it has been loaded already.

    "ALE/Pong-v5": `Atari`; kwargs are its settings
    "CartPole-v1", "module:CartPole-v1": `Gymnasium` by id (the module is imported, and
        registers it)
    "module:NAME", "FILE.py:NAME": `Gymnasium` by the class or function of that name;
        `Asynchronous` where its steps are `async def`
    "http://HOST:PORT", "https://…": `Rest`: a server that plays it; "rest:" may stand
        before it. kwargs are its settings
    "pettingzoo:mpe2.simple_spread_v3": `PettingZoo`; what follows is its `make`: a
        module, "module:NAME" or "FILE.py:NAME"
    "simulator:PATH", "simulator:": `SimulatorEnvironment`: an executable, or an editor
        that is open; kwargs are its settings
    """
    given = dict(kwargs or {})
    if text.startswith("simulator:"):
        path = text.removeprefix("simulator:")
        if given.get("layout") == 0:  # as it is written on a command line, where it is a number
            given["layout"] = "0"
        return decode(
            SimulatorEnvironment,
            {"kind": "SimulatorEnvironment", "path": str(Path(path).absolute()) if path else None, **given},
            "environment",
        )
    if text.startswith("pettingzoo:"):
        return PettingZoo(make=text.removeprefix("pettingzoo:"), kwargs=given)
    if text.startswith(("rest:", "http://", "https://")):
        return decode(Rest, {"kind": "Rest", "url": text.removeprefix("rest:"), **given}, "environment")
    source, _, name = text.rpartition(":")
    if not name:
        raise ConfigError(
            f'"{text}" names no environment; write "CartPole-v1", "module:ENV_ID", "module:NAME", '
            '"FILE.py:NAME", '
            '"http://HOST:PORT", "pettingzoo:MODULE" or "simulator:PATH"'
        )
    if name.endswith(".py") and not source:
        raise ConfigError(
            f'"{text}" is a file; say what of it is meant: {text}:experiment, a function of that name, or '
            f"{text}:NAME, an environment"
        )
    if name.startswith("ALE/") and not source:
        return decode(Atari, {"kind": "Atari", "id": text, **given}, "environment")
    # An identifier that ends in a version, or stands in a namespace, is no name that
    # Python allows.
    if not source or re.fullmatch(r".*-v\d+|.+/.+", name):
        return Gymnasium(id=text, kwargs=given)
    if made is None:
        with suppress(ConfigError):  # whoever builds it tells what is wrong
            made = load_attribute(text, "make")
    return (
        Asynchronous(make=text, kwargs=given) if is_asynchronous(made) else Gymnasium(make=text, kwargs=given)
    )


def is_named(text: str) -> bool:
    """True when `text` says by its beginning what kind of environment it names, and so is
    no experiment's file."""
    return text.startswith(("pettingzoo:", "simulator:", "rest:", "http://", "https://"))
