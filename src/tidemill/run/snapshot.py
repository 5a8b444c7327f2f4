"""A run at one moment, as a view shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.replay_training.trainer_config import ReplayTrainer
from tidemill.run.controller import Controller
from tidemill.run.host_watch import HostView
from tidemill.workers.actor_config import ActorConfig


@dataclass(frozen=True)
class WorkerView:
    """One worker in a snapshot.

    shares: share of its time by name (see `SHARES`), in [0, 1] each; what they leave of 1
        is drawn empty
    rate: what it does per second: env steps of an actor, answers of a policy worker, rows
        of a trainer
    """

    name: str
    state: str
    shares: Mapping[str, float]
    rate: float


@dataclass(frozen=True)
class EvaluationView:
    """The newest result of an evaluation in a snapshot: the mean return, its 95 %
    interval, and where games are won the share and the rating."""

    mean: float
    low: float
    high: float
    win_rate: float | None = None
    elo: float | None = None

    def __str__(self) -> str:
        digits = 0 if self.high - self.low >= 20 else 1 if self.high - self.low >= 2 else 2
        parts = [f"{self.mean:,.{digits}f} ({self.low:,.{digits}f} … {self.high:,.{digits}f})"]
        parts += [f"won {self.win_rate:.0%}"] if self.win_rate is not None else []
        return ", ".join(parts + ([f"Elo {self.elo:,.0f}"] if self.elo is not None else []))


def evaluations_of(measured: Mapping[str, float]) -> dict[str, EvaluationView]:
    """Return the evaluations among what was measured (``NAME/return`` and so on), by
    name."""
    found = {}
    for name in [metric.removesuffix("/return_low") for metric in measured if metric.endswith("/return_low")]:
        mean, low, high = (measured[f"{name}/{bound}"] for bound in ("return", "return_low", "return_high"))
        found[name] = EvaluationView(
            mean, low, high, measured.get(f"{name}/win_rate"), measured.get(f"{name}/elo")
        )
    return found


@dataclass(frozen=True)
class LimiterView:
    """What holds gathering and training together in a snapshot (see `replay.limiter`).

    waited: seconds that slots were free and had no credit, on average over them, and that
        training had nothing to do, since nothing was owed
    balance: N*, the slots at which neither would wait; None before it is known
    healthy: number of `slots` that do not rest; none of them may be known
    """

    committed: int
    tasks: int
    debt: int
    gathering_waited: float
    training_waited: float
    balance: float | None = None
    healthy: int = 0
    slots: int = 0

    def figures(self) -> dict[str, str]:
        """What is shown of it, by name."""
        return {
            "committed": f"{self.committed:,}",
            "tasks": f"{self.tasks:,}",
            "debt": f"{self.debt:,}",
            "gather waited": f"{short(self.gathering_waited)} s",
            "train waited": f"{short(self.training_waited)} s",
            "N*": "–" if self.balance is None else short(self.balance),
            **({"healthy": f"{self.healthy} of {self.slots}"} if self.slots else {}),
        }


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    seconds: of training until now (see `Progress.clock`)
    steps: env steps that entered training, of `limit` (None: no limit)
    steps_per_second: over the last few seconds
    gathered_per_second: env steps that all actors make together
    mean_returns: mean returns of the last episodes of each policy, by its name or ""
        where there is one; None before the first has ended
    lag: mean age of the rows in the newest batch, in versions; None before the first
        update
    dropped: samples that were thrown away
    memory: the memory plan in a line; "" before there is one
    stage: stage of the curriculum: "1 of 3"; "" without one
    evaluations: the newest result of each evaluation, by its name
    limiters: limiters of the trainers with a ratio, by name
    crash_cost: seconds and env steps that would be lost if everything died now
    hosts: where there are several, by name
    iterations: what each one came to that has ended: number, step, training_return and so
        on
    """

    run: str
    seconds: float
    steps: int
    limit: int | None
    steps_per_second: float
    gathered_per_second: float
    mean_returns: Mapping[str, float | None]
    episodes: int
    updates: int
    lag: float | None
    dropped: int
    workers: tuple[WorkerView, ...] = ()
    state: str = "running"
    memory: str = ""
    stage: str = ""
    evaluations: Mapping[str, EvaluationView] = field(default_factory=dict)
    limiters: Mapping[str, LimiterView] = field(default_factory=dict)
    iterations: Sequence[Mapping[str, float]] = ()
    crash_cost: tuple[float, int] = (0.0, 0)
    hosts: Mapping[str, HostView] = field(default_factory=dict)


def snapshot(controller: Controller) -> Snapshot:
    """Return the run as it is now."""
    progress, members = controller.state.progress, controller.state.members
    return Snapshot(
        run=controller.job.experiment.name,
        seconds=progress.clock,
        steps=progress.steps,
        limit=controller.job.experiment.limits.steps,
        steps_per_second=controller.steps_per_second,
        gathered_per_second=sum(
            m.rate for m in members.values() if m.runs and isinstance(m.config, ActorConfig)
        ),
        mean_returns=progress.mean_returns,
        episodes=progress.episodes,
        updates=progress.updates,
        lag=progress.metrics.get("lag/mean"),
        dropped=progress.dropped,
        workers=tuple(WorkerView(name, m.state.value, m.shares, m.rate) for name, m in members.items()),
        state=controller.state.phase,
        memory=str(controller.state.plan or ""),
        stage=progress.where,
        evaluations=evaluations_of(progress.measured),
        limiters={name: _limiter_view(controller, name) for name in progress.limiters},
        iterations=progress.iterations,
        crash_cost=progress.crash_cost,
        hosts=dict(controller.hosts),
    )


def _limiter_view(controller: Controller, trainer: str) -> LimiterView:
    """Of a trainer, and the slots whose steps it stores."""
    told, config = controller.state.progress.limiters[trainer], controller.state.members[trainer].config
    assert isinstance(config, ReplayTrainer)
    actors = [
        m.statistics
        for m in controller.state.members.values()
        if isinstance(m.config, ActorConfig) and any(config.samples in a.streams for a in m.config.agents)
    ]
    waits = [actor["slots/waited"] for actor in actors if "slots/waited" in actor]
    healthy, resting = (
        int(sum(actor.get(f"slots/{kind}", 0.0) for actor in actors)) for kind in ("healthy", "resting")
    )
    return LimiterView(
        committed=int(told["committed"]),
        tasks=int(told["tasks"]),
        debt=int(told["debt"]),
        gathering_waited=sum(waits) / max(len(waits), 1),
        training_waited=told["training_waited"],
        balance=told.get("balance"),
        healthy=healthy,
        slots=healthy + resting,
    )


def short(value: float) -> str:
    """Return a rate in at most five characters: 0.25, 12.3, 950, 9,500, 106k, 1.2M."""
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    if value >= 1e4:
        return f"{value / 1e3:.0f}k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
