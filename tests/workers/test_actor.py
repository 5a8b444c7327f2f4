"""The actor worker: its ring, when it takes parameters, how it is held back, and which
agents its specs match."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.workers.world import OFFSET, Known, Marked, World, check_samples

from tidemill.api.control_messages import WorkerStatistics
from tidemill.api.environment import AgentInfo
from tidemill.api.spaces import Box, Discrete, Spaces
from tidemill.core.errors import ConfigError
from tidemill.core.memory import own_bytes
from tidemill.testing.scripted import ScriptedEnvironment
from tidemill.workers import actor_limits, parameter_refresh
from tidemill.workers.actor import MAX_POLL_STEPS, Actors, AgentSpec, match_agents
from tidemill.workers.parameter_refresh import PULL_TICKS

EDGE = "samples/s/actor-0/0"


def spec(**changes: Any) -> AgentSpec:
    steps = (
        {"sample_steps": 4} if changes.get("mode", "fixed") == "fixed" and changes.get("samples", "s") else {}
    )
    return AgentSpec(**{"policy": "p", "samples": "s", **steps, **changes})


def world_of(
    environment: Marked | None = None,
    agents: tuple[AgentSpec, ...] | None = None,
    remote: bool = False,
    **actors: Any,
) -> World:
    environment = environment or Marked(shortest=3, longest=9)
    return World(
        Actors(
            environment=environment,
            agents=agents or (spec(inference="ask-p" if remote else "inline"),),
            **{"slots": 2 if agents is None else 1, **actors},
        ),
        remote=remote,
    )


def play(world: World, until: Callable[[], bool], most: int = 300) -> None:
    for _ in range(most):
        world.poll()
        world.drain()
        if until():
            return
    raise AssertionError(f"not so after {most} polls")


def test_what_an_actor_has_stepped_is_told_within_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """With slow environments a poll of many ticks takes seconds."""
    monkeypatch.setattr("tidemill.workers.actor.HEARTBEAT", -1.0)  # with each tick
    monkeypatch.setattr("tidemill.workers.base.HEARTBEAT", 3600.0)
    world = world_of(lanes=2, slots=4)
    world.begin()
    for _ in range(3):
        world.sent()
        steps = world.actor.order.steps
        world.actor.run_once()
        world.drain()
        beats = [m.time for m in world.sent() if isinstance(m, WorkerStatistics)]
        told = [round(beat["samples_per_second"] * beat["seconds"]) for beat in beats]
        assert len(told) > 3 and sum(told) == world.actor.order.steps - steps > 0
        assert max(told) <= 2  # of one tick


# ---- the ring --------------------------------------------------------------------------


@pytest.mark.parametrize("remote", [False, True])
def test_a_target_that_is_not_ready_holds_up_no_other(remote: bool) -> None:
    world = world_of(lanes=2, ring=3, slots=1, remote=remote)
    world.begin()
    slow = Marked.built[1]
    slow.stalled = True
    play(
        world,
        lambda: (
            len(world.got.get("samples/s/actor-0/0", ())) >= 4
            and len(world.got.get("samples/s/actor-0/2", ())) >= 4
        ),
    )
    assert (slow.sends, slow.receipts) == (1, 0)
    assert "samples/s/actor-0/1" not in world.got
    slow.stalled = False
    play(world, lambda: len(world.got.get("samples/s/actor-0/1", ())) >= 2)
    assert check_samples(world)


def test_targets_take_turns() -> None:
    world = world_of(lanes=1, ring=4, slots=4)
    world.begin()
    for _ in range(20):
        world.poll()
        world.drain()
        receipts = [env.receipts for env in Marked.built]
        assert max(receipts) - min(receipts) <= 1


def test_a_poll_does_at_most_so_many_steps_at_a_target() -> None:
    world = world_of(lanes=1, slots=1000)
    world.begin()
    assert world.actor._poll().batch_count == MAX_POLL_STEPS


def test_a_plain_environment_is_stepped_and_received_in_one_poll() -> None:
    """Or the worker would go to sleep in between, with nobody to wake it."""
    world = world_of(lanes=2, remote=True)
    world.begin()
    for tick in range(1, 6):
        assert world.actor._poll().batch_count == 1
        assert world.actor._poll().batch_count == 0  # waits for the answer
        assert Marked.built[0].receipts == tick
        assert world.servers[0]._poll().batch_count == 1


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("flush", [1, 2, 3, 7, 100])
def test_a_ring_smaller_than_its_flush_goes_on(flush: int, remote: bool) -> None:
    world = world_of(lanes=2, ring=2, flush_requests=flush, remote=remote)
    world.begin()
    for _ in range(20):
        assert world.poll() + world.poll() > 0
        world.drain()
    assert check_samples(world)


def test_requests_are_joined_until_there_are_enough() -> None:
    world = world_of(lanes=1, ring=4, flush_requests=4)
    world.begin()
    sizes: list[int] = []
    (policy,) = Known.built
    act = policy.act
    policy.act = lambda o, s, d, out: (sizes.append(len(o["obs"])), act(o, s, d, out))  # type: ignore[method-assign]
    world.actor._poll()
    assert sizes[0] == 4


# ---- parameters ------------------------------------------------------------------------


def versions_by_episode(world: World) -> dict[tuple[int, int], list[int]]:
    asked: dict[tuple[int, int], list[int]] = {}
    for policy in Known.built:
        for identity, versions in policy.asked.items():
            asked.setdefault((identity[0], identity[2]), []).extend(versions)
    return asked


def test_one_lane_takes_parameters_before_each_reset() -> None:
    """One version per episode, the newest at its reset, though samples end in the
    middle."""
    world = world_of(Marked(shortest=6, longest=6), lanes=1, slots=1)
    world.begin()
    newest: dict[int, int] = {}
    inner = Marked.built[0].inner
    send = inner.send

    def watched(actions: Any, reset: Any) -> None:
        send(actions, reset)
        newest.setdefault(int(inner._episode[0, 0]), world.version)

    inner.send = watched  # type: ignore[method-assign]
    for _ in range(60):
        world.poll()
        world.publish()
        world.drain()
    asked = versions_by_episode(world)
    assert len(asked) > 20 and len({min(versions) for versions in asked.values()}) > 20
    for (_, episode), versions in asked.items():
        assert {*versions} == {newest[episode]}


def test_many_lanes_take_parameters_at_sample_boundaries() -> None:
    world = world_of(lanes=3, slots=1)
    world.begin()
    for _ in range(40):
        world.poll()
        world.publish()
        world.drain()
    stamps = [sample["version"] for sample in world.got[EDGE]]
    assert len(stamps) == 40
    for number, stamp in enumerate(stamps):
        # The first row was answered before the boundary; all others are of the newest
        # version, though it came while the actor was held back.
        assert {*stamp[1:][stamp[1:] >= 0].tolist()} == {number}
        assert {*stamp[0].tolist()} <= {-1, number - 1, 0}


def pulled(world: World, ticks: int) -> bool:
    """True when a version that is published after the first rows is taken within so many
    ticks without a boundary."""
    world.begin()
    world.poll()
    world.publish()
    play(world, lambda: world.actor.order.ticks > ticks + MAX_POLL_STEPS)
    return Known.built[0].version == 1


def test_an_actor_without_boundaries_pulls_all_the_same() -> None:
    assert pulled(world_of(Marked(shortest=10**6, longest=10**6), (spec(samples=None),), lanes=2), PULL_TICKS)


def test_the_timed_pull_leaves_the_episode_of_a_single_lane_alone() -> None:
    world = world_of(Marked(shortest=3 * PULL_TICKS, longest=3 * PULL_TICKS), lanes=1)
    world.begin()
    while world.actor.order.ticks < 12 * PULL_TICKS:
        world.poll()
        world.publish()
        world.drain()
    asked = versions_by_episode(world)
    assert len(asked) >= 4
    assert [len({*versions}) for versions in asked.values()] == [1] * len(asked)


def test_the_timed_pull_takes_single_lanes_whose_samples_are_dropped_when_they_lag() -> None:
    long = Marked(shortest=10**6, longest=10**6)
    assert pulled(World(Actors(environment=long, agents=(spec(),), lanes=1), bounded=("s",)), PULL_TICKS)
    assert not pulled(World(Actors(environment=long, agents=(spec(),), lanes=1)), 4 * PULL_TICKS)


def test_a_single_lane_whose_episode_may_never_end_takes_parameters_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parameter_refresh, "ENDLESS_TICKS", 4 * PULL_TICKS)
    endless = Marked(shortest=10**6, longest=10**6, promises=False)
    assert not pulled(world_of(endless, lanes=1), 2 * PULL_TICKS)
    assert pulled(world_of(endless, lanes=1), 5 * PULL_TICKS)


def test_parameters_are_there_before_the_first_row() -> None:
    world = world_of(lanes=2)
    world.begin()
    world.poll()
    assert min(v for versions in Known.built[0].asked.values() for v in versions) == 0


# ---- held back -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment",
    [Marked(), Marked(same_step=True), Marked(agents=3, turns=3)],
    ids=["in step", "same step", "by index"],
)
@pytest.mark.parametrize("remote", [False, True])
def test_a_consumer_that_keeps_everything_stops_the_actor_and_nothing_is_lost(
    environment: Marked, remote: bool
) -> None:
    world = world_of(environment, lanes=2, slots=2, remote=remote)
    world.begin()
    for _ in range(200):
        world.poll()
    taken = []
    consumer = world.consumers[EDGE]
    while (views := consumer.take()) is not None:
        taken.append({n: a.copy() for n, a in views.items()})
    assert len(taken) == 2
    counts = (
        Marked.built[0].sends,
        Marked.built[0].receipts,
        sum(len(v) for v in Known.built[0].asked.values()),
    )
    for _ in range(20):
        result = world.actor._poll()
        assert (result.sample_count, result.batch_count) == (0, 0)  # so that the worker sleeps
    assert counts == (
        Marked.built[0].sends,
        Marked.built[0].receipts,
        sum(len(v) for v in Known.built[0].asked.values()),
    )
    world.got[EDGE] = taken
    for _ in taken:
        consumer.release()
    play(world, lambda: len(world.got[EDGE]) > 8)
    assert check_samples(world)


@pytest.mark.parametrize("remote", [False, True])
def test_a_sample_is_sent_when_its_last_row_is_answered(remote: bool) -> None:
    world = world_of(Marked(shortest=50, longest=50), lanes=2, remote=remote)
    world.begin()
    consumer = world.consumers[EDGE]
    if not remote:
        world.actor._poll()
        assert consumer.waiting() == 2  # of 5 rows each, then held back
        return
    for row in range(5):
        world.actor._poll()
        assert Marked.built[0].receipts == row + 1
        assert consumer.waiting() == 0  # row 4 is there, its answer is not
        world.servers[0]._poll()
    Marked.built[0].stalled = True
    world.actor._poll()
    assert consumer.waiting() == 1  # and the reward of its last row is not waited for
    assert Marked.built[0].receipts == 5


# ---- specs -----------------------------------------------------------------------------


def agents(*names: str, wide: tuple[str, ...] = ()) -> list[AgentInfo]:
    return [
        AgentInfo(name, Spaces(Box((3 if name in wide else 2,), "float32"), Discrete(2))) for name in names
    ]


def test_the_first_spec_that_matches_wins_by_name_or_index() -> None:
    some = agents("red_0", "red_1", "blue_0", "green")
    assert match_agents(some, [spec(match="red_1"), spec(match="red.*|2"), spec()]) == [[1], [0, 2], [3]]
    assert match_agents(some, [spec(match=r"\d")]) == [[0, 1, 2, 3]]
    with pytest.raises(ConfigError, match=r'no agent spec .* matches agent 0 "red_0"'):
        match_agents(some, [spec(match="red")])  # the whole name must match


@pytest.mark.parametrize(
    ("specs", "wide", "message"),
    [
        ([spec(match="red.*")], (), 'matches agent 2 "blue_0"'),
        (
            [spec(), spec(match="blue.*")],
            (),
            'agent spec "blue.*" matches no agent that an earlier spec left; ".*" stands before it',
        ),
        (
            [spec(match="rde_0"), spec()],
            (),
            'agent spec "rde_0" matches no agent that an earlier spec left; did you mean "red_0"?',
        ),
        ([spec()], ("blue_0",), 'agents "red_0" and "blue_0" have different spaces'),
    ],
)
def test_specs_that_do_not_fit_are_refused_by_name(
    specs: list[AgentSpec], wide: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        match_agents(agents("red_0", "red_1", "blue_0", wide=wide), specs)
    assert message in str(caught.value)


def test_settings_that_cannot_be_are_refused() -> None:
    for changes in ({"match": "("}, {"sample_steps": 0}, {"bootstrap": 0}, {"burn_in": -1}):
        with pytest.raises(ConfigError):
            spec(**changes)
    for changes in (
        {"lanes": 0},
        {"ring": 0},
        {"max_episode_steps": -1},
        {"flush_requests": 0},
        {"slots": 0},
        {"agents": ()},
    ):
        with pytest.raises(ConfigError):
            Actors(**{"environment": Marked(), **changes})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="two agent specs use one sample stream"):
        Actors(environment=Marked(), agents=(spec(match="a"), spec(match="b")))


def test_one_policy_for_different_spaces_is_refused() -> None:
    two = spec(match="red.*"), spec(match="blue.*", samples="t")
    with pytest.raises(ConfigError, match='play policy "p", but their agents have different spaces'):
        world_of(Marked(agents=2, kinds=2), two).begin()


@dataclass(frozen=True, kw_only=True)
class SelfResetting(Marked):
    def build(self, lanes: int, seed: int, render: bool = False) -> Any:
        environment = ScriptedEnvironment(self, lanes)
        environment.resets_any = False
        return environment


def test_a_limit_needs_an_environment_that_can_be_cut() -> None:
    with pytest.raises(ConfigError, match="set the limit in the environment"):
        world_of(SelfResetting(), max_episode_steps=5).begin()


def test_two_specs_share_one_policy_and_one_batch() -> None:
    two = spec(match="red_0"), spec(match="red_1", samples="t", sample_steps=3, burn_in=1)
    world = world_of(Marked(agents=2, deaths=True), two, lanes=2, ring=2, flush_requests=4)
    facts = world.begin()
    assert {name: (f.seats_per_lane, f.burn_in, f.bootstrap) for name, f in facts.samples.items()} == {
        "s": (1, 0, 1),
        "t": (1, 1, 1),
    }
    play(world, lambda: len(world.got) == 4 and min(map(len, world.got.values())) >= 3)
    assert len(Known.built) == 1
    assert {int(s["obs"][-1, :, 0].max()) // OFFSET for samples in world.got.values() for s in samples} == {
        0,
        1,
    }
    assert np.unique([s["obs"][-1, :, 1].max() for s in world.got["samples/t/actor-0/0"]]).tolist() == [1]
    assert check_samples(world)


# ---- memory ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fat(Marked):
    """Each lane takes 100 kB."""

    def build(self, lanes: int, seed: int, render: bool = False) -> Any:
        assert lanes < 100_000, "all lanes are built, though they cannot fit"
        environment = super().build(lanes, seed, render)
        environment.fat = np.ones((lanes, 100_000), np.int8)  # type: ignore[attr-defined]
        return environment


def test_rows_that_cannot_fit_are_refused_with_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_limits, "available", lambda: 1_000_000)
    world_of(lanes=4, ring=2).begin()
    with pytest.raises(
        ConfigError,
        match=r"(?s)MB of memory, and 1\.0 MB are available; make sample_steps.*samples: .* = 2 x 3 slots x "
        r"50,001 rows x 4 ",
    ):
        world_of(agents=(spec(sample_steps=50_000),), lanes=4, slots=3, count=2).begin()


def test_what_an_actor_says_of_its_slots_is_what_it_offers() -> None:
    world = world_of(lanes=4, ring=2, slots=3, remote=True)
    told = {need.what: need.nbytes for need in world.begin().memory}
    for _ in range(4):
        world.poll()
        world.drain()
    offered = [
        sum(a.nbytes for a in slot.values())
        for c in world.consumers.values()
        if c.attach()
        for slot in c._views  # type: ignore[attr-defined]
    ]
    assert len(offered) == 6
    assert sum(offered) <= told["samples"] < sum(offered) + 6 * 64 * len(world.consumers[EDGE].schema)


BUILT: list[int] = []


class Few(Marked):
    """11 lanes at a time, say all of its environments."""

    def build(self, lanes: int, seed: int, render: bool = False) -> Any:
        BUILT.append(lanes)
        environment = super().build(lanes, seed, render)
        environment.most_lanes = 11
        return environment


def test_more_lanes_than_there_can_be_at_a_time_are_refused_with_the_sum() -> None:
    world_of(Few(), lanes=5, ring=2).begin()
    for wrapped in (spec(), spec(frame_stack=2)):
        with pytest.raises(
            ConfigError,
            match=r"12 lanes .* \(actor: count 2 x ring 2 x 3 lanes\).* can be 11.*--max-sessions 12",
        ):
            world_of(Few(), agents=(wrapped,), lanes=3, ring=2, count=2).begin()
    BUILT.clear()
    with pytest.raises(ConfigError, match="1,000 lanes"):
        world_of(Few(), lanes=1, ring=1000).begin()
    assert BUILT == [1]


def test_a_hundred_million_lanes_are_refused_before_they_are_built() -> None:
    with pytest.raises(ConfigError, match=r"samples: [\d,.]+ GB = 2 slots x 5 rows x 100,000,000 seats x "):
        world_of(Fat(), lanes=100_000_000).begin()


def test_lanes_that_cannot_fit_are_refused_by_what_a_few_of_them_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actor_limits, "available", lambda: 20_000_000_000)
    # its share of what it shares with others grows whenever one of them ends
    monkeypatch.setattr(actor_limits, "resident_bytes", lambda: [own_bytes(os.getpid())])
    # freed at once: from then on glibc takes arrays up to this size from its heap, and
    # keeps twice as much free
    np.ones(31_000_000, np.int8)
    [np.ones(100_000, np.int8) for _ in range(140)]  # in which half of the lanes would lie
    with pytest.raises(ConfigError) as caught:
        world_of(Fat(), agents=(spec(samples=None),), lanes=300_000).begin()
    found = re.search(
        r"environments: ([\d.]+) GB = ring 1 x 300,000 lanes x ([\d,]+) bytes", str(caught.value)
    )
    assert found is not None, caught.value
    assert 90_000 < int(found[2].replace(",", "")) < 150_000
