"""TD3: what an update does to critics, actor and targets; how its policy explores; and
that it learns."""

import numpy as np
import pytest
import torch
from tests.algorithms.restoring import check_restored
from tests.algorithms.test_sac import BATCH, CENTRE, HALF, SPACES, sample_of

from tidemill.algorithms.td3 import TD3
from tidemill.api.algorithm import Sample
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.schema import allocate
from tidemill.nets.deterministic_actor import DeterministicActor
from tidemill.nets.squashed_gaussian import SquashedGaussian


def learner_of(config=None, seed=0):
    policy = DeterministicActor(hidden=(8, 6)).build(SPACES, seed)
    policy.flat += np.random.default_rng(seed).standard_normal(policy.flat.size).astype(np.float32) * 0.2
    return (config or TD3()).build(policy, seed)


# ---- the policy ------------------------------------------------------------------------


def acted(policy, deterministic, seen):
    out = allocate(policy.config.answer(SPACES), (len(seen),))
    policy.act({"obs": seen}, {}, deterministic, out)
    return policy.unscaled(out["action"])


def test_actions_are_uniform_before_the_first_update_and_then_the_actors_with_noise():
    learner = learner_of(TD3(exploration_noise=0.1))
    policy, seen = learner.policy, np.zeros((4_000, 3), np.float32)
    first = np.quantile(acted(policy, False, seen), [0.05, 0.5, 0.95], axis=0)
    np.testing.assert_allclose(first.mean(1), [-0.9, 0, 0.9], atol=0.05)
    learner.update([sample_of()], 0.0)
    policy.flat[:] *= 0.1  # so that no action is near a bound
    mode, found = acted(policy, True, seen), acted(policy, False, seen)
    assert np.ptp(mode, axis=0).max() == 0
    np.testing.assert_allclose(found.std(0), 0.1, atol=0.01)
    some = np.arange(4_000) % 2 == 0
    mixed = acted(policy, some, seen)
    np.testing.assert_array_equal(mixed[some], mode[some])
    assert (mixed[~some] != mode[~some]).any(1).all()


def test_noisy_actions_stay_within_their_bounds():
    learner = learner_of(TD3(exploration_noise=3.0))
    learner.update([sample_of()], 0.0)
    found = acted(learner.policy, False, np.zeros((1_000, 3), np.float32))
    assert found.min() == -1 and found.max() == 1


def test_players_explore_as_the_version_says_that_they_play():
    learner = learner_of(TD3(exploration_noise=0.3))
    learner.update([sample_of()], 0.0)
    player = DeterministicActor(hidden=(8, 6)).build(SPACES, 7)
    player.load({name: array.copy() for name, array in learner.policy.parameters().items()}, 1)
    assert float(player.epsilon) == 0 and float(player.noise) == np.float32(0.3)


# ---- the update ------------------------------------------------------------------------


def network(shape, flat, x):
    start, forms = 0, list(shape.forms().values())
    h = x.expand(shape.towers, *x.shape)
    for i in range(0, len(forms), 2):
        weight, bias = (int(np.prod(form)) for form in forms[i : i + 2])
        h = h @ flat[start : start + weight].reshape(forms[i])
        h = h + flat[start + weight : start + weight + bias].reshape(forms[i + 1])
        start += weight + bias
        h = h.relu() if i < len(forms) - 2 else h
    return h


def test_a_step_is_that_of_torchs_adam_down_the_papers_losses():
    config = TD3(gamma=0.9, learning_rate=0.01, critic_learning_rate=0.02, target_rate=0.1, policy_delay=1)
    learner = learner_of(config)
    rng = np.random.default_rng(3)
    learner.targets.flat += rng.standard_normal(learner.targets.flat.size).astype(np.float32) * 0.1
    learner.target_actor.flat += rng.standard_normal(learner.policy.flat.size).astype(np.float32) * 0.1
    sample = sample_of()
    b = {name: torch.tensor(array[0]) for name, array in sample.items()}
    draws = np.random.default_rng()
    draws.bit_generator.state = learner._rng.bit_generator.state
    noise = 0.2 * torch.tensor(draws.standard_normal((BATCH, 2), np.float32))
    share, shape, acting = b["weight"] / BATCH, learner.critics.shape, learner.policy.shape
    actor = torch.tensor(learner.policy.flat.copy(), requires_grad=True)
    critics = torch.tensor(learner.critics.flat.copy(), requires_grad=True)
    targets, past = (torch.tensor(x.flat.copy()) for x in (learner.targets, learner.target_actor))
    of_critics, of_actor = torch.optim.Adam([critics], lr=0.02), torch.optim.Adam([actor], lr=0.01)
    with torch.no_grad():
        then = (network(acting, past, b["next.obs"])[0].tanh() + noise.clamp(-0.5, 0.5)).clamp(-1, 1)
        least = network(shape, targets, torch.cat([b["next.obs"], then], 1))[..., 0].min(0).values
        goal = b["rewards"][:, 0] + 0.9 * ~b["done"] * least
    taken = (b["action"] - torch.tensor(CENTRE)) / torch.tensor(HALF)
    found = network(shape, critics, torch.cat([b["obs"], taken], 1))[..., 0]
    loss = (0.5 * (found - goal) ** 2 * share).sum()
    loss.backward()
    of_critics.step()
    action = network(acting, actor, b["obs"])[0].tanh()
    told = network(shape, critics.detach(), torch.cat([b["obs"], action], 1))[0, :, 0]
    of_policy = -(told * share).sum()
    of_policy.backward()
    of_actor.step()
    targets += 0.1 * (critics.detach() - targets)
    past += 0.1 * (actor.detach() - past)
    metrics = learner.update([sample], 0.0)
    assert metrics["loss/value"] == pytest.approx(loss.item(), rel=1e-3)
    assert metrics["loss/policy"] == pytest.approx(of_policy.item(), rel=1e-3)
    pairs = (
        (learner.critics, critics),
        (learner.policy, actor),
        (learner.targets, targets),
        (learner.target_actor, past),
    )
    for ours, torchs in pairs:
        np.testing.assert_allclose(ours.flat, torchs.detach().numpy(), atol=1e-4)
    error = (found - goal).abs().mean(0).detach().numpy()
    np.testing.assert_allclose(sample["priority"][0], error, rtol=1e-3, atol=1e-4)


def test_the_actor_and_all_targets_move_in_each_third_update_only():
    learner = learner_of(TD3(policy_delay=3))
    moved = []
    for i in range(6):
        watched = (learner.policy, learner.target_actor, learner.targets, learner.critics)
        before = [each.flat.copy() for each in watched]
        learner.update([sample_of(i)], 0.0)
        moved.append([not np.array_equal(each.flat, was) for each, was in zip(watched, before, strict=True)])
    assert moved == [[False] * 3 + [True], [False] * 3 + [True], [True] * 4] * 2


def test_a_restored_learner_goes_on_exactly():
    check_restored(learner_of(), learner_of(seed=5), sample_of)


def test_a_step_that_would_spoil_the_weights_is_left_out():
    learner = learner_of()
    before = learner.critics.flat.copy()
    with pytest.raises(RunError, match="TD3 left out a step"):
        learner.update([sample_of(rewards=np.full((BATCH, 1), np.inf, np.float32))], 0.0)
    np.testing.assert_array_equal(learner.critics.flat, before)


def test_it_tells_what_it_said_it_measures():
    assert set(learner_of().update([sample_of()], 0.0)) == set(TD3().measures())


REFUSED = {
    "policy_delay = 0 is not between": lambda: TD3(policy_delay=0),
    "take a DeterministicActor": lambda: TD3().build(SquashedGaussian().build(SPACES, 0), 0),
    "DeterministicActor needs bounds on both sides": lambda: DeterministicActor().build(
        Spaces(Box((3,), "float32"), Box((3,), "float32")), 0
    ),
    "DeterministicActor chooses in a Box": lambda: DeterministicActor().build(
        Spaces(Box((3,), "float32"), Discrete(3)), 0
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused(message):
    with pytest.raises(ConfigError, match=message):
        REFUSED[message]()


def test_it_learns_where_the_reward_is():
    """One step, paid 1 - 10 (a - obs)²."""
    space = Spaces(Box((1,), "float32"), Box((1,), "float32", (-1.0,), (1.0,)))
    policy = DeterministicActor(hidden=(32, 32)).build(space, 0)
    learner = TD3(learning_rate=3e-3).build(policy, 0)
    rng, out = np.random.default_rng(0), allocate(policy.config.answer(space), (64,))
    flags = {"steps": np.ones(64, np.int32), "done": np.ones(64, bool), "weight": np.ones(64, np.float32)}
    for i in range(900):
        obs = rng.uniform(-0.6, 0.6, (64, 1)).astype(np.float32)
        if i % 10 == 0:
            policy.epsilon[...] = 1  # now and then as before the first update
        policy.act({"obs": obs}, {}, False, out)
        rewards = (1 - 10 * (out["action"] - obs) ** 2).astype(np.float32)
        fields = {"obs": obs, "next.obs": obs, "action": out["action"].copy(), "rewards": rewards, **flags}
        learner.update([Sample({name: array[np.newaxis] for name, array in fields.items()})], 0.0)
    policy.act({"obs": obs}, {}, True, out)
    assert np.abs(out["action"] - obs).mean() < 0.1
