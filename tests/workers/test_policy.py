"""The policy worker."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.workers.world import Known, KnownPolicy, Marked, Sink, World, answer_of, check_samples

from tidemill.algorithms.ppo import PPO
from tidemill.api.control_messages import AnsweredBy, Facts, Hold, State
from tidemill.api.edges import Port, inference_edges
from tidemill.api.experiment import Experiment
from tidemill.api.spaces import Box, Discrete, Spaces, schema_of_space
from tidemill.api.worker import Context, WorkerConfig
from tidemill.core.errors import ConfigError
from tidemill.core.schema import schema_of
from tidemill.streams.inference import ChannelInferenceClient
from tidemill.transports.local import local_endpoints
from tidemill.workers.actor import MAX_POLL_STEPS, Actors, AgentSpec
from tidemill.workers.policy import PolicyWorker, PolicyWorkers
from tidemill.workers.trainer_config import Trainer

SPACES = Spaces(Box((5,), "float32"), Discrete(4))
ROWS, IN_FLIGHT = 6, 3  # of a request, and of a client


@dataclass(frozen=True, kw_only=True)
class Askers(WorkerConfig):
    """Stand where actors do."""

    policies: tuple[str, ...]

    def ports(self) -> tuple[Port, ...]:
        return tuple(Port("ask", "ask", policy=name) for name in self.policies)


class Desk:
    """Policy workers whose askers and trainer the test plays."""

    def __init__(self, askers: int = 1, policies: tuple[str, ...] = ("p",), **config: Any) -> None:
        Known.built.clear()
        workers: dict[str, WorkerConfig] = {
            "asker": Askers(count=askers, policies=policies),
            "server": PolicyWorkers(stream="ask", policies=policies, **config),
            "sink": Sink(policies=policies),
        }
        experiment = Experiment(
            name="desk", policies={name: KnownPolicy() for name in ("unused", *policies)}, workers=workers
        )
        members = dict(experiment.members())
        ends = local_endpoints(list(members), [*experiment.edges(), *experiment.spare_edges()])
        self._ends = {name: end for name, (end, _) in ends.items()}
        observation = schema_of_space(SPACES.observation, "obs")
        self.clients: dict[tuple[int, str], ChannelInferenceClient] = {}
        for i in range(askers):
            for name in policies:
                edge, endpoints = f"ask/asker-{i}/{name}", ends[f"asker-{i}"][0]
                pair = endpoints.producer(f"requests/{edge}"), endpoints.consumer(f"answers/{edge}")
                self.clients[i, name] = ChannelInferenceClient(*pair, observation, {}, ROWS, IN_FLIGHT)
        self.indices = {name: 1 + i for i, name in enumerate(policies)}
        self.versions = dict.fromkeys(policies, -1)
        self._writers = {name: ends["sink-0"][0].writer(f"parameters/{name}/sink-0") for name in policies}
        for name, writer in self._writers.items():
            writer.offer(schema_of({"w": np.zeros(3)}))
            self.publish(name)
        self.servers: list[PolicyWorker] = []
        self.served: dict[tuple[int, str], Known] = {}
        for i in range(workers["server"].count):
            server = PolicyWorker(
                Context(experiment, f"server-{i}", members[f"server-{i}"], ends[f"server-{i}"][0]),
                workers["server"],  # type: ignore[arg-type]
            )
            server._configure(Facts(spaces=dict.fromkeys(policies, SPACES)))
            server.start()
            self.servers.append(server)
            self.served |= {
                (i, policies[served._index - 1]): served.policy for served in server._service_order
            }  # type: ignore[misc]
        self.batches: list[tuple[str, int, int]] = []
        """(policy, rows, version) of what was computed."""
        for (_, name), known in self.served.items():
            self._watch(name, known)
        self.asked = 0
        self.waiting: dict[tuple[int, str, int], np.ndarray] = {}

    def _watch(self, name: str, known: Known) -> None:
        act: Callable[..., None] = known.act

        def watched(observation, state, deterministic, out) -> None:
            self.batches.append((name, len(observation["obs"]), known.version))
            act(observation, state, deterministic, out)

        known.act = watched  # type: ignore[method-assign]

    def turn(self, asker: int, name: str, server: int) -> None:
        """Have another worker answer an asker."""
        worker = self.servers[server]
        before = len(worker._served)
        worker._turn_to(AnsweredBy("ask", f"asker-{asker}", name, worker.name))
        for served in worker._served[before:]:
            self._watch(name, served.policy)  # type: ignore[arg-type]
        requests, answers = inference_edges("ask", f"asker-{asker}", name, worker.name)
        ends = self._ends[f"asker-{asker}"]
        self.clients[asker, name].turn_to(ends.producer(requests), ends.consumer(answers))

    def publish(self, name: str) -> None:
        self.versions[name] += 1
        self._writers[name].write({"w": np.full(3, self.versions[name])}, self.versions[name])

    def ask(self, asker: int, name: str, rows: int) -> None:
        """Ask for an answer to `rows` rows that say whose they are."""
        identities = np.stack(
            [
                np.full(rows, asker),
                np.full(rows, self.indices[name]),
                self.asked + np.arange(rows),
                *np.zeros((2, rows)),
            ],
            1,
        )
        self.asked += rows
        client = self.clients[asker, name]
        number = client.post_request({"obs": identities.astype(np.float32)}, {}, False)
        client.flush()
        self.waiting[asker, name, number] = identities.astype(np.int64)

    def rows_waiting(self, name: str) -> int:
        return sum(len(rows) for (_, of, _), rows in self.waiting.items() if of == name)

    def requests_waiting(self, asker: int, name: str) -> int:
        return sum(key[:2] == (asker, name) for key in self.waiting)

    def collect(self) -> list[tuple[str, int]]:
        """Take what was answered, see that it is right, and return (policy, rows) of each
        request."""
        found = []
        for (asker, name, number), rows in list(self.waiting.items()):
            client = self.clients[asker, name]
            if client.is_ready(number):
                answer = client.consume_result(number)
                for field, value in answer_of(rows.T, answer.version, 0).items():
                    assert (answer.fields[field][: len(rows)] == value).all()
                assert answer.policy == self.indices[name]
                del self.waiting[asker, name, number]
                found.append((name, len(rows)))
        return found

    def close(self) -> None:
        for server in self.servers:
            server._close()


@contextmanager
def gated(desk: Desk, known: Known) -> Iterator[tuple[threading.Event, threading.Semaphore]]:
    """(Set while a batch is being computed, what lets one batch be)."""
    computing, gate = threading.Event(), threading.Semaphore(0)
    act = known.act

    def held(*arguments: Any) -> None:
        computing.set()
        assert gate.acquire(timeout=240)
        act(*arguments)
        computing.clear()

    known.act = held  # type: ignore[method-assign]
    try:
        yield computing, gate
    finally:
        gate.release(100)
        desk.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_a_policy_worker_answers_for_another_one_also_a_policy_that_it_did_not_serve(threaded: bool) -> None:
    desk = Desk(2, ("p", "q"), count=2, threaded=threaded)
    dead, heir = desk.servers
    assert [[served.name for served in worker._served] for worker in desk.servers] == [["p"], ["q"]]
    try:
        desk.publish("p")
        for name in ("p", "q", "p"):
            for asker in range(2):
                desk.ask(asker, name, 2)  # "p" of the dead one
        for asker in range(2):
            desk.turn(asker, "p", 1)
        found = list[tuple[str, int]]()
        deadline = time.monotonic() + 60
        while desk.waiting and time.monotonic() < deadline:
            heir._poll()
            found += desk.collect()
        assert sorted(found) == [("p", 2)] * 4 + [("q", 2)] * 2
        assert {version for name, _, version in desk.batches if name == "p"} == {1}
        desk.ask(0, "p", 3)
        while desk.waiting and time.monotonic() < deadline:
            heir._poll()
            found += desk.collect()
        assert found[-1] == ("p", 3)
        assert dead._served[0].rows_answered == 0
    finally:
        desk.close()


MOVES = st.tuples(
    st.sampled_from(["ask", "ask", "ask", "publish", "poll"]),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(1, ROWS),
)


@settings(max_examples=80)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 14), st.lists(MOVES, max_size=60))
def test_a_batch_is_all_that_has_come_of_one_policy_up_to_its_bound(
    askers: int, kinds: int, most: int, moves: list[tuple[str, int, int, int]]
) -> None:
    """Never two small ones; by the newest parameters, which change between batches only;
    each policy in its turn."""
    names = ("p", "q", "r")[:kinds]
    desk = Desk(askers, names, most_rows=most)
    (server,) = desk.servers
    passed_over = dict.fromkeys(names, 0)
    for move, i, j, rows in moves:
        asker, name = i % askers, names[j % kinds]
        if move == "publish":
            desk.publish(name)
        elif move == "ask" and desk.requests_waiting(asker, name) < IN_FLIGHT:
            desk.ask(asker, name, rows)
        elif move == "poll":
            before = {of: desk.rows_waiting(of) for of in names}
            done = len(desk.batches)
            result = server._poll()
            answered = desk.collect()
            if not any(before.values()):
                assert result.batch_count == result.sample_count == 0 and len(desk.batches) == done
                continue
            ((policy, size, version),) = desk.batches[done:]
            assert version == desk.versions[policy]
            assert (
                answered
                and {of for of, _ in answered} == {policy}
                and sum(n for _, n in answered) == size == result.sample_count
            )
            assert size <= most or len(answered) == 1
            left = [len(rows) for (_, of, _), rows in desk.waiting.items() if of == policy]
            assert not left or size + max(left) > most, "it had room for one that has waited"
            for of in names:
                passed_over[of] = 0 if of == policy or not before[of] else passed_over[of] + 1
                assert passed_over[of] < kinds
    for _ in range(200):
        server._poll()
        desk.collect()
    assert not desk.waiting


def test_a_flood_for_one_policy_does_not_drown_another() -> None:
    desk = Desk(2, ("p", "q"), most_rows=4)
    for round_ in range(20):
        while desk.requests_waiting(0, "p") < IN_FLIGHT:
            desk.ask(0, "p", 4)
        desk.ask(1, "q", 1)
        for _ in range(2):
            assert desk.servers[0]._poll().batch_count == 1
        assert ("q", 1) in desk.collect(), round_


def test_a_flood_of_one_client_does_not_drown_another() -> None:
    desk = Desk(3, most_rows=4)
    for round_ in range(20):
        for asker, rows in ((0, 3), (1, 3)):
            while desk.requests_waiting(asker, "p") < IN_FLIGHT:
                desk.ask(asker, "p", rows)
        desk.ask(2, "p", ROWS)  # more than a batch has room for, beside others
        for _ in range(3):
            desk.servers[0]._poll()
        assert ("p", ROWS) in desk.collect(), round_


def test_several_policy_workers_share_the_policies_and_askers_of_a_stream() -> None:
    desk = Desk(2, ("p", "q"), count=4)
    assert {key: len(server._service_order) for key, server in enumerate(desk.servers)} == {
        0: 1,
        1: 1,
        2: 1,
        3: 1,
    }
    assert sorted(name for _, name in desk.served) == ["p", "p", "q", "q"]
    for asker in (0, 1):
        for name in ("p", "q"):
            desk.ask(asker, name, 2)
    for server in desk.servers:
        assert server._poll().sample_count == 2
    assert len(desk.collect()) == 4


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("copied", [False, True])
def test_threaded_what_comes_while_a_batch_computes_joins_the_one_that_waits(copied: bool) -> None:
    desk = Desk(3, ("p", "q"), threaded=True, most_rows=9)
    (server,) = desk.servers
    with gated(desk, desk.served[0, "p"]) as (computing, gate):
        desk.ask(0, "p", 1)
        assert server._poll().batch_count == 1
        assert computing.wait(60)
        for asker in (1, 2) if copied else (1,):
            desk.ask(asker, "p", 2)
        assert server._poll().batch_count == 1  # gathered, and waits
        desk.ask(0, "q", 1)  # has to wait for its turn
        desk.ask(0, "p", 3)
        assert (server._poll().batch_count, server._poll().batch_count) == (0, 0)
        desk.ask(1, "p", 6)  # does not fit any more
        assert server._poll().sample_count == 0
        desk.publish("p")
        gate.release(2)
        wait_until(lambda: len(desk.batches) == 2)
        assert desk.batches == [("p", 1, 0), ("p", 7 if copied else 5, 1)]
        while desk.waiting:
            gate.release()
            server._poll()
            desk.collect()
            time.sleep(0.001)
        assert sorted(desk.batches[2:]) == [("p", 6, 1), ("q", 1, 0)]


@settings(max_examples=10)
@given(st.integers(1, 14), st.lists(MOVES, min_size=20, max_size=80))
def test_threaded_every_request_is_answered_once_and_right(
    most: int, moves: list[tuple[str, int, int, int]]
) -> None:
    desk = Desk(3, ("p", "q"), threaded=True, most_rows=most)
    (server,) = desk.servers
    try:
        for move, asker, j, rows in moves:
            name = "pq"[j % 2]
            if move == "publish":
                desk.publish(name)
            elif desk.requests_waiting(asker, name) < IN_FLIGHT:
                desk.ask(asker, name, rows)
            server._poll()
            desk.collect()
        deadline = time.monotonic() + 60
        while desk.waiting:
            assert time.monotonic() < deadline
            server._poll()
            desk.collect()
    finally:
        desk.close()
    assert sum(rows for _, rows, _ in desk.batches) == desk.asked
    for name in ("p", "q"):
        versions = [version for of, _, version in desk.batches if of == name]
        assert versions == sorted(versions)


def test_an_actor_of_the_same_thread_is_answered_within_its_poll() -> None:
    spec = AgentSpec(policy="p", samples="s", inference="ask-p", sample_steps=64)
    for beside in (False, True):
        world = World(Actors(environment=Marked(), lanes=2, agents=(spec,)), remote=True)
        world.begin()
        if beside:
            world.actor.attendants = world.servers
        assert world.actor._poll().batch_count == (MAX_POLL_STEPS if beside else 1)
        while not world.got:
            world.poll()
            world.drain()
        check_samples(world)


@pytest.mark.parametrize("threaded", [False, True])
def test_policy_workers_attend_to_those_who_take_turns_with_them(threaded: bool) -> None:
    (server,) = Desk(threaded=threaded).servers
    asker = Desk().servers[0]
    for worker in (server, asker):
        worker.exit("told to")
    asker.run(server)
    assert asker.attendants == ([] if threaded else [server])
    assert server.attendants == [asker]


def test_who_is_paused_or_held_attends_to_nobody() -> None:
    desk = Desk()
    (server,) = desk.servers
    desk.ask(0, "p", 2)
    server.pause()
    server.attend()
    assert not desk.collect()
    server.start()
    server._hold(Hold(on=True, cut=1))
    server.attend()
    assert not desk.collect()
    server._hold(Hold(on=False, cut=1))
    server.attend()
    assert desk.collect() == [("p", 2)]


def test_what_a_policy_raises_as_it_attends_is_its_worker_s_failure() -> None:
    desk = Desk()
    (server,), known = desk.servers, desk.served[0, "p"]

    def fails(*arguments: Any) -> None:
        raise ValueError("no such action")

    known.act = fails  # type: ignore[method-assign]
    desk.ask(0, "p", 2)
    server.attend()
    assert server.state is State.FAILED and not desk.collect()
    server.attend()


def test_policies_are_named_once() -> None:
    for policies in ((), ("p", "p")):
        with pytest.raises(ConfigError, match="name at least one policy, and each of them once"):
            PolicyWorkers(policies=policies)


def test_threaded_only_the_inference_thread_takes_parameters() -> None:
    """A start after a pause, too, leaves them to it: it may be computing."""
    spec = AgentSpec(policy="p", samples="s", inference="ask-p", sample_steps=4)
    world = World(
        Actors(environment=Marked(shortest=3, longest=9), agents=(spec,), lanes=2), remote=True, threaded=True
    )
    world.begin()
    (policy,) = (known for known in Known.built)
    (server,) = world.servers
    threads: set[int] = set()
    load: Callable[..., None] = policy.load

    def watched(parameters, version) -> None:
        threads.add(threading.get_ident())
        load(parameters, version)

    policy.load = watched  # type: ignore[method-assign]
    deadline = time.monotonic() + 60
    try:
        while world.version < 5 or len(world.got.get("samples/s/actor-0/0", ())) < 3:
            assert time.monotonic() < deadline
            world.poll()
            world.drain()
            if policy.version == world.version and world.version < 5:
                world.publish()
                server.pause()
                server.start()
    finally:
        server._close()
    assert len(threads) == 1 and threading.get_ident() not in threads
    assert check_samples(world)


def test_threaded_a_policy_may_compute_elsewhere_and_finish_when_it_is_answered() -> None:
    spec = AgentSpec(policy="p", samples="s", inference="ask-p", sample_steps=4)
    world = World(
        Actors(environment=Marked(shortest=3, longest=9), agents=(spec,), lanes=2), remote=True, threaded=True
    )
    world.begin()
    (policy,) = (known for known in Known.built)
    (server,) = world.servers
    began, finished = set[int](), set[int]()

    def begin(observation, state, deterministic, out) -> Callable[[], None]:
        began.add(threading.get_ident())
        answers = {name: array.copy() for name, array in out.items()}
        policy.act(observation, state, deterministic, answers)

        def finish() -> None:
            finished.add(threading.get_ident())
            for name, array in answers.items():
                out[name][...] = array

        return finish

    policy.begin = begin  # type: ignore[method-assign]
    deadline = time.monotonic() + 60
    try:
        while len(world.got.get("samples/s/actor-0/0", ())) < 6:
            assert time.monotonic() < deadline
            world.poll()
            world.drain()
    finally:
        server._close()
    assert check_samples(world)
    assert (
        len(began) == len(finished) == 1
        and not began & finished
        and threading.get_ident() not in began | finished
    )


@pytest.mark.parametrize(
    "make",
    [lambda device: PolicyWorkers(device=device), lambda device: Trainer(algorithm=PPO(), device=device)],
)
def test_a_device_is_named(make: Callable[[str], PolicyWorkers | Trainer]) -> None:
    assert [make(device).device for device in ("cpu", "auto", "cuda", "cuda:1")] == [
        "cpu",
        "auto",
        "cuda",
        "cuda:1",
    ]
    with pytest.raises(ConfigError, match=r'device = "gpu" is not known; take "cpu", "cuda"'):
        make("gpu")
