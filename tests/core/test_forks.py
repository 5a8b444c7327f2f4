"""What becomes of a fork that comes back."""

import os
import subprocess
import sys

import pytest

from tidemill.core.forks import STATUS

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")

NOBODY_READS = """
import os
from tidemill.core.forks import end_in_fork, forks
since = forks()
if not (child := os.fork()):
    os.close(2)
    end_in_fork(since)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
AS_IT_IS_MADE = """
import os, sys
import gymnasium
from tidemill import Gymnasium

class Forks(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)
    made = 0

    def __init__(self):
        Forks.made += 1
        if os.fork():
            os.wait()
        elif sys.argv[1] == "raises":
            raise RuntimeError("no engine")

    def close(self):
        print("closed", flush=True)

Gymnasium(make=Forks).build(3, seed=0)
print("built", Forks.made)
"""


def said(code: str, *words: str) -> tuple[str, str]:
    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr


def test_it_ends_where_nobody_reads_why() -> None:
    assert said(NOBODY_READS) == (f"{STATUS}\n", "")


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_one_that_comes_back_as_a_lane_is_made_makes_and_closes_no_other(how: str) -> None:
    output, errors = said(AS_IT_IS_MADE, how)
    assert output == "built 3\n"
    assert errors.count("came back as if it were the worker") == 3
