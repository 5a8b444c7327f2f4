"""The curriculum: stages that end by conditions, and what environments are asked for at
their resets in each.

The controller alone knows the stage: it looks at the condition whenever something was
measured, and tells all workers (`EnterStage`). An episode counts for the stage in which
it began, so that what was under way does not end the next one. A resumed run takes its
stage from the metrics up to its checkpoint.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from tidemill.api.conditions import check_condition, check_measured
from tidemill.core.config import Config
from tidemill.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Stage(Config):
    """A stage of a curriculum says what environments are asked for, and when it ends.

    options: plain data for the environments' resets, e.g.
        ``{"low": -0.1, "high": 0.1}``: Gymnasium's ``reset(options=…)``. A lane whose
        episode is under way finishes it in the stage in which it began
    until: the next stage begins once this holds, e.g. ``"evaluation/return >= 400"`` or
        ``"return/mean >= 200 and step > 50000"``; the last stage has none
    """

    options: dict[str, Any] = field(default_factory=dict)
    until: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.until:
            check_condition("until", self.until)


def check_curriculum(stages: Collection[Stage], measured: Collection[str] | None) -> None:
    """Raise `ConfigError` for a stage that could never end, or a condition on what nobody
    measures."""
    for number, stage in enumerate(stages, 1):
        if not stage.until and number < len(stages):
            raise ConfigError(
                f'curriculum: stage {number} of {len(stages)} has no end; set until, e.g. "return/mean >= '
                '200"'
            )
        if stage.until and number == len(stages):
            raise ConfigError(
                f'curriculum: the last stage cannot end; leave out until = "{stage.until}", or add a stage'
            )
        check_measured(f"curriculum: until of stage {number}", stage.until, measured)
