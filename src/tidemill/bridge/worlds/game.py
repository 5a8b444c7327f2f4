"""What the example worlds share: random numbers that are the same in every language,
options, and the loop that plays a game over the bridge."""

import argparse
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tidemill.bridge.protocol.side_channels import Channels, EnvironmentParameters, Statistics
from tidemill.bridge.world_side.bridge import Bridge
from tidemill.bridge.world_side.world import World
from tidemill.core.errors import TidemillError

Ints = NDArray[np.int64]
Doubles = NDArray[np.float64]
SLOTS = 10


class RandomStreams:
    """A stream of random numbers for each slot, of 32 bits of state each."""

    def __init__(self, seed: int, slots: int = SLOTS) -> None:
        self._state = np.zeros(slots, np.uint32)
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Begin all streams anew."""
        slots = np.arange(len(self._state), dtype=np.uint64)
        self._state[:] = (
            np.uint64(seed % (1 << 32) * 0x85EBCA6B % (1 << 32)) + slots * np.uint64(0xC2B2AE35)
        ) & np.uint64(0xFFFFFFFF)

    def next(self, slots: Ints) -> NDArray[np.uint32]:
        """Return 32 random bits for each of `slots`."""
        x = self._state[slots] + np.uint32(0x9E3779B9)
        self._state[slots] = x
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x7FEB352D)
        x ^= x >> np.uint32(15)
        x *= np.uint32(0x846CA68B)
        x ^= x >> np.uint32(16)
        return x

    def uniform(self, slots: Ints) -> Doubles:
        """Return a number in [0, 1) for each of `slots`."""
        uniform: Doubles = (self.next(slots) >> np.uint32(8)) / 16777216.0
        return uniform


class Game(ABC):
    """A game of `SLOTS` slots, at most one agent in each.

    world: as the trainer sees it
    """

    world: World

    def __init__(self, seed: int, parameters: EnvironmentParameters, statistics: Statistics) -> None:
        self.parameters, self.statistics = parameters, statistics
        self.randoms = RandomStreams(seed)
        self._seed = seed
        self.returns: list[float] = []
        """Of the episodes that are over."""

    def reset(self) -> None:
        """Begin all over; random numbers go on, unless the trainer has set another
        seed."""
        seed = int(self.parameters.get("seed", self._seed))
        if seed != self._seed:
            self._seed = seed
            self.randoms.seed(seed)
        self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Take all agents away."""

    @abstractmethod
    def tick(self) -> None:
        """Move every agent by its action, and ask for the next actions."""


def play(kind: type[Game], arguments: Sequence[str] | None = None) -> None:
    """Play a game with a trainer until it closes or, where there is none, so many
    episodes on the heuristic. What goes wrong is one line."""
    try:
        _play(kind, arguments)
    except TidemillError as error:
        sys.exit(str(error))


def _play(kind: type[Game], arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=kind.__doc__)
    parser.add_argument("--memory-path", help="where the trainer waits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--episodes", type=int, default=100, help="episodes to play without a trainer")
    options = parser.parse_args(arguments)
    parameters, statistics = EnvironmentParameters(), Statistics()
    game = kind(options.seed, parameters, statistics)
    bridge = Bridge(options.memory_path, channels=Channels([parameters, statistics]), on_reset=game.reset)
    bridge.add(game.world)
    trained = bridge.has_trainer
    game.reset()
    while trained or len(game.returns) < options.episodes:
        game.tick()
        if not bridge.exchange() and trained:
            break
    bridge.close()
    if not trained:
        print(f"mean return {np.mean(game.returns):.4f} over {len(game.returns)} episodes")
