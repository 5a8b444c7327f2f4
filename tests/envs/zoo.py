"""Small PettingZoo environments that follow a script, for the tests of the adapter (and
found there by name, as a user's would be).

Every observation is float32 [lane, agent, game, step, 0]: lane is the seed less `base`,
game counts the resets.
"""

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv

ACTIONS = 4


class Panic(BaseException):
    """What a panic in Rust is in Python: no `Exception`."""


class _Scripted:
    """What both kinds share."""

    metadata = {"name": "scripted"}  # noqa: RUF012
    lane, game, now = -1, -1, 0

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-np.inf, np.inf, (5,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(ACTIONS)

    def see(self, agent: str) -> Any:
        return np.array([self.lane, self.possible_agents.index(agent), self.game, self.now, 0], np.float32)

    def begin(self, seed: int | None) -> None:
        if seed is not None:
            self.lane, self.game = seed - self.base, -1  # as if it were new
        self.game += 1
        self.now = 0

    def pay(self, agent: str, action: int) -> float:
        """A reward that tells apart agents, steps and actions, exact in float32."""
        return float(
            action
            + 4 * self.possible_agents.index(agent)
            + 16 * self.now
            + 1024 * (self.game % 8)
            + 8192 * self.lane
        )


class Meadow(_Scripted, ParallelEnv):
    """A script has one text per agent, a letter per step:

    o    lives and has an observation
    h    lives and has none (absent)
    .    is away
    D T  ends, is cut, with a final observation
    d t  ends, is cut, without one

    Actions must come from just those that had an observation; an absent agent's "action"
    is 3. The game is over when nobody lives.
    """

    def __init__(self, script: list[str], base: int = 0, fault: str = "") -> None:
        self.script, self.base, self.fault = script, base, fault
        self.possible_agents = [f"{'ab'[i % 2]}_{i}" for i in range(len(script))]
        self.agents: list[str] = []

    def letter(self, agent: str) -> str:
        text = self.script[self.possible_agents.index(agent)]
        return text[self.now] if self.now < len(text) else "."

    def look(self) -> Any:
        self.agents = [agent for agent in self.possible_agents if self.letter(agent) in "oh"]
        return {agent: self.see(agent) for agent in self.possible_agents if self.letter(agent) in "oDT"}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.begin(seed)
        if self.fault == "reset":
            raise RuntimeError("no grass")
        return self.look(), None if self.fault == "infos" else {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        assert {*actions} == {agent for agent in self.agents if self.letter(agent) == "o"}, (
            f"actions of {[*actions]} at {self.now}"
        )
        before = self.agents
        self.now += 1
        observations = self.look()
        rewards: dict[str, Any] = {agent: self.pay(agent, actions.get(agent, 3)) for agent in before}
        ended = {agent: self.letter(agent) in "Dd" for agent in before}
        cut = {agent: self.letter(agent) in "Tt" for agent in before}
        last = self.possible_agents[-1]
        match self.fault if self.now == 2 else "":
            case "raise":
                raise ZeroDivisionError("the wolf came")
            case "panic":
                raise Panic("the wolf came")
            case "shape":
                observations[last] = np.zeros(3, np.float32)
            case "nan":
                observations[last][4] = np.nan
            case "reward":
                rewards[last] = "much"
            case "unpaid" | "endless" | "uncut":
                del {"unpaid": rewards, "endless": ended, "uncut": cut}[self.fault][last]
            case "old":
                return observations, rewards, ended, {}
            case "unknown":
                self.agents = [*self.agents, "stranger"]
            case "blind":
                observations = {}
                ended[self.possible_agents[0]] = True
        return observations, rewards, ended, cut, {agent: {} for agent in before}


class Table(_Scripted, AECEnv):
    """Players that act in turn. `events` has a text per step, of words: D1 ends player 1,
    T1 cuts it, +1 lets it join (again).

    The game is over with the last step (cut, with `cuts`), or when nobody is left. Every
    step pays everybody who is there.
    """

    def __init__(
        self,
        players: int,
        events: list[str],
        there: tuple[int, ...] = (0,),
        cuts: bool = False,
        base: int = 0,
        empties: bool = False,
        fault: str = "",
    ) -> None:
        super().__init__()
        self.possible_agents = [f"{'ab'[i % 2]}_{i}" for i in range(players)]
        self.events = events
        self.there = there
        self.cuts = cuts
        self.base = base
        self.empties = empties
        self.fault = fault

    def observe(self, agent: str) -> Any:
        return self.see(agent)

    def join(self, agent: str) -> None:
        self.agents.append(agent)
        self.terminations[agent] = self.truncations[agent] = False
        self.rewards[agent] = self._cumulative_rewards[agent] = 0.0
        self.infos[agent] = {}

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.begin(seed)
        self.agents: list[str] = []
        self.terminations = {}
        self.truncations = {}
        self.rewards = {}
        self._cumulative_rewards = {}
        self.infos = {}
        for player in self.there:
            self.join(self.possible_agents[player])
        self.agent_selection = self.agents[0]
        self._skip_agent_selection = None

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            if self.fault == "undead":
                return
            self._was_dead_step(action)
            if self.fault == "reborn":
                self.join(agent)
                self.agent_selection = agent
            return
        assert 0 <= action < ACTIONS
        self._cumulative_rewards[agent] = 0.0
        self.now += 1
        if self.fault == "raise" and self.now == 2:
            raise ZeroDivisionError("the table fell")
        for other in self.agents:
            self.rewards[other] = self.pay(other, action)
        for word in self.events[self.now - 1].split():
            player = self.possible_agents[int(word[1:])]
            if word[0] == "+" and player not in self.agents:
                self.join(player)
            elif word[0] in "DT" and player in self.agents:
                (self.terminations if word[0] == "D" else self.truncations)[player] = True
        if self.now == len(self.events):
            over = self.truncations if self.cuts else self.terminations
            over.update(dict.fromkeys(self.agents, True))
        place = self.agents.index(agent) + 1
        order = [*self.agents[place:], *self.agents[:place]]
        self._accumulate_rewards()
        if self.empties and self.now == len(self.events):
            self.agents = []  # against the rules, and seen in the wild
            return
        self.agent_selection = next(
            (a for a in order if not (self.terminations[a] or self.truncations[a])), agent
        )
        self._deads_step_first()


class Branches(_Scripted, ParallelEnv):
    """One agent's mask comes in its info: of a MultiDiscrete, one array per branch, in
    every other step. Its state is float64."""

    possible_agents = ["a", "b"]  # noqa: RUF012
    base = 0

    def action_space(self, agent: str) -> Any:
        return spaces.MultiDiscrete([2, 3]) if agent == "a" else spaces.Box(-1, 1, (2,), np.float32)

    def info(self) -> Any:
        masks = (np.array([1, 0], np.int8), np.array([0, 1, 1], np.int8))
        return {"a": {"action_mask": masks} if self.now % 2 == 0 else {}, "b": {}}

    def state(self) -> Any:
        return np.array([[self.game, self.now]], np.float64)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.begin(seed)
        self.agents = list(self.possible_agents)
        return {agent: self.see(agent) for agent in self.agents}, self.info()

    def step(self, actions: Any) -> Any:
        self.given = actions
        self.now += 1
        seen = {agent: self.see(agent) for agent in self.agents}
        flags = dict.fromkeys(self.agents, self.now == 4)
        rewards = {"a": 1.0, "b": 4.0}
        if self.now == 4:
            self.agents = []
        return seen, rewards, dict.fromkeys(flags, False), flags, self.info()


def parallel_env(**kwargs: Any) -> Any:
    return Meadow(**{"script": ["ooooD", "ooD"], **kwargs})


def anonymous() -> Any:
    env = Meadow(["oD"])
    del env.possible_agents
    return env


def not_an_env() -> object:
    return object()


class Nested(Branches):
    """The actions of both agents have parts, and so have the masks in their infos, which
    are as their spaces' `sample` takes them."""

    def action_space(self, agent: str) -> Any:
        parts = {"aim": spaces.Box(-1, 1, (2,), np.float32), "kind": spaces.MultiDiscrete([2, 3])}
        if agent == "a":
            return spaces.Dict({**parts, "more": spaces.Discrete(2)})
        return spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)])

    def info(self) -> Any:
        kind = (np.array([1, 0], np.int8), np.array([0, 1, 1], np.int8))
        masks = {"a": {"aim": None, "kind": kind, "more": None}, "b": (np.array([0, 1, 1], np.int8), None)}
        return {name: {"action_mask": mask} if self.now % 2 == 0 else {} for name, mask in masks.items()}


class Choosy(Meadow):
    """Its agents have more to choose from."""

    def __init__(self) -> None:
        super().__init__(["ooooD", "ooD"])

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(9)
