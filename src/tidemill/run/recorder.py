"""The metrics of updates on their way from workers to the run's records."""

from collections.abc import Callable

from tidemill.api.experiment import Experiment
from tidemill.core.config import encode
from tidemill.metrics.record_pace import RecordPace
from tidemill.run.host_watch import HostWatch
from tidemill.run.run_state import RunState
from tidemill.run.training_warnings import TrainingWarnings


class Recorder:
    """The recorder writes a record of each update, or one of several together where a
    `RecordPace` holds them back, and looks whether they call for a warning.

    write: function that is called with each record
    """

    def __init__(
        self,
        experiment: Experiment,
        state: RunState,
        hosts: HostWatch,
        write: Callable[[dict[str, float]], None],
    ) -> None:
        self._state, self._hosts, self._write = state, hosts, write
        self._pace = RecordPace()
        self._warnings = TrainingWarnings(encode(experiment), whole=not state.progress.updates)

    def record_when_due(self) -> None:
        """Record the updates that were not recorded yet, where the pace allows it."""
        if not self._state.progress.recorded and self._pace.allows():
            self.record_rest()

    def record_rest(self) -> None:
        """Record the updates that were not recorded yet."""
        if not self._state.progress.recorded:
            record = self._state.progress.record(self._state.members) | self._hosts.metrics()
            self._write(record)
            self._state.report.notices += map(str, self._warnings.add(record))
