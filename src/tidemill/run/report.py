"""What a run reports besides metrics: notices that its user should read, events, and
tracebacks for developers. No secret of its experiment is in any of it."""

from collections.abc import Iterable, Mapping
from time import time

from tidemill.api.experiment import Experiment
from tidemill.core.clock import awake
from tidemill.core.config import encode
from tidemill.core.secrets import known, mask
from tidemill.run.events import Event
from tidemill.run.member import Member

# seconds before the last progress of a worker in which what others told may still be why
# it waits: they tell now and then
BEFORE = 10.0


class RunReport:
    """The report of a run of an experiment with these workers.

    notices: what the user should read
    events: what happened besides training
    of_events: notices of what `events` hold
    tracebacks: what a developer should read
    """

    def __init__(self, experiment: Experiment, members: Mapping[str, Member]) -> None:
        self._members = members
        self.notices: list[str] = []
        self.events: list[Event] = []
        self.of_events = set[str]()
        self.tracebacks: list[str] = []
        self._secrets = known(encode(experiment))
        # when, by which worker, and what notices said
        self._of_workers: list[tuple[float, str, str]] = []

    def mask(self, text: str) -> str:
        """Return a text without the secrets of the experiment."""
        return mask(text, self._secrets)

    def notify(self, text: str) -> None:
        """Have the user read this."""
        self.notices.append(self.mask(text))

    def notify_of_event(self, text: str) -> None:
        """Have the user read of what stands among the events."""
        self.notify(text)
        self.of_events.add(self.notices[-1])

    def notify_all(self, texts: Iterable[str]) -> None:
        """Have the user read each of these, now and among the events."""
        for text in map(self.mask, texts):
            self.events.append(Event(time(), "told", cause=text))
            self.notify_of_event(text)

    def notify_of(self, worker: str, text: str, steps: int = 0) -> None:
        """Have the user read this of a worker in the life that it is in, now and among
        the events; it has cost so many env `steps`."""
        life, text = self._members[worker].life + 1, self.mask(text)
        self.events.append(Event(time(), "told", worker, life, cause=text, steps=steps))
        self.notify_of_event(text)

    def notify_for(self, worker: str, text: str, steps: int = 0) -> None:
        """Have the user read what a worker says, likewise."""
        self.notify_of(worker, f"{worker}: {text}", steps)
        self._of_workers.append((awake(), worker, self.notices[-1]))

    def trace(self, worker: str, details: str) -> None:
        """Keep the traceback of a worker."""
        self.tracebacks.append(f"{worker}: {self.mask(details)}")

    def meanwhile(self, failed: str, waited: float) -> str:
        """Return the first and the last of what others said while the worker `failed`
        waited for so many seconds until it failed, to follow a message; "" if it did not
        wait, or they said nothing."""
        since = awake() - waited - BEFORE
        texts = [text for at, name, text in self._of_workers if waited and at >= since and name != failed]
        if not texts:
            return ""
        return f".\nMeanwhile, first: {texts[0]}" + (f"\nand last: {texts[-1]}" if len(texts) > 1 else "")
