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

import numpy as np

from tidemill.api.experiment import Experiment
from tidemill.core.errors import ConfigError
from tidemill.streams.sources import Newest
from tidemill.workers.actor_config import ActorConfig, PlayerSpec
from tidemill.workers.agent import Agent
from tidemill.workers.blocks import Columns, InStep, Terms, fill
from tidemill.workers.ring import EnvTarget


def in_lockstep(experiment: Experiment, spec: PlayerSpec) -> bool:
    """True when a consumer of the spec's samples trains in lockstep with those who make
    them."""
    return any(experiment.in_lockstep(stream) for stream in spec.streams)


def check_lockstep(experiment: Experiment, config: ActorConfig) -> None:
    """Raise `ConfigError` for agent specs that cannot go in lockstep with their
    trainers."""
    specs = [spec for spec in config.agents if in_lockstep(experiment, spec)]
    for spec in specs:
        if spec.mode != "fixed" or spec.bootstrap != 1:
            raise ConfigError(
                f'agent spec "{spec.match}": mode = "{spec.mode}" and bootstrap = {spec.bootstrap}, but its '
                "trainer has max_policy_lag = 0, so that "
                'each sample must end where the version does; take mode = "fixed" and bootstrap = 1, or '
                "allow some lag"
            )
        if spec.sample_steps != specs[0].sample_steps:
            raise ConfigError(
                f'agent specs "{specs[0].match}" and "{spec.match}" have sample_steps = '
                f"{specs[0].sample_steps} and {spec.sample_steps}, but "
                "max_policy_lag = 0 ends the samples of all agents of an environment at once; make them equal"
            )
        if spec.parameters != Newest():
            raise ConfigError(
                f'agent spec "{spec.match}": parameters = {spec.parameters}, but its trainer has '
                "max_policy_lag = 0 and trains only on rows that its "
                "newest version acted on; take samples = None for agents that play others"
            )
        for trainer, policy in (
            item for stream in spec.streams for item in experiment.in_lockstep(stream).items()
        ):
            if policy != spec.policy:
                raise ConfigError(
                    f'agent spec "{spec.match}" plays policy "{spec.policy}", but {trainer}, which gets its '
                    f'samples, trains "{policy}" with '
                    "max_policy_lag = 0, only on rows that the newest version of that very policy acted on; "
                    "give these samples another stream"
                )


class LockstepRows(InStep):
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

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms)
        self._everyone = np.arange(terms.seats)

    def has_room(self) -> bool:
        """See `Blocks.has_room`: a sample has its slot from its first row on."""
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
        spec, position, seats = self._terms.spec, self.position, self._everyone
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
            array[: len(stay)] = array[np.minimum(start + stay, self._kept - 1), seats]
        position -= start
        self._terms.samples.commit()
        self._terms.on_sent()


def lockstep_blocks(terms: Terms) -> LockstepRows | LockstepColumns:
    """Return the blocks of an agent spec in lockstep, and offer their slots."""
    terms.samples.offer(terms.schema, terms.need.rows, terms.need.columns, terms.need.slots)
    return LockstepColumns(terms) if terms.same_step else LockstepRows(terms)


class LockstepAgent(Agent):
    """An agent whose rows are `LockstepRows` or `LockstepColumns`."""

    _blocks: LockstepRows | LockstepColumns

    def fills(self) -> bool:
        """Complete the rows that were asked for. True when some seat has all rows of a
        sample."""
        self._complete()
        return self._blocks.full()

    def cut(self) -> None:
        """Send what there is of a sample; all rows are complete."""
        self._blocks.cut()

    def settled(self) -> bool:
        """True when the sample was given back, and the next one has room."""
        return self._blocks.settled()

    def ask_again(self) -> None:
        """Begin the next sample: ask the newest version for its first actions."""
        blocks, open_seats = self._blocks, (~self.finished).nonzero()[0]
        self._client.refresh()
        if isinstance(blocks, Columns):
            absent = np.setdiff1d(open_seats, self._asking)  # type: ignore[arg-type]
            blocks.arrays["truncated"][blocks.position[absent] - 1, absent] = True
            self._asked, self._asking = (blocks.position[open_seats] - 1, open_seats), open_seats
        elif len(open_seats) == self._seats:
            self._asked, self._asking = blocks.position - 1, None
        else:
            self._asked, self._asking = (blocks.position - 1, open_seats), open_seats
        self._extra = 0
        if len(open_seats):
            observation, state = (
                {n: blocks.arrays[n][self._asked] for n in names}
                for names in (self._observation_names, self._state_names)
            )
            self._request = self._client.post_request(observation, state, self._deterministic)


class LockstepTarget(EnvTarget):
    """A target some of whose agents are `LockstepAgent`."""

    _waits = False
    """Samples were sent, and not yet all given back."""

    def _agents_ready(self) -> bool:
        if not super()._agents_ready():
            return False
        agents = [agent for agent in self._agents if isinstance(agent, LockstepAgent)]
        if not self._waits:
            if not max([agent.fills() for agent in agents]):  # of each one, whatever the others say
                return True
            for agent in agents:
                agent.cut()
            self._waits = True
        if not all(agent.settled() for agent in agents):
            return False
        self._waits = False
        for agent in agents:
            agent.ask_again()
        return super()._agents_ready()
