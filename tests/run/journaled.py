"""What the journal of a run of `experiments.numbered_memory` says was lived."""

from pathlib import Path

import numpy as np
from tests.run.environments import Numbered

from tidemill.replay.retrain_journal import JournalReader, journal_path

Where = tuple[int, ...]
"""A copy of the environment, its episode, and how many steps that has had."""


def journaled_steps(run: Path, midway: bool = False) -> tuple[list[Where], list[Where]]:
    """Return the steps in the journal of a run, by where they led, and where a seat was
    as an episode of it was cut; rows fit those before them. `midway`: an episode may
    begin there with any of its rows."""
    reader = JournalReader(journal_path(run, "policy"))
    steps, cut, seen = list[Where](), list[Where](), dict[tuple[int, int], np.ndarray]()
    open_ = set[tuple[int, int]]()
    for record in reader.records():
        sample = reader.consume() if record is None else None
        for seat in range(0 if sample is None else sample["version"].shape[1]):
            assert sample is not None
            row, key = {name: array[0, seat] for name, array in sample.items()}, (sample.channel, seat)
            where = row["obs"].astype(np.int64)
            if row["on_reset"]:
                assert (where[2] == 0 or midway) and not row["voided"]
                cut += [tuple(seen[key].tolist())] if key in open_ else []
                open_.add(key)
            elif row["version"] < 0:
                continue  # a filler, or void
            else:
                assert key in open_ and (where - seen[key] == [0, 0, 1]).all()
                assert row["reward"] == Numbered.paid(*where)
                steps.append(tuple(where.tolist()))
                if row["done"] or row["truncated"]:
                    open_.remove(key)
            seen[key] = where
    reader.close()
    return steps, cut
