"""The choice of a layout from measured costs. Nothing here measures anything:
`auto_layout` does."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tidemill.api.algorithm import AlgorithmConfig
from tidemill.api.experiment import Experiment
from tidemill.layouts.costs import Costs
from tidemill.layouts.experiment_layout import ActorsAndTrainers, layout_of
from tidemill.layouts.layout import Layout
from tidemill.streams.all_reduce import WHOLE
from tidemill.workers.trainer_config import HOSTS

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
    parts = ActorsAndTrainers(experiment)
    known = [costs] * cores + list(elsewhere)
    algorithm = parts.trainers.algorithm
    minibatch = int(getattr(algorithm, "minibatch_size", 0))
    most_trainers = max(1, minibatch) if costs.parallel else 1
    lag = parts.trainers.max_policy_lag
    slowest = max(known or [costs], key=lambda each: each.train)

    def training(trainers: int) -> float:
        """The env steps/s of so many trainers."""
        where = costs if trainers == 1 else slowest
        by_host = parts.trainers.sums == HOSTS
        return 1 / (costs.rows * trained(algorithm, where, trainers, min(hosts, trainers), by_host))

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


def trained(
    algorithm: AlgorithmConfig, costs: Costs, trainers: int, hosts: int = 1, by_host: bool = False
) -> float:
    """Return the seconds in which so many equal trainers, on so many hosts, train on a
    row, all epochs: each has its share of the rows, all of what a minibatch costs
    besides, and the sums, which may be added `by_host` first."""
    rows, epochs = int(getattr(algorithm, "minibatch_size", 1)), int(getattr(algorithm, "epochs", 1))
    others = trainers - 1
    # large sums are cut, so that nobody reads more than twice their size
    sums = others * SUM + min(others, 2) * SUMMED_BYTE * costs.sums
    if hosts > 1:
        here = -(-trainers // hosts)  # each of them hears each that is elsewhere, or one for all does
        heard, among = (hosts - 1, hosts) if by_host else (here * (trainers - here), trainers)
        cut = min(1.0, 2 / among) if costs.sums > WHOLE else 1.0
        sums += SUM_ACROSS + BYTE_ACROSS * heard * cut * costs.sums
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
