"""External code that the settings of an environment name: callables, executables and
addresses outside of this library, which nobody has vouched for."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Outside(NamedTuple):
    """Something outside of this library, and of what is registered with Gymnasium, that
    the settings of an environment name.

    does: what is done with it when the environment is built, in words
    code: what is imported for that: "FILE.py:NAME", "module:NAME" or "module"; "" for
        nothing
    program: the executable that is started; "" for none
    """

    does: str
    code: str = ""
    program: str = ""


def quoted(value: Any) -> str:
    """Return a setting as an error shows it: whole, in printable ASCII, so that nothing
    of it hides."""
    return json.dumps(value, default=repr)


def called(name: Any, kwargs: Any) -> Outside:
    """Return what a callable is that a setting names, with the arguments that it is
    given."""
    return Outside(f"calls {quoted(name)}" + (f" with {quoted(kwargs)}" if kwargs else ""), str(name))


def names_nothing(value: Any) -> bool:
    """True for a plain setting: numbers, and single words, which cannot name a place, a
    module or an address, nor be a command with arguments."""
    match value:
        case str():
            return re.fullmatch(r"[A-Za-z0-9_-]*", value) is not None
        case Mapping():
            return all(map(names_nothing, value.values()))
        case list() | tuple():
            return all(map(names_nothing, value))
    return True
