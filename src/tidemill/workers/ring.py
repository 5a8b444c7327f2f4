"""Environment targets and the ring that an actor turns."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import Environment, Tick
from tidemill.core.clock import Clock
from tidemill.envs.step_limit import cut
from tidemill.workers.agent import Agent
from tidemill.workers.said import Listener, Numbers


class EnvTarget:
    """One environment (one lane or many) and the agents in it. A tick is `step` and, once
    the environment is ready, `observe`."""

    def __init__(
        self,
        environment: Environment,
        agents: Sequence[Agent],
        ticks: Sequence[Tick],
        clock: Clock,
    ) -> None:
        self._environment, self._agents, self._ticks = environment, list(agents), list(ticks)
        for group, agent in enumerate(self._agents):
            agent.hear = partial(self._hear, group)
        self.listener = Listener()
        """What the environment says of episodes goes through it."""
        self._clock = clock
        self._stage = 0
        self._stepping = False  # sent and not yet received
        self._reset: NDArray[np.bool_] = np.ones(environment.lanes, np.bool_)
        self._forced = False  # cut every open episode at the next observation
        self.elsewhere = False
        """The environment was not ready when it was asked: it steps in a thread or a
        process of its own."""
        self.steps = 0
        """Env steps so far: lanes that stepped, resets and lost steps not counted."""

    def _hear(self, group: int, seats: Sequence[int]) -> list[Numbers]:
        return [self.listener.numbers(info) for info in self._environment.said(group, seats)]

    def all_done(self) -> bool:
        """True when every lane is finished and none of its seats waits for an answer: the
        next tick resets all of them."""
        return not self._stepping and bool(self._reset.all()) and self._agents_ready()

    def unmask_all_info(self) -> None:
        """Cut the episodes still open now: the next observations are their final ones,
        and their info is shown."""
        self._forced = True

    def ready_to_step(self) -> bool:
        """True when no agent waits for an answer, and the last tick was received."""
        return not self._stepping and self._agents_ready()

    def _agents_ready(self) -> bool:
        return all(agent.is_ready() for agent in self._agents)

    def reset(self) -> None:
        """Begin a tick that resets every lane. Where episodes are open it is their last:
        they are cut, and the tick after it resets their lanes."""
        if not self._reset.all():
            self.unmask_all_info()
        self.step()

    def enter_stage(self, stage: int, options: Mapping[str, Any]) -> None:
        """Begin episodes in this stage of the curriculum from the next tick on."""
        self._environment.enter_stage(options)
        self._stage = stage

    def step(self) -> None:
        """Begin a tick: take the actions from the agents and send them; lanes whose seats
        are all finished are reset instead."""
        actions = [agent.get_action() for agent in self._agents]
        left = self._clock.enter("environment")
        self._environment.send(actions, self._reset)
        self._clock.enter(left)
        for agent in self._agents:
            agent.stage = self._stage
        self._stepping = True
        self.elsewhere = False

    def ready_to_observe(self) -> bool:
        """True when a tick was begun, its answer has come, and there is room for its
        rows."""
        if not self._stepping:
            return False
        if not self._environment.ready():
            self.elsewhere = True
            return False
        return all(agent.has_room() for agent in self._agents)

    def observe(self) -> None:
        """Finish the tick: receive it, store its rows, post the requests."""
        for agent, tick in zip(self._agents, self._ticks, strict=True):
            agent.next_observation(tick)
        left = self._clock.enter("environment")
        self._environment.recv(self._ticks)
        self._clock.enter(left)
        self._stepping = False
        lanes = self._environment.lanes
        resets = int(np.count_nonzero(self._reset))
        self.steps += lanes - resets
        if self._environment.voids:
            self.steps -= int(np.count_nonzero(self._ticks[0].voided))
        for agent in self._agents if resets and len(self._agents) > 1 else ():
            agent.acting.reshape(lanes, -1)[self._reset] = -1
        if self._forced:
            every, before = np.ones(lanes, np.bool_), [agent.finished for agent in self._agents]
            cut(self._ticks, before, every, self._reset, self._environment.same_step)
            self._forced = False
        for agent, tick in zip(self._agents, self._ticks, strict=True):
            agent.observe(tick)
        finished = [
            a.finished if len(a.finished) == lanes else np.all(a.finished.reshape(lanes, -1), axis=1)
            for a in self._agents
        ]
        self._reset = finished[0] if len(finished) == 1 else np.logical_and.reduce(finished)


class EnvRing:
    """Targets in turn. One that is not ready holds up no other."""

    def __init__(self, targets: Sequence[EnvTarget]) -> None:
        self.targets = list(targets)
        self._at = 0
        self.waited = 0.0
        """Seconds so far that a slot was held back by its trainer, where one limits its
        steps."""

    def __iter__(self) -> Iterator[EnvTarget]:
        """Yield each target once, beginning with the one whose turn it is; the turn moves
        on with each. One whose environment steps elsewhere, and would now idle while the
        others are served, is yielded again, to be sent its next actions: its requests
        were answered at once."""
        for _ in self.targets:
            target = self.targets[self._at]
            self._at = (self._at + 1) % len(self.targets)
            yield target
            if target.elsewhere and target.ready_to_step():
                yield target
