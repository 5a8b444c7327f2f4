"""The writer of a run's metrics: each record goes to `metrics.jsonl` and to the sinks
that the run was given."""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from time import monotonic

from tidemill.api.metric_sink import LoggedRun, MetricSink
from tidemill.core.errors import ConfigError, TidemillError
from tidemill.core.named_class import make, named_class
from tidemill.core.secrets import says_secret
from tidemill.metrics.json_lines import FILE, JSONLines

SINKS = {
    "csv": "tidemill.metrics.csv_file:CSV",
    "tensorboard": "tidemill.metrics.tensorboard:TensorBoard",
    "wandb": "tidemill.metrics.wandb:WeightsAndBiases",
}
"""The sinks that are known by a name of one word: module and class. A new one is a line
here."""
DEFAULT = "tensorboard"

RETRY = 10.0  # seconds between two tries of a sink that is away
MISSED = 1_000  # records that wait for it meanwhile

log = logging.getLogger(__name__)


Sinks = str | Sequence[str | type[MetricSink]]
"""What users say of sinks: names, also as one text with commas between, and classes."""


def find_sinks(chosen: Sinks) -> list[type[MetricSink]]:
    """Return the classes of the chosen sinks, each once. Raises `ConfigError`."""
    return list(dict.fromkeys(named_class(sink, MetricSink, SINKS, "--log") for sink in split(chosen)))


def split(chosen: Sinks) -> list[str | type[MetricSink]]:
    """Return the chosen sinks one by one."""
    if isinstance(chosen, str):
        return [name for word in chosen.split(",") if (name := word.strip())]
    if not isinstance(chosen, Iterable):
        raise ConfigError(f"log = {chosen!r}: write names of sinks, or sinks of your own, as a list")
    return list(chosen)


class MetricsWriter:
    """The writer writes the records of one run into its folder, and into each of `sinks`
    besides.

    A sink whose disk or server is away is tried again each `RETRY` seconds, and given
    what it missed then, the newest `MISSED` records; one that fails otherwise is left out
    from then on. Both are warned of: training goes on.
    """

    def __init__(
        self,
        run: LoggedRun,
        sinks: Collection[type[MetricSink]] = (),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._lines, self._clock = JSONLines(run), clock
        self._sinks: list[MetricSink] = []
        # of each sink that is away: when it is tried again, and what it missed
        self._away: dict[MetricSink, tuple[float, deque[Mapping[str, float]]]] = {}
        try:
            for sink in sinks:
                self._sinks.append(make(sink, "--log", run))
        except BaseException:
            self.close()
            raise

    def write(self, record: Mapping[str, float]) -> None:
        """Append one record. It needs a ``step``; the other names are free."""
        plain = {
            k: v if isinstance(v, int) else float(v)
            for k, v in record.items()
            if not says_secret(k.rpartition("/")[2])
        }
        self._lines.write(plain)
        for sink in list(self._sinks):
            at, missed = self._away.get(sink, (0.0, deque[Mapping[str, float]](maxlen=MISSED)))
            missed.append(plain)
            if self._clock() >= at:
                self._write(sink, missed)

    def _write(self, sink: MetricSink, records: deque[Mapping[str, float]]) -> None:
        """Write these records, and forget each that is."""
        if sink.rereads and sink in self._away:
            records = deque([records[-1]], maxlen=MISSED)
        try:
            while records:
                sink.write(records[0])
                records.popleft()
        except OSError as error:
            if sink not in self._away:
                log.warning(
                    "%s cannot be written (%s): training goes on, and it is tried again each %g s",
                    sink.title,
                    _what(error),
                    RETRY,
                )
            self._away[sink] = self._clock() + RETRY, records
            return
        except (Exception, SystemExit) as error:
            self._stop(sink, error)
        else:
            if sink in self._away:
                log.warning("%s: it is written again, with what it missed", sink.title)
        self._away.pop(sink, None)

    def _stop(self, sink: MetricSink, error: BaseException) -> None:
        self._sinks.remove(sink)
        log.warning(
            "%s: no more is written there (%s)%s",
            sink.title,
            _what(error),
            f"; {FILE} has all metrics" if self._lines.whole else "",
        )
        self._close(sink)

    def _close(self, sink: MetricSink) -> None:
        try:
            sink.close()
        except (Exception, SystemExit) as error:
            log.warning("%s cannot be closed: %s", sink.title, _what(error))

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._lines.close()
        for sink, (_, missed) in list(self._away.items()):
            self._write(sink, missed)
            if sink in self._away:
                log.warning(
                    "%s lacks its last records%s",
                    sink.title,
                    f"; {FILE} has all" if self._lines.whole else "",
                )
        self._away.clear()
        while self._sinks:
            self._close(self._sinks.pop())


def _what(error: BaseException) -> str:
    """Return what a user reads of an error of a sink."""
    return str(error) if isinstance(error, (OSError, ImportError, TidemillError)) else repr(error)
