"""The all-reduce of equal trainers: each brings an array, and all go on with the sum,
which is the same for all to the last bit.

`AllReduce`: all add in the order of ranks, wherever they are. Small arrays go to
everybody, large ones are reduced in parts. `HostSums`: trainers of a host add up first,
the lowest rank of each host exchanges that with those of others, and hands the sum on, so
that less crosses the network; where trainers are decides the order of addition then, and
with it the last bits.

Where one has died, a sum to which it has not brought its part is broken (`SumBroken`);
once it lives again all begin with a new number, by which parts of before are told apart.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.transport import Consumer, Producer
from tidemill.core.errors import SchemaError
from tidemill.core.schema import Array, Arrays, Field

# Nobody finishes a sum before all have begun it: a peer may be a message ahead. Who is
# further, since what was given back comes later from another host, or a sum is handed on,
# waits for room.
SLOTS = 2
WHOLE = 1 << 18  # bytes up to which everybody adds up everything: one exchange instead of two


def check_size(array: Array, most_bytes: int) -> None:
    """Raise `SchemaError` for an array of more bytes than the largest."""
    if array.nbytes > most_bytes:
        raise SchemaError(
            f"a sum of {array.nbytes} bytes is larger than the largest, of {most_bytes}: raise the "
            "algorithm's `largest_sum`"
        )


class SumBroken(Exception):
    """A sum that never comes: one that has died has not brought its part."""


class SharedSums(ABC):
    """One trainer's part in the sums of equal trainers. `rank` is its place among them.

    lost: ranks of those that have died. Whoever has finished a sum has sent its parts to
        all before, so that all others can finish it, too; a sum for which a part of one
        that is lost is missing is broken
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lost = set[int]()

    @property
    @abstractmethod
    def slot_bytes(self) -> int:
        """Bytes of the slots of this part's senders."""

    @property
    @abstractmethod
    def own_bytes(self) -> int:
        """Bytes of where this part adds up."""

    @abstractmethod
    def begin(self, number: int) -> None:
        """Begin anew, with all others, once those that were lost live again: what was
        sent by a lower `number` is of sums that are broken, and makes room."""

    @abstractmethod
    def add(self, array: Array) -> Iterator[None]:
        """Replace `array` (contiguous, float32 or float64) by the sum of everybody's.
        Yields for as long as others have not brought theirs. Raises `SumBroken`."""

    @abstractmethod
    def word(self) -> Iterator[None]:
        """Give the others a word, as the first of them, or wait for the first's, in the
        order in which they come. Raises `SumBroken`."""

    @abstractmethod
    def break_off(self) -> None:
        """Tell the others, as far as there is room, that this one brings no more until
        all begin anew: who waits for it may not have heard yet that somebody has died."""


class AllReduce(SharedSums):
    """One trainer's part in sums that are added in the order of ranks. `senders` and
    `receivers`: its channels to and from each other trainer, by rank.

    A small array goes to everybody, who each add it up. A large one is cut into a part
    per trainer: each receives everybody's copy of its own part, adds it up and sends the
    sum to the others (reduce-scatter, then all-gather), so that nobody reads more than
    twice its size. `most_bytes`: of the largest array.
    """

    def __init__(
        self, rank: int, senders: dict[int, Producer], receivers: dict[int, Consumer], most_bytes: int
    ) -> None:
        super().__init__(rank)
        self._senders, self._receivers = senders, receivers
        self.peers = len(senders)
        self._ranks = sorted([rank, *senders])
        self._number = 0
        self._come: dict[int, Arrays] = {}  # by rank, what it has sent next
        self._broken_off = set[int]()  # ranks that bring no more
        self._most = most_bytes
        # a message is an array or, of a large one, a part, of up to one number more than
        # an equal share
        message = min(most_bytes, max(WHOLE, most_bytes // (self.peers + 1) + 8))
        self._scratch = np.empty(message, np.uint8)
        schema = {"data": Field((message,), "uint8"), "number": Field((), "int64")}
        for sender in senders.values():
            sender.offer(schema, (), SLOTS)

    @property
    def slot_bytes(self) -> int:
        return SLOTS * self.peers * self._scratch.nbytes

    @property
    def own_bytes(self) -> int:
        return self._scratch.nbytes

    def begin(self, number: int) -> None:
        self.lost.clear()
        self._broken_off.clear()
        self._number = number
        for rank in [*self._come]:
            self._release(rank)
        for rank in self._receivers:
            self._has_come(rank)

    def add(self, array: Array) -> Iterator[None]:
        """See `SharedSums.add`. All add in the order of ranks, so that rounding is
        everywhere the same."""
        check_size(array, self._most)
        flat = array.reshape(-1)
        count = self.peers + 1
        if array.nbytes <= WHOLE:
            yield from self._exchange(flat, dict.fromkeys(self._ranks, flat))
            return
        parts = dict(zip(self._ranks, np.array_split(flat, count), strict=True))
        yield from self._exchange(parts[self.rank], parts)
        for rank in self._senders:
            yield from self._send(rank, parts[self.rank])
        for rank in self._receivers:
            parts[rank][...] = yield from self._next(rank, parts[rank], self._receivers)
            self._release(rank)

    def word(self) -> Iterator[None]:
        return self.hand_on(np.zeros(1), self._receivers)

    def hand_on(self, array: Array, needed: Collection[int] | None = None) -> Iterator[None]:
        """Replace `array` by that of the first. Yields for as long as that is not there.
        Raises `SumBroken` where the first is lost before, or one of those that are
        `needed` (None: it alone)."""
        first, flat = self._ranks[0], array.reshape(-1)
        most = self._scratch.nbytes // flat.itemsize
        for start in range(0, len(flat), most):
            piece = flat[start : start + most]
            if self.rank == first:
                for rank in self._senders:
                    yield from self._send(rank, piece)
            else:
                piece[...] = yield from self._next(first, piece, needed or (first,))
                self._release(first)

    def break_off(self) -> None:
        for sender in self._senders.values():
            if (slot := sender.reserve()) is not None:
                slot["number"][...] = ~self._number
                sender.commit()

    def _exchange(self, own: NDArray[Any], parts: dict[int, NDArray[Any]]) -> Iterator[None]:
        """Send each other trainer its part, and replace `own` by the sum of all copies of
        it."""
        for rank in self._senders:
            yield from self._send(rank, parts[rank])
        copies = {self.rank: own}
        for rank in self._receivers:
            copies[rank] = yield from self._next(rank, own, self._receivers)
        total = self._scratch[: own.nbytes].view(own.dtype)
        np.add(copies[self._ranks[0]], copies[self._ranks[1]], out=total)
        for rank in self._ranks[2:]:
            total += copies[rank]
        own[...] = total
        for rank in self._receivers:
            self._release(rank)

    def _send(self, rank: int, array: NDArray[Any]) -> Iterator[None]:
        sender = self._senders[rank]
        while (slot := sender.reserve()) is None:
            if rank in self.lost:  # and with it what it was to be sent: its next life begins anew
                return
            yield
        slot["data"][: array.nbytes].view(array.dtype)[...] = array
        slot["number"][...] = self._number
        sender.commit()

    def _next(
        self, rank: int, like: NDArray[Any], needed: Collection[int]
    ) -> Generator[None, None, NDArray[Any]]:
        """Return the next message of `rank`, as an array like `like`; of those that are
        `needed`, too, the ones of lower ranks have come."""
        while not self._has_come(rank):
            lost = [other for other in self.lost if other >= rank and other in needed]
            if rank in self._broken_off or not all(map(self._has_come, lost)):
                raise SumBroken
            yield
        data: NDArray[Any] = self._come[rank]["data"][: like.nbytes].view(like.dtype)
        return data

    def _has_come(self, rank: int) -> bool:
        """True once the next message of `rank` is there, and of now."""
        receiver = self._receivers[rank]
        while rank not in self._come and receiver.attach() and (slot := receiver.take()) is not None:
            self._come[rank] = slot
            if slot["number"] == ~self._number:
                self._broken_off.add(rank)
            if slot["number"] != self._number or rank in self._broken_off:
                self._release(rank)
        return rank in self._come

    def _release(self, rank: int) -> None:
        del self._come[rank]
        self._receivers[rank].release()


class HostSums(SharedSums):
    """One trainer's part in sums that are added per host first: those of a host add up
    what they bring, the lowest rank of each host exchanges that with the others, and
    hands the sum on to its own. Of n trainers on each host that is 1 ÷ n² of what goes
    between two hosts where everybody's part goes to everybody, 1 ÷ n of a large one.

    hosts: the host of each trainer, by rank
    sender, receiver: functions that return the channel to, and from, another rank
    most_bytes: of the largest array
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        sender: Callable[[int], Producer],
        receiver: Callable[[int], Consumer],
        most_bytes: int,
    ) -> None:
        super().__init__(rank)
        ours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
        self._circles: list[AllReduce] = []  # this host's, then that of the first ranks of all
        for circle in (ours, firsts):
            if rank in circle and len(circle) > 1:
                others = [other for other in circle if other != rank]
                senders = {other: sender(other) for other in others}
                receivers = {other: receiver(other) for other in others}
                self._circles.append(AllReduce(rank, senders, receivers, most_bytes))
        self._host = self._circles[0] if len(ours) > 1 else None
        for each in self._circles:
            each.lost = self.lost

    @property
    def slot_bytes(self) -> int:
        return sum(each.slot_bytes for each in self._circles)

    @property
    def own_bytes(self) -> int:
        return sum(each.own_bytes for each in self._circles)

    def begin(self, number: int) -> None:
        for each in self._circles:
            each.begin(number)

    def add(self, array: Array) -> Iterator[None]:
        for each in self._circles:
            yield from each.add(array)
        if self._host is not None:
            yield from self._host.hand_on(array)

    def word(self) -> Iterator[None]:
        for each in reversed(self._circles):
            yield from each.word()

    def break_off(self) -> None:
        for each in self._circles:
            each.break_off()
