"""The entry of the command ``tidemill``: one that trains starts processes for its workers
before it imports anything of size. What environments have left in this process does not
keep it from ending."""

import atexit
import os
import sys
import threading
from contextlib import suppress
from time import sleep

from tidemill.core.cores import cores
from tidemill.core.run_marks import begin_command, end_own
from tidemill.core.thread_stacks import stack_of, words_of
from tidemill.launchers.worker_process import start_early

MOST = 4  # processes to start before it is known how many there will be
PATIENCE = 30.0  # seconds that threads and processes have to end which environments have started
_OTHERWISE = ("-h", "--help", "--print-config", "--launch")  # there may be none, then


def main() -> None:
    """Do what the command's words say."""
    words = sys.argv[1:]
    begin_command()
    atexit.register(_end_left)  # after whatever else is to be done then
    if words[:1] in (["train"], ["resume"]) and not any(word.startswith(_OTHERWISE) for word in words):
        # on a single core nothing is gained
        start_early(min(cores(), MOST) if cores() > 1 and sys.platform.startswith("linux") else 0)
    from tidemill.cli.main import app

    try:
        app()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        with suppress(RuntimeError):  # no more threads are allowed
            threading.Thread(target=_end_anyway, args=(status,), daemon=True).start()
        raise


def _end_anyway(status: int) -> None:
    """End this process where somebody else's threads, or children of `multiprocessing`,
    for which Python waits without end, keep it. Slow endings of other kinds have their
    time."""
    sleep(PATIENCE)
    main, children = threading.main_thread(), []
    threads = [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]
    kept = [f"thread {thread.name}: {words_of(stack_of(thread.ident))}" for thread in threads]
    if (multiprocessing := sys.modules.get("multiprocessing")) is not None:
        children = multiprocessing.active_children()
        kept += [f"process {child.pid}" for child in children]
    if kept:
        print(
            f"note: an environment, most likely, has left what does not end ({'; '.join(kept)}); this "
            f"command ends without it, {PATIENCE:g} s after it was over. Let the environment's close() end "
            "what it started",
            file=sys.stderr,
        )
        for child in children:
            child.kill()
        _end_left()
        sys.stdout.flush()
        os._exit(status)


def _end_left() -> None:
    """End what environments of this process have left in sessions of their own."""
    if left := end_own():
        print(
            f"note: {', '.join(left)}, which an environment had started, most likely, and left, was ended "
            "with this command. Let the environment's close() end what it started",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
