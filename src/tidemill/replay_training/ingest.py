"""How steps come into a replay memory: how many the actors may take, and who looks at
what they bring on its way: the open episodes of an exact run, those that phases end
with, the journal, and the lag of the policy that acted.
"""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from tidemill.api.algorithm import Sample
from tidemill.api.buffer import Demand, Received, ReplayBuffer
from tidemill.api.stream import SampleConsumer, TellingConsumer
from tidemill.api.worker import Context
from tidemill.core.errors import CheckpointError, ConfigError, returned
from tidemill.replay.limiter import Limiter, LimiterCounts, check_slack, parse_ratio, tasks_at_once
from tidemill.replay.retrain_journal import JournaledConsumer, JournalWriter, journal_path
from tidemill.replay_training.credit_grants import CreditGrants
from tidemill.replay_training.open_episodes import FILE as SLOTS
from tidemill.replay_training.open_episodes import OpenEpisodes, OpenEpisodeTracker, read_slots
from tidemill.replay_training.phases import Phases
from tidemill.replay_training.policy_lag import PolicyLag
from tidemill.replay_training.since_life import SinceLife
from tidemill.replay_training.steps_within_limit import StepsWithinLimit
from tidemill.replay_training.trainer_config import ReplayTrainer
from tidemill.store.checkpoint import FoundCheckpoint
from tidemill.streams.samples import ChannelSampleConsumer
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.checkpoint_writer import Contents

MEMORY = "buffer"


class ReplayIngest:
    """The ingest of trainer `config` takes in rows from `channels`. A resumed run takes
    back what was `found`; else that is None.

    header: what the journal says of the run
    take_in: is told of each sample as it is stored (`Algorithm.take_in`)
    tell: takes a text for the user
    """

    def __init__(
        self,
        context: Context,
        config: ReplayTrainer,
        channels: ChannelSampleConsumer,
        demand: Demand,
        found: FoundCheckpoint | None,
        header: Mapping[str, Any],
        take_in: Callable[[Sample], None],
        tell: Callable[[str], None],
    ) -> None:
        self._config, self._endpoints, self._tell = config, context.endpoints, tell
        self._channels, self._lives = channels, channels.lives()
        source: SampleConsumer = channels
        life = 0 if config.exact else context.life
        self._since: SinceLife | None = None
        if life:
            source = self._since = SinceLife(source, life, len(self._lives))
        seats = [block.lead[1] for block in source.offered() or ()]
        self.producers = [edge.name.split("/")[2] for edge in context.edges(f"samples/{config.samples}/")]
        self._cells = {edge.targets[0]: edge.name for edge in context.edges(f"credits/{config.samples}/")}
        cells = {actor: self._endpoints.writer(edge) for actor, edge in self._cells.items()}
        lanes = {
            name: worker.lanes if isinstance(worker, ActorConfig) else 1
            for name, worker in context.experiment.members()
        }
        self.grants = CreditGrants(cells, lanes, [*zip(self.producers, seats, strict=True)], life)
        slots = None if found is None or not config.exact else found.arrays.get(SLOTS)
        self._open: OpenEpisodes | None = None
        if config.exact:
            source = self._open = OpenEpisodes(source, len(seats))
            if slots is not None:
                self._open.restore(*read_slots(slots))
        limit, facts = context.experiment.limits.steps, {} if found is None else found.facts
        if limit is not None and self.grants.holding:
            source = StepsWithinLimit(source, limit - int(facts.get("steps", 0)))
        self._unfinished: OpenEpisodeTracker | None = None
        if config.finish_episodes:
            if self.grants.holding:
                raise ConfigError(
                    "finish_episodes = True needs targets of one lane, which begin and end their episodes "
                    "alone; take lanes = 1, and ring more"
                )
            source = self._unfinished = OpenEpisodeTracker(source, seats)
            if self._open is not None:
                self._unfinished.restore(self._open.slots)
        self.journal: JournalWriter | None = None
        if config.journal and demand.folder is not None:
            end = None if found is None else _journal_end(found)
            if found is not None:
                self._look_for_changes(found, tell)
            self.journal = JournalWriter(
                journal_path(demand.folder, config.policy), source.offered() or [], dict(header), end
            )
            source = JournaledConsumer(source, self.journal)
        self.policy_lag = PolicyLag(TellingConsumer(source, take_in))
        build = config.buffer.build
        self.buffer = returned(build(self.policy_lag, demand), ReplayBuffer, build)
        self.limiter = self._limit(found, slots is not None, tell)
        self.phases = Phases(
            self.limiter,
            self.grants,
            config.iteration_steps,
            limit,
            self._unfinished,
            facts,
        )

    def _limit(self, found: FoundCheckpoint | None, goes_on: bool, tell: Callable[[str], None]) -> Limiter:
        """Return what limits the steps of the memory, which takes back what it had. Where
        it `goes_on` steps that were in flight are so again."""
        config, grants, buffer = self._config, self.grants, self.buffer
        assert config.ratio is not None
        ratio, at_once = parse_ratio(config.ratio), tasks_at_once(config.ratio)
        slack = grants.slots * (1 if config.exact else 2) if config.slack is None else config.slack
        check_slack(slack, grants.holding)
        if found is None:
            return Limiter(ratio, slack, at_once=at_once)
        kept = found.facts.get("limiter")
        if kept is None:
            raise CheckpointError(
                f"checkpoint {found.path} is of a run without a ratio, and this one has ratio = "
                f"{config.ratio}; train anew"
            )
        counts = LimiterCounts(**kept)
        if Fraction(found.facts["ratio"]) != ratio:
            tell(
                f"ratio was {found.facts['ratio']} and is {ratio}: steps that are stored from now on owe by "
                "the new one"
            )
            if counts.waived is not None:
                counts.waived = counts.started - counts.voided if goes_on else counts.committed
                counts.base = counts.tasks
        limiter = Limiter(ratio, slack, counts, lost=not (goes_on and config.keep_buffer), at_once=at_once)
        if goes_on:
            grants.go_on(limiter.in_flight)
        if config.keep_buffer:
            buffer.restore(found.path / MEMORY)
            if buffer.sampleable:
                limiter.sampleable()
        else:
            limiter.warm_up_again()
            if self.journal is not None:
                self.journal.emptied()
        return limiter

    def _journaled(self) -> dict[str, Any]:
        """Return those settings that a journal is read by, and that it has from its
        beginning to its end."""
        return {"exact": self._config.exact, "batch_size": self._config.batch_size}

    def _look_for_changes(self, found: FoundCheckpoint, tell: Callable[[str], None]) -> None:
        for name, value in self._journaled().items():
            if (was := found.facts.get("journaled", {}).get(name, value)) != value:
                tell(
                    f"{name} was {was} and is {value}: the journal goes on, but the run cannot be trained "
                    "again from it (tidemill retrain)"
                )

    def receive(self) -> list[Received]:
        """Store what has come, and return that."""
        arrivals = self.buffer.receive()
        if self._since is not None and (undone := self._since.take_undone()):
            self._tell(f"{undone:,} env steps that actors had sent to the trainer's life before are undone")
        for channel, committed, voided, returns in arrivals:
            self.grants.receive(channel, committed + voided)
            if committed:
                self.limiter.commit(committed)
            if voided:
                self.limiter.void(voided)
            self.phases.returns += returns if self._config.iteration_steps is not None else ()
        if arrivals and self.buffer.sampleable:
            self.limiter.sampleable(self.grants.slots - 1 if self._config.exact else 0)
        if (lives := self._channels.lives()) != self._lives:
            self._begin_lives(lives)
        return arrivals

    @property
    def awaits_life(self) -> bool:
        """True while an actor that lives again makes its environments."""
        return None in self._channels.lives()

    def _begin_lives(self, lives: Sequence[int | None]) -> None:
        """Count the steps that were in flight of actors which live again as lost, and
        grant their new lives steps of their own. Their open episodes are cut by the rows
        that these begin with."""
        for channel, life in enumerate(lives):
            if life is None or life == self._lives[channel]:
                continue
            self._lives[channel] = life
            actor = self.producers[channel]
            lost = self.grants.begin_life(channel, self._endpoints.writer(self._cells[actor]))
            self.limiter.void(lost)
            if self._unfinished is not None:  # else its new life is granted steps of them
                self._unfinished.cut(channel)
            if lost:
                self._tell(f"{lost:,} env steps that {actor} had not sent as it died are void")

    def extras(self, steps: int) -> Contents:
        """Return what checkpoints keep of it."""
        facts = {
            "limiter": vars(self.limiter.counts),
            "owed": self.limiter.owed,
            "ratio": str(self.limiter.ratio),
            **self.phases.facts(steps),
        }
        if self.journal is not None:
            facts["journal"], facts["journaled"] = self.journal.sync(), self._journaled()
        whole = self._config.keep_buffer
        return Contents(
            {} if self._open is None else {SLOTS: self._open.arrays(whole)},
            facts,
            {MEMORY: self.buffer.save} if whole else {},
        )


def _journal_end(found: FoundCheckpoint) -> int:
    if "journal" not in found.facts:
        raise CheckpointError(
            f"checkpoint {found.path} is of a run without a journal, which cannot begin in its middle; "
            "resume with journal = False"
        )
    return int(found.facts["journal"])
