"""The parts of cuts on disk: what a worker besides the trainers has of a run that resumes
exactly, in a folder of its own per worker, a file per cut."""

from collections.abc import Mapping
from pathlib import Path

from tidemill.api.experiment import Context
from tidemill.core.cut import Part, flatten, unflatten
from tidemill.core.errors import CheckpointError
from tidemill.store.checkpoint import checkpoint_name, read_newest, write_checkpoint

CUTS = "cuts"
KEPT = 4
"""Cuts of which a worker keeps its part: one more than trainers keep checkpoints, since
theirs are written first."""
PART = "part"


def write_part(context: Context, part: Part, checkpoints: Mapping[str, int]) -> None:
    """Write the worker's part of the cut that goes with these checkpoints: by policy,
    after how many updates. Raises `CheckpointError`."""
    if context.folder is None:
        return
    arrays, facts = flatten(part)
    number = sum(checkpoints.values())  # grows from cut to cut
    folder = Path(context.folder) / CUTS / context.name
    told = {PART: facts, "checkpoints": dict(checkpoints)}
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
