"""A worker's life, told by messages over a control link."""

import importlib
import pkgutil
import threading
from collections.abc import Iterator

import pytest

import tidemill.replay_training
import tidemill.workers
from tidemill.api.control_messages import (
    LONGEST_GROWN,
    Configure,
    Episodes,
    Exit,
    Facts,
    Hurry,
    LookAtMemory,
    MemoryGrown,
    Pause,
    SampleFacts,
    Save,
    Start,
    State,
    Status,
    Up,
    WorkerStatistics,
    pack,
    unpack_up,
)
from tidemill.api.experiment import Experiment
from tidemill.api.worker import Context, WorkerConfig
from tidemill.core import object_census
from tidemill.core.asyncio_loops import Loop
from tidemill.core.errors import EnvironmentFault, PeerLost
from tidemill.transports.local import local_endpoints
from tidemill.workers import base
from tidemill.workers.base import PollResult, Worker

FACTS = Facts(samples={"samples": SampleFacts(2, 0, 1)})


class Noting(Worker):
    """Writes down what is called; does what the test says."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.calls: list[str] = []
        self.fails_at: dict[str, BaseException] = {}
        self.work = 1
        self.polled = threading.Event()

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails_at:
            raise self.fails_at[name]

    def _configure(self, facts: Facts) -> Facts:
        self._note("configure")
        assert facts == FACTS
        return Facts(samples={"own": SampleFacts(1, 1, 1)})

    def _poll(self) -> PollResult:
        self._note("poll")
        self.polled.set()
        return PollResult(self.work, self.work)

    def _on_exit(self) -> None:
        self._note("on_exit")

    def _save(self) -> None:
        self._note("save")

    def _close(self) -> None:
        self._note("close")

    def _stats(self) -> dict[str, float]:
        return {"calls": float(len(self.calls))}


class Life:
    """A worker and the runner's end of its link."""

    def __init__(self) -> None:
        config = WorkerConfig()
        experiment = Experiment(name="life", policies={}, workers={"noting": config})
        endpoints, self.link = local_endpoints(["noting-0"], [])["noting-0"]
        self.worker = Noting(Context(experiment, "noting-0", config, endpoints))

    def tell(self, *messages: object) -> None:
        for message in messages:
            self.link.send(pack(message))  # type: ignore[arg-type]

    def heard(self) -> list[Up]:
        return [unpack_up(m) for m in self.link.receive() or []]

    def states(self) -> list[State]:
        return [m.state for m in self.heard() if isinstance(m, Status)]

    def turns(self, *messages: object) -> bool:
        self.tell(*messages)
        return self.worker.run_once()


@pytest.fixture
def life() -> Life:
    return Life()


def test_a_whole_life(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "HEARTBEAT", 3600.0)  # however long any of it takes
    worker = life.worker
    assert worker.state is State.CONFIGURING
    assert not life.turns()
    assert worker.calls == []
    assert not life.turns(Configure(FACTS))
    (ready,) = life.heard()
    assert ready == Status(State.READY, Facts(samples={"own": SampleFacts(1, 1, 1)}))
    assert not life.turns()  # READY is not RUNNING
    assert life.turns(Start()) and life.turns()
    assert not life.turns(Pause())
    assert not life.turns()
    assert life.turns(Start(), Save())
    assert not life.turns(Exit("enough"))
    assert worker.calls == ["configure", "poll", "poll", "save", "poll", "on_exit", "close"]
    heard = life.heard()
    assert [m.state for m in heard if isinstance(m, Status)] == [
        State.RUNNING,
        State.PAUSED,
        State.RUNNING,
        State.COMPLETED,
    ]
    assert heard[-1].reason == "enough"  # type: ignore[union-attr]
    _, last = (m for m in heard if isinstance(m, WorkerStatistics))
    assert last.polls == worker.polls == 3
    assert last.values == {"calls": 6.0}


def test_who_cannot_find_out_what_grows_says_so_and_goes_on(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("x" * 2 * LONGEST_GROWN)

    monkeypatch.setattr(object_census, "take_census", fails)
    assert life.turns(Configure(FACTS), Start(), LookAtMemory())
    assert not any(isinstance(m, MemoryGrown) for m in life.heard())
    assert life.turns(LookAtMemory(1))
    (text,) = (m.text for m in life.heard() if isinstance(m, MemoryGrown))
    assert text.startswith("what grows could not be found out (ZeroDivisionError: x")
    assert len(text) == LONGEST_GROWN


def test_nothing_happens_after_the_end(life: Life) -> None:
    life.turns(Configure(FACTS), Start())
    life.turns(Exit())
    calls = list(life.worker.calls)
    life.heard()
    assert not life.turns(Start(), Save(), Exit())
    life.link.close()
    assert not life.turns()
    assert life.worker.calls == calls and life.worker.state is State.COMPLETED
    assert life.heard() == []


def test_a_worker_that_has_nothing_to_do_says_so(life: Life) -> None:
    life.worker.work = 0
    assert not life.turns(Configure(FACTS), Start())
    assert life.worker.polls == 1


def test_a_worker_ends_by_itself(life: Life) -> None:
    life.turns(Configure(FACTS), Start())
    life.worker.work = 0
    poll = life.worker._poll

    def last() -> PollResult:
        life.worker.exit("limits")
        return poll()

    life.worker._poll = last  # type: ignore[method-assign]
    life.heard()
    life.turns()
    assert life.worker.calls[-3:] == ["on_exit", "poll", "close"]
    (completed,) = (m for m in life.heard() if isinstance(m, Status))
    assert (completed.state, completed.reason) == (State.COMPLETED, "limits")


def test_exit_before_configure_saves_nothing(life: Life) -> None:
    life.turns(Exit())
    assert life.worker.calls == ["close"]
    assert life.states() == [State.COMPLETED]


@pytest.mark.parametrize("where", ["configure", "poll", "save", "on_exit"])
@pytest.mark.parametrize("expected", [True, False])
def test_a_failure_is_reported_once(life: Life, where: str, expected: bool) -> None:
    error = EnvironmentFault("lane 3 raised") if expected else ValueError("oops")
    life.worker.fails_at[where] = error
    life.turns(Configure(FACTS), Start(), Save())
    life.turns(Exit())
    failed = [m for m in life.heard() if isinstance(m, Status) and m.state is State.FAILED]
    assert len(failed) == 1
    assert life.worker.state is State.FAILED
    assert life.worker.calls[-1] == "close" and life.worker.calls.count("close") == 1
    if expected:
        assert (failed[0].error, failed[0].details) == ("lane 3 raised", "")
    else:
        assert failed[0].error.startswith("ValueError: oops") and "Traceback" in failed[0].details


def test_where_it_happened_is_told_only_of_errors_that_are_not_ours(life: Life) -> None:
    try:
        try:
            raise PeerLost("it was ended by SIGKILL")
        except PeerLost as error:
            raise EnvironmentFault("simulator 0: it was ended by SIGKILL") from error
    except EnvironmentFault as fault:
        life.worker.fails_at["poll"] = fault
    life.turns(Configure(FACTS), Start())
    (failed,) = (m for m in life.heard() if isinstance(m, Status) and m.state is State.FAILED)
    assert (failed.error, failed.details) == ("simulator 0: it was ended by SIGKILL", "")


def test_a_failure_keeps_its_cause_when_closing_fails_too(life: Life) -> None:
    life.worker.fails_at = {"poll": EnvironmentFault("the cause"), "close": OSError("the consequence")}
    life.turns(Configure(FACTS), Start())
    assert life.worker.state is State.FAILED
    failed = [m for m in life.heard() if isinstance(m, Status) and m.state is State.FAILED]
    assert {m.error for m in failed} == {"the cause"}


@pytest.mark.parametrize("where", ["configure", "poll", "save", "on_exit"])
def test_a_worker_that_is_told_to_exit_from_within_has_failed(life: Life, where: str) -> None:
    life.worker.fails_at = {where: SystemExit(3), "close": SystemExit()}
    life.turns(Configure(FACTS), Start(), Save())
    life.turns(Exit())
    failed = [m for m in life.heard() if isinstance(m, Status) and m.state is State.FAILED]
    assert life.worker.state is State.FAILED
    assert {m.error for m in failed} == {failed[0].error}
    assert failed[0].error.startswith("SystemExit: sys.exit(3) was called") and "in _note)" in failed[0].error


def test_what_is_no_exception_is_a_failure_in_a_thread_and_the_runner_s_in_the_main_one(
    life: Life,
) -> None:
    life.worker.fails_at["poll"] = KeyboardInterrupt("from an environment")
    with pytest.raises(KeyboardInterrupt):
        life.turns(Configure(FACTS), Start())
    assert life.worker.state is State.RUNNING
    thread = threading.Thread(target=life.worker.run, daemon=True)
    thread.start()
    thread.join(60)
    (failed,) = (m for m in life.heard() if isinstance(m, Status) and m.state is State.FAILED)
    assert failed.error.startswith("KeyboardInterrupt: from an environment (") and "in _note)" in failed.error


class Panic(BaseException):
    """What a panic in Rust is in Python: no `Exception`."""


def test_a_panic_is_a_failure_in_the_main_thread_too(life: Life) -> None:
    life.worker.fails_at = {"poll": Panic("slice index out of range"), "close": Panic("poisoned")}
    life.turns(Configure(FACTS), Start())
    failed = [m for m in life.heard() if isinstance(m, Status) and m.state is State.FAILED]
    assert life.worker.state is State.FAILED
    assert {m.error.partition(" (")[0] for m in failed} == {"Panic: slice index out of range"}


def test_what_a_task_raises_while_the_worker_waits_is_its_failure(life: Life) -> None:
    life.worker.work = 0
    life.turns(Configure(FACTS), Start())

    async def exits() -> None:
        raise SystemExit(3)

    def run() -> None:
        loop = Loop.take()
        task = loop.loop.create_task(exits())
        life.worker.run()
        assert task.done()
        loop.give_back()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    (failed,) = (m for m in life.heard() if isinstance(m, Status) and m.state is State.FAILED)
    assert failed.error.startswith("SystemExit: sys.exit(3) was called") and "in exits)" in failed.error


def test_a_failure_s_text_is_bounded_and_ends_as_it_did(life: Life) -> None:
    life.worker.fails_at["poll"] = ValueError("x" * 1_000_000 + " the end")
    life.turns(Configure(FACTS), Start())
    (failed,) = (m for m in life.heard() if isinstance(m, Status) and m.state is State.FAILED)
    assert (
        len(failed.error) < base.ERROR_LIMIT
        and "characters are left out" in failed.error
        and "the end (" in failed.error
        and failed.error.endswith("in _note)")
    )
    assert len(failed.details) == base.DETAILS_LIMIT and failed.details.endswith("the end\n")


def test_a_message_that_cannot_be_read_is_a_failure(life: Life) -> None:
    life.link.send(b"\xc1 no message")
    assert not life.worker.run_once()
    (failed,) = (m for m in life.heard() if isinstance(m, Status))
    assert failed.state is State.FAILED and "cannot be read" in failed.error


def test_the_runner_s_end_is_the_worker_s(life: Life) -> None:
    life.turns(Configure(FACTS), Start())
    life.link.close()
    life.worker.run_once()
    assert life.worker.calls[-1] == "close"
    assert life.worker.state is State.COMPLETED


def test_what_it_was_told_in_a_long_turn_is_obeyed_in_its_next_one_and_not_lost(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the runner is gone by then, and however often it was looked at."""
    monkeypatch.setattr(base, "ASK", -1.0)
    life.turns(Configure(FACTS), Start())
    assert not life.worker.called() and not life.worker.hurried()
    life.tell(Save())
    assert life.worker.called() and life.worker.called() and not life.worker.hurried()
    life.tell(Hurry(), Exit("it is time"))
    assert life.worker.called() and life.worker.hurried()
    life.link.close()
    assert life.worker.called() and not life.turns()
    assert life.worker.calls[-3:] == ["save", "on_exit", "close"]
    assert life.worker.state is State.COMPLETED and not life.worker.called()


def test_reports_go_up_in_order(life: Life) -> None:
    reports = [Episodes(0, 0, [float(i)], [i]) for i in range(5)]
    for report in reports:
        life.worker.report(report)
    assert life.heard() == reports


@pytest.fixture
def running(life: Life) -> Iterator[tuple[Life, threading.Thread]]:
    thread = threading.Thread(target=life.worker.run, daemon=True)
    thread.start()
    yield life, thread
    life.link.close()
    thread.join(60)
    assert not thread.is_alive()


def test_run_sleeps_until_it_is_rung(
    running: tuple[Life, threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it would sleep for an hour."""
    monkeypatch.setattr(base, "LOOK_AGAIN", 3600.0)
    life, thread = running
    life.worker.work = 0
    life.tell(Configure(FACTS), Start())
    assert life.worker.polled.wait(60)
    life.tell(Pause())
    life.tell(Exit("enough"))
    thread.join(60)
    assert not thread.is_alive()
    assert life.states()[-1] is State.COMPLETED
    assert life.worker.rescues == 0


def test_run_ends_with_the_runner(running: tuple[Life, threading.Thread]) -> None:
    life, thread = running
    life.tell(Configure(FACTS), Start())
    assert life.worker.polled.wait(60)
    life.link.close()
    thread.join(60)
    assert not thread.is_alive()


def test_a_sleep_that_nobody_ended_is_counted_as_a_rescue(life: Life) -> None:
    waits: list[float] = []

    class Deaf(type(life.worker.context.endpoints.bell)):  # type: ignore[misc]
        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            life.worker.work = 1  # there is something to do now, and nobody said so
            if len(waits) > 1:
                life.worker.state = State.COMPLETED
            return False

    life.worker.context.endpoints.bell = Deaf()
    life.turns(Configure(FACTS), Start())
    life.worker.work = 0
    polls = iter([0, 1, 1, 0, 0, 0, 0])

    def poll() -> PollResult:
        return PollResult(next(polls), 0)

    life.worker._poll = poll  # type: ignore[method-assign]
    life.worker.run()
    assert life.worker.rescues == 1
    assert waits[:2] == [base.LOOK_AGAIN, base.RING_LATE]


def test_a_bell_that_is_rung_just_after_a_sleep_is_no_rescue(life: Life) -> None:
    waits: list[float] = []

    class Late(type(life.worker.context.endpoints.bell)):  # type: ignore[misc]
        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            if len(waits) > 2:
                life.worker.state = State.COMPLETED
            return len(waits) == 2

    life.worker.context.endpoints.bell = Late()
    life.turns(Configure(FACTS), Start())
    polls = iter([0, 1, 0, 0, 0, 0])
    life.worker._poll = lambda: PollResult(next(polls), 0)  # type: ignore[method-assign]
    life.worker.run()
    assert life.worker.rescues == 0 and waits[:2] == [base.LOOK_AGAIN, base.RING_LATE]


def test_no_worker_of_the_library_is_another_one_changed() -> None:
    for room in (tidemill.workers, tidemill.replay_training):
        for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
            importlib.import_module(module.name)
    kinds = [kind for kind in Worker.__subclasses__() if kind.__module__.startswith("tidemill.")]
    assert len(kinds) >= 7
    changed = [kind for base in kinds for kind in base.__subclasses__()]
    assert [kind for kind in changed if kind.__module__.startswith("tidemill.")] == []  # tests have some
