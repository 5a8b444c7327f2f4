"""PettingZoo's environments of agents that act in turn (AEC: agent, environment,
cycle).

A step of a lane is one agent's action; what it pays goes to all open episodes at once,
and finished agents take their dead steps within the tick.
"""

from typing import Any

from tidemill.core.errors import EnvironmentFault
from tidemill.envs.multi_agent import AgentLanes
from tidemill.envs.space_values import brief


class AECLanes(AgentLanes):
    """L copies of a `pettingzoo.AECEnv`. A step of a lane is the action of one agent; the
    one selected next is present, all others are absent.

    What a step pays (``env.rewards``) goes to every agent whose episode is open at once,
    so that it is part of the reward of the agent's own last action; until its next turn
    that adds up to the environment's cumulative reward. Finished agents that are selected
    take their dead step (``env.step(None)``) within the tick. One whose first selection
    finds it finished never had a turn, and no row.
    """

    _at_once = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._turn = [0] * self.lanes  # the agent that acts next

    def _begin(self, lane: int, seed: int | None) -> None:
        self._reset(lane, seed)
        self._select(lane, False)
        if not self._living[lane]:
            raise EnvironmentFault(
                f"{self.name}: lane {lane}: reset selects no agent that lives, so that none can act"
            )

    def _step(self, lane: int, given: list[Any], last: bool) -> None:
        env, first = self.envs[lane], lane * self._count
        env.step(given[first + self._turn[lane]])
        rewards, self._infos[lane] = env.rewards, env.infos
        if self._team:
            rewards = dict.fromkeys(self._ids, self._paid_equally(lane, rewards, [*rewards]))
        for number, agent in enumerate(self._ids):
            if self._open[first + number]:
                self._rewards[first + number] = rewards.get(agent, 0.0)
        self._select(lane, last)

    def _select(self, lane: int, last: bool) -> None:
        """Show the agent whose turn it is, once the finished ones before it have left."""
        env, first, cut = self.envs[lane], lane * self._count, False
        self._see_state(lane)
        for _ in range(2 * self._count + 1):
            if not env.agents:
                # those that left without a dead step end as the last ones did
                return self._end_all(lane, done=not cut)
            agent = env.agent_selection
            number = self._number(lane, agent)
            seat, done = first + number, bool(env.terminations[agent])
            if not self._over(lane, agent, env.terminations[agent], env.truncations[agent]):
                if self._open[seat] or not last:
                    self._show(lane, number, env.observe(agent), env.infos.get(agent))
                    self._turn[lane] = number
                if last:
                    self._end_all(lane, done=False)
                return None
            cut |= not done
            if self._open[seat]:
                self._show(lane, number, env.observe(agent), env.infos.get(agent))
                self._end(lane, number, done)
                # it leaves with its info
                self._infos[lane] = {**self._infos[lane], agent: env.infos.get(agent)}
            env.step(None)
        raise EnvironmentFault(
            f"{self.name}: lane {lane}: finished agents do not leave (the last was {env.agent_selection}); "
            "step(None) must remove them: call self._was_dead_step(action) there"
        )

    def _doing(self, lane: int, given: list[Any]) -> str:
        number = self._turn[lane]
        return (
            f"stepping: agent {self.agents[number].name}, action {brief(given[lane * self._count + number])}"
        )
