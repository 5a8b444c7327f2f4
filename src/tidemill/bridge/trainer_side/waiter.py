"""A thread that waits for simulators, so that nobody else has to."""

import threading
from collections.abc import Callable, Sequence

LOOK_AGAIN = 0.2  # seconds after which it sees that it was closed


class Waiter:
    """A waiter waits for all of several answers in turn, and then rings. The thread
    begins with the first wait, and is a daemon."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.wake: Callable[[], None] | None = None
        """Called, in the thread, when all have answered."""
        self._waits: Sequence[Callable[[float], bool]] = ()
        self._begun, self._over = threading.Event(), threading.Event()
        self._over.set()
        self._closed = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Nobody is waited for."""
        return self._over.is_set()

    def begin(self, waits: Sequence[Callable[[float], bool]]) -> None:
        """Call each of `waits`, with seconds, until it returns True. Only while `idle`.
        Raises what a wait before has raised."""
        self._tell()
        self._waits = waits
        self._over.clear()
        self._begun.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Return when nobody is waited for. Raises what a wait has raised."""
        self._over.wait()
        self._tell()

    def _tell(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """End the thread. Nobody is waited for afterwards."""
        self._closed = True
        self._begun.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._begun.wait()
            self._begun.clear()
            if self._closed:
                return
            try:
                for wait in self._waits:
                    while not self._closed and not wait(LOOK_AGAIN):
                        pass
            except Exception as error:  # whoever joins is to hear of it, and not to wait for ever
                self._error = error
            self._over.set()
            if self.wake is not None and not self._closed:
                self.wake()
