"""Experiments that the library ships."""

import pytest

from tidemill import Gymnasium, PettingZoo
from tidemill.presets.experiments import TUNED, experiment_for


@pytest.mark.parametrize(
    ("name", "environment"),
    [
        ("Hopper-v5", Gymnasium(id="Hopper-v5")),
        ("pettingzoo:mpe2.simple_spread_v3", PettingZoo(make="mpe2.simple_spread_v3")),  # one kind of agents
        ("pettingzoo:mpe2.simple_adversary_v3", PettingZoo(make="mpe2.simple_adversary_v3")),  # two
    ],
)
def test_what_nobody_tuned_trains_on_small_minibatches(name, environment):
    """8 lanes × 256 rows, minibatches of 64, 10 epochs; at 64 × 128, 2,048 and 4 an
    update of 8,192 had 16 steps of Adam, and learned little."""
    assert name not in TUNED
    workers = experiment_for(name, environment).workers
    actor = workers["actor"]
    trainers = [worker for name, worker in workers.items() if name.startswith("trainer")]
    assert actor.lanes == 8 and {spec.sample_steps for spec in actor.agents} == {256}
    assert {(trainer.algorithm.minibatch_size, trainer.algorithm.epochs) for trainer in trainers} == {
        (64, 10)
    }
