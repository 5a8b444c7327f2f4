"""A world in which every number is known beforehand: an environment, a policy, what joins
them, and what the rows must be."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from tidemill.api.algorithm import PostProcessor
from tidemill.api.control_messages import Facts, unpack_up
from tidemill.api.edges import Port
from tidemill.api.environment import Environment
from tidemill.api.experiment import Experiment
from tidemill.api.policy import Policy, PolicyConfig
from tidemill.api.spaces import Spaces
from tidemill.api.worker import Context, WorkerConfig
from tidemill.core.schema import Field, Schema, poison, schema_of
from tidemill.testing.scripted import Scripted, ScriptedEnvironment, reward_of
from tidemill.transports.local import LocalLink, local_endpoints
from tidemill.transports.slots import SlotEndpoints
from tidemill.workers.actor import Actors, AgentSpec, match_agents
from tidemill.workers.policy import PolicyWorkers
from tidemill.workers.sample_writers.base import Columns

OFFSET = 8  # lanes of the second target are numbered from here on
LUMP = 4.0  # reward that an absent seat is given in every tick
Identity = tuple[int, ...]  # (lane, agent, episode, row, tick)


def code_of(lane: Any, agent: Any, episode: Any, row: Any) -> Any:
    return ((lane * 4 + agent) * 16 + episode % 16) * 32 + row % 32


def answer_of(identity: Any, version: int, deterministic: Any) -> dict[str, Any]:
    """What the policy answers."""
    lane, agent, episode, row, tick = identity
    code = code_of(lane, agent, episode, row)
    return {
        "action": (code + tick + 2 * version + deterministic) % 4,
        "log_prob": -1.0 - code,
        "value": 8.0 * code + version % 8,
    }


@dataclass(frozen=True, kw_only=True)
class KnownPolicy(PolicyConfig):
    recurrent: bool = False

    def answer(self, spaces: Spaces) -> dict[str, Field]:
        return {"action": Field((), "int64"), "log_prob": Field((), "float32"), "value": Field((), "float32")}

    def state(self, spaces: Spaces) -> dict[str, Field]:
        return (
            {"state.count": Field((), "float32"), "state.code": Field((2,), "float32")}
            if self.recurrent
            else {}
        )

    def build(self, spaces: Spaces, seed: int) -> "Known":
        return Known(self)


class Known(Policy):
    """Remembers what it was asked, and with which version it answered."""

    built: ClassVar[list["Known"]] = []

    def __init__(self, config: KnownPolicy) -> None:
        self.config, self.version = config, -1
        self.asked: dict[Identity, list[int]] = {}
        self._parameters = {"w": np.zeros(3)}
        self.built.append(self)

    def act(self, observation, state, deterministic, out) -> None:
        # of a frame stack
        newest = observation["obs"].reshape(len(observation["obs"]), -1, observation["obs"].shape[-1])[:, -1]
        rows = np.array(newest[:, :5], np.int64)
        assert np.isfinite(observation["obs"]).all()
        assert (self._parameters["w"] == self.version).all()
        for identity in map(tuple, rows.tolist()):
            self.asked.setdefault(identity, []).append(self.version)
        for name, value in answer_of(rows.T, self.version, np.asarray(deterministic, np.int64)).items():
            out[name][: len(rows)] = value
        if self.config.recurrent:
            assert np.isfinite(state["state.count"]).all()
            out["state.count"][: len(rows)] = state["state.count"] + 1
            out["state.code"][: len(rows)] = code_of(*rows.T[:4])[:, None] * (1, -1)

    def parameters(self):
        return self._parameters

    def load(self, parameters, version) -> None:
        self._parameters["w"][:] = parameters["w"]
        self.version = version


@dataclass(frozen=True, kw_only=True)
class Marked(Scripted):
    """`Scripted`, with infos, a reward for absence, and targets that can be told apart.

    stalls: looks at `ready` in vain after each send
    promises: tells how long an episode can be
    """

    stalls: int = 0
    promises: bool = True
    built: ClassVar[list["MarkedEnvironment"]] = []

    def build(self, lanes: int, seed: int, render: bool = False) -> "MarkedEnvironment":
        self.built.append(MarkedEnvironment(self, lanes, OFFSET * len(self.built)))
        return self.built[-1]


class MarkedEnvironment(Environment):
    def __init__(self, config: Marked, lanes: int, offset: int) -> None:
        self.inner = ScriptedEnvironment(config, lanes)
        self.config, self.offset = config, offset
        self.agents, self.lanes, self.same_step = self.inner.agents, lanes, config.same_step
        self.info = {"code": Field((), "int64")}
        self.max_episode_steps = config.longest if config.promises else 0
        self.sends = self.receipts = self.looks = 0
        self.stalled = False
        self.bell: Any = None

    def bind(self, groups) -> None:
        self._groups = [list(group) for group in groups]
        self.inner.bind(groups)

    def send(self, actions, reset) -> None:
        assert self.sends == self.receipts
        self.sends += 1
        self.looks = self.config.stalls
        self.inner.send(actions, reset)
        for given in actions:
            poison(given)  # they were to be read before send returned

    def ready(self) -> bool:
        assert self.sends == self.receipts + 1
        if self.stalled or self.looks > 0:
            self.looks -= 1
            return False
        return True

    def recv(self, ticks) -> None:
        self.receipts += 1
        for tick in ticks:
            poison(tick.final)
            kept = dict.fromkeys(("observation", "info", "final", "voided"), tick.reward)
            poison(vars(tick) | kept)  # who never loses a step leaves `voided` alone
        self.inner.recv(ticks)
        inner = self.inner
        for group, tick in zip(self._groups, ticks, strict=True):
            for leaves in (tick.observation, tick.final):
                for leaf in leaves.values():
                    leaf[:, 0] += self.offset
            tick.reward[~tick.present] += LUMP
            count = np.repeat(
                np.where(inner._restarted.any(1), inner._final_tick[:, 0], inner._tick[:, 0]), len(group)
            )
            seat = (inner._lane * 16 + inner._agent)[:, group].reshape(-1)
            tick.info["code"][:] = seat * 1000 + count

    def on_ready(self, ring) -> None:
        self.bell = ring

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True, kw_only=True)
class Ahead(PostProcessor):
    """``post.total``: the rewards from the row on; ``post.left``: the actions from the
    row on, and the first number that was observed."""

    reads: ClassVar[tuple[str, ...]] = ("obs", "reward", "version", "done", "truncated")

    def fields(self) -> Schema:
        return {"total": Field((), "float32"), "left": Field((2,), "int32")}

    def process(self, episodes):
        own = (episodes["version"] >= 0) | episodes["done"]
        assert own[0].all() and (np.diff(own.astype(int), axis=0) <= 0).all()
        for array in episodes.values():
            assert (array[~own] == (-1 if array is episodes["version"] else 0)).all()
        assert ((episodes["done"] | episodes["truncated"]).sum(0) == 1).all()
        acts = own & ~episodes["done"] & ~episodes["truncated"]
        sums = [np.cumsum(array[::-1], axis=0)[::-1] for array in (episodes["reward"], acts)]
        lane = episodes["obs"].reshape(*own.shape, -1)[..., 0]
        return {"total": sums[0], "left": np.stack([sums[1], lane], axis=-1)}


@dataclass(frozen=True, kw_only=True)
class Sink(WorkerConfig):
    """Stands where trainers do."""

    streams: dict[str, str] = field(default_factory=dict)  # → the policy that plays it
    policies: tuple[str, ...] = ()
    lockstep: tuple[str, ...] = ()  # those of the streams whose producers wait for it
    bounded: tuple[str, ...] = ()  # and those of which it drops what lags behind

    def ports(self) -> tuple[Port, ...]:
        consumes = (
            Port(
                stream,
                "consume",
                policy=policy,
                lockstep=stream in self.lockstep,
                lag_bounded=stream in self.bounded,
            )
            for stream, policy in self.streams.items()
        )
        return *consumes, *(Port(policy, "publish") for policy in self.policies)


@dataclass
class World:
    """An actor (and policy workers), polled by the test, and the other ends of all of its
    streams."""

    actors: Actors
    recurrent: bool = False
    remote: bool = False  # by policy workers
    threaded: bool = False  # these have threads
    most_rows: int = 4096  # of a batch of theirs
    lockstep: tuple[str, ...] = ()  # streams in lockstep
    bounded: tuple[str, ...] = ()  # streams whose rows are dropped when they lag behind

    def __post_init__(self) -> None:
        Known.built.clear()
        Marked.built.clear()
        self.policies = tuple(dict.fromkeys(spec.policy for spec in self.actors.agents))
        streams = {stream: spec.policy for spec in self.actors.agents for stream in spec.streams}
        sink = Sink(streams=streams, policies=self.policies, lockstep=self.lockstep, bounded=self.bounded)
        workers: dict[str, WorkerConfig] = {"actor": self.actors, "sink": sink}
        if self.remote:
            asked: dict[str, list[str]] = {}
            for spec in self.actors.agents:
                asked.setdefault(spec.inference, []).append(spec.policy)
            served = {stream: tuple(dict.fromkeys(policies)) for stream, policies in asked.items()}
            workers |= {
                f"server-{s}": PolicyWorkers(
                    stream=s, policies=p, threaded=self.threaded, most_rows=self.most_rows
                )
                for s, p in served.items()
            }
        self.experiment = Experiment(
            name="world",
            policies={p: KnownPolicy(recurrent=self.recurrent) for p in self.policies},
            workers=workers,
        )
        edges = self.experiment.edges()
        self.ends: dict[str, tuple[SlotEndpoints, LocalLink]] = local_endpoints(
            [name for name, _ in self.experiment.members()], edges
        )
        self.actor = self._build("actor-0")
        self.servers = [
            self._build(name) for name, _ in self.experiment.members() if name.startswith("server-")
        ]
        self.version = -1
        self.got: dict[str, list[dict[str, np.ndarray]]] = {}
        sink = self.ends["sink-0"][0]
        self.consumers = {
            e.name.rpartition("/")[0]: sink.consumer(e.name) for e in edges if e.name.startswith("samples/")
        }
        self.writers = [sink.writer(f"parameters/{p}/sink-0") for p in self.policies]
        for writer in self.writers:
            writer.offer(schema_of({"w": np.zeros(3)}))

    def _build(self, name: str) -> Any:
        return dict(self.experiment.members())[name].build(
            Context(self.experiment, name, self.actors, self.ends[name][0])
        )

    def begin(self) -> Facts:
        """Configure and start everything, with poisoned slots and rows."""
        facts: Facts = self.actor._configure(Facts())
        for number, agent in self.actor.order.agents:
            if isinstance(agent.writer, Columns):
                poison(
                    {
                        name: array[self.actors.agents[number].burn_in :]
                        for name, array in agent.writer.arrays.items()
                    }
                )
        for consumer in self.consumers.values():
            assert consumer.attach()
            for slot in consumer._views:
                poison(slot)
        self.publish()
        for server in self.servers:
            server._configure(facts)
            server.start()
        self.actor.start()
        return facts

    def publish(self) -> None:
        self.version += 1
        for writer in self.writers:
            writer.write({"w": np.full(3, self.version)}, self.version)

    def poll(self) -> int:
        """Poll everyone once; return how many ticks the actor did."""
        ticks: int = self.actor._poll().batch_count
        for server in self.servers:
            server._poll()
        return ticks

    def drain(self) -> None:
        """Take every sample, keep a copy, poison the slot, give it back."""
        for name, consumer in self.consumers.items():
            while (views := consumer.take()) is not None:
                self.got.setdefault(name, []).append({n: a.copy() for n, a in views.items()})
                poison(views)
                consumer.release()

    def sent(self) -> list[Any]:
        """What the actor told the runner."""
        return [unpack_up(m) for m in self.ends["actor-0"][1].receive() or []]


# ---- what the rows must be -------------------------------------------------------------

Row = dict[str, Any]


@dataclass
class Seat:
    """One seat's rows, made the slow way. The `obs` of a row are the identities of its
    frames."""

    environment: Marked
    spec: AgentSpec
    group: list[int]  # the spec's agents
    lane: int  # as the environment counts
    agent: int
    offset: int
    limit: int
    policy: int
    asked: dict[Identity, list[int]]
    recurrent: bool
    rows: list[Row] = field(default_factory=list)
    episodes: list[list[Row]] = field(default_factory=list)
    told: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._used: dict[Identity, int] = {}
        self._episode = 0
        self.filler: Row = {
            "obs": None,
            **self._nothing(),
            "on_reset": False,
            "done": False,
            "truncated": False,
            "reward": 0.0,
        }
        if self.recurrent:
            self.filler |= {"state.count": 0.0, "state.code": (0.0, 0.0)}
        if self.spec.post:
            self.filler |= {"post.total": 0.0, "post.left": (0, 0)}
        self.rows += [self.filler] * self.spec.burn_in

    def _nothing(self) -> Row:
        unacted = {"version": -1, "policy": -1, "action": 0, "log_prob": 0.0, "value": 0.0}
        return {**unacted, "info_mask": False, "info.return": 0.0, "info.length": 0, "info.code": 0}

    def _answer(self, identity: Identity) -> Row:
        number = self._used.get(identity, 0)
        versions = self.asked.get(identity, [])
        if number >= len(versions):
            return {}  # not asked yet: such a row is in no sample
        self._used[identity] = number + 1
        version = versions[number]
        return {
            **answer_of(identity, version, self.spec.deterministic),
            "version": version,
            "policy": self.policy,
        }

    def play(self) -> None:
        """Play one more episode."""
        env, lane, agent, episode = self.environment, self.lane, self.agent, self._episode
        self._episode += 1
        natural, death = int(env.length(lane, episode)), int(env.death(lane, agent, episode))
        end = min(natural, death, self.limit or 10**9)
        dies = death <= end
        done = dies or (natural == end and not env.cut(lane, episode))
        rows: list[Row] = []
        for tick in range(end + 1):
            final, on_turn = tick == end, tick % env.turns == agent % env.turns
            present = on_turn or (final and dies)
            if not present and rows:
                rows[-1]["reward"] += LUMP
            if not present and not final:
                continue
            acted = len(rows)
            frames = rows[-1]["obs"] if rows else ()
            if present:
                seen = (lane + self.offset, agent, episode, acted, tick)
                frames = (*(frames or [seen] * self.spec.frame_stack), seen)[-self.spec.frame_stack :]
            seen = frames[-1]
            row = {
                "obs": frames,
                **self._nothing(),
                "on_reset": not rows,
                "done": final and done,
                "truncated": final and not done,
                "reward": 0.0,
            }
            if self.recurrent:
                last = code_of(*rows[-1]["obs"][-1][:4]) if rows else 0
                row |= {"state.count": float(acted), "state.code": (float(last), -float(last))}
            if not row["done"]:
                row |= self._answer(seen)
            if not final:
                row["reward"] = float(reward_of(lane, agent, episode, acted, row["action"]))
            elif not present and self.limit == end and not dies and natural != end:
                # our own limit: the environment, which knows nothing of it, had no
                # occasion to pay
                rows[-1]["reward"] -= float(reward_of(lane, agent, episode, acted - 1, rows[-1]["action"]))
            rows.append(row)
        self.told.append((sum(row["reward"] for row in rows), len(rows) - 1))
        rows[-2] |= {"info_mask": True, "info.return": self.told[-1][0], "info.length": len(rows) - 1}
        rows[-2] |= {"info.code": (lane * 16 + agent) * 1000 + end}
        if self.spec.post:
            for number, row in enumerate(rows):
                row["post.total"] = sum(later["reward"] for later in rows[number:])
                row["post.left"] = len(rows) - 1 - number, lane + self.offset
        self.rows += rows
        self.episodes.append(rows)

    def sample(self, number: int) -> list[Row]:
        """The rows of the seat's sample of that number."""
        spec = self.spec
        if spec.mode in ("full", "concise"):
            while len(self.episodes) <= number:
                self.play()
            rows = self.episodes[number]
            return rows if spec.mode == "full" else [self._concise(rows)]
        start = number * spec.sample_steps
        while len(self.rows) < start + spec.rows:
            self.play()
        rows = [dict(row) for row in self.rows[start : start + spec.rows]]
        if spec.mode == "fixed":  # sent before the last row's action was done
            rows[-1] |= {
                "reward": 0.0,
                "info_mask": False,
                "info.return": 0.0,
                "info.length": 0,
                "info.code": 0,
            }
        return rows

    def _concise(self, rows: list[Row]) -> Row:
        first, acted, last = rows[0], rows[-2], rows[-1]
        ends = {name: last[name] for name in ("done", "truncated")} | {
            name: acted[name] for name in acted if name.startswith("info")
        }
        return {
            **first,
            **ends,
            "last_version": acted["version"],
            "seat": self.lane * len(self.group) + self.group.index(self.agent),
        }


def compare(cells: dict[str, np.ndarray], rows: list[Row], place: str) -> None:
    """Raise unless one column's cells [T, ...] are these rows. Who played the others is
    looked at in test_evaluation, infos in test_infos."""
    cells = {name: array for name, array in cells.items() if not name.startswith(("others.", "info.packed"))}
    for t, row in enumerate(rows):
        assert {*row} == {*cells}, place
        for name, value in row.items():
            cell = cells[name][t]
            if name == "obs":
                frames = cell.reshape(-1, cell.shape[-1])
                wanted: Any = 0 if value is None else [(*seen, *[1] * (cell.shape[-1] - 5)) for seen in value]
                assert (frames == wanted).all(), f"{place}, row {t}: obs {cell} is not {wanted}"
            else:
                assert (cell == value).all(), f"{place}, row {t}: {name} is {cell}, not {value}"


def check_samples(world: World) -> dict[tuple[int, int], Seat]:
    """Compare every cell of every sample that came with what it must be. Return the seats
    that had any."""
    actors = world.actors
    environment = actors.environment
    assert isinstance(environment, Marked)
    specs = {stream: spec for spec in actors.agents for stream in spec.streams}
    asked: dict[Identity, list[int]] = {}
    for policy in Known.built:
        asked |= policy.asked
    seats: dict[tuple[int, int], Seat] = {}
    counts: dict[tuple[str, int, int], int] = {}

    groups = match_agents(Marked.built[0].agents, actors.agents)

    def seat_of(lane: int, agent: int) -> Seat:
        if (lane, agent) not in seats:
            ((spec, group),) = (
                (spec, group) for spec, group in zip(actors.agents, groups, strict=True) if agent in group
            )
            offset = lane // OFFSET * OFFSET
            policy = world.policies.index(spec.policy)
            limit = actors.max_episode_steps
            seats[lane, agent] = Seat(
                environment, spec, group, lane - offset, agent, offset, limit, policy, asked, world.recurrent
            )
        return seats[lane, agent]

    for edge, samples in world.got.items():
        stream = edge.split("/")[1]
        spec = specs[stream]
        for sample in samples:
            for column in range(sample["done"].shape[1]):
                cells = {name: array[:, column] for name, array in sample.items()}
                shown = 0 if spec.mode == "full" else -1
                lane, agent = (
                    int(v) for v in cells["obs"][shown].reshape(-1, cells["obs"].shape[-1])[-1, :2]
                )
                seat = seat_of(lane, agent)
                assert seat.spec == spec
                number = counts[stream, lane, agent] = counts.get((stream, lane, agent), -1) + 1
                rows = seat.sample(number)
                place = f"{edge}, sample {number} of lane {lane} agent {agent}"
                if spec.mode == "full":
                    limits = [
                        n
                        for n in (
                            actors.max_episode_steps,
                            environment.longest if environment.promises else 0,
                        )
                        if n
                    ]
                    assert len(cells["done"]) == min(limits) + 1, place
                    assert (cells["done"] | cells["truncated"])[: len(rows)].nonzero()[0].tolist() == [
                        len(rows) - 1
                    ], place
                    if spec.padded:
                        rows = rows + [seat.filler] * (min(limits) + 1 - len(rows))
                else:
                    assert len(cells["done"]) == len(rows), place
                compare(cells, rows, place)
    had = dict(seats)
    # Nobody asked for what needs no answer: each identity asked was one acting row, or
    # one final row that was cut. Columns go out in the order in which they finish: a seat
    # may have been asked for and be in no sample yet.
    for lane, agent in {identity[:2] for identity in asked}:
        seat_of(lane, agent)
    for seat in seats.values():
        own = {
            identity: versions
            for identity, versions in asked.items()
            if identity[:2] == (seat.lane + seat.offset, seat.agent)
        }
        while seat._episode <= max(identity[2] for identity in own) + 1:
            seat.play()
        for identity, versions in own.items():
            assert seat._used.get(identity, 0) == len(versions), (
                f"{identity} was asked for {len(versions)} times, not {seat._used.get(identity, 0)}"
            )
            assert versions == sorted(versions)
    return had
