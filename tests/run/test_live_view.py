"""The views: what they say of a snapshot, and when."""

import dataclasses
import io

from rich.console import Console

from tidemill.run.live_view import LiveView, PlainView, make_view, picture
from tidemill.run.snapshot import LimiterView, Snapshot, WorkerView, evaluations_of

ACTOR = WorkerView("actor.0", "running", {"environment": 0.5, "inference": 0.25, "odd": 0.125}, 48211.0)
START = Snapshot("cartpole-1", 0.0, 0, 600_000, 0.0, 48_211.0, {"": None}, 0, 0, None, 0, (ACTOR,))
LATER = dataclasses.replace(
    START,
    seconds=3725.0,
    steps=150_000,
    steps_per_second=96_513.2,
    mean_returns={"": 123.45},
    episodes=1711,
    updates=20,
    lag=1.04,
    dropped=3,
)

LIMITER = LimiterView(12_345, 3_086, 2, 1.25, 341.0, balance=36.44, healthy=31, slots=32)
ITERATION = {
    "number": 3.0,
    "step": 30_000.0,
    "training_return": 100.24,
    "training_episodes": 21.0,
    "evaluation_episodes": 1.0,
}


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def console(file: io.StringIO | None = None, **options: object) -> Console:
    return Console(file=file or io.StringIO(), width=100, height=20, **options)  # type: ignore[arg-type]


def text(of: Console) -> str:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


def frame(snapshot: Snapshot, width: int = 100, height: int = 20) -> str:
    into = Console(file=io.StringIO(), width=width, height=height)
    into.print(picture(snapshot, width, height))
    return text(into)


def test_a_terminal_gets_the_live_view_and_all_else_gets_lines() -> None:
    assert isinstance(
        make_view(console(Terminal(), force_terminal=True, _environ={"TERM": "xterm"})), LiveView
    )
    assert isinstance(make_view(console()), PlainView)
    assert isinstance(make_view(console(_environ={"FORCE_COLOR": "1"})), PlainView)
    assert isinstance(make_view(console(Terminal(), _environ={"TERM": "dumb"})), PlainView)


def test_plain_lines_come_first_every_five_seconds_and_at_a_change_of_state() -> None:
    view = PlainView(console())
    for seconds, state in (
        (0, "running"),
        (1, "running"),
        (4.9, "running"),
        (5, "running"),
        (6, "paused"),
        (7, "paused"),
        (8, "running"),
    ):
        view.show(dataclasses.replace(START, seconds=seconds, state=state))
    assert [line.split()[0] for line in text(view._console).splitlines()] == [
        "0:00:00",
        "0:00:05",
        "0:00:06",
        "0:00:08",
    ]


def test_the_memory_plan_is_told_once_and_stays_in_the_live_view() -> None:
    view = PlainView(console())
    planned = dataclasses.replace(START, memory="memory: samples 66 MB; 21.3 GB available")
    for snapshot in (START, planned, dataclasses.replace(planned, seconds=9.0)):
        view.show(snapshot)
    assert [
        line.startswith("memory: samples 66 MB; 21.3 GB") for line in text(view._console).splitlines()
    ] == [False, True, False]
    lines = frame(dataclasses.replace(planned, workers=(ACTOR,) * 40)).splitlines()
    assert lines[1].strip() == planned.memory and len(lines) < 20
    assert max(map(len, frame(dataclasses.replace(planned, memory="x" * 200)).splitlines())) <= 100


def test_a_plain_line_tells_every_figure() -> None:
    view = PlainView(console())
    view.show(LATER)
    assert text(view._console).strip() == (
        "1:02:05  steps 150,000 of 600,000  steps/s 97k  return 123.5  episodes 1,711  updates 20  lag 1.0  "
        "dropped 3"
    )


def test_a_plain_line_without_a_new_update_tells_what_is_gathered() -> None:
    view = PlainView(console())
    for seconds, state in ((0.0, "starting"), (0.0, "running"), (5.0, "running"), (10.0, "paused")):
        view.show(dataclasses.replace(START, seconds=seconds, state=state))
    view.show(dataclasses.replace(START, seconds=15.0, updates=1))
    view.show(dataclasses.replace(START, seconds=20.0, updates=1, gathered_per_second=47.6))
    lines = text(view._console).splitlines()
    assert ["gathered/s" in line for line in lines] == [False, True, True, False, False, True]
    assert lines[-1].endswith("updates 1  lag –  dropped 0  gathered/s 47.6")


def test_evaluations_are_told_and_shown() -> None:
    measured = {"population/best": 3.0}
    for name, (mean, low, high) in {
        "evaluation": (0.56, 0.4, 0.72),
        "chance": (120.44, 118.0, 122.9),
        "far": (1234.5, 1200.0, 1300.0),
    }.items():
        measured |= {
            f"{name}/return": mean,
            f"{name}/return_low": low,
            f"{name}/return_high": high,
            f"{name}/games": 9.0,
        }
    evaluations = evaluations_of(
        {**measured, "evaluation/win_rate": 0.78, "evaluation/elo": 1785.2, "chance/win_rate": 1.0}
    )
    told = {
        "evaluation": "0.56 (0.40 … 0.72), won 78%, Elo 1,785",
        "chance": "120.4 (118.0 … 122.9), won 100%",
        "far": "1,234 (1,200 … 1,300)",
    }
    assert {name: str(view) for name, view in evaluations.items()} == told
    snapshot = dataclasses.replace(LATER, evaluations=evaluations, workers=(ACTOR,) * 40)
    view = PlainView(console())
    view.show(snapshot)
    assert (
        text(view._console)
        .strip()
        .endswith("dropped 3  " + "  ".join(f"{name} {value}" for name, value in told.items()))
    )
    lines = frame(snapshot).splitlines()
    assert len(lines) < 20 and all(
        any(name in line and value in line for line in lines) for name, value in told.items()
    )


def test_a_run_with_a_ratio_has_a_line_of_its_limiter() -> None:
    view = PlainView(console())
    view.show(dataclasses.replace(LATER, limiters={"trainer-0": LIMITER}))
    told = (
        "committed 12,345  tasks 3,086  debt 2  gather waited 1.2 s  train waited 341 s  N* 36.4  healthy 31 "
        "of 32"
    )
    assert text(view._console).splitlines()[1].strip() == told
    view = PlainView(console())
    view.show(dataclasses.replace(LATER, limiters={"a-0": LIMITER, "b-0": LimiterView(1, 0, 0, 0.0, 0.0)}))
    assert [line.split()[:4] for line in text(view._console).splitlines()[1:]] == [
        [*["trainer", "a-0", "committed", "12,345"]],
        [*["trainer", "b-0", "committed", "1"]],
    ]
    assert text(view._console).endswith("N* –\n")


def test_a_frame_shows_the_limiter_and_fits_narrow_terminals() -> None:
    snapshot = dataclasses.replace(
        LATER, memory="memory: " + "x" * 90, workers=(ACTOR,) * 40, limiters={"trainer-0": LIMITER}
    )
    for width, height, tables in ((100, 20, 2), (80, 24, 2), (40, 24, 4)):
        lines = frame(snapshot, width, height).splitlines()
        assert len(lines) < height and max(map(len, lines)) <= width
        assert all(any(value in line for line in lines) for value in LIMITER.figures().values())
        assert lines.index("") == 3 and lines[4 + 2 * tables] == ""


def test_each_iteration_that_ends_is_told_once_in_a_line() -> None:
    both = [ITERATION, {**ITERATION, "number": 4.0, "step": 40_000.0, "evaluation_return": 1234.56}]
    told = [
        "iteration 3 at 30,000 steps: evaluation – (1 episode), training 100.2 (21 episodes)",
        "iteration 4 at 40,000 steps: evaluation 1,234.6 (1 episode), training 100.2 (21 episodes)",
    ]
    plain = PlainView(console())
    live = LiveView(console(Terminal(), force_terminal=True, _environ={"TERM": "xterm"}))
    for view in (plain, live):
        with view:
            for count in (0, 1, 1, 2, 2):
                view.show(dataclasses.replace(LATER, iterations=both[:count]))
        assert [text(view._console).count(line) for line in told] == [1, 1]
    without = {name: value for name, value in ITERATION.items() if not name.startswith("evaluation")}
    plain.show(dataclasses.replace(LATER, iterations=[*both, without]))
    assert text(plain._console).endswith("steps: training 100.2 (21 episodes)\n")


def test_unknown_figures_are_dashes_and_no_limit_has_no_bar() -> None:
    shown = frame(dataclasses.replace(START, limit=None))
    assert "of" not in shown.split()
    assert "━" not in shown
    assert shown.split().count("–") == 2


def test_a_frame_tells_progress_and_where_time_goes() -> None:
    shown = frame(LATER)
    assert "25%" in shown
    assert "actor.0  running  48k/s  █████████████████████···  environment 50%, inference 25%" in shown


def test_a_frame_fits_its_terminal() -> None:
    many = dataclasses.replace(LATER, workers=(ACTOR,) * 40)
    for width, height in ((100, 20), (80, 24)):
        lines = frame(many, width, height).splitlines()
        assert len(lines) < height
        assert max(map(len, lines)) <= width
    assert f"and {40 - 11} more" in frame(many)


def test_names_are_not_read_as_markup() -> None:
    odd = dataclasses.replace(ACTOR, name="[red]actor[0]")
    assert "[red]actor[0]" in frame(dataclasses.replace(START, run="[bold]", workers=(odd,)))


def test_shares_that_sum_to_more_than_one_fill_the_bar_and_no_more() -> None:
    assert f"  {'█' * 24}  " in frame(
        dataclasses.replace(START, workers=(dataclasses.replace(ACTOR, shares={"train": 0.9, "copy": 0.9}),))
    )


def test_the_live_view_leaves_the_newest_frame_and_a_visible_cursor() -> None:
    view = LiveView(console(Terminal(), force_terminal=True, _environ={"TERM": "xterm"}))
    with view:
        view.show(START)
        view.show(dataclasses.replace(LATER, seconds=0.01))  # too soon to be drawn
        assert "150,000" not in text(view._console)
    assert "150,000" in text(view._console)
    assert text(view._console).rindex("\x1b[?25h") > text(view._console).rindex("\x1b[?25l")
    view.close()


def test_the_end_tells_the_summary_and_commands_that_can_be_copied() -> None:
    view = PlainView(console())
    command = f"tidemill eval runs/{'x' * 120}"
    summary = {
        "status": "reached return 475",
        "env_steps": 412416,
        "seconds": 75.25,
        "mean_return": None,
        "steps_per_second": 73400.23,
    }
    view.end(summary, {"evaluate": command})
    lines = text(view._console).splitlines()
    assert [line.split("  ")[-1].strip() for line in lines if line] == [
        "reached return 475",
        "412,416",
        "0:01:15",
        "–",
        "73,400.2",
        "Next:",
        command,
    ]
