"""Rounds: judges of an evaluation that counts updates (`Evaluation.updates`) play the
same games of a version, whoever is quick.

A target stops once each of its seats has played as many episodes of the version as
count, and goes on when all of them were given back: by then the evaluation's tag points
to the next version. An episode that began before goes on with that one, and counts for
neither.
"""

from collections.abc import Sequence
from typing import cast

from tidemill.streams.inline import InlineInferenceClient
from tidemill.workers.block_agent import BlockAgent
from tidemill.workers.parameter_refresh import ParameterRefresh
from tidemill.workers.sample_writers.concise import Concise
from tidemill.workers.stages import ActorStages


class RoundGate:
    """Lets a target step until its round is over; see the module's text.

    judged: the agent whose episodes count
    agents: all of the target's
    games: episodes of each seat in a round
    stages: says in which stage of the curriculum a version is played
    ring: the gates of all of the actor's targets, which open together, when it is the
        first one's turn: else chance would say whose actions are drawn first
    """

    def __init__(
        self,
        judged: BlockAgent,
        agents: Sequence[BlockAgent],
        games: int,
        refresh: ParameterRefresh,
        stages: ActorStages,
        ring: "list[RoundGate]",
    ) -> None:
        self._client = cast("InlineInferenceClient", judged.client)  # who draws plays in the actor
        self._writer = cast("Concise", judged.writer)
        self._agents, self._games, self._refresh, self._ring = agents, games, refresh, ring
        self._stages = stages
        ring.append(self)
        self.waits = True
        """The round is over, and not all of it was given back; or none has begun."""

    def opens(self) -> bool:
        """True when the target may step. Asked when no agent waits for an answer."""
        if not self.waits:
            if self.lacks_room():
                return False
            if self._writer.played.min() < self._games:
                return True
            self.waits = True
        if self is not self._ring[0] or not all(gate.waits and gate._settled() for gate in self._ring):
            return False
        for gate in self._ring:
            gate.waits, gate._writer.played[:] = False, 0
            self._refresh.next_samples(gate._client)
        self._stages.play(self._client.counters)
        return True

    def lacks_room(self) -> bool:
        """True while the round goes on, and the evaluation holds all slots. Then no other
        target is served, so that all draw in one order."""
        if self.waits or not all(agent.is_ready() for agent in self._agents):
            return False
        if self._writer.playing != self._client.version:  # a round is of one version
            self._writer.playing, self._writer.played[:] = self._client.version, 0
        for agent in self._agents:
            agent.get_action()  # completes the newest rows, and sends what is done
        return not all(agent.has_room() for agent in self._agents)

    def _settled(self) -> bool:
        return self._writer.settled()
