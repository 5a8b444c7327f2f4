"""The conformance kit: sound simulators pass, and each kind of broken one is caught at
its point."""

import sys
from pathlib import Path

import pytest
from tests.bridge.conftest import Build
from tests.run.watching import wait_until
from typer.testing import CliRunner

from tidemill.bridge.kit.check import check_simulator
from tidemill.bridge.kit.check_points import POINTS
from tidemill.bridge.kit.trial_trainer import Program, SimulatorPlay
from tidemill.bridge.kit.trials import TRIALS
from tidemill.bridge.worlds import reach
from tidemill.cli.simulator import simulator as commands
from tidemill.core.errors import ConfigError

HERE = Path(__file__).parents[1]
WORLDS = Path(reach.__file__).parent
QUICK = 0.2  # seconds of plain play
# what not every world has in every layout
RARE = {"masks", "late groups", "side channel", "query", "unknown command", "one change"}
DEADLINE = 60.0  # seconds for an answer, also on a busy machine


@pytest.fixture(autouse=True)
def patience(monkeypatch, tmp_path):
    """Answers and ends are waited for with time; but of a simulator that says that it
    hangs the deadline is over at once."""
    hung, look = tmp_path / "hung", SimulatorPlay._look

    def impatient(play):
        if hung.exists():
            hung.unlink()
            play._end -= DEADLINE
        look(play)

    monkeypatch.setenv("HUNG", str(hung))
    monkeypatch.setattr(SimulatorPlay, "_look", impatient)
    monkeypatch.setattr("tidemill.bridge.kit.trial_trainer._GRACE", DEADLINE)


def soon(monkeypatch, seconds):
    """Have a simulator whose trainer has died end within so many seconds."""
    monkeypatch.setattr("tidemill.bridge.kit.trials._SOON", seconds - 0.1 * DEADLINE)


def broken(point):
    return Program(str(HERE / "broken.py"), (point.replace(" ", "-"),), deadline=DEADLINE)


def verdicts(points):
    found = {"pass": set(), "fail": set(), "not seen": set()}
    for point in points:
        found[point.verdict].add(point.name)
    return found


def seen(program, rare, **only):
    """Check `program`; longer on a machine so busy that what is not `rare` was not seen
    in a moment."""
    for seconds in (QUICK, 1.0, 5.0):
        found = check_simulator(program, seconds, **only)
        if verdicts(found)["not seen"] <= rare:
            break
    return found


def trial_of(point):
    return next(points for points in TRIALS.values() if point in points)


def test_every_point_belongs_to_a_trial():
    assert sorted(name for points in TRIALS.values() for name in points) == sorted(POINTS)


@pytest.mark.parametrize(("world", "layout"), [("reach", "0.3.2"), ("corridor", "0")])
def test_worlds_in_python_pass(world, layout):
    found = seen(Program(str(WORLDS / f"{world}.py"), layout=layout, deadline=DEADLINE), RARE)
    assert not [point for point in found if point.verdict == "fail"]
    assert verdicts(found)["not seen"] <= RARE


@pytest.mark.parametrize(("world", "layout"), [("reach", "0"), ("corridor", "0.3.2")])
def test_worlds_in_c_pass(world, layout, native: Build):
    found = seen(Program(str(native(world)), layout=layout, deadline=DEADLINE), RARE)
    assert not [point for point in found if point.verdict == "fail"]
    assert verdicts(found)["not seen"] <= RARE


@pytest.mark.parametrize(("world", "layout"), [("Reach", "0.3.2"), ("Corridor", "0")])
def test_worlds_in_csharp_pass(world, layout, csharp: Path):
    found = seen(Program(str(csharp / f"{world}.exe"), layout=layout, deadline=DEADLINE), RARE)
    assert not [point for point in found if point.verdict == "fail"]
    assert verdicts(found)["not seen"] <= RARE


def test_a_sound_simulator_of_another_make_passes():
    never = {"late groups", "side channel", "query", "one change"}
    found = seen(broken("nothing"), never)
    assert not [point for point in found if point.verdict == "fail"]
    assert verdicts(found)["not seen"] == never


@pytest.mark.parametrize("point", [point for point in POINTS if point not in ("query", "one change")])
def test_a_broken_simulator_is_caught_at_its_point_and_at_no_other(point, monkeypatch):
    """Once more, and longer, on a machine so busy that one without patience lost it
    elsewhere, or one that should have done wrong meanwhile had no turn."""
    soon(monkeypatch, 1.5)
    for seconds in (QUICK, 1.0, 5.0):
        found = check_simulator(broken(point), seconds, only=trial_of(point))
        failed = [(one.name, one.cure) for one in found if one.verdict == "fail"]
        if failed == [(point, POINTS[point][1])]:
            break
    assert failed == [(point, POINTS[point][1])]


@pytest.mark.parametrize(
    ("kind", "point", "verdict", "what"),
    [
        ("late", "late groups", "pass", '"late" appeared'),
        ("mortal", "steps", "fail", "the sky fell"),
        ("alternating", "varying agents", "pass", "different numbers"),
        ("rich", "masks", "pass", '"rich"'),
        ("statistical", "side channel", "pass", "messages in 1 channels"),
        ("forgetful", "commands", "fail", "it handed back with reset = 1"),
        ("stepping", "query", "fail", "rows changed"),
        ("twofold", "one change", "fail", "2 bodies in its turn"),
        ("late", "one change", "pass", "a body in exchange"),
        ("frozen", "query", "fail", "has not answered within 60 s"),
    ],
)
def test_what_is_seen_is_told(kind, point, verdict, what):
    program = Program(str(HERE / "simulators.py"), (kind,), "0.3.2", DEADLINE)
    (found,) = seen(program, set(), only=[point])
    assert (found.verdict, what in found.what) == (verdict, True), found


OTHER_VERSION = """
import mmap, sys, tempfile, time
from pathlib import Path
# of layout 0 the whole path is given
file = Path(tempfile.gettempdir(), "ml-agents", sys.argv[-1]).open("r+b")
memory = mmap.mmap(file.fileno(), 0)
memory[4] = 9
if memory[0]:
    memory[8] = 0
else:
    memory[12], memory[13] = 1, 0
time.sleep(60)
"""


@pytest.mark.parametrize(("layout", "version"), [("0", "9"), ("0.3.2", "0.9.2")])
def test_a_simulator_of_another_version_fails_at_its_start(layout, version, tmp_path):
    path = tmp_path / "other.py"
    path.write_text(OTHER_VERSION)
    found = check_simulator(Program(str(path), (), layout), QUICK, only=["start", "growth"])
    (failed,) = (point for point in found if point.verdict == "fail")
    assert (
        failed.name in ("start", "growth")
        and f"of version {version}, and layout {layout} was chosen" in failed.what
    )


def test_nothing_stays_behind(tmp_path, monkeypatch):
    soon(monkeypatch, 0.5)
    log = tmp_path / "log"
    for point in ("nothing", "growth"):
        check_simulator(
            Program(str(HERE / "broken.py"), (point, "--log", str(log)), deadline=DEADLINE),
            QUICK,
            only=["growth"],
        )
    check_simulator(
        Program(str(HERE / "broken.py"), ("trainer's-death", "--log", str(log)), deadline=DEADLINE),
        QUICK,
        only=["trainer's death"],
    )
    places = {Path(line).parent for line in log.read_text().splitlines()}
    assert len(places) == 3
    # another test's trainer, which looks for what the dead left, may be at it as well
    wait_until(lambda: not [place for place in places if place.exists()], 60, "nothing is left")


def test_a_trainer_to_be_killed_that_hangs_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("tidemill.bridge.kit.trials._IMPORTS", 0.01 - 3 * DEADLINE)
    (found,) = check_simulator(broken("nothing"), QUICK, only=["trainer's death"])
    assert found.verdict == "not seen"


def test_the_command_prints_points_and_its_status_tells_whether_all_is_well():
    def run(kind):
        arguments = [
            "check",
            str(HERE / "broken.py"),
            "--seconds",
            str(QUICK),
            "--only",
            "masks",
            "--only",
            "query",
            "--",
            kind,
        ]
        return CliRunner().invoke(commands, arguments)

    sound, torn = run("nothing"), run("masks")
    assert (sound.exit_code, torn.exit_code) == (0, 1)
    assert sound.stdout.splitlines()[-1] == "2 points: 1 pass, 0 fail, 1 not seen"
    assert (
        "all actions of branch 0 are forbidden to agent 0" in torn.stdout
        and "leave at least one action" in torn.stdout
    )


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match=r'no point "mask", did you mean "masks"\?'):
        check_simulator(broken("nothing"), only=["mask"])
    with pytest.raises(ConfigError, match="seconds = 0"):
        check_simulator(broken("nothing"), 0)
    with pytest.raises(ConfigError, match='layout "1" is unknown'):
        Program(sys.executable, layout="1")
    with pytest.raises(ConfigError, match="there is no simulator at"):
        check_simulator(Program("/nowhere/simulator"))
