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
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.schema import Array
from tidemill.streams.all_reduce import AllReduce, SharedSums, SumBroken, check_size

SMALL = 1 << 8  # bytes of what goes over channels
MEET_S = 60.0  # seconds in which all are to have met, from when the last one came
LOST_S = 120.0  # seconds after a failure within which the death that explains it must be known
_ANY = timedelta(days=1)  # how long others are waited for: a run may be paused in a sum
_CURES = {
    "cpu": "each trainer must reach the others: GLOO_SOCKET_IFNAME in the environment names the interface",
    "cuda": "each trainer needs a GPU of its own, and must reach the others: NCCL_SOCKET_IFNAME in the "
    "environment names the interface",
}


class TorchSums(SharedSums):
    """One trainer's part in sums that torch.distributed adds up.

    channels: this trainer's part in those of what is small
    file: path of the file by which they meet, without what is drawn: in the run's folder,
        which all see
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
        check_size(array, self._most)
        if self._group is None:
            yield from self._meet()
        own = torch.from_numpy(array.reshape(-1))
        tensor = self._scratch[: array.nbytes].view(own.dtype)
        tensor.copy_(own)
        try:
            work = self._group.allreduce([tensor], _patient())
            if self._device.type == "cpu":  # what a GPU is about to do counts as done there
                work.get_future().add_done_callback(lambda _: self._ring())
            while not work.is_completed():  # where somebody dies it fails, or is left
                if self._device.type != "cpu":  # nobody else rings
                    self._ring()
                yield
            work.wait()
        except RuntimeError as error:
            yield from self._failed(error)
        own.copy_(tensor)
        self._forget_file()  # all have met, or none could have added up

    def _meet(self) -> Iterator[None]:
        """Make the group, together with all others."""
        on_gpus = float(self._device.type != "cpu")
        drawn = np.array([float(randbits(48)) if self.rank == 0 else 0.0, on_gpus])
        if self.rank == 0:
            for left in self._file.parent.glob(f"{self._file.name}@*"):  # they were killed as they met
                left.unlink(missing_ok=True)
        yield from self._channels.add(drawn)  # so that all have come
        if drawn[1] not in (0, self._count):
            raise ConfigError(
                f"{drawn[1]:.0f} of {self._count} equal trainers have a GPU, and torch.distributed adds up "
                'on GPUs or on cores: give all the same device ("cpu", say), or take sums = "ranks"'
            )
        file = self._meeting = self._file.with_name(f"{self._file.name}@{int(drawn[0]):x}")
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
                group: Any = distributed.ProcessGroupNCCL(store, self.rank, self._count, options)
                group.allreduce([torch.zeros(1, device=self._device)]).wait()  # which connects them
                torch.cuda.synchronize(self._device)
                made.set_result(group)
        except BaseException as error:
            made.set_exception(error)
        self._ring()

    def _failed(self, error: Exception) -> Iterator[None]:
        """Wait until it is known that somebody has died, of which others hear by their
        connections first. Raises `SumBroken`; `RunError` where nobody has."""
        self._drop()
        until = awake() + LOST_S
        while not self.lost:
            if awake() > until:
                text, cure = str(error).partition("\n")[0], _CURES[self._device.type]
                raise RunError(
                    f'torch.distributed could not add up: {text}; {cure}; or take sums = "ranks", which '
                    "needs nothing"
                ) from error
            yield
        raise SumBroken

    def _forget_file(self) -> None:
        if self._meeting is not None and self.rank == 0:
            self._meeting.unlink(missing_ok=True)
        self._meeting = None

    def _drop(self) -> None:
        """Leave the group: who waits in it fails. What is under way may hold up its end,
        for which a thread waits that ends with the process."""
        self._forget_file()
        groups, self._group = [self._group], None
        if groups[0] is not None:
            threading.Thread(target=_end, args=(groups,), name="end of sums", daemon=True).start()


def _patient() -> Any:
    options = distributed.AllreduceOptions()
    options.timeout = _ANY
    return options


def _end(groups: list[Any]) -> None:
    """End a group that nobody else holds."""
    with suppress(RuntimeError):
        groups[0].abort()
    groups.clear()
