"""Actors whose host leaves the run: they finish the samples that they have begun, and go
on as if nothing had been where it stays."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.workers.test_actor import spec, world_of
from tests.workers.test_lockstep import Lockstep, check, lockstep_world
from tests.workers.world import Marked, World, check_samples

from tidemill.api.control_messages import Finish, Pause, Start, State, Status, WorkerStatistics, pack


def told(world: World, message: Any) -> None:
    world.ends["actor-0"][1].send(pack(message))
    world.actor.run_once()
    for server in world.servers:
        server._poll()


def polls(world: World, until: Callable[[], bool], takes: bool = True) -> None:
    """Poll as a process does, which obeys between two polls. `takes`: somebody takes the
    samples."""
    for _ in range(400):
        if until():
            return
        if takes:
            world.drain()
        world.actor.run_once()
        for server in world.servers:
            server._poll()
    raise AssertionError("not so after 400 polls")


def paused(world: World) -> bool:
    return world.actor.state is State.PAUSED


def stays_as_it_is(world: World) -> None:
    ticks = world.actor.order.ticks
    for _ in range(5):
        world.actor.run_once()
    assert world.actor.order.ticks == ticks


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        {"lanes": 3, "ring": 2},
        {"lanes": 1, "ring": 3, "agents": (spec(sample_steps=3, inference="ask-p"),)},
        {"lanes": 2, "agents": (spec(sample_steps=5, burn_in=2, inference="ask-p"),)},
        {"lanes": 1, "agents": (spec(mode="full", inference="ask-p"),)},
        {"lanes": 1, "agents": (spec(mode="after_done", sample_steps=1, inference="ask-p"),)},
    ],
)
def test_an_actor_finishes_its_samples_and_goes_on_where_it_is_told_to(
    how: dict[str, Any], remote: bool
) -> None:
    if "agents" in how and not remote:
        how = {**how, "agents": tuple(each.replace(inference="inline") for each in how["agents"])}
    world = world_of(Marked(shortest=3, longest=9, stalls=5), slots=4, remote=remote, **how)
    world.begin()
    for _ in range(2):
        polls(world, lambda: world.actor.order.unsent() > 0)
        world.sent()
        told(world, Finish())
        polls(world, lambda: paused(world))
        reports = world.sent()
        assert [r.state for r in reports if isinstance(r, Status)] == [State.PAUSED]
        assert [r.unsent for r in reports if isinstance(r, WorkerStatistics)][-1] == 0
        stays_as_it_is(world)
        told(world, Start())
        for _ in range(200):
            world.drain()
            world.poll()
    assert check_samples(world)


@pytest.mark.parametrize("remote", [False, True])
def test_in_lockstep_an_actor_finishes_its_sample_and_begins_none_with_the_next_version(
    remote: bool,
) -> None:
    world: Lockstep = lockstep_world(Marked(shortest=3, longest=9, stalls=3), remote=remote, lanes=2, ring=2)
    world.begin()
    world.round()
    polls(world, lambda: world.actor.order.unsent() > 0, takes=False)
    told(world, Finish())
    polls(world, lambda: paused(world), takes=False)
    assert {consumer.waiting() for consumer in world.consumers.values()} == {1}
    world.publish()
    world.drain()
    stays_as_it_is(world)
    told(world, Start())
    for sample in world.round():
        check(sample, world.version - 1, 0)


def test_where_seats_never_end_their_samples_together_the_actor_plays_on_until_it_is_to_pause() -> None:
    agents = (spec(mode="full"),)
    world = world_of(Marked(shortest=3, longest=9), lanes=8, slots=4, agents=agents)
    world.begin()
    polls(world, lambda: world.actor.order.unsent() > 0)
    told(world, Finish())
    for _ in range(50):
        world.actor.run_once()
        world.drain()
        assert not paused(world)
    assert world.got
    told(world, Pause())
    assert paused(world)
    told(world, Finish())
    assert paused(world)
