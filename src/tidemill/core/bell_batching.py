"""Rings put off: a thread that wakes others several times in a row wakes them once, when
it is done.

A system call that wakes somebody gives up Python's lock, and on one core the core, too.
Who is woken by the first of several answers would deal with that one alone, and be woken
again for the next.
"""

import threading
from collections.abc import Callable

_late = threading.local()


class BatchedRings:
    """Within batched rings, what this thread asks to `ring` is rung at the end, each
    once."""

    def __enter__(self) -> None:
        self._outer: dict[Callable[[], None], None] | None = getattr(_late, "rings", None)
        _late.rings = {}

    def __exit__(self, *error: object) -> None:
        rings, _late.rings = _late.rings, self._outer
        for each in rings:
            ring(each)


def ring(call: Callable[[], None]) -> None:
    """Call `call`, which wakes somebody, now or at the end of `BatchedRings`."""
    late = getattr(_late, "rings", None)
    if late is None:
        call()
    else:
        late[call] = None
