"""A thread that maps: takes from an upstream queue, applies a function, puts into a
downstream queue."""

import queue
import threading
from collections.abc import Callable
from typing import Any

_LOOK_AGAIN = 0.1  # seconds between looks at the stop flag


class MappingThread:
    """A mapping thread wraps one daemon thread.

    map_fn: applied to each item, in order
    upstream_queue: where items come from
    downstream_queue: where results go; None when there are none. A full queue holds the
        thread up
    cuda_device: CUDA device index (or name) to be current in the thread, None for no GPU

    An error in `map_fn` ends the thread and is kept in `error`; the owner looks at it.
    """

    def __init__(
        self,
        map_fn: Callable[[Any], Any],
        upstream_queue: "queue.Queue[Any]",
        downstream_queue: "queue.Queue[Any] | None" = None,
        cuda_device: int | str | None = None,
    ) -> None:
        self._map = map_fn
        self._upstream = upstream_queue
        self._downstream = downstream_queue
        self._device = cuda_device
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"map {getattr(map_fn, '__name__', 'items')}", daemon=True
        )
        self.error: Exception | SystemExit | None = None

    def is_alive(self) -> bool:
        """True between `start` and the end of the thread."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin to take items."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end after the item it is at; items left in the upstream queue
        stay there."""
        self._stopping.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end, at most `timeout` seconds."""
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            if self._device is not None:
                import torch

                torch.cuda.set_device(self._device)
            while not self._stopping.is_set():
                try:
                    item = self._upstream.get(timeout=_LOOK_AGAIN)
                except queue.Empty:
                    continue
                self._put(self._map(item))
        except (Exception, SystemExit) as error:
            self.error = error

    def _put(self, result: Any) -> None:
        while self._downstream is not None and not self._stopping.is_set():
            try:
                return self._downstream.put(result, timeout=_LOOK_AGAIN)
            except queue.Full:
                continue
