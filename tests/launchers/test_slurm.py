"""Jobs of Slurm: their script, and a run on two nodes of one that is brought up here."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.slurm_nodes import NotUp, Slurm, lacking
from tests.hosts.hosts import needs_namespaces, networked
from tests.run.watching import EXPERIMENTS, wait_until
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.core.errors import ConfigError, RunError, TidemillError
from tidemill.launchers import slurm, slurm_job
from tidemill.launchers.slurm_job import WATCH, SlurmJob, script
from tidemill.launchers.table import make_launcher
from tidemill.run.folder import RunFolder

JOB = SlurmJob(Path("/runs/cart"), ["train", "CartPole-v1"], ["resume", "/runs/cart"], ["policy"], 4)
RESUMED = SlurmJob(Path("/runs/cart"), ["resume", "/runs/cart", "--max-steps", "9"])
# stands for Tidemill: it says what it was asked for, and ends upon a SIGTERM as runs do
PROGRAM = """#!/bin/bash
echo "$@"
trap 'exit 143' TERM
touch begun
while :; do sleep 0.05; done
"""


def test_a_script_asks_for_what_the_job_says() -> None:
    asked = SlurmJob(
        JOB.run, JOB.first, JOB.again, JOB.policies, 4, "2:00:00", "gpu", 32, 2, ["--account=x"]
    )  # fmt: skip
    options = [line.removeprefix("#SBATCH ") for line in script(asked, "/home", "python").splitlines()[1:15]]
    assert options[:-1] == [
        "--job-name=tidemill-cart", "--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=32",
        "--gpus-per-node=2", "--time=2:00:00", "--partition=gpu", "--output=/runs/cart/slurm.log",
        "--open-mode=append", "--signal=B:USR1@120", "--requeue", "--no-kill", "--account=x",
    ]  # fmt: skip
    assert "#SBATCH --exclusive\n" in script(JOB, "/home", "python")
    for time in ("0", "3", "3:00", "1-0", "0-01:00"):  # the first has no end, and the last is an hour
        assert f"#SBATCH --time={time}\n" in script(replace(JOB, time=time), "/home", "python")


def told(end: signal.Signals, folder: Path, asked: SlurmJob = JOB, **variables: str) -> list[str]:
    """Return what a job's script says whose run, in a folder, is told of its end."""
    for name, text in (("tidemill", PROGRAM), ("scontrol", '#!/bin/bash\necho "scontrol $@"\n')):
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
    made = replace(asked, run=folder / "run")
    (folder / "job.sh").write_text(script(made, str(folder), str(folder / "tidemill")))
    variables |= {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen(
        ["bash", "job.sh"], cwd=folder, env=os.environ | variables, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_until((folder / "begun").exists, 60, "the run begins")
        job.send_signal(end)
        output, _ = job.communicate(timeout=240)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 143
    return output.splitlines()


def begins(words: Sequence[str]) -> str:
    return f"-m tidemill.cli.main {' '.join(words)}"


LATER = {"SECONDS": "100"}  # bash counts on from there: the job has had so many


def test_a_job_that_is_told_of_its_end_goes_on_later(tmp_path: Path) -> None:
    queued, folder = "scontrol requeue 7", tmp_path / "lr[0.1]"  # no pattern
    folder.mkdir()
    assert told(signal.SIGUSR1, folder, **LATER) == [begins(JOB.first), queued]
    (folder / "run" / "checkpoints" / "policy" / "update-1").mkdir(parents=True)
    (folder / "run" / "config.json").touch()
    (folder / "begun").unlink()
    assert told(signal.SIGUSR1, folder, SLURM_RESTART_COUNT="1", **LATER) == [begins(JOB.again), queued]


def test_a_job_that_goes_on_with_a_run_is_queued_again_with_the_same_words(tmp_path: Path) -> None:
    """Had it not begun before, its limits are not in the run's folder."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").touch()
    assert told(signal.SIGTERM, tmp_path, RESUMED, SLURM_RESTART_COUNT="1") == [begins(RESUMED.first)]
    assert not list(tmp_path.glob("run-until-*"))


def test_a_job_that_is_told_to_end_or_has_no_time_is_not_queued_again(tmp_path: Path) -> None:
    assert told(signal.SIGTERM, tmp_path, **LATER) == [begins(JOB.first)]
    (tmp_path / "begun").unlink()
    first, why = told(signal.SIGUSR1, tmp_path, SECONDS="-100000")  # however slow this machine is
    assert first == begins(JOB.first)
    assert re.fullmatch(
        r"the job was told of its end -\d+ s after its start, and is not queued again: it would be for ever; "
        rf"go on with more time \(--time\) by: tidemill resume {tmp_path}/run --launch slurm",
        why,
    )


def test_a_job_that_was_queued_again_before_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "epochs").mkdir(parents=True)
    for name in ("config.json", "events.jsonl", slurm_job.LOG, slurm_job.JOB, "epochs/1"):
        (run / name).write_text(name)
    said, first = told(signal.SIGTERM, tmp_path, SLURM_RESTART_COUNT="1")
    assert first == begins(JOB.first)
    (aside,) = tmp_path.glob("run-until-*")
    assert said == f"the run had no checkpoint yet of policy, and begins anew; what it has left is in {aside}"
    assert {path.name for path in aside.iterdir()} == {"config.json", "events.jsonl"}
    assert {path.name for path in run.iterdir()} == {"epochs", slurm_job.LOG, slurm_job.JOB}
    (tmp_path / "begun").unlink()
    assert told(signal.SIGTERM, tmp_path, SLURM_RESTART_COUNT="2") == [begins(JOB.first)]  # it never began


def test_a_job_of_several_policies_goes_on_once_each_has_a_checkpoint(tmp_path: Path) -> None:
    several, run = replace(JOB, policies=["red", "blue.2"]), tmp_path / "run"
    (run / "checkpoints" / "red" / "update-3").mkdir(parents=True)
    (run / "config.json").touch()
    said, first = told(signal.SIGTERM, tmp_path, several, SLURM_RESTART_COUNT="1")
    (aside,) = tmp_path.glob("run-until-*")
    assert first == begins(JOB.first) and said.startswith("the run had no checkpoint yet of blue.2, and ")
    (aside / "checkpoints").rename(run / "checkpoints")
    (run / "checkpoints" / "blue.2" / "update-1").mkdir(parents=True)
    (run / "config.json").touch()
    (tmp_path / "begun").unlink()
    assert told(signal.SIGTERM, tmp_path, several, SLURM_RESTART_COUNT="2") == [begins(JOB.again)]


def test_a_job_that_has_lost_its_first_node_is_queued_again_by_another_one(tmp_path: Path) -> None:
    for name, text in (
        ("sleep", "exec /bin/sleep 0.01"),
        ("squeue", 'echo "$@" >>asked; cat nodes'),
        ("scontrol", 'if [ $1 = show ]; then echo "$3" | tr , "\\n"; else echo "scontrol $@"; fi'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    nodes, asked = tmp_path / "nodes", tmp_path / "asked"
    nodes.write_text("")  # as of one that ends, and of one that Slurm does not tell
    variables = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    watch = ["bash", "-c", WATCH, "7", "a", "1"]
    watching = subprocess.Popen(watch, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True)

    def asks_on() -> bool:
        return asked.exists() and len(asked.read_text().splitlines()) > 2

    try:
        for there in ("", "1 a,b\n"):
            (tmp_path / "new").write_text(there)
            (tmp_path / "new").rename(nodes)
            asked.unlink(missing_ok=True)
            wait_until(asks_on, 60, "it looks")
        assert watching.poll() is None
        (tmp_path / "new").write_text("1 aa,b\n")
        (tmp_path / "new").rename(nodes)
        output, _ = watching.communicate(timeout=60)
    finally:
        watching.kill()
        watching.wait()
    assert output == "scontrol requeue 7\n" and watching.returncode == 0
    assert set(asked.read_text().splitlines()) == {
        "--noheader --jobs=7 --states=RUNNING --Format=RestartCnt:9,NodeList:9999"
    }
    # whoever was cut off meanwhile, and finds the job's next life, leaves it alone
    late = subprocess.run([*watch[:-1], "0"], cwd=tmp_path, env=variables, capture_output=True, timeout=60)
    assert (late.returncode, late.stdout, late.stderr) == (0, b"", b"")


def script_of(*words: str) -> str:
    """Return the script that a command with ``--launch slurm --script`` prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tidemill", *words, "--launch", "slurm", "--script"])
        said = CliRunner().invoke(app, sys.argv[1:])
    assert said.exit_code == 0, said.output
    return said.stdout


@pytest.mark.parametrize("allocated", [False, True])
def test_a_script_that_is_printed_may_be_submitted_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allocated: bool
) -> None:
    """Within an allocation, too, only the script was asked for."""
    monkeypatch.setenv("SLURM_JOB_ID", "7") if allocated else monkeypatch.delenv("SLURM_JOB_ID", False)
    run = tmp_path / "runs" / "run"
    text = script_of(
        "train",
        "CartPole-v1",
        "--time=9",
        "--partition",
        "cpu",
        "--sbatch=--account=x",
        "--run-dir",
        str(run),
    )
    assert f"set -- train CartPole-v1 --run-dir {run} --launch slurm\n" in text
    assert all(f"#SBATCH --{option}\n" in text for option in ("time=9", "partition=cpu", "account=x"))
    assert run.stat().st_mode & 0o777 == 0o700 and not list(
        run.iterdir()
    )  # Slurm makes no folder for the log
    (tmp_path / "job.sh").write_text(text.replace(sys.executable, "true", 1))
    variables = os.environ | {"SLURM_JOB_ID": "8"}
    subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=variables, check=True, timeout=60)
    assert slurm_job.job_of(run) == "8"  # so that it can be followed


def submission(folder: Path, patch: pytest.MonkeyPatch, *words: str, state: str = "COMPLETED") -> str:
    """Return why a command submits nothing, where a job before is in this state."""
    for name, text in (
        ("sbatch", f"touch {folder}/submitted"),
        ("scontrol", f"echo JobId=7 JobState={state} Reason=None"),
    ):
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o700)
    patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    patch.setattr(sys, "argv", ["tidemill", *words])
    said = CliRunner().invoke(app, [*words])
    assert said.exit_code == 1 and not (folder / "submitted").exists(), said.output
    return " ".join(said.output.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--place", "nobody=b"], "--place nobody=b: there is no such worker; "),
        (["--ray-address", "a:1"], '--launch slurm: it has no option "address"'),
        (["--hosts", "0"], "--hosts 0: it must be a whole number of at least 1"),
    ],
)
def test_what_a_job_would_refuse_is_said_before_it_waits_for_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    words = ["train", "CartPole-v1", "--launch", "slurm", "--run-dir", str(tmp_path / "run"), *words]
    assert said in submission(tmp_path, monkeypatch, *words)
    assert not (tmp_path / "run").exists()


def test_a_run_that_a_job_has_is_submitted_no_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").touch()
    for name, text in ((slurm_job.JOB, "7\n"), (slurm_job.SCRIPT, "its script")):
        (run / name).write_text(text)
    for words in (["train", "CartPole-v1", "--run-dir", str(run)], ["resume", str(run)]):
        said = submission(tmp_path, monkeypatch, *words, "--launch", "slurm", state="RUNNING")
        assert "is job 7, which is RUNNING: see it by: tidemill follow" in said
    assert (run / slurm_job.SCRIPT).read_text() == "its script"


def test_within_an_allocation_nothing_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    said = submission(tmp_path, monkeypatch, "train", "CartPole-v1", "--launch", "slurm", "--time", "9")
    assert "--time is of a job that is to be submitted, and this is within allocation 7" in said


def test_the_commands_say_what_a_job_is_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("ROWS", str(tmp_path))
    begun = script_of("train", f"{EXPERIMENTS}:rows", "--run-dir", str(run))
    assert "for policy in red blue; do" in begun and f"set -- resume {run} --launch slurm\n" in begun
    (run / "config.json").touch()
    resumed = script_of("resume", str(run), "--max-steps", "9")
    assert f"set -- resume {run} --max-steps 9 --launch slurm\n" in resumed
    assert resumed.count("set -- ") == 1
    with pytest.raises(AssertionError, match="is not a run's folder"):
        script_of("resume", str(tmp_path))


def test_what_slurm_says_of_nodes_and_times() -> None:
    assert slurm.cores_of_nodes(["a", "b", "c"], "8(x2),4") == {"a": 8, "b": 8, "c": 4}
    with pytest.raises(RunError, match="does not tell the cores of 2 nodes"):
        slurm.cores_of_nodes(["a", "b"], "8")
    assert [slurm.seconds_of(left) for left in ("0:43", "12:30", "1:00:00", "2-03:00:00")] == [
        43, 750, 3600, 183600,
    ]  # fmt: skip
    assert slurm.seconds_of("UNLIMITED") is None and slurm.seconds_of("INVALID") is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hosts": 0}, "--hosts 0"),
        ({"cpus_per_host": 0}, "--cpus-per-host 0"),
        ({"gpus_per_host": -1}, "--gpus-per-host -1"),
        ({"sbatch": ["account=x"]}, "one option of sbatch"),
        ({"time": "1:00\n#SBATCH --wrap=x"}, "one option of sbatch"),
        ({"time": "1"}, "--time 1: a job is told 120 s before its end .* 3 minutes at least: --time 3"),
        ({"time": "0:02:59"}, "3 minutes at least"),
        ({"time": "2:59"}, "3 minutes at least"),
        ({"time": "0-00:02"}, "3 minutes at least"),
        ({"run": Path("/runs/my run")}, "a path without spaces"),
    ],
)
def test_what_no_script_can_ask_for_is_named(changes: dict[str, object], said: str) -> None:
    words = {"run": JOB.run, "first": JOB.first, "again": JOB.again, "hosts": 4} | changes
    with pytest.raises(ConfigError, match=said):
        script(SlurmJob(**words), "/home", "python")  # type: ignore[arg-type]


def test_outside_of_an_allocation_and_of_slurm_it_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match="this is no allocation of Slurm's"):
        make_launcher("slurm")
    monkeypatch.setenv("PATH", str(tmp_path))
    run = tmp_path / "run"
    for job, said in (
        (SlurmJob(run, []), "there is no `sbatch` here"),
        (SlurmJob(run, [], hosts=0), "0: it"),
    ):
        with pytest.raises(TidemillError, match=said):
            slurm_job.submit(job)
        assert not run.exists()  # nothing is left of it
    with pytest.raises(RunError, match="was submitted as no job"):
        slurm_job.job_of(tmp_path)


@pytest.mark.parametrize(
    ("left", "hosts", "said"),
    [
        ("0:59", None, "allocation 7 ends in 59 s, and a run wants 60 at least; ask for more with --time"),
        ("1:00", 3, "--hosts 3, and allocation 7 has 2: a, b"),
        ("", None, "`squeue --noheader --jobs=7 --format=%L` says: it is over"),
    ],
)
def test_an_allocation_that_is_too_small_is_said(
    left: str, hosts: int | None, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in (
        ("squeue", f"echo {left}" if left else "echo it is over >&2; exit 1"),
        ("scontrol", "printf 'a\\nb\\n'"),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    allocation = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "[a-b]", "SLURM_JOB_CPUS_PER_NODE": "1(x2)"}
    for name, value in {**allocation, "PATH": f"{tmp_path}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=re.escape(said)):
        slurm.SlurmLauncher(hosts).engine()


def test_an_allocation_without_nodes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(RunError, match=r"job 7 has no nodes \(SLURM_JOB_NODELIST is not set"):
        slurm.SlurmLauncher(None).engine()


@pytest.mark.parametrize(
    ("state", "asked"), [("RUNNING", ("--signal=TERM", "--batch", "7")), ("PENDING", ("7",))]
)
def test_ctrl_c_asks_a_job_to_end_and_a_second_one_follows_it_no_more(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str,
    asked: tuple[str, ...],
) -> None:
    ends, said = list[tuple[str, ...]](), list[str]()

    def slurm_says(*words: str) -> str:
        if words[0] == "scancel":
            ends.append(words[1:])
        return f"JobId=7 JobState={state} Reason=None"

    def interrupt(seconds: float) -> None:
        said.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm_job, "slurm", slurm_says)
    monkeypatch.setattr(slurm_job, "sleep", interrupt)
    assert slurm_job.follow(tmp_path, "7") == 130 and ends == [asked]
    assert f"job 7: {state}; Ctrl-C ends it" in said[0] and "was asked to end" in said[1]
    assert f"see it again: tidemill follow {tmp_path}" in capsys.readouterr().out


def test_a_job_is_followed_while_slurm_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where its controller is started anew; only for minutes."""
    for name in ("_LOOK_S", "_ASK_S", "_LAST_S"):
        monkeypatch.setattr(slurm_job, name, 0.01)
    (tmp_path / slurm_job.LOG).write_text("trains\n")
    said = iter(["", "JobState=RUNNING Reason=None", "", "", "JobState=COMPLETED Reason=None ExitCode=3:0"])

    def scontrol(*_: str) -> str:
        if not (text := next(said, "JobState=COMPLETED Reason=None ExitCode=3:0")):
            raise RunError("Unable to contact slurm controller")
        return text

    monkeypatch.setattr(slurm_job, "slurm", scontrol)
    assert slurm_job.follow(tmp_path, "7") == 3
    assert "trains" in capsys.readouterr().out
    said = iter([""])
    monkeypatch.setattr(slurm_job, "_AWAY_S", -1.0)
    with pytest.raises(RunError, match=r"controller\njob 7 goes on, and is followed no more; .* follow"):
        slurm_job.follow(tmp_path, "7")


@pytest.mark.parametrize("wrong", [["--time", "1"], []], ids=["no script", "refused"])
@pytest.mark.parametrize("linked", [False, True])
def test_a_run_stays_where_what_was_to_be_begun_anew_is_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: list[str], linked: bool
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/bash\necho no such account >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    run, real = tmp_path / "run", tmp_path / ("real" if linked else "run")
    real.mkdir()
    (real / "config.json").write_text("a run that was")
    if linked:
        run.symlink_to(real)
    before = set(tmp_path.iterdir())
    words = ["train", "CartPole-v1", "--launch", "slurm", "--run-dir", str(run), "--anew", *wrong]
    monkeypatch.setattr(sys, "argv", ["tidemill", *words])
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 1 and ("3 minutes at least" if wrong else "no such account") in said.output
    assert set(tmp_path.iterdir()) == before and run.is_symlink() == linked
    assert (run / "config.json").read_text() == "a run that was"


@pytest.mark.parametrize(("words", "seconds"), [([], 120), (["--algorithm", "dqn"], 240)])
def test_a_job_is_told_of_its_end_so_early_that_all_can_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], seconds: int
) -> None:
    """A replay memory, which is kept, may be tens of GB."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    words = ["train", "CartPole-v1", *words, "--launch", "slurm", "--script", "--run-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["tidemill", *words])
    said = CliRunner().invoke(app, words).output
    assert f"#SBATCH --signal=B:USR1@{seconds}\n" in said
    assert slurm_job.notice_of(tmp_path) == 120
    (tmp_path / slurm_job.SCRIPT).write_text(said)
    assert slurm_job.notice_of(tmp_path) == seconds  # also where that run is gone on with
    short = CliRunner().invoke(app, [*words, "--time", str(seconds // 60)]).output
    assert f"so that it must have {seconds // 60 + 1} minutes at least" in short


def test_a_run_that_is_begun_anew_leaves_the_job_its_files(tmp_path: Path) -> None:
    over = "JobId=7 JobState=COMPLETED Reason=None ExitCode=0:0"
    for name, text in (("sbatch", "echo 7"), ("scontrol", f"echo {over}")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").touch()  # a run that was
    words = ["train", "CartPole-v1", "--launch", "slurm", "--run-dir", "run"]
    variables = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    variables.pop("SLURM_JOB_ID", None)
    command = [sys.executable, "-m", "tidemill.cli.main", *words, "--anew"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240)
    (aside,) = tmp_path.glob("run-until-*")
    assert done.returncode == 0 and f"is in {aside} now" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "run" / slurm_job.JOB).read_text() == "7\n"
    text = (tmp_path / "run" / slurm_job.SCRIPT).read_text()
    assert f"set -- {' '.join(words)}\n" in text and "--anew" not in text


@pytest.fixture
def slurm_nodes() -> Iterator[tuple[Slurm, Sequence[str]]]:
    """A Slurm of two nodes, and the words before a command where jobs are submitted."""
    if why := lacking():
        needs_namespaces(why)
    with networked(3) as network:
        try:
            nodes = Slurm(network.addresses, network.command)
        except NotUp as error:
            needs_namespaces(str(error))
        try:
            yield nodes, network.command(0)
        finally:
            nodes.close()


def test_a_job_of_two_nodes_trains_and_is_followed(slurm_nodes: tuple[Slurm, Sequence[str]]) -> None:
    nodes, head = slurm_nodes
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # each node has a /dev/shm of its own
        _trains_and_is_followed(nodes, head, Path(folder))


def test_a_job_whose_nodes_do_not_see_the_run_s_folder_says_so(
    slurm_nodes: tuple[Slurm, Sequence[str]],
) -> None:
    nodes, head = slurm_nodes
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        words = ["train", "CartPole-v1", "--launch", "slurm", "--hosts", "2", "--run-dir", "run"]
        done = subprocess.run(
            [*head, sys.executable, "-m", "tidemill.cli.main", *words],
            cwd=folder, capture_output=True, text=True, timeout=240, env=os.environ | nodes.variables,
        )  # fmt: skip
        log = Path(folder) / "run" / slurm_job.LOG
        said = f"job 1 ended with status 1 and wrote nothing into {log}: its nodes may not see that folder"
        assert done.returncode == 1 and f"error: {said}" in done.stderr, done.stdout + done.stderr
    wait_until(lambda: not nodes.left(), 60, "nothing is left on the nodes")


def _trains_and_is_followed(nodes: Slurm, head: Sequence[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *head, sys.executable, "-m", "tidemill.cli.main", "train", "CartPole-v1", "--launch", "slurm",
            "--hosts", "2", "--cpus-per-host", "1", "--layout", "given", "--max-steps", "30000", "--set",
            "workers.actor.count=2", "--run-dir", "run",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, env=os.environ | nodes.variables,
    )  # fmt: skip
    assert done.returncode == 0 and "completed" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "run" / slurm_job.JOB).read_text().strip().isdecimal()
    assert RunFolder.open(tmp_path / "run").read("placement.json").keys() > {"runner"}
    wait_until(lambda: not nodes.left(), 60, "nothing is left on the nodes")
