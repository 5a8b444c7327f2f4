"""Schedules: settings of an algorithm that change as a run goes on."""

from dataclasses import dataclass
from typing import overload

from tidemill.core.config import Config, acting
from tidemill.core.errors import ConfigError

MOST = 1e300


@dataclass(frozen=True)
class LinearSchedule(Config):
    """A linear schedule takes a setting from one value to another in a straight line, and
    leaves it there: ``PPO(learning_rate=LinearSchedule(3e-4, 0))``.

    start: the first value
    end: the last value
    to_step: env steps of the run after which it is `end`. None: at the end of the run, at
        `limits.steps` or `limits.updates`, whichever is reached first
    from_step: env steps of the run up to which it is `start`
    """

    start: float
    end: float
    to_step: int | None = None
    from_step: int = acting(
        0, lambda schedule: schedule.to_step is not None, "without to_step: it is counted back from there"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("start", "end"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not abs(value) <= MOST:
                raise ConfigError(f"{name} = {value!r} of a LinearSchedule must be a number")
        for name in ("to_step", "from_step"):
            value = getattr(self, name)
            if isinstance(value, float) and value.is_integer():  # 1e6
                object.__setattr__(self, name, int(value))
            elif not isinstance(value, int) and (value is not None or name == "from_step"):
                raise ConfigError(
                    f"{name} = {value!r} of a LinearSchedule must be a whole number of env steps"
                )
        self.check_least(from_step=0)
        if self.to_step is not None and self.to_step <= self.from_step:
            raise ConfigError(
                f"a LinearSchedule from step {self.from_step:,} to step {self.to_step:,} ends before it "
                "begins; set to_step above from_step, or leave it out to have the whole run"
            )

    def at(self, steps: int, progress: float) -> float:
        """Return the value after so many env steps, when the share `progress` of the run
        is over."""
        share = progress
        if self.to_step is not None:
            share = min(max((steps - self.from_step) / (self.to_step - self.from_step), 0.0), 1.0)
        return self.start * (1 - share) + self.end * share


@overload
def number(setting: float | LinearSchedule) -> float: ...
@overload
def number(setting: float | LinearSchedule | None) -> float | None: ...
def number(setting: float | LinearSchedule | None) -> float | None:
    """Return a setting of an algorithm that is learning: schedules have been turned into
    the numbers of now (`AlgorithmConfig.at`). Raises `TypeError` for one that has not."""
    if isinstance(setting, LinearSchedule):
        raise TypeError(f"{setting} has no value by itself; ask AlgorithmConfig.at first")
    return setting
