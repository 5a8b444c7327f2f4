"""The contract of what a buffer worker does to samples on their way from actors to trainers. The loop that calls it::

processor = config.build(policy, seed)
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


class Processor(ABC):
    """Changes samples in place."""

    @abstractmethod
    def process(self, sample: Sample) -> None:
        """Change fields of `sample` (see `Sample`; its arrays are the slot that is going to be sent). Shapes stay."""


class ProcessorConfig(Config):
    """Family of processors."""

    needs_policy: ClassVar[bool] = False
    """Whether it is built with a policy, whose newest parameters are loaded before each sample."""

    def build(self, policy: Policy | None, seed: int) -> Processor:
        """Return the processor. `policy` is there when it `needs_policy`; draws come from `seed`."""
        raise TypeError(f"{type(self).__name__} has no build()")
