"""The parameter stream: a trainer publishes versions of a policy, everyone who plays it
takes the newest."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from tidemill.api.policy import Policy
from tidemill.api.transport import Reader, Writer
from tidemill.core.cut import Part
from tidemill.core.schema import Arrays, allocate, schema_of


class ParameterPublisher:
    """The trainer's end."""

    def __init__(self, cell: Writer, policy: Policy) -> None:
        self._cell = cell
        cell.offer(schema_of(policy.parameters()))

    def publish(self, policy: Policy) -> None:
        """Make the policy's parameters the newest, under `policy.version`."""
        self._cell.write(policy.parameters(), policy.version)


class Subscription(ABC):
    """What keeps a policy supplied with parameters."""

    counters: Mapping[str, float] = {}
    """What was pushed with the version that it has loaded, where that is of the parameter
    database."""

    @abstractmethod
    def refresh(self, policy: Policy) -> bool:
        """Load into `policy` what it is to play with from now on. False while there is
        nothing yet."""

    def state(self) -> Part:
        """Return what the next refreshs depend on besides what is published, for a
        cut."""
        return {}

    def load_state(self, state: Part) -> None:
        """Be as the subscription was whose state this is."""


class ParameterSubscriber(Subscription):
    """A player's end: the newest version."""

    def __init__(self, cell: Reader) -> None:
        self._cell = cell
        self._buffer: Arrays | None = None

    def refresh(self, policy: Policy) -> bool:
        if self._buffer is None:
            if not self._cell.attach():
                return False
            self._buffer = allocate(self._cell.schema, ())
        newest = self._cell.newest()
        if newest > policy.version:
            version = self._cell.read(self._buffer)
            policy.load(self._buffer, version)
        return newest >= 0
