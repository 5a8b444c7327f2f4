"""The configuration of trainers that learn from a replay memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Self

from tidemill.api.algorithm import AlgorithmConfig
from tidemill.api.buffer import BufferConfig
from tidemill.api.edges import Port
from tidemill.api.experiment import Experiment
from tidemill.api.worker import Context, WorkerHandle
from tidemill.core.config import Config, member
from tidemill.core.errors import ConfigError
from tidemill.replay.limiter import check_slack, parse_ratio
from tidemill.workers.trainer_config import TrainerConfig

FAREWELL = 120.0  # seconds more to end: a replay memory may be tens of GB
LIMITER = (
    "limiter/started", "limiter/committed", "limiter/voided", "limiter/tasks", "limiter/in_flight",
    "limiter/debt", "limiter/debt_min", "limiter/debt_max", "limiter/training_waited", "limiter/balance",
    "limiter/age_versions", "limiter/age_seconds",
)  # fmt: skip
"""What is told besides: see `Limiter.report`; `balance` is the number of slots that would
balance the run, ages are those of the policy that acted, when its step is stored."""
ITERATION = (
    "iteration/number", "iteration/updates", "iteration/seconds", "iteration/training_episodes",
    "iteration/training_return", "iteration/overshoot", "iteration/evaluation_episodes",
    "iteration/evaluation_steps", "iteration/evaluation_return",
)  # fmt: skip
"""What is told at the end of an iteration; the returns where episodes ended in it, and
how many steps it was longer where these were awaited."""


@dataclass(frozen=True, kw_only=True)
class ReplayTrainer(TrainerConfig):
    """A trainer worker with a replay memory stores the steps that `ReplayActors` send,
    and trains `policy` by `algorithm` on batches that it draws from there, `ratio` of
    them for each step that is stored. A *task* is one such update; the ratio *owes* a
    task once enough steps are stored for it. Each lane is a *slot* of the run.

    buffer: the memory: `Replay`, `PrioritisedReplay`
    batch_size: transitions of a batch
    ratio: training tasks (updates) per env step that is stored, exactly: "1/4", "3/2", 8;
        "8/16" owes 8 at once after each 16, so that the policy stays the same between.
        Actors' steps wait for training, and training for steps (see `replay.limiter`).
        None: whoever runs it says so (--ratio, `AsyncTrainRunner`)
    slack: number of env steps that may be begun, and not yet trained for as the ratio
        says, before actors have to wait (as many as are between two times that it owes,
        at least); steps in flight count. None: twice the number of
        lanes of all actors, so that each may step while another step of it waits to be
        trained for; with `exact` once that number
    exact: whether the run's weights depend on nothing but its configuration, however long
        environments and training take: each lane's next step waits until the updates that
        are due for its last one are done. Costs throughput where latencies vary
    journal: whether to write down in the run's folder what came and what was trained, in
        order, so that it can be trained again from that (`tidemill.trained.retrain`)
    keep_buffer: whether checkpoints hold the replay memory. Without, a resumed run begins
        with an empty one, and does no update before that can be sampled again
    iteration_steps: env steps of an iteration. At its end all updates that are due are
        done, and while training pauses the weights of that moment are evaluated; a
        checkpoint is written, and its statistics are told (iteration/…). Open episodes go
        on in the next one. None: there are no iterations
    finish_episodes: whether, at the end of an iteration, and of the run at its limit of
        steps, episodes that are open (have a step) are played to their end first, and
        none begins; the steps that this takes more are counted. Targets of one lane;
        episodes must end some time
    evaluation_steps: env steps of each iteration's evaluation, which are no training
        steps; 0: none is evaluated
    max_no_progress_s: seconds without a stored step after which the run fails, once steps
        are in flight
    """

    buffer: BufferConfig
    batch_size: int
    ratio: str | int | None = None
    slack: int | None = None
    exact: bool = False
    journal: bool = False
    keep_buffer: bool = True
    iteration_steps: int | None = None
    finish_episodes: bool = False
    evaluation_steps: int = 0
    max_no_progress_s: float = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size is None or self.batch_size < 1:
            raise ConfigError(
                f"batch_size = {self.batch_size} says how many transitions a training task draws; set it to "
                "32 or 256, say"
            )
        if self.ratio is not None:
            parse_ratio(self.ratio)
        if not self.buffer.replays:
            raise ConfigError(
                f"buffer = {type(self.buffer).__name__} is no replay memory; take Replay or "
                "PrioritisedReplay, or Trainer in place of ReplayTrainer"
            )
        if self.count > 1:
            raise ConfigError(
                f"count = {self.count}: one trainer has the replay memory, which holds all steps; set it to "
                "1. A Trainer (PPO, IMPALA) may have several; cores that are left gather for the one with "
                "ReplayActors(count=…)"
            )
        if self.exact and self.slack is not None:
            raise ConfigError(
                f"slack = {self.slack}: with exact = True it is the number of slots; leave it out"
            )
        if self.slack is not None:
            check_slack(self.slack, 0)
        self.check_least(iteration_steps=1)
        if self.evaluation_steps and (self.evaluation_steps < 0 or self.iteration_steps is None):
            raise ConfigError(
                f"evaluation_steps = {self.evaluation_steps} of each iteration: set iteration_steps, and at "
                "least 1 of both"
            )
        self.check_above_zero("max_no_progress_s")

    @classmethod
    def of_today(cls, data: dict[str, Any]) -> dict[str, Any]:
        data, algorithm, buffer = super().of_today(data), data.get("algorithm"), data.get("buffer")
        if not isinstance(algorithm, dict) or not isinstance(buffer, dict):
            return data
        kind = member(Config, str(algorithm.get("kind")))
        # no task is owed for what comes before the memory can be sampled
        warm_up, ratio = buffer.get("warm_up"), parse_ratio(data.get("ratio") or 1)
        warm_up = warm_up if isinstance(warm_up, int) else 0
        if kind is not None and issubclass(kind, AlgorithmConfig):
            algorithm = kind.in_env_steps(algorithm, lambda updates: warm_up + ceil(updates / ratio))
        return {**data, "algorithm": algorithm}

    @property
    def evaluation_lanes(self) -> int:
        return min(self.evaluation_steps, 1)

    def check(self, experiment: Experiment) -> None:
        if self.ratio is None:
            raise ConfigError(
                f"buffer = {type(self.buffer).__name__} is a replay memory, and nothing says how often to "
                'train on it; set ratio, training tasks per env step, like "1/4" or 1 (ReplayTrainer.ratio, '
                "--ratio, or AsyncTrainRunner(ratio=…))"
            )
        super().check(experiment)

    def changed(self, settings: Mapping[str, float | None]) -> Self:
        if self.exact:
            raise ConfigError(
                f"{', '.join(settings)} cannot be changed: with exact = True weights depend on the "
                "configuration alone, and not on when it is changed; leave out exact"
            )
        if self.journal:
            raise ConfigError(
                f"{', '.join(settings)} cannot be changed: a journal does not hold settings, so that the run "
                "could not be trained again from it; leave out journal"
            )
        return super().changed(settings)

    def ports(self) -> tuple[Port, ...]:
        return (
            Port(self.samples, "consume", policy=self.policy),
            Port(
                self.samples,
                "grant",
                policy=self.policy,
                in_turn=self.exact,
                outlived=not self.exact and self.buffer.begins_midway,
            ),
            *super().ports(),
        )

    @property
    def farewell_s(self) -> float:
        return FAREWELL if self.keep_buffer else 0.0

    def measures(self) -> tuple[str, ...] | None:
        own = super().measures()
        return None if own is None else (*own, *LIMITER, *self._iteration())

    def _iteration(self) -> tuple[str, ...]:
        if self.iteration_steps is None:
            return ()
        return tuple(
            name
            for name in ITERATION
            if (self.evaluation_steps or not name.startswith("iteration/evaluation"))
            and (self.finish_episodes or name != "iteration/overshoot")
        )

    def build(self, context: Context) -> WorkerHandle:
        from tidemill.replay_training.trainer import ReplayTrainerWorker

        return ReplayTrainerWorker(context, self)
