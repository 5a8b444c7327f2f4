"""The trainer worker: takes samples until a batch is full, updates, publishes a version, and keeps checkpoints. The limits of a run are here.

samples → buffer → batch → algorithm.update → version + 1 → parameter stream

Several equal trainers of one policy each take samples of their own and sum their gradients, so that their weights stay the same, bit by bit.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from tidemill.api.algorithm import Algorithm, DataParallel, Sample
from tidemill.api.buffer import Buffer, Counts, Demand, Held
from tidemill.api.control import Adopt, Facts, Notice, State, Statistics
from tidemill.api.edges import number
from tidemill.api.experiment import Context
from tidemill.api.label import plain_spaces, write_label
from tidemill.core.checkpoint import checkpoint_name, read_newest, write_checkpoint
from tidemill.core.errors import CheckpointError, ConfigError, did_you_mean
from tidemill.core.memory import Need
from tidemill.core.schema import Array, Arrays
from tidemill.core.seeding import derive_seed
from tidemill.core.versions import PARAMETERS, ParameterDatabase
from tidemill.nets.device import choose_device
from tidemill.streams.parameters import ParameterPublisher
from tidemill.streams.samples import ChannelSampleConsumer
from tidemill.streams.sums import Summing
from tidemill.workers.base import PollResult, Worker
from tidemill.workers.pusher import LAST_PUSH, VersionPusher
from tidemill.workers.records import TrainingReturns, field_of, settings_of, with_settings
from tidemill.workers.rows import misfit_of_rows
from tidemill.workers.trainer_config import COUNTED, Trainer

LEAVE_ALONE = 2.0  # seconds that a trainer which is told to end waits for equal ones: longer than a minibatch takes, less than the controller waits
LOOKS = 32  # for what equal trainers bring, before others get their turns: a look takes 0.5 µs, the turns of a process 20
_AGREED = np.zeros(6)  # what equal trainers agree on before each update: see `_Agreed`


@dataclass
class Counters:
    """What a resumed run goes on from. `steps` are env steps that entered training: trained rows, each counted when it is first trained on, divided
    by the seats in a lane. `dropped`, `evicted` and `reused` count samples (see `api.buffer.Counts`), `adopted` is the version as which
    it went on from another policy's weights last."""

    updates: int = 0
    rows: int = 0
    steps: int = 0
    dropped: int = 0
    evicted: int = 0
    reused: int = 0
    adopted: int = 0
    seconds: float = 0.0


class _Agreed(NamedTuple):
    """Of all equal trainers together: how many are to end, rows of the batch that enter the loss, those of them that do so for the first time, and
    what became of samples since the last update."""

    ending: float
    rows: float
    fresh: float
    dropped: float
    evicted: float
    reused: float


class TrainerWorker(Worker):
    """See the module's text. Among equal trainers the first one reports updates and writes checkpoints."""

    def __init__(self, context: Context, config: Trainer) -> None:
        super().__init__(context)
        self._config = config
        self.counters = Counters()
        self._saved = -1, -1  # updates and steps at the newest checkpoint
        self._folder = Path(context.folder) / "checkpoints" / config.policy if context.folder else None
        self._versions: VersionPusher | None = None
        self._returns = TrainingReturns()
        self._adopted: dict[str, float] = {}  # settings of the algorithm, where adoptions have changed them
        self._settings: dict[str, float] = {}  # all of them, as the parameter database calls them
        self._peers: Summing | None = None
        self._life = self._train()
        self._reason: str | None = None  # why the run ends, once that is known
        self._together_at = 0.0  # when it became known, or equal trainers last met
        self._before: tuple[Arrays, Arrays] = {}, {}  # parameters and the algorithm's state before the update
        self._in_update = self._alone = False

    def _configure(self, facts: Facts) -> Facts:
        config, context = self._config, self.context
        experiment, endpoints = context.experiment, context.endpoints
        producers = [edge.name for edge in context.edges(f"samples/{config.samples}/")]
        if config.policy not in facts.spaces:
            raise ConfigError(
                f'policy "{config.policy}" is trained, but no agent spec plays it, so that nobody knows its spaces; let one play it '
                f"(samples=None keeps none of its rows); {did_you_mean(config.policy, facts.spaces)}"
            )
        self._facts, self._spaces = facts.samples[config.samples], facts.spaces[config.policy]
        if self._facts.mode == "concise":
            raise ConfigError(
                f'sample stream "{config.samples}" has an episode in each row (AgentSpec.mode = "concise"), which cannot be trained on; '
                'take mode = "full" for whole episodes'
            )
        own = self._facts
        source = ChannelSampleConsumer([endpoints.consumer(e) for e in producers], own.burn_in, own.bootstrap, own.cut)
        for offered in source.offered() or ():
            if misfit := misfit_of_rows(offered.schema, experiment.policies[config.policy], self._spaces):
                raise ConfigError(
                    f'policy "{config.policy}" is trained on sample stream "{config.samples}", which holds other rows than it goes with: {misfit}; '
                    "take the stream of the agents that play it, or of agents with its spaces and whose policy has its state"
                )
        rows = None if config.batch_size is None else -(-config.batch_size // config.count)
        samples = ceil(experiment.samples_at_once(context.name, config.samples))
        folder = Path(context.folder) if context.folder else None
        seed = derive_seed(experiment.seed, context.name, "buffer")
        self._buffer = self._build_buffer(source, Demand(rows, samples, config.max_policy_lag, config.count, seed, folder))
        device = choose_device(config.device, number(context.name))
        policy = experiment.policies[config.policy].build_on(device, self._spaces, derive_seed(experiment.seed, "policy", config.policy))
        self._policy = policy
        if context.resume is not None:
            self._restore()
        else:
            self._algorithm = self._build_algorithm()
            policy.version = 0
        self._peers = self._join_peers()
        edges = context.edges(f"parameters/{config.policy}/")
        self._publisher = ParameterPublisher(endpoints.writer(edges[0].name), policy) if edges else None
        if self._publisher is not None:
            self._publisher.publish(policy)
        self._open_versions()
        weights = sum(array.nbytes for array in policy.parameters().values())
        needs = [Need("parameters", 3 * weights)] if edges else []
        if self._peers is not None:
            state = sum(array.nbytes for array in self._algorithm.state().values())
            needs += [Need("sums", self._peers.nbytes), Need("weights before an update", weights + state)]
        return Facts(memory=(*needs, *self._buffer.needs))

    def _build_buffer(self, source: ChannelSampleConsumer, demand: Demand) -> Buffer:
        if self._facts.mode == "stepwise":
            raise ConfigError(
                f'sample stream "{self._config.samples}" has rows that are sent one by one (AgentSpec.mode = "stepwise"), for a replay memory; set '
                'buffer and ratio, or take mode = "fixed"'
            )
        return self._config.buffer.build(source, demand)

    def _build_algorithm(self) -> Algorithm:
        """Return the algorithm, as it is set now. After each adoption it draws other numbers."""
        path = (self.name, self.counters.adopted) if self.counters.adopted else (self.name,)
        config = with_settings(self._config.algorithm, self._adopted)
        self._settings = {field_of(name): value for name, value in settings_of(config).items()}
        return config.build(self._policy, derive_seed(self.context.experiment.seed, *path))

    def _join_peers(self) -> Summing | None:
        context, policy = self.context, self._config.policy
        names = context.experiment.holders(policy, "sum")
        if not names:
            return None
        if not isinstance(self._algorithm, DataParallel):
            raise ConfigError(
                f"count = {self._config.count}: several equal trainers cannot run {type(self._config.algorithm).__name__}, since its algorithm is no "
                "DataParallel (see tidemill.api.algorithm); set the trainer's count to 1"
            )
        others = {rank: name for rank, name in enumerate(names) if name != context.name}
        senders = {rank: context.endpoints.producer(f"sums/{policy}/{context.name}/{name}") for rank, name in others.items()}
        receivers = {rank: context.endpoints.consumer(f"sums/{policy}/{name}/{context.name}") for rank, name in others.items()}
        return Summing(names.index(context.name), senders, receivers, max(self._algorithm.largest_sum, _AGREED.nbytes))

    def start(self) -> None:
        self._started = self._last_save = monotonic()
        super().start()

    def pause(self) -> None:
        self._count_time()
        super().pause()

    def exit(self, reason: str = "") -> None:
        """See `Worker.exit`. Equal trainers end together, before the next update that one of them would begin: until then this one works on."""
        if self._peers is None or self.state not in (State.RUNNING, State.PAUSED):
            super().exit(reason)
        elif self._reason is None:
            self._end(reason)
            if self.state is State.PAUSED:
                self.start()

    def _end(self, reason: str) -> None:
        self._reason, self._together_at = reason, monotonic()

    def _count_time(self) -> None:
        now = monotonic()
        if self.state is State.RUNNING:
            self.counters.seconds += now - self._started
        self._started = now

    def _poll(self) -> PollResult:
        result = next(self._life)
        if self._reason is not None and self._peers is not None and monotonic() - self._together_at > LEAVE_ALONE and not self.ended:
            self._give_up()
        return result

    def _train(self) -> Iterator[PollResult]:
        """The trainer's life, in pieces that never wait."""
        counters, result = self.counters, PollResult()
        while True:
            taken: Sequence[Held] | None = None
            while self._reason is None and (taken := self._buffer.take(self._policy.version)) is None:
                if self.context.experiment.limits.seconds is not None:
                    self._count_time()
                    self._end_at_limits()
                if self._reason is None:
                    yield PollResult()
            batch = taken or ()
            agreed = yield from self._agree(batch)
            if agreed.ending:
                break
            if not agreed.rows:
                self._buffer.release()
                yield PollResult(0, 1)
                continue
            lags = self._lags(batch)
            self._returns.add(held.sample for held in batch if not held.uses)
            metrics = yield from self._update([held.sample for held in batch])
            counters.updates += 1
            counters.rows += int(agreed.fresh)
            counters.steps = counters.rows // self._facts.seats_per_lane
            self._policy.version = counters.updates
            self._publish()
            if self._config.max_policy_lag == 0:
                yield from self._sum(np.zeros(1))  # all have published: whoever gets a sample back finds the new version, whichever trainer it asks
            self._buffer.release()
            self._count_time()
            self._report_update({**metrics, **lags})
            if monotonic() - self._last_save >= self._config.checkpoint_seconds:
                self._save()
            if self._versions is not None and self._first:
                self._versions.look(self._policy, self._version_counters())
            self._end_at_limits()
            result = PollResult(sum(held.trained for held in batch), 1)
            if self._reason is None:
                yield result
        super().exit(self._reason or "")
        yield result

    def _publish(self) -> None:
        if self._publisher is not None:
            left = self.clock.enter("copy")
            self._publisher.publish(self._policy)
            self.clock.enter(left)

    def _agree(self, batch: Sequence[Held]) -> Generator[PollResult, None, _Agreed]:
        """Return what all trainers together bring to the update that is due, and count it."""
        counts, self._buffer.counts = self._buffer.counts, Counts()
        rows, fresh = sum(held.trained for held in batch), sum(held.trained for held in batch if not held.uses)
        numbers = _AGREED.copy()
        numbers[:] = _Agreed(self._reason is not None, rows, fresh, counts.dropped, counts.evicted, counts.reused)
        yield from self._sum(numbers)
        agreed = _Agreed(*numbers.tolist())
        self.counters.dropped += int(agreed.dropped)
        self.counters.evicted += int(agreed.evicted)
        self.counters.reused += int(agreed.reused)
        return agreed

    def _lags(self, batch: Sequence[Held]) -> dict[str, float]:
        """Return how many versions the rows that enter the loss are behind on average, and the oldest one."""
        version = self._policy.version
        behind, rows = sum(held.trained * version - held.stamps for held in batch), sum(held.trained for held in batch)
        return {"lag/mean": behind / max(rows, 1), "lag/max": float(max((held.lag(version) for held in batch), default=0))}

    def _sum(self, array: Array) -> Iterator[PollResult]:
        """Replace `array` by its sum over all equal trainers."""
        if self._peers is not None:
            left = self.clock.enter("copy")
            for look, _ in enumerate(self._peers.add(array), 1):
                self.clock.enter("wait")
                if look % LOOKS == 0:
                    yield PollResult()
                self.clock.enter("copy")
            self._together_at = monotonic()
            self.clock.enter(left)

    def _update(self, samples: list[Sample]) -> Generator[PollResult, None, dict[str, float]]:
        """Do one update and return its metrics."""
        algorithm, progress = self._algorithm, self._progress()
        left = self.clock.enter("train")
        if self._peers is None:
            metrics = algorithm.update(samples, progress)
        else:
            assert isinstance(algorithm, DataParallel)
            self._before = {k: v.copy() for k, v in self._policy.parameters().items()}, algorithm.state()
            self._in_update = True
            steps = algorithm.parallel_update(samples, progress)
            try:
                while True:
                    yield from self._sum(next(steps))
            except StopIteration as end:
                metrics = end.value
            self._in_update = False
        self.clock.enter(left)
        return metrics

    def _give_up(self) -> None:
        """End without the others, who do not come: one of them is dead, or hangs. What an unfinished update has done is undone, and whoever is left
        writes the checkpoint: all have the same weights."""
        self._alone = True
        if self._in_update:
            parameters, state = self._before
            self._policy.load(parameters, self.counters.updates)
            self._algorithm.load_state(state)
            self._in_update = False
        super().exit(self._reason or "")

    def _progress(self) -> float:
        limits = self.context.experiment.limits
        shares = [self.counters.steps / limits.steps if limits.steps else 0.0, self.counters.updates / limits.updates if limits.updates else 0.0]
        return min(max(shares), 1.0)

    def _end_at_limits(self) -> None:
        if self._reason is None and (reason := self._reached()):
            self._end(reason)

    def _steps_done(self) -> bool:
        limit = self.context.experiment.limits.steps
        return limit is not None and self.counters.steps >= limit

    def _reached(self) -> str:
        limits, counters = self.context.experiment.limits, self.counters
        if self._steps_done():
            return f"{counters.steps:,} env steps trained"
        if limits.updates is not None and counters.updates >= limits.updates:
            return f"{counters.updates:,} updates done"
        if limits.seconds is not None and counters.seconds >= limits.seconds:
            return f"{counters.seconds:.0f} s of training"
        return ""

    def _report_update(self, metrics: dict[str, float]) -> None:
        if not self._first:
            return
        counters = self.counters
        told = {name: float(getattr(counters, name)) for name in COUNTED}
        values = {"step": float(counters.steps), "update": float(counters.updates), **told, **metrics}
        self.report(Statistics(self.polls, values, {"seconds": counters.seconds}, update=True))

    def _adopt(self, message: Adopt) -> None:
        """Go on from a version of another policy, normalisers included, as if an update had led there: it is a version more, and is published.

        Samples of versions before it are dropped from now on. What is taken over are weights and settings, as in Jaderberg et al. 2017, section
        3, "exploit". The optimiser begins anew: its moments were of the weights that are given up, and versions hold none.
        """
        assert self.context.folder is not None
        parameters, _ = ParameterDatabase(Path(self.context.folder) / PARAMETERS).load(message.source, message.version)
        self._adopted |= message.settings
        self.counters.updates += 1
        self.counters.adopted = self._buffer.least = self.counters.updates
        self._algorithm = self._build_algorithm()
        self._policy.load(parameters, self.counters.updates)
        self._returns.clear()
        if self._publisher is not None:
            self._publisher.publish(self._policy)

    # ---- checkpoints -------------------------------------------------------------------------------------------------------------------------

    @property
    def _first(self) -> bool:
        return self._peers is None or self._peers.rank == 0 or self._alone

    def _save(self, final: bool = False) -> None:
        self._last_save = monotonic()
        if not self._first or self._folder is None or self._saved == (self.counters.updates, self.counters.steps):
            return
        # Among equal trainers an update may be half done: what was before it is kept.
        policy, algorithm = self._before if self._in_update else (self._policy.parameters(), self._algorithm.state())
        arrays = {"policy": policy, "algorithm": algorithm, **self._kept_arrays()}
        spaces = plain_spaces(self._spaces)  # so that the policy can be built without its environment
        names = {"policy": self._config.policy, "experiment": self.context.experiment.name}
        facts = {**vars(self.counters), **names, "spaces": spaces, "settings": self._adopted, **self._kept_facts()}
        try:
            write_checkpoint(self._folder, checkpoint_name(self.counters.updates), arrays, facts, self._config.checkpoints, self._kept_folders())
        except CheckpointError as error:
            if final:
                raise
            self.report(Notice(str(error)))  # training goes on; the last good checkpoint is kept
            return
        self._saved = self.counters.updates, self.counters.steps

    def _kept_arrays(self) -> dict[str, Arrays]:
        """Return the files of arrays that checkpoints keep besides."""
        return {}

    def _kept_facts(self) -> dict[str, Any]:
        """Return what checkpoints keep besides."""
        return {}

    def _kept_folders(self) -> dict[str, Callable[[Path], None]]:
        """Return the folders that checkpoints keep besides: name → who writes its files."""
        return {}

    def _take_back(self, path: Path, arrays: dict[str, Arrays], facts: dict[str, Any]) -> None:
        """Take back what `_kept_arrays`, `_kept_facts` and `_kept_folders` gave to the checkpoint at `path`."""

    def _restore(self) -> None:
        assert self._folder is not None
        path, arrays, facts, _ = read_newest(self._folder)  # the runner has looked: damaged ones are out of the way, and policies differ in updates
        for name in vars(self.counters):
            setattr(self.counters, name, facts.get(name, 0))  # older checkpoints lack the newer ones
        self._adopted = facts.get("settings", {})
        self._algorithm = self._build_algorithm()
        self._policy.load(arrays["policy"], self.counters.updates)
        self._algorithm.load_state(arrays["algorithm"])
        if (rank := number(self.context.name)) and isinstance(self._algorithm, DataParallel):
            self._algorithm.separate(rank)
        self._take_back(path, arrays, facts)
        self._saved = self.counters.updates, self.counters.steps

    def _open_versions(self) -> None:
        config, context = self._config, self.context
        if context.folder is None or config.database_seconds is None:
            return
        folder, text = Path(context.folder) / PARAMETERS, write_label(context.experiment.policies[config.policy], self._spaces)
        self._versions = VersionPusher(folder, config.policy, config.database_seconds, config.database_versions, text, self._tell)
        if self._first:
            self._versions.begin(self._policy, self._version_counters())

    def _tell(self, text: str) -> None:
        self.report(Notice(text))

    def _version_counters(self) -> dict[str, float]:
        """Return what the parameter database is to know of the present version. Of equal trainers the first one's episodes stand for all."""
        counters, reached = self.counters, self._returns.mean()
        known = {"env_steps": counters.steps, "seconds": counters.seconds, "adopted": counters.adopted, **self._settings}
        return known if reached is None else {**known, "training_return": reached}

    def _on_exit(self) -> None:
        self._count_time()
        self._save(final=True)
        if self._versions is not None and self._first:
            self._versions.end(self._policy, self._version_counters())

    def _close(self) -> None:
        if self._versions is not None:
            self._versions.wait(LAST_PUSH)
