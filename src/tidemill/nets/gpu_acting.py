"""Acting on a GPU: batches go there, are answered and come back, two at a time, while the
host does other things.

All operations of an answer are recorded once for each size of batch, powers of two, and
asked for as one.
"""

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.core.schema import Array, Arrays
from tidemill.nets.distributions import Distribution
from tidemill.nets.recording import GraphRecorder, GraphRecording
from tidemill.nets.torch_copies import DeviceEvent, Mirror, host_empty, torch_type

LANES = 2  # batches under way: one is copied while the other is computed
LEAST_ROWS = 8  # of a recorded size


class Answering(Protocol):
    """What answers."""

    device: torch.device
    distribution: Distribution

    def heads(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (head [n, size], value [n])."""
        ...

    def next_state(self) -> dict[str, Tensor]:
        """Return the state after the rows of the last `heads`."""
        ...

    def log_std(self) -> Tensor:
        """Return the log standard deviations [deviations]."""
        ...


class DeviceActing:
    """Device acting answers requests with `network`. `recorded`: batches are padded to a
    power of two, and on a GPU recorded; else each is computed as it comes."""

    def __init__(self, network: Answering, seed: int, recorded: bool) -> None:
        generator = torch.Generator(network.device)
        generator.manual_seed(seed)
        self._lanes = [_Lane(network, generator, recorded) for _ in range(LANES)]
        self._free: SimpleQueue[_Lane] = SimpleQueue()
        for lane in self._lanes:
            self._free.put(lane)

    def begin(
        self, inputs: Arrays, deterministic: bool | Array, value_scale: float, out: Arrays
    ) -> Callable[[], None]:
        """Begin to answer `inputs`, which may be changed at once. What is returned waits
        for the answers and writes them into `out`; it may be called in another thread,
        and must be: further batches wait for it once `LANES` are under way."""
        lane = self._free.get()
        lane.begin(inputs, deterministic, out)

        def finish() -> None:
            lane.finish(value_scale, out)
            self._free.put(lane)

        return finish

    def wait(self) -> None:
        """Wait until nothing is computed any more: the weights may change then."""
        for lane in self._lanes:
            lane.wait()


class _Lane:
    """One batch at a time: its stream, its memory on both sides, and what was recorded
    over that memory."""

    def __init__(self, network: Answering, generator: torch.Generator, recorded: bool) -> None:
        self._network, self._generator, self._recorded = network, generator, recorded
        on_gpu = network.device.type == "cuda"
        self._stream = torch.cuda.Stream(network.device) if on_gpu else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._recorder = GraphRecorder() if on_gpu and recorded else None
        self._answered = DeviceEvent(network.device)
        self._rows = self._capacity = 0
        self._recordings: dict[int, GraphRecording] = {}
        self._inputs: dict[str, tuple[Tensor, NDArray[Any], Tensor]] = {}

    def begin(self, inputs: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        n = self._rows = len(next(iter(inputs.values())))
        rows = max(LEAST_ROWS, 1 << (n - 1).bit_length()) if self._recorded else n
        with torch.cuda.stream(self._stream):
            if rows > self._capacity:
                self._allocate(rows, inputs, out)
            for name, (pinned, view, tensor) in self._inputs.items():
                view[:n] = inputs[name] if name else deterministic
                tensor[:n].copy_(pinned[:n], non_blocking=True)
            self._network.distribution.draw(self._noise[:rows], self._generator)
            self._compute(rows)
            for mirror in self._outputs.values():
                mirror.pull(n)
            self._answered.set()

    def finish(self, value_scale: float, out: Arrays) -> None:
        n = self._rows
        self._answered.wait()
        for name, mirror in self._outputs.items():
            if name != "value":
                out[name][:n] = mirror.array[:n]
        np.multiply(self._outputs["value"].array[:n], np.float32(value_scale), out=out["value"][:n])

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _allocate(self, rows: int, inputs: Arrays, out: Arrays) -> None:
        """Take memory for `rows` rows; what was recorded over the old one is void."""
        self.wait()
        device, self._capacity = self._network.device, rows
        self._recordings.clear()
        flags = {"": np.zeros(0, np.bool_)}  # whether a row is answered with the mode
        self._inputs = {}
        for name, array in {**inputs, **flags}.items():
            pinned = host_empty((rows, *array.shape[1:]), torch_type(array), device)
            self._inputs[name] = pinned, pinned.numpy(), torch.zeros_like(pinned, device=device)
        self._noise = torch.zeros((rows, self._network.distribution.draws), device=device)
        fields = {
            name: array
            for name, array in out.items()
            if name in ("action", "log_prob", "value") or name.startswith(("action.", "state."))
        }
        self._answers = {
            name: torch.zeros((rows, *array.shape[1:]), dtype=torch_type(array), device=device)
            for name, array in fields.items()
        }
        self._outputs = {name: Mirror(tensor) for name, tensor in self._answers.items()}

    def _compute(self, rows: int) -> None:
        if self._recorder is None:
            self._answer(rows)
            return
        if rows not in self._recordings:
            # libraries choose their kernels and take their memory before anything is
            # recorded
            self._answer(rows)
            self.wait()
            self._recordings[rows] = self._recorder.record(lambda: self._answer(rows))
        self._recordings[rows].graph.replay()

    @torch.no_grad()
    def _answer(self, rows: int) -> None:
        """Answer the first `rows` rows of the memory on the device, there. What pads them
        is old or zero, and nobody reads its answers."""
        network, answers = self._network, self._answers
        inputs = {name: tensor[:rows] for name, (_, _, tensor) in self._inputs.items()}
        deterministic = inputs.pop("")
        head, value = network.heads(inputs)
        distribution, log_std = network.distribution, network.log_std()
        action = distribution.action_of(answers, slice(rows))
        distribution.choose(head, log_std, self._noise[:rows], deterministic, action)
        answers["log_prob"][:rows].copy_(distribution.evaluate(head, log_std, action)[0])
        answers["value"][:rows].copy_(value)
        for name, part in network.next_state().items():
            answers[name][:rows].copy_(part)
