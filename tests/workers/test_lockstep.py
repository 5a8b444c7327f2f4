"""Lockstep: all rows that a sample trains are of one version, the border row is asked for
twice, and nobody moves while its sample is out."""

from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
from tests.workers.world import LUMP, OFFSET, Known, Marked, World, answer_of, code_of

from tidemill.api.algorithm import ROW_FIELDS
from tidemill.api.edges import Port
from tidemill.api.experiment import Experiment
from tidemill.api.limits import Limits
from tidemill.api.worker import WorkerConfig
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Field
from tidemill.streams.samples import NullSampleProducer
from tidemill.testing.scripted import reward_of
from tidemill.workers.actor_config import Actors
from tidemill.workers.agent_spec import AgentSpec
from tidemill.workers.lockstep import LockstepColumns, check_lockstep, lockstep_writer
from tidemill.workers.sample_writers.base import WriterTerms
from tidemill.workers.trainer_config import Trainer

STEPS = 4


class Lockstep(World):
    """A world whose sink takes one sample of each outlet, checks it, publishes the next
    version and only then gives them back."""

    def round(self) -> list[dict[str, np.ndarray]]:
        """Poll until nobody moves any more; return copies of the samples that came, one
        of each outlet."""
        polls, until = 0, monotonic() + 120
        while (moved := self.poll()) or not all(consumer.waiting() for consumer in self.consumers.values()):
            polls += 1
            if (monotonic() > until) if self.threaded else (polls == 400):
                raise AssertionError(
                    "no sample of "
                    f"{[name for name, consumer in self.consumers.items() if not consumer.waiting()]}"
                )
            if self.threaded and not moved:
                sleep(1e-4)  # its threads have the next move
        counts = [(env.sends, env.receipts) for env in Marked.built]
        for _ in range(5):
            assert self.poll() == 0
        assert counts == [(env.sends, env.receipts) for env in Marked.built]
        assert {consumer.waiting() for consumer in self.consumers.values()} == {1}
        self.got = {}
        self.publish()
        self.drain()
        return [sample for samples in self.got.values() for sample in samples]


def lockstep_world(
    environment: Marked,
    remote: bool = False,
    threaded: bool = False,
    agents: tuple[AgentSpec, ...] = (),
    **actors: Any,
) -> Lockstep:
    spec = AgentSpec(policy="p", samples="s", sample_steps=STEPS, inference="ask-p" if remote else "inline")
    agents = agents or (spec,)
    streams = tuple(spec.streams[0] for spec in agents)
    actor = Actors(environment=environment, agents=agents, **actors)
    return Lockstep(actor, recurrent=True, remote=remote, threaded=threaded, lockstep=streams)


def trained(sample: dict[str, np.ndarray], burn_in: int) -> np.ndarray:
    mask = (sample["version"] >= 0) & ~(sample["done"] | sample["truncated"])
    mask[:burn_in] = mask[-1:] = False
    return mask


def check(sample: dict[str, np.ndarray], version: int, burn_in: int) -> np.ndarray:
    """Compare what can be told of each row that is trained. Return their identities [n,
    5], (lane, agent, episode, row, tick), in order of time."""
    mask = trained(sample, burn_in)
    assert (sample["version"][mask] == version).all()
    identity = sample["obs"][..., :5].astype(np.int64)
    own = (sample["version"] >= 0) | sample["done"]
    for column in range(own.shape[1]):
        assert len({*map(tuple, identity[:, column, :2][own[:, column]].tolist())}) <= 1  # of one seat
        over = (sample["done"] | sample["truncated"])[:, column]
        for t in (over[:-1] & own[1:, column]).nonzero()[0]:
            goes_on = identity[t, column, 2] == identity[t + 1, column, 2]
            if goes_on:  # the seat was absent at the border
                assert t <= burn_in and sample["truncated"][t, column]
            assert sample["on_reset"][t + 1, column] != goes_on
        for t in mask[:, column].nonzero()[0]:  # what it remembers comes from this version, too
            assert (
                t <= burn_in or sample["on_reset"][t, column] or sample["version"][t - 1, column] == version
            )
    acted = identity[mask].T
    answer = answer_of(acted, version, 0)
    for name in ("action", "log_prob", "value"):
        np.testing.assert_array_equal(sample[name][mask], answer[name], err_msg=name)
    lane, agent, episode, row, _ = acted
    # by the action of the answer that is stored
    reward = reward_of(lane % OFFSET, agent, episode, row, sample["action"][mask])
    # and what it was given while it was absent
    assert np.isin(sample["reward"][mask] - reward, LUMP * np.arange(4)).all()
    # as many acts as the episode has had: none is counted twice
    assert (sample["state.count"][mask] == row).all()
    code = code_of(lane, agent, episode, row - 1)
    np.testing.assert_array_equal(sample["state.code"][mask][:, 0], np.where(row == 0, 0, code))
    return identity[mask]


ENVIRONMENTS = {
    "in step": Marked(shortest=3, longest=9),
    "ends within a tick": Marked(shortest=3, longest=9, same_step=True),
    "agents die": Marked(shortest=3, longest=9, agents=3, deaths=True),
    "ends within a tick, agents die": Marked(shortest=3, longest=9, agents=3, deaths=True, same_step=True),
    "in turn": Marked(shortest=3, longest=9, agents=3, turns=3),
}


@pytest.mark.parametrize(
    ("remote", "threaded"),
    [(False, False), (True, False), (True, True)],
    ids=["inline", "policy worker", "in threads"],
)
@pytest.mark.parametrize(("ring", "slots", "burn_in"), [(1, 1, 0), (2, 2, 2)])
@pytest.mark.parametrize("environment", ENVIRONMENTS.values(), ids=ENVIRONMENTS.keys())
def test_every_trained_row_is_of_the_trainer_s_version(
    environment: Marked, remote: bool, threaded: bool, ring: int, slots: int, burn_in: int
) -> None:
    spec = AgentSpec(
        policy="p",
        samples="s",
        sample_steps=STEPS,
        burn_in=burn_in,
        inference="ask-p" if remote else "inline",
    )
    world = lockstep_world(environment, remote, threaded, (spec,), lanes=3, ring=ring, slots=slots)
    world.begin()
    seen: list[np.ndarray] = []
    try:
        for version in range(12):
            samples = world.round()
            assert len(samples) == ring
            seen += [check(sample, version, burn_in) for sample in samples]
    finally:
        for server in world.servers:
            server._close()
    # Whatever acted is in one sample, and in the order of time; but for agents in turn,
    # whose last row an older version has acted on.
    seats: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for identity in np.concatenate(seen).tolist():
        seats.setdefault(tuple(identity[:2]), []).append(tuple(identity[2:4]))
    assert len(seats) == 3 * ring * environment.agents
    for seat, rows in seats.items():
        assert rows == sorted(rows) and len({*rows}) == len(rows), seat
        whole = [
            (episode, row)
            for episode in range(rows[-1][0])
            for row in range(_actions(environment, *seat, episode))
        ]
        missing = len(whole) - sum(episode < rows[-1][0] for episode, _ in rows)
        assert missing == 0 if environment.turns == 1 else missing <= 12, seat


def _actions(environment: Marked, lane: int, agent: int, episode: int) -> int:
    lane %= OFFSET
    end = min(int(environment.length(lane, episode)), int(environment.death(lane, agent, episode)))
    return sum(tick % environment.turns == agent % environment.turns for tick in range(end))


@pytest.mark.parametrize("environment", ENVIRONMENTS.values(), ids=ENVIRONMENTS.keys())
def test_samples_of_a_single_step(environment: Marked) -> None:
    """A seat that ends and begins within a tick has more rows of it than a sample has."""
    world = lockstep_world(environment, agents=(AgentSpec(policy="p", samples="s", sample_steps=1),), lanes=3)
    world.begin()
    # of seats in turn one has both of its rows
    assert sum(len(check(sample, version, 0)) for version in range(60) for sample in world.round()) > 20


@pytest.mark.parametrize(
    "environment", [ENVIRONMENTS["in step"], ENVIRONMENTS["in turn"]], ids=["in step", "in turn"]
)
def test_who_is_not_in_lockstep_is_waited_for_only_when_it_has_no_room(environment: Marked) -> None:
    spec = AgentSpec(policy="p", samples=("s", "t"), sample_steps=STEPS)  # s is in lockstep, t is not
    world = lockstep_world(environment, agents=(spec,), lanes=2, slots=2)
    world.begin()
    awaited, other = (world.consumers[f"samples/{stream}/actor-0/0"] for stream in ("s", "t"))

    def sent() -> list[int]:
        while world.poll():
            pass
        return [awaited.waiting(), other.waiting()]

    for version in range(2):
        assert sent() == [1, version + 1]
        sample = awaited.take()
        assert sample is not None
        check(sample, version, 0)
        world.publish()
        awaited.release()
    assert sent() == [0, 2]  # all of its slots
    for version in range(2):  # what it gets late is what the other one got
        late = other.take()
        assert late is not None
        check(late, version, 0)
        other.release()
    assert sent() == [1, 1]
    sample = awaited.take()
    assert sample is not None
    check(sample, 2, 0)


def test_the_border_row_s_first_value_closes_the_sample_and_its_second_action_opens_the_next() -> None:
    world = lockstep_world(Marked(shortest=100, longest=100), lanes=2)
    world.begin()
    before = None
    for version in range(5):
        (sample,) = world.round()
        assert (sample["version"] == version).all()
        if before is not None:
            np.testing.assert_array_equal(sample["obs"][0], before["obs"][-1])
            assert (sample["value"][0] != before["value"][-1]).all() and (
                sample["action"][0] != before["action"][-1]
            ).any()
        before = sample
    asked = [versions for policy in Known.built for versions in policy.asked.values()]
    assert sorted({len(versions) for versions in asked}) == [1, 2]
    assert all(versions[1] == versions[0] + 1 for versions in asked if len(versions) == 2)


@pytest.mark.parametrize(
    "environment",
    [
        Marked(agents=2, kinds=2, shortest=3, longest=9),
        Marked(agents=4, kinds=2, turns=4, shortest=4, longest=9),
    ],
)
def test_two_policies_never_wait_for_each_other(environment: Marked) -> None:
    """Each target's agents send at once, so that no target holds what another one's
    trainer waits for."""
    specs = tuple(
        AgentSpec(match=f"{kind}_.*", policy=kind, samples=kind, sample_steps=STEPS)
        for kind in ("red", "blue")
    )
    world = lockstep_world(environment, agents=specs, lanes=2, ring=3)
    world.begin()
    for version in range(10):
        samples = world.round()
        assert len(samples) == 6
        for sample in samples:
            check(sample, version, 0)


def test_a_seat_that_was_never_there_has_fillers_alone() -> None:
    schema = {**ROW_FIELDS, "obs": Field((), "float32")}
    spec, samples = AgentSpec(sample_steps=STEPS, burn_in=1), NullSampleProducer()
    need = spec.writer().sizes(spec, 3, 0, True, 1)
    terms = WriterTerms(spec, schema, schema, 3, need, True, samples, lambda: None)
    terms.offer(schema)
    blocks = lockstep_writer(terms)
    assert isinstance(blocks, LockstepColumns)
    # the first has the filler of its burn-in and nothing else, the last one a whole
    # sample
    blocks.position[:] = 1, 4, 6
    for seat, position in enumerate(blocks.position):
        blocks.arrays["version"][1:position, seat] = 7
        blocks.arrays["obs"][:position, seat] = np.arange(position)
    assert blocks.full()
    slot = samples.reserve()
    blocks.cut()
    assert slot["version"].T.tolist() == [[-1] * 6, [-1, 7, 7, 7, -1, -1], [-1, 7, 7, 7, 7, 7]]
    assert slot["truncated"].T.nonzero()[0].tolist() == [1] and slot["truncated"][3, 1]
    assert blocks.position.tolist() == [1, 2, 2]
    assert blocks.arrays["version"][0].tolist() == [-1, 7, 7]
    assert blocks.arrays["obs"][:2, 1:].T.tolist() == [[2, 3], [4, 5]]


def test_a_sample_without_a_successor_version_is_no_deadlock() -> None:
    """It was dropped, or had no row to train: it comes back, and no new version does."""
    world = lockstep_world(Marked(shortest=100, longest=100), lanes=2)
    world.begin()
    for _ in range(3):
        while not any(consumer.waiting() for consumer in world.consumers.values()):
            assert world.poll()
        world.drain()
    world.publish()
    assert [int(sample["version"].max()) for samples in world.got.values() for sample in samples] == [0, 0, 0]


# ---- what is refused -------------------------------------------------------------------


def experiment(
    agents: tuple[AgentSpec, ...] = (AgentSpec(),), count: int = 1, trainers: int = 1
) -> Experiment:
    from tidemill import PPO, ActorCritic

    policies = {spec.policy: ActorCritic() for spec in agents}
    workers: dict[str, Any] = {
        "actor": Actors(environment=Marked(agents=len(agents)), agents=agents, count=count)
    }
    for i, spec in enumerate(agents):
        workers[f"trainer{i}"] = Trainer(
            algorithm=PPO(), policy=spec.policy, samples=spec.streams[0], max_policy_lag=0, count=trainers
        )
    return Experiment(name="x", policies=policies, workers=workers, limits=Limits(updates=1))


def test_what_cannot_go_in_lockstep_is_refused() -> None:
    from tidemill import PPO

    with pytest.raises(
        ConfigError, match=r"batch_size = 64, but max_policy_lag = 0 trains on one sample of each producer"
    ):
        Trainer(algorithm=PPO(), max_policy_lag=0, batch_size=64)
    with pytest.raises(
        ConfigError, match=r"trainer0-0, trainer0-1 have max_policy_lag = 0, .* only actor-0 produces"
    ):
        experiment(trainers=2).check()
    experiment(count=2, trainers=2).check()
    for spec, message in (
        (AgentSpec(bootstrap=2), 'mode = "fixed" and bootstrap = 2, but its trainer has max_policy_lag = 0'),
        (AgentSpec(mode="full"), 'mode = "full" and bootstrap = 1'),
    ):
        made = experiment((spec,))
        with pytest.raises(ConfigError, match=message):
            check_lockstep(made, made.workers["actor"])  # type: ignore[arg-type]
    made = experiment(
        (
            AgentSpec(match="0", samples="a", policy="a"),
            AgentSpec(match="1", samples="b", policy="b", sample_steps=64),
        )
    )
    with pytest.raises(ConfigError, match="have sample_steps = 256 and 64"):
        check_lockstep(made, made.workers["actor"])  # type: ignore[arg-type]
    made = experiment(
        (AgentSpec(match="0", samples="a", policy="a"), AgentSpec(match="1", samples="b", policy="b"))
    )
    swapped = {
        name: made.workers[name].replace(samples=stream)
        for name, stream in (("trainer0", "b"), ("trainer1", "a"))
    }
    made = made.replace(workers={**made.workers, **swapped})
    with pytest.raises(
        ConfigError,
        match='spec "0" plays policy "a", but trainer1-0, which gets its samples, trains "b" with '
        "max_policy_lag = 0",
    ):
        check_lockstep(made, made.workers["actor"])  # type: ignore[arg-type]
    alone = Experiment(
        name="x",
        policies=made.policies,
        workers={"trainer": Trainer(algorithm=PPO(), max_policy_lag=0, policy="a"), "source": Source()},
    )
    with pytest.raises(
        ConfigError,
        match=r"trainer-0 has max_policy_lag = 0, which needs producers that wait for it, and source-0, .* "
        r'"samples"',
    ):
        alone.check()


@dataclass(frozen=True, kw_only=True)
class Source(WorkerConfig):
    """Sends samples, and waits for nobody."""

    def ports(self) -> tuple[Port, ...]:
        return (Port("samples", "produce"),)
