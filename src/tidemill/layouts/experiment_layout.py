"""The layout that an experiment has, and the experiment with another one."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from tidemill.api.experiment import Experiment
from tidemill.api.worker import WorkerConfig
from tidemill.core.config import LAYOUT, Config
from tidemill.core.errors import ConfigError
from tidemill.envs.fault_tolerant import Slots
from tidemill.layouts.layout import Layout
from tidemill.nets.choose_device import choose_device
from tidemill.replay_training.actor_config import ReplayActors
from tidemill.replay_training.trainer_config import ReplayTrainer
from tidemill.workers.actor import INLINE, Actors
from tidemill.workers.trainer_config import Trainer


class ActorsAndTrainers:
    """The one group of actors and the one of trainers of an experiment. Raises
    `ConfigError` for any other experiment, saying why."""

    def __init__(self, experiment: Experiment) -> None:
        groups = {
            kind: [(n, c) for n, c in experiment.workers.items() if type(c) is kind]
            for kind in (Actors, Trainer)
        }
        others = [name for name, config in experiment.workers.items() if type(config) not in groups]
        if others:
            raise ConfigError(f"it has workers of other kinds ({', '.join(others)})")
        for kind, found in groups.items():
            if len(found) != 1:
                raise ConfigError(f"it has {len(found)} groups of {kind.__name__}")
        (self.actor, actors), (self.trainer, trainer) = groups[Actors][0], groups[Trainer][0]
        assert isinstance(actors, Actors) and isinstance(trainer, Trainer)
        self.actors, self.trainers = actors, trainer
        if asked := [spec.inference for spec in actors.agents if spec.inference != INLINE]:
            raise ConfigError(f'its actors ask policy workers ("{asked[0]}")')
        self.sampled = [spec for spec in actors.agents if spec.streams]
        if modes := [spec.mode for spec in self.sampled if spec.mode != "fixed"]:
            raise ConfigError(f'its actors send samples of mode "{modes[0]}"')
        steps = {spec.sample_steps for spec in self.sampled}
        if len(steps) != 1:
            raise ConfigError(f"its agent specs have {len(steps)} different sample_steps")
        (self.steps,) = steps
        self.threads: int | None = getattr(actors.environment, "threads", None)
        """The environment's setting, None where it has none."""


def layout_of(experiment: Experiment) -> Layout:
    """Return the layout that an experiment has. Raises `ConfigError` where that is more
    than a `Layout` can say."""
    parts = ActorsAndTrainers(experiment)
    actors, trainers = parts.actors, parts.trainers
    return Layout(
        actors=actors.count,
        trainers=trainers.count,
        together=set(experiment.together) == {parts.actor, parts.trainer},
        lanes=actors.lanes,
        sample_steps=parts.steps,
        ring=actors.ring,
        slots=actors.slots,
        threads=parts.threads,
        one_core=actors.one_core,
    )


def apply(experiment: Experiment, layout: Layout) -> Experiment:
    """Return the experiment laid out so, and changed in nothing else. Raises
    `ConfigError` where that cannot be."""
    try:
        parts = ActorsAndTrainers(experiment)
    except ConfigError as error:
        raise ConfigError(
            f"--layout {layout}: the experiment cannot be laid out, since {error}; use --layout given"
        ) from None
    environment = parts.actors.environment
    if layout.threads is not None:
        if parts.threads is None:
            kind = type(environment).__name__
            raise ConfigError(
                f"--layout {layout}: a {kind} environment has no threads; leave threads={layout.threads} out"
            )
        environment = environment.replace(threads=layout.threads)
    specs = tuple(
        spec if not spec.streams else spec.replace(sample_steps=layout.sample_steps)
        for spec in parts.actors.agents
    )
    actors = parts.actors.replace(
        count=layout.actors,
        one_core=layout.one_core,
        lanes=layout.lanes,
        ring=layout.ring,
        flush_requests=1 if layout.ring * len(specs) == 1 else parts.actors.flush_requests,
        slots=layout.slots,
        agents=specs,
        environment=environment,
    )
    workers = {
        **experiment.workers,
        parts.actor: actors,
        parts.trainer: parts.trainers.replace(count=layout.trainers),
    }
    return experiment.replace(
        workers=workers, together=(parts.actor, parts.trainer) if layout.together else ()
    )


def of_layout(experiment: Experiment, paths: Collection[str]) -> list[str]:
    """Return those of the paths of settings that are a matter of layout: fields that are
    marked so (`layout_setting`), what lies in them, and workers as a whole."""
    return [path for path in paths if _lays_out(experiment, path.split("."))]


def _lays_out(config: Any, parts: list[str]) -> bool:
    for part in parts:
        if isinstance(config, Mapping):
            config = config.get(part)
            continue
        found = [each for each in fields(config) if each.name == part] if isinstance(config, Config) else []
        if not found or LAYOUT in found[0].metadata:
            return bool(found)
        config = getattr(config, part)
    return isinstance(config, WorkerConfig) or parts == ["workers"]


def why_unchanged(experiment: Experiment, fixed: Collection[str] = ()) -> str:
    """Return why an experiment is run as it is given, "" when its layout may be chosen.
    `fixed` are the paths of settings that the user made."""
    if own := of_layout(experiment, fixed):
        return f"{own[0]} was set"
    try:
        parts = ActorsAndTrainers(experiment)
    except ConfigError as error:
        return str(error)
    actors, trainers = f"workers.{parts.actor}", f"workers.{parts.trainer}"
    of_both = ((actors, parts.actors), (trainers, parts.trainers))
    reasons = (
        *((each.count > 1, f"{name}.count is {each.count}") for name, each in of_both),
        (experiment.together, "together is set"),
        *((each.math_threads > 1, f"{name}.math_threads is {each.math_threads}") for name, each in of_both),
        (parts.actors.ring > 1, f"{actors}.ring is {parts.actors.ring}"),
        *((each.one_core, f"{name}.one_core is set") for name, each in of_both),
        (parts.actors.environment.single, "there is one environment, and no more"),
        (parts.threads, f"{actors}.environment.threads is {parts.threads}"),
        (parts.trainers.batch_size is not None, f"{trainers}.batch_size is set"),
    )
    if why := next((reason for holds, reason in reasons if holds), ""):
        return why
    # the device is looked at last, since that may import torch
    device = choose_device("auto", 0) if parts.trainers.device == "auto" else parts.trainers.device
    if device != "cpu":  # costs are measured on cores
        return f"{trainers}.device is {device}"
    if not isinstance(getattr(parts.trainers.algorithm, "minibatch_size", None), int):
        return f"{type(parts.trainers.algorithm).__name__} has no minibatch_size"
    return ""


def by_turns(experiment: Experiment, fixed: Collection[str] = ()) -> Experiment:
    """Return an experiment with a replay memory and a ratio so that its actor and its
    trainer take turns in one process: all that is owed is trained before a tick of all
    lanes begins (a slack of as many), since lanes that step there gain nothing by being
    ahead, and a hand-over between processes takes longer than many an update. Others are
    returned as they are: with a slack of their own, several actors or trainers, other
    workers, or lanes that step in threads of Python or may fail."""
    kinds = {type(config): name for name, config in experiment.workers.items()}
    if (
        set(kinds) != {ReplayActors, ReplayTrainer}
        or len(experiment.workers) != 2
        or experiment.together
        or "together" in fixed
    ):
        return experiment
    actors, trainer = experiment.workers[kinds[ReplayActors]], experiment.workers[kinds[ReplayTrainer]]
    assert isinstance(actors, ReplayActors) and isinstance(trainer, ReplayTrainer)
    apart = isinstance(actors.environment, Slots) or bool(getattr(actors.environment, "threads", None))
    if (
        apart
        or trainer.ratio is None
        or trainer.slack is not None
        or (actors.count, trainer.count, actors.ring) != (1, 1, 1)
    ):
        return experiment
    workers = {**experiment.workers, kinds[ReplayTrainer]: trainer.replace(slack=actors.lanes)}
    return experiment.replace(workers=workers, together=(kinds[ReplayActors], kinds[ReplayTrainer]))
