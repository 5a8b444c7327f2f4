"""The configuration of trainers: what they train, on which samples, how old these may be,
and what they keep."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from tidemill.api.algorithm import AlgorithmConfig
from tidemill.api.buffer import BufferConfig
from tidemill.api.edges import Port
from tidemill.api.experiment import Context, Experiment, WorkerConfig, WorkerHandle
from tidemill.core.config import acting
from tidemill.core.errors import ConfigError
from tidemill.nets.device import check_device
from tidemill.replay.limiter import check_slack, parse_ratio
from tidemill.replay.queue import Queue
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.version_metadata import RECORDED, field_of, settings_of

COUNTED = ("dropped", "evicted", "reused")  # counters of samples that are told with each update
FAREWELL = 120.0  # seconds more to end: a replay memory may be tens of GB
LIMITED = (
    "limiter/started", "limiter/committed", "limiter/voided", "limiter/tasks", "limiter/in_flight",
    "limiter/debt", "limiter/debt_min", "limiter/debt_max", "limiter/training_waited", "limiter/balance",
    "limiter/age_versions", "limiter/age_seconds",
)  # fmt: skip
"""What a trainer with a ratio tells besides: see `Limiter.report`; `balance` is the
number of slots that would balance the run, ages are those of the policy that acted, when
its step is stored."""
ITERATION = (
    "iteration/number", "iteration/updates", "iteration/seconds", "iteration/training_episodes",
    "iteration/training_return", "iteration/overshoot", "iteration/evaluation_episodes",
    "iteration/evaluation_steps", "iteration/evaluation_return",
)  # fmt: skip
"""What is told at the end of an iteration; the returns where episodes ended in it, and
how many steps it was longer where these were awaited."""


_UNLIMITED = "without a ratio (and a replay memory): nobody waits for anybody then, and nothing is remembered"


def _limited(trainer: Any) -> bool:
    # then a ratio is going to be given, or `check` refuses it
    return trainer.ratio is not None or trainer.buffer.replays


@dataclass(frozen=True, kw_only=True)
class Trainer(WorkerConfig):
    """A trainer worker: trains `policy` by `algorithm` on sample stream `samples`. With a
    `count` above 1: equal trainers, each on the samples of its share of the producers,
    whose gradients are averaged (the algorithm must be `DataParallel`).

    batch_size: rows of a batch of all trainers together, at least (samples are taken
        whole); None: as many samples as actors fill at a time, one in each target (of
        whole episodes one of each seat), whether they come directly or through buffer
        workers, of whoever has some
    buffer: where samples wait for an update, and how often each is trained on: `Queue`,
        `PriorityQueue`; with a ratio, a memory that batches are drawn from: `Replay`,
        `PrioritisedReplay`
    max_policy_lag: samples whose oldest trained row is more versions behind at the moment
        of training, of each use, are dropped and counted; None: none are. Nobody is held
        back for it: a low limit throws work away. 0 is synchronous training: each
        producer sends one sample per update, waits for it, and goes on with the new
        version (see `workers.lockstep`), so that nothing is dropped
    checkpoint_seconds: seconds between checkpoints; one more is always written at the end
    checkpoints: how many of them are kept
    database_seconds: seconds between versions that are pushed into the run's parameter
        database; the first and the last always are. None: none is
    database_versions: how many of them are kept, besides tagged ones
    ratio: for a replay memory: training tasks (updates) per env step that is stored,
        exactly: "1/4", "3/2", 8. Actors' steps wait for training, and training for steps
        (see `replay.limiter`)
    slack: steps that gathering may be ahead of training, those in flight included; None:
        twice as many as there are slots (lanes of all targets of all actors), so that all
        may step while as many wait to be trained on; as many as slots with `exact`
    exact: the run's weights depend on nothing but its configuration, however long
        environments and training take: each slot's next step waits until all that its
        last one owes is trained. Costs throughput where latencies vary
    journal: write down in the run's folder what came and what was trained, in order, so
        that it can be trained again from that
    keep_buffer: checkpoints hold the replay memory; else it is filled anew after a
        resume, and owes nothing before
    iteration_steps: training steps of an iteration, with a ratio. At its end all that is
        owed is trained, and while training pauses the weights of that moment are
        evaluated; a checkpoint is written, and its statistics are told (iteration/…).
        Open episodes go on in the next one. None: there are no iterations
    finish_episodes: at the end of an iteration, and of the run at its limit of steps,
        episodes that are open (have a step) are played to their end first, and none
        begins; the steps that this takes more are counted. Targets of one lane; episodes
        must end some time
    evaluation_steps: steps of each iteration's evaluation, 0 for none
    max_no_progress_s: seconds without a stored step after which the run fails, once steps
        are in flight
    device: what trains: "cpu"; "cuda", a GPU, the next one for each worker of the group;
        "cuda:1", a certain one; "auto", a GPU if there is one. Worth it for images and
        wide networks; MLPs of the usual size should train faster on a CPU
        (benchmarks/device.py tells)
    """

    order: ClassVar[int] = 1
    limited: ClassVar[bool] = True

    algorithm: AlgorithmConfig
    policy: str = "policy"
    samples: str = "samples"
    batch_size: int | None = None
    buffer: BufferConfig = field(default_factory=Queue)
    max_policy_lag: int | None = None
    checkpoint_seconds: float = 60.0
    checkpoints: int = 3
    database_seconds: float | None = 10.0
    database_versions: int = acting(
        20,
        lambda trainer: trainer.database_seconds is not None,
        "without database_seconds: no versions are kept",
    )
    ratio: str | int | None = None
    slack: int | None = None
    exact: bool = False
    journal: bool = False
    keep_buffer: bool = acting(True, _limited, _UNLIMITED)
    iteration_steps: int | None = None
    finish_episodes: bool = False
    evaluation_steps: int = 0
    max_no_progress_s: float = acting(600.0, _limited, _UNLIMITED)
    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (
            ("batch_size", 1),
            ("max_policy_lag", 0),
            ("checkpoints", 1),
            ("database_versions", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} = {value} must be at least {least}")
        if self.checkpoint_seconds <= 0:
            raise ConfigError(f"checkpoint_seconds = {self.checkpoint_seconds} must be above 0")
        self.buffer.check(self.max_policy_lag)
        if self.database_seconds is not None and self.database_seconds <= 0:
            raise ConfigError(
                f"database_seconds = {self.database_seconds} must be above 0; None pushes no versions"
            )
        if self.max_policy_lag == 0 and self.batch_size is not None:
            raise ConfigError(
                f"batch_size = {self.batch_size}, but max_policy_lag = 0 trains on one sample of each "
                "producer per update, whatever they hold; leave "
                "it out, or allow some lag"
            )
        self._check_ratio()
        check_device(self.device)

    def _check_ratio(self) -> None:
        memory = type(self.buffer).__name__
        if self.ratio is None:
            if self.buffer.replays:
                return  # who runs it may say so, see `check`
            for name in (
                "slack",
                "exact",
                "journal",
                "iteration_steps",
                "finish_episodes",
                "evaluation_steps",
            ):
                if getattr(self, name):
                    raise ConfigError(
                        f"{name} = {getattr(self, name)} goes with a replay memory and a ratio; set these, "
                        "or leave it out"
                    )
            return
        parse_ratio(self.ratio)
        if not self.buffer.replays:
            raise ConfigError(
                f'ratio = "{self.ratio}" needs a replay memory, and buffer = {memory} is none; take Replay, '
                "or leave the ratio out"
            )
        if self.batch_size is None:
            raise ConfigError(
                f'ratio = "{self.ratio}": batch_size says how many transitions a training task draws; set '
                "it, to 32 or 256, say"
            )
        if self.count > 1:
            raise ConfigError(
                f'ratio = "{self.ratio}" goes with one trainer, whose memory holds all steps, not count = '
                f"{self.count}; set it to 1. Algorithms "
                "without a ratio (PPO, IMPALA) may have several; cores that are left gather for the one with "
                "Actors(count=…)"
            )
        if self.exact and self.slack is not None:
            raise ConfigError(
                f"slack = {self.slack}: with exact = True it is the number of slots; leave it out"
            )
        if self.slack is not None:
            check_slack(self.slack, 0)
        if self.iteration_steps is not None and self.iteration_steps < 1:
            raise ConfigError(
                f"iteration_steps = {self.iteration_steps} must be at least 1; None: no iterations"
            )
        if self.evaluation_steps and (self.evaluation_steps < 0 or self.iteration_steps is None):
            raise ConfigError(
                f"evaluation_steps = {self.evaluation_steps} of each iteration: set iteration_steps, and at "
                "least 1 of both"
            )
        if self.max_no_progress_s <= 0:
            raise ConfigError(f"max_no_progress_s = {self.max_no_progress_s} must be above 0")

    def check(self, experiment: Experiment) -> None:
        if self.buffer.replays and self.ratio is None:
            raise ConfigError(
                f"buffer = {type(self.buffer).__name__} is a replay memory, and nothing says how often to "
                "train on it; set ratio, training tasks per "
                'env step, like "1/4" or 1 (Trainer.ratio, --ratio, or AsyncTrainRunner(ratio=…))'
            )
        if experiment.limits.steps is None and experiment.limits.updates is None:
            self.algorithm.check_endless()
        streams = experiment.sources(self.samples)
        for config in experiment.workers.values():
            for spec in config.agents if isinstance(config, ActorConfig) else ():
                if not streams.isdisjoint(spec.streams):
                    self.algorithm.check_made([name for post in spec.post for name in post.fields()])

    def ports(self) -> tuple[Port, ...]:
        ports = [
            Port(
                self.samples,
                "consume",
                policy=self.policy,
                lockstep=self.max_policy_lag == 0,
                lag_bounded=self.max_policy_lag is not None,
            ),
            Port(self.policy, "publish"),
        ]
        ports += [Port(self.policy, "sum")] if self.count > 1 else []
        ports += (
            [Port(self.samples, "grant", policy=self.policy, in_turn=self.exact)]
            if self.ratio is not None
            else []
        )
        return (*ports, Port(self.policy, "store")) if self.database_seconds is not None else tuple(ports)

    @property
    def farewell_s(self) -> float:
        return FAREWELL if self.ratio is not None and self.keep_buffer else 0.0

    def records(self) -> tuple[str, ...]:
        """See `tidemill.workers.version_metadata`."""
        return (
            () if self.database_seconds is None else (*RECORDED, *map(field_of, settings_of(self.algorithm)))
        )

    def measures(self) -> tuple[str, ...] | None:
        own = self.algorithm.measures()
        return (
            None
            if own is None
            else (
                *COUNTED,
                "lag/mean",
                "lag/max",
                *(LIMITED if self.ratio is not None else ()),
                *self._iteration(),
                *own,
            )
        )

    def _iteration(self) -> tuple[str, ...]:
        if self.iteration_steps is None:
            return ()
        left_out = (
            {name for name in ITERATION if name.startswith("iteration/evaluation")}
            if not self.evaluation_steps
            else set()
        )
        left_out |= set() if self.finish_episodes else {"iteration/overshoot"}
        return tuple(name for name in ITERATION if name not in left_out)

    def build(self, context: Context) -> WorkerHandle:
        if self.ratio is not None:
            from tidemill.replay_training.trainer import ReplayTrainerWorker

            return ReplayTrainerWorker(context, self)
        from tidemill.workers.trainer import TrainerWorker

        return TrainerWorker(context, self)
