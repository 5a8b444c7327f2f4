"""How many more lives workers have, and how long each waits to begin."""

from collections import deque
from collections.abc import Mapping, Sequence

from tidemill.api.edges import group_of
from tidemill.api.launcher import Launcher
from tidemill.core.clock import awake
from tidemill.core.errors import RunError
from tidemill.run.member import Member

RECENT = 60.0  # seconds in which a worker's third death, and each one more, has its next life wait longer
YOUNG = 60.0  # seconds that a life ran for, or less, whose end counts for the whole group
LONGEST_PAUSE = 30.0  # seconds before a new life
LEAST_PAUSE = 1.0  # seconds before another try of one that the system has refused to start
FEWEST_STILLBORN = 3  # deaths before anybody ran that are one error


class NoLifeLeft(RunError):
    """A worker has used up its lives."""


class RestartBudget:
    """The budget of a run's workers: each has so many lives within so many seconds
    (`WorkerConfig.restarts`, `WorkerConfig.restarts_within_s`), however many there are in
    its group. What all of these die of is one error, and no storm of lives: where more
    than `restarts` of the group's die within `RECENT` seconds that had run for less than
    `YOUNG`, they have no other, nor has a group of which nobody has ever run with three
    deaths within `RECENT` seconds; two may have been killed by chance. Whoever dies three
    times without having run in between has no other, either."""

    def __init__(self, launcher: Launcher, members: Mapping[str, Member]) -> None:
        self._launcher, self._members = launcher, members
        self._deaths: dict[str, deque[float]] = {}  # when, by worker
        self._young: dict[str, list[tuple[float, str]]] = {}  # by group: who died young lately, and when
        self._since: dict[str, tuple[int, float]] = {}  # by worker: its last life that ran, and since when
        # by group: who died before it ran, when, and has not run since
        self._stillborn: dict[str, list[tuple[float, str]]] = {}
        self._ran: set[str] = set()  # groups of which somebody has run

    def note_running(self, name: str) -> None:
        """Take note that a life of `name` runs."""
        self._ran.add(group_of(name))
        self._forget_stillborn(name)
        life = self._members[name].life
        if self._since.get(name, (-1, 0.0))[0] != life:  # it may run again after a pause
            self._since[name] = life, awake()

    def spend(self, name: str, dead: Sequence[str], cause: str, ran: bool) -> float:
        """Count the death of `name`, and of those `dead` with it, and return the seconds
        that their next lives wait. `ran`: whether this one did. Raises `RunError` where
        they are to have none, `NoLifeLeft` where they have used them up."""
        said, counts = f"{name} is gone: {cause}", not self._launcher.moves(name)
        pause = max(self._count(other, said, counts) for other in dead)
        for group in dict.fromkeys(map(group_of, dead)) if counts else ():
            one = next(other for other in (name, *dead) if group_of(other) == group)
            self._count_young(group, one, said)
        if ran:
            self._forget_stillborn(name)
            return pause
        group, now = group_of(name), awake()
        early = self._stillborn.setdefault(group, [])
        early.append((now, name))
        # its own, whenever they were: one that dies late each time would never run
        own = [other for _, other in early if other == name]
        lately = [other for at, other in early if now - at <= RECENT and group not in self._ran]
        if len(lately) >= FEWEST_STILLBORN:
            which = (
                f"{len(lately)} within {RECENT:.0f} s of {group} ({', '.join(lately)}), of which none has "
                "run yet"
            )
        elif len(own) >= FEWEST_STILLBORN:
            which = f"{len(own)} before it ran"
        else:
            return pause
        raise NoLifeLeft(f"{name} is gone, death {which}, whatever restarts allows: {cause}")

    def spend_on_start(self, dead: Sequence[str], said: str) -> float:
        """Count a death of each of these, whose next lives the system refuses to start,
        and return the seconds until another try. What it lacks says nothing of their
        group. Raises as `spend` does; `said`: what is told then."""
        return max(LEAST_PAUSE, *(self._count(name, said, True) for name in dead))

    def _forget_stillborn(self, name: str) -> None:
        early = self._stillborn.get(group := group_of(name), [])
        self._stillborn[group] = [each for each in early if each[1] != name]

    def _count(self, name: str, said: str, counts: bool) -> float:
        """Count a death of `name`, if it `counts`, and return the seconds that its next
        life waits."""
        if not self._launcher.restarts:
            raise RunError(said)
        config = self._members[name].config
        if config.restarts is None:
            raise RunError(f"{said} (restarts = None of {group_of(name)}: the first death ends the run)")
        deaths, now = self._deaths.setdefault(name, deque()), awake()
        while deaths and now - deaths[0] > config.restarts_within_s:
            deaths.popleft()
        if counts:
            deaths.append(now)
        if len(deaths) > config.restarts:
            raise NoLifeLeft(
                f"{said}.\nThat is death {len(deaths)} of {name} within {config.restarts_within_s:.0f} s; "
                f"{config.restarts} are allowed (restarts, restarts_within_s)"
            )
        recent = sum(now - at < RECENT for at in deaths)
        return min(2.0 ** (recent - 3), LONGEST_PAUSE) if recent > 2 else 0.0

    def _count_young(self, group: str, name: str, said: str) -> None:
        """Count a death in `group`, where the life of `name` had begun to run lately or
        not at all: together these have no more than one worker may have."""
        member, now = self._members[name], awake()
        life, since = self._since.get(name, (-1, 0.0))
        if life == member.life and now - since > YOUNG:
            return
        young = self._young[group] = [each for each in self._young.get(group, ()) if now - each[0] <= RECENT]
        young.append((now, name))
        if member.config.restarts is not None and len(young) > member.config.restarts:
            which = ", ".join(dict.fromkeys(other for _, other in young))
            raise NoLifeLeft(
                f"{said}.\nThat is death {len(young)} within {RECENT:.0f} s of {group} ({which}) that had "
                f"run for less than {YOUNG:.0f} s; {member.config.restarts} are allowed (restarts): what all "
                "die of is one error"
            )
