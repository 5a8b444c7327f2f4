"""Sample Factory's APPO: rollout workers, a policy worker and a learner."""

import os
import sys
import tempfile
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)
sys.path = [p for p in sys.path if p != HERE] + [HERE]  # this file has the package's name

import common  # noqa: E402

LAYOUTS = {
    "cartpole": {"workers": 1, "envs_per_worker": 64, "splits": 2, "serial": False, "asynchronous": True},
    "half_cheetah": {"workers": 2, "envs_per_worker": 16, "splits": 2, "serial": False, "asynchronous": True},
    "pong_float32": {"workers": 2, "envs_per_worker": 8, "splits": 2, "serial": False, "asynchronous": True},
    "pong_one_epoch_float32": {
        "workers": 2,
        "envs_per_worker": 8,
        "splits": 2,
        "serial": False,
        "asynchronous": True,
    },
}
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
from sample_factory.algo.runners.runner import AlgoObserver  # noqa: E402
from sample_factory.algo.utils.misc import ExperimentStatus  # noqa: E402
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args  # noqa: E402
from sample_factory.envs.env_utils import register_env  # noqa: E402
from sample_factory.train import make_runner  # noqa: E402


def make_env(name, cfg=None, env_config=None, render_mode=None):
    if not name.startswith("ALE/"):
        return gym.make(name)
    import ale_py

    gym.register_envs(ale_py)
    env = gym.make(name, frameskip=1, repeat_action_probability=0.0)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
    return gym.wrappers.FrameStackObservation(env, 4)


class Observer(AlgoObserver):
    """Counts what the learner has finished. Training begins with its first finished
    update: processes start at different times before."""

    def __init__(self, meter):
        self.meter = meter

    def on_training_step(self, runner, training_iteration_since_resume):
        steps = runner.env_steps.get(0, 0)
        if training_iteration_since_resume <= 1:
            self.meter.start()
            return
        episodes = runner.policy_avg_stats.get("reward", [()])[0]
        mean = float(np.mean(list(episodes)[-100:])) if len(episodes) >= 100 else None
        if self.meter.update(steps, mean):
            runner.cfg.train_for_env_steps = 0


def main():
    args, work, layout = common.arguments(LAYOUTS)
    rows = work.rollout * layout["workers"] * layout["envs_per_worker"]
    nature = work.network == "nature"
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "env": work.environment,
            "experiment": "bench",
            "train_dir": folder,
            "restart_behavior": "overwrite",
            "device": "cpu",
            "seed": args.seed,
            "algo": "APPO",
            "async_rl": layout["asynchronous"],
            "serial_mode": layout["serial"],
            "num_workers": layout["workers"],
            "num_envs_per_worker": layout["envs_per_worker"],
            "worker_num_splits": layout["splits"],
            "policy_workers_per_policy": 1,
            "rollout": work.rollout,
            "batch_size": rows // work.minibatches,
            "num_batches_per_epoch": work.minibatches,
            "num_epochs": work.epochs,
            "shuffle_minibatches": False,  # its default; shuffling is a slow operation there
            "use_rnn": False,
            "recurrence": 1,
            "gamma": work.gamma,
            "gae_lambda": work.gae_lambda,
            "learning_rate": work.learning_rate,
            "ppo_clip_ratio": work.clip,
            "ppo_clip_value": 1e9,
            "exploration_loss_coeff": work.entropy_coefficient,
            "value_loss_coeff": work.value_coefficient,
            "max_grad_norm": work.max_gradient_norm,
            "adam_eps": work.adam_epsilon,
            "normalize_input": False,
            "normalize_returns": False,
            "value_bootstrap": True,
            "actor_critic_share_weights": nature,
            "adaptive_stddev": False,
            "nonlinearity": "relu" if nature else "tanh",
            "encoder_mlp_layers": [64, 64],
            "encoder_conv_architecture": "convnet_atari",
            "encoder_conv_mlp_layers": [512],
            "obs_scale": 255.0 if nature else 1.0,
            "log_to_file": False,
            **dict.fromkeys(
                ("save_every_sec", "save_best_every_sec", "experiment_summaries_interval"), 1_000_000
            ),
        }
        register_env(work.environment, make_env)
        words = [f"--{name}={value}" for name, value in settings.items() if not isinstance(value, list)]
        for name, value in settings.items():
            words += [f"--{name}", *map(str, value)] if isinstance(value, list) else []
        parser, _ = parse_sf_args(words)
        _, runner = make_runner(parse_full_cfg(parser, words))
        meter = common.Meter(args.seconds, work.target)
        runner.register_observer(Observer(meter))
        status = runner.init()
        if status == ExperimentStatus.SUCCESS:
            status = runner.run()
        if status != ExperimentStatus.SUCCESS:
            raise SystemExit(f"Sample Factory ended with status {status}")
    meter.report({**layout, "threads": 1}, ("sample-factory", "torch", "gymnasium", "numpy"))


if __name__ == "__main__":
    main()
