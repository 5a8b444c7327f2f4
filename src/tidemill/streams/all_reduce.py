"""The all-reduce of equal trainers: each brings an array, and all go on with the sum,
which is the same for all to the last bit.

All add in the order of ranks. Small arrays go to everybody, large ones are reduced in
parts.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.transport import Consumer, Producer
from tidemill.core.errors import SchemaError
from tidemill.core.schema import Array, Field

# A peer may be one message ahead, never two: nobody finishes a sum before all have begun
# it. To another host what was given back comes a little later, and is waited for.
SLOTS = 2
WHOLE = 1 << 18  # bytes up to which everybody adds up everything: one exchange instead of two


class AllReduce:
    """One trainer's part. `rank` is its place among them; `senders` and `receivers` its
    channels to and from each other trainer, by rank.

    A small array goes to everybody, who each add it up. A large one is cut into a part
    per trainer: each receives everybody's copy of its own part, adds it up and sends the
    sum to the others (reduce-scatter, then all-gather), so that nobody reads more than
    twice its size.
    """

    def __init__(
        self, rank: int, senders: dict[int, Producer], receivers: dict[int, Consumer], most_bytes: int
    ) -> None:
        self.rank, self._senders, self._receivers = rank, senders, receivers
        self.peers = len(senders)
        self._scratch = np.empty(most_bytes, np.uint8)
        for sender in senders.values():
            sender.offer({"data": Field((most_bytes,), "uint8")}, (), SLOTS)

    @property
    def nbytes(self) -> int:
        """Bytes of all that this part keeps: the slots of its senders, and where it adds
        up."""
        return (1 + SLOTS * self.peers) * self._scratch.nbytes

    def add(self, array: Array) -> Iterator[None]:
        """Replace `array` (contiguous, float32 or float64) by the sum of everybody's.
        Yields for as long as others have not brought theirs.

        The order of addition is that of ranks, so that rounding is everywhere the same.
        """
        if array.nbytes > self._scratch.nbytes:
            raise SchemaError(
                f"a sum of {array.nbytes} bytes does not fit a slot of {self._scratch.nbytes}: raise the "
                "algorithm's `largest_sum`"
            )
        flat = array.reshape(-1)
        count = self.peers + 1
        if array.nbytes <= WHOLE:
            yield from self._exchange(flat, [flat] * count)
            return
        parts = np.array_split(flat, count)
        yield from self._exchange(parts[self.rank], parts)
        for sender in self._senders.values():
            yield from self._send(sender, parts[self.rank])
        for rank, receiver in self._receivers.items():
            parts[rank][...] = yield from self._next(receiver, parts[rank])
            receiver.release()

    def word(self) -> Iterator[None]:
        """Give the others a word, as the first of them, or wait for the first's, in the
        order in which they come."""
        nothing = np.zeros(1)
        if self.rank == 0:
            for sender in self._senders.values():
                yield from self._send(sender, nothing)
        else:
            yield from self._next(self._receivers[0], nothing)
            self._receivers[0].release()

    def _exchange(self, own: NDArray[Any], parts: Sequence[NDArray[Any]]) -> Iterator[None]:
        """Send each other trainer its part, and replace `own` by the sum of all copies of
        it."""
        for rank, sender in self._senders.items():
            yield from self._send(sender, parts[rank])
        copies = {self.rank: own}
        for rank, receiver in self._receivers.items():
            copies[rank] = yield from self._next(receiver, own)
        total = self._scratch[: own.nbytes].view(own.dtype)
        np.add(copies[0], copies[1], out=total)
        for rank in range(2, len(copies)):
            total += copies[rank]
        own[...] = total
        for receiver in self._receivers.values():
            receiver.release()

    def _send(self, sender: Producer, array: NDArray[Any]) -> Iterator[None]:
        while (slot := sender.reserve()) is None:
            yield
        slot["data"][: array.nbytes].view(array.dtype)[...] = array
        sender.commit()

    def _next(self, receiver: Consumer, like: NDArray[Any]) -> Generator[None, None, NDArray[Any]]:
        """Return the next message, as an array like `like`."""
        while not receiver.attach() or (slot := receiver.take()) is None:
            yield
        data: NDArray[Any] = slot["data"][: like.nbytes].view(like.dtype)
        return data
