"""The policy worker: answers the requests of many actors in batches.

Batching is dynamic: while one batch computes, the next one grows in the clients' slots; whatever has arrived then (up to `most_rows`) is the next
batch. Folded, one poll gathers, computes and responds. Threaded, an inference thread computes and a responding thread answers, while the main
thread gathers.
"""

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tidemill.api.control import Facts
from tidemill.api.edges import Port, number
from tidemill.api.experiment import Context, WorkerConfig
from tidemill.api.policy import check_next_state, misfit
from tidemill.api.spaces import schema_of_space
from tidemill.api.stream import Requests
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array, Arrays, allocate
from tidemill.core.seeding import derive_seed
from tidemill.nets.device import check_device, choose_device
from tidemill.streams.inference import ChannelInferenceServer
from tidemill.streams.parameters import ParameterSubscriber
from tidemill.workers.base import PollResult, Worker
from tidemill.workers.mapping import MappingThread


@dataclass(frozen=True, kw_only=True)
class PolicyWorkers(WorkerConfig):
    """Policy workers: they serve inference stream `stream` with policy `policy`.

    most_rows   rows of a batch at most
    threaded    compute and respond in threads of their own (worth it with a GPU, or with a second core to spare)
    device      what computes: "cpu"; "cuda", a GPU, the next one for each worker of the group; "cuda:1", a certain one; "auto", a GPU if there is
                one. An MLP of the usual size should be answered faster by a CPU (benchmarks/device.py tells)
    """

    order: ClassVar[int] = 3

    stream: str = "inference"
    policy: str = "policy"
    most_rows: int = 4096
    threaded: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most_rows < 1:
            raise ConfigError(f"most_rows = {self.most_rows} must be at least 1")
        check_device(self.device)

    def ports(self) -> tuple[Port, ...]:
        return Port(self.stream, "serve", policy=self.policy), Port(self.policy, "subscribe")

    def build(self, context: Context) -> "PolicyWorker":
        return PolicyWorker(context, self)


@dataclass
class _Batch:
    requests: list[Requests]
    observation: Arrays
    state: Arrays
    deterministic: bool | Array
    answers: Arrays
    version: int = -1
    finish: Callable[[], None] | None = None
    """What completes the answers, of a batch that was begun in another thread."""


class PolicyWorker(Worker):
    """See the module's text."""

    def __init__(self, context: Context, config: PolicyWorkers) -> None:
        super().__init__(context)
        self._config = config
        self._threads: list[MappingThread] = []

    def _configure(self, facts: Facts) -> Facts:
        config, context = self._config, self.context
        experiment = context.experiment
        spaces = facts.spaces[config.policy]
        policy = experiment.policies[config.policy]
        observation, state, answer = schema_of_space(spaces.observation, "obs"), policy.state(spaces), policy.answer(spaces)
        clients = [f"{config.stream}/{e.source}/{config.policy}" for e in context.edges(f"requests/{config.stream}/")]
        endpoints = context.endpoints
        channels = [(endpoints.consumer(f"requests/{c}"), endpoints.producer(f"answers/{c}")) for c in clients]
        self._server = ChannelInferenceServer(channels, observation, state, answer)
        device = choose_device(config.device, number(context.name))
        self._policy = policy.build_on(device, spaces, derive_seed(experiment.seed, context.name, "policy", config.policy))
        self._policy_index = list(experiment.policies).index(config.policy)
        self._parameters = ParameterSubscriber(endpoints.reader(context.edges(f"parameters/{config.policy}/")[0].name))
        self._schemas = observation, state, {**answer, **state}
        self._buffers: list[tuple[Arrays, Arrays, Arrays]] = []
        self._answered = self._batches_done = 0
        if config.threaded:
            # The queues hold one batch each: a bound on delay, and the batch that is being gathered grows meanwhile.
            self._gathered: queue.Queue[_Batch] = queue.Queue(1)
            computed: queue.Queue[_Batch] = queue.Queue(1)
            self._threads = [MappingThread(self._compute, self._gathered, computed), MappingThread(self._respond, computed)]
            for thread in self._threads:
                thread.start()
        return Facts()

    def _poll(self) -> PollResult:
        for thread in self._threads:
            if thread.error is not None:
                raise thread.error
        if self._threads and self._gathered.full():
            return PollResult()
        requests = self._server.poll_requests(self._config.most_rows)
        if not requests:
            return PollResult()
        batch = self._gather(requests)
        if self._threads:
            self._gathered.put(batch)
        else:
            self._respond(self._compute(batch))
        return PollResult(sum(r.rows for r in requests), 1)

    def _gather(self, requests: list[Requests]) -> _Batch:
        """Join the requests' rows; a single request is used where it lies."""
        rows = sum(r.rows for r in requests)
        observation, state, answers = self._buffer(rows)
        if len(requests) == 1:
            (only,) = requests
            return _Batch(requests, only.observation, only.state, only.deterministic if only.deterministic.any() else False, answers)
        left = self.clock.enter("copy")
        for target, parts in ((observation, [r.observation for r in requests]), (state, [r.state for r in requests])):
            for name, array in target.items():
                np.concatenate([part[name] for part in parts], out=array[:rows])
        flags = np.concatenate([r.deterministic for r in requests])
        self.clock.enter(left)
        joined = [{name: array[:rows] for name, array in part.items()} for part in (observation, state)]
        return _Batch(requests, joined[0], joined[1], flags if flags.any() else False, answers)

    def _buffer(self, rows: int) -> tuple[Arrays, Arrays, Arrays]:
        """Return buffers of at least `rows` rows. Threaded, four sets are used in turn: one gathered, one queued, one computed, one answered."""
        sets = 4 if self._threads else 1
        if not self._buffers or len(next(iter(self._buffers[0][2].values()))) < rows:
            size = max(rows, 2 * self._answered // max(self._batches_done, 1))
            self._buffers = [tuple(allocate(schema, (size,)) for schema in self._schemas) for _ in range(sets)]  # type: ignore[misc]
        self._buffers.append(self._buffers.pop(0))
        return self._buffers[-1]

    def _compute(self, batch: _Batch) -> _Batch:
        left = self.clock.enter("inference") if not self._threads else ""
        if self._threads:
            self.context.endpoints.bell.ring()  # the queue has room again: the main thread may gather
        self._parameters.load_newest(self._policy)
        try:
            if self._threads:
                batch.finish = self._policy.begin(batch.observation, batch.state, batch.deterministic, batch.answers)
            else:
                self._policy.act(batch.observation, batch.state, batch.deterministic, batch.answers)
        except (KeyError, ValueError) as error:
            raise misfit(self._policy, batch.answers, error) from error
        check_next_state(self._policy, batch.state, batch.answers)
        batch.version = self._policy.version
        if left:
            self.clock.enter(left)
        return batch

    def _respond(self, batch: _Batch) -> None:
        if batch.finish is not None:
            batch.finish()
        self._server.respond(batch.requests, batch.answers, batch.version, self._policy_index)
        self._answered += sum(r.rows for r in batch.requests)
        self._batches_done += 1

    def _stats(self) -> dict[str, float]:
        return {"rows_per_batch": self._answered / max(self._batches_done, 1)}

    def _close(self) -> None:
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join(5.0)
