"""Lets trained policies play the environment of their run: for evaluations and videos."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidemill.api.algorithm import ROW_FIELDS
from tidemill.api.environment import Environment, Tick
from tidemill.api.experiment import Experiment
from tidemill.api.spaces import schema_of_space
from tidemill.api.stream import InferenceClient
from tidemill.core.clock import Clock, awake
from tidemill.core.errors import (
    SIGNALLED,
    EnvironmentFault,
    RunError,
    did_you_mean,
    foreign,
    message_of,
    place,
)
from tidemill.core.forgiving_output import printable
from tidemill.core.seeding import derive_seed
from tidemill.run.folder import RunFolder
from tidemill.streams.sources import Fixed
from tidemill.trained.load import LoadedPolicy, Weights, load_fixed, load_policy
from tidemill.transports.local import LocalBell
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.agent_spec import AgentSpec, PlayerSpec, match_agents
from tidemill.workers.block_agent import BlockAgent
from tidemill.workers.info_numbers import InfoReader, Numbers
from tidemill.workers.ring import EnvTarget
from tidemill.workers.sample_writers.unread import Unread

ROWS = AgentSpec(sample_steps=16)  # how many are written before they are written over
TICK_DEADLINE = 600.0  # seconds for one tick of an environment that steps elsewhere


@dataclass(frozen=True)
class Played:
    """One episode of one seat. `episode` is the number of the lane's in which it began;
    where agents are independent, it counts those of the spec's agents of the lane as they
    begin."""

    spec: int
    lane: int
    episode: int
    ret: float
    length: int
    info: Numbers


class Player:
    """Lets policies play an environment, as an actor's target whose rows nobody reads.

    A seat's episode lasts from its first observation to its end or cut, a lane's until
    all of its seats are finished.

    policies: one per agent spec
    deterministic: ask every policy for its mode; False leaves it to each spec
    """

    def __init__(
        self,
        environment: Environment,
        specs: Sequence[PlayerSpec],
        policies: Sequence[LoadedPolicy],
        deterministic: bool,
    ) -> None:
        groups = match_agents(environment.agents, specs)
        for spec, group, policy in zip(specs, groups, policies, strict=True):
            spaces = environment.agents[group[0]].spaces
            if spaces != policy.spaces:
                raise RunError(
                    f'the agents "{spec.match}" see and do something else than policy "{policy.name}" was '
                    f"trained on; evaluate it in the environment of its run.\nHere: {spaces}\nThen: "
                    f"{policy.spaces}"
                )
        self._environment, self._bell = environment, LocalBell()
        environment.bind(groups)
        environment.on_ready(self._bell.ring)
        self._clients, agents, ticks = list[InferenceClient](), list[BlockAgent](), list[Tick]()
        for spec, group, policy in zip(specs, groups, policies, strict=True):
            seats, observation = environment.lanes * len(group), policy.spaces.observation
            schema = {**schema_of_space(observation, "obs"), **ROW_FIELDS, **policy.schema, **policy.state}
            rows, client = Unread(ROWS, schema, seats, environment.same_step), policy.client(seats)
            self._clients.append(client)
            agents.append(BlockAgent(schema, seats, deterministic or spec.deterministic, client, rows))
            ticks.append(Tick.allocate(observation, seats, environment.info, environment.same_step))
        self._target = EnvTarget(environment, agents, ticks, Clock(), InfoReader())
        self._agents = agents
        self._number = [np.zeros((environment.lanes, len(group)), np.int64) for group in groups]
        self._begun = [np.zeros((environment.lanes, 1), np.int64) for _ in groups]
        self.episodes = np.zeros(environment.lanes, np.int64)
        """Finished episodes of each lane; where agents are independent, of each spec's
        agents that have begun any, as many as have ended of those that began first."""

    @property
    def steps(self) -> int:
        """Steps of all lanes; resets are none."""
        return self._target.steps

    def tick(self) -> list[Played]:
        """Play one tick and return the seats' episodes that ended in it."""
        target, deadline = self._target, awake() + TICK_DEADLINE
        target.step()
        while not target.ready_to_observe():
            if awake() > deadline:
                raise EnvironmentFault(
                    f"the environment did not finish a tick within {TICK_DEADLINE:.0f} s; it hangs, or its "
                    "server is away"
                )
            self._bell.wait(0.1)
        before = [agent.finished.copy() for agent in self._agents]
        target.observe()
        for client in self._clients:
            client.flush()
        changed = any(len(agent.begun) or agent.episodes for agent in self._agents)
        return self._count(before) if changed else []

    def _count(self, before: Sequence[NDArray[np.bool_]]) -> list[Played]:
        """Number the episodes that begin, and return those that ended. `before` has of
        each spec the seats that were between two episodes."""
        environment, played = self._environment, list[Played]()
        over, idle, goes_on, begins = [], [], [], []
        for spec, (agent, was, number) in enumerate(zip(self._agents, before, self._number, strict=True)):
            began = np.zeros(number.shape, np.bool_)
            began.reshape(-1)[agent.begun] = True
            begins.append(began)
            # once all ends of the tick are taken in, and before anybody begins
            between = agent.finished.reshape(number.shape) | began
            ended = (between > was.reshape(number.shape)).nonzero()
            over.append(between.all(axis=1))
            idle.append(was.reshape(number.shape).all(axis=1))
            goes_on.append(began.any(axis=1) & (not environment.same_step))
            for lane, episode, (ret, length, _, said) in zip(
                ended[0].tolist(), number[ended].tolist(), agent.episodes, strict=True
            ):
                played.append(Played(spec, lane, episode, ret, length, said))
            agent.episodes.clear()
        if not environment.independent:
            # a lane goes on when somebody begins in the tick in which all others finish
            self.episodes += np.logical_and.reduce(over) & ~np.logical_or.reduce(
                [np.logical_and.reduce(idle), *goes_on]
            )
        for number, began, begun in zip(self._number, begins, self._begun, strict=True):
            first = begun + began.cumsum(axis=1) - 1 if environment.independent else self.episodes[:, None]
            np.copyto(number, first, where=began)
            begun += began.sum(axis=1, keepdims=True)
        if environment.independent:
            ended_first = [
                np.where(agent.finished.reshape(number.shape), begun, number).min(axis=1)
                for agent, number, begun in zip(self._agents, self._number, self._begun, strict=True)
            ]
            shown = np.concatenate(self._begun, axis=1).T > 0
            most = np.iinfo(np.int64).max
            self.episodes = np.where(shown, ended_first, most).min(axis=0) * shown.any(axis=0)
        return played


@contextmanager
def closing_after(environment: Environment) -> Iterator[None]:
    """Close the environment in the end. What that raises is told, and costs nothing of
    what was done in it."""
    try:
        yield
    finally:
        try:
            environment.close()
        except SIGNALLED:
            raise
        except BaseException as error:
            print(
                f"warning: the environment raised {type(error).__name__} as it was closed: "
                f"{printable(message_of(error))}{place(foreign(error))}",
                file=sys.stderr,
            )


def find_actors(experiment: Experiment, group: str | None) -> tuple[str, ActorConfig]:
    """Return name and configuration of the actors called `group`, or of the only ones."""
    known = experiment.groups(ActorConfig)
    if group is not None:
        if group not in known:
            raise RunError(f'the experiment has no actors called "{group}"; {did_you_mean(group, known)}')
        return group, known[group]
    if not known:
        raise RunError("the experiment has no actors, so no environment to play in")
    environments = [config.environment for config in known.values()]
    if any(environment != environments[0] for environment in environments):
        raise RunError(
            f"the experiment's actors play in different environments; say which of {', '.join(known)} by "
            "actor (--actor)"
        )
    return next(iter(known.items()))


def load_policies(
    folder: RunFolder,
    experiment: Experiment,
    actors: ActorConfig,
    environment: Environment,
    weights: Weights,
    seed: int,
) -> list[LoadedPolicy]:
    """Return the policy of each agent spec: with these `weights`, or with those that it
    is fixed to. Specs that share both get the same."""
    loaded: dict[tuple[str, Fixed | None], LoadedPolicy] = {}
    groups = match_agents(environment.agents, actors.agents)
    for spec, group in zip(actors.agents, groups, strict=True):
        name, fixed = spec.policy, spec.parameters if isinstance(spec.parameters, Fixed) else None
        own = derive_seed(seed, "policy", name)
        if (name, fixed) in loaded:
            continue
        if fixed is None:
            loaded[name, fixed] = load_policy(folder, experiment, name, weights, own)
        else:
            loaded[name, fixed] = load_fixed(
                experiment, name, fixed, environment.agents[group[0]].spaces, own
            )
    return [
        loaded[spec.policy, spec.parameters if isinstance(spec.parameters, Fixed) else None]
        for spec in actors.agents
    ]
