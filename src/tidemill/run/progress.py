"""What a run knows of its workers and of how far it is, from what they report."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from tidemill.api.control import State, Statistics
from tidemill.api.experiment import WorkerConfig
from tidemill.api.transport import Link
from tidemill.core.memory import Need
from tidemill.core.tally import How, Tally, summary
from tidemill.workers.trainer_config import COUNTED

NEWEST = {"step", "update", *COUNTED, *(f"limiter/{name}" for name in ("started", "committed", "voided", "tasks", "in_flight", "debt"))}
"""What trainers count themselves, of which a row has the newest."""


def how_merged(name: str) -> How:
    """Return how what several updates tell under this name becomes one number of a row: what was waited is summed, of names that end in min and max
    it is the smallest and the largest, of counters the newest; all else is the mean of the updates."""
    if name in NEWEST:
        return "most_recent"
    return "smallest" if name.endswith("min") else "largest" if name.endswith("max") else "sum" if name.endswith("_waited") else "average"


@dataclass
class Member:
    """What the controller knows of one worker."""

    config: WorkerConfig
    link: Link
    state: State = State.CONFIGURING
    shares: dict[str, float] = field(default_factory=dict)
    rate: float = 0.0
    told: dict[str, float] = field(default_factory=dict)  # its last regular statistics, all of them; shares are those since the last record
    recorded: bool = True  # since it was last heard
    spent: dict[str, float] = field(default_factory=dict)  # seconds by place of its clock since the last record
    update: Statistics = field(default_factory=lambda: Statistics(0))  # a trainer's last update
    updates: Tally = field(default_factory=Tally)  # what its updates told since the last record
    heard: float = field(default_factory=monotonic)
    saving: bool = False  # it writes a checkpoint
    needs: tuple[Need, ...] = ()  # memory that it is going to fill

    def works(self, seconds: float) -> bool:
        """True of one that writes a checkpoint, or was heard of in the last so many seconds: others hang."""
        return self.saving or monotonic() - self.heard < seconds

    def told_regularly(self, message: Statistics) -> None:
        """Note its regular statistics: the shares of its time, its rate, and all the rest."""
        self.shares = {k.removeprefix("share/"): v for k, v in message.time.items() if k.startswith("share/")}
        self.rate = message.time.get("samples_per_second", 0.0)
        if self.recorded:
            self.recorded, self.spent = False, {}
        for place, share in self.shares.items():
            self.spent[place] = self.spent.get(place, 0.0) + share * message.time.get("seconds", 0.0)
        total = sum(self.spent.values())
        shares = {place: seconds / total for place, seconds in self.spent.items()} if total else self.shares
        self.told = {k.removeprefix("share/"): v for k, v in (message.values | message.time).items()} | shares

    def updated(self, message: Statistics) -> None:
        """Note what an update told. One that stands for several, of a trainer whose tasks are short, weighs as much; one for none, where there was
        nothing to train, as nothing."""
        before = self.update.values.get("update")
        weight = 1 if before is None else int(message.values["update"] - before)
        for name, value in message.values.items():
            how = how_merged(name)
            if how == "average" and weight:
                self.updates.add(name, weight * value, how, weight)
            elif how != "average" or name not in self.updates:
                self.updates.add(name, value, "most_recent" if how == "average" else how)
        self.update = message


class Rate:
    """How fast a count has grown over the last few seconds, however rarely it is told. For display alone."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._marks: deque[tuple[float, int]] = deque()

    def add(self, now: float, count: int) -> None:
        """Say how far the count is."""
        self._marks.append((now, count))
        self._forget(now)

    def _forget(self, now: float) -> None:
        while len(self._marks) > 1 and self._marks[1][0] <= now - self._seconds:
            self._marks.popleft()

    def per_second(self, now: float) -> float:
        """Return the growth per second up to now, 0 before anything was told."""
        self._forget(now)
        if not self._marks:
            return 0.0
        (since, before), (_, last) = self._marks[0], self._marks[-1]
        return (last - before) / max(now - since, 1e-9)


@dataclass
class Progress:
    """The run so far, as the trainers and actors tell it."""

    steps: int = 0
    updates: int = 0
    seconds: float = 0.0
    dropped: int = 0
    episodes: int = 0
    returns: deque[float] = field(default_factory=deque)
    metrics: dict[str, float] = field(default_factory=dict)
    rate: Rate = field(default_factory=Rate)
    last_update: float = field(default_factory=monotonic)
    stage: int = 0
    """Of the curriculum, from 0."""
    stages: int = 0
    """Of the curriculum; 0: there is none."""
    measured: dict[str, float] = field(default_factory=dict)
    """The newest of each measurement in this stage."""
    recorded: bool = True
    """All updates are."""
    told: Tally = field(default_factory=Tally)
    """What environments measured by themselves since the last record."""
    limiters: dict[str, dict[str, float]] = field(default_factory=dict)
    """The newest that each trainer with a ratio told of its limiter, ``limiter/`` left out; what either side waited is summed."""
    iterations: list[dict[str, float]] = field(default_factory=list)
    """What each iteration came to that has ended since the start, ``iteration/`` left out, and its ``step``."""

    @property
    def mean_return(self) -> float | None:
        """Mean undiscounted return of the last finished episodes; None before the first."""
        return sum(self.returns) / len(self.returns) if self.returns else None

    def begin(self, window: int, stages: int = 0) -> None:
        """Keep the returns of the last `window` episodes from now on, in a curriculum of so many `stages`."""
        self.returns, self.stages = deque(maxlen=window), stages

    @property
    def where(self) -> str:
        """The curriculum's stage, as people count: "1 of 3"; "" without one."""
        return f"{self.stage + 1} of {self.stages}" if self.stages else ""

    def known(self) -> dict[str, float]:
        """Return what the curriculum's conditions are about."""
        known = {"step": float(self.steps), "update": float(self.updates), "episodes": float(self.episodes), "time/seconds": self.seconds}
        if self.mean_return is not None and len(self.returns) == self.returns.maxlen:
            known["return/mean"] = self.mean_return
        return {**self.metrics, **known, **self.measured}

    def enter_stage(self, stage: int) -> None:
        """Forget what was measured in the stage before."""
        self.stage, self.metrics = stage, {}
        self.returns.clear()
        self.measured.clear()

    def mark(self) -> None:
        """Say that the run is here now: at its start, and with each update."""
        self.last_update = monotonic()
        self.rate.add(self.last_update, self.steps)

    def _note_limiter(self, name: str, told: dict[str, float]) -> None:
        if told:
            before = self.limiters.setdefault(name, {})
            before |= {k: v + before.get(k, 0.0) if k.endswith("_waited") else v for k, v in told.items()}

    def note_iteration(self, step: int, told: Mapping[str, float]) -> None:
        """Note what was measured if it is what an iteration came to."""
        if "iteration/number" in told:
            self.iterations.append({"step": float(step), **{k.removeprefix("iteration/"): v for k, v in told.items()}})

    def count_episodes(self, returns: Sequence[float], stage: int) -> None:
        """Count episodes that ended, and had begun in `stage`."""
        self.episodes += len(returns)
        if stage == self.stage:
            self.returns.extend(returns)

    def count_update(self, name: str, message: Statistics, members: Mapping[str, Member]) -> None:
        """Count an update of trainer `name`. Several trainers share the environment: steps and updates are those of the one that is furthest, what
        was dropped is their sum. A resumed one that has not been heard yet counts as before."""
        members[name].updated(message)
        self.recorded = False
        trainers = [member.update for member in members.values() if member.update.update]
        self.steps = max(self.steps, int(message.values["step"]))
        self.updates = max(self.updates, int(message.values["update"]))
        self.seconds = max(self.seconds, message.time["seconds"])
        self.dropped = max(self.dropped, sum(int(update.values["dropped"]) for update in trainers))
        self.metrics = message.values
        self._note_limiter(name, {k.removeprefix("limiter/"): v for k, v in message.values.items() if k.startswith("limiter/")})
        self.mark()

    def record(self, members: Mapping[str, Member]) -> dict[str, float]:
        """Return what is to be recorded of all updates since the last record. Of several kinds of trainers each one's own numbers bear its name."""
        several = len({worker.rpartition("-")[0] for worker, member in members.items() if member.config.limited}) > 1  # kinds: equal ones tell as one
        record: dict[str, float] = {}
        for worker, member in members.items():
            record |= {f"{worker}/{k}" if several else k: v for k, v in summary(member.updates.take()).items()}
        counters = {"step": self.steps, "update": self.updates, "dropped": self.dropped, "episodes": self.episodes}
        record |= {k: float(v) for k, v in counters.items()}
        if self.mean_return is not None:
            record["return/mean"] = self.mean_return
        if self.stages:
            record["curriculum/stage"] = float(self.stage + 1)
        record |= {f"environment/{k}": v for k, v in summary(self.told.take()).items()}
        record["time/seconds"] = self.seconds
        record["time/steps_per_second"] = self.steps / max(self.seconds, 1e-9)
        for worker, member in members.items():
            record.update({f"time/{worker}/{k}": v for k, v in member.told.items()})
            member.recorded = True
        self.recorded = True
        return record
