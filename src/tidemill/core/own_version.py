"""Which Tidemill this is: two installations of one version may differ, as clones of its
repository do."""

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

_SOURCE = (".py", ".c", ".h")  # what is compiled differs from machine to machine
_EXAMPLES = "examples"  # that an installed package has within; they change nothing


@cache
def own_version() -> str:
    """Return its version, with a digest of its source."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    files = {file.relative_to(package): file for file in package.rglob("*") if file.suffix in _SOURCE}
    for name, file in sorted(files.items()):
        # what editors leave is hidden, and may be a link to nothing
        if name.parts[0] != _EXAMPLES and not name.name.startswith(".") and file.is_file():
            text = file.read_bytes()
            digest.update(f"{name.as_posix()} {len(text)}\n".encode() + text)
    return f"{version('tidemill')} ({digest.hexdigest()[:10]})"
