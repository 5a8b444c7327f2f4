"""The policy contract: what acts. Configurations import no torch; `build` may.

Shapes: n rows of any seats. Observations come by leaf name (``obs``, ``obs.position``), raw, as they are stored in rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from tidemill.api.spaces import Spaces
from tidemill.core.config import Config
from tidemill.core.schema import Array, Arrays, Field


class Policy(ABC):
    """A policy as actors and policy workers use it."""

    version: int = -1
    """Number of finished updates behind the loaded parameters; -1 before the first `load`."""

    @abstractmethod
    def act(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        """Answer n requests: write every field of the answer schema (``action...``, ``log_prob`` float32, ``value`` float32 in reward units, and
        for recurrent policies the next state) into ``out[name][:n]``. `deterministic` (bool, or bool [n]) asks for the mode of the distribution.
        Must not keep references to its arguments."""

    @abstractmethod
    def parameters(self) -> Arrays:
        """Return all that a version consists of, weights and normalisers, as arrays that view the policy's own memory."""

    @abstractmethod
    def load(self, parameters: Mapping[str, Array], version: int) -> None:
        """Copy `parameters` in and set `version`. Raises `SchemaError` when a name or shape differs."""


class PolicyConfig(Config):
    """Family of policies."""

    def answer(self, spaces: Spaces) -> dict[str, Field]:
        """Return the fields of an answer: the action's leaves, ``log_prob``, ``value`` and whatever else belongs into rows. No torch."""
        raise TypeError(f"{type(self).__name__} has no answer()")

    def state(self, spaces: Spaces) -> dict[str, Field]:
        """Return the recurrent state's fields; {} when there is none. Zeros are the default state."""
        return {}

    def build(self, spaces: Spaces, seed: int) -> Policy:
        """Return the policy with weights drawn from `seed`, and its own random stream for sampling."""
        raise TypeError(f"{type(self).__name__} has no build()")
