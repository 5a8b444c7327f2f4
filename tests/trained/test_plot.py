"""Curves over runs and seeds."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from tidemill.api.metric_sink import LoggedRun
from tidemill.core.errors import RunError
from tidemill.metrics.json_lines import JSONLines
from tidemill.trained.plot import middle, over_seeds, plot


def run(
    folder: Path, returns: list[float], name: str | None = None, seed: int = 0, **settings: object
) -> Path:
    writer = JSONLines(LoggedRun(folder))
    for i, value in enumerate(returns):
        writer.write({"step": 100 * i + seed, "return/mean": value})
    writer.close()
    if name:
        (folder / "config.json").write_text(
            json.dumps({"name": name, "seed": seed, "limits": {"steps": 100 * len(returns)}, **settings})
        )
    return folder


def labels_of(runs: list[Path], out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """The lines of the picture: label → places."""
    axes = pytest.importorskip("matplotlib.axes")
    found: dict[str, np.ndarray] = {}
    real = axes.Axes.plot

    def spy(self: object, *args: np.ndarray, label: str, **kwargs: object) -> object:
        found[label] = args[0]
        return real(self, *args, label=label, **kwargs)

    monkeypatch.setattr(axes.Axes, "plot", spy)
    plot(runs, out)
    monkeypatch.undo()
    return found


def curve(*points: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    places, values = np.array(points, np.float64).T
    return places, values


def test_several_curves_are_compared_where_all_were_measured() -> None:
    places, middle_, low, high = over_seeds([curve((0, 0), (2, 4)), curve((1, 4), (2, 6), (3, 9))])
    # at 0 and 3 only one of them has been measured: nothing jumps there
    np.testing.assert_array_equal(places, [1, 2])
    np.testing.assert_array_equal(middle_, [3, 5])
    np.testing.assert_array_equal(low, [2, 4])  # of two the interval of the mean is as wide as they are apart
    np.testing.assert_array_equal(high, [4, 6])


def test_of_many_places_so_many_are_drawn_as_can_be_seen() -> None:
    long = curve(*((step, step) for step in range(1000)))
    places, middle_, _, _ = over_seeds([long, long])
    assert len(places) == 256 and (places[0], places[-1]) == (0, 999)
    np.testing.assert_allclose(middle_, places)


def test_the_interquartile_mean_is_that_of_the_middle_half() -> None:
    values = np.array([[100.0], [1.0], [2.0], [3.0], [-50.0], [4.0], [5.0], [6.0]])
    assert middle(values) == 3.5  # without 100, 6, -50 and 1: of 2, 3, 4 and 5
    assert middle(values[:3]) == pytest.approx(103 / 3)  # of three nothing is left out


def test_the_interval_is_of_the_mean_and_not_of_the_runs() -> None:
    rng = np.random.default_rng(7)
    values = rng.normal(0.0, 1.0, 40)
    _, at, low, high = over_seeds([curve((0, value), (1, value)) for value in values])
    spread = np.sort(values)[10:30]
    assert low[0] < at[0] < high[0] and at[0] == pytest.approx(spread.mean())
    # the runs lie 4 apart; the interquartile mean of 40 has a standard error of some 0.2
    assert 0.4 < high[0] - low[0] < 1.2
    # the same picture each time
    np.testing.assert_array_equal(over_seeds([curve((0, value), (1, value)) for value in values])[2], low)


def test_runs_of_the_same_settings_are_one_line_and_of_others_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(folder: str, rate: float, seed: int, steps: int = 4, clip: float = 0.2) -> Path:
        algorithm = {"learning_rate": rate, "clip": clip, "kind": "PPO"}
        return run(
            tmp_path / folder,
            [float(seed + i) for i in range(steps)],
            "ppo",
            seed,
            workers={"trainer": {"algorithm": algorithm}},
        )

    runs = [of(f"a{seed}", 0.001, seed, steps=4 + seed) for seed in range(4)] + [
        of(f"b{seed}", 0.1, seed) for seed in range(2)
    ]
    runs += [of("c", 0.1, 0, clip=0.3)]
    runs += [run(tmp_path / "alone", [3.0, 4.0], "dqn"), run(tmp_path / "bare", [5.0, 6.0])]
    lines = labels_of(runs, tmp_path / "new" / "curve.png", monkeypatch)
    assert [*lines] == [
        "ppo: learning_rate=0.001, clip=0.2 (interquartile mean of 4 runs)",
        "ppo: learning_rate=0.1, clip=0.2 (mean of 2 runs)",
        "ppo: learning_rate=0.1, clip=0.3",
        str(tmp_path / "alone"),
        str(tmp_path / "bare"),
    ]
    first = lines["ppo: learning_rate=0.001, clip=0.2 (interquartile mean of 4 runs)"]
    assert (first[0], first[-1]) == (3, 300)  # where the last began, and the first ended
    assert (tmp_path / "new" / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_layout_that_was_chosen_for_the_machine_is_no_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(folder: str, lanes: int, layout: object) -> Path:
        made = run(
            tmp_path / folder,
            [1.0, 2.0],
            "ppo",
            workers={"actor": {"lanes": lanes, "agents": [{"sample_steps": 512 // lanes}]}},
        )
        (made / "layout.json").write_text(json.dumps(layout))
        return made

    chosen = {"layout": "1x8", "costs": {"step": 1.0}}
    assert [*labels_of([of("a", 8, chosen), of("b", 16, chosen)], tmp_path / "a.png", monkeypatch)] == [
        "ppo (mean of 2 runs)"
    ]
    told = {"layout": "1x8", "costs": None}
    assert [*labels_of([of("c", 8, told), of("d", 16, told)], tmp_path / "b.png", monkeypatch)] == [
        "ppo: lanes=8, sample_steps=64", "ppo: lanes=16, sample_steps=32",
    ]  # fmt: skip


def test_a_limit_is_a_setting_where_a_schedule_runs_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(folder: str, steps: int, to_step: int | None) -> Path:
        schedule = {"kind": "LinearSchedule", "start": 1e-3, "end": 0, "to_step": to_step, "from_step": 0}
        return run(
            tmp_path / folder,
            [1.0] * steps,
            "ppo",
            workers={"trainer": {"algorithm": {"learning_rate": schedule}}},
        )

    assert [*labels_of([of("a", 3, 100), of("b", 4, 100)], tmp_path / "a.png", monkeypatch)] == [
        "ppo (mean of 2 runs)"
    ]
    assert [*labels_of([of("c", 3, None), of("d", 4, None)], tmp_path / "b.png", monkeypatch)] == [
        "ppo: steps=300",
        "ppo: steps=400",
    ]


def test_runs_with_nothing_in_common_are_named(tmp_path: Path) -> None:
    runs = [run(tmp_path / "a", [1.0, 2.0], "ppo"), run(tmp_path / "b", [1.0, 2.0], "ppo", seed=500)]
    with pytest.raises(RunError, match='the runs of "ppo" have no environment steps in common'):
        plot(runs, tmp_path / "a.png")


def test_what_runs_are_called_is_no_formula(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(
        [run(tmp_path / "a", [1.0, 2.0], name=r"a$\frac$"), run(tmp_path / "b$1$", [1.0, 2.0])],
        tmp_path / "curve.png",
    )
    assert (tmp_path / "curve.png").stat().st_size > 0


def test_one_point_alone_is_seen(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("matplotlib.image")
    runs = [run(tmp_path / str(seed), [1.0], "ppo") for seed in range(2)]
    for name, those in (("one", runs[:1]), ("two", runs)):
        plot(those, tmp_path / f"{name}.png")
        # the middle, without axes and legend
        picture = image.imread(tmp_path / f"{name}.png")[100:500, 200:700, :3]
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
