"""The worker base: one life for every kind of worker.

    configure() → READY, start() → RUNNING, pause() → PAUSED, start() …,
    exit() → COMPLETED; an error → FAILED

The handles are called by messages of the control link, which `run` reads between polls. A
subclass implements `_configure` and `_poll`.
"""

import threading
import traceback
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemill.api.control_messages import (
    ENDED,
    LONGEST_GROWN,
    Adopt,
    AnsweredBy,
    ChangeSettings,
    Configure,
    EnterStage,
    Exit,
    Facts,
    Finish,
    Hold,
    Holding,
    Hurry,
    LookAtMemory,
    MemoryGrown,
    Notice,
    Pause,
    Rejoin,
    Renew,
    Save,
    Start,
    State,
    Status,
    Stay,
    TryAgain,
    Up,
    WorkerStatistics,
    pack,
    unpack_down,
)
from tidemill.api.worker import Context, WorkerHandle
from tidemill.core.clock import Clock, awake
from tidemill.core.errors import SIGNALLED, NoProgress, foreign, message_of, place, returned
from tidemill.core.forks import end_in_fork, forks
from tidemill.core.resource_shortage import why
from tidemill.workers.cut_files import PartWriter

if TYPE_CHECKING:
    from tidemill.core.object_census import Census

# seconds: a sleeping worker looks again all the same; `rescues` counts how often that
# helped
LOOK_AGAIN = 0.1
# seconds: so late after the work that it tells of a bell may be rung, on cores that are
# busy
RING_LATE = 0.05
HEARTBEAT = 0.25  # seconds between statistics that nothing else prompts
ASK = 0.25  # seconds between looks for `Hurry` in a long piece of work
# characters of a failure's text and of its traceback that are reported
ERROR_LIMIT, DETAILS_LIMIT = 4_000, 20_000


@dataclass(frozen=True)
class PollResult:
    """A poll result says what one poll did; both numbers 0 mean that nothing could be
    done. The unit is the worker's own (an actor: env steps and ticks)."""

    sample_count: int = 0
    batch_count: int = 0


class Worker(WorkerHandle):
    """The base of all workers: it obeys the control link, polls, sleeps on its bell and
    reports. A subclass implements `_configure` and `_poll`. `state` is where in its life
    it is, `clock` tells where its time goes."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.name = context.name
        self.clock = Clock()
        self._forks = forks()
        self.state = State.CONFIGURING
        self.rescues = 0  # sleeps that nobody ended although there was something to do
        self.polls = 0  # progress counter of the poll loop
        self._samples = self._batches = 0
        self._longest_poll = 0.0  # seconds
        self._last_beat = awake()
        self._last_counts = (0, 0)
        self._held = False  # nothing is polled while the run is cut
        self._facts: Facts | None = None  # what it is to be configured by, once all is there
        self._tries = True  # what is away is tried again: the run is not paused
        self._inbox: list[bytes] = []  # what it was told in a long piece of work
        self._hurry, self._asked_at = False, 0.0
        self._parts = PartWriter(context.folder, context.name, lambda text: self.report(Notice(text)))
        self._answered: list[AnsweredBy] = []  # all that it was told so, each once
        self._census: Census | None = None  # of its process, once that was suspected to grow
        self.cut = 0
        """Number of the cut that is being made, or comes next."""
        self.stage = 0
        """Stage of the curriculum, from 0."""

    # ---- for subclasses ----------------------------------------------------------------

    @abstractmethod
    def _configure(self, facts: Facts) -> Facts:
        """Build everything and return what only this worker knows (an owner of
        environments: its spaces; others: nothing)."""

    def _there(self) -> bool:
        """Return whether all is there that the worker is built on: it is configured once
        that is, and looks again with each turn."""
        return True

    @abstractmethod
    def _poll(self) -> PollResult:
        """Do one piece of the work, without ever waiting."""

    def _stats(self) -> dict[str, float]:
        """Return further numbers for the regular statistics."""
        return {}

    def _counts(self) -> tuple[int, int]:
        """Return the samples and batches so far, with those of a poll that goes on, where
        it tells of itself meanwhile."""
        return self._samples, self._batches

    def _progress(self) -> int:
        """Return how much was done so far, in any unit."""
        return self._samples + self._batches

    def _unsent(self) -> int:
        """Return how many env steps would be lost with the worker: nobody has them
        yet."""
        return 0

    def _unfilled(self) -> int:
        """Return how many bytes of the memory that it has told of, and that is its own
        alone, the worker is still to fill."""
        return 0

    def _away(self) -> tuple[str, bool]:
        """Return what the worker's environment waits for while that is away, and how it
        has failed last, in words, "" else; and whether it makes a pause before it tries
        again, or tries no longer than that may take."""
        return "", False

    def _lacks(self) -> dict[str, str]:
        """Return what the worker lacks of versions, by policy, where nobody waits for it:
        see `WorkerStatistics`."""
        return {}

    def _paces(self) -> dict[str, float]:
        """Return further numbers for the regular statistics that depend on the clock."""
        return {}

    def _on_exit(self) -> None:
        """Finish what must not be lost. Called once, before COMPLETED."""

    def _enter_stage(self, message: EnterStage) -> None:
        """Go over to a stage of the curriculum."""
        self.stage = message.stage

    def _adopt(self, message: Adopt) -> None:
        """Go on from other weights. Trainers are told to."""

    def _change(self, message: ChangeSettings) -> None:
        """Go on with other settings of the algorithm. Trainers are told to."""

    def _turn_to(self, message: AnsweredBy) -> None:
        """Ask, or answer, where another policy worker did that before. Called once the
        worker is configured, once for each message."""

    def _await(self, message: Stay) -> None:
        """Wait for the next lives of equal workers, which have died. Trainers are told
        to."""

    def _rejoin(self, message: Rejoin) -> None:
        """Go on with equal workers, all of which live again. Trainers are told to."""

    def _finish(self) -> None:
        """Pause, once what was begun is done. Actors are told to."""
        self.pause()

    def _hold(self, message: Hold) -> None:
        """Stay as the worker is, or go on. See `Hold`."""
        self.cut, self._held = message.cut, message.on
        if message.on:
            self.report(Holding(self.cut))

    def _save(self) -> None:
        """Write a checkpoint, where the worker has one to write."""

    def _save_part(self, checkpoints: Mapping[str, int]) -> None:
        """Write what the worker has of a cut that goes with these checkpoints."""

    def _close(self) -> None:
        """Free everything. Called once, after the last poll, also after errors."""

    # ---- handles -----------------------------------------------------------------------

    def configure(self, facts: Facts | None = None) -> None:
        """Become READY, once all is there for that."""
        self._facts = facts = facts or Facts()
        if self._there():
            self._facts = None
            self._enter(Status(State.READY, returned(self._configure(facts), Facts, self._configure)))
            for message in self._answered:
                self._turn_to(message)

    def start(self) -> None:
        """Become RUNNING."""
        self._enter(Status(State.RUNNING))

    def pause(self) -> None:
        """Become PAUSED: nothing is polled until `start`."""
        if self.state is State.RUNNING:
            self._beat()  # what it has done is known from here on
        self._enter(Status(State.PAUSED))

    def exit(self, reason: str = "") -> None:
        """Finish and become COMPLETED; `reason` says why and is reported."""
        if self.state not in ENDED:
            if self.state is not State.CONFIGURING:
                self._on_exit()
            self._enter(Status(State.COMPLETED, reason=reason))

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def run(self, *others: WorkerHandle) -> None:
        """See `WorkerHandle.run`."""
        together = (self, *others)
        for worker in together:
            worker.company = [other for other in together if other is not worker]
            worker.attendants = [other for other in worker.company if other.attends]
        idle_since: float | None = None
        rung = True
        while living := [worker for worker in together if not worker.ended]:
            if sum(worker.run_once() for worker in living):
                if not rung:  # a bell is rung after what it tells of: whoever rings may just be about to
                    self.rescues += not self._wait(RING_LATE)
                idle_since, rung = None, True
            elif not all(worker.ended for worker in living):
                now = awake()
                idle_since = idle_since or now
                if now - idle_since >= self.context.spin:
                    rung = self._wait(LOOK_AGAIN)

    def run_once(self) -> bool:
        """Handle the control link, poll once, report. False when nothing could be done.
        Between two of these a worker waits."""
        return self.state not in ENDED and self._turn()

    def _turn(self, obeys: bool = True) -> bool:
        """See `run_once`. `obeys`: whether the control link is looked at; in between two
        turns in which it is, there is no need to."""
        self.clock.enter("python")
        try:
            if obeys and not self._obey():
                return False
            if self.state is not State.RUNNING:
                if self._facts is not None:
                    self.configure(self._facts)
                return False
            began = awake()
            if self._held:
                if began - self._last_beat > HEARTBEAT:
                    self._beat()
                return False
            result = returned(self._poll(), PollResult, self._poll)
            now = awake()
            self.polls += 1
            self._samples += result.sample_count
            self._batches += result.batch_count
            if now - began > self._longest_poll:
                self._longest_poll = now - began
            if now - self._last_beat > HEARTBEAT:
                self._beat()
            if self.ended:
                self._close()
            return result.sample_count > 0 or result.batch_count > 0
        except BaseException as error:
            self._fail(error)
            return False
        finally:
            self.clock.enter("wait")

    def _wait(self, seconds: float) -> bool:
        """Wait at the bell. True when it was rung. What tasks of environments raise
        meanwhile is this worker's failure."""
        try:
            return self.context.endpoints.bell.wait(seconds)
        except BaseException as error:
            self._fail(error)
            return True

    def _fail(self, error: BaseException) -> None:
        """Report what was raised, but in the main thread what signals raise, which is
        for whoever leads the run."""
        if isinstance(error, SIGNALLED) and threading.current_thread() is threading.main_thread():
            raise error
        cause = foreign(error)
        message = f"{type(error).__name__}: {why(error)}" if cause is error else message_of(error)
        if isinstance(error, SystemExit):
            message = (
                f"SystemExit: sys.exit({error.code!r}) was called in a worker, by its environment or another "
                "part of the experiment"
            )
        if (where := place(cause)) not in message:
            message += where
        message = _tail(message, ERROR_LIMIT)
        details = "" if cause is None else _tail("".join(traceback.format_exception(error)), DETAILS_LIMIT)
        waited = error.seconds if isinstance(error, NoProgress) else 0.0
        self._enter(Status(State.FAILED, error=message, details=details, waited=waited))
        try:
            self._close()
        except SIGNALLED:
            raise
        except BaseException:
            self.report(
                Status(State.FAILED, error=message, details=_tail(traceback.format_exc(), DETAILS_LIMIT))
            )

    def hurried(self) -> bool:
        """Return whether the worker was told to `Hurry`: for who asks in a long piece of
        work, again and again. What it is told besides is obeyed after that."""
        if not self._hurry and (now := awake()) - self._asked_at > ASK:
            self._asked_at = now
            self._look_at_link()
            self._hurry = any(isinstance(unpack_down(data), Hurry) for data in self._inbox)
        return self._hurry

    def called(self) -> bool:
        return not self.ended and (not self._look_at_link() or bool(self._inbox))

    def _look_at_link(self) -> bool:
        """Take in what it was told, which is obeyed in its next turn. False where the
        runner is gone."""
        end_in_fork(self._forks)
        told = self.context.endpoints.link.receive()
        self._inbox += told or ()
        return told is not None

    def _obey(self) -> bool:
        """Carry out what the runner says. False when the worker has ended."""
        end_in_fork(self._forks)
        messages = self.context.endpoints.link.receive()
        if messages is None and not self._inbox:  # the runner is gone: nobody to report to
            self.state = State.COMPLETED
            self._close()
            return False
        messages, self._inbox = self._inbox + (messages or []), []
        for data in messages:
            match unpack_down(data):
                case Configure(facts=facts):
                    self.configure(facts)
                case Start():
                    self.start()
                case TryAgain(on=tries):
                    self._tries = tries
                case Pause():
                    self.pause()
                case Finish():
                    self._finish()
                case Hold() as message:
                    self._hold(message)
                case Save(checkpoints=checkpoints):
                    self._save()
                    if checkpoints:
                        self._save_part(checkpoints)
                    if self._held:
                        self.report(Holding(self.cut))
                case EnterStage() as message:
                    self._enter_stage(message)
                case Adopt() as message:
                    self._adopt(message)
                case ChangeSettings() as message:
                    self._change(message)
                case Hurry():
                    self._hurry = True
                case Renew(edges=edges):
                    self.context.endpoints.renew(edges)
                case AnsweredBy() as message:
                    if message not in self._answered:  # a new life is told what the one before was
                        self._answered.append(message)
                        if self.state is not State.CONFIGURING:
                            self._turn_to(message)
                case LookAtMemory(grown=grown):
                    self._look_at_memory(grown)
                case Stay() as message:
                    self._await(message)
                case Rejoin() as message:
                    self._rejoin(message)
                case Exit(reason=reason):
                    self.exit(reason)
                    if self.ended:
                        self._close()
                        return False
        return True

    def _look_at_memory(self, grown: int) -> None:
        """See `LookAtMemory`. It holds the worker up for some tenths of a second."""
        from tidemill.core.object_census import take_census

        try:
            self._census, text = take_census(self._census, grown)
        except Exception as error:  # what users make of objects is not ours to know
            text = f"what grows could not be found out ({type(error).__name__}: {error})"
        if grown:
            self.report(MemoryGrown(text[:LONGEST_GROWN]))

    # ---- reports -----------------------------------------------------------------------

    def report(self, message: Up) -> None:
        """Send a message up. Never waits."""
        end_in_fork(self._forks)
        self.context.endpoints.link.send(pack(message))

    def _enter(self, status: Status) -> None:
        if status.state in ENDED and self.state is not State.CONFIGURING and status.state is not State.FAILED:
            self._beat()
        self.state = status.state
        self.report(status)

    def _beat(self) -> None:
        now = awake()
        seconds = max(now - self._last_beat, 1e-9)
        samples, batches = counts = self._counts()
        samples_before, batches_before = self._last_counts
        time = {f"share/{place}": share for place, share in self.clock.time_shares().items()}
        time["samples_per_second"] = (samples - samples_before) / seconds
        time["batches_per_second"] = (batches - batches_before) / seconds
        time["rescues"] = self.rescues
        time["longest_poll"] = self._longest_poll
        time["seconds"] = seconds
        time |= self._paces()
        self._last_beat, self._last_counts = now, counts
        away, pauses = self._away()
        self.report(
            WorkerStatistics(
                self.polls,
                self._stats(),
                time,
                progress=self._progress(),
                unsent=self._unsent(),
                unfilled=self._unfilled(),
                away=away,
                pauses=pauses,
                due=self._lacks(),
            )
        )


def _tail(text: str, most: int) -> str:
    """Return the last `most` characters of `text`, marked where something is missing."""
    return text if len(text) <= most else f"[…]{text[3 - most :]}"
