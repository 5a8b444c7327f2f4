"""The policy worker."""

import threading
import time
from collections.abc import Callable

from tests.workers.world import Known, Marked, World, check_samples

from tidemill.workers.actor import Actors, AgentSpec


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
