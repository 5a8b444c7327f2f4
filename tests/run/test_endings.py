"""However a run ends, nothing is left behind, and what it says about its end is true."""

import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from click.testing import Result as Said
from tests.run.watching import (
    EXPERIMENTS,
    MARK,
    Run,
    bells,
    check_versions,
    ended_well,
    leftovers,
    links,
    log_of,
    processes_of,
    segments,
    wait_until,
    workers_of,
)
from typer.testing import CliRunner

from tidemill import PPO, ActorCritic, SimulatorEnvironment
from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Job
from tidemill.api.worker import Context, WorkerConfig, WorkerHandle
from tidemill.bridge.worlds import reach
from tidemill.cli.main import app
from tidemill.core.errors import RunError
from tidemill.core.run_marks import VARIABLE
from tidemill.core.user_code_loading import load_file
from tidemill.launchers.threads import ThreadsLauncher
from tidemill.metrics.json_lines import read_metrics
from tidemill.run import equal_lives, interrupts
from tidemill.run.controller import Controller
from tidemill.run.events import read_events
from tidemill.run.folder import RunFolder
from tidemill.run.run_control import RunControl
from tidemill.store.checkpoint import read_newest
from tidemill.training.train import Result, train

pytestmark = [
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="looks into /proc, and processes need Linux"
    ),
]
experiments = load_file(EXPERIMENTS, "test")


def tidemill(*words: object) -> Said:
    """Return what a command says."""
    return CliRunner().invoke(app, [str(word) for word in words])


@contextmanager
def nothing_left() -> Iterator[None]:
    """This process comes to hold no more than before, and has no more children; what
    tests before have left may go meanwhile."""

    def held() -> dict[str, int]:
        return {
            "descriptors": len(list(links(os.getpid()))),
            "segments": segments(os.getpid()),
            "bells": bells(os.getpid()),
            "sockets": sum("socket:" in link for link in links(os.getpid())),
            "children": len(psutil.Process().children(recursive=True)),
            "threads": threading.active_count(),
        }

    before = held()
    yield
    wait_until(lambda: all(count <= before[what] for what, count in held().items()), 60, "nothing is left")


# However busy the machine is, trainers and the run as a whole have long enough to end
# well, and equal trainers to say that they live. Those that hang are ended by force as
# soon as ever.
PATIENT = """
from tidemill.run import ending, equal_lives, interrupts
ending.EXIT_DEADLINE, equal_lives.ANSWER, interrupts.GRACE = 60.0, 100.0, 180.0
"""
# More than that passes at once as a next life begins.
LATE = f"""{PATIENT}
from tidemill.core.clock import awake
from tidemill.run.supervisor import Supervisor
passed, revive = [0.0], Supervisor._revive
ending.awake = lambda: awake() + passed[0]

def revive_late(*burial):
    revive(*burial)
    passed[0] += 2 * ending.EXIT_DEADLINE

Supervisor._revive = revive_late
"""
# and those that hang have a minute, in which a second signal is certain to come
HANGING = f"""{PATIENT}
from tidemill.replay_training import trainer
ending.CLOSE_DEADLINE = trainer.DRAIN = interrupts.HURRY = 60.0
"""
# and inline what hangs is left at once
LEFT = """
from tidemill.run import interrupts, silence
interrupts.GRACE, interrupts.HURRY, silence.STEP_LEFT = 180.0, 0.5, 2.0
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(function: str, *arguments: str, launch: str = "processes", code: str = PATIENT) -> Run:
        folder = tmp_path / str(len(runs))
        runs.append(Run(folder, function, *arguments, launch=launch, code=code))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill_all()


def test_what_a_simulator_needs_by_name_goes_with_a_run_that_it_does_not_let_end(tmp_path: Path) -> None:
    folders, stopped = list[Path](), list[psutil.Process]()
    world = SimulatorEnvironment(path=reach.__file__)
    made = experiments.experiment(world, algorithm=PPO(minibatch_size=32), lanes=1)
    made = made.replace(policies={"policy": ActorCritic(hidden=(4,))})

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if not stopped:
            for child in psutil.Process().children(recursive=True):
                words = list[str]()
                with suppress(psutil.Error):  # of tests before, it has ended meanwhile
                    words = child.cmdline()
                if "--memory-path" in words:
                    stopped.append(child)
                    folders.append(Path(words[words.index("--memory-path") + 1]).parent)
                    assert folders[-1].exists()
                    child.suspend()
            control.stop()

    train(made, run_dir=tmp_path / "run", source=EXPERIMENTS, quiet=True, on_update=on_update)
    assert folders and not any(folder.exists() for folder in folders)
    for child in stopped:
        with suppress(psutil.NoSuchProcess):
            assert child.status() == psutil.STATUS_ZOMBIE


LIMITS = {
    "updates": ({"updates": 5}, "5 updates"),
    "steps": ({"steps": 300}, "env steps"),
    "seconds": ({"seconds": 0.2}, "s of training"),
    "return": ({"mean_return": 1.0, "window": 3}, "mean return"),
}


@pytest.mark.parametrize("launch", ["inline", "threads", "processes"])
def test_a_run_that_reaches_a_limit_leaves_nothing(tmp_path: Path, launch: str) -> None:
    """The runner finds a limit wherever its workers are: in processes, which begin for
    long, by another's word and by its own clock."""
    made = experiments.cartpole()
    for name in ("updates", "seconds") if launch == "processes" else LIMITS:
        limits, reason = LIMITS[name]
        with nothing_left():
            result: Result = train(
                made.replace(limits=made.limits.replace(**{"updates": None, **limits})),
                launch=launch,
                run_dir=tmp_path / name,
                source=EXPERIMENTS,
                quiet=True,
            )
        ended_well(result.folder, "completed", reason)
        assert list((tmp_path / name).glob("logs/*")) == []


def test_while_it_runs_each_worker_holds_its_own_ends_and_no_others(start: Callable[..., Run]) -> None:
    run = start("cartpole")
    run.wait_for_updates()
    workers = {name: process.pid for name, process in workers_of(run.main.pid).items()}
    # actor → trainer samples, actor ⇄ server requests and answers, trainer → server
    # parameters
    assert {name: segments(pid) for name, pid in workers.items()} == {
        "actor-0": 3,
        "server-0": 3,
        "trainer-0": 2,
    }
    assert segments(run.main.pid) == 4
    assert tidemill("pause", run.path).output == "paused\n"
    held = (run.path / "metrics.jsonl").read_bytes
    size = [-1, -2]
    wait_until(
        lambda: size.append(len(held())) or time.sleep(0.2) or size[-1] == size[-2],
        60,
        "updates stop in a pause",
    )
    assert tidemill("start", run.path).output == "running\n"
    wait_until(lambda: len(held()) > size[-1], 60, "updates go on after a pause")
    second = tidemill("resume", run.path)
    assert second.exit_code == 1 and "is being written by another run" in " ".join(second.output.split())
    assert tidemill("stop", run.path).exit_code == 0
    status, _ = run.ended()
    assert status == 0
    ended_well(run.path, "completed", "tidemill stop")
    run.nothing_is_left()


def test_a_checkpoint_is_written_when_asked_for_and_not_before_the_run(start: Callable[..., Run]) -> None:
    run = start("cartpole", "--set", "workers.trainer.checkpoint_seconds=1000000")

    def save() -> str:
        return tidemill("save", run.path).output

    def written() -> list[Path]:
        return list(run.path.glob("checkpoints/policy/update-*/manifest.json"))

    wait_until(
        lambda: save().startswith(("nothing to save", "saving")),
        60,
        "an answer, however early it is asked for",
    )
    run.wait_for_updates()
    assert save().startswith("saving")
    wait_until(written, 60, "a checkpoint")
    tidemill("stop", run.path)
    assert run.ended()[0] == 0
    ended_well(run.path, "completed", "tidemill stop")


PHASES = {
    "training": ("cartpole", "run/metrics.jsonl"),
    "training by turns": ("equal", "run/metrics.jsonl"),
    "training in slots": ("slots", "run/metrics.jsonl"),
    "hanging in slots": ("slots_hang", "hanging"),
    "warming up": ("warming_up", "stepped"),
    "saving": ("slow_saving", "saving"),
    "waiting for an evaluation": ("awaits_an_evaluation", "evaluating"),
    "evaluating between iterations": ("evaluates_for_long", "evaluating"),
}


@pytest.mark.parametrize(
    ("phase", "number", "group"),
    [
        ("training", signal.SIGINT, True),
        ("training", signal.SIGTERM, False),
        ("training", signal.SIGHUP, False),
        ("training by turns", signal.SIGTERM, True),
        ("training by turns", signal.SIGINT, False),
        ("warming up", signal.SIGINT, False),
        ("saving", signal.SIGTERM, False),
        ("waiting for an evaluation", signal.SIGTERM, True),
        ("evaluating between iterations", signal.SIGINT, False),
        ("training in slots", signal.SIGINT, True),
        ("hanging in slots", signal.SIGTERM, False),
    ],
)
def test_a_signal_ends_a_run_with_a_final_checkpoint(
    start: Callable[..., Run], phase: str, number: signal.Signals, group: bool
) -> None:
    function, flag = PHASES[phase]
    run = start(function)
    run.wait_for_file(run.folder / flag, phase)
    run.signal_group(number) if group else run.main.send_signal(number)
    status, text = run.ended()
    assert status == 128 + number, text
    assert "Traceback" not in text
    ended_well(run.path, "interrupted", {2: "Ctrl-C", 15: "SIGTERM", 1: "SIGHUP"}[number])
    run.nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_run_starts_leaves_no_folder(
    start: Callable[..., Run], number: signal.Signals
) -> None:
    run = start("starts_when_told", "--layout", "given")
    run.wait_for_worker("actor-0")
    run.main.send_signal(number)
    (run.folder / "told").touch()
    status, text = run.ended()
    assert status == 128 + number, text
    assert "Traceback" not in text and "before the run began: nothing is kept" in text
    assert not run.path.exists()
    run.nothing_is_left()


def test_an_environment_that_raises_ends_the_run_with_one_error(start: Callable[..., Run]) -> None:
    run = start("raises")
    status, text = run.ended()
    assert status == 1
    assert "Traceback" not in text and text.count("error:") == 1
    assert (
        "actor-0" in text
        and "ValueError" in text
        and "the arm is broken" in text
        and "in step)" in text
        and "tidemill resume run" in text
    )
    assert "ValueError: the arm is broken" in (run.path / "logs" / "traceback.log").read_text()
    ended_well(run.path, "failed", "the arm is broken")
    run.nothing_is_left()


@pytest.mark.parametrize("launch", ["inline", "threads", "processes"])
def test_an_environment_that_exits_ends_the_run_with_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: str
) -> None:
    monkeypatch.chdir(tmp_path)  # the environment writes there
    with nothing_left(), pytest.raises(RunError) as caught:
        train(experiments.quits(), launch=launch, run_dir=tmp_path / "run", source=EXPERIMENTS, quiet=True)
    text = str(caught.value)
    assert "actor-0: SystemExit: sys.exit('the arm is gone') was called" in text and "in step)" in text
    ended_well(tmp_path / "run", "failed", "the arm is gone")


class Absent(WorkerHandle):
    """A worker that returns at once, whatever it is told."""

    ended = False

    def run(self, *others: WorkerHandle) -> None:
        pass

    def run_once(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class Vanishing(WorkerConfig):
    """The configuration of `Absent`."""

    def build(self, context: Context) -> WorkerHandle:
        return Absent()


def test_a_thread_that_ends_unasked_is_noticed() -> None:
    job = Job(Experiment(name="vanishing", policies={}, workers={"gone": Vanishing()}), None, None, None)
    with nothing_left(), pytest.raises(RunError, match="gone-0 is gone: its thread ended"):
        Controller(job, ThreadsLauncher(), lambda _: None, lambda _: None).run()


@pytest.mark.parametrize("function", ["slots", "slots_hang"])
def test_kill_of_a_run_in_slots_leaves_nothing_but_whole_checkpoints(
    start: Callable[..., Run], function: str
) -> None:
    run = start(function)
    wait_until(lambda: list(run.path.glob("checkpoints/policy/update-*/manifest.json")), 60, "a checkpoint")
    if function == "slots_hang":
        run.wait_for_file(run.folder / "hanging", "all slots hang")
    run.main.kill()
    run.ended()
    run.nothing_is_left()
    _, arrays, facts, warnings = read_newest(run.path / "checkpoints" / "policy")
    assert warnings == [] and (arrays["policy"]["w"] == facts["updates"]).all()


def sleeping(run: Run) -> list[psutil.Process]:
    """Return the processes that environments of a run have started."""
    found = []
    for process in run.processes():
        with suppress(psutil.Error):  # it is gone by now
            if process.name() == "sleep":
                found.append(process)
    return found


def daemons_told(run: Run) -> int:
    """Return of how many daemons of its environments a run says that they were ended."""
    causes = [event.cause for event in read_events(run.path)]
    return sum(
        bool(re.match(r"process \d+ \(sleep\), which an environment of .+ was ended with it$", cause))
        for cause in causes
    )


@pytest.mark.parametrize("ending", ["clean", "kill main", "kill actor"])
def test_what_an_environment_started_ends_with_the_run(start: Callable[..., Run], ending: str) -> None:
    """Also what has left its session and its parent, with its variables and without."""
    run = start("leaves", *(["--max-steps", "200"] if ending == "clean" else []))
    if ending != "clean":
        run.wait_for_updates()
    if ending == "kill main":
        run.main.kill()
    elif ending == "kill actor":
        run.wait_for_worker("actor-0").kill()
        wait_until(
            lambda: any(event.what == "lives" for event in read_events(run.path)), 60, "the actor lives again"
        )
        # the new life's: what starts by itself may need a moment
        wait_until(lambda: len(sleeping(run)) == 3, 60, "one of each is there")
        run.main.send_signal(signal.SIGTERM)
    run.ended()
    run.nothing_is_left()
    if ending != "kill main":
        assert daemons_told(run) == 2 * (1 + (ending == "kill actor"))  # what is no daemon went unasked


def test_daemons_of_a_run_that_was_killed_with_all_its_processes_end_with_the_next_start(
    start: Callable[..., Run],
) -> None:
    run = start("daemons")
    run.wait_for_updates()
    wait_until(lambda: len(sleeping(run)) == 2, 60, "the daemons are there")
    daemons = {*sleeping(run)}
    for process in [run.main, *(each for each in run.processes() if each not in daemons)]:
        process.send_signal(signal.SIGSTOP)  # so that nobody ends anything
    for process in [run.main, *(each for each in run.processes() if each not in daemons)]:
        process.send_signal(signal.SIGKILL)
    run.main.wait()
    wait_until(lambda: {*run.processes()} == daemons, 60, "the daemons alone are left")
    again = start("cartpole", "--max-steps", "200")
    assert again.ended()[0] == 0
    assert not run.processes()


# the command as it is installed, which knows that its process is its own
COMMAND = "from tidemill.cli.entry import main as app"


@pytest.mark.parametrize("launch", ["inline", "threads"])
@pytest.mark.parametrize("ending", ["clean", "signal", "kill"])
def test_daemons_that_lived_in_the_command_s_process_end_with_it_or_with_the_next_start(
    start: Callable[..., Run], ending: str, launch: str
) -> None:
    words = ["--max-steps", "200"] if ending == "clean" else []
    run = start("daemons", *words, launch=launch, code=COMMAND)
    if ending != "clean":
        run.wait_for_updates()
        wait_until(lambda: len(sleeping(run)) == 2, 60, "the daemons are there")
        run.main.send_signal(signal.SIGTERM if ending == "signal" else signal.SIGKILL)
    status, text = run.ended()
    told = re.findall(r"process \d+ \(sleep\), process \d+ \(sleep\), which an environment had started", text)
    assert (status, len(told)) == {"clean": (0, 1), "signal": (143, 1), "kill": (-9, 0)}[ending], text
    if ending == "kill":
        again = start("cartpole", "--max-steps", "200", launch=launch, code=COMMAND)
        assert again.ended()[0] == 0
    run.nothing_is_left()


@pytest.mark.parametrize("launch", ["inline", "processes"])
def test_what_a_user_s_own_program_started_outlives_its_run(
    launch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments, own = uuid.uuid4().hex, uuid.uuid4().hex
    monkeypatch.setenv(MARK, environments)
    before = resource.getrlimit(10), os.environ.get(VARIABLE)
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)

    def on_update(metrics: dict[str, float], control: RunControl) -> None:
        if not processes_of(own):
            words = f"env -i setsid sleep 1000 0.{int(own, 16)} &"
            subprocess.run(["sh", "-c", words], stdout=subprocess.DEVNULL, check=True)
            wait_until(lambda: processes_of(own), 60, "the user's daemon is there")
        control.stop()

    try:
        made = experiments.bare_daemon()
        train(
            made, run_dir=tmp_path / "run", source=EXPERIMENTS, launch=launch, quiet=True, on_update=on_update
        )
        assert (resource.getrlimit(10), os.environ.get(VARIABLE)) == before
        assert child.poll() is None and len(processes_of(own)) == 1
        assert [p.name() for p in processes_of(environments) if p.pid != child.pid] == (
            ["sleep"] if launch == "inline" else []
        )
    finally:
        for process in (*processes_of(environments), *processes_of(own)):
            process.kill()
        child.wait()


def test_an_environment_that_hangs_is_named_and_ended_by_force(start: Callable[..., Run]) -> None:
    run = start("hangs")
    run.wait_for_file(run.folder / "hanging", "the environment hangs")
    run.main.terminate()
    status, text = run.ended()
    assert status == 143, text
    assert "actor-0 hangs, most likely in its environment" in text
    ended_well(run.path, "interrupted", "SIGTERM")
    run.nothing_is_left()


def awaited(run: Run, number: int) -> bool:
    """True of a signal that has been sent to a run, and that it has not got yet."""
    lines = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{run.main.pid}/status").read_text().splitlines()
    )
    return any(int(lines[which], 16) >> (number - 1) & 1 for which in ("SigPnd", "ShdPnd"))


@pytest.mark.parametrize(
    ("function", "launch"), [("hangs", "inline"), ("hangs", "processes"), ("slots_hang", "threads")]
)
def test_a_second_signal_breaks_off_at_once(start: Callable[..., Run], function: str, launch: str) -> None:
    run = start(function, launch=launch, code=HANGING)
    run.wait_for_file(run.folder / "hanging", "the environment hangs")

    run.main.send_signal(signal.SIGINT)
    wait_until(lambda: not awaited(run, signal.SIGINT), 60, "it has heard the first one")
    if launch == "inline":  # whoever leads the run hangs itself
        output = run.folder / "output.txt"
        wait_until(lambda: "note: Ctrl-C has come: the run ends" in output.read_text(), 60, "that is told")
    time.sleep(interrupts.ONE + 1.0)
    run.main.send_signal(signal.SIGINT)
    status, text = run.ended()
    assert status == 1 and "Ctrl-C for the second time" in text and "Traceback" not in text, text
    assert run.summary()["status"] == "failed"
    run.nothing_is_left()


def test_inline_what_hangs_is_left_once_a_signal_is_to_end_the_run(start: Callable[..., Run]) -> None:
    run = start("hangs", launch="inline", code=LEFT)
    run.wait_for_file(run.folder / "hanging", "the environment hangs")
    run.main.send_signal(signal.SIGTERM)
    status, text = run.ended()
    assert status == 143 and "Traceback" not in text, text
    assert re.search(
        r"an environment has not come back for \d+ s: lane 0 of target 0 of actor-0: .* it is left", text
    )
    assert "ended by force" not in text, text
    assert run.summary()["status"] == "interrupted"
    # no update is undone
    told = [int(record["update"]) for record in read_metrics(run.path) if "update" in record]
    assert read_newest(run.path / "checkpoints" / "policy").facts["updates"] == told[-1]
    run.nothing_is_left()


def test_inline_a_second_one_that_hangs_is_left_sooner(start: Callable[..., Run]) -> None:
    """Else no time would be left in which what was trained is saved."""
    run = start("two_hang", launch="inline", code=LEFT.replace("2.0", "6.0"))
    run.wait_for_file(run.folder / "hanging", "an environment hangs")
    run.main.send_signal(signal.SIGTERM)
    status, text = run.ended()
    assert status == 143 and "Traceback" not in text, text
    first, second = map(int, re.findall(r"an environment has not come back for (\d+) s: .* it is left", text))
    assert first >= 6 > second, text
    ended_well(run.path, "interrupted", "SIGTERM")
    run.nothing_is_left()


def test_inline_steps_that_take_their_time_are_not_left(start: Callable[..., Run]) -> None:
    """A poll takes longer than one of them may."""
    run = start("snoozes", launch="inline", code=LEFT.replace("2.0", "5.0"))  # a stall is not one of them
    run.wait_for_file(run.folder / "snoozing", "the environment takes its time")
    run.main.send_signal(signal.SIGTERM)
    status, text = run.ended()
    assert status == 143 and "it is left" not in text and "hangs" not in text, text
    run.nothing_is_left()


def test_kill_of_the_main_process_at_any_point_leaves_nothing(start: Callable[..., Run]) -> None:
    """Points from before the first worker to well into training, three runs at a time;
    then one that has come far, whose folder nobody holds any more."""
    draw, runs = random.Random(1), list[Run]()

    for parts in (range(3), range(3, 6)):
        begun = [(start(draw.choice(["cartpole", "equal"])), time.monotonic()) for _ in parts]
        for part, (run, at) in zip(parts, begun, strict=True):
            time.sleep(max(0.0, at + 0.2 + 0.3 * (part + draw.random()) - time.monotonic()))
            run.main.kill()
            runs.append(run)
        for run, _ in begun:
            run.ended()
            run.nothing_is_left()
    run = start("cartpole")
    runs.append(run)
    run.wait_for_updates()
    wait_until(lambda: list(run.path.glob("checkpoints/policy/update-*/manifest.json")), 60, "a checkpoint")
    versions = RunFolder(run.path).database().versions
    wait_until(lambda: len(versions("policy")) > 1, 60, "a second version in the database")
    run.main.kill()
    run.ended()
    run.nothing_is_left()
    for run in runs:
        if (run.path / "checkpoints").exists():
            assert read_newest(run.path / "checkpoints" / "policy")[3] == []  # the newest is whole
        check_versions(run.path)
    assert check_versions(runs[-1].path) > 1
    again = RunFolder.open(runs[-1].path)
    again.lock()  # nobody holds it
    again.unlock()


KILLED = [("cartpole", worker) for worker in ("actor-0", "server-0", "trainer-0")] + [
    ("equal", f"actor-{i}+trainer-{i}") for i in range(2)
]


KILLS = 2  # one at random within each half of the first 1.2 s


@pytest.mark.parametrize(("function", "worker"), KILLED)
def test_a_worker_that_is_killed_at_any_point_lives_again_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, worker: str
) -> None:
    monkeypatch.setattr(equal_lives, "ANSWER", 100.0)
    draw = random.Random(worker)
    made = getattr(experiments, function)()
    killed = worker.split("+")

    def kill_after(path: Path, delay: float) -> None:
        def mine() -> list[psutil.Process]:
            return [p for p in psutil.Process().children() if log_of(p) == path / "logs" / f"{worker}.log"]

        wait_until(mine, 60, f"{worker} starts")
        time.sleep(delay)
        for process in mine():
            process.kill()

    def one(number: int) -> None:
        path, until = tmp_path / str(number), time.monotonic() + 120
        delay = 1.2 * (number + draw.random()) / KILLS
        killer = threading.Thread(target=kill_after, args=(path, delay))

        def on_update(metrics: dict[str, float], control: RunControl) -> None:
            live = {event.worker for event in read_events(path) if event.what == "lives"}
            if live.issuperset(killed) or time.monotonic() > until:
                control.stop()

        killer.start()
        result = train(made, run_dir=path, source=EXPERIMENTS, quiet=True, on_update=on_update)
        killer.join()
        assert result.summary["status"] == "completed"
        events = read_events(path)
        died = [event for event in events if event.what == "died"]
        assert [event.worker for event in died] == killed
        assert all(re.search("its process was killed by SIGKILL", event.cause) for event in died)
        lived = [(event.worker, event.life) for event in events if event.what == "lives"]
        assert set(lived) >= {(name, 2) for name in killed}
        back = {event.policy for event in events if event.what == "went back"}
        if function == "equal":  # before all run, both begin again
            assert back <= {"policy"}
        else:
            assert back == ({"policy"} if "trainer" in worker else set())
        assert leftovers(path) == []
        check_versions(path)
        # no update is half done, none is counted twice, none is left out
        _, arrays, facts, warnings = read_newest(path / "checkpoints" / "policy")
        assert warnings == [] and (arrays["policy"]["w"] == facts["updates"]).all()
        recorded = [record["update"] for record in read_metrics(path) if "update" in record]
        assert recorded == sorted(set(recorded)) and recorded[-1] == result.summary["updates"]

    with nothing_left(), ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(KILLS)))


@pytest.mark.parametrize(("function", "worker"), [("cartpole", "trainer-0"), ("equal", "actor-0+trainer-0")])
def test_a_trainer_that_is_killed_as_the_run_ends_ends_it_in_its_next_life(
    start: Callable[..., Run], function: str, worker: str
) -> None:
    """However long that takes to begin."""
    settings = ("algorithm.save_seconds=0.5", "checkpoint_share=0.000001")  # the first one, and the last
    words = (word for each in settings for word in ("--set", f"workers.trainer.{each}"))
    run = start(function, *words, code=LATE)
    wait_until(lambda: list(run.path.glob("checkpoints/policy/update-*/manifest.json")), 60, "a checkpoint")
    wait_until(lambda: len(read_metrics(run.path)) > 1, 60, "updates of which it does not know")
    (run.folder / "held").touch()
    (run.folder / "saving").unlink()
    run.main.send_signal(signal.SIGTERM)
    run.wait_for_file(run.folder / "saving", "the last checkpoint")
    run.wait_for_worker(worker).kill()
    (run.folder / "held").unlink()
    status, text = run.ended()
    assert status == 143 and "Traceback" not in text, text
    ended_well(run.path, "interrupted", "SIGTERM")
    events = read_events(run.path)
    assert "trainer-0" in {event.worker for event in events if event.what == "died"}
    lived = ("trainer-0", 2) in {(event.worker, event.life) for event in events if event.what == "lives"}
    assert lived or function == "equal"  # what an equal one has saved may be the last checkpoint already
    recorded = [record["update"] for record in read_metrics(run.path)]
    assert recorded == sorted(set(recorded)) and recorded[-1] == run.summary()["updates"]
    assert read_newest(run.path / "checkpoints" / "policy")[2]["updates"] == recorded[-1]
    check_versions(run.path)
    run.nothing_is_left()


def test_the_mark_finds_orphans() -> None:
    """The tests above are worth what this is."""
    mark = uuid.uuid4().hex
    run = subprocess.Popen(["sh", "-c", "sleep 1000 & exit"], env={**os.environ, MARK: mark})
    run.wait()
    found: list[psutil.Process] = []

    def look() -> bool:
        found[:] = [p for p in psutil.process_iter() if _mark(p) == mark]
        return [p.name() for p in found] == ["sleep"]

    try:
        wait_until(look, 60, "the orphan is found")
    finally:
        for process in found:
            process.kill()


def _mark(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK)
    except psutil.Error:
        return None
