"""What a limited trainer tells of its tasks and steps now and then, since tasks are many
and short."""

from collections.abc import Mapping

from tidemill.core.clock import awake
from tidemill.replay.limiter import Limiter
from tidemill.replay_training.policy_lag import PolicyLag


class LimiterMetrics:
    """The metrics of a limiter are of what has happened since they were last reported.
    Before anything was trained there is nothing to tell, unless it is `known` what is to
    come."""

    def __init__(self, limiter: Limiter, policy_lag: PolicyLag, known: bool) -> None:
        self._limiter, self._policy_lag, self._known = limiter, policy_lag, known
        self._sums: dict[str, float] = {}
        self._means: dict[str, float] = {}  # of the tasks that were told last
        self._tasks, self._seconds = 0, 0.0
        self._committed, self._voided = limiter.counts.committed, limiter.counts.voided
        self.reported_at = 0.0

    def count(self, metrics: Mapping[str, float], seconds: float) -> None:
        """Count a task: what its update returned, and how long it took."""
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._tasks += 1
        self._seconds += seconds

    def take(self) -> dict[str, float] | None:
        """Return the means of what updates returned, what the limiter counts, the lag of
        what came, and the number of slots that would balance the run: N* = seconds of a
        step / (ratio · seconds of a task). None when nothing has happened."""
        told = {**self._limiter.report(), **self._policy_lag.take()}
        flown, voided = told.pop("limiter/flown"), int(told["limiter/voided"])
        committed, tasks = int(told["limiter/committed"]) - self._committed, self._tasks
        if tasks:
            self._means = {name: total / tasks for name, total in self._sums.items()}
            if committed and flown:
                told["limiter/balance"] = (
                    flown / committed / (float(self._limiter.ratio) * self._seconds / tasks)
                )
        happened = tasks or ((committed or voided > self._voided) and (self._means or self._known))
        self._sums, self._tasks, self._seconds, self.reported_at = {}, 0, 0.0, awake()
        self._committed, self._voided = self._committed + committed, voided
        return {**self._means, **told} if happened else None
