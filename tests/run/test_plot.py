"""Curves over runs and seeds."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from tidemill.core.errors import RunError
from tidemill.run.metrics import MetricsWriter
from tidemill.run.plot import over_seeds, plot


def run(folder: Path, returns: list[float], name: str | None = None, seed: int = 0) -> Path:
    writer = MetricsWriter(folder)
    for i, value in enumerate(returns):
        writer.write({"step": 100 * i + seed, "return/mean": value})
    writer.close()
    if name:
        (folder / "config.json").write_text(json.dumps({"name": name, "seed": seed}))
    return folder


def test_mean_and_band_are_taken_at_every_measured_place() -> None:
    places, mean, low, high = over_seeds([(np.array([0.0, 2.0]), np.array([0.0, 4.0])), (np.array([1.0, 2.0, 3.0]), np.array([4.0, 6.0, 9.0]))])
    np.testing.assert_array_equal(places, [0, 1, 2, 3])
    np.testing.assert_array_equal(mean, [0, 3, 5, 9])  # at 0 and 3 only one of them has been measured
    np.testing.assert_array_equal(low, [0, 2, 4, 9])
    np.testing.assert_array_equal(high, [0, 4, 6, 9])


def test_runs_of_one_experiment_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = pytest.importorskip("matplotlib.axes")
    labels: list[str] = []
    real = axes.Axes.plot

    def spy(self: object, *args: object, label: str, **kwargs: object) -> object:
        labels.append(label)
        return real(self, *args, label=label, **kwargs)

    monkeypatch.setattr(axes.Axes, "plot", spy)
    runs = [run(tmp_path / f"seed{seed}", [1.0, 2.0 + seed], "ppo", seed) for seed in range(3)]
    runs += [run(tmp_path / "alone", [3.0, 4.0], "dqn"), run(tmp_path / "bare", [5.0, 6.0])]
    plot(runs, tmp_path / "new" / "curve.png")
    assert labels == ["ppo (mean of 3, min–max)", str(tmp_path / "alone"), str(tmp_path / "bare")]
    assert (tmp_path / "new" / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_one_point_alone_is_seen(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("matplotlib.image")
    runs = [run(tmp_path / str(seed), [1.0], "ppo") for seed in range(2)]
    for name, those in (("one", runs[:1]), ("two", runs)):
        plot(those, tmp_path / f"{name}.png")
        picture = image.imread(tmp_path / f"{name}.png")[100:500, 200:700, :3]  # the middle, without axes and legend
        assert (np.ptp(picture, axis=2) > 0.5).sum() > 20, "nothing there has a colour"


def test_an_unknown_metric_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(RunError, match='no metric "return/maen"; did you mean "return/mean"'):
        plot([run(tmp_path / "a", [1.0])], tmp_path / "a.png", y="return/maen")


def test_a_metric_without_a_finite_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match='no finite value of "return/mean"'):
        plot([run(tmp_path / "a", [math.nan])], tmp_path / "a.png")


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has no metrics\.jsonl"):
        plot([tmp_path / "nothing"], tmp_path / "a.png")


def test_no_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nothing to plot"):
        plot([], tmp_path / "a.png")


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", [1.0, 2.0])
    with pytest.raises(RunError, match=r"cannot write .*ends in \.png"):
        plot([folder], tmp_path / "a.nonsense")
    with pytest.raises(RunError, match="cannot write"):
        plot([folder], folder / "metrics.jsonl" / "a.png")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RunError, match=r"tidemill\[plot\]"):
        plot([], tmp_path / "a.png")
