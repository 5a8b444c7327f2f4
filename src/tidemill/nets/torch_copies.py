"""Copies between the host's memory and a GPU's. On a CPU both are the same, or plain
copies.

Only page-locked ("pinned") host memory is copied to and from a GPU while both sides work
on.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array, Arrays

CHUNK = 1 << 24  # bytes copied at a time: one is filled while the other is sent


def torch_type(array: Array) -> torch.dtype:
    """Return torch's name of an array's dtype."""
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def convolution_type(asked: str, device: torch.device) -> torch.dtype:
    """Return what convolutions compute in on `device`: what was `asked` for ("float32",
    "bfloat16", or "auto", which nobody has measured: bfloat16 where that is there).
    Raises `ConfigError` for "bfloat16" on a processor without it, where oneDNN would
    emulate it: that takes 12 to 19 times as long, and others have other last bits."""
    if asked == "float32":
        return torch.float32
    there = device.type != "cpu" or has_bfloat16()
    if asked == "bfloat16" and not there:
        raise ConfigError(
            'convolutions = "bfloat16", which this processor does not compute (or ONEDNN_MAX_CPU_ISA keeps '
            'it from that); take "float32", with other last bits, or "auto", which takes what is there: '
            "--set policies.policy.convolutions=float32 or, of a run that goes on, in its config.json"
        )
    return torch.bfloat16 if there else torch.float32


def has_bfloat16() -> bool:
    """Return whether the processor computes convolutions in bfloat16. oneDNN's own word
    counts besides the processor's flag, since ONEDNN_MAX_CPU_ISA may hold it back."""
    return bool(torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def host_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host memory that is quick to copy to and from `device`. It is taken again
    once nothing refers to it and what was copied has arrived."""
    if device.type != "cuda":
        return torch.empty(shape, dtype=dtype)
    with torch.cuda.device(device):
        return torch.empty(shape, dtype=dtype, pin_memory=True)


class DeviceEvent:
    """A place in the current stream that the host can wait for. (A CPU has done
    everything at once.)"""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def set(self) -> None:
        """Mark what was begun so far."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until all that was marked last is done."""
        if self._event is not None:
            self._event.synchronize()


class Mirror:
    """The host's side of a tensor: `array`. For a tensor on a CPU it is the tensor's own
    memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        on_host = tensor.device.type == "cpu"
        self._host = self._tensor if on_host else host_empty(tuple(tensor.shape), tensor.dtype, tensor.device)
        self.array: NDArray[Any] = self._host.numpy()

    def pull(self, rows: int | None = None) -> None:
        """Begin to copy the tensor (or its first rows) to the host."""
        if self._host is not self._tensor:
            host, tensor = (
                (self._host, self._tensor) if rows is None else (self._host[:rows], self._tensor[:rows])
            )
            host.copy_(tensor, non_blocking=True)

    def push(self) -> None:
        """Begin to copy what the host has to the device."""
        if self._host is not self._tensor:
            self._tensor.copy_(self._host, non_blocking=True)


class Staging:
    """A staging area copies arrays of any size to a device, in the current stream:
    through two small pieces of pinned memory, where they do not lie in such memory
    themselves. Returns before they have arrived."""

    def __init__(self, device: torch.device, chunk: int = CHUNK) -> None:
        self._device, self._chunk = device, chunk
        self._pieces = [(host_empty((chunk,), torch.uint8, device), DeviceEvent(device)) for _ in range(2)]

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        """Return contiguous `arrays` on the device. They may be changed at once, but for
        those in pinned memory (`host_empty`)."""
        return {name: self._send(array) for name, array in arrays.items()}

    def _send(self, array: Array) -> Tensor:
        here = torch.from_numpy(array)
        if here.is_pinned():
            return here.to(self._device, non_blocking=True)
        tensor = torch.empty(array.shape, dtype=here.dtype, device=self._device)
        source, target = array.reshape(-1).view(np.uint8), tensor.view(-1).view(torch.uint8)
        for start in range(0, len(source), self._chunk):
            part = source[start : start + self._chunk]
            self._pieces.reverse()
            pinned, sent = self._pieces[0]
            sent.wait()
            pinned.numpy()[: len(part)] = part
            target[start : start + len(part)].copy_(pinned[: len(part)], non_blocking=True)
            sent.set()
        return tensor


def tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Return arrays as tensors of a CPU, on the same memory where that is contiguous."""
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
