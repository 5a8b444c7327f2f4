"""Curves of runs as a picture. Runs of the same settings that differ by their seed become
one line with an interval.

The line is the interquartile mean over seeds where there are four or more: the mean of
the middle half, which one lucky or unlucky seed does not move (Agarwal et al. 2021, "Deep
Reinforcement Learning at the Edge of the Statistical Precipice"); of fewer it is their
mean. The band is its 95 % percentile bootstrap interval: seeds are drawn anew, with
replacement. Both are drawn where all seeds of the line were measured, so that none joins
or leaves on the way.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import RunError, did_you_mean, needing
from tidemill.metrics.json_lines import each_record
from tidemill.trained.run_settings import differences, name_of, settings_of

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Places and values, by rising place."""

AXES = {
    "step": "environment steps", "update": "updates", "time/seconds": "seconds",
    "return/mean": "mean return of an "
                   "episode", "length/mean": "mean length of an episode", "win_rate": "share of episodes won",
}  # fmt: skip
RESAMPLES = 2000  # of the bootstrap
MOST_PLACES = 256  # at which several curves are compared; that many are more than a picture can show
AT_ONCE = 1 << 22  # numbers of the bootstrap that are in memory
QUARTILES = 4  # curves from which on there is something between the quartiles


def plot(runs: Sequence[str | Path], out: str | Path, x: str = "step", y: str = "return/mean") -> None:
    """Draw metric `y` over metric `x` for the runs in the given folders into the picture
    file `out`, whose suffix is the format (PNG without one). Runs that differ by their
    seed alone become one line: their mean, or from four runs on their interquartile mean,
    with its 95 % bootstrap interval as a band.

    Raises `RunError` when `runs` is empty, a run has no metrics, none has `x` or `y`,
    seeds have no `x` in common, matplotlib is missing, or `out` cannot be written.
    """
    with needing("plotting needs", 'pip install "tidemill[plot]"', RunError):
        from matplotlib.figure import Figure
    if not runs:
        raise RunError("nothing to plot: name one run folder or more")
    folders, out = [Path(run) for run in runs], Path(out)
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    groups = _groups(folders, x, y)
    for label, curves in groups.items():
        if len(curves) == 1:
            axes.plot(*curves[0], label=_literal(label), marker=_marker(curves[0][0]))
            continue
        if max(where[0] for where, _ in curves) > min(where[-1] for where, _ in curves):
            raise RunError(
                f'the runs of "{label}" have no {AXES.get(x, x)} in common; draw them one by one, or leave '
                "out the shortest"
            )
        places, mean, low, high = over_seeds(curves)
        what = "interquartile mean" if len(curves) >= QUARTILES else "mean"
        (line,) = axes.plot(
            places, mean, label=_literal(f"{label} ({what} of {len(curves)} runs)"), marker=_marker(places)
        )
        axes.fill_between(places, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    if any(len(curves) > 1 for curves in groups.values()):
        axes.set_title(
            "bands: 95 % bootstrap intervals; a line ends where the first of its runs ends",
            fontsize="small",
            color="0.4",
            loc="left",
        )
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


def over_seeds(
    curves: Sequence[Curve],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return (places, middle, low, high) of curves measured at different places: their
    mean or interquartile mean, and its 95 % interval, at the places that lie within all
    of them.

    Between its measurements a curve is taken as straight.
    """
    first, last = max(where[0] for where, _ in curves), min(where[-1] for where, _ in curves)
    places = np.unique(np.concatenate([*(where for where, _ in curves), [first, last]]))
    places = places[(places >= first) & (places <= last)]
    if len(places) > MOST_PLACES:
        places = np.linspace(first, last, MOST_PLACES)
    values = np.stack([np.interp(places, where, value) for where, value in curves])
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(values), (RESAMPLES, len(values)))
    parts = np.array_split(values, -(-drawn.size * len(places) // AT_ONCE), axis=1)
    low, high = np.concatenate(
        [np.percentile(middle(part[drawn]), (2.5, 97.5), axis=0) for part in parts], axis=1
    )
    return places, middle(values), low, high


def middle(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the interquartile mean of [..., seeds, places] over seeds: the mean of what
    is left without the lowest and the highest quarter, rounded down, so that of fewer
    than four it is the mean."""
    seeds = values.shape[-2]
    cut = seeds // QUARTILES
    if not cut:
        return np.asarray(values.mean(axis=-2))
    return np.asarray(np.sort(values, axis=-2)[..., cut : seeds - cut, :].mean(axis=-2))


def _literal(label: str) -> str:
    """Return a label as matplotlib shows it as it is: what stands between dollars it
    takes for a formula."""
    return label.replace("$", r"\$")


def _marker(places: NDArray[np.float64]) -> str:
    return "o" if len(places) == 1 else ""  # one point alone makes no line


def _groups(runs: Sequence[Path], x: str, y: str) -> dict[str, list[Curve]]:
    """Return the curves by label. Runs of one name and the same settings are one line;
    what tells lines of one name apart stands behind it. A run that is alone is called by
    its folder."""
    names = {run: name_of(run) for run in runs}
    found: dict[str, list[Curve]] = {}
    for name in dict.fromkeys(names.values()):
        shared = [run for run, other in names.items() if other == name]
        if name is None or len(shared) == 1:
            found |= {str(run): [_curve(run, x, y)] for run in shared}
            continue
        settings = {run: settings_of(run) for run in shared}
        kinds: list[list[Path]] = []
        for run in shared:
            same = next((kind for kind in kinds if settings[kind[0]] == settings[run]), None)
            kinds.append([run]) if same is None else same.append(run)
        for kind, told in zip(kinds, differences([settings[kind[0]] for kind in kinds]), strict=True):
            label = f"{name}: {told}" if told else name
            label = label if label not in found else f"{label}, {kind[0]}"
            found[label] = [_curve(run, x, y) for run in kind]
    return found


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
