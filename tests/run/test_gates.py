"""What the limiter and the memory promise holds at every instant of real runs, in threads
and in processes, bounded and exact, and of those that are killed, too. See `watched` for
what looks at it there."""

import json
import random
import signal
import sys
from collections import Counter
from fractions import Fraction
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.run.watching import Run

from tidemill.core.seeding import derive_seed
from tidemill.core.user_code_loading import load_attribute, load_file
from tidemill.metrics.json_lines import read_metrics
from tidemill.replay.limiter import Limiter
from tidemill.replay_training import trainer
from tidemill.run.events import read_events
from tidemill.store.checkpoint import checkpoints, read_checkpoint, read_newest
from tidemill.training.iteration_runners import read_iterations
from tidemill.training.train import train

FILE = Path(__file__).with_name("watched.py")
watched = load_file(FILE, "test")


@pytest.fixture(autouse=True)
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests have the limiter as it is; and steps and looks are counted from 0."""
    monkeypatch.setattr("tidemill.replay_training.ingest.Limiter", Limiter)
    monkeypatch.setattr("tidemill.replay_training.trainer.DRAIN", trainer.DRAIN)
    monkeypatch.setattr(watched.Watched, "looks", 0)
    monkeypatch.setattr(load_attribute(f"{FILE}:Coded", "make"), "steps", 0)


def run(folder: Path, launch: str, **settings: Any) -> dict[str, Any]:
    """Train to the end. Return the facts of the final checkpoint, with those of the
    memory, its rows, and what environments noted."""
    made = watched.experiment(folder / "log", **settings)
    folder.mkdir()
    result = train(made, launch=launch, run_dir=folder / "run", source=FILE, quiet=True)
    assert result.summary["status"] == "completed", result.summary
    facts = left(folder, Fraction(made.workers["trainer"].ratio))
    assert facts["steps"] == made.limits.steps and facts["memory"]["looks"] > facts["updates"]
    n = facts["limiter"]
    assert facts["stored"] == facts["taken"] and n["voided"] == sum(facts["memory"]["lost"])
    owed = (
        0
        if n["waived"] is None
        else floor((n["committed"] - n["waived"]) * Fraction(made.workers["trainer"].ratio))
    )
    assert n["started"] == n["committed"] + n["voided"] and n["tasks"] == max(0, owed)
    told = [record for record in read_metrics(folder / "run") if "limiter/committed" in record][-1]
    assert (
        (told["limiter/committed"], told["update"])
        == (told["step"], facts["updates"])
        == (facts["steps"], facts["updates"])
    )
    assert told["limiter/in_flight"] == told["limiter/debt"] == 0
    return {**facts, "seed": made.seed}


def left(folder: Path, ratio: Fraction, deaths: int = 0) -> dict[str, Any]:
    """Check all checkpoints and the memory. Return the facts of the newest one, with
    those of the memory, its rows, and what environments noted.

    Regular checkpoints are written while slots step: what is in flight then is void in a
    life that goes on from one, and what is owed is within the slack (G1). Slots' counts
    sum to the limiter's (G4), but for those. What a slot did lies in its seat, in order;
    it begins midway in an episode with each of so many `deaths` of a trainer that has
    lived again alone, at most.
    """
    written = checkpoints(folder / "run" / "checkpoints" / "policy")
    for path in written:
        facts, memory = read_checkpoint(path)[1], json.loads((path / "buffer" / "manifest.json").read_text())
        n = facts["limiter"]
        assert n["committed"] == facts["steps"] and n["started"] >= n["committed"] + n["voided"]
        owed = 0 if n["waived"] is None else floor(max(0, n["committed"] - n["waived"]) * ratio)
        assert n["tasks"] == facts["updates"] and 0 <= owed - n["tasks"] <= max(
            ceil(2 * len(memory["lost"]) * ratio), ceil(ratio)
        )
        assert sum(memory["stored"]) == n["committed"] and sum(memory["lost"]) <= n["voided"]
    path, arrays, facts, warnings = read_newest(folder / "run" / "checkpoints" / "policy")
    assert warnings == [] and arrays["policy"]["w"] == facts["updates"]
    memory = json.loads((path / "buffer" / "manifest.json").read_text())
    heads, seen, spans = (np.load(path / "buffer" / f"{name}.npy") for name in ("heads", "row.obs", "span"))
    seats = [seat[:count].astype(int) for seat, count in zip(seen, heads, strict=True)]
    stored = Counter[tuple[int, ...]]()
    for rows, steps in zip(seats, memory["stored"], strict=True):
        begins = rows[:, 2] == 0
        follows = (np.diff(rows[:, 2]) == 1) & (np.diff(rows[:, :2], axis=0) == 0).all(axis=1)
        midway = np.concatenate([~begins[:1], ~follows & ~begins[1:]])
        assert midway.sum() <= deaths
        begins |= midway
        assert begins[:1].all() and (follows ^ begins[1:]).all() and len(rows) - begins.sum() == steps
        stored.update(map(tuple, rows[~begins].tolist()))
    log = [
        (what, tuple(map(int, code)))
        for what, *code in map(str.split, (folder / "log").read_text().splitlines())
    ]
    assert all(what in ("taken", "lost") for what, _ in log)
    taken = Counter(code for what, code in log if what == "taken")
    found = {
        "rows": seats,
        "spans": {*spans.ravel().tolist()},
        "stored": stored,
        "taken": taken,
        "log": log,
        "checkpoints": len(written),
    }
    return {**facts, "memory": memory, **found}


def slot_of(facts: dict[str, Any], exact: bool) -> dict[int, int]:
    """Whose each copy is, by what its seeds are made of: in an exact run slot and
    episode, else how often the slot's was made anew."""
    memory, copies = facts["memory"], watched.Coded.copies
    if exact:
        seeds = {
            (slot, i): derive_seed(derive_seed(facts["seed"], "actor-0", "slot", slot), "reset", i)
            for slot in range(len(memory["lost"]))
            for i in range(200)
        }
    else:
        seeds = {
            (slot, i): int(rows[0, 0]) + 1_000_003 * i
            for slot, (rows, lost) in enumerate(zip(facts["rows"], memory["lost"], strict=True))
            if len(rows)
            for i in range(-lost, lost + 1)
        }
    return {seed % copies: slot for (slot, _), seed in seeds.items()}


RATIOS = ("1/4", "1", "3/2", "8")
BOUNDED = [("threads", False, 1, ratio, every) for ratio in RATIOS for every in (0, 7)] + [
    ("inline", False, 1, ratio, every) for ratio, every in zip(RATIOS, (0, 7, 0, 7), strict=True)
]
EXACT = [
    ("threads", True, 1, "1/4", 0),
    ("threads", True, 1, "3/2", 7),
    ("inline", True, 1, "8", 7),
    ("processes", True, 1, "1", 7),
]
PROCESSES = [
    ("processes", False, 1, "8", 0),
    ("processes", False, 2, "3/2", 7),
    ("processes", False, 2, "1/4", 7),
]


@pytest.mark.parametrize(("launch", "exact", "actors", "ratio", "every"), [*BOUNDED, *EXACT, *PROCESSES])
def test_the_gates_hold_at_every_instant_and_each_slots_counts_are_its_environments(
    tmp_path: Path, launch: str, exact: bool, actors: int, ratio: str, every: int
) -> None:
    facts = run(
        tmp_path / "run",
        launch,
        exact=exact,
        actors=actors,
        ratio=ratio,
        every=every,
        iteration_steps=50,
        checkpoints=10,
    )
    assert (
        (facts["limiter"]["voided"] > 10) == bool(every)
        and facts["updates"] > 20
        and facts["checkpoints"] >= 3
    )
    whose, asked = slot_of(facts, exact), {what: Counter[int]() for what in ("taken", "lost")}
    for what, (copy, *_) in facts["log"]:
        asked[what][whose[copy]] += 1
    for slot, (stored, lost) in enumerate(
        zip(facts["memory"]["stored"], facts["memory"]["lost"], strict=True)
    ):
        assert (asked["taken"][slot], asked["lost"][slot]) == (stored, lost)


@pytest.mark.parametrize(
    ("launch", "every", "endless", "warm_up"),
    [
        ("threads", 0, False, 12),
        ("threads", 0, True, 12),
        ("threads", 0, True, 100),
        ("processes", 9, False, 12),
    ],
)
def test_whole_episodes_may_be_drawn_once_they_are_over_and_nobody_waits_for_an_open_one(
    tmp_path: Path, launch: str, every: int, endless: bool, warm_up: int
) -> None:
    """What may be drawn lags behind C, and debts begin once there is enough of it. All
    steps count, those of episodes that never end, too."""
    buffer = {"whole_episodes": True, "warm_up": warm_up}
    facts = run(tmp_path / "run", launch, slots=4, every=every, endless=endless, ratio="3/2", buffer=buffer)
    opened, over = (np.array(facts["memory"][name]) for name in ("open", "over"))
    assert over.sum() + np.maximum(opened, 0).sum() == 150
    assert (opened.max() >= 150 / 4 - 11) == endless
    assert (facts["updates"] > 0) == (warm_up <= over.sum())


@pytest.mark.parametrize(("launch", "exact"), [("processes", False), ("threads", False), ("threads", True)])
def test_windows_stacks_and_states_of_slots_never_mix(tmp_path: Path, launch: str, exact: bool) -> None:
    """Environments, policies and the algorithm look at them, wherever they are."""
    actors = 1 if exact else 2
    facts = run(
        tmp_path / "run",
        launch,
        exact=exact,
        actors=actors,
        slots=2,
        every=11,
        steps=200,
        frames=3,
        buffer={"steps": 3},
        ratio="1",
    )
    assert facts["updates"] > 100
    assert facts["limiter"]["voided"] > 5  # how many depends on which thread comes first
    assert {1, 2, 3} <= facts["spans"]  # windows that episodes end before, and whole ones


LIVE = """
import sys
from pathlib import Path
from tidemill.core.user_code_loading import load_file
load_file(Path(sys.argv[1]), "test").live(Path(), resume=bool(sys.argv[2]))
"""


class Life(Run):
    """A life of a run by an `AsyncTrainRunner` in `folder`, in which somebody is killed,
    or nobody."""

    def __init__(self, folder: Path, resume: bool, kill: str) -> None:
        self._start(folder, "-c", LIVE, str(FILE), "again" * resume, **{watched.KILL: kill})


def lived(folder: Path, resume: bool, kill: str = "nobody -1 0") -> tuple[int, str]:
    """Return how a life ended, and what it said; it has left nothing."""
    life = Life(folder, resume, kill)
    try:
        ended = life.ended()
        life.nothing_is_left()
    finally:
        life.kill_all()
    return ended


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc, and processes need Linux")
@pytest.mark.parametrize("at", [30, 380])
def test_a_trainer_with_a_replay_memory_that_is_killed_lives_again(tmp_path: Path, at: int) -> None:
    """The run goes on by itself, from the newest checkpoint: nothing is counted twice,
    and nothing is owed."""
    status, text = lived(tmp_path, False, f"trainer {at} {random.Random(at).uniform(0, 0.02)} once")
    assert status == 0, text
    events = read_events(tmp_path / "run")
    assert [(event.worker, event.life) for event in events if event.what == "lives"] == [("trainer-0", 2)]
    (back,) = (event for event in events if event.what == "went back")
    assert (back.policy, back.worker, back.life) == ("policy", "trainer-0", 1) and back.seconds > 0
    facts = left(tmp_path, Fraction(3, 2), deaths=1)
    n = facts["limiter"]
    assert facts["steps"] == 500 == n["committed"] and facts["stored"] <= facts["taken"]
    assert n["voided"] == n["started"] - n["committed"]
    assert n["tasks"] == floor((n["committed"] - n["waived"]) * Fraction(3, 2))
    assert [row["iteration/number"] for row in read_iterations(tmp_path / "run")] == [1, 2, 3, 4, 5]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc, and processes need Linux")
def test_a_run_in_processes_that_is_killed_at_any_step_goes_on_with_what_it_had(tmp_path: Path) -> None:
    """Nothing is counted twice, no work is owed that was not, and nothing is left behind.
    What was done since the newest checkpoint is lost."""
    draw, kept, flown = random.Random(3), 0, 0
    for number, whom in enumerate(["trainer", "main", "trainer"], 1):
        status, text = lived(
            tmp_path, number > 1, f"{whom} {100 * number + draw.randint(1, 80)} {draw.uniform(0, 0.02)}"
        )
        assert (
            (status == -signal.SIGKILL) if whom == "main" else (status == 1 and "trainer-0 is gone" in text)
        ), text
        facts = left(tmp_path, Fraction(3, 2))
        # each iteration ends with a checkpoint
        assert max(kept, 100 * number) <= facts["steps"] < 500 and facts["stored"] <= facts["taken"]
        kept, n = facts["steps"], facts["limiter"]
        assert n["voided"] == sum(facts["memory"]["lost"]) + flown
        flown += n["started"] - n["committed"] - n["voided"]
    assert lived(tmp_path, True)[0] == 0
    facts = left(tmp_path, Fraction(3, 2))
    n = facts["limiter"]
    assert (
        facts["steps"] == 500
        and facts["stored"] <= facts["taken"]
        and n["voided"] == flown == n["started"] - n["committed"]
    )
    assert n["tasks"] == floor((n["committed"] - n["waived"]) * Fraction(3, 2))
    assert read_iterations(tmp_path / "run")[-1]["step"] == 500
