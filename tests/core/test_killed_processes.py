"""A process that was killed is waited for, and not for ever."""

import os
import subprocess
import sys

import pytest
from tests.run.watching import wait_until

from tidemill.core.errors import DeadlineError
from tidemill.core.killed_processes import await_end, kill_session, living_groups


def test_one_that_does_not_end_is_named_with_who_holds_it() -> None:
    process = subprocess.Popen(["sleep", "600"])  # as if the kernel did not end it
    try:
        text = rf"actor-0 \(process {process.pid}\) was killed, and has not ended within 0.05 s: the kernel"
        with pytest.raises(DeadlineError, match=text):
            await_end(process, "actor-0", 0.05)
    finally:
        process.kill()
    await_end(process, "actor-0")
    assert process.returncode == -9


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_groups_live_as_long_as_one_that_they_began_does() -> None:
    """Whatever that is called; zombies count for none."""
    name = r"import ctypes; ctypes.CDLL(None).prctl(15, b'\xff)\xfe', 0, 0, 0)"
    code = f"import os, time; {name}; os.fork() or time.sleep(1000)"
    leader = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie, and what it forked lives
        assert living_groups({leader.pid, os.getpid() + 2**22}) == {leader.pid}
    finally:
        kill_session(leader.pid)
    wait_until(lambda: not living_groups({leader.pid}), 60, "what it forked has ended")
    leader.wait()
