"""What a run knows of how far it is, from what its workers report."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from tidemill.api.control_messages import Episodes, WorkerStatistics
from tidemill.api.experiment import Experiment
from tidemill.core.clock import awake
from tidemill.core.cut import Part
from tidemill.core.tally import Tally, summary
from tidemill.run.episode_windows import (
    CHECKPOINTS,
    CheckpointEpisodes,
    EpisodeWindows,
    SavedEpisodes,
)
from tidemill.run.member import Member
from tidemill.run.rounds import Rounds
from tidemill.workers.stages import stages_by_round
from tidemill.workers.trainer_config import TrainerConfig


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
        """Forget what is older than so many seconds, and than the time between two."""
        marks = self._marks
        while len(marks) > 1 and now - marks[1][0] >= max(self._seconds, marks[1][0] - marks[0][0]):
            marks.popleft()

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
    """Of training, as of the newest update."""
    dropped: int = 0
    policy_updates: dict[str, int] = field(default_factory=dict)
    """After how many updates policies go on that go back to checkpoints."""
    lost_samples: int = 0
    """Samples that were on their way from hosts that are lost."""
    lost_steps: int = 0
    """Env steps of samples that were begun by workers that died, as far as they had
    told. Of a host that is heard again it becomes known exactly, and may be less."""
    lost_any: bool = False
    """Either was told, and is recorded from then on, also where it comes to nothing."""
    episodes: int = 0
    windows: EpisodeWindows | None = None
    """What the last episodes have reached; None before the run begins."""
    checkpoint_episodes: dict[str, list[CheckpointEpisodes]] = field(default_factory=dict)
    """The last episodes at the newest checkpoints of each policy, the oldest first."""
    unsaved: bool = False
    """There are other ones in `checkpoint_episodes` since somebody wrote them down."""
    metrics: dict[str, float] = field(default_factory=dict)
    rate: Rate = field(default_factory=Rate)
    stage: int = 0
    """Stage of the curriculum, from 0."""
    stages: int = 0
    """Number of stages of the curriculum; 0: there is none."""
    rounds: Rounds | None = None
    """The rounds at which stages begin, where they do."""
    of_cut: bool = False
    """It is of a run that goes back to its newest cut as a whole, or begins anew."""
    measured: dict[str, float] = field(default_factory=dict)
    """The newest of each measurement in this stage."""
    recorded: bool = True
    """All updates are."""
    environment_statistics: Tally = field(default_factory=Tally)
    """What environments measured by themselves since the last record."""
    saved: dict[str, tuple[float, int, int]] = field(default_factory=dict)
    """When the newest checkpoint of each policy was on the disk, its env steps, and its
    updates."""
    updated: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Env steps and updates of each policy, as one of its trainers told them last."""
    trained: set[str] = field(default_factory=set)
    """The policies that are trained."""
    changes: int = 0
    """How often settings were changed while the run went on."""
    began: float = field(default_factory=awake)
    """When this life of the run began, and after how many env steps."""
    steps_at_start: int = 0
    marked_at: float | None = None
    """When the newest update was told, or the run began; None before it has begun."""
    paused_at: float | None = None
    """When the run was paused, while it is."""
    limiters: dict[str, dict[str, float]] = field(default_factory=dict)
    """The newest that each trainer with a ratio told of its limiter, ``limiter/`` left
    out; what either side waited is summed."""
    iterations: list[dict[str, float]] = field(default_factory=list)
    """What each iteration came to that has ended since the start, ``iteration/`` left
    out, and its ``step``."""

    def note_saved(self, policy: str, steps: int, updates: int) -> None:
        """Note that a checkpoint of `policy` after so many env steps and updates is on
        the disk."""
        self.saved[policy] = awake(), steps, updates

    def count_saved(self) -> None:
        """Count the updates that only a checkpoint tells of: whoever had done them died
        before it had told them, and its next life had none left to do."""
        for _, steps, updates in self.saved.values():
            if updates > self.updates:
                self.steps, self.updates, self.recorded = max(self.steps, steps), updates, False

    def pause(self) -> None:
        """Note that the run is paused: nothing is added to what a crash would cost."""
        if self.paused_at is None:
            self.paused_at = awake()

    def go_on(self) -> None:
        """Note that the run goes on after a pause, in which no time has passed."""
        if self.paused_at is not None:
            now, paused = awake(), self.paused_at
            self.began += now - max(self.began, paused)
            if self.marked_at is not None:
                self.marked_at += now - max(self.marked_at, paused)
            for policy, (at, steps, updates) in self.saved.items():
                self.saved[policy] = at + now - max(at, paused), steps, updates
        self.paused_at = None

    @property
    def clock(self) -> float:
        """Seconds of training until now: they go on while no update comes, and stand
        still until the run has begun, and in pauses."""
        if self.marked_at is None:
            return self.seconds
        now = awake() if self.paused_at is None else self.paused_at
        return self.seconds + max(now - self.marked_at, 0.0)

    @property
    def crash_cost(self) -> tuple[float, int]:
        """What would be lost if everything died now: seconds since the newest durable
        checkpoint, of several policies the oldest one of those that were updated since,
        and most env steps of a policy since its own. Before each has one, all of this
        life. Pauses are no time."""
        now = awake() if self.paused_at is None else self.paused_at
        if not self.trained or self.trained - self.saved.keys():
            return max(now - self.began, 0.0), self.steps - self.steps_at_start
        lost = [
            (at, self.updated[policy][0] - steps)
            for policy, (at, steps, updates) in self.saved.items()
            if policy in self.trained and self.updated.get(policy, (0, 0))[1] > updates
        ]
        if not lost:
            return max(now - max(at for at, _, _ in self.saved.values()), 0.0), 0
        return max(now - min(at for at, _ in lost), 0.0), max(steps for _, steps in lost)

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
        if self.rounds is not None or point.of_cut:
            self.stage, self.episodes, self.rounds = point.stage, point.episodes, point.rounds
            self.measured, self.metrics = point.measured, point.metrics
        for policy in policies:
            if (saved := self.saved.get(policy)) is not None and saved[2] > point.updates:
                self.saved[policy] = saved[0], point.steps, point.updates
            points = self.checkpoint_episodes[policy] = point.checkpoint_episodes.get(policy, [])
            if self.windows is not None:
                self.windows.clear(policy)
                if points and points[-1].stage == self.stage:
                    self.windows.restore(points[-1].episodes)

    def state(self) -> Part:
        """Return what is known of the run as a whole, for a cut of it: its episodes, and
        what decides when a curriculum's stages begin."""
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
        self.marked_at = awake()
        self.rate.add(self.marked_at, self.steps)

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
        if isinstance(config := members[name].config, TrainerConfig):
            self.updated[config.policy] = int(message.values["step"]), int(message.values["update"])
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
        if self.lost_any:
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
