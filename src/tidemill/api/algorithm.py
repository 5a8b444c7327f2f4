"""The algorithm contract: what learns. The loop that calls it (a trainer worker does)::

algorithm = config.build(policy, seed)
while ...:
    algorithm.config = config.at(steps, progress)     # where it has schedules
    metrics = algorithm.update(samples, steps)        # one version more
    publish(policy.parameters())
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from inspect import signature
from math import isfinite
from typing import Any, ClassVar, NamedTuple, Self, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from tidemill.api.policy import Policy, PolicyConfig
from tidemill.api.schedule import LinearSchedule
from tidemill.core.config import Config
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.schema import Array, Arrays, Field, Schema

ROW_FIELDS: dict[str, Field] = {
    "on_reset": Field((), "bool"),  # first row of an episode
    "done": Field((), "bool"),  # final row of an episode that ended: no action
    "truncated": Field((), "bool"),  # final row of an episode that was cut: its value is the bootstrap value
    "reward": Field((), "float32"),  # caused by this row's action; 0 in final rows
    "version": Field((), "int64"),  # that acted; -1 in rows on which nothing acted (ended rows and fillers)
    # index of the policy that acted in the stream's list of names; -1 where none did
    "policy": Field((), "int16"),
    "info_mask": Field((), "bool"),  # 1 on the row whose action finished the episode
    "info.return": Field((), "float32"),  # undiscounted sum of the episode's rewards, where info_mask
    "info.length": Field((), "int32"),  # its number of actions, where info_mask
}
"""The fields that every row has, besides the observation (``obs...``), the answer
(``action...``, ``log_prob``, ``value``) and the recurrent state before acting
(``state...``)."""


ARRIVAL_FIELDS: dict[str, Field] = {**ROW_FIELDS, "voided": Field((), "bool")}
"""The fields of an arrival, a row of `ReplayActors`, which holds what was observed and
*what led to it*::

    row              0      1      2      …  T (final)     0 (next episode)
    obs              o_0    o_1    o_2       o_T           o_0
    on_reset         1      0      0         0             1
    action, version  -      a_0    a_1       a_T-1         -
    reward           0      r_1    r_2       r_T           0
    done|truncated   0      0      0         1             0
    info_mask        0      0      0         1             0

Nothing led to a row 0: its version is -1. Transition t is (obs of row t; action and
reward of row t + 1; obs of row t + 1; done of row t + 1). The answer's other fields are
as the action. A step that was lost is a row with `voided` set (version -1): the episode
was cut after the row before it. Either that row is the next episode's row 0, too (obs,
on_reset), or nothing else is in it, and the next row of this seat has on_reset. A seat
that was absent in the tick has a filler: version -1, policy -1,
neither on_reset nor voided. ``state...`` is what the policy remembers before it acts on
this row's observation.

Where the trainer that grants the steps has died and lives again, in its `life` n (from
1), episodes go on: the first row that it takes of one has on_reset, whichever row of the
episode that is. The first sample that an actor sends to it says so by its versions,
which are all -1 - n: what came before it was sent to a life before."""


FILLER: dict[str, int] = {"version": -1, "policy": -1}
"""What the fields of a filler row are, besides 0: rows of no seat's life, that stand
before its first one (burn-in) or after an episode (padding)."""


class Sample(dict[str, Array]):
    """A sample is a block of rows, as a mapping: field name → array [T, N, ...], time
    first, of N seats (agents × lanes) and T = burn_in + sample_steps + bootstrap rows
    (`AgentSpec`; with mode "full" the rows of one episode). `burn_in` and `bootstrap` are
    the numbers of rows at its start and end that are not trained on; `channel` tells
    through which of the consumer's channels it came. The arrays are views of the stream's
    memory, valid until the trainer releases the sample: copy what you keep.
    """

    burn_in: int = 0
    bootstrap: int = 1
    channel: int = 0

    def trained(self) -> NDArray[np.bool_]:
        """Return the [T, N] mask of the rows that enter a loss: not burn-in, not
        bootstrap, not final (ended or cut), and acted on."""
        mask: NDArray[np.bool_] = (self["version"] >= 0) & ~(self["done"] | self["truncated"])
        mask[: self.burn_in] = False
        mask[len(mask) - self.bootstrap :] = False
        return mask

    @property
    def advance(self) -> int:
        """Number of its rows, over all seats, that count towards a trainer's
        `batch_size`: all but burn-in rows, bootstrap rows and fillers. Final rows count.
        """
        fillers = (self["version"][self.burn_in :] < 0) & ~self["done"][self.burn_in :]
        return int(fillers.size - np.count_nonzero(fillers) - self.bootstrap * fillers.shape[1])


class PostProcessor(Config):
    """A post-processor computes fields from finished episodes, which the actor then adds
    to the episodes' rows (`AgentSpec.post`). It is its own configuration. `reads` names
    the fields of a row that it needs."""

    reads: ClassVar[tuple[str, ...]] = ()

    def fields(self) -> Schema:
        """Return what it makes: name → field. The rows have them as ``post.<name>``."""
        raise TypeError(f"{type(self).__name__} has no fields()")

    def process(self, episodes: Mapping[str, Array]) -> Arrays:
        """Return its fields, each [T, N, ...], of N finished episodes, each from its
        first row to its final one: `episodes` has the arrays [T, N, ...] that it reads,
        with fillers behind the final row of a shorter one."""
        raise TypeError(f"{type(self).__name__} has no process()")


class UpdateFault(RunError):
    """What an update computed is not finite: the rest of it is left out, and what that
    step would have changed is as it was before it.

    stage: which step of the update it was, as `Algorithm.trace` takes it
    minibatch: what `Algorithm.trace` does that step again with; {} where what is not
        finite came from an equal trainer
    """

    def __init__(self, text: str, stage: str, minibatch: Arrays) -> None:
        super().__init__(text)
        self.stage, self.minibatch = stage, minibatch


class TracedArray(NamedTuple):
    """A traced array is one that a step of an update has read or computed.

    kind: "input", "weights", "layer", "loss" or "gradient"
    name: the leaf, the weight, the layer or the part of the loss
    array: its numbers
    rows: the axis along which rows lie; None: none does
    place: where each of these rows lay, integers [n, 3]: sample, row and seat of it; None
        where they were drawn from a memory
    """

    kind: str
    name: str
    array: Array
    rows: int | None = None
    place: Array | None = None


class Algorithm(ABC):
    """An algorithm learns from samples: it changes its policy's parameters in place.

    batch_copies: how many copies of a batch an update makes, for the plan of memory; 0:
        it reads samples where they lie
    policy: the policy that learns
    config: what it is set to. One whose configuration has `changeable` settings, or
        such as may be schedules, reads these here in each update: a trainer gives it
        another configuration now and then
    hurried: whether an update that is under way is to end with the steps that it has
        done, since the run is about to be broken off; trainers set it, equal ones never:
        they undo it. One whose updates take many seconds asks between steps: else what
        was trained since the newest checkpoint is lost then
    """

    hurried: Callable[[], bool] = bool  # of nothing, False
    batch_copies: ClassVar[int] = 2

    policy: Policy
    config: "AlgorithmConfig"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        methods = [getattr(cls, name) for name in ("update", "parallel_update") if hasattr(cls, name)]
        for method in methods:
            if "progress" not in signature(method).parameters:
                continue
            raise ConfigError(
                f"{cls.__name__}.{method.__name__}(samples, progress) is given the env steps of the run now, "
                f"and no share of it; write {method.__name__}(samples, steps), and take a LinearSchedule for "
                "what was to fall with it"
            )

    @abstractmethod
    def update(self, samples: Sequence[Sample], steps: int) -> dict[str, float]:
        """Do one update (all its epochs) and return its metrics (names such as
        ``loss/policy``, ``kl``). Reads the samples' arrays no more once it returns.
        `steps` are the env steps that the run had come to before it. Does not touch
        `policy.version`. May raise `UpdateFault` where what it computes is not finite:
        training goes on with the next update then."""

    def trace(self, stage: str, minibatch: Arrays) -> Iterator[TracedArray]:
        """Do the step again that an `UpdateFault` was of, by the weights as they are;
        yield what it reads and computes, in order. An array may be rewritten when the
        next one is asked for. Only for looking: the state afterwards is no one's."""
        raise ConfigError(f"{type(self).__name__} has no trace(): its steps cannot be looked at again")

    def take_in(self, sample: Sample) -> None:
        """Look at rows (`ARRIVAL_FIELDS`) that a replay memory stores, once, in the order
        in which they are stored. Reads their arrays no more once it returns, and leaves
        the policy's parameters to the next `update`."""

    @abstractmethod
    def state(self) -> Arrays:
        """Return all besides the policy's parameters that a resumed run needs (optimiser
        moments, running scales, random streams)."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take back what `state` returned."""


class DataParallel(Algorithm):
    """A data-parallel algorithm can be run by several equal trainers in step, each on
    samples of its own: whatever decides how weights change is summed over all of them, so
    that their weights stay the same."""

    @property
    @abstractmethod
    def largest_sum(self) -> int:
        """Bytes of the largest array that `parallel_update` yields."""

    @abstractmethod
    def parallel_update(
        self, samples: Sequence[Sample], steps: int
    ) -> Generator[Array, None, dict[str, float]]:
        """Do one update and return its metrics. Yields each contiguous float32 or float64
        array that the trainers share; when it goes on, the array holds the sum over all
        of them. Each trainer yields arrays of the same number, shapes and dtypes,
        whatever rows it has."""

    def update(self, samples: Sequence[Sample], steps: int) -> dict[str, float]:
        """See `Algorithm.update`. A single trainer's arrays are their own sums."""
        return run_alone(self.parallel_update(samples, steps))

    def separate(self, rank: int) -> None:
        """Draw random numbers of one's own from now on. Called in each equal trainer but
        the first, by its `rank`, when all have taken back one state; in one that lives
        again by a larger number, once it has the state of another."""


def run_alone(update: Generator[Any, None, dict[str, float]]) -> dict[str, float]:
    """Run an update of a trainer without equals to its end, and return its metrics."""
    try:
        while True:
            next(update)
    except StopIteration as end:
        metrics: dict[str, float] = end.value
        return metrics


class AlgorithmConfig(Config):
    """The configuration of an algorithm: a subclass is what `Trainer.algorithm` takes. A
    setting of type ``float | LinearSchedule`` may be either."""

    ranges: ClassVar[Mapping[str, tuple[float, float, str]]] = {}
    """The least and the most of each number, and a word of advice."""
    changeable: ClassVar[Collection[str]] = ()
    """The numbers that may change while a run goes on: see `Algorithm.config`. A subclass
    whose learner reads some of them only when it is built sets this anew without
    those."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (low, high, advice) in self.ranges.items():
            setting = getattr(self, name)
            ends = (setting.start, setting.end) if isinstance(setting, LinearSchedule) else (setting,)
            for value in ends:
                if not isinstance(value, float | int | np.floating | np.integer | None):
                    raise ConfigError(
                        f"{name} = {value!r} is no number; {advice}. What falls or rises as a run goes on is "
                        "a LinearSchedule(start, end)"
                    )
                if value is not None and not (isfinite(value) and low <= value <= high):
                    raise ConfigError(f"{name} = {value} is not between {low:g} and {high:g}; {advice}")
        if self.schedules:
            hints = get_type_hints(type(self))
            known = [name for name, hint in hints.items() if LinearSchedule in get_args(hint)]
            for name in self.schedules.keys() - known:
                raise ConfigError(
                    f"{name} of {type(self).__name__} cannot be a schedule; write a number. These can be: "
                    f"{', '.join(known) or 'none'}"
                )

    @cached_property
    def schedules(self) -> dict[str, LinearSchedule]:
        """The settings that are schedules, by name."""
        settings = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in settings.items() if isinstance(value, LinearSchedule)}

    def at(self, steps: int, progress: float) -> Self:
        """Return this configuration as it is after so many env steps, when the share
        `progress` of the run is over: with a number in place of each schedule."""
        if not self.schedules:
            return self
        now = object.__new__(type(self))  # a tenth of what `copy` takes
        vars(now).update(vars(self))
        # checked already: what lies between two values that are in range is, too
        for name, schedule in self.schedules.items():
            object.__setattr__(now, name, schedule.at(steps, progress))
        object.__setattr__(now, "schedules", {})
        return now

    def measures(self) -> tuple[str, ...] | None:
        """Return the names of the metrics that updates return, so that conditions on them
        (`Limits.until`, `Stage.until`) are checked at start; None: nobody knows before
        the first update."""
        return None

    def check_endless(self) -> None:
        """Raise `ConfigError` for settings that depend on the share of the run that is
        over. Called where neither `limits.steps` nor `limits.updates` is set, so that the
        share is unknown."""
        for name, schedule in self.schedules.items():
            if schedule.to_step is None:
                raise ConfigError(
                    f"{name} = {schedule} goes on to the end of the run, and nobody knows where that is "
                    "without limits.steps or limits.updates; set one of them, or its to_step"
                )

    @classmethod
    def in_env_steps(cls, data: dict[str, Any], steps_of: Callable[[float], int]) -> dict[str, Any]:
        """Return what an earlier version has saved as `data` of this kind, with what it
        counted in updates counted in env steps, of which `steps_of` tells."""
        return data

    def check_made(self, names: Collection[str]) -> None:
        """Raise `ConfigError` for settings that have no effect on rows to which
        post-processors have added ``post.NAME`` for each NAME in `names`."""

    def check_policy(self, policy: PolicyConfig) -> None:
        """Raise `ConfigError` for settings that have no effect on what `policy`
        builds."""

    def build(self, policy: Policy, seed: int) -> Algorithm:
        """Return the algorithm that trains `policy`. Schedules are what they are at step
        0, until its `config` is set."""
        raise TypeError(f"{type(self).__name__} has no build()")
