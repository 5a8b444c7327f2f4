"""How many threads may compute in the processes of an experiment."""

from dataclasses import replace

import pytest
from benchmarks.works import cartpole_small

from tidemill.core.control_groups import MemoryKills
from tidemill.launchers import processes
from tidemill.launchers.cause_of_end import killer
from tidemill.launchers.processes import layer_threads
from tidemill.layouts.experiment_layout import apply, layout_of


@pytest.mark.parametrize(
    ("cores", "settings", "expected"),
    [
        (2, {"actors": 1, "trainers": 1, "together": True, "slots": 1}, [2]),
        # one learns, the other waits
        (2, {"actors": 2, "trainers": 1, "together": True, "slots": 1}, [2, 1]),
        (8, {"actors": 4, "trainers": 2, "together": True, "slots": 1}, [4, 4, 2, 2]),
        # all learn
        (2, {"actors": 2, "trainers": 2, "together": True, "slots": 1}, [1, 1]),
        # actors go on while the trainer learns
        (2, {"actors": 2, "trainers": 1, "together": True, "slots": 2}, [1, 1]),
        (2, {"actors": 1, "trainers": 1, "slots": 2}, [1, 1]),
        (2, {"actors": 2, "trainers": 1, "slots": 1}, [0, 0, 0]),
    ],
)
def test_cores_whose_workers_wait_compute_for_those_who_learn(monkeypatch, cores, settings, expected):
    monkeypatch.setattr(processes, "cores", lambda: cores)
    experiment = cartpole_small()
    laid_out = apply(experiment, replace(layout_of(experiment), lanes=2, **settings))
    groups = laid_out.processes()
    assert [layer_threads(laid_out, names, groups) for names in groups] == expected


@pytest.mark.parametrize(
    ("here", "anywhere", "told"),
    [
        (0, 0, "by hand, or by another program"),
        (1, 1, "its control group has no more"),
        (0, 1, "most likely"),
    ],
)
def test_who_sends_sigkill_is_told_by_what_the_system_counts(here: int, anywhere: int, told: str) -> None:
    assert told in killer(MemoryKills(2, 7), MemoryKills(2 + here, 7 + anywhere))
