"""What a file of weights says of its policy, so that it can be played without the run
that trained it: configuration and spaces, no code."""

import json
from collections.abc import Mapping
from math import isinf
from typing import Any

import msgspec

from tidemill.api.policy import PolicyConfig
from tidemill.api.spaces import Spaces, check_space
from tidemill.core.config import encode
from tidemill.core.errors import SchemaError
from tidemill.core.secrets import hide
from tidemill.core.untrusted_files import read_json

HEADER = "tidemill"
"""The label's name in the header of a file of weights."""
_FORMAT = 1


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


def write_header(config: PolicyConfig, spaces: Spaces) -> dict[str, str]:
    """Return the text that goes into the header of a file of weights."""
    return {
        HEADER: json.dumps(
            {"format": _FORMAT, "config": hide(encode(config, "policy")), "spaces": plain_spaces(spaces)}
        )
    }


def read_header(text: Mapping[str, str]) -> tuple[Any, Spaces]:
    """Return the configuration, encoded as it is there, and the spaces in a header.
    Raises `SchemaError` where there are none."""
    try:
        content = read_json(text[HEADER])
        number, config, spaces = content["format"], content["config"], content["spaces"]
    except (KeyError, ValueError, TypeError) as error:
        raise SchemaError(f"it does not say what policy it holds ({type(error).__name__}: {error})") from None
    if number != _FORMAT:
        raise SchemaError(f"it has format {number}; this version of tidemill reads {_FORMAT}")
    return config, read_spaces(spaces)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and isinf(value) else value
