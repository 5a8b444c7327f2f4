"""Modules that have moved, and names in modules that are others now, for those who import
them as they were called before: the old name still works, and a DeprecationWarning tells
the new one."""

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NoReturn

# Packages of which modules went to another one with their last names.
_REHOUSED = (
    (
        "bridge",
        "bridge.trainer_side",
        ("environment", "gymnasium", "lanes", "pettingzoo", "seats", "simulator", "spaces"),
    ),
    ("bridge", "bridge.protocol", ("files", "generate", "specs", "tables")),
    ("run", "trained", ("evaluate", "load", "play", "plot", "retrain")),
    ("workers", "replay_training", ("exact", "open_episodes", "phases")),
)
# The old name of each module that a page or an example named, and its new name.
MOVED = {
    **{f"tidemill.{old}.{name}": f"tidemill.{new}.{name}" for old, new, names in _REHOUSED for name in names},
    **{
        f"tidemill.algorithms.{name}_learner": f"tidemill.algorithms.{name}"
        for name in ("dqn", "impala", "ppo", "sac")
    },
    **{
        f"tidemill.nets.{name}_policy": f"tidemill.nets.{name}"
        for name in ("actor_critic", "recurrent", "squashed_gaussian", "torch_network")
    },
    "tidemill.algorithms.batch": "tidemill.algorithms.minibatches",
    "tidemill.algorithms.chunks": "tidemill.algorithms.minibatches",
    "tidemill.algorithms.formulas": "tidemill.algorithms.policy_gradient_formulas",
    "tidemill.algorithms.library": "tidemill.algorithms.array_library",
    "tidemill.algorithms.post": "tidemill.algorithms.post_processors",
    "tidemill.algorithms.random_state": "tidemill.algorithms.learner_state",
    "tidemill.algorithms.value_formulas": "tidemill.algorithms.action_value_formulas",
    "tidemill.api.control": "tidemill.api.control_messages",
    "tidemill.api.label": "tidemill.api.weights_header",
    "tidemill.api.outside": "tidemill.api.external_code",
    "tidemill.bench.measure": "tidemill.bench.efficiency",
    "tidemill.bridge.channels": "tidemill.bridge.protocol.side_channels",
    "tidemill.bridge.play": "tidemill.bridge.kit.trial_trainer",
    "tidemill.bridge.record": "tidemill.bridge.kit.record",
    "tidemill.bridge.sources": "tidemill.bridge.world_side.language_files",
    "tidemill.bridge.turns": "tidemill.bridge.protocol.handover",
    "tidemill.bridge.world": "tidemill.bridge.world_side.world",
    "tidemill.core.checkpoint": "tidemill.store.checkpoint",
    "tidemill.core.loops": "tidemill.core.asyncio_loops",
    "tidemill.core.output": "tidemill.core.forgiving_output",
    "tidemill.core.packed": "tidemill.core.safetensors_io",
    "tidemill.core.query": "tidemill.store.query",
    "tidemill.core.reading": "tidemill.core.untrusted_files",
    "tidemill.core.rings": "tidemill.core.bell_batching",
    "tidemill.core.source": "tidemill.core.user_code_loading",
    "tidemill.core.threads": "tidemill.core.blas_threads",
    "tidemill.core.versions": "tidemill.store.parameter_database",
    "tidemill.envs.check": "tidemill.testing.check_env",
    "tidemill.envs.making": "tidemill.envs.parallel_build",
    "tidemill.envs.openenv": "tidemill.remote.openenv",
    "tidemill.envs.rest": "tidemill.remote",
    "tidemill.envs.rest.config": "tidemill.remote.rest_config",
    "tidemill.envs.rest.sessions": "tidemill.remote.server_sessions",
    "tidemill.envs.scripted": "tidemill.testing.scripted",
    "tidemill.envs.slots": "tidemill.envs.fault_tolerant",
    "tidemill.nets.device": "tidemill.nets.choose_device",
    "tidemill.nets.device_acting": "tidemill.nets.gpu_acting",
    "tidemill.nets.q_policy": "tidemill.nets.q_network",
    "tidemill.nets.torch_device": "tidemill.nets.torch_copies",
    "tidemill.nets.torch_policy": "tidemill.nets.torch_backend",
    "tidemill.nets.torch_recurrent": "tidemill.nets.torch_actor_critic",
    "tidemill.nets.towers": "tidemill.nets.mlp",
    "tidemill.replay.journal": "tidemill.replay.retrain_journal",
    "tidemill.replay.store": "tidemill.replay.row_storage",
    "tidemill.run.arrange": "tidemill.layouts.auto_layout",
    "tidemill.run.layout": "tidemill.layouts.layout",
    "tidemill.run.life": "tidemill.run.run_lifecycle",
    "tidemill.run.metrics": "tidemill.metrics.json_lines",
    "tidemill.run.plan": "tidemill.layouts.memory_plan",
    "tidemill.run.presets": "tidemill.presets.experiments",
    "tidemill.run.probe": "tidemill.layouts.probe",
    "tidemill.run.provenance": "tidemill.run.source_info",
    "tidemill.run.reached": "tidemill.run.episode_windows",
    "tidemill.run.resolve": "tidemill.presets.environment_names",
    "tidemill.run.runners": "tidemill.training.iteration_runners",
    "tidemill.run.session": "tidemill.training.train",
    "tidemill.streams.sums": "tidemill.streams.all_reduce",
    "tidemill.workers.actor_memory": "tidemill.workers.actor_limits",
    "tidemill.workers.blocks": "tidemill.workers.sample_writers",
    "tidemill.workers.buffers": "tidemill.workers.buffer_worker",
    "tidemill.workers.counters": "tidemill.workers.trainer_counters",
    "tidemill.workers.frames": "tidemill.envs.frame_stack",
    "tidemill.workers.gang": "tidemill.replay_training.ready_environments",
    "tidemill.workers.intake": "tidemill.replay_training.ingest",
    "tidemill.workers.iterations": "tidemill.replay_training.iteration_evaluation",
    "tidemill.workers.limited": "tidemill.replay_training.trainer",
    "tidemill.workers.rating": "tidemill.workers.elo_rating",
    "tidemill.workers.records": "tidemill.workers.version_metadata",
    "tidemill.workers.rows": "tidemill.workers.row_schema",
    "tidemill.workers.said": "tidemill.workers.info_numbers",
    "tidemill.workers.shares": "tidemill.replay_training.credit_grants",
    "tidemill.workers.stepwise": "tidemill.replay_training.transitions",
}

# Of each module: old names in it, and what they are called now: a name in it, or of
# another module, "MODULE:NAME".
RENAMED = {
    "tidemill.api.curriculum": {
        name: f"tidemill.api.conditions:{name}"
        for name in ("PROGRESS", "episode_metric", "episode_metrics", "holds")
    },
    "tidemill.api.buffer": {"Counts": "SampleCounts", "Held": "BufferedSample"},
    "tidemill.api.control_messages": {"Statistics": "WorkerStatistics", "Tallied": "EnvironmentStatistics"},
    "tidemill.api.experiment": {name: f"tidemill.api.worker:{name}" for name in ("Context", "WorkerHandle")},
    "tidemill.bridge.kit.record": {
        name: f"tidemill.bridge.kit.playback:{name}"
        for name in ("Playback", "PlaybackResult", "RecordedSideChannels", "replay")
    },
    "tidemill.core.tally": {"Told": "TallyEntry"},
    "tidemill.layouts.layout": {
        **{name: f"tidemill.layouts.costs:{name}" for name in ("Costs", "microseconds", "waits")},
        **{name: f"tidemill.layouts.choice:{name}" for name in ("choose", "pace", "promises", "trained")},
        **{
            name: f"tidemill.layouts.experiment_layout:{name}"
            for name in ("apply", "by_turns", "layout_of", "of_layout", "why_unchanged")
        },
    },
    "tidemill.envs.frame_stack": {
        "build_environment": "tidemill.workers.actor_environments:build_environment",
        "seen_by": "tidemill.workers.actor_environments:seen_by",
    },
    "tidemill.envs.lanes": {"Gymnasium": "tidemill.envs.plain_gymnasium:Gymnasium"},
    "tidemill.envs.spaces": {"to_gymnasium": "tidemill.api.spaces:to_gymnasium"},
    "tidemill.layouts.auto_layout": {"Arranged": "LaidOut", "arrange": "lay_out"},
    "tidemill.metrics.json_lines": {
        "MetricsWriter": "tidemill.metrics.writer:MetricsWriter",
        **{name: f"tidemill.metrics.record_pace:{name}" for name in ("BURST", "RATE")},
    },
    "tidemill.nets.trainable": {"Evaluation": "ActionEvaluation"},
    "tidemill.presets.experiments": {
        "off_policy": "tidemill.presets.off_policy:off_policy",
        "run_name": "tidemill.presets.base:run_name",
        **{
            name: f"tidemill.presets.ppo:{name}"
            for name in ("atari", "kinds_of", "ppo", "several", "simulated")
        },
    },
    "tidemill.replay.limiter": {"Counts": "LimiterCounts"},
    "tidemill.trained.evaluate": {"Evaluation": "EvaluationResult"},
    "tidemill.workers.actor": {
        "ENDLESS_TICKS": "tidemill.workers.parameter_refresh:ENDLESS_TICKS",
        "PULL_TICKS": "tidemill.workers.parameter_refresh:PULL_TICKS",
    },
    "tidemill.workers.actor_config": {"match_agents": "tidemill.workers.agent_spec:match_agents"},
}

_TUNED = 'gone; experiment_for("CartPole-v1", environment) is what is tuned for that name'
_OFF_POLICY = 'gone; experiment_for(name, environment, "dqn"), or "sac", is what it made'
_UNTUNED = "gone; PPO() is what it was"
_TABLES = "gone; presets_of(algorithm).tuned has them, by the name of an environment"
# Of each module: old names in it that nothing is called any more, and what to do instead.
GONE = {
    "tidemill.presets.experiments": {
        **dict.fromkeys(("acrobot", "cartpole", "half_cheetah", "lunar_lander", "pendulum"), _TUNED),
        **dict.fromkeys(("dqn", "dqn_atari", "dqn_cartpole", "dqn_minatar"), _OFF_POLICY),
        **dict.fromkeys(("sac", "sac_half_cheetah"), _OFF_POLICY),
        **dict.fromkeys(("OFF_POLICY", "TUNED", "TUNED_OFF_POLICY"), _TABLES),
        "UNTUNED": _UNTUNED,
    },
    "tidemill.presets.ppo": {"UNTUNED": _UNTUNED},
}


class MovedModules:
    """The finder of what is asked for by an old name. It is asked before all others,
    which would find the modules of a moved package a second time."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what loads a moved module, or one that has `RENAMED` or `GONE` names;
        None for all others."""
        if new_name(fullname):
            return ModuleSpec(fullname, self)  # type: ignore[arg-type]
        spec = PathFinder.find_spec(fullname, path) if fullname in {*RENAMED, *GONE} else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_run, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to make the module that `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name in the place of the old one."""
        old, new = module.__name__, new_name(module.__name__)
        warnings.warn(f"{old} is called {new} now", DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(new)


def _run(exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run a module, and have it know its old names."""
    module.__getattr__ = partial(_find, module)  # type: ignore[method-assign]
    exec_module(module)


def _find(module: ModuleType, name: str) -> Any:
    """Return what an old name in a module stands for now: its ``__getattr__``."""
    here = module.__name__
    if name in GONE.get(here, {}):
        raise ImportError(f"{here}.{name} is {GONE[here][name]}")  # an AttributeError would not be read
    if name not in RENAMED.get(here, {}):
        raise AttributeError(f"module {here!r} has no attribute {name!r}")
    place, _, new = RENAMED[here][name].rpartition(":")
    warnings.warn(f"{here}.{name} is called {place or here}.{new} now", DeprecationWarning, stacklevel=2)
    return getattr(import_module(place or here), new)


def new_name(old: str) -> str:
    """Return the new name of a module, or of one in a package that moved; "" for
    others."""
    package, _, module = old.rpartition(".")
    return MOVED.get(old) or (f"{MOVED[package]}.{module}" if package in MOVED else "")


def find_moved_modules() -> None:
    """Let the old names be imported in this process."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())


class Gone:
    """An attribute that a class had once: who asks for it is told what to take
    `instead`."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._text = f"{owner.__name__}.{name} is gone; take {self._instead}"

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise AttributeError(self._text)
