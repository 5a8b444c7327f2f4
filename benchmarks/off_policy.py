"""What training from a replay memory costs: milliseconds of an arrival, of a batch that
is drawn, and of an update, ours and plain torch's; then, by the clock, of works' updates
by numpy and by the native core, and of their bare matrix products, on one thread and on
as many as there are cores.

OMP_NUM_THREADS=1 python benchmarks/off_policy.py [--repeats 200]
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from tidemill import DQN, SAC, PrioritisedReplay, QNetwork, Replay, SquashedGaussian
from tidemill.api.algorithm import ARRIVAL_FIELDS, Sample
from tidemill.api.buffer import Demand
from tidemill.api.edges import Edge
from tidemill.api.spaces import Box, Discrete, Spaces, schema_of_space
from tidemill.core.blas_threads import limit_threads
from tidemill.core.cores import cores
from tidemill.native.library import choices, use_threads
from tidemill.streams.samples import ChannelSampleConsumer, ChannelSampleProducer
from tidemill.transports.local import local_endpoints

CARTPOLE = Spaces(Box((4,), "float32"), Discrete(2))
MINATAR = Spaces(Box((10, 10, 4), "bool", (0,), (1,)), Discrete(3))
CHEETAH = Spaces(Box((17,), "float32"), Box((6,), "float32", (-1.0,), (1.0,)))


def median(call: Callable[[], object], repeats: int) -> float:
    """Return the processor milliseconds (other work on the machine counts less in them)
    of a call."""
    call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return float(np.median(times)) * 1e3


def replay_of(config: Replay, seats: int, batch: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return what sends a row of each seat and has it stored, and what draws a batch and
    gives it back with new priorities, of a replay that holds some rows."""
    ends = local_endpoints(["actor", "trainer"], [Edge("rows", "channel", "actor", ("trainer",))])
    producer = ChannelSampleProducer([[ends["actor"][0].producer("rows")]])
    fields = {
        **schema_of_space(CARTPOLE.observation, "obs"),
        **ARRIVAL_FIELDS,
        **schema_of_space(CARTPOLE.action, "action"),
    }
    producer.offer(fields, 1, seats, 2)
    buffer: Any = config.build(
        ChannelSampleConsumer([ends["trainer"][0].consumer("rows")], 0, 0), Demand(rows=batch, samples=1)
    )
    sent, priority = 0, np.random.default_rng(0).random(batch)

    def send() -> None:
        nonlocal sent
        block = producer.reserve()
        assert block is not None
        for array in block.values():
            array[...] = 0
        block["on_reset"][...] = sent % 200 == 0
        block["version"][...] = -1 if sent % 200 == 0 else 0
        block["done"][...] = sent % 200 == 199
        sent += 1
        producer.commit()
        buffer.receive()

    def draw() -> None:
        (held,) = buffer.take(0)
        held.sample["priority"][0] = priority
        buffer.release()

    for _ in range(20_000 // seats):
        send()
    return send, draw


def sample_of(spaces: Spaces, batch: int) -> Sample:
    """Return a batch as a replay draws it."""
    rng = np.random.default_rng(0)
    fields: dict[str, Any] = {
        "rewards": rng.standard_normal((batch, 1)).astype(np.float32),
        "steps": np.ones(batch, np.int32),
    }
    fields |= {"done": np.zeros(batch, bool), "weight": np.ones(batch, np.float32)}
    for name in ("obs", "next.obs"):
        shape = schema_of_space(spaces.observation, "obs")["obs"].shape
        dtype = schema_of_space(spaces.observation, "obs")["obs"].dtype
        fields[name] = (rng.standard_normal((batch, *shape)) > 0).astype(dtype)
    discrete = isinstance(spaces.action, Discrete)
    fields["action"] = (
        rng.integers(0, spaces.action.n, batch)  # type: ignore[union-attr]
        if discrete
        else rng.uniform(-1, 1, (batch, 6)).astype(np.float32)
    )
    return Sample({name: array[np.newaxis] for name, array in fields.items()})


def torch_dqn(batch: int, hidden: int) -> Callable[[], None]:
    """Return a double-DQN update of the same network in plain torch."""
    online, target = (
        nn.Sequential(
            nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2)
        )
        for _ in range(2)
    )
    adam = torch.optim.Adam(online.parameters(), lr=1e-3, fused=True)
    obs = torch.randn(batch, 4)
    then = torch.randn(batch, 4)
    action = torch.randint(2, (batch, 1))
    reward = torch.randn(batch, 1)

    def update() -> None:
        with torch.no_grad():
            goal = reward + 0.99 * target(then).gather(1, online(then).argmax(1, keepdim=True))
        loss = nn.functional.smooth_l1_loss(online(obs).gather(1, action), goal)
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), 10)
        adam.step()

    return update


def torch_sac(batch: int) -> Callable[[], None]:
    """Return a SAC update of the same networks in plain torch."""

    def network(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs)
        )

    actor = network(17, 12)
    critics = nn.ModuleList(network(23, 1) for _ in range(2))
    targets = nn.ModuleList(network(23, 1) for _ in range(2))
    log_alpha = torch.zeros(1, requires_grad=True)
    adams = [
        torch.optim.Adam(p, lr=3e-4, fused=True)
        for p in (critics.parameters(), actor.parameters(), [log_alpha])
    ]
    obs = torch.randn(batch, 17)
    then = torch.randn(batch, 17)
    taken = torch.rand(batch, 6) * 2 - 1
    reward = torch.randn(batch)

    def draw(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = actor(seen).chunk(2, 1)
        log_std = log_std.clamp(-20, 2)
        noise = torch.randn_like(mean)
        u = mean + log_std.exp() * noise
        slope = 2 * (np.log(2) - u - nn.functional.softplus(-2 * u))
        return u.tanh(), (-0.5 * noise**2 - log_std - 0.919 - slope).sum(1)

    def least(of: nn.ModuleList, seen: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([seen, action], 1)
        return torch.min(of[0](joined), of[1](joined))[:, 0]

    def update() -> None:
        alpha = log_alpha.exp().item()
        with torch.no_grad():
            action, log_prob = draw(then)
            goal = reward + 0.99 * (least(targets, then, action) - alpha * log_prob)
        joined = torch.cat([obs, taken], 1)
        loss = sum(0.5 * ((critic(joined)[:, 0] - goal) ** 2).mean() for critic in critics)
        adams[0].zero_grad()
        loss.backward()
        adams[0].step()
        critics.requires_grad_(False)
        action, log_prob = draw(obs)
        adams[1].zero_grad()
        (alpha * log_prob - least(critics, obs, action)).mean().backward()
        adams[1].step()
        critics.requires_grad_(True)
        adams[2].zero_grad()
        (-log_alpha.exp() * (log_prob.detach() - 6).mean()).sum().backward()
        adams[2].step()
        with torch.no_grad():
            for own, other in zip(targets.parameters(), critics.parameters(), strict=True):
                own.lerp_(other, 0.005)

    return update


def products(networks: list[tuple[int, list[int], int, int]], batch: int) -> Callable[[], None]:
    """Return the matrix products of an update in numpy, of networks of (how many, inputs
    and widths of the layers, times forward, 1 if its weights' gradients are taken); of
    two critics the inputs' gradients, too."""
    calls = []
    for count, widths, forward, trained in networks:
        for number, (inputs, outputs) in enumerate(pairwise(widths)):
            x, w, g = (np.ones(s, np.float32) for s in ((batch, inputs), (inputs, outputs), (batch, outputs)))
            into = [np.empty_like(a) for a in (g, w, x)]
            calls += [(x, w, into[0])] * count * forward
            calls += [(x.T, g, into[1])] * count * trained
            below = trained * (number > 0) + (count > 1) * trained
            calls += [(g, w.T, into[2])] * count * below

    def multiply() -> None:
        for a, b, out in calls:
            np.matmul(a, b, out=out)

    return multiply


def beside_products(threads: int, rounds: int = 12) -> None:
    """Print the milliseconds of works' updates beside those of their products, by turns,
    all on so many threads: the median and the least of all rounds."""
    limit_threads(threads)
    use_threads(threads)
    works: dict[str, tuple[Any, Any, Spaces, int, Callable[[], None]]] = {
        "SAC, 256 + 256, batch 256": (
            SAC(),
            SquashedGaussian(),
            CHEETAH,
            256,
            products([(1, [17, 256, 256, 12], 2, 1), (2, [23, 256, 256, 1], 3, 1)], 256),
        ),
        "DQN, 64 + 64, batch 64": (
            DQN(double=False),
            QNetwork(hidden=(64, 64), duelling=False),
            CARTPOLE,
            64,
            products([(1, [4, 64, 64, 2], 2, 1)], 64),
        ),
    }
    for name, (algorithm, policy, spaces, batch, bare) in works.items():
        sample, calls = sample_of(spaces, batch), max(1, 1280 // batch)
        contest: dict[str, Callable[[], object]] = {"bare products": bare}
        for native in choices():
            learner = algorithm.build(policy.replace(native=native).build(spaces, 0), 0)
            contest[native] = partial(learner.update, [sample], 0.0)
        found: dict[str, list[float]] = {what: [] for what in contest}
        for _ in range(rounds):
            for what, call in contest.items():
                time.sleep(0.1)  # threads of the one before wait awake for some time
                begun = time.perf_counter()
                while time.perf_counter() - begun < 0.1:
                    call()
                begun = time.perf_counter()
                for _ in range(calls):
                    call()
                found[what].append((time.perf_counter() - begun) / calls * 1e3)
        for what, times in found.items():
            took = f"{np.median(times):7.3f} (least {min(times):7.3f}) ms"
            print(f"{name:26} threads {threads} {what:14} {took}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=200)
    repeats = parser.parse_args().repeats
    limit_threads(1)
    torch.set_num_threads(1)
    for config in (Replay(capacity=100_000, steps=3), PrioritisedReplay(capacity=100_000, steps=3)):
        for seats in (1, 32):
            send, draw = replay_of(config, seats, 64)
            print(
                f"{type(config).__name__:18} a row of {seats:2} seats {median(send, repeats):7.3f} ms   a "
                f"batch of 64 {median(draw, repeats):7.3f} ms"
            )
    updates: dict[str, tuple[Callable[[], object], Callable[[], object] | None]] = {}
    for name, network, spaces, batch, torchs in (
        ("DQN, CartPole, 128 + 128, batch 64", QNetwork(duelling=False), CARTPOLE, 64, torch_dqn(64, 128)),
        ("DQN, MinAtar, convolution, batch 32", QNetwork(hidden=(128,)), MINATAR, 32, None),
        ("DQN, CartPole, noisy, 51 atoms, batch 64", QNetwork(noise=0.5, atoms=51), CARTPOLE, 64, None),
    ):
        learner, sample = DQN().build(network.build(spaces, 0), 0), sample_of(spaces, batch)
        updates[name] = (lambda learner=learner, sample=sample: learner.update([sample], 0.0)), torchs  # type: ignore[misc]
    for batch in (128, 256):
        learner, sample = SAC().build(SquashedGaussian().build(CHEETAH, 0), 0), sample_of(CHEETAH, batch)
        ours = lambda learner=learner, sample=sample: learner.update([sample], 0.0)  # noqa: E731
        updates[f"SAC, HalfCheetah, 256 + 256, batch {batch}"] = ours, torch_sac(batch)
    for name, (here, there) in updates.items():
        beside = f"   plain torch {median(there, repeats):7.3f} ms" if there is not None else ""
        print(f"{name:42} {median(here, repeats):7.3f} ms{beside}")
    for threads in sorted({1, cores()}):
        beside_products(threads)


if __name__ == "__main__":
    main()
