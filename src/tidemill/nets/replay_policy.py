"""What policies have in common that are trained from a replay memory: the base of their
configurations, and of what these describe, in numpy."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tidemill.api.algorithm import Sample
from tidemill.api.policy import Policy
from tidemill.core.cut import Part, generator_state, set_generator_state
from tidemill.core.schema import Array, Arrays, Field
from tidemill.native.library import Kernels
from tidemill.nets.encoders import BytesSetting, ObservationEncoder
from tidemill.nets.mlp import Floats
from tidemill.nets.native_setting import NUMPY, NativeSetting
from tidemill.nets.normaliser import ObservationNormaliser, RunningMoments
from tidemill.nets.weights import load_parameters


@dataclass(frozen=True, kw_only=True)
class ReplayNetwork(NativeSetting, BytesSetting):
    """The base of configurations of networks that learn from a replay memory."""

    normalise_observations: bool | None = False
    """Whether flattened Boxes are brought to mean 0 and deviation 1, by the moments of
    the rows that have entered the replay memory, each counted once, and clipped to ±10.
    None: where there are any."""

    def normalises(self, encoder: ObservationEncoder) -> bool:
        """Return whether what `encoder` flattens is normalised. Raises `ConfigError`
        where it is to be, and there is nothing to."""
        if self.normalise_observations and not encoder.boxes:
            self.refuse_idle("normalise_observations", "on an observation without flattened Boxes")
        return self.normalise_observations is not False and encoder.boxes

    def moments(self, encoder: ObservationEncoder) -> dict[str, Field]:
        """Return the fields of what normalises, ``observation.*``; {} where nothing
        does."""
        return RunningMoments.fields("observation", (encoder.width,)) if self.normalises(encoder) else {}


class ReplayPolicy(Policy):
    """The base of policies that a `ReplayNetwork` describes."""

    _named: Arrays

    def __init__(
        self, kernels: Kernels | None, encoder: ObservationEncoder, normalises: bool, rng: np.random.Generator
    ) -> None:
        self.encoder, self.kernels, self._rng = encoder, kernels, rng
        self.computed_by = NUMPY if kernels is None else kernels.instruction_set
        self._normaliser = ObservationNormaliser(encoder.normalised) if normalises else None
        self._named = {} if self._normaliser is None else self._normaliser.moments.parameters()
        self.arrived = RunningMoments("observation", (encoder.width,)).moments(None)
        """Sums over the rows that entered the replay memory since the last `fold`, about
        the present mean: see `RunningMoments.moments`."""

    def features(self, observation: Arrays, of: str = "obs", out: Floats | None = None) -> Floats:
        """Return raw observations [n], flattened and normalised: see
        `ObservationEncoder.flat`."""
        found = self.encoder.flat(observation, of, out)
        if self._normaliser is not None:
            self._normaliser.apply(found)
        return found

    @property
    def normalised(self) -> bool:
        """Whether observations are normalised."""
        return self._normaliser is not None

    def take_in(self, sample: Sample) -> None:
        """Collect the observations of arrivals (`ARRIVAL_FIELDS`). They count from the
        next `fold` on, so that a version of the policy has one set of moments."""
        here = sample["on_reset"] | (sample["version"] >= 0)
        if self._normaliser is not None and here.any():
            seen = self.encoder.flat({name: sample[name][here] for name in self.encoder.names})
            self.arrived += self._normaliser.moments.moments(seen)

    def fold(self) -> None:
        """Have what was collected count from now on; nothing of it where that is not
        finite, which updates find in the rows themselves."""
        if self._normaliser is not None and self.arrived[0]:
            if np.isfinite(self.arrived).all():
                self._normaliser.moments.fold(self.arrived)
            self._normaliser.refresh()
            self.arrived[:] = 0

    def reseed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def random_state(self) -> Part:
        return generator_state(self._rng)

    def set_random_state(self, state: Part) -> None:
        set_generator_state(self._rng, state)

    def parameters(self) -> Arrays:
        """Return the weights, and what normalises observations, as views."""
        return self._named

    def load(self, parameters: Mapping[str, Array], version: int) -> None:
        load_parameters(self._named, parameters)
        if self._normaliser is not None:
            self._normaliser.refresh()
        self.arrived[:] = 0  # about another mean
        self.version = version
