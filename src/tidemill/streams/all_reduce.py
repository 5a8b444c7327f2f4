"""The all-reduce of equal trainers: each brings an array, and all go on with the sum,
which is the same for all to the last bit.

All add in the order of ranks. Small arrays go to everybody, large ones are reduced in
parts. Where one has died, a sum to which it has not brought its part is broken
(`SumBroken`); once it lives again all begin with a new number, by which parts of before
are told apart.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.transport import Consumer, Producer
from tidemill.core.errors import SchemaError
from tidemill.core.schema import Array, Arrays, Field

# A peer may be one message ahead, never two: nobody finishes a sum before all have begun
# it. To another host what was given back comes a little later, and is waited for.
SLOTS = 2
WHOLE = 1 << 18  # bytes up to which everybody adds up everything: one exchange instead of two


class SumBroken(Exception):
    """A sum that never comes: one that has died has not brought its part."""


class AllReduce:
    """One trainer's part. `rank` is its place among them; `senders` and `receivers` its
    channels to and from each other trainer, by rank.

    A small array goes to everybody, who each add it up. A large one is cut into a part
    per trainer: each receives everybody's copy of its own part, adds it up and sends the
    sum to the others (reduce-scatter, then all-gather), so that nobody reads more than
    twice its size. `most_bytes`: of the largest array.

    lost: ranks of those that have died. Whoever has finished a sum has sent its parts to
        all before, so that all others can finish it, too; a sum for which a part of one
        that is lost is missing is broken
    """

    def __init__(
        self, rank: int, senders: dict[int, Producer], receivers: dict[int, Consumer], most_bytes: int
    ) -> None:
        self.rank, self._senders, self._receivers = rank, senders, receivers
        self.peers = len(senders)
        self.lost = set[int]()
        self._number = 0
        self._come: dict[int, Arrays] = {}  # by rank, what it has sent next
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
        """Bytes of the slots of this part's senders."""
        return SLOTS * self.peers * self._scratch.nbytes

    @property
    def own_bytes(self) -> int:
        """Bytes of where this part adds up."""
        return self._scratch.nbytes

    def begin(self, number: int) -> None:
        """Begin anew, with all others, once those that were lost live again: what was
        sent by a lower `number` is of sums that are broken, and makes room."""
        self.lost.clear()
        self._number = number
        for rank in [*self._come]:
            self._release(rank)
        for rank in self._receivers:
            self._has_come(rank)

    def add(self, array: Array) -> Iterator[None]:
        """Replace `array` (contiguous, float32 or float64) by the sum of everybody's.
        Yields for as long as others have not brought theirs. Raises `SumBroken`.

        The order of addition is that of ranks, so that rounding is everywhere the same.
        """
        if array.nbytes > self._most:
            raise SchemaError(
                f"a sum of {array.nbytes} bytes is larger than the largest, of {self._most}: raise the "
                "algorithm's `largest_sum`"
            )
        flat = array.reshape(-1)
        count = self.peers + 1
        if array.nbytes <= WHOLE:
            yield from self._exchange(flat, [flat] * count)
            return
        parts = np.array_split(flat, count)
        yield from self._exchange(parts[self.rank], parts)
        for rank in self._senders:
            yield from self._send(rank, parts[self.rank])
        for rank in self._receivers:
            parts[rank][...] = yield from self._next(rank, parts[rank])
            self._release(rank)

    def word(self) -> Iterator[None]:
        """Give the others a word, as the first of them, or wait for the first's, in the
        order in which they come. Raises `SumBroken`."""
        nothing = np.zeros(1)
        if self.rank == 0:
            for rank in self._senders:
                yield from self._send(rank, nothing)
        else:
            yield from self._next(0, nothing)
            self._release(0)

    def _exchange(self, own: NDArray[Any], parts: Sequence[NDArray[Any]]) -> Iterator[None]:
        """Send each other trainer its part, and replace `own` by the sum of all copies of
        it."""
        for rank in self._senders:
            yield from self._send(rank, parts[rank])
        copies = {self.rank: own}
        for rank in self._receivers:
            copies[rank] = yield from self._next(rank, own)
        total = self._scratch[: own.nbytes].view(own.dtype)
        np.add(copies[0], copies[1], out=total)
        for rank in range(2, len(copies)):
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

    def _next(self, rank: int, like: NDArray[Any]) -> Generator[None, None, NDArray[Any]]:
        """Return the next message of `rank`, as an array like `like`; those of lower
        ranks have come."""
        while not self._has_come(rank):
            if not all(self._has_come(lost) for lost in self.lost if lost >= rank):
                raise SumBroken
            yield
        data: NDArray[Any] = self._come[rank]["data"][: like.nbytes].view(like.dtype)
        return data

    def _has_come(self, rank: int) -> bool:
        """True once the next message of `rank` is there, and of now."""
        receiver = self._receivers[rank]
        while rank not in self._come and receiver.attach() and (slot := receiver.take()) is not None:
            self._come[rank] = slot
            if slot["number"] != self._number:
                self._release(rank)
        return rank in self._come

    def _release(self, rank: int) -> None:
        del self._come[rank]
        self._receivers[rank].release()
