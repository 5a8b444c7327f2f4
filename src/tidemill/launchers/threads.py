"""The threads launcher: every worker in a thread of this process, but for those that take
turns in one (`Experiment.together`). Those with `one_core` keep to one core with all
threads that step for them."""

import os
import threading
from collections.abc import Sequence
from time import monotonic, sleep

from tidemill.api.launcher import Call, Job, Launcher
from tidemill.api.transport import Link
from tidemill.api.worker import WorkerHandle
from tidemill.core.blas_threads import limit_threads
from tidemill.core.cores import keep_to
from tidemill.core.memory import own_bytes
from tidemill.core.thread_stacks import stack_of
from tidemill.transports.local import LocalLink, local_endpoints


class ThreadsLauncher(Launcher):
    """The launcher of threads suits slow and remote environments, and code that releases
    Python's lock."""

    def __init__(self) -> None:
        self._threads: dict[str, threading.Thread] = {}
        self._links: list[LocalLink] = []
        self._core = _any_core()

    def launch(self, job: Job) -> dict[str, Link]:
        experiment, configs = job.experiment, dict(job.experiment.members())
        math_threads = experiment.math_threads(configs)
        limit_threads(math_threads)
        groups = experiment.processes()
        ends = local_endpoints([name for name, _ in experiment.members()], experiment.edges(), groups)
        links: dict[str, Link] = {}
        workers: dict[str, WorkerHandle] = {}
        for name in configs:
            endpoints, link = ends[name]
            links[name] = link
            self._links.append(link)
            self._bell = link.bell
            workers[name] = job.build(name, endpoints, math_threads)
        for names in groups:
            core = self._core if any(configs[name].one_core for name in names) else None
            lives = [workers[name] for name in names], [ends[name][1].peer for name in names], core
            self._threads |= dict.fromkeys(
                names, threading.Thread(target=_live, args=lives, name="+".join(names), daemon=True)
            )
        for names in groups:
            self._threads[names[0]].start()
        return links

    def wait(self, seconds: float, least: float = 0.0) -> None:
        sleep(least)
        self._bell.wait(seconds)

    def obituary(self, worker: str) -> str:
        return "its thread ended"

    def stack(self, worker: str) -> Sequence[Call]:
        return stack_of(self._threads[worker].ident)

    def own_bytes(self, worker: str) -> int | None:
        return own_bytes(os.getpid())

    def close(self, seconds: float) -> None:
        for link in self._links:
            link.close()
        deadline = monotonic() + seconds
        for thread in filter(threading.Thread.is_alive, self._threads.values()):
            # one whose environment hangs ends with this process
            thread.join(max(deadline - monotonic(), 0.01))
        keep_to(None)


def _any_core() -> int:
    """Return the core for those that keep to one (the same for all: they have Python's
    lock by turns). Other runs do the same."""
    free = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    return free[os.getpid() % len(free)]


def _live(workers: Sequence[WorkerHandle], links: Sequence[LocalLink], core: int | None) -> None:
    """What each thread runs. Its ends of the links hang up with it, so that the runner
    notices however it ends."""
    if core is not None:
        keep_to(core)
    try:
        workers[0].run(*workers[1:])
    finally:
        for link in links:
            link.close()
