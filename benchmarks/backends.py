"""What hand-written numpy saves beside torch: acting, and a minibatch both ways.

OMP_NUM_THREADS=1 python benchmarks/backends.py

Cells of `RecurrentActorCritic` (both towers, 8 inputs), and the convolution of a
`QNetwork` for MinAtar's images; best of calls by turns, in microseconds.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from tidemill import RecurrentActorCritic
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.blas_threads import limit_threads
from tidemill.core.schema import allocate
from tidemill.nets.actor_critic import ActorCriticPolicy
from tidemill.nets.convolution import Convolution, TorchConvolutions, Trunk
from tidemill.nets.trainable import Network

SPACES = Spaces(Box((8,), "float32"), Discrete(4))


def by_turns(name: str, numpy: Callable[[], object], of_torch: Callable[[], object]) -> None:
    """Print the best times of two calls, made by turns for half a second."""
    best, calls = [float("inf")] * 2, (numpy, of_torch)
    end = time.perf_counter() + 0.5
    while time.perf_counter() < end:
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    print(f"{name:32} numpy {best[0] * 1e6:8.0f} torch {best[1] * 1e6:8.0f} × {best[1] / best[0]:.2f}")


def train(network: Network, inputs: Any, action: Any, ones: Any, into: Any) -> None:
    network.forward(inputs, action)
    network.backward(ones, None, ones, into)


def cells(cell: Any, width: int) -> None:
    config, rng = RecurrentActorCritic(cell=cell, width=width), np.random.default_rng(0)
    policies = [ActorCriticPolicy(config, SPACES, 0, backend) for backend in ("numpy", "torch")]
    for n in (8, 32, 64):
        seen = {"obs": rng.standard_normal((n, 8), np.float32)}
        state = allocate(config.state(SPACES), (n,))
        out = allocate({**config.answer(SPACES), **config.state(SPACES)}, (n,))
        acts = [partial(policy.act, seen, state, False, out) for policy in policies]
        by_turns(f"{cell} {width}, acting, {n} rows", *acts)
    for length, count in ((16, 4), (16, 16), (16, 32), (128, 4)):
        n = length * count
        given = {
            "features": rng.standard_normal((n, 8), np.float32),
            "on_reset": rng.random((length, count)) < 0.02,
            "rows": np.arange(n),
            **allocate(config.state(SPACES), (count,)),
        }
        of_numpy = given, {"action": rng.integers(0, 4, n)}, np.ones(n, np.float32)
        inputs, action = ({k: torch.from_numpy(v) for k, v in part.items()} for part in of_numpy[:2])
        calls = []
        for policy, arrays in zip(policies, (of_numpy, (inputs, action, torch.ones(n))), strict=True):
            network, out = policy.network, np.zeros(policy.network.size, np.float32)
            into = out if network.library == "numpy" else torch.from_numpy(out)

            calls.append(partial(train, network, *arrays, into))
        by_turns(f"{cell} {width}, learning, {length} × {count} rows", *calls)


def convolve(trunk: Trunk, images: Any, of_features: Any, into: Any) -> None:
    trunk.forward(images)
    trunk.backward(of_features.copy(), into)


def convolution(channels: int) -> None:
    rng, kernels = np.random.default_rng(0), ((16, 3, 1),)
    weights = {
        "convolution.0.weight": rng.standard_normal((9 * channels, 16), np.float32),
        "convolution.0.bias": np.zeros(16, np.float32),
    }
    into = {name: array.copy() for name, array in weights.items()}
    both = Convolution(3, weights), TorchConvolutions(kernels, weights)
    for n in (1, 8, 32, 64, 128, 512):
        images = (rng.random((n, 10, 10, channels)) < 0.1).astype(np.float32)
        of_features = np.ones((n, 1024), np.float32)
        by_turns(f"{channels} channels, acting, {n} rows", *(partial(c.forward, images) for c in both))
        learns = [partial(convolve, c, images, of_features, into) for c in both]
        by_turns(f"{channels} channels, learning, {n} rows", *learns)


def main() -> None:
    limit_threads(1)
    torch.set_num_threads(1)
    for cell in ("lstm", "gru"):
        for width in (64, 128):
            cells(cell, width)
    for channels in (4, 10):
        convolution(channels)


if __name__ == "__main__":
    main()
