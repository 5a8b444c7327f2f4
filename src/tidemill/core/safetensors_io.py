"""Arrays and a little text as the bytes of one safetensors file. No code is in it, and
reading it runs none."""

from collections.abc import Mapping

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from tidemill.core.errors import SchemaError
from tidemill.core.schema import Array, Arrays
from tidemill.core.untrusted_files import read_json


def pack(arrays: Mapping[str, Array], text: Mapping[str, str] | None = None) -> bytes:
    """Return the file's bytes: `arrays`, and `text` in its header."""
    # ascontiguousarray gives scalars an axis
    return save({k: np.asarray(a, order="C") for k, a in arrays.items()}, dict(text) if text else None)


def unpack(data: bytes) -> tuple[Arrays, dict[str, str]]:
    """Return (arrays, text) of what `pack` made. Raises `SchemaError` for anything
    else."""
    try:
        arrays = load(data)
        # which `load` has found to be sound
        header = read_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return arrays, {str(k): str(v) for k, v in header.get("__metadata__", {}).items()}
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SchemaError(f"no safetensors file: {type(error).__name__}: {error}") from None
