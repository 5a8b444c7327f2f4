"""What a trainer writes into its run's folder of checkpoints: how often, how many are
kept, and where the run's last one goes when the folder does not take it."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from tidemill.api.control_messages import Notice, Saved, Saving, Up
from tidemill.api.worker import Context
from tidemill.core.clock import awake
from tidemill.core.errors import CheckpointError
from tidemill.core.resource_shortage import why
from tidemill.core.schema import Arrays
from tidemill.store.checkpoint import ENDED, checkpoint_name, hangs, read_newest, write_checkpoint
from tidemill.store.fence import epoch_of
from tidemill.store.refuge import abandon, copy_metrics, copy_of_run, make_refuge, refuge_of
from tidemill.workers.checkpoint_pace import CheckpointPace
from tidemill.workers.cut_files import spared_checkpoint
from tidemill.workers.trainer_config import TrainerConfig
from tidemill.workers.trainer_counters import TrainingLimits

# by folder: where an equal trainer hangs as they end, all others write the last
# checkpoint, in threads at once
_writing: dict[str, Lock] = {}


class Contents(NamedTuple):
    """What a checkpoint holds: files of arrays, facts, and folders: name → who writes its
    files."""

    arrays: dict[str, Arrays]
    facts: dict[str, Any]
    folders: dict[str, Callable[[Path], None]]


class CheckpointWriter:
    """A checkpoint writer keeps the checkpoints of one policy while it is trained.

    limits: how far training is, and how far it may go
    contents: the function that returns what a checkpoint of now holds. It raises
        `CheckpointError` where that is not to be kept
    report: the function that sends a message up
    alive: the function that says that the worker lives, once it has written one
    """

    folder: Path | None
    """Where they are; None in a run without a folder."""
    newest = (-1, -1, -1)
    """Updates, steps and dropped samples at the newest one."""

    def __init__(
        self,
        context: Context,
        config: TrainerConfig,
        limits: TrainingLimits,
        contents: Callable[[], Contents],
        report: Callable[[Up], None],
        alive: Callable[[], None],
    ) -> None:
        self._context, self._config, self._limits = context, config, limits
        self._contents, self._report, self._alive = contents, report, alive
        self._run = Path(context.folder) if context.folder else None
        self.folder = self._run / "checkpoints" / config.policy if self._run else None
        self.pace = CheckpointPace(config.checkpoint_seconds, config.checkpoint_share)
        self._refused = False  # the last one could not be written
        self._refuge: Path | None = None  # where the run's last one goes then
        with suppress(OSError):  # of a host that does not see the folder
            self._refuge = refuge_of(self._run) if self._run else None
        # of several policies some may lack their last checkpoint, which is marked
        self._several = len(context.experiment.trained()) > 1 and not context.experiment.exact_resume
        self._ends = False

    @property
    def now(self) -> tuple[int, int, int]:
        """How far training is: see `newest`."""
        counters = self._limits.counters
        return counters.updates, counters.steps, counters.dropped

    @property
    def hangs(self) -> bool:
        """Whether the run's folder does not answer."""
        return self._run is not None and hangs(self._run)

    def save(self, final: bool = False, again: bool = False) -> bool:
        """Write a checkpoint, unless the newest one is of now; `again`: all the same.
        Where it cannot be written only the `final` one raises. Return whether one was
        written into the run's folder."""
        if self.folder is None or (self.newest == self.now and not again):
            self.pace.unchanged(awake())
            if self.folder is not None:
                self._told_saved()
            return False
        began, refused = awake(), self._refused
        try:
            self._write(self.folder)
        except CheckpointError as error:
            self.pace.failed(began, awake())
            if final and self.newest == self.now:  # it is there, unmarked
                return False
            if final:
                self._write_elsewhere(error)
            elif not refused:  # training goes on; the last good checkpoint is kept
                self._tell(f"{error}. Training goes on; this is tried again, and told when it is over")
            self._refused = True
            return False
        self.pace.wrote(began, awake())
        if refused:
            self._tell(f"checkpoints are written again: update {self.now[0]} is on the disk")
        self.newest, self._refused = self.now, False
        self._told_saved()
        self._alive()  # who hangs from now on does not save
        return True

    def save_last(self, stands_in: bool) -> None:
        """Write the run's last checkpoint. Who `stands_in` for the first of equal
        trainers leaves what that has written, where it came to its end after all: it has
        other random numbers, with which the run would not go on exactly."""
        self._ends = self._several
        if not (stands_in and self._is_of_now()):
            self.save(final=True, again=self._ends)

    def _tell(self, text: str) -> None:
        self._report(Notice(text))

    def _told_saved(self) -> None:
        self._report(Saved(self._config.policy, *self.now[:2]))

    def _write(self, folder: Path) -> None:
        """Write a checkpoint of now into `folder`. Raises `CheckpointError`."""
        config, updates = self._config, self.now[0]
        self._report(Saving(config.policy, updates))
        contents = self._contents()
        mark = {ENDED: epoch_of(self._run or Path()) * self._ends} if self._several else {}
        exact = folder == self.folder and self._context.experiment.exact_resume
        with _writing.setdefault(str(folder), Lock()):
            write_checkpoint(
                folder,
                checkpoint_name(updates),
                contents.arrays,
                {**contents.facts, **mark},
                # who is killed ahead of the others goes back to the one before its last
                max(config.checkpoints, 2) if self._several else config.checkpoints,
                contents.folders,
                self._of_cut if exact else tuple,
            )

    def _of_cut(self) -> list[str]:
        return spared_checkpoint(self._run or Path(), self._config.policy)

    def _write_elsewhere(self, error: CheckpointError) -> None:
        """Write the run's last checkpoint into a folder of temporary files, since its own
        does not take it; it can be gone on from there. Raises `CheckpointError`, of the
        `error` and of why that cannot be, either."""
        if (run := self._run) is None or (refuge := self._refuge) is None:
            raise error
        experiment, policy = self._context.experiment, self._config.policy
        try:
            make_refuge(refuge)
            if there := not self.hangs:
                copy_of_run(run, refuge, [*experiment.trained()], policy)
            self._write(refuge / "checkpoints" / policy)
        except (CheckpointError, OSError) as other:
            if not isinstance(other, PermissionError):  # else what is there is not the user's own
                abandon(refuge)
            cause = why(other) if isinstance(other, OSError) else str(other)
            if cause == str(error):  # its weights are not finite, say
                raise error from None
            raise CheckpointError(f"{error}. Nor could it be written into {refuge}: {cause}") from None
        if there:
            copy_metrics(run, refuge)
        higher = " with a higher limit" if self._limits.limit_reached("") else ""
        anew = " with new episodes, not exactly," if experiment.exact_resume else ""
        self._tell(
            f"{error}. The last checkpoint is in {refuge} instead, which may be emptied when the machine "
            f"starts anew; go on from there{anew}{higher} by: tidemill resume {refuge}"
        )

    def _is_of_now(self) -> bool:
        """True where the newest checkpoint is of now. One that is being written in this
        process is waited for."""
        if self.folder is None or self.hangs:
            return False
        with _writing.setdefault(str(self.folder), Lock()), suppress(CheckpointError):
            facts, ended = read_newest(self.folder).facts, epoch_of(self.folder.parents[1]) * self._ends
            now = *self.now[:2], ended
            return (facts["updates"], facts["steps"], facts.get(ENDED, 0)) == now
        return False
