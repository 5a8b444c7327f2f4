"""Layouts: how many actors and trainers there are, which of them share processes, and how
many environments each actor steps.

`choose` finds one from measured costs, `apply` makes an experiment of it. Nothing here
measures anything: `auto_layout` does.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from tidemill.api.algorithm import AlgorithmConfig
from tidemill.api.experiment import Experiment
from tidemill.api.worker import WorkerConfig
from tidemill.core.config import LAYOUT, Config
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.envs.fault_tolerant import Slots
from tidemill.nets.choose_device import choose_device
from tidemill.replay_training.actor_config import ReplayActors
from tidemill.replay_training.trainer_config import ReplayTrainer
from tidemill.streams.all_reduce import WHOLE
from tidemill.workers.actor import INLINE, Actors
from tidemill.workers.trainer_config import Trainer

# core seconds of an actor's tick that do not grow with its lanes: the line through
# CartPole's ticks of 1, 4, 16 and 64 lanes
TICK = 40e-6
# 64 environments that sleep 5 ms reached, in a ring of 4, 8, 16 and 32 targets, 0.93,
# 0.95, 0.96 and 0.95 of what bare threads do where the actor kept to one core, and with
# every core, in a ring of 8 and 16, 0.92 and 0.89. That is: seconds of a tick of threads
# beside its lanes: wake-ups, and waits for Python's lock; on one core, or every
WAKING = {True: 130e-6, False: 220e-6}
HANDOVER = {True: 15e-6, False: 30e-6}  # and for each lane
COLD = 80e-6  # core seconds of a tick of one lane after a wait, without the lane's own
# Seconds by which a minibatch takes longer for each other trainer, and for each byte that
# they sum: a sum of 40 KB takes 22 µs, and the slower one is waited for; in runs both
# together were 100 to 200 (benchmarks/gradient_sums.py)
SUM, SUMMED_BYTE = 90e-6, 0.25e-9
# The same where trainers stand on several hosts: CartPole's 16 sums made an update of two
# hosts of one core each 41 ms longer, and the wire carries 0.43 GB/s, encrypted.
SUM_ACROSS, BYTE_ACROSS = 2.5e-3, 2.3e-9
# part of the gathering by which the slower of several processes is waited for: 3 ms of 60
# at CartPole's with 8 lanes
UNEVEN = 0.05
NEARLY = 0.05  # layouts that promise as much within this are equal: the one with fewer workers is taken,
ALMOST = 0.01  # and among those with as many, within this, the one with fewer targets
# an environment waits when its step takes so much longer than its work, and so long
WAIT_FACTOR, WAIT_SECONDS = 2.0, 0.5e-3


def waits(core: float, wall: float) -> bool:
    """Return whether a step that takes so many core seconds, and seconds, waits for
    something other than a core."""
    return wall > WAIT_FACTOR * core and wall > WAIT_SECONDS


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a probe measured.

    env: core seconds of an env step, without those of the tick:
    tick: core seconds of the environment in a tick, however many lanes step
    wall: seconds that pass in it, those in which others had the core not counted
    infer: core seconds per row acted on, without those of the calls:
    call: core seconds of the calls of policies in a tick, however many rows they answer
    train: core seconds per row trained on, all epochs, in whole minibatches
    rows: rows per env step
    parallel: whether equal trainers can share the algorithm
    threaded: whether the environment can be stepped in threads; known of those that wait
    one_core: whether lanes in threads are served as quickly by one core
    minibatch: core seconds of a minibatch that do not shrink with its rows
    sums: bytes of what equal trainers sum in each minibatch
    decided: policy → the settings that it left undecided, as they are quickest; `infer`,
        `call` and `train` are those of the policies that result
    """

    env: float
    wall: float
    infer: float
    call: float
    train: float
    rows: int
    parallel: bool
    threaded: bool = False
    one_core: bool = False
    minibatch: float = 0.0
    sums: int = 0
    decided: dict[str, dict[str, Any]] = {}
    tick: float = 0.0

    def __post_init__(self) -> None:
        for name in ("env", "wall", "infer", "train", "rows"):
            value = getattr(self, name)
            if not 0 < value < 1e6:
                raise ValueError(f"{name} = {value} is no cost")
        for name in ("call", "minibatch", "sums", "tick"):
            if not 0 <= (value := getattr(self, name)) < 1e12:
                raise ValueError(f"{name} = {value} is no cost")

    @property
    def waits(self) -> bool:
        """True when a step is spent waiting for something other than a core."""
        return waits(self.env, self.wall)

    def words(self, lanes: int) -> str:
        """Return the costs in words, per env step, with so many lanes in a target."""
        trained = microseconds(self.rows * self.train)
        return f"{self.acting(lanes)}, training {trained}" + ("" if self.waits else " on a core")

    def acting(self, lanes: int) -> str:
        """Return in words, as `words`, what an actor's part costs."""
        waited = (
            ", of which it waits "
            f"{microseconds(self.wall - self.env)}{'' if self.threaded else ' and takes no threads'}"
            if self.waits
            else ""
        )
        step = microseconds(self.wall if self.waits else self.env + self.tick / lanes)
        acted = microseconds(self.rows * self.infer + self.call / lanes)
        return f"a step takes {step} µs{waited}, inference {acted}"

    def decisions(self) -> str:
        """Return in words what was decided, "" where nothing was open."""
        return ", ".join(
            f"{policy}: {name} = {value}"
            for policy, settings in self.decided.items()
            for name, value in settings.items()
        )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout says how an experiment of one group of actors and one of trainers is laid
    out. Its text (`str`, `parse`) reproduces it exactly.

    actors, trainers: how many there are
    together: whether actor i and trainer i take turns in one process; an actor without a
        trainer of its number has a process of its own
    lanes, ring: environments of a target, targets of an actor
    sample_steps: rows by which a sample advances
    slots: sample slots per target
    threads: number of threads in which the lanes of a target step; None: the environment
        has no such setting
    one_core: whether each actor's process keeps to one core
    """

    actors: int
    trainers: int
    together: bool = False
    lanes: int
    sample_steps: int
    ring: int
    slots: int
    threads: int | None = None
    one_core: bool = False

    def __post_init__(self) -> None:
        if self.together and self.actors < self.trainers:
            raise ConfigError(
                f"--layout {self}: together needs an actor for each trainer, not {self.actors} for "
                f"{self.trainers}; make them equal, or leave together out"
            )

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return ",".join(
            name if value is True else f"{name}={value}"
            for name, value in values.items()
            if value is not None and value is not False
        )

    @property
    def processes(self) -> int:
        """The number of worker processes that it makes."""
        return self.actors if self.together else self.actors + self.trainers

    @property
    def rows(self) -> int:
        """Rows per agent of a batch."""
        return self.actors * self.ring * self.lanes * self.sample_steps

    def words(self) -> str:
        """Return the layout in words."""
        ring = f"{self.ring} × " if self.ring > 1 else ""
        where = " in threads" * bool(self.threads) + " on one core" * self.one_core
        lanes = f"{ring}{self.lanes} lane{'s' * (self.lanes > 1)} × {self.sample_steps} steps{where}"
        if self.together:
            if self.actors == 1:
                return f"1 process, an actor of {lanes} and a trainer by turns"
            if self.actors == self.trainers:
                return f"{self.actors} processes, each an actor of {lanes} and a trainer by turns"
            trainers = "a trainer by turns with one"
            if self.trainers > 1:
                trainers = f"{self.trainers} trainers by turns with as many"
            return f"{self.actors} processes, each an actor of {lanes}, and {trainers}"
        actors = f"{self.actors} actors, each of" if self.actors > 1 else "an actor of"
        return f"{actors} {lanes} beside {'a trainer' if self.trainers == 1 else f'{self.trainers} trainers'}"


EXAMPLE = "actors=2,trainers=2,together,lanes=32,sample_steps=64,ring=1,slots=1,threads=0"


def parse(text: str) -> Layout:
    """Return the layout that `text` says. Raises `ConfigError` naming what is wrong with
    it."""
    values: dict[str, Any] = {}
    marks = [f.name for f in fields(Layout) if f.default is False]
    numbers = [f.name for f in fields(Layout) if f.name not in marks]
    for item in text.split(","):
        name, equals, value = item.strip().partition("=")
        if name in values:
            raise ConfigError(f"--layout {text}: {name} is said twice")
        if name in marks and not equals:
            values[name] = True
            continue
        if name not in numbers or not equals:
            if len(text.split(",")) == 1 and not equals:
                raise ConfigError(
                    f'--layout {text}: there is no layout "{text}"; write auto, measure, given, or all of '
                    f"one, e.g. {EXAMPLE}"
                )
            hint = f"write {name}=NUMBER" if name in numbers else did_you_mean(name, [*numbers, *marks])
            raise ConfigError(f'--layout {text}: "{item}" is not a part of a layout; {hint}')
        least = 0 if name == "threads" else 1
        if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < least:
            raise ConfigError(
                f"--layout {text}: {name} = {value or 'nothing'} must be a whole number of at least {least}"
            )
        values[name] = int(value)
    if missing := [name for name in numbers if name not in values and name != "threads"]:
        raise ConfigError(
            f"--layout {text}: {', '.join(missing)} is missing; a layout is written out in full, e.g. "
            f"{EXAMPLE}"
        )
    return Layout(**values)


# ---- experiments -----------------------------------------------------------------------


class _Parts:
    """The one group of actors and the one of trainers of an experiment. Raises
    `ConfigError` for any other experiment, saying why."""

    def __init__(self, experiment: Experiment) -> None:
        groups = {
            kind: [(n, c) for n, c in experiment.workers.items() if type(c) is kind]
            for kind in (Actors, Trainer)
        }
        others = [name for name, config in experiment.workers.items() if type(config) not in groups]
        if others:
            raise ConfigError(f"it has workers of other kinds ({', '.join(others)})")
        for kind, found in groups.items():
            if len(found) != 1:
                raise ConfigError(f"it has {len(found)} groups of {kind.__name__}")
        (self.actor, actors), (self.trainer, trainer) = groups[Actors][0], groups[Trainer][0]
        assert isinstance(actors, Actors) and isinstance(trainer, Trainer)
        self.actors, self.trainers = actors, trainer
        if asked := [spec.inference for spec in actors.agents if spec.inference != INLINE]:
            raise ConfigError(f'its actors ask policy workers ("{asked[0]}")')
        self.sampled = [spec for spec in actors.agents if spec.streams]
        if modes := [spec.mode for spec in self.sampled if spec.mode != "fixed"]:
            raise ConfigError(f'its actors send samples of mode "{modes[0]}"')
        steps = {spec.sample_steps for spec in self.sampled}
        if len(steps) != 1:
            raise ConfigError(f"its agent specs have {len(steps)} different sample_steps")
        (self.steps,) = steps
        self.threads: int | None = getattr(actors.environment, "threads", None)
        """The environment's setting, None where it has none."""


def layout_of(experiment: Experiment) -> Layout:
    """Return the layout that an experiment has. Raises `ConfigError` where that is more
    than a `Layout` can say."""
    parts = _Parts(experiment)
    actors, trainers = parts.actors, parts.trainers
    return Layout(
        actors=actors.count,
        trainers=trainers.count,
        together=set(experiment.together) == {parts.actor, parts.trainer},
        lanes=actors.lanes,
        sample_steps=parts.steps,
        ring=actors.ring,
        slots=actors.slots,
        threads=parts.threads,
        one_core=actors.one_core,
    )


def apply(experiment: Experiment, layout: Layout) -> Experiment:
    """Return the experiment laid out so, and changed in nothing else. Raises
    `ConfigError` where that cannot be."""
    try:
        parts = _Parts(experiment)
    except ConfigError as error:
        raise ConfigError(
            f"--layout {layout}: the experiment cannot be laid out, since {error}; use --layout given"
        ) from None
    environment = parts.actors.environment
    if layout.threads is not None:
        if parts.threads is None:
            kind = type(environment).__name__
            raise ConfigError(
                f"--layout {layout}: a {kind} environment has no threads; leave threads={layout.threads} out"
            )
        environment = environment.replace(threads=layout.threads)
    specs = tuple(
        spec if not spec.streams else spec.replace(sample_steps=layout.sample_steps)
        for spec in parts.actors.agents
    )
    actors = parts.actors.replace(
        count=layout.actors,
        one_core=layout.one_core,
        lanes=layout.lanes,
        ring=layout.ring,
        flush_requests=1 if layout.ring * len(specs) == 1 else parts.actors.flush_requests,
        slots=layout.slots,
        agents=specs,
        environment=environment,
    )
    workers = {
        **experiment.workers,
        parts.actor: actors,
        parts.trainer: parts.trainers.replace(count=layout.trainers),
    }
    return experiment.replace(
        workers=workers, together=(parts.actor, parts.trainer) if layout.together else ()
    )


def of_layout(experiment: Experiment, paths: Collection[str]) -> list[str]:
    """Return those of the paths of settings that are a matter of layout: fields that are
    marked so (`layout_setting`), what lies in them, and workers as a whole."""
    return [path for path in paths if _lays_out(experiment, path.split("."))]


def _lays_out(config: Any, parts: list[str]) -> bool:
    for part in parts:
        if isinstance(config, Mapping):
            config = config.get(part)
            continue
        found = [each for each in fields(config) if each.name == part] if isinstance(config, Config) else []
        if not found or LAYOUT in found[0].metadata:
            return bool(found)
        config = getattr(config, part)
    return isinstance(config, WorkerConfig) or parts == ["workers"]


def why_unchanged(experiment: Experiment, fixed: Collection[str] = ()) -> str:
    """Return why an experiment is run as it is given, "" when its layout may be chosen.
    `fixed` are the paths of settings that the user made."""
    if own := of_layout(experiment, fixed):
        return f"{own[0]} was set"
    try:
        parts = _Parts(experiment)
    except ConfigError as error:
        return str(error)
    actors, trainers = f"workers.{parts.actor}", f"workers.{parts.trainer}"
    of_both = ((actors, parts.actors), (trainers, parts.trainers))
    reasons = (
        *((each.count > 1, f"{name}.count is {each.count}") for name, each in of_both),
        (experiment.together, "together is set"),
        *((each.math_threads > 1, f"{name}.math_threads is {each.math_threads}") for name, each in of_both),
        (parts.actors.ring > 1, f"{actors}.ring is {parts.actors.ring}"),
        *((each.one_core, f"{name}.one_core is set") for name, each in of_both),
        (parts.actors.environment.single, "there is one environment, and no more"),
        (parts.threads, f"{actors}.environment.threads is {parts.threads}"),
        (parts.trainers.batch_size is not None, f"{trainers}.batch_size is set"),
    )
    if why := next((reason for holds, reason in reasons if holds), ""):
        return why
    # the device is looked at last, since that may import torch
    device = choose_device("auto", 0) if parts.trainers.device == "auto" else parts.trainers.device
    if device != "cpu":  # costs are measured on cores
        return f"{trainers}.device is {device}"
    if not isinstance(getattr(parts.trainers.algorithm, "minibatch_size", None), int):
        return f"{type(parts.trainers.algorithm).__name__} has no minibatch_size"
    return ""


def by_turns(experiment: Experiment, fixed: Collection[str] = ()) -> Experiment:
    """Return an experiment with a replay memory and a ratio so that its actor and its
    trainer take turns in one process: all that is owed is trained before a tick of all
    lanes begins (a slack of as many), since lanes that step there gain nothing by being
    ahead, and a hand-over between processes takes longer than many an update. Others are
    returned as they are: with a slack of their own, several actors or trainers, other
    workers, or lanes that step in threads of Python or may fail."""
    kinds = {type(config): name for name, config in experiment.workers.items()}
    if (
        set(kinds) != {ReplayActors, ReplayTrainer}
        or len(experiment.workers) != 2
        or experiment.together
        or "together" in fixed
    ):
        return experiment
    actors, trainer = experiment.workers[kinds[ReplayActors]], experiment.workers[kinds[ReplayTrainer]]
    assert isinstance(actors, ReplayActors) and isinstance(trainer, ReplayTrainer)
    apart = isinstance(actors.environment, Slots) or bool(getattr(actors.environment, "threads", None))
    if (
        apart
        or trainer.ratio is None
        or trainer.slack is not None
        or (actors.count, trainer.count, actors.ring) != (1, 1, 1)
    ):
        return experiment
    workers = {**experiment.workers, kinds[ReplayTrainer]: trainer.replace(slack=actors.lanes)}
    return experiment.replace(workers=workers, together=(kinds[ReplayActors], kinds[ReplayTrainer]))


# ---- choosing --------------------------------------------------------------------------


def choose(
    experiment: Experiment, costs: Costs, cores: int, elsewhere: Sequence[Costs] = (), hosts: int = 1
) -> Layout:
    """Return the layout that promises the most env steps per second (see `promises`),
    among those that nearly do the one with the fewest parts.

    A batch is made of the same number of lanes, each as many steps long: shorter samples
    of more lanes would make cheaper ticks, but CartPole then took half as many env steps
    more to its mark. The experiment must be one for which `why_unchanged` has nothing to
    say. It is left as it is where an environment waits that cannot step in threads.
    """
    promised = list(promises(experiment, costs, cores, elsewhere, hosts))
    if not promised:
        return layout_of(experiment)
    near = _nearly(promised, NEARLY)
    parts = min(_parts(layout) for layout, _ in near)
    alike = [(layout, speed) for layout, speed in near if _parts(layout) == parts]
    return min((layout for layout, _ in _nearly(alike, ALMOST)), key=lambda layout: layout.ring)


def _parts(layout: Layout) -> tuple[bool, int, int]:
    return not layout.together, layout.processes, layout.trainers


def _nearly(promised: list[tuple[Layout, float]], share: float) -> list[tuple[Layout, float]]:
    most = max(speed for _, speed in promised)
    return [(layout, speed) for layout, speed in promised if speed >= most * (1 - share)]


def promises(
    experiment: Experiment, costs: Costs, cores: int, elsewhere: Sequence[Costs] = (), hosts: int = 1
) -> Iterator[tuple[Layout, float]]:
    """Yield the layouts that are possible on so many cores, and the env steps per second
    that each promises.

    `elsewhere`: what the parts cost on each core of other hosts, besides; `hosts`: on how
    many hosts these cores are. One trainer stands here; several, which the placement
    spreads over all hosts, sum across them, and are waited for where they are slowest.
    Actors take what is left, the fastest cores first. Where a batch is made
    of one sample of each actor, the slowest of those cores decides how long it takes, so
    that those of a slow host are used where they bring more than they hold up the others.
    Where actors may be ahead of the trainers, each adds what it does.
    """
    parts = _Parts(experiment)
    known = [costs] * cores + list(elsewhere)
    algorithm = parts.trainers.algorithm
    minibatch = int(getattr(algorithm, "minibatch_size", 0))
    most_trainers = max(1, minibatch) if costs.parallel else 1
    lag = parts.trainers.max_policy_lag
    slowest = max(known or [costs], key=lambda each: each.train)

    def training(trainers: int) -> float:
        """The env steps/s of so many trainers."""
        where = costs if trainers == 1 else slowest
        return 1 / (costs.rows * trained(algorithm, where, trainers, min(hosts, trainers)))

    # with a slot more actors gather while trainers learn, by weights of before
    slots = max(2, parts.actors.slots) if lag and lag >= 2 else parts.actors.slots
    if costs.waits:
        beside = _by_turns if lag == 0 or slots == 1 else min
        # where its work takes most of a step threads were not tried
        waiting = [each for each in (costs, *elsewhere) if each.waits]
        if parts.threads is None or not all(each.threaded for each in waiting):
            return
        one_core = all(each.one_core for each in waiting)
        for layout in _waiting(experiment, one_core, len(known), most_trainers, slots):
            gathered = _gathered(layout, costs, known, cores, lag == 0)
            yield layout, beside(gathered, training(layout.trainers))
        return
    # actors fill all slots, of two or more, while a sample waits for its update: its
    # oldest row may be as many versions old as there are slots
    ahead = slots if lag is not None and lag >= slots >= 2 else 0
    for layout in _computing(experiment, len(known), most_trainers, ahead):
        speed = _by_turns if layout.together else min
        gathered = _gathered(layout, costs, known, cores, layout.together)
        yield layout, speed(gathered, training(layout.trainers))


def _gathered(layout: Layout, costs: Costs, known: Sequence[Costs], cores: int, in_step: bool) -> float:
    """Return the env steps/s of all actors. `known`: the costs on each core, the `cores`
    of the first trainer's host first, where they are `costs`. `in_step`: whether the
    slowest actor decides."""
    # those that take turns with a trainer stand with it, all but the first anywhere
    anywhere = max((pace(layout, each) for each in known), default=0.0)
    with_trainers = [pace(layout, costs), *[anywhere] * (layout.trainers - 1)] if layout.together else []
    free = sorted(pace(layout, each) for each in known[min(layout.trainers, cores) :])
    used = [*with_trainers, *free[: layout.actors - len(with_trainers)]]
    used = used or [pace(layout, costs)]  # an actor and a trainer may share the only core
    return len(used) / max(used) if in_step else sum(1 / each for each in used)


def pace(layout: Layout, costs: Costs) -> float:
    """Return the seconds in which an actor of a layout does an env step on a core where
    the parts cost so much."""
    if layout.threads:
        # measured by one lane
        own = max(costs.env - COLD, 0) + HANDOVER[layout.one_core] + costs.rows * costs.infer
        # what a tick of a target takes of its actor
        served = WAKING[layout.one_core] + costs.call + layout.lanes * own
        return max(costs.wall + served, layout.ring * served) / (layout.ring * layout.lanes)
    step = costs.wall if costs.waits else costs.env
    gather = step + costs.rows * costs.infer + (TICK + costs.tick + costs.call) / layout.lanes
    return gather * (1 + UNEVEN * (layout.together and layout.actors > 1))


def trained(algorithm: AlgorithmConfig, costs: Costs, trainers: int, hosts: int = 1) -> float:
    """Return the seconds in which so many equal trainers, on so many hosts, train on a
    row, all epochs: each has its share of the rows, all of what a minibatch costs
    besides, and the sums."""
    rows, epochs = int(getattr(algorithm, "minibatch_size", 1)), int(getattr(algorithm, "epochs", 1))
    others = trainers - 1
    # large sums are cut, so that nobody reads more than twice their size
    sums = others * SUM + min(others, 2) * SUMMED_BYTE * costs.sums
    if hosts > 1:
        here = -(-trainers // hosts)  # each of them hears each that is elsewhere
        heard = here * (trainers - here) * (min(1.0, 2 / trainers) if costs.sums > WHOLE else 1.0)
        sums += SUM_ACROSS + BYTE_ACROSS * heard * costs.sums
    besides = min(costs.minibatch * epochs / rows, costs.train)
    return (costs.train - besides) / trainers + besides + sums * epochs / rows


def _by_turns(acting: float, training: float) -> float:
    """Return the steps/s of actors and trainers that wait for each other."""
    return 1 / (1 / acting + 1 / training)


def _computing(experiment: Experiment, cores: int, most_trainers: int, ahead: int) -> Iterator[Layout]:
    """Processes that all gather, and then train, or some of them; where actors may be
    ahead of the trainers by so many slots (`Trainer.max_policy_lag`), these beside those,
    too: never more processes than cores."""
    own = layout_of(experiment)
    for actors in (n for n in range(1, cores + 1) if own.lanes % n == 0):
        apart = replace(own, actors=actors, lanes=own.lanes // actors)
        for trainers in (n for n in range(1, min(most_trainers, actors) + 1) if actors % n == 0):
            yield replace(apart, trainers=trainers, together=True, slots=1)
            if ahead and actors + trainers <= cores:
                yield replace(apart, trainers=trainers, slots=ahead)


def _waiting(
    experiment: Experiment, one_core: bool, cores: int, most_trainers: int, slots: int
) -> Iterator[Layout]:
    """Actors whose lanes step in threads, in a ring so that some step while others are
    served, beside trainers. As many lanes as were asked for."""
    own = replace(layout_of(experiment), slots=slots, one_core=one_core)
    for actors in (n for n in range(1, max(cores, 2)) if own.lanes % n == 0):
        share = own.lanes // actors
        for trainers in range(1, min(most_trainers, max(cores, 2) - actors, actors) + 1):
            for ring in (n for n in range(1, share + 1) if share % n == 0 and actors % trainers == 0):
                lanes = share // ring
                yield replace(own, actors=actors, trainers=trainers, ring=ring, lanes=lanes, threads=lanes)


def microseconds(seconds: float) -> str:
    """Return a cost in microseconds, with two figures."""
    value = seconds * 1e6
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"
