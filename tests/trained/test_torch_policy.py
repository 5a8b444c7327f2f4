"""A trained policy as a torch module does what the policy does."""

import numpy as np
import pytest
import torch

from tidemill import ActorCritic, ConfigError, PolicyConfig, QNetwork, RecurrentActorCritic, SquashedGaussian
from tidemill.api.spaces import Box, Discrete, Space, Spaces
from tidemill.trained.load import LoadedPolicy

VECTOR = Box((5,), "float32")
PUSH = Box((2,), "float32", (-1.0, -3.0), (2.0, 1.0))


def loaded(config: PolicyConfig, observation: Space, action: Space) -> LoadedPolicy:
    """Return a policy with weights, and statistics of observations, drawn at random."""
    spaces, rng = Spaces(observation, action), np.random.default_rng(3)
    weights = {name: array.copy() for name, array in config.build(spaces, 3).parameters().items()}
    for name, array in weights.items():
        if name.startswith("observation.") or name.endswith(("weight", "bias")):
            array[...] = rng.uniform(0.1, 1.0, array.shape) - 0.5 * (not name.startswith("observation."))
    return LoadedPolicy("policy", config, spaces, weights, {"updates": 1, "steps": 1}, 0)


@pytest.mark.parametrize(
    ("config", "observation", "action"),
    [
        (ActorCritic(), VECTOR, Discrete(3, start=2)),
        (ActorCritic(shared_critic=True, hidden=(8,), activation="relu"), VECTOR, PUSH),
        (ActorCritic(normalise_observations=True), VECTOR, PUSH),
        (ActorCritic(normalise_observations=True), Box((3, 2), "float32"), Box((2, 2), "float32")),
        (ActorCritic(normalise_observations=True), Box((6,), "uint8"), PUSH),
        (QNetwork(), VECTOR, Discrete(4)),
        (QNetwork(duelling=False, hidden=(8,)), VECTOR, Discrete(4, start=-1)),
        (SquashedGaussian(hidden=(8, 8)), VECTOR, PUSH),
    ],
)
def test_the_module_gives_the_actions_that_the_policy_takes(
    config: PolicyConfig, observation: Box, action: Space
) -> None:
    policy, rng = loaded(config, observation, action), np.random.default_rng(0)
    if observation.dtype == "uint8":
        rows = rng.integers(0, 256, (200, *observation.shape), np.uint8)
    else:
        rows = rng.normal(0, 20, (200, *observation.shape)).astype(np.float32)
        rows[:100] /= 20
    module = policy.module()
    given = module(torch.from_numpy(rows)).detach().numpy()
    taken = policy.act(rows)
    assert given.shape == taken.shape and len(np.unique(taken)) > 1
    np.testing.assert_allclose(given, taken, rtol=1e-6, atol=1e-6)
    before = policy.act(rows)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    np.testing.assert_array_equal(policy.act(rows), before)  # the weights are copies


def test_a_policy_that_has_no_module_is_refused_with_what_has_one() -> None:
    with pytest.raises(ConfigError, match=r"RecurrentActorCritic .* has no torch module yet; an ActorCritic"):
        loaded(RecurrentActorCritic(), VECTOR, PUSH).module()
