"""Options of resets: what a curriculum asks of environments."""

import inspect
from collections.abc import Mapping
from typing import Any

from tidemill.core.errors import ConfigError
from tidemill.core.secrets import reveal


def take_options(env: Any, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` for the resets of `env` (Gymnasium's or PettingZoo's, in its
    wrappers), with what references in them stand for. Raises `ConfigError` where it, or
    one of its wrappers, takes none: found out without a reset."""
    layer = env
    while layer is not None:
        reset = getattr(layer, "reset", None)
        try:
            known = inspect.signature(reset).parameters if callable(reset) else {}
        except ValueError:  # made in C, it does not say
            known = {}
        if (
            known
            and "options" not in known
            and not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
        ):
            raise ConfigError(
                f"{name}: {type(layer).__name__}.reset({', '.join(known)}) takes no options, so that the "
                "experiment can have no curriculum; give it the argument options=None, and have it read "
                "there what the stages say"
            )
        layer = vars(layer).get("env") if hasattr(layer, "__dict__") else None
    return dict(reveal(options))


def reset_env(env: Any, seed: int | None, options: Mapping[str, Any] | None) -> Any:
    """Reset `env`, with a copy of `options` where there are any; return its answer."""
    return env.reset(seed=seed) if options is None else env.reset(seed=seed, options=dict(options))
