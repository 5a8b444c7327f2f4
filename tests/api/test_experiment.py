"""The experiment as a value: its edges, and what it refuses before anything is
started."""

import pytest

from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Free, Limits, Trainer
from tidemill.core.config import decode, encode
from tidemill.core.errors import ConfigError


def experiment(**workers):
    return Experiment(name="x", policies={"policy": ActorCritic(), "other": ActorCritic()}, workers=workers)


def actors(count=1, ring=1, **spec):
    return Actors(environment=Free(), count=count, ring=ring, agents=(AgentSpec(**spec),))


def test_an_experiment_survives_being_written_down():
    made = experiment(actor=actors(), trainer=Trainer(algorithm=PPO(epochs=7)))
    assert decode(Experiment, encode(made)) == made


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ({"actor": actors()}, "no trainer"),
        (
            {"actor": actors(samples="smaples"), "trainer": Trainer(algorithm=PPO())},
            "did you mean|nobody consumes it",
        ),
        ({"actor": actors(policy="polcy"), "trainer": Trainer(algorithm=PPO())}, 'did you mean "policy"'),
        ({"actor": actors(inference="answers"), "trainer": Trainer(algorithm=PPO())}, "nobody serves it"),
    ],
)
def test_what_cannot_run_is_refused_by_name(workers, message):
    with pytest.raises(ConfigError, match=message):
        experiment(**workers).check()


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"steps": 0}, "steps = 0 must be above 0, or null"),
        ({"updates": -1}, "updates = -1 must be above 0, or null"),
        ({"seconds": -0.5}, "seconds = -0.5 must be above 0, or null"),
        ({"stall_s": float("inf")}, "stall_s = inf must be finite, or null"),
        ({"window": 0}, "window = 0 must be above 0"),
    ],
)
def test_limits_are_positive(limits, said):
    with pytest.raises(ConfigError) as refused:
        Limits(**limits)
    assert str(refused.value).endswith(said)


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../x", "x" * 65, "a b"])
def test_names_are_names(name):
    with pytest.raises(ConfigError, match="is not a name"):
        Experiment(name=name, policies={}, workers={})


def test_a_group_of_absurdly_many_workers_is_refused_at_once():
    with pytest.raises(ConfigError, match="count = 999,999,999 must be at most 10,000"):
        actors(count=999_999_999)
