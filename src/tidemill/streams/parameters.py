"""The parameter stream: a trainer publishes versions of a policy, everyone who plays it takes the newest."""

from tidemill.api.policy import Policy
from tidemill.api.transport import Reader, Writer
from tidemill.core.schema import Arrays, allocate, schema_of


class ParameterPublisher:
    """The trainer's end."""

    def __init__(self, cell: Writer, policy: Policy) -> None:
        self._cell = cell
        cell.offer(schema_of(policy.parameters()))

    def publish(self, policy: Policy) -> None:
        """Make the policy's parameters the newest, under `policy.version`."""
        self._cell.write(policy.parameters(), policy.version)


class ParameterSubscriber:
    """A player's end."""

    def __init__(self, cell: Reader) -> None:
        self._cell = cell
        self._buffer: Arrays | None = None

    def load_newest(self, policy: Policy) -> bool:
        """Load the newest version into `policy` when it is newer than the one it has. False while nothing was ever published."""
        if self._buffer is None:
            if not self._cell.attach():
                return False
            self._buffer = allocate(self._cell.schema, ())
        newest = self._cell.newest()
        if newest > policy.version:
            version = self._cell.read(self._buffer)
            policy.load(self._buffer, version)
        return newest >= 0
