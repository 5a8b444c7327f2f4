"""What the rows of an environment of PettingZoo's must be: plain loops over its own
interface, agent by agent, and games by the script."""

from collections.abc import Callable
from typing import Any

import numpy as np

Choose = Callable[[str, Any], Any]  # agent's name, its observation → its action


class Stuck(Exception):
    """Agents live, and none of them has an observation."""


class Book:
    """The rows of one seat, as a loop that knows nothing of lanes and ticks writes them
    down."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.open = False

    def act(self, choose: Choose, agent: str, observation: Any) -> Any:
        action = choose(agent, observation)
        self._row(observation, action=action, on_reset=not self.open)
        self.open = True
        return action

    def pay(self, reward: float) -> None:
        if self.open:
            self.rows[-1]["reward"] += float(reward)

    def end(self, observation: Any, done: bool) -> None:
        """The open episode is over; without a final observation, the last one stands for
        it."""
        if self.open:
            self._row(
                self.rows[-1]["obs"] if observation is None else observation, done=done, truncated=not done
            )
            self.open = False

    def _row(self, observation: Any, **more: Any) -> None:
        self.rows.append(
            {
                "obs": observation,
                "action": None,
                "reward": 0.0,
                "on_reset": False,
                "done": False,
                "truncated": False,
            }
            | more
        )


def raw_parallel(env: Any, seed: int, choose: Choose, games: int, limit: int = 0) -> dict[str, Book]:
    books = {agent: Book() for agent in env.possible_agents}
    for game in range(games):
        seen, _ = env.reset(seed=seed if game == 0 else None)
        actions = {
            agent: books[agent].act(choose, agent, seen[agent]) for agent in env.agents if agent in seen
        }
        steps = 0
        while actions or any(book.open for book in books.values()):
            seen, paid, ended, cut, _ = env.step(actions)
            steps += 1
            actions = {}
            for agent, book in books.items():
                book.pay(paid.get(agent, 0.0))
                if ended.get(agent) or cut.get(agent):
                    book.end(seen.get(agent), bool(ended.get(agent)))
                elif steps == limit:
                    book.end(seen.get(agent), False)
                elif agent in env.agents and agent in seen:
                    actions[agent] = book.act(choose, agent, seen[agent])
            if not env.agents:
                for agent, book in books.items():
                    book.end(seen.get(agent), not any(cut.values()))
            elif steps != limit and not any(book.open for book in books.values()):
                raise Stuck
    return books


def raw_turns(env: Any, seed: int, choose: Choose, games: int) -> dict[str, Book]:
    """By the loop that PettingZoo's documentation shows."""
    books = {agent: Book() for agent in env.possible_agents}
    for game in range(games):
        env.reset(seed=seed if game == 0 else None)
        for agent in env.agent_iter():
            observation, reward, ended, cut, _ = env.last()
            books[agent].pay(reward)
            if ended or cut:
                books[agent].end(observation, bool(ended))
                env.step(None)
            else:
                env.step(books[agent].act(choose, agent, observation))
    return books


def same(one: Any, other: Any) -> bool:
    """Whether two observations, of arrays and dicts, are equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(part, other[key]) for key, part in one.items())
    return np.array_equal(one, other)
