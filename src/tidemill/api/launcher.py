"""The launcher contract: where the workers of an experiment live. Nothing in an
experiment or a worker knows."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemill.api.experiment import Experiment
from tidemill.api.transport import Link


@dataclass(frozen=True)
class Job:
    """What is launched.

    source: the file that defines the experiment's own classes, or None; workers load it
        before they read the experiment
    folder: the run's folder, or None
    resume: name of the checkpoint to go on from, or None
    files: digests of files that workers may run only as they are, by path (see
        `core.user_code.expect`)
    """

    experiment: Experiment
    source: str | None = None
    folder: str | None = None
    resume: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)


class Launcher(ABC):
    """Starts the workers of a job, all at once, and ends them. The runner speaks to each
    over its control link."""

    apart = False
    """Whether the workers live in other processes, and so go on while the runner's is
    stopped."""

    @abstractmethod
    def launch(self, job: Job) -> dict[str, Link]:
        """Start every worker and return the runner's end of its control link, by worker
        name."""

    @abstractmethod
    def wait(self, seconds: float, least: float = 0.0) -> None:
        """Let the workers work until one has something to say, at most `seconds`. Where
        they work by themselves, leave them alone for `least` seconds before that: what
        they say meanwhile is heard at once, for less than it would cost to be woken by
        each word."""

    @abstractmethod
    def obituary(self, worker: str) -> str:
        """Say how a worker whose link is gone ended (exit status or signal, the tail of
        its output)."""

    def condition(self, worker: str) -> str:
        """Say what keeps a worker still that it cannot tell itself ("is stopped …"); ""
        for nothing that is known."""
        return ""

    @abstractmethod
    def close(self, seconds: float) -> None:
        """End what still lives: workers that were told to exit have `seconds` left.
        Afterwards nothing is left behind."""
