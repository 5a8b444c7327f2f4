"""PufferLib's PPO (PuffeRL) with its own vector environments, its policy widened to two
towers. It cuts a batch into segments of an environment's rows and draws minibatches of
whole segments anew each time, estimates advantages anew for each of them, and clips
rewards at -1 and 1.
"""

import os
import sys
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)
sys.path = [p for p in sys.path if p != HERE] + [HERE]  # this file has the package's name

import common  # noqa: E402

LAYOUTS = {
    "cartpole": {"envs": 128, "threads": 2, "vector": "Serial"},
    "half_cheetah": {"envs": 64, "threads": 2, "vector": "Serial"},
    "cartpole_small": {"envs": 8, "threads": 1, "vector": "Serial"},
    "hopper_small": {"envs": 8, "threads": 1, "vector": "Serial"},
    "half_cheetah_small": {"envs": 8, "threads": 1, "vector": "Serial"},
}
ARGS, WORK, LAYOUT = common.arguments(LAYOUTS)
os.environ["OMP_NUM_THREADS"] = str(LAYOUT["threads"])

from collections import deque  # noqa: E402

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import pufferlib.emulation  # noqa: E402
import pufferlib.vector  # noqa: E402
import torch  # noqa: E402
from pufferlib import pufferl  # noqa: E402
from pufferlib.pytorch import layer_init  # noqa: E402
from torch import nn  # noqa: E402

torch.set_num_threads(LAYOUT["threads"])
pufferl.ADVANTAGE_CUDA = False  # whether or not there is a compiler of CUDA


def make_env(buf=None, seed=0):
    env = gym.make(WORK.environment)
    if WORK.target is not None:
        env = pufferlib.EpisodeStats(env)
    return pufferlib.emulation.GymnasiumPufferEnv(env=env, buf=buf, seed=seed)


def make_envs():
    more = {}
    if LAYOUT["vector"] == "Multiprocessing":
        more = {"num_workers": LAYOUT["workers"], "batch_size": LAYOUT["batch"], "overwork": True}
    return pufferlib.vector.make(
        make_env, backend=LAYOUT["vector"], num_envs=LAYOUT["envs"], seed=ARGS.seed, **more
    )


def tower(inputs, outputs, gain):
    return nn.Sequential(
        layer_init(nn.Linear(inputs, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh(),
        layer_init(nn.Linear(64, outputs), gain)
    )  # fmt: skip


class Policy(nn.Module):
    def __init__(self, envs):
        super().__init__()
        inputs, action = envs.single_observation_space.shape[0], envs.single_action_space
        self.discrete = isinstance(action, gym.spaces.Discrete)
        outputs = int(action.n) if self.discrete else action.shape[0]
        self.actor, self.critic = tower(inputs, outputs, 0.01), tower(inputs, 1, 1.0)
        self.log_std = None if self.discrete else nn.Parameter(torch.zeros(outputs))

    def forward(self, observations, state=None):
        observations = observations.float()
        head, value = self.actor(observations), self.critic(observations)
        if not self.discrete:
            head = torch.distributions.Normal(head, self.log_std.exp().expand_as(head), validate_args=False)
        return head, value

    forward_eval = forward


def main():
    torch.manual_seed(ARGS.seed)
    rows = WORK.rollout * LAYOUT["envs"]
    minibatch = rows // WORK.minibatches
    settings = {
        "seed": ARGS.seed,
        "device": "cpu",
        "torch_deterministic": True,
        "cpu_offload": False,
        "precision": "float32",
        "compile": False,
        "use_rnn": False,
        "batch_size": rows,
        "bptt_horizon": min(WORK.rollout, minibatch),
        "minibatch_size": minibatch,
        "max_minibatch_size": minibatch,
        "update_epochs": WORK.epochs,
        "optimizer": "adam",
        "learning_rate": WORK.learning_rate,
        "anneal_lr": False,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": WORK.adam_epsilon,
        "gamma": WORK.gamma,
        "gae_lambda": WORK.gae_lambda,
        "clip_coef": WORK.clip,
        "vf_coef": WORK.value_coefficient,
        "vf_clip_coef": 1e9,
        "ent_coef": WORK.entropy_coefficient,
        "max_grad_norm": WORK.max_gradient_norm,
        "vtrace_rho_clip": 1.0,
        "vtrace_c_clip": 1.0,
        "prio_alpha": 0.0,  # all segments are equally likely
        "prio_beta0": 1.0,
        "total_timesteps": 10**12,
        "checkpoint_interval": 10**9,
        "data_dir": "experiments",
    }
    pufferl.PuffeRL.print_dashboard = lambda *_, **__: None
    envs = make_envs()
    trainer = pufferl.PuffeRL(settings, envs, Policy(envs))
    meter, finished, trained = common.Meter(ARGS.seconds, WORK.target), deque(maxlen=100), 0
    meter.start()
    while True:
        finished.extend(trainer.evaluate().pop("episode_return", ()))
        trainer.train()
        # a finished environment's next row is its reset
        trained += rows - int(trainer.terminals.sum())
        if meter.update(trained, float(np.mean(finished)) if len(finished) == 100 else None):
            break
    meter.report(LAYOUT, ("pufferlib", "torch", "gymnasium", "numpy"))
    trainer.utilization.stop()
    envs.close()


if __name__ == "__main__":
    main()
