"""What a GPU is worth beside the CPU: rows per second of training and acting, by network
and device.

OMP_NUM_THREADS=1 python benchmarks/device.py [--rows 8192] [--minibatch 2048] [--epochs
4] [--batch 1024] [--seconds 2] [--works mlp,cnn]

train: a whole PPO update (gather, all epochs), trained rows × epochs per second. act:
batches one after the other. act, threaded: as many under way as a threaded policy worker
has. All by the wall clock, the CPU with one thread. On a machine without a GPU the CPU's
column stands alone.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
from learner import make_sample

from tidemill.algorithms.ppo import PPO
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.blas_threads import limit_threads
from tidemill.core.schema import allocate
from tidemill.nets.actor_critic import ActorCritic
from tidemill.nets.choose_device import choose_device

VECTOR = Box((4,), "float32")
WIDE = Box((64,), "float32")
IMAGES = Box((4, 84, 84), "uint8", (0.0,), (255.0,))
WORKS = {
    "mlp 64×64 on 4": (Spaces(VECTOR, Discrete(2)), ActorCritic(normalise_observations=False)),
    "mlp 512×512 on 64": (
        Spaces(WIDE, Box((8,), "float32", (-1.0,), (1.0,))),
        ActorCritic(hidden=(512, 512), normalise_observations=False),
    ),
    "cnn float32": (Spaces(IMAGES, Discrete(6)), ActorCritic()),
    "cnn bfloat16": (Spaces(IMAGES, Discrete(6)), ActorCritic(convolutions="bfloat16")),
}


def per_second(call: Callable[[], int], seconds: float) -> float:
    """Return what `call` counts, per second: the best of its calls within `seconds`,
    after two to warm up where there is time."""
    began, best, calls = time.perf_counter(), 0.0, 0
    while True:
        start = time.perf_counter()
        count = call()
        now = time.perf_counter()
        calls += 1
        if calls > 2 or now - began > seconds:
            best = max(best, count / (now - start))
        if now - began > seconds:
            return best


def measure(
    spaces: Spaces, config: ActorCritic, device: str, options: argparse.Namespace
) -> dict[str, float]:
    """Return rows per second by part."""
    seats = min(64, options.rows)
    sample = make_sample(config, spaces, options.rows // seats, seats)
    policy = config.build_on(device, spaces, 0)
    learner = PPO(
        epochs=options.epochs, minibatch_size=options.minibatch, clip_apart=False, learning_rate=1e-4
    ).build(policy, 0)
    rng = np.random.default_rng(0)
    seen = {
        "obs": sample["obs"].reshape(-1, *sample["obs"].shape[2:])[
            rng.integers(0, sample["done"].size, options.batch)
        ]
    }
    outs = [allocate(config.answer(spaces), (options.batch,)) for _ in range(2)]

    def train() -> int:
        return int(learner.update([sample], 0.0)["rows"]) * options.epochs

    def act() -> int:
        policy.act(seen, {}, False, outs[0])
        return options.batch

    def act_threaded() -> int:
        ends = [policy.begin(seen, {}, False, out) for out in outs]
        for _ in range(8):
            ends.pop(0)()
            ends.append(policy.begin(seen, {}, False, outs[0]))
            outs.reverse()
        for end in ends:
            end()
        return options.batch * 10

    parts = {"train": train, "act": act, "act, threaded": act_threaded}
    return {name: per_second(part, options.seconds) for name, part in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--minibatch", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1024, help="rows that act at a time")
    parser.add_argument("--seconds", type=float, default=2.0, help="of measuring, per number")
    parser.add_argument("--works", default="mlp,cnn", help=f"beginnings of names, of: {', '.join(WORKS)}")
    options = parser.parse_args()
    limit_threads(1)
    gpu = choose_device("auto", 0)
    devices = ["cpu"] if gpu == "cpu" else ["cpu", gpu]
    if gpu == "cpu":
        print("no GPU here: the CPU's column only; nothing below was run on a GPU")
    else:
        import torch

        print(f"{gpu}: {torch.cuda.get_device_name(gpu)}")
    print(
        f"{options.rows} rows, minibatches of {options.minibatch}, {options.epochs} epochs; acting in "
        f"batches of {options.batch}; rows per second"
    )
    print(
        f"{'':20} {'':14}",
        *(f"{device:>12}" for device in devices),
        f"{'ratio':>8}" if len(devices) > 1 else "",
    )
    for name, (spaces, config) in WORKS.items():
        if not name.startswith(tuple(options.works.split(","))):
            continue
        found = [measure(spaces, config, device, options) for device in devices]
        for part in found[0]:
            numbers = [column[part] for column in found]
            ratio = f"{numbers[1] / numbers[0]:8.2f}" if len(numbers) > 1 else ""
            print(f"{name:20} {part:14}", *(f"{number:12,.0f}" for number in numbers), ratio)


if __name__ == "__main__":
    main()
