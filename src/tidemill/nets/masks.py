"""Action masks: a part of an observation says which actions are allowed. Importing this
file imports no torch.

A mask works on the network's head, before any distribution sees it: what is not allowed
gets `FORBIDDEN` for its unnormalised log-probability. Its probability is then exactly 0,
it adds nothing to the entropy, and its gradient is exactly 0.

A row that forbids everything is answered all the same, since the final row of a cut
episode may be like that and is asked for its value; a learner refuses it among the rows
that were acted on.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.api.spaces import Space, Spaces, choices_of, field_of, flat_width, leaves
from tidemill.core.errors import ConfigError, EnvironmentFault, did_you_mean
from tidemill.core.schema import Arrays

if TYPE_CHECKING:
    from torch import Tensor

FORBIDDEN = -1e30
"""Its exponential is 0, and it is finite: 0 · log 0 is 0 then, not NaN."""
USUAL = "action_mask"
DTYPES = ("bool", "int8", "uint8")

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


class MaskSpan(NamedTuple):
    """Where the mask of one discrete leaf of the action stands.

    action: the leaf of the action
    branches: number of choices in each of its branches
    name: the leaf of the observation that tells what is allowed
    elements: which of that leaf's elements do
    outputs: which outputs of the network are the action's logits
    """

    action: str
    branches: tuple[int, ...]
    name: str
    elements: slice
    outputs: slice


class ActionMask:
    """The leaves `names` of an observation, with an element for each action, those of all
    branches one after the other; what is 0 is forbidden.

    Where all actions of a row (or of a branch of it) are forbidden, all get the same
    probability: only final rows may be like that, which are asked for their value, and
    whose action nobody takes. `check` finds others.
    """

    def __init__(self, spans: Sequence[MaskSpan], outputs: int) -> None:
        """Take the masks of some of the action's leaves; a network has so many `outputs`
        for all of them."""
        self.names = list(dict.fromkeys(span.name for span in spans))
        self._spans, self._outputs = spans, outputs
        # one leaf of the observation is about all outputs, as they lie
        self._whole = len(self.names) == 1 and outputs == sum(sum(span.branches) for span in spans)

    def forbidden(self, observation: Arrays) -> Bools:
        """Return [n, outputs]: what n raw observations forbid."""
        if self._whole:
            return np.logical_not(observation[self.names[0]])
        found = np.zeros((len(observation[self.names[0]]), self._outputs), np.bool_)
        for span in self._spans:
            np.logical_not(observation[span.name][:, span.elements], out=found[:, span.outputs])
        return found

    def taken_out(self, head: "Tensor", observation: "Mapping[str, Tensor]") -> "Tensor":
        """Return `head` [n, outputs] without what n raw observations forbid, in torch."""
        from torch import cat

        pieces, done = [], 0
        for span in self._spans:
            allowed = observation[span.name][:, span.elements]
            pieces.append(head[:, done : span.outputs.start])
            pieces.append(head[:, span.outputs].masked_fill(allowed == 0, FORBIDDEN))
            done = span.outputs.stop
        return cat([*pieces, head[:, done:]], -1)

    def check(self, observation: Arrays) -> None:
        """Raise `EnvironmentFault` when a row of `observation`, all of which were acted
        on, forbids everything."""
        for span in self._spans:
            forbidden = np.logical_not(observation[span.name][:, span.elements])
            nothing = np.logical_and.reduceat(forbidden, np.cumsum([0, *span.branches[:-1]]), axis=1)
            if not nothing.any():
                continue
            row, branch = np.argwhere(nothing)[0].tolist()
            where = f" of {span.action}" if len(self._spans) > 1 or self._outputs > forbidden.shape[1] else ""
            where += f" in branch {branch}" if len(span.branches) > 1 else ""
            count = int(np.count_nonzero(nothing.any(1)))
            raise EnvironmentFault(
                f"{span.name} allows no action{where} in {count} of {len(nothing)} rows on which an agent "
                f"had to act (first: row {row} of the batch); only final observations may be like that. Let "
                "the environment allow at least one action (one that does nothing, if need be), or leave the "
                "agent out of the step"
            )


def forbid(head: Floats, forbidden: Bools) -> None:
    """Take what is forbidden [n, actions] out of `head` [actions, n]."""
    np.copyto(head, FORBIDDEN, where=forbidden.T)


def lacks(part: str, leaves: Iterable[str]) -> str:
    """Return the end of a message: an observation of these leaves has no such part."""
    return (
        "the observation has no such part; "
        f"{did_you_mean(part, (leaf.removeprefix('obs.') for leaf in leaves if leaf != 'obs'))}"
    )


def mask_of(spaces: Spaces, part: str | None) -> ActionMask | None:
    """Return the mask that lies in `part` of the observation: one array for all discrete
    leaves of the action, or a Dict or Tuple like the action space, with an array for each
    leaf that has a mask. None: there is no such part, which goes for the `USUAL` name
    only: it stands by itself in every configuration. Raises `ConfigError` for another one
    that is not there, and for a mask that does not fit."""
    name, parts = f"obs.{part}", leaves(spaces.observation, "obs")
    inside = [leaf for leaf in parts if leaf == name or leaf.startswith(f"{name}.")]
    if part is not None and part != USUAL and not inside:
        raise ConfigError(f'action_mask = "{part}", but {lacks(part, parts)}')
    if part is None or not inside:
        return None
    acts = leaves(spaces.action, "action")
    if not any(map(choices_of, acts.values())):
        raise ConfigError(
            f'action_mask = "{part}", a part of the observation, but the action space is '
            f"{spaces.action}: masks go with Discrete and MultiDiscrete; take action_mask = None to have "
            f"{name} seen like any other part"
        )
    spans = _spans(acts, name, inside == [name])
    unknown = [leaf for leaf in inside if leaf not in {span.name for span in spans}]
    wanted = _wanted(spaces.action, acts, name)
    if unknown:
        raise ConfigError(
            f'action_mask = "{part}", but that part of the observation has parts itself '
            f"({', '.join(inside)}); {wanted}"
        )
    spans = [span for span in spans if span.name in inside]
    for leaf in inside:
        field = field_of(parts[leaf])
        choices = sum(sum(span.branches) for span in spans if span.name == leaf)
        if field.shape != (choices,) or field.dtype not in DTYPES:
            raise ConfigError(
                f'action_mask = "{part}", but {leaf} is {field.dtype}{list(field.shape)}; {wanted}'
            )
    return ActionMask(spans, sum(map(flat_width, acts.values())))


def _spans(acts: Mapping[str, Space], name: str, joined: bool) -> list[MaskSpan]:
    """Return a span for each discrete leaf of an action: all in the leaf `name` of the
    observation where they are `joined`, else each in a leaf of its own within it."""
    spans, elements = [], 0
    ends = np.cumsum([0, *map(flat_width, acts.values())]).tolist()
    for (action, leaf), outputs in zip(acts.items(), pairwise(ends), strict=True):
        if branches := choices_of(leaf):
            where, first = (name, elements) if joined else (name + action.removeprefix("action"), 0)
            elements += sum(branches)
            spans.append(
                MaskSpan(action, branches, where, slice(first, first + sum(branches)), slice(*outputs))
            )
    return spans


def _wanted(space: Space, acts: Mapping[str, Space], name: str) -> str:
    """Return the end of a message: what a mask of actions in `space` must be."""
    branches = [n for leaf in acts.values() for n in choices_of(leaf)]
    actions = (
        f"{sum(branches)}" if len(branches) == 1 else f"{'+'.join(map(str, branches))} = {sum(branches)}"
    )
    wanted = f"it must be one array, bool or int8, of {actions} elements: one per action of {space}"
    if list(acts) == ["action"]:
        return wanted
    apart = ", ".join(
        f"{name}{leaf.removeprefix('action')} of {sum(choices_of(space))}"
        for leaf, space in acts.items()
        if choices_of(space)
    )
    return f"{wanted}, those of its discrete parts side by side; or parts of its own: {apart}"
