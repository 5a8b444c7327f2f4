"""Conditions on what a run measures, such as "return/mean >= 200 and step > 50000":
limits and the stages of a curriculum end by them."""

from collections.abc import Collection, Mapping

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
