"""Buffer workers: what they change, that nothing is lost on the way, and what a trainer
behind them takes."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.run.watching import EXPERIMENTS
from tests.workers.adding_processor import Add
from tests.workers.world import KnownPolicy, Sink, answer_of

from tidemill import (
    PPO,
    ActorCritic,
    Buffers,
    Experiment,
    Limits,
    RandomShift,
    Reanalyse,
    RecurrentActorCritic,
    RunControl,
    Scripted,
)
from tidemill.algorithms.augmentation import shift
from tidemill.api.algorithm import ROW_FIELDS, Sample
from tidemill.api.control_messages import Facts, SampleFacts, Voided
from tidemill.api.edges import Port
from tidemill.api.policy import Policy
from tidemill.api.processing import ProcessorConfig
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.api.worker import Context, WorkerConfig
from tidemill.core.errors import ConfigError, SchemaError, TidemillError
from tidemill.core.memory import LocalSegment
from tidemill.core.schema import Arrays, Field, Schema, poison, schema_of
from tidemill.core.user_code_loading import load_file
from tidemill.metrics.json_lines import read_metrics
from tidemill.streams.samples import ChannelSampleConsumer, sample_producer
from tidemill.training.train import train
from tidemill.transports.local import local_endpoints

experiments = load_file(EXPERIMENTS, "test")
SOURCE = Path(__file__).with_name("adding_processor.py")

SEATS, STEPS, BURN_IN, SLOTS = 2, 4, 1, 2
ROWS = BURN_IN + STEPS + 1
SPACES = Spaces(Box((5,), "float32"), Discrete(4))
ANSWERED = {
    "obs": Field((5,), "float32"),
    "action": Field((), "int64"),
    "log_prob": Field((), "float32"),
    "value": Field((), "float32"),
}


# ---- one worker at a time: both of its ends are the test's -----------------------------


@dataclass(frozen=True, kw_only=True)
class Source(WorkerConfig):
    """Stands where actors do."""

    def ports(self) -> tuple[Port, ...]:
        return (Port("gathered", "produce"),)


class Line:
    """Producers that the test holds → buffer workers that it polls → a consumer of its
    own."""

    def __init__(
        self,
        *process: ProcessorConfig,
        policy: str | None = None,
        sources: int = 1,
        seats: Sequence[int] = (SEATS,),
        schema: Schema = ROW_FIELDS,
        mode: Any = "fixed",
        spaces: Spaces = SPACES,
        **buffers: Any,
    ) -> None:
        self.config = Buffers(process=process, policy=policy, **buffers)
        sink = Sink(streams={"samples": "policy"}, policies=("policy",) if policy else ())
        workers: dict[str, WorkerConfig] = {
            "source": Source(count=sources),
            "buffers": self.config,
            "sink": sink,
        }
        experiment = Experiment(name="line", policies={"policy": KnownPolicy()}, workers=workers)
        ends = local_endpoints([name for name, _ in experiment.members()], experiment.edges())
        edges = [edge for edge in experiment.edges() if edge.kind == "channel"]
        self.producers = []
        for number, count in zip(range(sources), itertools.cycle(seats), strict=False):
            name = f"source-{number}"
            self.producers.append(
                sample_producer(Context(experiment, name, Source(), ends[name][0]), ("gathered",))
            )
            self.producers[-1].offer(schema, ROWS, count, SLOTS)
        if policy:
            self.writer = ends["sink-0"][0].writer("parameters/policy/sink-0")
            self.writer.offer(schema_of({"w": np.zeros(3)}))
        facts = Facts(
            spaces={"policy": spaces},
            samples={"gathered": SampleFacts(1, BURN_IN if mode == "fixed" else 0, 1, mode)},
        )
        self.experiment, self.ends, self.told = experiment, ends, facts
        self.workers, self.facts, self.links = [], [], []
        for number in range(self.config.count):
            name = f"buffers-{number}"
            self.workers.append(self.config.build(Context(experiment, name, self.config, ends[name][0])))
            self.facts.append(self.workers[-1]._configure(facts))
        own = self.facts[0].samples["samples"]
        channels = self.channels = [
            ends["sink-0"][0].consumer(e.name) for e in edges if "sink-0" in e.targets
        ]
        self.consumer = ChannelSampleConsumer(channels, own.burn_in, own.bootstrap, own.cut)
        self.offered = self.consumer.offered()
        for channel in channels:
            for slot in channel._views:  # type: ignore[attr-defined]
                poison(slot)

    def live_again(self, told: list[Any]) -> None:
        """Have the first worker live again, and what it reports meanwhile be `told`."""
        name, ends = "buffers-0", self.ends
        for channel in self.channels:
            segment = LocalSegment()
            edge = next(e.name for e in self.experiment.edges() if e.source == name)
            ends[name][0]._edges[edge] = segment, [ends["sink-0"][0].bell]
            channel.renew(segment)
        worker = self.config.build(Context(self.experiment, name, self.config, ends[name][0], life=1))
        worker.report = told.append  # type: ignore[attr-defined]
        worker._configure(self.told)
        self.workers[0] = worker

    def publish(self, version: int) -> None:
        self.writer.write({"w": np.full(3, version)}, version)

    def send(self, mark: float, producer: int = 0, change: Callable[[Arrays], None] | None = None) -> bool:
        block = self.producers[producer].reserve()
        if block is None:
            return False
        for array in block.values():
            array[...] = np.zeros((), array.dtype)
        block["reward"][:] = mark
        if change is not None:
            change(block)
        self.producers[producer].commit()
        return True

    def poll(self) -> int:
        return sum(worker._poll().batch_count for worker in self.workers)

    def take(self) -> Sample | None:
        """The next sample, a copy of it."""
        sample = self.consumer.consume()
        if sample is None:
            return None
        copy = Sample({name: array.copy() for name, array in sample.items()})
        copy.burn_in, copy.bootstrap = sample.burn_in, sample.bootstrap
        self.consumer.release()
        return copy

    def marks(self) -> list[float]:
        got = []
        while (sample := self.take()) is not None:
            got.append(float(sample["reward"][0, 0]))
        return got


def test_it_takes_nothing_that_it_cannot_send_on_and_so_holds_its_producers_up() -> None:
    line = Line()
    sent = [mark for mark in range(10) if line.send(mark) or (line.poll() and line.send(mark))]
    assert sent == [0, 1, 2, 3]  # its own slots, as many as those of its stream, and these
    assert not line.poll() and not line.send(10)
    got = line.marks()
    while line.poll():
        got += line.marks()
    assert got == sent


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_every_sample_is_processed_once_whatever_the_number_of_workers(buffers: int) -> None:
    line = Line(Add(amount=1000.0), sources=2, count=buffers)
    got: list[float] = []
    rng = np.random.default_rng(0)
    waiting = [iter(range(100 * source, 100 * source + 40)) for source in range(2)]
    todo: list[Any] = [next(each) for each in waiting]
    while any(mark is not None for mark in todo):
        source = int(rng.integers(2))
        if todo[source] is not None and line.send(todo[source], source):
            todo[source] = next(waiting[source], None)
        if rng.random() < 0.5:
            line.workers[int(rng.integers(buffers))]._poll()
        if rng.random() < 0.3:
            got += [] if (sample := line.take()) is None else [float(sample["reward"][0, 0])]
    while line.poll():
        got += line.marks()
    assert sorted(got) == [1000.0 + mark for mark in (*range(40), *range(100, 140))]
    if buffers == 1:
        assert [mark for mark in got if mark < 1100] == [1000.0 + mark for mark in range(40)]
    assert sum(worker._stats()["samples"] for worker in line.workers) == 80


class Killed(BaseException):
    """Stands for the end of a process."""


@pytest.mark.parametrize("step", ["process", "pass_on", "commit", "release", "afterwards"])
def test_what_a_worker_had_in_hand_as_it_died_comes_once_or_is_void_and_counted(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies as it is about to do that `step` with its third sample, of five."""
    line, got, told = Line(Add(), sources=2), list[float](), list[Any]()
    for mark in (0, 1):
        line.send(mark)
        line.poll()
        got += line.marks()
    first = line.workers[0]
    line.send(2, producer=1)
    line.send(3, producer=1)
    line.send(4)

    def dies(*given: Any) -> None:
        raise Killed

    of: dict[str, tuple[Any, str]] = {
        "process": (first._processors[0], "process"),
        "pass_on": (first._consumer, "pass_on"),
        "commit": (first._producer, "commit"),
        "release": (first._consumer, "release"),
    }
    if step in of:
        monkeypatch.setattr(*of[step], dies)
        with pytest.raises(Killed):
            line.poll()
    else:
        line.poll()
    monkeypatch.undo()
    line.live_again(told)
    got += line.marks()  # what the life before had sent
    while line.poll():
        got += line.marks()
    void = {"commit": 1, "release": 1}.get(step, 0)
    assert told == [Voided(1)] * void
    sent = [1.0 + mark for mark in range(5)]
    assert len(got) == len(set(got)) and set(got) <= set(sent)
    assert len(got) == 5 - (step == "commit")  # of those that are void one may have come


def test_burn_in_bootstrap_and_states_pass_unchanged() -> None:
    state = {"state.h": Field((3,), "float32")}
    line = Line(Add(), schema={**ROW_FIELDS, **state})
    states = np.arange(ROWS * SEATS * 3, dtype=np.float32).reshape(ROWS, SEATS, 3)

    def fill(block: Arrays) -> None:
        block["state.h"][:] = states
        block["version"][:BURN_IN] = -1
        block["on_reset"][2] = True

    line.send(5, change=fill)
    line.poll()
    sample = line.take()
    assert sample is not None and (sample.burn_in, sample.bootstrap) == (BURN_IN, 1)
    np.testing.assert_array_equal(sample["state.h"], states)
    assert (
        (sample["version"][:BURN_IN] == -1).all()
        and sample["on_reset"][2].all()
        and (sample["reward"] == 6).all()
    )


@pytest.mark.parametrize("last", [2, ROWS - 1])
def test_an_episode_is_processed_and_sent_without_what_lies_behind_it(last: int) -> None:
    line = Line(Add(), seats=(1,), mode="full")

    def fill(block: Arrays) -> None:
        poison({name: array[last + 1 :] for name, array in block.items()})
        block["done"][last + 1 :] = block["truncated"][last + 1 :] = True  # of an earlier episode
        block["truncated"][last] = True

    line.send(5, change=fill)
    assert line.poll() == 1
    sample = line.take()
    assert sample is not None and len(sample["reward"]) == last + 1
    assert (sample["reward"] == 6).all() and sample["truncated"].sum() == 1


def test_what_a_processor_puts_in_place_of_a_field_is_sent() -> None:
    line = Line(Add(in_place=False), Add(amount=10.0))
    line.send(1)
    line.poll()
    assert line.marks() == [12.0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [("field", r"added or removed fields of a sample \(bonus\)"), ("shape", "changed the shape of reward")],
)
def test_a_processor_that_changes_the_form_of_samples_is_told_off(wrong: str, message: str) -> None:
    line = Line(Add(wrong=wrong))
    line.send(1)
    with pytest.raises(SchemaError, match=message):
        line.poll()


def test_the_memory_of_its_slots_is_planned() -> None:
    line = Line(sources=3)
    (need,) = line.facts[0].memory
    assert line.offered is not None and [block.slots for block in line.offered] == [3 * SLOTS]
    assert (
        need.what == "buffer workers' samples"
        and need.factors == f"1 consumers x 6 slots x {need.nbytes // 6:,} bytes"
    )


def test_samples_of_different_sizes_are_refused_at_start() -> None:
    with pytest.raises(
        ConfigError,
        match=rf'stream "gathered" \({ROWS} rows x 2 seats and {ROWS} rows x 3 seats\); give each kind a '
        rf"stream",
    ):
        Line(sources=2, seats=(2, 3))


# ---- processors ------------------------------------------------------------------------


def test_rows_get_the_values_of_the_newest_policy_and_keep_the_version_that_acted() -> None:
    line = Line(Reanalyse(), policy="policy", schema={**ROW_FIELDS, **ANSWERED})
    rows = np.arange(ROWS * SEATS).reshape(ROWS, SEATS)

    def fill(block: Arrays) -> None:
        block["obs"][..., 3] = rows
        block["action"][:], block["value"][:], block["log_prob"][:] = 3, -7, -8
        block["version"][:] = 2
        block["version"][3, 1] = -1  # on which nothing acted: it ended there

    assert line.send(0, change=fill) and not line.poll()  # nothing is known of the policy yet
    for version in (2, 5):
        line.publish(version)
        line.send(0, change=fill)
        assert line.poll() == 1
        sample = line.take()
        assert sample is not None and line.workers[0]._stats() == {
            "samples": 1.0 + (version == 5),
            "version": version,
        }
        expected = np.asarray(answer_of((0, 0, 0, rows, 0), version, True)["value"], np.float32)
        expected[3, 1] = -7
        np.testing.assert_array_equal(sample["value"], expected)
        assert (
            (sample["action"] == 3).all()
            and (sample["log_prob"] == -8).all()
            and (np.delete(sample["version"].ravel(), 7) == 2).all()
        )


def test_more_rows_than_the_policy_is_asked_for_at_once_are_all_valued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidemill.algorithms.reanalysis.MOST_ROWS", 5)
    check_values(ActorCritic(hidden=(8,)).build(SPACES, 1), {})


def test_a_recurrent_policy_goes_on_from_each_row_s_stored_state() -> None:
    config = RecurrentActorCritic()
    rng = np.random.default_rng(1)
    states = {
        name: rng.standard_normal((4, 3, *field.shape)).astype(field.dtype)
        for name, field in config.state(SPACES).items()
    }
    check_values(config.build(SPACES, 1), states)


def check_values(policy: Policy, states: Arrays) -> None:
    rng = np.random.default_rng(0)
    arrays: Arrays = {
        "obs": rng.standard_normal((4, 3, 5)).astype(np.float32),
        **{name: state.copy() for name, state in states.items()},
        "value": np.full((4, 3), 7.0, np.float32),
        "version": np.zeros((4, 3), np.int64),
        "action": np.zeros((4, 3), np.int64),
        "log_prob": np.zeros((4, 3), np.float32),
    }
    sample = Sample(arrays)
    answers = {
        name: array.reshape(12, *array.shape[2:]).copy()
        for name, array in arrays.items()
        if name not in ("obs", "version")
    }
    policy.act(
        {"obs": arrays["obs"].reshape(12, 5)},
        {n: s.reshape(12, *s.shape[2:]) for n, s in states.items()},
        True,
        answers,
    )
    schema = {name: Field(array.shape[2:], array.dtype.name) for name, array in arrays.items()}
    Reanalyse().build(schema, policy, 0).process(sample)
    np.testing.assert_allclose(sample["value"], answers["value"].reshape(4, 3), rtol=1e-5)
    assert not sample["action"].any() and not sample["log_prob"].any()
    for name, state in states.items():
        np.testing.assert_array_equal(sample[name], state)


def test_images_are_shifted_and_their_border_repeated() -> None:
    images = np.arange(27, dtype=np.uint8).reshape(3, 1, 3, 3)
    shift(images, np.array([[1, -1], [0, 0], [-2, 0]]))
    np.testing.assert_array_equal(images[0, 0], [[1, 2, 2], [1, 2, 2], [4, 5, 5]])
    np.testing.assert_array_equal(images[1, 0], [[9, 10, 11], [12, 13, 14], [15, 16, 17]])
    np.testing.assert_array_equal(images[2, 0], [[24, 25, 26], [24, 25, 26], [24, 25, 26]])


@pytest.mark.parametrize("shape", [(40, 44), (3, 40, 44), (40, 44, 3)])
def test_every_image_is_shifted_by_a_draw_of_its_own_and_nothing_else_is(shape: tuple[int, ...]) -> None:
    pictures = np.zeros((2, 3, *shape), np.uint8)
    along = [slice(None), slice(None), *([slice(None)] if shape[0] == 3 else []), 20, 21]
    pictures[tuple(along)] = 255
    lit = int(pictures.astype(bool).sum())
    sample = Sample({"obs.picture": pictures, "obs.speed": np.ones((2, 3, 4), np.float32)})
    schema = {name: Field(array.shape[2:], array.dtype.name) for name, array in sample.items()}
    RandomShift(pixels=2).build(schema, None, 3).process(sample)
    planes = pictures if pictures.ndim == 4 else pictures.max(axis=2 if shape[0] == 3 else 4)
    places = {tuple(np.argwhere(plane)[0]) for plane in planes.reshape(6, 40, 44)}
    assert len(places) > 1 and all(18 <= down <= 22 and 19 <= right <= 23 for down, right in places)
    assert (sample["obs.speed"] == 1).all() and pictures.astype(bool).sum() == lit


def test_shifts_go_on_from_where_they_were() -> None:
    schema = {"obs": Field((40, 44), "uint8")}
    pictures = np.random.default_rng(0).integers(0, 256, (2, 2, 3, 40, 44)).astype(np.uint8)
    first, second = (RandomShift(pixels=2).build(schema, None, seed) for seed in (3, 4))
    first.process(Sample({"obs": pictures[0]}))
    state = first.state()
    assert state is not None
    second.load_state(state)
    ours, theirs = pictures[1].copy(), pictures[1].copy()
    for processor, images in ((first, ours), (second, theirs)):
        processor.process(Sample({"obs": images}))
    assert (ours == theirs).all() and (ours != pictures[1]).any()


# ---- whole runs ------------------------------------------------------------------------


def through(
    buffers: dict[str, Buffers], first: str = "gathered", actors: dict[str, Any] | None = None, **trainer: Any
) -> Experiment:
    made: Experiment = experiments.experiment(Scripted(agents=2), **trainer)
    actor = made.workers["actor"].replace(**actors or {})
    actor = actor.replace(agents=(actor.agents[0].replace(samples=first),))
    return made.replace(workers={"actor": actor, **buffers, "trainer": made.workers["trainer"]})


def gathered(
    folder: Path, buffers: dict[str, Buffers], launch: str, first: str
) -> list[dict[str, np.ndarray]]:
    """Train four updates through the buffers and return the samples that arrived."""
    folder.mkdir()
    made = through(
        buffers, first, algorithm=experiments.Recorder(record=str(folder / "sample")), batch_size=1
    )
    train(
        made.replace(limits=Limits(updates=4)),
        launch=launch,
        run_dir=folder / "run",
        source=SOURCE,
        quiet=True,
    )
    return [dict(np.load(folder / f"sample-{i}.npz")) for i in range(4)]


@pytest.mark.parametrize("launch", ["inline", "threads", "processes"])
def test_samples_pass_through_a_chain_in_order_and_are_changed_on_the_way(
    tmp_path: Path, launch: str
) -> None:
    chain = {
        "two": Buffers(samples="b", into="samples", process=(Add(amount=10.0), Add(amount=100.0))),
        "one": Buffers(samples="a", into="b", process=(Add(),)),
    }
    plain = gathered(tmp_path / "plain", {}, launch, "samples")
    added = gathered(tmp_path / "added", chain, launch, "a")
    for before, after in zip(plain, added, strict=True):
        for name in before.keys() - {"version"}:  # which depends on who is quicker
            np.testing.assert_array_equal(
                after[name], before[name] + 111 if name == "reward" else before[name], err_msg=name
            )


# actors, ring, buffer workers (0: none), trainers → samples that each trainer takes
AT_ONCE: list[tuple[int, int, int, int, int]] = [
    (1, 1, 0, 1, 1),
    (2, 2, 0, 1, 4),
    (2, 2, 1, 1, 4),
    (2, 2, 2, 1, 4),
    (2, 2, 3, 1, 4),
    (4, 1, 1, 2, 2),
    (4, 1, 0, 2, 2),
    (1, 1, 2, 2, 1),
    (3, 1, 1, 2, 2),
]


@pytest.mark.parametrize(("actors", "ring", "buffers", "trainers", "samples"), AT_ONCE)
def test_buffer_workers_do_not_change_how_many_samples_a_trainer_takes(
    actors: int, ring: int, buffers: int, trainers: int, samples: int
) -> None:
    group = {"one": Buffers(process=(), count=buffers)} if buffers else {}
    made = through(group, "gathered" if buffers else "samples", {"count": actors, "ring": ring})
    made = made.replace(workers={**made.workers, "trainer": made.workers["trainer"].replace(count=trainers)})
    counts = [made.samples_at_once(f"trainer-{i}", "samples") for i in range(trainers)]
    assert max(-(-count.numerator // count.denominator) for count in counts) == samples
    assert sum(counts) == actors * ring


@pytest.mark.parametrize("launch", ["inline", "processes"])
def test_several_actors_buffer_workers_and_trainers_train_full_batches(tmp_path: Path, launch: str) -> None:
    made = through({"one": Buffers(process=(Add(),), count=2)}, actors={"count": 2, "ring": 2})
    made = made.replace(
        workers={**made.workers, "trainer": made.workers["trainer"].replace(count=2)},
        limits=Limits(updates=12),
    )
    result = train(made, launch=launch, run_dir=tmp_path / "run", source=SOURCE, quiet=True)
    assert result.summary["updates"] == 12 and result.summary["dropped"] == 0
    steps = [record["step"] for record in read_metrics(tmp_path / "run")]
    full = 4 * 4 * 16  # outlets x lanes x steps, some of which are final rows
    assert all(0.5 * full < after - before <= full for before, after in itertools.pairwise(steps))


def test_what_buffer_workers_have_done_is_among_the_metrics(tmp_path: Path) -> None:
    made = through({"one": Buffers(process=(Reanalyse(),), policy="policy")}).replace(
        limits=Limits(seconds=120.0)
    )

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if metrics.get("time/one-0/samples", 0) > 0 and metrics.get("time/one-0/version", 0) > 0:
            control.stop("both were told")

    run = {"launch": "threads", "run_dir": tmp_path / "run", "source": SOURCE, "quiet": True}
    assert train(made, **run, on_update=on_update).summary["reason"] == "both were told"
    last = read_metrics(tmp_path / "run")[-1]
    assert last["time/one-0/samples"] > 0 and last["time/one-0/version"] > 0


def test_rows_are_as_old_as_their_actor_s_version_re_analysed_or_not(tmp_path: Path) -> None:
    made = through(
        {"one": Buffers(process=(Reanalyse(),), policy="policy")},
        actors={"slots": 2},
        max_policy_lag=1,
        batch_size=1,
    )
    result = train(
        made.replace(limits=Limits(updates=30)),
        launch="inline",
        run_dir=tmp_path / "run",
        source=SOURCE,
        quiet=True,
    )
    records = read_metrics(tmp_path / "run")
    assert max(record["lag/max"] for record in records) == 1
    assert result.summary["dropped"] == records[-1]["dropped"] > 0  # more than one sample is on its way


def test_the_recurrent_policy_is_trained_on_re_analysed_samples(tmp_path: Path) -> None:
    made = through(
        {"one": Buffers(process=(Reanalyse(),), policy="policy")},
        algorithm=PPO(chunk_steps=8, minibatch_size=32, epochs=1),
    )
    made = made.replace(policies={"policy": RecurrentActorCritic()}, limits=Limits(updates=3))
    result = train(made, launch="inline", run_dir=tmp_path / "run", source=SOURCE, quiet=True)
    assert result.summary["updates"] == 3
    assert all(np.isfinite(value) for value in read_metrics(tmp_path / "run")[-1].values())


@pytest.mark.parametrize("padded", [False, True])
def test_episodes_pass_through(tmp_path: Path, padded: bool) -> None:
    made = through(
        {"one": Buffers(process=(Add(amount=0.5),))},
        algorithm=experiments.Recorder(record=str(tmp_path / "sample")),
        batch_size=1,
    )
    actor = made.workers["actor"]
    actor = actor.replace(agents=(actor.agents[0].replace(mode="full", padded=padded, sample_steps=256),))
    train(
        made.replace(workers={**made.workers, "actor": actor}, limits=Limits(updates=6)),
        launch="inline",
        run_dir=tmp_path / "run",
        quiet=True,
    )
    for number in range(6):
        sample = dict(np.load(tmp_path / f"sample-{number}.npz"))
        final = int((sample["done"] | sample["truncated"])[:, 0].argmax())
        assert len(sample["done"]) == (13 if padded else final + 1)
        assert (sample["reward"] % 1 == 0.5).all()


# ---- what cannot be --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"process": (Reanalyse(),)}, "Reanalyse needs a policy; set the policy"),
        ({"process": (Add(),), "policy": "policy"}, 'policy = "policy", but nothing in process needs one'),
        ({"process": (), "into": "gathered"}, 'samples and into are both "gathered"'),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Buffers(**settings)


def test_samples_that_would_go_round_in_a_circle_are_refused() -> None:
    ring = {
        "one": Buffers(samples="a", into="b", process=()),
        "two": Buffers(samples="b", into="a", process=()),
        "three": Buffers(samples="b", into="samples", process=()),
    }
    with pytest.raises(ConfigError, match=r'in a circle \(one-0 from "a" into "b", two-0 from "b" into "a"'):
        through(ring, "a").check()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            through({"one": Buffers(samples="gatherd", process=())}),
            '"gathered": actor-0 produces it, but nobody consumes it; did you mean "gatherd"',
        ),
        (
            through({"one": Buffers(samples="lost", process=())}, "samples"),
            '"lost": one-0 consumes it, but nobody produces it',
        ),
        (
            through({"one": Buffers(into="sample", process=())}),
            '"sample": one-0 produces it, but nobody consumes it; did you mean "samples"',
        ),
        (
            through({"one": Buffers(process=(Reanalyse(),), policy="polcy")}),
            'uses policy "polcy", which the experiment lacks; did you mean "policy"',
        ),
        (
            through({"one": Buffers(process=())}, max_policy_lag=0),
            "max_policy_lag = 0, which needs producers that wait for it, and one-0",
        ),
        (
            through({"one": Buffers(process=(RandomShift(),))}),
            r"RandomShift shifts images, .* the rows have none \(obs float32\[5\]\)",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_start(tmp_path: Path, made: Experiment, message: str) -> None:
    with pytest.raises(TidemillError, match=message):
        train(made, launch="inline", run_dir=tmp_path / "run", quiet=True)


def test_a_policy_that_nobody_gives_or_that_goes_with_other_rows_is_refused(tmp_path: Path) -> None:
    made = through({"one": Buffers(process=(Reanalyse(),), policy="other")})
    made = made.replace(policies={**made.policies, "other": experiments.ByObservation()})
    with pytest.raises(
        ConfigError, match='parameters stream "other": one-0 subscribes it, but nobody publishes it'
    ):
        made.check()
    with pytest.raises(
        ConfigError,
        match=r'with policy "policy", which goes with other rows: obs is float32\[7\], and float32\[5\] '
        r"there",
    ):
        Line(
            Reanalyse(),
            policy="policy",
            schema={**ROW_FIELDS, **ANSWERED},
            spaces=Spaces(Box((7,), "float32"), Discrete(4)),
        )
