"""Modules that have moved, and names in modules that are others now, for those who import
them as they were called before: the old name still works, and a DeprecationWarning tells
the new one."""

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The old name of each module that a page or an example named, and its new name.
MOVED = {
    "tidemill.algorithms.post": "tidemill.algorithms.post_processors",
    "tidemill.api.control": "tidemill.api.control_messages",
    "tidemill.api.external_references": "tidemill.api.external_code",
    "tidemill.api.label": "tidemill.api.policy_header",
    "tidemill.api.outside": "tidemill.api.external_code",
    "tidemill.bridge.channels": "tidemill.bridge.protocol.side_channels",
    "tidemill.bridge.environment": "tidemill.bridge.trainer_side.environment",
    "tidemill.bridge.files": "tidemill.bridge.protocol.files",
    "tidemill.bridge.generate": "tidemill.bridge.protocol.generate",
    "tidemill.bridge.gymnasium": "tidemill.bridge.trainer_side.gymnasium",
    "tidemill.bridge.pettingzoo": "tidemill.bridge.trainer_side.pettingzoo",
    "tidemill.bridge.record": "tidemill.bridge.kit.record",
    "tidemill.bridge.protocol.channels": "tidemill.bridge.protocol.side_channels",
    "tidemill.bridge.simulator": "tidemill.bridge.trainer_side.simulator",
    "tidemill.bridge.sources": "tidemill.bridge.world_side.sources",
    "tidemill.bridge.spaces": "tidemill.bridge.trainer_side.spaces",
    "tidemill.bridge.specs": "tidemill.bridge.protocol.specs",
    "tidemill.bridge.world": "tidemill.bridge.world_side.world",
    "tidemill.core.checkpoint": "tidemill.store.checkpoint",
    "tidemill.core.query": "tidemill.store.query",
    "tidemill.core.source": "tidemill.core.user_code",
    "tidemill.core.versions": "tidemill.store.parameter_database",
    "tidemill.envs.check": "tidemill.testing.check_env",
    "tidemill.envs.openenv": "tidemill.remote.openenv",
    "tidemill.envs.rest": "tidemill.remote",
    "tidemill.envs.rest.config": "tidemill.remote.rest_config",
    "tidemill.envs.rest.sessions": "tidemill.remote.server_sessions",
    "tidemill.envs.scripted": "tidemill.testing.scripted",
    "tidemill.envs.slots": "tidemill.envs.fault_tolerant",
    "tidemill.nets.device": "tidemill.nets.choose_device",
    "tidemill.run.arrange": "tidemill.layouts.auto_layout",
    "tidemill.run.evaluate": "tidemill.trained.evaluate",
    "tidemill.run.layout": "tidemill.layouts.layout",
    "tidemill.run.load": "tidemill.trained.load",
    "tidemill.run.metrics": "tidemill.metrics.json_lines",
    "tidemill.run.play": "tidemill.trained.play",
    "tidemill.run.plot": "tidemill.trained.plot",
    "tidemill.run.presets": "tidemill.presets.experiments",
    "tidemill.run.probe": "tidemill.layouts.probe",
    "tidemill.run.provenance": "tidemill.run.source_info",
    "tidemill.run.resolve": "tidemill.presets.environment_names",
    "tidemill.run.retrain": "tidemill.trained.retrain",
    "tidemill.run.runners": "tidemill.training.runners",
    "tidemill.run.session": "tidemill.training.train",
    "tidemill.workers.buffers": "tidemill.workers.buffer_worker",
    "tidemill.workers.frames": "tidemill.envs.frame_stack",
}

# Of each module: old names in it, and what they are called there now.
RENAMED = {
    "tidemill.api.buffer": {"Held": "BufferedSample"},
    "tidemill.api.control_messages": {"Tallied": "EnvironmentStatistics"},
    "tidemill.core.tally": {"Told": "TallyEntry"},
}


class MovedModules:
    """The finder of modules by their old names. It is asked before all others, which
    would find the modules of a moved package a second time."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what loads a moved module, and None for all other names."""
        return ModuleSpec(fullname, self) if new_name(fullname) else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to make the module that `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name in the place of the old one."""
        old, new = module.__name__, new_name(module.__name__)
        warnings.warn(f"{old} is called {new} now", DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(new)


def new_name(old: str) -> str:
    """Return the new name of a module, or of one in a package that moved; "" for
    others."""
    package, _, module = old.rpartition(".")
    return MOVED.get(old) or (f"{MOVED[package]}.{module}" if package in MOVED else "")


def find_moved_modules() -> None:
    """Let the old names be imported in this process."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())


def renamed(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module some of whose names are `RENAMED`."""

    def find(name: str) -> Any:
        if (new := RENAMED[module].get(name)) is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is called {new} now", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], new)

    return find
