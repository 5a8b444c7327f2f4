"""The curriculum: stages change where their conditions hold, environments read them at
resets, a resumed run goes on in its stage."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from pettingzoo import AECEnv, ParallelEnv
from rich.console import Console
from tests.run.watching import EXPERIMENTS

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    GymnasiumVector,
    Impala,
    Limits,
    PettingZoo,
    Scripted,
    Stage,
    evaluate,
)
from tidemill.api.algorithm import Algorithm, AlgorithmConfig, Sample
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.policy import Policy
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.user_code_loading import load_file
from tidemill.metrics.json_lines import read_metrics
from tidemill.run import run_lifecycle as life
from tidemill.run.folder import RunFolder
from tidemill.run.live_view import make_view, picture
from tidemill.run.resume_point import ResumePoint
from tidemill.training.train import Result, resume, train

experiments = load_file(EXPERIMENTS, "test")

OBSERVATION, ACTION = gymnasium.spaces.Box(-1, 1, (1,), np.float32), gymnasium.spaces.Discrete(2)
SEEN = np.zeros(1, np.float32)


class Paying(gymnasium.Env[Any, Any]):
    """Episodes of 5 steps, each paid what the reset's options said (0 without): an
    episode pays the same from its first step to its last."""

    observation_space, action_space = OBSERVATION, ACTION

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.pay, self.steps = (options or {}).get("pay", 0.0), 0
        return SEEN, {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return SEEN, self.pay, self.steps == 5, False, {}


class Taking(Paying):
    """Its resets leave nothing of their options."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        answer = super().reset(seed=seed, options=options)
        (options or {}).clear()
        return answer


class PayingBoth(ParallelEnv):  # type: ignore[type-arg]
    """The same for two agents at once."""

    possible_agents = ["a", "b"]  # noqa: RUF012
    metadata = {"name": "paying"}  # noqa: RUF012
    render_mode = None

    def observation_space(self, agent: str) -> Any:
        return OBSERVATION

    def action_space(self, agent: str) -> Any:
        return ACTION

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.game, self.agents = Paying(), list(self.possible_agents)
        observation, _ = self.game.reset(options=options)
        return dict.fromkeys(self.agents, observation), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        observation, pay, done, cut, _ = self.game.step(None)
        told = tuple(dict.fromkeys(self.agents, value) for value in (observation, pay, done, cut, {}))
        if done:
            self.agents = []
        return told


class PayingInTurn(AECEnv):  # type: ignore[type-arg]
    """The same for one agent whose turn it always is."""

    possible_agents = ["a"]  # noqa: RUF012
    metadata = {"name": "paying in turn"}  # noqa: RUF012
    render_mode = None

    def observation_space(self, agent: str) -> Any:
        return OBSERVATION

    def action_space(self, agent: str) -> Any:
        return ACTION

    def observe(self, agent: str) -> Any:
        return SEEN

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.game, self.agents, self.agent_selection = Paying(), ["a"], "a"
        self.game.reset(options=options)
        self.rewards, self.infos = {"a": 0.0}, {"a": {}}
        self._cumulative_rewards = {"a": 0.0}
        self.terminations, self.truncations = {"a": False}, {"a": False}

    def step(self, action: Any) -> None:
        if self.terminations["a"]:
            self.agents, self.rewards = [], {}
            return
        _, pay, done, _, _ = self.game.step(action)
        self.rewards, self.terminations = {"a": pay}, {"a": done}


def paying_vector(num_envs: int, autoreset_mode: Any) -> Any:
    return gymnasium.vector.SyncVectorEnv([Paying] * num_envs, autoreset_mode=autoreset_mode)


class Deaf(Paying):
    """Takes no options."""

    def reset(self, *, seed: int | None = None) -> Any:
        return super().reset(seed=seed)


class Deafening(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that hands none on."""

    def reset(self, *, seed: int | None = None) -> Any:
        return self.env.reset(seed=seed)


def deafened() -> Any:
    return Deafening(Paying())


STAGES = (
    Stage(options={"pay": 1.0}, until="return/mean >= 5"),
    Stage(options={"pay": 2.0}, until="step >= 400"),
    Stage(options={"pay": 3.0}),
)


def paying(environment: EnvironmentConfig | None = None, **changes: Any) -> Experiment:
    made: Experiment = experiments.experiment(environment or Gymnasium(make=f"{__file__}:Paying"))
    return made.replace(**{"curriculum": STAGES, **changes})


def learning() -> Experiment:
    made: Experiment = experiments.experiment(Gymnasium(make=f"{__file__}:Paying"), algorithm=PPO())
    return made.replace(curriculum=STAGES, policies={"policy": ActorCritic()})


def run(
    folder: Path, made: Experiment, launch: str = "inline", quiet: bool = True, window: int = 4, **limits: Any
) -> Result:
    return train(
        made.replace(limits=Limits(window=window, **limits)),
        launch=launch,
        run_dir=folder,
        source=__file__,
        quiet=quiet,
    )


def returns(folder: Path) -> list[float]:
    return [record["return/mean"] for record in read_metrics(folder) if "return/mean" in record]


def check_stages(folder: Path) -> None:
    records = read_metrics(folder)
    stages = [record["curriculum/stage"] for record in records]
    assert stages == sorted(stages) and set(stages) == {1.0, 2.0, 3.0}
    assert records[stages.index(3.0) - 1]["step"] >= 400
    reached = returns(folder)
    assert reached == sorted(reached) and reached[-1] == 15.0
    assert set(reached) <= {5.0, 10.0, 15.0}  # of episodes of one stage


@pytest.mark.parametrize("launch", ["inline", "processes"])
def test_stages_follow_one_another_and_are_read_at_resets(tmp_path: Path, launch: str) -> None:
    """The run ends once episodes of the last stage are known: when somebody in another
    process hears of a stage is a matter of time."""
    result = run(tmp_path, paying(), launch, until="return/mean >= 15")
    check_stages(tmp_path)
    assert result.summary["stage"] == "3 of 3"


ENVIRONMENTS: dict[str, EnvironmentConfig] = {
    "taking": Gymnasium(make=f"{__file__}:Taking"),
    "threads": Gymnasium(make=f"{__file__}:Paying", threads=2),
    "agents at once": PettingZoo(make=f"{__file__}:PayingBoth"),
    "agents in turn": PettingZoo(make=f"{__file__}:PayingInTurn"),
    "vector": GymnasiumVector(make=f"{__file__}:paying_vector", autoreset="disabled"),
}


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_every_kind_of_environment_that_takes_options_gets_them(tmp_path: Path, kind: str) -> None:
    run(tmp_path, paying(ENVIRONMENTS[kind]), steps=1500)
    check_stages(tmp_path)


def test_episodes_count_for_the_stage_in_which_they_began(tmp_path: Path) -> None:
    stages = (
        Stage(options={"pay": 3.0}, until="return/mean >= 15"),
        Stage(options={"pay": 1.0}, until="return/mean > 5"),
        Stage(),
    )
    # what was under way when the second one began was paid more
    run(tmp_path, paying(curriculum=stages), steps=1000, window=16)
    records = read_metrics(tmp_path)
    assert records[-1]["curriculum/stage"] == 2.0 and records[-1]["return/mean"] == 5.0
    assert {r["return/mean"] for r in records if "return/mean" in r} <= {15.0, 5.0}  # no mean of both


def test_stacked_frames_leave_the_options_alone(tmp_path: Path) -> None:
    made = learning()
    actors = made.workers["actor"]
    assert isinstance(actors, Actors)
    stacked = actors.replace(agents=(AgentSpec(frame_stack=2, sample_steps=16),))
    run(tmp_path, made.replace(workers={**made.workers, "actor": stacked}), steps=1500)
    check_stages(tmp_path)


def test_a_resumed_run_goes_on_in_its_stage(tmp_path: Path) -> None:
    run(tmp_path, paying(), steps=200)
    assert read_metrics(tmp_path)[-1]["curriculum/stage"] == 2.0
    resume(tmp_path, launch="inline", limits={"steps": 390}, quiet=True)
    assert read_metrics(tmp_path)[-1]["curriculum/stage"] == 2.0 and returns(tmp_path)[-1] == 10.0
    resume(tmp_path, launch="inline", limits={"steps": 900}, quiet=True)
    assert read_metrics(tmp_path)[-1]["curriculum/stage"] == 3.0 and returns(tmp_path)[-1] == 15.0


def test_a_stage_that_a_checkpoints_own_update_has_begun_is_where_a_resumed_run_goes_on(
    tmp_path: Path,
) -> None:
    run(
        tmp_path,
        paying(curriculum=(Stage(options={"pay": 1.0}, until="update >= 5"), Stage(options={"pay": 2.0}))),
        updates=5,
    )
    # it was told before anybody looked whether that ends
    assert read_metrics(tmp_path)[-1]["curriculum/stage"] == 1.0
    folder = RunFolder(tmp_path)
    assert ResumePoint.of(folder, folder.experiment().experiment).progress.stage == 1


def test_evaluation_is_in_the_last_stage(tmp_path: Path) -> None:
    run(tmp_path, learning(), steps=50)
    assert read_metrics(tmp_path)[-1]["curriculum/stage"] == 1.0
    assert evaluate(tmp_path, episodes=4, quiet=True).specs[0].mean == 15.0


def test_the_stage_is_told_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=200)
    views = []

    def keep(_: Console) -> Any:
        views.append(make_view(console))
        return views[-1]

    monkeypatch.setattr(life, "make_view", keep)
    run(tmp_path, paying(), quiet=False, steps=2000)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "dropped 0  stage 1 of 3" in text and "stage 3 of 3" in text
    screen = Console(width=200, file=io.StringIO())
    screen.print(picture(views[0]._last, 200, 40))
    assert "3 of 3" in screen.file.getvalue()  # type: ignore[attr-defined]


# ---- conditions ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((Stage(), Stage()), "stage 1 of 2 has no end"),
        ((Stage(until="step > 1"),), "the last stage cannot end"),
        (
            (Stage(until="return/man > 1"), Stage()),
            'until of stage 1 = "return/man > 1" waits for "return/man", which nobody .*did you mean '
            '"return/mean"',
        ),
    ],
)
def test_what_could_never_happen_is_refused_at_start(stages: tuple[Stage, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        paying(curriculum=stages).check()


@pytest.mark.parametrize("until", ["return/mean", "order by step", "step > 1 limit 3", "step > many"])
def test_an_end_that_is_no_condition_is_refused(until: str) -> None:
    with pytest.raises(ConfigError):
        Stage(until=until)


def test_a_run_ends_when_its_condition_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    until = "return/mean >= 15 and update > 3"
    result = run(tmp_path, paying(), until=until, steps=100_000)
    assert result.summary["status"] == "completed" and result.summary["reason"] == until
    assert result.summary["mean_return"] == 15.0
    updates = result.summary["updates"]
    # which would end at once otherwise
    resumed = resume(tmp_path, launch="inline", limits={"updates": updates + 20}, quiet=True)
    assert resumed.summary["updates"] == updates + 20
    assert f"reached its mark, {until}, and goes on without one" in capsys.readouterr().err


def test_a_run_that_has_reached_its_only_limit_says_how_to_go_on(tmp_path: Path) -> None:
    run(tmp_path, paying(), until="update > 3")
    with pytest.raises(
        RunError,
        match=r"already reached its mark, update > 3, and has no other limit; .* limits=\{'until': …\}",
    ):
        resume(tmp_path, launch="inline", quiet=True)
    assert (
        resume(tmp_path, launch="inline", limits={"until": "update > 30"}, quiet=True).summary["updates"] > 30
    )


def test_a_misspelt_limit_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match=r'limits\.until = "retrun/mean > 1" waits for "retrun/mean"'):
        paying(limits=Limits(until="retrun/mean > 1")).check()


def test_stages_end_by_what_training_measures(tmp_path: Path) -> None:
    stages = (STAGES[0].replace(until="loss >= 1 and lag/mean >= 0 and dropped == 0"), STAGES[2])
    run(tmp_path, paying(curriculum=stages), steps=300)
    told = [record["curriculum/stage"] for record in read_metrics(tmp_path)]
    assert told[0] == 1.0 and set(told[1:]) == {2.0}
    with pytest.raises(ConfigError, match=r'waits for "los", .* did you mean "loss"'):
        paying(curriculum=(Stage(until="los > 1"), Stage())).check()


@pytest.mark.parametrize("algorithm", [PPO(), Impala()])
def test_algorithms_say_what_they_measure(tmp_path: Path, algorithm: AlgorithmConfig) -> None:
    made: Experiment = experiments.experiment(Gymnasium(id="CartPole-v1"), algorithm=algorithm)
    run(tmp_path, made.replace(policies={"policy": ActorCritic()}), updates=2)
    own = {"step", "update", "episodes", "return/mean", "length/mean", "win_rate"}
    told = {
        name for record in read_metrics(tmp_path) for name in record if not name.startswith("time/")
    } - own
    assert told == set(made.workers["trainer"].measures() or ())


@dataclass(frozen=True, kw_only=True)
class Own(AlgorithmConfig):
    """Does not say before it runs what it measures."""

    def build(self, policy: Policy, seed: int) -> Algorithm:
        return _Own(policy)


class _Own(Algorithm):
    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def update(self, samples: Sequence[Sample], steps: int) -> dict[str, float]:
        return {"skill": 2.0}

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Any) -> None:
        pass


def own(*stages: Stage) -> Experiment:
    made: Experiment = experiments.experiment(Gymnasium(make=f"{__file__}:Paying"), algorithm=Own())
    return made.replace(curriculum=stages)


def test_a_condition_on_what_an_algorithm_has_not_said_is_looked_at_with_its_first_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "right", own(Stage(until="skill > 1"), Stage(options={"pay": 3.0})), steps=200)
    assert read_metrics(tmp_path / "right")[-1]["curriculum/stage"] == 2.0
    assert "never hold" not in capsys.readouterr().err
    run(tmp_path / "wrong", own(Stage(until="skil > 1"), Stage()), steps=200)
    assert read_metrics(tmp_path / "wrong")[-1]["curriculum/stage"] == 1.0
    assert (
        'waits for "skil", which nobody measures; did you mean "skill"?. It will never hold'
        in capsys.readouterr().err
    )


# ---- environments that cannot ----------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Scripted(), "the resets of a ScriptedEnvironment take no options"),
        (Gymnasium(make=f"{__file__}:Deaf"), r"Deaf\.reset\(seed\) takes no options"),
        (
            Gymnasium(make=f"{__file__}:deafened", max_episode_steps=9),
            r"Deafening\.reset\(seed\) takes no options",
        ),
        (
            GymnasiumVector(id="CartPole-v1"),
            r'resets finished lanes by itself, without options, .*autoreset="disabled"',
        ),
    ],
)
def test_an_environment_without_options_says_so_at_start(
    tmp_path: Path, environment: EnvironmentConfig, message: str
) -> None:
    with pytest.raises(RunError, match=message):
        run(tmp_path, paying(environment), steps=100)


def test_options_that_a_vector_environment_needs_itself_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match='options have "reset_mask"'):
        run(
            tmp_path,
            paying(ENVIRONMENTS["vector"], curriculum=(Stage(options={"reset_mask": 1}),)),
            steps=100,
        )
