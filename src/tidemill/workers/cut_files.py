"""The parts of cuts on disk: what a worker has of a run that resumes exactly besides the
checkpoints, in a folder of its own per worker, a file per cut."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tidemill.api.edges import group_of, number
from tidemill.api.experiment import Experiment
from tidemill.api.worker import Context, WorkerConfig
from tidemill.core.cut import Part, flatten, unflatten
from tidemill.core.errors import CheckpointError, SchemaError, TidemillError
from tidemill.core.resource_shortage import wants_memory, why
from tidemill.core.untrusted_files import read_json, read_plain
from tidemill.replay.queue import Queue
from tidemill.store.checkpoint import (
    MANIFEST,
    checkpoint_name,
    checkpoints,
    read_newest,
    write_checkpoint,
)
from tidemill.workers.actor_config import ActorConfig, Actors
from tidemill.workers.trainer_config import Trainer, TrainerConfig

CUTS = "cuts"
KEPT = 4
"""Cuts of which a worker keeps its part: one more than trainers keep checkpoints, since
theirs are written first."""
RUNNER = "runner"
"""Whose part is what is known of the run as a whole: its episodes, from which the stages
of a curriculum follow."""
PART = "part"


def has_cut(context: Context) -> bool:
    """Return whether a worker goes on from its part of a cut: in a run that is resumed,
    and in a later life, where a cut is whole by now."""
    folder = context.folder
    written = folder is not None and checkpoints(Path(folder) / CUTS / context.name)
    return context.resume is not None or bool(context.life and written)


def go_back_together(experiment: Experiment) -> list[str]:
    """Return the workers that go back to the newest cut where one of them dies: all of a
    run that resumes exactly, but for those that watch. None of a run that has only
    replay memories, which keep what they need themselves."""
    if not experiment.exact_resume or not actors_with_part(experiment):
        return []
    return [
        name
        for name, config in experiment.members()
        if isinstance(config, TrainerConfig) or has_part(experiment, name)
    ]


def actors_with_part(experiment: Experiment) -> list[str]:
    """Return the actors that write a part of each cut: none where all of them play for a
    replay memory, or for those that watch."""
    members = experiment.members()
    return [name for name, config in members if isinstance(config, Actors) and has_part(experiment, name)]


def has_part(experiment: Experiment, worker: str) -> bool:
    """Return whether a worker writes a part of each cut."""
    config = experiment.workers[group_of(worker)]
    if isinstance(config, Trainer):
        return holds_samples(config) or number(worker) > 0
    if isinstance(config, Actors):
        return not watches(experiment, group_of(worker))
    return not (isinstance(config, TrainerConfig | ActorConfig) or config.watches)


def drains(config: WorkerConfig) -> bool:
    """Return whether a worker trains from a replay memory, or gathers for it: at its end
    what is in flight still comes, and what is owed for it is trained."""
    if isinstance(config, TrainerConfig):
        return not isinstance(config, Trainer)
    return isinstance(config, ActorConfig) and not isinstance(config, Actors)


def holds_samples(config: Trainer) -> bool:
    """Return whether what waits in a trainer's buffer is more than follows from what its
    producers have in hand: a queue in lockstep has one sample of each."""
    return config.max_policy_lag != 0 or config.buffer != Queue()


def watches(experiment: Experiment, group: str) -> bool:
    """Return whether a group's workers only watch, or play for those alone that do."""
    config = experiment.workers[group]
    if not isinstance(config, ActorConfig):
        return config.watches
    streams = [stream for spec in config.agents for stream in spec.streams]
    takers = {group_of(name) for stream in streams for name in experiment.holders(stream, "consume")}
    return bool(takers) and all(experiment.workers[taker].watches for taker in takers)


def watchers(experiment: Experiment) -> set[str]:
    """Return the workers that only watch."""
    return {name for name, _ in experiment.members() if watches(experiment, group_of(name))}


def newest_cut(folder: Path) -> int:
    """Return the number of the newest cut of which the run in `folder` has a part, 0 for
    none."""
    parts = (path for worker in sorted((folder / CUTS).glob("*")) for path in checkpoints(worker))
    return max((number_of(path) for path in parts), default=0)


def number_of(path: Path) -> int:
    """Return the number of the cut of which the folder `path` is a part."""
    return int(path.stem.rpartition("-")[2])


def spared_part(run: Path) -> Path | None:
    """Return a part of the newest cut of which all who have written any have theirs, by
    names alone: where somebody's next parts cannot be written, it is what a resume goes
    on from, and all of it is to stay. None where there is none. Raises `OSError`."""
    workers = [*(run / CUTS).iterdir()] if (run / CUTS).exists() else []
    parts = {
        worker: {path.name for path in worker.glob("update-*") if not path.suffix}
        for worker in workers
        if worker.is_dir()
    }
    if not (common := set.intersection(*parts.values()) if parts else set[str]()):
        return None
    worker = run / CUTS / RUNNER if run / CUTS / RUNNER in parts else min(parts)
    return worker / max(common, key=lambda name: number_of(Path(name)))


def spared_checkpoint(run: Path, policy: str) -> list[str]:
    """Return the name of the checkpoint of `policy` with which `spared_part` goes, if
    there is one. Raises `OSError`."""
    part = spared_part(run)
    with suppress(ValueError, KeyError, TypeError):  # of a manifest that is damaged
        if part is not None:
            facts = read_json(read_plain(part / MANIFEST))["facts"]
            return [checkpoint_name(facts["checkpoints"][policy])]
    return []


class PartWriter:
    """The writer of what worker `name`, or the runner, has of cuts of the run in folder
    `run`, None for none. What cannot be written is told once, and once more when it can
    be again."""

    def __init__(self, run: str | None, name: str, tell: Callable[[str], None]) -> None:
        self._run, self._name, self._tell = run, name, tell
        self._refused = False

    def write(self, part: Part, number: int, goes_with: Mapping[str, int]) -> None:
        """Write the part of cut `number`, which goes with these checkpoints: by policy,
        after how many updates."""
        if self._run is None:
            return
        try:
            write_part_of(Path(self._run), self._name, part, number, goes_with)
        except CheckpointError as error:
            if not self._refused:
                self._tell(
                    f"{error}. Training goes on; a resumed run goes on from the cut before. This is tried "
                    "again, and told when it is over"
                )
            self._refused = True
            return
        if self._refused:
            self._tell("parts of cuts are written again")
        self._refused = False


def write_part_of(run: Path, name: str, part: Part, number: int, goes_with: Mapping[str, int]) -> None:
    """Write what worker `name`, or the runner, has of cut `number` of the run in folder
    `run`, which goes with these checkpoints. Raises `CheckpointError`."""
    arrays, facts = flatten(part)
    folder = run / CUTS / name
    told = {PART: facts, "checkpoints": dict(goes_with)}

    def spared() -> list[str]:
        part = spared_part(run)
        return [] if part is None else [part.name]

    write_checkpoint(folder, checkpoint_name(number), {PART: arrays}, told, KEPT, spared=spared)


@contextmanager
def by_other_code(what: str) -> Iterator[None]:
    """Let what the block raises, as it goes on from `what`, be a `CheckpointError`: of
    code that has changed since, most likely, unless there was no memory for it."""
    try:
        yield
    except SchemaError as error:  # it says what does not fit
        raise CheckpointError(f"{what} cannot be gone on from: {error}; or train anew (--anew)") from None
    except TidemillError:
        raise
    except Exception as error:
        if wants_memory(error):
            raise CheckpointError(
                f"{what} cannot be gone on from for want of memory: {type(error).__name__}: {why(error)}"
            ) from error
        raise CheckpointError(
            f"{what} cannot be gone on from: {type(error).__name__}: {error}. Most likely other code has "
            "written it: go on with that, or train anew (--anew)"
        ) from error


@contextmanager
def own_part(context: Context) -> Iterator[Part]:
    """Yield the worker's part of the newest cut, to go on from in the block. Raises
    `CheckpointError`, also of what the block raises (`by_other_code`)."""
    assert context.folder is not None
    with by_other_code(f"what {context.name} had in hand when the run was cut"):
        yield read_part_of(Path(context.folder), context.name)


def read_part_of(run: Path, name: str) -> Part:
    """Return what worker `name`, or the runner, has of the newest cut of the run in
    folder `run`. Raises `CheckpointError`."""
    found = read_newest(run / CUTS / name)
    try:
        return unflatten(found.arrays[PART], found.facts[PART])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{found.path} is no part of a cut ({type(error).__name__}: {error}); it is of another version"
        ) from None
