"""Whatever began with a run's mark is found, and ended where its run is gone; nothing
else is."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.run.watching import wait_until

from tidemill.core.run_marks import (
    ROOM,
    STARTER,
    VARIABLE,
    end_marked,
    end_orphans,
    left_alone,
    marked,
    new_mark,
    orphans,
    this_process,
)


@pytest.fixture
def start() -> Iterator[Callable[[str], "subprocess.Popen[bytes]"]]:
    """Starts a process with a mark, in a session of its own."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(mark: str) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, VARIABLE: mark}
        process = subprocess.Popen(["sleep", "1000"], env=environment, start_new_session=True)
        started.append(process)
        # or a run of another test has ended it
        variables, own = Path(f"/proc/{process.pid}/environ"), f"{VARIABLE}={mark}".encode()
        wait_until(lambda: process.poll() or own in variables.read_bytes(), 60, f"{mark} has begun")
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_those_of_a_mark_are_ended_and_no_others(start: Callable[[str], "subprocess.Popen[bytes]"]) -> None:
    run = new_mark()
    first, second = start(f"{run}/actor-0/0"), start(f"{run}/actor-0/1")
    assert (marked(f"{run}/actor-0/0"), marked(f"{run}/actor-0/1")) == ([first.pid], [second.pid])
    assert {first.pid, second.pid}.isdisjoint(orphans())  # this process lives
    end_marked(f"{run}/actor-0/0")
    assert first.wait(60) == -9 and second.poll() is None


def test_those_whose_runner_is_gone_are_orphans_but_not_a_container_s(
    start: Callable[[str], "subprocess.Popen[bytes]"],
) -> None:
    words = "from tidemill.core.run_marks import new_mark; print(new_mark())"
    gone = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, check=True
    ).stdout.strip()
    namespace, pid, began, name = gone.split(".")
    orphan = start(f"{gone}/actor-0/0")
    elsewhere = start(f"{int(namespace) + 1}.{pid}.{began}.{name}/actor-0/0")
    same_id = start(f"{namespace}.{os.getpid()}.{int(began) + 1}.{name}/actor-0/0")  # given out again
    nobody = start("what somebody else set")
    end_orphans()  # whatever other tests have left, too
    assert orphan.wait(60) == same_id.wait(60) == -9
    assert elsewhere.poll() is None and nobody.poll() is None


def test_workers_are_left_alone_once_their_starter_is_gone_whosever_children_they_are() -> None:
    words = ["sleep", "1000"]
    through = (
        "import subprocess as s; "
        f"print(s.Popen({words}, stdout=s.DEVNULL, stderr=s.DEVNULL, start_new_session=True).pid)"
    )
    pids = []
    gone = this_process().rpartition(".")[0] + ".1"  # another one had its number
    for starter in (this_process(), gone):
        said = subprocess.run(
            [sys.executable, "-c", through], env={**os.environ, STARTER: starter}, capture_output=True
        )
        pids.append(int(said.stdout))
    own, lost = pids
    try:
        wait_until(lambda: lost in left_alone(), 60, "it is found")
        assert own not in left_alone()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


STARTS = """
import os, resource, subprocess, sys, time
from tidemill.core.run_marks import mark_started
how, mark = sys.argv[1:]
if how == "limited":
    resource.setrlimit(10, (100, 100))
mark_started(mark)
if how == "bare":
    subprocess.run(["sh", "-c", "env -i setsid sh -c 'echo $$; exec sleep 1000 >&-' &"])
elif not os.fork():
    os.setsid()
    if not (pid := os.fork()):
        os.close(1)
        time.sleep(1000)
    print(pid, flush=True)
    os._exit(0)
if how != "bare":
    os.wait()
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "how",
    [
        "forked",
        "limited",  # nor may a number be set
        "bare",  # a program without variables
    ],
)
def test_what_has_no_variables_of_its_own_is_found_as_a_worker_started_it(how: str) -> None:
    mark = f"{new_mark()}/actor-0/0"
    words = [sys.executable, "-c", STARTS, how, mark]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env={**os.environ, VARIABLE: ROOM}, stdin=pipe, stdout=pipe) as process:
        daemon = int(process.stdout.readline())  # type: ignore[union-attr]
        found = {daemon} if how == "limited" else {daemon, process.pid}
        wait_until(lambda: {*marked(mark)} == found, 60, "the daemon is found")
        end_marked(mark)
        process.communicate()
    assert process.returncode == (0 if how == "limited" else -signal.SIGKILL)
    wait_until(lambda: not marked(mark), 60, "the daemon is gone")


BEGINS = """
import subprocess, sys
from tidemill.core.run_marks import mark_started, new_mark
mark_started(new_mark())
subprocess.run(["sh", "-c", "env -i setsid sh -c 'echo $$; exec sleep 1000 >&-' &"])
sys.stdin.read()
"""


def test_an_orphan_without_variables_is_ended_once_its_runner_is_gone_and_not_before() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", BEGINS], stdin=pipe, stdout=pipe) as runner:
        daemon = int(runner.stdout.readline())  # type: ignore[union-attr]
        end_orphans()
        assert daemon not in left_alone()
        os.kill(daemon, 0)  # it is there
        runner.communicate()
    end_orphans()  # or a run of another test has
    wait_until(lambda: daemon not in orphans(), 60, "it is ended")
    assert over(daemon)


def over(pid: int) -> bool:
    """True of a process that is gone, or of which its parent has taken no note yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_who_stays_in_the_session_of_a_command_is_nobody_s_after_it() -> None:
    """A viewer, say, that was opened meanwhile; who has left the session is ended."""
    words = """
import subprocess
from tidemill.core.run_marks import begin_command, end_own, marking_own

begin_command()
with marking_own():
    sleep = ["sleep", "1000"]
    started = [subprocess.Popen(sleep, start_new_session=new, stdout=-3, stderr=-3) for new in (True, False)]
left = end_own()
print(started[1].pid, len(left), started[0].wait())
"""
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    stays, ended, status = map(int, done.stdout.split())
    try:
        assert (ended, status) == (1, -signal.SIGKILL)
        os.kill(stays, 0)
        assert stays not in orphans()
    finally:
        os.kill(stays, signal.SIGKILL)
