"""Evaluates a run's policies: so many episodes of the run's own environment, played by a
checkpoint, and what came of them.

Which episodes count is known before they begin (`counted_episodes`).
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from tidemill.core.config import check_counts
from tidemill.core.errors import RunError, no_exits
from tidemill.core.forgiving_output import forgiving_output
from tidemill.core.seeding import derive_seed
from tidemill.run.folder import RunFolder
from tidemill.run.trust import Trust
from tidemill.trained.episode_player import Played, Player, closing_after, find_actors, load_policies
from tidemill.trained.load import LoadedPolicy, Weights
from tidemill.trained.progress_bar import ProgressBar
from tidemill.workers.actor_environments import build_environment
from tidemill.workers.counted_episodes import counted_of
from tidemill.workers.info_numbers import means

LANES = 10
RESAMPLES = 2000  # of the bootstrap; the ends of a 95 % interval move by about 2 % of its width


@dataclass(frozen=True)
class SpecEvaluation:
    """What the agents of one spec reached. Returns are undiscounted; a length is a number
    of actions; `info` has the mean of each number that the environment said of episodes
    at their end.

    mean, deviation: mean and standard deviation of the returns
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
    `specs` per agent spec. `episodes` are the environment's, `env_steps` the steps of all
    lanes, `seconds` wall time."""

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
@no_exits()
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
    """Play `episodes` episodes of the environment of the run in folder `run` with its
    trained policies. Return what they reached: undiscounted returns, in the environment's
    reward units, and lengths, in steps (`.mean`; `.specs` has one entry per agent spec).
    It is also written into the folder, as ``evaluation-<update>.json``.

    episodes: number of episodes of the environment, each of all its agents
    lanes: copies of the environment; each plays its share of the episodes
    seed: of the environment and of sampling; by default the experiment's (the random
        streams are not those of training)
    deterministic: whether to take the likeliest action (of a Gaussian its mean); False:
        actions are drawn, as in training
    checkpoint: see `tidemill.load`; `version`, `file` and `trust` likewise
    actor: the group of actors whose environment and agents are taken, when there are
        several
    quiet: show no progress

    Raises `RunError`, `ConfigError`, `CheckpointError` or `DatabaseError`, and
    `EnvironmentFault` where the environment calls `sys.exit`.
    """
    check_counts(episodes=episodes, lanes=lanes)
    folder = RunFolder.open(Path(run))
    experiment = folder.experiment(file, trust).experiment
    group, actors = find_actors(experiment, actor)
    root = experiment.seed if seed is None else seed
    weights = Weights(checkpoint, version)
    lanes = 1 if actors.environment.single else min(lanes, episodes)
    shares = np.array([counted_of(lane, lanes, episodes) for lane in range(lanes)])
    environment = build_environment(
        actors.replace(environment=actors.environment.bare().scored()),
        lanes,
        derive_seed(root, "evaluate", group),
    )
    began = perf_counter()
    with closing_after(environment):
        policies = load_policies(
            folder, experiment, actors, environment, weights, derive_seed(root, "evaluate")
        )
        if experiment.curriculum:
            environment.enter_stage(experiment.curriculum[-1].options)
        player = Player(environment, actors.agents, policies, deterministic)
        played = _play(player, shares, quiet)
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


def _play(player: Player, shares: NDArray[np.int64], quiet: bool) -> list[Played]:
    """Play until every lane has done its share, and return the seats' episodes that began
    within it."""
    played: list[Played] = []
    total = int(shares.sum())
    with ProgressBar("episodes", total, quiet, MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        while (player.episodes < shares).any():
            ended = [p for p in player.tick() if p.episode < shares[p.lane]]
            if ended:
                played += ended
                mean = np.mean([p.ret for p in played])
                bar.show(int(np.minimum(player.episodes, shares).sum()), f"mean return {mean:.1f}")
    return played


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
