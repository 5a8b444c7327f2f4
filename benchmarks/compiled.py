"""What a row and epoch of PPO cost by torch's autograd, the same compiled
(`torch.compile`, which needs a C++ compiler), and written out in numpy.

    OMP_NUM_THREADS=1 python benchmarks/compiled.py
        [--rounds 15] [--minibatches 2048 512] [--images 256]

Networks, loss and ways are those of the reference of `tidemill bench`; compiled are
forward, loss and backward at once. Processor µs, the best of alternating rounds; seconds
of compiling apart.
"""

import argparse
import os
from collections.abc import Callable
from math import log
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

import torch
from torch import Tensor

from tidemill import PPO, ActorCritic
from tidemill.api.spaces import Box
from tidemill.bench.plain_mlps import PlainMLPs
from tidemill.bench.reference import (
    Columns,
    ReferenceNetwork,
    log_prob_entropy,
    loss_of,
    torch_step,
    train_part,
    weights_of,
)
from tidemill.core.blas_threads import limit_threads
from tidemill.nets.encoders import ObservationEncoder
from tidemill.nets.torch_copies import has_bfloat16


def stepping(ppo: PPO, network: ReferenceNetwork, backend: str) -> Callable[[Columns], None]:
    """Return a function that does one minibatch with torch's autograd, compiled by
    `backend` unless that is empty."""

    def evaluate(part: Columns) -> tuple[Tensor, Tensor, Tensor]:
        head, value = network(part["input"])
        return *log_prob_entropy(head, network.log_std, part["action"]), value

    loss = loss_of(ppo, evaluate)
    return torch_step(
        ppo,
        torch.compile(loss, fullgraph=True, dynamic=False, backend=backend) if backend else loss,
        list(network.parameters()),
    )


def measure(
    observation: Box,
    config: ActorCritic,
    actions: int,
    minibatch: int,
    count: int,
    rounds: int,
    backend: str,
) -> dict[str, float]:
    """Return µs a row and epoch by way, of epochs of `count` minibatches."""
    ppo = PPO(minibatch_size=minibatch, epochs=4)
    encoder = ObservationEncoder(observation, "auto")
    rows = count * minibatch
    network = ReferenceNetwork(config, encoder, actions)
    images = torch.randint(0, 256, (rows, *observation.shape), dtype=torch.uint8)
    columns = {
        "input": images if encoder.images else torch.randn(rows, encoder.width),
        "action": torch.randint(0, actions, (rows,)),
    }
    columns |= {
        "log_prob": torch.full((rows,), -log(actions)),
        "advantage": torch.randn(rows),
        "target": torch.randn(rows),
    }
    ways = {
        way: train_part(minibatch, columns, stepping(ppo, network, by))
        for way, by in (("autograd", ""), ("compiled", backend))
    }
    if not encoder.images:
        plain = PlainMLPs(weights_of(network), config, ppo)
        arrays = {name: column.numpy() for name, column in columns.items()}
        ways["numpy"] = lambda: plain.epoch(minibatch, arrays)
    began, best = perf_counter(), dict.fromkeys(ways, float("inf"))
    ways["compiled"]()
    compiling = perf_counter() - began
    for _ in range(rounds):
        for way, work in ways.items():
            start = process_time()
            work()
            best[way] = min(best[way], (process_time() - start) / rows * 1e6)
    return best | {"s to compile": compiling}


def main() -> None:
    """Print a line for each network and minibatch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--minibatches", type=int, nargs="*", default=[2048, 512], help="of the MLPs of CartPole"
    )
    parser.add_argument(
        "--images",
        type=int,
        nargs="*",
        default=[256],
        help="minibatches of Mnih et al.'s convolutions, in bfloat16 where the processor has that",
    )
    parser.add_argument(
        "--backend", default="inductor", help="of torch.compile: aot_eager traces, and compiles nothing"
    )
    given = parser.parse_args()
    limit_threads(1)
    torch.manual_seed(0)
    vector, screen = Box((4,), "float32"), Box((4, 84, 84), "uint8", (0.0,), (255.0,))
    works = [("MLP", vector, ActorCritic(), 2, size, 4) for size in given.minibatches]
    images = ActorCritic(convolutions="bfloat16" if has_bfloat16() else "float32")
    works += [(f"Nature CNN, {images.convolutions}", screen, images, 6, size, 2) for size in given.images]
    with TemporaryDirectory() as folder:
        # nothing is taken from an earlier run, and nothing stays
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        for name, observation, config, actions, minibatch, count in works:
            found = measure(observation, config, actions, minibatch, count, given.rounds, given.backend)
            print(
                f"{name}, minibatch {minibatch}: "
                f"{', '.join(f'{way} {value:.2f}' for way, value in found.items())}",
                flush=True,
            )


if __name__ == "__main__":
    main()
