"""From what a user types to an environment's configuration."""

import re
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

from tidemill.api.environment import EnvironmentConfig
from tidemill.core.errors import ConfigError
from tidemill.core.user_code_loading import load_attribute


class Family(NamedTuple):
    """A family of environments whose names are told by their beginning.

    form: what its names look like, for people
    prefixes: what they begin with; one without a colon may begin a path, too, and counts
        only for names without one
    module, kind: where its `EnvironmentConfig` is, whose `from_name` makes one of a name
    """

    form: str
    prefixes: tuple[str, ...]
    module: str
    kind: str

    def has(self, name: str) -> bool:
        """Return whether `name` is one of its names."""
        return any(name.startswith(each) and (":" in each or ":" not in name) for each in self.prefixes)


_ZOO = ("classic", "butterfly", "sisl", "atari")
FAMILIES = (
    Family("ALE/Pong-v5", ("ALE/",), "tidemill.envs.atari", "Atari"),
    Family("envpool:HalfCheetah-v5", ("envpool:",), "tidemill.envs.envpool", "EnvPool"),
    Family(
        "pettingzoo:NAME",
        ("pettingzoo:", "pettingzoo.", "mpe2:", "mpe2.", *(f"pettingzoo.{kind}:" for kind in _ZOO)),
        "tidemill.envs.pettingzoo",
        "PettingZoo",
    ),
    Family(
        "simulator:PATH", ("simulator:",), "tidemill.bridge.trainer_side.environment", "SimulatorEnvironment"
    ),
    Family("http://HOST:PORT", ("rest:", "http://", "https://"), "tidemill.remote.rest_config", "Rest"),
)
"""All families but Gymnasium's, whose names are the others."""
FORMS = ("CartPole-v1", "module:ENV_ID", *(family.form for family in FAMILIES), "module:NAME", "FILE.py:NAME")


def environment_from(
    text: str, kwargs: Mapping[str, Any] | None = None, made: Any = None, wrap: Any = ()
) -> EnvironmentConfig:
    """Return the configuration for `text`, with `kwargs` for the environment, in the
    wrappers `wrap` (see `Gymnasium`). `made` is what `text` names, or what that has
    returned, where it has been loaded already.

    "ALE/Pong-v5", "simulator:PATH", …: one of `FAMILIES`; kwargs are its settings
    "CartPole-v1", "module:CartPole-v1": `Gymnasium` by id (the module is imported, and
        registers it)
    "module:NAME", "FILE.py:NAME": `Gymnasium` by the class or function of that name;
        `Asynchronous` where its steps are `async def`
    """
    given = dict(kwargs or {})
    # the console's frames one by one, without sticky actions: what wrappers made of them
    # in the usual presets is `Atari`
    text = re.sub(r"^(\w+)NoFrameskip-v4$", r"ALE/\1-v5", text)
    for family in FAMILIES:
        if family.has(text):
            config: type[EnvironmentConfig] = getattr(import_module(family.module), family.kind)
            return in_wrappers(config.from_name(text, given), wrap)
    source, _, name = text.rpartition(":")
    if not name:
        *forms, last = (f'"{form}"' for form in FORMS)
        raise ConfigError(f'"{text}" names no environment; write {", ".join(forms)} or {last}')
    if name.endswith(".py") and not source:
        raise ConfigError(
            f'"{text}" is a file; say what of it is meant: {text}:experiment, a function of that name, or '
            f"{text}:NAME, an environment"
        )
    from tidemill.envs.gymnasium_registry import is_registered
    from tidemill.envs.plain_gymnasium import Gymnasium

    if not source or is_registered(text):
        return in_wrappers(Gymnasium(id=text, kwargs=given), wrap)
    from tidemill.envs.asynchronous import Asynchronous, is_asynchronous

    if made is None:
        with suppress(ConfigError):  # whoever builds it tells what is wrong
            made = load_attribute(text, "make")
    kind = Asynchronous if is_asynchronous(made) else Gymnasium
    return in_wrappers(kind(make=text, kwargs=given), wrap)


def in_wrappers(environment: EnvironmentConfig, wrap: Any) -> EnvironmentConfig:
    """Return `environment` in these wrappers, which come outside of its own. Raises
    `ConfigError` where it takes none."""
    from tidemill.envs.pettingzoo import PettingZoo
    from tidemill.envs.plain_gymnasium import Gymnasium
    from tidemill.envs.wrapping import names_of

    if not (isinstance(wrap, str) or callable(wrap) or wrap):
        return environment
    if not isinstance(environment, (Gymnasium, PettingZoo)):
        raise ConfigError(
            "wrappers go around environments of Gymnasium and PettingZoo, and this is "
            f"{type(environment).__name__}: see its own settings; a function of yours can make the "
            "environment and wrap it, FILE.py:NAME"
        )
    return environment.replace(wrap=(*environment.wrap, *names_of(wrap)))


def is_named(text: str) -> bool:
    """True when `text` says by its beginning what kind of environment it names, and so is
    no experiment's file."""
    return any(family.has(text) for family in FAMILIES)
