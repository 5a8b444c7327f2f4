"""`tidemill tune`: runs an experiment in layouts around the one that its costs advise,
and keeps the fastest.

Coarse first: every layout for half the time. Then the best few, and the one that would be
chosen, again, twice and by turns, so that they share what else the machine does.
"""

import ast
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from time import strftime
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tidemill.api.experiment import Experiment
from tidemill.bench.efficiency import MOST_DROPPED, run_for
from tidemill.core.config import encode
from tidemill.core.cores import cores
from tidemill.core.errors import ConfigError, Interrupted, RunError, TidemillError
from tidemill.core.secrets import hide
from tidemill.core.user_code_loading import refuse_while_loading
from tidemill.launchers.kinds import processor
from tidemill.layouts.auto_layout import costs_of, decided
from tidemill.layouts.choice import choose, promises
from tidemill.layouts.costs import Costs
from tidemill.layouts.experiment_layout import apply, layout_of, why_unchanged
from tidemill.layouts.layout import Layout
from tidemill.workers.trainer_config import Trainer

MOST = 10  # layouts to try
PROMISED = 4  # of those: as many as promise the most
LEAST_STEPS = 32  # samples are not cut shorter than this: advantages look ahead within a sample
FINALISTS, TURNS = 3, 2
UPDATES = 4  # a run has time for so many at least


@dataclass
class Trial:
    """One layout and what it reached: steps/s of the coarse run, then of each longer one.
    `failed` says why it could not run, "" if it could. `marks` are what it is known as.
    """

    layout: Layout
    marks: list[str] = field(default_factory=list)
    coarse: float = 0.0
    fine: list[float] = field(default_factory=list)
    failed: str = ""

    @property
    def speed(self) -> float:
        """Steps/s, of the longer runs where there were any."""
        return mean(self.fine) if self.fine else self.coarse


@dataclass
class Tuning:
    """A search: its trials in the order in which they were found, what is under way, how
    much of all is done, and the signal that ended it early."""

    experiment: Experiment
    costs: Costs
    cores: int
    trials: list[Trial]
    now: str = ""
    done: int = 0
    runs: int = 0
    interrupted: str = ""

    @property
    def ran(self) -> list[Trial]:
        """Those that have run well."""
        return [trial for trial in self.trials if trial.speed and not trial.failed]

    @property
    def best(self) -> Trial:
        """The fastest, of those that ran longer if any did. Raises `RunError` when none
        ran at all."""
        if not (ran := self.ran):
            raise RunError(
                f"no layout of {self.experiment.name} could be run; {self.trials[0].layout}: "
                f"{self.trials[0].failed}"
            )
        return max([trial for trial in ran if trial.fine] or ran, key=lambda trial: trial.speed)


def tune(
    experiment: Experiment,
    source: Path | None = None,
    seconds: float = 6.0,
    tell: Callable[[Tuning], None] = lambda _: None,
) -> Tuning:
    """Search the fastest layout of `experiment`; each run takes `seconds`, or half of
    that, and its start: longer ones where updates are so slow that few would be seen.
    `tell` hears of every change. A signal ends the search, with what has run by then:
    `Interrupted` when that is nothing.

    Raises `ConfigError` for an experiment that has more than one group of actors and one
    of trainers.
    """
    refuse_while_loading("tune(…)")
    if not 0 < seconds < 3600:
        raise ConfigError(f"--seconds {seconds:g} must be above 0, and less than an hour")
    experiment.check()
    try:
        whole = undivided(experiment)
    except ConfigError as error:
        raise ConfigError(f"{experiment.name} cannot be tuned, since {error}") from None
    costs, count = costs_of(experiment, source), cores()
    experiment, whole = decided(experiment, costs), decided(whole, costs)
    tuning = Tuning(experiment, costs, count, candidates(experiment, whole, costs, count))
    tuning.runs = len(tuning.trials) + TURNS * min(FINALISTS, len(tuning.trials))
    speed = max((speed for _, speed in promises(whole, costs, count)), default=0.0)
    if speed:
        seconds = max(seconds, 2 * UPDATES * layout_of(whole).rows / speed)

    def run(trial: Trial, length: float, what: str) -> float:
        tuning.now = f"{what}: {trial.layout}"
        tell(tuning)
        try:
            found = run_for(apply(experiment, trial.layout), source, length)
        except Interrupted:
            raise
        except TidemillError as error:
            trial.failed, speed = str(error).splitlines()[0], 0.0
        else:
            speed = found.steps_per_second
            if found.dropped >= MOST_DROPPED:
                trial.failed = f"{found.dropped:.0%} of its steps were dropped as too old"
        tuning.done += 1
        return speed

    try:
        _search(tuning, run, seconds)
    except (Interrupted, KeyboardInterrupt) as signal:
        if not tuning.ran:
            raise
        tuning.interrupted = signal.reason if isinstance(signal, Interrupted) else "Ctrl-C"
    tuning.now = ""
    tell(tuning)
    return tuning


def _search(tuning: Tuning, run: Callable[[Trial, float, str], float], seconds: float) -> None:
    """Run every layout for half of `seconds`, then the best few again."""
    for trial in tuning.trials:
        trial.coarse = run(trial, seconds / 2, f"coarse, {seconds / 2:.3g} s")
    able = [trial for trial in tuning.trials if not trial.failed]
    finalists = sorted(able, key=lambda trial: -trial.speed)[:FINALISTS] if len(able) > 1 else []
    finalists += [trial for trial in able if finalists and "auto" in trial.marks and trial not in finalists]
    tuning.runs = tuning.done + TURNS * len(finalists)
    for turn in range(TURNS):
        for trial in finalists[:: -1 if turn % 2 else 1]:
            if not trial.failed:
                trial.fine.append(run(trial, seconds, f"turn {turn + 1} of {TURNS}, {seconds:.3g} s"))


def undivided(experiment: Experiment) -> Experiment:
    """Return the experiment as one actor of all lanes beside one trainer: what every
    layout is made from."""
    own = layout_of(experiment)
    (trainer,) = experiment.groups(Trainer).values()
    if trainer.batch_size is not None:
        raise ConfigError(
            f"its batch_size is set ({trainer.batch_size:,}), so that batches would change with its layout; "
            "leave it out"
        )
    lanes = own.actors * own.ring * own.lanes
    threads = None if own.threads is None else 0
    return apply(
        experiment,
        Layout(
            actors=1,
            trainers=1,
            lanes=lanes,
            sample_steps=own.sample_steps,
            ring=1,
            slots=own.slots,
            threads=threads,
        ),
    )


def candidates(experiment: Experiment, whole: Experiment, costs: Costs, cores: int) -> list[Trial]:
    """Return the layouts to try, each once, the likeliest first. All have batches of the
    same rows."""
    chosen, given = choose(whole, costs, cores), layout_of(experiment)
    promised = sorted(promises(whole, costs, cores), key=lambda item: -item[1])
    kinds: dict[tuple[bool, int, int], Layout] = {}
    for layout, _ in promised:  # of those that differ in lanes alone, neighbours are looked at below
        kinds.setdefault((layout.together, layout.actors, layout.trainers), layout)
    found = [
        chosen,
        given,
        *list(kinds.values())[:PROMISED],
        *neighbours(chosen, least=min(LEAST_STEPS, layout_of(whole).sample_steps)),
    ]
    trials: dict[Layout, Trial] = {layout: Trial(layout) for layout in found if layout.rows == given.rows}
    trials[chosen].marks.append("auto")
    trials[given].marks.append("given")
    return list(trials.values())[:MOST]


def neighbours(layout: Layout, least: int) -> list[Layout]:
    """Return the layouts one change away: twice or half the lanes, with samples half or
    twice as long; slots; with threads, more or fewer targets of fewer or more lanes; with
    threads or several processes, each on one core or on every core."""
    found = []
    if layout.threads:
        for ring, lanes in ((2 * layout.ring, layout.lanes / 2), (layout.ring / 2, 2 * layout.lanes)):
            if lanes == int(lanes) and ring == int(ring):
                found.append(replace(layout, ring=int(ring), lanes=int(lanes), threads=int(lanes)))
        found.append(replace(layout, threads=max(1, layout.threads // 2)))
    else:
        if layout.lanes % 2 == 0:
            found.append(replace(layout, lanes=layout.lanes // 2, sample_steps=2 * layout.sample_steps))
        if layout.sample_steps % 2 == 0 and layout.sample_steps // 2 >= least:
            found.append(replace(layout, lanes=2 * layout.lanes, sample_steps=layout.sample_steps // 2))
    if layout.threads or layout.processes > 1:
        found.append(replace(layout, one_core=not layout.one_core))
    found += [
        replace(layout, slots=slots)
        for slots in (1, 2, 3)
        if slots != layout.slots and not (layout.together and slots == 3)
    ]
    return found


# ---- what is shown and written ---------------------------------------------------------


def table(tuning: Tuning) -> Table:
    """Return the trials, the fastest first, and what is under way."""
    head = (
        f"{tuning.experiment.name}: run {min(tuning.done + 1, tuning.runs)} of {tuning.runs}, {tuning.now}"
        if tuning.now
        else None
    )
    shown = Table("steps/s", "runs", "", "layout", box=SIMPLE_HEAD, caption=head, caption_justify="left")
    shown.columns[0].justify = "right"
    shown.columns[3].overflow = "fold"
    for trial in sorted(tuning.trials, key=lambda trial: (bool(trial.failed), not trial.fine, -trial.speed)):
        speed = "failed" if trial.failed else f"{trial.speed:,.0f}" if trial.speed else "–"
        runs = (
            ""
            if trial.failed
            else " ".join(f"{value:,.0f}" for value in trial.fine or [trial.coarse] if value)
        )
        layout = Text(str(trial.layout)) + Text(f"  {trial.failed}" if trial.failed else "", "red")
        shown.add_row(speed, runs, ", ".join(trial.marks), layout)
    return shown


def source_text(tuning: Tuning, out: Path, source: Path | None) -> str:
    """Return an experiment file with the best layout. `source` is the file that the
    experiment came from: its classes are needed."""
    best, experiment = tuning.best, tuning.experiment
    tuned = apply(experiment, best.layout)
    note = ""
    if not why_unchanged(tuned):
        (trainer,) = tuned.groups(Trainer)
        tuned = tuned.replace(together=(trainer,))
        note = (
            f'\n"together" names {trainer} alone: it has a process of its own, as before, and `--layout '
            "auto` lets the experiment be.\n"
        )
    content = hide(encode(tuned))
    literal = literal_of(content)
    try:
        equal = ast.literal_eval(literal) == content
    except ValueError:
        equal = False
    if not equal:
        raise ConfigError(
            "the experiment holds a number that no literal says (infinite, or none); it cannot be written as "
            "a file"
        )
    given = next(
        (trial for trial in tuning.trials if "given" in trial.marks and trial.speed and trial is not best),
        None,
    )
    gain = f", {best.speed / given.speed:.2f} times what it makes as it was given" if given else ""
    figures = "\n".join(
        f"    {trial.speed:12,.0f}  {trial.layout}"
        for trial in sorted(tuning.ran, key=lambda trial: -trial.speed)
    )
    load, imports = "", ""
    if source is not None:
        path = os.path.relpath(source.resolve(), out.resolve().parent)
        load = (
            f'load_file(Path(__file__).parent / {path!r}, "experiment file")  # whose classes the experiment '
            "may be made of\n\n"
        )
        imports = "from pathlib import Path\n\n"
    loader = "from tidemill.core.user_code_loading import load_file\n" if source is not None else ""
    cores = f"{tuning.cores} core{'s' * (tuning.cores > 1)}"
    machine = f"{processor()}, {cores}, Python {platform.python_version()}"
    return f'''"""{experiment.name}, as `tidemill tune` found it fastest: {best.speed:,.0f} env steps/s{gain}.

    tidemill train {out.name}:experiment

Machine: {machine}; {strftime("%Y-%m-%d")}
Costs: {tuning.costs.words(best.layout.lanes)}
Layout: {best.layout.words()}
{note}
Env steps/s of all that was tried{f" until {tuning.interrupted} ended the search" * bool(tuning.interrupted)}:

{figures}
"""

{imports}from tidemill import Experiment
from tidemill.core.config import decode
{loader}
{load}
def experiment() -> Experiment:
    """Return the tuned experiment."""
    return decode(Experiment, EXPERIMENT)


EXPERIMENT = {literal}
'''


def literal_of(value: Any, indent: int = 0) -> str:
    """Return plain data as Python source, a line for each part of what is too long for
    one."""
    text = repr(value)
    if len(text) + indent <= 100 or not isinstance(value, (dict, list)):
        return text
    pad = " " * (indent + 4)
    parts = (
        [f"{k!r}: {literal_of(v, indent + 4)}" for k, v in value.items()]
        if isinstance(value, dict)
        else [literal_of(v, indent + 4) for v in value]
    )
    first, last = "{}" if isinstance(value, dict) else "[]"
    return first + "\n" + "".join(f"{pad}{part},\n" for part in parts) + " " * indent + last


def check_out(out: Path, force: bool, source: Path | None) -> None:
    """Raise `ConfigError` when a file cannot be written there, before the search."""
    if out.suffix != ".py":
        raise ConfigError(f"--out {out}: an experiment file's name ends in .py")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}; make it first")
    if source is not None and out.resolve() == source.resolve():
        raise ConfigError(
            f"--out {out} is the file that the experiment comes from, and would need itself; name another"
        )
    if out.exists() and not force:
        raise ConfigError(f"--out {out} exists; name another file, or overwrite it with --force")


def write(tuning: Tuning, out: Path, source: Path | None) -> None:
    """Write the experiment file (see `source_text`); `check_out` comes first."""
    text = source_text(tuning, out, source)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from error
