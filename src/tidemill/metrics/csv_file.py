"""`metrics.csv`: the records as a table, for spreadsheets and data frames."""

import csv
from collections.abc import Iterable, Mapping

from tidemill.api.metric_sink import LoggedRun, MetricSink
from tidemill.core.private_files import private
from tidemill.metrics.json_lines import each_record


class CSV(MetricSink):
    """The sink writes a CSV file with a row per record. When a record brings a new name,
    the file is written anew from `metrics.jsonl`, with one column more; what a record
    does not have is empty there."""

    title = "metrics.csv"
    rereads = True

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self._path = run.folder / "metrics.csv"
        self._columns: dict[str, None] = {}

    def write(self, record: Mapping[str, float]) -> None:
        try:
            self._write(record)
        except OSError:
            self._columns.clear()  # its last row may be torn: the file is written anew
            raise

    def _write(self, record: Mapping[str, float]) -> None:
        if record.keys() <= self._columns.keys():
            self._append(self._path.name, [record])
            return
        for each in each_record(self.run.folder, self.recorded):
            self._columns.update(dict.fromkeys(each))
        (self.run.folder / "metrics.csv.tmp").unlink(missing_ok=True)
        self._append("metrics.csv.tmp", [dict(zip(self._columns, self._columns, strict=True))])
        self._append("metrics.csv.tmp", each_record(self.run.folder, self.recorded))
        (self.run.folder / "metrics.csv.tmp").replace(self._path)

    def _append(self, name: str, rows: Iterable[Mapping[str, object]]) -> None:
        with open(self.run.folder / name, "a", newline="", opener=private) as file:
            csv.writer(file).writerows([row.get(column, "") for column in self._columns] for row in rows)
