"""Trains a run again from its journal: the same arrivals, the same tasks between them, so
the same weights to the last bit."""

from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.api.algorithm import UpdateFault
from tidemill.api.buffer import Demand, ReplayBuffer
from tidemill.api.plain_spaces import read_spaces
from tidemill.api.policy import check_weights
from tidemill.api.spaces import Spaces
from tidemill.api.stream import TellingConsumer
from tidemill.api.worker import MOST_THREADS
from tidemill.core.blas_threads import limit_threads
from tidemill.core.errors import CheckpointError, ConfigError, RunError, SchemaError, did_you_mean
from tidemill.core.schema import Arrays
from tidemill.core.seeding import derive_seed
from tidemill.nets.choose_device import choose_device
from tidemill.replay.retrain_journal import JournalReader, MemoryCleared, Task, journal_path
from tidemill.replay_training.trainer_config import ReplayTrainer
from tidemill.run.folder import RunFolder
from tidemill.run.trust import Trust
from tidemill.store.checkpoint import read_newest


@dataclass(frozen=True)
class Retrained:
    """What came of it: the policy's parameters, what was counted, and whether the weights
    were those of the run's newest checkpoint after as many updates as that has
    (`compared`). A run that was killed has a journal that goes further than its
    checkpoint."""

    parameters: Arrays
    updates: int
    committed: int
    voided: int
    compared: int
    same: bool


def retrain(run: str | Path, *, policy: str | None = None, trust: Trust = False) -> Retrained:
    """Train the run in folder `run` again, from its journal
    (`ReplayTrainer(journal=True)`), of several that of `policy`; `trust` as in
    `tidemill.load`. Raises `RunError` or `CheckpointError` where there is none."""
    folder = RunFolder.open(Path(run))
    experiment = folder.experiment(None, trust, environments=False).experiment
    found = [(name, config) for name, config in experiment.groups(ReplayTrainer).items() if config.journal]
    if not found:
        raise RunError(
            f"{folder.path} has no journal: its trainer was not told to write one; train with "
            "ReplayTrainer(journal=True)"
        )
    known = [config.policy for _, config in found]
    if policy is not None and policy not in known:
        raise RunError(f'{folder.path} has no journal of a policy "{policy}"; {did_you_mean(policy, known)}')
    if policy is None and len(found) > 1:
        raise RunError(
            f"{folder.path} has journals of {len(found)} policies; say which with --policy: "
            f"{', '.join(known)}"
        )
    group, config = next(each for each in found if policy in (None, each[1].policy))
    worker = f"{group}-0"
    with closing(JournalReader(journal_path(folder.path, config.policy))) as reader:
        spaces, math_threads = _header(reader, folder.path)
        limit_threads(math_threads)  # products on more threads have other last bits
        _, arrays, facts, _ = read_newest(folder.checkpoints(config.policy))
        kept, compared = arrays.get("policy", {}), _updates(facts)
        check_weights(experiment.policies[config.policy], spaces, kept)
        trained = experiment.policies[config.policy].build_on(
            choose_device(config.device, 0), spaces, derive_seed(experiment.seed, "policy", config.policy)
        )
        trained.version = 0
        algorithm = config.algorithm.build(trained, derive_seed(experiment.seed, worker))

        def empty() -> ReplayBuffer:
            demand = Demand(
                config.batch_size, 1, seed=derive_seed(experiment.seed, worker, "buffer"), folder=folder.path
            )
            buffer = config.buffer.build(TellingConsumer(reader, algorithm.take_in), demand)
            if not isinstance(buffer, ReplayBuffer):
                raise ConfigError(f"{type(config.buffer).__name__} builds no ReplayBuffer")
            return buffer

        def matches() -> bool:
            own = trained.parameters()
            return own.keys() == kept.keys() and all(
                np.array_equal(own[n], kept[n], equal_nan=True) for n in own
            )

        buffer, committed, voided, updates = empty(), 0, 0, 0
        same = compared == 0 and matches()
        for record in reader.records():
            match record:
                case MemoryCleared():
                    buffer = empty()
                case Task(progress):
                    taken = buffer.take(updates)
                    if taken is None:
                        raise RunError(
                            f"the journal of {folder.path} has a task before its memory could be sampled "
                            "from; it is of another configuration"
                        )
                    if config.algorithm.schedules:
                        algorithm.config = config.algorithm.at(committed, progress)
                    with suppress(UpdateFault):  # which the run has left out, too
                        algorithm.update([held.sample for held in taken], committed)
                    buffer.release()
                    updates += 1
                    trained.version = updates
                    if updates == compared:
                        same = matches()
                case None:
                    for received in buffer.receive():
                        committed, voided = committed + received.committed, voided + received.voided
    return Retrained(
        {name: array.copy() for name, array in trained.parameters().items()},
        updates,
        committed,
        voided,
        compared,
        same,
    )


def _updates(facts: Mapping[str, Any]) -> int:
    try:
        return int(facts["updates"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"the newest checkpoint does not say how many updates its run had done ({error!r})"
        ) from None


def _header(reader: JournalReader, folder: Path) -> tuple[Spaces, int]:
    """Return the spaces of a journal's run, and how many threads numeric libraries had in
    it."""
    try:
        spaces, threads = read_spaces(reader.facts["spaces"]), reader.facts.get("math_threads", 1)
    except (KeyError, TypeError, SchemaError) as error:
        raise CheckpointError(
            f"the journal of {folder} is damaged: its header does not say what spaces the run had ({error!r})"
        ) from None
    if not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
        raise CheckpointError(
            f"the journal of {folder} is damaged: it says that numeric libraries had {threads!r} threads, "
            f"not 1 to {MOST_THREADS:,}"
        )
    return spaces, threads
