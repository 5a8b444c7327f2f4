"""What a policy's configuration says of its weights is what it builds, and is told before
anything is built."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    DeterministicActor,
    Experiment,
    Gymnasium,
    Limits,
    PolicyWorkers,
    QNetwork,
    RecurrentActorCritic,
    SquashedGaussian,
    Trainer,
    load,
    resume,
    train,
)
from tidemill.api.policy import PolicyConfig, check_weights
from tidemill.api.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Spaces, Tuple
from tidemill.core.errors import SchemaError
from tidemill.core.schema import allocate, schema_of
from tidemill.nets import weights

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
        (DeterministicActor(), BOTH, MOVE),
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


def test_first_weights_are_the_same_whether_made_in_threads_or_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begun() -> dict[str, Any]:
        return ActorCritic(hidden=(24, 40)).build(Spaces(FLAT, MOVE), 3).parameters()

    in_turn = begun()
    monkeypatch.setattr(weights, "LARGE", 1)
    for name, array in begun().items():
        np.testing.assert_array_equal(array, in_turn[name], strict=True)


def test_a_matrix_that_cannot_be_made_orthogonal_in_a_thread_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "LARGE", 1)
    monkeypatch.setattr(np.linalg, "qr", fail)
    with pytest.raises(FloatingPointError, match="no orthogonal matrix"):
        ActorCritic().build(Spaces(FLAT, MOVE), 0)


def fail(*_: Any, **__: Any) -> None:
    raise FloatingPointError("no orthogonal matrix")


def test_placeholders_are_as_large_as_first_weights_and_the_actions_drawn_with_them_stay_the_same() -> None:
    config, spaces = ActorCritic(hidden=(64, 96)), Spaces(FLAT, MOVE)
    built = config.build(spaces, 5)
    with weights.placeholder_weights():
        placeholder = config.build(spaces, 5)
    own, others = built.parameters(), placeholder.parameters()
    for name, array in own.items():
        assert float(others[name].std()) == pytest.approx(float(array.std()), rel=0.35), name
    assert not np.array_equal(own["hidden.1.weight"], others["hidden.1.weight"])
    placeholder.load(own, 1)
    answers = []
    for policy in (built, placeholder):
        out = allocate(config.answer(spaces), (7,))
        policy.act({"obs": np.ones((7, 3), np.float32)}, {}, False, out)
        answers.append(out["action"])
    np.testing.assert_array_equal(*answers)


@pytest.mark.parametrize("inference", ["inline", "inference"])
def test_first_weights_are_made_by_the_trainer_alone_and_not_again_to_resume_or_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inference: str
) -> None:
    made: list[tuple[int, ...]] = []
    make = weights._make_orthogonal
    monkeypatch.setattr(
        weights, "_make_orthogonal", lambda weight, *rest: (made.append(weight.shape), make(weight, *rest))
    )
    served = {} if inference == "inline" else {"policy": PolicyWorkers(stream=inference)}
    spec = AgentSpec(policy="policy", samples="samples", inference=inference, sample_steps=16)
    experiment = Experiment(
        name="widths",
        policies={"policy": ActorCritic(hidden=(8, 12))},
        workers={
            "actor": Actors(environment=Gymnasium(id="CartPole-v1"), lanes=2, agents=(spec,)),
            "trainer": Trainer(policy="policy", samples="samples", algorithm=PPO(minibatch_size=16)),
            **served,
        },
        limits=Limits(updates=2),
    )
    result = train(experiment, launch="inline", run_dir=tmp_path / "run", quiet=True)
    assert sorted(made) == sorted([(4, 8), (4, 8), (8, 12), (8, 12), (2, 12), (12,)])
    made.clear()
    resume(result.folder, launch="inline", limits={"updates": 3}, quiet=True)
    load(result.folder)
    assert made == []


@pytest.mark.parametrize(
    ("config", "spaces", "inputs"),
    [
        (ActorCritic(initialisation="uniform"), Spaces(Box((400,), "float32"), Box((90,), "float32")),
         {"hidden.0": 400, "hidden.1": 64, "actor": 64, "critic": 64}),
        (ActorCritic(initialisation="uniform", critic_hidden=(300,)),
         Spaces(Box((50,), "float32"), Discrete(40)),
         {"hidden.0": 50, "hidden.1": 64, "critic_hidden.0": 50, "actor": 64, "critic": 300}),
        (ActorCritic(initialisation="uniform"), Spaces(Box((4, 36, 36), "uint8"), Discrete(40)),
         {"cnn.obs.0": 256, "cnn.obs.1": 512, "cnn.obs.out": 64, "actor": 512}),
        (QNetwork(initialisation="uniform", hidden=(90,)), Spaces(Box((10, 10, 4), "bool"), Discrete(40)),
         {"convolution.0": 36, "hidden.0": 1024, "head": 90}),
        (SquashedGaussian(initialisation="uniform"),
         Spaces(Box((50,), "float32"), Box((9,), "float32", (-1.0,), (1.0,))),
         {"hidden.0": 50, "hidden.1": 256, "head": 256}),
    ],
)  # fmt: skip
def test_uniform_weights_and_biases_reach_to_one_by_the_root_of_the_inputs(config, spaces, inputs):
    named = config.build(spaces, 0).parameters()
    for layer, count in inputs.items():
        weight, bias = named[f"{layer}.weight"], named[f"{layer}.bias"]
        bound = 1 / np.sqrt(count)
        assert np.abs(weight).max() <= bound * 1.0001 and np.abs(bias).max() <= bound * 1.0001, layer
        assert np.abs(weight).max() > 0.9 * bound and abs(weight.mean()) < 0.15 * bound, layer
        assert bias.any(), layer


def test_uniform_weights_are_0_where_the_actor_does_not_see():
    space = Dict({"own": Box((3,), "float32"), "global_state": Box((2,), "float32")})
    named = ActorCritic(initialisation="uniform").build(Spaces(space, Discrete(2)), 0).parameters()
    actor, critic = named["hidden.0.weight"]
    assert not actor[3:].any() and actor[:3].all() and critic.all()


@pytest.mark.parametrize("critic_hidden", [None, (7,)])
def test_the_places_of_the_towers_are_all_weights_once(critic_hidden):
    spaces = Spaces(Box((3,), "float32"), Box((2,), "float32", (-1.0,), (1.0,)))
    shape = ActorCritic(hidden=(5, 4), critic_hidden=critic_hidden).shape(spaces)
    flat = np.arange(sum(int(np.prod(form)) for form in shape.forms().values()))
    actor, critic = (np.concatenate([flat[place] for place in tower]) for tower in shape.places())
    assert sorted([*actor, *critic]) == flat.tolist()
    layers = (5, 4) if critic_hidden is None else critic_hidden
    inputs = (3, *layers)
    assert len(critic) == sum((n + 1) * out for n, out in zip(inputs, (*layers, 1), strict=True))
