"""Seats that play episodes nobody has made up: each row's observation says which seat,
episode and step it is of.

They send arrivals to a replay, whose batches are checked against what the numbers in them
say.
"""

from typing import Any

import numpy as np

from tidemill.api.algorithm import ARRIVAL_FIELDS, FILLER
from tidemill.api.buffer import BufferConfig, Demand, ReplayBuffer
from tidemill.api.edges import Edge
from tidemill.core.schema import Field
from tidemill.streams.samples import ChannelSampleConsumer, ChannelSampleProducer
from tidemill.transports.local import local_endpoints

CODE = Field((3,), "float32")
"""Seat, episode, step."""


class Seat:
    """Plays episodes; `row` is what it sends next, given what befalls it."""

    def __init__(self, number: int) -> None:
        self.number, self.episode, self.step, self.open = number, -1, 0, False

    def row(self, what: str) -> dict[str, Any]:
        """`what`: "step", "done", "cut" (truncated), "lost" (voided), "anew" (voided, and
        the next episode begins), "away" (a filler). A seat whose episode is over begins
        one."""
        if what == "away":
            return dict(FILLER)
        if what == "lost":
            was, self.open = self.open, False
            return {**FILLER, "voided": True} if was else dict(FILLER)
        if not self.open or what == "anew":
            lost, self.episode, self.step, self.open = self.open, self.episode + 1, 0, True
            return {**FILLER, "obs": self.code(), "on_reset": True, "voided": lost}
        self.step += 1
        over = what in ("done", "cut")
        self.open = not over
        finished = {"info_mask": over, "info.return": reward_of(*self.code()) if over else 0}
        return {
            "obs": self.code(),
            "action": action_of(*self.code()),
            "reward": reward_of(*self.code()),
            "version": self.step,
            "done": what == "done",
            "truncated": what == "cut",
            **finished,
        }

    def code(self) -> np.ndarray:
        return np.array([self.number, self.episode, self.step], np.float32)


def reward_of(seat, episode, step):
    """The reward of the step that led to that row."""
    return np.float32(seat * 100 + episode * 10 + step)


def action_of(seat, episode, step):
    """The action that led to that row."""
    return np.int64(seat * 7 + episode * 5 + step)


class Play:
    """Producers with so many `seats` each, and a replay at the other end."""

    def __init__(
        self,
        config: BufferConfig,
        seats: tuple[int, ...] = (1,),
        batch: int | None = 8,
        stack: int = 1,
        blank: bool = False,
        **demand: Any,
    ) -> None:
        edges = [Edge(f"samples/{i}", "channel", f"source-{i}", ("trainer",)) for i in range(len(seats))]
        ends = local_endpoints([*(f"source-{i}" for i in range(len(seats))), "trainer"], edges)
        self.producers = [ChannelSampleProducer([[ends[e.source][0].producer(e.name)]]) for e in edges]
        obs = CODE if stack == 1 else Field((stack, 3), "float32")
        schema = {
            "obs": obs,
            **ARRIVAL_FIELDS,
            "action": Field((), "int64"),
            "log_prob": Field((), "float32"),
        }
        for producer, count in zip(self.producers, seats, strict=True):
            producer.offer(schema, 1, count, 4)
        source = ChannelSampleConsumer([ends["trainer"][0].consumer(e.name) for e in edges], 0, 0)
        self.seats = [[Seat(sum(seats[:i]) + j) for j in range(count)] for i, count in enumerate(seats)]
        self._stacks = {
            seat.number: np.zeros((stack, 3), np.float32) for group in self.seats for seat in group
        }
        self._stack, self._blank = stack, blank
        self.ends: set[tuple[float, ...]] = set()
        """The last rows of episodes that came to an end."""
        self.buffer: ReplayBuffer = config.build(
            source, Demand(**{"rows": batch, "samples": len(seats), "seed": 3, **demand})
        )

    def tick(self, producer: int, *whats: str):
        """Send what befalls each seat of a producer (the last one named befalls the
        rest), and have it received."""
        block = self.producers[producer].reserve()
        assert block is not None
        for array in block.values():
            array[...] = 0
        for i, seat in enumerate(self.seats[producer]):
            row = seat.row(whats[min(i, len(whats) - 1)])
            if self._stack > 1 and "obs" in row:
                stack = self._stacks[seat.number]
                stack[:-1] = (0 if self._blank else row["obs"]) if row.get("on_reset") else stack[1:]
                stack[-1] = row["obs"]
                row["obs"] = stack
            if row.get("done"):
                self.ends.add(tuple(seat.code()))
            for name, value in row.items():
                block[name][0, i] = value
        self.producers[producer].commit()
        (received,) = self.buffer.receive()
        assert received.channel == producer
        return received

    def draw(self, version: int = 0, transitions: int = 1):
        """Return the fields [n, ...] of at least so many transitions, in batches that are
        released."""
        batches: list[dict[str, np.ndarray]] = []
        while not batches or sum(len(batch["steps"]) for batch in batches) < transitions:
            taken = self.buffer.take(version)
            assert taken is not None
            (held,) = taken
            batches.append({name: array[0].copy() for name, array in held.sample.items()})
            self.buffer.release()
        return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}

    def check(self, steps: int, transitions: int = 1) -> dict[str, np.ndarray]:
        """Draw, look at what was drawn, and return it."""
        batch = self.draw(transitions=transitions)
        check(batch, steps, self._stack, self._blank)
        then = batch["next.obs"][:, -1] if self._stack > 1 else batch["next.obs"]
        assert (batch["done"] == [tuple(code) in self.ends for code in then.tolist()]).all()
        return batch


def check(batch: dict[str, np.ndarray], steps: int, stack: int, blank: bool) -> None:
    """Every transition must be of one seat and one episode, reach over `steps` steps or
    to the episode's end, and bear the rewards between."""
    obs, then = batch["obs"], batch["next.obs"]
    if stack > 1:
        for frames in (obs, then):
            ages = frames[:, -1:, 2] - np.arange(stack - 1, -1, -1)
            # consecutive, and the first one or zeros stand for those before it
            assert (frames[:, :, 2] == np.maximum(ages, 0)).all()
            assert (
                frames[:, :, :2] == np.where(blank & (ages < 0), 0, 1)[..., None] * frames[:, -1:, :2]
            ).all()
        obs, then = obs[:, -1], then[:, -1]
    spans = batch["steps"]
    assert (obs[:, :2] == then[:, :2]).all()
    assert (then[:, 2] - obs[:, 2] == spans).all()
    assert ((spans >= 1) & (spans <= steps)).all()
    first = obs.copy()
    first[:, 2] += 1
    assert (batch["action"] == action_of(*first.T)).all()
    assert (batch["version"] == first[:, 2]).all()
    for n in range(steps):
        expected = np.where(n < spans, reward_of(first[:, 0], first[:, 1], first[:, 2] + n), 0)
        assert (batch["rewards"][:, n] == expected).all()
