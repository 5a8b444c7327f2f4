"""What the last episodes reach is told of each policy and of each agent spec, ends runs
by what it is of, and is known after a resume."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from pettingzoo import ParallelEnv
from tests.run.watching import EXPERIMENTS

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Limits,
    PettingZoo,
    Trainer,
    populate,
)
from tidemill.api.control_messages import Episodes
from tidemill.core.errors import ConfigError, RunError
from tidemill.core.user_code_loading import load_file
from tidemill.envs.atari import Atari
from tidemill.metrics.json_lines import read_metrics
from tidemill.run.episode_windows import EpisodeWindows, read_saved_episodes
from tidemill.run.folder import EPISODES, RunFolder
from tidemill.run.live_view import _figures
from tidemill.run.progress import Progress
from tidemill.run.resume_point import ResumePoint
from tidemill.run.run_lifecycle import _returns_notice
from tidemill.run.snapshot import Snapshot
from tidemill.training.train import Result, resume, train

experiments = load_file(EXPERIMENTS, "test")

OBSERVATION, ACTION = gymnasium.spaces.Box(-1, 1, (1,), np.float32), gymnasium.spaces.Discrete(2)
PAY = {"winner": 1.0, "loser": -2.0}


class Unequal(ParallelEnv):  # type: ignore[type-arg]
    """Episodes of 5 steps, for each of which an agent gets what is its own."""

    possible_agents = list(PAY)  # noqa: RUF012
    metadata = {"name": "unequal"}  # noqa: RUF012
    render_mode = None

    def observation_space(self, agent: str) -> Any:
        return OBSERVATION

    def action_space(self, agent: str) -> Any:
        return ACTION

    def _seen(self) -> dict[str, Any]:
        return {agent: np.zeros(1, np.float32) for agent in PAY}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents, self.steps = list(PAY), 0
        return self._seen(), {agent: {} for agent in PAY}

    def step(self, actions: Any) -> Any:
        self.steps += 1
        over = dict.fromkeys(PAY, self.steps == 5)
        if self.steps == 5:
            self.agents = []
        return self._seen(), PAY, over, dict.fromkeys(PAY, False), {agent: {} for agent in PAY}


def unequal(policies: dict[str, str], **limits: Any) -> Experiment:
    """`policies`: agent → who plays it."""
    specs = tuple(
        AgentSpec(match=agent, policy=policy, samples=agent, sample_steps=16)
        for agent, policy in policies.items()
    )
    trainers = {f"trainer-{policy}": (agent, policy) for agent, policy in policies.items()}
    algorithm = experiments.Recorder(seconds=0.0)
    return Experiment(
        name="unequal",
        policies={policy: experiments.ByObservation() for policy in policies.values()},
        workers={
            "actor": Actors(environment=PettingZoo(make=f"{__file__}:Unequal"), lanes=2, agents=specs),
            **{
                name: Trainer(algorithm=algorithm, policy=policy, samples=agent)
                for name, (agent, policy) in trainers.items()
            },
        },
        limits=Limits(**{"window": 10, "updates": 20, **limits}),
    )


TWO = {"winner": "red", "loser": "blue"}
ONE = {"winner": "red", "loser": "red"}


def run(folder: Path, made: Experiment) -> Result:
    return train(made, launch="inline", run_dir=folder, source=EXPERIMENTS, quiet=True)


def told(folder: Path) -> dict[str, float]:
    """What the last record says of episodes."""
    return {
        name: value
        for name, value in read_metrics(folder)[-1].items()
        if name.partition("/")[0] in ("return", "length", "win_rate")
    }


def test_each_of_several_policies_has_a_return_a_length_and_a_win_rate_of_its_own(tmp_path: Path) -> None:
    result = run(tmp_path / "run", unequal(TWO))
    assert told(tmp_path / "run") == {
        "return/red/mean": 5.0, "length/red/mean": 5.0, "win_rate/red": 1.0,
        "return/blue/mean": -10.0, "length/blue/mean": 5.0, "win_rate/blue": 0.0,
    }  # fmt: skip
    assert result.summary["mean_return"] is None and result.summary["mean_returns"] == {
        "red": 5.0,
        "blue": -10.0,
    }


def test_agent_specs_that_share_a_policy_have_one_each_besides_the_policys(tmp_path: Path) -> None:
    made = unequal(ONE).replace(name="shared")
    del made.workers["trainer-red"]
    workers = {
        **made.workers,
        "trainer": Trainer(algorithm=experiments.Recorder(seconds=0.0), policy="red", samples="winner"),
    }
    actor = made.workers["actor"]
    assert isinstance(actor, Actors)
    specs = tuple(
        spec if spec.match == "winner" else spec.replace(samples=None, sample_steps=AgentSpec().sample_steps)
        for spec in actor.agents
    )
    result = run(tmp_path / "run", made.replace(workers={**workers, "actor": actor.replace(agents=specs)}))
    assert told(tmp_path / "run") == {
        "return/mean": -2.5, "length/mean": 5.0, "win_rate": 0.5,
        "return/red/winner/mean": 5.0, "length/red/winner/mean": 5.0, "win_rate/red/winner": 1.0,
        "return/red/loser/mean": -10.0, "length/red/loser/mean": 5.0, "win_rate/red/loser": 0.0,
    }  # fmt: skip
    assert result.summary["mean_return"] == -2.5


@pytest.mark.parametrize(("whose", "ended_by"), [("red", "red"), ("any", "red")])
def test_a_mean_return_ends_the_run_by_the_policy_that_is_meant(
    tmp_path: Path, whose: str, ended_by: str
) -> None:
    result = run(tmp_path / "run", unequal(TWO, mean_return=4.0, return_of=whose, updates=None))
    assert result.summary["reason"] == f"mean return 5.0 of the last 10 episodes of {ended_by}"


def test_a_mean_return_that_others_alone_have_reached_ends_nothing(tmp_path: Path) -> None:
    result = run(tmp_path / "run", unequal(TWO, mean_return=4.0, return_of="blue"))
    assert "updates" in result.summary["reason"]


def test_whose_return_is_meant_must_be_said_and_be_somebodys() -> None:
    with pytest.raises(
        ConfigError,
        match=r'could be of several: "red", "blue"; say of which by limits.return_of \(--return-of\), or '
        r'"any"',
    ):
        unequal(TWO, mean_return=4.0).check()
    with pytest.raises(
        ConfigError, match=r'return_of = "bleu" is nobody whose episodes are counted; did you mean "blue"'
    ):
        unequal(TWO, mean_return=4.0, return_of="bleu").check()
    with pytest.raises(ConfigError, match=r"no limits\.mean_return is set"):
        Limits(return_of="red")
    unequal(TWO, mean_return=4.0, return_of="blue").check()
    made: Experiment = experiments.cartpole()
    made.replace(limits=Limits(mean_return=4.0, return_of="policy")).check()  # the only one may be named, too


def test_conditions_know_each_policys_return_and_no_common_one(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r'waits for "return/mean", which nobody measures; .*return/red/mean'
    ):
        unequal(TWO, until="return/mean > 1").check()
    until = "return/red/mean >= 5 and length/blue/mean == 5 and win_rate/blue < 0.5"
    assert run(tmp_path / "run", unequal(TWO, until=until)).summary["reason"] == until


def test_the_first_member_of_a_population_that_reaches_the_mean_return_ends_the_run() -> None:
    made = Experiment(
        name="one",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(environment=Gymnasium(id="CartPole-v1")),
            "trainer": Trainer(algorithm=PPO()),
        },
        limits=Limits(mean_return=100.0),
    )
    members = populate(
        made, [{"learning_rate": 1e-3}, {"learning_rate": 1e-4}], explore={"learning_rate": (1e-4, 1e-2)}
    )
    members.check()
    assert members.judged() == ["policy-0", "policy-1"]


def test_a_return_of_clipped_rewards_that_may_end_the_run_is_told_to_be_one() -> None:
    made: Experiment = experiments.experiment(Atari(id="pong"))
    (told,) = _returns_notice(made.replace(limits=Limits(mean_return=18.0)))
    assert "rewards clipped to -1, 0 and 1 and of one life" in told
    assert "the game's score is info/score" in told
    assert _returns_notice(made.replace(limits=Limits(until="return/mean > 1"))) == [told]
    for limits in (Limits(steps=10), Limits(until="info/score > 1")):
        assert _returns_notice(made.replace(limits=limits)) == []
    plain: Experiment = experiments.experiment(Atari(id="pong").scored())
    assert _returns_notice(plain.replace(limits=Limits(mean_return=18.0))) == []


# ---- after a resume --------------------------------------------------------------------


def test_the_last_episodes_are_known_after_a_resume(tmp_path: Path) -> None:
    folder = run(
        tmp_path / "run", experiments.cartpole().replace(limits=Limits(updates=60, window=50))
    ).folder
    before = RunFolder(folder).read("summary.json")
    assert before["episodes"] > 60
    found = ResumePoint.of(RunFolder(folder), RunFolder(folder).experiment()[0]).progress
    found.begin(RunFolder(folder).experiment()[0])
    assert found.mean_return == before["mean_return"] and found.windows is not None and found.windows.full("")
    # CartPole pays 1 a step
    assert (found.windows.means("")["length"], found.episodes) == (before["mean_return"], before["episodes"])
    again = resume(folder, launch="inline", limits={"mean_return": 1.0, "updates": 10_000}, quiet=True)
    assert again.summary["reason"].startswith("mean return")
    assert again.summary["episodes"] < before["episodes"] + 50  # the window was not filled anew


def test_a_resume_from_an_earlier_checkpoint_knows_the_episodes_of_its_time() -> None:
    made = experiments.cartpole()
    progress = Progress()
    progress.begin(made)
    assert progress.windows is not None
    for updates in range(1, 7):
        progress.count_episodes("actor", Episodes(0, 0, [float(updates)], [updates]))
        progress.keep("policy", updates)
    assert [point.updates for point in progress.checkpoint_episodes["policy"]] == [4, 5, 6]
    resumed = Progress(checkpoint_episodes={"policy": progress.checkpoint_episodes["policy"][:2]})
    resumed.begin(made)
    assert resumed.mean_return == 3.0  # of 1 … 5
    elsewhere = Progress(checkpoint_episodes=resumed.checkpoint_episodes, stage=1)
    elsewhere.begin(made)
    assert elsewhere.mean_return is None  # they were of another stage


def test_what_is_damaged_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", experiments.cartpole().replace(limits=Limits(updates=20))).folder
    good = (folder / EPISODES).read_bytes()
    assert read_saved_episodes(good)["policy"][-1].updates == 20
    for bad in (
        b"",
        b"[" * 100_000,
        good[: len(good) // 2],
        b'{"policy": 3}',
        good.replace(b'"returns"', b'"retruns"'),
    ):
        (folder / EPISODES).write_bytes(bad)
        progress = ResumePoint.of(RunFolder(folder), RunFolder(folder).experiment()[0]).progress
        progress.begin(RunFolder(folder).experiment()[0])
        assert progress.mean_return is None and progress.updates == 20


def test_views_show_each_policys_return() -> None:
    def shown(returns: dict[str, float | None]) -> dict[str, str]:
        moment = Snapshot(
            run="r",
            seconds=0,
            steps=0,
            limit=None,
            steps_per_second=0,
            gathered_per_second=0,
            mean_returns=returns,
            episodes=0,
            updates=0,
            lag=None,
            dropped=0,
        )
        return {name: value for name, value in _figures(moment).items() if name.startswith("return")}

    assert shown({"": 1.25}) == {"return": "1.2"}
    assert shown({"red": 1.0, "blue": None}) == {"return red": "1.0", "return blue": "–"}
    assert shown({f"policy-{n}": float(n) for n in range(20)}) == {"returns of 20": "0.0 … 19.0"}


def test_episodes_of_which_numbers_are_missing_are_an_error_that_names_the_group() -> None:
    windows = EpisodeWindows(unequal(TWO))
    with pytest.raises(RunError, match="a worker of actor reported 3 returns, 2 lengths and 3 infos"):
        windows.add("actor", Episodes(0, 0, [1.0, 2.0, 3.0], [4, 5]))
