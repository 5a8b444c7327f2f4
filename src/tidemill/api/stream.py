"""The stream contracts: what workers see of streams. Written once, over any transport."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidemill.api.algorithm import Sample
from tidemill.core.cut import Part
from tidemill.core.schema import Array, Arrays, Schema


@dataclass
class Answer:
    """An answer holds the actions (and values, states) for one request of n rows. Its
    arrays are views, valid until the next `post_request` of the same client that reuses
    them: copy at once."""

    fields: Arrays  # answer schema's name → [n, ...] (or more rows: the first n count)
    version: int  # that made the answers
    policy: int  # index of the policy that made them


class InferenceClient(ABC):
    """The asking end of an inference stream. Nothing leaves it before `flush`."""

    @abstractmethod
    def post_request(self, observation: Arrays, state: Arrays, deterministic: bool | Array) -> int:
        """Buffer a request of n rows (leaf name → [n, ...]) and return its number. The
        arrays must stay as they are until it is answered."""

    @abstractmethod
    def flush(self) -> None:
        """Send (or, inline, compute) everything buffered."""

    @abstractmethod
    def is_ready(self, request: int) -> bool:
        """True when the request's answer has arrived."""

    @abstractmethod
    def consume_result(self, request: int) -> Answer:
        """Return the answer, once. Raises KeyError for a request that is unknown,
        unanswered or already consumed."""

    @abstractmethod
    def refresh(self) -> None:
        """Take newer parameters, where the client holds a policy of its own; else do
        nothing. Called between requests only."""

    @property
    @abstractmethod
    def buffered(self) -> int:
        """Number of requests posted and not yet flushed."""

    def on_its_way(self, request: int) -> bool:
        """True when a request was flushed, and somebody else is still to answer it."""
        return False

    @abstractmethod
    def state(self) -> Part:
        """Return what was asked and not yet consumed, and what answers are drawn from
        where the client holds a policy of its own. For a cut: nobody answers
        meanwhile."""

    @abstractmethod
    def load_state(self, state: Part) -> None:
        """Be as the client was whose state this is."""


@dataclass(eq=False, slots=True)
class Requests:
    """A request of one client as the server sees it: n rows, to be answered as a
    whole."""

    client: int
    number: int
    rows: int
    observation: Arrays
    state: Arrays
    deterministic: bool | Array  # False, or of each row
    answered: bool = False


class InferenceServer(ABC):
    """The answering end of an inference stream: the requests for one policy."""

    @abstractmethod
    def poll_requests(self, most_rows: int, beside: int = 0) -> list[Requests]:
        """Return the requests that have arrived, at most `most_rows` rows of them, with
        the `beside` rows that they join. Where they join none: at least one request, if
        there is any."""

    @abstractmethod
    def place(self, request: Requests) -> Arrays:
        """Return where its client is going to read the next answer that it is sent:
        arrays of `request.rows` rows or more. What is written there is not copied, if
        `request` is what is answered next."""

    @abstractmethod
    def respond(self, requests: Sequence[Requests], answers: Arrays, version: int, policy: int) -> None:
        """Answer `requests`, whose rows lie one after the other in ``answers[name]``; or
        a single one in its `place`. Their views are invalid afterwards."""


class SampleProducer(ABC):
    """The sending end of a sample stream: its slots are where rows are written."""

    @abstractmethod
    def offer(self, schema: Schema, rows: int, seats: int, slots: int) -> None:
        """Create the slots: blocks [rows, seats]."""

    @abstractmethod
    def reserve(self) -> Arrays | None:
        """Return the block to write next, or None while the consumer holds all of
        them."""

    @abstractmethod
    def commit(self) -> None:
        """Send the reserved block."""

    @abstractmethod
    def settled(self) -> bool:
        """True when whoever goes in lockstep with this producer has given back every
        block that it was sent."""

    @abstractmethod
    def state(self, cut: bool = False) -> Part:
        """Return what was sent and not given back, and to whom. `cut`: a block's rows end
        with its final one."""

    @abstractmethod
    def load_state(self, state: Part) -> None:
        """Send again what `state` holds, once the blocks are made."""


@dataclass(frozen=True)
class Offered:
    """What one producer has offered: `slots` blocks of `lead` = (rows, seats). `rows` is
    how many rows each counts in a batch: those that a sample advances by, of all seats.
    """

    schema: Schema
    lead: tuple[int, ...]
    slots: int
    rows: int


class SampleConsumer(ABC):
    """The receiving end of a sample stream, over all of its producers."""

    @abstractmethod
    def offered(self) -> list[Offered] | None:
        """Return what each producer has offered; None until all of them have."""

    @abstractmethod
    def consume(self) -> Sample | None:
        """Return the next sample of any producer, in turn, or None. Valid until
        released."""

    @abstractmethod
    def release(self) -> None:
        """Give the oldest consumed sample back."""


class WatchedConsumer(SampleConsumer):
    """A watched consumer hands on the samples of `source` and lets a subclass look at
    each as it is taken."""

    def __init__(self, source: SampleConsumer) -> None:
        self._source = source

    def offered(self) -> list[Offered] | None:
        """See `SampleConsumer`."""
        return self._source.offered()

    def consume(self) -> Sample | None:
        """See `SampleConsumer`."""
        sample = self._source.consume()
        if sample is not None:
            self._look(sample)
        return sample

    @abstractmethod
    def _look(self, sample: Sample) -> None:
        """Look at the next sample."""

    def release(self) -> None:
        """See `SampleConsumer`."""
        self._source.release()


class TellingConsumer(WatchedConsumer):
    """A telling consumer tells `listener` of each sample as it is taken."""

    def __init__(self, source: SampleConsumer, listener: Callable[[Sample], None]) -> None:
        super().__init__(source)
        self._listener = listener

    def _look(self, sample: Sample) -> None:
        self._listener(sample)
