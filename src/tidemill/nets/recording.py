"""What a GPU is asked to do, recorded (a CUDA graph). A small network is a hundred
operations of a few microseconds each, and the host takes longer to ask for one than the
GPU to do it: recorded, they are asked for together."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor

_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def _no_collection() -> Iterator[None]:
    """A recording that is freed while another one is made spoils it, and may lie in
    garbage of this process that would be collected just then."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class GraphRecording(NamedTuple):
    """A recording does the same again, in the memory that it was recorded over."""

    graph: torch.cuda.CUDAGraph
    """`replay` does it, in the stream that is current."""
    made: Tensor | None
    """What was returned; written anew each time."""


class GraphRecorder:
    """A recorder has the memory that its recordings are made over, which stays when they
    are gone: a small one of its own lives as long as it does. It is made in the stream in
    which it records, which must not be the default one."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper = self.record(lambda: torch.zeros(1, device="cuda"))

    def record(self, do: Callable[[], Tensor | None]) -> GraphRecording:
        """Return a recording of what `do` asks for, which has to be done once before, so
        that libraries choose their kernels. Nothing of it is done now. Other threads may
        use the GPU meanwhile, but not wait for all of it. Raises `RuntimeError` where
        `do` waits for the GPU, or what it does cannot be recorded: the recorder is
        spoilt then."""
        graph = torch.cuda.CUDAGraph()
        with _ONE_AT_A_TIME, _no_collection():
            # thread_local: other policies of this process go on meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                made = do()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return GraphRecording(graph, made)
