"""Cuts of a run that resumes exactly (`Experiment.exact_resume`): all workers but those
that watch are held between two polls, trainers write their checkpoints, the others their
parts of the cut, and all go on as if nothing had been.

Of a run inline a cut lies between two rounds of turns. In lockstep it may lie anywhere:
what each worker does next depends on nothing but what it holds and what it was sent.
Samples in flight are their producers' to keep, since slots that nobody has given back are
theirs.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from tidemill.api.control_messages import (
    ENDED,
    Down,
    Hold,
    Holding,
    Save,
    Saved,
    SaveDue,
    State,
    WorkerStatistics,
)
from tidemill.api.edges import group_of
from tidemill.api.experiment import Experiment
from tidemill.core.clock import awake
from tidemill.core.errors import CheckpointError, ConfigError
from tidemill.replay.queue import Queue
from tidemill.replay_training.trainer_config import ReplayTrainer
from tidemill.run.folder import RunFolder
from tidemill.run.progress import Member
from tidemill.store.checkpoint import checkpoint_name, checkpoints, put_aside, readable
from tidemill.store.query import Query, among
from tidemill.streams.sources import Drawn
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.agent_spec import PlayerSpec
from tidemill.workers.buffer_worker import Buffers
from tidemill.workers.cut_files import CUTS, RUNNER, actors_with_part, has_part, number_of, watches
from tidemill.workers.evaluation import Evaluation, judge_of
from tidemill.workers.policy import PolicyWorkers
from tidemill.workers.population import Population
from tidemill.workers.stages import in_rounds
from tidemill.workers.trainer_config import Trainer, TrainerConfig

PATIENCE = 600.0
"""Seconds until a cut is given up for which somebody does not come to rest: an
environment may take minutes for a step, and an actor that it holds for good lives again
before."""


COUNTED_FIELDS = frozenset({"version", "env_steps"})
"""What of versions is the same at one update, however long that took."""
BEHIND = 10.0
"""Seconds that a trainer has at the end for the update that another one has done."""


class Cuts:
    """The cuts of a run.

    policies: the policies that are trained
    members: the workers
    send: function that sends a message to one
    hear: function that reads what they have told; it hands `take` each message
    over: function that says whether the run is to end
    tell: function that tells the user of a text
    keep: function that writes what is known of the run as a whole, as a part of a cut:
        its number, and with which checkpoints it goes
    watchers: those of the workers that only watch: no cut waits for them, or holds them
    even: whether trainers end after equally many updates
    number: number of the first one

    due: it is time for one
    """

    def __init__(
        self,
        policies: Collection[str],
        members: Mapping[str, Member],
        send: Callable[[str, Down], None],
        hear: Callable[[], None],
        over: Callable[[], bool],
        tell: Callable[[str], None],
        keep: Callable[[int, Mapping[str, int]], None],
        watchers: Collection[str] = (),
        even: bool = False,
        number: int = 1,
    ) -> None:
        self._policies, self._members = policies, members
        self._send, self._hear, self._over, self._tell = send, hear, over, tell
        self._keep, self._watchers = keep, watchers
        self.number = number
        """Number of the cut that is being made, or comes next. It stays where the run is
        to end meanwhile: then its end is that cut, of which some have written their part
        already."""
        self.due = False
        self.checkpoints: dict[str, int] = {}
        """By policy, after how many updates its newest checkpoint was written; of those
        whose checkpoint is of now."""
        self._held: set[str] = set()
        self._even = even
        self._updates: dict[str, int] = {}  # of each trainer, as far as it has told
        self._until: float | None = None  # who is behind is waited for at the end

    def take(self, name: str, message: Any) -> None:
        """Take in a message of a worker's."""
        config = self._members[name].config
        match message:
            case SaveDue():
                self.due = True
            case Holding():
                self._held.add(name)
            case Saved():
                self.checkpoints[message.policy] = message.updates
            case WorkerStatistics(update=True) if isinstance(config, TrainerConfig):
                self.checkpoints.pop(config.policy, None)
                self._updates[name] = int(message.values["update"])

    def forget(self) -> None:
        """Forget what trainers have told of updates that are undone."""
        self.due = False
        self.checkpoints.clear()
        self._updates.clear()

    @property
    def whole(self) -> bool:
        """True when there is a checkpoint of now of every policy."""
        return self.checkpoints.keys() == {*self._policies}

    def one_is_behind(self) -> bool:
        """True while a trainer is to do one more update, which another one has ended with
        in lockstep: so each policy has the same number of them in the end, whoever was
        quicker. Its samples are there by then."""
        ended = [self._updates.get(name, 0) for name, m in self._members.items() if m.state in ENDED]
        living = [
            self._updates[name]
            for name, m in self._members.items()
            if name in self._updates and m.state not in ENDED
        ]
        if not (self._even and any(count + 1 == max(ended, default=0) for count in living)):
            return False
        self._until = self._until or awake() + BEHIND
        return awake() < self._until

    @property
    def _parties(self) -> dict[str, Member]:
        """All but the watchers."""
        return {name: member for name, member in self._members.items() if name not in self._watchers}

    @property
    def at_rest(self) -> bool:
        """True when everybody who has not ended is held, but for who watches."""
        return all(m.state in ENDED or name in self._held for name, m in self._parties.items())

    @property
    def agreed(self) -> bool:
        """True when some rest by agreement, which they come to only while they run."""
        return any(member.config.limited and member.config.count > 1 for member in self._members.values())

    def hold(self) -> None:
        """Have everybody stay as they are, but for who watches."""
        self._held.clear()
        for name in self._parties:
            self._send(name, Hold(cut=self.number))

    def go_on(self) -> None:
        """Have everybody go on."""
        self.number += 1
        for name in self._parties:
            self._send(name, Hold(on=False, cut=self.number))

    def cut(self) -> None:
        """Cut the run. Given up where it ends, or somebody dies: the cut before stays."""
        self.due = False
        parties = self._parties
        limited = [name for name, member in parties.items() if member.config.limited]
        others = [name for name in parties if name not in limited]
        self.hold()
        # to a checkpoint that could not be written nothing belongs
        written = self._await(parties) and self._save(limited, {}) and self.whole
        if written and self._save(others, self.checkpoints):
            self._keep(self.number, self.checkpoints)
        if not self._over():
            self.go_on()

    def _save(self, names: Iterable[str], with_checkpoints: Mapping[str, int]) -> bool:
        names = list(names)
        self._held.difference_update(names)
        for name in names:
            self._send(name, Save(dict(with_checkpoints)))
        return self._await(names)

    def _await(self, names: Iterable[str]) -> bool:
        """Wait until these are held. False where that will not be."""
        names, until = set(names), awake() + PATIENCE
        while late := names - self._held:
            if awake() > until:
                self._tell(
                    f"no checkpoint is written: {', '.join(sorted(late))} did not come to rest within "
                    f"{PATIENCE:.0f} s; training goes on, and this is tried again"
                )
                return False
            self._hear()
            if self._over() or any(
                member.buried or member.state not in (State.RUNNING, State.PAUSED)
                for member in self._parties.values()
            ):
                return False
        return True


def check_exact(experiment: Experiment, inline: bool) -> None:
    """Raise `ConfigError` for an experiment with `exact_resume` that cannot be resumed
    exactly. `inline`: its workers take turns in one thread."""
    if not experiment.exact_resume:
        return
    wrong = ""
    if experiment.curriculum:
        wrong = _wrong_with_stages(experiment, inline)
    for name, config in experiment.workers.items():
        match config:
            case ReplayTrainer():
                if not config.exact:
                    wrong = f"workers.{name} is a ReplayTrainer with exact = False; set exact = True"
            case Trainer():
                if config.max_policy_lag != 0 and not inline:
                    wrong = (
                        f"workers.{name}.max_policy_lag = {config.max_policy_lag}, so that what is "
                        "trained on which weights is a matter of time; set it to 0, or launch inline"
                    )
                elif config.buffer != Queue() and not inline:
                    wrong = (
                        f"workers.{name}.buffer = {config.buffer}, which may depend on which sample comes "
                        "first; take Queue(), or launch inline"
                    )
                elif config.device != "cpu":
                    wrong = f'workers.{name}.device = "{config.device}"; take "cpu"'
            case ActorConfig():
                for spec in config.agents:
                    if isinstance(spec.parameters, Drawn) and not watches(experiment, name):
                        wrong = _wrong_with_draws(experiment, config, spec, inline)
                    if wrong:
                        break
            case Evaluation():  # it watches, or training waits for it
                pass
            case PolicyWorkers():
                if config.threaded:
                    wrong = f"workers.{name}.threaded = True, so that who draws first is a matter of time"
                elif config.device != "cpu":
                    wrong = f'workers.{name}.device = "{config.device}"; take "cpu"'
            case Buffers():
                if not inline:
                    wrong = (
                        f"workers.{name} are buffer workers, whose samples come to trainers at any time; "
                        "launch inline"
                    )
            case Population():
                wrong = _wrong_with_population(experiment, name, config, inline)
            case _:
                wrong = f"workers.{name}, a {type(config).__name__}, works by the clock; leave it out"
        if wrong:
            break
    if wrong:
        raise ConfigError(f"exact_resume = True cannot be had here: {wrong}; or leave out exact_resume")


def _wrong_with_stages(experiment: Experiment, inline: bool) -> str:
    """Return why when the stages of the curriculum begin would be a matter of time, ""
    where it is not."""
    if experiment.groups(ReplayTrainer):
        return "a curriculum and a ReplayTrainer, which keeps no stage with its episodes; leave one out"
    if not inline and experiment.groups(Population):
        return "a curriculum and a Population, whose members are no rounds together; launch inline"
    together = {group_of(name) for name in in_rounds(experiment)}
    for name, actors in experiment.groups(ActorConfig).items():
        if not inline and actors.plays() and name not in together:
            return (
                f"a curriculum and workers.{name}, whose episodes count, and end at any time, since no "
                "trainer waits for their samples; have its agents play other parameters than the newest, or "
                "launch inline"
            )
    evaluations = experiment.groups(Evaluation).values()
    watching = [config.measures() for config in evaluations if config.watches]
    for number, stage in enumerate(experiment.curriculum, 1):
        for name in Query.parse(stage.until).fields() if stage.until else ():
            names = name, name.partition("/")[2]  # the group stands before what several measure
            if name == "time/seconds" or any(among(each, told) for each in names for told in watching):
                return (
                    f'stage {number} of the curriculum, which ends by "{name}", a matter of time; take '
                    '"step", "update", "episodes", what the last episodes have reached, what training tells '
                    "or what an evaluation with updates says"
                )
    return ""


def _wrong_with_draws(experiment: Experiment, config: ActorConfig, spec: PlayerSpec, inline: bool) -> str:
    """Return why what these agents draw would be a matter of time, "" where it is not."""
    drawn, who = spec.parameters, f'the agents "{spec.match}" play versions that are drawn'
    assert isinstance(drawn, Drawn)
    awaited = [
        each
        for each in experiment.groups(Evaluation).values()
        if each.updates is not None and each.policy == spec.policy
    ]
    judged = [each for each in awaited if judge_of(experiment, config.agents) == each]
    counted = {*COUNTED_FIELDS, *(name for each in awaited if inline for name in each.records())}
    if drawn.tag and drawn.tag in {tag for each in awaited if inline for tag in (each.tag, each.best)} | {
        each.tag for each in judged
    }:
        return ""
    fields = {field for query in drawn.queries() for field in query.fields()} - counted
    if drawn.tag or fields:
        by = f'the tag "{drawn.tag}"' if drawn.tag else f'"{min(fields)}"'
        return f"{who} by {by}, which moves at any time; draw by {' and '.join(sorted(COUNTED_FIELDS))} alone"
    for name, trainer in experiment.groups(TrainerConfig).items():
        if trainer.policy != spec.policy:
            continue
        if trainer.database_updates is None or trainer.database_versions is not None:
            return (
                f"{who}, and which ones there are is a matter of time; set workers.{name}.database_updates "
                f"(updates between two of them) and workers.{name}.database_versions = None (all are kept)"
            )
        streams = [stream for each in config.agents for stream in each.streams]
        if not (inline or judged) and not any(
            name == group_of(taker) for s in streams for taker in experiment.in_lockstep(s)
        ):
            return f"{who}, and {name}, which makes these, does not wait for their actors' samples"
    return ""


def _wrong_with_population(experiment: Experiment, name: str, config: Population, inline: bool) -> str:
    """Return why what a population decides would be a matter of time, "" where it is
    not."""
    if config.updates is None:
        return f"workers.{name} decides by env steps, whenever it looks; set its updates"
    evaluations = [each for each in experiment.groups(Evaluation).values() if each.updates is not None]
    for member in config.members:
        counted = {name for each in evaluations if each.policy == member for name in each.records()}
        if config.metric not in {"training_return", *counted}:
            return (
                f'workers.{name}.metric = "{config.metric}", which is known of versions of "{member}" at any '
                'time; take "training_return", or what an Evaluation with updates records'
            )
    if not inline and (experiment.limits.updates is None or experiment.limits.steps is not None):
        return (
            f"the first member of workers.{name} that reaches a limit would end the run, or keep the others "
            "waiting; set limits.updates, which all members reach, and no limits.steps"
        )
    return ""


def newest_whole_cut(folder: RunFolder, experiment: Experiment) -> dict[Path, Path]:
    """Return the checkpoints and parts of the newest whole cut of a run that resumes
    exactly, by the folders in which those of their kind are; {} for another run, and for
    one without checkpoints. Raises `CheckpointError` where it has some, but no whole
    cut."""
    policies = experiment.trained()
    with_part = _with_part(experiment)
    if not with_part or not folder.has_checkpoints(policies):
        return {}
    parts = {
        name: {number_of(found.path): found for found in readable(folder.path / CUTS / name)}
        for name in with_part
    }
    for cut, part in parts[actors_with_part(experiment)[0]].items():  # the newest first
        goes_with = part.facts.get("checkpoints", {})
        same = [held[cut] for held in parts.values() if cut in held]
        agree = all(each.facts.get("checkpoints", {}).items() <= goes_with.items() for each in same)
        named = {policy: checkpoint_name(goes_with.get(policy, -1)) for policy in policies}
        paths = [folder.checkpoints(policy) / name for policy, name in named.items()]
        if (
            agree
            and len(same) == len(parts)
            and all(any(found.path == path for found in readable(path.parent)) for path in paths)
        ):
            return {path.parent: path for path in (*paths, *(each.path for each in same))}
    raise CheckpointError(
        f"{folder.path} has checkpoints, but no whole cut to resume exactly from: the run was killed before "
        "all its workers had written the first one. Train anew; or set exact_resume to false in its "
        "config.json, and it goes on from its newest checkpoint with new episodes"
    )


def go_back_to_cut(folder: RunFolder, experiment: Experiment, or_begin: bool = False) -> None:
    """Put aside the checkpoints and parts that are newer than the newest whole cut of a
    run that resumes exactly. Where there is none all of them, to `or_begin` anew; else
    raises `CheckpointError`."""
    with_part = _with_part(experiment)
    try:
        cut = newest_whole_cut(folder, experiment)
    except CheckpointError:
        if not or_begin:
            raise
        cut = {}
    if not with_part or not (cut or or_begin):
        return
    places = [*map(folder.checkpoints, experiment.trained()), *(folder.path / CUTS / n for n in with_part)]
    for place in places:
        written = checkpoints(place)
        put_aside(written[written.index(cut[place]) + 1 :] if cut else written)


def _with_part(experiment: Experiment) -> list[str]:
    """Return whose parts make a cut whole; none where a run resumes otherwise."""
    if not experiment.exact_resume or not actors_with_part(experiment):
        return []
    with_part = [name for name, _ in experiment.members() if has_part(experiment, name)]
    return with_part + [RUNNER] * bool(experiment.curriculum)
