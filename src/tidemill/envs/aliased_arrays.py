"""Detects copies of an environment that hand out one and the same array: without a copy
in time every lane would hold what the last one of them observed."""

import copy
import threading
from collections.abc import Mapping
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import EnvironmentFault

TICKS = 3  # at the start, in which everything is copied and looked at: the first reset, and the first steps

# By the address of an array that was handed out: weak references to the array whose
# memory that is (so that nobody takes another one for it that comes to lie there) and to
# the `AliasDetector` of who did so last; the lane; its thread; and what it held then. Of
# all environments of the process: the targets of a ring and threads beside one another
# share what belongs to a class or a module, too.
_Owner = tuple["ReferenceType[Any]", "ReferenceType[AliasDetector]", int, int, NDArray[Any]]
_owners: dict[int, _Owner] = {}


class AliasDetector:
    """The detector sees in an environment's first ticks whether two of its lanes, or it
    and another environment of this process, hand out one array.

    Such arrays are copied for good as soon as they are handed out, before the next lane
    is stepped. Where different threads write one, that is too late: an
    `EnvironmentFault`. What lies still, as the rows of a table that is looked up, is
    copied for nothing, and no fault.

    active: what is handed out is to go through `copied` found: somebody shares
    """

    def __init__(self, name: str) -> None:
        """`name` is what messages call the environment."""
        self._name, self._left = name, TICKS
        self.active, self.found = True, False
        # something was handed out of which nobody can tell whether others hand it out,
        # too: it is copied for good
        self._unseen = False
        # of this tick: what has no weak references, by where it lies, and who handed it
        # out
        self._parts: dict[int, tuple[Any, int]] = {}
        self._closed = False

    def next_tick(self) -> None:
        """A tick is received."""
        self._parts.clear()
        self._left -= 1
        self.active = self.found or self._unseen or self._left > 0

    def close(self) -> None:
        """Whatever it handed out, nobody is disturbed by it from now on."""
        self._closed = True

    def copied(self, value: Any, lane: int) -> Any:
        """Return a copy of what `lane` (any number for who may write an array by itself)
        handed out just now, in the thread that stepped it."""
        if isinstance(value, np.ndarray):
            held = value.copy()
            if self._left > 0:
                self._look(value, held, lane)
            return held
        if isinstance(value, Mapping):
            self._note(id(value), value, lane)
            return {key: self.copied(part, lane) for key, part in value.items()}
        if isinstance(value, tuple):
            return tuple([self.copied(part, lane) for part in value])
        if isinstance(value, list):  # is slow anyway
            self._note(id(value), value, lane)
            self._unseen = True
            return copy.deepcopy(value)
        if hasattr(value, "__array__") and not isinstance(value, np.generic):  # another library's
            self._unseen = True
            return np.array(value)
        return value

    def _note(self, place: int, value: Any, lane: int) -> None:
        """See whether another lane has handed out in this tick what lies at `place`:
        `value`, which is kept meanwhile, so that nothing else does."""
        if self._parts.setdefault(place, (value, lane))[1] != lane:
            self.found = True

    def _look(self, array: NDArray[Any], held: NDArray[Any], lane: int) -> None:
        root: Any = array
        while (inner := _memory_of(root)) is not None:
            root = inner
        key, thread = array.__array_interface__["data"][0], threading.get_ident()
        known = _owners.get(key)
        if known is not None and known[0]() is root:
            _, whose, other, its_thread, told = known
            sharing = whose()
            if sharing is not None and not sharing._closed and (sharing is not self or other != lane):
                if thread != its_thread and not (told.shape == held.shape and np.array_equal(told, held)):
                    raise EnvironmentFault(
                        f"{self._name}: copies of it in different threads write their observations into one "
                        "array, so that each may tell another's. Give each copy an array of its own (made "
                        "in __init__, not in the class or the module), or return a fresh one from reset and "
                        "step; or step them in one thread (threads = 0, and the processes launcher)"
                    )
                self.found = sharing.found = sharing.active = True
            _owners[key] = (known[0], ref(self), lane, thread, held)
            return
        try:
            weak = ref(root, lambda _: _owners.pop(key, None))
        except TypeError:  # a bytearray, say
            if not isinstance(root, bytes):  # which nobody writes again
                self._note(key, array, lane)
            return
        _owners[key] = (weak, ref(self), lane, thread, held)


def _memory_of(view: Any) -> Any:
    """Return whose memory an array or a memoryview shows, None where it is its own, or of
    something else."""
    return view.base if isinstance(view, np.ndarray) else view.obj if isinstance(view, memoryview) else None
