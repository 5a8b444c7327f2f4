"""What a run's folder tells of how it goes, or went: ``tidemill doctor run``. Nothing
that the folder names is run, and the run, where it goes on, is left alone."""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tidemill.core.errors import RunError
from tidemill.core.untrusted_files import read_plain
from tidemill.metrics.json_lines import FILE, each_record
from tidemill.run.folder import CONFIG, SUMMARY, RunFolder, as_typed, command
from tidemill.run.run_lifecycle import TRACEBACKS
from tidemill.run.snapshot import evaluations_of
from tidemill.run.training_warnings import TrainingWarnings
from tidemill.testing.check_env import Finding

SILENT = 60.0  # seconds without a record, from which on a run that goes on is said to stand still
_SHARE = re.compile(r"time/([\w-]+-\d+)/(environment|inference|train|copy|wait|python)")
_PLAIN = re.compile(r"[\w./-]{1,80}")  # names of metrics that may be shown


def examine_run(folder: RunFolder) -> Iterator[Finding]:
    """Yield what there is to tell of a run: how it stands, what it reaches, how quick it
    is and who waits, what is odd about its training, and its last error."""
    live = folder.led()
    yield from _standing(folder, live)
    config = folder.read(CONFIG)
    warnings = TrainingWarnings(config if isinstance(config, Mapping) else {})
    last: dict[str, float] = {}  # the newest of each metric
    first, best, count, told = math.nan, -math.inf, 0, list[Finding]()
    try:
        for record in each_record(folder.path):
            told += [
                Finding(
                    "training", "warn", _shown(f"at step {record.get('step', 0):,.0f}: {what}"), _shown(cure)
                )
                for what, cure in warnings.add(record)
            ]
            last.update((name, value) for name, value in record.items() if _PLAIN.fullmatch(name))
            count += "update" in record
            if math.isfinite(reached := record.get("return/mean", math.nan)):
                first = reached if math.isnan(first) else first
                best = max(best, reached)
    except RunError as error:
        yield Finding("records", "warn", str(error))
    if count:
        yield _pace(folder.path, last, count, live)
        yield from _workers(last)
        if best > -math.inf:
            yield Finding(
                "returns",
                "ok",
                f"{first:,.2f} at first, {last['return/mean']:,.2f} now, {best:,.2f} at best (means of the "
                "last episodes)",
            )
        for name, found in evaluations_of(last).items():
            yield Finding(name, "ok", f"mean return {found} of the newest")
        yield from told or [Finding("training", "ok", f"nothing odd in {count:,} records")]
    yield from _error(folder.path)


def _standing(folder: RunFolder, live: bool) -> Iterator[Finding]:
    go_on = folder.how_to_go_on()
    summary: Any = None
    with suppress(RunError):
        summary = folder.read(SUMMARY)
    if live:
        yield Finding("run", "ok", "it is going on")
    elif not isinstance(summary, dict) or not summary:
        yield Finding(
            "run", "warn", f"it was cut off: there is no whole {SUMMARY}, and nobody holds the folder", go_on
        )
    else:
        failed = summary.get("status") == "failed"
        yield Finding(
            "run",
            "fail" if failed else "ok",
            f"{_shown(summary.get('status'))}: {_shown(summary.get('reason'))}",
            go_on if failed else "",
        )


def _pace(path: Path, last: Mapping[str, float], count: int, live: bool) -> Finding:
    seconds = last.get("time/seconds", 0.0)
    steps, updates = last.get("step", 0.0), last.get("update", 0.0)
    text = f"{steps:,.0f} env steps, {updates:,.0f} updates in {seconds:,.0f} s of training"
    if seconds > 0:
        text += f": {steps / seconds:,.0f} steps/s"
    if voided := last.get("limiter/voided", 0.0):
        text += f"; {voided:,.0f} steps were lost to environments that failed"
    dropped = last.get("dropped", 0.0)
    since = time.time() - (path / FILE).stat().st_mtime
    if live and since > SILENT:
        return Finding(
            "pace", "warn", f"{text}; no record for {since:,.0f} s", f"{command()} stop RUN ends it"
        )
    if dropped > 0.1 * steps:
        return Finding(
            "pace", "warn", f"{text}; {dropped:,.0f} rows were dropped as too old", "raise max_policy_lag"
        )
    return Finding("pace", "ok", text)


def _workers(last: Mapping[str, float]) -> Iterator[Finding]:
    """Say where each kind of workers spends its time, by its newest shares."""
    kinds: dict[str, dict[str, list[float]]] = {}
    for name, value in last.items():
        if (found := _SHARE.fullmatch(name)) and math.isfinite(value):
            places = kinds.setdefault(found[1].rpartition("-")[0], {})
            places.setdefault(found[2], []).append(value)
    for kind, places in kinds.items():
        shares = {place: sum(values) / len(values) for place, values in places.items()}
        most = sorted(shares, key=lambda place: -shares[place])
        text = ", ".join(f"{shares[place]:.0%} {place}" for place in most if shares[place] >= 0.01)
        yield Finding(kind, "ok", text or "it has not worked yet")


def _error(path: Path) -> Iterator[Finding]:
    """Say what the last traceback ends with."""
    log = path / TRACEBACKS
    with suppress(OSError, ValueError):
        lines = read_plain(log).decode("utf-8", "replace").strip().splitlines()
        if lines:
            yield Finding("last error", "fail", _shown(lines[-1]), f"see {as_typed(log)}")


def _shown(value: Any) -> str:
    """Return text of a file as it may be shown: in printable letters, not for ever."""
    text = str(value)[:400]
    return text if text.isprintable() else json.dumps(text)
