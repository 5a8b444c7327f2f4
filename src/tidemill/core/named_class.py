"""Classes that users choose by a word, such as launchers and metric sinks: those of the
library by a name of one word, their own by where they are."""

from collections.abc import Mapping
from typing import TypeVar

from tidemill.core.errors import ConfigError, TidemillError, did_you_mean, place
from tidemill.core.resource_shortage import why
from tidemill.core.user_code_loading import load_attribute

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


def make(chosen: type[T], setting: str, *given: object) -> T:
    """Return one of the class that a user has chosen by `setting`. Raises `ConfigError`
    for what that raises, unless it is a `TidemillError`."""
    try:
        return chosen(*given)
    except TidemillError:
        raise
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {why(error)}{place(error, lambda file: file != __file__)}"
        raise ConfigError(f"{setting} {chosen.__name__}: it cannot be made: {what}") from error
