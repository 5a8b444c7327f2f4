"""What is wrong with a part of a user's own is told in one error that names it: who
returned what, and what is due."""

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tidemill
from tidemill import (
    PPO,
    ConfigError,
    Gymnasium,
    PollResult,
    ProcessesLauncher,
    Queue,
    RunError,
    TidemillError,
    Worker,
    WorkerConfig,
)
from tidemill.api.control_messages import Facts, Measured
from tidemill.api.edges import Port
from tidemill.launchers.inline import InlineLauncher
from tidemill.metrics import spool
from tidemill.presets.ppo import ppo
from tidemill.training.experiment_from import resolve

wrong: dict[str, Any] = {}
"""What a part returns in place of what is right, by the part."""


@dataclass(frozen=True, kw_only=True)
class Watch(WorkerConfig):
    def ports(self) -> Any:
        return wrong.get("ports", (Port("policy", "subscribe"),))

    def build(self, context: Any) -> Any:
        return wrong["worker"] if "worker" in wrong else Watching(context)


class Watching(Worker):
    def _configure(self, facts: Facts) -> Any:
        return wrong.get("facts", Facts())

    def _poll(self) -> Any:
        if "measured" in wrong:
            self.report(Measured(1, self.stage, {"watch/number": wrong["measured"]}))
        if "reason" in wrong:
            self.exit(wrong["reason"])
        return wrong.get("poll", PollResult())


@dataclass(frozen=True, kw_only=True)
class OwnPPO(PPO):
    def build(self, policy: Any, seed: int) -> Any:
        if "algorithm" in wrong:
            return wrong["algorithm"]
        learner = super().build(policy, seed)
        if "metrics" in wrong:
            learner.update = update  # type: ignore[method-assign]
        return learner


def update(samples: Any, steps: int) -> Any:
    return wrong["metrics"]


@dataclass(frozen=True, kw_only=True)
class OwnQueue(Queue):
    def build(self, source: Any, demand: Any) -> Any:
        return wrong["buffer"] if "buffer" in wrong else super().build(source, demand)


@dataclass(frozen=True, kw_only=True)
class OwnCartPole(Gymnasium):
    def build(self, lanes: int, seed: int, render: bool = False) -> Any:
        return wrong["environment"] if "environment" in wrong else super().build(lanes, seed, render)


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run(launch: Any = "inline", **parts: Any) -> Any:
        monkeypatch.setattr(f"{__name__}.wrong", parts)
        made = ppo("small", OwnCartPole(id="CartPole-v1"), lanes=4, sample_steps=16, updates=2)
        trainer = made.workers["trainer"].replace(algorithm=OwnPPO(), buffer=OwnQueue())
        workers = {**made.workers, "trainer": trainer, "watch": Watch()}
        return tidemill.train(
            made.replace(workers=workers), launch=launch, run_dir=tmp_path / "run", quiet=True
        )

    return run


@pytest.mark.parametrize(
    ("part", "returned", "told"),
    [
        (
            "ports",
            Port("policy", "subscribe"),
            r"^Watch\.ports\(\) returned Port\(.* an instance of Sequence$",
        ),
        ("ports", ("policy",), r"^Watch\.ports\(\) returned 'policy'; it must return an instance of Port$"),
        ("worker", None, r"^Watch\.build\(\) returned None; it must return an instance of WorkerHandle$"),
        ("facts", None, r"^watch-0: Watching\._configure\(\) returned None; .* Facts$"),
        (
            "poll",
            None,
            r"^watch-0: Watching\._poll\(\) returned None; it must return an instance of PollResult$",
        ),
        ("measured", "high", r"^a control message from watch-0 cannot be read: .*`float`, got `str`"),
        (
            "measured",
            np.zeros(3),
            r"^watch-0: array\(\[0\., 0\., 0\.\]\) was to be reported, which is no number",
        ),
        ("reason", "seen enough", "^watch-0 ended before it was told to: seen enough; .*limited = True may$"),
        (
            "algorithm",
            None,
            r"^trainer-0: OwnPPO\.build\(\) returned None; it must return an instance of Algorithm$",
        ),
        ("metrics", None, r"^trainer-0: update\(\) returned None; it must return an instance of dict$"),
        (
            "buffer",
            None,
            r"^trainer-0: OwnQueue\.build\(\) returned None; it must return an instance of Buffer$",
        ),
        ("environment", None, r"^actor-0: OwnCartPole\.build\(\) returned None; .* Environment$"),
    ],
)
def test_a_part_that_returns_something_else_is_named(
    part: str, returned: Any, told: str, train: Callable[..., Any]
) -> None:
    with pytest.raises(TidemillError, match=told):
        train(**{part: returned})


def test_numbers_of_other_libraries_are_numbers(train: Callable[..., Any]) -> None:
    assert train(measured=np.float32(0.5), metrics={"loss/policy": np.float32(0.25)}).summary.updates == 2


def test_a_port_of_a_role_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match='called "subscribes"; did you mean "subscribe"'):
        Port("policy", "subscribes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (None, r"launch\(\) returned None; it must return an instance of dict$"),
        ({}, r"^Launches\.launch\(\) must return a link for each worker, and no more: actor-0, trainer-0"),
    ],
)
def test_a_launcher_that_launches_nobody_is_an_error(
    returned: Any, told: str, train: Callable[..., Any]
) -> None:
    class Launches(InlineLauncher):
        def launch(self, job: Any) -> Any:
            return returned

    with pytest.raises(TidemillError, match=told):
        train(launch=Launches)


@pytest.mark.parametrize("command", [None, "nice python"])
def test_a_launcher_s_command_is_a_list(command: Any, train: Callable[..., Any]) -> None:
    class Nice(ProcessesLauncher):
        def command(self, workers: Any) -> Any:
            return command

    with pytest.raises(
        ConfigError, match=r"Nice\.command\(\) returned .*; it must return an instance of list$"
    ):
        tidemill.train("CartPole-v1", launch=Nice, layout="given", steps=99)


def test_a_launcher_s_runtime_error_says_where_it_was_raised(train: Callable[..., Any]) -> None:
    class Launches(InlineLauncher):
        def launch(self, job: Any) -> Any:
            raise RuntimeError("no node")

    with pytest.raises(RunError, match=r"cannot be started: RuntimeError: no node \(.*, in launch\)"):
        train(launch=Launches)


def test_a_sink_that_exits_is_told_by_its_name(tmp_path: Path) -> None:
    class Exits(tidemill.MetricSink):
        def __init__(self, run: Any) -> None:
            raise SystemExit("no account")

        def write(self, record: Any) -> None: ...

    with pytest.raises(ConfigError, match=r"--log Exits: it cannot be made: SystemExit: no account"):
        tidemill.train("CartPole-v1", launch="inline", log=[Exits], run_dir=tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def experiment(seed):\n    pass\n", "positional argument: 'seed'; it is called without arguments$"),
        ("def experiment():\n    raise TypeError('no width')\n", r"TypeError: no width \(line 2\)$"),
    ],
)
def test_that_an_experiment_is_called_without_arguments_is_told_where_it_wants_some(
    text: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(ConfigError, match=told):
        resolve(f"{tmp_path}/own.py:experiment", {})


def test_targets_whose_environments_differ_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter(("CartPole-v1", "Acrobot-v1"))
    monkeypatch.setattr(
        OwnCartPole,
        "build",
        lambda self, lanes, seed, render=False: Gymnasium(id=next(ids)).build(lanes, seed),
    )
    made = ppo("small", OwnCartPole(id="CartPole-v1"), lanes=4, sample_steps=16, updates=2)
    made = made.replace(workers={**made.workers, "actor": made.workers["actor"].replace(ring=2)})
    with pytest.raises(RunError, match=r"actor-0: target 1: the environment has other agents, or spaces"):
        tidemill.train(made, launch="inline", run_dir=tmp_path / "run", quiet=True)


def test_a_signal_is_heard_while_a_sink_hangs_as_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = threading.Event()

    class Unmade(tidemill.MetricSink):
        def __init__(self, run: Any) -> None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            freed.wait()

        def write(self, record: Any) -> None: ...

    monkeypatch.setattr(spool, "MAKING", 60.0)  # then it is another error
    try:
        done = tidemill.train(
            "CartPole-v1", launch="inline", log=[Unmade], run_dir=tmp_path / "run", quiet=True
        )
    finally:
        freed.set()
    assert (done.summary.status, done.summary.reason) == ("interrupted", "Ctrl-C")
    assert not (tmp_path / "run").exists()
