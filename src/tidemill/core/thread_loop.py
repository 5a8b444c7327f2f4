"""The event loop that a thread has, if any. It is made by `core.asyncio_loops`, which
imports asyncio; whoever only waits needs none."""

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.core.asyncio_loops import Loop


class _Own(threading.local):
    """What each thread has."""

    loop: "Loop | None" = None


own = _Own()


def run_ready() -> None:
    """Run what is ready in the loop of this thread, if it has one."""
    if own.loop is not None:
        own.loop.run_ready()
