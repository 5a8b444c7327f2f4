"""Layouts: how many actors and trainers there are, which of them share processes, and how
many environments each actor steps."""

import re
from dataclasses import dataclass, fields
from typing import Any

from tidemill.core.errors import ConfigError, did_you_mean


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
