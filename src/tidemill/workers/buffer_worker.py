"""The buffer worker: between actors and trainers, it changes samples on their way.

channel of an actor → copy into a slot of the next stream → processors, in place → sent

It takes a sample only when there is a slot for it, so that whoever fills its stream waits
as it waits itself: nothing is dropped here. What it has not sent on as it dies its next
life takes again, but for a sample that it may just have sent, which is void. How old a
row is counts from the version that acted on it, whatever was made of it since.

Buffer workers are configured once those who fill what they take from are READY, level
by level (`Experiment.forwarders`, which refuses circles), so that size, slots and
memory are known at the start. A trainer whose `batch_size` is None takes what actors
fill at a time, however many hands it goes through (`Experiment.samples_at_once`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tidemill.api.algorithm import Sample
from tidemill.api.control_messages import Facts, Voided
from tidemill.api.edges import Port
from tidemill.api.policy import Policy, number_of
from tidemill.api.processing import Processor, ProcessorConfig
from tidemill.api.worker import Context, WorkerConfig
from tidemill.core.config import check_several
from tidemill.core.errors import ConfigError, SchemaError, did_you_mean
from tidemill.core.memory import Need
from tidemill.core.schema import Arrays, Schema, layout
from tidemill.core.seeding import derive_seed
from tidemill.nets.weights import placeholder_weights
from tidemill.streams.parameters import ParameterSubscriber
from tidemill.streams.samples import ChannelSampleConsumer, sample_producer
from tidemill.workers.base import PollResult, Worker
from tidemill.workers.cut_files import has_cut, own_part
from tidemill.workers.row_schema import misfit_of_rows
from tidemill.workers.sample_writers.base import MOST_SLOTS


@dataclass(frozen=True, kw_only=True)
class Buffers(WorkerConfig):
    """Buffer workers take the samples of one stream, process them, and send them into
    another, which has as many slots as the one they take from. Several share the samples;
    each sample is processed once. Where buffer workers are chained, samples go from one
    to the next.

    samples: name of the stream that actors (or other buffer workers) fill
    into: name of the stream that trainers (or other buffer workers) consume
    process: what is done to each sample, in order
    policy: name of the policy whose newest parameters those processors play with that
        need a policy
    """

    order: ClassVar[int] = 2

    samples: str = "gathered"
    into: str = "samples"
    process: tuple[ProcessorConfig, ...]
    policy: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.into == self.samples:
            raise ConfigError(
                f'samples and into are both "{self.into}"; give the stream that the buffer workers fill '
                "another name"
            )
        check_several("process", self.process)
        needy = [type(config).__name__ for config in self.process if config.needs_policy]
        if needy and self.policy is None:
            raise ConfigError(f"{needy[0]} needs a policy; set the policy of the buffer workers")
        if self.policy is not None and not needy:
            raise ConfigError(f'policy = "{self.policy}", but nothing in process needs one; leave it out')

    def ports(self) -> tuple[Port, ...]:
        ports = Port(self.samples, "consume"), Port(self.into, "produce")
        return ports if self.policy is None else (*ports, Port(self.policy, "subscribe"))

    def forwards(self) -> dict[str, str]:
        return {self.into: self.samples}

    def build(self, context: Context) -> "BufferWorker":
        return BufferWorker(context, self)


class BufferWorker(Worker):
    """The buffer worker takes samples, processes and sends them."""

    def __init__(self, context: Context, config: Buffers) -> None:
        super().__init__(context)
        self._config = config
        self._sent = 0
        self._policy: Policy | None = None
        self._parameters: ParameterSubscriber | None = None

    def _configure(self, facts: Facts) -> Facts:
        config, context = self._config, self.context
        known, seed = facts.samples[config.samples], derive_seed(context.experiment.seed, context.name)
        self._until_end = known.cut
        channels = [
            context.endpoints.consumer(edge.name) for edge in context.edges(f"samples/{config.samples}/")
        ]
        self._consumer = ChannelSampleConsumer(channels, known.burn_in, known.bootstrap, known.cut)
        offered = self._consumer.offered()
        if offered is None:
            raise SchemaError(
                f'{context.name} was configured before those who fill "{config.samples}" had made their slots'
            )
        if voided := self._consumer.void():
            self.report(Voided(voided))
        schema, leads = offered[0].schema, sorted({(block.lead[0], block.lead[1]) for block in offered})
        if len(leads) > 1 or any(block.schema != schema for block in offered):
            sizes = " and ".join(f"{rows} rows x {seats} seats" for rows, seats in leads)
            raise ConfigError(
                f'{context.name} takes samples of different kinds from stream "{config.samples}" ({sizes}); '
                "give each kind a stream and buffer workers of its own"
            )
        if config.policy is not None:
            self._policy = self._build_policy(config.policy, facts, schema, seed)
        self._processors: Sequence[Processor] = [
            each.build(
                schema, self._policy if each.needs_policy else None, derive_seed(seed, "processor", number)
            )
            for number, each in enumerate(config.process)
        ]
        made = context.edges(f"samples/{config.into}/{context.name}/")
        slots = min(sum(block.slots for block in offered), MOST_SLOTS)
        self._producer = sample_producer(context, (config.into,))
        self._producer.offer(schema, *leads[0], slots)
        nbytes = layout(schema, leads[0])[1]
        self._go_on_from_cut()
        sums = f"{len(made)} consumers x {slots} slots x {nbytes:,} bytes"
        return Facts(
            samples={config.into: known},
            memory=(Need("buffer workers' samples", len(made) * slots * nbytes, sums, shared=True),),
        )

    # ---- a cut -------------------------------------------------------------------------

    def _go_on_from_cut(self) -> None:
        """Be where the worker was when the run was cut, if it was: with the samples that
        it has sent and nobody has given back. Raises `ConfigError` for a processor that
        could not tell its state, in a run that resumes exactly."""
        if not self.context.experiment.exact_resume:
            return
        if mute := [type(each).__name__ for each in self._processors if each.state() is None]:
            raise ConfigError(
                f"exact_resume = True cannot be had here: {mute[0]}, which {self.context.name} processes "
                "samples with, has no state() (see tidemill.api.processing); give it one that returns what "
                "it draws from and remembers ({} for nothing), and load_state(state), or leave out "
                "exact_resume"
            )
        if has_cut(self.context):
            with own_part(self.context) as part:
                self._consumer.load_state(part["taken"])
                self._producer.load_state(part["sent"])
                for number, processor in enumerate(self._processors):
                    processor.load_state(part["processors"][str(number)])

    def _save_part(self, checkpoints: Mapping[str, int]) -> None:
        part = {
            "taken": self._consumer.state(),
            "sent": self._producer.state(cut=self._until_end),
            "processors": {str(number): each.state() for number, each in enumerate(self._processors)},
        }
        self._parts.write(part, self.cut, checkpoints)

    # ---- what it does ------------------------------------------------------------------

    def _build_policy(self, name: str, facts: Facts, schema: Schema, seed: int) -> Policy:
        context = self.context
        if name not in facts.spaces:
            raise ConfigError(
                f'{context.name} processes with policy "{name}", but no agent spec plays it, so that nobody '
                f"knows its spaces; {did_you_mean(name, facts.spaces)}"
            )
        spaces, config = facts.spaces[name], context.experiment.policies[name]
        if misfit := misfit_of_rows(schema, config, spaces):
            raise ConfigError(
                f'{context.name} is to process the rows of stream "{self._config.samples}" with policy '
                f'"{name}", which goes with other rows: {misfit}; name the policy that plays those agents'
            )
        (edge,) = context.edges(f"parameters/{name}/")
        self._parameters = ParameterSubscriber(context.endpoints.reader(edge.name))
        with placeholder_weights():
            return config.build(spaces, seed)

    def _poll(self) -> PollResult:
        if (
            self._policy is not None
            and self._parameters is not None
            and not self._parameters.refresh(self._policy)
        ):
            return PollResult()  # nothing was published yet
        slot = self._producer.reserve()
        taken = None if slot is None else self._consumer.consume()
        if slot is None or taken is None:
            return PollResult()
        left = self.clock.enter("copy")
        rows = len(taken["done"])
        # an episode ends before its slot does
        sample = Sample({name: array[:rows] for name, array in slot.items()})
        for name, array in taken.items():
            sample[name][...] = array
        sample.burn_in, sample.bootstrap = taken.burn_in, taken.bootstrap
        for processor, config in zip(self._processors, self._config.process, strict=True):
            self.clock.enter("inference" if config.needs_policy else "python")
            self._process(processor, sample)
        self.clock.enter(left)
        # who dies between these may have sent it: the next life voids it
        self._consumer.pass_on()
        self._producer.commit()
        self._consumer.release()
        self._sent += 1
        return PollResult(sample["done"].size, 1)

    def _process(self, processor: Processor, sample: Sample) -> None:
        slot: Arrays = dict(sample)
        processor.process(sample)
        if sample.keys() != slot.keys():
            changed = ", ".join(sorted(sample.keys() ^ slot.keys()))
            raise SchemaError(
                f"{type(processor).__name__} added or removed fields of a sample ({changed}); it can change "
                "those that there are"
            )
        for name, array in slot.items():
            if sample[name] is not array:  # put in its place instead of written into it
                try:
                    array[...] = sample[name]
                except ValueError as error:
                    raise SchemaError(
                        f"{type(processor).__name__} changed the shape of {name}: {error}"
                    ) from error
                sample[name] = array

    def _stats(self) -> dict[str, float]:
        sent = {"samples": float(self._sent)}
        return sent if self._policy is None else {**sent, "version": float(number_of(self._policy.version))}
