"""What an agent spec can say about its samples, beyond the cells of their rows (those:
test_rows)."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.workers.world import Ahead, Marked, World, check_samples

from tidemill.algorithms.post_processors import GAE, Returns
from tidemill.api.algorithm import Sample
from tidemill.core.config import decode, encode
from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.streams.samples import ChannelSampleConsumer
from tidemill.workers.actor import Actors, AgentSpec
from tidemill.workers.sample_writers.base import Columns

RED = "samples/red/actor-0/0"


def spec(**changes: Any) -> AgentSpec:
    steps = (
        {"sample_steps": 4}
        if changes.get("mode", "fixed") in ("fixed", "after_done") and changes.get("samples", "red")
        else {}
    )
    return AgentSpec(**{"policy": "p", "samples": "red", **steps, **changes})


def begun(environment: Marked, *specs: AgentSpec, remote: bool = False, **actors: Any) -> World:
    world = World(Actors(environment=environment, agents=specs, **actors), remote=remote)
    world.begin()
    return world


def play(world: World, until: Callable[[], bool]) -> None:
    for _ in range(300):
        world.poll()
        world.drain()
        if until():
            return
    raise AssertionError("it does not come")


# ---- when samples are sent -------------------------------------------------------------


def test_after_done_sends_nothing_before_the_episode_is_done_and_then_all_samples_that_are_complete() -> None:
    world = begun(Marked(shortest=18, longest=18), spec(mode="after_done"), lanes=1, slots=20)
    consumer, (environment,) = world.consumers[RED], Marked.built
    waiting = []
    while environment.receipts < 45:
        world.actor._poll()
        waiting.append((environment.receipts, consumer.waiting()))
    # Episodes of 19 rows: 4 samples of 5 rows, each 4 after the one before, are complete
    # with the first, 9 (rows 0 to 36 of 38) with the second.
    assert sorted({sent for _, sent in waiting}) == [0, 4, 9]
    assert {sent for receipts, sent in waiting if receipts < 19} == {0}
    world.drain()
    assert check_samples(world)


@pytest.mark.parametrize("mode", ["full", "concise"])
def test_an_episode_is_sent_when_it_is_done_whatever_the_others_do(mode: Any) -> None:
    environment = Marked(shortest=3, longest=90)
    world = begun(environment, spec(mode=mode, inference="ask-p"), lanes=4, slots=20, remote=True)
    ends = sorted(int(environment.length(lane, 0)) for lane in range(4))
    assert ends[1] - ends[0] > 3
    consumer, (target,) = world.consumers[RED], Marked.built
    while target.receipts <= ends[0]:
        assert consumer.waiting() == 0
        world.poll()
    for _ in range(2):
        world.poll()  # the answers, with which a cut episode is complete
    assert consumer.waiting() == 1


@pytest.mark.parametrize("mode", ["after_done", "full", "concise"])
@pytest.mark.parametrize("same_step", [False, True])
def test_a_consumer_that_keeps_everything_stops_the_actor_and_nothing_is_lost(
    mode: Any, same_step: bool
) -> None:
    world = begun(Marked(agents=2, deaths=True, same_step=same_step), spec(mode=mode), lanes=2, slots=1)
    for _ in range(100):
        world.actor._poll()
    slots = world.consumers[RED].slots
    assert world.consumers[RED].waiting() == slots
    counts = Marked.built[0].sends, Marked.built[0].receipts
    result = world.actor._poll()
    assert (result.sample_count, result.batch_count) == (0, 0)
    assert counts == (Marked.built[0].sends, Marked.built[0].receipts)
    play(world, lambda: len(world.got[RED]) > 5 * slots)
    assert check_samples(world)


@pytest.mark.parametrize("mode", ["fixed", "full"])
def test_each_of_several_streams_gets_every_sample_and_each_holds_the_actor_back(mode: Any) -> None:
    world = begun(Marked(), spec(mode=mode, samples=("red", "more")), lanes=2, slots=1)
    both = [RED, "samples/more/actor-0/0"]
    for kept in both:
        for _ in range(20):  # one consumer takes, the other one does not
            world.poll()
            for name in both:
                if name != kept:
                    take(world, name)
        slots = world.consumers[kept].slots
        assert world.consumers[kept].waiting() == slots
        counts = Marked.built[0].receipts
        world.poll()
        assert counts == Marked.built[0].receipts
        world.drain()
    play(world, lambda: len(world.got[RED]) >= 8)
    assert len(world.got[both[0]]) == len(world.got[both[1]])
    for one, other in zip(*(world.got[name] for name in both), strict=True):
        rows = (
            int((one["done"] | one["truncated"])[:, 0].argmax()) + 1 if mode == "full" else len(one["done"])
        )
        for name in one:
            np.testing.assert_array_equal(one[name][:rows], other[name][:rows])
    assert check_samples(world)


def take(world: World, name: str) -> None:
    consumer = world.consumers[name]
    while (views := consumer.take()) is not None:
        world.got.setdefault(name, []).append({n: a.copy() for n, a in views.items()})
        consumer.release()


def test_a_spec_without_streams_keeps_nothing_and_plays_on() -> None:
    world = begun(
        Marked(agents=2, kinds=2),
        spec(match="red.*"),
        spec(match="blue.*", policy="q", samples=None, deterministic=True),
        lanes=2,
    )
    play(world, lambda: len(world.got.get(RED, ())) >= 6)
    assert {*world.got} == {RED}
    assert check_samples(world)


# ---- what the consumer sees ------------------------------------------------------------


def samples_of(world: World, mode: str, padded: bool = False) -> list[Sample]:
    """What a trainer gets."""
    consumer = ChannelSampleConsumer([world.consumers[RED]], 0, 1, cut=mode == "full" and not padded)
    got = []
    for _ in range(60):
        world.poll()
        while (sample := consumer.consume()) is not None:
            copy = Sample({name: array.copy() for name, array in sample.items()})
            copy.burn_in, copy.bootstrap = sample.burn_in, sample.bootstrap
            got.append(copy)
            consumer.release()
    assert len(got) > 10
    return got


def test_a_full_sample_has_its_own_rows_and_all_but_the_final_one_are_trained_on() -> None:
    world = begun(Marked(shortest=2, longest=9), spec(mode="full"), lanes=2)
    lengths = set()
    for sample in samples_of(world, "full"):
        length = int(sample["info.length"][sample["info_mask"]][0])
        assert sample["done"].shape == (length + 1, 1)
        assert sample.trained()[:, 0].tolist() == [True] * length + [False]
        assert sample.advance == length
        lengths.add(length)
    assert len(lengths) > 3


def test_padding_is_of_version_minus_one_and_neither_trained_on_nor_counted() -> None:
    world = begun(Marked(shortest=2, longest=9), spec(mode="full", padded=True), lanes=2)
    for sample in samples_of(world, "full", padded=True):
        length = int(sample["info.length"][sample["info_mask"]][0])
        assert sample["done"].shape == (10, 1)
        assert (sample["version"][length + 1 :] == -1).all() and (sample["policy"][length + 1 :] == -1).all()
        assert (sample["version"][:length] == 0).all()
        assert sample.trained()[:, 0].tolist() == [True] * length + [False] * (10 - length)
        assert sample.advance == length


def test_no_row_of_a_concise_sample_is_trained_on() -> None:
    world = begun(Marked(), spec(mode="concise"), lanes=3)
    for sample in samples_of(world, "concise"):
        assert (
            sample["info_mask"].all()
            and (sample["done"] | sample["truncated"]).all()
            and sample["on_reset"].all()
        )
        assert not sample.trained().any()


@pytest.mark.parametrize("mode", ["fixed", "after_done", "full", "concise"])
@pytest.mark.parametrize("same_step", [False, True])
def test_what_an_actor_says_of_its_slots_is_what_it_offers(mode: Any, same_step: bool) -> None:
    world = World(
        Actors(
            environment=Marked(same_step=same_step),
            agents=(spec(mode=mode, samples=("red", "more")),),
            lanes=4,
            ring=2,
            slots=3,
        )
    )
    told = {need.what: need.nbytes for need in world.begin().memory}
    play(world, lambda: len(world.got) == 4)
    slots = [slot for c in world.consumers.values() if c.attach() for slot in c._views]  # type: ignore[attr-defined]
    offered = sum(a.nbytes for slot in slots for a in slot.values())
    assert offered <= told["samples"] < offered + 64 * len(slots) * len(slots[0])
    own = (
        sum(a.nbytes for _, agent in world.actor.order.agents for a in agent.writer.arrays.values())
        if mode != "fixed" or same_step
        else 0
    )
    assert own <= told["actors' own rows"] < 2 * own + 200_000


@pytest.mark.parametrize("mode", ["fixed", "after_done", "full", "concise"])
def test_an_actor_says_how_much_of_its_own_rows_was_never_written(mode: Any) -> None:
    """What was written before memory is watched is no room to grow in."""
    world = World(
        Actors(
            environment=Marked(same_step=True), agents=(spec(mode=mode, samples=("red", "more")),), lanes=4
        )
    )
    (planned,) = [need.nbytes for need in world.begin().memory if not need.shared]
    before = world.actor._unfilled()
    ((_, agent),) = world.actor.order.agents
    first = {name: array.copy() for name, array in agent.writer.arrays.items()}  # {}: seats are in step
    play(world, lambda: len(world.got) == 2)
    after = world.actor._unfilled()
    assert planned / 2 < before <= planned and 0 <= after < before
    assert isinstance(agent.writer, Columns)
    for name, array in first.items():
        written = agent.writer._reached
        assert agent.writer.arrays[name][written:].tobytes() == array[written:].tobytes()


# ---- refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "ful"}, 'mode = "ful" is not known; did you mean "full"'),
        (
            {"deterministic": True},
            'deterministic = True with samples does not go with mode = "fixed"; take mode = "full" or '
            '"concise"',
        ),
        ({"deterministic": True, "mode": "after_done"}, "deterministic = True with samples does not go"),
        ({"padded": True}, 'padded = True does not go with mode = "fixed"; take mode = "full"'),
        ({"padded": True, "mode": "after_done"}, "padded = True does not go"),
        ({"padded": True, "mode": "concise"}, "padded = True does not go"),
        ({"post": (Ahead(),)}, 'post does not go with mode = "fixed"; take mode = "after_done" or "full"'),
        ({"post": (Ahead(),), "mode": "concise"}, "post does not go"),
        ({"post": (Ahead(), Ahead()), "mode": "full"}, "two post-processors make one field"),
        ({"burn_in": 2, "mode": "full"}, "burn_in = 2 does not go"),
        ({"bootstrap": 2, "mode": "concise"}, "bootstrap = 2 does not go"),
        ({"samples": ("red", "red")}, "a sample stream is named twice"),
        ({"frame_stack": 0}, "frame_stack = 0 must be at least 1"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec(**changes)
    assert message in str(caught.value)


def test_whatever_a_spec_says_of_samples_reaches_other_processes() -> None:
    for one in (
        spec(
            mode="full",
            samples=("red", "more"),
            padded=True,
            post=(GAE(gamma=0.9), Returns()),
            deterministic=True,
            frame_stack=4,
        ),
        spec(mode="after_done", burn_in=2, bootstrap=3),
        spec(mode="concise", samples="red"),
    ):
        assert decode(AgentSpec, json.loads(json.dumps(encode(one)))) == one


@pytest.mark.parametrize(("mode", "at_once"), [("full", 6), ("after_done", 1), ("fixed", 1)])
def test_an_actor_says_how_many_samples_it_fills_at_a_time(mode: Any, at_once: int) -> None:
    facts = World(Actors(environment=Marked(agents=2), agents=(spec(mode=mode),), lanes=3)).begin()
    assert facts.samples["red"].at_once == at_once


def test_streams_of_two_specs_that_overlap_are_refused() -> None:
    with pytest.raises(ConfigError, match="two agent specs use one sample stream"):
        Actors(
            environment=Marked(),
            agents=(spec(match="a", samples=("red", "more")), spec(match="b", samples=("blue", "more"))),
        )


@pytest.mark.parametrize(
    "changes", [{"mode": "full"}, {"mode": "full", "padded": True}, {"mode": "after_done"}]
)
def test_episodes_are_kept_only_where_their_length_is_bounded(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"no limit of its steps is known.*set Actors\.max_episode_steps"):
        begun(Marked(promises=False), spec(**changes), lanes=2)
    world = begun(
        Marked(promises=False, shortest=5, longest=50), spec(**changes), lanes=2, max_episode_steps=8
    )
    play(world, lambda: len(world.got.get(RED, ())) > 6)
    assert check_samples(world)


@pytest.mark.parametrize("mode", ["full", "after_done"])
def test_an_episode_beyond_the_limit_that_the_environment_promised_is_a_fault(mode: Any) -> None:
    world = World(Actors(environment=Marked(shortest=30, longest=30), agents=(spec(mode=mode),), lanes=2))
    build = Marked.build

    def lie(self: Marked, lanes: int, seed: int, render: bool = False) -> Any:
        environment = build(self, lanes, seed, render)
        environment.max_episode_steps = 20
        return environment

    Marked.build = lie  # type: ignore[method-assign]
    try:
        world.begin()
        with pytest.raises(
            EnvironmentFault, match=r'an episode of the agents "\.\*" goes on beyond the limit'
        ):
            play(world, lambda: False)
    finally:
        Marked.build = build  # type: ignore[method-assign]


def test_a_post_processor_that_reads_what_rows_lack_is_refused() -> None:
    class Blind(Ahead):
        reads = ("reward", "obz")

    with pytest.raises(ConfigError, match='Blind reads "obz", which its rows lack; did you mean "obs"'):
        begun(Marked(), spec(mode="full", post=(Blind(),)))


@pytest.mark.parametrize(("mode", "burn_in"), [("fixed", 0), ("fixed", 2), ("after_done", 2), ("full", 0)])
@pytest.mark.parametrize("same_step", [False, True])
def test_each_step_is_in_a_sample_or_told_to_be_in_none(mode: Any, burn_in: int, same_step: bool) -> None:
    begins = {"burn_in": burn_in} if burn_in else {}
    world = begun(Marked(same_step=same_step), spec(mode=mode, **begins), lanes=3, ring=2, slots=20)
    order, sent, told = world.actor.order, 0, set()
    for _ in range(70):
        order.serve(1)
        world.drain()
        for samples in world.got.values():
            for sample in samples:
                ends = sample["done"] | sample["truncated"]
                last = int(ends[:, 0].argmax()) + 1 if mode == "full" else len(ends) - 1
                sent += int(np.count_nonzero(~ends[burn_in:last]))
            samples.clear()
        told.add(unsent := order.unsent())
        assert sent + unsent == order.steps
    assert len(told) > 5 and sent > 100
