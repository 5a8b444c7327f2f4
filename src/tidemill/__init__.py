"""Tidemill trains reinforcement-learning agents. Workers are joined by streams; the same
experiment runs in one thread, in threads, or in processes over shared memory.

    import tidemill

    result = tidemill.train("CartPole-v1", mean_return=475)
    action = result.policy.act(observation)

An experiment says more: which workers there are, and which streams join them.

    from tidemill import PPO, ActorCritic, Actors, Experiment, Gymnasium, Limits, Trainer

    result = tidemill.train(Experiment(
        name="cartpole",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(environment=Gymnasium(id="CartPole-v1")),
            "trainer": Trainer(algorithm=PPO()),
        },
        limits=Limits(mean_return=475.0),
    ))

Importing this imports no torch: a policy's `build` does.
"""

from typing import TYPE_CHECKING, Any

from tidemill.core import config
from tidemill.core.moved import find_moved_modules

if TYPE_CHECKING:
    from tidemill.public_names import *  # noqa: F403

__version__ = "0.1.0"


def _read_public_names() -> dict[str, str]:
    """Return the module of each public name: the import statements of `public_names` are
    run by an import that only notes them."""
    from importlib.util import find_spec
    from types import SimpleNamespace

    noted: dict[str, str] = {}

    def note(module: str, _globals: Any, _locals: Any, names: tuple[str, ...], _level: int) -> Any:
        noted.update(dict.fromkeys(names, module))
        return SimpleNamespace(**dict.fromkeys(names))

    spec: Any = find_spec(f"{__name__}.public_names")
    exec(spec.loader.get_code(spec.name), {"__builtins__": {"__import__": note}})
    return noted


_public = _read_public_names()
__all__ = sorted(_public)
# And names that are no longer public: environments for tests.
_MODULES = {**_public, **dict.fromkeys(("Free", "Scripted"), "tidemill.testing.scripted")}

config.homes.update(_MODULES)
find_moved_modules()


def __getattr__(name: str) -> Any:
    """Import what is public when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
