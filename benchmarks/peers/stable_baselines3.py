"""Stable-Baselines3's PPO, DQN and SAC with its own vector environments and policies."""

import os
import sys
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)
sys.path = [p for p in sys.path if p != HERE] + [HERE]  # this file has the package's name

import common  # noqa: E402

LAYOUTS = {
    "cartpole": {"envs": 64, "threads": 1, "vector": "DummyVecEnv"},
    "half_cheetah": {"envs": 64, "threads": 1, "vector": "DummyVecEnv"},
    "pong_float32": {"envs": 8, "threads": 2, "vector": "DummyVecEnv"},
    "pong_one_epoch_float32": {"envs": 8, "threads": 2, "vector": "DummyVecEnv"},
    "cartpole_small": {"envs": 8, "threads": 1, "vector": "DummyVecEnv"},
    "hopper_small": {"envs": 8, "threads": 1, "vector": "DummyVecEnv"},
    "half_cheetah_small": {"envs": 8, "threads": 1, "vector": "DummyVecEnv"},
    "cartpole_one": {"envs": 1, "threads": 1, "vector": "DummyVecEnv"},
    "hopper_one": {"envs": 1, "threads": 1, "vector": "DummyVecEnv"},
    "dqn": {"envs": 8, "threads": 1, "vector": "DummyVecEnv"},
    "sac": {"envs": 8, "threads": 2, "vector": "DummyVecEnv"},
}
ARGS, WORK, LAYOUT = common.arguments(LAYOUTS)
os.environ["OMP_NUM_THREADS"] = str(LAYOUT["threads"])

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from stable_baselines3 import DQN, PPO, SAC  # noqa: E402
from stable_baselines3.common.atari_wrappers import AtariWrapper  # noqa: E402
from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402
from stable_baselines3.common.vec_env import (  # noqa: E402
    DummyVecEnv,
    SubprocVecEnv,
    VecFrameStack,
    VecMonitor,
    VecTransposeImage,
)

torch.set_num_threads(LAYOUT["threads"])


def make_env():
    if isinstance(WORK, common.OffPolicyWork) or WORK.network != "nature":
        return gym.make(WORK.environment)
    import ale_py

    gym.register_envs(ale_py)
    return AtariWrapper(gym.make(WORK.environment, frameskip=1, repeat_action_probability=0.0))


class Stop(BaseCallback):
    """A rollout begins when all rows of the one before have been trained on; one of a
    replay memory, a step long, when all that it owes was done."""

    def __init__(self, meter):
        super().__init__()
        self.meter, self.over = meter, False

    def _on_training_start(self):
        self.meter.start()

    def _on_rollout_start(self):
        episodes = self.model.ep_info_buffer
        mean = float(np.mean([e["r"] for e in episodes])) if len(episodes) == 100 else None
        self.over = self.num_timesteps > 0 and self.meter.update(self.num_timesteps, mean)

    def _on_step(self):
        return not self.over


def on_policy(envs):
    count = LAYOUT["envs"]
    if WORK.network == "nature":
        envs = VecTransposeImage(VecFrameStack(envs, 4))
    return PPO(
        # their defaults: Nature CNN with one trunk; 64×64 tanh, actor and critic apart
        "CnnPolicy" if WORK.network == "nature" else "MlpPolicy",
        VecMonitor(envs),
        learning_rate=WORK.learning_rate,
        n_steps=WORK.rollout,
        batch_size=WORK.rollout * count // WORK.minibatches,
        n_epochs=WORK.epochs,
        gamma=WORK.gamma,
        gae_lambda=WORK.gae_lambda,
        clip_range=WORK.clip,
        ent_coef=WORK.entropy_coefficient,
        vf_coef=WORK.value_coefficient / 2,  # its value loss has no factor ½
        max_grad_norm=WORK.max_gradient_norm,
        policy_kwargs={"optimizer_kwargs": {"eps": WORK.adam_epsilon}},
        seed=ARGS.seed,
        device="cpu",
    )


def off_policy(envs):
    own = {
        "DQN": {
            "target_update_interval": WORK.target_updates * WORK.envs // WORK.updates,
            "max_grad_norm": WORK.max_gradient_norm,
        },
        "SAC": {},
    }
    return {"DQN": DQN, "SAC": SAC}[WORK.algorithm](
        "MlpPolicy",
        VecMonitor(envs),
        learning_rate=WORK.learning_rate,
        buffer_size=WORK.capacity,
        learning_starts=WORK.warm_up,
        batch_size=WORK.batch,
        tau=WORK.target_rate,
        gamma=WORK.gamma,
        train_freq=1,
        gradient_steps=WORK.updates,
        policy_kwargs={"net_arch": list(WORK.hidden)},
        seed=ARGS.seed,
        device="cpu",
        **own[WORK.algorithm],
    )


def main():
    envs = {"DummyVecEnv": DummyVecEnv, "SubprocVecEnv": SubprocVecEnv}[LAYOUT["vector"]](
        [make_env] * LAYOUT["envs"]
    )
    model = (off_policy if isinstance(WORK, common.OffPolicyWork) else on_policy)(envs)
    meter = common.Meter(ARGS.seconds, WORK.target)
    model.learn(10**12, callback=Stop(meter), log_interval=None)
    envs.close()
    meter.report(LAYOUT, ("stable_baselines3", "torch", "gymnasium", "numpy"))


if __name__ == "__main__":
    main()
