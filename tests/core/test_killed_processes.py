"""A process that was killed is waited for, and not for ever."""

import subprocess

import pytest

from tidemill.core.errors import DeadlineError
from tidemill.core.killed_processes import await_end


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
