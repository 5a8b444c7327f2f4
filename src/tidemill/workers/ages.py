"""How old the policy was that acted, when its step was stored: in versions, and in seconds since that version was published."""

from collections import deque
from time import monotonic

from tidemill.api.algorithm import Sample
from tidemill.api.stream import Offered, SampleConsumer

KEPT = 4096  # versions whose time is known


class Ages(SampleConsumer):
    """A sample stream of arrivals whose rows are looked at as they are taken."""

    def __init__(self, source: SampleConsumer) -> None:
        self._source = source
        self._published: dict[int, float] = {}
        self._order: deque[int] = deque()
        self._newest = self._count = 0
        self._versions = self._seconds = 0.0

    def publish(self, version: int) -> None:
        """Say that this version is published now."""
        self._newest = version
        if version not in self._published:
            self._order.append(version)
            if len(self._order) > KEPT:
                del self._published[self._order.popleft()]
        self._published[version] = monotonic()

    def offered(self) -> list[Offered] | None:
        return self._source.offered()

    def consume(self) -> Sample | None:
        sample = self._source.consume()
        if sample is not None:
            now, versions = monotonic(), sample["version"][0].tolist()
            acted = len(versions) - versions.count(-1)
            for version in {*versions} - {-1}:
                rows = acted if acted == 1 else versions.count(version)
                self._count += rows
                self._versions += rows * (self._newest - version)
                self._seconds += rows * (now - self._published.get(version, now))
        return sample

    def release(self) -> None:
        self._source.release()

    def take(self) -> dict[str, float]:
        """Return the means since the last call, {} when nothing came."""
        count, versions, seconds = self._count, self._versions, self._seconds
        self._count, self._versions, self._seconds = 0, 0.0, 0.0
        return {"limiter/age_versions": versions / count, "limiter/age_seconds": seconds / count} if count else {}
