"""`RecurrentActorCritic` in torch: with images, and whatever is to compute on a GPU. The
same weights in the same order as in numpy; the way back through time is autograd's."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from tidemill.api.spaces import Spaces
from tidemill.nets.cells import Memory
from tidemill.nets.masks import FORBIDDEN
from tidemill.nets.recurrent_policy import check_inputs
from tidemill.nets.torch_actor_critic import TorchActorCriticPolicy
from tidemill.nets.trainable import Evaluation

if TYPE_CHECKING:
    from tidemill.nets.recurrent import RecurrentActorCritic

State = list[Tensor]
"""The parts of a state, each [G, m, w]."""


class TorchRecurrentPolicy(TorchActorCriticPolicy):
    """`TorchActorCriticPolicy` with a cell between the hidden layers and the heads.
    Letters as in `cells`."""

    recurrent = True
    _memory: Memory  # always there

    def __init__(
        self, config: "RecurrentActorCritic", spaces: Spaces, seed: int, device: str = "cpu"
    ) -> None:
        self._memory = config.memory
        self._step = {"lstm": self._lstm, "gru": self._gru}[config.cell]
        self._names = [f"state.{part}" for part in self._memory.cell.parts]
        self._after: State = []
        super().__init__(config, spaces, seed, device)

    def heads(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Of the rows asked for, when training; acting, of each row, which is a stretch
        by itself."""
        weights, below = self._tensors, torch.stack(self._towers(inputs))
        state = [inputs[name].transpose(0, 1) for name in self._names]
        share = torch.baddbmm(weights["cell.bias"], below, weights["cell.weight"])
        forbidden = inputs.get("forbidden")
        if "on_reset" in inputs:
            given = self._unroll(share, state, inputs["on_reset"]).index_select(1, inputs["rows"])
            forbidden = None if forbidden is None else forbidden.index_select(0, inputs["rows"])
        else:
            self._after = self._step(share, state)
            given = self._after[0]
        head = functional.linear(given[0], weights["actor.weight"], weights["actor.bias"].squeeze(1))
        if forbidden is not None:
            head = head.masked_fill(forbidden, FORBIDDEN)
        return head, torch.addmv(weights["critic.bias"], given[-1], weights["critic.weight"])

    def next_state(self) -> dict[str, Tensor]:
        return {name: part.transpose(0, 1) for name, part in zip(self._names, self._after, strict=True)}

    def evaluate(self, inputs: Mapping[str, Any], action: Mapping[str, Any]) -> Evaluation:
        check_inputs(inputs)
        return super().evaluate(dict(inputs), dict(action))

    def _unroll(self, share: Tensor, state: State, on_reset: Tensor) -> Tensor:
        """Return what the cell gives for every row, [G, L·m, w], from the inputs' share
        of the gates [G, L·m, gates·w]."""
        given, rows = [], share.view(len(share), *on_reset.shape, -1)
        for row, begins in zip(rows.unbind(1), on_reset.unsqueeze(-1).unbind(0), strict=True):
            state = self._step(row, [part.masked_fill(begins, 0) for part in state])
            given.append(state[0])
        return torch.stack(given, 1).flatten(1, 2)

    def _lstm(self, share: Tensor, state: State) -> State:
        """See `cells.LSTM`."""
        hidden, cell = state
        output, into, forget, new = torch.baddbmm(share, hidden, self._tensors["cell.recurrent"]).chunk(4, -1)
        cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
        return [output.sigmoid() * cell.tanh(), cell]

    def _gru(self, share: Tensor, state: State) -> State:
        """See `cells.GRU`."""
        (hidden,) = state
        new, reset, keep = share.chunk(3, -1)
        of_reset, of_keep, of_new = torch.bmm(hidden, self._tensors["cell.recurrent"]).chunk(3, -1)
        new = (new + (reset + of_reset).sigmoid() * (of_new + self._tensors["cell.candidate"])).tanh()
        return [new + (keep + of_keep).sigmoid() * (hidden - new)]
