"""A trained policy as a torch module does what the policy does."""

from typing import Any, Literal

import numpy as np
import pytest
import torch

from tidemill import (
    ActorCritic,
    ConfigError,
    DeterministicActor,
    PolicyConfig,
    QNetwork,
    RecurrentActorCritic,
    SquashedGaussian,
    TorchNetwork,
)
from tidemill.api.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Spaces, Tuple
from tidemill.trained.load import LoadedPolicy
from tidemill.trained.torch_policy import torch_policy

VECTOR = Box((5,), "float32")
PUSH = Box((2,), "float32", (-1.0, -3.0), (2.0, 1.0))


def loaded(config: PolicyConfig, observation: Space, action: Space) -> LoadedPolicy:
    """Return a policy with weights, and statistics of observations, drawn at random."""
    spaces, rng = Spaces(observation, action), np.random.default_rng(3)
    weights = {name: array.copy() for name, array in config.build(spaces, 3).parameters().items()}
    for name, array in weights.items():
        if name.startswith("observation."):
            array[...] = rng.uniform(0.1, 1.0, array.shape)
        elif name.endswith(("bias", "candidate")):
            array[...] = rng.uniform(-0.3, 0.3, array.shape)
        elif name in ("actor.weight", "head.weight"):  # they begin small
            array *= 200
    return LoadedPolicy("policy", config, spaces, weights, {"updates": 1, "steps": 1}, 0)


@pytest.mark.parametrize(
    ("config", "observation", "action"),
    [
        (ActorCritic(), VECTOR, Discrete(3, start=2)),
        (ActorCritic(shared_critic=True, hidden=(8,), activation="relu"), VECTOR, PUSH),
        (ActorCritic(critic_hidden=(9, 3), hidden=(8,), activation="elu"), VECTOR, PUSH),
        (ActorCritic(activation="gelu"), VECTOR, PUSH),
        (ActorCritic(activation="silu"), VECTOR, PUSH),
        (ActorCritic(normalise_observations=True), VECTOR, PUSH),
        (ActorCritic(normalise_observations=True), Box((3, 2), "float32"), Box((2, 2), "float32")),
        (ActorCritic(normalise_observations=True), Box((6,), "uint8"), PUSH),
        (QNetwork(), VECTOR, Discrete(4)),
        (QNetwork(), Box((7, 7, 3), "uint8"), Discrete(4)),
        (QNetwork(scaled_bytes="all"), Box((7, 7, 3), "uint8"), Discrete(4)),
        (QNetwork(filters=0, scaled_bytes="all"), Box((7, 7, 3), "uint8"), Discrete(4)),
        (SquashedGaussian(), Box((40, 40), "uint8"), PUSH),
        (QNetwork(normalise_observations=True), VECTOR, Discrete(4)),
        (SquashedGaussian(hidden=(8, 8), normalise_observations=True), VECTOR, PUSH),
        (DeterministicActor(hidden=(8, 8), normalise_observations=None), VECTOR, PUSH),
        (QNetwork(duelling=False, hidden=(8,)), VECTOR, Discrete(4, start=-1)),
        (SquashedGaussian(hidden=(8, 8)), VECTOR, PUSH),
        (DeterministicActor(hidden=(8, 8)), VECTOR, PUSH),
        (SquashedGaussian(hidden=(8, 8), critic_hidden=(5,), activation="elu"), VECTOR, PUSH),
        (QNetwork(activation="tanh"), VECTOR, Discrete(4)),
        (QNetwork(layer_norm=True), VECTOR, Discrete(4)),
        (ActorCritic(layer_norm=True, critic_hidden=(9, 3)), VECTOR, PUSH),
        (SquashedGaussian(layer_norm=True), VECTOR, PUSH),
        (SquashedGaussian(hidden=(8,), sde_steps=4), VECTOR, PUSH),
        (QNetwork(quantiles=5), VECTOR, Discrete(4)),
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
    np.testing.assert_allclose(given, taken, rtol=5e-6, atol=5e-6)
    before = policy.act(rows)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    np.testing.assert_array_equal(policy.act(rows), before)  # the weights are copies


def rows_of(space: Space, rng: np.random.Generator, n: int = 40) -> Any:
    """Return observations of `space` as a user has them, drawn at random."""
    match space:
        case Dict():
            return {key: rows_of(part, rng, n) for key, part in space.spaces.items()}
        case Tuple():
            return tuple(rows_of(part, rng, n) for part in space.spaces)
        case Discrete():
            return rng.integers(space.start, space.start + space.n, n)
        case MultiDiscrete():
            return rng.integers(0, space.nvec, (n, len(space.nvec)))
        case MultiBinary():
            return rng.integers(0, 2, (n, space.n), np.int8)
    if space.dtype == "uint8":
        light = rng.random((n, *(1 for _ in space.shape)))
        return (rng.integers(0, 256, (n, *space.shape)) * light).astype(np.uint8)
    if space.dtype == "bool":
        return rng.random((n, *space.shape)) < 0.5
    return rng.normal(0, 2, (n, *space.shape)).astype(space.dtype)


def as_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_tensors(part) for key, part in value.items()}
    return tuple(map(as_tensors, value)) if isinstance(value, tuple) else torch.from_numpy(value)


MIXED = Dict({"a": VECTOR, "b": Tuple((Discrete(3, start=4), MultiDiscrete((2, 3)))), "c": MultiBinary(4)})
IMAGE = Dict({"image": Box((38, 44, 3), "uint8"), "state": VECTOR, "global_state": Box((6,), "float32")})
MASKED = Dict({"see": VECTOR, "action_mask": Box((5,), "bool")})


@pytest.mark.parametrize(
    ("config", "observation", "action"),
    [
        (ActorCritic(normalise_observations=True), MIXED, PUSH),
        (ActorCritic(), Box((4, 36, 40), "uint8"), Discrete(5)),
        (ActorCritic(shared_critic=False), Box((36, 40), "uint8"), MultiDiscrete((2, 3))),
        (ActorCritic(encoder="impala_cnn", shared_critic=False), Box((37, 40, 3), "uint8"), Discrete(5)),
        (ActorCritic(encoder="impala_cnn"), IMAGE, Discrete(5)),
        (ActorCritic(normalise_observations=True), IMAGE, MultiBinary(3)),
        (ActorCritic(), MASKED, Discrete(5)),
        (ActorCritic(), MASKED, MultiDiscrete((2, 3))),
        (QNetwork(atoms=7, noise=0.5), MASKED, Discrete(5)),
        (QNetwork(hidden=(32,)), Box((4, 36, 40), "uint8"), Discrete(5)),
        (QNetwork(hidden=(32,)), Box((10, 8, 4), "bool"), Discrete(5)),
        (QNetwork(hidden=()), Box((3, 8, 9), "uint8"), Discrete(5)),
        (SquashedGaussian(), MIXED, PUSH),
    ],
)
def test_the_module_takes_images_masks_and_parts_in_the_form_of_their_space(
    config: PolicyConfig, observation: Space, action: Space
) -> None:
    policy, rows = loaded(config, observation, action), rows_of(observation, np.random.default_rng(1))
    given, taken = policy.module()(as_tensors(rows)).detach().numpy(), policy.act(rows)
    assert given.shape == taken.shape and len(np.unique(taken)) > 1
    np.testing.assert_allclose(given, taken, rtol=1e-5, atol=1e-5)


NESTED = Dict(
    {
        "push": PUSH,
        "pick": Discrete(5, start=2),
        "more": Tuple((MultiBinary(3), MultiDiscrete((2, 3)))),
    }
)


@pytest.mark.parametrize("mask", [None, MultiBinary(10), Dict({"pick": MultiBinary(5)})])
def test_actions_of_several_parts_come_nested(mask: Space | None) -> None:
    observation = Dict({"see": VECTOR, **({"action_mask": mask} if mask else {})})
    policy = loaded(ActorCritic(hidden=(8,)), observation, NESTED)
    rows = rows_of(observation, np.random.default_rng(1))
    given, taken = policy.module()(as_tensors(rows)), policy.act(rows)
    assert list(given) == list(taken) == ["push", "pick", "more"] and isinstance(given["more"], tuple)
    pairs = [(given[name], taken[name]) for name in ("push", "pick")]
    pairs += zip(given["more"], taken["more"], strict=True)
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape and len(np.unique(theirs)) > 1
        np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-5, atol=1e-5)
    if isinstance(mask, Dict):
        allowed = np.take_along_axis(rows["action_mask"]["pick"], taken["pick"][:, None] - 2, 1)[:, 0]
        assert allowed[rows["action_mask"]["pick"].any(1)].all()
    one = policy.act({name: as_row(part) for name, part in rows.items()})
    assert one["pick"] == taken["pick"][0] and one["more"][1].tolist() == taken["more"][1][0].tolist()


def as_row(value: Any) -> Any:
    """Return the first row of observations."""
    return {key: as_row(part) for key, part in value.items()} if isinstance(value, dict) else value[0]


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize(
    ("observation", "action"),
    [(VECTOR, PUSH), (MASKED, Discrete(5)), (Box((36, 40, 3), "uint8"), PUSH)],
)
def test_the_module_of_a_policy_that_remembers_takes_and_gives_its_state(
    cell: Literal["gru", "lstm"], observation: Space, action: Space
) -> None:
    policy = loaded(RecurrentActorCritic(cell=cell, width=8), observation, action)
    module, rng = policy.module(), np.random.default_rng(1)
    state: Any = None
    for step in range(4):
        rows = rows_of(observation, rng, 6)
        if step == 2:  # an episode begins anew in one place
            policy.reset([2])
            for part in (state,) if cell == "gru" else state:
                part[2] = 0
        with torch.no_grad():
            given, state = module(as_tensors(rows), state)
        taken = policy.act(rows)
        assert given.shape == taken.shape and len(np.unique(taken)) > 1
        np.testing.assert_allclose(given, taken, rtol=1e-5, atol=1e-5)


class OwnNetwork(TorchNetwork):
    def network(self, spaces: Spaces, outputs: int) -> torch.nn.Module:
        raise NotImplementedError


def test_a_policy_that_has_no_module_is_refused_with_what_has_one() -> None:
    spaces = Spaces(VECTOR, PUSH)
    with pytest.raises(ConfigError, match=r"OwnNetwork has no torch module .* an ActorCritic"):
        torch_policy(OwnNetwork(), spaces, {})
