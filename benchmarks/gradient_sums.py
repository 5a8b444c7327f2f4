"""What cutting a minibatch between two processes costs, and brings: microseconds of a
minibatch that one process does alone, and that two do by halves and sum; what a sum
takes; and a hand-over between two processes.

    OMP_NUM_THREADS=1 python benchmarks/gradient_sums.py [--seconds 2]

Who waits looks again and again, or sleeps on its bell at once. A hand-over rings the
other and waits to be rung. Two cores that nobody else has are needed; the ways are tried
by turns, and the medians of their rounds are told.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter

import numpy as np

from tidemill import PPO, ActorCritic
from tidemill.algorithms.policy_gradient import PolicyGradientLearner
from tidemill.api.algorithm import Sample
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.blas_threads import limit_threads
from tidemill.core.memory import MemfdSegment
from tidemill.layouts.probe import make_sample
from tidemill.streams.all_reduce import AllReduce
from tidemill.transports.shared import EventBell
from tidemill.transports.slots import SlotConsumer, SlotProducer
from tidemill.workers.agent_spec import AgentSpec

SPACES = Spaces(Box((8,), "float32"), Discrete(4))  # LunarLander's
ROWS = 2048
ROUNDS = 3
SIZES = (64, 128, 256)


def learner_and_sample(minibatch: int, rows: int) -> tuple[PolicyGradientLearner, Sample]:
    """Return a learner of two towers of 64 × 64, and rows for it."""
    config = ActorCritic(normalise_observations=False)
    policy = config.build(SPACES, 0)
    learner = PPO(minibatch_size=minibatch, epochs=1, clip_apart=False, learning_rate=1e-8).build(policy, 0)
    assert isinstance(learner, PolicyGradientLearner)
    return learner, make_sample(policy, config, SPACES, AgentSpec(), 8, rows)


def repeated(work: Callable[[], None], seconds: float) -> float:
    """Return the seconds of a call."""
    work()
    began, calls = perf_counter(), 0
    while perf_counter() - began < seconds:
        work()
        calls += 1
    return (perf_counter() - began) / calls


class Peer:
    """One of two processes."""

    def __init__(self, rank: int, segments: list[int], bells: list[int], sleeps: bool) -> None:
        self.rank, self._sleeps = rank, sleeps
        self.bell, self.other = EventBell(bells[rank]), EventBell(bells[1 - rank])
        self._ends = (
            SlotProducer(MemfdSegment(segments[rank]), self.other),
            SlotConsumer(MemfdSegment(segments[1 - rank]), self.other),
        )

    def reducer(self, nbytes: int) -> AllReduce:
        """Return this process's part of sums."""
        sender, receiver = self._ends
        return AllReduce(self.rank, {1 - self.rank: sender}, {1 - self.rank: receiver}, nbytes)

    def wait(self, looks: Iterator[None]) -> None:
        """Wait for the other's part."""
        for _ in looks:
            if self._sleeps:
                self.bell.wait(0.1)


def both(sleeps: bool, work: Callable[[Peer, int], None], times: int) -> float:
    """Return the seconds of a time, of `times` that two processes do `work`."""
    segments = [os.memfd_create(f"sums {rank}") for rank in range(2)]
    bells = [os.eventfd(0) for _ in range(2)]
    child = os.fork()
    peer = Peer(int(child == 0), segments, bells, sleeps)
    try:
        work(peer, 20)  # what happens once only
        began = perf_counter()
        work(peer, times)
        seconds = perf_counter() - began
    finally:
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        for descriptor in (*segments, *bells):
            os.close(descriptor)
    return seconds / times


def updates(minibatch: int) -> Callable[[Peer, int], None]:
    """Return the work of updates by halves of `ROWS`."""
    reducers: list[AllReduce] = []
    learner, sample = learner_and_sample(minibatch, ROWS // 2)

    def work(peer: Peer, times: int) -> None:
        if not reducers:
            reducers.append(peer.reducer(learner.largest_sum))
        for _ in range(times):
            for array in learner.parallel_update([sample], 0.0):
                peer.wait(reducers[0].add(array))

    return work


def sums() -> Callable[[Peer, int], None]:
    """Return the work of sums alone, of a gradient of LunarLander's network."""
    reducers: list[AllReduce] = []
    array = np.zeros(10_000, np.float32)

    def work(peer: Peer, times: int) -> None:
        if not reducers:
            reducers.append(peer.reducer(array.nbytes))
        for _ in range(times):
            peer.wait(reducers[0].add(array))

    return work


def hand_overs(peer: Peer, times: int) -> None:
    """Ring, and be rung."""
    for _ in range(times):
        if peer.rank == 0:
            peer.other.ring()
        peer.bell.wait(1.0)
        if peer.rank == 1:
            peer.other.ring()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.5, help="of each way, in a round")
    seconds = parser.parse_args().seconds
    limit_threads(1)
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        found.setdefault("hand-over and back, asleep", []).append(both(True, hand_overs, 2000))
        for sleeps, name in ((False, "looking"), (True, "asleep")):
            found.setdefault(f"a sum alone, {name}", []).append(both(sleeps, sums(), 2000))
        for size in SIZES:
            learner, sample = learner_and_sample(size, ROWS)
            alone = repeated(lambda learner=learner, sample=sample: learner.update([sample], 0.0), seconds)
            per_update = ROWS // size
            found.setdefault(f"a minibatch of {size}, alone", []).append(alone / per_update)
            for sleeps, name in ((False, "looking"), (True, "asleep")):
                took = both(sleeps, updates(size), max(3, int(seconds / alone)))
                found.setdefault(f"a minibatch of {size}, by halves, {name}", []).append(took / per_update)
    for name, times in found.items():
        print(f"{median(times) * 1e6:8.1f} µs ({min(times) * 1e6:.1f} … {max(times) * 1e6:.1f})  {name}")


if __name__ == "__main__":
    main()
