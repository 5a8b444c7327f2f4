"""A mode of samples is one file, and a line in `WRITERS`."""

import numpy as np
import pytest

import tidemill
from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Gymnasium, Limits, Trainer
from tidemill.store.checkpoint import read_newest
from tidemill.workers.sample_writers import WRITERS
from tidemill.workers.sample_writers.base import fill
from tidemill.workers.sample_writers.full import Full


class Rounded(Full):
    """An episode a sample, whose rewards are rounded to halves; every slot is filled."""

    settings = ("deterministic",)
    sent = 0

    def _write(self, slot, seat, rows):
        np.copyto(self.arrays["reward"][:rows, seat], np.round(self.arrays["reward"][:rows, seat] * 2) / 2)
        for name, array in self.arrays.items():
            slot[name][:rows, 0] = array[:rows, seat]
        fill({name: array[rows:] for name, array in slot.items()})
        Rounded.sent += 1


def weights(spec, folder):
    environment = Gymnasium(id="CartPole-v1", max_episode_steps=30)
    experiment = Experiment(
        name="modes",
        policies={"policy": ActorCritic(hidden=(8,))},
        workers={
            "actor": Actors(environment=environment, lanes=4, slots=4, agents=(spec,)),
            "trainer": Trainer(algorithm=PPO(minibatch_size=64, epochs=2), batch_size=256),
        },
        limits=Limits(updates=4),
    )
    result = tidemill.train(experiment, launch="inline", run_dir=folder, quiet=True)
    assert result.summary["status"] == "completed"
    _, arrays, *_ = read_newest(folder / "checkpoints" / "policy")
    return arrays["policy"]


def test_a_mode_of_ones_own_is_a_file_and_a_line(monkeypatch, tmp_path):
    with pytest.raises(tidemill.ConfigError, match='mode = "rounded" is not known'):
        AgentSpec(mode="rounded")
    monkeypatch.setitem(WRITERS, "rounded", Rounded)
    with pytest.raises(tidemill.ConfigError, match='does not go with mode = "rounded"'):
        AgentSpec(mode="rounded", padded=True)
    own = weights(AgentSpec(mode="rounded"), tmp_path / "own")
    full = weights(AgentSpec(mode="full", padded=True), tmp_path / "full")
    assert Rounded.sent > 4
    # CartPole's rewards are 1 each, and stay so: what is learnt is the same
    assert own.keys() == full.keys()
    for name, array in own.items():
        assert np.array_equal(array, full[name])
