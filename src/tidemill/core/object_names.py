"""What objects of this process are called, for messages: by who refers to them, which is
looked for only when somebody asks."""

import gc
import sys
import types
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

LEVELS = 4  # of who holds what holds it
LONGEST = 60  # characters of a name that are shown
LONGEST_KEY = 30  # likewise, of a dict's key
_ORDERED = (list, tuple, deque)
_UNSEEN = (types.FrameType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_PLURALS = {"str": "strings", "bytes": "bytes", "ndarray": "numpy arrays", "Tensor": "torch tensors"}


class _Holder(NamedTuple):
    """Who refers to an object. Of several the one with the least `rank` is told.

    step: what the object is there: ".kept", "[3]"
    key: that of a dict, which may be somebody's names
    names: the object is the dict of the holder's names
    """

    rank: int
    holder: Any
    step: str = ""
    key: str = ""
    names: bool = False


def name_of(kind: type) -> str:
    """Return a type as messages show it: "list", "arm.py:Arm"."""
    if kind.__module__ in ("builtins", "collections"):
        return kind.__name__[:LONGEST]
    where = Path(getattr(sys.modules.get(kind.__module__), "__file__", None) or "").name
    if where in ("", "__init__.py"):
        where = str(kind.__module__)
    return f"{where}:{kind.__qualname__}"[:LONGEST]


def plural_of(kind: type) -> str:
    """Return objects of a type as messages show them: "lists", "arm.py:Arm objects"."""
    name = name_of(kind)
    return _PLURALS.get(kind.__name__) or (f"{name} objects" if ":" in name else f"{name}s")


def place_of(target: Any, ignored: Collection[int], over: Callable[[], bool]) -> str:
    """Return an object by the name that somebody has for it: "the list `kept` of
    arm.py:Arm", "the list `kept['rows'][3]` of arm.py:Arm", and by its type alone where
    nobody is found before it is `over`. `ignored`: identities of who only looks at it."""
    what = name_of(type(target))
    if not issubclass(type(target), (*_ORDERED, dict, set)):
        return what
    found, path, key = f"a {what}", "", ""
    for _ in range(LEVELS):
        if over() or (holder := _holder(target, ignored)) is None:
            break
        target = holder.holder
        if key:
            path = f".{key}{path}" if holder.names else f"[{key!r}]{path}"
        key, path = holder.key, f"{holder.step}{path}"
        if issubclass(type(target), (*_ORDERED, dict)):
            continue
        name = f"the {what} `{path.removeprefix('.')[:LONGEST]}` of" if path else f"a {what} in"
        found = f"{name} {_whose(target)}" if path or not holder.names else _whose(target)
        if type(target).__module__.partition(".")[0] not in sys.stdlib_module_names or holder.names:
            break
    return found


def _whose(holder: Any) -> str:
    if issubclass(type(holder), types.ModuleType):
        return Path(getattr(holder, "__file__", None) or holder.__name__).name
    if type(holder) is types.CellType:
        return "a function"
    return name_of(holder if issubclass(type(holder), type) else type(holder))


def _holder(target: Any, ignored: Collection[int]) -> _Holder | None:
    found: list[_Holder] = []
    for holder in gc.get_referrers(target):
        kind = type(holder)
        if id(holder) in ignored:
            continue
        if issubclass(kind, dict):
            keys = [key for key, value in dict.items(holder) if value is target]
            found += [_Holder(2, holder, key=f"{key!s:.{LONGEST_KEY}}") for key in keys[:1]]
        elif issubclass(kind, _ORDERED):
            number = next((number for number, each in enumerate(holder) if each is target), -1)
            found.append(_Holder(3, holder, f"[{number}]"))
        elif issubclass(type(target), dict) and _has_names(holder, target):
            found.append(_Holder(0, holder, names=True))
        elif (name := _attribute(holder, target)) is not None:
            found.append(_Holder(1, holder, f".{name}"))
        elif not issubclass(kind, _UNSEEN):
            found.append(_Holder(4, holder))
    return min(found, key=lambda each: each.rank, default=None)


def _has_names(holder: Any, names: dict[Any, Any]) -> bool:
    """True where this dict is that of a module's, class's or object's names."""
    if issubclass(type(holder), type):
        return "__module__" in names
    with suppress(Exception):
        return object.__getattribute__(holder, "__dict__") is names
    return False


def _attribute(holder: Any, target: Any) -> str | None:
    """Return the name of the attribute of an object that `target` is, or None."""
    with suppress(Exception):
        for name, value in object.__getattribute__(holder, "__dict__").items():
            if value is target:
                return str(name)
    for kind in type(holder).__mro__:
        for name, member in kind.__dict__.items():
            if isinstance(member, types.MemberDescriptorType):
                with suppress(AttributeError):
                    if member.__get__(holder) is target:
                        return name
    return None
