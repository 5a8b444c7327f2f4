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
LONGEST_KEY = 50  # of a dict's key: a longer one is not shown, not in part either
_ORDERED = (list, tuple, deque)
_SHOWN = (str, int, float, bool, type(None))  # keys that need no code of a user's to be shown
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
    module = _module_of(kind)
    if module in ("builtins", "collections"):
        return kind.__name__[:LONGEST]
    where = _file_of(sys.modules.get(module))
    if where in ("", "__init__.py"):
        where = module
    return f"{where}:{kind.__qualname__}"[:LONGEST]


def _module_of(kind: type) -> str:
    """Return the name of a type's module, whatever the type itself makes of that."""
    name = kind.__module__
    return name if type(name) is str else "?"


def _file_of(module: Any) -> str:
    """Return the name of a module's file, "" where there is none; one that is loaded once
    somebody asks it for something is not asked."""
    with suppress(Exception):
        return Path(object.__getattribute__(module, "__dict__")["__file__"]).name
    return ""


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
            path = _within(f".{key}" if holder.names else f"[{key!r}]", path)
        key, path = holder.key, _within(holder.step, path)
        if issubclass(type(target), (*_ORDERED, dict)):
            continue
        name = f"the {what} `{path.removeprefix('.')}` of" if path else f"a {what} in"
        found = f"{name} {_whose(target)}" if path or not holder.names else _whose(target)
        if _module_of(type(target)).partition(".")[0] not in sys.stdlib_module_names or holder.names:
            break
    return found


def _within(step: str, path: str) -> str:
    """Return a path with one step before it. What is too long to be shown is left out
    whole: a secret is masked where all of it is there."""
    if len(step) + len(path) <= LONGEST:
        return step + path
    return f"{step}…" if len(step) < LONGEST else "…"


def _shown(key: Any) -> str:
    """Return a dict's key as messages show it; of some its type alone."""
    if type(key) in _SHOWN and len(text := str(key)) <= LONGEST_KEY:
        return text
    return f"({name_of(type(key))})"


def _whose(holder: Any) -> str:
    if issubclass(type(holder), types.ModuleType):
        names = object.__getattribute__(holder, "__dict__")
        return _file_of(holder) or str(names.get("__name__"))[:LONGEST]
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
            with suppress(RuntimeError):  # another thread changes it meanwhile
                keys = [key for key, value in dict.items(holder) if value is target]
                found += [_Holder(2, holder, key=_shown(key)) for key in keys[:1]]
        elif (ordered := next((base for base in _ORDERED if issubclass(kind, base)), None)) is not None:
            with suppress(RuntimeError):  # likewise
                entries = enumerate(ordered.__iter__(holder))
                number = next((number for number, each in entries if each is target), -1)
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
