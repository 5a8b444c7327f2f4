"""Evaluates a run's policies: so many episodes of the run's own environment, played by a
checkpoint, and what came of them.

Which episodes count is fixed before the first begins (so many per lane), never by which
of them end first: those would be the short ones.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tidemill.api.algorithm import ROW_FIELDS
from tidemill.api.environment import Environment, Tick
from tidemill.api.experiment import Experiment
from tidemill.api.spaces import schema_of_space
from tidemill.api.stream import InferenceClient
from tidemill.core.clock import Clock, awake
from tidemill.core.errors import ConfigError, EnvironmentFault, RunError, did_you_mean
from tidemill.core.forgiving_output import forgiving_output
from tidemill.core.seeding import derive_seed
from tidemill.envs.episode_counter import EpisodeCounter
from tidemill.run.folder import RunFolder
from tidemill.run.trust import Trust
from tidemill.streams.sources import Fixed
from tidemill.trained.load import LoadedPolicy, Weights, load_fixed, load_policy
from tidemill.transports.local import LocalBell
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.actor_environments import build_environment
from tidemill.workers.agent_spec import AgentSpec, PlayerSpec, match_agents
from tidemill.workers.block_agent import BlockAgent
from tidemill.workers.episode_info import InfoReader, Numbers, means
from tidemill.workers.ring import EnvTarget
from tidemill.workers.sample_writers.unread import Unread

LANES = 10
ROWS = AgentSpec(sample_steps=16)  # how many are written before they are written over
TICK_DEADLINE = 600.0  # seconds for one tick of an environment that steps elsewhere
RESAMPLES = 2000  # of the bootstrap; the ends of a 95 % interval move by about 2 % of its width


@dataclass(frozen=True)
class Played:
    """One episode of one seat. `episode` is its number (see `EpisodeCounter`)."""

    spec: int
    lane: int
    episode: int
    ret: float
    length: int
    info: Numbers


class Player:
    """Lets policies play an environment, as an actor's target whose rows nobody reads.

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
        self._bell, self._counter = LocalBell(), EpisodeCounter(environment)
        self._counter.bind(groups)
        self._counter.on_ready(self._bell.ring)
        self._clients, agents, ticks = list[InferenceClient](), list[BlockAgent](), list[Tick]()
        for spec, group, policy in zip(specs, groups, policies, strict=True):
            seats, observation = environment.lanes * len(group), policy.spaces.observation
            schema = {**schema_of_space(observation, "obs"), **ROW_FIELDS, **policy.schema, **policy.state}
            rows, client = Unread(ROWS, schema, seats, environment.same_step), policy.client(seats)
            self._clients.append(client)
            agents.append(BlockAgent(schema, seats, deterministic or spec.deterministic, client, rows))
            ticks.append(Tick.allocate(observation, seats, environment.info, environment.same_step))
        self._target = EnvTarget(self._counter, agents, ticks, Clock(), InfoReader())

    @property
    def episodes(self) -> NDArray[np.int64]:
        """Finished episodes of each lane (see `EpisodeCounter`)."""
        return self._counter.episodes

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
        target.observe()
        for client in self._clients:
            client.flush()
        played = []
        for number, (agent, ended) in enumerate(zip(target.agents, self._counter.ended, strict=True)):
            for (lane, episode), (ret, length, _, said) in zip(ended, agent.episodes, strict=True):
                played.append(Played(number, lane, episode, ret, length, said))
            agent.episodes.clear()
        return played


@dataclass(frozen=True)
class SpecEvaluation:
    """What the agents of one spec reached. Returns are undiscounted; a length is a number
    of actions; `info` has the mean of each number that the environment said of episodes
    at their end.

    interval: 95 % confidence interval of the mean return, by the percentile bootstrap
        over whole episodes of the environment (agents of one episode are not
        independent); None of a single one
    """

    agents: str
    policy: str
    update: int
    steps: int
    episodes: int
    mean: float
    deviation: float
    interval: tuple[float, float] | None
    min: float
    max: float
    length_mean: float
    length_min: int
    length_max: int
    returns: list[float]
    lengths: list[int]
    info: dict[str, float]


@dataclass(frozen=True)
class EvaluationResult:
    """What `evaluate` found, as written into ``evaluation-<update>.json``; one entry of
    `specs` per agent spec. `episodes` are the environment's."""

    episodes: int
    lanes: int
    seed: int
    deterministic: bool
    env_steps: int
    seconds: float
    specs: list[SpecEvaluation]

    @property
    def mean(self) -> float:
        """Mean return of the first (often the only) agent spec."""
        return self.specs[0].mean


@forgiving_output()
def evaluate(
    run: str | Path,
    episodes: int = 100,
    *,
    lanes: int = LANES,
    seed: int | None = None,
    deterministic: bool = True,
    checkpoint: str | int | Path | None = None,
    version: str | int | None = None,
    file: str | Path | None = None,
    actor: str | None = None,
    trust: Trust = False,
    quiet: bool = False,
) -> EvaluationResult:
    """Play `episodes` episodes of the run's environment with its trained policies, and
    return (and write down) what they reached.

    lanes: copies of the environment; each plays its share of the episodes
    seed: of the environment and of sampling; by default the experiment's (the random
        streams are not those of training)
    deterministic: act by the mode of every policy's distribution; False: as in training
    checkpoint: see `tidemill.load`; `version`, `file` and `trust` likewise
    actor: the group of actors whose environment and agents are taken, when there are
        several
    quiet: show no progress
    """
    for name, value in (("episodes", episodes), ("lanes", lanes)):
        if value < 1:
            raise ConfigError(f"{name} = {value} must be at least 1")
    folder = RunFolder.open(Path(run))
    experiment = folder.experiment(Path(file) if file is not None else None, trust).experiment
    group, actors = find_actors(experiment, actor)
    root = experiment.seed if seed is None else seed
    weights = Weights(checkpoint, version)
    lanes = 1 if actors.environment.single else min(lanes, episodes)
    shares = np.array([episodes // lanes + (lane < episodes % lanes) for lane in range(lanes)])
    environment = build_environment(
        actors.replace(environment=actors.environment.bare().scored()),
        lanes,
        derive_seed(root, "evaluate", group),
    )
    began = perf_counter()
    try:
        policies = load_policies(
            folder, experiment, actors, environment, weights, derive_seed(root, "evaluate")
        )
        if experiment.curriculum:
            environment.enter_stage(experiment.curriculum[-1].options)
        player = Player(environment, actors.agents, policies, deterministic)
        played = _play(player, shares, quiet)
    finally:
        environment.close()
    if actors.environment.rewarded and not quiet:
        print(
            "note: returns are of whole games and their own rewards; training has "
            f"{actors.environment.rewarded}",
            file=sys.stderr,
        )
    specs = [
        _summarise(
            spec.match,
            policy,
            [p for p in played if p.spec == number],
            derive_seed(root, "evaluate", "bootstrap"),
        )
        for number, (spec, policy) in enumerate(zip(actors.agents, policies, strict=True))
    ]
    evaluation = EvaluationResult(
        episodes, lanes, root, deterministic, player.steps, round(perf_counter() - began, 3), specs
    )
    try:
        folder.write(f"evaluation-{policies[0].update}.json", evaluation)
    except OSError as error:
        print(
            f"warning: the evaluation could not be written into {folder.path}: {error.strerror}",
            file=sys.stderr,
        )
    return evaluation


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


def _play(player: Player, shares: NDArray[np.int64], quiet: bool) -> list[Played]:
    """Play until every lane has done its share, and return the seats' episodes that began
    within it."""
    played: list[Played] = []
    total = int(shares.sum())
    with _progress(total, quiet) as show:
        while (player.episodes < shares).any():
            ended = [p for p in player.tick() if p.episode < shares[p.lane]]
            if ended:
                played += ended
                show(int(np.minimum(player.episodes, shares).sum()), float(np.mean([p.ret for p in played])))
    return played


class _progress:  # noqa: N801  used as a function
    """Shows a bar on a terminal, nothing elsewhere."""

    def __init__(self, total: int, quiet: bool) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("episodes"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(
            *columns, console=console, transient=True, disable=quiet or not console.is_terminal
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Callable[[int, float], None]:
        self._bar.start()
        return lambda done, mean: self._bar.update(
            self._task, completed=done, description=f"mean return {mean:.1f}"
        )

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()


def _summarise(agents: str, policy: LoadedPolicy, played: list[Played], seed: int) -> SpecEvaluation:
    if not played:
        raise RunError(f'no agent of "{agents}" finished an episode; the environment never shows them')
    played = sorted(played, key=lambda p: (p.lane, p.episode))
    returns, lengths = np.array([p.ret for p in played]), np.array([p.length for p in played])
    _, group = np.unique([(p.lane, p.episode) for p in played], axis=0, return_inverse=True)
    group = group.reshape(-1)
    return SpecEvaluation(
        agents=agents,
        policy=policy.name,
        update=policy.update,
        steps=policy.steps,
        episodes=len(played),
        mean=float(returns.mean()),
        deviation=float(returns.std(ddof=1)) if len(returns) > 1 else 0.0,
        interval=bootstrap(np.bincount(group, returns), np.bincount(group), seed),
        min=float(returns.min()),
        max=float(returns.max()),
        length_mean=float(lengths.mean()),
        length_min=int(lengths.min()),
        length_max=int(lengths.max()),
        returns=returns.tolist(),
        lengths=lengths.tolist(),
        info=means([p.info for p in played]),
    )


def bootstrap(sums: NDArray[Any], counts: NDArray[Any], seed: int) -> tuple[float, float] | None:
    """Return the 95 % percentile interval of the mean of values that come in independent
    groups, of which `sums` and `counts` are given.

    Efron, Tibshirani 1993, "An Introduction to the Bootstrap", section 13.3. None for a
    single group.
    """
    if len(sums) < 2:
        return None
    rng = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        drawn = rng.integers(0, len(sums), len(sums))
        means[i] = sums[drawn].sum() / counts[drawn].sum()
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)
