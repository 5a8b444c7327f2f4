"""The policy worker."""

import threading
import time
from collections.abc import Callable

import pytest
from tests.workers.world import Known, Marked, World, check_samples

from tidemill.algorithms.ppo import PPO
from tidemill.core.errors import ConfigError
from tidemill.workers.actor import Actors, AgentSpec
from tidemill.workers.policy import PolicyWorkers
from tidemill.workers.trainer import Trainer


def test_threaded_only_the_inference_thread_takes_parameters() -> None:
    """A start after a pause, too, leaves them to it: it may be computing."""
    spec = AgentSpec(policy="p", samples="s", inference="ask-p", sample_steps=4)
    world = World(Actors(environment=Marked(shortest=3, longest=9), agents=(spec,), lanes=2), remote=True, threaded=True)
    world.begin()
    (policy,) = (known for known in Known.built)
    (server,) = world.servers
    threads: set[int] = set()
    load: Callable[..., None] = policy.load

    def watched(parameters, version) -> None:
        threads.add(threading.get_ident())
        load(parameters, version)

    policy.load = watched  # type: ignore[method-assign]
    deadline = time.monotonic() + 60
    try:
        while world.version < 5 or len(world.got.get("samples/s/actor-0/0", ())) < 3:
            assert time.monotonic() < deadline
            world.poll()
            world.drain()
            if policy.version == world.version and world.version < 5:
                world.publish()
                server.pause()
                server.start()
    finally:
        server._close()
    assert len(threads) == 1 and threading.get_ident() not in threads
    assert check_samples(world)


def test_threaded_a_policy_may_compute_elsewhere_and_finish_when_it_is_answered() -> None:
    spec = AgentSpec(policy="p", samples="s", inference="ask-p", sample_steps=4)
    world = World(Actors(environment=Marked(shortest=3, longest=9), agents=(spec,), lanes=2), remote=True, threaded=True)
    world.begin()
    (policy,) = (known for known in Known.built)
    (server,) = world.servers
    began, finished = set[int](), set[int]()

    def begin(observation, state, deterministic, out) -> Callable[[], None]:
        began.add(threading.get_ident())
        answers = {name: array.copy() for name, array in out.items()}
        policy.act(observation, state, deterministic, answers)

        def finish() -> None:
            finished.add(threading.get_ident())
            for name, array in answers.items():
                out[name][...] = array

        return finish

    policy.begin = begin  # type: ignore[method-assign]
    deadline = time.monotonic() + 60
    try:
        while len(world.got.get("samples/s/actor-0/0", ())) < 6:
            assert time.monotonic() < deadline
            world.poll()
            world.drain()
    finally:
        server._close()
    assert check_samples(world)
    assert len(began) == len(finished) == 1 and not began & finished and threading.get_ident() not in began | finished


@pytest.mark.parametrize("make", [lambda device: PolicyWorkers(device=device), lambda device: Trainer(algorithm=PPO(), device=device)])
def test_a_device_is_named(make: Callable[[str], PolicyWorkers | Trainer]) -> None:
    assert [make(device).device for device in ("cpu", "auto", "cuda", "cuda:1")] == ["cpu", "auto", "cuda", "cuda:1"]
    with pytest.raises(ConfigError, match=r'device = "gpu" is not known; take "cpu", "cuda"'):
        make("gpu")
