"""The learner of a trainer: the policy that is trained, by which algorithm, and all that
is counted, published, kept and reported of it.

Both trainers hold one: `workers.trainer`, and the one of a replay memory.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import islice
from math import ceil, isfinite
from pathlib import Path

import numpy as np

from tidemill.api.algorithm import Algorithm, DataParallel, UpdateFault
from tidemill.api.buffer import BufferedSample, Demand
from tidemill.api.control_messages import (
    Adopt,
    ChangeSettings,
    Facts,
    Notice,
    Rejoin,
    SampleFacts,
    Up,
    WorkerStatistics,
)
from tidemill.api.edges import number
from tidemill.api.plain_spaces import plain_spaces
from tidemill.api.policy import VERSIONS_OF_LIFE, Policy, check_weights, number_of
from tidemill.api.spaces import Spaces
from tidemill.api.weights_header import write_header
from tidemill.api.worker import Context
from tidemill.core.clock import Clock, awake
from tidemill.core.config import encode
from tidemill.core.errors import (
    CheckpointError,
    ConfigError,
    DatabaseError,
    VersionGone,
    did_you_mean,
    returned,
)
from tidemill.core.memory import Need
from tidemill.core.schema import Array, Arrays
from tidemill.core.seeding import derive_seed
from tidemill.nets.choose_device import choose_device
from tidemill.nets.weights import placeholder_weights
from tidemill.store.checkpoint import (
    FoundCheckpoint,
    checkpoint_name,
    checkpoints,
    put_aside,
    read_newest,
    readable,
)
from tidemill.store.database_watch import DatabaseWatch
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase
from tidemill.streams.parameters import ParameterPublisher
from tidemill.streams.samples import ChannelSampleConsumer
from tidemill.workers.algorithm_settings import AlgorithmSettings
from tidemill.workers.base import PollResult
from tidemill.workers.checkpoint_writer import CheckpointWriter, Contents
from tidemill.workers.cut_files import by_other_code
from tidemill.workers.data_parallel import EqualTrainers
from tidemill.workers.fault_records import FaultRecords
from tidemill.workers.other_bits import other_bits
from tidemill.workers.row_schema import misfit_of_rows
from tidemill.workers.trainer_config import COUNTED, TrainerConfig
from tidemill.workers.trainer_counters import Counters, TrainingLimits
from tidemill.workers.update_faults import IN_A_ROW, UpdateFaults, infinities, not_finite
from tidemill.workers.version_metadata import STAGE, TrainingReturns, field_of, settings_of
from tidemill.workers.version_writer import LAST_PUSH, VersionWriter

AGAIN = 5.0  # seconds until a version that is waited for is pushed again, where it was not kept
# updates between two looks at the weights of an algorithm that tells no loss: a look
# reads them once, an update ten times and more
LOOK_EACH = 16
COMPUTED_BY = "computed_by"  # what checkpoints call `Policy.computed_by`


class Learner:
    """A learner is what both trainer workers hold: a policy, its algorithm, and what of
    them is counted, published, saved, restored and reported. `connect`, then `build`,
    make it ready. Of equal trainers the first one reports updates and writes checkpoints.

    clock: the worker's clock
    report: the function that sends a message up
    alive: the function that says that the worker lives, once it has written a checkpoint
    extras: the function that returns what checkpoints keep besides
    first_version: the version of no updates
    joins: how it joins equal trainers, and what is the version of no updates since then
    hurried: the function that says whether the run is about to be broken off
    settings: what the algorithm is set to
    """

    policy: Policy
    algorithm: Algorithm
    spaces: Spaces
    samples: SampleFacts
    found: FoundCheckpoint | None = None
    """The checkpoint that it goes on from."""
    own_state: Arrays | None = None
    """The state of its algorithm, where that is not the one of its checkpoint."""

    def __init__(
        self,
        context: Context,
        config: TrainerConfig,
        clock: Clock,
        report: Callable[[Up], None],
        alive: Callable[[], None],
        extras: Callable[[], Contents] = lambda: Contents({}, {}, {}),
        first_version: int = 0,
        hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        self._context, self._config, self._clock = context, config, clock
        self._report, self._extras = report, extras
        self.joins = Rejoin(0, first_version, first_version)
        self._hurried, self._cut_short = hurried, False  # the algorithm was told so in its update
        self.counters = Counters()
        self.limits = TrainingLimits(self.counters, context.experiment.limits)
        policy, group = context.experiment.policies[config.policy], context.name.rpartition("-")[0]
        self.settings = AlgorithmSettings(config, policy, group, self.limits, self._notice_once)
        self.returns = TrainingReturns()
        self.equal_trainers = EqualTrainers(clock)
        instead = "Updates that are left out are counted, and not recorded"
        self._faults = UpdateFaults(FaultRecords(context, config.fault_records, self.notice, instead))
        self._returns = 0  # since the newest checkpoint
        self.goes_back = True
        """Whether training may go back to a checkpoint: a run whose weights follow from
        its journal, or its configuration, alone ends instead."""
        self.went_back = False
        """Whether the last update did."""
        self.checkpoints = CheckpointWriter(context, config, self.limits, self._contents, report, alive)
        self._update_s = 0.0  # that the last update took
        self._infinite: dict[str, Array] = {}  # where the policy's parameters may be infinite
        self._spoilt = False  # a checkpoint was refused, since what it was to hold is not finite
        self._publisher: ParameterPublisher | None = None
        self._versions: VersionWriter | None = None
        self._awaited = context.experiment.awaited(config.policy)
        self._watch = DatabaseWatch(Path(context.folder or "") / PARAMETERS)
        self._heard = -1  # after how many updates all that is awaited was there
        self._again = 0.0  # when a version that is not in the database is pushed once more

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
        self._senders = [edge.name.split("/")[2] for edge in edges]
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
        # the runner has looked: damaged ones are out of the way, and policies differ in
        # updates; a later life begins anew where nothing was saved before its death
        folder = self.checkpoints.folder
        if context.resume is not None or (context.life and folder and checkpoints(folder)):
            assert folder is not None
            self.found = read_newest(folder)
            with by_other_code(f"the weights of checkpoint {self.found.path}"):
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
        device = choose_device(config.device, context.gpu)
        with placeholder_weights() if self.found is not None else nullcontext():
            self.policy = context.experiment.policies[config.policy].build_on(device, self.spaces, seed)
        if self.found is not None:
            self._restore(self.found)
        else:
            self.algorithm = self._build_algorithm()
            self.policy.version = self.version
        # modules of one's own may mask by infinities: those that are there from the start
        declared = context.experiment.policies[config.policy].weights(self.spaces) is not None
        self._infinite = {} if declared else infinities(self.policy.parameters())
        if wrong := not_finite(self.policy.parameters(), self._infinite):
            raise ConfigError(
                f'policy "{config.policy}" begins with NaN or infinity in {wrong}, from which nothing can be '
                f"learnt; look at how {type(context.experiment.policies[config.policy]).__name__} makes it"
            )
        if self.version < self.joins.least:
            raise CheckpointError(
                f"the newest checkpoint that can be read in {self.checkpoints.folder} is of update "
                f"{self.counters.updates}, but equal trainers have written one for {context.name} to go on "
                f"from, of update {self.joins.least - self.joins.first}; look whether its disk is well"
            )
        self.equal_trainers = EqualTrainers.of(
            context,
            config,
            self.algorithm,
            self._clock,
            self.joins,
            restored=self.found is not None and self.own_state is None,
        )
        if self.found is not None and self.equal_trainers.first:  # who writes checkpoints
            self._compare_bits(self.found)
        edges = context.edges(f"parameters/{config.policy}/")
        if edges:
            self._publisher = ParameterPublisher(context.endpoints.writer(edges[0].name), self.policy)
            self._publisher.publish(self.policy)
        self._open_versions()
        weights = sum(array.nbytes for array in self.policy.parameters().values())
        own_needs = [Need("parameters", 3 * weights, shared=True)] if edges else []
        return [*own_needs, *self.equal_trainers.needs(self.algorithm, weights)]

    def _compare_bits(self, found: FoundCheckpoint) -> None:
        """Tell that who computes from now on has other last bits than who computed a
        checkpoint. Raises `ConfigError` where the run is to go on exactly, or to be
        trained again from its journal."""
        name, experiment = self._config.policy, self._context.experiment
        differs, cure = other_bits(
            found.facts.get(COMPUTED_BY, ""), self.policy.computed_by, experiment.policies[name]
        )
        if not differs:
            return
        text = f"policy {name} goes on from checkpoint {found.path.name}: {differs}"
        if experiment.exact_resume:
            loose = "; or set exact_resume to false in its config.json, and it goes on with other bits"
            raise ConfigError(f"{text}; a run with exact_resume goes on in every bit: {cure}{loose}")
        if not self.goes_back:
            raise ConfigError(f"{text}; a run that is exact, or has a journal, goes on in every bit: {cure}")
        self.notice(f"{text}; {cure}")

    def _build_algorithm(self) -> Algorithm:
        """Return the algorithm, as it is set now. After each adoption it draws other
        numbers."""
        name, adopted = self._context.name, self.counters.adopted
        path = (name, adopted) if adopted else (name,)
        config = self.settings.build_by()
        built = config.build(self.policy, derive_seed(self._context.experiment.seed, *path))
        self.settings.follow(returned(built, Algorithm, config.build))
        built.hurried = self._asks
        return built

    def _asks(self) -> bool:
        # equal trainers, of which one would end sooner than another, undo theirs
        self._cut_short = not self.equal_trainers.others and self._hurried()
        return self._cut_short

    def _restore(self, found: FoundCheckpoint) -> None:
        for name in vars(self.counters):
            kept = found.facts.get(name, 0)  # older checkpoints lack the newer ones
            if isinstance(kept, bool) or not isinstance(kept, (int, float)) or not isfinite(kept):
                raise CheckpointError(f"checkpoint {found.path} says {name} = {kept!r}, which is no count")
            setattr(self.counters, name, kept)
        self.settings.changed = found.facts.get("settings", {})
        with placeholder_weights():
            self.algorithm = self._build_algorithm()
        with by_other_code(f"the weights of checkpoint {found.path}"):
            self.policy.load(found.arrays["policy"], self.version)
        with by_other_code(
            f"checkpoint {found.path}, which {type(self.algorithm).__name__} is to take back,"
        ):
            self.algorithm.load_state(found.arrays["algorithm"] if self.own_state is None else self.own_state)
        try:
            self.returns.extend(map(float, found.facts.get("returns", ())))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint {found.path} has returns that are none: {error}") from None
        self.checkpoints.newest = self.checkpoints.now

    # ---- training ----------------------------------------------------------------------

    def update(self, batch: Sequence[BufferedSample]) -> Generator[PollResult, None, dict[str, float]]:
        """Do an update, all equal trainers together, and return its metrics.

        Where what it computes is not finite, the rest of it is left out, which is
        written down and counted, and {} returned; several in a row lead back to a
        checkpoint. Raises `UpdateFault` where that cannot be: `save_finite` then.
        """
        self.went_back = False
        algorithm, policy, steps, began = self.algorithm, self.policy, self.counters.steps, awake()
        try:
            metrics = yield from self.equal_trainers.update(
                algorithm, policy, [held.sample for held in batch], steps
            )
            metrics = returned(metrics, dict, algorithm.update)
            self._look_further(metrics, began)
        except UpdateFault as fault:
            self.counters.skipped += 1
            self._note(fault, batch)
            if self._faults.go_back:
                yield from self._go_back(fault)
            return {}
        self._faults.in_a_row = 0
        self._update_s = awake() - began
        if self._cut_short:
            self.notice(
                f"update {self.counters.updates + 1} ended with the steps that it had done, after "
                f"{self._update_s:.0f} s: the run was about to be broken off"
            )
        return metrics

    def _note(self, fault: UpdateFault, batch: Sequence[BufferedSample]) -> None:
        """Write down what led to an update that was left out, and tell it."""
        facts = {
            "experiment": self._context.experiment.name,
            "policy": self._config.policy,
            "spaces": plain_spaces(self.spaces),
            "steps": self.counters.steps,
            "seats_per_lane": self.samples.seats_per_lane,
            "senders": [self._senders[held.sample.channel] for held in batch],
        }
        facts["settings"] = encode(self.settings.now())
        text = self._faults.note(fault, self.counters.updates, self.policy, self.algorithm, facts)
        if text and (fault.minibatch or self.equal_trainers.first):
            left_out = sum(held.trained for held in batch) // self.samples.seats_per_lane
            cure = self.settings.cure()
            self.notice(f"{text}; {cure}" if cure else text, left_out)

    def _look_further(self, metrics: Mapping[str, float], began: float) -> None:
        """Raise `UpdateFault` where the weights are not finite after an update that was
        begun at `began`, by an algorithm that does not look itself: they are looked at
        where a loss of it is not finite, or where it tells none; and with its state where
        a checkpoint was refused."""
        telling = [v for name, v in metrics.items() if name.startswith("loss") or name == "gradient_norm"]
        due = self._spoilt or self._weights_due(bool(telling), awake() - began)
        if isfinite(sum(telling)) and not due:
            return
        what, name = "weight ", not_finite(self.policy.parameters(), self._infinite)
        if self._spoilt and not name:
            what, name = "in its state() ", not_finite(self.algorithm.state())
        self._spoilt = False
        if not name:
            return
        self._faults.in_a_row = IN_A_ROW  # there is no way back but that one
        sooner = "" if telling else ', and tells no "loss" or "gradient_norm" by which that is seen at once'
        raise UpdateFault(
            f"{type(self.algorithm).__name__} has made {what}{name} NaN or infinite{sooner}", "", {}
        )

    def _weights_due(self, tells: bool, took: float) -> bool:
        """True where the weights are to be looked at after an update that `took` so many
        seconds: before a version that is waited for is pushed; and where the algorithm
        `tells` no loss now and then, and before they are saved or pushed. Equal trainers,
        all of which are to find the same, do not ask the time."""
        updates, versions = self.counters.updates + 1, self._versions
        if versions is not None and versions.counts and versions.due(number_of(self.version + 1)):
            return True
        if tells:
            return False
        if updates % LOOK_EACH == 0:
            return True
        return not self.equal_trainers.others and (
            self.checkpoints.pace.due(awake(), updates, took)
            or (versions is not None and versions.due(number_of(self.version + 1)))
        )

    def _go_back(self, fault: UpdateFault) -> Generator[PollResult, None, None]:
        """Go on with the weights and the learner of a checkpoint: of the newest one, or
        where that did not help, the one before it, and so on. Updates, steps and versions
        count on. Raises an `UpdateFault` where none is left, or that was too often."""
        first, own_often = self.equal_trainers.first, self._faults.too_often(self.counters.updates)
        of_first = np.array([self._returns, bool(own_often)], float) * first  # who alone saves
        yield from self.equal_trainers.sum(of_first)
        returns, found = int(of_first[0]), None
        often = (own_often or "training has gone back too often, which has not helped") if of_first[1] else ""
        if self.goes_back and self.checkpoints.folder is not None and not often:
            found = next(islice(readable(self.checkpoints.folder), returns, None), None)
        own = -1 if found is None else int(found.facts["updates"])
        agreed = np.array([1.0, own])
        yield from self.equal_trainers.sum(agreed)
        if found is None or agreed[1] != agreed[0] * own:
            to = often or (
                "no other checkpoint is there than those that it has gone back to"
                if returns
                else "no checkpoint is there to go back to"
            )
            if not self.goes_back:
                to = "an exact run, or one with a journal, does not go back to a checkpoint"
            # `resume` takes no settings, but reads them from there
            cure = self.settings.cure()
            cure = f"; {cure}, or that in config.json before a resume" if cure else ""
            if often and cure and self._config.fault_rate_factor is None:
                group = self._context.name.rpartition("-")[0]
                cure += f", or have each return make it smaller: --set workers.{group}.fault_rate_factor=0.5"
            text = f"{self._faults.left_out}, and {to}: {fault}{cure}"
            raise UpdateFault(text, "", {}) from fault
        self.policy.load(found.arrays["policy"], self.policy.version)
        self.algorithm.load_state(found.arrays["algorithm"])
        if isinstance(self.algorithm, DataParallel) and (rank := number(self._context.name)):
            self.algorithm.separate(rank)
        self._returns, self.went_back = returns + 1, True
        left_out = self._faults.left_out
        self._faults.went_back(self.counters.updates)
        told = self.settings.make_smaller(self.algorithm)
        self._notice_once(
            f"{left_out}: training goes on with the weights of checkpoint {found.path.name}{told}",
            max(self.counters.steps - int(found.facts["steps"]), 0),
        )

    def finish_update(self) -> None:
        """Count an update: the policy is a version further."""
        self.equal_trainers.done()
        self.counters.updates += 1
        self.policy.version = self.version

    @property
    def version(self) -> int:
        """The version after the updates that are counted."""
        return self.joins.first + self.counters.updates

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
        behind = sum(held.trained * version - held.stamps for held in batch) % VERSIONS_OF_LIFE
        if behind > VERSIONS_OF_LIFE // 2:  # who has died had published versions that nobody else has
            behind = 0
        rows = sum(held.trained for held in batch)
        return {
            **self.settings.of_schedules(self.algorithm),
            **metrics,
            "lag/mean": behind / max(rows, 1),
            "lag/max": float(max((held.lag(version) for held in batch), default=0)),
        }

    def adopt(self, message: Adopt) -> bool:
        """Go on from a version of another policy, normalisers included, as if an update
        had led there: it is a version more, and is published. False where that version is
        gone: its trainer has died, and gone back behind it.

        What is taken over are weights and settings, as in Jaderberg et al. 2017, section
        3, "exploit". The optimiser begins anew: its moments were of the weights that are
        given up, and versions hold none.
        """
        assert self._context.folder is not None
        try:
            parameters, _ = ParameterDatabase(Path(self._context.folder) / PARAMETERS).load(
                message.source, message.version
            )
        except VersionGone:
            return False
        self.settings.accept(message.settings)
        self.counters.updates += 1
        self.counters.adopted = self.counters.updates
        self.algorithm = self._build_algorithm()
        self.policy.load(parameters, self.version)
        self.returns.clear()
        if self._publisher is not None:
            self._publisher.publish(self.policy)
        return True

    @property
    def least(self) -> int:
        """The oldest version that belongs to these weights: one of before their trainer's
        life, or before they were adopted, is of others."""
        return max(self.joins.least, self.joins.first + self.counters.adopted)

    def awaits(self) -> bool:
        """True while the present version is still to be evaluated, or decided on, before
        it is trained any further (`Evaluation.updates`, `Population.updates`)."""
        now, folder = self.counters.updates, self._context.folder
        if self._heard == now:
            return False
        due = {name for name, updates in self._awaited.items() if now % updates == 0}
        if due and folder is not None:
            if not self._watch.due():
                return True
            try:
                database = ParameterDatabase(Path(folder) / PARAMETERS)
                known = database.results.means(self._config.policy, now)
            except DatabaseError:  # it could not be written: the disk is full, say
                if awake() > self._again:
                    self._again = awake() + AGAIN
                    self.look_at_versions()
                return True
            if not due <= known.keys():
                return True
            if (message := self._context.experiment.adoption(self._config.policy, known)) is not None:
                if not self.adopt(message):
                    return True  # its trainer comes there again
                self.look_at_versions()
                return self.awaits()
        self._heard = now
        return False

    def change(self, message: ChangeSettings) -> None:
        """Take other settings of the algorithm, which checkpoints keep from now on. A
        trainer without equals goes on with them at once."""
        if self.settings.hear(message):
            self.checkpoints.newest = -1, -1, -1  # the checkpoint of now, if there is one, does not know them
            if not self.equal_trainers.others:
                self.settings.apply_next(self.algorithm)

    # ---- deaths of equal trainers ------------------------------------------------------

    def undo_update(self) -> None:
        """Be as before an update that was begun and does not count."""
        self.equal_trainers.undo(self.algorithm, self.policy, self.version)

    def save_for_others(self) -> bool:
        """Write a checkpoint for equal trainers that are to live again, in place of the
        first one where it is dead. True when it is there, as the newest: what one that
        has died, or hangs, has saved of updates that the others lack is undone."""
        self.equal_trainers.stand_in()
        self.save()
        folder = self.checkpoints.folder
        if folder is None or self.checkpoints.newest[0] != self.counters.updates:
            return False
        own, written = folder / checkpoint_name(self.counters.updates), checkpoints(folder)
        if own not in written:  # fewer are kept than are newer
            return False
        try:
            put_aside(written[written.index(own) + 1 :])
        except OSError:
            return False
        return True

    def rejoin(self, message: Rejoin) -> None:
        """Go on with equal trainers that live again."""
        moved = message.first - self.joins.first
        self.joins = Rejoin(message.number, message.first, self.joins.least)
        self.equal_trainers.rejoin(message.number)
        self.settings.apply_all(self.algorithm)
        if moved:  # some of the dead may have published versions that nobody has
            self.policy.version = self.version
            self.publish()

    def start(self) -> None:
        """Begin to count the time of training, and until the next checkpoint."""
        self.checkpoints.pace.start(awake(), self.found is not None)
        self.limits.start()

    def pause(self) -> None:
        """Count no time until the next `start`."""
        self.checkpoints.pace.pause(awake())
        self.limits.pause()

    # ---- reports, versions, checkpoints ------------------------------------------------

    def report_update(self, metrics: dict[str, float], polls: int) -> None:
        """Report what updates have returned, in poll number `polls`."""
        if not self.equal_trainers.first:
            return
        counters = self.counters
        told = {name: float(getattr(counters, name)) for name in COUNTED}
        values = {"step": float(counters.steps), "update": float(counters.updates), **told, **metrics}
        self._report(WorkerStatistics(polls, values, {"seconds": counters.seconds}, update=True))

    def notice(self, text: str, steps: int = 0) -> None:
        """Report a text for the user, of what has cost so many env `steps`."""
        self._report(Notice(text, steps))

    def _notice_once(self, text: str, steps: int = 0) -> None:
        """Report what all equal trainers know, which the first one says."""
        if self.equal_trainers.first:
            self.notice(text, steps)

    def save_finite(self) -> None:
        """Write the checkpoint of a run that is about to fail since its updates are not
        finite, or cannot be done: its weights are as before. One that cannot be written
        is not the cause."""
        with suppress(CheckpointError):
            self.save(final=True)

    def save_due(self, ahead: float | None = None) -> bool:
        """True when it is time for a checkpoint, which of equal trainers the first one
        says: not while updates are left out, since what they end in is to be gone back
        from. `ahead`: seconds until that is asked again; None: as the last update took.

        A pause (`inf`) may last for any time, and the machine may go down in it. To write
        one then keeps nobody from anything, unless training is to go on at once: so it is
        due as far as its share of the time allows, a replay memory, which takes long,
        included."""
        faulty = self._faults.in_a_row or self.went_back
        ahead = self._update_s if ahead is None else ahead
        pace = self.checkpoints.pace
        return not faulty and self.equal_trainers.first and pace.due(awake(), self.counters.updates, ahead)

    def count_hold(self, began: float) -> None:
        """Note that everybody was held since second `began` (of `awake`) until now, for a
        cut."""
        self.checkpoints.pace.stood_still(began, awake())

    def save(self, final: bool = False, again: bool = False) -> None:
        """Write a checkpoint, which of equal trainers the first one does: see
        `CheckpointWriter.save`."""
        if not self.equal_trainers.first:
            self.checkpoints.pace.unchanged(awake())
        elif self.checkpoints.save(final, again):
            self._returns = 0

    def _contents(self) -> Contents:
        """Return what a checkpoint of now holds. Raises `CheckpointError` where something
        of it is not finite."""
        policy, algorithm = self.equal_trainers.state(self.algorithm, self.policy)
        if wrong := not_finite(policy, self._infinite) or not_finite(algorithm):
            self._spoilt = not self.equal_trainers.others  # which would have to find the same
            raise CheckpointError(
                f"no checkpoint after update {self.counters.updates} is written: {wrong} is not finite. The "
                "last one of finite weights stays"
            )
        extras = self._extras()
        facts = {
            **vars(self.counters),
            "policy": self._config.policy,
            COMPUTED_BY: self.policy.computed_by,
            "experiment": self._context.experiment.name,
            "spaces": plain_spaces(self.spaces),  # so that the policy can be built without its environment
            "settings": self.settings.changed,
            "returns": self.returns.values(),
            **extras.facts,
        }
        return Contents({"policy": policy, "algorithm": algorithm, **extras.arrays}, facts, extras.folders)

    def _open_versions(self) -> None:
        config, context = self._config, self._context
        if context.folder is None or config.database_seconds is None:
            return
        folder = Path(context.folder) / PARAMETERS
        text = write_header(context.experiment.policies[config.policy], self.spaces)
        self._versions = VersionWriter(
            folder,
            config.policy,
            config.database_seconds,
            config.database_updates,
            config.database_versions,
            text,
            self._infinite,
            self.notice,
        )
        if self.equal_trainers.first:
            # a later life may begin on a full disk
            self._versions.begin(self.policy, self.metadata(), waits=self._context.life > 0)

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
            **{field_of(name): value for name, value in settings_of(self.settings.now()).items()},
        }
        if self._context.experiment.curriculum:
            known[STAGE] = counters.stage + 1
        if reached is None or not isfinite(reached):  # an episode's rewards have no finite sum
            return known
        return {**known, "training_return": reached}

    def end(self) -> None:
        """Write the last checkpoint and push the last version."""
        if not self.equal_trainers.first:
            return
        self.checkpoints.save_last(self.equal_trainers.stands_in)
        if self._versions is not None and not self.checkpoints.hangs:
            self._versions.end(self.policy, self.metadata())

    def close(self) -> None:
        """Wait until what is being pushed is on the disk, for a while."""
        if self._versions is not None and not self.checkpoints.hangs:
            self._versions.wait(LAST_PUSH)
