"""The policy worker: answers the requests of many actors in batches, each of one policy.

Batching is dynamic: while one batch computes, the next one grows; whatever has arrived
when its turn comes (up to `most_rows`) is the next batch. Folded, it grows in the
clients' slots, and one poll gathers, computes and responds; a request that has come alone
is neither gathered nor its answer copied. Threaded, an inference thread
computes and a responding thread answers, while the main thread gathers; what arrives
before a gathered batch is begun joins it.
"""

import queue
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tidemill.api.control_messages import AnsweredBy, Facts
from tidemill.api.edges import Port, inference_edges
from tidemill.api.policy import check_next_state, misfit
from tidemill.api.spaces import Spaces, schema_of_space
from tidemill.api.stream import Requests
from tidemill.api.transport import Consumer, Producer
from tidemill.api.worker import Context, WorkerConfig
from tidemill.core.config import check_several
from tidemill.core.cut import Part
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array, Arrays, Schema, allocate
from tidemill.nets.choose_device import check_device, choose_device
from tidemill.nets.weights import placeholder_weights
from tidemill.streams.inference import ChannelInferenceServer
from tidemill.streams.parameters import ParameterSubscriber
from tidemill.workers.base import PollResult, Worker
from tidemill.workers.cut_files import has_cut, own_part
from tidemill.workers.mapping import MappingThread


@dataclass(frozen=True, kw_only=True)
class PolicyWorkers(WorkerConfig):
    """Policy workers answer the requests that actors send on an inference stream, in
    batches. With a `count` above 1 they share the actors: what an actor asks of a policy
    always goes to the same worker, and to another one once that has no life left.

    stream: name of the inference stream (`AgentSpec.inference`)
    policies: names of the policies that they answer for, in turn: a batch is of one
    most_rows: most rows of a batch
    threaded: whether to compute and respond in threads of their own (worth it with a GPU,
        or with a second core to spare). Which requests share a batch is then a matter of
        time, under the launcher "inline" too: runs of one seed differ
    device: what computes: "cpu"; "cuda", a GPU, the next one for each worker of the
        group; "cuda:1", a certain one; "auto", a GPU if there is one. An MLP of the usual
        size should be answered faster by a CPU (benchmarks/device.py tells)
    """

    order: ClassVar[int] = 3

    stream: str = "inference"
    policies: tuple[str, ...] = ("policy",)
    most_rows: int = 4096
    threaded: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(most_rows=1)
        check_several("policies", self.policies)
        if not self.policies or len(set(self.policies)) < len(self.policies):
            raise ConfigError(f"policies = {self.policies}: name at least one policy, and each of them once")
        check_device(self.device)

    def ports(self) -> tuple[Port, ...]:
        return *(Port(self.stream, "serve", policy=name) for name in self.policies), *(
            Port(name, "subscribe") for name in self.policies
        )

    def build(self, context: Context) -> "PolicyWorker":
        return PolicyWorker(context, self)


@dataclass
class _Batch:
    """Requests for one policy that are answered at once. `buffered`: their rows lie in
    the newest buffers, and not where the only request lies."""

    served: "_Served"
    requests: list[Requests]
    rows: int
    buffered: bool
    observation: Arrays
    state: Arrays
    deterministic: bool | Array
    answers: Arrays
    version: int = -1
    finish: Callable[[], None] | None = None
    """What completes the answers, of a batch that was begun in another thread."""


@dataclass
class _Buffers:
    """Where a batch is joined, and its answers."""

    observation: Arrays
    state: Arrays
    answers: Arrays
    deterministic: Array

    @classmethod
    def allocate(cls, schemas: tuple[Schema, Schema, Schema], rows: int) -> "_Buffers":
        observation, state, answers = (allocate(schema, (rows,)) for schema in schemas)
        return cls(observation, state, answers, np.zeros(rows, np.bool_))


class _Served:
    """One policy that a worker serves: who asks for it, its network, and buffers for its
    batches.

    sets: of buffers, used in turn: as many as there are batches under way
    """

    def __init__(self, context: Context, config: PolicyWorkers, name: str, spaces: Spaces, sets: int) -> None:
        experiment, endpoints = context.experiment, context.endpoints
        policy = experiment.policies[name]
        observation = schema_of_space(spaces.observation, "obs")
        state = policy.state(spaces)
        answer = policy.answer(spaces)
        askers = [
            e.source for e in context.edges(f"requests/{config.stream}/") if e.name.endswith(f"/{name}")
        ]
        self.name, self._context, self._stream = name, context, config.stream
        self._server = ChannelInferenceServer(map(self._channels, askers), observation, state, answer)
        self._most_rows = config.most_rows
        device = choose_device(config.device, context.gpu)
        with placeholder_weights():
            self.policy = policy.build_on(device, spaces, context.seed("policy", name))
        self._index = list(experiment.policies).index(name)
        self._parameters = ParameterSubscriber(endpoints.reader(context.edges(f"parameters/{name}/")[0].name))
        self._schemas = observation, state, {**answer, **state}
        self._sets = sets
        self._buffers: list[_Buffers] = []  # the newest last
        self.rows_answered = self.batches_answered = 0
        self._random: list[Part] | None = None
        """Where the random stream of each client is, in runs that resume exactly: what a
        client is answered follows from what it asks, whoever asks besides."""
        if experiment.exact_resume:
            self._random = []
            for asker in askers:
                self.policy.reseed(context.seed("policy", name, asker))
                self._random.append(self.policy.random_state())

    def _channels(self, asker: str, spare: str = "") -> tuple[Consumer, Producer]:
        requests, answers = inference_edges(self._stream, asker, self.name, spare)
        endpoints = self._context.endpoints
        return endpoints.consumer(requests), endpoints.producer(answers)

    def add(self, asker: str) -> None:
        """Answer an asker, too, that asked another worker before."""
        self._server.add(*self._channels(asker, self._context.name))

    def poll(self, beside: int = 0) -> list[Requests]:
        """Return what has arrived and fits a batch, beside so many rows."""
        return self._server.poll_requests(self._most_rows, beside)

    def gather(self, requests: list[Requests], waiting: _Batch | None = None) -> _Batch:
        """Return a batch of `requests`, or `waiting` with them: it is the newest, and not
        yet begun."""
        if self._buffers and waiting is None:
            self._buffers.append(self._buffers.pop(0))
        joined = [*waiting.requests, *requests] if waiting is not None else requests
        rows = sum(r.rows for r in joined)
        grown = not self._buffers or len(self._buffers[-1].deterministic) < rows
        if grown:
            size = max(rows, 2 * self.rows_answered // max(self.batches_answered, 1))
            self._buffers = [_Buffers.allocate(self._schemas, size) for _ in range(self._sets)]
        buffers = self._buffers[-1]
        if len(joined) == 1:  # is used where it lies
            (only,) = joined
            deterministic, observation, state = only.deterministic, only.observation, only.state
        else:
            start, fresh = (
                (waiting.rows, requests)
                if waiting is not None and waiting.buffered and not grown
                else (0, joined)
            )
            for target, parts in (
                (buffers.observation, [r.observation for r in fresh]),
                (buffers.state, [r.state for r in fresh]),
            ):
                for name, array in target.items():
                    np.concatenate([part[name] for part in parts], out=array[start:rows])
            for request in fresh:
                buffers.deterministic[start : start + request.rows] = request.deterministic
                start += request.rows
            deterministic = buffers.deterministic[:rows]
            observation, state = (
                {name: array[:rows] for name, array in part.items()}
                for part in (buffers.observation, buffers.state)
            )
        return _Batch(
            self,
            joined,
            rows,
            len(joined) > 1,
            observation,
            state,
            deterministic if np.count_nonzero(deterministic) else False,
            buffers.answers,
        )

    @property
    def apart(self) -> bool:
        """True when each request is a batch of its own."""
        return self._random is not None

    def state(self) -> Part:
        """Return what its answers are drawn from, for a cut."""
        return {str(client): state for client, state in enumerate(self._random or ())}

    def load_state(self, state: Part) -> None:
        """Go on drawing from there."""
        self._random = [state[str(client)] for client in range(len(state))]

    def answer(self, request: Requests) -> None:
        """Answer a request by itself, where it lies and to where it is read; in runs that
        resume exactly from its client's random stream."""
        if self._random is not None:
            self.policy.set_random_state(self._random[request.client])
        self._parameters.refresh(self.policy)
        flags, answers = request.deterministic, self._server.place(request)
        if flags is not False and not np.count_nonzero(flags):
            flags = False
        self._act(request.observation, request.state, flags, answers)
        self._respond([request], answers, self.policy.version, request.rows)
        if self._random is not None:
            self._random[request.client] = self.policy.random_state()

    def compute(self, batch: _Batch, elsewhere: bool) -> None:
        """Answer the batch by the newest parameters; `elsewhere`: only begin, in a thread
        that does not wait for the end."""
        self._parameters.refresh(self.policy)
        inputs = batch.observation, batch.state, batch.deterministic, batch.answers
        batch.finish = self._act(*inputs, elsewhere)
        batch.version = self.policy.version

    def _act(
        self,
        observation: Arrays,
        state: Arrays,
        deterministic: bool | Array,
        answers: Arrays,
        elsewhere: bool = False,
    ) -> Callable[[], None] | None:
        finish = None
        try:
            if elsewhere:
                finish = self.policy.begin(observation, state, deterministic, answers)
            else:
                self.policy.act(observation, state, deterministic, answers)
        except (KeyError, ValueError) as error:
            raise misfit(self.policy, answers, error) from error
        if state:
            check_next_state(self.policy, state, answers)
        return finish

    def respond(self, batch: _Batch) -> None:
        """Send the batch's answers."""
        if batch.finish is not None:
            batch.finish()
        self._respond(batch.requests, batch.answers, batch.version, batch.rows)

    def _respond(self, requests: list[Requests], answers: Arrays, version: int, rows: int) -> None:
        self._server.respond(requests, answers, version, self._index)
        self.rows_answered += rows
        self.batches_answered += 1


class PolicyWorker(Worker):
    """The policy worker gathers requests, computes their answers as a batch and sends
    them back."""

    def __init__(self, context: Context, config: PolicyWorkers) -> None:
        super().__init__(context)
        self._config = config
        self._threads: list[MappingThread] = []
        self._service_order: deque[_Served] = deque()  # the next policy to be served is the first
        self._served: list[_Served] = []
        self._newest: _Batch | None = None  # threaded: what was gathered last, and may still wait

    def _configure(self, facts: Facts) -> Facts:
        config, context = self._config, self.context
        self._spaces = facts.spaces
        asked = {edge.name.rpartition("/")[2] for edge in context.edges(f"requests/{config.stream}/")}
        for name in config.policies:
            if name in asked:
                self._serve(name)
        if context.experiment.exact_resume and has_cut(context):
            with own_part(context) as part:
                for number, served in enumerate(self._served):
                    served.load_state(part[str(number)])
        if config.threaded:
            # The queues hold one batch each: a bound on delay.
            self._gathered: queue.Queue[_Batch] = queue.Queue(1)
            computed: queue.Queue[_Batch] = queue.Queue(1)
            self._threads = [
                MappingThread(self._compute, self._gathered, computed),
                MappingThread(self._respond, computed),
            ]
            for thread in self._threads:
                thread.start()
        return Facts()

    def _serve(self, policy: str) -> _Served:
        sets = 4 if self._config.threaded else 1  # one gathered, one waits, one is computed, one answered
        served = _Served(self.context, self._config, policy, self._spaces[policy], sets)
        self._service_order.append(served)
        self._served.append(served)
        return served

    def _turn_to(self, message: AnsweredBy) -> None:
        served = next((served for served in self._served if served.name == message.policy), None)
        (served or self._serve(message.policy)).add(message.asker)

    def _poll(self) -> PollResult:
        if self._threads:
            return self._gather_for_threads()
        served, requests = self._next_requests()
        if not requests:
            return PollResult()
        if len(requests) == 1 or served.apart:
            left, before = self.clock.enter("inference"), served.rows_answered
            for request in requests:
                served.answer(request)
            self.clock.enter(left)
            return PollResult(served.rows_answered - before, len(requests))
        left = self.clock.enter("copy")
        batch = served.gather(requests)
        self.clock.enter("inference")
        served.compute(batch, elsewhere=False)
        self.clock.enter(left)
        served.respond(batch)
        return PollResult(batch.rows, 1)

    def _gather_for_threads(self) -> PollResult:
        """Gather what has come, with the batch that waits to be computed, if one does."""
        for thread in self._threads:
            if thread.error is not None:
                raise thread.error
        waiting = self._newest if self._gathered.full() else None
        served, requests = (
            self._next_requests() if waiting is None else (waiting.served, waiting.served.poll(waiting.rows))
        )
        if not requests:
            return PollResult()
        if waiting is not None:
            waiting = self._take_back()
        left = self.clock.enter("copy")
        self._newest = served.gather(requests, waiting)
        self.clock.enter(left)
        self._gathered.put(self._newest)  # has room: only this thread puts
        return PollResult(sum(r.rows for r in requests), int(waiting is None))

    def _save_part(self, checkpoints: Mapping[str, int]) -> None:
        part = {str(number): served.state() for number, served in enumerate(self._served)}
        self._parts.write(part, self.cut, checkpoints)

    @property
    def attends(self) -> bool:
        """An actor is answered before it gives up its turn, unless a thread computes."""
        return not self._config.threaded

    def attend(self) -> None:
        self._turn(obeys=False)

    def _next_requests(self) -> tuple[_Served, list[Requests]]:
        """Return the requests of the next policy, in turn, that has some."""
        for _ in range(len(self._service_order)):
            served = self._service_order[0]
            self._service_order.rotate(-1)
            if requests := served.poll():
                break
        return served, requests

    def _compute(self, batch: _Batch) -> _Batch:
        """Begin a batch, in the inference thread."""
        self.context.endpoints.bell.ring()  # the queue has room again: the main thread may gather
        batch.served.compute(batch, elsewhere=True)
        return batch

    def _respond(self, batch: _Batch) -> None:
        """Answer a batch, in the responding thread."""
        batch.served.respond(batch)

    def _take_back(self) -> _Batch | None:
        """Return the batch that waits, None when it was begun meanwhile."""
        try:
            return self._gathered.get_nowait()
        except queue.Empty:
            return None

    def _stats(self) -> dict[str, float]:
        return {
            "rows_per_batch": sum(s.rows_answered for s in self._service_order)
            / max(sum(s.batches_answered for s in self._service_order), 1)
        }

    def _close(self) -> None:
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join(5.0)
