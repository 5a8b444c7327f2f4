"""Ten agents, each on its way to a target on a square: continuous actions, all of them at
once.

# plays on its heuristic and prints what that reaches
python -m tidemill.bridge.worlds.reach
# trains it
tidemill train simulator:…/bridge/worlds/reach.py
"""

import numpy as np

from tidemill.bridge.protocol.side_channels import EnvironmentParameters, Statistics
from tidemill.bridge.protocol.specs import ActionTuple, Floats, Ints
from tidemill.bridge.world_side.world import World
from tidemill.bridge.worlds.game import SLOTS, Game, RandomStreams, play

NEAR = 0.1
LONGEST = 50


class Square:
    """The square: positions and targets of all agents, [slots, 2] each, moved at once. It
    knows of no bridge."""

    def __init__(self, randoms: RandomStreams, slots: int = SLOTS) -> None:
        self._randoms = randoms
        self.position, self.target = np.zeros((slots, 2)), np.zeros((slots, 2))
        self.steps = np.zeros(slots, np.int64)
        self.speed = 0.1

    def place(self, slots: "np.typing.NDArray[np.int64]") -> None:
        """Begin an episode for the agents of these slots."""
        uniform = self._randoms.uniform
        self.steps[slots] = 0
        for axis in (0, 1):
            self.position[slots, axis] = 2 * uniform(slots) - 1
        while len(slots):  # a target that is reached already is drawn anew
            for axis in (0, 1):
                self.target[slots, axis] = 2 * uniform(slots) - 1
            slots = slots[self.distance()[slots] <= NEAR]

    def distance(self) -> "np.typing.NDArray[np.float64]":
        """Return how far each agent is from its target."""
        way = self.target - self.position
        way *= way
        return np.sqrt(way[:, 0] + way[:, 1])

    def move(self, actions: Floats) -> tuple["np.typing.NDArray[np.float64]", "np.typing.NDArray[np.bool_]"]:
        """Move all agents; return their rewards, and who is there."""
        before = self.distance()
        step = np.nan_to_num(actions.astype(np.float64), nan=0.0).clip(-1, 1)
        np.clip(self.position + self.speed * step, -1, 1, out=self.position)
        after = self.distance()
        self.steps += 1
        there = after <= NEAR
        return before - after + there, there

    def observation(self) -> Floats:
        """Return what each agent sees: the way to its target, and where it is."""
        return np.concatenate([self.target - self.position, self.position], axis=1).astype(np.float32)


class Reach(Game):
    """The world "reach"."""

    def __init__(self, seed: int, parameters: EnvironmentParameters, statistics: Statistics) -> None:
        super().__init__(seed, parameters, statistics)
        self.world = World("reach", SLOTS, [(4,)], continuous_size=2, heuristic=self.heuristic)
        self.field = Square(self.randoms)
        self._playing = np.zeros(SLOTS, np.bool_)
        self._ids = np.arange(SLOTS)
        self._returns = np.zeros(SLOTS)

    def begin(self) -> None:
        self.field.speed = min(max(self.parameters.get("speed", 0.1), 0.01), 1.0)
        self._playing[:] = False

    def tick(self) -> None:
        ids, actions, _ = self.world.action_arrays()
        rewards, over, interrupted = np.zeros(SLOTS), np.zeros(SLOTS, np.bool_), np.zeros(SLOTS, np.bool_)
        new = (~self._playing).nonzero()[0]
        if len(ids):
            given = np.zeros((SLOTS, 2), np.float32)
            given[ids] = actions
            rewards, over = self.field.move(given)
            over &= self._playing
            interrupted = (self.field.steps == LONGEST) & ~over & self._playing
            over |= interrupted
        if len(new):
            self.field.place(new)
            rewards[new] = self._returns[new] = 0
            self._playing[new] = True
        self._returns += rewards
        seen = self.field.observation()
        if not over.any():
            self.world.request_decisions(self._ids, rewards, [seen])
            return
        asks, ends = (~over).nonzero()[0], over.nonzero()[0]
        self.world.request_decisions(asks, rewards[asks], [seen[asks]])
        self.world.end_episodes(ends, rewards[ends], [seen[ends]], interrupted[ends])
        self._playing[ends] = False
        self.returns += self._returns[ends].tolist()
        for steps in self.field.steps[ends].tolist():
            self.statistics.add("reach/steps", steps)

    def heuristic(self, ids: Ints, observations: list[Floats]) -> ActionTuple:
        """Go straight to the target."""
        return ActionTuple(np.clip(observations[0][:, :2] / self.field.speed, -1, 1).astype(np.float32))


if __name__ == "__main__":
    play(Reach)
