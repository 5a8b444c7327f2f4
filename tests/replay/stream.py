"""A sample stream whose producers the tests hold, and a buffer at its other end."""

from typing import Any

from tidemill.api.algorithm import ROW_FIELDS
from tidemill.api.buffer import Buffer, BufferConfig, BufferedSample, Demand
from tidemill.api.edges import Edge
from tidemill.streams.samples import ChannelSampleConsumer, ChannelSampleProducer
from tidemill.transports.local import local_endpoints

BURN_IN, STEPS, SEATS = 1, 4, 2
ROWS = STEPS * SEATS
"""That each sample counts in a batch."""


class Stream:
    """`slots` of each producer; `seats` of each one's samples."""

    def __init__(
        self,
        config: BufferConfig,
        slots: int = 2,
        seats: tuple[int, ...] = (SEATS,),
        late: bool = False,
        **demand: Any,
    ) -> None:
        edges = [Edge(f"samples/{i}", "channel", f"source-{i}", ("trainer",)) for i in range(len(seats))]
        ends = local_endpoints([*(f"source-{i}" for i in range(len(seats))), "trainer"], edges)
        self.producers = [ChannelSampleProducer([[ends[e.source][0].producer(e.name)]]) for e in edges]
        self._offers = [(BURN_IN + STEPS + 1, count, slots) for count in seats]
        if not late:
            self.offer()
        source = ChannelSampleConsumer([ends["trainer"][0].consumer(e.name) for e in edges], BURN_IN, 1)
        self.buffer: Buffer = config.build(source, Demand(**{"rows": None, "samples": len(seats), **demand}))

    def offer(self) -> None:
        for producer, (rows, seats, slots) in zip(self.producers, self._offers, strict=True):
            producer.offer(ROW_FIELDS, rows, seats, slots)

    def send(self, mark: int, version: int = 0, producer: int = 0) -> bool:
        """Send a sample that bears `mark` and whose every row was made by `version`, but
        its burn-in, which is older than any bound. False when there is no slot for it."""
        block = self.producers[producer].reserve()
        if block is None:
            return False
        for array in block.values():
            array[...] = 0
        block["reward"][:] = mark
        block["version"][:BURN_IN], block["version"][BURN_IN:] = 0, version
        self.producers[producer].commit()
        return True

    def take(self, version: int = 0) -> list[int] | None:
        """Return the marks of the batch, used at once; None when there is none. Every
        cell of its samples must still be as it was sent."""
        taken = self.buffer.take(version)
        if taken is None:
            return None
        marks = [mark_of(held) for held in taken]
        self.buffer.release()
        return marks


def mark_of(held: BufferedSample) -> int:
    reward = held.sample["reward"]
    assert (reward == reward[0, 0]).all()
    assert (held.sample.burn_in, held.sample.bootstrap) == (BURN_IN, 1)
    return int(reward[0, 0])
