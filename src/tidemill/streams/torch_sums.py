"""Sums of equal trainers by torch.distributed: gloo on cores, NCCL on GPUs.

The trainers meet by a file in the run's folder, whose name the first of them draws and
tells. What is small (who is to end, counts of a batch) goes over channels, as in
`all_reduce`, since that is waited for without end; torch adds up what all bring to an
update. Its groups cannot go on without one that has died: those that live drop them, and
meet anew once it lives again.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from secrets import randbits
from typing import Any

import numpy as np
import torch
from torch import distributed

from tidemill.core.clock import awake
from tidemill.core.errors import RunError
from tidemill.core.schema import Array
from tidemill.streams.all_reduce import AllReduce, SharedSums, SumBroken

SMALL = 1 << 8  # bytes of what goes over channels
MEET_S = 60.0  # seconds in which the trainers are to have met
LOST_S = 30.0  # seconds after a failure in which somebody's death is to be known that explains it
_CURE = (
    "each trainer must reach the others: GLOO_SOCKET_IFNAME, or NCCL_SOCKET_IFNAME, in the environment names "
    'the interface; or take sums = "ranks", which needs nothing'
)


class TorchSums(SharedSums):
    """One trainer's part in sums that torch.distributed adds up.

    channels: this trainer's part in those of what is small
    file: where they meet, but for its end: in the run's folder, which all see
    device: where it adds up: "cpu" by gloo, "cuda:1" by NCCL
    most_bytes: of the largest array
    ring: function that wakes this trainer
    """

    def __init__(
        self, channels: AllReduce, file: Path, device: str, most_bytes: int, ring: Callable[[], None]
    ) -> None:
        super().__init__(channels.rank)
        self._channels, self._count, self._ring = channels, channels.peers + 1, ring
        self._file, self._device, self._most = file, torch.device(device), most_bytes
        self._group: Any = None
        self._scratch = torch.empty(0, dtype=torch.uint8)  # a group may write into it once it was left
        self._meeting: Path | None = None  # the file by which they have met, until all have
        channels.lost = self.lost

    @property
    def slot_bytes(self) -> int:
        return self._channels.slot_bytes

    @property
    def own_bytes(self) -> int:
        return self._channels.own_bytes + self._most

    def begin(self, number: int) -> None:
        self._drop()
        self._channels.begin(number)

    def word(self) -> Iterator[None]:
        return self._channels.word()

    def break_off(self) -> None:
        self._drop()
        self._channels.break_off()

    def add(self, array: Array) -> Iterator[None]:
        if array.nbytes <= SMALL:
            yield from self._channels.add(array)
            return
        if self._group is None:
            yield from self._meet()
        own, done = torch.from_numpy(array.reshape(-1)), Future[None]()
        tensor = self._scratch[: array.nbytes].view(own.dtype)
        tensor.copy_(own)
        try:
            work = self._group.allreduce([tensor])
            work.get_future().add_done_callback(lambda _: self._tell(done))
            while not done.done():  # where somebody dies it fails, or is left
                yield
            work.wait()
        except RuntimeError as error:
            yield from self._failed(error)
        own.copy_(tensor)
        if self._meeting is not None:  # all have met, or none could have added up
            if self.rank == 0:
                self._meeting.unlink(missing_ok=True)
            self._meeting = None

    def _meet(self) -> Iterator[None]:
        """Make the group, together with all others."""
        drawn = np.array([float(randbits(48))])
        if self.rank == 0:
            for left in self._file.parent.glob(f"{self._file.name}.*"):  # they were killed as they met
                left.unlink(missing_ok=True)
        yield from self._channels.hand_on(drawn)
        file = self._meeting = self._file.with_name(f"{self._file.name}.{int(drawn[0]):x}")
        made = Future[Any]()
        threading.Thread(target=self._make, args=(file, made), name="sums", daemon=True).start()
        while not made.done():
            if self.lost:
                raise SumBroken
            yield
        try:
            self._group = made.result()
            self._scratch = torch.empty(self._most, dtype=torch.uint8, device=self._device)
        except (RuntimeError, OSError) as error:
            yield from self._failed(error)

    def _make(self, file: Path, made: "Future[Any]") -> None:
        try:
            patience = timedelta(seconds=MEET_S)
            store = distributed.FileStore(str(file), self._count)  # type: ignore[attr-defined]
            store.set_timeout(patience)
            if self._device.type == "cpu":
                made.set_result(distributed.ProcessGroupGloo(store, self.rank, self._count, patience))
            else:
                torch.cuda.set_device(self._device)
                options = distributed.ProcessGroupNCCL.Options()
                made.set_result(distributed.ProcessGroupNCCL(store, self.rank, self._count, options))
        except BaseException as error:
            made.set_exception(error)
        self._ring()

    def _tell(self, done: "Future[None]") -> None:
        done.set_result(None)
        self._ring()

    def _failed(self, error: Exception) -> Iterator[None]:
        """Wait until it is known that somebody has died, of which others hear by their
        connections first. Raises `SumBroken`; `RunError` where nobody has."""
        self._drop()
        until = awake() + LOST_S
        while not self.lost:
            if awake() > until:
                text = str(error).partition("\n")[0]
                raise RunError(f"torch.distributed could not add up: {text}; {_CURE}") from error
            yield
        raise SumBroken

    def _drop(self) -> None:
        """Leave the group: who waits in it fails. What is under way may hold up its end,
        for which a thread waits that ends with the process."""
        groups, self._group, self._meeting = [self._group], None, None
        if groups[0] is not None:
            threading.Thread(target=_end, args=(groups,), name="end of sums", daemon=True).start()


def _end(groups: list[Any]) -> None:
    """End a group that nobody else holds."""
    with suppress(RuntimeError):
        groups[0].abort()
    groups.clear()
