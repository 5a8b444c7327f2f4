"""The trainer worker: takes samples until a batch is full, updates, publishes a version,
and keeps checkpoints. The limits of a run are here.

samples → buffer → batch → algorithm.update → version + 1 → parameter stream

Several equal trainers of one policy each take samples of their own and sum their
gradients (`workers.data_parallel`).
"""

from collections.abc import Callable, Iterator, Sequence
from math import ceil, isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tidemill.api.algorithm import Algorithm, DataParallel
from tidemill.api.buffer import Buffer, Counts, Demand, Held
from tidemill.api.control import Adopt, Facts, Notice, Saving, State, Statistics
from tidemill.api.edges import number
from tidemill.api.experiment import Context
from tidemill.api.policy import check_weights
from tidemill.api.policy_header import plain_spaces, write_label
from tidemill.api.stream import SampleConsumer
from tidemill.core.clock import awake
from tidemill.core.errors import CheckpointError, ConfigError, did_you_mean
from tidemill.core.memory import Need
from tidemill.core.schema import Arrays
from tidemill.core.seeding import derive_seed
from tidemill.nets.device import choose_device
from tidemill.store.checkpoint import Found, checkpoint_name, read_newest, write_checkpoint
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase
from tidemill.streams.parameters import ParameterPublisher
from tidemill.streams.samples import ChannelSampleConsumer
from tidemill.workers.base import PollResult, Worker
from tidemill.workers.counters import Counters
from tidemill.workers.data_parallel import Peers
from tidemill.workers.row_schema import misfit_of_rows
from tidemill.workers.trainer_config import COUNTED, Trainer
from tidemill.workers.version_metadata import TrainingReturns, field_of, settings_of, with_settings
from tidemill.workers.version_writer import LAST_PUSH, VersionWriter


class Kept(NamedTuple):
    """What a checkpoint keeps: files of arrays, facts, and folders: name → who writes its
    files."""

    arrays: dict[str, Arrays]
    facts: dict[str, Any]
    folders: dict[str, Callable[[Path], None]]


class TrainerWorker(Worker):
    """See the module's text. Among equal trainers the first one reports updates and
    writes checkpoints."""

    def __init__(self, context: Context, config: Trainer) -> None:
        super().__init__(context)
        self._config = config
        self.counters = Counters()
        self._saved = -1, -1  # updates and steps at the newest checkpoint
        self._folder = Path(context.folder) / "checkpoints" / config.policy if context.folder else None
        self._versions: VersionWriter | None = None
        self._returns = TrainingReturns()
        self._adopted: dict[str, float] = {}  # settings of the algorithm, where adoptions have changed them
        self._settings: dict[str, float] = {}  # all of them, as the parameter database calls them
        self._peers = Peers(self.clock)
        self._batch_steps = 0  # of the last update
        self._life = self._train()
        self._reason: str | None = None  # why the run ends, once that is known

    def _configure(self, facts: Facts) -> Facts:
        config, context = self._config, self.context
        experiment, endpoints = context.experiment, context.endpoints
        producers = [edge.name for edge in context.edges(f"samples/{config.samples}/")]
        if config.policy not in facts.spaces:
            raise ConfigError(
                f'policy "{config.policy}" is trained, but no agent spec plays it, so that nobody knows its '
                "spaces; let one play it "
                f"(samples=None keeps none of its rows); {did_you_mean(config.policy, facts.spaces)}"
            )
        self._facts, self._spaces = facts.samples[config.samples], facts.spaces[config.policy]
        if self._facts.mode == "concise":
            raise ConfigError(
                f'sample stream "{config.samples}" has an episode in each row (AgentSpec.mode = "concise"), '
                "which cannot be trained on; "
                'take mode = "full" for whole episodes'
            )
        own = self._facts
        source = ChannelSampleConsumer(
            [endpoints.consumer(e) for e in producers], own.burn_in, own.bootstrap, own.cut
        )
        for offered in source.offered() or ():
            if misfit := misfit_of_rows(offered.schema, experiment.policies[config.policy], self._spaces):
                raise ConfigError(
                    f'policy "{config.policy}" is trained on sample stream "{config.samples}", which holds '
                    f"other rows than it goes with: {misfit}; "
                    "take the stream of the agents that play it, or of agents with its spaces and whose "
                    "policy has its state"
                )
        rows = None if config.batch_size is None else -(-config.batch_size // config.count)
        samples = ceil(experiment.samples_at_once(context.name, config.samples) * own.at_once)
        folder = Path(context.folder) if context.folder else None
        seed = derive_seed(experiment.seed, context.name, "buffer")
        found = None
        if context.resume is not None:
            assert self._folder is not None
            # the runner has looked: damaged ones are out of the way, and policies differ
            # in updates
            found = read_newest(self._folder)
            check_weights(experiment.policies[config.policy], self._spaces, found.arrays.get("policy", {}))
        self._buffer = self._build_buffer(
            source, Demand(rows, samples, config.max_policy_lag, config.count, seed, folder), found
        )
        device = choose_device(config.device, number(context.name))
        policy = experiment.policies[config.policy].build_on(
            device, self._spaces, derive_seed(experiment.seed, "policy", config.policy)
        )
        self._policy = policy
        if found is not None:
            self._restore(found)
        else:
            self._algorithm = self._build_algorithm()
            policy.version = 0
        self._peers = Peers.of(context, config, self._algorithm, self.clock)
        edges = context.edges(f"parameters/{config.policy}/")
        self._publisher = ParameterPublisher(endpoints.writer(edges[0].name), policy) if edges else None
        if self._publisher is not None:
            self._publisher.publish(policy)
        self._open_versions()
        weights = sum(array.nbytes for array in policy.parameters().values())
        own_needs = [Need("parameters", 3 * weights)] if edges else []
        return Facts(memory=(*own_needs, *self._peers.needs(self._algorithm, weights), *self._buffer.needs))

    def _build_buffer(self, source: SampleConsumer, demand: Demand, found: Found | None) -> Buffer:
        if self._facts.mode == "transitions":
            raise ConfigError(
                f'sample stream "{self._config.samples}" has rows that are sent one by one, for a replay '
                "memory; set buffer and ratio, or take Actors in place of ReplayActors"
            )
        return self._config.buffer.build(source, demand)

    def _build_algorithm(self) -> Algorithm:
        """Return the algorithm, as it is set now. After each adoption it draws other
        numbers."""
        path = (self.name, self.counters.adopted) if self.counters.adopted else (self.name,)
        config = with_settings(self._config.algorithm, self._adopted)
        self._settings = {field_of(name): value for name, value in settings_of(config).items()}
        return config.build(self._policy, derive_seed(self.context.experiment.seed, *path))

    def start(self) -> None:
        self._started = self._last_save = awake()
        super().start()

    def pause(self) -> None:
        self._count_time()
        super().pause()

    def exit(self, reason: str = "") -> None:
        """See `Worker.exit`. While there is something to end first this one works on."""
        if not self._works_on() or self.state not in (State.RUNNING, State.PAUSED):
            super().exit(reason)
        elif self._reason is None:
            self._end(reason)
            if self.state is State.PAUSED:
                self.start()

    def _works_on(self) -> bool:
        """Equal trainers end together, before the next update that one of them would
        begin."""
        return self._peers.others

    def _end(self, reason: str) -> None:
        self._reason = reason
        self._peers.begin_to_end()

    def _count_time(self) -> None:
        now = awake()
        if self.state is State.RUNNING:
            self.counters.seconds += now - self._started
        self._started = now

    def _poll(self) -> PollResult:
        result = next(self._life)
        if self._reason is not None and self._peers.missing() and not self.ended:
            self._peers.leave(self._algorithm, self._policy, self.counters.updates)
            super().exit(self._reason)
        return result

    def _train(self) -> Iterator[PollResult]:
        """The trainer's life, in pieces that never wait."""
        counters, result = self.counters, PollResult()
        while True:
            taken: Sequence[Held] | None = None
            while self._reason is None and (taken := self._buffer.take(self._policy.version)) is None:
                if self.context.experiment.limits.seconds is not None:
                    self._count_time()
                    self._end_at_limits()
                if self._reason is None:
                    yield PollResult()
            batch = taken or ()
            counts, self._buffer.counts = self._buffer.counts, Counts()
            agreed = yield from self._peers.agree(self._reason is not None, batch, counts)
            counters.add(agreed)
            if agreed.ending:
                break
            if not agreed.rows:
                self._buffer.release()
                yield PollResult(0, 1)
                continue
            lags = self._lags(batch)
            self._returns.add(held.sample for held in batch if not held.uses)
            left = self.clock.enter("train")
            metrics = yield from self._peers.update(
                self._algorithm, self._policy, [held.sample for held in batch], self._progress()
            )
            self.clock.enter(left)
            counters.updates += 1
            counters.rows += int(agreed.fresh)
            before, counters.steps = counters.steps, counters.rows // self._facts.seats_per_lane
            self._batch_steps = counters.steps - before
            self._policy.version = counters.updates
            self._publish()
            if self._config.max_policy_lag == 0:
                # Then all have published: whoever gets a sample back finds the new
                # version, whichever trainer it asks.
                yield from self._peers.sum(np.zeros(1))
            self._buffer.release()
            self._count_time()
            self._report_update({**metrics, **lags})
            if awake() - self._last_save >= self._config.checkpoint_seconds:
                self._save()
            if self._versions is not None and self._peers.first:
                self._versions.look(self._policy, self._version_counters())
            self._end_at_limits()
            result = PollResult(sum(held.trained for held in batch), 1)
            if self._reason is None:
                yield result
        super().exit(self._reason or "")
        yield result

    def _publish(self) -> None:
        if self._publisher is not None:
            left = self.clock.enter("copy")
            self._publisher.publish(self._policy)
            self.clock.enter(left)

    def _lags(self, batch: Sequence[Held]) -> dict[str, float]:
        """Return how many versions the rows that enter the loss are behind on average,
        and the oldest one."""
        version = self._policy.version
        behind = sum(held.trained * version - held.stamps for held in batch)
        rows = sum(held.trained for held in batch)
        return {
            "lag/mean": behind / max(rows, 1),
            "lag/max": float(max((held.lag(version) for held in batch), default=0)),
        }

    def _progress(self) -> float:
        return self.counters.progress(self.context.experiment.limits)

    def _end_at_limits(self) -> None:
        if self._reason is None and (reason := self._reached()):
            self._end(reason)

    def _steps_done(self) -> bool:
        limit = self.context.experiment.limits.steps
        return limit is not None and self.counters.steps >= limit

    def _why_more(self) -> str:
        return f"an update takes whole samples, {self._batch_steps:,} steps in the last one"

    def _reached(self) -> str:
        limits, counters = self.context.experiment.limits, self.counters
        if self._steps_done():
            over = counters.steps - (limits.steps or 0)
            return f"{counters.steps:,} env steps trained" + (
                f", {over:,} more than the limit: {self._why_more()}" if over else ""
            )
        if limits.updates is not None and counters.updates >= limits.updates:
            return f"{counters.updates:,} updates done"
        if limits.seconds is not None and counters.seconds >= limits.seconds:
            return f"{counters.seconds:.0f} s of training"
        return ""

    def _report_update(self, metrics: dict[str, float]) -> None:
        if not self._peers.first:
            return
        counters = self.counters
        told = {name: float(getattr(counters, name)) for name in COUNTED}
        values = {"step": float(counters.steps), "update": float(counters.updates), **told, **metrics}
        self.report(Statistics(self.polls, values, {"seconds": counters.seconds}, update=True))

    def _adopt(self, message: Adopt) -> None:
        """Go on from a version of another policy, normalisers included, as if an update
        had led there: it is a version more, and is published.

        Samples of versions before it are dropped from now on. What is taken over are
        weights and settings, as in Jaderberg et al. 2017, section 3, "exploit". The
        optimiser begins anew: its moments were of the weights that are given up, and
        versions hold none.
        """
        assert self.context.folder is not None
        parameters, _ = ParameterDatabase(Path(self.context.folder) / PARAMETERS).load(
            message.source, message.version
        )
        self._adopted |= message.settings
        self.counters.updates += 1
        self.counters.adopted = self._buffer.least = self.counters.updates
        self._algorithm = self._build_algorithm()
        self._policy.load(parameters, self.counters.updates)
        self._returns.clear()
        if self._publisher is not None:
            self._publisher.publish(self._policy)

    # ---- checkpoints -------------------------------------------------------------------

    def _save(self, final: bool = False) -> None:
        self._last_save = awake()
        if (
            not self._peers.first
            or self._folder is None
            or self._saved == (self.counters.updates, self.counters.steps)
        ):
            return
        self.report(Saving(self._config.policy, self.counters.updates))
        (policy, algorithm), besides = self._peers.state(self._algorithm, self._policy), self._kept()
        arrays = {"policy": policy, "algorithm": algorithm, **besides.arrays}
        spaces = plain_spaces(self._spaces)  # so that the policy can be built without its environment
        names = {"policy": self._config.policy, "experiment": self.context.experiment.name}
        facts = {**vars(self.counters), **names, "spaces": spaces, "settings": self._adopted, **besides.facts}
        try:
            write_checkpoint(
                self._folder,
                checkpoint_name(self.counters.updates),
                arrays,
                facts,
                self._config.checkpoints,
                besides.folders,
            )
        except CheckpointError as error:
            if final:
                raise
            self.report(Notice(str(error)))  # training goes on; the last good checkpoint is kept
            return
        self._beat()  # who hangs from now on does not save
        self._saved = self.counters.updates, self.counters.steps

    def _kept(self) -> Kept:
        """Return what checkpoints keep besides."""
        return Kept({}, {}, {})

    def _restore(self, found: Found) -> None:
        for name in vars(self.counters):
            kept = found.facts.get(name, 0)  # older checkpoints lack the newer ones
            if isinstance(kept, bool) or not isinstance(kept, (int, float)) or not isfinite(kept):
                raise CheckpointError(f"checkpoint {found.path} says {name} = {kept!r}, which is no count")
            setattr(self.counters, name, kept)
        self._adopted = found.facts.get("settings", {})
        self._algorithm = self._build_algorithm()
        self._policy.load(found.arrays["policy"], self.counters.updates)
        self._algorithm.load_state(found.arrays["algorithm"])
        if (rank := number(self.context.name)) and isinstance(self._algorithm, DataParallel):
            self._algorithm.separate(rank)
        self._saved = self.counters.updates, self.counters.steps

    def _open_versions(self) -> None:
        config, context = self._config, self.context
        if context.folder is None or config.database_seconds is None:
            return
        folder = Path(context.folder) / PARAMETERS
        text = write_label(context.experiment.policies[config.policy], self._spaces)
        self._versions = VersionWriter(
            folder, config.policy, config.database_seconds, config.database_versions, text, self._tell
        )
        if self._peers.first:
            self._versions.begin(self._policy, self._version_counters())

    def _tell(self, text: str) -> None:
        self.report(Notice(text))

    def _version_counters(self) -> dict[str, float]:
        """Return what the parameter database is to know of the present version. Of equal
        trainers the first one's episodes stand for all."""
        counters, reached = self.counters, self._returns.mean()
        known = {
            "env_steps": counters.steps,
            "seconds": counters.seconds,
            "adopted": counters.adopted,
            **self._settings,
        }
        return known if reached is None else {**known, "training_return": reached}

    def _on_exit(self) -> None:
        self._count_time()
        self._save(final=True)
        if self._versions is not None and self._peers.first:
            self._versions.end(self._policy, self._version_counters())

    def _close(self) -> None:
        if self._versions is not None:
            self._versions.wait(LAST_PUSH)
