"""How old the policy was that acted, when its step was stored: in versions, and in
seconds since that version was published."""

from collections import deque
from time import monotonic

from tidemill.api.algorithm import Sample
from tidemill.api.policy import number_of
from tidemill.api.stream import SampleConsumer, WatchedConsumer

MOST_VERSIONS = 4096  # versions whose time is known


class PolicyLag(WatchedConsumer):
    """A sample stream of arrivals whose rows are looked at as they are taken."""

    def __init__(self, source: SampleConsumer) -> None:
        super().__init__(source)
        self._published: dict[int, float] = {}
        self._order: deque[int] = deque()
        self._count = 0
        self.newest = 0
        """The version that was published last."""
        self._versions = self._seconds = 0.0

    def publish(self, version: int) -> None:
        """Say that this version is published now."""
        self.newest = version
        if version not in self._published:
            self._order.append(version)
            if len(self._order) > MOST_VERSIONS:
                del self._published[self._order.popleft()]
        self._published[version] = monotonic()

    def _look(self, sample: Sample) -> None:
        now, versions = monotonic(), sample["version"][0].tolist()
        acted = len(versions) - versions.count(-1)
        for version in {*versions} - {-1}:
            rows = acted if acted == 1 else versions.count(version)
            self._count += rows
            # one that is undone may have come further
            self._versions += rows * max(number_of(self.newest) - number_of(version), 0)
            self._seconds += rows * (now - self._published.get(version, now))

    def take(self) -> dict[str, float]:
        """Return the means since the last call, {} when nothing came."""
        count, versions, seconds = self._count, self._versions, self._seconds
        self._count, self._versions, self._seconds = 0, 0.0, 0.0
        return (
            {"limiter/age_versions": versions / count, "limiter/age_seconds": seconds / count}
            if count
            else {}
        )
