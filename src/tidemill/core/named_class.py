"""Classes that users choose by a word, such as launchers and metric sinks: those of the
library by a name of one word, their own by where they are."""

import ast
from collections.abc import Mapping
from typing import Any, TypeVar

from tidemill.core.errors import ConfigError, TidemillError, did_you_mean, place
from tidemill.core.resource_shortage import why
from tidemill.core.user_code_loading import load_attribute, without_arguments

T = TypeVar("T")


def named_class(chosen: "str | type[T]", base: type[T], known: Mapping[str, str], setting: str) -> type[T]:
    """Return the subclass of `base` that a user has chosen: a key of `known`, whose value
    is its module and name, or "module:NAME", or "FILE.py:NAME", or the class itself.
    Raises `ConfigError`, beginning with `setting`."""
    if isinstance(chosen, str) and chosen not in known and ":" not in chosen:
        raise ConfigError(
            f'{setting} {chosen}: no {base.__name__} is called "{chosen}"; {did_you_mean(chosen, known)} '
            "(one of your own is module:NAME or FILE.py:NAME)"
        )
    found = load_attribute(known.get(chosen, chosen), setting) if isinstance(chosen, str) else chosen
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{setting} {chosen}: that is {found!r}, and no subclass of {base.__name__}")
    return found


def read_call(text: str, setting: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return what NAME, or NAME(argument=value, …) with plain values, names, and the
    arguments. Raises `ConfigError`, beginning with `setting`."""
    name = without_arguments(text)
    written = text[len(name) :].strip()
    try:
        if not written:
            return name, [], {}
        call = ast.parse(f"call{written}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("no call")
        kwargs = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords if each.arg}
        if len(kwargs) < len(call.keywords):
            raise ValueError("** in it")
        return name, [ast.literal_eval(each) for each in call.args], kwargs
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ConfigError(
            f"{setting} {text[:200]}: write NAME, or NAME(argument=value, …) with plain values: numbers, "
            '"text", True, None, lists, tuples and dicts of them'
        ) from None


def make(chosen: type[T], setting: str, *given: object, **named: object) -> T:
    """Return one of the class that a user has chosen by `setting`. Raises `ConfigError`
    for what that raises, unless it is a `TidemillError`."""
    try:
        return chosen(*given, **named)
    except TidemillError:
        raise
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {why(error)}{place(error, lambda file: file != __file__)}"
        raise ConfigError(f"{setting} {chosen.__name__}: it cannot be made: {what}") from error
