"""What a callback of one's own may do with a run that is going on."""

from collections.abc import Callable, Mapping
from typing import Any

from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.run.controller import Controller

OnUpdate = Callable[[dict[str, float], "RunControl"], None]
"""Called in the main process with each record of updates: of each update, or of several
together where they are quicker than `metrics.record_pace` lets them be written. Training
goes on meanwhile, in other processes or threads. What it raises ends the run."""
CHANGEABLE = ("mean_return", "until")


class RunControl:
    """A run that is going on, as a callback has it: it may log, save, stop, pause, and
    change a limit."""

    def __init__(self, controller: Controller, record: Callable[[dict[str, float]], None]) -> None:
        self._controller, self._record = controller, record

    def log(self, metrics: Mapping[str, float]) -> None:
        """Write numbers of one's own into the run's metrics, at its present env step."""
        self._record({"step": float(self._controller.progress.steps), **metrics})

    def stop(self, reason: str = "stopped by on_update") -> None:
        """End the run with a final checkpoint, as ``tidemill stop`` does."""
        self._controller.stop(reason)

    def save(self) -> bool:
        """Write a checkpoint now. False where the run is ending, which writes one."""
        return self._controller.save()

    def change(self, **limits: Any) -> None:
        """Change a limit that this process looks at: `mean_return` or `until`. What
        workers were given is theirs while they run, and is refused by name."""
        for name in limits:
            if name not in CHANGEABLE:
                raise ConfigError(
                    f"{name} cannot be changed while a run is going on; {did_you_mean(name, CHANGEABLE)}. "
                    "Stop it, and go on with other limits by tidemill.resume"
                )
        self._controller.change_limits(limits)
