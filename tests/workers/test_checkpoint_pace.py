"""When checkpoints are written: a life of a trainer with a clock of its own."""

from itertools import pairwise
from math import inf

import pytest
from tests.run.cut_experiments import experiment

from tidemill.run.cuts import Cuts
from tidemill.training.train import train
from tidemill.workers.checkpoint_pace import CheckpointPace


def written(seconds, share, cost, until, saved=False):
    """Return when checkpoints were begun that took `cost` each, of a trainer that does
    one update each 0.1 s."""
    pace, now, found = CheckpointPace(seconds, share), 0.0, []
    pace.start(0.0, saved)
    for update in range(1, int(until * 10)):
        now = max(now, update * 0.1)
        if pace.due(now, update):
            found.append(now)
            pace.wrote(now, now + cost)
            now += cost
    return found


def test_the_first_is_written_with_the_first_update_and_they_come_sooner_while_the_run_is_young():
    found = written(60.0, 0.02, 0.0, 2000)
    assert found[0] == 0.1
    for before, after in pairwise(found):
        assert after - before <= min(60.0, max(1.0, 0.1 * after)) + 0.11  # an update is awaited
    assert found[-1] - found[-2] == pytest.approx(60.0, abs=0.11)


@pytest.mark.parametrize("cost", [0.01, 0.2, 3.0])
def test_writing_never_takes_more_than_its_share(cost):
    found = written(60.0, 0.02, cost, 1500)
    for count, began in enumerate(found[1:], 2):
        assert cost * (count - 1) <= 0.02 * (began + cost) + cost  # the first one aside
    assert len(found) > 5


def test_a_young_run_gives_half_of_the_share_and_an_older_one_is_saved_each_so_many_seconds_all_the_same():
    young = written(60.0, 0.02, 0.05, 30)
    assert all(after - before >= 0.05 * 100 for before, after in pairwise(young)) and len(young) == 6
    old = written(60.0, 0.02, 1.0, 400)  # half of the share would be one each 100 s
    assert [after - before for before, after in pairwise(old[1:])] == pytest.approx([61.0] * 5, abs=0.11)


@pytest.mark.parametrize(("cost", "each"), [(0.1, 1), (1.0, 3)])
def test_updates_that_take_long_are_saved_each_as_far_as_the_share_allows(cost, each):
    pace, now, found = CheckpointPace(60.0, 0.02), 0.0, []
    pace.start(0.0, True)
    for update in range(1, 10):
        now += 20.0
        if pace.due(now, update, 20.0):
            found.append(update)
            pace.wrote(now, now + cost)
            now += cost
    assert found == [1, *range(1 + each, 10, each)]
    assert not pace.due(now + 1.0, 10, 0.1)


def test_a_run_that_goes_on_has_its_first_one_already():
    assert written(60.0, 0.02, 0.0, 2, saved=True) == [1.0]


def test_before_the_first_update_there_is_little_to_lose():
    pace = CheckpointPace(60.0)
    pace.start(0.0, False)
    assert not pace.due(59.9, 0)
    assert pace.due(60.0, 0)
    assert pace.due(0.1, 1)


def paused(pace, began, ended):
    pace.pause(began)
    pace.pause(began + 1.0)  # said twice
    pace.start(ended, True)


def test_a_pause_is_no_time_and_what_was_trained_before_it_is_no_less_to_be_saved():
    pace = CheckpointPace(60.0)
    pace.start(0.0, True)
    pace.wrote(1000.0, 1000.0)
    paused(pace, 1050.0, 5000.0)
    assert not pace.due(5009.0, 5)
    assert pace.due(5010.0, 5)


def test_a_run_that_is_paused_often_is_saved_all_the_same():
    pace, now = CheckpointPace(60.0), 1000.0
    pace.start(0.0, True)
    pace.wrote(now, now)
    for _ in range(3):
        paused(pace, now + 19.0, now + 100.0)
        now += 100.0
        assert not pace.due(now, 5)
    assert not pace.due(now + 2.0, 5)
    assert pace.due(now + 3.0, 5)


def test_one_that_is_written_in_a_pause_counts_from_its_end():
    pace = CheckpointPace(60.0, 1.0)
    pace.start(0.0, True)
    pace.pause(1000.0)
    assert pace.due(1000.0, 5)
    pace.wrote(1001.0, 1003.0)
    pace.start(2000.0, True)
    assert not pace.due(2059.0, 5)
    assert pace.due(2060.0, 5)


def test_a_run_does_not_grow_older_in_a_pause():
    """A young one is saved as often as before."""
    pace = CheckpointPace(60.0)
    pace.start(0.0, True)
    pace.wrote(20.0, 20.0)
    paused(pace, 20.0, 5000.0)
    assert not pace.due(5001.9, 5)
    assert pace.due(5002.3, 5)


@pytest.mark.parametrize(("cost", "due"), [(0.0, True), (0.5, True), (1.1, False)])
def test_in_a_pause_one_is_due_as_far_as_the_share_allows(cost, due):
    """A replay memory may take minutes, for which somebody who goes on at once waits."""
    pace = CheckpointPace(60.0, 0.02)
    pace.start(0.0, True)
    pace.wrote(1000.0 - cost, 1000.0)
    assert not pace.due(1050.0, 5)
    assert pace.due(1050.0, 5, inf) is due
    assert not CheckpointPace(60.0).due(10.0, 0, inf)  # nothing is trained


def test_a_share_of_1_holds_nothing_back():
    assert len(written(1e-9, 1.0, 0.5, 100)) > 150


def test_a_cut_costs_the_time_for_which_everybody_is_held():
    pace, now, found = CheckpointPace(60.0, 0.02), 0.0, []
    pace.start(0.0, False)
    for update in range(1, 15_000):
        now = max(now, update * 0.1)
        if pace.due(now, update):
            found.append(now)
            pace.wrote(now + 0.5, now + 0.7)  # actors came to rest before, and write their parts then
            pace.stood_still(now, now + 3.0)
            now += 3.0
    assert len(found) > 5
    assert 3.0 * len(found) <= 0.02 * now + 2 * 3.0
    before = pace.interval(now)
    pace.stood_still(now + 1.0, now + 500.0)  # nothing was written then: some did not come to rest
    assert pace.interval(now) == before


def test_of_equal_trainers_one_says_when_a_run_is_cut(tmp_path, monkeypatch):
    """The others write none, and have no pace."""
    cuts = []
    cut = Cuts.cut
    monkeypatch.setattr(Cuts, "cut", lambda self: (cuts.append(self.number), cut(self)))
    monkeypatch.setattr(CheckpointPace, "interval", lambda *given: inf)  # but the first one
    made = experiment(lag=0, count=2, trainers=2, updates=6)
    summary = train(made, launch="inline", run_dir=tmp_path / "run", quiet=True).summary
    assert summary["updates"] == 6 and len(cuts) == 1
