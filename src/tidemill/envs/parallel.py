"""PettingZoo's parallel environments: every agent that lives acts in every step."""

from collections.abc import Mapping
from typing import Any

from tidemill.core.errors import EnvironmentFault
from tidemill.envs.multi_agent import MASK, OWN, AgentLanes, picker
from tidemill.envs.space_values import brief
from tidemill.envs.tick_check import FLAGS


class ParallelLanes(AgentLanes):
    """L copies of a `pettingzoo.ParallelEnv`.

    An agent lives while it is in ``env.agents``. One that lives and has no observation is
    absent: it is asked for no action, and its episode goes on. One that leaves without
    being terminated or truncated is absent as well; it may come back, and when all have
    left its episode ends as theirs did. One that comes back after its end begins a new
    episode.
    """

    _at_once = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._all, self._every = picker(self._ids), {*self._ids}
        self._asked: list[list[int]] = [[] for _ in range(self.lanes)]  # the agents that act next

    def _begin(self, lane: int, seed: int | None) -> None:
        env = self.envs[lane]
        answer = self._reset(lane, seed)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise EnvironmentFault(
                f"{self.name}: lane {lane}: reset returned {brief(answer)} instead of (observations, infos)"
            )
        observations, infos = answer
        for agent in env.agents:
            number = self._number(lane, agent)
            if agent in observations:
                self._show(lane, number, observations[agent], infos.get(agent))
        if not self._living[lane]:
            raise EnvironmentFault(
                f"{self.name}: lane {lane}: reset returned no observation of an agent that lives "
                f"(env.agents: {env.agents})"
            )
        self._settle(lane, ())

    def _step(self, lane: int, given: list[Any], last: bool) -> None:
        env, first, asked = self.envs[lane], lane * self._count, self._asked[lane]
        if len(asked) == self._count:
            answer = env.step(dict(zip(self._ids, given[first : first + self._count], strict=True)))
        else:
            answer = env.step({self._ids[agent]: given[first + agent] for agent in asked})
        if not isinstance(answer, tuple) or len(answer) != 5:
            raise EnvironmentFault(
                f"{self.name}: lane {lane}: step returned {brief(answer)} instead of (observations, rewards, "
                "terminations, truncations, infos)"
            )
        observations, rewards, terminated, truncated, infos = answer
        for ends in (terminated, truncated):
            if not FLAGS.issuperset(map(type, ends.values())):
                for agent in ends:
                    self._over(lane, agent, terminated.get(agent, False), truncated.get(agent, False))
        self._infos[lane] = infos
        usual = len(asked) == len(env.agents) == self._count and all(
            self._every <= part.keys() for part in answer[:4]
        )
        if usual and not (last or any(terminated.values()) or any(truncated.values())):
            self._go_on(lane, observations, rewards, infos)
        else:
            self._change(lane, answer, last)

    def _go_on(
        self, lane: int, observations: Mapping[Any, Any], rewards: Mapping[Any, Any], infos: Mapping[Any, Any]
    ) -> None:
        """All agents lived and live."""
        seats = slice(lane * self._count, (lane + 1) * self._count)
        if self._aliases.active:
            self._observed[OWN][seats] = [
                self._copied(observations[agent], lane, number) for number, agent in enumerate(self._ids)
            ]
        else:
            self._observed[OWN][seats] = self._all(observations)
        self._rewards[seats] = (
            [self._paid_equally(lane, rewards, self._ids)] * self._count if self._team else self._all(rewards)
        )
        if self._masked:
            self._observed[MASK][seats] = [
                self._mask_of(lane, number, infos.get(agent)) for number, agent in enumerate(self._ids)
            ]
        self._present[seats] = True
        self._see_state(lane)

    def _change(self, lane: int, answer: tuple[Any, ...], last: bool) -> None:
        """Somebody is absent, appears, or is finished."""
        observations, rewards, terminated, truncated, infos = answer
        first, living = lane * self._count, {*self.envs[lane].agents}
        if self._team:
            paid = [
                agent
                for number, agent in enumerate(self._ids)
                if self._open[first + number] and agent in rewards
            ]
            rewards = dict.fromkeys(self._ids, self._paid_equally(lane, rewards, paid))
        over = [agent for agent in self._ids if terminated.get(agent) or truncated.get(agent)]
        for number, agent in enumerate(self._ids):
            if self._open[first + number]:
                if agent in observations and number in self._asked[lane]:
                    self._check_whole(lane, agent, answer)
                self._rewards[first + number] = rewards.get(agent, 0.0)
                if agent in observations and (agent in living or agent in over or not living):
                    self._show(lane, number, observations[agent], infos.get(agent))
                if agent in over or last:
                    self._end(lane, number, bool(terminated.get(agent)))
            elif agent in living and agent in observations and agent not in over and not last:
                self._show(lane, number, observations[agent], infos.get(agent))
        if not living:
            self._end_all(lane, done=not any(truncated.values()))
        self._settle(lane, () if last else [agent for agent in self.envs[lane].agents if agent not in over])

    def _check_whole(self, lane: int, agent: Any, answer: tuple[Any, ...]) -> None:
        """Raise `EnvironmentFault` where what a step returned lacks a part of an agent
        that was in it."""
        for name, part in zip(("reward", "termination", "truncation"), answer[1:4], strict=True):
            if agent not in part:
                raise EnvironmentFault(
                    f"{self.name}: lane {lane}: step returned an observation of agent {agent}, and no "
                    f"{name}; return one for every agent that acted"
                )

    def _settle(self, lane: int, waiting: Any) -> None:
        """See who acts next. `waiting` are those that live on."""
        first = lane * self._count
        for agent in waiting:
            self._number(lane, agent)
        if not self._living[lane] and waiting:
            raise EnvironmentFault(
                f"{self.name}: lane {lane}: {', '.join(map(str, waiting))} live (env.agents), but no agent "
                "has an observation, so that none can act; return an observation for those that are to act"
            )
        self._asked[lane] = [
            agent
            for agent in range(self._count)
            if self._open[first + agent] and self._present[first + agent]
        ]
        self._see_state(lane)

    def _doing(self, lane: int, given: list[Any]) -> str:
        taken = ", ".join(
            f"{self.agents[agent].name}: {brief(given[lane * self._count + agent])}"
            for agent in self._asked[lane]
        )
        return f"stepping with actions {taken}"
