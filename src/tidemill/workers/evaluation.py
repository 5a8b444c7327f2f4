"""The evaluation manager: freezes a version, has actors play it, and records what it
reached once its games are played.

Evaluation actors are ordinary ones, which play the version that a tag points to and send
each episode as one row::

    "judge": Actors(environment=…, agents=(
        AgentSpec(
            parameters=Drawn(tag="evaluating"),
            deterministic=True, mode="concise", samples="evaluation",
        ),
    )),
    "evaluation": Evaluation(games=100),

In a game against versions of the same policy (`Drawn`), a version is rated by theirs, and
it is noted which of them have beaten it::

    "first": Actors(environment=…, agents=(
        AgentSpec(
            match="player_0", parameters=Drawn(tag="evaluating"),
            deterministic=True, mode="concise", samples="evaluation",
        ),
        AgentSpec(match="player_1", parameters=Drawn(), samples=None),
    )),
    "evaluation": Evaluation(games=100, drawn=0.0),

A version's games are whole rounds of the seats' episodes (`counted_episodes`). Episodes
of other versions, or in which the version changed, are discarded and counted; not those
that judges in rounds have played of a version beyond its games, since chance says whether
they come before its last one or after.

An opponent that was never rated counts as the newest rated version before it.
Evaluation takes longer than a push, so that most opponents were not evaluated
themselves: left out, they cost half of the games, and once all rated versions were
collected ratings began anew.

Nobody is told to begin or to stop: a full stream holds the actors up while there is no
new version.

With `updates` the version after each so many is evaluated, and training waits for that:
the next one is not there before. Then judges play in rounds (`workers.judge_rounds`), for
which the evaluation holds the episode that completes what it needs of a channel until the
tag points to the next version. So what is played, against whom, and what is recorded
follows from the experiment alone.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

import numpy as np

from tidemill.api.algorithm import Sample
from tidemill.api.control_messages import EnterStage, Facts, Measured, Notice
from tidemill.api.edges import Port, group_of
from tidemill.api.experiment import Experiment
from tidemill.api.worker import Context, WorkerConfig
from tidemill.core.cut import Part
from tidemill.core.errors import ConfigError, DatabaseError, VersionGone
from tidemill.store.database_watch import DatabaseWatch
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase
from tidemill.store.query import check_field
from tidemill.store.recorded_results import NO_RESULTS
from tidemill.store.versions import Mean, Version, check_tag
from tidemill.streams.samples import ChannelSampleConsumer
from tidemill.streams.sources import Drawn
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.agent_spec import PlayerSpec
from tidemill.workers.base import PollResult, Worker
from tidemill.workers.counted_episodes import counted_of
from tidemill.workers.cut_files import has_cut, own_part
from tidemill.workers.elo_rating import performance
from tidemill.workers.info_numbers import FIELD, Numbers, by_name, means, unpack
from tidemill.workers.trainer_config import check_pushed
from tidemill.workers.version_metadata import stage_of

LOOK = 0.25  # seconds between looks for a version that was not evaluated yet
AGAIN = 5.0  # seconds until a database that could not be written is tried again
MOST_EPISODES = 256  # that are taken in one poll


@dataclass(frozen=True, kw_only=True)
class Evaluation(WorkerConfig):
    """An evaluation manager has actors play the versions of one policy, one version at a
    time, and records what each reached.

    policy: name of the policy whose versions are evaluated
    samples: the stream of the evaluation actors' episodes
    games: least number of episodes per version: every seat of the evaluation actors
        plays the same number, so that there may be more
    updates: the version after each so many updates is evaluated, beginning with that of
        none, and training waits until it is; None: the newest one is, whenever there is
        time for one
    tag: tag that points to the version that is being evaluated: what the actors play
    best: tag that points to the version with the highest mean return so far, of those
        that were evaluated in the curriculum's present stage
    drawn: the return of a drawn game: a higher one is a win, a lower one a loss. None:
        nothing is won
    name: first word of the metrics: ``evaluation/return`` (mean), ``/return_low`` and
        ``/return_high`` (its 95 % confidence interval), ``/length``, ``/version``,
        ``/games`` and ``/discarded`` (episodes of other versions so far); ``/info/…``
        (what the environment says of episodes at their end); where games are won
        ``/win_rate`` (a draw counts ½) and ``/elo`` (see `tidemill.workers.elo_rating`)

    The database gets to know of the version its ``NAME/return``, ``/length``,
    ``/info/…``, ``/win_rate`` and ``/elo``, and of its opponents ``/beats``: the share of
    games that they won against those that were evaluated. In a curriculum ``NAME/stage``
    is the stage (from 1) in which it was evaluated: with `updates` that of the version.

    Evaluations of different policies may have one name: in the metrics each one's worker
    group then stands before it, ``GROUP/evaluation/return``.

    While there is no new version to be evaluated, its actors wait: no episode is taken
    from them.
    """

    order: ClassVar[int] = 4

    policy: str = "policy"
    samples: str = "evaluation"
    games: int = 100
    updates: int | None = None
    tag: str = "evaluating"
    best: str = "best"
    drawn: float | None = None
    name: str = "evaluation"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count != 1:
            raise ConfigError(
                f"count = {self.count}: one worker evaluates a policy; give each policy an Evaluation, and "
                "the actors a higher count"
            )
        self.check_least(games=1, updates=1)
        for tag in (self.tag, self.best):
            check_tag(tag)
        check_field(f"{self.name}/return")
        if self.drawn is not None and not isfinite(self.drawn):
            raise ConfigError(
                f"drawn = {self.drawn} is no return of a drawn game; give a finite number, or None where "
                "nothing is won"
            )
        if self.tag == self.best:
            raise ConfigError(f'tag and best are both "{self.tag}"; give them different names')

    def ports(self) -> tuple[Port, ...]:
        return Port(self.samples, "consume", lockstep=self.updates is not None), Port(self.policy, "draw")

    def measures(self) -> tuple[str, ...]:
        won = () if self.drawn is None else ("win_rate", "elo")
        own = ("return", "return_low", "return_high", "length", "version", "games", "discarded", "info/")
        return tuple(f"{self.name}/{metric}" for metric in (*own, *won))

    def records(self) -> tuple[str, ...]:
        won = () if self.drawn is None else ("win_rate", "elo", "beats")
        return tuple(f"{self.name}/{what}" for what in ("return", "length", "stage", "info/", *won))

    @property
    def watches(self) -> bool:
        return self.updates is None

    def awaited(self, policy: str) -> dict[str, int]:
        if self.updates is None or policy != self.policy:
            return {}
        return {f"{self.name}/return": self.updates}

    def rounds(self, experiment: Experiment, seats_per_lane: int) -> int:
        """Return how many episodes of each seat count."""
        edges = (edge for edge in experiment.edges() if edge.name.startswith(f"samples/{self.samples}/"))
        actors = experiment.groups(ActorConfig)
        seats = sum(actors[group_of(edge.source)].lanes for edge in edges) * seats_per_lane
        return counted_of(0, seats, self.games)

    def check(self, experiment: Experiment) -> None:
        """Raise `ConfigError` unless those who fill the stream are actors that play what
        is evaluated, and for two evaluations that go by one name or move one tag."""
        for worker in experiment.holders(self.samples, "produce"):
            self._check_judge(worker, experiment.workers[group_of(worker)])
        if self.updates is not None:
            check_pushed(experiment, self.policy, "Evaluation", self.updates)
        evaluations = experiment.groups(Evaluation).items()
        for (group, one), (other_group, other) in combinations(evaluations, 2):
            if one.policy != other.policy:
                continue
            if one.name == other.name:
                raise ConfigError(
                    f'{group} and {other_group} both have name = "{one.name}"; their metrics need different '
                    "names"
                )
            if same := {one.tag, one.best} & {other.tag, other.best}:
                raise ConfigError(
                    f'{group} and {other_group} both move the tag "{min(same)}"; give each its own tag and '
                    "best"
                )

    def _check_judge(self, worker: str, judge: WorkerConfig) -> None:
        if not isinstance(judge, ActorConfig):
            raise ConfigError(
                f'{worker} fills sample stream "{self.samples}", but evaluation takes episodes from actors '
                "alone; let them fill it"
            )
        (spec,) = (spec for spec in judge.agents if self.samples in spec.streams)
        others = [stream for other in judge.agents for stream in other.streams if stream != self.samples]
        if self.updates is not None and others:
            raise ConfigError(
                f'{worker} fills "{others[0]}" beside "{self.samples}", but plays in rounds for an '
                f"evaluation with updates = {self.updates}; let other actors fill that"
            )
        for what, is_so, cure in (
            (f'mode = "{spec.mode}"', spec.mode == "concise", 'mode = "concise"'),
            (f'policy = "{spec.policy}"', spec.policy == self.policy, f'policy = "{self.policy}"'),
            (
                f"parameters = {spec.parameters}",
                spec.parameters == Drawn(tag=self.tag),
                f'parameters = Drawn(tag="{self.tag}")',
            ),
        ):
            if not is_so:
                raise ConfigError(
                    f'{worker}: agent spec "{spec.match}" has {what}, but fills sample stream '
                    f'"{self.samples}", where evaluation takes one row of each episode of the version of '
                    f'"{self.policy}" that it points to; set {cure}'
                )

    def build(self, context: Context) -> "EvaluationWorker":
        return EvaluationWorker(context, self)


def judge_of(experiment: Experiment, specs: Iterable[PlayerSpec]) -> Evaluation | None:
    """Return the evaluation that gets the episodes of one of `specs` in rounds, None for
    none."""
    streams = {stream for spec in specs for stream in spec.streams}
    for evaluation in experiment.groups(Evaluation).values():
        if evaluation.updates is not None and evaluation.samples in streams:
            return evaluation
    return None


class EvaluationWorker(Worker):
    """The evaluation manager: it moves the tag, collects the episodes of the version that
    the tag points to, and records what they reached."""

    def __init__(self, context: Context, config: Evaluation) -> None:
        super().__init__(context)
        self._config = config
        self._frozen: Version | None = None
        self._last = -1  # the version that was frozen last
        self._looked = 0.0
        self._again = 0.0  # when the database is tried again that could not be written; 0: it could
        self._played: Counter[tuple[int, int]] = Counter()  # games of the frozen version by (channel, seat)
        self._returns: list[float] = []
        self._lengths: list[float] = []
        self._infos: list[Numbers] = []
        self._against: dict[int, list[float]] = {}  # scores of the frozen version, by the opponent's
        self._ratings: dict[int, float] = {}  # by version, of collected ones, too
        self._discarded = 0
        self._kept: list[int] = []  # channels whose round is over, for each sample that is kept of it
        self._to_hold = 0  # samples that were kept when the run was cut, and are still to be taken again
        self._exact = context.experiment.exact_resume and config.updates is not None
        self._holds = self._exact or not context.life
        """Episodes are held that complete a channel's round: not while judges may be
        within one whose beginning nobody knows of any more."""

    def _configure(self, facts: Facts) -> Facts:
        config, context = self._config, self.context
        if context.folder is None:
            raise ConfigError(
                "evaluation takes versions from the run's parameter database, but the run keeps no folder"
            )
        edges = context.edges(f"samples/{config.samples}/")
        actors = context.experiment.groups(ActorConfig)
        judges = [actors[group_of(edge.source)] for edge in edges]
        per_lane = facts.samples[config.samples].seats_per_lane
        self._policy_index = list(context.experiment.policies).index(config.policy)
        self._database = ParameterDatabase(Path(context.folder) / PARAMETERS)
        self._watch = DatabaseWatch(self._database.folder)
        channels = [context.endpoints.consumer(edge.name) for edge in edges]
        self._consumer = ChannelSampleConsumer(channels, 0, 0)
        self._of_channel = [judge.lanes * per_lane for judge in judges]  # seats
        self._seats = sum(self._of_channel)
        self._each = config.rounds(context.experiment, per_lane)  # games of every seat: whole rounds
        self._return, self._elo, self._beats, self._in = (
            f"{config.name}/{what}" for what in ("return", "elo", "beats", "stage")
        )
        if self._exact and has_cut(context):
            with own_part(context) as part:
                self._load_part(part)
        elif self._exact and context.life:  # all begin anew, and so do the judges' games
            with suppress(VersionGone):  # nothing was pushed yet
                self._database.results.load_state(config.policy, f"{config.name}/", NO_RESULTS)
        return Facts()

    # ---- a cut -------------------------------------------------------------------------

    def _save_part(self, checkpoints: Mapping[str, int]) -> None:
        if not self._exact:
            return
        config, tags = self._config, self._database.tags(self._config.policy)
        part = {
            "frozen": -1 if self._frozen is None else self._frozen.version,
            "played": [[*key, count] for key, count in self._played.items()],
            "returns": self._returns,
            "lengths": self._lengths,
            "infos": [dict(numbers) for numbers in self._infos],
            "against": [[version, scores] for version, scores in self._against.items()],
            "ratings": [[version, rating] for version, rating in self._ratings.items()],
            "discarded": self._discarded,
            "held": self._kept,
            "source": self._consumer.state(),
            "tags": {tag: tags.get(tag, -1) for tag in (config.tag, config.best)},
            "records": self._database.results.state(config.policy, f"{config.name}/"),
        }
        self._parts.write(part, self.cut, checkpoints)

    def _load_part(self, part: Part) -> None:
        """Be where the evaluation was when the run was cut, and have the database know
        what it knew then."""
        config = self._config
        frozen = [version for version in self._versions() if version.version == part["frozen"]]
        if frozen:
            self._begin_with(frozen[0])
        self._played.update({(channel, seat): count for channel, seat, count in part["played"]})
        self._returns, self._lengths = list(part["returns"]), list(part["lengths"])
        self._infos = [dict(numbers) for numbers in part["infos"]]
        self._against = {version: list(scores) for version, scores in part["against"]}
        self._ratings = dict(part["ratings"])
        self._discarded, self._kept = part["discarded"], list(part["held"])
        self._to_hold = len(self._kept)
        self._consumer.load_state(part["source"])
        for tag, version in part["tags"].items():
            with suppress(VersionGone):  # there is none to remove
                if version < 0:
                    self._database.untag(config.policy, tag)
                else:
                    self._database.tag(config.policy, tag, version)
        self._database.results.load_state(config.policy, f"{config.name}/", part["records"])

    # ---- what it does ------------------------------------------------------------------

    def _versions(self) -> list[Version]:
        return self._database.versions(self._config.policy)

    def _enter_stage(self, message: EnterStage) -> None:
        if self._config.updates is None:  # else a version says of which stage it is
            self.stage = message.stage
            self._frozen = None  # what was played so far was of another stage

    def _poll(self) -> PollResult:
        while self._to_hold and self._consumer.consume() is not None:
            self._to_hold -= 1
        if self._to_hold:
            return PollResult()
        if self._frozen is None:
            self._try(self._freeze)
        elif self._all_played():  # and what came of it could not be written
            self._try(self._conclude)
        taken = 0
        while (
            self._frozen is not None
            and taken < MOST_EPISODES
            and (sample := self._consumer.consume()) is not None
        ):
            taken += self._count(sample)
            if self._config.updates is not None and self._holds and self._round_over(sample.channel):
                self._kept.append(sample.channel)
            else:
                self._consumer.give_back(sample.channel)
            if self._all_played():
                self._try(self._conclude)
        return PollResult(taken, taken)

    def _lacks(self) -> dict[str, str]:
        # where the database cannot be written that was told
        lacks = self._config.updates is None and self._frozen is not None and not self._again
        return {self._config.policy: self._return} if lacks else {}

    def _all_played(self) -> bool:
        return len(self._played) == self._seats and min(self._played.values()) >= self._each

    def _round_over(self, channel: int) -> bool:
        """True when all that counts of a channel has come."""
        enough = (key for key, count in self._played.items() if key[0] == channel and count >= self._each)
        return sum(1 for _ in enough) == self._of_channel[channel]

    def _try(self, step: Callable[[], None]) -> None:
        """Do what needs the database. Where that cannot be written, the disk is full,
        say, it is tried again until it can, with what was played meanwhile."""
        if monotonic() < self._again:
            return
        try:
            step()
        except DatabaseError as error:
            if not self._again:
                self.report(Notice(f"{error}. Evaluation goes on when it can be written again"))
            self._again = monotonic() + AGAIN
            return
        if self._again:
            self.report(Notice("the parameter database is written again: evaluation goes on"))
        self._again = 0.0

    def _begin_with(self, version: Version) -> None:
        self._frozen = version
        if self._config.updates is not None:
            self.stage = stage_of(version.counters)

    def _freeze(self) -> None:
        """Let the tag point to the newest version, once there is one that was not
        evaluated; or to the one that training waits for."""
        policy, updates = self._config.policy, self._config.updates
        if updates is not None:
            if not self._watch.due():
                return
            due = self._database.results.oldest_without(policy, self._return, updates)
            newest = (
                [version for version in self._versions() if version.version == due] if due is not None else []
            )
        elif monotonic() - self._looked < LOOK:
            return
        else:
            self._looked = monotonic()
            newest = self._versions()[-1:]
            if newest and (newest[0].version <= self._last or self._return in newest[0].means):
                return
        if not newest:
            return
        try:
            self._database.tag(self._config.policy, self._config.tag, newest[0].version)
        except VersionGone:  # collected meanwhile: there is a newer one
            return
        self._begin_with(newest[0])
        self._last = newest[0].version
        self._played.clear()
        self._returns, self._lengths, self._infos, self._against = [], [], [], {}
        for channel in self._kept:  # whose judges go on with this version
            self._consumer.give_back(channel)
        self._kept.clear()
        self.context.endpoints.bell.ring()  # what lies in the stream was announced long ago

    def _count(self, sample: Sample) -> int:
        """Count the episodes of the frozen version that are among the first of their
        seat. Return how many there are in the sample."""
        frozen, ends = self._frozen, sample["info_mask"].nonzero()
        assert frozen is not None
        before = frozen.version - (self._config.updates or 0)  # whose round was the last one
        names = ("version", "last_version", "seat", "info.return", "info.length")
        rows: list[list[Any]] = [sample[name][ends].tolist() for name in names]
        rows.append(list(sample[FIELD][ends]))
        rows += [
            sample[name][ends].tolist() if name in sample else [[]] * len(ends[0])
            for name in ("others.version", "others.policy")
        ]
        for first, last, seat, reached, length, info, others, policies in zip(*rows, strict=True):
            key = sample.channel, seat
            if not first == last == frozen.version:
                self._discarded += not first == last == before
            elif self._played[key] < self._each:
                self._played[key] += 1
                self._returns.append(reached)
                self._lengths.append(length)
                self._infos.append(unpack(info))
                for version, policy in zip(others, policies, strict=True):
                    if policy == self._policy_index and version >= 0:
                        self._against.setdefault(version, []).append(self._score(reached))
        return len(ends[0])

    def _score(self, reached: float) -> float:
        return 0.5 * (1 + float(np.sign(reached - (self._config.drawn or 0.0))))

    def _rate(self) -> dict[str, float]:
        """Return the frozen version's rating, if it has played versions of its policy,
        and note how these did against it. One that was not rated itself counts as the
        newest before it that was: evaluation takes longer than a push, and versions are
        collected."""
        assert self._frozen is not None
        if not self._against:
            return {}
        self._ratings |= {
            version.version: version.means[self._elo].mean
            for version in self._versions()
            if self._elo in version.means
        }
        rated, games = sorted(self._ratings), []
        for version, scores in self._against.items():
            before = bisect_right(rated, version)
            if before and version != self._frozen.version:
                games += [(self._ratings[rated[before - 1]], score) for score in scores]
            with suppress(VersionGone):  # it was collected while it played
                self._database.results.add(
                    self._config.policy, version, {self._beats: [1 - score for score in scores]}
                )
        against, won = np.array(games).reshape(-1, 2).T
        if rated and not len(games):
            return {}
        self._ratings[self._frozen.version] = rating = performance(against, won)
        return {"elo": rating}

    def _conclude(self) -> None:
        config, frozen = self._config, self._frozen
        assert frozen is not None
        results: dict[str, list[float]] = {"return": self._returns, "length": self._lengths}
        results |= {f"info/{name}": values for name, values in by_name(self._infos).items()}
        won: dict[str, float] = {}
        if config.drawn is not None:
            results["win_rate"] = [self._score(reached) for reached in self._returns]
            rated = self._rate()
            won = {"win_rate": float(np.mean(results["win_rate"])), **rated}
            results |= {name: [value] for name, value in rated.items()}
        if self.context.experiment.curriculum:
            results["stage"] = [self.stage + 1]
        self._database.results.add(
            config.policy,
            frozen.version,
            {f"{config.name}/{what}": values for what, values in results.items()},
        )
        reached = Mean().add(np.array(self._returns))
        margin = reached.margin or 0.0
        told = {
            "return": reached.mean,
            "return_low": reached.mean - margin,
            "return_high": reached.mean + margin,
            "length": float(np.mean(self._lengths)),
            "version": float(frozen.version),
            "games": float(reached.count),
            "discarded": float(self._discarded),
            **{f"info/{name}": mean for name, mean in means(self._infos).items()},
            **won,
        }
        self.report(
            Measured(
                int(frozen.counters.get("env_steps", 0)),
                self.stage,
                {f"{config.name}/{k}": v for k, v in told.items()},
            )
        )
        if self._is_best(reached.mean):
            self._database.tag(config.policy, config.best, frozen.version)
        self._frozen, self._holds = None, True

    def _is_best(self, reached: float) -> bool:
        best = [
            version.means
            for version in self._versions()
            if self._config.best in version.tags and self._return in version.means
        ]
        if (
            best
            and self.context.experiment.curriculum
            and (self._in not in best[0] or best[0][self._in].mean != self.stage + 1)
        ):
            return True  # what it has reached was easier
        return not best or best[0][self._return].mean < reached
