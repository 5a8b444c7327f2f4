"""The trainer worker: what enters training, what is dropped, when it ends, and what a
resumed one goes on from."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.run.watching import wait_until
from tests.workers.world import Known, KnownPolicy

from tidemill.api.algorithm import ROW_FIELDS, Algorithm, AlgorithmConfig, Sample
from tidemill.api.buffer import BufferedSample
from tidemill.api.control_messages import (
    Adopt,
    ChangeSettings,
    Exit,
    Facts,
    Hold,
    Hurry,
    Notice,
    Pause,
    SampleFacts,
    Save,
    Saved,
    SaveDue,
    Start,
    State,
    Status,
    WorkerStatistics,
    pack,
    unpack_up,
)
from tidemill.api.edges import Port
from tidemill.api.experiment import Experiment
from tidemill.api.limits import Limits
from tidemill.api.policy import Policy
from tidemill.api.spaces import Box, Discrete, Spaces, schema_of_space
from tidemill.api.worker import Context, WorkerConfig
from tidemill.core.errors import CheckpointError, ConfigError
from tidemill.core.schema import Field
from tidemill.replay.priority_queue import PriorityQueue
from tidemill.replay.queue import Queue
from tidemill.store.checkpoint import checkpoints, read_newest
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase
from tidemill.transports.local import local_endpoints
from tidemill.transports.slots import SlotProducer
from tidemill.workers import checkpoint_pace
from tidemill.workers.data_parallel import EqualTrainers
from tidemill.workers.trainer import TrainerWorker
from tidemill.workers.trainer_config import Trainer

SPACES = Spaces(Box((5,), "float32"), Discrete(4))
ROWS, SEATS = 5, 2  # per sample: 4 trained rows of each seat, and one that lends its value
TRAINED = (ROWS - 1) * SEATS
FIELDS = {**ROW_FIELDS, **schema_of_space(SPACES.observation, "obs"), **KnownPolicy().answer(SPACES)}


@pytest.fixture(autouse=True)
def _no_checkpoint_for_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first checkpoint is written with the first update, and the next ones after
    `checkpoint_seconds`."""
    monkeypatch.setattr(checkpoint_pace, "LEAST", 3600.0)
    monkeypatch.setattr(checkpoint_pace, "LONG", 3600.0)


@dataclass(frozen=True, kw_only=True)
class Adding(AlgorithmConfig):
    """Adds to the policy's parameters in each update, and remembers what it was given."""

    amount: float = 1.0

    def build(self, policy: Policy, seed: int) -> "Adder":
        return Adder(policy, self.amount)


class Adder(Algorithm):
    built: ClassVar[list["Adder"]] = []

    def __init__(self, policy: Policy, amount: float) -> None:
        self.policy, self.amount = policy, amount
        self.loss: float | None = 0.5
        self.seen: list[list[float]] = []
        self.steps: list[int] = []
        self.moment = np.zeros(2)
        self.built.append(self)

    def update(self, samples: Sequence[Sample], steps: int) -> dict[str, float]:
        self.seen.append([float(sample["reward"][0, 0]) for sample in samples])
        self.steps.append(steps)
        self.policy.parameters()["w"][:] += self.amount  # type: ignore[index]
        self.moment += 10
        return {} if self.loss is None else {"loss/policy": self.loss}

    def state(self) -> dict[str, Any]:
        return {"moment": self.moment}

    def load_state(self, state: Any) -> None:
        self.moment[:] = state["moment"]


@dataclass(frozen=True, kw_only=True)
class Source(WorkerConfig):
    """Stands where actors do."""

    outlets: int = 1

    def ports(self) -> tuple[Port, ...]:
        return Port("samples", "produce", outlets=self.outlets, lockstep=True), Port("policy", "subscribe")


class Bench:
    """A trainer with producers that the test holds."""

    def __init__(
        self,
        outlets: int = 1,
        slots: int = 4,
        limits: Limits | None = None,
        folder: Path | None = None,
        resume: str | None = None,
        mode: Any = "fixed",
        at_once: int = 1,
        exact: bool = False,
        **settings: Any,
    ):
        Adder.built.clear()
        Known.built.clear()
        config = Trainer(algorithm=Adding(), **settings)
        workers: dict[str, WorkerConfig] = {"source": Source(outlets=outlets), "trainer": config}
        experiment = Experiment(
            name="bench",
            policies={"policy": KnownPolicy()},
            workers=workers,
            limits=limits or Limits(),
            exact_resume=exact,
        )
        ends = local_endpoints(["source-0", "trainer-0"], experiment.edges())
        source = ends["source-0"][0]
        self.link = ends["trainer-0"][1]
        self.producers: list[SlotProducer] = [
            source.producer(f"samples/samples/source-0/{i}/trainer-0") for i in range(outlets)
        ]
        for producer in self.producers:
            producer.offer(FIELDS, (ROWS, SEATS), slots)
        self.reader = source.reader("parameters/policy/trainer-0")
        context = Context(
            experiment,
            "trainer-0",
            config,
            ends["trainer-0"][0],
            None if folder is None else str(folder),
            resume,
        )
        self.worker = TrainerWorker(context, config)
        self.facts = self.worker._configure(
            Facts(spaces={"policy": SPACES}, samples={"samples": SampleFacts(1, 0, 1, mode, at_once=at_once)})
        )
        (self.algorithm,) = Adder.built
        self.worker.start()
        self.told: list[Any] = []

    def send(self, mark: float, version: Any = 0, outlet: int = 0, **cells: Any) -> bool:
        """Send a sample whose every row was made by `version`."""
        block = self.producers[outlet].reserve()
        if block is None:
            return False
        for array in block.values():
            array[...] = np.zeros((), array.dtype)
        block["reward"][:] = mark
        block["version"][:] = version
        for name, (index, value) in cells.items():
            block[name][index] = value
        self.producers[outlet].commit()
        return True

    def two_updates(self) -> None:
        """Be at version 2."""
        for version in range(2):
            for outlet in range(len(self.producers)):
                self.send(version, version, outlet)
            self.poll()

    def poll(self) -> tuple[int, int]:
        result = self.worker._poll()
        return result.sample_count, result.batch_count

    def heard(self) -> list[Any]:
        self.told += [unpack_up(m) for m in self.link.receive() or []]
        return self.told

    def updates(self) -> list[WorkerStatistics]:
        return [m for m in self.heard() if isinstance(m, WorkerStatistics) and m.update]

    def published(self) -> tuple[int, float]:
        assert self.reader.attach()
        into = {"w": np.zeros(3)}
        return self.reader.read(into), float(into["w"][0])


def test_version_0_is_published_before_anything_is_trained() -> None:
    bench = Bench()
    assert bench.published() == (0, 0.0)
    assert bench.poll() == (0, 0)


def test_each_update_is_one_version() -> None:
    bench = Bench()
    for update in range(1, 4):
        assert bench.send(update, version=update - 1)
        assert bench.poll() == (TRAINED, 1)
        assert bench.published() == (update, float(update))
    assert bench.algorithm.seen == [[1.0], [2.0], [3.0]]
    names = ("update", "step", "lag/max", "loss/policy")
    assert [tuple(s.values[name] for name in names) for s in bench.updates()] == [
        (1.0, 8.0, 0.0, 0.5),
        (2.0, 16.0, 0.0, 0.5),
        (3.0, 24.0, 0.0, 0.5),
    ]


def test_a_batch_is_one_sample_of_each_producer() -> None:
    bench = Bench(outlets=3)
    bench.send(1, outlet=0)
    bench.send(2, outlet=2)
    assert bench.poll() == (0, 0)
    bench.send(3, outlet=1)
    assert bench.poll() == (3 * TRAINED, 1)
    assert sorted(bench.algorithm.seen[0]) == [1.0, 2.0, 3.0]


def test_producers_are_served_in_turn() -> None:
    bench = Bench(outlets=2, batch_size=1)
    for mark in range(3):
        bench.send(mark, outlet=0)
        bench.send(10 + mark, outlet=1)
    for _ in range(6):
        bench.poll()
    assert bench.algorithm.seen == [[0.0], [10.0], [1.0], [11.0], [2.0], [12.0]]


def test_a_batch_is_so_many_rows_at_least() -> None:
    bench = Bench(batch_size=2 * TRAINED + 1)
    for mark in range(3):
        assert bench.poll() == (0, 0)
        bench.send(mark)
    assert bench.poll() == (3 * TRAINED, 1)


def test_slots_are_given_back_after_the_update_only() -> None:
    bench = Bench(slots=2, batch_size=2 * TRAINED)
    assert bench.send(1)
    assert bench.poll() == (0, 0)
    assert bench.send(2)
    assert not bench.send(3)  # both are held, the first for the batch under way
    assert bench.poll() == (2 * TRAINED, 1)
    assert bench.send(3) and bench.send(4)


def test_a_batch_that_no_slots_can_hold_is_an_error() -> None:
    """Else the trainer would wait for actors that wait for it."""
    with pytest.raises(ConfigError, match="batch_size = 17 is more than the 16 rows"):
        Bench(slots=2, batch_size=2 * TRAINED + 1)


# ---- staleness -------------------------------------------------------------------------


def test_samples_that_lag_too_far_are_dropped_and_counted() -> None:
    bench = Bench(max_policy_lag=2)
    for version in range(4):
        bench.send(version, version)
        bench.poll()
    assert bench.worker.learner.counters.updates == 4
    bench.send(100, version=1)  # 3 behind
    assert bench.poll() == (0, 0)
    assert bench.published()[0] == 4
    bench.send(101, version=2)
    assert bench.poll() == (TRAINED, 1)
    assert bench.worker.learner.counters.dropped == 1
    assert [s[0] for s in bench.algorithm.seen][-1] == 101
    assert bench.updates()[-1].values["dropped"] == 1
    for mark in range(4):
        assert bench.send(mark), "dropped samples were not given back"


def test_part_of_a_batch_is_dropped() -> None:
    bench = Bench(outlets=2, max_policy_lag=1)
    bench.two_updates()
    bench.send(3, 2, outlet=0)
    bench.send(4, 0, outlet=1)
    assert bench.poll() == (0, 0)  # the batch is not full
    bench.send(5, 2, outlet=1)
    assert bench.poll() == (2 * TRAINED, 1)
    assert bench.algorithm.seen[-1] == [3.0, 5.0]
    assert (bench.worker.learner.counters.dropped, bench.worker.learner.counters.rows) == (1, 6 * TRAINED)
    assert bench.updates()[-1].values["lag/max"] == 0
    for outlet in (0, 1):
        assert bench.send(6, outlet=outlet), "dropped samples were not given back"


def test_dropped_samples_that_fill_all_slots_do_not_hold_the_batch_up() -> None:
    bench = Bench(outlets=2, slots=1, max_policy_lag=1)
    bench.two_updates()
    bench.send(3, 2, outlet=0)
    bench.send(4, 0, outlet=1)
    assert bench.poll() == (TRAINED, 1)  # nobody could send more
    assert bench.algorithm.seen[-1] == [3.0]


@pytest.mark.parametrize("slots", [1, 3])
def test_in_lockstep_a_sample_is_given_back_once_the_next_version_is_published(slots: int) -> None:
    """Whoever sent it asks for its next actions then."""
    bench = Bench(outlets=2, slots=slots, max_policy_lag=0)
    found: list[tuple[int, bool]] = []
    release = bench.worker._buffer.release

    def spy() -> None:
        found.append((bench.published()[0], any(producer.free() == slots for producer in bench.producers)))
        release()
        assert all(producer.free() == slots for producer in bench.producers)

    bench.worker._buffer.release = spy  # type: ignore[method-assign]
    for version in range(3):
        for outlet in range(2):
            assert bench.send(0, version, outlet)
        assert bench.poll() == (2 * TRAINED, 1)
    assert found == [(1, False), (2, False), (3, False)]


def test_in_lockstep_a_sample_that_is_too_old_all_the_same_holds_nobody_up() -> None:
    bench = Bench(outlets=2, slots=3, max_policy_lag=0)
    bench.two_updates()
    bench.send(1, 2, outlet=0)
    bench.send(2, 1, outlet=1)
    assert bench.poll() == (TRAINED, 1)  # its producer waits for it and sends no other
    assert bench.worker.learner.counters.updates == 3 and all(
        producer.free() == 3 for producer in bench.producers
    )


def test_a_batch_without_a_row_to_train_is_no_update() -> None:
    bench = Bench(slots=1)
    for _ in range(3):
        assert bench.send(0, done=(slice(None), True))
        assert bench.poll() == (0, 1)
    assert bench.algorithm.seen == [] and bench.published()[0] == 0
    assert bench.worker.learner.counters.dropped == 0


def test_lag_counts_only_rows_that_enter_the_loss() -> None:
    sample = Sample({name: np.zeros((6, 1), field.dtype) for name, field in ROW_FIELDS.items()})
    sample.burn_in = 1
    sample["version"][:, 0] = [0, 5, -1, 6, 7, 2]  # burn-in, row, ended, cut, row, bootstrap
    sample["done"][2] = sample["truncated"][3] = True
    held = BufferedSample.of(sample)
    assert (held.trained, held.oldest, held.stamps, held.lag(9)) == (2, 5, 12, 4)
    sample["version"][:] = -1
    held = BufferedSample.of(sample)
    assert (held.trained, held.oldest, held.stamps, held.lag(9)) == (0, None, 0, 0)


def test_steps_are_rows_that_were_trained() -> None:
    bench = Bench()
    bench.send(0, done=((2, 0), True), truncated=((1, 1), True))
    assert bench.poll() == (TRAINED - 2, 1)
    assert bench.worker.learner.counters.steps == TRAINED - 2


# ---- samples trained on again ----------------------------------------------------------


def test_a_row_is_a_step_once_however_often_it_is_trained_on() -> None:
    bench = Bench(buffer=Queue(reuses=3), limits=Limits(updates=4))
    bench.send(1)
    assert [bench.poll() for _ in range(4)] == [(TRAINED, 1)] * 3 + [(0, 0)]
    bench.send(2)
    bench.poll()
    assert bench.algorithm.seen == [[1.0]] * 3 + [[2.0]]
    told = [
        (u.values["update"], u.values["step"], u.values["reused"], u.values["lag/max"], u.values["lag/mean"])
        for u in bench.updates()
    ]
    assert told == [
        (1, TRAINED, 0, 0, 0),
        (2, TRAINED, 1, 1, 1),
        (3, TRAINED, 2, 2, 2),
        (4, 2 * TRAINED, 2, 3, 3),
    ]


def test_what_a_priority_queue_does_with_samples_is_told_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "buffer": PriorityQueue(capacity=2 * TRAINED, reuses=2),
        "folder": tmp_path,
        "max_policy_lag": 1,
    }
    bench = Bench(**settings)
    for mark in (1, 2, 3):  # 3 takes the place of 1
        bench.send(mark)
    for _ in range(3):
        bench.poll()
    assert bench.algorithm.seen == [[3.0], [2.0]]  # both are too old for a third update
    assert bench.updates()[-1].values["evicted"] == 1
    bench.send(4, version=2)
    bench.poll()
    assert bench.algorithm.seen == [[3.0], [2.0], [4.0]]
    counters = bench.worker.learner.counters
    assert (counters.dropped, counters.evicted, counters.reused, counters.steps) == (2, 1, 0, 3 * TRAINED)
    bench.poll()
    assert (counters.reused, counters.updates) == (1, 4)
    bench.worker.exit()
    again = Bench(**settings, resume="update-4")
    assert vars(again.worker.learner.counters) == vars(counters)
    assert again.poll() == (0, 0)  # it is empty


def test_a_checkpoint_without_the_newer_counters_is_taken(tmp_path: Path) -> None:
    bench = Bench(folder=tmp_path)
    bench.send(1)
    bench.poll()
    del bench.worker.learner.counters.evicted
    bench.worker.learner.save(final=True)
    assert Bench(folder=tmp_path, resume="update-1").worker.learner.counters.evicted == 0


def test_the_plan_counts_the_copies_that_the_algorithm_makes_of_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def batches(**settings: Any) -> list[int]:
        return [need.nbytes for need in Bench(outlets=2, **settings).facts.memory if need.what == "batches"]

    (usual,) = batches()  # of an algorithm that does not say
    monkeypatch.setattr(Adder, "batch_copies", 0)
    assert batches() == []
    monkeypatch.setattr(Adder, "batch_copies", 3)
    (sample,) = batches(batch_size=None)
    row = sum(field.nbytes for field in FIELDS.values())
    assert sample >= 2 * 3 * ROWS * SEATS * row and 3 * usual == 2 * sample
    (large,) = batches(batch_size=8 * TRAINED)
    assert large == 4 * sample


@pytest.mark.parametrize("then", [Save(), Exit("enough")])
def test_a_checkpoint_that_is_asked_for_with_a_change_knows_it(tmp_path: Path, then: Any) -> None:
    bench = Bench(folder=tmp_path)
    for message in (ChangeSettings({"amount": 3.0}, 1), then):
        bench.link.send(pack(message))
    bench.worker.run_once()
    assert read_newest(tmp_path / "checkpoints" / "policy").facts["settings"] == {"amount": 3.0}


def test_a_change_that_does_not_go_with_earlier_ones_is_refused_with_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Adding, "ranges", {"amount": (0, 5, "1 is usual")})
    bench = Bench(folder=tmp_path)
    for number, amount in enumerate((3.0, 9.0), 1):
        bench.link.send(pack(ChangeSettings({"amount": amount}, number)))
    bench.worker.run_once()
    assert bench.worker.state is State.RUNNING and bench.algorithm.config == Adding(amount=3.0)
    (notice,) = [message.text for message in bench.heard() if isinstance(message, Notice)]
    assert notice.startswith("amount = 9.0 is not taken") and "1 is usual" in notice
    bench.worker.exit()
    assert read_newest(tmp_path / "checkpoints" / "policy").facts["settings"] == {"amount": 3.0}


def test_a_checkpoint_is_due_again_where_no_cut_came_of_it(tmp_path: Path) -> None:
    bench = Bench(folder=tmp_path, exact=True)

    def due() -> int:
        bench.two_updates()
        return sum(isinstance(message, SaveDue) for message in bench.heard())

    assert due() == 1 and due() == 1
    for message in (Hold(cut=1), Hold(on=False, cut=2)):
        bench.link.send(pack(message))
    bench.worker.run_once()
    assert due() == 2


def test_a_trainer_counts_the_whole_time_for_which_it_is_held_as_what_a_checkpoint_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, now = Bench(folder=tmp_path, exact=True), [1000.0]
    for module in ("trainer", "learner", "checkpoint_writer"):
        monkeypatch.setattr(f"tidemill.workers.{module}.awake", lambda: now[0])
    bench.two_updates()
    pace = bench.worker.learner.checkpoints.pace
    for message, later in ((Hold(cut=1), 4.0), (Save(), 5.0), (Hold(on=False, cut=2), 0.0)):
        bench.link.send(pack(message))
        bench.worker.run_once()
        now[0] += later
    assert pace.interval(1e6) == pytest.approx(9.0 * 49)
    bench.link.send(pack(Hold(on=False, cut=2)))  # nothing was held meanwhile
    now[0] += 100.0
    bench.worker.run_once()
    assert pace.interval(1e6) == pytest.approx(9.0 * 49)


def test_who_is_told_to_end_while_equal_trainers_agree_to_rest_does_not_rest(tmp_path: Path) -> None:
    """It would be waited for at the end: all of them were told."""
    worker = Bench(folder=tmp_path, exact=True).worker
    worker._end("stopped")
    worker._rest(1)
    assert not worker._held


def test_a_change_that_a_checkpoint_knows_is_not_taken_again(tmp_path: Path) -> None:
    """What came after it holds: here what a life before took as updates were not
    finite."""
    first, second = ChangeSettings({"amount": 3.0}, 1), ChangeSettings({"amount": 7.0}, 2)
    bench = Bench(folder=tmp_path)
    bench.link.send(pack(first))
    bench.worker.run_once()
    assert bench.worker.learner.settings.accept({"amount": 1.5}) is not None
    bench.worker.exit()
    for told, amount in (([first], 1.5), ([first, second], 7.0)):
        again = Bench(folder=tmp_path, resume="update-0")
        for message in told:
            again.link.send(pack(message))
        again.worker.run_once()
        assert again.worker.learner.settings.now() == Adding(amount=amount)


# ---- going on from another policy ------------------------------------------------------


def adopting(folder: Path, **settings: Any) -> Bench:
    """A trainer at version 1 that has adopted weights of 50, as version 2, and adds 0.25
    in each update from now on."""
    ParameterDatabase(folder / PARAMETERS).push("other", 7, {"w": np.full(3, 50.0)})
    bench = Bench(folder=folder, **settings)
    bench.send(1, info_mask=((2, 0), True), **{"info.return": ((2, 0), 30.0)})
    bench.poll()
    assert bench.worker.learner.metadata() == {
        "env_steps": TRAINED, "seconds": bench.worker.learner.counters.seconds, "adopted": 0,
        "algorithm/amount": 1.0,
        "training_return": 30.0,
    }  # fmt: skip
    bench.link.send(pack(Adopt("other", 7, {"amount": 0.25})))
    bench.worker._obey()
    _, bench.algorithm = Adder.built
    return bench


def test_adopted_weights_are_a_version_more_and_published_at_once(tmp_path: Path) -> None:
    bench = adopting(tmp_path)
    assert bench.published() == (2, 50.0)
    assert (bench.algorithm.moment == 0).all()  # the optimiser begins anew
    bench.send(2, version=2)
    bench.poll()
    assert bench.published() == (3, 50.25)
    known = bench.worker.learner.metadata()
    assert (known["adopted"], known["algorithm/amount"], known["env_steps"]) == (2, 0.25, 2 * TRAINED)
    assert "training_return" not in known  # what was reached before was by others


def test_a_version_that_is_gone_is_not_adopted(tmp_path: Path) -> None:
    """Its trainer has died, and gone back behind it."""
    bench = Bench(folder=tmp_path)
    bench.link.send(pack(Adopt("other", 7, {"amount": 0.25})))
    assert bench.worker._obey() and bench.worker.learner.counters.adopted == 0


def test_a_version_that_is_gone_and_was_decided_for_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, database = Bench(folder=tmp_path), ParameterDatabase(tmp_path / PARAMETERS)
    learner = bench.worker.learner
    learner._awaited = {"population/from": 2}
    database.results.add("policy", 0, {"population/from": [1.0]})
    monkeypatch.setattr(Experiment, "adoption", lambda *known: Adopt("other", 7, {}))
    assert learner.awaits() and learner.counters.adopted == 0
    database.push("other", 7, {"w": np.full(3, 50.0)})
    wait_until(lambda: not learner.awaits(), 60, "it has gone on from that version")
    assert learner.counters.adopted == 1


@pytest.mark.parametrize("buffer", [Queue(), PriorityQueue(capacity=8 * TRAINED)])
def test_samples_of_versions_before_an_adoption_are_not_trained(tmp_path: Path, buffer: Any) -> None:
    bench = adopting(tmp_path, buffer=buffer)
    bench.send(10, version=1)
    mixed = np.full((ROWS, SEATS), 2)
    mixed[1, 1] = 1
    bench.send(11, version=mixed)
    bench.send(12, version=2)
    assert bench.poll() == (TRAINED, 1)
    assert bench.algorithm.seen == [[12.0]]
    assert bench.worker.learner.counters.dropped == 2


def test_a_batch_that_is_used_again_goes_with_the_version_it_was_of(tmp_path: Path) -> None:
    bench = adopting(tmp_path, buffer=Queue(reuses=3))
    assert bench.poll() == (0, 0)  # it had two uses left
    bench.send(2, version=2)
    assert bench.poll() == (TRAINED, 1)
    assert bench.algorithm.seen == [[2.0]] and bench.worker.learner.counters.dropped == 1


def test_a_resumed_run_goes_on_with_what_was_adopted(tmp_path: Path) -> None:
    bench = adopting(tmp_path)
    bench.worker.exit()
    again = Bench(folder=tmp_path, resume="update-2")
    assert again.published() == (2, 50.0) and again.algorithm.amount == 0.25
    assert again.worker.learner.metadata() == bench.worker.learner.metadata()


def test_a_batch_of_whole_episodes_has_as_many_as_there_are_seats_unless_its_size_is_set() -> None:
    bench = Bench(at_once=3)
    for _ in range(2):
        bench.send(0)
    assert bench.poll() == (0, 0)
    bench.send(0)
    assert bench.poll() == (3 * TRAINED, 1)
    bench = Bench(at_once=3, batch_size=TRAINED)
    bench.send(0)
    assert bench.poll() == (TRAINED, 1)


# ---- limits ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "updates", "reason"),
    [
        (Limits(updates=3), 3, "3 updates done"),
        (
            Limits(steps=2 * TRAINED + 1),
            3,
            "24 env steps trained, 7 more than the limit: an update takes whole samples, 8 steps in the last "
            "one",
        ),
        (Limits(steps=TRAINED), 1, "8 env steps trained"),
    ],
)
def test_the_run_ends_at_its_limits(limits: Limits, updates: int, reason: str) -> None:
    bench = Bench(limits=limits)
    for update in range(updates):
        assert bench.worker.state is State.RUNNING
        bench.send(0, update)
        bench.poll()
    assert bench.worker.state is State.COMPLETED
    (end,) = (m for m in bench.heard() if isinstance(m, Status) and m.state is State.COMPLETED)
    assert end.reason == reason
    assert bench.algorithm.steps == sorted(set(bench.algorithm.steps))
    assert bench.algorithm.steps[0] == 0


@pytest.mark.parametrize("samples", [True, False])
def test_time_ends_a_run_even_if_no_sample_comes(samples: bool) -> None:
    bench = Bench(limits=Limits(seconds=1000.0))
    bench.poll()
    assert bench.worker.state is State.RUNNING
    bench.worker.learner.limits._counted_at -= 1001
    if samples:
        bench.send(0)
    bench.poll()
    assert bench.worker.state is State.COMPLETED


def test_a_pause_costs_no_time() -> None:
    bench = Bench()
    bench.worker.learner.limits._counted_at -= 1000
    bench.worker.pause()
    assert 1000 <= bench.worker.learner.counters.seconds < 2000
    bench.worker.learner.limits._counted_at -= 100_000
    bench.worker.start()
    bench.worker.exit()
    assert bench.worker.learner.counters.seconds < 2000


# ---- checkpoints -----------------------------------------------------------------------


def test_the_end_is_saved_and_a_resumed_run_goes_on_from_it(tmp_path: Path) -> None:
    bench = Bench(folder=tmp_path, limits=Limits(updates=3), max_policy_lag=1)
    bench.two_updates()
    bench.send(1, 0)
    assert bench.poll() == (0, 0)  # dropped
    bench.send(2, 2)
    bench.worker.learner.limits._counted_at -= 50
    bench.poll()
    assert bench.worker.state is State.COMPLETED
    first, saved = checkpoints(tmp_path / "checkpoints" / "policy")
    assert (first.name, saved.name) == ("update-1", "update-3")
    again = Bench(folder=tmp_path, resume=saved.name)
    assert vars(again.worker.learner.counters) == vars(bench.worker.learner.counters)
    counters = again.worker.learner.counters
    assert counters.dropped == 1
    assert (counters.updates, counters.rows, counters.steps) == (
        3,
        3 * TRAINED,
        3 * TRAINED,
    ) and counters.seconds >= 50
    assert again.published() == (3, 3.0)
    assert again.algorithm.moment.tolist() == [30.0, 30.0]
    again.send(3, 3)
    again.poll()
    assert again.published() == (4, 4.0)
    again.worker.exit()
    assert read_newest(tmp_path / "checkpoints" / "policy")[2]["updates"] == 4


def test_checkpoints_are_kept_in_numeric_order(tmp_path: Path) -> None:
    bench = Bench(folder=tmp_path, checkpoints=2)
    for update in range(12):
        bench.send(0, update)
        bench.poll()
        bench.worker._save()
    assert [p.name for p in checkpoints(tmp_path / "checkpoints" / "policy")] == ["update-11", "update-12"]


def test_one_update_is_saved_once(tmp_path: Path) -> None:
    bench = Bench(folder=tmp_path)
    bench.send(0)
    bench.poll()
    bench.worker._save()
    (saved,) = checkpoints(tmp_path / "checkpoints" / "policy")
    before = (saved / "manifest.json").stat().st_ino
    bench.worker._save()
    bench.worker.exit()
    assert (saved / "manifest.json").stat().st_ino == before


def test_what_is_not_saved_yet_is_saved_in_a_pause(tmp_path: Path) -> None:
    """The machine may go down in it."""
    bench = Bench(folder=tmp_path, checkpoint_share=1)

    def saved() -> list[str]:
        return [path.name for path in checkpoints(tmp_path / "checkpoints" / "policy")]

    bench.worker.pause()
    bench.worker.start()
    assert saved() == []  # nothing is trained
    bench.two_updates()
    assert saved() == ["update-1"]
    bench.worker.pause()
    assert saved() == ["update-1", "update-2"]
    states = [m.state if isinstance(m, Status) else m for m in bench.heard()]
    assert Saved("policy", 2, 16) in states[states.index(State.PAUSED, states.index(Saved("policy", 1, 8))) :]
    before = (tmp_path / "checkpoints" / "policy" / "update-2" / "manifest.json").stat().st_ino
    for _ in range(2):
        bench.worker.start()
        bench.worker.pause()
    assert (tmp_path / "checkpoints" / "policy" / "update-2" / "manifest.json").stat().st_ino == before
    assert saved() == ["update-1", "update-2"]


def test_a_trainer_that_ends_or_that_is_not_begun_saves_nothing_in_a_pause(tmp_path: Path) -> None:
    bench = Bench(folder=tmp_path, checkpoint_share=1)
    bench.two_updates()
    bench.worker.pause()
    written = tmp_path / "checkpoints" / "policy"
    (written / "update-2").rename(tmp_path / "elsewhere")
    bench.worker.learner.checkpoints.newest = -1, -1, -1
    bench.worker.pause()  # said again
    assert [path.name for path in checkpoints(written)] == ["update-1"]
    bench.worker.start()
    bench.worker._end("stopped")
    bench.worker.pause()
    assert [path.name for path in checkpoints(written)] == ["update-1"]


def test_who_ends_is_to_have_its_turns_soon_and_hears_that_its_time_runs_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others of its thread ask: to end may take several turns."""
    monkeypatch.setattr("tidemill.workers.base.ASK", -1.0)
    bench = Bench()
    assert not bench.worker.called()
    bench.worker._end("stopped")
    assert bench.worker.called() and not bench.worker.hurried()
    bench.link.send(pack(Hurry()))
    assert bench.worker.called() and bench.worker.hurried()
    bench.worker.state = State.COMPLETED
    assert not bench.worker.called()


def test_an_exact_run_is_cut_in_a_pause(tmp_path: Path) -> None:
    bench = Bench(folder=tmp_path, exact=True, checkpoint_share=1)
    bench.two_updates()
    bench.link.send(pack(Hold(cut=1)))
    bench.link.send(pack(Save()))
    bench.link.send(pack(Hold(on=False, cut=2)))
    bench.worker.run_once()
    bench.send(2, 2)
    bench.poll()
    before = sum(isinstance(message, SaveDue) for message in bench.heard())
    bench.worker.pause()
    assert sum(isinstance(message, SaveDue) for message in bench.heard()) == before + 1
    assert [path.name for path in checkpoints(tmp_path / "checkpoints" / "policy")] == ["update-2"]


def test_nobody_waits_for_a_cut_in_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts in what a checkpoint costs, and so in how rarely they are written."""
    bench, now = Bench(folder=tmp_path, exact=True), [1000.0]
    for module in ("trainer", "learner", "checkpoint_writer"):
        monkeypatch.setattr(f"tidemill.workers.{module}.awake", lambda: now[0])
    bench.two_updates()
    pace = bench.worker.learner.checkpoints.pace
    for message, later in (
        (Hold(cut=1), 4.0),
        (Pause(), 500.0),
        (Start(), 1.0),
        (Save(), 5.0),
        (Hold(on=False, cut=2), 0.0),
    ):
        bench.link.send(pack(message))
        bench.worker.run_once()
        now[0] += later
    assert pace.interval(1e6) == pytest.approx(6.0 * 49)


def test_training_goes_on_when_a_checkpoint_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    bench = Bench(folder=tmp_path, checkpoint_seconds=1e-9, checkpoint_share=1)
    bench.send(0)
    bench.poll()
    bench.send(1)
    bench.poll()
    assert bench.worker.state is State.RUNNING and bench.worker.learner.counters.updates == 2
    (told,) = (m.text for m in bench.heard() if isinstance(m, Notice))
    assert "Training goes on; this is tried again" in told


def test_an_algorithm_that_spoils_its_weights_goes_back_at_once(tmp_path: Path) -> None:
    """Of one that does not look itself its loss tells, and then its weights."""
    bench = Bench(folder=tmp_path)
    bench.two_updates()
    before = bench.worker.learner.policy.parameters()["w"].copy()
    saved = read_newest(tmp_path / "checkpoints" / "policy")
    bench.algorithm.amount, bench.algorithm.loss = np.nan, np.nan
    bench.send(2, 2)
    bench.poll()
    learner = bench.worker.learner
    np.testing.assert_array_equal(learner.policy.parameters()["w"], saved.arrays["policy"]["w"])
    assert not np.array_equal(before, saved.arrays["policy"]["w"])  # that of the first update
    assert (learner.counters.updates, learner.policy.version, learner.counters.skipped) == (3, 3, 1)
    texts = [m.text for m in bench.heard() if isinstance(m, Notice)]
    assert "Adder has made weight w NaN or infinite" in texts[0]
    assert "training goes on with the weights of checkpoint update-1" in texts[1]


def spoilt(bench: Bench, loss: float | None) -> int:
    """Return after how many updates it is seen that an algorithm which tells this `loss`
    spoils its weights, from the third one on; 0: not in 20."""
    bench.algorithm.loss = loss
    bench.two_updates()
    bench.algorithm.amount = np.nan
    learner = bench.worker.learner
    for version in range(2, 20):
        learner.close()  # what is being pushed is there, and the next one may be
        bench.send(version, version)
        bench.poll()
        if learner.counters.skipped:
            assert np.isfinite(learner.policy.parameters()["w"]).all()
            texts = [m.text for m in bench.heard() if isinstance(m, Notice)]
            assert "Adder has made weight w NaN or infinite" in texts[0] and "goes on with" in texts[1]
            assert ('tells no "loss"' in texts[0]) is (loss is None) and len(texts) == 2
            return learner.counters.updates
    return 0


def test_of_an_algorithm_that_tells_no_loss_weights_are_looked_at_now_and_then(tmp_path: Path) -> None:
    assert spoilt(Bench(folder=tmp_path, database_seconds=None), None) == 16


def test_of_one_that_tells_a_loss_they_are_not(tmp_path: Path) -> None:
    assert spoilt(Bench(folder=tmp_path, database_seconds=None), 0.5) == 0


def test_of_an_algorithm_that_tells_no_loss_weights_are_looked_at_before_they_are_saved(
    tmp_path: Path,
) -> None:
    bench = Bench(folder=tmp_path, database_seconds=None, checkpoint_seconds=1e-9, checkpoint_share=1)
    assert spoilt(bench, None) == 3


@pytest.mark.parametrize(
    ("loss", "when"),
    [
        (None, {"database_seconds": 1e-9}),
        (None, {"database_updates": 3, "database_versions": None}),
        (0.5, {"database_updates": 3, "database_versions": None}),  # somebody may wait for it
    ],
)
def test_no_version_that_is_not_finite_is_pushed(tmp_path: Path, loss: float | None, when: Any) -> None:
    bench = Bench(folder=tmp_path, **when)
    assert spoilt(bench, loss) == 3
    bench.worker.learner.close()  # what is being pushed is there
    database = ParameterDatabase(tmp_path / PARAMETERS)
    found = [database.load("policy", each.version)[0]["w"] for each in database.versions("policy")]
    assert len(found) > 1 and np.isfinite(found).all()


def test_a_version_that_is_not_finite_all_the_same_is_not_kept(tmp_path: Path) -> None:
    """An algorithm that tells a finite loss is not looked at."""
    bench = Bench(folder=tmp_path)
    bench.algorithm.amount = np.nan
    bench.send(0)
    bench.poll()
    with pytest.raises(CheckpointError, match="w is not finite"):
        bench.worker.exit()
    learner = bench.worker.learner
    assert learner._versions is not None
    learner._versions.end(learner.policy, {})
    told = [m.text for m in bench.heard() if isinstance(m, Notice)]
    assert "a version was not kept: weight w of version 1 of policy policy is not finite" in told[-1]
    assert [each.version for each in ParameterDatabase(tmp_path / PARAMETERS).versions("policy")] == [0]


def test_equal_trainers_look_at_the_same_updates_whenever_these_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(folder=tmp_path, database_seconds=1e-9, checkpoint_seconds=1e-9, checkpoint_share=1)
    learner = bench.worker.learner
    for others in (False, True):
        monkeypatch.setattr(EqualTrainers, "others", others)
        found = []
        for learner.counters.updates in range(40):
            if learner._weights_due(False, 0.0):
                found.append(learner.counters.updates + 1)
        assert found == ([16, 32] if others else [*range(1, 41)])


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_never_on_the_disk(tmp_path: Path, wrong: float) -> None:
    """Whatever an algorithm of one's own tells."""
    bench = Bench(folder=tmp_path, checkpoint_seconds=1e-9, checkpoint_share=1)
    bench.two_updates()
    bench.algorithm.amount = wrong
    bench.send(2, 2)
    bench.poll()
    assert bench.worker.state is State.RUNNING
    assert [path.name for path in checkpoints(tmp_path / "checkpoints" / "policy")] == [
        "update-1",
        "update-2",
    ]
    (told,) = (m.text for m in bench.heard() if isinstance(m, Notice))
    assert "no checkpoint after update 3 is written: w is not finite" in told
    with pytest.raises(CheckpointError, match="w is not finite"):
        bench.worker.exit()


@pytest.mark.parametrize("where", ["weight w", r"in its state\(\) moment"])
def test_training_goes_back_from_where_a_checkpoint_is_refused(tmp_path: Path, where: str) -> None:
    """With the next update, of an algorithm whose loss is finite all the same."""
    bench = Bench(folder=tmp_path)
    bench.two_updates()
    learner = bench.worker.learner
    saved = read_newest(tmp_path / "checkpoints" / "policy").arrays
    spoilt = learner.policy.parameters()["w"] if "weight" in where else bench.algorithm.moment
    spoilt[1] = np.inf
    learner.save()
    bench.send(2, 2)
    bench.poll()
    assert learner.counters.skipped == 1
    for part, now in (("policy", learner.policy.parameters()), ("algorithm", bench.algorithm.state())):
        for name, array in now.items():
            np.testing.assert_array_equal(array, saved[part][name])
    texts = [m.text for m in bench.heard() if isinstance(m, Notice)]
    assert "no checkpoint after update 2 is written" in texts[0]
    assert re.search(f"Adder has made {where} NaN or infinite", texts[1])
    assert "training goes on with the weights of checkpoint update-1" in texts[2]
    bench.send(3, 3)
    bench.poll()
    bench.worker.exit()
    assert read_newest(tmp_path / "checkpoints" / "policy").facts["updates"] == 4


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_first_weights_that_are_not_finite_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    """But for infinities of a policy that tells no weights: they may mask."""
    begin = Known.__init__

    def spoilt(policy: Known, config: KnownPolicy) -> None:
        begin(policy, config)
        policy._parameters["w"][1] = wrong

    monkeypatch.setattr(Known, "__init__", spoilt)
    if wrong == np.inf:
        declared = {"w": Field((3,), "float64")}
        monkeypatch.setattr(KnownPolicy, "weights", lambda self, spaces: declared)
    with pytest.raises(
        ConfigError, match=r'policy "policy" begins with NaN or infinity in w, .* KnownPolicy'
    ):
        Bench(folder=tmp_path)
    assert not (tmp_path / PARAMETERS).exists()


def test_infinities_that_a_policy_has_from_the_start_stay_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may mask; also after a resume."""
    begin = Known.__init__

    def masked(policy: Known, config: KnownPolicy) -> None:
        begin(policy, config)
        policy._parameters["w"][0] = -np.inf

    monkeypatch.setattr(Known, "__init__", masked)
    settings = {"folder": tmp_path, "checkpoint_seconds": 1e-9, "checkpoint_share": 1}
    bench = Bench(**settings)
    bench.two_updates()
    for resume in (None, "update-2"):
        bench = Bench(**settings, resume=resume) if resume else bench
        weights = bench.worker.learner.policy.parameters()["w"]
        assert [path.name for path in checkpoints(tmp_path / "checkpoints" / "policy")][-1] == "update-2"
        np.testing.assert_array_equal(weights, [-np.inf, 2, 2])
        for wrong in (np.inf, np.nan):
            weights[2] = wrong
            bench.worker.learner.counters.steps += 1
            with pytest.raises(CheckpointError, match="w is not finite"):
                bench.worker.learner.save(final=True)


def test_settings_that_cannot_be_are_refused() -> None:
    for changes in (
        {"batch_size": 0},
        {"max_policy_lag": -1},
        {"checkpoints": 0},
        {"checkpoint_seconds": 0},
        {"count": 0},
    ):
        with pytest.raises(ConfigError):
            Trainer(algorithm=Adding(), **changes)
    with pytest.raises(ConfigError, match="reuses = 2, but max_policy_lag = 0"):
        Trainer(algorithm=Adding(), buffer=Queue(reuses=2), max_policy_lag=0)


# ---- samples that are episodes ---------------------------------------------------------


def test_short_episodes_are_trained_on_once_they_hold_all_slots() -> None:
    """They would never fill the batch."""
    bench = Bench(mode="full", batch_size=20, slots=3)  # whose slots hold 24 rows, if episodes are long
    for mark in range(2):
        assert bench.send(mark, done=(1, True))
    assert bench.poll() == (0, 0)
    assert bench.send(2, done=(1, True))
    assert bench.poll()[1] == 1
    assert bench.updates()[-1].values["step"] == 3 * SEATS  # of two rows each, the final one among them


def test_a_stream_of_one_row_per_episode_is_refused() -> None:
    with pytest.raises(ConfigError, match='sample stream "samples" has an episode in each row'):
        Bench(mode="concise")
