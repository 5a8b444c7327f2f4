"""Backends of one configuration are one network: the same weights by name, shape and
first value, so that a file of one fits all."""

import numpy as np
import pytest

from tidemill import ActorCritic, RecurrentActorCritic
from tidemill.api.spaces import Box, Dict, Discrete, MultiDiscrete, Spaces
from tidemill.core.schema import allocate, schema_of
from tidemill.nets.actor_critic import BACKENDS, ActorCriticPolicy

VECTOR = Box((5,), "float32")
CASES = {
    "plain": (ActorCritic(normalise_observations=True), Spaces(VECTOR, Discrete(3))),
    "shared": (ActorCritic(shared_critic=True, activation="relu"), Spaces(VECTOR, Box((2,), "float32"))),
    "elu": (ActorCritic(activation="elu"), Spaces(VECTOR, Discrete(3))),
    "gelu": (ActorCritic(activation="gelu"), Spaces(VECTOR, Discrete(3))),
    "normalised": (ActorCritic(layer_norm=True), Spaces(VECTOR, Discrete(3))),
    "normalised, separate": (ActorCritic(layer_norm=True, critic_hidden=(7,)), Spaces(VECTOR, Discrete(3))),
    "silu": (ActorCritic(activation="silu"), Spaces(VECTOR, Box((2,), "float32"))),
    "separate": (ActorCritic(critic_hidden=(32, 16, 8)), Spaces(VECTOR, Discrete(3))),
    "separate state": (
        ActorCritic(critic_hidden=(7,)),
        Spaces(Dict({"own": VECTOR, "global_state": VECTOR}), Discrete(3)),
    ),
    "state": (ActorCritic(), Spaces(Dict({"own": VECTOR, "global_state": VECTOR}), MultiDiscrete((2, 3)))),
    "gru": (RecurrentActorCritic(cell="gru"), Spaces(VECTOR, Discrete(3))),
    "lstm": (RecurrentActorCritic(cell="lstm", hidden=()), Spaces(VECTOR, Discrete(3))),
}


@pytest.mark.parametrize("case", CASES)
def test_a_file_of_weights_fits_every_backend(case):
    config, spaces = CASES[case]
    # what the native core needs (kernels; no memory) is in tests/native
    backends = [name for name in BACKENDS if name != "native"]
    policies = [ActorCriticPolicy(config, spaces, 3, backend) for backend in backends]
    assert len({policy.network.library for policy in policies}) == len(policies) > 1
    names = list(config.weights(spaces))
    rng, n, answers = np.random.default_rng(0), 6, []
    given = {name: array.copy() for name, array in policies[0].parameters().items()}
    for policy in policies:
        own = policy.parameters()
        assert list(own) == [name for name in given if name in names] == list(given)
        assert schema_of(own) == config.weights(spaces)
        for name, array in own.items():
            np.testing.assert_array_equal(array, given[name], err_msg=name)
    for array in given.values():  # as if they had been trained
        if array.dtype == np.float32:
            array += rng.standard_normal(array.shape, np.float32) * np.float32(0.1)
    seen = {name: rng.standard_normal((n, 5), np.float32) for name in policies[0].encoder.names}
    state = allocate(config.state(spaces), (n,))
    for policy in policies:
        policy.load(given, 7)
        out = allocate({**config.answer(spaces), **config.state(spaces)}, (n,))
        policy.act(seen, state, True, out)
        answers.append(out)
        for name, array in policy.parameters().items():
            np.testing.assert_array_equal(array, given[name], err_msg=name)
    for out in answers[1:]:
        for name, array in out.items():
            np.testing.assert_allclose(array, answers[0][name], rtol=1e-5, atol=1e-5, err_msg=name)
