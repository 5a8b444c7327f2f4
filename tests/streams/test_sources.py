"""Where inline policies take their parameters from, over a real parameter database."""

import errno
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.workers.arena import SPACES, Arena, Games, judge
from tests.workers.world import Known, KnownPolicy

from tidemill import (
    ActorCritic,
    Actors,
    AgentSpec,
    Drawn,
    Evaluation,
    Experiment,
    Fixed,
    Newest,
    Scripted,
    Trainer,
)
from tidemill.algorithms.ppo import PPO
from tidemill.core.errors import ConfigError, DatabaseAway, RunError
from tidemill.store.query import Query
from tidemill.streams import sources
from tidemill.streams.sources import ParameterSource


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arena:
    monkeypatch.setattr(sources, "LOOK", 0.0)
    return Games(tmp_path)


def policy() -> Known:
    return KnownPolicy().build(SPACES, 0)


def subscription(arena: Arena, source: ParameterSource, name: str = "policy") -> Any:
    return source.build(arena.context("judge-0"), name, np.random.default_rng(3))


def drawn(arena: Arena, source: Drawn, times: int = 400) -> Counter[int]:
    """Return how often each version was drawn."""
    known, drawing = policy(), subscription(arena, source)
    found: Counter[int] = Counter()
    for _ in range(times):
        assert drawing.refresh(known)
        assert (known.parameters()["w"] == known.version).all()
        found[known.version] += 1
    return found


# ---- draws -----------------------------------------------------------------------------


def test_each_version_of_the_past_is_drawn_alike(arena: Arena) -> None:
    arena.push(0, 3, 12, 40)
    found = drawn(arena, Drawn())
    assert found.keys() == {0, 3, 12, 40}
    assert all(70 < count < 130 for count in found.values()), found


def test_draws_are_those_of_the_seed(arena: Arena) -> None:
    arena.push(*range(6))
    known, other = policy(), policy()
    first, again = (subscription(arena, Drawn()) for _ in range(2))
    for _ in range(20):
        assert first.refresh(known) and again.refresh(other)
        assert known.version == other.version


def test_what_a_query_finds_is_drawn(arena: Arena) -> None:
    arena.push(*range(8))
    for version in range(6):
        arena.database.results.add("policy", version, {"win_rate": version / 10})
    assert drawn(arena, Drawn(among=Query(order="-win_rate", limit=2)), 50).keys() == {4, 5}
    assert drawn(arena, Drawn(among=Query.parse("win_rate > 0.15 and win_rate < 0.35")), 50).keys() == {2, 3}
    assert drawn(arena, Drawn(among=Query(limit=1)), 5).keys() == {7}, "the newest"


def test_while_a_query_finds_nothing_the_latest_is_played(arena: Arena) -> None:
    arena.push(0, 1)
    known, drawing = policy(), subscription(arena, Drawn(among=Query.parse("win_rate > 0.5")))
    assert drawing.refresh(known) and known.version == 1
    arena.push(2)
    assert drawing.refresh(known) and known.version == 2
    arena.database.results.add("policy", 0, {"win_rate": 0.9})
    assert drawing.refresh(known) and known.version == 0


def test_who_is_hard_to_beat_is_drawn_more_often_and_who_was_never_played_most(arena: Arena) -> None:
    arena.push(*range(4))
    for version, beats in ((0, [1.0, 0.0, 0.0, 0.0, 0.0]), (1, [1.0, 1.0, 0.0, 0.0, 0.0]), (2, 0.0)):
        arena.database.results.add("policy", version, {"evaluation/beats": beats})
    found = drawn(arena, Drawn(how="prioritised"), 800)
    # weights 0.2, 0.4, 0 and 1 of 1.6 in all: 100, 200, none and 500 of 800
    assert found[2] == 0 and 75 < found[0] < 125 and 160 < found[1] < 240 and 450 < found[3] < 550, found


def test_when_everybody_is_beaten_always_each_is_drawn_alike(arena: Arena) -> None:
    arena.push(0, 1)
    for version in (0, 1):
        arena.database.results.add("policy", version, {"evaluation/beats": 0.0})
    assert all(count > 30 for count in drawn(arena, Drawn(how="prioritised"), 100).values())


def test_a_tag_is_followed_and_before_it_points_to_any_the_latest(arena: Arena) -> None:
    known, drawing = policy(), subscription(arena, Drawn(tag="champion"))
    assert not drawing.refresh(known) and known.version == -1, "nothing was pushed"
    for version in (0, 1):
        arena.push(version)
        assert drawing.refresh(known) and known.version == version
    arena.database.tag("policy", "champion", 0)
    assert drawing.refresh(known) and known.version == 0
    arena.push(2)
    assert drawing.refresh(known) and known.version == 0
    arena.database.tag("policy", "champion", 2)
    assert drawing.refresh(known) and known.version == 2


def test_the_database_is_looked_at_now_and_then_and_no_file_is_read_twice(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LOOK", 1e9)
    arena.push(*range(4))
    known, drawing = policy(), subscription(arena, Drawn())
    seen = set()
    for _ in range(40):
        assert drawing.refresh(known)
        seen.add(known.version)
    for file in (arena.database.folder / "policy").iterdir():
        file.unlink()
    arena.push(4)
    assert seen == {0, 1, 2, 3}
    for _ in range(40):
        assert drawing.refresh(known) and known.version != 4


def test_versions_that_are_collected_between_the_look_and_the_draw_are_drawn_no_more(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LOOK", 1e9)
    arena.push(*range(20))
    known, drawing = policy(), subscription(arena, Drawn())
    assert drawing.refresh(known)
    before = known.version
    arena.push(20, 21)
    arena.database.collect("policy", 2)
    for _ in range(20):
        assert drawing.refresh(known)
        assert known.version in (before, 20, 21)
    assert known.version in (20, 21)


@pytest.mark.parametrize("exact", [False, True])
def test_while_the_database_is_away_what_was_drawn_last_is_played(
    exact: bool, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a share whose server has gone. An exact run would be another one then."""
    arena.push(3)
    monkeypatch.setattr(sources, "LOOK", 0.0 if exact else 1e-9)
    known, drawing = policy(), subscription(arena, Drawn())
    assert drawing.refresh(known) and known.version == 3
    arena.push(5)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", gone)
        if exact:
            with pytest.raises(DatabaseAway, match="Transport endpoint is not connected; look whether its"):
                drawing.refresh(known)
            return
        assert not drawing.refresh(known)
    assert known.version == 3
    assert drawing.refresh(known)


def gone(path: Path) -> bool:
    """Raise as the system does where a share's server is gone."""
    raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(path))


def test_when_all_that_is_drawn_is_collected_at_once_that_is_said(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena.push(0)
    drawing, newest = subscription(arena, Drawn()), [0]
    load = drawing._database.load

    def late(name: str, which: int | str) -> Any:
        newest[0] += 1
        arena.push(newest[0])
        arena.database.collect(name, 1)
        return load(name, which)

    monkeypatch.setattr(drawing._database, "load", late)
    with pytest.raises(
        RunError,
        match=r'policy "policy": 8 versions were drawn .* collected before it could be read; keep more',
    ):
        drawing.refresh(policy())


# ---- always the same -------------------------------------------------------------------


def test_fixed_parameters_are_a_file_s_or_the_untrained_ones(arena: Arena, tmp_path: Path) -> None:
    arena.push(5)
    arena.database.export("policy", 5, tmp_path / "5.safetensors")
    known = policy()
    fixed = subscription(arena, Fixed(file=str(tmp_path / "5.safetensors")))
    assert fixed.refresh(known) and known.version == 5 and (known.parameters()["w"] == 5).all()
    (tmp_path / "5.safetensors").unlink()
    assert fixed.refresh(known) and known.version == 5
    untrained = policy()
    assert subscription(arena, Fixed()).refresh(untrained) and untrained.version == 0


def test_a_file_that_holds_no_weights_is_refused_when_the_worker_is_built(
    arena: Arena, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("hello")
    for name, message in (
        ("none", "No such file"),
        ("text", "holds no weights of a policy"),
        (".", "it is a folder"),
    ):
        with pytest.raises(ConfigError, match=f"{message}.*written by tidemill params RUN export"):
            subscription(arena, Fixed(file=str(tmp_path / name)))


def test_a_file_of_another_policy_is_refused(arena: Arena, tmp_path: Path) -> None:
    config = ActorCritic()
    for name, hidden in (("a", (8,)), ("b", (8, 8))):
        arrays = config.replace(hidden=hidden).build(SPACES, 1).parameters()
        arena.database.push(name, 1, arrays)
        arena.database.export(name, 1, tmp_path / name)
    fixed = subscription(arena, Fixed(file=str(tmp_path / "a")))
    with pytest.raises(ConfigError, match='a is of another policy than "policy": '):
        fixed.refresh(config.replace(hidden=(8, 8)).build(SPACES, 1))
    other = config.replace(hidden=(8,)).build(SPACES, 2)
    assert fixed.refresh(other) and other.version == 1


# ---- what can be known at the start ----------------------------------------------------


def experiment(source: ParameterSource, evaluated: bool = True, **trainer: Any) -> Experiment:
    opponents = Actors(
        environment=Scripted(agents=2),
        agents=(AgentSpec(match="red_0"), AgentSpec(parameters=source, samples=None)),
    )
    workers = {"actor": opponents, "trainer": Trainer(algorithm=PPO(), **trainer)}
    return Experiment(
        name="sources",
        policies={"policy": ActorCritic()},
        workers={**workers, "judge": judge(), "evaluation": Evaluation(drawn=0.0)} if evaluated else workers,
    )


def test_what_is_known_of_versions_can_be_asked_for() -> None:
    where = (
        "version > 3 and age < 100 and env_steps > 5 and training_return > 2 and algorithm/learning_rate < 1 "
        "and evaluation/elo.n > 0"
    )
    for source in (
        Newest(),
        Drawn(),
        Drawn(how="prioritised"),
        Drawn(tag="best"),
        Drawn(among=Query.parse(where)),
    ):
        experiment(source).check()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            Drawn(among=Query(order="-evaluation/win_rat")),
            'asks for "evaluation/win_rat", which no version has; did you mean "evaluation/win_rate"',
        ),
        (Drawn(among=Query.parse("envsteps > 10")), 'asks for "envsteps".*did you mean "env_steps"'),
        (
            Drawn(how="prioritised", metric="evaluation/beat"),
            'asks for "evaluation/beat".*did you mean "evaluation/beats"',
        ),
    ],
)
def test_a_misspelt_field_is_refused_at_the_start(source: Drawn, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment(source).check()


def test_what_nobody_records_is_refused_at_the_start() -> None:
    experiment(Drawn(), evaluated=False).check()
    with pytest.raises(
        ConfigError,
        match=r'draws versions of policy .* asks for "evaluation/beats", which no version has; .* with '
        r"`drawn` NAME/win_rate",
    ):
        experiment(Drawn(how="prioritised"), evaluated=False).check()


def test_what_is_recorded_of_another_policy_cannot_be_asked_for() -> None:
    made = experiment(Drawn())
    other = Trainer(algorithm=PPO(), policy="other", samples="others")
    specs = (
        AgentSpec(match="red_0", policy="other", samples="others"),
        AgentSpec(policy="other", parameters=Drawn(how="prioritised"), samples=None),
    )
    more = {"other": Actors(environment=Scripted(agents=2), agents=specs), "other-trainer": other}
    with pytest.raises(
        ConfigError, match=r'other draws versions of policy "other": .* asks for "evaluation/beats"'
    ):
        made.replace(
            policies={**made.policies, "other": ActorCritic()}, workers={**made.workers, **more}
        ).check()


def test_a_draw_from_a_policy_whose_versions_nobody_keeps_is_refused_at_the_start() -> None:
    message = (
        'actor-0, judge-0, evaluation-0 draws policy "policy" from the parameter database, but no trainer '
        "stores .* set the database_seconds"
    )
    with pytest.raises(ConfigError, match=message):
        experiment(Drawn(), database_seconds=None).check()


def test_a_draw_needs_a_folder(arena: Arena) -> None:
    context = arena.context("judge-0")
    context.folder = None
    with pytest.raises(
        ConfigError, match='"policy" is drawn from the parameter database, but the run keeps no folder'
    ):
        Drawn().build(context, "policy", np.random.default_rng(0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"how": "best"}, 'how = "best" is not known; take one of uniform, prioritised'),
        ({"tag": "best", "how": "prioritised"}, 'tag = "best" is one version'),
        ({"tag": "best", "among": Query(limit=3)}, 'tag = "best" is one version'),
    ],
)
def test_draws_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Drawn(**settings)
