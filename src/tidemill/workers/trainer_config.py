"""The configuration of trainers: what they train, on which samples, how old these may be, and what they keep."""

from dataclasses import dataclass, field
from typing import ClassVar

from tidemill.api.algorithm import AlgorithmConfig
from tidemill.api.buffer import BufferConfig
from tidemill.api.edges import Port
from tidemill.api.experiment import Context, WorkerConfig, WorkerHandle
from tidemill.core.errors import ConfigError
from tidemill.nets.device import check_device
from tidemill.replay.queue import Queue
from tidemill.workers.records import RECORDED, field_of, settings_of

COUNTED = ("dropped", "evicted", "reused")  # counters of samples that are told with each update


@dataclass(frozen=True, kw_only=True)
class Trainer(WorkerConfig):
    """A trainer worker: trains `policy` by `algorithm` on sample stream `samples`. With a `count` above 1: equal trainers, each on the samples of
    its share of the producers, whose gradients are averaged (the algorithm must be `DataParallel`).

    batch_size          rows of a batch of all trainers together, at least (samples are taken whole); None: as many samples as actors fill at a time,
                        one in each target, whether they come directly or through buffer workers, of whoever has some
    buffer              where samples wait for an update, and how often each is trained on: `Queue`, `PriorityQueue`
    max_policy_lag      samples whose oldest trained row is more versions behind at the moment of training, of each use, are dropped and counted;
                        None: none are. Nobody is held back for it: a low limit throws work away. 0 is synchronous training: each producer sends one
                        sample per update, waits for it, and goes on with the new version (see `workers.lockstep`), so that nothing is dropped
    checkpoint_seconds  seconds between checkpoints; one more is always written at the end
    checkpoints         how many of them are kept
    database_seconds    seconds between versions that are pushed into the run's parameter database; the first and the last always are. None: none is
    database_versions   how many of them are kept, besides tagged ones
    device              what trains: "cpu"; "cuda", a GPU, the next one for each worker of the group; "cuda:1", a certain one; "auto", a GPU if there
                        is one. Worth it for images and wide networks; MLPs of the usual size should train faster on a CPU (benchmarks/device.py
                        tells)
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
    database_versions: int = 20
    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("batch_size", 1), ("max_policy_lag", 0), ("checkpoints", 1), ("database_versions", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} = {value} must be at least {least}")
        if self.checkpoint_seconds <= 0:
            raise ConfigError(f"checkpoint_seconds = {self.checkpoint_seconds} must be above 0")
        self.buffer.check(self.max_policy_lag)
        if self.database_seconds is not None and self.database_seconds <= 0:
            raise ConfigError(f"database_seconds = {self.database_seconds} must be above 0; None pushes no versions")
        if self.max_policy_lag == 0 and self.batch_size is not None:
            raise ConfigError(
                f"batch_size = {self.batch_size}, but max_policy_lag = 0 trains on one sample of each producer per update, whatever they hold; leave "
                "it out, or allow some lag"
            )
        check_device(self.device)

    def ports(self) -> tuple[Port, ...]:
        ports = [Port(self.samples, "consume", policy=self.policy, lockstep=self.max_policy_lag == 0), Port(self.policy, "publish")]
        ports += [Port(self.policy, "sum")] if self.count > 1 else []
        return (*ports, Port(self.policy, "store")) if self.database_seconds is not None else tuple(ports)

    def records(self) -> tuple[str, ...]:
        """See `tidemill.workers.records`."""
        return () if self.database_seconds is None else (*RECORDED, *map(field_of, settings_of(self.algorithm)))

    def measures(self) -> tuple[str, ...] | None:
        own = self.algorithm.measures()
        return None if own is None else (*COUNTED, "lag/mean", "lag/max", *own)

    def build(self, context: Context) -> WorkerHandle:
        from tidemill.workers.trainer import TrainerWorker

        return TrainerWorker(context, self)
