"""Agents that come and go in a corridor, and press a button at the end they are told: two
branches of actions, with masks.

# plays on its heuristic and prints what that reaches
python -m tidemill.bridge.worlds.corridor
# trains it
tidemill train simulator:…/bridge/worlds/corridor.py
"""

from dataclasses import dataclass

import numpy as np

from tidemill.bridge.protocol.side_channels import EnvironmentParameters, Statistics
from tidemill.bridge.protocol.specs import ActionTuple, Floats, Ints
from tidemill.bridge.world_side.world import Request, World
from tidemill.bridge.worlds.game import SLOTS, Game, play

CELLS = 7
LONGEST = 30
LEFT, RIGHT, PRESS = 1, 2, 1


@dataclass
class Walker:
    """One agent: where it is, and at which end (-1, 1) it is to press."""

    number: int
    goal: int
    cell: int = CELLS // 2
    steps: int = 0
    total: float = 0.0

    @property
    def at_an_end(self) -> bool:
        """It can press here."""
        return self.cell in (0, CELLS - 1)

    def seen(self) -> list[float]:
        """Return its observation: its cell, one-hot, its goal, and the time."""
        return [float(cell == self.cell) for cell in range(CELLS)] + [float(self.goal), self.steps / LONGEST]


class Corridor(Game):
    """The world "corridor"."""

    def __init__(self, seed: int, parameters: EnvironmentParameters, statistics: Statistics) -> None:
        super().__init__(seed, parameters, statistics)
        self.world = World("corridor", SLOTS, [(CELLS + 2,)], branches=(3, 2), heuristic=self.heuristic)
        self._slots: list[Walker | None] = [None] * SLOTS
        self._wait = list(range(1, SLOTS + 1))
        self._number = 0

    def begin(self) -> None:
        self._slots, self._wait = [None] * SLOTS, list(range(1, SLOTS + 1))

    def tick(self) -> None:
        actions = {event.agent_id: event.discrete.tolist() for event in self.world.actions()}
        for slot, agent in enumerate(self._slots):
            if agent is not None:
                self._act(slot, agent, *actions[agent.number])
                continue
            self._wait[slot] -= 1
            if self._wait[slot] == 0:
                agent = Walker(self._number, 1 if self._draw(slot) & 1 else -1)
                self._number += 1
                self._slots[slot] = agent
                self._ask(agent, 0.0)

    def _draw(self, slot: int) -> int:
        return int(self.randoms.next(np.array([slot]))[0])

    def _act(self, slot: int, agent: Walker, move: int, press: int) -> None:
        agent.steps += 1
        pressed = press == PRESS and agent.at_an_end
        reward = -0.02
        if pressed:
            reward += 1 if (agent.cell == 0) == (agent.goal < 0) else -1
        elif move == LEFT and agent.cell > 0:
            agent.cell -= 1
        elif move == RIGHT and agent.cell < CELLS - 1:
            agent.cell += 1
        agent.total += reward
        if not pressed and agent.steps < LONGEST:
            self._ask(agent, reward)
            return
        end = self.world.end_episode if pressed else self.world.interrupt_episode
        self._show(end(agent.number), agent, reward)
        self.returns.append(agent.total)
        self._slots[slot], self._wait[slot] = None, 1 + self._draw(slot) % 4

    def _ask(self, agent: Walker, reward: float) -> None:
        request = self._show(self.world.request_decision(agent.number), agent, reward)
        request.set_action_mask(0, [False, agent.cell == 0, agent.cell == CELLS - 1]).set_action_mask(
            1, [False, not agent.at_an_end]
        )

    def _show(self, request: Request, agent: Walker, reward: float) -> Request:
        return request.set_reward(reward).set_observation(0, agent.seen())

    def heuristic(self, ids: Ints, observations: list[Floats]) -> ActionTuple:
        """Go to the end that is the goal, and press."""
        cell, goal = observations[0][:, :CELLS].argmax(axis=1), observations[0][:, CELLS]
        there = cell == np.where(goal < 0, 0, CELLS - 1)
        return ActionTuple(
            None,
            np.stack([np.where(there, 0, np.where(goal < 0, LEFT, RIGHT)), there], axis=1).astype(np.int32),
        )


if __name__ == "__main__":
    play(Corridor)
