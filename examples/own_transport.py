"""A transport of one's own: what workers hand each other lies in files of a folder, in
place of memory without a name, and other programs may look at it. `ends` are made of the
library's slots; a transport over a network has a `Producer`, `Consumer`, `Writer` and
`Reader` of its own. The folder stays when the main process is killed with SIGKILL, which
the library's own memory, without a name, does not.

tidemill train CartPole-v1 --launch examples/own_transport.py:OverFiles
"""

import mmap
import os
import tempfile
from pathlib import Path

from tidemill import ProcessesLauncher
from tidemill.api.edges import ends_by_worker
from tidemill.api.transport import Handle, Transport
from tidemill.core.memory import Segment
from tidemill.transports.shared import EventBell
from tidemill.transports.slots import SlotEndpoints


class FileSegment(Segment):
    """The memory of an edge, in a file."""

    def __init__(self, path):
        self.path = path

    def create(self, nbytes):
        os.truncate(self.path, nbytes)
        return self.attach()

    def attach(self):
        with open(self.path, "r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), 0)) if os.path.getsize(self.path) else None


class Files(Transport):
    """Joins worker processes by files, one for each edge."""

    descriptors_per_edge = 0

    def __init__(self, edges, bells):
        self.folder = tempfile.TemporaryDirectory(prefix="tidemill-edges-")
        self.ends, self.bells = ends_by_worker(edges), bells
        for edge in edges:
            self._path(edge.name).touch()

    def _path(self, edge):
        return Path(self.folder.name, edge.replace("/", "+"))

    def handles(self, worker):
        return {
            edge: Handle(tuple(self.bells[other] for other in others), str(self._path(edge)))
            for edge, others in self.ends[worker].items()
        }

    @staticmethod
    def endpoints(bell, link, handles):
        ends = {
            edge: (FileSegment(handle.text), [EventBell(descriptor) for descriptor in handle.descriptors])
            for edge, handle in handles.items()
        }
        return SlotEndpoints(bell, link, ends)

    def close(self):
        self.folder.cleanup()


class OverFiles(ProcessesLauncher):
    """Starts processes that are joined by files."""

    transport = f"{__file__}:Files"
