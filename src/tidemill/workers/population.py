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
from pathlib import Path
from time import monotonic

import numpy as np

from tidemill.api.control_messages import Adopt, Facts, Measured, Notice, Relay
from tidemill.api.worker import Context
from tidemill.core.cut import Part
from tidemill.core.errors import ConfigError, DatabaseError, VersionGone
from tidemill.core.seeding import derive_seed
from tidemill.store.database_watch import DatabaseWatch
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase
from tidemill.store.query import Query
from tidemill.store.versions import Version
from tidemill.workers.base import PollResult, Worker
from tidemill.workers.cut_files import has_cut, own_part
from tidemill.workers.population_config import FROM, FROM_VERSION, PREFIX, Population, recorded_as
from tidemill.workers.population_formulas import choose_donor, explore
from tidemill.workers.version_metadata import field_of

LOOK = 0.25  # seconds between looks at the database
AGAIN = 5.0  # seconds until a database that could not be written is tried again


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
        self._parts.write(part, self.cut, checkpoints)

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
                taken_over = {recorded_as(setting): value for setting, value in taken.items()}
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
            if member.score is not None and self._trained(member)
        }
        if len(scores) < len(self._members):
            return PollResult()
        self._decide(scores)
        return PollResult(1, 1)

    def _trained(self, member: _Member) -> bool:
        """True of a member that has trained enough to be decided on."""
        return member.steps >= member.since + self._config.steps

    def _lacks(self) -> dict[str, str]:
        if self._config.updates is not None or not any(map(self._trained, self._members.values())):
            return {}
        return {
            name: self._config.metric if self._trained(member) and member.donor is None else ""
            for name, member in self._members.items()
            if member.score is None or not self._trained(member)
        }

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
        elif (donor := member.donor) is not None and member.steps > member.since + 2 * self._config.steps:
            self._let_go(donor, member)
            member.donor = None
            whence = f"version {donor.version} of {donor.policy}"
            why = "most likely since its trainer died as it was told to"
            self.report(Notice(f"{name} has not gone on from {whence}, {why}: it is decided on anew"))
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


def _tag(member: _Member) -> str:
    """Return what points to the version that a member is going on from, so that it is not
    collected meanwhile."""
    return f"for-member-{member.number}"
