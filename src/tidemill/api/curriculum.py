"""Conditions on what a run measures, and the curriculum, whose stages end by them: what
environments are asked for at their resets.

The controller alone knows the stage: it looks at the condition whenever something was
measured, and tells all workers (`EnterStage`). An episode counts for the stage in which
it began, so that what was under way does not end the next one. A resumed run takes its
stage from the metrics up to its checkpoint.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.core.config import Config
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.store.query import Query, among

PROGRESS = ("step", "update", "episodes", "time/seconds")
"""What is known of every run: env steps and updates of training, finished episodes,
seconds of training. Conditions may also be about what the last `Limits.window` episodes
have reached once this stage has seen so many (`episode_metrics`), and about what workers
say that they measure (`WorkerConfig.measures`: "kl" of `PPO`, "evaluation/return" of
`Evaluation`), by the names in metrics.jsonl; of trainers where there is one group of
them."""


def episode_metric(what: str, who: str) -> str:
    """Return the metric that says `what` ("return", "length", "win_rate", "info/NAME")
    the last episodes of `who` have reached: a policy, POLICY/AGENTS, or "" where there is
    one policy."""
    kind, slash, name = what.partition("/")
    end = name if slash else "" if what == "win_rate" else "mean"
    return "/".join(part for part in (kind, who) if part) + (f"/{end}" if end or slash else "")


def episode_metrics(who: str) -> tuple[str, ...]:
    """Return the metrics of the last episodes of `who`: "return/mean", "length/mean",
    "win_rate" and the family "info/", with the policy after the first word where there
    are several."""
    return tuple(episode_metric(what, who) for what in ("return", "length", "win_rate", "info/"))


def check_condition(setting: str, text: str) -> None:
    """Raise `ConfigError` unless `text` is a condition, such as "return/mean >= 200 and
    step > 50000"."""
    query = Query.parse(text)
    if query != Query(where=query.where) or not query.where:
        raise ConfigError(
            f'{setting} = "{text}" must be conditions alone, such as "return/mean >= 200 and step > 50000"'
        )


def check_measured(setting: str, text: str, measured: Collection[str] | None) -> None:
    """Raise `ConfigError` for a condition on what nobody measures. `measured` is None
    where that is not known yet."""
    for name, _, _ in Query.parse(text).where:
        if measured is not None and not among(name, measured):
            raise ConfigError(
                f'{setting} = "{text}" waits for "{name}", which nobody measures; '
                f"{did_you_mean(name, measured)}"
            )


def holds(text: str, values: Mapping[str, float]) -> bool:
    """Return whether a condition holds. What is not among `values`, or NaN, fulfils
    nothing."""
    where = Query.parse(text).where
    return bool(Query(where=where, order=where[0][0]).select([values], lambda known: known))


@dataclass(frozen=True, kw_only=True)
class Stage(Config):
    """A stage of a curriculum: what environments are asked for in it, and when it ends.

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
