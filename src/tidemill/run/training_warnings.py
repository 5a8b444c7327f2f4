"""What a run warns of by itself: metrics of a trainer that say that it does not learn, or
learns nothing any more, with the likely cause and the setting to try.

Each rule is a function of a `TrainerHistory`, which is made of the records of updates.
Thresholds are such that runs which learn keep away from them: `docs/experiments.md` says
how far.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from operator import attrgetter
from statistics import median
from typing import Any, NamedTuple

from tidemill.api.conditions import episode_metric

WINDOW = 20  # records of updates that a rule looks back on
SEVERAL = ("PettingZoo", "SimulatorEnvironment")  # kinds of environments of several agents
EPISODES = 300  # that may all be alike before that is odd
EXPLORATION = (
    ("entropy_coefficient", "entropy_coefficient=0.01"),
    ("epsilon", "epsilon=0.3"),
    ("exploration_noise", "exploration_noise=0.3"),
)  # settings that make a policy explore, the usual ones first
LONG = 60  # records from which on something has been so for long


class TrainerPoint(NamedTuple):
    """A point of a trainer's history: what a record says of its updates, NaN for what it
    does not say."""

    explained_variance: float = nan
    kl: float = nan
    clip_fraction: float = nan
    entropy: float = nan
    loss: float = nan
    """Of the values."""
    mean_return: float = nan
    learning_rate: float = nan
    episodes: float = nan


@dataclass
class TrainerHistory:
    """The history of a trainer, as far as rules need it.

    settings: its algorithm's, plain
    whole: whether it begins with the trainer's first update
    alone: whether an episode is of one agent, so that nobody's loss is another one's gain
    """

    settings: Mapping[str, Any]
    whole: bool = True
    alone: bool = True
    count: int = 0
    early: list[TrainerPoint] = field(default_factory=list)
    """The first `WINDOW` points."""
    late: deque[TrainerPoint] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """The last `WINDOW` points."""
    explained: float = -inf
    """The largest variance that was explained in half of `WINDOW` points in a row."""
    returns: tuple[float, float] = (inf, -inf)
    """The least and the largest mean return."""

    def add(self, point: TrainerPoint) -> None:
        """Add the newest point."""
        self.count += 1
        if len(self.early) < WINDOW:
            self.early.append(point)
        self.late.append(point)
        if len(self.late) == WINDOW:
            explained = _median(list(self.late)[WINDOW // 2 :], "explained_variance")
            self.explained = max(self.explained, explained) if isfinite(explained) else self.explained
        if isfinite(point.mean_return):
            self.returns = min(self.returns[0], point.mean_return), max(self.returns[1], point.mean_return)

    def lately(self, name: str) -> float:
        """Return the median of the last `WINDOW` points; NaN while there are fewer, or
        where one does not say it."""
        return _median(self.late, name) if len(self.late) == WINDOW else nan

    @property
    def risen(self) -> bool:
        """True where the last points have larger returns than the first that had any, or
        none is known."""
        first = next((p.mean_return for p in self.early if isfinite(p.mean_return)), nan)
        return not self.lately("mean_return") <= first

    @property
    def settled(self) -> bool:
        """True where the last points have returns at the largest, which hardly differ
        beside what they have risen by."""
        first = [point.mean_return for point in self.early if isfinite(point.mean_return)]
        rise = self.returns[1] - median(first) if first else 0.0
        return rise > 0 and all(point.mean_return >= self.returns[1] - 0.02 * rise for point in self.late)


def _median(points: "list[TrainerPoint] | deque[TrainerPoint]", name: str) -> float:
    values: list[float] = list(map(attrgetter(name), points))
    total = sum(values)  # NaN if any is, or infinities of both signs: each is looked at only then
    if not values or (total != total and any(value != value for value in values)):
        return nan
    return median(values)


class TrainingWarning(NamedTuple):
    """A training warning says what is odd, with the likely cause, and what to try."""

    what: str
    cure: str

    def __str__(self) -> str:
        return f"{self.what}; {self.cure}"


# ---- rules: in a cure, {algorithm} and {policy} stand for paths of settings -----------


def far_updates(history: TrainerHistory) -> TrainingWarning | None:
    """Tell of a policy most of whose rows are beyond the clip once an update is done."""
    clip, share = history.settings.get("clip"), history.lately("clip_fraction")
    if clip is None or not share > 0.5:
        return None
    what = f"{share:.0%} of rows are clipped (clip_fraction): "
    if history.lately("kl") < 1e-4:
        return TrainingWarning(
            f"{what}clip = {clip} is so narrow that hardly a step counts", "{algorithm}.clip=0.2 is usual"
        )
    return TrainingWarning(
        f"{what}updates go too far", f"{_slower(history)}, fewer epochs, or larger minibatches"
    )


def idle_policy(history: TrainerHistory) -> TrainingWarning | None:
    """Tell of a policy that does what it did at the start, at random."""
    first = history.early[0].entropy
    still = history.lately("kl") < 1e-5 and (
        abs(history.lately("entropy") - first) <= 0.01 * max(abs(first), 0.1)
    )
    if not still or not history.whole or history.count < 2 * WINDOW or far_updates(history):
        return None
    rate = history.late[-1].learning_rate
    return TrainingWarning(
        f"the policy does not change (kl {history.lately('kl'):.1g}, entropy as at the start): the learning "
        f"rate, {rate:.2g}, is too small, or rewards do not tell one action from another",
        f"{{algorithm}}.learning_rate={max(10 * rate, 3e-4):.2g}",
    )


def collapsed_policy(history: TrainerHistory) -> TrainingWarning | None:
    """Tell of a policy that always does the same, and no better than at the start."""
    settled = history.lately("kl") < 1e-8 and abs(history.lately("entropy")) < 1e-3
    if not settled or not history.whole or history.risen or history.count < 2 * WINDOW:
        return None
    return TrainingWarning(
        "the policy always does the same (entropy and kl are 0), and gains no more than at the start: a step "
        "went too far",
        f"begin anew with {_slower(history)}, or {{algorithm}}.entropy_coefficient=0.01",
    )


def untrained_critic(history: TrainerHistory) -> TrainingWarning | None:
    """Tell of values that never came to tell one state from another."""
    if not (history.whole and history.count >= LONG and -inf < history.explained < 0.05):
        return None
    if same_returns(history) or history.settled:
        return None  # there is nothing to explain, as in CartPole at 500
    return TrainingWarning(
        f"values explain nothing of the returns (explained_variance "
        f"{history.lately('explained_variance'):.2f} after {history.count} records, never above "
        f"{max(history.explained, 0):.2f}): they learn too slowly, or observations do not tell how well it "
        "goes",
        "a larger {algorithm}.learning_rate or value_coefficient, more epochs, or, where they are not yet "
        "normalised, {policy}.normalise_observations=true",
    )


def exploding_loss(history: TrainerHistory) -> TrainingWarning | None:
    """Tell of a loss that grows while returns do not."""
    now = history.lately("loss")
    if not now > 1 or history.count < 2 * WINDOW:
        return None
    before = _median(history.early[1:], "loss")
    if not now > 100 * max(before, 0.01) or history.risen:
        return None
    return TrainingWarning(
        f"the values' loss explodes ({before:.3g} at first, {now:.3g} now), and returns do not grow",
        f"{_slower(history)}, or a smaller {{algorithm}}.max_gradient_norm",
    )


def same_returns(history: TrainerHistory) -> TrainingWarning | None:
    """Tell of episodes none of which has paid more than another."""
    least, largest = history.returns
    enough = history.count >= LONG and history.late[-1].episodes >= EPISODES
    if not (history.whole and history.alone and enough and least == largest):
        return None
    more = [f" ({{algorithm}}.{setting})" for name, setting in EXPLORATION if name in history.settings]
    return TrainingWarning(
        f"every episode so far had the same return, {least:g}, so that there is nothing to learn from",
        f"rewards that random actions hardly ever find need shaping, or more exploration{''.join(more[:1])}; "
        "those that never differ are a mistake of the environment (tidemill check-env)",
    )


def _slower(history: TrainerHistory) -> str:
    rate = history.late[-1].learning_rate
    return f"{{algorithm}}.learning_rate={rate / 10:.2g}" if rate > 0 else "a smaller learning rate"


RULES: tuple[Callable[[TrainerHistory], TrainingWarning | None], ...] = (
    far_updates,
    idle_policy,
    collapsed_policy,
    untrained_critic,
    exploding_loss,
    same_returns,
)
"""All rules. Each speaks once at most for a trainer."""


class TrainingWarnings:
    """Training warnings tell what is odd about a run's training, each thing once.

    config: the experiment's encoded configuration
    whole: whether the records begin with the run
    """

    def __init__(self, config: Mapping[str, Any], whole: bool = True) -> None:
        workers = config.get("workers")
        alone = not any(f"'kind': '{kind}'" in str(workers) for kind in SEVERAL)
        self._histories: dict[str, TrainerHistory] = {}
        self._policies: dict[str, str] = {}
        for name, worker in workers.items() if isinstance(workers, Mapping) else ():
            settings = worker.get("algorithm") if isinstance(worker, Mapping) else None
            if isinstance(settings, Mapping):
                self._histories[name] = TrainerHistory(settings, whole, alone)
                self._policies[name] = str(worker.get("policy", "policy"))
        self._told = set[tuple[str, Any]]()

    def add(self, record: Mapping[str, float]) -> Iterator[TrainingWarning]:
        """Take a record of updates; yield what there is to tell now."""
        if "update" not in record:
            return
        several = len(self._histories) > 1
        for name, history in self._histories.items():
            point = _point(record, f"{name}-0/" if several else "", self._policies[name])
            if all(value != value for value in point):
                continue
            history.add(point)
            for rule in RULES:
                if (name, rule) not in self._told and (found := rule(history)):
                    self._told.add((name, rule))
                    paths = {
                        "algorithm": f"--set workers.{name}.algorithm",
                        "policy": f"--set policies.{self._policies[name]}",
                    }
                    yield TrainingWarning(
                        (f"{name}: " if several else "") + found.what, found.cure.format(**paths)
                    )


def _point(record: Mapping[str, float], prefix: str, policy: str) -> TrainerPoint:
    def metric(name: str) -> float:
        return record.get(prefix + name, nan)

    return TrainerPoint(
        metric("explained_variance"),
        metric("kl"),
        metric("clip_fraction"),
        metric("entropy"),
        metric("loss/value"),
        record.get(episode_metric("return", policy), record.get(episode_metric("return", ""), nan)),
        metric("learning_rate"),
        record.get("episodes", nan),
    )
