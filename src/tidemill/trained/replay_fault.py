"""Looks again at a fault of a run, from its record.

An update that was left out, since what it computed was not finite, is done once more
(`workers.update_faults`), and the first number that is not finite is found. A step that
an environment failed in is shown, and played again where that can be (`replay_step`).
"""

import pdb
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.api.algorithm import Algorithm, TracedArray, UpdateFault
from tidemill.api.plain_spaces import read_spaces
from tidemill.api.policy import check_parameters
from tidemill.core.config import brought_up_to_date, decode
from tidemill.core.errors import CheckpointError, ConfigError, RunError, SchemaError
from tidemill.core.schema import Array, Arrays
from tidemill.core.seeding import derive_seed
from tidemill.run.folder import RunFolder
from tidemill.run.trust import Trust
from tidemill.store.checkpoint import STEP, checkpoints, read_checkpoint
from tidemill.trained.replay_step import StepReport, replay_step
from tidemill.workers.fault_records import FAULTS
from tidemill.workers.trainer_config import TrainerConfig
from tidemill.workers.update_faults import infinities


@dataclass(frozen=True)
class TracedLine:
    """A traced line sums up one array of the step.

    kind, name: as of `TracedArray`
    largest: the largest magnitude among its finite numbers
    wrong: how many of its numbers are not finite, of `size`
    """

    kind: str
    name: str
    largest: float
    wrong: int
    size: int


@dataclass(frozen=True)
class FaultReport:
    """A fault report tells what became of a step that was done again.

    record: where it was recorded
    error: what was told when the update was left out
    lines: the arrays of the step in order, up to the first that is not finite
    where: in words, where in that array the first such number is; "" where all were
        finite this time
    """

    record: Path
    error: str
    lines: list[TracedLine]
    where: str


def replay_fault(
    run: str | Path,
    number: int | None = None,
    *,
    worker: str | None = None,
    debugger: bool = False,
    trust: Trust = False,
) -> FaultReport | StepReport:
    """Do the step again at which an update of the run in folder `run` was left out; or
    show a step that an environment failed in, with what led to it, and play its episode
    again where the record has all of it.

    number: that of the update, or of the actor's record; None: the newest record
    worker: the trainer or actor, where several have a record of this number
    debugger: whether to stop in Python's debugger where the first number that is not
        finite was computed; of an environment where it raised, or its step begins
    trust: as in `tidemill.load`. Without it an episode is not played again in an
        environment that the user has not had run before

    Raises `RunError` or `CheckpointError` where there is no such record, or it cannot be
    read.
    """
    folder = RunFolder(Path(run))
    if not (folder.path / FAULTS).is_dir():  # which is all that is left of a run that failed at once
        folder = RunFolder.open(folder.path)
    path = _record(folder.path, number, worker)
    if path.name.startswith(STEP):
        return replay_step(folder, path, debugger, trust)
    experiment = folder.experiment(None, trust, environments=False).experiment
    arrays, facts = read_checkpoint(path)
    try:
        trainer, name = path.parent.name, str(facts["policy"])
        config = experiment.workers[trainer.rpartition("-")[0]]
        if not isinstance(config, TrainerConfig):
            raise KeyError(trainer)
        policy_config, spaces = experiment.policies[name], read_spaces(facts["spaces"])
        settings = decode(type(config.algorithm), brought_up_to_date(facts["settings"])[0], "settings")
        stage, error = str(facts["stage"]), str(facts["error"])
        weights, state, minibatch = (arrays[part] for part in ("policy", "algorithm", "minibatch"))
    except (KeyError, TypeError, ConfigError, SchemaError) as broken:
        raise CheckpointError(f"{path} is no record of an update of this run: {broken!r}") from None
    declared = policy_config.weights(spaces)
    if declared is not None:
        check_parameters(declared, weights)
    policy = policy_config.build(spaces, derive_seed(experiment.seed, "policy", name))
    masks = infinities(policy.parameters()) if declared is None else {}  # as `Learner.build` has it
    # by the run's settings: to its checks a number of then, in place of a schedule, is
    # one that somebody has set
    algorithm = config.algorithm.build(policy, derive_seed(experiment.seed, trainer))
    algorithm.config = settings
    policy.load(weights, 0)
    algorithm.load_state(state)
    try:
        with np.errstate(all="ignore"):  # what is not finite is looked for
            lines, where = _follow(algorithm, algorithm.trace(stage, minibatch), facts, masks, debugger)
    except (KeyError, ValueError, IndexError) as broken:
        raise CheckpointError(
            f"{path} does not hold what {type(settings).__name__} needs: {broken!r}"
        ) from None
    return FaultReport(path, error, lines, where)


def _record(run: Path, number: int | None, worker: str | None) -> Path:
    folders = [folder for folder in sorted((run / FAULTS).glob(worker or "*")) if folder.name.isprintable()]
    found = [path for folder in folders for path in checkpoints(folder)]
    if not found:
        raise RunError(
            f"{run} has no record of an update that was left out, or a step that an environment failed in"
            f"{f', by {worker}' if worker else ''}: there was none, fault_records (of actors "
            "lane_fault_records) was 0, or the algorithm, one of your own, did not say what had failed (by "
            "an UpdateFault with a minibatch)"
        )
    if number is None:
        return max(found, key=lambda path: path.stat().st_mtime)
    chosen = [path for path in found if path.name.rpartition("-")[2] == str(number)]
    if len(chosen) == 1:
        return chosen[0]
    known = ", ".join(f"{path.parent.name} {path.name}" for path in found)
    raise RunError(
        f"{'several workers have a' if chosen else 'there is no'} record {number} in {run / FAULTS}; there "
        f"are: {known}" + ("; say which one with --worker" if chosen else "")
    )


def _follow(
    algorithm: Algorithm,
    traced: Iterator[TracedArray],
    facts: Mapping[str, Any],
    masks: Mapping[str, Array],
    debugger: bool,
) -> tuple[list[TracedLine], str]:
    """Return the lines up to the first number that is not finite, and where that is.
    Infinities of weights that are there from the start (`masks`) are none."""
    lines = []
    for each in traced:
        if each.array.dtype.kind != "f":
            continue
        finite = np.isfinite(each.array)
        if each.kind == "weights" and each.name in masks:
            finite |= masks[each.name] & np.isinf(each.array)
        wrong = int(finite.size - np.count_nonzero(finite))
        largest = float(np.abs(each.array[np.isfinite(each.array)]).max(initial=0))
        lines.append(TracedLine(each.kind, each.name, largest, wrong, finite.size))
        if wrong:
            where = _where(each, ~finite, facts)
            if debugger:
                _stop_at(algorithm, traced, where)
            return lines, where
    return lines, ""


def _where(traced: TracedArray, wrong: Array, facts: Mapping[str, Any]) -> str:
    """Return in words which the first number is that is not finite."""
    index = tuple(int(i) for i in np.argwhere(wrong)[0]) if wrong.ndim else ()
    text = f"{traced.kind} {traced.name}{list(index) if index else ''} is {traced.array[index]}"
    if traced.rows is None or not index:
        return text
    row = index[traced.rows]
    if traced.place is None:
        return f"{text}: row {row} of the minibatch"
    sample, step, seat = (int(part) for part in traced.place[row])
    if sample < 0:
        return f"{text}: row {row} of the minibatch, which is there for the state alone"
    lane, agent = divmod(seat, int(facts.get("seats_per_lane", 1)))
    senders = facts.get("senders", [])
    sender = f" from {senders[sample]}" if sample < len(senders) else ""
    return f"{text}: row {step}, lane {lane}{f', agent {agent}' if agent else ''} of sample {sample}{sender}"


def _stop_at(algorithm: Algorithm, traced: Iterator[TracedArray], where: str) -> None:
    """Stop in the debugger where the array was computed that was told last."""
    assert isinstance(traced, Iterator) and hasattr(traced, "throw")
    try:
        traced.throw(UpdateFault(where, "", Arrays()))
    except UpdateFault as fault:
        print(f"{where}\nThe debugger is where that was computed; the learner is `self` further up (u).")
        pdb.post_mortem(fault.__traceback__)
