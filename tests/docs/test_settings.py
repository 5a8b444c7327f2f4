"""The page of settings: each public configuration's settings stand there with their
defaults, or on a page of its own, and so do metrics."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import tidemill
from tidemill.api.curriculum import Stage
from tidemill.api.limits import Limits
from tidemill.core.config import Config
from tidemill.replay_training.trainer_config import ITERATION, LIMITER
from tidemill.workers.trainer_config import COUNTED

DOCS = Path(__file__).parents[2] / "docs"
ELSEWHERE = {
    "Asynchronous": "rest.md",
    "Drawn": "versions.md",
    "Fixed": "versions.md",
    "GAE": "experiments.md",
    "OpenEnv": "rest.md",
    "PrioritisedReplay": "off-policy.md",
    "Query": "versions.md",
    "RandomShift": "experiments.md",
    "Replay": "off-policy.md",
    "Rest": "rest.md",
    "Returns": "experiments.md",
    "SimulatorEnvironment": "simulators.md",
    "Slots": "async.md",
}
"""Where configurations have no section of their own on the page of settings: all their
settings are named there."""
CONFIGS: dict[str, type[Any]] = {
    name: found
    for name in tidemill.__all__
    if isinstance(found := getattr(tidemill, name), type)
    and issubclass(found, Config)
    and dataclasses.fields(found)
} | {"Limits": Limits, "Stage": Stage}


def sections() -> dict[str, dict[str, str]]:
    """Of each configuration with a section: its settings there, and their defaults as
    written. A class's section goes over those that it shares."""
    found: dict[str, dict[str, str]] = {}
    for section in (DOCS / "experiments.md").read_text().split("\n### ")[1:]:
        table = re.findall(r"^\| `(\w+)` \| (?:`(.*?)`)? *\|", section.split("\n## ")[0], re.MULTILINE)
        for name in re.findall(r"`(\w+)`", section.partition("\n")[0]):
            found.setdefault(name, {}).update(table)
    return {
        name: {**found["ActorCritic"], **table} if name == "RecurrentActorCritic" else table
        for name, table in found.items()
    }


def default(field: "dataclasses.Field[Any]") -> str:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    elif field.default is dataclasses.MISSING:
        return ""
    else:
        value = field.default
    short = {"AgentSpec": "AgentSpec()", "Limits": "Limits()", "Queue": "Queue()"}
    if isinstance(value, tuple) and value and isinstance(value[0], Config):
        return f"({short[type(value[0]).__name__]},)"
    return short.get(type(value).__name__, repr(value))


@pytest.mark.parametrize("name", sorted({*CONFIGS} - {*ELSEWHERE, "WorkerConfig"}))
def test_each_setting_has_its_default_on_the_page(name: str) -> None:
    assert sections()[name] == {field.name: default(field) for field in dataclasses.fields(CONFIGS[name])}


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_each_setting_is_named_on_the_page_of_its_own(name: str) -> None:
    text = (DOCS / ELSEWHERE[name]).read_text()
    assert (
        name in text
        and [f.name for f in dataclasses.fields(CONFIGS[name]) if not re.search(rf"\b{f.name}\b", text)] == []
    )


@pytest.mark.parametrize("name", ["PPO", "Impala", "DQN", "QRDQN", "SAC", "TD3"])
def test_what_an_algorithm_measures_is_on_the_page(name: str) -> None:
    told = re.findall(r"`([\w/]+)`", (DOCS / "experiments.md").read_text().split("in `metrics.jsonl`")[1])
    assert {*CONFIGS[name]().measures(), *COUNTED, "lag/mean", "lag/max"} <= {*told}


def test_what_a_ratio_measures_is_on_its_page() -> None:
    told = re.findall(r"`(?:limiter|iteration|…)/(\w+)`", (DOCS / "async.md").read_text())
    assert {name.partition("/")[2] for name in (*LIMITER, *ITERATION)} <= {*told}
