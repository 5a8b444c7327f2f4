"""Several equal PPO learners in step: the same weights to the last bit, and what one
learner would have learnt from all rows."""

from dataclasses import dataclass

import numpy as np
import pytest
from torch import nn

from tidemill.algorithms.impala import Impala
from tidemill.algorithms.ppo import PPO
from tidemill.api.algorithm import ROW_FIELDS, Sample, UpdateFault
from tidemill.api.spaces import Box, Discrete, Spaces, schema_of_space
from tidemill.core.blas_threads import limit_threads
from tidemill.core.schema import allocate
from tidemill.nets.actor_critic import ActorCritic
from tidemill.nets.torch_network import TorchNetwork

MLP = ActorCritic(hidden=(16, 8), normalise_observations=True)
VECTOR = Spaces(Box((3,), "float32"), Discrete(3))
IMAGE = Spaces(Box((1, 36, 36), "uint8", (0.0,), (255.0,)), Discrete(3))


@dataclass(frozen=True, kw_only=True)
class Linear(TorchNetwork):
    def network(self, spaces, outputs):
        class Network(nn.Module):
            def __init__(self):
                super().__init__()
                self.actor, self.critic = nn.Linear(3, outputs), nn.Linear(3, 1)
                self.critic.bias.requires_grad_(False)

            def forward(self, observation):
                return self.actor(observation["obs"]), self.critic(observation["obs"]).squeeze(-1)

        return Network()


def make_sample(policy, net, spaces, seats, seed, steps=12):
    rng = np.random.default_rng(seed)
    sample = Sample(
        allocate(
            {**ROW_FIELDS, **schema_of_space(spaces.observation, "obs"), **net.answer(spaces)},
            (steps + 1, seats),
        )
    )
    shape = sample["obs"].shape
    sample["obs"][...] = (
        rng.integers(0, 256, shape) if sample["obs"].dtype == np.uint8 else rng.standard_normal(shape)
    )
    sample["done"][...] = rng.random((steps + 1, seats)) < 0.1
    sample["version"][...] = np.where(sample["done"], -1, 0)
    sample["reward"][...] = np.where(sample["done"], 0, rng.standard_normal((steps + 1, seats)) * 3 + 1)
    for t in range(steps + 1):
        policy.act(
            {"obs": sample["obs"][t]}, {}, False, {name: sample[name][t] for name in net.answer(spaces)}
        )
    return sample


def in_step(learners, samples, progress=0.0):
    """One update of all: sums in the order of ranks, the same array to each."""
    steps = [learner.parallel_update(own, progress) for learner, own in zip(learners, samples, strict=True)]
    metrics = []
    while True:
        arrays = []
        for generator in steps:
            try:
                arrays.append(next(generator))
            except StopIteration as end:
                metrics.append(end.value)
        if metrics:
            assert not arrays
            return metrics
        assert len({(array.shape, array.dtype) for array in arrays}) == 1
        assert all(
            array.flags.c_contiguous and array.nbytes <= learner.largest_sum
            for array, learner in zip(arrays, learners, strict=True)
        )
        total = arrays[0].copy()
        for array in arrays[1:]:
            total += array
        for array in arrays:
            array[...] = total


def learners_of(count, net=MLP, spaces=VECTOR, algorithm=PPO, **settings):
    limit_threads(1)
    config = algorithm(
        **{"minibatch_size": 30, "learning_rate": 1e-2, "entropy_coefficient": 0.01, **settings}
    )
    return [config.build(net.build(spaces, 0), seed) for seed in range(count)]


def assert_same(learners):
    for other in learners[1:]:
        for name, array in learners[0].policy.parameters().items():
            np.testing.assert_array_equal(array, other.policy.parameters()[name], err_msg=name)
        own, theirs = learners[0].state(), other.state()
        for name in own.keys() - {"random"}:
            np.testing.assert_array_equal(own[name], theirs[name], err_msg=name)


@pytest.mark.parametrize("seats", [(4, 4), (2, 5, 1)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_kl": 0.01},
        {"correct_off_policy": True, "clip_value": 0.2},
        {"normalise_advantages": "minibatch", "minibatch_size": 3},
        {"algorithm": Impala},
    ],
    ids=["plain", "kl", "corrected", "normalised", "impala"],
)
def test_weights_and_normalisers_stay_the_same_to_the_last_bit(seats, settings):
    learners = learners_of(len(seats), **settings)
    for update in range(3):
        samples = [
            [make_sample(le.policy, MLP, VECTOR, n, 10 * update + i)]
            for i, (le, n) in enumerate(zip(learners, seats, strict=True))
        ]
        metrics = in_step(learners, samples, update / 3)
        assert all(m == metrics[0] for m in metrics)
        assert_same(learners)
    assert metrics[0]["minibatches"] > 0


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(
    ("net", "spaces"), [(ActorCritic(), IMAGE), (Linear(), VECTOR)], ids=["images", "module"]
)
def test_networks_in_torch_too(net, spaces, empty):
    settings = {"learning_rate": 1e-3, "minibatch_size": 10**6, "epochs": 2}
    (alone,), learners = learners_of(1, net, spaces, **settings), learners_of(2, net, spaces, **settings)
    samples = [make_sample(alone.policy, net, spaces, 2, i, steps=4) for i in range(2)]
    if empty:
        samples[1]["version"][...] = -1
    alone.update(samples, 0.0)
    in_step(learners, [[sample] for sample in samples])
    assert_same(learners)
    for name, array in alone.policy.parameters().items():
        np.testing.assert_allclose(
            learners[0].policy.parameters()[name], array, rtol=1e-4, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("empty", [None, "a sample without rows", "no sample"])
@pytest.mark.parametrize(
    "settings",
    [{"epochs": 1}, {"epochs": 1, "normalise_advantages": "minibatch"}, {"algorithm": Impala}],
    ids=["ppo", "normalised", "impala"],
)
def test_parts_teach_what_the_whole_does(count, empty, settings):
    # One minibatch, so that the order of rows is only one of addition.
    (alone,), learners = (learners_of(n, minibatch_size=10**6, **settings) for n in (1, count))
    samples = [make_sample(alone.policy, MLP, VECTOR, 3 + i, i) for i in range(count)]
    if empty:
        samples[0]["version"][...] = -1
    expected = alone.update(samples, 0.0)
    given = [[sample] for sample in samples]
    if empty == "no sample":
        given[0] = []
    metrics = in_step(learners, given)
    assert_same(learners)
    for name, array in alone.policy.parameters().items():
        np.testing.assert_allclose(
            learners[0].policy.parameters()[name], array, rtol=1e-5, atol=1e-5, err_msg=name
        )
    assert metrics[0].keys() == expected.keys()
    for name, value in expected.items():
        assert metrics[0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_minibatch_without_rows_at_any_trainer_is_left_out():
    learners = learners_of(2, minibatch_size=1, epochs=1)
    samples = [
        [make_sample(learner.policy, MLP, VECTOR, 1, i, steps=3)] for i, learner in enumerate(learners)
    ]
    for sample in samples:
        sample[0]["done"][...] = False
        sample[0]["version"][...] = 0
    metrics = in_step(learners, samples)
    assert metrics[0]["rows"] == 6
    assert metrics[0]["minibatches"] == 3  # of two rows each
    assert_same(learners)


def test_nobody_has_a_row():
    learners = learners_of(2)
    assert in_step(learners, [[], []]) == [{"rows": 0.0, "learning_rate": 0.01}] * 2


@pytest.mark.parametrize(
    ("field", "sums", "stage", "says"),
    [
        ("reward", 1, "estimates", "its advantages or targets are not finite"),
        ("obs", 2, "minibatch", "loss/policy is nan"),
    ],
)
def test_all_stop_before_the_step_that_one_of_them_would_spoil(field, sums, stage, says):
    learners = learners_of(2)
    samples = [[make_sample(learner.policy, MLP, VECTOR, 3, i)] for i, learner in enumerate(learners)]
    samples[1][0][field][2] = np.inf if field == "reward" else np.nan
    steps = [learner.parallel_update(own, 0.0) for learner, own in zip(learners, samples, strict=True)]
    for _ in range(sums):
        arrays = [next(generator) for generator in steps]
        arrays[0] += arrays[1]
        arrays[1][...] = arrays[0]
    faults = []
    for generator, learner in zip(steps, learners, strict=True):
        with pytest.raises(UpdateFault, match=says) as caught:
            next(generator)
        faults.append(caught.value)
        assert np.isfinite(learner.policy.network.flat).all()
    assert [fault.stage for fault in faults] == [stage, stage]
    # who has the row records it, and only that one
    assert [bool(fault.minibatch) for fault in faults] == [False, True]


def test_update_is_the_same_with_nobody_to_add():
    one, other = learners_of(2)
    other.load_state(one.state())
    sample = make_sample(one.policy, MLP, VECTOR, 4, 0)
    assert in_step([one], [[sample]]) == [other.update([sample], 0.0)]
    assert_same([one, other])


def test_equal_learners_that_take_back_one_state_shuffle_apart():
    learners = learners_of(3)
    state = learners[0].state()
    for rank, learner in enumerate(learners):
        learner.load_state(state)
        if rank:
            learner.separate(rank)
    orders = {tuple(learner._rng.permutation(1000).tolist()) for learner in learners}
    assert len(orders) == 3
    again = learners_of(3)[2]
    again.load_state(state)
    again.separate(2)
    assert tuple(again._rng.permutation(1000).tolist()) in orders  # and the same each time
    again.load_state(again.state())  # as what an update that is undone leaves
    assert again.state().keys() == state.keys()
