"""The transport contract: three primitives that carry every stream, and the control link.

A transport makes the two ends of each; a stream is written once, over them. Who creates
memory: the end that knows the schema *offers* it (producer, writer); the other end
*attaches* as soon as it is there.

=========  ==================================  ===========================================
primitive  promise                             wakes
=========  ==================================  ===========================================
Channel    bounded, ordered, nothing lost      `commit` the consumer, `release` the
                                               producer
Cell       the newest value wins, never torn   `write` every reader
Bell       no ring is lost, however many ring  the worker that sleeps on it
Link       ordered messages, small             the receiver's bell
=========  ==================================  ===========================================
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

import msgspec

from tidemill.api.edges import Edge
from tidemill.core.schema import Arrays, Schema


class Bell(ABC):
    """A bell is what one worker sleeps on. It is rung by whatever the worker waits for; a
    ring before the wait makes the wait return at once."""

    @abstractmethod
    def ring(self) -> None:
        """Wake the owner, now or at its next wait. Any thread or process may ring."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Sleep until rung, at most `seconds`. True when it was rung. Only the owner
        waits. The event loop of its thread runs meanwhile, if it has one
        (`core.asyncio_loops`), and ends the wait whenever an environment on it is
        ready."""


class Producer(ABC):
    """The sending end of a channel."""

    @abstractmethod
    def offer(self, schema: Schema, lead: tuple[int, ...], slots: int) -> None:
        """Create the slots: arrays of shape ``lead + field.shape``. Once, before the
        first `reserve`."""

    @abstractmethod
    def reserve(self) -> Arrays | None:
        """Return the views of the next free slot, or None while all are full. The same
        slot until `commit`."""

    @abstractmethod
    def commit(self) -> None:
        """Hand the reserved slot to the consumer. Its views must not be written
        afterwards."""

    @abstractmethod
    def free(self) -> int:
        """Return the number of slots that can be reserved and committed now."""

    @abstractmethod
    def unreleased(self) -> list[Arrays]:
        """Return the slots that were committed and not yet given back, the oldest
        first."""


class Consumer(ABC):
    """The receiving end of a channel."""

    schema: Schema
    lead: tuple[int, ...]
    slots: int

    @abstractmethod
    def attach(self) -> bool:
        """True once the producer has offered; `schema`, `lead` and `slots` are known from
        then on."""

    @abstractmethod
    def take(self) -> Arrays | None:
        """Return the views of the next committed slot, in order, or None. Several may be
        held at once."""

    @abstractmethod
    def release(self) -> None:
        """Give the oldest held slot back to the producer. Its views must not be read
        afterwards."""

    @abstractmethod
    def pass_on(self) -> None:
        """Say that what the oldest held slot has is sent on to others between now and
        its `release`."""

    @abstractmethod
    def in_doubt(self) -> bool:
        """True while the next slot to be taken is one that the life before may have sent
        on: it died after `pass_on`, and had not released it."""

    @abstractmethod
    def waiting(self) -> int:
        """Return the number of committed slots not yet taken."""

    def life(self) -> int | None:
        """Return to how many later lives of the producer the consumer has gone over; None
        while it knows of one to which it has not yet. A transport that joins no edges
        anew has none."""
        return 0


class Writer(ABC):
    """The writing end of a cell."""

    @abstractmethod
    def offer(self, schema: Schema) -> None:
        """Create the cell for one value: an array per field. Once."""

    @abstractmethod
    def write(self, value: Arrays, version: int) -> None:
        """Publish `value` under `version` (which grows). Never waits."""


class Reader(ABC):
    """A reading end of a cell."""

    schema: Schema

    @abstractmethod
    def attach(self) -> bool:
        """True once the writer has offered; `schema` is known from then on."""

    @abstractmethod
    def newest(self) -> int:
        """Return the version that `read` would give now, -1 before the first write. Costs
        one memory read."""

    @abstractmethod
    def read(self, into: Arrays) -> int:
        """Copy the newest value into the given arrays and return its version. Never
        returns a mixture of two."""


class Link(ABC):
    """A link is one end of the control link between the runner and a worker: small typed
    messages, as bytes."""

    @abstractmethod
    def send(self, message: bytes) -> bool:
        """Queue a message and send what can be sent. Never waits. False when the other
        end is gone."""

    @abstractmethod
    def receive(self) -> list[bytes] | None:
        """Return the messages that have arrived; None when the other end is gone and
        nothing is left to read."""


class Endpoints(ABC):
    """Endpoints are the ends of edges that one worker holds, by the edge's name."""

    bell: Bell
    link: Link

    @abstractmethod
    def producer(self, edge: str) -> Producer:
        """Return the sending end of a channel edge, which only its source asks for.
        Raises KeyError when this worker has no end of the edge."""

    @abstractmethod
    def consumer(self, edge: str) -> Consumer:
        """Return the receiving end of a channel edge."""

    @abstractmethod
    def writer(self, edge: str) -> Writer:
        """Return the writing end of a cell edge."""

    @abstractmethod
    def reader(self, edge: str) -> Reader:
        """Return a reading end of a cell edge."""

    def renew(self, edges: "Mapping[str, Handle]") -> None:
        """Have the ends of `edges` that this worker reads go over to a new life of
        whoever writes them, once what was committed before is taken. What a cell held
        counts until the new life has written. Of edges that it writes itself, to a new
        life of their reader, `writer` returns a new end from now on. Asked for by
        `Transport.renew` alone."""
        raise TypeError(f"{type(self).__name__} has no renew()")


class Handle(msgspec.Struct, frozen=True):
    """What a process needs in order to reach one end of an edge.

    descriptors: open files that it inherits
    text: what else there is to know, as a path or an address
    """

    descriptors: tuple[int, ...] = ()
    text: str = ""


class Transport(ABC):
    """A transport joins workers that have processes of their own: it makes the channels
    and cells of a run.

    A launcher makes one of all edges before it starts a process. Each process opens its
    ends by their handles. Bells and control links are the launcher's, which sees by them
    that a process has died; a transport may hold the other end of an edge itself, to send
    on elsewhere what is put in. A new transport is one file with a subclass, and a line
    in `transports/table.py`; or a user's own, which a launcher names (see
    `ProcessesLauncher.transport`).
    """

    renews = False
    """Whether it can join edges anew (`renew`); else a worker's death ends the run."""
    descriptors_per_edge = 1
    """Files that the launcher's process has open for each edge."""

    @abstractmethod
    def __init__(self, edges: Sequence[Edge], bells: Mapping[str, int]) -> None:
        """Make what joins the two sides of each edge. `bells`: by worker, the eventfd
        that wakes it."""

    @abstractmethod
    def handles(self, worker: str) -> dict[str, Handle]:
        """Return how the process of `worker` reaches its ends, by the edge's name."""

    def renew(self, workers: Collection[str], edges: Collection[str] = ()) -> dict[str, dict[str, Handle]]:
        """Join the edges that begin with `workers` anew (`Edge.begins_with`): they have
        died, and are about to live again; and the named `edges`, which others carry here
        for such workers. What a new life writes is new memory, and it goes on reading at
        the first slot that the one before had not released. Return, by worker that lives
        on at another end, how it reaches the new edges by name (see `Endpoints.renew`).
        """
        raise TypeError(f"{type(self).__name__} has no renew()")

    @staticmethod
    @abstractmethod
    def endpoints(bell: Bell, link: Link, handles: Mapping[str, Handle]) -> Endpoints:
        """Return the ends of a worker, in its own process."""

    @abstractmethod
    def close(self) -> None:
        """Free what the launcher's process holds. The workers have ended by then."""
