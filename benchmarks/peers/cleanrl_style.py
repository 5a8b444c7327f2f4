"""PPO in one file, in the style that CleanRL made known: one loop that gathers with a
vector environment, computes advantages, trains, and begins again. Written for this
comparison; each work has the vector environment that such scripts run fastest with.
"""

import os

import common

LAYOUTS = {
    "cartpole": {"envs": 64, "threads": 1, "vector": "SyncVectorEnv"},
    "cartpole_vector": {"envs": 64, "threads": 1, "vector": "Gymnasium's own"},
    "cartpole_vector_small": {"envs": 8, "threads": 1, "vector": "Gymnasium's own"},
    "half_cheetah": {"envs": 64, "threads": 1, "vector": "EnvPool, 2 threads"},
    **{
        pong: {"envs": 8, "threads": 2, "vector": "AtariVectorEnv, 2 threads"}
        for pong in ("pong_float32", "pong_one_epoch_float32", "pong", "pong_one_epoch")
    },
    "cartpole_small": {"envs": 8, "threads": 1, "vector": "SyncVectorEnv"},
    "cartpole_one": {"envs": 1, "threads": 1, "vector": "SyncVectorEnv"},
    "hopper_one": {"envs": 1, "threads": 1, "vector": "SyncVectorEnv"},
    "hopper_small": {"envs": 8, "threads": 1, "vector": "EnvPool, 2 threads"},
    "half_cheetah_small": {"envs": 8, "threads": 1, "vector": "EnvPool, 2 threads"},
}
ARGS, WORK, LAYOUT = common.arguments(LAYOUTS)
BFLOAT16 = ARGS.work in ("pong", "pong_one_epoch")
os.environ["OMP_NUM_THREADS"] = str(LAYOUT["threads"])

from collections import deque  # noqa: E402

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributions import Categorical, Normal  # noqa: E402

torch.set_num_threads(LAYOUT["threads"])


def make_envs(count):
    """Return the vector environment, its observation and action spaces, and whether a
    finished environment's next row is its reset."""
    if LAYOUT["vector"] == "SyncVectorEnv":
        same_step = gym.vector.AutoresetMode.SAME_STEP
        envs = gym.vector.SyncVectorEnv(
            [lambda: gym.make(WORK.environment)] * count, copy=False, autoreset_mode=same_step
        )
        return envs, envs.single_observation_space, envs.single_action_space, False
    if LAYOUT["vector"] == "Gymnasium's own":
        envs = gym.make_vec(WORK.environment, num_envs=count, vectorization_mode="vector_entry_point")
        return envs, envs.single_observation_space, envs.single_action_space, True
    if LAYOUT["vector"].startswith("EnvPool"):
        import envpool

        envs = envpool.make_gymnasium(WORK.environment, num_envs=count, num_threads=2, seed=ARGS.seed)
        return envs, envs.observation_space, envs.action_space, True
    from ale_py.vector_env import AtariVectorEnv

    envs = AtariVectorEnv(
        "pong", num_envs=count, num_threads=2, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
    )
    return envs, envs.single_observation_space, envs.single_action_space, False


def layer(module, gain=2**0.5):
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


def tower(inputs, outputs, gain):
    return nn.Sequential(
        layer(nn.Linear(inputs, 64)), nn.Tanh(), layer(nn.Linear(64, 64)), nn.Tanh(),
        layer(nn.Linear(64, outputs), gain)
    )  # fmt: skip


class Agent(nn.Module):
    def __init__(self, observation, action):
        super().__init__()
        self.discrete = isinstance(action, gym.spaces.Discrete)
        outputs = int(action.n) if self.discrete else action.shape[0]
        if WORK.network == "nature":
            self.trunk = nn.Sequential(
                layer(nn.Conv2d(4, 32, 8, 4)), nn.ReLU(), layer(nn.Conv2d(32, 64, 4, 2)), nn.ReLU(),
                layer(nn.Conv2d(64, 64, 3, 1)), nn.ReLU(), nn.Flatten(), layer(nn.Linear(3136, 512)),
                nn.ReLU(),
            )  # fmt: skip
            self.actor, self.critic = layer(nn.Linear(512, outputs), 0.01), layer(nn.Linear(512, 1), 1.0)
        else:
            self.trunk = None
            self.actor, self.critic = (
                tower(observation.shape[0], outputs, 0.01),
                tower(observation.shape[0], 1, 1.0),
            )
        self.log_std = nn.Parameter(torch.zeros(outputs)) if not self.discrete else None

    def features(self, obs):
        if self.trunk is None:
            return obs
        if not BFLOAT16:
            return self.trunk(obs.float() / 255.0)
        with torch.autocast("cpu", torch.bfloat16):
            return self.trunk((obs.bfloat16() / 255.0).contiguous(memory_format=torch.channels_last)).float()

    def act(self, obs, action=None):
        hidden = self.features(obs)
        head = self.actor(hidden)
        if self.discrete:
            chances = Categorical(logits=head, validate_args=False)
            action = chances.sample() if action is None else action
            log_prob, entropy = chances.log_prob(action), chances.entropy()
        else:
            chances = Normal(head, self.log_std.exp().expand_as(head), validate_args=False)
            action = chances.sample() if action is None else action
            log_prob, entropy = chances.log_prob(action).sum(1), chances.entropy().sum(1)
        return action, log_prob, entropy, self.critic(hidden).flatten()

    def value(self, obs):
        return self.critic(self.features(obs)).flatten()


def main():
    np.random.seed(ARGS.seed)
    torch.manual_seed(ARGS.seed)
    steps, count = WORK.rollout, LAYOUT["envs"]
    envs, observation, action_space, next_step = make_envs(count)
    agent = Agent(observation, action_space)
    if BFLOAT16:
        agent = agent.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(agent.parameters(), lr=WORK.learning_rate, eps=WORK.adam_epsilon)
    as_float = np.float32 if observation.dtype.kind == "f" else observation.dtype
    low_high = None if agent.discrete else (action_space.low, action_space.high)

    obs = torch.zeros(
        (steps, count, *observation.shape), dtype=torch.float32 if as_float == np.float32 else torch.uint8
    )
    actions = torch.zeros(
        (steps, count) if agent.discrete else (steps, count, action_space.shape[0]),
        dtype=torch.int64 if agent.discrete else None,
    )
    log_probs, rewards, dones, values = (torch.zeros((steps, count)) for _ in range(4))

    meter = common.Meter(ARGS.seconds, WORK.target)
    returns, finished, trained = np.zeros(count), deque(maxlen=100), 0
    first = envs.reset() if LAYOUT["vector"].startswith("EnvPool") else envs.reset(seed=ARGS.seed)
    next_obs, next_done = torch.from_numpy(np.array(first[0], as_float)), torch.zeros(count)
    done = np.zeros(count, bool)
    meter.start()
    while True:
        resets = 0
        for t in range(steps):
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                action, log_probs[t], _, values[t] = agent.act(next_obs)
            actions[t] = action
            played = (
                action.numpy() if low_high is None else np.clip(action.numpy().astype(np.float64), *low_high)
            )
            was_done = done
            raw, reward, terminated, truncated, _ = envs.step(played)
            done = terminated | truncated
            rewards[t] = torch.from_numpy(np.asarray(reward, np.float32))
            if next_step:
                resets += int(was_done.sum())
                returns[was_done] = 0.0
                returns[~was_done] += reward[~was_done]
            else:
                returns += reward
            if done.any():
                finished.extend(returns[done])
                returns[done] = 0.0
            next_obs = torch.from_numpy(np.array(raw, as_float))
            next_done = torch.from_numpy(done.astype(np.float32))

        with torch.no_grad():
            following, going_on, last = agent.value(next_obs), 1.0 - next_done, 0.0
            advantages = torch.zeros_like(rewards)
            for t in reversed(range(steps)):
                delta = rewards[t] + WORK.gamma * following * going_on - values[t]
                advantages[t] = last = delta + WORK.gamma * WORK.gae_lambda * going_on * last
                following, going_on = values[t], 1.0 - dones[t]

        rows = steps * count
        flat_obs = obs.reshape(rows, *observation.shape)
        flat_actions = actions.reshape(rows, *actions.shape[2:])
        flat_log_probs = log_probs.reshape(-1)
        flat_advantages = advantages.reshape(-1)
        targets = (advantages + values).reshape(-1)
        for _ in range(WORK.epochs):
            for part in torch.randperm(rows).split(rows // WORK.minibatches):
                _, log_prob, entropy, value = agent.act(flat_obs[part], flat_actions[part])
                ratio = (log_prob - flat_log_probs[part]).exp()
                gain = flat_advantages[part]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                policy_loss = torch.max(
                    -gain * ratio, -gain * ratio.clamp(1 - WORK.clip, 1 + WORK.clip)
                ).mean()
                value_loss = 0.5 * (value - targets[part]).square().mean()
                loss = (
                    policy_loss
                    + WORK.value_coefficient * value_loss
                    - WORK.entropy_coefficient * entropy.mean()
                )
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), WORK.max_gradient_norm)
                optimizer.step()

        trained += rows - resets
        if meter.update(trained, float(np.mean(finished)) if len(finished) == 100 else None):
            break
    computes = "bfloat16 (autocast), channels last" if BFLOAT16 else "float32"
    meter.report(LAYOUT, ("torch", "gymnasium", "numpy", "envpool", "ale-py"), computes)


if __name__ == "__main__":
    main()
