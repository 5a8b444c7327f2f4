"""Making and joining shared memory of any layout."""

from pathlib import Path

from tidemill.bridge.protocol.files import open_file
from tidemill.bridge.protocol.image import layout_of
from tidemill.bridge.protocol.one_file import OneFile
from tidemill.bridge.protocol.shared_memory import SharedMemory
from tidemill.bridge.protocol.tables import LAYOUTS, SIMULATOR, MemoryLayout
from tidemill.bridge.protocol.two_files import TwoFiles


def create_memory(layout: MemoryLayout, path: Path, side: int) -> SharedMemory:
    """Make the memory of a bridge; `side` has the first turn."""
    return (OneFile if layout.files == 1 else TwoFiles)(layout, path, side, create=True)


def join_memory(path: Path, side: int = SIMULATOR) -> SharedMemory:
    """Join a memory that is there, as the simulator unless another side is given,
    whatever layout it is of."""
    first = open_file(path)
    layout = LAYOUTS[layout_of(first)]
    first.close()
    return (OneFile if layout.files == 1 else TwoFiles)(layout, path, side, create=False)
