"""The learner of a trainer: the policy that is trained, by which algorithm, and all that
is counted, published, kept and reported of it.

Both trainers hold one: `workers.trainer`, and the one of a replay memory.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from math import ceil, isfinite
from pathlib import Path
from typing import Any, NamedTuple

from tidemill.api.algorithm import Algorithm, AlgorithmConfig
from tidemill.api.buffer import BufferedSample, Demand
from tidemill.api.control_messages import Adopt, Facts, Notice, SampleFacts, Saving, Up, WorkerStatistics
from tidemill.api.edges import number
from tidemill.api.experiment import Context
from tidemill.api.plain_spaces import plain_spaces
from tidemill.api.policy import Policy, check_weights
from tidemill.api.spaces import Spaces
from tidemill.api.weights_header import write_header
from tidemill.core.clock import Clock, awake
from tidemill.core.errors import CheckpointError, ConfigError, did_you_mean, returned
from tidemill.core.memory import Need
from tidemill.core.schema import Arrays
from tidemill.core.seeding import derive_seed
from tidemill.nets.choose_device import choose_device
from tidemill.nets.weights import placeholder_weights
from tidemill.store.checkpoint import FoundCheckpoint, checkpoint_name, read_newest, write_checkpoint
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase
from tidemill.streams.parameters import ParameterPublisher
from tidemill.streams.samples import ChannelSampleConsumer
from tidemill.workers.data_parallel import EqualTrainers
from tidemill.workers.row_schema import misfit_of_rows
from tidemill.workers.trainer_config import COUNTED, TrainerConfig
from tidemill.workers.trainer_counters import Counters, TrainingLimits
from tidemill.workers.version_metadata import TrainingReturns, field_of, settings_of, with_settings
from tidemill.workers.version_writer import LAST_PUSH, VersionWriter


class Extras(NamedTuple):
    """What a checkpoint keeps besides the learner: files of arrays, facts, and folders:
    name → who writes its files."""

    arrays: dict[str, Arrays]
    facts: dict[str, Any]
    folders: dict[str, Callable[[Path], None]]


class Learner:
    """A learner is what both trainer workers hold: a policy, its algorithm, and what of
    them is counted, published, saved, restored and reported. `connect`, then `build`,
    make it ready. Of equal trainers the first one reports updates and writes checkpoints.

    clock: the worker's clock
    report: the function that sends a message up
    alive: the function that says that the worker lives, once it has written a checkpoint
    extras: the function that returns what checkpoints keep besides
    changes: settings of the algorithm that equal trainers are still to agree on
    """

    policy: Policy
    algorithm: Algorithm
    spaces: Spaces
    samples: SampleFacts
    found: FoundCheckpoint | None = None
    """The checkpoint that it goes on from."""

    def __init__(
        self,
        context: Context,
        config: TrainerConfig,
        clock: Clock,
        report: Callable[[Up], None],
        alive: Callable[[], None],
        extras: Callable[[], Extras] = lambda: Extras({}, {}, {}),
    ) -> None:
        self._context, self._config, self._clock = context, config, clock
        self._report, self._alive, self._extras = report, alive, extras
        self.counters = Counters()
        self.limits = TrainingLimits(self.counters, context.experiment.limits)
        self.returns = TrainingReturns()
        self.equal_trainers = EqualTrainers(clock)
        self._folder = Path(context.folder) / "checkpoints" / config.policy if context.folder else None
        self._saved = -1, -1  # updates and steps at the newest checkpoint
        self._last_save = 0.0
        self._publisher: ParameterPublisher | None = None
        self._versions: VersionWriter | None = None
        self.changes = deque[AlgorithmConfig]()
        # settings of the algorithm, where they were changed, `changes` included
        self._changed: dict[str, float | None] = {}

    # ---- making it ---------------------------------------------------------------------

    def connect(self, facts: Facts) -> ChannelSampleConsumer:
        """Return the samples that it is to learn from. Raises `ConfigError` where these
        are not of its policy."""
        config, context = self._config, self._context
        experiment, endpoints = context.experiment, context.endpoints
        if config.policy not in facts.spaces:
            raise ConfigError(
                f'policy "{config.policy}" is trained, but no agent spec plays it, so that nobody knows its '
                "spaces; let one play it (samples=None keeps none of its rows); "
                f"{did_you_mean(config.policy, facts.spaces)}"
            )
        own = self.samples = facts.samples[config.samples]
        self.spaces = facts.spaces[config.policy]
        if own.mode == "concise":
            raise ConfigError(
                f'sample stream "{config.samples}" has an episode in each row (AgentSpec.mode = "concise"), '
                'which cannot be trained on; take mode = "full" for whole episodes'
            )
        edges = context.edges(f"samples/{config.samples}/")
        source = ChannelSampleConsumer(
            [endpoints.consumer(edge.name) for edge in edges], own.burn_in, own.bootstrap, own.cut
        )
        policy = experiment.policies[config.policy]
        for offered in source.offered() or ():
            if misfit := misfit_of_rows(offered.schema, policy, self.spaces):
                raise ConfigError(
                    f'policy "{config.policy}" is trained on sample stream "{config.samples}", which holds '
                    f"other rows than it goes with: {misfit}; take the stream of the agents that play it, or "
                    "of agents with its spaces and whose policy has its state"
                )
        if context.resume is not None:
            assert self._folder is not None
            # the runner has looked: damaged ones are out of the way, and policies differ
            # in updates
            self.found = read_newest(self._folder)
            check_weights(policy, self.spaces, self.found.arrays.get("policy", {}))
        return source

    def demand(self, rows: int | None, max_lag: int | None = None) -> Demand:
        """Return what is asked of a buffer: `rows` of all equal trainers together."""
        config, context = self._config, self._context
        at_once = context.experiment.samples_at_once(context.name, config.samples)
        return Demand(
            None if rows is None else -(-rows // config.count),
            ceil(at_once * self.samples.at_once),
            max_lag,
            config.count,
            derive_seed(context.experiment.seed, context.name, "buffer"),
            Path(context.folder) if context.folder else None,
        )

    def build(self) -> list[Need]:
        """Build the policy and the algorithm, as the checkpoint has them if there is one,
        and publish the first version. Return the memory that this is going to take."""
        config, context = self._config, self._context
        seed = derive_seed(context.experiment.seed, "policy", config.policy)
        device = choose_device(config.device, number(context.name))
        with placeholder_weights() if self.found is not None else nullcontext():
            self.policy = context.experiment.policies[config.policy].build_on(device, self.spaces, seed)
        if self.found is not None:
            self._restore(self.found)
        else:
            self.algorithm = self._build_algorithm()
            self.policy.version = 0
        self.equal_trainers = EqualTrainers.of(
            context, config, self.algorithm, self._clock, restored=self.found is not None
        )
        edges = context.edges(f"parameters/{config.policy}/")
        if edges:
            self._publisher = ParameterPublisher(context.endpoints.writer(edges[0].name), self.policy)
            self._publisher.publish(self.policy)
        self._open_versions()
        weights = sum(array.nbytes for array in self.policy.parameters().values())
        own_needs = [Need("parameters", 3 * weights)] if edges else []
        return [*own_needs, *self.equal_trainers.needs(self.algorithm, weights)]

    def _build_algorithm(self) -> Algorithm:
        """Return the algorithm, as it is set now. After each adoption it draws other
        numbers."""
        name, adopted = self._context.name, self.counters.adopted
        path = (name, adopted) if adopted else (name,)
        config = with_settings(self._config.algorithm, self._changed)
        self._scheduled = config
        built = config.build(self.policy, derive_seed(self._context.experiment.seed, *path))
        self._follow(returned(built, Algorithm, config.build))
        return built

    def _accept(self, settings: Mapping[str, float | None]) -> AlgorithmConfig | None:
        """Return what the algorithm is to be set to with these settings, which
        checkpoints keep from now on. None, and a notice, where they do not go with those
        that were changed before: nothing is changed then."""
        changed = {**self._changed, **settings}
        try:
            config = with_settings(self._config.algorithm, changed)
            config.check_policy(self._context.experiment.policies[self._config.policy])
        except ConfigError as error:
            if self.equal_trainers.first:
                asked = ", ".join(f"{name} = {value}" for name, value in settings.items())
                self.notice(f"{asked} is not taken, since settings were changed before: {error}")
            return None
        self._changed = changed
        return config

    def _restore(self, found: FoundCheckpoint) -> None:
        for name in vars(self.counters):
            kept = found.facts.get(name, 0)  # older checkpoints lack the newer ones
            if isinstance(kept, bool) or not isinstance(kept, (int, float)) or not isfinite(kept):
                raise CheckpointError(f"checkpoint {found.path} says {name} = {kept!r}, which is no count")
            setattr(self.counters, name, kept)
        self._changed = found.facts.get("settings", {})
        with placeholder_weights():
            self.algorithm = self._build_algorithm()
        self.policy.load(found.arrays["policy"], self.counters.updates)
        self.algorithm.load_state(found.arrays["algorithm"])
        self._saved = self.counters.updates, self.counters.steps

    # ---- training ----------------------------------------------------------------------

    def follow_schedules(self) -> None:
        """Set the algorithm's schedules to what they are now."""
        self._follow(self.algorithm)

    def _follow(self, algorithm: Algorithm) -> None:
        if self._scheduled.schedules:
            algorithm.config = self._now()

    def _now(self) -> AlgorithmConfig:
        """Return the algorithm's settings as they are now."""
        return self._scheduled.at(self.counters.steps, self.limits.progress())

    def finish_update(self) -> None:
        """Count an update: the policy is a version further."""
        self.counters.updates += 1
        self.policy.version = self.counters.updates

    def publish(self) -> None:
        """Publish the weights as they are now."""
        if self._publisher is not None:
            left = self._clock.enter("copy")
            self._publisher.publish(self.policy)
            self._clock.enter(left)

    def measured(self, metrics: dict[str, float], batch: Sequence[BufferedSample]) -> dict[str, float]:
        """Return what the update of `batch` has returned, what scheduled settings were in
        it, and how many versions the rows that enter the loss are behind on average, and
        the oldest one."""
        version = self.policy.version
        behind = sum(held.trained * version - held.stamps for held in batch)
        rows = sum(held.trained for held in batch)
        return {
            **{name: float(getattr(self.algorithm.config, name)) for name in self._scheduled.schedules},
            **returned(metrics, dict, self.algorithm.update),
            "lag/mean": behind / max(rows, 1),
            "lag/max": float(max((held.lag(version) for held in batch), default=0)),
        }

    def adopt(self, message: Adopt) -> None:
        """Go on from a version of another policy, normalisers included, as if an update
        had led there: it is a version more, and is published.

        What is taken over are weights and settings, as in Jaderberg et al. 2017, section
        3, "exploit". The optimiser begins anew: its moments were of the weights that are
        given up, and versions hold none.
        """
        assert self._context.folder is not None
        parameters, _ = ParameterDatabase(Path(self._context.folder) / PARAMETERS).load(
            message.source, message.version
        )
        self._accept(message.settings)
        self.counters.updates += 1
        self.counters.adopted = self.counters.updates
        self.algorithm = self._build_algorithm()
        self.policy.load(parameters, self.counters.updates)
        self.returns.clear()
        if self._publisher is not None:
            self._publisher.publish(self.policy)

    def change(self, settings: Mapping[str, float | None]) -> None:
        """Take other settings of the algorithm, which checkpoints keep from now on. A
        trainer without equals goes on with them at once."""
        if (config := self._accept(settings)) is not None:
            self.changes.append(config)
            self._saved = -1, -1  # the checkpoint of now, if there is one, does not know them
            if not self.equal_trainers.others:
                self.apply_change()

    def apply_change(self) -> None:
        """Go on with the first of `changes`."""
        self._scheduled = self.changes.popleft()
        self.algorithm.config = self._now()

    def start(self) -> None:
        """Begin to count the time of training, and until the next checkpoint."""
        self._last_save = awake()
        self.limits.start()

    # ---- reports, versions, checkpoints ------------------------------------------------

    def report_update(self, metrics: dict[str, float], polls: int) -> None:
        """Report what updates have returned, in poll number `polls`."""
        if not self.equal_trainers.first:
            return
        counters = self.counters
        told = {name: float(getattr(counters, name)) for name in COUNTED}
        values = {"step": float(counters.steps), "update": float(counters.updates), **told, **metrics}
        self._report(WorkerStatistics(polls, values, {"seconds": counters.seconds}, update=True))

    def notice(self, text: str) -> None:
        """Report a text for the user."""
        self._report(Notice(text))

    def save_due(self) -> bool:
        """True when it is time for a checkpoint."""
        return awake() - self._last_save >= self._config.checkpoint_seconds

    def save(self, final: bool = False, again: bool = False) -> None:
        """Write a checkpoint, unless the newest one is of now; `again`: all the same.
        Where it cannot be written only the `final` one raises."""
        self._last_save = awake()
        now = self.counters.updates, self.counters.steps
        if not self.equal_trainers.first or self._folder is None or (self._saved == now and not again):
            return
        config = self._config
        self._report(Saving(config.policy, self.counters.updates))
        (policy, algorithm), extras = self.equal_trainers.state(self.algorithm, self.policy), self._extras()
        facts = {
            **vars(self.counters),
            "policy": config.policy,
            "experiment": self._context.experiment.name,
            "spaces": plain_spaces(self.spaces),  # so that the policy can be built without its environment
            "settings": self._changed,
            **extras.facts,
        }
        try:
            write_checkpoint(
                self._folder,
                checkpoint_name(self.counters.updates),
                {"policy": policy, "algorithm": algorithm, **extras.arrays},
                facts,
                config.checkpoints,
                extras.folders,
            )
        except CheckpointError as error:
            if final:
                raise
            self.notice(str(error))  # training goes on; the last good checkpoint is kept
            return
        self._alive()  # who hangs from now on does not save
        self._saved = now

    def _open_versions(self) -> None:
        config, context = self._config, self._context
        if context.folder is None or config.database_seconds is None:
            return
        folder = Path(context.folder) / PARAMETERS
        text = write_header(context.experiment.policies[config.policy], self.spaces)
        self._versions = VersionWriter(
            folder, config.policy, config.database_seconds, config.database_versions, text, self.notice
        )
        if self.equal_trainers.first:
            self._versions.begin(self.policy, self.metadata())

    def look_at_versions(self) -> None:
        """Push a version into the parameter database when it is time."""
        if self._versions is not None and self.equal_trainers.first:
            self._versions.look(self.policy, self.metadata())

    def metadata(self) -> dict[str, float]:
        """Return what the parameter database is to know of the present version. Of equal
        trainers the first one's episodes stand for all."""
        counters, reached = self.counters, self.returns.mean()
        known = {
            "env_steps": counters.steps,
            "seconds": counters.seconds,
            "adopted": counters.adopted,
            **{field_of(name): value for name, value in settings_of(self._now()).items()},
        }
        return known if reached is None else {**known, "training_return": reached}

    def end(self) -> None:
        """Write the last checkpoint and push the last version."""
        self.save(final=True)
        if self._versions is not None and self.equal_trainers.first:
            self._versions.end(self.policy, self.metadata())

    def close(self) -> None:
        """Wait until what is being pushed is on the disk, for a while."""
        if self._versions is not None:
            self._versions.wait(LAST_PUSH)
