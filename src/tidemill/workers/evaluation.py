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
of other versions, or in which the version changed, are discarded and counted.

An opponent that was never rated counts as the newest rated version before it.
Evaluation takes longer than a push, so that most opponents were not evaluated
themselves: left out, they cost half of the games, and once all rated versions were
collected ratings began anew.

Nobody is told to begin or to stop: a full stream holds the actors up while there is no
new version.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

import numpy as np

from tidemill.api.algorithm import Sample
from tidemill.api.control_messages import Facts, Measured, Notice
from tidemill.api.edges import Port, group_of
from tidemill.api.experiment import Context, Experiment, WorkerConfig
from tidemill.core.errors import ConfigError, DatabaseError, VersionGone
from tidemill.store.parameter_database import PARAMETERS, Mean, ParameterDatabase, Version, check_tag
from tidemill.store.query import check_field
from tidemill.streams.samples import ChannelSampleConsumer
from tidemill.streams.sources import Drawn
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.base import PollResult, Worker
from tidemill.workers.counted_episodes import counted_of
from tidemill.workers.elo_rating import performance
from tidemill.workers.info_numbers import FIELD, Numbers, by_name, means, unpack

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
    is the stage (from 1) in which it was evaluated.

    Evaluations of different policies may have one name: in the metrics each one's worker
    group then stands before it, ``GROUP/evaluation/return``.

    While there is no new version to be evaluated, its actors wait: no episode is taken
    from them.
    """

    order: ClassVar[int] = 4

    policy: str = "policy"
    samples: str = "evaluation"
    games: int = 100
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
        self.check_least(games=1)
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
        return Port(self.samples, "consume"), Port(self.policy, "draw")

    def measures(self) -> tuple[str, ...]:
        won = () if self.drawn is None else ("win_rate", "elo")
        own = ("return", "return_low", "return_high", "length", "version", "games", "discarded", "info/")
        return tuple(f"{self.name}/{metric}" for metric in (*own, *won))

    def records(self) -> tuple[str, ...]:
        won = () if self.drawn is None else ("win_rate", "elo", "beats")
        return tuple(f"{self.name}/{what}" for what in ("return", "length", "stage", "info/", *won))

    def check(self, experiment: Experiment) -> None:
        """Raise `ConfigError` unless those who fill the stream are actors that play what
        is evaluated, and for two evaluations that go by one name or move one tag."""
        for worker in experiment.holders(self.samples, "produce"):
            self._check_judge(worker, experiment.workers[group_of(worker)])
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

    def _configure(self, facts: Facts) -> Facts:
        config, context = self._config, self.context
        if context.folder is None:
            raise ConfigError(
                "evaluation takes versions from the run's parameter database, but the run keeps no folder"
            )
        edges = context.edges(f"samples/{config.samples}/")
        actors = context.experiment.groups(ActorConfig)
        judges = [actors[group_of(edge.source)] for edge in edges]
        self._policy_index = list(context.experiment.policies).index(config.policy)
        self._database = ParameterDatabase(Path(context.folder) / PARAMETERS)
        channels = [context.endpoints.consumer(edge.name) for edge in edges]
        self._consumer = ChannelSampleConsumer(channels, 0, 0)
        self._seats = sum(judge.lanes for judge in judges) * facts.samples[config.samples].seats_per_lane
        self._each = counted_of(0, self._seats, config.games)  # games of every seat: whole rounds
        self._return, self._elo, self._beats, self._in = (
            f"{config.name}/{what}" for what in ("return", "elo", "beats", "stage")
        )
        return Facts()

    def _versions(self) -> list[Version]:
        return self._database.versions(self._config.policy)

    def _enter_stage(self, options: Mapping[str, Any]) -> None:
        self._frozen = None  # what was played so far was of another stage

    def _poll(self) -> PollResult:
        if self._frozen is None:
            self._try(self._freeze)
        taken = 0
        while (
            self._frozen is not None
            and taken < MOST_EPISODES
            and (sample := self._consumer.consume()) is not None
        ):
            taken += self._count(sample)
            self._consumer.release()
            if len(self._played) == self._seats and min(self._played.values()) >= self._each:
                self._try(self._conclude)
        return PollResult(taken, taken)

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

    def _freeze(self) -> None:
        """Let the tag point to the newest version, once there is one that was not
        evaluated."""
        if monotonic() - self._looked < LOOK:
            return
        self._looked = monotonic()
        newest = self._versions()[-1:]
        if not newest or newest[0].version <= self._last or self._return in newest[0].means:
            return
        try:
            self._database.tag(self._config.policy, self._config.tag, newest[0].version)
        except VersionGone:  # collected meanwhile: there is a newer one
            return
        (self._frozen,), self._last = newest, newest[0].version
        self._played.clear()
        self._returns, self._lengths, self._infos, self._against = [], [], [], {}
        self.context.endpoints.bell.ring()  # what lies in the stream was announced long ago

    def _count(self, sample: Sample) -> int:
        """Count the episodes of the frozen version that are among the first of their
        seat. Return how many there are in the sample."""
        frozen, ends = self._frozen, sample["info_mask"].nonzero()
        assert frozen is not None
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
                self._discarded += 1
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
                self._database.record(
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
        self._database.record(
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
        self._frozen = None

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
