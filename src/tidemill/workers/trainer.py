"""The trainer worker: takes samples until a batch is full, updates, publishes a version,
and keeps checkpoints. The limits of a run are here.

samples → buffer → batch → algorithm.update → version + 1 → parameter stream

Several equal trainers of one policy each take samples of their own and sum their
gradients (`workers.data_parallel`).
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tidemill.api.algorithm import UpdateFault
from tidemill.api.buffer import Buffer, BufferedSample, SampleCounts
from tidemill.api.control_messages import Adopt, Facts, SaveDue, State
from tidemill.api.experiment import Context
from tidemill.api.policy import VERSIONS_OF_LIFE
from tidemill.core.errors import ConfigError, returned
from tidemill.streams.samples import ChannelSampleConsumer
from tidemill.workers.base import PollResult, Worker
from tidemill.workers.learner import Extras, Learner
from tidemill.workers.trainer_config import Trainer


class TrainerWorker(Worker):
    """The trainer worker: it collects samples in its buffer, and trains, publishes and
    saves its policy."""

    _buffer: Buffer
    _source: ChannelSampleConsumer

    def __init__(self, context: Context, config: Trainer) -> None:
        super().__init__(context)
        self._config = config
        self.learner = Learner(
            context,
            config,
            self.clock,
            self.report,
            self._beat,
            self._extras,
            first_version=context.life * VERSIONS_OF_LIFE,
        )
        self._exact = context.experiment.exact_resume
        # Checkpoints say what was taken since the last update; in lockstep that is one
        # sample of each producer, in their order.
        self._keeps_taken = self._exact and config.max_policy_lag != 0
        self._told = False  # that a checkpoint is due
        self._batch_steps = 0  # of the last update
        self._loop = self._train()
        self._reason: str | None = None  # why the run ends, once that is known

    def _configure(self, facts: Facts) -> Facts:
        config, learner = self._config, self.learner
        source = self._source = learner.connect(facts)
        if learner.found is not None and not self.context.life and "taken" in learner.found.facts:
            source.load_state(learner.found.facts["taken"])
        if learner.samples.mode == "transitions":
            raise ConfigError(
                f'sample stream "{config.samples}" has steps that are sent one by one, for a replay memory; '
                "take ReplayTrainer, or Actors in place of ReplayActors"
            )
        demand = learner.demand(config.batch_size, config.max_policy_lag)
        self._buffer = returned(config.buffer.build(source, demand), Buffer, config.buffer.build)
        self._buffer.least = learner.first_version  # what the weights of undone updates have played
        needs = *learner.build(), *self._buffer.needs
        copies = learner.algorithm.batch_copies
        return Facts(memory=(*needs, *demand.batches(source.offered() or (), copies)))

    def start(self) -> None:
        self.learner.start()
        super().start()

    def pause(self) -> None:
        self.learner.limits.pause()
        super().pause()

    def exit(self, reason: str = "") -> None:
        """See `Worker.exit`. Equal trainers end together, before the next update that one
        of them would begin."""
        if not self.learner.equal_trainers.others or self.state not in (State.RUNNING, State.PAUSED):
            super().exit(reason)
        elif self._reason is None:
            self._end(reason)
            if self.state is State.PAUSED:
                self.start()

    def _end(self, reason: str) -> None:
        self._reason = reason
        self.learner.equal_trainers.begin_to_end()

    def _poll(self) -> PollResult:
        result, learner = next(self._loop), self.learner
        if self._reason is not None and learner.equal_trainers.missing() and not self.ended:
            learner.equal_trainers.leave(learner.algorithm, learner.policy, learner.version)
            super().exit(self._reason)
        return result

    def _train(self) -> Iterator[PollResult]:
        """The trainer's life, in pieces that never wait."""
        learner, result = self.learner, PollResult()
        counters = learner.counters
        while True:
            taken: Sequence[BufferedSample] | None = None
            while self._reason is None and (taken := self._buffer.take(learner.policy.version)) is None:
                if self.context.experiment.limits.seconds is not None:
                    learner.limits.count_time()
                    self._end_at_limits()
                if self._reason is None:
                    yield PollResult()
            batch = taken or ()
            counts, self._buffer.counts = self._buffer.counts, SampleCounts()
            agreed = yield from learner.equal_trainers.agree(
                self._reason is not None, not learner.changes, batch, counts
            )
            if not agreed.unchanged:  # all have been told, and all of the same first
                learner.apply_change()
            counters.add(agreed)
            if agreed.ending:
                break
            if not agreed.rows:
                self._buffer.release()
                yield PollResult(0, 1)
                continue
            learner.returns.add(buffered.sample for buffered in batch if not buffered.uses)
            learner.follow_schedules()
            left = self.clock.enter("train")
            try:
                metrics = yield from learner.update(batch)
            except UpdateFault:
                learner.finish_update()
                learner.save_finite()
                raise
            self.clock.enter(left)
            metrics = learner.measured(metrics, batch)
            learner.finish_update()
            if learner.went_back:  # what others played by weights that were given up is not trained on
                self._buffer.least = learner.version
            counters.rows += int(agreed.fresh)
            before, counters.steps = counters.steps, counters.rows // learner.samples.seats_per_lane
            self._batch_steps = counters.steps - before
            learner.publish()
            if self._config.max_policy_lag == 0:
                # Then all have published: whoever gets a sample back finds the new
                # version, whichever trainer it asks.
                yield from learner.equal_trainers.sum(np.zeros(1))
            self._buffer.release()
            learner.limits.count_time()
            learner.report_update(metrics, self.polls)
            if learner.save_due():
                self._save_when_due()
            learner.look_at_versions()
            self._end_at_limits()
            result = PollResult(sum(buffered.trained for buffered in batch), 1)
            if self._reason is None:
                yield result
        super().exit(self._reason or "")
        yield result

    def _end_at_limits(self) -> None:
        why_more = f"an update takes whole samples, {self._batch_steps:,} steps in the last one"
        if self._reason is None and (reason := self.learner.limits.limit_reached(why_more)):
            self._end(reason)

    def _adopt(self, message: Adopt) -> None:
        """See `Learner.adopt`. Samples of versions before it are dropped from now on."""
        self.learner.adopt(message)
        self._buffer.least = self.learner.version

    def _change(self, settings: Mapping[str, float | None]) -> None:
        self.learner.change(settings)  # never within an update of a trainer without equals

    def _leave_alone(self) -> None:
        self.learner.equal_trainers.alone = True

    def _save_when_due(self) -> None:
        """Write a checkpoint; or say that it is due where the run is to be cut for it."""
        if not self._exact:
            self.learner.save()
        elif not self._told:
            self._told = True
            self.report(SaveDue())

    def _save(self) -> None:
        self._told = False
        self.learner.save(again=self._keeps_taken)

    def _extras(self) -> Extras:
        return Extras({}, {"taken": self._source.state()} if self._keeps_taken else {}, {})

    def _on_exit(self) -> None:
        self.learner.limits.count_time()
        self.learner.end(again=self._keeps_taken)

    def _close(self) -> None:
        self.learner.close()
