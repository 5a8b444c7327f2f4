"""What joins workers: the channels and cells that follow from the streams they name, and
the streams that are refused."""

import pytest

from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Free, PolicyWorkers, Trainer
from tidemill.api.edges import Port, derive_edges, spare_edges
from tidemill.core.errors import ConfigError


def experiment(**workers):
    return Experiment(name="x", policies={"policy": ActorCritic(), "other": ActorCritic()}, workers=workers)


def actors(*specs, count=1, ring=1, **spec):
    return Actors(environment=Free(), count=count, ring=ring, agents=specs or (AgentSpec(**spec),))


def joined(**groups):
    """The edges of groups of workers given as (count, *ports): name → source, targets."""
    ends = [
        (f"{group}-{i}", port)
        for group, (count, *ports) in groups.items()
        for i in range(count)
        for port in ports
    ]
    return {edge.name: (edge.source, edge.targets) for edge in derive_edges(ends)}


def sent(**groups):
    """Who sends samples to whom: a set of (producer, consumer), of outlet 0."""
    return {(source, target) for name, (source, (target, *_)) in joined(**groups).items() if "/0/" in name}


PRODUCE, CONSUME = Port("x", "produce"), Port("x", "consume")


def test_equal_stream_names_are_joined():
    made = experiment(
        actor=actors(count=2, ring=2, inference="answers"),
        policy=PolicyWorkers(stream="answers"),
        trainer=Trainer(algorithm=PPO()),
    )
    edges = {edge.name: (edge.kind, edge.source, edge.targets) for edge in made.edges()}
    assert edges == {
        "samples/samples/actor-0/0/trainer-0": ("channel", "actor-0", ("trainer-0",)),
        "samples/samples/actor-0/1/trainer-0": ("channel", "actor-0", ("trainer-0",)),
        "samples/samples/actor-1/0/trainer-0": ("channel", "actor-1", ("trainer-0",)),
        "samples/samples/actor-1/1/trainer-0": ("channel", "actor-1", ("trainer-0",)),
        "requests/answers/actor-0/policy": ("channel", "actor-0", ("policy-0",)),
        "answers/answers/actor-0/policy": ("channel", "policy-0", ("actor-0",)),
        "requests/answers/actor-1/policy": ("channel", "actor-1", ("policy-0",)),
        "answers/answers/actor-1/policy": ("channel", "policy-0", ("actor-1",)),
        "parameters/policy/trainer-0": ("cell", "trainer-0", ("policy-0",)),
    }


def test_producers_are_shared_out_among_the_consumers_of_a_group():
    assert sent(a=(2, PRODUCE), c=(2, CONSUME)) == {("a-0", "c-0"), ("a-1", "c-1")}
    assert sent(a=(3, PRODUCE), c=(2, CONSUME)) == {("a-0", "c-0"), ("a-1", "c-1"), ("a-2", "c-0")}


def test_a_producer_that_is_left_with_several_consumers_serves_all_of_them():
    assert sent(a=(1, PRODUCE), c=(2, CONSUME)) == {("a-0", "c-0"), ("a-0", "c-1")}
    assert sent(a=(2, PRODUCE), c=(5, CONSUME)) == {
        ("a-0", "c-0"),
        ("a-1", "c-1"),
        ("a-0", "c-2"),
        ("a-1", "c-3"),
        ("a-0", "c-4"),
    }


def test_each_group_of_consumers_gets_every_sample():
    both = sent(a=(2, PRODUCE), b=(1, PRODUCE), c=(2, CONSUME), d=(1, CONSUME))
    assert both == {
        ("a-0", "c-0"),
        ("a-1", "c-1"),
        ("b-0", "c-0"),
        ("a-0", "d-0"),
        ("a-1", "d-0"),
        ("b-0", "d-0"),
    }
    names = list(joined(a=(1, Port("x", "produce", outlets=2)), c=(1, CONSUME), d=(1, CONSUME)))
    assert names == [
        "samples/x/a-0/0/c-0",
        "samples/x/a-0/0/d-0",
        "samples/x/a-0/1/c-0",
        "samples/x/a-0/1/d-0",
    ]


def test_samples_do_not_come_back():
    with pytest.raises(ConfigError, match='b-0 produces sample stream "x" and consumes it, too'):
        joined(a=(1, PRODUCE), b=(1, PRODUCE, CONSUME))


def asks(policy):
    return Port("i", "ask", policy=policy)


def serves(policy):
    return Port("i", "serve", policy=policy)


def served(**groups):
    """Who serves whom: (asker, policy) → server."""
    edges = joined(**groups)
    found = {}
    for name, (asker, (server,)) in edges.items():
        kind, stream, client, policy = name.split("/")
        if kind == "requests":
            assert client == asker and edges[f"answers/{stream}/{client}/{policy}"] == (server, (asker,))
            found[asker, policy] = server
    return found


def test_askers_are_shared_out_among_policy_workers():
    assert served(a=(4, asks("p")), s=(2, serves("p"))) == {
        ("a-0", "p"): "s-0",
        ("a-1", "p"): "s-1",
        ("a-2", "p"): "s-0",
        ("a-3", "p"): "s-1",
    }


def test_one_stream_may_be_asked_for_several_policies():
    assert served(a=(1, asks("p"), asks("q")), s=(1, serves("p"), serves("q"))) == {
        ("a-0", "p"): "s-0",
        ("a-0", "q"): "s-0",
    }
    assert served(a=(1, asks("p"), asks("q")), s=(2, serves("p"), serves("q"))) == {
        ("a-0", "p"): "s-0",
        ("a-0", "q"): "s-1",
    }


def test_policy_workers_of_one_stream_may_serve_different_policies():
    found = served(a=(2, asks("p"), asks("q")), s=(1, serves("p"), serves("q")), t=(1, serves("p")))
    assert found == {("a-0", "p"): "t-0", ("a-0", "q"): "s-0", ("a-1", "p"): "t-0", ("a-1", "q"): "s-0"}


def test_spare_edges_lead_from_each_asker_to_all_others_that_serve_its_policy():
    workers = [("a-0", asks("p")), ("a-0", asks("q")), ("a-1", asks("p")), ("s-0", serves("p"))]
    workers += [("s-0", serves("q")), ("s-1", serves("p")), ("s-1", serves("q")), ("t-0", serves("p"))]
    edges = derive_edges(workers)
    laid = {edge.name: edge.targets[0] for edge in edges if edge.name.startswith("requests/")}
    assert laid == {"requests/i/a-0/p": "t-0", "requests/i/a-0/q": "s-0", "requests/i/a-1/p": "s-1"}
    spare = {edge.name: (edge.kind, edge.source, edge.targets) for edge in spare_edges(workers, edges)}
    pairs = [("a-0", "p", "s-0"), ("a-0", "p", "s-1"), ("a-0", "q", "s-1")]
    pairs += [("a-1", "p", "s-0"), ("a-1", "p", "t-0")]
    expected = {}
    for asker, policy, server in pairs:
        expected[f"spare-requests/i/{asker}/{policy}/{server}"] = ("channel", asker, (server,))
        expected[f"spare-answers/i/{asker}/{policy}/{server}"] = ("channel", server, (asker,))
    assert spare == expected


def test_a_run_that_resumes_exactly_has_no_spare_edges():
    made = experiment(
        actor=actors(count=2, inference="answers"),
        policy=PolicyWorkers(stream="answers", count=2),
        trainer=Trainer(algorithm=PPO(), max_policy_lag=0),
    )
    assert len(made.spare_edges()) == 4
    assert made.replace(exact_resume=True).spare_edges() == []


def test_a_policy_worker_that_would_never_be_asked_is_refused():
    with pytest.raises(
        ConfigError,
        match=r'"i" is asked by a-0, a-1, and s-2, s-3 would never be asked.*fewer policy workers, or more '
        r"actors",
    ):
        joined(a=(2, asks("p")), s=(4, serves("p")))
    with pytest.raises(
        ConfigError, match=r's-0 serves policy "q" on inference stream "i", but a-0 asks for "p" there'
    ):
        joined(a=(1, asks("p")), s=(1, serves("p"), serves("q")))


def test_a_policy_that_nobody_serves_is_refused():
    with pytest.raises(
        ConfigError, match=r'a-0 asks stream "i" for policy "q", but s-0 serves "p" there; add it'
    ):
        joined(a=(1, asks("p"), asks("q")), s=(1, serves("p")))


def test_one_name_is_one_stream():
    with pytest.raises(
        ConfigError, match=r'"i" is a sample stream \(t-0\) and an inference stream \(s-0\) at once'
    ):
        joined(a=(1, asks("p"), Port("i", "produce")), s=(1, serves("p")), t=(1, Port("i", "consume")))


@pytest.mark.parametrize(
    ("ports", "message"),
    [
        (
            (PRODUCE,),
            'samples stream "x": w-0, w-1 produces it, but nobody consumes it; add a worker that consumes '
            '"x"',
        ),
        ((CONSUME,), 'samples stream "x": w-0, w-1 consumes it, but nobody produces it'),
        ((asks("p"),), 'inference stream "i": w-0, w-1 asks it, but nobody serves it'),
        ((serves("p"),), 'inference stream "i": w-0, w-1 serves it, but nobody asks it'),
        ((Port("p", "subscribe"),), 'parameters stream "p": w-0, w-1 subscribes it, but nobody publishes it'),
    ],
)
def test_a_stream_that_lacks_an_end_is_refused(ports, message):
    with pytest.raises(ConfigError, match=message):
        joined(w=(2, *ports))


def test_a_misspelt_stream_is_guessed():
    with pytest.raises(ConfigError, match='did you mean "samples"'):
        experiment(actor=actors(samples="smaples"), trainer=Trainer(algorithm=PPO())).check()


def test_a_policy_that_nobody_plays_is_trained_all_the_same():
    assert joined(w=(1, Port("p", "publish"))) == {}


def test_one_group_publishes_a_policy():
    with pytest.raises(
        ConfigError, match='policy "p" is published by v-0, w-0; one group of trainers per policy'
    ):
        joined(v=(1, Port("p", "publish")), w=(1, Port("p", "publish")), x=(1, Port("p", "subscribe")))


def test_who_plays_gets_versions_from_the_trainer_that_takes_its_samples():
    """Over hosts what that one gives back waits for versions that it has published."""
    edges = joined(
        first=(1, PRODUCE, Port("p", "subscribe")),
        second=(1, PRODUCE, Port("p", "subscribe")),
        watcher=(2, Port("p", "subscribe")),
        trainer=(2, CONSUME, Port("p", "publish")),
    )
    asked = joined(
        first=(1, PRODUCE, asks("p")),
        second=(1, PRODUCE, asks("p")),
        server=(2, serves("p"), Port("p", "subscribe")),
        trainer=(2, CONSUME, Port("p", "publish")),
    )
    for number, asker in enumerate(("first-0", "second-0")):
        (server,) = asked[f"requests/i/{asker}/p"][1]
        assert asked[f"parameters/p/trainer-{number}"] == (f"trainer-{number}", (server,))
    assert edges["samples/x/first-0/0/trainer-0"] and edges["samples/x/second-0/0/trainer-1"]
    assert edges["parameters/p/trainer-0"] == ("trainer-0", ("first-0", "watcher-0"))
    assert edges["parameters/p/trainer-1"] == ("trainer-1", ("second-0", "watcher-1"))
