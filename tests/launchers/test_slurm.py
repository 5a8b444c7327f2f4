"""Jobs of Slurm: their script, and, where there is a Slurm, a run on two of its nodes."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.run.watching import wait_until

from tidemill.core.errors import ConfigError, RunError
from tidemill.launchers import slurm, slurm_job
from tidemill.launchers.slurm_job import WATCH, SlurmJob, script
from tidemill.launchers.table import make_launcher

JOB = SlurmJob(Path("/runs/cart"), ["train", "CartPole-v1"], ["resume", "/runs/cart"], 4)
# stands for Tidemill: it says what it was asked for, and ends upon a SIGTERM as runs do
PROGRAM = """#!/bin/bash
echo "$@"
trap 'exit 143' TERM
touch begun
while :; do sleep 0.05; done
"""


def test_a_script_asks_for_what_the_job_says() -> None:
    asked = SlurmJob(
        JOB.run, JOB.first, JOB.again, 4, "2:00:00", "gpu", 32, 2, ["--account=x"]
    )  # fmt: skip
    options = [line.removeprefix("#SBATCH ") for line in script(asked, "/home", "python").splitlines()[1:15]]
    assert options[:-1] == [
        "--job-name=tidemill-cart", "--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=32",
        "--gpus-per-node=2", "--time=2:00:00", "--partition=gpu", "--output=/runs/cart/slurm.log",
        "--open-mode=append", "--signal=B:USR1@120", "--requeue", "--no-kill", "--account=x",
    ]  # fmt: skip
    assert "#SBATCH --exclusive\n" in script(JOB, "/home", "python")


@pytest.mark.parametrize(
    ("end", "restarts", "requeued"),
    [(signal.SIGUSR1, "", True), (signal.SIGUSR1, "1", True), (signal.SIGTERM, "", False)],
)
def test_a_job_that_is_told_of_its_end_goes_on_later(
    end: signal.Signals, restarts: str, requeued: bool, tmp_path: Path
) -> None:
    for name, text in (("tidemill", PROGRAM), ("scontrol", '#!/bin/bash\necho "scontrol $@"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    (tmp_path / "job.sh").write_text(script(JOB, str(tmp_path), str(tmp_path / "tidemill")))
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    variables |= {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    job = subprocess.Popen(
        ["bash", "job.sh"], cwd=tmp_path, env=os.environ | variables, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_until((tmp_path / "begun").exists, 60, "the run begins")
        job.send_signal(end)
        output, _ = job.communicate(timeout=240)
    finally:
        job.kill()
        job.wait()
    words = JOB.again if restarts else JOB.first
    assert output.splitlines() == [
        f"-m tidemill.cli.main {' '.join(words)}",
        *(["scontrol requeue 7"] if requeued else []),
    ]
    assert job.returncode == 143


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
    run.mkdir()
    with pytest.raises(RunError, match="there is no `sbatch` here"):
        slurm_job.submit(SlurmJob(run, JOB.first, JOB.again))
    assert not run.exists()  # nothing is left of it
    with pytest.raises(RunError, match="was submitted as no job"):
        slurm_job.job_of(tmp_path)


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="there is no Slurm here")
def test_a_job_of_two_nodes_trains_and_is_followed(tmp_path: Path) -> None:
    if subprocess.run(["sinfo"], capture_output=True).returncode:
        pytest.skip("Slurm's controller does not answer")
    done = subprocess.run(
        [
            sys.executable, "-m", "tidemill.cli.main", "train", "CartPole-v1", "--launch", "slurm", "--hosts",
            "2", "--cpus-per-host", "1", "--layout", "given", "--max-steps", "30000", "--set",
            "workers.actor.count=2", "--run-dir", "run",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0 and "completed" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "run" / slurm_job.JOB).read_text().strip().isdecimal()
