"""What the lane loop costs per tick beyond the environments' own steps: python
benchmarks/lanes.py [lanes]"""

import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from tidemill.api.environment import Tick
from tidemill.envs.lanes import LaneLoop


class Still(gymnasium.Env[Any, Any]):
    """Costs nothing and never ends."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        """Prepare the only answer."""
        self._answer = (np.zeros(4, np.float32), 1.0, False, False, {})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Return zeros."""
        return self._answer[0], {}

    def step(self, action: Any) -> Any:
        """Return zeros."""
        return self._answer


def fastest(call: Callable[[], object], repeats: int = 7, number: int = 2000) -> float:
    """Return the microseconds of one call, the best of several runs (others use the
    machine too)."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(number):
            call()
        best = min(best, time.perf_counter() - start)
    return best / number * 1e6


def main(lanes: int) -> None:
    """Print the figures."""
    loop = LaneLoop([Still() for _ in range(lanes)], "Still", seed=0)
    loop.bind([[0]])
    tick = Tick.allocate(loop.agents[0].spaces.observation, lanes, loop.info, loop.same_step)
    actions = {"action": np.zeros(lanes, np.int64)}
    loop.send([actions], np.ones(lanes, np.bool_))
    loop.recv([tick])
    steps, nothing = [env.step for env in loop.envs], np.zeros(lanes, np.bool_)

    def bare() -> None:
        for step in steps:
            step(0)

    def whole() -> None:
        loop.send([actions], nothing)
        loop.recv([tick])

    floor, cost = fastest(bare), fastest(whole)
    over = cost - floor
    print(
        f"{lanes} lanes: bare loop {floor:.1f} µs, lane loop {cost:.1f} µs per tick, overhead {over:.1f} µs "
        f"= {over / lanes:.2f} µs per lane"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
