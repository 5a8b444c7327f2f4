"""The transports between processes that are known by a name of one word."""

from tidemill.api.transport import Transport
from tidemill.core.errors import ConfigError
from tidemill.core.named_class import named_class

TRANSPORTS = {"shared": "tidemill.transports.shared:SharedTransport"}
"""Module and class of each. A new one is a line here."""


def find_transport(name: str) -> type[Transport]:
    """Return the transport of this name, of "module:NAME" or of "FILE.py:NAME", which
    each worker process looks up for itself. Raises `ConfigError`."""
    if not isinstance(name, str):
        raise ConfigError(
            f'a transport is named, so that worker processes find it: "{" or ".join(TRANSPORTS)}", '
            f'"module:NAME" or "FILE.py:NAME"; not {name!r}'
        )
    return named_class(name, Transport, TRANSPORTS, "transport")
