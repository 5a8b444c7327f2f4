"""What a run knows of each of its workers, from what that reports, and how it is told
what to do."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tidemill.api.control_messages import (
    AnsweredBy,
    Configure,
    Down,
    Start,
    State,
    Staying,
    TryAgain,
    WorkerStatistics,
    pack,
)
from tidemill.api.transport import Link
from tidemill.api.worker import WorkerConfig
from tidemill.core.clock import awake
from tidemill.core.memory import Need
from tidemill.core.tally import How, Tally
from tidemill.workers.trainer_config import COUNTED

MOST_TURN = 60.0  # seconds of ticks that are waited for: a first one may have compiled for minutes
LONGEST_CAUSE = 160  # characters of an event's that are shown
NEWEST = {
    "step",
    "update",
    *COUNTED,
    *(f"limiter/{name}" for name in ("started", "committed", "voided", "tasks", "in_flight", "debt")),
}
"""What trainers count themselves, of which a row has the newest."""


def how_merged(name: str) -> How:
    """Return how what several updates tell under this name becomes one number of a row:
    what was waited is summed, of names whose last word is min or max it is the smallest
    or the largest, of counters the newest; all else is the mean of the updates."""
    last: dict[str, How] = {"min": "smallest", "max": "largest", "waited": "sum"}
    return "most_recent" if name in NEWEST else last.get(name.replace("_", "/").rpartition("/")[2], "average")


@dataclass
class Member:
    """What the runner knows of one worker."""

    config: WorkerConfig
    link: Link
    state: State = State.CONFIGURING
    shares: dict[str, float] = field(default_factory=dict)
    rate: float = 0.0
    polls: int = 0  # so far, in this life
    progress: int = 0  # likewise: see `WorkerStatistics`
    # its last regular ones, all of them; shares are those since the last record
    statistics: dict[str, float] = field(default_factory=dict)
    recorded: bool = True  # since it was last heard
    # seconds by place of its clock since the last record
    spent: dict[str, float] = field(default_factory=dict)
    update: WorkerStatistics = field(default_factory=lambda: WorkerStatistics(0))  # a trainer's last update
    updates: Tally = field(default_factory=Tally)  # what its updates told since the last record
    heard: float = field(default_factory=awake)
    where: str = ""  # where its thread is, as was seen since it was heard; "" if nobody looked
    saving: bool = False  # it writes a checkpoint
    needs: tuple[Need, ...] = ()  # memory that it is going to fill
    grows: str = ""  # what does in its process, as it has answered, until that is told
    life: int = 0  # how often it has died
    wanted: State = State.CONFIGURING  # what it was told to become: READY or RUNNING
    buried: bool = False  # it has died, and its next life has not begun
    reviving: bool = False  # its next life has begun, but was not told yet all that this one was
    died_at: float = 0.0  # second of `awake`, until it runs again; 0: it lives
    cause: str = ""  # of its last death, shortly
    # what it has answered as an equal trainer that waits for others' next lives
    awaits: Staying | None = None
    unsent: int = 0  # see `WorkerStatistics`, as for the next four
    unfilled: int = 0
    away: str = ""
    pauses: bool = False
    due: Mapping[str, str] = field(default_factory=dict)

    def send(self, message: Down) -> None:
        """Tell it what to do. One that is dead, or reviving, is not told: the supervisor
        tells its next life; but whether to try what it waits for, and who answers."""
        if isinstance(message, (Configure, Start)):
            self.wanted = State.READY if isinstance(message, Configure) else State.RUNNING
        if not (self.buried or (self.reviving and not isinstance(message, (TryAgain, AnsweredBy)))):
            self.link.send(pack(message))

    def bury(self, cause: str) -> None:
        """Note that it has died, and of what."""
        self.cause = cause.partition("\n")[0].partition(";")[0][:LONGEST_CAUSE]
        self.buried, self.state, self.shares, self.rate = True, State.CONFIGURING, {}, 0.0
        self.died_at = self.died_at or awake()
        self.unsent, self.unfilled, self.away, self.pauses, self.due = 0, 0, "", False, {}

    def forget_updates(self) -> None:
        """Forget what updates have told that are undone."""
        self.update = WorkerStatistics(0)
        self.updates.take()

    def begin_life(self, link: Link) -> None:
        """Note that it lives again, at the other end of `link`."""
        self.link, self.life, self.buried, self.awaits = link, self.life + 1, False, None
        self.reviving = True
        self.heard, self.saving, self.polls, self.statistics = awake(), False, 0, {}
        self.where, self.progress, self.grows = "", 0, ""

    @property
    def begins(self) -> bool:
        """True of one that does not run yet, in this life or, where it is dead, the next
        one."""
        return self.state in (State.CONFIGURING, State.READY)

    @property
    def runs(self) -> bool:
        """True of one that runs, or pauses."""
        return self.state in (State.RUNNING, State.PAUSED)

    def works(self, seconds: float) -> bool:
        """True of one that writes a checkpoint, or was heard of in the last so many
        seconds: others hang."""
        return self.saving or awake() - self.heard < seconds

    @property
    def tick(self) -> float:
        """Seconds that 99 in 100 of an actor's newest ticks took; of fewer than 100 the
        longest. 0 where none is known, and of all others."""
        return self.statistics.get("tick_p99", self.statistics.get("tick_longest", 0.0))

    def note_statistics(self, message: WorkerStatistics) -> None:
        """Note its regular statistics: the shares of its time, its rate, and all the
        rest."""
        self.polls, self.progress = message.polls, message.progress
        self.unsent, self.unfilled = message.unsent, message.unfilled
        self.away, self.pauses, self.due = message.away, message.pauses, message.due
        self.shares = {k.removeprefix("share/"): v for k, v in message.time.items() if k.startswith("share/")}
        self.rate = message.time.get("samples_per_second", 0.0)
        if self.recorded:
            self.recorded, self.spent = False, {}
        for place, share in self.shares.items():
            self.spent[place] = self.spent.get(place, 0.0) + share * message.time.get("seconds", 0.0)
        total = sum(self.spent.values())
        shares = {place: seconds / total for place, seconds in self.spent.items()} if total else self.shares
        self.statistics = {
            k.removeprefix("share/"): v for k, v in (message.values | message.time).items()
        } | shares

    def updated(self, message: WorkerStatistics) -> None:
        """Note what an update told. One that stands for several, of a trainer whose tasks
        are short, weighs as much; one for none, where there was nothing to train, as
        nothing."""
        before = self.update.values.get("update")
        weight = 1 if before is None else int(message.values["update"] - before)
        for name, value in message.values.items():
            how = how_merged(name)
            if how == "average" and weight:
                self.updates.add(name, weight * value, how, weight)
            elif how != "average" or name not in self.updates:
                self.updates.add(name, value, "most_recent" if how == "average" else how)
        self.update = message


def turn(company: Iterable[Member]) -> float:
    """Return the seconds after which workers that take turns with each other have all had
    one: those of their ticks."""
    return min(sum(member.tick for member in company), MOST_TURN)
