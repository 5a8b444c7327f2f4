"""The trainer of a replay memory: it stores what comes, runs the training tasks that the
limiter says are owed, and grants actors their steps.

A turn: receive all that has come, grant what the gates allow, and run the tasks that are
owed, granting what each of them allows: a few at most. So whoever gathers waits for these
at most, and nobody at all while training keeps up: steps are granted ahead, up to an
actor's slots. In an exact run all tasks that are owed come before the grant.
"""

from collections.abc import Generator, Iterator
from math import inf

from tidemill.api.algorithm import UpdateFault, run_alone
from tidemill.api.control_messages import Adopt, ChangeSettings, EnterStage, Facts, Measured, Notice, State
from tidemill.api.plain_spaces import plain_spaces
from tidemill.api.policy import VERSIONS_OF_LIFE
from tidemill.api.worker import Context
from tidemill.core.bell_batching import BatchedRings
from tidemill.core.clock import awake
from tidemill.core.errors import CheckpointError, ConfigError, EnvironmentFault, NoProgress, RunError
from tidemill.core.memory import own_of
from tidemill.replay.retrain_journal import JournalWriter
from tidemill.replay_training.ingest import ReplayIngest
from tidemill.replay_training.iteration_evaluation import evaluate
from tidemill.replay_training.limiter_metrics import LimiterMetrics
from tidemill.replay_training.trainer_config import ReplayTrainer
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.base import PollResult, Worker
from tidemill.workers.checkpoint_writer import Contents
from tidemill.workers.learner import Learner

# seconds that a trainer which is told to end waits for steps in flight: less than the
# controller gives it
DRAIN = 2.0
# of a turn at most: steps that have become free are to be sent. Not a time, by which what
# one thread does would differ from run to run
TASKS = 8
REPORT_SECONDS = 0.2  # seconds between reports: tasks are many and short


class ReplayTrainerWorker(Worker):
    """The trainer worker of a replay memory: it stores steps, trains what is owed for
    them, and grants actors the next ones."""

    _ingest: ReplayIngest

    def __init__(self, context: Context, config: ReplayTrainer) -> None:
        super().__init__(context)
        self._config = config
        # exact ones go back with all who know the weights that are undone
        first_version = 0 if config.exact else context.life * VERSIONS_OF_LIFE
        self.learner = Learner(
            context, config, self.clock, self.report, self._beat, self._extras, first_version
        )
        self.learner.goes_back = not (config.exact or config.journal)
        self._loop = self._train()
        self._reason: str | None = None  # why the run ends, once that is known
        self._ended_at = self._progress_at = 0.0
        self._journal: JournalWriter | None = None
        self._told_large = False  # that transitions were taken out of the memory

    def _configure(self, facts: Facts) -> Facts:
        config, learner = self._config, self.learner
        source = learner.connect(facts)
        if learner.samples.mode != "transitions":
            raise ConfigError(
                f'sample stream "{config.samples}" has samples of mode = "{learner.samples.mode}", and a '
                "replay memory stores steps one by one; take ReplayActors in place of Actors"
            )
        header = {
            "experiment": self.context.experiment.name,
            "policy": config.policy,
            "spaces": plain_spaces(learner.spaces),
            "math_threads": self.context.math_threads,  # products on more threads have other last bits
        }
        demand = learner.demand(config.batch_size)
        self._ingest = ingest = ReplayIngest(
            self.context,
            config,
            source,
            demand,
            learner.found,
            header,
            lambda sample: learner.algorithm.take_in(sample),
            learner.notice,
        )
        self.limiter, self._buffer, self._grants = ingest.limiter, ingest.buffer, ingest.grants
        self._phases, self._policy_lag, self._journal = ingest.phases, ingest.policy_lag, ingest.journal
        self._metrics = LimiterMetrics(self.limiter, self._policy_lag, config.measures() is not None)
        needs = learner.build()
        self._policy_lag.publish(learner.policy.version)
        batches = demand.batches(source.offered() or (), learner.algorithm.batch_copies)
        self._of_update = own_of((*needs, *batches))
        return Facts(memory=(*needs, *self._buffer.needs, *batches))

    def _unfilled(self) -> int:
        return self._buffer.unfilled + (0 if self._batches else self._of_update)

    # ---- the loop ----------------------------------------------------------------------

    def _enter_stage(self, message: EnterStage) -> None:
        super()._enter_stage(message)
        self.learner.counters.stage = message.stage

    def start(self) -> None:
        self._progress_at = self._metrics.reported_at = awake()
        self._policy_lag.publish(self._policy_lag.newest)
        self.learner.start()
        super().start()

    def pause(self) -> None:
        """See `Worker.pause`. What is trained, and not saved, is saved in the pause."""
        trained = self.state is State.RUNNING
        self.learner.pause()
        super().pause()
        if trained:
            self._save_when_due(inf)

    def called(self) -> bool:
        # to end, or to go on after a death, takes several turns
        due = self._reason is not None or self.learner.equal_trainers.lost
        return not self.ended and (due or super().called())

    def exit(self, reason: str = "") -> None:
        """See `Worker.exit`. What is in flight may still come, and what is owed is
        trained."""
        if self.state not in (State.RUNNING, State.PAUSED):
            super().exit(reason)
        elif self._reason is None:
            self._end(reason)
            if self.state is State.PAUSED:
                self.start()

    def _end(self, reason: str) -> None:
        self._reason = reason
        self._ended_at = awake()
        self.limiter.drain()

    def _end_at_limits(self) -> None:
        why_more = "open episodes were played to their end"
        if self._reason is None and (
            reason := self.learner.limits.limit_reached(why_more, self._awaits_episodes())
        ):
            self._end(reason)

    def _poll(self) -> PollResult:
        return next(self._loop)

    def _train(self) -> Iterator[PollResult]:
        limiter, exact = self.limiter, self._config.exact
        if not self._phases.iteration_reached(self.learner.counters.steps):
            self._end_at_limits()  # those of a life before, that died as it ended
        while True:
            with BatchedRings():  # an actor is woken once, and finds its credits
                moved, ran = self._receive(), 0
                if self._phases.steps_reached(self.learner.counters.steps):
                    self._phases.end(self._awaits_episodes())
                granted = 0 if exact and (limiter.owed or self._iteration_over()) else self._grant()
            while not granted and self._due() and ran < TASKS:  # what was granted is to be sent first
                self._run_task()
                ran += 1
                if not exact:
                    self._grant()
            moved += ran
            if self.context.experiment.limits.seconds is not None:
                self.learner.limits.count_time()
            if moved or self._reason is not None:
                self._look_round()
            else:
                self._look_for_progress()
            if self._iteration_over():
                yield from self._end_iteration()
            if self._reason is not None or not self._phases.iteration_reached(self.learner.counters.steps):
                self._end_at_limits()
            if self._reason is not None and (self._quiet() or self._alone_at_end()):
                break
            yield PollResult(moved, ran)
        limiter.void(limiter.in_flight)  # whatever comes of them, nobody looks at it any more
        self._summarise()
        super().exit(self._reason or "")
        yield PollResult(moved, 1)

    def _iteration_over(self) -> bool:
        """True when it is to be evaluated now. In an exact run the actor is told of its
        last sample only after that, together with whether episodes may begin again, on
        which the order of its slots depends."""
        reached = self._phases.iteration_reached(self.learner.counters.steps)
        return self._reason is None and reached and self._quiet() and not self._awaits_episodes()

    def _awaits_episodes(self) -> bool:
        """True when the phase does not end yet, since episodes are open, and what they
        owe may be trained."""
        return self._reason is None and self.learner.limits.updates_left and self._phases.open()

    def _quiet(self) -> bool:
        """True when nothing is owed and nothing in flight: a quiescent cut."""
        return not self._due() and self._phases.quiet()

    def _end_iteration(self) -> Iterator[PollResult]:
        """Evaluate, save, tell; and begin the next iteration."""
        phases, counters, each = self._phases, self.learner.counters, self._config.iteration_steps
        end, returns = phases.iteration_end, phases.returns
        assert end is not None and each is not None
        number = end // each
        self._summarise()
        self.learner.limits.count_time()
        evaluated = (yield from self._evaluate(number)) if self._config.evaluation_steps else {}
        if self._reason is not None:
            return
        told = {
            "number": float(number),
            "updates": float(counters.updates),
            "seconds": counters.seconds,
            "training_episodes": float(len(returns)),
        }
        told |= {"training_return": sum(returns) / len(returns)} if returns else {}
        told |= {"overshoot": float(counters.steps - end)} if self._config.finish_episodes else {}
        self.report(
            Measured(
                counters.steps,
                self.stage,
                {f"iteration/{name}": value for name, value in {**told, **evaluated}.items()},
            )
        )
        phases.end_iteration()
        self._save(again=True)  # a checkpoint from before the evaluation may be there
        phases.begin(counters.steps)
        self._progress_at = self._metrics.reported_at = awake()
        self.limiter.report()  # what was waited for meanwhile was the evaluation

    def _evaluate(self, number: int) -> Generator[PollResult, None, dict[str, float]]:
        """Return what the evaluation of this iteration came to."""
        config, context = self._config, self.context
        actors = context.experiment.workers[self._ingest.producers[0].rpartition("-")[0]]
        assert isinstance(actors, ActorConfig)
        steps, patience = config.evaluation_steps, config.max_no_progress_s
        try:
            return (
                yield from evaluate(
                    context,
                    actors,
                    self.learner.spaces,
                    self.learner.policy,
                    steps,
                    number,
                    patience,
                    lambda: self._reason is not None,
                )
            )
        except (ConfigError, EnvironmentFault) as error:  # a server is down, say: training may do without
            self.report(Notice(f"{error}; training goes on without it"))
            return {}

    def _due(self) -> bool:
        """True when a task is owed, and within the limit of updates."""
        return self.limiter.owed > 0 and self.learner.limits.updates_left

    def _receive(self) -> int:
        """Store what has come. Return how many samples that was."""
        arrivals = self._ingest.receive()
        for arrival in arrivals:
            self.learner.returns.extend(arrival.returns)
            if arrival.committed:
                self._progress_at = awake()
        if arrivals:
            self.learner.counters.steps = self.learner.counters.rows = self.limiter.counts.committed
        return len(arrivals)

    def _grant(self) -> int:
        """Grant what the gates allow, and return how many steps that was. In an exact run
        the actor is told of each sample, since it waits until that was dealt with."""
        granted = self._grants.start(self.limiter)
        # they are taken with the newest version: while training lags something is owed
        # all the time
        if granted:
            self._publish_newest()
        self._grants.tell(self._config.exact)
        return granted

    def _run_task(self) -> None:
        """Train once."""
        learner = self.learner
        taken = self._buffer.take(learner.policy.version)
        if taken is None:
            raise RunError(
                f"{type(self._config.buffer).__name__} owes a batch and gives none: its `sampleable` did not "
                "hold for ever"
            )
        began = awake()
        left = self.clock.enter("train")
        learner.settings.follow(learner.algorithm)
        if self._journal is not None:
            self._journal.task(learner.limits.progress())
        skipped = learner.counters.skipped
        try:
            metrics = run_alone(learner.update(taken))
        except UpdateFault:
            self._finish_task()
            self._summarise()
            learner.save_finite()
            raise
        self.clock.enter(left)
        if learner.counters.skipped > skipped:
            self._forget_large()
        metrics = learner.measured(metrics, taken)
        self._finish_task()
        # else the next one is about to be published in its place, or steps are granted
        # before
        if not self.limiter.owed:
            self._publish_newest()
        self._progress_at = awake()  # while tasks are owed, steps may have to wait for them
        self._metrics.count(metrics, self._progress_at - began)

    def _forget_large(self) -> None:
        """Take out of the memory what may have led to an update that was left out: it
        would come again. What an exact run, or one with a journal, draws follows from
        what it has stored alone."""
        found = self._buffer.forget_large() if self.learner.goes_back else 0
        if found and not self._told_large:
            self._told_large = True
            self.learner.notice(
                f"{found:,} transitions of that update are never drawn again, since their observations or "
                "rewards are so large that they may have led to it; later ones like these neither: scale or "
                "clip them"
            )

    def _finish_task(self) -> None:
        self.learner.finish_update()
        self._buffer.release()
        self.limiter.finish_task()

    def _publish_newest(self) -> None:
        """Publish the weights, unless the newest ones are."""
        if self._policy_lag.newest != self.learner.policy.version:
            self.learner.publish()
            self._policy_lag.publish(self.learner.policy.version)

    def _look_round(self) -> None:
        now = awake()
        if now - self._metrics.reported_at >= REPORT_SECONDS:
            self._summarise()
            self.learner.look_at_versions()
        self._save_when_due()

    def _look_for_progress(self) -> None:
        """Fail when nothing has come for long. Actors have told what their slots suffer
        from, and the controller adds that. For one that lives again the controller has
        deadlines of its own."""
        limit = self._config.max_no_progress_s
        if self._ingest.awaits_life:
            self._progress_at = awake()
        if awake() - self._progress_at > limit and self.limiter.in_flight:
            try:
                self._save(final=True)
            except CheckpointError as error:  # the cause is another
                self.learner.notice(str(error))
            hanging = self.limiter.in_flight
            self.limiter.void(hanging)  # after the checkpoint: an exact run plays them again
            self._summarise()
            raise NoProgress(
                f"no step was stored for {limit:g} s (max_no_progress_s), with {hanging} in flight: "
                "environments do not answer, or fail (a server can be looked at by: tidemill doctor env "
                "URL). Mend that and resume, or set max_no_progress_s higher",
                limit,
            )

    def _alone_at_end(self) -> bool:
        """True when what is in flight does not come."""
        return not self._due() and awake() - self._ended_at > DRAIN

    # ---- what is told ------------------------------------------------------------------

    def _adopt(self, message: Adopt) -> None:
        if self._journal is not None:
            raise RunError(
                "the policy is to go on from another one's weights, which a journal does not hold; train "
                "populations with journal = False"
            )
        if self.learner.adopt(message):
            self._buffer.least = self.learner.counters.updates
            self._policy_lag.publish(self.learner.policy.version)

    def _change(self, message: ChangeSettings) -> None:
        self.learner.change(message)  # between two tasks

    def _summarise(self) -> None:
        """Report what has happened since the last time."""
        self.learner.counters.add(self._buffer.counts)
        self._buffer.counts = type(self._buffer.counts)()
        if (told := self._metrics.take()) is not None:
            self.learner.limits.count_time()
            self.learner.report_update(told, self.polls)

    # ---- checkpoints: between two tasks, while slots step on ---------------------------

    def _save_when_due(self, ahead: float | None = None) -> None:
        """Write a checkpoint when it is time for one, see `Learner.save_due`."""
        due = self._reason is None and self.learner.save_due(ahead)
        # an exact run is at a cut after each sample and all that this owes
        if due and not (self._config.exact and self.limiter.owed):
            began = awake()
            self._save()
            self._progress_at += awake() - began  # writing a large memory is no want of progress

    def _save(self, final: bool = False, again: bool = False) -> None:
        self._summarise()  # a run that goes on from here drops what is told later
        self.learner.save(final, again)

    def _extras(self) -> Contents:
        return self._ingest.extras(self.learner.counters.steps)

    def _on_exit(self) -> None:
        self.learner.limits.count_time()
        self._summarise()
        self.learner.end()

    def _close(self) -> None:
        if self._journal is not None:
            self._journal.close()
        self.learner.close()
