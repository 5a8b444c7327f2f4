"""The command ends whatever environments have left in its process."""

import subprocess
import sys

LEFT = """
import multiprocessing, sys, threading, time
begun = threading.Event()
def nap():
    begun.set(); time.sleep(1000)

def app():
    threading.Thread(target=nap, name="arm").start()
    begun.wait(60)
    child = multiprocessing.get_context("fork").Process(target=nap)
    child.start()
    print(child.pid)
    sys.exit(3)

from types import ModuleType
commands = sys.modules["tidemill.cli.main"] = ModuleType("tidemill.cli.main")
commands.app = app
from tidemill.cli import entry
entry.PATIENCE = 0.1
sys.argv = ["tidemill", "status", "runs/mine"]
entry.main()
"""


def test_a_command_that_somebody_elses_threads_and_processes_keep_ends_all_the_same() -> None:
    words = [sys.executable, "-c", LEFT]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3, done.stderr
    child = done.stdout.strip()
    left = "has left what does not end (thread arm: nap (<string>:5) ← run (threading.py:"
    assert left in done.stderr and f"; process {child}); this command ends without it" in done.stderr
