"""Does a resumed run go on as if it had never ended? Two short runs of one experiment
say: one that goes straight through, and one that ends about half-way and is resumed. All
that they leave is compared, in every bit.

Where workers have threads or processes of their own it is a matter of time where each of
them was as the run ended. What they held then shows in what comes of it: both runs are
resumed once more there, for two updates, before they are compared.

The second one ends by its time, which no schedule depends on: those that follow the share
of the run that is over would be others in a run of half as many updates.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from tidemill.api.experiment import Experiment
from tidemill.api.launcher import Launcher
from tidemill.api.limits import Limits
from tidemill.api.plain_spaces import read_spaces
from tidemill.core.errors import ConfigError, Interrupted
from tidemill.core.schema import Array
from tidemill.core.temporary_folders import temporary_folder
from tidemill.launchers.table import make_launcher
from tidemill.metrics.json_lines import read_metrics
from tidemill.replay_training.trainer_config import ReplayTrainer
from tidemill.run.events import read_events
from tidemill.store.checkpoint import MANIFEST, FoundCheckpoint, checkpoints, read_newest
from tidemill.store.query import among
from tidemill.training.result import Result
from tidemill.training.train import resume, train
from tidemill.workers.cut_files import CUTS, actors_with_part, read_part_of
from tidemill.workers.trainer_config import TrainerConfig

UPDATES, OF_MEMORY = 8, 200
"""Updates of each run, and where one trains from a replay memory: these come quickly,
after a warm-up that is no proof by itself."""
BEYOND = 2
"""Updates for which both runs go on where workers do not take turns in one thread."""
TRIES = 10
"""How often a run is begun anew that ended before its first update, or was over before
its time."""
CLOCK = ("seconds",)
"""Facts of checkpoints that tell of the clock."""
FIRST, SECOND = "straight", "resumed"


@dataclass(frozen=True)
class ResumeCheck:
    """What `check_resume` has found.

    updates: number of updates of each run
    ended: after how many of them the second run ended, and was resumed
    compared: number of arrays, numbers and files that were compared
    differences: those that differ, and how; those of actors first
    cause: the likely cause of the first one, "" where nothing differs
    made_anew: how often lanes were made anew in the two runs, and what of, in words; ""
        where none were
    """

    updates: int
    ended: int
    compared: int
    differences: tuple[str, ...]
    cause: str
    made_anew: str = ""

    @property
    def exact(self) -> bool:
        """True when nothing differs."""
        return not self.differences


def check_resume(
    experiment: Experiment,
    *,
    updates: int | None = None,
    launch: str | type[Launcher] = "inline",
    source: str | Path | None = None,
) -> ResumeCheck:
    """Return whether a run of `experiment` that is resumed goes on exactly as one that
    was never ended, by two short runs in a folder of temporary files.

    updates: number of updates of each run, at least 2; None: 8, with a replay memory 200
    launch, source: as of `train`

    Raises `ConfigError` for an experiment that cannot be resumed exactly at all, saying
    why, `Interrupted` where a signal ends one of the runs, and what `train` raises.
    """
    if updates is None:
        updates = OF_MEMORY if experiment.groups(ReplayTrainer) else UPDATES
    if updates < 2:
        raise ConfigError(f"updates = {updates} must be at least 2, so that a run can end before its last")
    limits = Limits(updates=updates, window=experiment.limits.window)
    asked = experiment.replace(exact_resume=True, limits=limits)
    with temporary_folder() as folder:
        straight, resumed = (Path(folder) / name for name in (FIRST, SECOND))
        settings: dict[str, Any] = {"launch": launch, "quiet": True, "log": "csv"}
        _uninterrupted(train(asked, run_dir=straight, source=source, **settings))
        ended = _cut_short(asked, straight, resumed, source, settings)
        _uninterrupted(resume(resumed, limits={"seconds": None}, trust=True, **settings))
        takes_turns = make_launcher(launch).takes_turns
        for run in () if takes_turns else (straight, resumed):
            _uninterrupted(resume(run, limits={"updates": updates + BEYOND}, trust=True, **settings))
        compared, differences, first = compare_runs(asked, straight, resumed, takes_turns)
        cause, (anew, unequal) = "", _made_anew(asked, straight, resumed)
        if differences or first:
            by_chance = f"{anew}: what fails by chance, or by the clock, follows from no seed" * unequal
            cause = _cause(resumed, ended, first, _forgotten(asked, resumed), by_chance)
        if first and not differences:
            differences.append(first[1])
        return ResumeCheck(updates, ended, compared, tuple(differences), cause, anew)


def compare_runs(
    experiment: Experiment, straight: Path, resumed: Path, takes_turns: bool
) -> tuple[int, list[str], tuple[int, str] | None]:
    """Return how many things were compared in what two runs of `experiment` have left in
    their folders, which differ, those of actors first, and of the first metric that
    differs the update and a sentence. `takes_turns`: their workers did, in one thread."""
    members = dict(experiment.members())
    trainers = [name for name, config in members.items() if isinstance(config, TrainerConfig)]
    places = [f"checkpoints/{policy}" for policy in experiment.trained()]
    places += [f"{CUTS}/{name}" for name in trainers]
    if takes_turns:  # elsewhere it is a matter of time where the others are
        places = [*(f"{CUTS}/{name}" for name in members if name not in trainers), *places]
    compared, differences = 0, list[str]()
    for place in places:
        if not checkpoints(straight / place):
            continue  # what a replay memory's actors hold is their trainer's to keep
        count, found = compare(place, read_newest(straight / place), read_newest(resumed / place))
        compared += count
        differences += found
    count, first = _compare_metrics(experiment, straight, resumed)
    measured, apart = _compare_measured(experiment, straight, resumed)
    return compared + count + measured, differences, first or apart


def _cut_short(
    experiment: Experiment, straight: Path, folder: Path, source: str | Path | None, settings: dict[str, Any]
) -> int:
    """Train into `folder` for about half of the time that the run in `straight` took,
    but for some of its updates and not for all. Return after how many that was."""
    last = experiment.limits.updates
    times = [record["time/seconds"] for record in read_metrics(straight) if "time/seconds" in record]
    seconds, too_short, too_long = times[(len(times) - 1) // 2], 0.0, times[-1]
    for _ in range(TRIES):
        limits = experiment.limits.replace(seconds=seconds)
        made = train(experiment.replace(limits=limits), run_dir=folder, source=source, **settings)
        _uninterrupted(made)
        if 0 < made.summary["updates"] != last:
            return int(made.summary["updates"])
        rmtree(folder)
        if made.summary["updates"]:
            too_long = seconds
        else:
            too_short = seconds
        seconds = (too_short + too_long) / 2
    raise ConfigError(
        f"{last} updates are over too soon to end a run between its first and its last one; ask for more of "
        "them (--updates)"
    )


def _uninterrupted(run: Result) -> None:
    """Raise `Interrupted` where a signal has ended a run: what it left proves nothing."""
    if run.summary["status"] == "interrupted":
        raise Interrupted(run.summary["reason"], "the check was broken off, and nothing was found out")


def _flat(part: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in part.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}/")
        else:
            yield f"{path}{name}", value


def compare(place: str, ours: FoundCheckpoint, theirs: FoundCheckpoint) -> tuple[int, list[str]]:
    """Return how many things were compared in two checkpoints of `place`, and which
    differ, and how."""
    differences = list[str]()
    mine, others = (
        {name: value for name, value in _flat({**each.arrays, **each.facts}) if name not in CLOCK}
        for each in (ours, theirs)
    )
    for name in sorted(mine.keys() | others.keys()):
        if name not in mine or name not in others:
            where = SECOND if name not in mine else FIRST
            differences.append(f"{place}: {name} is in the {where} run alone")
        elif isinstance(mine[name], np.ndarray):
            if text := _unequal(mine[name], others[name]):
                differences.append(f"{place}: {name}: {text}")
        elif mine[name] != others[name]:
            differences.append(f"{place}: {name}: {_short(mine[name])} and {_short(others[name])}")
    sums = [json.loads((each.path / MANIFEST).read_text())["sha256"] for each in (ours, theirs)]
    files = [file for file in sums[0] | sums[1] if "/" in file]  # of whoever wrote them: replay memories
    differences += [f"{place}: {file} differs" for file in files if sums[0].get(file) != sums[1].get(file)]
    return len(mine) + len(files), differences


def _unequal(ours: Array, theirs: Array) -> str:
    """Return how two arrays differ; "" where they do not, in any bit."""
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"{ours.dtype}{list(ours.shape)} and {theirs.dtype}{list(theirs.shape)}"
    if ours.tobytes() == theirs.tobytes():
        return ""
    same = (ours == theirs) | ((ours != ours) & (theirs != theirs))
    at = tuple(int(place) for place in np.argwhere(~same)[0]) if not np.all(same) else ()
    return (
        f"{int(np.size(same) - np.count_nonzero(same)):,} of {ours.size:,} numbers differ, first "
        f"{ours[at]} and {theirs[at]} at {list(at)}"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _compare_metrics(
    experiment: Experiment, straight: Path, resumed: Path
) -> tuple[int, tuple[int, str] | None]:
    """Return how many metrics of updates were compared, and of the first that differs
    the update and a sentence. Those of episodes are left out: how many the runner has
    heard of by then is chance; and those of a replay memory's trainer, which are told now
    and then."""
    ours, theirs = (_updates(experiment, path) for path in (straight, resumed))
    count = 0
    for update, trainer in sorted(ours.keys() & theirs.keys()):
        others = theirs[update, trainer]
        for name, value in ours[update, trainer].items():
            count += 1
            other = others.get(name)
            if value != other and not (value != value and other is not None and other != other):
                return count, (update, f"metric {trainer}{name} of update {update}: {value} and {other}")
    return count, None


def _compare_measured(
    experiment: Experiment, straight: Path, resumed: Path
) -> tuple[int, tuple[int, str] | None]:
    """Return how many numbers were compared that evaluations and populations have told of
    versions that training waits for, and of the first that differs a sentence, with the
    last update. What was just under way when a run ended may be there or not."""
    ours, theirs = (_measured(experiment, path) for path in (straight, resumed))
    ends = [
        int(read_newest(run / "checkpoints" / policy).facts["steps"])
        for run in (straight, resumed)
        for policy in experiment.trained()
    ]
    count, last = 0, experiment.limits.updates or 0
    for step, name in sorted(ours.keys() | theirs.keys()):
        if step >= min(ends) and not {(step, name)} <= ours.keys() & theirs.keys():
            continue
        count += 1
        one, other = ours.get((step, name)), theirs.get((step, name))
        if one != other:
            return count, (last, f"metric {name} of env step {step}: {one} and {other}")
    return count, None


def _measured(experiment: Experiment, folder: Path) -> dict[tuple[int, str], float]:
    """Return what was told in `folder` of versions that training waits for, by env step
    and name."""
    several, policies = experiment.measured_by_several(), experiment.trained()
    names = {
        f"{group}/{name}" if name in several else name
        for group, config in experiment.workers.items()
        if any(config.awaited(policy) for policy in policies)
        for name in config.measures() or ()
    }
    return {
        (int(record["step"]), name): value
        for record in read_metrics(folder)
        for name, value in record.items()
        if among(name, names)
    }


def _updates(experiment: Experiment, folder: Path) -> dict[tuple[int, str], dict[str, float]]:
    """Return what updates have told in the run in `folder`, by their number and what
    precedes the names of their trainer's metrics: its own name where there are several
    kinds."""
    trainers = experiment.groups(TrainerConfig)
    found = {}
    for record in read_metrics(folder):
        for group, config in trainers.items():
            place = f"{group}-0/" if len(trainers) > 1 else ""  # equal ones tell as one
            told = {name: record[place + name] for name in config.measures() or () if place + name in record}
            if f"{place}update" in record and f"{place}limiter/started" not in record:
                found[int(record[f"{place}update"]), place] = told
    return found


def _forgotten(experiment: Experiment, folder: Path) -> str:
    """Return the first array that a trainer's learner no longer has once it was loaded
    from its checkpoint in `folder`, and how it differs; "" where none does."""
    for trainer in experiment.groups(TrainerConfig).values():
        found = read_newest(folder / "checkpoints" / trainer.policy)
        spaces = read_spaces(found.facts["spaces"])
        policy = experiment.policies[trainer.policy].build(spaces, 0)
        policy.load(found.arrays["policy"], int(found.facts["updates"]))
        algorithm = trainer.algorithm.at(0, 0.0).build(policy, 0)
        algorithm.load_state(found.arrays["algorithm"])
        for part, now in (("policy", policy.parameters()), ("algorithm", algorithm.state())):
            for name, array in sorted(found.arrays[part].items()):  # files have no order
                if text := _unequal(array, now[name]):
                    return f"{part}/{name}: {text}"
    return ""


def _made_anew(experiment: Experiment, straight: Path, resumed: Path) -> tuple[str, bool]:
    """Return how often lanes were made anew in each of two runs, with the first fault
    that was told, "" where none were; and whether that differs."""
    actors = actors_with_part(experiment)
    counts = [sum(int(read_part_of(run, name)["restarts"]) for name in actors) for run in (straight, resumed)]
    if not any(counts):
        return "", False
    told = [event.cause for run in (straight, resumed) for event in read_events(run)]
    fault = next((text.partition(";")[0] for text in told if "made anew" in text), "")
    return (
        f"lanes were made anew {counts[0]} times in the {FIRST} run and {counts[1]} times in the {SECOND} "
        f"one{f' ({fault})' * bool(fault)}"
    ), counts[0] != counts[1]


def _cause(resumed: Path, ended: int, first: tuple[int, str] | None, forgotten: str, made_anew: str) -> str:
    """Return what most likely led to the differences."""
    cut = [event.cause for event in read_events(resumed) if "are cut, so that" in event.cause]
    if first is not None and first[0] <= ended:
        return made_anew or (
            f"the two runs differ before either was resumed ({first[1]}): something draws random numbers "
            "from elsewhere than its seed, or goes by the clock. tidemill check-env says whether it is the "
            "environment"
        )
    if forgotten:
        return (
            "what the trainer holds: the algorithm's load_state() does not take back all that its state() "
            f"returns ({forgotten})"
        )
    if cut:
        return f"the environment's episodes could not be brought back: {cut[0]}"
    when = f" The first metric that differs: {first[1]}." if first else ""
    return made_anew or (
        "something that is in no state: of the environment's state() its next steps do not follow, of the "
        "policy's random_state() what it draws, or of the algorithm's state() its next update; the first "
        f"difference lies nearest to it.{when}"
    )
