"""The configuration of the built-in policy that remembers: an actor and a critic with an
LSTM or a GRU. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from tidemill.api.spaces import Spaces
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Field
from tidemill.nets.actor_critic import ActorCritic
from tidemill.nets.cells import CELLS, Memory
from tidemill.nets.trainable import TrainablePolicy


@dataclass(frozen=True, kw_only=True)
class RecurrentActorCritic(ActorCritic):
    """`ActorCritic` with a cell between the hidden layers and the heads: what it saw
    earlier in an episode bears on what it does. Actor and critic have cells of their own
    unless they share their layers.

    Rows hold its state before acting, ``state.hidden`` (and ``state.cell`` of an LSTM),
    float32 [1 or 2, width]. PPO trains it on stretches of rows (`PPO.chunk_steps`).
    """

    hidden: tuple[int, ...] = (64,)
    """Widths of the hidden layers before the cell."""
    cell: Literal["lstm", "gru"] = "gru"
    """``lstm``: Hochreiter & Schmidhuber 1997, with the forget gate of Gers et al. 2000;
    ``gru``: Cho et al. 2014, smaller and often as good."""
    width: int = 64
    """Units of the cell."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cell not in CELLS:
            raise ConfigError(f'cell = "{self.cell}" is not known; take one of {", ".join(CELLS)}')
        if self.width < 1:
            raise ConfigError(
                f"width = {self.width}: the cell needs at least 1 unit; 64 is usual, and ActorCritic is the "
                "policy without a cell"
            )

    @property
    def memory(self) -> Memory:
        return Memory(CELLS[self.cell], self.width)

    def state(self, spaces: Spaces) -> dict[str, Field]:
        """Return ``state.hidden``, and ``state.cell`` of an LSTM: what each tower's cell
        keeps."""
        towers = self.towers(self.observation_encoder(spaces))
        return {f"state.{part}": Field((towers, self.width), "float32") for part in CELLS[self.cell].parts}

    def build_on(self, device: str, spaces: Spaces, seed: int) -> TrainablePolicy:
        """Return the policy; its first weights are the same on every device. An MLP on a
        CPU is numpy's, everything else torch's."""
        if device == "cpu" and not self.observation_encoder(spaces).images:
            from tidemill.nets.recurrent_policy import RecurrentPolicy

            return RecurrentPolicy(self, spaces, seed)
        from tidemill.nets.torch_recurrent import TorchRecurrentPolicy

        return TorchRecurrentPolicy(self, spaces, seed, device)
