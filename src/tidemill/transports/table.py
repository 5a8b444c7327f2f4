"""The transports between processes that are known by a name of one word."""

from tidemill.api.transport import Transport
from tidemill.core.named_class import named_class

TRANSPORTS = {"shared": "tidemill.transports.shared:SharedTransport"}
"""Module and class of each. A new one is a line here."""


def find_transport(name: str) -> type[Transport]:
    """Return the transport of this name, of "module:NAME" or of "FILE.py:NAME". Raises
    `ConfigError`."""
    return named_class(name, Transport, TRANSPORTS, "transport")
