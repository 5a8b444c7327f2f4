"""The contract of what a buffer worker does to samples on their way from actors to
trainers. The loop that calls it::

    processor = config.build(schema, policy, seed)
    while ...:
        sample = copy of the next one
        processor.process(sample)
        send(sample)
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from tidemill.api.algorithm import Sample
from tidemill.api.policy import Policy
from tidemill.core.config import Config
from tidemill.core.cut import Part
from tidemill.core.schema import Schema


class Processor(ABC):
    """A processor changes samples on their way from actors to trainers."""

    @abstractmethod
    def process(self, sample: Sample) -> None:
        """Change fields of `sample` (see `Sample`: [T, N, ...], burn-in first), best in
        place: its arrays are the slot that is going to be sent. Fields, shapes and dtypes
        stay. Versions, too: how old a row is counts from its actor's."""

    def state(self) -> Part | None:
        """Return what the samples to come depend on besides themselves and the policy's
        newest parameters: where its random stream is (`core.cut.generator_state`), what
        it remembers; {} for nothing. None where it cannot tell: a run that resumes
        exactly is refused then."""
        return None

    def load_state(self, state: Part) -> None:
        """Be as the processor was whose state this is. Called before the first sample."""
        raise NotImplementedError(f"{type(self).__name__} has a state(), but no load_state()")


class ProcessorConfig(Config):
    """The configuration of a processor: a subclass is what `Buffers.process` takes."""

    needs_policy: ClassVar[bool] = False
    """Whether it is built with a policy, whose newest parameters are loaded before each
    sample."""

    def build(self, schema: Schema, policy: Policy | None, seed: int) -> Processor:
        """Return the processor of samples whose rows have the fields of `schema`.
        `policy` is there when it `needs_policy`; draws come from `seed`. Raises
        `ConfigError` for rows that it can do nothing with."""
        raise TypeError(f"{type(self).__name__} has no build()")
