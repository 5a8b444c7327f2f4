"""The writer of a run's metrics: each record goes to `metrics.jsonl` and to the sinks
that the run was given."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from os.path import isdir
from time import sleep

from tidemill.api.metric_sink import LoggedRun, MetricSink
from tidemill.core.clock import awake
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.folder_thread import FolderThread
from tidemill.core.named_class import named_class
from tidemill.core.secrets import says_secret
from tidemill.metrics.json_lines import JSONLines
from tidemill.metrics.spool import Spool

SINKS = {
    "csv": "tidemill.metrics.csv_file:CSV",
    "tensorboard": "tidemill.metrics.tensorboard:TensorBoard",
    "wandb": "tidemill.metrics.wandb:WeightsAndBiases",
}
"""The sinks that are known by a name of one word: module and class. A new one is a line
here."""
DEFAULT = "tensorboard"

HURRIED = 10.0  # seconds that sinks have at the end of a run that a signal ends
AWAY = 2.0  # seconds of these where the run's folder hangs
LOOK = 0.1  # seconds between looks at whether one has come
ANSWER = 60.0  # seconds for which a run that goes back waits for a folder that hangs

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
    """The writer writes the records of one run into its folder, and has those of `sinks`
    written besides, each in a thread of its own (`Spool`): training goes on whatever they
    do, and what they do is warned of. Raises what making a sink raises.

    thread: in which it writes into the folder; None: one of its own
    """

    def __init__(
        self,
        run: LoggedRun,
        sinks: Collection[type[MetricSink]] = (),
        thread: FolderThread | None = None,
    ) -> None:
        self._thread = thread
        self._run, self._lines = run, JSONLines(run, thread)
        self._spools: list[Spool] = []
        try:
            for sink in sinks:
                self._spools.append(Spool(sink, run, lambda: self._lines.whole))
        except BaseException:
            self.close()
            raise

    def write(self, record: Mapping[str, float]) -> None:
        """Append one record. It needs a ``step``; the other names are free. Raises
        `Overtaken`."""
        plain = {
            k: v if isinstance(v, int) else float(v)
            for k, v in record.items()
            if not says_secret(k.rpartition("/")[2])
        }
        self._lines.write(plain)
        for spool in self._spools:
            spool.put(self._run, plain, self._lines.end)

    def go_back(self, run: LoggedRun) -> None:
        """Have the records of the run go on from where it goes back to. Each sink is made
        anew before the next one. Where the folder hangs it waits for that, since what is
        being written there is to be dropped. Raises `RunError` where it hangs for longer
        than `ANSWER`, or is gone."""
        self._await_folder()
        self._lines.close()
        self._await_folder()  # it may hang since
        if not isdir(run.folder):  # it is not made anew
            raise RunError(
                f"{run.folder} was removed or renamed, or its disk is away, and a worker has died that goes "
                "back to what lay there: the run ends. Where the folder is elsewhere, resume it there"
            )
        self._run, self._lines = run, JSONLines(run, self._thread)

    def _await_folder(self) -> None:
        until = awake() + ANSWER
        while self._lines.hangs:
            if awake() > until:
                raise RunError(
                    f"{self._run.folder}: its disk, or share, has not answered for {ANSWER:g} s, and a worker"
                    " has died that goes back to what lies there; see whether its server, or device, is well,"
                    " and resume the run then"
                )
            sleep(LOOK)

    def look(self) -> None:
        """Tell which sinks do not come back."""
        for spool in self._spools:
            spool.look()

    def close(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """Close the files, and wait for the sinks, which write what waits for them and
        are closed: as long as each asks for (`MetricSink.closing_s`), all at a time, or
        `HURRIED` seconds once `hurry` says that a signal has come, and `AWAY` where the
        folder hangs besides. Those that have not come back then are left, and told. May
        be called twice."""
        self._lines.close()
        for spool in self._spools:
            spool.end(self._lines.end)
        began, until = awake(), inf
        while self._spools:
            if self._spools[0].ended(LOOK):
                self._spools.pop(0)
                continue
            if hurry():
                until = min(until, awake() + (AWAY if self._lines.hangs else HURRIED))
            if awake() > min(until, began + self._spools[0].closing_s):
                self._spools.pop(0).leave(awake() - began)
