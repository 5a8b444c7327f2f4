"""Stable-Baselines3 on a task of the suite, with its own defaults or with rl-zoo's
settings, which are read from the package `rl_zoo3`. The only argument is what
`benchmarks/suite.py` tells, as JSON."""

import ast
import importlib
import importlib.util
import json
import re
import sys
import time
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)
sys.path = [place for place in sys.path if place != HERE]  # files here have packages' names

import gymnasium  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from stable_baselines3 import DQN, PPO, SAC  # noqa: E402
from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.vec_env import VecNormalize  # noqa: E402

TOLD = json.loads(sys.argv[1])
NOT_ITS_OWN = ("n_timesteps", "env_wrapper", "frame_stack", "n_envs", "normalize", "policy")


def of_the_zoo():
    """The zoo's settings of the task; what YAML calls "lin_0.1" falls to 0 with time."""
    package = importlib.util.find_spec("rl_zoo3")
    file = Path(package.origin).parent / "hyperparams" / f"{TOLD['algorithm']}.yml"
    found = dict(yaml.safe_load(file.read_text())[TOLD["zoo"]])
    for name, value in found.items():
        if isinstance(value, str) and value.startswith("lin_"):
            start = float(value.removeprefix("lin_"))
            found[name] = lambda left, start=start: left * start
    return found


def keywords(text):
    """`dict(log_std_init=-2, activation_fn=nn.ReLU, …)` as a dict, without running it."""
    text = re.sub(r"nn\.(\w+)", r"'nn.\1'", text)
    call = ast.parse(text.strip(), mode="eval").body

    def value(node):
        if isinstance(node, ast.Call):  # dict(…) within
            return {word.arg: value(word.value) for word in node.keywords}
        plain = ast.literal_eval(node)
        return getattr(torch.nn, plain[3:]) if isinstance(plain, str) and plain[:3] == "nn." else plain

    return value(call)


class Curve(BaseCallback):
    """The mean return of the last 100 episodes, at each thousandth of the way."""

    def __init__(self):
        super().__init__()
        self.places, self.values = [], []

    def _on_step(self):
        done = self.num_timesteps
        if (
            self.model.ep_info_buffer
            and done - (self.places[-1] if self.places else 0) >= TOLD["steps"] / 1000
        ):
            self.places.append(done)
            self.values.append(float(np.mean([episode["r"] for episode in self.model.ep_info_buffer])))
        return True


def main():
    torch.set_num_threads(1)
    name, settings = TOLD["name"], of_the_zoo() if TOLD["tuned"] else {}
    if name.startswith("MiniGrid"):
        importlib.import_module("minigrid")
    if name.startswith("MinAtar/"):
        importlib.import_module("minatar.gym").register_envs()
    wrapper = settings.pop("env_wrapper", None) or TOLD["wrapper"] or None
    made = None
    if wrapper:
        module, _, kind = wrapper.rpartition(".")
        made = getattr(importlib.import_module(module), kind)
    envs = make_vec_env(name, settings.get("n_envs", 1), seed=TOLD["seed"], wrapper_class=made)
    normalise = settings.get("normalize", False)
    if isinstance(normalise, str):
        normalise = keywords(normalise) if normalise.startswith("dict") else ast.literal_eval(normalise)
    if normalise:
        given = dict(normalise) if isinstance(normalise, dict) else {}
        if "gamma" in settings:  # as the zoo does
            given.setdefault("gamma", settings["gamma"])
        envs = VecNormalize(envs, **given)
    own = {key: value for key, value in settings.items() if key not in NOT_ITS_OWN}
    if isinstance(own.get("policy_kwargs"), str):
        own["policy_kwargs"] = keywords(own["policy_kwargs"])
    if isinstance(own.get("train_freq"), list):
        own["train_freq"] = tuple(own["train_freq"])
    several = isinstance(envs.observation_space, gymnasium.spaces.Dict)
    policy = settings.get("policy", "MultiInputPolicy" if several else "MlpPolicy")
    kind = {"ppo": PPO, "dqn": DQN, "sac": SAC}[TOLD["algorithm"]]
    model = kind(policy, envs, seed=TOLD["seed"], device="cpu", **own)
    curve, begun, used = Curve(), time.monotonic(), time.process_time()
    model.learn(TOLD["steps"], callback=curve, log_interval=None)
    seconds, used = time.monotonic() - begun, time.process_time() - used
    if not curve.places:
        raise SystemExit(f"no episode of {name} ended in {TOLD['steps']} steps")
    at = np.linspace(0, TOLD["steps"], TOLD["points"] + 1)[1:]
    values = np.interp(at, curve.places, curve.values)
    found = {"curve": [round(float(value), 4) for value in values]}
    print(json.dumps(found | {"seconds": round(seconds, 1), "core_seconds": round(used, 1)}))


if __name__ == "__main__":
    main()
