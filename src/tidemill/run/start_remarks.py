"""What is said of an experiment at its start: what its user may expect otherwise, and
that the native core computes."""

import os
import platform
from collections.abc import Iterator

from tidemill.api.experiment import Experiment
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.native.library import VARIABLE, unavailable
from tidemill.nets.native_setting import NativeSetting
from tidemill.presets.fitting_algorithms import from_replay_memories
from tidemill.replay_training.trainer_config import ReplayTrainer
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.trainer_config import Trainer, TrainerConfig


def remarks(experiment: Experiment) -> Iterator[str]:
    """Yield a sentence for each limit that is worth a word."""
    for name, actors in experiment.groups(ActorConfig).items():
        if actors.environment.remote:
            yield _remote(experiment, name, actors)
        single = actors.environment
        if isinstance(single, Gymnasium) and single.slowed_by_wrappers:
            yield (
                f"lanes of {single.name} step one after the other, since wrappers are around each "
                f"({', '.join(single.wrap)}); without, all would step at once"
            )
    for name, policy in experiment.policies.items():
        if isinstance(policy, NativeSetting) and (kernels := policy.kernels()):
            core = f"the native core ({kernels.instruction_set})"
            if kernels.best == "baseline" and platform.machine() == "x86_64":
                lacks = "this processor has no"
                if kernels.processor != "baseline":
                    lacks = "the core was built without"
                core += f", in code for any processor ({lacks} AVX2),"
            yield f"{core} computes policy {name} where it is an MLP on a CPU"
    for name, config in experiment.groups(Trainer).items():
        rows = [
            actors.lanes * spec.sample_steps
            for actors in experiment.groups(ActorConfig).values()
            for spec in actors.agents
            if config.samples in spec.streams and spec.mode == "fixed"
        ]
        minibatch, size = getattr(config.algorithm, "minibatch_size", None), config.batch_size
        if minibatch and size and size < min(rows, default=0):
            yield (
                f"batch_size = {size} of {name} is less than one sample has, and samples are "
                f"taken whole: batches have {min(rows):,} rows and more. What Stable-Baselines3 calls so is "
                f"minibatch_size here ({minibatch:,})"
            )
    yield from numpy_instead(experiment)


def numpy_instead(experiment: Experiment) -> Iterator[str]:
    """Yield why numpy computes MLPs, or a part of them, where the native core could be
    asked to: it lacks a setting, or is not there."""
    if os.environ.get(VARIABLE) == "off":
        return
    policies = {
        name: policy for name, policy in experiment.policies.items() if isinstance(policy, NativeSetting)
    }
    why = unavailable("auto")
    for name, policy in policies.items():
        if slow := policy.beyond_core:
            yield f"numpy computes policy {name} where it is an MLP on a CPU: the native core has no {slow}"
        elif (slow := policy.beside_core) and policy.native != "off" and not why:
            yield (
                f"numpy computes what {slow} of policy {name} adds: where it is an MLP on a CPU, the native "
                "core can compute its layers alone"
            )
    able = any(policy.in_core for policy in policies.values())
    if able and why:
        yield f"numpy computes MLPs, since the native core cannot be used: {why}"


def _remote(experiment: Experiment, name: str, actors: ActorConfig) -> str:
    """Say what a server's environments are without slots."""
    sessions = actors.count * actors.ring * actors.lanes
    streams = {stream for spec in actors.agents for stream in spec.streams}
    fed = [config for config in experiment.groups(TrainerConfig).values() if config.samples in streams]
    slots = f"--slots {sessions}" + (
        ""
        if fed and all(isinstance(config, ReplayTrainer) for config in fed)
        else f" --algorithm {from_replay_memories()}"
    )
    waits = f"Each step of {actors.lanes} lanes takes as long as the slowest. " if actors.lanes > 1 else ""
    lost = "Where a step is lost, the episodes of all of them are cut, and begin anew (lane_restarts)."
    learner = " and ".join(dict.fromkeys(type(config.algorithm).__name__ for config in fed)) or name
    return (
        f"{learner} plays {sessions} session{'s' * (sessions > 1)} of the server. {waits}{lost} Slots wait "
        f"for nobody, and a lost step is that slot's alone: {slots}"
    )
