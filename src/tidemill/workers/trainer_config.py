"""The configuration of trainers: what they train, on which samples, how old these may be,
and what they keep."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from tidemill.api.algorithm import AlgorithmConfig
from tidemill.api.buffer import BufferConfig
from tidemill.api.edges import Port
from tidemill.api.experiment import Experiment
from tidemill.api.worker import Context, WorkerConfig, WorkerHandle
from tidemill.core.config import acting
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.nets.choose_device import check_device
from tidemill.replay.queue import Queue
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.checkpoint_pace import SHARE
from tidemill.workers.version_metadata import RECORDED, field_of, settings_of, with_settings

# counters of samples and updates that are told with each update
COUNTED = ("dropped", "evicted", "reused", "skipped")
RATES = ("learning_rate", "critic_learning_rate")
RANKS, HOSTS, TORCH = "ranks", "hosts", "torch"  # how equal trainers add up
_SUMS = {
    RANKS: "in the order of equal trainers",
    HOSTS: "per host first",
    TORCH: "by torch.distributed",
}


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(WorkerConfig):
    """The configuration of trainer workers, each of which trains `policy` by `algorithm`
    on sample stream `samples`: what `Trainer` and `ReplayTrainer` have in common.

    checkpoint_seconds: seconds between checkpoints, at most: the first is written with
        the first update, and while the run is young they follow after a tenth of its age;
        one more is always written at the end
    checkpoint_share: share of the run's time that writing them may take, in a run that
        resumes exactly: for which all may be held for them; where it would take more they
        are written less often. 1: it may take any
    checkpoints: how many of them are kept; in a run of several policies two at least
    database_seconds: seconds between versions that are pushed into the run's parameter
        database; the first and the last always are. None: none is
    database_updates: updates between them, in place of seconds: each is on the disk
        before the version is published. None: by seconds
    database_versions: how many of them are kept, besides tagged ones; None: all
    fault_records: how many updates that were left out, since they were not finite, are
        kept in the run's folder with what led to them, the newest ones
    fault_rate_factor: what learning rates are multiplied by each time that training goes
        back to a checkpoint, since updates in a row were not finite; None: they stay
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
    checkpoint_seconds: float = 60.0
    checkpoint_share: float = SHARE
    checkpoints: int = 3
    database_seconds: float | None = 10.0
    database_updates: int | None = acting(
        None,
        lambda trainer: trainer.database_seconds is not None,
        "without database_seconds: no versions are kept",
    )
    database_versions: int | None = acting(
        20,
        lambda trainer: trainer.database_seconds is not None,
        "without database_seconds: no versions are kept",
    )
    fault_records: int = 10
    fault_rate_factor: float | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(checkpoints=1, database_updates=1, database_versions=1, fault_records=0)
        self.check_above_zero("checkpoint_seconds", "checkpoint_share", "database_seconds")
        self.check_shares("checkpoint_share")
        check_device(self.device)
        factor: Any = self.fault_rate_factor
        if factor is not None and not (isinstance(factor, (int, float)) and 0 < factor < 1):
            raise ConfigError(
                f"fault_rate_factor = {factor!r} must lie between 0 and 1, so that learning rates become "
                "smaller; 0.5 is usual, None leaves them as they are"
            )

    def smaller_rates(self, algorithm: AlgorithmConfig) -> dict[str, float]:
        """Return the learning rates of `algorithm` times `fault_rate_factor`, by name: {}
        where that is None."""
        rates = {name: getattr(algorithm, name) for name in RATES if name in algorithm.changeable}
        factor = self.fault_rate_factor
        if factor is None:
            return {}
        return {name: rate * factor for name, rate in rates.items() if isinstance(rate, int | float)}

    @property
    def evaluation_lanes(self) -> int:
        """Lanes that the trainer needs of its actors' environment, for evaluations of its
        own."""
        return 0

    def check(self, experiment: Experiment) -> None:
        if experiment.limits.steps is None and experiment.limits.updates is None:
            self.algorithm.check_endless()
        self.algorithm.check_policy(experiment.policies[self.policy])
        if (factor := self.fault_rate_factor) is not None and not self.smaller_rates(self.algorithm):
            raise ConfigError(
                f"fault_rate_factor = {factor} multiplies learning_rate, and that of "
                f"{type(self.algorithm).__name__} is no number that may change while a run goes on; write a "
                "number in place of a schedule, or leave fault_rate_factor out"
            )
        streams = experiment.sources(self.samples)
        for actors in experiment.groups(ActorConfig).values():
            for spec in actors.agents:
                if not streams.isdisjoint(spec.streams):
                    self.algorithm.check_made([name for post in spec.post for name in post.fields()])

    def changed(self, settings: Mapping[str, float | None]) -> Self:
        """Return this trainer with other settings of its algorithm, as they may change
        while a run goes on. Raises `ConfigError` for one that may not."""
        for name in settings:
            if name not in self.algorithm.changeable:
                raise ConfigError(
                    f"{name} of {type(self.algorithm).__name__} cannot be changed while a run goes on; these "
                    f"can: {', '.join(sorted(self.algorithm.changeable)) or 'none'}"
                )
        return self.replace(algorithm=with_settings(self.algorithm, settings))

    def ports(self) -> tuple[Port, ...]:
        store = () if self.database_seconds is None else (Port(self.policy, "store"),)
        return (Port(self.policy, "publish"), *store)

    def records(self) -> tuple[str, ...]:
        """See `tidemill.workers.version_metadata`."""
        if self.database_seconds is None:
            return ()
        return (*RECORDED, *map(field_of, settings_of(self.algorithm.at(0, 0.0))))

    def measures(self) -> tuple[str, ...] | None:
        own = self.algorithm.measures()
        if own is None:
            return None
        return (*COUNTED, "lag/mean", "lag/max", *dict.fromkeys((*own, *self.algorithm.schedules)))


def check_pushed(experiment: Experiment, policy: str, who: str, updates: int) -> None:
    """Raise `ConfigError` unless the trainers of `policy` push the version after each so
    many `updates`, and wait for `who` records something of it."""
    for group, trainer in experiment.groups(TrainerConfig).items():
        if trainer.policy != policy:
            continue
        wrong = ""
        if not isinstance(trainer, Trainer):
            wrong = f"{group} is a {type(trainer).__name__}, which does not wait for it; leave out updates"
        elif trainer.database_updates is None or updates % trainer.database_updates:
            wrong = (
                f"{group} does not push these versions (database_updates = {trainer.database_updates}); set "
                f"workers.{group}.database_updates = {updates}, or to a divisor of it"
            )
        if wrong:
            raise ConfigError(
                f'{who}: updates = {updates} is of the version of "{policy}" after each {updates} of its '
                f"updates, but {wrong}"
            )


def _replay(name: str) -> str:
    return f"replay training has a trainer of its own; take ReplayTrainer({name}=…)"


@dataclass(frozen=True, kw_only=True)
class Trainer(TrainerConfig):
    """A trainer worker trains `policy` by `algorithm` on sample stream `samples`. With a
    `count` above 1 there are equal trainers, each on the samples of its share of the
    producers, whose gradients are averaged (the algorithm must be `DataParallel`).
    `ReplayTrainer` is the one with a replay memory.

    The *version* of weights is the number of updates that made them. The policy that
    acted, at the version that stands in a row, is the *behaviour* policy (μ); the one
    that is trained is π. A policy that *remembers* is a recurrent one. A *deviation* is a
    standard deviation.

    batch_size: least number of rows of a batch, of all trainers together (samples are
        taken whole, so that there may be more). None: as many samples as actors fill at a
        time, which is one for each target, or with whole episodes one for each seat. Any
        sample counts, whoever sent it, directly or through buffer workers
    buffer: where samples wait for an update, and how often each is trained on: `Queue`,
        `PriorityQueue`
    max_policy_lag: most updates by which the weights that acted may be older than those
        that are about to be trained. A sample with an older row among its trained ones is
        dropped and counted; it is looked at before each use. None: no sample is dropped.
        Actors are not held back, so that a low limit throws work away; but for 0, which
        is synchronous training: each actor sends one sample per update, waits for that,
        and goes on with the new version (see `workers.lockstep`): nothing is dropped. A
        layout that is chosen has actors gather while a trainer learns only where this
        is at least 2, and no less than their `slots`; those of one slot have two then
    sums: how equal trainers add up what they bring. "ranks": in the order of their
        numbers, so that the weights are the same to the last bit on whatever hosts they
        are; "hosts": those of each host first, one of whom exchanges that with the other
        hosts, which takes less of the network (of n trainers on each host 1 ÷ n²), and
        on other hosts ends in other last bits; of one host both are the same. "torch": by
        torch.distributed, gloo on cores and NCCL on GPUs, whose connections are neither
        encrypted nor authenticated
    """

    retired: ClassVar[dict[str, tuple[Any, str]]] = {
        name: (default, _replay(name))
        for name, default in {
            "ratio": None,
            "slack": None,
            "exact": False,
            "journal": False,
            "keep_buffer": True,
            "iteration_steps": None,
            "finish_episodes": False,
            "evaluation_steps": 0,
            "max_no_progress_s": 600.0,
        }.items()
    }

    batch_size: int | None = None
    buffer: BufferConfig = field(default_factory=Queue)
    max_policy_lag: int | None = None
    sums: str = RANKS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(batch_size=1, max_policy_lag=0)
        if self.sums not in _SUMS:
            known = ", ".join(f'"{name}" ({how})' for name, how in _SUMS.items())
            raise ConfigError(
                f"sums = {self.sums!r} is none of {known}; {did_you_mean(str(self.sums), _SUMS)}"
            )
        if self.buffer.replays:
            raise ConfigError(
                f"buffer = {type(self.buffer).__name__} is a replay memory, and a Trainer trains on each "
                "sample once, or a few times; take ReplayTrainer(buffer=…, batch_size=…, ratio=…), and "
                "ReplayActors"
            )
        self.buffer.check(self.max_policy_lag)
        if self.max_policy_lag == 0 and self.batch_size is not None:
            raise ConfigError(
                f"batch_size = {self.batch_size}, but max_policy_lag = 0 trains on one sample of each "
                "producer per update, whatever they hold; leave it out, or allow some lag"
            )

    def check(self, experiment: Experiment) -> None:
        super().check(experiment)
        if self.sums != RANKS and self.count > 1 and experiment.exact_resume:
            raise ConfigError(
                f'sums = "{self.sums}" does not add up in the same order wherever trainers stand, and a run '
                f'with exact_resume goes on in every bit, wherever it is resumed: take sums = "{RANKS}"'
            )

    @classmethod
    def of_today(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return saved settings in today's form: a trainer with a ratio is a
        `ReplayTrainer` now. See `Config.of_today`."""
        if data.get("ratio") is None:
            return data
        others = {name: value for name, value in data.items() if name != "max_policy_lag"}
        return {**others, "kind": "ReplayTrainer"}

    def ports(self) -> tuple[Port, ...]:
        consume = Port(
            self.samples,
            "consume",
            policy=self.policy,
            lockstep=self.max_policy_lag == 0,
            lag_bounded=self.max_policy_lag is not None,
        )
        together = (Port(self.policy, "sum"),) if self.count > 1 else ()
        return (consume, *together, *super().ports())

    def build(self, context: Context) -> WorkerHandle:
        from tidemill.workers.trainer import TrainerWorker

        return TrainerWorker(context, self)
