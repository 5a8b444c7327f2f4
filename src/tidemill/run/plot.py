"""Curves of runs as a picture. Runs of one experiment (the same `name` in their config.json) become one line: mean and min–max band over seeds."""

import math
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import RunError, did_you_mean
from tidemill.run.metrics import each_record

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Places and values, by rising place."""

AXES = {"step": "environment steps", "update": "updates", "time/seconds": "seconds", "return/mean": "mean return of an episode"}


def plot(runs: list[Path], out: Path, x: str = "step", y: str = "return/mean") -> None:
    """Draw metric `y` over metric `x` for the runs in the given folders, into the picture file `out`.

    Raises `RunError` when a run has no metrics, none has `x` or `y`, matplotlib is missing, or `out` cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RunError('plotting needs matplotlib, which is not installed. Install it with: pip install "tidemill[plot]"') from None
    if not runs:
        raise RunError("nothing to plot: name one run folder or more")
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for label, curves in _groups(runs, x, y).items():
        if len(curves) == 1:
            axes.plot(*curves[0], label=label, marker=_marker(curves[0][0]))
            continue
        places, mean, low, high = over_seeds(curves)
        (line,) = axes.plot(places, mean, label=f"{label} (mean of {len(curves)}, min–max)", marker=_marker(places))
        axes.fill_between(places, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_xlabel(AXES.get(x, x))
    axes.set_ylabel(AXES.get(y, y))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.legend(frameon=False)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, format=out.suffix[1:] or "png")
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"cannot write {out}: {error}. Name a file that ends in .png") from error


def over_seeds(curves: Iterable[Curve]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return (places, mean, low, high) of curves measured at different places.

    Between its measurements a curve is taken as straight; before its first and after its last it takes no part, so a run that ended early does not
    hold the others down.
    """
    curves = list(curves)
    places = np.unique(np.concatenate([where for where, _ in curves]))
    values = np.stack([np.interp(places, where, value, left=np.nan, right=np.nan) for where, value in curves])
    return places, np.nanmean(values, axis=0), np.nanmin(values, axis=0), np.nanmax(values, axis=0)


def _marker(places: NDArray[np.float64]) -> str:
    return "o" if len(places) == 1 else ""  # one point alone makes no line


def _groups(runs: list[Path], x: str, y: str) -> dict[str, list[Curve]]:
    """Return the curves by label: by experiment name where several runs share it, else by folder."""
    names = {run: _name(run) for run in runs}
    groups: dict[str, list[Curve]] = {}
    for run, name in names.items():
        shared = list(names.values()).count(name) > 1
        groups.setdefault(name if shared else str(run), []).append(_curve(run, x, y))
    return groups


def _name(run: Path) -> str:
    try:
        config = msgspec.json.decode((run / "config.json").read_bytes(), type=dict[str, object])
    except (OSError, msgspec.DecodeError):
        return str(run)  # a metrics file alone is enough for a line
    return str(config.get("name", run))


def _curve(run: Path, x: str, y: str) -> Curve:
    known: set[str] = set()
    pairs = []
    for record in each_record(run):
        known.update(record)
        if x in record and y in record and math.isfinite(record[x]) and math.isfinite(record[y]):
            pairs.append((record[x], record[y]))
    for metric in (x, y):
        if metric not in known:
            raise RunError(f'{run} has no metric "{metric}"; {did_you_mean(metric, known)}')
    if not pairs:
        raise RunError(f'{run} has no finite value of "{y}" over "{x}" yet')
    places, values = np.array(sorted(pairs), np.float64).T
    return places, values
