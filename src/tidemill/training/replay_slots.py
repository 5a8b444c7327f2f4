"""Experiments in slots: environments that step at the same time, and may fail, with a
ratio of training to steps."""

from typing import Any

from tidemill.api.experiment import Experiment
from tidemill.api.worker import WorkerConfig
from tidemill.core.errors import ConfigError
from tidemill.envs.fault_tolerant import Slots
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.presets.fitting_algorithms import from_replay_memories
from tidemill.replay.limiter import parse_ratio
from tidemill.replay_training.actor_config import ReplayActors
from tidemill.replay_training.trainer_config import ReplayTrainer
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.trainer_config import TrainerConfig


def with_slots(
    experiment: Experiment, slots: int | None = None, ratio: str | int | None = None, **trainer: Any
) -> Experiment:
    """Return `experiment` with so many slots, and that ratio: its actors become one, with
    a target of one lane for each slot, whose environment steps in a thread of its own and
    may fail. `trainer` are further settings of its trainer. What is None stays.

    Raises `ConfigError` for an experiment that has no replay memory, or several trainers.
    """
    workers: dict[str, WorkerConfig] = {**experiment.workers}
    trainers = experiment.groups(TrainerConfig)
    if len(trainers) != 1:
        raise ConfigError(
            f"slots and ratios go with one trainer, and the experiment has {len(trainers)} "
            f"({', '.join(trainers)}); write them into it"
        )
    ((name, config),) = trainers.items()
    if not isinstance(config, ReplayTrainer):
        raise ConfigError(
            f"slots and ratios go with a replay memory, and {name} is a {type(config).__name__}: "
            f"{type(config.algorithm).__name__} learns from what its own policy has just done. Take what has "
            f"a replay memory, --algorithm {from_replay_memories()}, or leave slots and ratios out: then "
            "environments play in lanes that wait for the slowest, and those that fail are made anew"
        )
    if ratio is not None:
        parse_ratio(ratio)
        trainer["ratio"] = ratio
    workers[name] = config = config.replace(**trainer)
    if slots is not None:
        if slots < 1:
            raise ConfigError(f"slots = {slots} must be at least 1")
        for group, actors in experiment.groups(ActorConfig).items():
            for spec in actors.agents:
                if config.samples in spec.streams:
                    workers[group] = _in_slots(ReplayActors.like(actors, spec), slots)
    return experiment.replace(workers=workers)


def by_turns(experiment: Experiment, launch: str) -> Experiment:
    """Return `experiment` as it is to be launched: in "threads" the actor of slots and
    the trainer take turns in one thread, unless the trainer has a slack of its own, or it
    is said already who takes turns. Only one of both could compute at a time, and handing
    over takes longer than many a task."""
    groups = [
        name
        for name, config in experiment.groups(ReplayActors).items()
        if isinstance(config.environment, Slots)
    ]
    trainers = [name for name, config in experiment.groups(ReplayTrainer).items() if config.slack is None]
    if launch != "threads" or experiment.together or not groups or not trainers:
        return experiment
    return experiment.replace(together=(groups[0], trainers[0]))


def _in_slots(actors: ReplayActors, slots: int) -> ReplayActors:
    environment = actors.environment
    if isinstance(environment, Gymnasium) and not environment.threads:
        environment = environment.replace(threads=1)
    if not isinstance(environment, Slots):
        environment = Slots(environment=environment)
    return actors.replace(environment=environment, count=1, lanes=1, ring=slots, flush_requests=1)
