"""What actors send to a replay memory whose trainer has died, and lives again: what they
had sent to its lives before is undone."""

from numpy import count_nonzero, full_like

from tidemill.api.algorithm import FILLER, Sample
from tidemill.api.stream import Offered, SampleConsumer


class SinceLife(SampleConsumer):
    """A sample stream from which nothing is taken that came through one of its `channels`
    before the sample in which the actor says that it knows of the trainer's `life`
    (`ARRIVAL_FIELDS`)."""

    def __init__(self, source: SampleConsumer, life: int, channels: int) -> None:
        self._source, self._version = source, -1 - life
        self._awaited = set(range(channels))
        self._undone = 0  # steps

    def offered(self) -> list[Offered] | None:
        return self._source.offered()

    def consume(self) -> Sample | None:
        while (sample := self._source.consume()) is not None:
            version, channel = sample["version"], sample.channel
            says = version[0, 0] == self._version
            if says and channel in self._awaited:
                self._awaited.remove(channel)
                sample["version"] = full_like(version, FILLER["version"])
                return sample
            if not says and channel not in self._awaited:
                return sample
            # an actor that begins a life later says it, too, after what it begins with
            self._undone += int(count_nonzero(version >= 0))
            self._source.release()
        return None

    def release(self) -> None:
        self._source.release()

    def take_undone(self) -> int:
        """Return how many steps were undone, once that is known of all channels, and not
        once more."""
        if self._awaited:
            return 0
        undone, self._undone = self._undone, 0
        return undone
