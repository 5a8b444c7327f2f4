"""Population-based training: equal experiments train side by side, and whoever does badly goes on from one that does well, with changed settings.

Jaderberg et al. 2017, "Population Based Training of Neural Networks": exploit by truncation selection, explore by perturbing (section 4.1.1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import ClassVar

import numpy as np

from tidemill.api.control import Adopt, Facts, Measured, Notice, Relay
from tidemill.api.edges import Port
from tidemill.api.experiment import Context, Experiment, WorkerConfig
from tidemill.core.config import set_path
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.core.query import Query
from tidemill.core.seeding import derive_seed
from tidemill.core.versions import PARAMETERS, ParameterDatabase, Version
from tidemill.workers.actor import Actors
from tidemill.workers.base import PollResult, Worker
from tidemill.workers.trainer import Trainer

LOOK = 0.5  # seconds between looks at the database


@dataclass(frozen=True, kw_only=True)
class Population(WorkerConfig):
    """A population manager.

    members   the policies of the population, each with a trainer of its own
    explore   settings of the members' algorithms that are explored, with their bounds: ``{"learning_rate": (1e-5, 1e-1)}``
    steps     env steps that a member trains between two decisions
    metric    what is known of versions by which members are compared; higher is better
    quantile  a member among so large a share of the worst goes on from one among as large a share of the best
    factors   a setting that was taken over is multiplied by one of these
    """

    order: ClassVar[int] = 5

    members: tuple[str, ...]
    explore: dict[str, tuple[float, float]]
    steps: int = 50_000
    metric: str = "training_return"
    quantile: float = 0.25
    factors: tuple[float, ...] = (0.8, 1.2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.members)) < max(2, len(self.members)):
            raise ConfigError(f"members = {self.members} must be at least two different policies")
        if self.steps < 1:
            raise ConfigError(f"steps = {self.steps} must be at least 1")
        if not 0 < self.quantile <= 0.5:
            raise ConfigError(f"quantile = {self.quantile} must be above 0 and at most 0.5; a quarter is usual")
        if not self.factors or not all(isfinite(factor) and factor > 0 for factor in self.factors):
            raise ConfigError(f"factors = {self.factors} must be positive numbers; (0.8, 1.2) is usual")
        for name, (low, high) in self.explore.items():
            if not 0 < low <= high < float("inf"):
                raise ConfigError(f"explore: the bounds {low} and {high} of {name} must be positive, the lower one first")

    def ports(self) -> tuple[Port, ...]:
        return tuple(Port(member, "draw") for member in self.members)

    def queries(self) -> tuple[Query, ...]:
        return (Query(order=self.metric),)

    def measures(self) -> tuple[str, ...]:
        return "population/best", "population/mean", "population/adoptions"

    def build(self, context: Context) -> "PopulationWorker":
        return PopulationWorker(context, self)


@dataclass
class _Member:
    """`settings` are its present ones; it decides again once it has trained `due` env steps."""

    settings: dict[str, float]
    due: float
    newest: Version | None = None
    since: int = -1
    """The first version that is its own since it went on from another."""

    def score(self, metric: str) -> float | None:
        """What its newest version has reached; None before anything is known of what it is since it went on from another."""
        return None if self.newest is None or self.newest.version < self.since else self.newest.values().get(metric)


class PopulationWorker(Worker):
    """See the module's text."""

    def __init__(self, context: Context, config: Population) -> None:
        super().__init__(context)
        self._config = config
        self._looked, self._adoptions = 0.0, 0

    def _configure(self, facts: Facts) -> Facts:
        config, context = self._config, self.context
        if context.folder is None:
            raise ConfigError("a population exchanges versions by the run's parameter database, but the run keeps no folder")
        self._database = ParameterDatabase(Path(context.folder) / PARAMETERS)
        self._rng = np.random.default_rng(derive_seed(context.experiment.seed, context.name))
        self._members: dict[str, _Member] = {}
        for name in config.members:
            trainer = trainer_of(context.experiment, name)
            newest = self._newest(name)
            settings = {setting: _setting(trainer, setting) for setting in config.explore}
            if newest is not None:  # a resumed run
                settings |= {setting: newest.facts[setting] for setting in settings.keys() & newest.facts.keys()}
            self._members[name] = _Member(settings, config.steps + (newest.facts["env_steps"] if newest is not None else 0), newest)
        return Facts()

    def _newest(self, member: str) -> Version | None:
        return (self._database.versions(member) or [None])[-1]

    def _poll(self) -> PollResult:
        if monotonic() - self._looked < LOOK:
            return PollResult()
        self._looked = monotonic()
        for name, member in self._members.items():
            member.newest = self._newest(name)
        decided = 0
        for name, member in self._members.items():
            if member.newest is not None and member.newest.facts["env_steps"] >= member.due and self._decide(name, member):
                member.due = member.newest.facts["env_steps"] + self._config.steps
                decided += 1
        if decided:
            self._report()
        return PollResult(decided, 1 if decided else 0)

    def _decide(self, name: str, member: _Member) -> bool:
        """Exploit and explore, once something is known of all members. False before."""
        config = self._config
        scores = {other: m.score(config.metric) for other, m in self._members.items()}
        ranked = sorted((score, other) for other, score in scores.items() if score is not None)
        if len(ranked) < len(self._members):
            return False
        share = max(1, int(len(ranked) * config.quantile))
        worst, best = [other for _, other in ranked[:share]], [other for _, other in ranked[-share:]]
        if name in worst:
            self._adopt(name, member, str(self._rng.choice(best)))
        return True

    def _adopt(self, name: str, member: _Member, donor: str) -> None:
        config, version = self._config, self._members[donor].newest
        assert version is not None and member.newest is not None
        taken = self._members[donor].settings
        member.settings = {
            setting: float(np.clip(taken[setting] * self._rng.choice(config.factors), low, high)) for setting, (low, high) in config.explore.items()
        }
        member.since = member.newest.version + 1
        self._adoptions += 1
        self.report(Relay(name, Adopt(donor, version.version, member.settings)))
        now = ", ".join(f"{setting} = {value:.3g}" for setting, value in member.settings.items())
        self.report(Notice(f"{name} goes on from {donor} (version {version.version}), with {now}"))

    def _report(self) -> None:
        scores = [score for member in self._members.values() if (score := member.score(self._config.metric)) is not None]
        steps = max(int(member.newest.facts["env_steps"]) for member in self._members.values() if member.newest is not None)
        if scores:
            values = {"population/best": max(scores), "population/mean": float(np.mean(scores)), "population/adoptions": float(self._adoptions)}
            self.report(Measured(steps, self.stage, values))


def trainer_of(experiment: Experiment, policy: str) -> Trainer:
    """Return the trainer of a member. Raises `ConfigError` for one that could not go on from another."""
    trainers = [config for config in experiment.workers.values() if isinstance(config, Trainer) and config.policy == policy]
    if len(trainers) != 1 or trainers[0].count != 1:
        raise ConfigError(
            f'member "{policy}" of the population has {sum(trainer.count for trainer in trainers)} trainers; each member needs one of its own'
        )
    return trainers[0]


def _setting(trainer: Trainer, name: str) -> float:
    value = getattr(trainer.algorithm, name, None)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        numbers = [key for key, known in vars(trainer.algorithm).items() if isinstance(known, float)]
        raise ConfigError(f'explore: {type(trainer.algorithm).__name__} has no number "{name}"; {did_you_mean(name, numbers)}')
    return float(value)


def populate(experiment: Experiment, starts: Sequence[Mapping[str, float]], **population: object) -> Experiment:
    """Return an experiment with a population: for each of `starts` a copy of the one policy, its actors and its trainer, whose algorithm begins with
    these settings (``{"learning_rate": 1e-4}``). `population` are settings of `Population`.

    Raises `ConfigError` for an experiment that is more than one policy, one group of actors and one trainer.
    """
    actors = [(name, config) for name, config in experiment.workers.items() if isinstance(config, Actors)]
    trainers = [(name, config) for name, config in experiment.workers.items() if isinstance(config, Trainer)]
    if (len(experiment.policies), len(experiment.workers), len(actors), len(trainers)) != (1, 2, 1, 1):
        raise ConfigError("populate takes an experiment of one policy, one group of actors and one trainer; write a larger population out by hand")
    (policy,), ((actor_name, actor),), ((trainer_name, trainer),) = experiment.policies, actors, trainers
    policies, workers = {}, {}
    for number, start in enumerate(starts):
        member, samples = f"{policy}-{number}", f"samples-{number}"
        policies[member] = experiment.policies[policy]
        workers[f"{actor_name}-{number}"] = actor.replace(agents=tuple(spec.replace(policy=member, samples=samples) for spec in actor.agents))
        copy = trainer.replace(policy=member, samples=samples)
        for setting, value in start.items():
            copy = set_path(copy, f"algorithm.{setting}", str(value))
        workers[f"{trainer_name}-{number}"] = copy
    manager = Population(members=tuple(policies), **population)  # type: ignore[arg-type]
    return experiment.replace(policies=policies, workers={**workers, "population": manager})
