"""What policies have in common that are trained from a replay memory: the base of their
configurations, and of what these describe, in numpy."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tidemill.api.policy import Policy
from tidemill.core.schema import Array, Arrays, Field
from tidemill.native.library import Kernels
from tidemill.nets.encoders import ObservationEncoder
from tidemill.nets.mlp import Floats
from tidemill.nets.native_setting import NativeSetting
from tidemill.nets.normaliser import ObservationNormaliser, RunningMoments
from tidemill.nets.weights import load_parameters


@dataclass(frozen=True, kw_only=True)
class ReplayNetwork(NativeSetting):
    """The base of configurations of networks that learn from a replay memory."""

    normalise_observations: bool | None = False
    """Whether flattened Boxes are brought to mean 0 and deviation 1, by the running
    moments of the batches that were drawn, and clipped to ±10. None: where there are
    any."""

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
        self._normaliser = ObservationNormaliser(encoder.normalised) if normalises else None
        self._named = {} if self._normaliser is None else self._normaliser.moments.parameters()

    def features(self, observation: Arrays, of: str = "obs") -> Floats:
        """Return raw observations [n], flattened and normalised."""
        found = self.encoder.flat(observation, of)
        if self._normaliser is not None:
            self._normaliser.apply(found)
        return found

    def fold(self, observation: Arrays) -> None:
        """Take raw observations [n] into what normalises them."""
        if self._normaliser is not None:
            self._normaliser.fold(self.encoder.flat(observation))

    def reseed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def parameters(self) -> Arrays:
        """Return the weights, and what normalises observations, as views."""
        return self._named

    def load(self, parameters: Mapping[str, Array], version: int) -> None:
        load_parameters(self._named, parameters)
        if self._normaliser is not None:
            self._normaliser.refresh()
        self.version = version
