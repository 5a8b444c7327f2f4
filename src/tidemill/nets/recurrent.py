"""The built-in recurrent policy: `ActorCritic` with an LSTM or a GRU, which
`cells` (in numpy) and `torch_actor_critic` compute. Imports no torch.

The agent keeps the states: it zeroes them where an episode begins, and stores in each row
the one before acting. A chunk of rows is trained from its first row's stored state, after
`burn_in` rows without loss, and reset where the rollout was: so unchanged weights give
the stored log-probabilities again.
"""

from dataclasses import dataclass
from typing import Literal

from tidemill.api.spaces import Spaces
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Field
from tidemill.nets.actor_critic import ActorCritic
from tidemill.nets.cells import CELLS, Memory


@dataclass(frozen=True, kw_only=True)
class RecurrentActorCritic(ActorCritic):
    """It is an `ActorCritic` with a recurrent cell between the hidden layers and heads:
    what it saw earlier in an episode bears on what it does. Actor and critic have cells
    of their own unless they share their layers.

    Rows hold its state before acting, ``state.hidden`` (and ``state.cell`` of an LSTM),
    float32 [2, width] for the actor's and the critic's cell, [1, width] where they share
    one. `PPO` and `Impala` train it on chunks of rows (`chunk_steps`).
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
        form = self.shape(spaces).towers, self.width
        return {f"state.{part}": Field(form, "float32") for part in CELLS[self.cell].parts}
