"""The trainer of a replay memory: it stores what comes, runs the training tasks that the limiter says are owed, and grants actors their steps.

A turn: receive all that has come, grant what the gates allow, and run the tasks that are owed, granting what each of them allows: one task, or some
that are very short. So whoever gathers waits for a task at most, and nobody at all while training keeps up: steps are granted ahead, up to an actor's
slots. In an exact run all tasks that are owed come before the grant.
"""

from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from tidemill.api.buffer import Buffer, Demand, ReplayBuffer
from tidemill.api.control import Adopt, Facts, Measured, Notice, State
from tidemill.api.experiment import Context
from tidemill.api.label import plain_spaces
from tidemill.api.stream import SampleConsumer
from tidemill.core.checkpoint import read_newest
from tidemill.core.errors import CheckpointError, ConfigError, EnvironmentFault, NoProgress, RunError
from tidemill.core.rings import Together
from tidemill.core.schema import Arrays
from tidemill.replay.journal import Journaled, JournalWriter, journal_path
from tidemill.replay.limiter import Counts, Limiter, check_slack, parse_ratio
from tidemill.streams.credits import CreditWriter
from tidemill.workers.actor_config import Actors
from tidemill.workers.ages import Ages
from tidemill.workers.base import PollResult, Worker
from tidemill.workers.iterations import evaluate
from tidemill.workers.open_episodes import FILE as SLOTS
from tidemill.workers.open_episodes import OpenEpisodes, Unfinished, read_slots
from tidemill.workers.trainer import TrainerWorker
from tidemill.workers.trainer_config import Trainer

DRAIN = 2.0  # seconds that a trainer which is told to end waits for steps in flight: less than the controller gives it
CUT = 10.0  # seconds that it waits for them before a regular checkpoint
TURN = 0.0003  # seconds after which a turn runs no further task: steps that have become free are to be sent
TOLD = 0.2  # seconds between reports: tasks are many and short
MEMORY = "buffer"


class LimitedTrainerWorker(TrainerWorker):
    """See the module's text."""

    _buffer: ReplayBuffer

    def __init__(self, context: Context, config: Trainer) -> None:
        super().__init__(context, config)
        assert config.ratio is not None
        self._ratio = parse_ratio(config.ratio)
        self._counts = Counts()
        self.limiter = Limiter(self._ratio, 1)  # until it is configured
        self._cut_at: float | None = None  # when a drain for a checkpoint began
        self._sums: dict[str, float] = {}  # of metrics since the last report
        self._means: dict[str, float] = {}  # of metrics in the last report
        self._tasks = self._seconds = 0.0  # since then: how many, and what they took
        self._told_steps = self._told_voided = 0
        self._told_at = self._progress_at = 0.0
        self._published = 0  # version
        self._restored: Path | None = None
        self._open: OpenEpisodes | None = None  # of an exact run
        self._goes_on = False  # its slots go on where they were at the checkpoint
        self._journal: JournalWriter | None = None
        self._iteration_end: int | None = None  # of the iteration that is not evaluated yet; None: it is over, and the next one not begun
        self._phase_end: int | None = None
        self._unfinished: Unfinished | None = None  # where phases end with episodes
        self._finishing = False  # the phase is over but for open episodes
        self._was_finishing = False  # where a resumed run goes on
        self._episodes: list[float] = []  # returns of those that ended in this iteration

    def _configure(self, facts: Facts) -> Facts:
        context, config = self.context, self._config
        cells = context.edges(f"credits/{config.samples}/")
        self._actors = {edge.targets[0]: _Share(CreditWriter(context.endpoints.writer(edge.name))) for edge in cells}
        told = super()._configure(facts)
        self._published = self._policy.version
        slots = sum(share.slots for share in self._actors.values())
        self.slots = slots
        slack = slots if config.slack is None else config.slack
        check_slack(slack, sum(share.lanes - 1 for share in self._actors.values()))
        self.limiter = Limiter(self._ratio, slack, self._counts, lost=not (self._goes_on and config.keep_buffer))
        if self._goes_on:
            (share,) = self._actors.values()
            share.go_on(self.limiter.in_flight)
        if self._restored is not None and config.keep_buffer:
            self._buffer.restore(self._restored)
        elif self._restored is not None:
            self.limiter.warm_up_again()
            if self._journal is not None:
                self._journal.emptied()
        if self._buffer.sampleable:
            self.limiter.sampleable()
        self._begin_phase()
        if self._was_finishing and self._phase_end is not None and self.counters.steps >= self._phase_end:
            self._finish_episodes()
        return told

    def _begin_phase(self) -> None:
        """Grant up to the end of the iteration, or the limit of steps. Where the lanes of a target step together it may be passed by some."""
        each, ends = self._config.iteration_steps, [self.context.experiment.limits.steps]
        if each is not None:
            self._iteration_end = self._iteration_end or (self.counters.steps // each + 1) * each
            ends.append(self._iteration_end)
        together = any(share.lanes > 1 for share in self._actors.values())
        self._phase_end = min((end for end in ends if end is not None), default=None)
        self.limiter.begin_phase(None if together else self._phase_end)
        self._finishing = False
        for share in self._actors.values():
            share.credits.finishing = False

    def _end_phase(self) -> None:
        """So many steps are there as the phase has."""
        if not self._awaits_episodes():
            self.limiter.drain()
        elif not self._finishing and not self.limiter.in_flight:
            self._finish_episodes()

    def _finish_episodes(self) -> None:
        """Grant as many steps as there are open episodes, and have no other begin. Nothing is in flight, but for steps of such episodes."""
        self._finishing = True
        self.limiter.begin_phase(None)
        for share in self._actors.values():
            share.credits.finishing = True

    def _awaits_episodes(self) -> bool:
        """True when the phase does not end yet, since episodes are open, and what they owe may be trained."""
        return self._reason is None and self._updates_left() and self._any_open()

    def _any_open(self) -> bool:
        """True when episodes that a phase ends with are open."""
        return self._unfinished is not None and any(flags.any() for flags in self._unfinished.open)

    def _steps_done(self) -> bool:
        return super()._steps_done() and not self._awaits_episodes()

    def _quiet(self) -> bool:
        """True when nothing is owed and nothing in flight: a quiescent cut. A target of many lanes may hold fewer credits than it can use. Those of
        open episodes that were cut by a resume are used in the next phase."""
        return not self._due() and (
            (self._finishing and not self._any_open()) or all(share.outstanding < share.lanes for share in self._actors.values())
        )

    def _build_buffer(self, source: SampleConsumer, demand: Demand) -> Buffer:
        config, producers = self._config, [e.name.split("/")[2] for e in self.context.edges(f"samples/{self._config.samples}/")]
        if self._facts.mode != "stepwise":
            raise ConfigError(
                f'sample stream "{config.samples}" has samples of mode = "{self._facts.mode}", and a replay memory stores steps one by one; take '
                'AgentSpec(mode = "stepwise")'
            )
        self._producers = producers
        if config.exact:
            source = self._open = OpenEpisodes(source, len(producers))
        self._shares = [self._actors[producer] for producer in producers]  # of each channel
        for share, offered in zip(self._shares, source.offered() or (), strict=True):
            share.slots += offered.lead[1]
        for name, worker in self.context.experiment.members():
            if name in self._actors and isinstance(worker, Actors):
                self._actors[name].lanes = worker.lanes
        if config.finish_episodes:
            if any(share.lanes > 1 for share in self._shares):
                raise ConfigError(
                    "finish_episodes = True needs targets of one lane, which begin and end their episodes alone; take lanes = 1, and ring more"
                )
            source = self._unfinished = Unfinished(source, [offered.lead[1] for offered in source.offered() or ()])
        if config.journal and demand.folder is not None:
            self._journal = JournalWriter(
                journal_path(demand.folder, config.policy), source.offered() or [], self._journal_facts(), self._journal_end()
            )
            source = Journaled(source, self._journal)
        self._ages = Ages(source)
        return config.buffer.build(self._ages, demand)

    def _journal_facts(self) -> dict[str, Any]:
        return {"experiment": self.context.experiment.name, "policy": self._config.policy, "spaces": plain_spaces(self._spaces)}

    def _journal_end(self) -> int | None:
        """Return where a resumed run's journal goes on; None for a new run."""
        if self.context.resume is None:
            return None
        assert self._folder is not None
        path, _, facts, _ = read_newest(self._folder)
        if "journal" not in facts:
            raise CheckpointError(f"checkpoint {path} is of a run without a journal, which cannot begin in its middle; resume with journal = False")
        return int(facts["journal"])

    # ---- the loop ----------------------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._progress_at = self._told_at = monotonic()
        self._told_steps, self._told_voided = self.counters.steps, self._counts.voided
        self._ages.publish(self._published)
        super().start()

    def exit(self, reason: str = "") -> None:
        """See `Worker.exit`. What is in flight may still come, and what is owed is trained; until then this one works on."""
        if self.state not in (State.RUNNING, State.PAUSED):
            Worker.exit(self, reason)
        elif self._reason is None:
            self._end(reason)
            if self.state is State.PAUSED:
                self.start()

    def _end(self, reason: str) -> None:
        super()._end(reason)
        self.limiter.drain()

    def _train(self) -> Iterator[PollResult]:
        limiter, exact = self.limiter, self._config.exact
        while True:
            with Together():  # an actor is woken once, and finds its credits
                moved, ran = self._receive(), 0
                if self._phase_end is not None and self.counters.steps >= self._phase_end:
                    self._end_phase()
                granted = 0 if exact and (limiter.owed or self._iteration_over()) else self._grant()
            until = monotonic() + TURN
            while not granted and self._due() and (not ran or monotonic() < until):  # what was granted is to be sent first
                self._run_task()
                ran += 1
                if not exact:
                    self._grant()
            moved += ran
            if self.context.experiment.limits.seconds is not None:
                self._count_time()
            if moved or self._reason is not None or self._cut_at is not None:
                self._look_round()
            else:
                self._look_for_progress()
            if self._iteration_over():
                yield from self._end_iteration()
            if self._reason is not None or not self._iteration_reached():
                self._end_at_limits()
            if self._reason is not None and (self._quiet() or self._alone_at_end()):
                break
            yield PollResult(moved, ran)
        limiter.void(limiter.in_flight)  # whatever comes of them, nobody looks at it any more
        self._summarise()
        Worker.exit(self, self._reason)
        yield PollResult(moved, 1)

    def _iteration_reached(self) -> bool:
        return self._iteration_end is not None and self.counters.steps >= self._iteration_end

    def _iteration_over(self) -> bool:
        """True when it is to be evaluated now. In an exact run the actor is told of its last sample only after that, together with whether episodes
        may begin again, on which the order of its slots depends."""
        return self._reason is None and self._iteration_reached() and self._quiet() and not self._awaits_episodes()

    def _end_iteration(self) -> Iterator[PollResult]:
        """Evaluate, save, tell; and begin the next iteration."""
        steps = self._iteration_end
        assert steps is not None and self._config.iteration_steps is not None
        number, returns = steps // self._config.iteration_steps, self._episodes
        evaluated: dict[str, float] = {}
        beyond = {"overshoot": float(self.counters.steps - steps)} if self._config.finish_episodes else {}
        self._summarise()
        self._count_time()
        if self._config.evaluation_steps:
            group = self._producers[0].rpartition("-")[0]
            actors = self.context.experiment.workers[group]
            assert isinstance(actors, Actors)
            steps = self._config.evaluation_steps
            patience = self._config.max_no_progress_s
            try:
                evaluated = yield from evaluate(
                    self.context, actors, self._spaces, self._policy, steps, number, patience, lambda: self._reason is not None
                )
            except (ConfigError, EnvironmentFault) as error:  # a server is down, say: training may do without
                self.report(Notice(f"{error}; training goes on without it"))
            if self._reason is not None:
                return
        counters = self.counters
        told = {"number": float(number), "updates": float(counters.updates), "seconds": counters.seconds, "training_episodes": float(len(returns))}
        told |= {"training_return": sum(returns) / len(returns)} if returns else {}
        self.report(Measured(counters.steps, self.stage, {f"iteration/{name}": value for name, value in {**told, **beyond, **evaluated}.items()}))
        self._episodes = []
        self._iteration_end, self._saved = None, (-1, -1)  # a checkpoint from before the evaluation may be there
        TrainerWorker._save(self)
        self._cut_at = None
        self._begin_phase()
        self._progress_at = self._told_at = monotonic()
        self.limiter.report()  # what was waited for meanwhile was the evaluation

    def _due(self) -> bool:
        """True when a task is owed, and within the limit of updates."""
        return self.limiter.owed > 0 and self._updates_left()

    def _updates_left(self) -> bool:
        limit = self.context.experiment.limits.updates
        return limit is None or self.counters.updates < limit

    def _receive(self) -> int:
        """Store what has come. Return how many samples that was."""
        arrivals = self._buffer.receive()
        if not arrivals:
            return 0
        limiter = self.limiter
        for channel, committed, voided, returns in arrivals:
            share = self._shares[channel]
            share.credits.received += 1
            share.outstanding -= committed + voided
            if committed:
                limiter.commit(committed)
                self._progress_at = monotonic()
            if voided:
                limiter.void(voided)
            self._returns.extend(returns)
            self._episodes += returns if self._config.iteration_steps is not None else ()
        if self._buffer.sampleable:
            limiter.sampleable(self.slots - 1 if self._config.exact else 0)
        self.counters.steps = self.counters.rows = limiter.counts.committed
        return len(arrivals)

    def _grant(self) -> int:
        """Grant what the gates allow, first to whoever has least of what it can use, and return how many steps that was. In an exact run the actor is
        told of each sample, since it waits until that was dealt with."""
        granted = 0
        for share in sorted(self._actors.values(), key=_Share.used) if len(self._actors) > 1 else self._actors.values():
            wanted = (self._open_episodes(share) if self._finishing else share.slots) - share.outstanding
            steps = self.limiter.start(wanted) if wanted > 0 else 0
            granted += steps
            share.outstanding += steps
            share.credits.granted += steps
            if steps:  # they are taken with the newest version: while training lags something is owed all the time
                self._publish_newest()
            if steps or (self._config.exact and share.credits.received > share.told):
                share.told = share.credits.received
                share.credits.write()
        return granted

    def _open_episodes(self, share: "_Share") -> int:
        assert self._unfinished is not None
        return sum(int(np.count_nonzero(flags)) for flags, whose in zip(self._unfinished.open, self._shares, strict=True) if whose is share)

    def _run_task(self) -> None:
        """Train once."""
        taken = self._buffer.take(self._policy.version)
        if taken is None:
            raise RunError(f"{type(self._config.buffer).__name__} owes a batch and gives none: its `sampleable` did not hold for ever")
        began = monotonic()
        left = self.clock.enter("train")
        progress = self._progress()
        if self._journal is not None:
            self._journal.task(progress)
        metrics = self._algorithm.update([held.sample for held in taken], progress)
        self.clock.enter(left)
        self._count({**metrics, **self._lags(taken)})
        self.counters.updates += 1
        self._policy.version = self.counters.updates
        self._buffer.release()
        self.limiter.finish_task()
        if not self.limiter.owed:  # else the next one is about to be published in its place, or steps are granted before
            self._publish_newest()
        self._tasks += 1
        self._progress_at = monotonic()  # while tasks are owed, steps may have to wait for them
        self._seconds += self._progress_at - began

    def _publish_newest(self) -> None:
        """Publish the weights, unless the newest ones are."""
        if self._published != self._policy.version:
            self._published = self._policy.version
            self._publish()
            self._ages.publish(self._published)

    def _look_round(self) -> None:
        now = monotonic()
        if now - self._told_at >= TOLD:
            self._summarise()
            if self._versions is not None:
                self._versions.look(self._policy, self._version_counters())
        due = self._reason is None and self._cut_at is None and now - self._last_save >= self._config.checkpoint_seconds
        if due and not (self._config.exact and self.limiter.owed):  # others train what they owe before they write it
            self._save()
        if self._cut_at is not None and (self._quiet() or now - self._cut_at > CUT):
            self._write_cut()

    def _look_for_progress(self) -> None:
        """Fail when nothing has come for long. Actors have told what their slots suffer from, and the controller adds that."""
        limit = self._config.max_no_progress_s
        if monotonic() - self._progress_at > limit and self.limiter.in_flight:
            self._summarise()
            TrainerWorker._save(self, final=True)
            raise NoProgress(
                f"no step was stored for {limit:g} s (max_no_progress_s), with {self.limiter.in_flight} in flight: environments do not answer, or "
                "fail (a server can be looked at by: tidemill doctor env URL). Mend that and resume, or set max_no_progress_s higher",
                limit,
            )

    def _alone_at_end(self) -> bool:
        """True when what is in flight does not come."""
        return not self._due() and monotonic() - self._together_at > DRAIN

    # ---- what is told ------------------------------------------------------------------------------------------------------------------------

    def _adopt(self, message: Adopt) -> None:
        if self._journal is not None:
            raise RunError("the policy is to go on from another one's weights, which a journal does not hold; train populations with journal = False")
        super()._adopt(message)
        self._published = self._policy.version
        self._ages.publish(self._published)

    def _count(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def _summarise(self) -> None:
        """Report the means of what updates returned since the last report, what the limiter counts, and the number of slots that would balance the
        run: N* = seconds of a step / (ratio · seconds of a task)."""
        now = monotonic()
        counts, told = self._buffer.counts, {**self.limiter.report(), **self._ages.take()}
        for name in ("dropped", "evicted", "reused"):
            setattr(self.counters, name, getattr(self.counters, name) + getattr(counts, name))
        self._buffer.counts = type(counts)()
        flown, committed = told.pop("limiter/flown"), self.counters.steps - self._told_steps
        if self._tasks:
            self._means = {name: total / self._tasks for name, total in self._sums.items()}
            if committed and flown:
                told["limiter/balance"] = flown / committed / (float(self._ratio) * self._seconds / self._tasks)
        voided = int(told["limiter/voided"])
        if self._tasks or (
            (committed or voided > self._told_voided) and (self._means or self._config.measures() is not None)
        ):  # in the warm-up, too, unless nobody knew what is to come
            self._count_time()
            self._report_update({**self._means, **told})
        self._sums, self._tasks, self._seconds, self._told_at = {}, 0.0, 0.0, now
        self._told_steps, self._told_voided = self.counters.steps, voided

    # ---- checkpoints: at a quiescent cut -----------------------------------------------------------------------------------------------------

    def _save(self, final: bool = False) -> None:
        """Write a checkpoint: at the end now, else when nothing is in flight and nothing owed."""
        if final or self._config.exact or self.state is State.PAUSED:  # an exact run is at a cut after each sample, and may not stop for it
            super()._save(final)
        elif self._cut_at is None and self._folder is not None:
            self._cut_at = monotonic()
            self.limiter.drain()

    def _write_cut(self) -> None:
        super()._save()
        self._cut_at = None
        if self._reason is not None:
            return
        if self._finishing:
            self.limiter.begin_phase(None)
        elif not self._iteration_reached():  # else the iteration is to end first
            self._begin_phase()

    def _kept_arrays(self) -> dict[str, Arrays]:
        return {} if self._open is None else {SLOTS: self._open.arrays(self._config.keep_buffer)}

    def _kept_facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"limiter": vars(self.limiter.counts), "ratio": str(self._ratio)}
        if self._iteration_reached():
            facts["iteration_end"] = self._iteration_end
        if self._finishing and ("iteration_end" in facts or self._any_open()):
            facts["finishing"] = True
        return facts if self._journal is None else {**facts, "journal": self._journal.sync()}

    def _kept_folders(self) -> dict[str, Callable[[Path], None]]:
        return {MEMORY: self._buffer.save} if self._config.keep_buffer else {}

    def _take_back(self, path: Path, arrays: dict[str, Arrays], facts: dict[str, Any]) -> None:
        kept = facts.get("limiter")
        if kept is None:
            raise CheckpointError(f"checkpoint {path} is of a run without a ratio, and this one has ratio = {self._config.ratio}; train anew")
        self._counts = counts = Counts(**kept)
        if self._open is not None and SLOTS in arrays:
            self._open.restore(*read_slots(arrays[SLOTS]))
            self._goes_on = True
            if self._unfinished is not None:
                for flags, slot in zip(self._unfinished.open, self._open.slots, strict=True):
                    flags[:] = slot.open and slot.steps > 0
        end, each = facts.get("iteration_end"), self._config.iteration_steps
        self._iteration_end = end if end is not None and each is not None and end % each == 0 else None
        self._was_finishing = facts.get("finishing", False)
        if Fraction(facts["ratio"]) != self._ratio:
            self.report(Notice(f"ratio was {facts['ratio']} and is {self._ratio}: steps that are stored from now on owe by the new one"))
            if counts.waived is not None:
                counts.waived, counts.base = counts.started - counts.voided if self._goes_on else counts.committed, counts.tasks
        self._restored = path / MEMORY

    def _close(self) -> None:
        if self._journal is not None:
            self._journal.close()
        if self.state is State.FAILED:
            self.limiter.stop(RunError("the trainer failed"))
        super()._close()


class _Share:
    """What an actor has of the credits: `slots` lanes of all its targets, `lanes` in each, `outstanding` steps granted that have not come, and
    `told` samples that it knows to be dealt with."""

    def __init__(self, credits: CreditWriter) -> None:
        self.credits, self.slots, self.lanes, self.outstanding = credits, 0, 1, 0
        self.told = 0

    def go_on(self, steps: int) -> None:
        """So many steps are in flight again; the sample that the actor goes on after counts as the first one that it has sent."""
        self.outstanding = self.credits.granted = steps
        self.credits.received = 1

    def used(self) -> float:
        return self.outstanding / max(self.slots, 1)
