"""The rows: every cell of every committed sample against a slow reference, per seat."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.workers.world import Ahead, Known, Marked, World, check_samples

from tidemill.api.control_messages import Episodes
from tidemill.workers.actor import Actors, AgentSpec
from tidemill.workers.sample_writers.fixed import AlignedBlock


def specs_of(
    kinds: int,
    remote: bool,
    others: dict[str, Any] | None = None,
    shared: bool = False,
    **settings_of_both: Any,
) -> tuple[AgentSpec, ...]:
    """`others` is changed for the second spec. `shared`: both ask one inference
    stream."""
    inference = {"inference": "ask-p"} if remote else {}
    first = AgentSpec(match="red.*", policy="p", **inference, **{"samples": "red", **settings_of_both})
    if kinds == 1:
        return (first,)
    inference = {"inference": "ask-p" if shared else "ask-q"} if remote else {}
    second = {"samples": "blue", **settings_of_both, "sample_steps": 4} if others is None else others
    return first, AgentSpec(match="blue.*", policy="q", **inference, **second)


@st.composite
def settings_of_a_spec(draw, stream: str, promised: bool) -> dict[str, Any]:
    """Whatever can be said of samples."""
    mode = draw(
        st.sampled_from(
            ["fixed", "fixed", "after_done", "full", "concise"] if promised else ["fixed", "concise"]
        )
    )
    given: dict[str, Any] = {
        "mode": mode,
        "samples": draw(st.sampled_from([stream, (stream, f"{stream}-too")])),
    }
    given["frame_stack"] = draw(st.sampled_from([1, 1, 2, 3]))
    if mode in ("fixed", "after_done"):
        given |= {
            "sample_steps": draw(st.integers(1, 7)),
            "bootstrap": draw(st.integers(1, 2)),
            "burn_in": draw(st.integers(0, 3)),
        }
    if mode in ("after_done", "full"):
        given["post"] = (Ahead(),) if draw(st.booleans()) else ()
    if mode in ("full", "concise"):
        given["deterministic"] = draw(st.booleans())
    if mode == "full":
        given["padded"] = draw(st.booleans())
    return given


@st.composite
def worlds(draw) -> World:
    remote, kinds = draw(st.booleans()), draw(st.sampled_from([1, 1, 2]))
    agents = draw(st.integers(kinds, 3))
    same_step = draw(st.booleans())
    turns = 1 if same_step else draw(st.sampled_from([1, 1, 2, 3]))
    shortest = draw(st.integers(turns, 5))
    promises = draw(st.booleans())
    environment = Marked(
        agents=agents,
        kinds=kinds,
        shortest=shortest,
        longest=shortest + draw(st.integers(0, 7)),
        truncations=draw(st.booleans()),
        deaths=draw(st.booleans()),
        turns=turns,
        same_step=same_step,
        stalls=draw(st.integers(0, 2)),
        promises=promises,
    )
    limit = draw(st.sampled_from([0, 0, turns, 4, 6]))
    red, blue = (draw(settings_of_a_spec(stream, promises or limit > 0)) for stream in ("red", "blue"))
    if draw(st.sampled_from([False, False, True])):
        blue = {"samples": None, "frame_stack": blue["frame_stack"], "deterministic": draw(st.booleans())}
    ring = draw(st.integers(1, 2))
    actors = Actors(
        environment=environment,
        agents=specs_of(kinds, remote, blue, draw(st.booleans()), **red),
        lanes=draw(st.integers(1, 4)),
        ring=ring,
        max_episode_steps=max(limit, turns) if limit else 0,
        flush_requests=draw(st.integers(1, 5)) if ring * kinds > 1 else 1,
        slots=draw(st.integers(1, 3)),
    )
    return World(actors, recurrent=draw(st.booleans()), remote=remote)


@given(
    worlds(), st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=8, max_size=24), st.booleans()
)
@settings(max_examples=70, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_each_cell_of_each_sample_is_what_it_must_be(
    world: World, plan: list[tuple[int, bool]], by_index: bool
) -> None:
    play_and_check(world, plan, by_index)


def test_a_seat_that_was_asked_may_be_in_no_sample_yet() -> None:
    environment = Marked(agents=2, shortest=3, longest=6, deaths=True, stalls=2)
    world = World(
        Actors(
            environment=environment, agents=specs_of(1, False, sample_steps=1, bootstrap=2), lanes=2, slots=1
        )
    )
    play_and_check(world, [(0, False)] * 8, by_index=False)
    assert len({identity[:2] for identity in Known.built[0].asked}) > len(streams_of(world))


def play_and_check(world: World, plan: list[tuple[int, bool]], by_index: bool) -> None:
    world.begin()
    if by_index:
        force_index(world)
    for polls, publish in plan:
        for _ in range(polls + 1):
            world.poll()
        if publish:
            world.publish()
        world.drain()
    rounds = 0
    while not all(len(world.got.get(edge, ())) >= 3 for edge in world.consumers):
        world.poll()
        world.drain()
        rounds += 1
        assert rounds < 600, "the samples stay away"
    assert check_samples(world)


def force_index(world: World) -> None:
    for _, agent in world.actor.order.agents:
        if isinstance(agent.writer, AlignedBlock):
            agent.writer = agent.writer.by_index()


def streams_of(world: World) -> dict[tuple[int, int], list[dict[str, np.ndarray]]]:
    """Each seat's samples."""
    streams: dict[tuple[int, int], list[dict[str, np.ndarray]]] = {}
    for samples in world.got.values():
        for sample in samples:
            for column in range(sample["done"].shape[1]):
                cells = {name: array[:, column] for name, array in sample.items()}
                streams.setdefault((int(cells["obs"][-1][0]), int(cells["obs"][-1][1])), []).append(cells)
    return streams


@pytest.mark.parametrize("recurrent", [False, True])
def test_both_paths_write_the_same_rows(recurrent: bool) -> None:
    streams = []
    for by_index in (False, True):
        agents = specs_of(2, False, sample_steps=5, burn_in=2)
        world = World(
            Actors(environment=Marked(agents=2, kinds=2, shortest=2, longest=9), agents=agents, lanes=3),
            recurrent=recurrent,
        )
        world.begin()
        if by_index:
            force_index(world)
        while len(world.got.get("samples/red/actor-0/0", ())) < 8:
            world.poll()
            world.drain()
        # A lane's agents end together, but not all lanes: an environment for both.
        streams.append(streams_of(world))
    assert {*streams[0]} == {*streams[1]}
    for key, samples in streams[0].items():
        assert abs(len(samples) - len(streams[1][key])) <= 1
        for one, other in zip(samples, streams[1][key], strict=False):
            for name in one:
                np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_seats_in_step_keep_their_columns() -> None:
    world = World(Actors(environment=Marked(), agents=specs_of(1, False, sample_steps=4), lanes=5))
    world.begin()
    while not world.got:
        world.poll()
        world.drain()
    (sample,) = world.got["samples/red/actor-0/0"][:1]
    assert (sample["obs"][:, :, 0] == np.arange(5)).all()


def run(environment: Marked, samples: int = 12, **actors: Any) -> dict[str, np.ndarray]:
    """One lane's rows in order, without the overlap."""
    world = World(
        Actors(
            environment=environment, agents=specs_of(1, False, sample_steps=4, bootstrap=1), lanes=1, **actors
        )
    )
    world.begin()
    while len(world.got.get("samples/red/actor-0/0", ())) < samples:
        world.poll()
        world.drain()
    check_samples(world)
    got = world.got["samples/red/actor-0/0"]
    return {name: np.concatenate([s[name][:-1, 0] for s in got]) for name in got[0]}


def test_an_episode_of_T_actions_has_T_plus_1_rows() -> None:
    environment = Marked(shortest=3, longest=3, truncations=False)
    rows = run(environment)
    assert rows["on_reset"].nonzero()[0].tolist() == list(range(0, len(rows["done"]), 4))
    assert rows["done"].nonzero()[0].tolist() == list(range(3, len(rows["done"]), 4))
    assert rows["info_mask"].nonzero()[0].tolist() == list(range(2, len(rows["done"]), 4))
    assert (rows["info.length"][rows["info_mask"]] == 3).all()
    assert (rows["version"][rows["done"]] == -1).all() and (rows["policy"][rows["done"]] == -1).all()


def test_the_step_limit_cuts_and_asks_for_the_value() -> None:
    rows = run(Marked(shortest=50, longest=50), max_episode_steps=5)
    cut = rows["truncated"]
    assert not rows["done"].any()
    assert cut.nonzero()[0].tolist() == list(range(5, len(cut), 6))
    assert (
        (rows["version"][cut] == 0).all()
        and (rows["value"][cut] != 0).all()
        and (rows["reward"][cut] == 0).all()
    )


@pytest.mark.parametrize("mode", ["fixed", "after_done", "full", "concise"])
def test_a_cut_closes_the_open_row_of_an_agent_that_is_absent(mode: Any) -> None:
    environment = Marked(agents=2, turns=2, shortest=50, longest=50)
    world = World(
        Actors(
            environment=environment,
            agents=specs_of(
                1, False, mode=mode, **({"sample_steps": 2} if mode in ("fixed", "after_done") else {})
            ),
            lanes=1,
            max_episode_steps=5,
        )
    )
    world.begin()
    while len(world.got.get("samples/red/actor-0/0", ())) < 6:
        world.poll()
        world.drain()
    seats = check_samples(world)
    # Agent 0 acts at ticks 0, 2 and 4 and is away at 5, when the lane is cut.
    episode = seats[0, 0].episodes[0]
    assert [row["obs"][-1][-1] for row in episode] == [0, 2, 4, 4]
    assert [row["truncated"] for row in episode] == [False, False, False, True]
    assert episode[-1]["version"] == 0 and episode[2]["info_mask"]


@pytest.mark.parametrize("same_step", [False, True])
def test_the_step_limit_counts_each_episode_anew(same_step: bool) -> None:
    rows = run(Marked(shortest=3, longest=3, truncations=False, same_step=same_step), max_episode_steps=4)
    assert not rows["truncated"].any()
    assert (rows["info.length"][rows["info_mask"]] == 3).all()


@pytest.mark.parametrize("how", ["unmask_all_info", "reset"])
def test_a_cut_is_forced_from_outside_too(how: str) -> None:
    """By a reset, too, that meets open episodes."""
    world = World(
        Actors(
            environment=Marked(shortest=1000, longest=1000),
            agents=specs_of(1, False, sample_steps=6),
            lanes=2,
            slots=20,
        )
    )
    world.begin()
    (target,) = world.actor.order.targets
    forced = 0
    while len(world.got.get("samples/red/actor-0/0", ())) < 8:
        if world.got and not forced:
            assert target.ready_to_step() and not target.all_done()
            getattr(target, how)()
            forced = 1
        world.poll()
        world.drain()
    cut = np.concatenate([s["truncated"][:-1] for s in world.got["samples/red/actor-0/0"]])
    mask = np.concatenate([s["info_mask"][:-1] for s in world.got["samples/red/actor-0/0"]])
    assert cut.sum(0).tolist() == [1, 1] and mask.sum(0).tolist() == [1, 1]
    assert (mask[:-1] == cut[1:]).all()


def test_episodes_are_told_once_each() -> None:
    world = World(
        Actors(environment=Marked(agents=2, deaths=True), agents=specs_of(1, False, sample_steps=4), lanes=3)
    )
    world.begin()
    for _ in range(30):
        world.poll()
        world.drain()
    told = [
        pair
        for m in world.sent()
        if isinstance(m, Episodes)
        for pair in zip(m.returns, m.lengths, strict=True)
    ]
    seats = check_samples(world)
    shown = [
        (float(r), int(n))
        for s in world.got["samples/red/actor-0/0"]
        for r, n, mask in zip(
            s["info.return"][:-1].flat, s["info.length"][:-1].flat, s["info_mask"][:-1].flat, strict=True
        )
        if mask
    ]
    assert len(shown) > 10
    assert not Counter(shown) - Counter(told)
    expected = Counter(pair for seat in seats.values() for pair in seat.told)
    assert not Counter(told) - expected
    # those that the reference played beyond the run
    assert (expected - Counter(told)).total() <= 2 * len(seats)


@given(st.integers(1, 3), st.integers(2, 3), st.booleans())
@settings(max_examples=8)
def test_env_steps_count_lanes_that_stepped(lanes: int, ring: int, same_step: bool) -> None:
    assume(lanes * ring <= 6)
    environment = Marked(shortest=3, longest=3, truncations=False, same_step=same_step)
    world = World(
        Actors(environment=environment, agents=specs_of(1, False, sample_steps=4), lanes=lanes, ring=ring)
    )
    world.begin()
    steps = 0
    for _ in range(10):
        steps += world.actor._poll().sample_count
        world.drain()
    ticks = [env.receipts for env in Marked.built]
    per = 3 if same_step else 4
    expected = sum(lanes * (t - (1 if same_step else -(-t // per))) for t in ticks)
    assert steps == expected
