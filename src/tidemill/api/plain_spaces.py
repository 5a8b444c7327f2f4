"""Spaces as plain data that JSON can hold, and back."""

from math import isinf
from typing import Any

import msgspec

from tidemill.api.spaces import Spaces, check_space
from tidemill.core.errors import SchemaError


def plain_spaces(spaces: Spaces) -> Any:
    """Return `spaces` as JSON can hold them: infinite bounds as text, since JSON has no
    such number. `read_spaces` reads them back."""
    return _plain(msgspec.to_builtins(spaces))


def read_spaces(plain: Any) -> Spaces:
    """Return what `plain_spaces` was given. Raises `SchemaError` for anything else."""
    try:
        spaces = msgspec.convert(plain, Spaces, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise SchemaError(f"these are no spaces: {error}") from None
    check_space(spaces.observation, "observation")
    check_space(spaces.action, "action")
    return spaces


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and isinf(value) else value
