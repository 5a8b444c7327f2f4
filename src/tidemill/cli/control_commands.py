"""The commands for a run that is going on: ``pause``, ``start``, ``save``, ``stop`` and
``status``."""

from collections.abc import Callable
from pathlib import Path

from tidemill.cli.arguments import Run
from tidemill.cli.error_output import friendly, print_table

COMMANDS = {
    "pause": "Pause a run that is going on.",
    "start": "Start a paused run again.",
    "save": "Write a checkpoint of a run that is going on, now.",
    "stop": "End a run that is going on, with a final checkpoint.",
}
"""What a run that is going on can be told, and what that does."""


def command(word: str) -> Callable[[Path], None]:
    """Return the command that tells a run this word of `COMMANDS`."""

    @friendly
    def tell(run: Run) -> None:
        from tidemill.run import control_socket
        from tidemill.run.folder import RunFolder

        print(control_socket.tell(RunFolder.open(run).path, word))

    return tell


@friendly
def status(run: Run) -> None:
    """Show a run: as it is now, or how it ended, and what happened last."""
    from tidemill.run.folder import RunFolder
    from tidemill.run.status import render_status

    print_table(render_status(RunFolder.open(run)))
