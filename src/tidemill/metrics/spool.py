"""A spool: the records on their way to one sink, and the thread that brings them."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

from tidemill.api.metric_sink import LoggedRun, MetricSink
from tidemill.core.clock import awake
from tidemill.core.errors import Overtaken, RunError, TidemillError
from tidemill.core.named_class import make
from tidemill.metrics.json_lines import FILE
from tidemill.store.fence import check

MAKING = 120.0  # seconds that a sink has to be made
RETRY = 10.0  # seconds between two tries of a sink that is away
LATE = 10.0  # seconds after which one that is still in a call is told
MISSED = 1_000  # records that wait for it meanwhile
ROOM = 1.0  # seconds that a record waits for room where a sink is slow

log = logging.getLogger(__name__)


class _Record(NamedTuple):
    run: LoggedRun
    values: Mapping[str, float]
    recorded: int


class Spool:
    """A spool keeps the records that wait for one sink. A thread of its own makes the
    sink, writes to it and closes it, so that one that does not come back holds up nobody
    else. Raises from its constructor what making the sink raises.

    A sink whose disk or server is away is tried again each `RETRY` seconds, one that does
    not come back is told after `LATE` seconds; both are given what they missed once they
    are back, the newest `MISSED` records, and that is told, too. One that fails otherwise
    is left out from then on. Where a sink is merely slow, who brings more waits for room,
    `ROOM` seconds at most.

    kind: class of the sink
    run: what it is told of its run
    whole: function that says whether `metrics.jsonl` has all records
    """

    def __init__(self, kind: type[MetricSink], run: LoggedRun, whole: Callable[[], bool]) -> None:
        self._kind, self._run, self._whole = kind, run, whole
        self._sink: MetricSink | None = None
        self._made = Future[None]()
        self._called: float | None = awake()  # when the call began that the sink is in
        # what follows is changed with this held
        self._changed = threading.Condition()
        self._waiting = deque[_Record]()  # the first one may be just being written
        self._lost = 0  # of them, since it was written last
        self._recorded = 0
        self._away = self._late = False  # it raised an OSError; it was told that it does not come back
        self._over = False  # no more is written
        self._closing = self._left = False
        self._thread = threading.Thread(target=self._work, name=f"sink {kind.__name__}", daemon=True)
        try:  # a signal is heard as soon as the thread has begun, within `start`
            try:
                self._thread.start()
            except RuntimeError as error:  # no more are allowed, and a run in one thread needs none
                self._stop(error)
                return
            self._made.result(MAKING)
        except BaseException as error:
            self._leave()
            if not isinstance(error, TimeoutError):
                raise
            raise RunError(
                f"--log {kind.__name__}: making it has taken {MAKING:g} s and is not over. See whether what "
                "it connects to answers, or leave it out"
            ) from None

    # ---- in the thread of who writes ---------------------------------------------------

    def put(self, run: LoggedRun, values: Mapping[str, float], recorded: int) -> None:
        """Have a record of a run written. `recorded`: see `MetricSink`."""
        with self._changed:
            if self._over:
                return
            if len(self._waiting) >= MISSED and not (self._away or self._late):
                self._changed.wait_for(lambda: len(self._waiting) < MISSED or self._away, ROOM)
            if len(self._waiting) >= MISSED:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append(_Record(run, values, recorded))
            self._recorded = recorded
            self._changed.notify_all()

    def look(self) -> None:
        """Tell where the sink does not come back."""
        called = self._called
        if called is None or self._late or self._over or awake() - called < LATE:
            return
        with self._changed:
            self._late = True
        log.warning(
            "%s has not come back for %g s: training goes on, and the newest %s records wait for it",
            self._title,
            LATE,
            f"{MISSED:,}",
        )

    def end(self, recorded: int) -> None:
        """Have it closed, once all that waits is written. Returns at once."""
        with self._changed:
            self._closing, self._recorded = True, recorded
            self._changed.notify_all()

    def ended(self, seconds: float) -> bool:
        """Wait for that, so long at most, and return whether it has come."""
        if self._thread.is_alive():  # one that could not be started cannot be joined
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def closing_s(self) -> float:
        """Seconds that the sink has for that."""
        return self._kind.closing_s if self._sink is None else self._sink.closing_s

    def leave(self, seconds: float) -> None:
        """Tell that it was waited for so long, and is no more. Should the sink come back
        it is closed, as long as the process lives."""
        lacking = self._leave()
        log.warning(
            "%s has not come back within %.0f s of the run's end, and is left%s%s",
            self._title,
            seconds,
            f": it lacks the last {lacking:,} records" if lacking else "",
            self._elsewhere("; "),
        )

    def _leave(self) -> int:
        """Have no more written, and return how many records waited."""
        with self._changed:
            self._closing = self._left = self._over = True
            lacking = len(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        return lacking

    # ---- in its own --------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._sink = make(self._kind, "--log", self._run)
        except BaseException as error:
            self._made.set_exception(error)
            return
        self._called = None
        self._made.set_result(None)
        while (record := self._next()) is not None:
            raised = self._bring(record)
            if raised is None:
                self._written(record)
            elif isinstance(raised, Overtaken):  # which ends the run, too, and is told then
                self._leave()
            elif not isinstance(raised, OSError):
                self._stop(raised)
            elif not self._put_off(raised):
                break
        self._close()

    def _next(self) -> _Record | None:
        """Wait for a record, and return it; None: no more is to be written."""
        with self._changed:
            rereads = self._sink is not None and self._sink.rereads
            # what is not in `metrics.jsonl` yet would be missed
            self._changed.wait_for(
                lambda: (self._waiting and (not rereads or self._whole())) or self._closing or self._over
            )
            if not self._waiting:
                return None
            if rereads and self._away:
                newest = self._waiting[-1]._replace(recorded=self._recorded)
                self._waiting.clear()
                self._waiting.append(newest)
                self._lost = 0
            return self._waiting[0]

    def _bring(self, record: _Record) -> BaseException | None:
        """Write a record, unless another runner leads the run by now, and return what is
        raised."""
        self._called = awake()
        try:
            check(record.run.folder)
            if record.run is not self._run or self._sink is None:
                self._close()
                self._run, self._sink = record.run, make(self._kind, "--log", record.run)
            self._called = awake()
            self._sink.recorded = record.recorded
            self._sink.write(record.values)
        except BaseException as error:
            return error
        finally:
            self._called = None
        return None

    def _written(self, record: _Record) -> None:
        """Forget a record, and tell that the sink is back once none waits."""
        with self._changed:
            if self._waiting and self._waiting[0] is record:
                self._waiting.popleft()
                self._changed.notify_all()
            else:
                self._lost -= 1  # it was given up meanwhile
            if self._waiting or self._over or not (self._away or self._late or self._lost):
                return
            self._away = self._late = False
            lost, self._lost = self._lost, 0
        but = f", but for the oldest {lost:,} records" if lost else ""
        log.warning("%s: it is written again, with what it missed%s", self._title, but)

    def _put_off(self, error: OSError) -> bool:
        """Wait until the sink is tried again, and return whether it is."""
        with self._changed:
            told, self._away = self._away, True
            last = self._left or (told and self._closing)
            self._changed.notify_all()
        if not told:
            log.warning(
                "%s cannot be written (%s): training goes on, and it is tried again each %g s",
                self._title,
                _what(error),
                RETRY,
            )
        if last:
            log.warning("%s lacks its last records%s", self._title, self._elsewhere("; ", ""))
            return False
        with self._changed:
            self._changed.wait_for(lambda: self._closing, RETRY)
        return True

    def _stop(self, error: BaseException) -> None:
        with self._changed:
            self._over = True
            self._waiting.clear()
            self._changed.notify_all()
        text = "%s: no more is written there (%s)%s"
        log.warning(text, self._title, _what(error), self._elsewhere("; "))

    def _close(self) -> None:
        if self._sink is None:
            return
        self._called = awake()
        try:
            self._sink.close()
        except BaseException as error:
            if not self._left:  # which was told
                log.warning("%s cannot be closed: %s", self._title, _what(error))
        finally:
            self._called = None

    # ---- in both -----------------------------------------------------------------------

    @property
    def _title(self) -> str:
        return self._kind.title if self._sink is None else self._sink.title

    def _elsewhere(self, before: str, what: str = " metrics") -> str:
        return f"{before}{FILE} has all{what}" if self._whole() else ""


def _what(error: BaseException) -> str:
    """Return what a user reads of an error of a sink."""
    return str(error) if isinstance(error, (OSError, ImportError, TidemillError)) else repr(error)
