"""Agents that stand in for one that is lost: whoever is left, an agent or the runner,
starts one beside itself."""

import threading

from tidemill.core.errors import RunError
from tidemill.launchers.engine import CommandEngine, CommandHost


class StandIn:
    """An agent that this process holds. It is started in a thread, which takes seconds on
    a busy machine, and ends with this process. What it wrote last is told with how it has
    ended.

    key: its public key, b"" before it has told it
    error: why it could not be started, "" as long as that is not known
    """

    def __init__(self, name: str, address: str) -> None:
        """`address`: this host's, by which others reach it."""
        self.key, self.error = b"", ""
        self._name = name
        self._engine = CommandEngine({name: CommandHost(address)}, address)
        self._closed = False
        threading.Thread(target=self._start, name=f"start {name}", daemon=True).start()

    def _start(self) -> None:
        try:
            self.key = self._engine.start(None)[self._name].key
        except (RunError, OSError, ValueError, KeyError) as error:  # also of one that was closed meanwhile
            self.error = str(error)
        if self._closed:
            self._engine.close()

    def introduce(self, introduction: bytes) -> None:
        """Tell it who it is. See `HostEngine.introduce`."""
        self._engine.introduce(self._name, introduction)

    def ended(self) -> str:
        """Return how it has ended, "" as long as it has not."""
        return self.error or (self._engine.ended(self._name) if self.key else "")

    def terminate(self) -> None:
        """Tell it to leave the run."""
        self._engine.terminate()

    def let_go(self) -> None:
        """End it, without a wait for that. This process ends after it."""
        threading.Thread(target=self.close, name=f"end {self._name}").start()

    def close(self) -> None:
        """End it, and wait for that."""
        self._closed = True
        self._engine.close()
