"""What users get wrong: one error each that names value, cause and cure; status 1, no
traceback, nothing left behind."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.run.watching import wait_until
from typer.testing import CliRunner, Result

from tidemill.cli.main import app
from tidemill.store.checkpoint import read_newest

FILE = """
from dataclasses import dataclass
from typing import Any
import gymnasium, numpy as np
import tidemill
from tidemill import *

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fault="", at=0):
        self.fault, self.at, self.steps = fault, at, 0
        if fault == "init":
            raise OSError("no simulator at port 7")

    def reset(self, *, seed=None, options=None):
        if self.fault == "reset":
            raise ValueError("no such level")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        observation, reward = np.zeros(2, np.float32), 1.0
        if self.steps > self.at:
            if self.fault == "step":
                raise ZeroDivisionError("division by zero")
            if self.fault == "shape":
                observation = np.zeros(3, np.float32)
            if self.fault == "nan":
                observation[1] = np.nan
            if self.fault == "reward":
                reward = np.inf
        return observation, reward, self.steps % 10 == 0, False, {}

def made(agents=(AgentSpec(sample_steps=8),), policies=("policy",), trainers=None, lane_restarts=5, **kwargs):
    return Experiment(
        name="bad",
        policies={name: ActorCritic() for name in policies},
        workers={
            "actor": Actors(
                environment=Gymnasium(make=f"{__file__}:Env", kwargs=kwargs), lanes=2, agents=agents,
                lane_restarts=lane_restarts,
            ),
            **(
                trainers
                if trainers is not None
                else {
                    "trainer": Trainer(
                        algorithm=PPO(minibatch_size=16), checkpoint_seconds=1e-3, checkpoint_share=1
                    )
                }
            ),
        },
        limits=Limits(updates=3),
    )

def good(): return made()
def init(): return made(fault="init")
def reset(): return made(fault="reset")
def step(): return made(fault="step")
def late_step(): return made(fault="step", at=20, lane_restarts=None)
def late_nan(): return made(fault="nan", at=20, lane_restarts=None)
def shape(): return made(fault="shape")
def nan(): return made(fault="nan")
def reward(): return made(fault="reward")
def a_lambda(): return made(at=lambda: 3)
def nothing(): return 3
def raises(): return {}["missing"]
def unmatched(): return made(agents=(AgentSpec(match="robot_.*"),))
def two_missing(): return made(agents=(AgentSpec(policy="polcy"),))
def fixed_missing(): return made(agents=(AgentSpec(policy="polcy", parameters=Fixed()),))
def one_spec(): return made(agents=AgentSpec())
def one_name(): return made(trainers={"server": PolicyWorkers(stream="i", policies=("policy"))})
def one_post(): return made(agents=(AgentSpec(mode="full", post=GAE()),))
def a_class(): return made(trainers={"trainer": Trainer(algorithm=PPO)})
def no_name(): return made(agents=(AgentSpec(inference=None),))
def two_kinds(env="CartPole-v1", **spec):
    e = made()
    return e.replace(workers={
        **e.workers,
        "other": Actors(environment=Gymnasium(id=env), lanes=2, agents=(AgentSpec(**spec),)),
    })
def two_modes():
    return (e := two_kinds(mode="after_done")).replace(workers={
        **e.workers, "actor": e.workers["other"].replace(agents=(AgentSpec(),)),
    })
@dataclass(frozen=True, kw_only=True)
class Broken(AlgorithmConfig):
    def build(self, policy, seed): return Breaks()
class Breaks(Algorithm):
    updates = 0
    def update(self, samples, steps):
        self.updates += 1
        if self.updates == 1:
            raise ArithmeticError("no gradient")
        return {}
    def state(self): return {}
    def load_state(self, state): pass
def half():
    one = {f"{name}-actor": Actors(environment=Gymnasium(id="CartPole-v1"), lanes=2,
                                   agents=(AgentSpec(policy=name, samples=name, sample_steps=8),))
           for name in ("good", "bad")}
    two = {"good": Trainer(policy="good", samples="good", algorithm=PPO(), checkpoint_seconds=1e-3,
                           checkpoint_share=1),
           "bad": Trainer(policy="bad", samples="bad", algorithm=Broken())}
    return Experiment(name="half", policies={"good": ActorCritic(), "bad": ActorCritic()},
                      workers={**one, **two}, limits=Limits(updates=300))
def crossed():
    one = {f"{stream}-actor": Actors(environment=Gymnasium(id=env), lanes=2,
                                     agents=(AgentSpec(policy=stream, samples=stream, sample_steps=8),))
           for stream, env in (("balance", "CartPole-v1"), ("swing", "Acrobot-v1"))}
    pairs = (("balance", "swing"), ("swing", "balance"))
    two = {f"{policy}-trainer": Trainer(policy=policy, samples=stream, algorithm=PPO())
           for policy, stream in pairs}
    return Experiment(name="crossed", policies={"balance": ActorCritic(), "swing": ActorCritic()},
                      workers={**one, **two}, limits=Limits(updates=3))
def no_consumer(): return made(agents=(AgentSpec(samples="smples"),))
def no_trainer(): return made(trainers={}, agents=(AgentSpec(samples=None),))
def unbounded(): return made(agents=(AgentSpec(mode="full"),))
def concise(): return made(agents=(AgentSpec(mode="concise"),))
def no_server(): return made(agents=(AgentSpec(inference="inference"),))
def served(policies=("policy",), trainers=1, **spec):
    groups = {"server": PolicyWorkers(stream="i", policies=policies),
              **{f"trainer{i}": Trainer(algorithm=PPO()) for i in range(trainers)}}
    return made(agents=(AgentSpec(**spec),), policies=("policy", "other"), trainers=groups)
def lockstep(batch_size=None, trainers=1, buffer=Queue(), **spec):
    trainer = Trainer(algorithm=PPO(minibatch_size=16), max_policy_lag=0, batch_size=batch_size,
                      count=trainers, buffer=buffer)
    return made(agents=(AgentSpec(sample_steps=8, **spec),), trainers={"trainer": trainer})
def lockstep_batch(): return lockstep(batch_size=64)
def lockstep_trainers(): return lockstep(trainers=2)
def lockstep_full(): return lockstep(mode="after_done")
def lockstep_bootstrap(): return lockstep(bootstrap=3)
def lockstep_copies(): return lockstep(buffer=PriorityQueue(capacity=64))
def lockstep_reuses(): return lockstep(buffer=Queue(reuses=2))
def one_name_for_two(): return served(inference="i", samples="i")
def unserved(): return served(inference="i", policy="other")
def unasked(): return served(inference="i", policies=("policy", "other"))
def idle():
    return (e := served(inference="i")).replace(workers={
        **e.workers, "server": e.workers["server"].replace(count=2),
    })
def two_publish(): return served(inference="i", trainers=2)
"""


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")
    (tmp_path / "bad.py").write_text(FILE)

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    return invoke


def refused(result: Result, *parts: str) -> None:
    """One error with all these parts, status 1 or (of the option parser) 2, no
    traceback."""
    assert result.exit_code in (1, 2), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    errors = [
        line
        for line in result.output.splitlines()
        if re.match(r"error: |.*(Invalid value|No such option)", line)
    ]
    assert len(errors) == 1, result.output
    assert "Traceback" not in result.output
    for part in parts:
        assert part in errors[0], (part, errors[0])


def nothing_left(folder: Path) -> None:
    assert {p.name for p in folder.iterdir()} <= {"bad.py", "__pycache__", "taken", "file"}
    # of tests before, some may still be ending
    wait_until(lambda: not psutil.Process().children(recursive=True), 60, "no process is left")


@pytest.mark.parametrize("command", ["status", "resume", "stop", "retrain", "doctor run", "follow"])
def test_an_empty_path_is_not_the_folder_that_one_is_in(command: str, cli: Callable[..., Result]) -> None:
    refused(cli(*command.split(), ""), "an empty path names no run; write . for the folder that you are in")


NEVER_BEGAN = {
    "unknown environment": (["CartPol-v1"], ['"CartPol-v1"', "CartPole"]),
    "unknown module": (["no_such_module:Env-v0"], ["no_such_module", "install it"]),
    "unknown launcher": (["CartPole-v1", "--launch", "proceses"], ["proceses", 'did you mean "processes"?']),
    "misspelt key": (
        ["CartPole-v1", "--set", "workers.trainer.algorithm.epoch=3"],
        ['"epoch"', 'did you mean "epochs"?'],
    ),
    "misspelt group": (
        ["CartPole-v1", "--set", "workers.trainr.algorithm.epochs=3"],
        ['"trainr"', 'did you mean "trainer"?'],
    ),
    "wrong type": (
        ["CartPole-v1", "--set", "workers.trainer.algorithm.epochs=many"],
        ["epochs", "many", "int"],
    ),
    "out of range": (
        ["CartPole-v1", "--set", "workers.trainer.algorithm.gamma=1.5"],
        ["gamma", "1.5", "0.99 is usual"],
    ),
    "a layout that is none": (["CartPole-v1", "--layout", "fast"], ['"fast"', "auto, measure, given"]),
    "a part of a layout": (
        ["CartPole-v1", "--layout", "actors=2,lames=3"],
        ['"lames=3"', 'did you mean "lanes"?'],
    ),
    "a layout for others": (
        ["bad.py:no_server", "--layout", "actors=1,trainers=1,lanes=2,sample_steps=8,ring=1,slots=1"],
        ['"inference"', "nobody"],
    ),
    "a layout and its parts": (
        [
            "CartPole-v1",
            "--layout",
            "actors=1,trainers=1,lanes=2,sample_steps=8,ring=1,slots=1",
            "--set",
            "workers.actor.lanes=3",
        ],
        ["workers.actor.lanes was set besides", "one place"],
    ),
    "no value": (["CartPole-v1", "--set", "seed"], ["--set seed", "NAME=VALUE"]),
    "negative limit": (["CartPole-v1", "--max-steps", "-5"], ["steps", "-5", "must be above 0"]),
    "negative seconds": (["CartPole-v1", "--set", "limits.seconds=-1"], ["seconds", "-1", "must be above 0"]),
    "a mark that is no number": (
        ["CartPole-v1", "--stop-at-return", "nan"],
        ["mean_return", "nan", "not a finite number"],
    ),
    "negative seed": (["CartPole-v1", "--seed", "-1"], ["seed", "-1", "must not be negative"]),
    "no lanes": (["CartPole-v1", "--set", "workers.actor.lanes=0"], ["lanes", "0", "at least 1"]),
    "misspelt env arg": (
        ["CartPole-v1", "--env-arg", "suton_barto_reward=true"],
        ["suton_barto_reward", 'did you mean "sutton_barto_reward"?'],
    ),
    "an unknown wrapper": (
        ["CartPole-v1", "--wrap", "frameskip"],
        ["frameskip", 'did you mean "frame-skip"?'],
    ),
    "a wrapper that computes": (
        ["CartPole-v1", "--wrap", "time-limit(2 * 100)"],
        ["time-limit(2 * 100)", "plain values"],
    ),
    "a wrapper around a game": (["ALE/Pong-v5", "--wrap", "flatten"], ["this is Atari", "FILE.py:NAME"]),
    "a wrapper of an experiment": (["bad.py:good", "--wrap", "flatten"], ["Gymnasium(id=", "wrap="]),
    "unwritable folder": (
        ["CartPole-v1", "--run-dir", "/proc/here/run"],
        ["/proc/here/run", "cannot be written", "--run-dir"],
    ),
    "a folder below a file": (
        ["CartPole-v1", "--run-dir", "bad.py/run"],
        ["bad.py/run", "cannot be written", "--run-dir"],
    ),
    "a file as folder": (["CartPole-v1", "--run-dir", "bad.py"], ["bad.py is a file", "--run-dir"]),
    "a name that is none": (["CartPole-v1", "--run-dir", "my run"], ['"my run"', "letters, digits"]),
    "no such file": (["absent.py:f"], ["absent.py"]),
    "no such function": (["bad.py:goood"], ['"goood"', 'did you mean "good"?']),
    "a function of something else": (["bad.py:nothing"], ["gives a int", "Experiment"]),
    "a function that raises": (["bad.py:raises"], ["bad.py:raises raised KeyError", "missing", "(line "]),
    "one spec without a comma": (
        ["bad.py:one_spec"],
        ["agents = AgentSpec(", "must be a tuple", "agents=(…,)"],
    ),
    "one policy without a comma": (["bad.py:one_name"], ["policies = 'policy'", "policies=(…,)"]),
    "one post-processor without a comma": (["bad.py:one_post"], ["post = GAE(", "post=(…,)"]),
    "a class in place of its settings": (
        ["bad.py:a_class"],
        ["workers.trainer.algorithm is the class PPO", "write PPO(…)"],
    ),
    "a name that is no text": (["bad.py:no_name"], ["agents[0].inference = None", "expected `str`"]),
    "a lambda": (
        ["bad.py:a_lambda"],
        ["workers.actor.environment.kwargs.at", "lambda", "plain data", "FILE.py:NAME"],
    ),
    "a spec that matches nothing": (["bad.py:unmatched"], ["robot_.*", "agent"]),
    "a missing policy": (["bad.py:two_missing"], ['"polcy"', 'did you mean "policy"?']),
    "a missing policy that is never trained": (
        ["bad.py:fixed_missing"],
        ['".*"', '"polcy"', 'did you mean "policy"?'],
    ),
    "a stream of other agents": (
        ["bad.py:crossed"],
        ['"balance"', '"swing"', "obs is float32[4], and float32[6] there", "take the stream"],
    ),
    "one policy in two kinds of spaces": (
        ["bad.py:two_kinds"],
        ['other-0 plays policy "policy" in spaces', "give each kind of agents a policy"],
    ),
    "one stream of two kinds of samples": (
        ["bad.py:two_modes"],
        ["other-0", '"samples"', "mode = after_done", "mode = fixed", "a stream"],
    ),
    "a stream without a consumer": (["bad.py:no_consumer"], ['"smples"', "actor-0", "nobody"]),
    "whole episodes without a limit": (
        ["bad.py:unbounded"],
        ["actor-0", 'mode = "full"', "no limit", "Actors.max_episode_steps"],
    ),
    "training on one row of each episode": (
        ["bad.py:concise"],
        ["trainer-0", '"samples"', "concise", 'take mode = "full"'],
    ),
    "a stream without a server": (["bad.py:no_server"], ['"inference"', "actor-0", "nobody"]),
    "one name for two streams": (
        ["bad.py:one_name_for_two"],
        ['"i"', "sample stream (actor-0)", "inference stream", "another name"],
    ),
    "a policy that nobody serves": (
        ["bad.py:unserved"],
        ["actor-0", '"other"', 'server-0 serves "policy"', "policies"],
    ),
    "a policy that nobody asks for": (["bad.py:unasked"], ["server-0", '"other"', '"i"', "take it out"]),
    "a policy worker that nobody asks": (
        ["bad.py:idle"],
        ["server-1 would never be asked", "fewer policy workers"],
    ),
    "two groups that publish a policy": (
        ["bad.py:two_publish"],
        ['"policy"', "trainer0-0, trainer1-0", "one group"],
    ),
    "lockstep and a batch size": (
        ["bad.py:lockstep_batch"],
        ["batch_size = 64", "max_policy_lag = 0", "leave it out"],
    ),
    "lockstep and more trainers than actors": (
        ["bad.py:lockstep_trainers"],
        ["trainer-0, trainer-1", "max_policy_lag = 0", "only actor-0", "producers"],
    ),
    "lockstep and whole episodes": (
        ["bad.py:lockstep_full"],
        ['mode = "after_done"', "max_policy_lag = 0", 'take mode = "fixed"'],
    ),
    "lockstep and a long bootstrap": (
        ["bad.py:lockstep_bootstrap"],
        ["bootstrap = 3", "max_policy_lag = 0", "bootstrap = 1"],
    ),
    "lockstep and a buffer of its own": (
        ["bad.py:lockstep_copies"],
        ["max_policy_lag = 0", "PriorityQueue", "take Queue"],
    ),
    "lockstep and samples used twice": (
        ["bad.py:lockstep_reuses"],
        ["reuses = 2", "max_policy_lag = 0", "max_policy_lag = 1"],
    ),
    "no trainer": (["bad.py:no_trainer"], ["no trainer", "add one"]),
    "an environment that cannot be made": (["bad.py:init"], ["OSError", "no simulator at port 7"]),
    "unknown algorithm": (["CartPole-v1", "--algorithm", "dnq"], ['"dnq"', 'did you mean "dqn"?']),
    "an algorithm beside a file": (["bad.py:good", "--algorithm", "dqn"], ["--algorithm dqn", "has its own"]),
    "actions of another kind": (
        ["CartPole-v1", "--algorithm", "sac"],
        ["Discrete", "QNetwork with DQN for Discrete"],
    ),
    "a replay less than a batch": (
        [
            "CartPole-v1",
            "--algorithm",
            "dqn",
            "--set",
            "workers.trainer.buffer.capacity=1000",
            "--set",
            "workers.trainer.batch_size=2000",
        ],
        ["1,000 rows", "a batch of 2,000"],
    ),
    "a replay larger than it may be": (
        ["CartPole-v1", "--algorithm", "dqn", "--set", "workers.trainer.buffer.max_bytes=1000000"],
        ["100,000 rows takes 5.3 MB", "max_bytes allows 1,000,000 bytes", "obs 16", "at most"],
    ),
    "a replay larger than the machine": (
        ["CartPole-v1", "--algorithm", "dqn", "--set", "workers.trainer.buffer.capacity=1000000000000"],
        ["of memory are available: ", "rows x (obs 16", "make capacity at most"],
    ),
}


@pytest.mark.parametrize("case", NEVER_BEGAN)
def test_what_cannot_begin_says_why_and_leaves_nothing(
    cli: Callable[..., Result], tmp_path: Path, case: str
) -> None:
    arguments, parts = NEVER_BEGAN[case]
    extra = [] if "--run-dir" in arguments else ["--run-dir", "below/run"]
    launch = [] if "--launch" in arguments else ["--launch", "inline"]
    refused(cli("train", *arguments, *extra, *launch), *parts)
    nothing_left(tmp_path)


FAULTS = {
    "reset": ["ValueError", "no such level", "bad.py", "in reset"],
    "step": ["ZeroDivisionError", "division by zero", "bad.py", "in step"],
    "shape": ["(3,)", "(2,)"],
    "nan": ["obs", "not finite", "nan"],
    "reward": ["reward", "not finite", "inf"],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_environment_that_goes_wrong_ends_the_run_with_one_error(
    cli: Callable[..., Result], tmp_path: Path, fault: str
) -> None:
    refused(
        cli("train", f"bad.py:{fault}", "--run-dir", "run", "--launch", "inline"),
        "actor-0",
        "lane",
        *FAULTS[fault],
    )
    left = {p.name for p in (tmp_path / "run").iterdir()} if (tmp_path / "run").exists() else set()
    # it ended before its first update: as if it had never begun, but for what led to that
    assert left <= {"logs", "faults"}
    assert cli("train", "bad.py:good", "--run-dir", "run", "--launch", "inline").exit_code == 0


@pytest.mark.parametrize("fault", ["late_step", "late_nan"])
def test_the_last_checkpoint_stays_good(cli: Callable[..., Result], tmp_path: Path, fault: str) -> None:
    result = cli("train", f"bad.py:{fault}", "--run-dir", "run", "--launch", "inline")
    refused(result, "actor-0", "lane")
    assert "tidemill resume run" in result.output
    path, _, facts, warnings = read_newest(tmp_path / "run" / "checkpoints" / "policy")
    assert facts["updates"] >= 1 and warnings == [] and path.is_dir()


def test_a_run_goes_on_only_with_a_checkpoint_of_every_policy(
    cli: Callable[..., Result], tmp_path: Path
) -> None:
    result = cli("train", "bad.py:half", "--run-dir", "run", "--launch", "inline")
    refused(result, "bad-0", "ArithmeticError", "no gradient")
    assert "tidemill resume" not in result.output
    refused(
        cli("resume", "run", "--launch", "inline"),
        'no checkpoint of policy "bad"',
        "its first update",
        "train anew",
    )


def test_processes_say_the_same_and_leave_nothing(cli: Callable[..., Result], tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    refused(
        cli("train", "CartPol-v1", "--run-dir", "below/run", "--layout", "given"), "actor-0", '"CartPol-v1"'
    )
    nothing_left(tmp_path)
    # for the layout: the probe is refused it
    measured = cli("train", "bad.py:unmatched", "--run-dir", "below/run")
    refused(measured, "robot_.*")
    assert len(measured.output.splitlines()) == 1
    nothing_left(tmp_path)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_folder_that_holds_a_run_is_not_written_to(cli: Callable[..., Result], tmp_path: Path) -> None:
    assert cli("train", "bad.py:good", "--run-dir", "taken", "--launch", "inline").exit_code == 0

    def files() -> dict[Path, bytes]:
        """All but the run's epochs, of which whoever looks into it as its leader takes
        one."""
        found = [p for p in (tmp_path / "taken").rglob("*") if p.is_file() and p.parent.name != "epochs"]
        return {p: p.read_bytes() for p in found}

    before = files()
    refused(
        cli("train", "bad.py:good", "--run-dir", "taken", "--launch", "inline"),
        "already holds a run",
        "tidemill resume taken",
    )
    refused(
        cli("train", "CartPole-v1", "--run-dir", "taken", "--launch", "inline"),
        "another experiment",
        '"bad"',
        "--run-dir",
    )
    refused(cli("resume", "taken", "--launch", "inline"), "already reached its limit of 3 updates")
    refused(cli("stop", "taken"), "no run is going on", "tidemill resume taken")
    refused(cli("resume", "nowhere"), "nowhere", "not a run's folder")
    assert files() == before
    (tmp_path / "bad.py").write_text(FILE + "\n# changed\n")
    changed = cli("resume", "taken", "--launch", "inline")
    refused(changed, "taken names what you have not had done before")
    assert re.search(
        r'\n  runs the code in ".*bad.py", which has changed since you last had it run\n.* --trust',
        changed.output,
    )


def test_an_empty_folder_of_the_users_stays(cli: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    refused(cli("train", "CartPol-v1", "--run-dir", "taken", "--launch", "inline"), "CartPol-v1")
    assert list((tmp_path / "taken").iterdir()) == []


@pytest.mark.parametrize("what", ["slow.py:Slow", "pettingzoo:slow.py:Slow"])
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--run-dir", ".hidden"], '".hidden" is not a name'),
        (["--launch", "proceses"], 'did you mean "processes"'),
        (["--layout", "fast"], "fast"),
        (["--set", "seed"], "NAME=VALUE"),
    ],
)
def test_what_is_wrong_whatever_is_trained_is_said_before_an_environment_is_made(
    cli: Callable[..., Result], tmp_path: Path, what: str, words: list[str], part: str
) -> None:
    (tmp_path / "slow.py").write_text("from pathlib import Path\ndef Slow(): Path('made').touch()\n")
    refused(cli("train", what, *words), part)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--run-dir", "taken"], "already holds a run"),
        (["--run-dir", "slow.py/run"], "cannot be written"),
        (["--set", "workers.actor.lens=3"], "lanes"),
        (["--set", "workers.trainer.algorithm.clip=-1"], "clip"),
        (["--max-steps", "-1"], "-1"),
    ],
)
def test_a_folder_and_settings_are_looked_at_before_anything_is_measured(
    cli: Callable[..., Result], tmp_path: Path, words: list[str], part: str
) -> None:
    (tmp_path / "slow.py").write_text(
        "import gymnasium\nfrom pathlib import Path\nclass Slow(gymnasium.Env):\n    def __init__(self): "
        "Path('made').touch()\n"
    )
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.json").write_text('{"name": "Slow"}')
    refused(cli("train", "slow.py:Slow", *words), part)
    assert not (tmp_path / "made").exists()
