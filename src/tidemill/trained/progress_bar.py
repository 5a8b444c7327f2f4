"""A bar on the terminal of who evaluates a policy or has a video made."""

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn


class ProgressBar:
    """A bar that shows how much of `total` is done; it shows nothing elsewhere than on a
    terminal.

    columns: columns behind the bar and its text
    """

    def __init__(self, name: str, total: float, quiet: bool, *columns: ProgressColumn) -> None:
        console = Console(stderr=True)
        shown = TextColumn(name), BarColumn(), TextColumn("{task.description}"), *columns
        self._bar = Progress(
            *shown, console=console, transient=True, disable=quiet or not console.is_terminal
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def show(self, done: float, text: str) -> None:
        """Show that so much is done, and a text."""
        self._bar.update(self._task, completed=done, description=text)

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()
