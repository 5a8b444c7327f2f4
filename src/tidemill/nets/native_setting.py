"""The setting of policies that says who computes their plain layers: numpy, or the native
core."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from tidemill.api.policy import PolicyConfig
from tidemill.api.spaces import Spaces
from tidemill.native.library import Kernels, asked_for, choices, unavailable

NUMPY = "numpy"
"""What `Policy.computed_by` is where numpy computes."""


@dataclass(frozen=True, kw_only=True)
class NativeSetting(PolicyConfig):
    """The base of policies whose plain layers, and those of what trains them, the native
    core can compute."""

    native: Literal["off", "auto", "baseline", "avx2", "avx512"] = "auto"
    """Instruction set in which the native core computes an MLP on a CPU (docs/native.md);
    ``off``: numpy computes it. With ``auto`` the fastest is measured before processes
    start, and written into the run's configuration; without a measurement it is ``off``.
    A run whose instruction set is not there is refused; playing what it trained is not.
    The environment variable ``TIDEMILL_NATIVE`` overrides this setting."""

    @property
    def beyond_core(self) -> str | None:
        """The setting, as it would be typed, that the core does not compute; None: it
        computes all of them."""
        return None

    @property
    def beside_core(self) -> str | None:
        """The setting, as it would be typed, of what numpy computes beside the core's
        layers; None: there is no such."""
        return None

    @property
    def in_core(self) -> bool:
        """Whether the core has networks of this kind at all."""
        return self.beyond_core is None

    @property
    def undecided(self) -> bool:
        return self.native == "auto" and self.in_core and len(choices()) > 1

    def alternatives(self, spaces: Spaces) -> Sequence[Self]:
        if self.native != "auto" or not self.in_core:
            return (self,)
        return [self.replace(native=name) for name in choices()]

    def to_play(self) -> Self:
        return self if unavailable(self.native) is None else self.replace(native="off")

    def kernels(self) -> Kernels | None:
        """Return the native core's kernels where they are to compute its layers. Raises
        `ConfigError` where they cannot be had."""
        return asked_for(self.native) if self.in_core else None
