"""The inline launcher: every worker in this thread, in turn. Deterministic: the
debugger's launcher."""

import os

from tidemill.api.launcher import Job, Launcher
from tidemill.api.transport import Link
from tidemill.api.worker import WorkerHandle
from tidemill.core.blas_threads import limit_threads
from tidemill.core.errors import HangLeft
from tidemill.core.memory import own_bytes
from tidemill.transports.local import LocalLink, local_endpoints

# seconds to wait when no worker can do anything: for an environment outside of this
# process, or for the end of a pause
_NAP = 0.001


class InlineLauncher(Launcher):
    """One `wait` gives each worker one turn."""

    takes_turns = True

    def __init__(self) -> None:
        self._workers: dict[str, WorkerHandle] = {}
        self._hung = set[str]()  # whose environment has not come back from a step: they have no more turns
        self._links: list[LocalLink] = []

    def launch(self, job: Job) -> dict[str, Link]:
        experiment = job.experiment
        names = [name for name, _ in experiment.members()]
        math_threads = experiment.math_threads(names)
        limit_threads(math_threads)
        ends = local_endpoints(names, experiment.edges(), [names])
        self._bell = ends[names[0]][0].bell
        links: dict[str, Link] = {}
        for name in names:
            endpoints, links[name] = ends[name]
            self._links.append(ends[name][1])
            self._workers[name] = job.build(name, endpoints, math_threads)
        for name, config in experiment.members():
            equals = [
                each
                for port in config.ports()
                if port.role == "sum"
                for each in experiment.holders(port.stream, "sum")
            ]
            self._workers[name].attendants = [self._workers[each] for each in equals if each != name]
        return links

    def wait(self, seconds: float, least: float = 0.0) -> None:
        done = False
        for name, worker in self._workers.items():
            if name not in self._hung:
                try:
                    done |= worker.run_once()
                except HangLeft as left:
                    if left.worker == name:
                        self._hung.add(name)
                    raise
        if not done:
            self._bell.wait(min(seconds, _NAP))

    def own_bytes(self, worker: str) -> int | None:
        return own_bytes(os.getpid())

    def obituary(self, worker: str) -> str:
        return "it returned"

    def close(self, seconds: float) -> None:
        for link in self._links:
            link.close()
        for name, worker in self._workers.items():
            if name not in self._hung:
                worker.run_once()  # finds the link closed, and frees what it holds
        self._workers.clear()
