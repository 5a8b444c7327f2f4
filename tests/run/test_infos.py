"""What environments say in the info of an episode's last step becomes metrics, results of
evaluations, and what conditions and queries may name."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from pettingzoo import AECEnv, ParallelEnv
from tests.remote.served import client, serving
from tests.run.watching import EXPERIMENTS

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Drawn,
    Evaluation,
    Experiment,
    Gymnasium,
    GymnasiumVector,
    Limits,
    PettingZoo,
    Slots,
    evaluate,
)
from tidemill.api.environment import EnvironmentConfig
from tidemill.core.errors import ConfigError
from tidemill.core.user_code_loading import load_file
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.folder import RunFolder
from tidemill.run.resume_point import ResumePoint
from tidemill.store.query import Query
from tidemill.training.train import Result, train
from tidemill.workers.info_numbers import LONGEST, MOST, PACKED_INFO, InfoReader, pack, unpack

experiments = load_file(EXPERIMENTS, "test")

OBSERVATION, ACTION = gymnasium.spaces.Box(-1, 1, (1,), np.float32), gymnasium.spaces.Discrete(2)
SEEN = np.zeros(1, np.float32)
STEPS = 5
SAYS = {"info/score": 50.0, "info/is_success": 0.0, "info/terms/forward": 1.5, "info/lives_left_": 3.0}


class Telling(gymnasium.Env[Any, Any]):
    """Episodes of 5 steps. Its score is ten times the step; what else it says are numbers
    of several kinds, and what is none."""

    observation_space, action_space = OBSERVATION, ACTION

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps = 0
        return SEEN.copy(), {"score": -1.0, "begun": 1.0}

    def step(self, action: Any) -> Any:
        self.steps += 1
        says = {
            "score": 10 * self.steps,
            "is_success": False,
            "terms": {"forward": np.float32(1.5), "deep": {"er": {"est": 1.0}}},
            "lives left!": 3,
        }
        nothing = {"name": "telling", "nan": float("nan"), "many": np.ones(3), "nobody": None, "final_obs": 3}
        return SEEN.copy(), 1.0, self.steps == STEPS, False, {**says, **nothing}


class Refusing(Telling):
    """A success is what it calls one, whatever it pays; lane by lane it says something
    else."""

    def step(self, action: Any) -> Any:
        seen, _, done, cut, _ = super().step(action)
        return seen, -1.0, done, cut, {"success": np.bool_(True)}


class Generous(Telling):
    """Each of its rewards is one that float32 can tell, and their sum is none."""

    def step(self, action: Any) -> Any:
        seen, _, done, cut, says = super().step(action)
        return seen, 2e38, done, cut, says


class TellingBoth(ParallelEnv):  # type: ignore[type-arg]
    """The same of two agents, who are told apart."""

    possible_agents = ["a", "b"]  # noqa: RUF012
    metadata = {"name": "telling"}  # noqa: RUF012
    render_mode = None

    def observation_space(self, agent: str) -> Any:
        return OBSERVATION

    def action_space(self, agent: str) -> Any:
        return ACTION

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.game, self.agents = Telling(), list(self.possible_agents)
        self.game.reset()
        return {agent: SEEN.copy() for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        _, pay, done, _, info = self.game.step(None)
        agents = list(self.agents)
        if done:
            self.agents = []
        infos = {agent: {**info, "number": number} for number, agent in enumerate(agents)}
        return (
            {a: SEEN.copy() for a in agents},
            dict.fromkeys(agents, pay),
            dict.fromkeys(agents, done),
            dict.fromkeys(agents, False),
            infos,
        )


class TellingInTurn(AECEnv):  # type: ignore[type-arg]
    """The same of one agent whose turn it always is."""

    possible_agents = ["a"]  # noqa: RUF012
    metadata = {"name": "telling in turn"}  # noqa: RUF012
    render_mode = None

    def observation_space(self, agent: str) -> Any:
        return OBSERVATION

    def action_space(self, agent: str) -> Any:
        return ACTION

    def observe(self, agent: str) -> Any:
        return SEEN.copy()

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.game, self.agents, self.agent_selection = Telling(), ["a"], "a"
        self.game.reset()
        self.rewards, self.infos, self._cumulative_rewards = {"a": 0.0}, {"a": {}}, {"a": 0.0}
        self.terminations, self.truncations = {"a": False}, {"a": False}

    def step(self, action: Any) -> None:
        if self.terminations["a"]:
            self._was_dead_step(action)
            return
        _, pay, done, _, info = self.game.step(action)
        self.rewards, self.terminations, self.infos = {"a": pay}, {"a": done}, {"a": info}


def telling_vector(num_envs: int, autoreset_mode: Any) -> Any:
    return gymnasium.vector.SyncVectorEnv([Telling] * num_envs, autoreset_mode=autoreset_mode)


TELLING = Gymnasium(make=f"{__file__}:Telling")
ENVIRONMENTS: dict[str, EnvironmentConfig] = {
    "copies": TELLING,
    "threads": Gymnasium(make=f"{__file__}:Telling", threads=2),
    "agents in turn": PettingZoo(make=f"{__file__}:TellingInTurn"),
    **{
        f"vector, {mode}": GymnasiumVector(make=f"{__file__}:telling_vector", autoreset=mode)  # type: ignore[arg-type]
        for mode in ("next-step", "same-step", "disabled")
    },
}


def run(folder: Path, made: Experiment, **limits: Any) -> Result:
    limited = made.replace(limits=Limits(**{"window": 8, "updates": 8, **limits}))
    return train(limited, launch="inline", run_dir=folder, source=EXPERIMENTS, quiet=True)


def told(folder: Path, kind: str = "info/") -> dict[str, float]:
    """What the newest record says of episodes."""
    last = [record for record in read_metrics(folder) if "episodes" in record][-1]
    return {name: value for name, value in last.items() if name.startswith(kind)}


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_every_kind_of_environment_is_heard_at_its_episodes_ends(tmp_path: Path, kind: str) -> None:
    run(tmp_path / "run", experiments.experiment(ENVIRONMENTS[kind]))
    assert told(tmp_path / "run") == SAYS
    assert told(tmp_path / "run", "win_rate") == {"win_rate": 0.0}  # whatever it is paid: is_success says so
    assert told(tmp_path / "run", "length/") == {"length/mean": 5.0}


def test_a_server_is_heard(tmp_path: Path) -> None:
    with serving(Telling) as server:
        run(tmp_path / "run", experiments.experiment(client(server), lanes=2), updates=3)
    assert told(tmp_path / "run") == SAYS


@pytest.mark.parametrize("slots", [False, True])
def test_actors_of_a_replay_memory_hear(tmp_path: Path, slots: bool) -> None:
    environment = Slots(environment=TELLING) if slots else TELLING
    made: Experiment = experiments.from_memory(environment)
    run(tmp_path / "run", made, steps=200, updates=None)
    assert told(tmp_path / "run") == SAYS


def test_agents_are_told_apart(tmp_path: Path) -> None:
    made: Experiment = experiments.experiment(PettingZoo(make=f"{__file__}:TellingBoth"))
    specs = (AgentSpec(match="a", sample_steps=16), AgentSpec(match="b", samples=None))
    actor = made.workers["actor"].replace(agents=specs)  # type: ignore[call-arg]
    run(tmp_path / "run", made.replace(workers={**made.workers, "actor": actor}))
    found = told(tmp_path / "run")
    assert {name: found[name] for name in found if name.endswith("number")} == {
        "info/number": 0.5, "info/policy/a/number": 0.0, "info/policy/b/number": 1.0,
    }  # fmt: skip
    assert found["info/score"] == found["info/policy/a/score"] == 50.0


def test_an_episode_that_we_cut_is_heard_too_and_through_stacked_frames(tmp_path: Path) -> None:
    made: Experiment = experiments.experiment(TELLING, algorithm=PPO()).replace(
        policies={"policy": ActorCritic()}
    )
    actor = made.workers["actor"].replace(  # type: ignore[call-arg]
        max_episode_steps=3, agents=(AgentSpec(sample_steps=16, frame_stack=2),)
    )
    run(tmp_path / "run", made.replace(workers={**made.workers, "actor": actor}))
    assert told(tmp_path / "run")["info/score"] == 30.0


def test_a_success_is_what_the_environment_calls_one(tmp_path: Path) -> None:
    run(tmp_path / "run", experiments.experiment(Gymnasium(make=f"{__file__}:Refusing")))
    assert told(tmp_path / "run", "win_rate") == {"win_rate": 1.0} and told(tmp_path / "run", "return/") == {
        "return/mean": -5.0
    }


@pytest.mark.filterwarnings("ignore:overflow encountered")  # where actors add
def test_a_return_beyond_what_a_sample_can_hold_is_the_largest_that_it_can(tmp_path: Path) -> None:
    made: Experiment = experiments.experiment(TELLING)
    own = AgentSpec(parameters=Drawn(tag="evaluating"), mode="concise", samples="evaluation")
    judge = Actors(environment=Gymnasium(make=f"{__file__}:Generous"), lanes=2, agents=(own,))
    made = made.replace(workers={**made.workers, "judge": judge, "evaluation": Evaluation(games=4)})
    result = run(tmp_path / "run", made, until="evaluation/version >= 0", updates=None)
    assert result.summary["status"] == "completed"
    (first, *_) = [record for record in read_metrics(tmp_path / "run") if "evaluation/return" in record]
    assert first["evaluation/return"] == pytest.approx(float(np.finfo(np.float32).max))


def test_evaluations_conditions_and_queries_know_infos_and_so_does_a_resumed_run(tmp_path: Path) -> None:
    made: Experiment = experiments.experiment(TELLING)
    own = AgentSpec(parameters=Drawn(tag="evaluating"), mode="concise", samples="evaluation")
    judge = Actors(environment=TELLING, lanes=2, agents=(own,))
    made = made.replace(workers={**made.workers, "judge": judge, "evaluation": Evaluation(games=4)})
    until = "evaluation/info/score >= 50 and info/terms/forward > 1 and update > 2"
    result = run(tmp_path / "run", made, until=until, updates=None)
    assert result.summary["reason"] == until
    (last,) = [record for record in read_metrics(tmp_path / "run") if "evaluation/return" in record][-1:]
    said = {
        name.removeprefix("evaluation/"): value
        for name, value in last.items()
        if name.startswith("evaluation/info/")
    }
    assert said == SAYS
    query = Query.parse("evaluation/info/score > 49 and evaluation/info/score.n == 4")
    versions = RunFolder(tmp_path / "run").database().query("policy", query, list(made.recorded("policy")))
    assert versions and versions[0].means["evaluation/info/terms/forward"].mean == 1.5
    (spec,) = evaluate(tmp_path / "run", episodes=3, quiet=True).specs
    assert {f"info/{name}": value for name, value in spec.info.items()} == SAYS
    again = ResumePoint.of(RunFolder(tmp_path / "run"), made).progress
    again.begin(made)
    assert again.windows is not None
    assert {
        name: value for name, value in again.windows.metrics().items() if name.startswith("info/")
    } == SAYS


def test_a_condition_on_what_no_info_says_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", experiments.experiment(TELLING), until="info/scroe >= 50")
    assert (
        'waits for "info/scroe", which no info of the episodes so far has said; did you mean "info/score"'
        in capsys.readouterr().err
    )
    with pytest.raises(ConfigError, match='waits for "inof/score"'):
        experiments.experiment(TELLING).replace(limits=Limits(until="inof/score > 1")).check()


# ---- what is taken of an info ----------------------------------------------------------


def test_names_are_those_of_metrics_and_no_more_than_a_fixed_number_of_them() -> None:
    notices: list[str] = []
    listener = InfoReader(notices.append)
    assert listener.numbers({"a b": 1, "ä": True, 3: 2.0, "x" * 99: 4, "": 5}) == {
        "a_b": 1.0,
        "_": 1.0,
        "3": 2.0,
        "x" * LONGEST: 4.0,
    }
    assert listener.numbers(
        {"big": 10**400, "inf": float("inf"), "complex": 1j, "text": "1.5", "z": np.array(7)}
    ) == {"z": 7.0}
    assert listener.numbers({"api_key": 1, "secret": {"left": 2}, "keys_found": 3}) == {"keys_found": 3.0}
    assert listener.numbers(None) == listener.numbers([1]) == listener.numbers({}) == {}
    many = {f"n{number:03}": number for number in range(2 * MOST)}
    taken = listener.numbers(many)
    assert len(taken) == MOST - 6 and listener.numbers(many) == taken
    assert len(notices) == 1 and "left out" in notices[0]


def test_numbers_travel_in_rows_whatever_they_are_called() -> None:
    full = {f"{number:02}{'x' * (LONGEST - 2)}": -1e300 * number for number in range(MOST)}
    for numbers in ({}, {"score": 0.1}, full):
        value = pack(numbers)
        assert value.shape == PACKED_INFO.shape and unpack(value) == numbers
