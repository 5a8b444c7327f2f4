"""What a run loses with workers that die: env steps of samples that they had begun, and
samples that were on their way from a host, or that a buffer worker was sending on."""

from time import time

from msgspec.structs import replace

from tidemill.api.launcher import Launcher
from tidemill.run.events import Event
from tidemill.run.run_state import RunState


class Losses:
    """The losses of a run, which are summed in its progress."""

    def __init__(self, launcher: Launcher, state: RunState) -> None:
        self._launcher, self._state = launcher, state
        self._begun = dict[tuple[str, int], int]()  # env steps that were lost of samples, by worker and life

    def note(self, event: Event) -> None:
        """Take note of an event, and of what was lost with it: of each life the last
        event says how many steps that are."""
        life, progress = (event.worker, event.life), self._state.progress
        if event.what == "died" and life in self._begun:  # its host is lost before it lives again
            event = replace(event, steps=self._begun[life])
        self._state.report.events.append(event)
        if event.what in ("died", "lost"):
            progress.lost_samples += event.samples
            # what was known before may have been less, or was sent since
            progress.lost_steps += event.steps - self._begun.get(life, 0)
            progress.lost_any |= bool(progress.lost_samples or progress.lost_steps)
            self._begun[life] = event.steps

    def note_voided(self, worker: str, life: int, samples: int) -> None:
        """Take note of samples that a life may have sent on as it died, and tell it."""
        cause = f"{samples:,} sample{'s' * (samples > 1)} that it was sending on as it died"
        steps = self._begun.get((worker, life), 0)
        self.note(Event(time(), "lost", worker, life, cause=cause, steps=steps, samples=samples))
        self._state.report.notify_of_event(f"of {worker} is lost {cause}")

    def look(self) -> None:
        """Tell what is known by now to be lost with hosts."""
        for worker, life, host, samples, exact in self._launcher.losses():
            known = self._begun.get((worker, life), 0)
            steps = known if exact is None else exact
            if samples or steps != known:
                way = f"{samples:,} samples that were on their way" if samples else ""
                begun = f"{steps:,} env steps of samples that were begun" if steps else ""
                cause = f"with host {host}: {' and '.join(filter(None, (way, begun))) or 'nothing'}"
                self.note(Event(time(), "lost", worker, life, cause=cause, steps=steps, samples=samples))
                if samples:
                    self._state.report.notify_of_event(f"of {worker} is lost {cause}")
