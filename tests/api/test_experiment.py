"""The experiment as a value: its edges, and what it refuses before anything is started."""

import pytest

from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Free, Limits, PolicyWorkers, Trainer
from tidemill.core.config import decode, encode
from tidemill.core.errors import ConfigError


def experiment(**workers):
    return Experiment(name="x", policies={"policy": ActorCritic(), "other": ActorCritic()}, workers=workers)


def actors(count=1, ring=1, **spec):
    return Actors(environment=Free(), count=count, ring=ring, agents=(AgentSpec(**spec),))


def test_equal_stream_names_are_joined():
    made = experiment(actor=actors(count=2, ring=2, inference="answers"), policy=PolicyWorkers(stream="answers"), trainer=Trainer(algorithm=PPO()))
    edges = {edge.name: (edge.kind, edge.source, edge.targets) for edge in made.edges()}
    assert edges == {
        "samples/samples/actor-0/0": ("channel", "actor-0", ("trainer-0",)),
        "samples/samples/actor-0/1": ("channel", "actor-0", ("trainer-0",)),
        "samples/samples/actor-1/0": ("channel", "actor-1", ("trainer-0",)),
        "samples/samples/actor-1/1": ("channel", "actor-1", ("trainer-0",)),
        "requests/answers/actor-0": ("channel", "actor-0", ("policy-0",)),
        "answers/answers/actor-0": ("channel", "policy-0", ("actor-0",)),
        "requests/answers/actor-1": ("channel", "actor-1", ("policy-0",)),
        "answers/answers/actor-1": ("channel", "policy-0", ("actor-1",)),
        "parameters/policy/trainer-0": ("cell", "trainer-0", ("policy-0",)),
    }


def test_an_experiment_survives_being_written_down():
    made = experiment(actor=actors(), trainer=Trainer(algorithm=PPO(epochs=7)))
    assert decode(Experiment, encode(made)) == made


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ({"actor": actors()}, "no trainer"),
        ({"actor": actors(samples="smaples"), "trainer": Trainer(algorithm=PPO())}, "did you mean|nobody consumes it"),
        ({"actor": actors(policy="polcy"), "trainer": Trainer(algorithm=PPO())}, 'did you mean "policy"'),
        ({"actor": actors(inference="answers"), "trainer": Trainer(algorithm=PPO())}, "nobody serves it"),
        (
            {
                "actor": actors(inference="inference", policy="other"),
                "policy": PolicyWorkers(),
                "trainer": Trainer(algorithm=PPO()),
            },
            'actor-0 asks stream "inference" for policy "other", but policy-0 serves "policy" there',
        ),
        ({"actor": actors(), "first": Trainer(algorithm=PPO()), "second": Trainer(algorithm=PPO())}, "one group of consumers per sample stream"),
    ],
)
def test_what_cannot_run_is_refused_by_name(workers, message):
    with pytest.raises(ConfigError, match=message):
        experiment(**workers).check()


@pytest.mark.parametrize("limits", [{"steps": 0}, {"updates": -1}, {"seconds": -0.5}, {"window": 0}])
def test_limits_are_positive(limits):
    with pytest.raises(ConfigError, match="must be above 0"):
        Limits(**limits)


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../x", "x" * 65, "a b"])
def test_names_are_names(name):
    with pytest.raises(ConfigError, match="is not a name"):
        Experiment(name=name, policies={}, workers={})
