"""The parts of cuts on disk: what a worker has of a run that resumes exactly besides the
checkpoints, in a folder of its own per worker, a file per cut."""

from collections.abc import Mapping
from pathlib import Path

from tidemill.api.edges import group_of, number
from tidemill.api.experiment import Context, Experiment
from tidemill.core.cut import Part, flatten, unflatten
from tidemill.core.errors import CheckpointError
from tidemill.store.checkpoint import checkpoint_name, checkpoints, read_newest, write_checkpoint
from tidemill.workers.actor_config import ActorConfig, Actors
from tidemill.workers.trainer_config import Trainer, TrainerConfig

CUTS = "cuts"
KEPT = 4
"""Cuts of which a worker keeps its part: one more than trainers keep checkpoints, since
theirs are written first."""
PART = "part"
OTHERWISE = (
    "it begins another life, so that the run does not go on as it would have without this death "
    "(exact_resume goes back further: stop the run, and resume it)"
)
"""What a worker tells that cannot be where the one before it was."""


def has_part(experiment: Experiment, worker: str) -> bool:
    """Return whether a worker writes a part of each cut."""
    config = experiment.workers[group_of(worker)]
    if isinstance(config, Trainer):
        return config.max_policy_lag != 0 or number(worker) > 0
    if isinstance(config, Actors):
        return not only_judges(experiment, config)
    return not (isinstance(config, TrainerConfig | ActorConfig) or config.watches)


def only_judges(experiment: Experiment, config: ActorConfig) -> bool:
    """Return whether actors play for those alone that watch."""
    streams = [stream for spec in config.agents for stream in spec.streams]
    takers = {group_of(name) for stream in streams for name in experiment.holders(stream, "consume")}
    return bool(takers) and all(experiment.workers[group].watches for group in takers)


def newest_cut(folder: Path) -> int:
    """Return the number of the newest cut of which the run in `folder` has a part, 0 for
    none."""
    parts = (path for worker in sorted((folder / CUTS).glob("*")) for path in checkpoints(worker))
    return max((number_of(path) for path in parts), default=0)


def number_of(path: Path) -> int:
    """Return the number of the cut of which the folder `path` is a part."""
    return int(path.name.rpartition("-")[2])


def write_part(context: Context, part: Part, number: int, goes_with: Mapping[str, int]) -> None:
    """Write the worker's part of cut `number`, which goes with these checkpoints: by
    policy, after how many updates. Raises `CheckpointError`."""
    if context.folder is None:
        return
    arrays, facts = flatten(part)
    folder = Path(context.folder) / CUTS / context.name
    told = {PART: facts, "checkpoints": dict(goes_with)}
    write_checkpoint(folder, checkpoint_name(number), {PART: arrays}, told, KEPT)


def read_part(context: Context) -> Part:
    """Return the worker's part of the newest cut. Raises `CheckpointError`."""
    assert context.folder is not None
    found = read_newest(Path(context.folder) / CUTS / context.name)
    try:
        return unflatten(found.arrays[PART], found.facts[PART])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{found.path} is no part of a cut ({type(error).__name__}: {error}); it is of another version"
        ) from None
