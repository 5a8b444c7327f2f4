"""What the parts of an experiment cost on a core, as a probe has measured it."""

from typing import Any

import msgspec

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


def microseconds(seconds: float) -> str:
    """Return a cost in microseconds, with two figures."""
    value = seconds * 1e6
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"
