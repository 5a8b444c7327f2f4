"""The policy that `RecurrentActorCritic` describes, for MLPs on a CPU: all in numpy.
Images and GPUs: `torch_recurrent`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.spaces import Spaces
from tidemill.core.errors import SchemaError
from tidemill.core.schema import Arrays
from tidemill.nets.actor_critic_policy import ActorCriticPolicy, layers_of
from tidemill.nets.cells import Memory

if TYPE_CHECKING:
    from tidemill.nets.recurrent import RecurrentActorCritic

Floats = NDArray[np.float32]


class RecurrentPolicy(ActorCriticPolicy):
    """`ActorCriticPolicy` with a cell between the hidden layers and the heads."""

    recurrent = True
    _memory: Memory  # always there

    def __init__(self, config: "RecurrentActorCritic", spaces: Spaces, seed: int) -> None:
        super().__init__(config, spaces, seed)
        self._cell_of_acting, self._cell_of_training = (self._memory.cell(self.weights) for _ in range(2))

    def _remember(self, last: Floats, state: Arrays, out: Arrays) -> Floats:
        cell, n = self._cell_of_acting, last.shape[1]
        given = cell.forward(
            last, {part: state[f"state.{part}"] for part in cell.parts}, np.zeros((1, n), np.bool_)
        )
        for part, array in cell.state().items():
            out[f"state.{part}"][:n] = array
        return given

    def _ascend(self, inputs: Mapping[str, Any]) -> Floats:
        """Run through whole stretches; the heads see the rows that are asked for."""
        check_inputs(inputs)
        cell = self._cell_of_training
        given = cell.forward(
            self._towers_of_training.forward(inputs["features"]),
            {part: inputs[f"state.{part}"] for part in cell.parts},
            inputs["on_reset"],
        )
        self._rows, self._given = inputs["rows"], given.shape
        # mode: with "raise" numpy would write to a copy of `out` first
        return given.take(
            self._rows,
            axis=1,
            out=self._scratch("seen", (self.towers, len(self._rows), given.shape[2])),
            mode="clip",
        )

    def _descend(self, of_last: Floats, gradient: dict[str, Floats]) -> None:
        of_given = self._scratch("of given", self._given)
        of_given.fill(0)
        of_given[:, self._rows] = of_last
        below = self._cell_of_training.backward(of_given, gradient, bool(self.layers))
        if below is not None:
            self._towers_of_training.backward(below, layers_of(gradient))


def check_inputs(inputs: Mapping[str, Any]) -> None:
    """Raise `SchemaError` for the inputs of rows without their order in time."""
    if "on_reset" not in inputs:
        raise SchemaError(
            "a policy that remembers is trained on stretches of rows: besides what prepare() gives, its "
            "inputs hold on_reset, state.* and rows (see "
            "tidemill.nets.trainable), as PPO hands them in; an algorithm that takes rows one by one trains "
            "ActorCritic"
        )
