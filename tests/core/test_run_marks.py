"""Whatever began with a run's mark is found, and ended where its run is gone; nothing
else is."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

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
        wait_until(lambda: process.pid in marked(mark) or process.poll(), 60, f"{mark} has begun")
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


FORKS = """
import os, sys, time
from tidemill.core.run_marks import VARIABLE, mark_forks
mark_forks(sys.argv[1])
os.environ[VARIABLE] = sys.argv[1]
if not os.fork():
    os.setsid()
    if not (pid := os.fork()):
        os.close(1)
        time.sleep(1000)
    print(pid, flush=True)
    os._exit(0)
os.wait()
sys.stdin.read()
"""


def test_what_was_only_forked_is_found_and_not_who_forked_it() -> None:
    mark = f"{new_mark()}/actor-0/0"
    words = [sys.executable, "-c", FORKS, mark]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env={**os.environ, VARIABLE: ROOM}, stdin=pipe, stdout=pipe) as process:
        daemon = int(process.stdout.readline())  # type: ignore[union-attr]
        wait_until(
            lambda: marked(mark) == [daemon], 60, "who forked the daemon is gone, and nobody else found"
        )
        end_marked(mark)
        process.communicate()
    assert process.returncode == 0
    wait_until(lambda: not marked(mark), 60, "the daemon is gone")
