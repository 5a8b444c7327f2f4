"""The hosts of a run as they are now: what views show of them, and what is recorded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tidemill.api.launcher import HostFigures
from tidemill.core.clock import awake
from tidemill.run.member import Member
from tidemill.workers.actor_config import ActorConfig

EVERY = 1.0  # seconds between two looks
_MB = 1e6


@dataclass(frozen=True)
class HostView:
    """A host of a run.

    workers, cores: how many of either are the run's there
    steps_per_second: env steps of its actors
    sent, received: MB/s to and from other hosts
    said: messages per second that it says to other hosts besides data
    round_trip_ms: from the runner's host and back; None of that itself
    lag: how many versions of what trainers publish it is behind, of the policy that is
        furthest; None of the runner's host
    lost: why it is not there; "" as long as it is
    """

    workers: int
    cores: int
    steps_per_second: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    said: float = 0.0
    round_trip_ms: float | None = None
    lag: int | None = None
    lost: str = ""


class HostWatch:
    """A host watch looks at the hosts of a run now and then.

    each_host: function that returns what is known of them (see `Launcher.each_host`)
    hosts: each as it was when it was last looked at, the runner's first; empty where a
        run has this machine alone
    """

    def __init__(self, each_host: Callable[[], Mapping[str, HostFigures]]) -> None:
        self._each_host = each_host
        self.hosts: dict[str, HostView] = {}
        self._before: Mapping[str, HostFigures] = {}
        self._at = float("-inf")

    def look(self, members: Mapping[str, Member]) -> None:
        """Look at all of them, if it is time."""
        now, at = awake(), self._at
        if now < at + EVERY:
            return
        self._at, before, self._before = now, self._before, self._each_host()
        self.hosts = {
            name: _view(figures, before.get(name, figures), now - at, members)
            for name, figures in self._before.items()
        }

    def metrics(self) -> dict[str, float]:
        """Return what is recorded of them, by metric name."""
        found: dict[str, float] = {}
        for name, host in self.hosts.items():
            told = {
                "workers": host.workers,
                "cores": host.cores,
                "steps_per_second": host.steps_per_second,
                "sent_mb_per_second": host.sent,
                "received_mb_per_second": host.received,
                "messages_per_second": host.said,
                "round_trip_ms": host.round_trip_ms,
                "lag": host.lag,
            }
            found |= {f"host/{name}/{k}": float(v) for k, v in told.items() if v is not None}
        return found


def _view(now: HostFigures, before: HostFigures, seconds: float, members: Mapping[str, Member]) -> HostView:
    def per_second(figure: Callable[[HostFigures], int]) -> float:
        return max(figure(now) - figure(before), 0) / seconds  # a new agent of a host begins at 0

    living = [members[worker] for worker in now.workers if worker in members]
    return HostView(
        workers=len(now.workers),
        cores=now.cores,
        steps_per_second=sum(m.rate for m in living if isinstance(m.config, ActorConfig)),
        sent=per_second(lambda figures: figures.sent_bytes) / _MB,
        received=per_second(lambda figures: figures.received_bytes) / _MB,
        said=per_second(lambda figures: figures.said),
        round_trip_ms=None if now.round_trip_s is None else now.round_trip_s * 1000,
        lag=now.lag,
        lost=now.lost,
    )
