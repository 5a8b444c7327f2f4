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

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.core import config
from tidemill.core.moved import find_moved_modules

if TYPE_CHECKING:
    from tidemill.public_names import *  # noqa: F403

__version__ = "0.1.0"


_LINE = re.compile(r"^from (\S+) import (\w+) as", re.MULTILINE)
_names = Path(__file__).with_name("public_names.py").read_text(encoding="utf-8")
_public = {name: module for module, name in _LINE.findall(_names)}
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
    return sorted({*globals(), *__all__})
