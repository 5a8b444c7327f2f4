"""The buffer worker: between actors and trainers, it changes samples on their way.

What it cannot send on waits, and so do those who send to it: nothing is lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tidemill.api.algorithm import Sample
from tidemill.api.control import Facts
from tidemill.api.edges import Port
from tidemill.api.experiment import Context, WorkerConfig
from tidemill.api.processing import Processor, ProcessorConfig
from tidemill.core.errors import ConfigError, SchemaError
from tidemill.core.seeding import derive_seed
from tidemill.streams.parameters import ParameterSubscriber
from tidemill.streams.samples import ChannelSampleConsumer, sample_producer
from tidemill.workers.base import PollResult, Worker


@dataclass(frozen=True, kw_only=True)
class Buffers(WorkerConfig):
    """Buffer workers: they take the samples of one stream, process them, and send them into another.

    samples   the stream that actors (or other buffer workers) fill
    into      the stream that trainers (or other buffer workers) consume
    process   what is done to each sample, in order
    policy    whose newest parameters those processors play with that need a policy
    slots     samples that may lie in the stream that it fills
    """

    order: ClassVar[int] = 2

    samples: str = "gathered"
    into: str = "samples"
    process: tuple[ProcessorConfig, ...]
    policy: str | None = None
    slots: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slots < 1:
            raise ConfigError(f"slots = {self.slots} must be at least 1")
        for config in self.process:
            if config.needs_policy and self.policy is None:
                raise ConfigError(f"{type(config).__name__} needs a policy; set the policy of the buffer worker")

    def ports(self) -> tuple[Port, ...]:
        ports = Port(self.samples, "consume"), Port(self.into, "produce")
        return ports if self.policy is None else (*ports, Port(self.policy, "subscribe"))

    def forwards(self) -> dict[str, str]:
        return {self.into: self.samples}

    def build(self, context: Context) -> "BufferWorker":
        return BufferWorker(context, self)


class BufferWorker(Worker):
    """See the module's text."""

    def __init__(self, context: Context, config: Buffers) -> None:
        super().__init__(context)
        self._config = config
        self._held: Sample | None = None  # taken, and not yet sent

    def _configure(self, facts: Facts) -> Facts:
        config, context = self._config, self.context
        blocks = facts.samples[config.samples]
        self._channels = [context.endpoints.consumer(edge.name) for edge in context.edges(f"samples/{config.samples}/")]
        self._consumer = ChannelSampleConsumer(self._channels, blocks.burn_in, blocks.bootstrap)
        self._producer = sample_producer(context, (config.into,))
        self._offered = False
        seed = derive_seed(context.experiment.seed, context.name)
        self._policy, self._parameters = None, None
        if config.policy is not None:
            self._policy = context.experiment.policies[config.policy].build(facts.spaces[config.policy], seed)
            (edge,) = context.edges(f"parameters/{config.policy}/")
            self._parameters = ParameterSubscriber(context.endpoints.reader(edge.name))
        self._processors: Sequence[Processor] = [
            processor.build(self._policy if processor.needs_policy else None, derive_seed(seed, "processor", number))
            for number, processor in enumerate(config.process)
        ]
        return Facts()

    def _offer(self) -> bool:
        """Make slots like those that come in. False while they are not known."""
        if not self._offered and all(channel.attach() for channel in self._channels):
            leads = {channel.lead for channel in self._channels}
            if len(leads) > 1:
                raise SchemaError(f'samples of stream "{self._config.samples}" are of different sizes {sorted(leads)}; give each size a stream')
            (rows, seats), self._offered = leads.pop(), True
            self._producer.offer(self._channels[0].schema, rows, seats, self._config.slots)
        return self._offered

    def _poll(self) -> PollResult:
        if not self._offer():
            return PollResult()
        if self._held is None:
            self._held = self._consumer.consume()
        if self._held is None or (slot := self._producer.reserve()) is None:
            return PollResult()
        left = self.clock.enter("copy")
        for name, array in self._held.items():
            slot[name][...] = array
        self.clock.enter("inference")
        if self._policy is not None and self._parameters is not None:
            self._parameters.refresh(self._policy)
        sample = Sample(slot)
        sample.burn_in, sample.bootstrap = self._held.burn_in, self._held.bootstrap
        for processor in self._processors:
            processor.process(sample)
        self.clock.enter(left)
        self._producer.commit()
        self._consumer.release()
        self._held = None
        return PollResult(sample["done"].size, 1)
