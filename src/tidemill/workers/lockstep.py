"""Lockstep: actors and a trainer by turns, which is synchronous, on-policy training
(`Trainer.max_policy_lag` = 0).

The trainer trains on one sample of each producer per update. An actor sends its sample,
and goes on once that was given back: by then the next version is published. The rows that
are to act next are asked for again: their first answer's value has closed the sample, the
action of the second opens the next, so that all rows that a sample trains are of one
version, the trainer's.

A sample ends for all seats of a target at once, those of other agent specs included: else
two targets might wait for each other's samples. Of a seat that is behind (it was absent,
or others began an episode within a tick) it has fewer rows then: the last one lends its
value, as that of a cut episode does (`truncated`), and fillers follow. One that is absent
then has done the action of its newest row already, an older version's. It is asked again
all the same, so that what it remembers comes from the new version, and the row stays
`truncated`: it is the one that nobody trains on.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np

from tidemill.api.experiment import Experiment
from tidemill.core.errors import ConfigError
from tidemill.streams.sources import Newest
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.agent_spec import in_lockstep
from tidemill.workers.block_agent import BlockAgent
from tidemill.workers.parameter_refresh import ParameterRefresh
from tidemill.workers.sample_writers.base import Columns, WriterTerms, fill
from tidemill.workers.sample_writers.fixed import AlignedBlock
from tidemill.workers.stages import ActorStages


def check_lockstep(experiment: Experiment, config: ActorConfig) -> None:
    """Raise `ConfigError` for agent specs that cannot go in lockstep with their
    trainers."""
    specs = [spec for spec in config.agents if in_lockstep(experiment, spec)]
    for spec in specs:
        if spec.mode != "fixed" or spec.bootstrap != 1:
            raise ConfigError(
                f'agent spec "{spec.match}": mode = "{spec.mode}" and bootstrap = {spec.bootstrap}, but its '
                "trainer has max_policy_lag = 0, so that each sample must end where the version does; take "
                'mode = "fixed" and bootstrap = 1, or allow some lag'
            )
        if spec.sample_steps != specs[0].sample_steps:
            raise ConfigError(
                f'agent specs "{specs[0].match}" and "{spec.match}" have sample_steps = '
                f"{specs[0].sample_steps} and {spec.sample_steps}, but max_policy_lag = 0 ends the samples "
                "of all agents of an environment at once; make them equal"
            )
        if spec.parameters != Newest():
            raise ConfigError(
                f'agent spec "{spec.match}": parameters = {spec.parameters}, but its trainer has '
                "max_policy_lag = 0 and trains only on rows that its newest version acted on; take samples "
                "= None for agents that play others"
            )
        for trainer, policy in (
            item for stream in spec.streams for item in experiment.in_lockstep(stream).items()
        ):
            if policy != spec.policy:
                raise ConfigError(
                    f'agent spec "{spec.match}" plays policy "{spec.policy}", but {trainer}, which gets its '
                    f'samples, trains "{policy}" with max_policy_lag = 0, only on rows that the newest '
                    "version of that very policy acted on; give these samples another stream"
                )


class LockstepRows(AlignedBlock):
    """All seats at the same row."""

    def full(self) -> bool:
        """True when a sample has all of its rows."""
        return self.position == self._rows

    def settled(self) -> bool:
        """True when every sample that was sent has been given back, and the next one has
        a slot."""
        return self._terms.samples.settled() and self.has_room()

    def cut(self) -> None:
        """End the sample here and send it; all rows written have their answers."""
        assert self.full()  # a row of each seat in every tick: no other agent of the target can be ahead
        self.send()

    def _columns(self) -> Columns:
        return LockstepColumns(self._terms)


class LockstepColumns(Columns):
    """Each seat at a row of its own; a sample has a column of each, in order."""

    def has_room(self) -> bool:
        """See `SampleWriter.has_room`: a sample has its slot from its first row on."""
        return self._terms.samples.reserve() is not None

    def send(self) -> bool:
        """Send nothing, which `cut` does for all agents at once."""
        return True

    def full(self) -> bool:
        """See `LockstepRows`."""
        return bool(self.position.max() >= self._terms.spec.rows)

    def settled(self) -> bool:
        """See `LockstepRows`."""
        return self._terms.samples.settled() and self.has_room()

    def cut(self) -> None:
        """See `LockstepRows`."""
        spec, position, seats = self._terms.spec, self.position, np.arange(len(self.position))
        slot = self._terms.samples.reserve()
        assert slot is not None  # the same one that `has_room` found
        length = np.minimum(position, spec.rows)
        for name, array in self.arrays.items():
            slot[name][:] = array[: spec.rows]
        fill(slot, np.arange(spec.rows)[:, None] >= length)
        slot["truncated"][length - 1, seats] |= (slot["version"][length - 1, seats] >= 0) & (
            length < spec.rows
        )
        # a seat that was never there yet has less
        start = np.maximum(length - spec.burn_in - spec.bootstrap, 0)
        stay = np.arange(int((position - start).max()))[:, None]
        for array in self.arrays.values():
            array[: len(stay)] = array[np.minimum(start + stay, self._private_rows - 1), seats]
        position -= start
        self._terms.samples.commit()
        self._terms.on_sent()


def lockstep_writer(terms: WriterTerms) -> LockstepRows | LockstepColumns:
    """Return the writer of an agent spec in lockstep."""
    return LockstepColumns(terms) if terms.same_step else LockstepRows(terms)


class LockstepGate:
    """Lets a target step until a sample of one of `agents` has all of its rows; then it
    sends what all of them have, and opens again once that was given back: the rows that
    are to act next are asked for again, the newest version.

    stages: says in which stage of the curriculum the actor goes on
    ring: the gates of all of the actor's targets, which open together, when it is the
        first one's turn: else chance would say whose actions are drawn first
    """

    def __init__(
        self,
        agents: Sequence[BlockAgent],
        refresh: ParameterRefresh,
        stages: ActorStages,
        ring: "list[LockstepGate]",
    ) -> None:
        self._agents, self._refresh, self._stages, self._ring = agents, refresh, stages, ring
        ring.append(self)
        self.waits = False
        """Samples were sent, and not yet all given back."""

    def _writers(self) -> list[LockstepRows | LockstepColumns]:
        return [cast("LockstepRows | LockstepColumns", agent.writer) for agent in self._agents]

    def opens(self) -> bool:
        """True when the target may step. Asked when no agent waits for an answer."""
        if not self.waits:
            for agent in self._agents:
                agent.complete()
            writers = self._writers()
            if not any(each.full() for each in writers):
                return True
            for each in writers:
                each.cut()
            self.waits = True
            if all(gate.waits for gate in self._ring):
                self._stages.end_round()
        if self is not self._ring[0] or not all(gate.waits and gate._settled() for gate in self._ring):
            return False
        if not self._stages.known():
            return False
        self._stages.begin_round()
        for gate in self._ring:
            gate._open()
        return all(agent.is_ready() for agent in self._agents)

    def _settled(self) -> bool:
        return all(each.settled() for each in self._writers())

    def _open(self) -> None:
        self.waits = False
        for agent in self._agents:
            self._refresh.next_samples(agent.client)
            agent.ask_again()
