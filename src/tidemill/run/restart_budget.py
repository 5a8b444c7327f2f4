"""How many more lives groups of workers have, and how long each waits to begin."""

from collections import deque
from collections.abc import Mapping, Sequence

from tidemill.api.edges import group_of
from tidemill.api.launcher import Launcher
from tidemill.core.clock import awake
from tidemill.core.errors import RunError
from tidemill.run.member import Member

RECENT = 60.0  # seconds in which a group's third death, and each one more, has its next life wait longer
LONGEST_PAUSE = 30.0  # seconds before a new life


class NoLifeLeft(RunError):
    """A worker has used up its lives."""


class RestartBudget:
    """The budget of a run's groups of workers: so many lives within so many seconds
    (`WorkerConfig.restarts`, `WorkerConfig.restarts_within_s`). Whoever dies twice before
    it ever ran has no other, nor has a group of which two die before any has run: what
    all die of as they begin is one error."""

    def __init__(self, launcher: Launcher, members: Mapping[str, Member]) -> None:
        self._launcher, self._members = launcher, members
        self._deaths: dict[str, deque[float]] = {}  # when, by group
        self._stillborn: set[str] = set()  # who died before it ran, and has not run since
        self._ran: set[str] = set()  # groups of which somebody has run

    def note_running(self, name: str) -> None:
        """Take note that a life of `name` runs."""
        self._ran.add(group_of(name))
        self._stillborn.discard(name)

    def spend(self, name: str, dead: Sequence[str], cause: str, ran: bool) -> float:
        """Count the death of `name`, and of those `dead` with it, and return the seconds
        that their next lives wait. `ran`: whether this one did. Raises `RunError` where
        they are to have none, `NoLifeLeft` where they have used them up."""
        said, counts = f"{name} is gone: {cause}", not self._launcher.moves(name)
        pause = max(self._count(group, said, counts) for group in dict.fromkeys(map(group_of, dead)))
        if ran:
            self._stillborn.discard(name)
        elif name in self._stillborn:
            raise NoLifeLeft(
                f"{name} is gone, for the second time before it ran, whatever restarts allows: {cause}"
            )
        elif group_of(name) not in self._ran and (before := self._stillborn_of(group_of(name))):
            raise NoLifeLeft(
                f"{name} is gone, as {before[0]} was before, and no worker of {group_of(name)} has run yet, "
                f"whatever restarts allows: {cause}"
            )
        else:
            self._stillborn.add(name)
        return pause

    def _stillborn_of(self, group: str) -> list[str]:
        return sorted(name for name in self._stillborn if group_of(name) == group)

    def _count(self, group: str, said: str, counts: bool) -> float:
        """Count a death in `group`, if it `counts`, and return the seconds that its next
        life waits."""
        if not self._launcher.restarts:
            raise RunError(said)
        config = next(m.config for name, m in self._members.items() if group_of(name) == group)
        if config.restarts is None:
            raise RunError(f"{said} (restarts = None of {group}: the first death ends the run)")
        deaths, now = self._deaths.setdefault(group, deque()), awake()
        while deaths and now - deaths[0] > config.restarts_within_s:
            deaths.popleft()
        if counts:
            deaths.append(now)
        if len(deaths) > config.restarts:
            raise NoLifeLeft(
                f"{said}.\nThat is death {len(deaths)} of {group} within {config.restarts_within_s:.0f} s; "
                f"{config.restarts} are allowed (restarts, restarts_within_s)"
            )
        recent = sum(now - at < RECENT for at in deaths)
        return min(2.0 ** (recent - 3), LONGEST_PAUSE) if recent > 2 else 0.0
