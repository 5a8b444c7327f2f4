"""Python loads this by itself, on a host of tests: its agent tells another agent what is
no message, once, as soon as there is the file that NONSENSE names."""

import os
import sys
from contextlib import suppress

if "tidemill.launchers.host" in sys.orig_argv:
    from tidemill.hosts.peer import Peer

    pump = Peer.pump

    def pump_nonsense(self: Peer) -> None:
        if self.name != "runner" and self.lines[1].answered:
            with suppress(FileNotFoundError):
                os.unlink(os.environ["NONSENSE"])
                self.lines[1].connection.send(b"nonsense")
        pump(self)

    Peer.pump = pump_nonsense  # type: ignore[method-assign]
