"""What a policy's configuration says of its weights is what it builds, and is told before
anything is built."""

from typing import Any

import numpy as np
import pytest

from tidemill import ActorCritic, QNetwork, RecurrentActorCritic, SquashedGaussian
from tidemill.api.policy import PolicyConfig, check_weights
from tidemill.api.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Spaces, Tuple
from tidemill.core.errors import SchemaError
from tidemill.core.schema import schema_of

FLAT = Box((3,), "float32")
IMAGE = Box((4, 40, 44), "uint8", (0.0,), (255.0,))
SMALL = Box((10, 10, 4), "bool")
BOTH = Dict({"seen": Tuple((FLAT, Discrete(3), MultiDiscrete((2, 4)), MultiBinary(3))), "image": IMAGE})
MASKED = Dict(
    {"obs": FLAT, "action_mask": Box((2,), "int8", (0.0,), (1.0,)), "global_state": Box((5,), "float32")}
)
TWO, MOVE = Discrete(2), Box((2,), "float32", (-1.0,), (1.0,))


@pytest.mark.parametrize(
    ("config", "observation", "action"),
    [
        (ActorCritic(), FLAT, TWO),
        (ActorCritic(hidden=(), normalise_observations=True), FLAT, MultiDiscrete((2, 3))),
        (ActorCritic(shared_critic=True, normalise_observations=True), BOTH, MultiDiscrete((4, 2))),
        (ActorCritic(), IMAGE, MOVE),
        (ActorCritic(encoder="mlp", hidden=(4,)), IMAGE, MultiBinary(2)),
        (ActorCritic(), MASKED, TWO),
        (RecurrentActorCritic(cell="lstm"), FLAT, MOVE),
        (RecurrentActorCritic(shared_critic=True, width=5), BOTH, TWO),
        (QNetwork(), FLAT, TWO),
        (QNetwork(noise=0.5, atoms=5, duelling=False), SMALL, TWO),
        (QNetwork(hidden=(16,)), IMAGE, TWO),
        (SquashedGaussian(), BOTH, MOVE),
    ],
)
def test_declared_weights_are_those_that_are_built(
    config: PolicyConfig, observation: Space, action: Space
) -> None:
    spaces = Spaces(observation, action)
    built = config.build(spaces, 1).parameters()
    assert config.weights(spaces) == schema_of(built)
    check_weights(config, spaces, built)


@pytest.mark.parametrize(
    ("config", "spaces"),
    [
        (ActorCritic(hidden=(10**6, 10**6)), Spaces(FLAT, TWO)),
        (ActorCritic(hidden=(10**9,) * 3, encoder="mlp"), Spaces(IMAGE, TWO)),
        (ActorCritic(), Spaces(Discrete(10**15), TWO)),
        (ActorCritic(), Spaces(FLAT, Discrete(10**15))),
        (RecurrentActorCritic(width=10**9), Spaces(FLAT, TWO)),
        (QNetwork(hidden=(10**9, 10**9)), Spaces(FLAT, TWO)),
        (QNetwork(atoms=10**12), Spaces(FLAT, TWO)),
        (SquashedGaussian(hidden=(10**9, 10**9)), Spaces(FLAT, MOVE)),
    ],
)
def test_weights_that_no_memory_holds_are_refused_before_they_are_built(
    config: PolicyConfig, spaces: Spaces
) -> None:
    given = (
        type(config)()
        .build(Spaces(FLAT, MOVE if isinstance(config, SquashedGaussian) else TWO), 1)
        .parameters()
    )
    with pytest.raises(SchemaError, match=r"this network's is|of another network"):
        check_weights(config, spaces, given)


@pytest.mark.parametrize(
    ("name", "value"), [("actor.weight", np.nan), ("critic.bias", np.inf), ("returns.mean", np.nan)]
)
def test_weights_that_are_not_finite_are_refused(name: str, value: float) -> None:
    spaces, config = Spaces(FLAT, TWO), ActorCritic()
    given: dict[str, Any] = {
        name: array.copy() for name, array in config.build(spaces, 1).parameters().items()
    }
    given[name].reshape(-1)[0] = value
    with pytest.raises(SchemaError, match=f"parameter {name} holds NaN or infinity"):
        check_weights(config, spaces, given)
