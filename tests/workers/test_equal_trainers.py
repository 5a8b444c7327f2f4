"""Several equal trainers: one version of the weights, one end, and no update that is half
done."""

import shutil
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.workers.test_trainer import FIELDS, ROWS, SEATS, SPACES, TRAINED, Adding, Source
from tests.workers.world import KnownPolicy

from tidemill.api.algorithm import AlgorithmConfig, DataParallel, Sample
from tidemill.api.buffer import BufferConfig
from tidemill.api.control_messages import (
    ChangeSettings,
    Configure,
    Exit,
    Facts,
    Notice,
    Pause,
    Rejoin,
    SampleFacts,
    Save,
    Start,
    State,
    Status,
    Stay,
    Staying,
    WorkerStatistics,
    pack,
    unpack_up,
)
from tidemill.api.experiment import Experiment
from tidemill.api.limits import Limits
from tidemill.api.policy import VERSIONS_OF_LIFE, Policy
from tidemill.api.transport import Handle
from tidemill.api.worker import WorkerConfig
from tidemill.core.errors import ConfigError
from tidemill.core.memory import LocalSegment
from tidemill.replay.priority_queue import PriorityQueue
from tidemill.replay.queue import Queue
from tidemill.store.checkpoint import read_newest
from tidemill.transports.local import local_endpoints
from tidemill.transports.slots import SlotEndpoints
from tidemill.workers import data_parallel as peers_module
from tidemill.workers import trainer as trainer_module
from tidemill.workers.trainer import TrainerWorker
from tidemill.workers.trainer_config import Trainer


@dataclass(frozen=True, kw_only=True)
class Averaging(AlgorithmConfig):
    """Adds the mean of all rewards, times `factor`, in two steps."""

    changeable: ClassVar[tuple[str, ...]] = ("factor",)

    factor: float = 1.0

    def build(self, policy: Policy, seed: int) -> "Averager":
        return Averager(self, policy)


class Averager(DataParallel):
    batch_copies: ClassVar[int] = 0
    largest_sum: ClassVar[int] = 16  # type: ignore[assignment]

    config: Averaging

    def __init__(self, config: Averaging, policy: Policy) -> None:
        self.config, self.policy, self.count, self.rank = config, policy, np.zeros(()), 0

    def parallel_update(
        self, samples: Sequence[Sample], steps: int
    ) -> Generator[np.ndarray, None, dict[str, float]]:
        rewards = [s["reward"][s.trained()] for s in samples]
        for _ in range(2):
            sums = np.array([sum(float(r.sum()) for r in rewards), sum(r.size for r in rewards)])
            yield sums
            self.policy.parameters()["w"][:] += sums[0] / sums[1] / 2 * self.config.factor
            self.count += 1
        return {"loss": float(sums[0])}

    def state(self) -> dict[str, Any]:
        return {"count": self.count.copy()}

    def load_state(self, state: Any) -> None:
        self.count[...] = state["count"]

    def separate(self, rank: int) -> None:
        self.rank = rank


CONFIGURE = Configure(Facts(spaces={"policy": SPACES}, samples={"samples": SampleFacts(1, 0, 1)}))


@pytest.fixture(autouse=True)
def _nobody_is_left_alone() -> Iterator[None]:
    """Nobody takes another one for dead since a turn has taken long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers_module, "LEAVE_ALONE", 3600.0)
        yield


class Group:
    """Equal trainers, each with a producer that the test holds."""

    def __init__(
        self,
        count: int = 2,
        folder: Path | None = None,
        limits: Limits | None = None,
        resume: str | None = None,
        **settings: Any,
    ) -> None:
        config = Trainer(**{"algorithm": Averaging(), "count": count, **settings})
        workers: dict[str, WorkerConfig] = {"source": Source(count=count), "trainer": config}
        self.experiment = Experiment(
            name="group", policies={"policy": KnownPolicy()}, workers=workers, limits=limits or Limits()
        )
        ends = local_endpoints([name for name, _ in self.experiment.members()], self.experiment.edges())
        self.ends, self.config, self.folder = ends, config, folder
        self.producers = [
            ends[f"source-{i}"][0].producer(f"samples/samples/source-{i}/0/trainer-{i}") for i in range(count)
        ]
        for producer in self.producers:
            producer.offer(FIELDS, (ROWS, SEATS), 4)
        self.links = [ends[f"trainer-{i}"][1] for i in range(count)]
        self.readers = [ends[f"source-{i}"][0].reader(f"parameters/policy/trainer-{i}") for i in range(count)]
        self.workers = [self.build(i, ends[f"trainer-{i}"][0], resume) for i in range(count)]
        self.tell(CONFIGURE, Start())
        self.told: list[list[Any]] = [[] for _ in range(count)]
        self.turns(1)

    def build(self, i: int, ends: SlotEndpoints, resume: str | None = None, life: int = 0) -> TrainerWorker:
        folder = None if self.folder is None else str(self.folder)
        context = trainer_module.Context(
            self.experiment, f"trainer-{i}", self.config, ends, folder, resume, life=life
        )
        return TrainerWorker(context, self.config)

    def live_again(self, i: int, join: Rejoin, *before: Any) -> None:
        """Begin another life of a trainer, which others wait for; it is told what comes
        `before` it starts, and they go on then."""
        name = f"trainer-{i}"
        made = {edge.name: LocalSegment() for edge in self.experiment.edges() if edge.source == name}
        for other, (ends, _) in self.ends.items():
            ends._segment_of = lambda handle: made[handle.text]
            edges = [e.name for e in self.experiment.edges() if e.name in made and other in e.targets]
            ends.renew({edge: Handle(text=edge) for edge in edges})
        old = self.ends[name][0]
        edges = {edge: (made.get(edge, segment), bells) for edge, (segment, bells) in old._edges.items()}
        old.link.receive()  # what its last life was told
        self.workers[i] = self.build(i, SlotEndpoints(old.bell, old.link, edges), life=1)
        self.tell(join, CONFIGURE, *before, Start(), to=i)
        for other in range(len(self.workers)):
            if other != i:
                self.tell(join, to=other)
        self.turns(1)

    def answers(self, i: int) -> list[Staying]:
        return [m for m in self.heard(i) if isinstance(m, Staying)]

    def tell(self, *messages: Any, to: int | None = None) -> None:
        for i, link in enumerate(self.links):
            if to in (None, i):
                for message in messages:
                    link.send(pack(message))

    def send(self, to: int, reward: float, version: int = 0, rows: int = ROWS) -> None:
        block = self.producers[to].reserve()
        assert block is not None
        for array in block.values():
            array[...] = np.zeros((), array.dtype)
        block["reward"][:] = reward
        block["version"][:] = version
        block["version"][rows:] = -1
        self.producers[to].commit()

    def turns(self, most: int = 60) -> None:
        for _ in range(most):
            for worker in self.workers:
                worker.run_once()

    def heard(self, i: int) -> list[Any]:
        self.told[i] += [unpack_up(m) for m in self.links[i].receive() or []]
        return self.told[i]

    def updates(self, i: int) -> list[WorkerStatistics]:
        return [m for m in self.heard(i) if isinstance(m, WorkerStatistics) and m.update]

    def weights(self) -> list[float]:
        return [float(worker.learner.policy.parameters()["w"][0]) for worker in self.workers]

    def states(self) -> list[State]:
        return [worker.state for worker in self.workers]


def test_one_stays_once_another_brings_no_more_and_answers_when_it_is_told_why() -> None:
    group = Group(3)
    group.send(0, 1.0)
    group.turns(3)
    group.workers[1].learner.equal_trainers.break_off()  # it has heard that 2 has died
    for _ in range(3):
        group.turns(3)
        assert group.workers[0].learner.equal_trainers.lost and group.answers(0) == []
    assert all(producer.free() == 3 for producer in group.producers[:1])  # its batch is still there
    group.tell(Stay(7, ("trainer-2",)), to=0)
    group.turns(1)
    assert [answer.number for answer in group.answers(0)] == [7]
    group.live_again(2, Rejoin(1, 0, 0))
    group.send(1, 1.0)
    group.send(2, 1.0)
    group.turns()
    assert group.weights() == [1, 1, 1]


def test_all_take_the_same_step_down_the_mean_of_all_rows() -> None:
    group = Group(3)
    for i, (reward, rows) in enumerate([(1.0, ROWS), (2.0, ROWS), (6.0, 3)]):
        group.send(i, reward, rows=rows)
    group.turns()
    rows = [TRAINED, TRAINED, 3 * SEATS]
    assert group.weights() == [np.dot([1, 2, 6], rows) / sum(rows)] * 3
    (update,) = group.updates(0)
    assert update.values["step"] == sum(rows) and update.values["update"] == 1
    assert group.updates(1) == group.updates(2) == []  # one tells
    for reader in group.readers:
        assert reader.attach() and reader.newest() == 1


def test_nobody_begins_before_all_have_a_batch() -> None:
    group = Group()
    group.send(0, 1.0)
    group.turns()
    assert group.weights() == [0, 0]
    group.send(1, 3.0)
    group.turns()
    assert group.weights() == [2, 2]


def test_one_without_a_row_to_train_takes_part() -> None:
    group = Group()
    group.send(0, 1.0)
    group.send(1, 3.0, rows=0)
    group.turns()
    assert group.weights() == [1, 1]
    group.send(0, 1.0, rows=0)
    group.send(1, 3.0, rows=0)
    group.turns()
    assert group.weights() == [1, 1] and [worker.learner.counters.updates for worker in group.workers] == [
        1,
        1,
    ]


def test_a_setting_changes_at_one_update_of_all_once_all_are_told(tmp_path: Path) -> None:
    group = Group(folder=tmp_path)
    half_an_update(group)  # of the first; what is half done is finished as it was begun
    group.tell(ChangeSettings({"factor": 10.0}, 1), to=0)
    group.turns()
    first = group.weights()
    assert first[0] == first[1]
    for told, factor in ((None, 1), (1, 10), (None, 10)):
        before = group.weights()[0]
        if told is not None:
            group.tell(ChangeSettings({"factor": 10.0}, 1), to=told)
        for i in range(2):
            group.send(i, 2.0)
        group.turns()
        assert group.weights() == [before + 2.0 * factor] * 2
    group.tell(ChangeSettings({"factor": 100.0}, 2), Exit("enough"))
    group.turns()
    assert group.states() == [State.COMPLETED] * 2
    assert read_newest(tmp_path / "checkpoints" / "policy").facts["settings"] == {"factor": 100.0}
    updates = len(group.updates(0))
    again = Group(folder=tmp_path, resume=f"update-{updates}")
    for i in range(2):
        again.send(i, 2.0)
    again.turns()
    assert again.weights() == [group.weights()[0] + 200.0] * 2


@pytest.mark.parametrize("then", [Save(), Exit("enough")])
def test_a_checkpoint_knows_changes_that_not_all_have_taken(tmp_path: Path, then: Any) -> None:
    group = Group(folder=tmp_path)
    changes = ChangeSettings({"factor": 10.0}, 1), ChangeSettings({"factor": 100.0}, 2)
    group.tell(*changes, then)
    group.turns()
    assert read_newest(tmp_path / "checkpoints" / "policy").facts["settings"] == {"factor": 100.0}


def test_a_batch_size_is_that_of_all_together() -> None:
    group = Group(batch_size=4 * TRAINED)
    for _ in range(2):
        group.turns()
        assert group.weights() == [0, 0]
        group.send(0, 1.0)
        group.send(1, 1.0)
    group.turns()
    assert group.weights() == [1, 1] and group.workers[1].learner.counters.rows == 4 * TRAINED


@pytest.mark.parametrize("buffer", [Queue(reuses=2), PriorityQueue(capacity=4 * TRAINED, reuses=2)])
def test_each_has_a_buffer_of_its_own_and_all_count_the_same(buffer: BufferConfig) -> None:
    group = Group(buffer=buffer)
    for i in range(2):
        group.send(i, 1.0 + 2 * i)
    group.turns()
    assert group.weights() == [4, 4]  # two updates by the mean of 1 and 3
    for worker in group.workers:
        counters = worker.learner.counters
        assert (counters.updates, counters.rows, counters.reused) == (2, 2 * TRAINED, 2)


def test_dropped_samples_of_all_are_counted() -> None:
    group = Group(max_policy_lag=1)
    for worker in group.workers:
        worker.learner.policy.version = 2
    group.send(1, 1.0, version=0)
    for i in range(2):
        group.send(i, 1.0, version=2)
    group.turns()
    assert [worker.learner.counters.dropped for worker in group.workers] == [1, 1]


@pytest.mark.parametrize("count", [2, 3])
def test_in_lockstep_nobody_gets_a_sample_back_before_all_have_published(count: int) -> None:
    """For the actor that sent it to one may be answered by who listens to another."""
    group = Group(count, max_policy_lag=0)
    for version in range(4):
        for i in range(count):
            group.send(i, 1.0, version=version)
        for _ in range(40):
            for worker in group.workers:
                worker.run_once()
                newest = [reader.newest() for reader in group.readers if reader.attach()]
                if any(producer.free() == 4 for producer in group.producers):
                    assert newest == [version + 1] * count
        assert [producer.free() for producer in group.producers] == [4] * count
    assert [worker.learner.counters.dropped for worker in group.workers] == [0] * count


@pytest.mark.parametrize("limits", [Limits(updates=3), Limits(steps=3 * 2 * TRAINED)])
def test_limits_end_all_at_one_update(limits: Limits) -> None:
    group = Group(limits=limits)
    for _ in range(4):
        for i in range(2):
            group.send(i, 1.0)
    group.turns(200)
    assert group.states() == [State.COMPLETED] * 2 and group.weights() == [3, 3]


def test_the_first_whose_time_is_up_ends_all() -> None:
    group = Group(limits=Limits(seconds=1000.0))
    group.workers[1].learner.counters.seconds = 2000.0
    for i in range(4):
        group.send(i % 2, 1.0)
    group.turns()
    assert group.states() == [State.COMPLETED] * 2 and group.weights() in ([0, 0], [1, 1])


def half_an_update(group: Group) -> None:
    """Bring the first trainer to where it waits for the second within an update."""
    before = group.weights()[0]
    for i in range(2):
        group.send(i, 1.0)
    group.workers[0].run_once()
    while group.weights()[0] == before:
        group.workers[1].run_once()
        group.workers[0].run_once()
    assert group.weights()[0] == before + 0.5


@pytest.mark.parametrize("paused", [False, True])
def test_told_to_end_they_end_together_after_the_update(tmp_path: Path, paused: bool) -> None:
    group = Group(folder=tmp_path)
    half_an_update(group)
    if paused:
        group.tell(Pause())
        group.turns(3)
        assert group.states() == [State.PAUSED] * 2
    group.tell(Exit("enough"))
    group.turns()
    assert group.states() == [State.COMPLETED] * 2 and group.weights() == [1, 1]
    _, arrays, facts, _ = read_newest(tmp_path / "checkpoints" / "policy")
    assert (arrays["policy"]["w"] == 1).all() and facts["updates"] == 1
    assert [m.reason for m in group.heard(0) if isinstance(m, Status) and m.state is State.COMPLETED] == [
        "enough"
    ]


def test_a_trainer_left_alone_gives_up_what_is_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(folder=tmp_path)
    for i in range(2):
        group.send(i, 4.0)
    group.turns()
    half_an_update(group)
    now = [peers_module.awake()]
    monkeypatch.setattr(peers_module, "awake", lambda: now[0])
    group.tell(Exit("the other is dead"), to=0)
    group.workers[0].run_once()
    assert group.workers[0].state is State.RUNNING
    now[0] += peers_module.LEAVE_ALONE + 0.1
    group.workers[0].run_once()
    assert group.workers[0].state is State.COMPLETED
    _, arrays, facts, _ = read_newest(tmp_path / "checkpoints" / "policy")
    assert (arrays["policy"]["w"] == 4).all() and facts["updates"] == 1 and arrays["algorithm"]["count"] == 2


@pytest.mark.parametrize("paused", [False, True])
def test_a_checkpoint_asked_for_within_an_update_is_that_before_it(tmp_path: Path, paused: bool) -> None:
    group = Group(folder=tmp_path)
    for i in range(2):
        group.send(i, 4.0)
    group.turns()
    half_an_update(group)
    group.tell(*([Pause()] if paused else []), Save())
    group.workers[0].run_once()
    _, arrays, facts, _ = read_newest(tmp_path / "checkpoints" / "policy")
    assert (arrays["policy"]["w"] == 4).all() and facts["updates"] == 1 and arrays["algorithm"]["count"] == 2


def test_whoever_is_left_alone_writes_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(folder=tmp_path)
    for i in range(2):
        group.send(i, 4.0)
    group.turns()
    now = [peers_module.awake()]
    monkeypatch.setattr(peers_module, "awake", lambda: now[0])
    group.tell(Exit("the first is dead"), to=1)
    group.workers[1].run_once()
    now[0] += peers_module.LEAVE_ALONE + 0.1
    group.workers[1].run_once()
    assert group.workers[1].state is State.COMPLETED
    _, arrays, facts, _ = read_newest(tmp_path / "checkpoints" / "policy")
    assert (arrays["policy"]["w"] == 4).all() and facts["updates"] == 1


def test_one_that_comes_to_its_end_after_the_first_leaves_what_that_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each took the other for dead. What is of the first alone, its random numbers say,
    is what a run goes on from."""
    group = Group(folder=tmp_path)
    for i in range(2):
        group.send(i, 4.0)
    group.turns()
    now = [peers_module.awake()]
    monkeypatch.setattr(peers_module, "awake", lambda: now[0])
    group.tell(Exit("enough"))
    for worker in group.workers:
        worker.run_once()
        now[0] += peers_module.LEAVE_ALONE + 0.1
        worker.run_once()
        assert worker.state is State.COMPLETED
        _, arrays, facts, _ = read_newest(tmp_path / "checkpoints" / "policy")
        assert facts["updates"] == 1 and arrays["algorithm"]["count"] == 2
        group.workers[1].learner.algorithm.load_state({"count": 100})


def test_several_that_are_left_alone_in_threads_write_one_checkpoint_after_the_other(tmp_path: Path) -> None:
    group, at_once = Group(4, tmp_path), Barrier(3)
    for i in range(4):
        group.send(i, 4.0)
    group.turns()

    def leave(worker: TrainerWorker) -> None:
        worker.learner.equal_trainers.stand_in()
        at_once.wait(60)
        worker.learner.save(final=True)

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(leave, group.workers[:3])] == [None] * 3
    assert [path.name for path in (tmp_path / "checkpoints" / "policy").iterdir()] == ["update-1"]
    assert not [message for i in range(3) for message in group.heard(i) if isinstance(message, Notice)]


def two_of_three_alone(folder: Path, newest: int = 1) -> Group:
    """Three trainers after an update; the third is gone in the midst of the next one, of
    which the others have done a half, with samples of version `newest`."""
    group = Group(3, folder)
    group.tell(Save(), to=0)
    for reward, version in ((4.0, 0), (1.0, newest)):
        group.turns()
        for i in range(3):
            group.send(i, reward, version)
    for i in (2, 0, 1, 2, 0, 1):
        group.workers[i].run_once()
    assert group.weights()[:2] == [4.5, 4.5]
    group.workers[2].run_once = lambda: False  # type: ignore[method-assign]
    return group


@pytest.mark.parametrize("paused", [False, True])
def test_those_that_live_keep_their_batches_and_wait_for_the_next_life_of_one_that_has_died(
    tmp_path: Path, paused: bool
) -> None:
    group = two_of_three_alone(tmp_path)
    if paused:
        group.tell(Pause())
        group.turns(3)
    group.tell(Stay(7, ("trainer-2",)))
    group.turns(3)
    assert group.weights()[:2] == [4, 4]
    assert [group.answers(i) for i in (0, 1)] == [[Staying(7, 1)], [Staying(7, 1)]]
    group.tell(Stay(8, ("trainer-2",), save=True), to=1)
    group.turns(3)
    assert group.answers(1)[1:] == [Staying(8, 1, True)] and group.states()[:2] == (
        [State.PAUSED if paused else State.RUNNING] * 2
    )
    _, arrays, facts, _ = read_newest(tmp_path / "checkpoints" / "policy")
    assert (arrays["policy"]["w"] == 4).all() and facts["updates"] == 1 and arrays["algorithm"]["count"] == 2
    if paused:
        group.tell(Start())
    group.turns(20)
    assert group.weights()[:2] == [4, 4]  # they wait
    group.live_again(2, Rejoin(1, 0, 1))
    group.turns()
    # its sample may have been trained on before: that is of a version that all have
    assert group.weights() == [5, 5, 5]
    assert [reader.newest() for reader in group.readers if reader.attach()] == [2, 2, 2]
    ranks = [worker.learner.algorithm.rank for worker in group.workers]  # type: ignore[attr-defined]
    assert ranks == [0, 0, 2 + 3]  # whoever has saved draws what it would have drawn
    for worker in group.workers:
        counters = worker.learner.counters
        assert (counters.updates, counters.rows, counters.dropped) == (2, 2 * 3 * TRAINED, 0)
    assert [m.values["update"] for m in group.updates(0)] == [1, 2]
    group.tell(Exit("enough"))
    group.turns()
    assert group.states() == [State.COMPLETED] * 3


def test_what_a_next_life_finds_of_older_versions_may_have_been_trained_on_and_is_dropped(
    tmp_path: Path,
) -> None:
    group = two_of_three_alone(tmp_path, newest=2)  # the dead had published one more
    group.send(2, 9.0, version=0)
    group.tell(Stay(1, ("trainer-2",), save=True), to=0)
    group.tell(Stay(2, ("trainer-2",)), to=1)
    group.turns(3)
    # two have died, say: all go on as a later life
    group.live_again(2, Rejoin(1, VERSIONS_OF_LIFE, VERSIONS_OF_LIFE + 1))
    group.turns()
    assert [reader.newest() for reader in group.readers if reader.attach()] == [VERSIONS_OF_LIFE + 1] * 3
    group.send(2, 1.0, version=VERSIONS_OF_LIFE + 1)
    group.turns()
    assert group.weights() == [5, 5, 5]
    assert [worker.learner.counters.dropped for worker in group.workers] == [2, 2, 2]
    (update,) = [m.values for m in group.updates(0) if m.values["update"] == 2]
    assert update["lag/max"] == update["lag/mean"] == 0


@pytest.mark.parametrize("told", ["before", "meanwhile", "both"])
def test_settings_that_change_while_one_is_dead_change_at_one_update_of_all(
    tmp_path: Path, told: str
) -> None:
    group = two_of_three_alone(tmp_path)
    change = ChangeSettings({"factor": 10.0}, 1)
    if told != "meanwhile":
        group.tell(change)
    group.tell(Stay(1, ("trainer-2",), save=True), to=0)
    group.tell(Stay(2, ("trainer-2",)), to=1)
    group.turns(3)
    if told != "before":
        change = ChangeSettings({"factor": 10.0}, 2 if told == "both" else 1)
        for i in (0, 1):
            group.tell(change, to=i)
    group.live_again(2, Rejoin(1, 0, 1), change)
    group.turns()
    assert group.weights() == [4 + 10.0] * 3
    group.tell(ChangeSettings({"factor": 1.0}, 3))
    for i in range(3):
        group.send(i, 2.0, version=2)
    group.turns()
    assert group.weights() == [4 + 10.0 + 2.0] * 3


def test_one_that_waits_ends_where_nobody_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = two_of_three_alone(tmp_path)
    group.tell(Stay(1, ("trainer-2",)))
    group.turns(3)
    now = [peers_module.awake()]
    monkeypatch.setattr(peers_module, "awake", lambda: now[0])
    group.tell(Exit("enough"), to=0)
    group.turns(3)
    assert group.states()[0] is State.RUNNING
    now[0] += peers_module.LEAVE_ALONE + 0.1
    group.turns(3)
    assert group.states()[0] is State.COMPLETED
    assert read_newest(tmp_path / "checkpoints" / "policy").facts["updates"] == 1


def test_one_whose_equal_hangs_while_another_is_dead_waits_no_longer_than_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(3, tmp_path)
    for i in range(3):
        group.send(i, 1.0)
    group.workers[2].run_once()  # it has brought its part to what all agree on
    group.tell(Stay(1, ("trainer-2",)), to=0)
    now = [peers_module.awake()]
    monkeypatch.setattr(peers_module, "awake", lambda: now[0])
    for _ in range(3):
        group.workers[0].run_once()
    assert group.answers(0) == []
    now[0] += peers_module.LEAVE_ALONE + 0.1
    group.workers[0].run_once()
    assert group.answers(0) == [Staying(1, 0)]


def test_what_the_dead_has_saved_that_the_others_lack_is_undone(tmp_path: Path) -> None:
    """Its last parts were lost on their way from its host, say. The next life goes on
    from where the others are."""
    group, written = two_of_three_alone(tmp_path), tmp_path / "checkpoints" / "policy"
    shutil.copytree(written / "update-0", written / "update-2")
    group.tell(Stay(1, ("trainer-2",), save=True), to=0)
    group.tell(Stay(2, ("trainer-2",)), to=1)
    group.turns(3)
    assert group.answers(0) == [Staying(1, 1, True)]
    assert read_newest(written).path.name == "update-1"
    group.live_again(2, Rejoin(1, 0, 1))
    group.turns()
    assert group.weights() == [5, 5, 5]
    group.tell(Exit("enough"))
    group.turns()
    assert (read_newest(written).arrays["policy"]["w"] == 5).all()
    assert {path.name for path in written.iterdir()} == {"update-0", "update-1", "update-2"}


def test_a_next_life_that_does_not_find_what_the_others_know_is_refused(tmp_path: Path) -> None:
    group = two_of_three_alone(tmp_path)
    group.tell(Stay(1, ("trainer-2",), save=True), to=0)
    group.tell(Stay(2, ("trainer-2",)), to=1)
    group.turns(3)
    saved = read_newest(tmp_path / "checkpoints" / "policy").path
    (saved / "policy.safetensors").write_bytes(b"torn")
    group.live_again(2, Rejoin(1, 0, 1))
    assert group.states()[2] is State.FAILED
    (error,) = [m.error for m in group.heard(2) if isinstance(m, Status) and m.error]
    assert "equal trainers have written one for trainer-2 to go on from, of update 1" in error


def test_an_algorithm_that_sums_nothing_is_refused() -> None:
    group = Group(algorithm=Adding())
    group.turns(1)
    assert group.states() == [State.FAILED] * 2
    assert "several equal trainers cannot run Adding" in next(
        m.error for m in group.heard(0) if isinstance(m, Status) and m.error
    )


def test_who_shares_a_process() -> None:
    experiment = Group().experiment
    assert experiment.processes() == [["source-0"], ["source-1"], ["trainer-0"], ["trainer-1"]]
    shared = experiment.replace(together=("source", "trainer"))
    assert shared.processes() == [["source-0", "trainer-0"], ["source-1", "trainer-1"]]
    shared.check()
    for together, message in (
        (("source", "trainr"), 'did you mean "trainer"'),
        (("trainer", "trainer"), "must be different"),
    ):
        with pytest.raises(ConfigError, match=message):
            experiment.replace(together=together).check()
    more = shared.replace(workers={**experiment.workers, "source": Source(count=3)})
    more.check()
    assert more.processes() == [*shared.processes(), ["source-2"]]


def test_those_that_go_on_take_one_state_and_draw_numbers_of_their_own(tmp_path: Path) -> None:
    group = Group(3, tmp_path)
    assert [worker.learner.algorithm.rank for worker in group.workers] == [0, 0, 0]  # type: ignore[attr-defined]
    for i in range(3):
        group.send(i, 1.0)
    group.turns()
    group.tell(Exit("enough"))
    group.turns()
    assert group.states() == [State.COMPLETED] * 3
    again = Group(3, tmp_path, resume="000000000001")
    assert again.weights() == group.weights()
    assert [float(worker.learner.algorithm.count) for worker in again.workers] == [2, 2, 2]  # type: ignore[attr-defined]
    assert [worker.learner.algorithm.rank for worker in again.workers] == [0, 1, 2]  # type: ignore[attr-defined]


def test_the_plan_counts_what_equal_trainers_take_besides() -> None:
    group = Group(3)
    (needs,) = [m.facts.memory for m in group.heard(1) if isinstance(m, Status) and m.state is State.READY]
    largest = max(Averager.largest_sum, 8 * len(peers_module.CombinedCounts._fields))
    weights = sum(array.nbytes for array in group.workers[1].learner.policy.parameters().values())
    assert {(need.what, need.shared): need.nbytes for need in needs} == {
        ("parameters", True): 3 * weights,
        ("sums", True): 2 * 2 * largest,  # to two others, two slots each
        ("sums", False): largest,  # to add in
        ("weights before an update", False): weights + 8,  # and the algorithm's count
    }
