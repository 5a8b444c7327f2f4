"""Population-based training: equal experiments train side by side, and whoever does badly
goes on from one that does well, with changed settings.

Jaderberg et al. 2017, "Population Based Training of Neural Networks": exploit by
truncation selection, explore by perturbing or resampling (section 4.1.1). The manager
looks at what the parameter database knows of the members' versions, and decides once each
has trained another `steps` env steps; training does not wait for it. What it decides
follows from these records and the run's seed alone. It keeps no state: a resumed run goes
on from the records, each member with the weights and settings of its checkpoint.

With `updates` it decides on the members' versions after each so many, and each member
waits for that: what was decided is recorded of its version, where its trainer reads it.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import exp, isfinite, log
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

import numpy as np

from tidemill.api.control_messages import Adopt, Facts, Measured, Notice, Relay
from tidemill.api.edges import Port
from tidemill.api.experiment import Experiment
from tidemill.api.worker import Context, WorkerConfig
from tidemill.core.config import acting
from tidemill.core.cut import Part
from tidemill.core.errors import CheckpointError, ConfigError, DatabaseError, VersionGone, did_you_mean
from tidemill.core.seeding import derive_seed
from tidemill.store.database_watch import DatabaseWatch
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase
from tidemill.store.query import Query
from tidemill.store.versions import Version
from tidemill.workers.actor_config import ActorConfig, Actors
from tidemill.workers.base import PollResult, Worker
from tidemill.workers.cut_files import has_cut, own_part, write_part
from tidemill.workers.evaluation import Evaluation
from tidemill.workers.trainer_config import TrainerConfig, check_pushed
from tidemill.workers.version_metadata import field_of, with_settings

LOOK = 0.25  # seconds between looks at the database
AGAIN = 5.0  # seconds until a database that could not be written is tried again
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
        return () if self.updates is None else (FROM, FROM_VERSION, *map(_taken, self.explore))

    @property
    def goes_on_without(self) -> str:
        return "its members go on with what they have" if self.updates is None else ""

    def awaited(self, policy: str) -> dict[str, int]:
        return {} if self.updates is None or policy not in self.members else {FROM: self.updates}

    def adoption(self, policy: str, known: Mapping[str, float]) -> Adopt | None:
        if policy not in self.members or FROM not in known:
            return None
        donor = self.members[int(known[FROM])]
        settings = {setting: known[_taken(setting)] for setting in self.explore}
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

    def build(self, context: Context) -> "PopulationWorker":
        return PopulationWorker(context, self)


@dataclass
class _Member:
    """What is known of a member.

    newest: its newest version
    score: what the newest version of which that is known has reached, among those that
        are its own since it went on from another
    since: env steps that it had trained when it was decided on, or went on from another
    donor: from which version it was told to go on, until it has a version that does
    """

    number: int
    newest: Version | None = None
    score: float | None = None
    since: int = 0
    donor: Version | None = None

    @property
    def steps(self) -> int:
        """Env steps that it has trained."""
        return 0 if self.newest is None else int(self.newest.counters["env_steps"])


class PopulationWorker(Worker):
    """The population manager: it reads what versions reached, and decides who goes on
    from whom."""

    def __init__(self, context: Context, config: Population) -> None:
        super().__init__(context)
        self._config = config
        self._members = {name: _Member(number) for number, name in enumerate(config.members)}
        self._looked, self._begun = -LOOK, False
        self._again = 0.0  # when the database is tried again that could not be written; 0: it could
        self._tags = {_tag(member) for member in self._members.values()}

    def _configure(self, facts: Facts) -> Facts:
        if self.context.folder is None:
            raise ConfigError(
                "a population exchanges versions by the run's parameter database, but the run keeps no folder"
            )
        spaces, (first, *others) = facts.spaces, self._config.members
        for other in others:
            if spaces.get(other) != spaces.get(first):
                raise ConfigError(
                    f'members "{first}" and "{other}" of the population play in different spaces: '
                    f"{spaces[first]} and {spaces[other]}"
                )
        self._database = ParameterDatabase(Path(self.context.folder) / PARAMETERS)
        self._watch = DatabaseWatch(self._database.folder)
        if self.context.experiment.exact_resume and has_cut(self.context):
            with own_part(self.context) as part:
                self._load_part(part)
        return Facts()

    # ---- a cut -------------------------------------------------------------------------

    def _save_part(self, checkpoints: Mapping[str, int]) -> None:
        if self._config.updates is None:
            return
        part = {
            name: {
                "records": self._database.results.state(name, PREFIX),
                "tags": {
                    tag: version for tag, version in self._database.tags(name).items() if tag in self._tags
                },
            }
            for name in self._members
        }
        try:
            write_part(self.context, part, self.cut, checkpoints)
        except CheckpointError as error:
            self.report(Notice(f"{error}. Training goes on; a resumed run goes on from the cut before"))

    def _load_part(self, part: Part) -> None:
        """Have the database know what it knew of decisions when the run was cut."""
        for name in self._members:
            self._untag(name)
            for tag, version in part[name]["tags"].items():
                self._database.tag(name, tag, version)
            self._database.results.load_state(name, PREFIX, part[name]["records"])

    # ---- decisions that members wait for -----------------------------------------------

    def _try_waiting(self, updates: int) -> PollResult:
        """See `_poll_waiting`. Where the database cannot be written, the disk is full,
        say, it is tried again until it can: what is decided then is the same."""
        if monotonic() < self._again or not self._watch.due():
            return PollResult()
        try:
            result = self._poll_waiting(updates)
        except DatabaseError as error:
            if not self._again:
                self.report(Notice(f"{error}. The population decides when it can be written again"))
            self._again = monotonic() + AGAIN
            return PollResult()
        if self._again and result.batch_count:
            self._again = 0.0
            self.report(Notice("the parameter database is written again: the population goes on"))
        return result

    def _poll_waiting(self, updates: int) -> PollResult:
        """Decide on the members' versions after so many updates more, once all are
        there, and all is known of them that their trainers wait for besides."""
        due = [self._database.results.oldest_without(name, FROM, updates) for name in self._members]
        if due.count(None) == len(due):
            return PollResult()
        at = min(version for version in due if version is not None)
        found = {name: self._database.versions(name) for name in self._members}
        now = {name: {each.version: each for each in versions}.get(at) for name, versions in found.items()}
        for name, version in now.items():
            if version is None and not any(each.version > at for each in found[name]):
                return PollResult()  # it is to come
            awaited = self.context.experiment.awaited(name)
            others = {what for what, every in awaited.items() if at % every == 0} - {FROM}
            if version is not None and not others <= version.means.keys():
                return PollResult()
        scores = dict[str, float]()
        for name, member in self._members.items():
            member.newest = now[name]
            if member.newest is not None:
                own = self._own([each for each in found[name] if each.version <= at], member.newest)
                scores.update(zip([name], own, strict=False))  # the newest, if there is one
            self._untag(name)
        self._decide_together(scores if at and len(scores) == len(now) else {})
        return PollResult(1, 1)

    def _decide_together(self, scores: Mapping[str, float]) -> None:
        """Exploit and explore, where something is known of everybody, and record what
        each member is to go on from."""
        told = list[tuple[int, dict[str, float], str]]()
        for name, member in self._members.items():
            if (version := member.newest) is None:  # it was collected, and its trainer waits no more
                continue
            rng = self._random(name, version)
            donor = choose_donor(scores, name, self._config.quantile, rng) if scores else None
            source, taken = version, self._settings(version)
            if donor is not None and (found := self._members[donor].newest) is not None:
                self._database.tag(donor, _tag(member), found.version)
                source, taken = found, self._explored(found, rng)
                told.append(self._lineage(name, member, found, version.version + 1, taken))
            origin = {FROM: float(self._members[source.policy].number), FROM_VERSION: float(source.version)}
            if FROM not in version.means:
                taken_over = {_taken(setting): value for setting, value in taken.items()}
                self._database.results.add(name, version.version, origin | taken_over)
        if scores:
            self._measure(scores)
        for steps, values, text in told:
            self.report(Measured(steps, self.stage, values))
            self.report(Notice(text))

    def _untag(self, policy: str) -> None:
        for tag in self._tags & self._database.tags(policy).keys():
            with suppress(VersionGone):  # its trainer, which goes back, has just removed that version
                self._database.untag(policy, tag)

    # ---- decisions that nobody waits for -----------------------------------------------

    def _poll(self) -> PollResult:
        if self._config.updates is not None:
            return self._try_waiting(self._config.updates)
        if monotonic() - self._looked < LOOK:
            return PollResult()
        self._looked = monotonic()
        for name, member in self._members.items():
            self._read(name, member)
        if not self._begun:  # not before: trainers make their first versions while they are configured
            self._begin()
        scores = {
            name: member.score
            for name, member in self._members.items()
            if member.score is not None and member.steps >= member.since + self._config.steps
        }
        if len(scores) < len(self._members):
            return PollResult()
        self._decide(scores)
        return PollResult(1, 1)

    def _begin(self) -> None:
        """What a run before this one was about to do is not done: whoever ought to go on
        from another is told so anew."""
        self._begun = True
        for name, member in self._members.items():
            self._untag(name)
            member.since = member.steps

    def _on_exit(self) -> None:
        for member in self._members.values():
            if member.donor is not None:
                self._let_go(member.donor, member)

    def _let_go(self, donor: Version, member: _Member) -> None:
        with suppress(DatabaseError):  # somebody else has removed the tag, or it cannot be now
            self._database.untag(donor.policy, _tag(member))

    def _read(self, name: str, member: _Member) -> None:
        versions = self._database.versions(name)
        if not versions:
            return
        before, member.newest = member.newest, versions[-1]
        adopted = member.newest.counters["adopted"]
        if member.donor is not None and before is not None and adopted > before.counters["adopted"]:
            self._let_go(member.donor, member)
            self._tell(name, member, member.newest)
            member.donor, member.since = None, member.steps
        scores = self._own(versions, member.newest)
        member.score = scores[0] if scores and member.donor is None else None

    def _own(self, versions: Sequence[Version], newest: Version) -> list[float]:
        """Return what a member's versions have reached, the newest first, of those since
        it went on from another."""
        own = Query(where=(("adopted", "==", newest.counters["adopted"]),)).select(versions, Version.values)
        known = (version.values() for version in own)
        return [values[self._config.metric] for values in known if self._config.metric in values]

    def _random(self, name: str, version: Version) -> np.random.Generator:
        """Return what draws for a member at a version."""
        return np.random.default_rng(
            derive_seed(self.context.experiment.seed, self.name, name, version.version)
        )

    def _decide(self, scores: Mapping[str, float]) -> None:
        """Exploit and explore."""
        for name, member in self._members.items():
            assert member.newest is not None
            rng = self._random(name, member.newest)
            donor = choose_donor(scores, name, self._config.quantile, rng)
            if donor is not None:
                self._exploit(name, member, donor, rng)
            member.since = member.steps
        self._measure(scores)

    def _measure(self, scores: Mapping[str, float]) -> None:
        reached = {
            "population/best": max(scores.values()),
            "population/mean": float(np.mean(list(scores.values()))),
        }
        self.report(Measured(max(member.steps for member in self._members.values()), self.stage, reached))

    def _exploit(self, name: str, member: _Member, donor: str, rng: np.random.Generator) -> None:
        version = self._members[donor].newest
        assert version is not None
        try:
            self._database.tag(donor, _tag(member), version.version)
        except VersionGone:  # collected since it was looked up: the next decision is soon enough
            return
        except DatabaseError as error:  # the disk is full, say: so it is then
            self.report(Notice(f"{error}. {name} goes on with its own weights until the next decision"))
            return
        self.report(Relay(name, Adopt(donor, version.version, self._explored(version, rng))))
        member.donor = version

    def _settings(self, version: Version) -> dict[str, float]:
        return {setting: version.counters[field_of(setting)] for setting in self._config.explore}

    def _explored(self, version: Version, rng: np.random.Generator) -> dict[str, float]:
        config = self._config
        return explore(self._settings(version), config.explore, config.factors, config.resample, rng)

    def _tell(self, name: str, member: _Member, now: Version) -> None:
        """Say that a member has gone on from its donor: `now` is its first version that
        is known to."""
        assert member.donor is not None
        adopted = int(now.counters["adopted"])
        _, values, text = self._lineage(name, member, member.donor, adopted, self._settings(now))
        self.report(Measured(int(now.counters["env_steps"]), self.stage, values))
        self.report(Notice(text))

    def _lineage(
        self, name: str, member: _Member, donor: Version, adopted: int, settings: Mapping[str, float]
    ) -> tuple[int, dict[str, float], str]:
        """Return the env steps, the metrics and the sentence that say from which version
        a member goes on, as version `adopted`, with these settings."""
        origin = {
            "from": float(self._members[donor.policy].number),
            "from_version": float(donor.version),
            "version": float(adopted),
        }
        values = {f"population/{member.number}/{key}": value for key, value in {**origin, **settings}.items()}
        told = (
            ", ".join(f"{setting} = {value:.3g}" for setting, value in settings.items())
            or "settings as they were"
        )
        whence = f"version {donor.version} of {donor.policy}"
        return member.steps, values, f"{name} goes on from {whence}, as version {adopted}, with {told}"


def _taken(setting: str) -> str:
    """Return by what name a setting is recorded that a member takes over."""
    return f"{PREFIX}{setting}"


def _tag(member: _Member) -> str:
    """Return what points to the version that a member is going on from, so that it is not
    collected meanwhile."""
    return f"for-member-{member.number}"


def choose_donor(
    scores: Mapping[str, float], member: str, quantile: float, rng: np.random.Generator
) -> str | None:
    """Return whom `member` is to go on from, by all members' `scores`: where it is among
    the share `quantile` of the worst (one at least), one of the best, as many, drawn from
    `rng`. None where it is not, or has reached as much as that one: it goes on by itself.

    Jaderberg et al. 2017, section 4.1.1, "truncation selection".
    """
    ranked = sorted(scores, key=lambda name: (scores[name], name))
    share = max(1, int(len(ranked) * quantile))
    if member not in ranked[:share]:
        return None
    donor = ranked[len(ranked) - share + int(rng.integers(share))]
    return donor if scores[donor] > scores[member] else None


def explore(
    settings: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]],
    factors: Sequence[float],
    resample: float,
    rng: np.random.Generator,
) -> dict[str, float]:
    """Return `settings`, each multiplied by one of `factors` or, with probability
    `resample`, drawn anew log-uniformly, within its `bounds`.

    Jaderberg et al. 2017, section 4.1.1, "perturb" and "resample".
    """
    changed = {}
    for name, (low, high) in bounds.items():
        anew = rng.random() < resample
        value = (
            exp(rng.uniform(log(low), log(high)))
            if anew
            else settings[name] * factors[int(rng.integers(len(factors)))]
        )
        changed[name] = min(max(value, low), high)
    return changed


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
