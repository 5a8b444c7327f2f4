"""The sample stream: blocks [time, seats] of rows, written in place by actors and read in place by trainers."""

from collections import deque
from collections.abc import Sequence

from tidemill.api.algorithm import Sample
from tidemill.api.stream import Blocks, SampleConsumer, SampleProducer
from tidemill.api.transport import Consumer, Producer
from tidemill.core.schema import Arrays, Schema


class ChannelSampleProducer(SampleProducer):
    """Sends over one channel to the stream's consumer."""

    def __init__(self, channel: Producer) -> None:
        self._channel = channel

    def offer(self, schema: Schema, rows: int, seats: int, slots: int) -> None:
        self._channel.offer(schema, (rows, seats), slots)

    def reserve(self) -> Arrays | None:
        return self._channel.reserve()

    def commit(self) -> None:
        self._channel.commit()


class ChannelSampleConsumer(SampleConsumer):
    """Receives from one channel per producer, in turn, so that no producer waits while others are served twice."""

    def __init__(self, channels: Sequence[Consumer], burn_in: int, bootstrap: int) -> None:
        self._channels = list(channels)
        self._burn_in, self._bootstrap = burn_in, bootstrap
        self._next = 0
        self._held: deque[Consumer] = deque()

    def blocks(self) -> list[Blocks] | None:
        if not all(channel.attach() for channel in self._channels):
            return None
        kept = self._burn_in + self._bootstrap
        return [Blocks(c.schema, c.lead, c.slots, (c.lead[0] - kept) * c.lead[1]) for c in self._channels]

    def consume(self) -> Sample | None:
        for _ in self._channels:
            channel = self._channels[self._next]
            self._next = (self._next + 1) % len(self._channels)
            if channel.attach() and (views := channel.take()) is not None:
                self._held.append(channel)
                sample = Sample(views)
                sample.burn_in, sample.bootstrap = self._burn_in, self._bootstrap
                return sample
        return None

    def release(self) -> None:
        self._held.popleft().release()
