"""What grows in the memory of this process: Python's objects, counted twice, by who holds
the most of what has come, and what is in none of them.

Nothing is written down meanwhile: somebody asks for a first census once growth is
suspected, and for another one later, which tells the difference. Each looks for so long
as it may, at the newest objects first, and tells sizes by samples: who keeps a million
arrays keeps similar ones. Arrays, and dicts of arrays alone, are no objects that the
garbage collector lists; they are found by what refers to them. Memory that several share
counts once, and what many refer to (the environment, say) belongs to none of them.
"""

import gc
import sys
import types
import weakref
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import compress, islice
from operator import itemgetter
from time import thread_time
from typing import Any, NamedTuple

import numpy as np

from tidemill.core.clock import awake
from tidemill.core.memory import kinds_of_memory, size
from tidemill.core.object_names import place_of, plural_of

# seconds of a core that parts of a census have: to find large arrays, to estimate what
# has grown, and to find out who holds it
LOOKING, WEIGHING, NAMING = 0.2, 0.08, 0.08
MOST = 1_000_000  # objects that are counted, and looked at one by one; of more some are
LARGE = 100  # entries from which on a container is known by itself
BUFFER = 64 << 10  # bytes from which on an array is
KEPT = 20_000  # of each of them that are known later, the largest
CHUNK = 2_000  # objects that are looked at in one call
LOOKED_AT = 500  # containers that have grown by the most entries: these are estimated
TYPES = 8  # likewise
FEW, MANY = 16, 256  # entries that are looked at for an estimate, and for one that is told
OBJECTS = 1_000  # that belong to an entry, at most
WIDTH = 64  # of what an object refers to, what is looked at: it stands for the rest
OWNERS = 3  # so many refer to what belongs to an entry, at most
OURS = 4  # references that a census itself has to what it looks at
NESTED = 3  # containers in one another, of those that the collector does not list
TOLD = 0.1  # share of what has grown that is worth a word
LINES = 3  # that are told
UNEXPLAINED = 0.3  # share of what has grown from which on it is told that no object has it
HEADER = 112  # bytes of an array besides its numbers
Entry = tuple[Any, ...]
# how long they are, and what is in them, whatever subclasses make of that
_CONTAINERS: Mapping[type, tuple[Callable[[Any], int], Callable[[Any], Iterable[Any]]]] = {
    list: (list.__len__, list.__iter__),
    dict: (dict.__len__, dict.items),
    set: (set.__len__, set.__iter__),
    deque: (deque.__len__, deque.__iter__),
}
_PROGRAM = (  # what programs are made of, without data of their own
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.ModuleType,
    types.CodeType,
    types.FrameType,
    types.GenericAlias,
    types.UnionType,
    weakref.ReferenceType,
    property,
    staticmethod,
    classmethod,
)


class Census(NamedTuple):
    """A census as it is kept, for a later one to be compared with it.

    at: second of `awake`
    whole: whether there was time to look at all
    memory: bytes of the process by kind (see `kinds_of_memory`)
    counts: objects, by the identity of their type
    lengths: entries of large containers, by identity
    buffers: bytes of large arrays, by who has the memory
    """

    at: float
    whole: bool
    memory: Mapping[str, int]
    counts: Mapping[int, int]
    lengths: Mapping[int, int]
    buffers: Mapping[int, int]


def take_census(before: Census | None = None, grown: int = 0) -> tuple[Census, str]:
    """Look at this process's objects. Return what is to be kept, and what has grown since
    `before`, in words; where that is None, what `grown` bytes may be in; "" for 0."""
    heap = _Heap(before)
    try:
        return heap.census, heap.growth(before, grown) if grown else ""
    finally:
        heap.forget()


class _Heap:
    """The objects that there are now, the newest last."""

    def __init__(self, before: Census | None) -> None:
        old, middle, young = (gc.get_objects(generation) for generation in (2, 1, 0))
        self._objects = old + middle + young
        self._every = 1 + len(self._objects) // MOST
        self._types = Counter(map(type, self._objects[:: self._every]))
        self._plain = {kind for kind in self._types if issubclass(kind, _PROGRAM)}
        self._sources = _sources()
        self._wanted = {*self._sources, dict, tuple}
        self._large: dict[int, Any] = {}  # containers
        self._lengths: dict[int, int] = {}  # of these
        self._buffers: dict[int, int] = {}  # bytes
        self._holders: dict[int, Any] = {}  # of these
        mine = (old, middle, young, self._objects, self._types, self._large, self._lengths, self._holders)
        # what is made here, and what was kept, does not grow
        self._ours = {id(each) for each in (*mine, self._buffers, *(before or ()))}
        self._seen = set[int]()  # what is in estimates that are told
        self._find_large()
        self._give(LOOKING)
        self.census = Census(
            awake(),
            self._look_into(),
            kinds_of_memory(),
            {id(kind): self._every * count for kind, count in self._types.items()},
            _most(self._lengths, KEPT),
            _most(self._buffers, KEPT),
        )

    def forget(self) -> None:
        """Keep nothing alive: it is among the objects itself."""
        for kept in (self._objects, self._large, self._holders):
            kept.clear()

    def _give(self, seconds: float) -> None:
        self._until = thread_time() + seconds

    def _over(self) -> bool:
        return thread_time() > self._until

    # ---- what there is -----------------------------------------------------------------

    def _find_large(self) -> None:
        """Find large containers among the oldest: what grows was there before it grew."""
        lengths = {
            kind: length
            for kind in (*_CONTAINERS, *self._types)
            for base, (length, _) in _CONTAINERS.items()
            if issubclass(kind, base)
        }
        for each in [each for each in islice(self._objects, MOST) if type(each) in lengths]:
            if (n := lengths[type(each)](each)) >= LARGE and id(each) not in self._ours:
                self._large[id(each)], self._lengths[id(each)] = each, n

    def _look_into(self) -> bool:
        """Find large arrays, and large dicts that the collector does not list, the newest
        first. False where time was over before all was looked at."""
        objects = self._objects
        for end in range(len(objects), 0, -CHUNK):
            if self._over():
                return False
            chunk = objects[max(end - CHUNK, 0) : end]
            self._look_at([each for each in chunk if type(each) not in self._plain and not self._huge(each)])
        return True

    def _huge(self, each: Any) -> bool:
        """True of a container of whose entries a sample will do, but of dicts that may be
        somebody's names, and of this census's own."""
        most = CHUNK if issubclass(type(each), dict) else 0
        return self._lengths.get(id(each), 0) > most or id(each) in self._ours

    def _look_at(self, holders: Sequence[Any], nested: int = 0) -> None:
        found, inner = dict[int, tuple[int, int]](), []
        sources, referents = self._sources, gc.get_referents(*holders)
        for each in compress(referents, map(self._wanted.__contains__, map(type, referents))):
            kind = type(each)
            if (source := sources.get(kind)) is not None:
                key, nbytes = source(each)
                if nbytes >= BUFFER and key not in self._buffers:
                    found[id(each)] = key, nbytes
            elif not gc.is_tracked(each):
                if kind is dict and len(each) >= LARGE and id(each) not in self._ours:
                    self._large[id(each)], self._lengths[id(each)] = each, len(each)
                if not self._huge(each):
                    inner.append(each)
        for holder in holders if found else ():
            for each in gc.get_referents(holder):
                if (hit := found.get(id(each))) is not None:
                    self._buffers[hit[0]], self._holders[hit[0]] = hit[1], holder
        if inner and nested < NESTED:
            self._look_at(inner, nested + 1)

    # ---- what has grown ----------------------------------------------------------------

    def growth(self, before: Census | None, grown: int) -> str:
        """Return what has grown, in words."""
        more, head = float(grown), "it holds "
        if before is not None:
            kinds = {kind: n - before.memory.get(kind, 0) for kind, n in self.census.memory.items()}
            more = max(float(kinds.get("private memory", grown)), 1.0)
            told = [f"{size(n)} of {kind}" for kind, n in kinds.items() if n > TOLD * more]
            head = f"in the last {self.census.at - before.at:.0f} s came "
            head += f"{', '.join(told)}, in it " if told else ""  # else what was freed before is used again
        self._give(WEIGHING)
        found = self._containers(before, more)
        if sum(nbytes for nbytes, _ in found) < more / 2 and self._comparable(before):
            found += self._large_arrays(before, more)
        if sum(nbytes for nbytes, _ in found) < more / 2:
            self._give(WEIGHING)
            found += self._newest(before, more)
        words = [text for _, text in sorted(found, key=itemgetter(0), reverse=True)[:LINES]]
        rest = more - sum(nbytes for nbytes, _ in found)
        if rest > UNEXPLAINED * more:
            whole = self._comparable(before) and not gc.get_freeze_count()  # which are not listed
            seen = "" if whole else f" (as far as {len(self._objects):,} were looked at)"
            words.append(
                f"about {size(rest)} in no object of Python{seen}: native memory, of a library that it calls "
                "most likely, or freed and not given back"
            )
        return head + (", ".join(words) or "nothing that has a tenth of it")

    def _comparable(self, before: Census | None) -> bool:
        """True where there was time for all that the collector does not list."""
        return self.census.whole and (before is None or before.whole)

    def _containers(self, before: Census | None, more: float) -> list[tuple[float, str]]:
        """Return the containers whose new entries have most of it: bytes, and words."""
        known = {} if before is None else before.lengths
        grown = {
            key: n - known.get(key, 0)
            for key, n in self._lengths.items()
            if key in known or self._comparable(before) or gc.is_tracked(self._large[key])
        }
        few: dict[int, float] = {}
        for key in _most(grown, LOOKED_AT):
            if grown[key] > 0 and not self._over():
                few[key] = self._estimate(key, grown[key], FEW, set())[0]
        found = list[tuple[float, str]]()
        for key in _most(few, LINES):
            if few[key] > TOLD * more and key not in self._seen:
                self._give(WEIGHING / LINES)
                nbytes, what = self._estimate(key, grown[key], MANY, self._seen)
                new = f", {grown[key]:,} of them new" if grown[key] < self._lengths[key] else ""
                entries = f"{self._lengths[key]:,} entries{new}"
                found.append((nbytes, f"{self._place(self._large[key])} ({entries}, {what})"))
        return found

    def _estimate(self, key: int, count: int, samples: int, seen: set[int]) -> tuple[float, str]:
        """Return how many bytes the newest entries of a large container are, and of what,
        by a sample."""
        container, length = self._large[key], self._lengths[key]
        seen.add(key)
        nbytes, sizes = self._mean(_entries(container, length - count, samples), seen, listed=True)
        nbytes += _size_of(container) / length
        return count * nbytes, _about(count * nbytes, sizes)

    def _mean(self, entries: Sequence[Entry], seen: set[int], listed: bool) -> tuple[float, Counter[type]]:
        """Return the bytes that belong to each of these, and to which types. What all
        have in common is found with the first ones, which do not count. `listed`: with
        objects that the collector lists."""
        common, sizes, counted = min(len(entries), FEW) // 4, Counter[type](), 0
        for number, entry in enumerate(entries):
            if number >= FEW and self._over():
                break
            self._weigh(entry, seen, listed, sizes if number >= common else Counter())
            counted += number >= common
        return sum(sizes.values()) / max(counted, 1), sizes

    def _weigh(self, entry: Entry, seen: set[int], listed: bool, sizes: Counter[type]) -> None:
        """Add the bytes of what belongs to an entry, by type."""
        todo, left = [(each, 1) for each in entry], OBJECTS
        while todo and left:
            (each, times), left = todo.pop(), left - 1
            kind = type(each)
            if (source := self._sources.get(kind)) is not None:
                key, nbytes = source(each)
                if key not in seen:
                    seen.add(key)
                    sizes[kind] += times * (nbytes + HEADER)
            elif id(each) not in seen and not issubclass(kind, _PROGRAM):
                if sys.getrefcount(each) > OWNERS + OURS:
                    continue
                seen.add(id(each))
                sizes[kind] += times * _size_of(each)
                inner = gc.get_referents(each)
                every = 1 + len(inner) // WIDTH
                todo += [(one, times * every) for one in inner[::every] if listed or not gc.is_tracked(one)]

    def _large_arrays(self, before: Census | None, more: float) -> list[tuple[float, str]]:
        """Return who holds most of the large arrays that have come."""
        known = {} if before is None else before.buffers
        new: dict[int, list[int]] = {}  # keys, by identity of the holder
        for key, nbytes in self._buffers.items():
            if nbytes > known.get(key, 0) and key not in self._seen:
                new.setdefault(id(self._holders[key]), []).append(key)
        total = {
            holder: sum(self._buffers[key] - known.get(key, 0) for key in keys)
            for holder, keys in new.items()
        }
        return [
            (
                float(nbytes),
                f"{self._place(self._holders[new[holder][0]])} ({size(nbytes)} of large arrays, "
                f"{len(new[holder]):,} of them)",
            )
            for holder, nbytes in _most(total, LINES).items()
            if nbytes > TOLD * more
        ]

    def _newest(self, before: Census | None, more: float) -> list[tuple[float, str]]:
        """Return the types of which most has come, with what belongs to them that is not
        listed by itself."""
        known = {} if before is None else before.counts
        grown = {
            kind: self._every * count - known.get(id(kind), 0)
            for kind, count in self._types.items()
            if kind not in self._plain
        }
        newest: dict[type, list[Entry]] = {kind: [] for kind in _most(grown, TYPES) if grown[kind] >= LARGE}
        for number, each in enumerate(reversed(self._objects)):
            kind = type(each)
            if (
                kind in newest
                and len(newest[kind]) < grown[kind]
                and id(each) not in self._seen
                and not self._huge(each)
            ):
                newest[kind].append((each,))
            if number % CHUNK == 0 and self._over():
                break
        self._give(WEIGHING)
        found = []
        for kind, entries in newest.items():
            some = entries[:: 1 + len(entries) // MANY]
            nbytes, sizes = self._mean(some, self._seen, listed=False)
            if (nbytes := nbytes * grown[kind]) > TOLD * more:
                found.append(
                    (nbytes, f"some {grown[kind]:,} more {plural_of(kind)} ({_about(nbytes, sizes)})")
                )
        return found

    def _place(self, target: Any) -> str:
        self._give(NAMING)
        return place_of(target, self._ours, self._over)


def _entries(container: Any, first: int, samples: int) -> list[Entry]:
    """Return so many of its entries, from number `first` on."""
    base = next(kind for kind in _CONTAINERS if issubclass(type(container), kind))
    length, entries = _CONTAINERS[base]
    every = max((length(container) - first) // samples, 1)
    with suppress(RuntimeError):  # another thread changes it meanwhile
        some = list(islice(entries(container), first, None, every))
        return some if base is dict else [(each,) for each in some]
    return []


def _about(nbytes: float, sizes: Counter[type]) -> str:
    """Return so many bytes, and what most of them are."""
    most = [plural_of(kind) for kind, n in sizes.most_common(2) if n >= 0.25 * sizes.total()]
    return f"about {size(nbytes)} of {' and '.join(most)}" if most else f"about {size(nbytes)}"


def _most(numbers: Mapping[Any, Any], count: int) -> dict[Any, Any]:
    """Return the largest of these, the largest first."""
    return dict(sorted(numbers.items(), key=itemgetter(1), reverse=True)[:count])


def _sources() -> dict[type, Callable[[Any], tuple[int, int]]]:
    """Return, by type, how to find out who has the memory of what is no container, and
    how many bytes that is."""
    sources: dict[type, Callable[[Any], tuple[int, int]]] = {
        bytes: _of_itself,
        bytearray: _of_itself,
        array: _of_itself,
        np.ndarray: _of_numpy,
    }
    if (torch := sys.modules.get("torch")) is not None:
        with suppress(AttributeError):  # another thread imports it just now
            sources |= {torch.Tensor: _of_torch, torch.nn.Parameter: _of_torch}
    return sources


def _size_of(each: Any) -> int:
    """Return the bytes of an object itself, where it can tell."""
    with suppress(Exception):  # what users make of that
        return sys.getsizeof(each)
    return object.__sizeof__(each)


def _of_itself(each: Any) -> tuple[int, int]:
    return id(each), sys.getsizeof(each)


def _of_numpy(each: Any) -> tuple[int, int]:
    while isinstance(base := each.base, np.ndarray):
        each = base
    if base is None:
        return id(each), each.nbytes
    if isinstance(base, (bytes, bytearray)):
        return _of_itself(base)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(base, torch.Tensor):
        return _of_torch(base)
    return id(each), 0  # memory that is shared, or a file's


def _of_torch(each: Any) -> tuple[int, int]:
    with suppress(Exception):  # one without a storage of its own
        if each.device.type == "cpu":
            storage = each.untyped_storage()
            return storage.data_ptr(), storage.nbytes()
    return id(each), 0
