"""Making and joining shared memory of any layout."""

from pathlib import Path

from tidemill.bridge.files import open_file
from tidemill.bridge.image import layout_of
from tidemill.bridge.memory import SharedMemory
from tidemill.bridge.one_file import OneFile
from tidemill.bridge.tables import LAYOUTS, SIMULATOR, Layout
from tidemill.bridge.two_files import TwoFiles


def create_memory(layout: Layout, path: Path, side: int) -> SharedMemory:
    """Make the memory of a bridge; `side` has the first turn."""
    return (OneFile if layout.files == 1 else TwoFiles)(layout, path, side, create=True)


def join_memory(path: Path, side: int = SIMULATOR) -> SharedMemory:
    """Join a memory that is there, as the simulator unless another side is given,
    whatever layout it is of."""
    first = open_file(path)
    layout = LAYOUTS[layout_of(first)]
    first.close()
    return (OneFile if layout.files == 1 else TwoFiles)(layout, path, side, create=False)
