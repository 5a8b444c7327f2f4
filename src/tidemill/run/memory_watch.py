"""Workers whose memory grows beyond what they said that they would fill: told, with what
grows, before the system kills one for it.

What grows a process finds out itself: it looks at its objects once it is suspected to
grow, and again when that is told (`core/object_census.py`). One that does not grow is
never asked.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tidemill.api.control_messages import LookAtMemory, State
from tidemill.core.clock import awake
from tidemill.core.memory import available, size
from tidemill.run.member import Member
from tidemill.workers.trainer_config import TrainerConfig

EVERY = 5.0  # seconds between two looks
# seconds of a life, or of one that trains after the first update, after which a process
# has what it works with
SETTLED = 60.0
UNTRAINED = 600.0  # seconds after which it is looked at without a first update
MARGIN, MARGIN_SHARE = 256 << 20, 0.25  # bytes beyond its plan that are not told, and of what it has
SUSPECTED = 0.5  # of these, from which on it is asked to look at its objects
# seconds that it has to answer what grows, since it may be in an update, and of those
# that the memory that is left would last
ANSWER, ANSWER_SHARE = 30.0, 0.1


@dataclass
class _Footprint:
    """What is known of a process's memory.

    life, began: the life that it is of, and when that was first seen running
    since: then, or when it had begun to train
    settled: bytes of its own once it had settled, at `settled_at`
    planned: bytes that its workers were still to fill then
    suspected: it was asked to look at its objects
    told: bytes beyond its plan that were told
    telling: what is told of it once it has answered what grows, or at `until` the latest,
        and then with `guess`; "": nothing
    """

    life: int
    began: float
    since: float
    settled: int = 0
    planned: int = 0
    settled_at: float = 0.0
    suspected: bool = False
    told: int = 0
    telling: str = ""
    until: float = 0.0
    guess: str = ""


class MemoryWatch:
    """A memory watch looks at the memory that each process holds for itself alone, and
    tells when it is more than the process had once it worked and what its workers were to
    fill from then on, and what it is that grows; and again at twice as much.

    processes: the workers that share each process
    own_bytes: function that returns how much it is (see `Launcher.own_bytes`)
    tell: function that tells the user of a worker
    """

    def __init__(
        self,
        processes: Sequence[Sequence[str]],
        own_bytes: Callable[[str], int | None],
        tell: Callable[[str, str], None],
    ) -> None:
        self._processes, self._own_bytes, self._tell = processes, own_bytes, tell
        self._known: dict[str, _Footprint] = {}  # by first worker
        self._next = 0.0

    def look(self, members: Mapping[str, Member]) -> None:
        """Look at all of them, if it is time, and tell what they have answered."""
        now = awake()
        for first, known in self._known.items():
            self._tell_answer(first, members[first], known, now)
        if now < self._next:
            return
        self._next = now + EVERY
        trained = any(member.update.values for member in members.values())
        for names in self._processes:
            group = [members[name] for name in names]
            if all(member.state is State.RUNNING and not member.buried for member in group):
                early = not trained and any(isinstance(member.config, TrainerConfig) for member in group)
                self._look_at(names, group, now, early)

    def _look_at(self, names: Sequence[str], group: Sequence[Member], now: float, early: bool) -> None:
        """Look at one process; at an `early` one again later."""
        life = group[0].life
        known = self._known.get(names[0])
        if known is None or known.life != life:
            known = self._known[names[0]] = _Footprint(life, now, now)
        if early and now - known.began < UNTRAINED:
            known.since = now
        if now - known.since < SETTLED or (own := self._own_bytes(names[0])) is None:
            return
        if not known.settled:
            known.settled, known.settled_at = own, now
            known.planned = sum(member.unfilled for member in group)
        grown, planned = own - known.settled, known.planned
        margin = max(MARGIN, int(MARGIN_SHARE * known.settled))
        if grown - planned > max(margin, 2 * known.told) and not known.telling:
            known.told = grown - planned
            seconds, free = now - known.settled_at, available()
            known.telling = growth(", ".join(names), own, grown, planned, seconds, free, group)
            known.guess = owner(group)
            known.until = now + min(ANSWER, ANSWER_SHARE * free * seconds / grown)
            group[0].send(LookAtMemory(grown))
        elif grown - planned > SUSPECTED * margin and not known.suspected:
            known.suspected = True
            group[0].send(LookAtMemory())

    def _tell_answer(self, first: str, member: Member, known: _Footprint, now: float) -> None:
        answer, member.grows = member.grows, ""
        if not known.telling:
            if answer:  # late
                self._tell(first, f"{first}: {answer}")
        elif answer or now > known.until or member.buried or member.life != known.life:
            self._tell(first, f"{known.telling}; {answer or known.guess}")
            known.telling = ""


def growth(
    names: str,
    own: int,
    grown: int,
    planned: int,
    seconds: float,
    free: int,
    group: Sequence[Member],
) -> str:
    """Return what is told of a process that has `own` bytes for itself, `grown` of them
    in the last `seconds`, where `planned` were to be expected."""
    pace = grown / seconds
    left = free / pace
    ago = f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} s"
    soon = f"{left / 60:.0f} minutes" if left < 7200 else f"{left / 3600:.0f} hours"
    text = (
        f"{names} holds {size(own)} for itself, {size(grown)} more than {ago} ago, where {size(planned)} "
        f"were planned: it grows by {size(60 * pace)} a minute, and the {size(free)} that are left would "
        f"last {soon}"
    )
    if hanging := int(max(member.statistics.get("lanes/hanging", 0.0) for member in group)):
        text += f"; {hanging} threads that hang in environments keep theirs"
    return text


def owner(group: Sequence[Member]) -> str:
    """Return what most likely grows in the process of these workers, by what they are,
    where that has not answered."""
    owners = [member for member in group if member.config.owns_environment]
    if len(owners) not in (0, len(group)):  # as threads, or by turns
        most = (
            "an environment, an algorithm, a policy or a callback of one's own keeps what it could forget; "
            "with processes of their own (--launch processes, no `together`) it is told whose it is"
        )
    elif owners:
        most = "its environment, most likely, keeps what it could forget (episodes, lists that only grow)"
    else:
        most = "a list in its algorithm or policy, most likely, only grows"
    return f"it has not answered what grows: {most}"
