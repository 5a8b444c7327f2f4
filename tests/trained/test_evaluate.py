"""Evaluation: which episodes count, and what is made of them."""

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import tidemill
from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    EnvironmentConfig,
    Experiment,
    Fixed,
    Free,
    Gymnasium,
    GymnasiumVector,
    Limits,
    Scripted,
    Trainer,
)
from tidemill.api.spaces import Spaces, schema_of_space
from tidemill.core.clock import Clock
from tidemill.core.errors import ConfigError, EnvironmentFault, RunError
from tidemill.core.schema import Arrays, Field
from tidemill.envs.batch_lanes import BatchLanes
from tidemill.envs.lanes import LaneLoop
from tidemill.envs.step_limit import StepLimit
from tidemill.run.folder import RunFolder
from tidemill.streams.inline import InlineInferenceClient
from tidemill.testing.scripted import reward_of
from tidemill.trained.episode_player import Played, Player
from tidemill.trained.evaluate import EvaluationResult, _play, bootstrap, evaluate
from tidemill.trained.play import play


class Ticker:
    """In `Scripted`: the action is the tick mod 4, and the recurrent state counts the
    rows of the episode."""

    name = "ticker"
    version = 0
    state = {"state.rows": Field((), "int64")}  # noqa: RUF012

    def __init__(self, spaces: Spaces) -> None:
        self.spaces = spaces
        self.schema = {
            "action": Field((), "int64"),
            "log_prob": Field((), "float32"),
            "value": Field((), "float32"),
        }

    def client(self, rows: int) -> InlineInferenceClient:
        observation = schema_of_space(self.spaces.observation, "obs")
        policy: Any = self
        return InlineInferenceClient(policy, 0, None, self.schema, self.state, observation, rows, Clock())

    def act(self, observation: Arrays, state: Arrays, deterministic: bool, out: Arrays) -> None:
        row, tick = observation["obs"][:, 3], observation["obs"][:, 4]
        np.testing.assert_array_equal(state["state.rows"], row)
        out["action"][: len(tick)] = tick % 4
        out["state.rows"][: len(tick)] = row + 1


class Pusher(Ticker):
    """Always action 1."""

    state: dict[str, Field] = {}  # noqa: RUF012

    def act(self, observation: Arrays, state: Arrays, deterministic: bool, out: Arrays) -> None:
        out["action"][: len(observation["obs"])] = 1


def played(
    config: EnvironmentConfig,
    shares: list[int],
    kind: type[Ticker] = Ticker,
    max_steps: int = 0,
    split: bool = False,
) -> list[Played]:
    environment = config.build(len(shares), 5)
    if max_steps:
        environment = StepLimit(environment, max_steps)
    specs = (AgentSpec(match="red.*"), AgentSpec()) if split else (AgentSpec(),)
    policies: Any = [kind(agent.spaces) for agent in environment.agents[: len(specs)]]
    try:
        return _play(Player(environment, specs, policies, True), np.array(shares), quiet=True)
    finally:
        environment.close()


def expected(config: Scripted, lane: int, agent: int, episode: int) -> tuple[float, int]:
    """Return and length of a seat's episode when it acts by tick mod 4."""
    last = min(int(config.length(lane, episode)), int(config.death(lane, agent, episode)))
    ticks = [t for t in range(last) if t % config.turns == agent % config.turns]
    return float(sum(reward_of(lane, agent, episode, row, t % 4) for row, t in enumerate(ticks))), len(ticks)


@pytest.mark.parametrize(
    "config",
    [
        Scripted(),
        Scripted(agents=3, kinds=2, deaths=True),
        Scripted(agents=3, kinds=2, turns=2),
        Scripted(agents=2, kinds=2, deaths=True, turns=3),
        Scripted(agents=3, kinds=2, deaths=True, same_step=True),
        Scripted(delay=0.001),
    ],
    ids=repr,
)
def test_each_lane_plays_its_share_of_first_episodes_and_every_number_is_right(config: Scripted) -> None:
    shares = [3, 3, 2, 2, 2]
    found = played(config, shares, split=config.kinds == 2)
    wanted = Counter(
        (agent % config.kinds, lane, episode, *expected(config, lane, agent, episode))
        for lane, share in enumerate(shares)
        for episode in range(share)
        for agent in range(config.agents)
    )
    assert Counter((p.spec, p.lane, p.episode, p.ret, p.length) for p in found) == wanted


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_native_vector_environments_are_played_in_every_reset_mode(mode: str) -> None:
    games = GymnasiumVector(
        make=f"{Path(__file__).parents[1] / 'envs' / 'games.py'}:vector", kwargs={"mode": mode}
    )
    found = played(games, [2, 3, 1], Pusher)  # lane i plays games of 2 + i steps
    assert Counter((p.lane, p.episode, p.length) for p in found) == Counter(
        [(0, 0, 2), (0, 1, 2), (1, 0, 3), (1, 1, 3), (1, 2, 3), (2, 0, 4)]
    )
    assert len({(p.length, p.ret) for p in found}) == 3


def test_a_native_vector_environment_of_gymnasium_is_played() -> None:
    found = played(GymnasiumVector(id="CartPole-v1"), [2, 2, 1], Pusher)
    assert len(found) == 5
    # pushed to one side, the pole falls at once
    assert all(p.ret == p.length and 7 <= p.length <= 12 for p in found)


def test_episodes_are_cut_at_the_actors_limit() -> None:
    assert [(p.ret, p.length) for p in played(Free(agents=2), [2, 1], Pusher, max_steps=7)] == [(0.0, 7)] * 6
    games = GymnasiumVector(
        make=f"{Path(__file__).parents[1] / 'envs' / 'games.py'}:vector",
        kwargs={"mode": "Disabled", "lengths": (9, 3)},
    )
    found = played(games, [2, 3], Pusher, max_steps=4)
    assert Counter((p.lane, p.length) for p in found) == {(0, 4): 2, (1, 3): 3}


def test_an_interval_holds_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(60):
        low, high = bootstrap(rng.normal(3, 2, 50), np.ones(50, np.int64), 1) or (0.0, 0.0)
        held += low <= 3 <= high
    assert 50 <= held <= 60
    values = rng.normal(3, 2, 400)
    low, high = bootstrap(values, np.ones(400, np.int64), 1) or (0.0, 0.0)
    np.testing.assert_allclose(high - low, 2 * 1.96 * values.std() / 20, rtol=0.1)  # the normal approximation


def test_agents_of_one_episode_are_not_counted_as_independent() -> None:
    values = np.random.default_rng(0).normal(size=60)
    low, high = bootstrap(values, np.ones(60, np.int64), 1) or (0.0, 0.0)
    same = bootstrap(4 * values, np.full(60, 4), 1)  # four agents that always reach the same
    assert same is not None and np.allclose(same, (low, high))
    assert bootstrap(values[:1], np.ones(1, np.int64), 1) is None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experiment = Experiment(
        name="cartpole",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(
                environment=Gymnasium(id="CartPole-v1"), lanes=8, agents=(AgentSpec(sample_steps=32),)
            ),
            "trainer": Trainer(algorithm=PPO()),
        },
        limits=Limits(steps=3000),
    )
    return tidemill.train(
        experiment, launch="inline", run_dir=tmp_path_factory.mktemp("runs") / "run", quiet=True
    ).folder


def same(first: EvaluationResult, second: EvaluationResult) -> bool:
    return first.specs == second.specs


def test_a_run_is_evaluated_and_the_result_lies_in_its_folder(run: Path) -> None:
    found = evaluate(run, 12, lanes=5, quiet=True)
    spec = found.specs[0]
    assert (found.episodes, found.lanes, spec.episodes, len(spec.returns)) == (12, 5, 12, 12)
    assert spec.interval is not None and spec.interval[0] <= spec.mean <= spec.interval[1]
    assert spec.min == min(spec.returns) <= spec.mean == found.mean == pytest.approx(np.mean(spec.returns))
    assert spec.deviation == pytest.approx(np.std(spec.returns, ddof=1))
    assert spec.returns == spec.lengths  # CartPole pays 1 per step
    written = json.loads((run / f"evaluation-{spec.update}.json").read_bytes())
    assert written["specs"][0]["returns"] == spec.returns
    assert written["specs"][0]["interval"] == list(spec.interval)


def test_the_seed_decides(run: Path) -> None:
    first, again, other = (evaluate(run, 6, seed=s, deterministic=False, quiet=True) for s in (3, 3, 4))
    assert same(first, again)
    assert not same(first, other)


def test_there_are_never_more_lanes_than_episodes(run: Path) -> None:
    found = evaluate(run, 2, lanes=50, quiet=True)
    assert (found.lanes, found.specs[0].episodes) == (2, 2)
    one = evaluate(run, 1, quiet=True).specs[0]
    assert (one.deviation, one.interval) == (0.0, None)


def test_impossible_wishes_are_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="episodes = 0 must be at least 1"):
        evaluate(run, 0)
    with pytest.raises(RunError, match='no actors called "actr"; did you mean "actor"'):
        evaluate(run, 1, actor="actr")


def test_an_environment_that_calls_exit_does_not_end_the_callers_program(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(LaneLoop, "recv", Mock(side_effect=SystemExit(0)))
    for call in (lambda: evaluate(run, 1, quiet=True), lambda: play(run, tmp_path / "v.mp4")):
        with pytest.raises(EnvironmentFault, match=r"sys\.exit\(0\) was called by the environment"):
            call()


def test_an_exit_of_the_callers_own_signal_handler_is_the_callers(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object) -> None:
        raise SystemExit(3)

    before = signal.signal(signal.SIGUSR1, leave)
    try:
        monkeypatch.setattr(LaneLoop, "recv", lambda *_: signal.raise_signal(signal.SIGUSR1))
        with pytest.raises(SystemExit):
            evaluate(run, 1, quiet=True)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_environment_with_other_spaces_than_those_trained_in_is_refused(run: Path) -> None:
    config = (run / "config.json").read_text()
    try:
        (run / "config.json").write_text(config.replace("CartPole-v1", "Acrobot-v1"))
        with pytest.raises(RunError, match="something else than policy"):
            evaluate(run, 1, quiet=True)
    finally:
        (run / "config.json").write_text(config)


def test_each_spec_is_played_by_its_own_policy(tmp_path: Path) -> None:
    specs = tuple(AgentSpec(match=f"{c}.*", policy=c, samples=c, sample_steps=8) for c in ("red", "blue"))
    experiment = Experiment(
        name="two",
        policies={"red": ActorCritic(), "blue": ActorCritic(hidden=(8,))},
        workers={
            "actor": Actors(environment=Scripted(agents=4, kinds=2, deaths=True), lanes=4, agents=specs),
            **{
                f"{c}-trainer": Trainer(algorithm=PPO(epochs=1), policy=c, samples=c) for c in ("red", "blue")
            },
        },
        limits=Limits(updates=2),
    )
    run = tidemill.train(experiment, launch="inline", run_dir=tmp_path / "run", quiet=True).folder
    found = evaluate(run, 7, quiet=True)
    assert [(s.policy, s.agents, s.episodes) for s in found.specs] == [
        ("red", "red.*", 14),
        ("blue", "blue.*", 14),
    ]


def test_fixed_opponents_stay_what_they_are(tmp_path: Path) -> None:
    """An untrained one has no checkpoint; a file's weights are those of its policy's
    version, not the run's newest."""
    environment, kept = Scripted(agents=3), tmp_path / "kept.safetensors"
    specs = (
        AgentSpec(match="red_0", sample_steps=8),
        AgentSpec(match="red_1", policy="other", parameters=Fixed(), samples=None),
    )
    trainer = Trainer(algorithm=PPO(epochs=1, minibatch_size=8))
    policies = {"policy": ActorCritic(), "other": ActorCritic(hidden=(8,))}
    first = Experiment(
        name="first",
        policies=policies,
        workers={"actor": Actors(environment=Scripted(), lanes=4, agents=specs[:1]), "trainer": trainer},
        limits=Limits(updates=1),
    )
    trained = tidemill.train(first, launch="inline", run_dir=tmp_path / "first", quiet=True).folder
    RunFolder.open(trained).database().export("policy", "latest", kept)
    filed = AgentSpec(parameters=Fixed(file=str(kept)), samples=None)
    workers = {"actor": Actors(environment=environment, lanes=4, agents=(*specs, filed)), "trainer": trainer}
    run = tidemill.train(
        Experiment(name="run", policies=policies, workers=workers, limits=Limits(updates=4)),
        launch="inline",
        run_dir=tmp_path / "run",
        quiet=True,
    ).folder
    found = evaluate(run, 3, quiet=True)
    assert [(s.policy, s.update) for s in found.specs] == [("policy", 4), ("other", 0), ("policy", 1)]
    kept.write_bytes(b"no weights")
    with pytest.raises(ConfigError, match="holds no weights of a policy"):
        evaluate(run, 3, quiet=True)


def test_what_goes_wrong_in_the_environment_is_said_and_it_is_closed() -> None:
    with pytest.raises(EnvironmentFault, match="lane 1 raised ValueError"):
        played(Scripted(fault="raise", fault_tick=3), [2, 2])


def test_an_environment_that_raises_as_it_is_closed_costs_no_result(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = evaluate(run, 3, seed=5, quiet=True)
    for kind in (BatchLanes, LaneLoop):
        monkeypatch.setattr(kind, "close", Mock(side_effect=SystemExit(0)))
    assert same(evaluate(run, 3, seed=5, quiet=True), before)
    assert "warning: the environment raised SystemExit as it was closed: 0" in capsys.readouterr().err
