"""What a random and a greedy player reach in simple_spread: the two ends of the gap that
learning is measured by.

python benchmarks/simple_spread.py
"""

from itertools import permutations

import numpy as np
from numpy.typing import NDArray

EPISODES = 1000
# seconds of its own velocity that a player looks ahead, so that it brakes in time; how
# near to stop. The best of a few
AHEAD, NEAR = 0.2, 0.02
STAY, LEFT, RIGHT, DOWN, UP = range(5)


def greedy(observations: dict[str, NDArray[np.float32]]) -> dict[str, int]:
    """Send every agent to a landmark of its own, so that the ways are shortest in sum,
    each along the longer axis of its way."""
    names = list(observations)
    seen = np.stack([observations[name] for name in names])
    count = len(names)
    way = seen[:, 4 : 4 + 2 * count].reshape(count, count, 2)  # [agent, landmark, axis]
    length = np.linalg.norm(way, axis=2)
    landmark = min(permutations(range(count)), key=lambda order: length[np.arange(count), order].sum())
    left = way[np.arange(count), landmark] - AHEAD * seen[:, :2]
    return {name: move(x, y) for name, (x, y) in zip(names, left, strict=True)}


def move(x: float, y: float) -> int:
    """Return the action that goes along the longer axis of (x, y)."""
    if max(abs(x), abs(y)) < NEAR:
        return STAY
    if abs(x) > abs(y):
        return RIGHT if x > 0 else LEFT
    return UP if y > 0 else DOWN


def main() -> None:
    """Play the same episodes with both, and print what an agent is paid per episode, as
    the mean of the three."""
    from mpe2 import simple_spread_v3

    env, rng = simple_spread_v3.parallel_env(), np.random.default_rng(1)
    players = {"random": lambda seen: {name: int(rng.integers(5)) for name in seen}, "greedy": greedy}
    for name, player in players.items():
        returns = np.zeros(EPISODES)
        for episode in range(EPISODES):
            seen, _ = env.reset(seed=episode)
            while env.agents:
                seen, paid, *_ = env.step(player(seen))
                returns[episode] += sum(paid.values()) / len(paid)
        print(
            f"{name}: {returns.mean():.2f} ± {1.96 * returns.std() / np.sqrt(EPISODES):.2f} (95 %) over "
            f"{EPISODES} episodes"
        )


if __name__ == "__main__":
    main()
