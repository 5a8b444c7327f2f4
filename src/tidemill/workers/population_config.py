"""The configuration of a population: who its members are, what is explored, and when it
decides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar

from tidemill.api.control_messages import Adopt
from tidemill.api.edges import Port
from tidemill.api.experiment import Experiment
from tidemill.api.worker import Context, WorkerConfig, WorkerHandle
from tidemill.core.config import acting
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.workers.actor_config import ActorConfig, Actors
from tidemill.workers.evaluation import Evaluation
from tidemill.workers.trainer_config import TrainerConfig, check_pushed
from tidemill.workers.version_metadata import with_settings

PREFIX = "population/"
FROM, FROM_VERSION = f"{PREFIX}from", f"{PREFIX}from_version"
"""What is recorded of a version that was decided on: the number of the member from which
it goes on, its own where it goes on by itself, and from which version."""


@dataclass(frozen=True, kw_only=True)
class Population(WorkerConfig):
    """A population manager does population-based training (Jaderberg et al. 2017): at
    intervals, each of the worst members takes over the weights and settings of one of the
    best, with those settings changed.

    members: the policies of the population, each with one trainer of its own that stores
        versions
    explore: settings of the members' algorithms that are explored, with their bounds:
        ``{"learning_rate": (1e-5, 1e-2)}``; they may begin outside
    updates: updates that every member does between two decisions, for which each waits
        for the others; to go on from another counts as one. None: it is decided by
        `steps`, and nobody waits
    steps: env steps that every member trains between two decisions: many enough that what
        it reaches is that of its present weights and settings
    metric: what is recorded of versions by which members are compared; higher is better.
        "training_return" is the mean return of the last 100 training episodes
    quantile: a member among so large a share of the worst goes on from one among as large
        a share of the best, which is drawn
    factors: numbers of which one is drawn to multiply each setting that was taken over
    resample: probability that such a setting is drawn anew instead, between its bounds,
        its logarithm uniformly

    Metrics are ``population/best`` and ``population/mean``, with each decision; and when
    member N (from 0) goes on from another ``population/N/from`` (the other's number),
    ``/from_version`` (which of its versions), ``/version`` (as which), and each of its
    settings: the lineage.
    """

    order: ClassVar[int] = 5

    members: tuple[str, ...]
    explore: dict[str, tuple[float, float]]
    updates: int | None = None
    steps: int = acting(
        50_000, lambda population: population.updates is None, "with updates, which say when it is decided"
    )
    metric: str = "training_return"
    quantile: float = 0.25
    factors: tuple[float, ...] = acting(
        (0.8, 1.25), lambda population: bool(population.explore), "without settings to explore"
    )
    resample: float = acting(0.25, lambda population: bool(population.explore), "without settings to explore")

    def __post_init__(self) -> None:
        if self.count != 1:
            raise ConfigError(f"count = {self.count}: one worker manages a population")
        if len(set(self.members)) < max(2, len(self.members)):
            raise ConfigError(f"members = {self.members} must be at least two different policies")
        self.check_least(steps=1, updates=2)
        if not 0 < self.quantile <= 0.5:
            raise ConfigError(
                f"quantile = {self.quantile} must be above 0 and at most 0.5; a quarter is usual"
            )
        if not self.factors or not all(isfinite(factor) and factor > 0 for factor in self.factors):
            raise ConfigError(f"factors = {self.factors} must be positive numbers; (0.8, 1.25) is usual")
        self.check_shares("resample")
        for name, bounds in self.explore.items():
            if len(bounds) != 2:
                raise ConfigError(
                    f"explore: {bounds} of {name} must be two numbers, its lower and its upper bound"
                )
            low, high = bounds
            if not 0 < low <= high < float("inf"):
                raise ConfigError(
                    f"explore: the bounds {low} and {high} of {name} must be positive, the lower one first"
                )
        super().__post_init__()

    def ports(self) -> tuple[Port, ...]:
        return tuple(Port(member, "draw") for member in self.members)

    def measures(self) -> tuple[str, ...]:
        own = ("from", "from_version", "version", *self.explore)
        return (
            "population/best",
            "population/mean",
            *(f"population/{number}/{name}" for number in range(len(self.members)) for name in own),
        )

    def records(self) -> tuple[str, ...]:
        return () if self.updates is None else (FROM, FROM_VERSION, *map(recorded_as, self.explore))

    @property
    def goes_on_without(self) -> str:
        return "its members go on with what they have" if self.updates is None else ""

    def awaited(self, policy: str) -> dict[str, int]:
        return {} if self.updates is None or policy not in self.members else {FROM: self.updates}

    def adoption(self, policy: str, known: Mapping[str, float]) -> Adopt | None:
        if policy not in self.members or FROM not in known:
            return None
        donor = self.members[int(known[FROM])]
        settings = {setting: known[recorded_as(setting)] for setting in self.explore}
        return None if donor == policy else Adopt(donor, int(known[FROM_VERSION]), settings)

    def check(self, experiment: Experiment) -> None:
        """Raise `ConfigError` for members that could not go on from one another, or of
        which the metric is not recorded."""
        populations = experiment.groups(Population)
        for member in self.members:
            managers = [name for name, config in populations.items() if member in config.members]
            if len(managers) > 1:
                raise ConfigError(
                    f'policy "{member}" is a member of the populations {" and ".join(managers)}; one alone '
                    "can tell it what to go on from"
                )
            if self.updates is not None:
                check_pushed(experiment, member, "Population", self.updates)
        policies = [experiment.policies[member] for member in self.members]
        for member, policy in zip(self.members, policies, strict=True):
            if policy != policies[0]:
                raise ConfigError(
                    f'members "{self.members[0]}" and "{member}" of the population are different policies: '
                    f"{policies[0]} and {policy}"
                )
            trainer = _trainer_of(experiment, member)
            for name in self.explore.keys() & trainer.algorithm.schedules.keys():
                raise ConfigError(
                    f"{name} of {type(trainer.algorithm).__name__} is a schedule, so that there is no number "
                    "to explore; give the algorithm a number, or leave it out of explore"
                )
            for bounds in zip(*self.explore.values(), strict=True):
                explored = with_settings(trainer.algorithm, dict(zip(self.explore, bounds, strict=True)))
                explored.check_policy(policy)
            if self.metric not in (recorded := experiment.recorded(member)):
                raise ConfigError(
                    f'metric = "{self.metric}" is not recorded of member "{member}"; '
                    f"{did_you_mean(self.metric, recorded)}"
                )

    def build(self, context: Context) -> WorkerHandle:
        from tidemill.workers.population import PopulationWorker

        return PopulationWorker(context, self)


def recorded_as(setting: str) -> str:
    """Return by what name a setting is recorded that a member takes over."""
    return f"{PREFIX}{setting}"


def _trainer_of(experiment: Experiment, policy: str) -> TrainerConfig:
    """Return the trainer of a member. Raises `ConfigError` for one that could not go on
    from another."""
    trainers = [each for each in experiment.groups(TrainerConfig).values() if each.policy == policy]
    if len(trainers) != 1 or trainers[0].count != 1:
        raise ConfigError(
            f'member "{policy}" of the population has {sum(trainer.count for trainer in trainers)} trainers; '
            "each member needs one of its own"
        )
    return trainers[0]


def populate(
    experiment: Experiment, starts: Sequence[Mapping[str, float]], **population: object
) -> Experiment:
    """Return an experiment with a population: for each of `starts` a copy of the one
    policy, its actors, its evaluations, and its trainer, whose algorithm begins with
    these settings
    (``{"learning_rate": 1e-4}``). `population` are settings of `Population`. The first
    member that reaches the limits of steps, updates or the mean return ends the run.

    Raises `ConfigError` for an experiment that is more than one policy, one trainer,
    actors and evaluations.
    """
    trainers = experiment.groups(TrainerConfig)
    known = {*trainers, *experiment.groups(ActorConfig), *experiment.groups(Evaluation)}
    if (
        (len(experiment.policies), len(trainers)) != (1, 1)
        or experiment.together
        or {*experiment.workers} - known
    ):
        raise ConfigError(
            "populate takes an experiment of one policy, one trainer, actors and evaluations; write a larger "
            "population out by hand"
        )
    (policy,) = experiment.policies
    workers: dict[str, WorkerConfig] = {}
    for number, start in enumerate(starts):
        for name, config in experiment.workers.items():
            workers[f"{name}-{number}"] = _of_member(config, number, start)
    members = tuple(f"{policy}-{number}" for number in range(len(starts)))
    workers["population"] = Population(members=members, **population)  # type: ignore[arg-type]
    limits = (
        experiment.limits
        if experiment.limits.mean_return is None
        else experiment.limits.replace(return_of="any")
    )
    return experiment.replace(
        policies=dict.fromkeys(members, experiment.policies[policy]), workers=workers, limits=limits
    )


def _of_member(config: WorkerConfig, number: int, start: Mapping[str, float]) -> WorkerConfig:
    """Return a group of workers of the one policy as that of a member."""
    if isinstance(config, Actors):
        return config.replace(agents=tuple(_renumbered(spec, number) for spec in config.agents))
    own = _renumbered(config, number)
    return (
        own.replace(algorithm=with_settings(own.algorithm, start)) if isinstance(own, TrainerConfig) else own
    )


def _renumbered(config: Any, number: int) -> Any:
    """Return what names one policy, and sample streams, by the names of a member."""
    samples = config.samples
    if isinstance(samples, str):
        samples = f"{samples}-{number}"
    elif samples:
        samples = tuple(f"{stream}-{number}" for stream in samples)
    return config.replace(policy=f"{config.policy}-{number}", samples=samples)
