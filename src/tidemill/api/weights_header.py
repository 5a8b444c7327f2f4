"""What a file of weights says of its policy, so that it can be played without the run
that trained it: configuration and spaces, no code."""

import json
from collections.abc import Mapping
from typing import Any

from tidemill.api.plain_spaces import plain_spaces, read_spaces
from tidemill.api.policy import PolicyConfig
from tidemill.api.spaces import Spaces
from tidemill.core.config import encode
from tidemill.core.errors import SchemaError
from tidemill.core.secrets import hide
from tidemill.core.untrusted_files import read_json

HEADER = "tidemill"
"""The label's name in the header of a file of weights."""
_FORMAT = 1


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
