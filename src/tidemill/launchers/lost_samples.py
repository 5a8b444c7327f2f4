"""The samples that were lost with hosts: of what a lost host's workers had sent, what has
not come whole to those who were to read it."""

from collections import Counter
from collections.abc import Sequence

from tidemill.api.edges import Edge
from tidemill.api.launcher import Loss

_Life = tuple[int, int]  # the number of an edge, and a life of its writer


class LostSamples:
    """The count of samples that were lost with hosts, of each edge and life of its
    writer.

    What has come whole is known where it is read. How many were sent is known there as
    far as it was said with what came; a host that is heard again, or that leaves, says it
    exactly.
    """

    def __init__(self) -> None:
        self._came: dict[_Life, int] = {}
        self._sent = Counter[_Life]()
        self._lost = Counter[_Life]()
        self._losses: list[Loss] = []

    def came(self, host: str, came: Sequence[tuple[int, int, int, int]], edges: Sequence[Edge]) -> None:
        """Take note of what has come of a host's samples, by `Crossing.came`."""
        for number, life, whole, told in came:
            self._came[number, life] = whole
            self._sent[number, life] = max(self._sent[number, life], told)
        self._count(host, [(number, life) for number, life, _, _ in came], edges)

    def sent(self, host: str, sent: Sequence[tuple[int, int, int]], edges: Sequence[Edge]) -> None:
        """Take note of what that host's workers have sent, by `Crossing.sent`."""
        for number, life, slots in sent:
            self._sent[number, life] = max(self._sent[number, life], slots)
        self._count(host, [(number, life) for number, life, _ in sent], edges)

    def _count(self, host: str, lives: Sequence[_Life], edges: Sequence[Edge]) -> None:
        found = Counter[tuple[str, int]]()
        for number, life in lives:
            if (number, life) in self._came:
                lost = max(self._sent[number, life] - self._came[number, life], 0)
                found[edges[number].source, life] += lost - self._lost[number, life]
                self._lost[number, life] = lost
        self._losses += [Loss(*who, host, samples) for who, samples in found.items() if samples]

    def begun(self, host: str, unsent: dict[str, tuple[int, int]]) -> None:
        """Take note of the env steps that samples of that host's workers were begun
        with."""
        self._losses += [Loss(worker, life, host, steps=steps) for worker, (life, steps) in unsent.items()]

    def take(self) -> list[Loss]:
        """Return what was lost, of all that was not returned before."""
        losses, self._losses = self._losses, []
        return losses
