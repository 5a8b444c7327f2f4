"""How old the policy was that acted, when its step was stored: in versions, and in seconds since that version was published."""

from collections import deque
from time import monotonic

from tidemill.api.algorithm import Sample
from tidemill.api.stream import Offered, SampleConsumer

KEPT = 4096  # versions whose time is known


class Ages(SampleConsumer):
    """A sample stream of arrivals whose rows are looked at as they are taken: the oldest version of each."""

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
            versions = sample["version"]
            version = int(versions[0, 0]) if versions.shape[1] == 1 else int(versions[versions >= 0].min(initial=self._newest))
            if version >= 0:
                self._count += 1
                self._versions += self._newest - version
                self._seconds += monotonic() - self._published.get(version, monotonic())
        return sample

    def release(self) -> None:
        self._source.release()

    def take(self) -> dict[str, float]:
        """Return the means since the last call, {} when nothing came."""
        count, versions, seconds = self._count, self._versions, self._seconds
        self._count, self._versions, self._seconds = 0, 0.0, 0.0
        return {"limiter/age_versions": versions / count, "limiter/age_seconds": seconds / count} if count else {}
