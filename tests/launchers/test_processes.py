"""How many threads may compute in the processes of an experiment."""

from dataclasses import replace

import pytest
from benchmarks.works import cartpole_small

from tidemill.launchers import processes
from tidemill.launchers.processes import layer_threads
from tidemill.layouts.layout import apply, layout_of


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
