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
from stable_baselines3.common.vec_env import VecFrameStack, VecMonitor, VecNormalize  # noqa: E402

TOLD = json.loads(sys.argv[1])
ATARI, TEAM = TOLD["name"].startswith("ALE/"), TOLD["name"].startswith("pettingzoo:")
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


def lanes_of(settings):
    """The environments, in as many lanes as the settings have."""
    name = TOLD["name"]
    if TEAM:
        import supersuit

        team = importlib.import_module(name.removeprefix("pettingzoo:")).parallel_env()
        lanes = supersuit.pettingzoo_env_to_vec_env_v1(team)
        lanes = supersuit.concat_vec_envs_v1(lanes, 1, num_cpus=0, base_class="stable_baselines3")
        lanes.venv.seed = lambda seed: lanes.venv.reset(seed=seed)  # supersuit's has none
        return VecMonitor(lanes)
    if name.startswith("MiniGrid"):
        importlib.import_module("minigrid")
    if name.startswith("MinAtar/"):
        importlib.import_module("minatar.gym").register_envs()
    wrapper = settings.pop("env_wrapper", None) or TOLD["wrapper"] or None
    made = None
    if wrapper:
        module, _, kind = (wrapper[0] if isinstance(wrapper, list) else wrapper).rpartition(".")
        made = getattr(importlib.import_module(module), kind)
    given = {}
    if ATARI:  # the wrapper skips frames
        import ale_py

        gymnasium.register_envs(ale_py)
        given = {"frameskip": 1, "repeat_action_probability": 0.0}
    envs = make_vec_env(
        name, settings.get("n_envs", 1), seed=TOLD["seed"], wrapper_class=made, env_kwargs=given
    )
    return VecFrameStack(envs, settings.get("frame_stack", 4)) if ATARI else envs


def played(model, envs):
    """The mean return of some episodes of the final policy without exploration; None
    where none ends in good time."""
    if isinstance(envs, VecNormalize):
        envs.training = False
    returns, begun, seen = [], time.monotonic(), envs.reset()
    while len(returns) < TOLD["played"] and time.monotonic() - begun < TOLD["patience"]:
        seen, _, _, infos = envs.step(model.predict(seen, deterministic=True)[0])
        returns += [info["episode"]["r"] for info in infos if "episode" in info]
    return round(float(np.mean(returns)), 4) if returns else None


def main():
    torch.set_num_threads(1)
    name, settings = TOLD["name"], of_the_zoo() if TOLD["tuned"] else {}
    envs = lanes_of(settings)
    steps = TOLD["steps"] * (envs.num_envs if TEAM else 1)  # there each agent's step is one
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
    usual = "MultiInputPolicy" if several else "CnnPolicy" if ATARI else "MlpPolicy"
    policy = settings.get("policy", usual)
    kind = {"ppo": PPO, "dqn": DQN, "sac": SAC}[TOLD["algorithm"]]
    model = kind(policy, envs, seed=TOLD["seed"], device="cpu", **own)
    curve, begun, used = Curve(), time.monotonic(), time.process_time()
    model.learn(steps, callback=curve, log_interval=None)
    seconds, used = time.monotonic() - begun, time.process_time() - used
    if not curve.places:
        raise SystemExit(f"no episode of {name} ended in {TOLD['steps']} steps")
    at = np.linspace(0, steps, TOLD["points"] + 1)[1:]
    values = np.interp(at, curve.places, curve.values)
    found = {"curve": [round(float(value), 4) for value in values], "evaluation": played(model, envs)}
    print(json.dumps(found | {"seconds": round(seconds, 1), "core_seconds": round(used, 1)}))


if __name__ == "__main__":
    main()
