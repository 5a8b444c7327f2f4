"""What a PPO update costs: microseconds per row, all epochs together, by part.

OMP_NUM_THREADS=1 python benchmarks/learner.py [--rows 8192] [--epochs 4] [--minibatch
2048] [--images [--bfloat16]] [--repeats 10]
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

from tidemill.algorithms.batch_totals import BatchTotals, sums_of
from tidemill.algorithms.minibatches import gae_of, gather
from tidemill.algorithms.policy_gradient_formulas import gae
from tidemill.algorithms.policy_gradient_loss import Minibatches
from tidemill.algorithms.ppo import PPO, PPOLearner
from tidemill.api.algorithm import ROW_FIELDS, Sample
from tidemill.api.spaces import Box, Discrete, Spaces, schema_of_space
from tidemill.core.blas_threads import limit_threads
from tidemill.core.memory import keep_freed
from tidemill.core.schema import Arrays, allocate
from tidemill.nets.actor_critic import ActorCritic


def best(call: Callable[[], object], repeats: int) -> float:
    """Return the processor seconds (other work on the machine counts less in them) of the
    fastest of `repeats` calls, after one to warm up."""
    call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def make_sample(config: ActorCritic, spaces: Spaces, steps: int, seats: int) -> Sample:
    """Return a sample of random observations with the policy's own answers; one row in
    200 is final."""
    rng = np.random.default_rng(0)
    policy = config.build(spaces, 0)
    policy.version = 0
    fields = {**ROW_FIELDS, **schema_of_space(spaces.observation, "obs"), **config.answer(spaces)}
    sample = Sample(allocate(fields, (steps + 1, seats)))
    for name in schema_of_space(spaces.observation, "obs"):
        values = (
            rng.standard_normal(sample[name].shape)
            if sample[name].dtype.kind == "f"
            else rng.integers(0, 256, sample[name].shape)
        )
        sample[name][...] = values
    for t in range(steps + 1):
        out: Arrays = {name: sample[name][t] for name in config.answer(spaces)}
        policy.act(
            {name: sample[name][t] for name in schema_of_space(spaces.observation, "obs")}, {}, False, out
        )
    sample["done"][...] = rng.random((steps + 1, seats)) < 1 / 200
    sample["reward"][...] = np.where(sample["done"], 0, 1)
    sample["version"][...] = np.where(sample["done"], -1, 0)
    return sample


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minibatch", type=int, default=2048)
    parser.add_argument("--bfloat16", action="store_true", help="convolutions in bfloat16")
    parser.add_argument(
        "--images", action="store_true", help="Nature CNN on [4, 84, 84] instead of an MLP on 4 numbers"
    )
    parser.add_argument("--repeats", type=int, default=10, help="the fastest counts (images: one)")
    options = parser.parse_args()
    limit_threads(1)
    keep_freed()  # as workers do
    observation = Box((4, 84, 84), "uint8", (0.0,), (255.0,)) if options.images else Box((4,), "float32")
    spaces = Spaces(observation, Discrete(6 if options.images else 2))
    config = ActorCritic(
        convolutions="bfloat16" if options.bfloat16 else "float32", normalise_observations=False
    )
    seats = min(64, options.rows)
    sample = make_sample(config, spaces, options.rows // seats, seats)
    learner = PPO(
        epochs=options.epochs, minibatch_size=options.minibatch, clip_apart=False, learning_rate=1e-4
    ).build(config.build(spaces, 0), 0)
    assert isinstance(learner, PPOLearner)
    batch = gather([sample], gae_of(0.99, 0.95))
    repeats = 1 if options.images else options.repeats
    rows, s, acted = len(batch), sample, sample["version"] >= 0
    size = min(options.minibatch, rows)
    loss = learner.loss
    columns = loss.columns(batch, BatchTotals.of(sums_of(batch)))
    of = Minibatches(learner._source(batch, [sample]), columns, 1 / size)
    order = np.random.default_rng(0).permutation(rows)[:size]
    inputs, action = (
        {k: v[:size] for k, v in part.items()}
        for part in (learner.policy.prepare(batch.observation), columns[0])
    )
    if options.images:  # torch computes these
        from tidemill.nets.torch_copies import tensors

        inputs, action = tensors(inputs), tensors(action)
    passes = options.epochs * rows / size  # minibatches' worth of work in an update

    def minibatch() -> None:
        loss.differentiate(of, order)
        *parts, share = loss.parts.tolist()
        loss.descend(parts, share, 1e-4)

    parts = {
        "advantages (GAE)": best(
            lambda: gae(s["reward"], s["value"], s["done"], s["truncated"], acted, 0.99, 0.95), repeats
        ),
        "gather, GAE included": best(lambda: gather([sample], gae_of(0.99, 0.95)), repeats),
        "forward, all epochs": best(lambda: learner.policy.network.forward(inputs, action), repeats) * passes,
        "minibatch's gradient, all epochs": best(lambda: loss.differentiate(of, order), repeats) * passes,
        "the same and step, all epochs": best(minibatch, repeats) * passes,
        "update": best(lambda: learner.update([sample], 0.0), repeats),
    }
    print(f"{rows} rows, {options.epochs} epochs, minibatches of {size}; microseconds per row")
    for name, seconds in parts.items():
        print(f"{name:32} {seconds / rows * 1e6:8.3f}")


if __name__ == "__main__":
    main()
