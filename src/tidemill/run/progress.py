"""What a run knows of its workers and of how far it is, from what they report."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from tidemill.api.control_messages import Episodes, State, Staying, WorkerStatistics
from tidemill.api.experiment import Experiment, WorkerConfig
from tidemill.api.transport import Link
from tidemill.core.clock import awake
from tidemill.core.cut import Part
from tidemill.core.memory import Need
from tidemill.core.tally import How, Tally, summary
from tidemill.run.episode_windows import (
    CHECKPOINTS,
    CheckpointEpisodes,
    EpisodeWindows,
    SavedEpisodes,
)
from tidemill.run.rounds import Rounds
from tidemill.workers.stages import stages_by_round
from tidemill.workers.trainer_config import COUNTED

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


LONGEST_CAUSE = 160  # characters of an event's that are shown


@dataclass
class Member:
    """What the controller knows of one worker."""

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
    saving: bool = False  # it writes a checkpoint
    needs: tuple[Need, ...] = ()  # memory that it is going to fill
    life: int = 0  # how often it has died
    wanted: State = State.CONFIGURING  # what it was told to become: READY or RUNNING
    buried: bool = False  # it has died, and its next life has not begun
    died_at: float = 0.0  # second of `awake`, until it runs again; 0: it lives
    cause: str = ""  # of its last death, shortly
    # what it has answered as an equal trainer that waits for others' next lives
    awaits: Staying | None = None
    unsent: int = 0  # see `WorkerStatistics`

    def bury(self, cause: str) -> None:
        """Note that it has died, and of what."""
        self.cause = cause.partition("\n")[0].partition(";")[0][:LONGEST_CAUSE]
        self.buried, self.state, self.shares, self.rate = True, State.CONFIGURING, {}, 0.0
        self.died_at = self.died_at or awake()
        self.unsent = 0

    def forget_updates(self) -> None:
        """Forget what updates have told that are undone."""
        self.update = WorkerStatistics(0)
        self.updates.take()

    def begin_life(self, link: Link) -> None:
        """Note that it lives again, at the other end of `link`."""
        self.link, self.life, self.buried, self.awaits = link, self.life + 1, False, None
        self.heard, self.saving, self.polls, self.statistics = awake(), False, 0, {}
        self.progress = self.unsent = 0

    def works(self, seconds: float) -> bool:
        """True of one that writes a checkpoint, or was heard of in the last so many
        seconds: others hang."""
        return self.saving or awake() - self.heard < seconds

    def note_statistics(self, message: WorkerStatistics) -> None:
        """Note its regular statistics: the shares of its time, its rate, and all the
        rest."""
        self.polls, self.progress, self.unsent = message.polls, message.progress, message.unsent
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


class Rate:
    """A rate says how fast a count has grown over the last few seconds, however rarely it
    is reported. For display alone."""

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
    lost_samples: int = 0
    """Samples that were on their way from hosts that are lost."""
    lost_steps: int = 0
    """Env steps of samples that were begun by workers that died, as far as they had
    told."""
    episodes: int = 0
    windows: EpisodeWindows | None = None
    """What the last episodes have reached; None before the run begins."""
    checkpoint_episodes: dict[str, list[CheckpointEpisodes]] = field(default_factory=dict)
    """The last episodes at the newest checkpoints of each policy, the oldest first."""
    unsaved: bool = False
    """There are other ones in `checkpoint_episodes` since somebody wrote them down."""
    metrics: dict[str, float] = field(default_factory=dict)
    rate: Rate = field(default_factory=Rate)
    last_update: float = field(default_factory=awake)
    stage: int = 0
    """Stage of the curriculum, from 0."""
    stages: int = 0
    """Number of stages of the curriculum; 0: there is none."""
    rounds: Rounds | None = None
    """The rounds at which stages begin, where they do."""
    measured: dict[str, float] = field(default_factory=dict)
    """The newest of each measurement in this stage."""
    recorded: bool = True
    """All updates are."""
    environment_statistics: Tally = field(default_factory=Tally)
    """What environments measured by themselves since the last record."""
    saved: dict[str, tuple[float, int]] = field(default_factory=dict)
    """When the newest checkpoint of each policy was on the disk, and its env steps."""
    trained: set[str] = field(default_factory=set)
    """The policies that are trained."""
    changes: int = 0
    """How often settings were changed while the run went on."""
    began: float = field(default_factory=awake)
    """When this life of the run began, and after how many env steps."""
    steps_at_start: int = 0
    limiters: dict[str, dict[str, float]] = field(default_factory=dict)
    """The newest that each trainer with a ratio told of its limiter, ``limiter/`` left
    out; what either side waited is summed."""
    iterations: list[dict[str, float]] = field(default_factory=list)
    """What each iteration came to that has ended since the start, ``iteration/`` left
    out, and its ``step``."""

    def note_saved(self, policy: str, steps: int) -> None:
        """Note that a checkpoint of `policy` after so many env steps is on the disk."""
        self.saved[policy] = awake(), steps

    @property
    def crash_cost(self) -> tuple[float, int]:
        """What would be lost if everything died now: seconds since the newest durable
        checkpoint, of several policies the oldest one, and env steps since then. Before
        there is one, all of this life."""
        if not self.trained or self.trained - self.saved.keys():
            return awake() - self.began, self.steps - self.steps_at_start
        at, steps = min(self.saved[policy] for policy in self.trained)
        return awake() - at, max(self.steps - steps, 0)

    @property
    def mean_return(self) -> float | None:
        """Mean undiscounted return of the last finished episodes; None before the first,
        and where they are of several policies."""
        return self.mean_returns.get("")

    @property
    def mean_returns(self) -> dict[str, float | None]:
        """The same of each policy, by name; "" where there is one."""
        return self.windows.mean_returns() if self.windows is not None else {}

    def begin(self, experiment: Experiment) -> None:
        """Count the episodes of `experiment` from now on, after those that were kept of
        this stage."""
        self.windows, self.stages = EpisodeWindows(experiment), len(experiment.curriculum)
        if self.rounds is None and stages_by_round(experiment):
            self.rounds = Rounds(experiment)
        self.trained, self.began, self.steps_at_start = set(experiment.trained()), awake(), self.steps
        for points in self.checkpoint_episodes.values():
            if points and points[-1].stage == self.stage:
                self.windows.restore(points[-1].episodes)

    def keep(self, policy: str, updates: int) -> None:
        """Keep the last episodes of `policy` as they are now: at its checkpoint after so
        many `updates`."""
        if self.windows is not None:
            earlier = [point for point in self.checkpoint_episodes.get(policy, ()) if point.updates < updates]
            self.checkpoint_episodes[policy] = [
                *earlier,
                CheckpointEpisodes(updates, self.stage, self.windows.plain(policy)),
            ][-CHECKPOINTS:]
            self.unsaved = True

    def count(self, update: WorkerStatistics) -> None:
        """Count how far a trainer is after an update. Several trainers share the
        environment: steps and updates are those of the one that is furthest."""
        self.steps = max(self.steps, int(update.values["step"]))
        self.updates = max(self.updates, int(update.values["update"]))
        self.seconds = max(self.seconds, update.time["seconds"])

    def go_back(self, point: "Progress", others: "Progress", policies: Iterable[str]) -> None:
        """Go back to where `policies` were at their newest checkpoints, which `point`
        says; `others` says how far all other trainers are."""
        self.steps = max(point.steps, others.steps)
        self.updates = max(point.updates, others.updates)
        self.seconds = max(point.seconds, others.seconds)
        self.dropped = point.dropped
        if self.rounds is not None:
            self.stage, self.episodes, self.rounds = point.stage, point.episodes, point.rounds
            self.measured, self.metrics = point.measured, point.metrics
        for policy in policies:
            points = self.checkpoint_episodes[policy] = point.checkpoint_episodes.get(policy, [])
            if self.windows is not None:
                self.windows.clear(policy)
                if points and points[-1].stage == self.stage:
                    self.windows.restore(points[-1].episodes)

    def state(self) -> Part:
        """Return what decides when a curriculum's stages begin, for a cut of the run."""
        assert self.windows is not None
        last = {policy: msgspec.to_builtins(self.windows.plain(policy)) for policy in self.trained}
        return {
            "stage": self.stage,
            "episodes": self.episodes,
            "measured": self.measured,
            "metrics": self.metrics,
            "last": last,
            "rounds": {} if self.rounds is None else self.rounds.state(),
        }

    def load_state(self, state: Part, checkpoints: Mapping[str, int]) -> None:
        """Go on from what `state` told, of a cut with these checkpoints: by policy, after
        how many updates."""
        self.stage, self.episodes, self.measured = state["stage"], state["episodes"], dict(state["measured"])
        self.metrics = dict(state.get("metrics", {}))
        if self.rounds is not None:
            self.rounds.load_state(state.get("rounds", {}))
        for policy, updates in checkpoints.items():
            episodes = msgspec.convert(state["last"][policy], dict[str, SavedEpisodes])
            self.checkpoint_episodes[policy] = [CheckpointEpisodes(updates, self.stage, episodes)]

    def keep_last(self) -> None:
        """Keep the last episodes of the whole run, which has written its last
        checkpoints."""
        for policy, points in list(self.checkpoint_episodes.items()):
            if points:  # none: it has written no checkpoint since it was resumed from one without episodes
                self.keep(policy, points[-1].updates)

    @property
    def where(self) -> str:
        """The curriculum's stage, as people count: "1 of 3"; "" without one."""
        return f"{self.stage + 1} of {self.stages}" if self.stages else ""

    def known(self) -> dict[str, float]:
        """Return what the curriculum's conditions are about."""
        known = {
            "step": float(self.steps),
            "update": float(self.updates),
            "episodes": float(self.episodes),
            "time/seconds": self.seconds,
        }
        return {
            **self.metrics,
            **known,
            **(self.windows.metrics(full=True) if self.windows is not None else {}),
            **self.measured,
        }

    def enter_stage(self, stage: int) -> None:
        """Forget what was measured in the stage before."""
        self.stage, self.metrics = stage, {}
        if self.windows is not None:
            self.windows.clear()
        self.measured.clear()

    def mark(self) -> None:
        """Say that the run is here now: at its start, and with each update."""
        self.last_update = awake()
        self.rate.add(self.last_update, self.steps)

    def note_iteration(self, step: int, values: Mapping[str, float]) -> None:
        """Note what was measured if it is what an iteration came to."""
        if "iteration/number" in values:
            self.iterations.append(
                {"step": float(step), **{k.removeprefix("iteration/"): v for k, v in values.items()}}
            )

    def count_episodes(self, group: str, message: Episodes) -> None:
        """Count episodes that ended, as a worker of `group` tells them."""
        self.episodes += len(message.returns)
        if message.stage == self.stage and self.windows is not None:
            self.windows.add(group, message)

    def count_update(self, name: str, message: WorkerStatistics, members: Mapping[str, Member]) -> None:
        """Count an update of trainer `name`. What was dropped is the trainers' sum. A
        resumed one that has not been heard yet counts as before."""
        members[name].updated(message)
        self.recorded = False
        trainers = [member.update for member in members.values() if member.update.update]
        self.count(message)
        self.dropped = max(self.dropped, sum(int(update.values["dropped"]) for update in trainers))
        self.metrics = message.values
        for key, value in message.values.items():
            if (told := key.removeprefix("limiter/")) != key:
                limiter = self.limiters.setdefault(name, {})
                limiter[told] = value + limiter.get(told, 0.0) if told.endswith("_waited") else value
        self.mark()

    def record(self, members: Mapping[str, Member]) -> dict[str, float]:
        """Return what is to be recorded of all updates since the last record. Of several
        kinds of trainers each one's own numbers bear its name."""
        # kinds: equal ones tell as one
        several = (
            len({worker.rpartition("-")[0] for worker, member in members.items() if member.config.limited})
            > 1
        )
        record: dict[str, float] = {}
        for worker, member in members.items():
            record |= {
                f"{worker}/{k}" if several else k: v for k, v in summary(member.updates.take()).items()
            }
        counters = {
            "step": self.steps,
            "update": self.updates,
            "dropped": self.dropped,
            "episodes": self.episodes,
        }
        if self.lost_samples or self.lost_steps:
            counters |= {"lost/samples": self.lost_samples, "lost/steps": self.lost_steps}
        record |= {k: float(v) for k, v in counters.items()}
        if self.windows is not None:
            record |= self.windows.metrics()
        if self.stages:
            record["curriculum/stage"] = float(self.stage + 1)
        record |= {f"environment/{k}": v for k, v in summary(self.environment_statistics.take()).items()}
        record["time/seconds"] = self.seconds
        record["time/steps_per_second"] = self.steps / max(self.seconds, 1e-9)
        for worker, member in members.items():
            record.update({f"time/{worker}/{k}": v for k, v in member.statistics.items()})
            member.recorded = True
        self.recorded = True
        return record
