"""DQN: what an update does to the weights, the target, ε and the priorities; and that it
learns."""

import numpy as np
import pytest
import torch
from tests.algorithms.restoring import check_restored
from torch.nn import functional

from tidemill.algorithms.dqn import DQN
from tidemill.algorithms.qr_dqn import QRDQN
from tidemill.api.algorithm import Sample
from tidemill.api.schedule import LinearSchedule
from tidemill.api.spaces import Box, Dict, Discrete, Spaces
from tidemill.core.errors import ConfigError, RunError
from tidemill.nets.actor_critic import ActorCritic
from tidemill.nets.q_network import QNetwork

SPACES = Spaces(Box((3,), "float32"), Discrete(4))
BATCH, STEPS = 16, 2


def sample_of(seed=0, **fields):
    """A batch as a replay draws it."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(1, STEPS + 1, BATCH).astype(np.int32)
    rewards = rng.standard_normal((BATCH, STEPS)).astype(np.float32)
    rewards[np.arange(STEPS) >= steps[:, None]] = 0
    batch = {
        "obs": rng.standard_normal((BATCH, 3)).astype(np.float32),
        "next.obs": rng.standard_normal((BATCH, 3)).astype(np.float32),
        "action": rng.integers(0, 4, BATCH),
        "rewards": rewards,
        "steps": steps,
        "done": rng.random(BATCH) < 0.3,
        "weight": rng.uniform(0.2, 1, BATCH).astype(np.float32),
        "version": np.zeros(BATCH, np.int64),
        "priority": np.full(BATCH, np.nan, np.float32),
        **fields,
    }
    sample = Sample({name: array[np.newaxis] for name, array in batch.items()})
    sample.bootstrap = 0
    return sample


def learner_of(config=None, net=None, seed=0):
    policy = (net or QNetwork(hidden=(8,))).build(SPACES, seed)
    policy.flat += np.random.default_rng(seed).standard_normal(policy.flat.size).astype(np.float32) * 0.3
    return (config or DQN()).build(policy, seed)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("atoms", [1, 5])
def test_a_step_is_that_of_torchs_adam_down_the_papers_loss(double, atoms):
    net = QNetwork(
        hidden=(8,),
        duelling=False,
        atoms=atoms,
        **({"least_return": -3, "greatest_return": 3} if atoms > 1 else {}),
    )
    learner = learner_of(DQN(double=double, gamma=0.9, max_gradient_norm=None, learning_rate=0.01), net)
    learner.policy.flat += (
        np.random.default_rng(7).standard_normal(learner.policy.flat.size).astype(np.float32) * 0.5
    )
    sample = sample_of()
    b = {name: torch.tensor(array[0]) for name, array in sample.items()}

    def network(flat, x):
        w0 = flat[:24].reshape(3, 8)
        b0 = flat[24:32]
        w1 = flat[32 : 32 + 32 * atoms].reshape(8, -1)
        b1 = flat[32 + 32 * atoms :]
        return ((x @ w0 + b0).relu() @ w1 + b1).reshape(len(x), 4, atoms)

    online = torch.tensor(learner.policy.flat.copy(), requires_grad=True)
    target = torch.tensor(learner._target.flat)
    adam = torch.optim.Adam([online], lr=0.01, eps=1e-5)
    rows = torch.arange(BATCH)
    support = torch.linspace(-3, 3, atoms)
    expected = (lambda told: told[..., 0]) if atoms == 1 else (lambda told: told.softmax(-1) @ support)
    with torch.no_grad():
        told = network(target, b["next.obs"])
        bests = [expected(network(flat, b["next.obs"])).argmax(1) for flat in (target, online)]
        assert (bests[0] != bests[1]).any()
        best = bests[double]
        returns = b["rewards"][:, 0] + 0.9 * b["rewards"][:, 1]
        discount = 0.9 ** b["steps"] * ~b["done"]
    seen = network(online, b["obs"])[rows, b["action"]]
    if atoms == 1:
        goal = (returns + discount * told[rows, best, 0]).float()
        loss = functional.huber_loss(seen[:, 0], goal, reduction="none")
        error = (seen[:, 0] - goal).abs()
    else:
        goal = torch.zeros(BATCH, atoms)
        for i in range(BATCH):  # algorithm 1 as it is printed
            for j, p in enumerate(told[i, best[i]].softmax(-1)):
                at = ((returns[i] + discount[i] * support[j]).clamp(-3, 3) + 3) / (6 / (atoms - 1))
                low, high = int(at.floor()), int(at.ceil())
                goal[i, low] += p * (high - at) if high > low else p
                goal[i, high] += p * (at - low)
        loss = error = -(goal * seen.log_softmax(-1)).sum(-1)
    (loss * b["weight"]).mean().backward()
    adam.step()
    metrics = learner.update([sample], 0.0)
    np.testing.assert_allclose(learner.policy.flat, online.detach().numpy(), atol=2e-5)
    np.testing.assert_allclose(sample["priority"][0], error.detach().numpy(), rtol=1e-3, atol=1e-4)
    assert metrics["loss/value"] == pytest.approx(float((loss * b["weight"]).mean().detach()), rel=1e-3)


def test_what_is_forbidden_next_is_not_hoped_for():
    space = Dict({"seen": Box((3,), "float32"), "action_mask": Box((4,), "int8", (0,), (1,))})
    policy = QNetwork(hidden=(8,)).build(Spaces(space, Discrete(4)), 0)
    learner = DQN().build(policy, 0)
    shape = {"obs.seen": np.ones((BATCH, 3), np.float32), "next.obs.seen": np.ones((BATCH, 3), np.float32)}
    masks = {
        "obs.action_mask": np.ones((BATCH, 4), np.int8),
        "next.obs.action_mask": np.tile(np.array([0, 1, 0, 0], np.int8), (BATCH, 1)),
    }
    sample = sample_of(
        **shape, **masks, done=np.zeros(BATCH, bool), rewards=np.zeros((BATCH, STEPS), np.float32)
    )
    seen = policy.function(policy.flat.copy()).forward(np.ones((1, 3), np.float32))[0, :, 0].copy()
    batch = {name: array[0] for name, array in sample.items()}
    _, _, error, value = learner._differentiate(batch)
    np.testing.assert_allclose(error, abs(value - 0.99 ** batch["steps"] * seen[1]), rtol=1e-4)


@pytest.mark.parametrize(
    ("every", "rate", "moves"), [(3, 1.0, [3, 7, 9, 20]), (4, 0.25, [7, 8, 20]), (0, 0.5, None)]
)
def test_the_target_moves_by_the_count_of_env_steps(every, rate, moves):
    learner = learner_of(DQN(target_steps=every, target_rate=rate))
    expected, before = learner._target.flat.copy(), 0
    for steps in (0, 1, 2, 2, 3, 3, 7, 8, 9, 20, 20):
        learner.update([sample_of(steps)], steps)
        if moves is None or (steps in moves and steps > before):
            expected += rate * (learner.policy.flat - expected)
        before = steps
        np.testing.assert_allclose(learner._target.flat, expected, atol=1e-6)


def test_epsilon_falls_with_env_steps_and_travels_with_the_weights():
    config = DQN(epsilon=LinearSchedule(1.0, 0.2, from_step=10, to_step=50))
    learner = learner_of(config)
    told = [float(learner.policy.parameters()["epsilon"])]
    for steps in (5, 10, 20, 30, 40, 50, 60):
        learner.config = config.at(steps, 0.0)
        learner.update([sample_of(steps)], steps)
        told.append(float(learner.policy.parameters()["epsilon"]))
    np.testing.assert_allclose(told, [1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2], rtol=1e-6)


@pytest.mark.parametrize(
    "net",
    [
        QNetwork(hidden=(8,)),
        QNetwork(hidden=(8,), noise=0.5, atoms=5),
        QNetwork(hidden=(8,), noise=0.5, quantiles=5),
    ],
)
def test_a_restored_learner_goes_on_exactly(net):
    config = (QRDQN if net.quantiles else DQN)(target_steps=3)
    check_restored(learner_of(config, net), learner_of(config, net, seed=5), sample_of)


def test_a_step_that_would_spoil_the_weights_is_left_out():
    learner = learner_of()
    before = learner.policy.flat.copy()
    rewards = np.full((BATCH, STEPS), np.nan, np.float32)
    with pytest.raises(RunError, match="left out a step"):
        learner.update([sample_of(rewards=rewards)], 0.0)
    np.testing.assert_array_equal(learner.policy.flat, before)


def test_it_tells_what_it_said_it_measures():
    assert set(learner_of().update([sample_of()], 0.0)) == set(DQN().measures())


REFUSED = {
    "gamma = 1.5 is not between": lambda: DQN(gamma=1.5),
    "target_steps = -1 is not between": lambda: DQN(target_steps=-1),
    "epsilon = 1.5 is not between": lambda: DQN(epsilon=LinearSchedule(1.5, 0)),
    "gamma of DQN cannot be a schedule; write a number. These can be: learning_rate, epsilon": lambda: DQN(
        gamma=LinearSchedule(0.9, 0.99)
    ),
    "no setting target_every any more: env steps are counted": lambda: DQN(target_every=500),
    "quantiles = 5; take QRDQN": lambda: DQN().build(QNetwork(quantiles=5).build(SPACES, 0), 0),
    "QRDQN trains a QNetwork that tells quantiles": lambda: QRDQN().build(QNetwork().build(SPACES, 0), 0),
    "quantiles = 5 with atoms = 3 cannot be": lambda: QNetwork(quantiles=5, atoms=3),
    "take a QNetwork": lambda: DQN().build(ActorCritic().build(SPACES, 0), 0),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused(message):
    with pytest.raises(ConfigError, match=message):
        REFUSED[message]()


@pytest.mark.parametrize(
    "net",
    [
        QNetwork(hidden=(16,)),
        QNetwork(hidden=(16,), atoms=21, least_return=-1, greatest_return=3),
        QNetwork(noise=0.3),
        QNetwork(hidden=(16,), quantiles=8),
    ],
)
def test_it_learns_the_values_of_a_walk_whose_values_are_known(net):
    """States 0, 1, 2 in a row: action 0 goes on and pays 1 at the end of state 2, the
    others end at once and pay 0.5. Best: γ², γ, 1."""
    policy = net.build(SPACES, 0)
    kind = QRDQN if net.quantiles else DQN
    learner = kind(learning_rate=3e-3, gamma=0.8, target_steps=50).build(policy, 0)
    state, action = (part.reshape(-1) for part in np.meshgrid(np.arange(3), np.arange(4), indexing="ij"))
    eye = np.eye(4, 3, dtype=np.float32)
    over = (action > 0) | (state == 2)
    pays = np.where(action > 0, 0.5, np.where(state == 2, 1.0, 0.0)).astype(np.float32)
    n = len(state)
    fields = {
        "obs": eye[state],
        "next.obs": eye[state + 1],
        "action": action,
        "rewards": pays[:, None],
        "steps": np.ones(n, np.int32),
    }
    fields |= {
        "done": over,
        "weight": np.ones(n, np.float32),
        "version": np.zeros(n, np.int64),
        "priority": np.zeros(n, np.float32),
    }
    sample = Sample({name: array[np.newaxis] for name, array in fields.items()})
    for step in range(1200):
        learner.update([sample], step)
    twin = policy.function(policy.flat.copy())
    twin.still()
    found = policy.expected(twin.forward(eye[:3]))
    np.testing.assert_allclose(found[:, 0], [0.64, 0.8, 1.0], atol=0.05)
    np.testing.assert_allclose(found[:, 1:], 0.5, atol=0.05)
