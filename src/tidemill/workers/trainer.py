"""The trainer worker: takes samples until a batch is full, updates, publishes a version,
and keeps checkpoints. The limits of a run are here.

samples → buffer → batch → algorithm.update → version + 1 → parameter stream

Several equal trainers of one policy each take samples of their own and sum their
gradients (`workers.data_parallel`). Where one dies the others keep their batches and wait
(`TrainerWorker._stay`).
"""

from collections.abc import Iterator, Sequence
from math import inf
from typing import cast

import numpy as np

from tidemill.api.algorithm import UpdateFault
from tidemill.api.buffer import Buffer, BufferedSample, SampleCounts
from tidemill.api.control_messages import (
    Adopt,
    ChangeSettings,
    EnterStage,
    Facts,
    Hold,
    Holding,
    Rejoin,
    RoundOver,
    SaveDue,
    State,
    Stay,
    Staying,
)
from tidemill.api.edges import number
from tidemill.api.policy import VERSIONS_OF_LIFE
from tidemill.api.worker import Context
from tidemill.core.clock import awake
from tidemill.core.cut import Part
from tidemill.core.errors import ConfigError, EnvironmentFault, returned
from tidemill.core.memory import own_of
from tidemill.streams.all_reduce import SumBroken
from tidemill.streams.samples import ChannelSampleConsumer
from tidemill.workers.base import PollResult, Worker
from tidemill.workers.cut_files import by_other_code, has_part, holds_samples, own_part
from tidemill.workers.learner import Learner
from tidemill.workers.stages import StagesByRound, stages_by_round
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
            # in runs that resume exactly nobody outlives the weights that are undone
            first_version=0 if context.experiment.exact_resume else context.life * VERSIONS_OF_LIFE,
            # one that resumes exactly does that update again, and whole
            hurried=(lambda: False) if context.experiment.exact_resume else self.hurried,
        )
        self._exact = context.experiment.exact_resume
        self._has_part = self._exact and has_part(context.experiment, context.name)
        self._holds = self._exact and holds_samples(config)
        self._told = False  # that a checkpoint is due
        self._to_rest = False  # for a cut, together with equal trainers
        self._held_at: float | None = None  # when it was told to rest for a cut that is not over
        # Whether an update of equal trainers is done within the turn of the one whose
        # batch is full last, so that nobody sees a half of it: they take turns then.
        self._at_once = self._exact and config.count > 1 and config.max_policy_lag != 0
        self._stays = False  # until equal trainers that have died live again
        self._asked = Stay(0, ())  # last, that one of them has died
        self._meets = False  # from when its batch is full until the update is done
        self._finished = False  # the last checkpoint is written
        self._batch_steps = 0  # of the last update
        self._rounds = StagesByRound() if stages_by_round(context.experiment) else None
        self._loop = self._train()
        self._reason: str | None = None  # why the run ends, once that is known

    def _configure(self, facts: Facts) -> Facts:
        config, learner = self._config, self.learner
        source = self._source = learner.connect(facts)
        held: Part | None = None
        if learner.found is not None and self._has_part:
            with own_part(self.context) as part:
                if "taken" in part:
                    source.load_state(part["taken"])
                learner.own_state, held = part.get("algorithm"), part.get("buffer")
        if learner.samples.mode == "transitions":
            raise ConfigError(
                f'sample stream "{config.samples}" has steps that are sent one by one, for a replay memory; '
                "take ReplayTrainer, or Actors in place of ReplayActors"
            )
        demand = learner.demand(config.batch_size, config.max_policy_lag)
        self._buffer = returned(config.buffer.build(source, demand), Buffer, config.buffer.build)
        self._load_buffer(held)
        needs = learner.build()
        if self._rounds is not None:
            self._rounds.number = learner.counters.rounds
        self._buffer.least = learner.least  # what the weights of undone updates have played
        batches = demand.batches(source.offered() or (), learner.algorithm.batch_copies)
        self._of_update = own_of((*needs, *batches))
        return Facts(memory=(*needs, *self._buffer.needs, *batches))

    def _unfilled(self) -> int:
        return self._buffer.unfilled + (0 if self._batches else self._of_update)

    def _load_buffer(self, state: Part | None) -> None:
        """Be where the buffer was when the run was cut, if it was. Raises `ConfigError`
        for one that could not tell, in a run that resumes exactly."""
        config, buffer = self._config, self._buffer
        if self._holds and buffer.state() is None:
            raise ConfigError(
                f"exact_resume = True cannot be had here: {type(config.buffer).__name__}, the buffer of "
                f"{self.context.name}, has no state() (see tidemill.api.buffer); give it one, take Queue(), "
                "or leave out exact_resume"
            )
        if state is not None:
            with by_other_code(f"what {type(buffer).__name__} held when the run was cut"):
                buffer.load_state(state["held"])
                buffer.counts = SampleCounts(**state["counts"])

    def start(self) -> None:
        if self.state is State.READY:
            self.learner.settings.apply_all(self.learner.algorithm)  # what all were told before this life
        self.learner.start()
        if self._held_at is not None:
            self._held_at = awake()  # nobody has waited for a cut in a pause
        super().start()

    def pause(self) -> None:
        """See `Worker.pause`. What is trained, and not saved, is saved in the pause."""
        trained = self.state is State.RUNNING and self._reason is None
        self.learner.pause()
        super().pause()
        if trained and self.learner.save_due(inf):
            self._save_when_due()

    def called(self) -> bool:
        # to end, or to go on after a death, takes several turns
        due = self._reason is not None or self.learner.equal_trainers.lost
        return not self.ended and (due or super().called())

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
        self._reason, self._held, self._to_rest = reason, False, False
        self.learner.equal_trainers.begin_to_end()

    def _poll(self) -> PollResult:
        result, learner, equals = self._go_on(), self.learner, self._equals()
        if len(equals) == self._config.count and all(each._meets for each in equals):
            while any(each._meets for each in equals):
                for each in equals:
                    if each is not self:
                        each.attend()
                    elif self._meets:
                        result = self._go_on()
        ours = learner.algorithm, learner.policy, learner.version
        if self._reason is None or self.ended:
            return result
        if learner.equal_trainers.missing():
            learner.equal_trainers.leave(*ours)
            super().exit(self._reason)
        elif self._hurry and not self._exact and learner.equal_trainers.undo(*ours):
            super().exit(self._reason)
        return result

    def _equals(self) -> "list[TrainerWorker]":
        """Return all equal trainers where they update at once."""
        return [self, *cast("Sequence[TrainerWorker]", self.attendants)] if self._at_once else []

    def _go_on(self) -> PollResult:
        try:
            return next(self._loop)
        except BaseException:
            for each in self._equals():
                each._meets = False  # nobody waits for one that has failed
            raise

    def attend(self) -> None:
        """Go on with the update for which all equal trainers have a batch."""
        if not self._meets:
            return
        try:
            result = self._go_on()
            self._samples += result.sample_count
            self._batches += result.batch_count
            if self.ended:
                self._close()
        except BaseException as error:
            self._fail(error)

    def _train(self) -> Iterator[PollResult]:
        """The trainer's life, in pieces that never wait."""
        self._end_at_limits()  # those of a life before, that died as it ended
        while True:
            try:
                yield from self._train_together()
                return
            except SumBroken:
                self.learner.undo_update()
                yield from self._stay()

    def _train_together(self) -> Iterator[PollResult]:
        """The same, until a sum of equal trainers breaks, since one has died: raises
        `SumBroken` then. The batch that was taken for an update stays what is trained on
        next."""
        learner, result = self.learner, PollResult()
        counters = learner.counters
        while True:
            taken: Sequence[BufferedSample] | None = None
            while self._reason is None and not self._to_rest and not learner.equal_trainers.lost:
                if (taken := self._next_batch()) is not None:
                    break
                if self.context.experiment.limits.seconds is not None:
                    learner.limits.count_time()
                    self._end_at_limits()
                if self._reason is None:
                    yield PollResult()
            batch, self._meets = taken or (), True
            agreed = yield from learner.equal_trainers.agree(
                self._reason is not None,
                not learner.settings.changes,
                batch,
                self._buffer.counts,
                waiting=taken is None,
                cut=self.cut if self._to_rest else 0,
            )
            if not agreed.unchanged:  # all have been told, and all of the same first
                learner.settings.apply_next(learner.algorithm)
            if agreed.ending:
                if not self._holds:  # see `_count`
                    counters.add(agreed)
                    self._buffer.counts = SampleCounts()
                break
            if agreed.waiting:
                self._meets = False
                self._rest(int(agreed.cut))
                yield PollResult()
                continue
            if not agreed.rows:
                self._meets = False
                self._end_round()
                self._buffer.release()
                self._tell_round()
                yield PollResult(0, 1)
                continue
            learner.settings.follow(learner.algorithm)
            left = self.clock.enter("train")
            try:
                metrics = yield from learner.update(batch)
            except UpdateFault:
                counters.add(agreed)
                learner.finish_update()
                learner.save_finite()
                raise
            except EnvironmentFault:  # before its first step: there is none that may be done
                learner.save_finite()
                raise
            self.clock.enter(left)
            metrics = learner.measured(metrics, batch)
            counters.add(agreed)
            self._buffer.counts = SampleCounts()
            learner.returns.add(buffered.sample for buffered in batch if not buffered.uses)
            learner.finish_update()
            if learner.went_back:  # what others played by weights that were given up is not trained on
                self._buffer.least = learner.version
            counters.rows += int(agreed.fresh)
            before, counters.steps = counters.steps, counters.rows // learner.samples.seats_per_lane
            self._batch_steps = counters.steps - before
            self._end_round()
            learner.look_at_versions()  # first: who draws one does so once its samples were given back
            learner.publish()
            if self._config.max_policy_lag == 0:
                # Then all have published: whoever gets a sample back finds the new
                # version, whichever trainer it asks.
                try:
                    yield from learner.equal_trainers.sum(np.zeros(1))
                except SumBroken:  # the dead one publishes it in its next life
                    yield from self._stay()
            self._buffer.release()
            learner.limits.count_time()
            learner.report_update(metrics, self.polls)
            self._tell_round()
            if learner.save_due():
                self._save_when_due()
            self._end_at_limits()
            result = PollResult(sum(buffered.trained for buffered in batch), 1)
            self._meets = False
            if self._reason is None:
                yield result
        yield from learner.equal_trainers.end(self._finish)
        self._meets = False
        super().exit(self._reason or "")
        yield result

    # ---- deaths of equal trainers ------------------------------------------------------

    def _await(self, message: Stay) -> None:
        """See `Stay`. All that others have brought to sums is there by now, so that the
        next one that lacks a part breaks."""
        self.learner.equal_trainers.lose(message.lost)
        self._asked = message
        if self._stays:
            self._answer()

    def _stay(self) -> Iterator[PollResult]:
        """Stay as this trainer is until those that have died live again."""
        self._stays = True
        self.learner.equal_trainers.break_off()
        if self.learner.equal_trainers.told_lost:  # else that is on its way
            self._answer()
        self.clock.enter("wait")
        while self.learner.equal_trainers.lost:
            yield PollResult()
        self._stays = False

    def _answer(self) -> None:
        learner, asked = self.learner, self._asked
        saved = learner.save_for_others() if asked.save else None
        self.report(Staying(asked.number, learner.counters.updates, saved))

    def _rejoin(self, message: Rejoin) -> None:
        """See `Rejoin`."""
        if self.state is State.CONFIGURING:
            self.learner.joins = message
        else:
            self.learner.rejoin(message)

    def _obey(self) -> bool:
        """See `Worker._obey`. One that is paused comes to where it stays all the same."""
        obeyed = super()._obey()
        if obeyed and self.state is State.PAUSED and self.learner.equal_trainers.lost and not self._stays:
            self._go_on()
            if self.ended:
                self._close()
                return False
        return obeyed

    # ---- limits, cuts, checkpoints -----------------------------------------------------

    def _next_batch(self) -> Sequence[BufferedSample] | None:
        """Return the batch of the next update, None while it is not full, or something is
        waited for before that. In lockstep it is full first: a population's member that
        goes on from another one does so once its actors have played by the weights that
        it gives up, and not, as chance has it, before they have seen these."""
        buffer, policy = self._buffer, self.learner.policy
        if self._config.max_policy_lag != 0:
            return None if self._awaits() else buffer.take(policy.version)
        if (taken := buffer.take(policy.version)) is None:
            return None
        waits = self._awaits()
        if any(each.oldest is not None and each.oldest < buffer.least for each in taken):
            buffer.counts.dropped += len(taken)
            buffer.release()
            return None
        return None if waits else taken

    def _awaits(self) -> bool:
        """True while something is waited for before the next update; see
        `Learner.awaits`, which may have the trainer go on from other weights."""
        learner = self.learner
        before = learner.counters.adopted
        if learner.awaits():  # first: it pushes a version again that was not kept, and is waited for
            return True
        if learner.counters.adopted != before:
            self._buffer.least = learner.least
            self._end_at_limits()
        return self._reason is not None or (self._rounds is not None and not self._rounds.known)

    def _enter_stage(self, message: EnterStage) -> None:
        if self._rounds is None or self._rounds.tell(message):
            self.learner.counters.stage = message.stage

    def _end_round(self) -> None:
        """The next version, which is about to be published, is of the stage that was told
        for it."""
        if self._rounds is not None:
            counters = self.learner.counters
            counters.stage, counters.rounds = self._rounds.next().stage, self._rounds.number

    def _tell_round(self) -> None:
        if self._rounds is not None:
            self.report(RoundOver(self._rounds.number, self.learner.counters.updates))

    def _hold(self, message: Hold) -> None:
        """See `Worker._hold`. Equal trainers rest between two updates, once they have
        agreed on it; where they update at once they never are within one."""
        if message.on:
            self._held_at = awake()
        else:
            self._told = False  # where no cut came of it, one is still due
            if self._held_at is not None:
                self.learner.count_hold(self._held_at)
            self._held_at = None
        if not self.learner.equal_trainers.others or self._at_once:
            super()._hold(message)
            return
        self.cut, self._to_rest = message.cut, message.on
        if not message.on:
            self._held = False

    def _rest(self, cut: int) -> None:
        """Stay as this trainer is until that cut, if it is any, is over; but for one that
        was told to end since it agreed to it, which all are about to be."""
        if cut and self.cut <= cut and self._reason is None:
            self._held = True
            self.report(Holding(cut))

    def _end_at_limits(self) -> None:
        why_more = f"an update takes whole samples, {self._batch_steps:,} steps in the last one"
        if self._reason is None and (reason := self.learner.limits.limit_reached(why_more)):
            self._end(reason)

    def _adopt(self, message: Adopt) -> None:
        """See `Learner.adopt`. Samples of versions before it are dropped from now on."""
        if self.learner.adopt(message):
            self._buffer.least = self.learner.least

    def _change(self, message: ChangeSettings) -> None:
        self.learner.change(message)  # never within an update of a trainer without equals

    def _save_when_due(self) -> None:
        """Write a checkpoint; or say that it is due where the run is to be cut for it."""
        if not self._exact:
            self.learner.save()
        elif not self._told:
            self._told = True
            self.report(SaveDue())

    def _count(self) -> None:
        """Count what became of samples since the last update; equal trainers do it
        together. Where that is a part of cuts it waits for the next update: the
        checkpoint after one may be that of several cuts."""
        if not (self.learner.equal_trainers.others or self._holds):
            self.learner.counters.add(self._buffer.counts)
            self._buffer.counts = SampleCounts()

    def _save(self) -> None:
        self._told = False
        self._count()
        self.learner.save()
        self._write_part()

    def _write_part(self) -> None:
        """Write what this trainer has of a cut besides its policy's checkpoint: what it
        has taken and not trained on, which of a queue in lockstep is one sample of each
        producer in their order; and of equal ones what each draws."""
        if not self._has_part:
            return
        part = dict[str, Part]()
        if self._holds:
            part["taken"] = self._source.state()
            part["buffer"] = {"held": self._buffer.state(), "counts": vars(self._buffer.counts)}
        if number(self.context.name):
            part["algorithm"] = self.learner.algorithm.state()
        updates = {self._config.policy: self.learner.counters.updates}
        self._parts.write(part, self.cut, updates)

    def _finish(self) -> None:
        """Write the last checkpoint and version, once."""
        if not self._finished:
            self._finished = True
            self._count()
            self.learner.limits.count_time()
            self.learner.end()

    def _on_exit(self) -> None:
        self._finish()
        self._write_part()

    def _close(self) -> None:
        self.learner.close()
