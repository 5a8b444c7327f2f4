"""Action masks: a part of an observation says which actions are allowed. Numpy only.

A mask works on the network's head, before any distribution sees it: what is not allowed
gets `FORBIDDEN` for its unnormalised log-probability. Its probability is then exactly 0,
it adds nothing to the entropy, and its gradient is exactly 0.

A row that forbids everything is answered all the same, since the final row of a cut
episode may be like that and is asked for its value; a learner refuses it among the rows
that were acted on.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tidemill.api.spaces import Discrete, MultiDiscrete, Spaces, field_of, leaves
from tidemill.core.errors import ConfigError, EnvironmentFault, did_you_mean
from tidemill.core.schema import Arrays

FORBIDDEN = -1e30
"""Its exponential is 0, and it is finite: 0 · log 0 is 0 then, not NaN."""
USUAL = "action_mask"
DTYPES = ("bool", "int8", "uint8")

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


class ActionMask:
    """The leaf `name` of an observation: one element per action, those of all branches
    one after the other; what is 0 is forbidden.

    Where all actions of a row (or of a branch of it) are forbidden, all get the same
    probability: only final rows may be like that, which are asked for their value, and
    whose action nobody takes. `check` finds others.
    """

    def __init__(self, name: str, branches: tuple[int, ...]) -> None:
        self.name = name
        self._starts = np.cumsum([0, *branches[:-1]])

    def forbidden(self, observation: Arrays) -> Bools:
        """Return [n, actions]: what n raw observations forbid."""
        return np.logical_not(observation[self.name])

    def check(self, observation: Arrays) -> None:
        """Raise `EnvironmentFault` when a row of `observation`, all of which were acted
        on, forbids everything."""
        nothing = np.logical_and.reduceat(self.forbidden(observation), self._starts, axis=1)
        if not nothing.any():
            return
        row, branch = np.argwhere(nothing)[0].tolist()
        where = f" in branch {branch}" if len(self._starts) > 1 else ""
        count = int(np.count_nonzero(nothing.any(1)))
        raise EnvironmentFault(
            f"{self.name} allows no action{where} in {count} of {len(nothing)} rows on which an agent had to "
            f"act (first: row {row} of the batch); only final observations may be like that. Let the "
            "environment allow at least one action (one that does nothing, if need be), or leave the agent "
            "out of the step"
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
    """Return the mask that lies in `part` of the observation. None: there is no such
    part, which goes for the `USUAL` name only: it stands by itself in every
    configuration. Raises `ConfigError` for another one that is not there, and for a mask
    that does not fit."""
    name, parts = f"obs.{part}", leaves(spaces.observation, "obs")
    inside = [leaf for leaf in parts if leaf == name or leaf.startswith(f"{name}.")]
    if part is not None and part != USUAL and not inside:
        raise ConfigError(f'action_mask = "{part}", but {lacks(part, parts)}')
    if part is None or not inside:
        return None
    match spaces.action:
        case Discrete():
            branches: tuple[int, ...] = (spaces.action.n,)
        case MultiDiscrete():
            branches = spaces.action.nvec
        case _:
            raise ConfigError(
                f'action_mask = "{part}", a part of the observation, but the action space is '
                f"{spaces.action}: masks go with Discrete and MultiDiscrete; take action_mask = None to have "
                f"{name} seen like any other part"
            )
    actions = (
        f"{sum(branches)}" if len(branches) == 1 else f"{'+'.join(map(str, branches))} = {sum(branches)}"
    )
    wanted = f"it must be one array, bool or int8, of {actions} elements: one per action of {spaces.action}"
    if inside != [name]:
        raise ConfigError(
            f'action_mask = "{part}", but that part of the observation has parts itself '
            f"({', '.join(inside)}); {wanted}"
        )
    field = field_of(parts[name])
    if field.shape != (sum(branches),) or field.dtype not in DTYPES:
        raise ConfigError(f'action_mask = "{part}", but {name} is {field.dtype}{list(field.shape)}; {wanted}')
    return ActionMask(name, branches)
