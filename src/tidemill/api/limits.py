"""The limits of a run: when it ends."""

from dataclasses import dataclass
from math import isfinite
from numbers import Real

from tidemill.api.conditions import check_condition
from tidemill.core.config import Config
from tidemill.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Limits(Config):
    """The limits of a run: it ends at whichever is reached first. None means no such
    limit.

    steps: env steps that entered training
    updates: finished updates
    seconds: wall time since training began; pauses do not count
    mean_return: mean undiscounted return of the last `window` finished episodes (of each
        agent spec that plays the policy)
    return_of: whose: a policy, or POLICY/AGENTS where several agent specs play it; needed
        where several policies are trained. "any": the first that reaches it
    until: a condition on what the run measures, e.g. "evaluation/return >= 475"; what is
        measured: see `tidemill.api.conditions`
    stall_s: seconds in which nothing was done that could bring a trainer to an update,
        after which the run ends as failed, with a checkpoint: no step, episode, update,
        evaluation, or writing of a checkpoint. Longer deadlines of environments and
        trainers (`deadline_s`, `ReplayTrainer.max_no_progress_s`) come first; pauses do
        not count
    """

    steps: int | None = None
    updates: int | None = None
    seconds: float | None = None
    mean_return: float | None = None
    return_of: str = ""
    window: int = 100
    until: str = ""
    stall_s: float | None = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.until:
            check_condition("limits.until", self.until)
        for name in ("seconds", "mean_return"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Real) and isfinite(value)):
                raise ConfigError(
                    f"limits.{name} = {value!r} is not a finite number; leave it out for no limit"
                )
        self.check_above_zero("steps", "updates", "seconds", "window", "stall_s")
        if self.return_of and self.mean_return is None:
            raise ConfigError(
                f'limits.return_of = "{self.return_of}" says whose mean return ends the run, and no '
                "limits.mean_return is set; set both"
            )
