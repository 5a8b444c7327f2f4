"""One experiment on several hosts: what it learns does not depend on where its workers
are, and its end leaves nothing anywhere."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from tests.hosts.hosts import needs_namespaces
from tests.launchers.host_launchers import (
    PATIENT,
    BlindHost,
    CalledRunner,
    FourTrainers,
    NoCommand,
    NoTidemill,
    OtherKind,
    SixHosts,
    ThreeHosts,
    TwoHosts,
)
from tests.run.watching import Run, log_of, wait_until

import tidemill.training.train
from tidemill import (
    DQN,
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Drawn,
    Evaluation,
    Experiment,
    Gymnasium,
    Limits,
    PolicyWorkers,
    QNetwork,
    ReplayActors,
    ReplayTrainer,
    Trainer,
    resume,
    train,
)
from tidemill.api.launcher import Job
from tidemill.api.transport import Link
from tidemill.core.cores import cores
from tidemill.core.errors import ConfigError, RunError, TidemillError
from tidemill.launchers import hosts, report_checks
from tidemill.launchers.engine import CommandEngine, CommandHost, HostEngine
from tidemill.launchers.host_workers import given_back_in_lockstep
from tidemill.launchers.hosts import HostsLauncher
from tidemill.launchers.known_agents import HostLink, Share
from tidemill.launchers.placement import place
from tidemill.metrics.json_lines import read_metrics
from tidemill.nets.choose_device import visible_gpus
from tidemill.replay.replay import Replay
from tidemill.run.events import Event, read_events
from tidemill.store.checkpoint import read_newest
from tidemill.training.check_resume import compare
from tidemill.training.experiment_from import resolve

LAUNCHERS = Path(__file__).with_name("host_launchers.py")
TWO = f"{LAUNCHERS}:TwoHosts"
AGENT = "tidemill.launchers.host"


def experiment(
    updates: int = 6,
    trainers: int = 1,
    servers: int = 0,
    lag: int | None = 0,
    actors: int = 2,
    sums: str = "ranks",
) -> Experiment:
    """Actors, each with two targets; in lockstep, so that equal seeds are equal."""
    workers: dict[str, Any] = {
        "actor": Actors(
            environment=Gymnasium(id="CartPole-v1"),
            count=actors,
            lanes=4,
            ring=2,
            agents=(AgentSpec(sample_steps=16, inference="served" if servers else "inline"),),
        ),
        "trainer": Trainer(
            algorithm=PPO(minibatch_size=32, epochs=2), count=trainers, max_policy_lag=lag, sums=sums
        ),
    }
    if servers:
        workers["server"] = PolicyWorkers(policies=("policy",), stream="served", count=servers)
    return Experiment(
        name="hosts",
        policies={"policy": ActorCritic(hidden=(16,))},
        workers=workers,
        limits=Limits(updates=updates),
        seed=5,
    )


def replay() -> Experiment:
    return Experiment(
        name="hosts",
        policies={"policy": QNetwork(hidden=(16,))},
        workers={
            "actor": ReplayActors(environment=Gymnasium(id="CartPole-v1"), lanes=2, count=2),
            "trainer": ReplayTrainer(
                algorithm=DQN(), buffer=Replay(capacity=1000, warm_up=50), batch_size=8, ratio="1/4"
            ),
        },
        limits=Limits(steps=400),
        seed=5,
    )


def weights(made: Experiment, launch: Any, run: Path) -> Any:
    assert (
        train(made, launch=launch, layout="given", run_dir=run, quiet=True).summary["status"] == "completed"
    )
    return read_newest(run / "checkpoints" / "policy")


@pytest.mark.parametrize(
    ("made", "launcher", "launch"),
    [
        (experiment(), ThreeHosts, "processes"),
        (experiment(trainers=2), TwoHosts, "threads"),
        (experiment(trainers=3, actors=3), ThreeHosts, "threads"),
        (experiment(actors=5), SixHosts, "threads"),
        (experiment(servers=1, actors=4).replace(exact_resume=True), ThreeHosts, "threads"),
    ],
    ids=["three hosts", "equal trainers", "three of them", "a tree of six", "a policy worker"],
)
def test_several_hosts_learn_what_processes_or_threads_of_one_learn(
    made: Experiment, launcher: Any, launch: str, tmp_path: Path
) -> None:
    """In lockstep it is the same; threads begin sooner."""
    alone = weights(made, launch, tmp_path / "alone")
    together = weights(made, launcher, tmp_path / "together")
    compared, differing = compare("policy", alone, together)
    assert compared > 15 and differing == []
    assert [path.name for path in (tmp_path / "together").rglob("host-*")] == []  # they had nothing to say


@pytest.mark.parametrize("sums", ["hosts", "torch"])
def test_other_sums_are_the_same_but_for_their_last_bits(
    tmp_path: Path, sums: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    four = partial(experiment, trainers=4, actors=4)
    alone, together = (
        weights(four(sums=how), launch, tmp_path / how).arrays["policy"]
        for how, launch in (("ranks", "processes"), (sums, FourTrainers))
    )
    if sums == "hosts":
        assert any(array.tobytes() != together[name].tobytes() for name, array in alone.items())
    for name, array in alone.items():
        np.testing.assert_allclose(together[name], array, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match=r"goes on in every bit, .* take sums = \"ranks\""):
        four(sums=sums).replace(exact_resume=True).check()


def test_a_run_that_resumes_exactly_goes_on_in_every_bit_on_fewer_hosts_and_on_more(tmp_path: Path) -> None:
    alone = weights(experiment(updates=9), "threads", tmp_path / "alone")
    weights(experiment(updates=3).replace(exact_resume=True), ThreeHosts, tmp_path / "together")
    for updates, launch in ((6, TwoHosts), (9, ThreeHosts)):
        resume(tmp_path / "together", launch=launch, limits={"updates": updates}, quiet=True)
    compared, differing = compare("policy", alone, read_newest(tmp_path / "together/checkpoints/policy"))
    assert compared > 15 and differing == []


@pytest.mark.parametrize("made", [experiment(servers=2, lag=None), replay()], ids=["served", "replay"])
def test_policy_workers_and_replay_memories_are_joined_over_hosts(made: Experiment, tmp_path: Path) -> None:
    summary = train(made, launch=ThreeHosts, layout="given", run_dir=tmp_path / "run", quiet=True).summary
    assert summary["status"] == "completed"
    if made.limits.steps:  # those open are played to their end
        assert 400 <= summary["env_steps"] < 420 and summary["updates"] >= 87
    else:
        assert summary["updates"] == 6


def test_a_layout_has_the_cores_of_all_hosts_and_one_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.layouts.auto_layout.SECONDS", 240)  # also on a busy machine
    result = train("CartPole-v1", steps=5000, launch=ThreeHosts, run_dir=tmp_path / "run", quiet=True)
    assert result.summary["status"] == "completed"
    told = json.loads((result.folder / "layout.json").read_text())
    assert f"{3 * cores()} cores of 3 hosts" in told["told"] and "trainers=1" in told["layout"]
    assert [kind["hosts"] for kind in told["kinds"].values()] == [["runner", "b", "c"]]


def test_what_ends_before_the_launch_leaves_no_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RunError("no layout")

    monkeypatch.setattr(tidemill.training.train, "lay_out", fails)
    with pytest.raises(RunError, match="no layout"):
        train(experiment(), launch=TwoHosts, run_dir=tmp_path / "run", quiet=True)
    wait_until(lambda: not agents_of(psutil.Process().children(recursive=True)), 60, "no agent is left")


def test_workers_are_placed_where_cores_are_left() -> None:
    cores = {"runner": 2, "b": 4, "c": 1}
    assert place(experiment(trainers=2, servers=2), cores) == {
        "actor-0": "b",
        "actor-1": "b",
        "trainer-0": "runner",
        "trainer-1": "b",
        "server-0": "b",
        "server-1": "b",
    }


def test_in_lockstep_policy_workers_stand_where_they_have_the_newest_version() -> None:
    cores = {"runner": 1, "b": 1, "c": 1}
    apart = {"actor-0": "b", "actor-1": "c", "trainer-0": "runner"}
    assert place(experiment(servers=1), cores) == {**apart, "server-0": "runner"}
    # with lag they stand where they are asked
    assert place(experiment(servers=1, lag=2), cores)["server-0"] == "b"
    # as they do where all stand that ask them
    assert place(experiment(servers=1), cores, {"actor": "c"})["server-0"] == "c"
    # unless an equal trainer gives one of these its samples back
    two = {"actor": "c", "trainer-1": "b"}
    assert place(experiment(trainers=2, servers=1), cores, two)["server-0"] == "runner"
    together = experiment(servers=1).replace(together=("actor", "server"))
    assert place(together, {"runner": 1, "b": 8, "c": 8})["server-0"] == "runner"  # and actor-0 with it
    assert place(together, {"runner": 1, "b": 8, "c": 8}, {"trainer": "c"})["server-0"] == "c"
    for chosen in ({"server": "b"}, {"server": "c", **two, "actor-0": "b"}):
        with pytest.raises(ConfigError, match=r"server-0 stands on host ., trainer-0 on runner: with max"):
            place(experiment(servers=1, trainers=2 if "trainer-1" in chosen else 1), cores, chosen)


def test_the_actor_of_an_exact_replay_memory_stands_with_its_trainer() -> None:
    made = replay()
    actor, trainer = made.workers["actor"].replace(count=1), made.workers["trainer"].replace(exact=True)
    made = made.replace(workers={"actor": actor, "trainer": trainer})
    cores = {"runner": 1, "b": 8}
    assert place(made, cores) == {"actor-0": "runner", "trainer-0": "runner"}
    assert set(place(made, cores, {"actor": "b", "trainer": "b"}).values()) == {"b"}
    assert set(place(made, cores, {"trainer": "b"}).values()) == {"b"}  # or where its GPU is
    there = made.replace(workers={"actor": actor, "trainer": trainer.replace(device="cuda")})
    assert set(place(there, cores, gpus={"b": 1}).values()) == {"b"}
    with pytest.raises(
        ConfigError, match=r"actor-0 stands on host b, trainer-0 on runner: with exact = True"
    ):
        place(made, cores, {"actor": "b"})


def test_samples_are_given_back_in_lockstep_where_their_trainer_trains_so() -> None:
    for lag, expected in ((0, 4), (None, 0)):
        made = experiment(servers=1, lag=lag)
        assert len(given_back_in_lockstep(made, made.edges())) == expected


def test_the_fastest_hosts_that_have_cores_left_get_actors() -> None:
    cores = {"runner": 2, "b": 1, "c": 2, "d": 1}
    paces = {"runner": 2e-6, "b": 1e-6, "c": 4e-6}  # d was not measured
    places = place(experiment(actors=7), cores, paces=paces)
    hosts = [places[f"actor-{number}"] for number in range(7)]
    # the trainer has a core of the runner's; beyond all cores they are spread evenly
    assert (hosts[:2], sorted(hosts[2:5]), hosts[5:]) == (["b", "runner"], ["c", "c", "d"], ["runner", "b"])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Run]]:
    runs: list[Run] = []

    def begin(function: str) -> Run:
        runs.append(Run(tmp_path, function, "--layout", "given", launch=TWO, code=PATIENT))
        runs[-1].wait_for_updates()
        return runs[-1]

    yield begin
    for run in runs:
        run.kill_all()


def agents_of(processes: list[psutil.Process]) -> dict[str, psutil.Process]:
    """Return those that are agents, by their names."""
    found = {}
    for process in processes:
        with suppress(psutil.Error):  # it has ended meanwhile
            if AGENT in (words := process.cmdline()):
                found[words[-1]] = process
    return found


def worker_of(process: psutil.Process) -> psutil.Process:
    """Return a worker's process that this one has begun, once there is one."""
    found: list[psutil.Process] = []

    def look() -> bool:
        found.clear()
        for child in process.children():
            with suppress(psutil.Error):  # it has ended meanwhile
                # one that waits for the next life has no output yet
                if "tidemill.launchers.entry" in child.cmdline() and log_of(child) != Path(os.devnull):
                    found.append(child)
        return bool(found)

    wait_until(look, 60, "the host has workers")
    return found[0]


def events(run: Run, what: str) -> list[Event]:
    """Return the events of a kind that are written down by now."""
    return [event for event in read_events(run.path) if event.what == what]


@pytest.mark.parametrize(("made", "places"), [("cartpole", ("runner", "b")), ("equal", ("b",))])
def test_a_worker_that_dies_on_any_host_lives_again_and_a_runner_that_dies_takes_its_hosts_along(
    start: Callable[[str], Run], made: str, places: tuple[str, ...]
) -> None:
    run = start(made)
    there = {"runner": psutil.Process(run.main.pid)} | agents_of(run.processes())
    lines = lambda: len((run.path / "metrics.jsonl").read_text().splitlines())  # noqa: E731
    with_it = 2 if made == "equal" else 1  # the actor of its process
    for deaths, where in enumerate(2 * places, 1):
        worker_of(there[where]).kill()
        lives = deaths * with_it
        wait_until(lambda lives=lives: len(events(run, "lives")) >= lives, 120, "it lives again")
        before = lines()
        wait_until(lambda before=before: lines() > before + 2, 120, "updates go on")
    if made == "equal":
        os.killpg(run.main.pid, signal.SIGINT)
    else:
        run.main.kill()
    status, text = run.ended()
    assert status == (130 if made == "equal" else -signal.SIGKILL), text
    run.nothing_is_left()


OWN_FILE = """
import gymnasium
from its_environment import Walk

from tidemill import PPO, ActorCritic, Actors, Experiment, Gymnasium, Limits, Trainer


class Half(gymnasium.RewardWrapper):
    def reward(self, reward):
        return reward / 2


def experiment():
    return Experiment(
        name="own",
        policies={"policy": ActorCritic(hidden=(16,))},
        workers={
            "actor": Actors(environment=Gymnasium(make=Walk, wrap=Half), count=4, lanes=4),
            "trainer": Trainer(algorithm=PPO()),
        },
        limits=Limits(updates=2),
    )
"""
ITS_ENVIRONMENT = """
import gymnasium
import numpy as np


class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        print("there is a walk", flush=True)  # of each actor, before the run begins

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.zeros(3, np.float32), 1.0, bool(self.np_random.random() < 0.1), False, {}
"""


@pytest.fixture
def hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that `BlindHost` does not see."""
    command = ("unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path))
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        needs_namespaces(f"a folder cannot be hidden: {error}")
    monkeypatch.setenv("HIDDEN", str(tmp_path))
    return tmp_path


def test_next_lives_that_cannot_be_ordered_are_none(tmp_path: Path) -> None:
    """Where the run's folder is away, the next try finds lives counted as they were."""
    launcher, told = TwoHosts(), list[object]()
    share = Share("b", SimpleNamespace(name="b", home="b"))  # type: ignore[arg-type]
    there: Any = SimpleNamespace(shares={"b": share}, tell_share=lambda *words: told.append(words))
    share.links["actor-0"] = of_the_dead = HostLink("actor-0", lambda _: None, 0)
    launcher._agents, launcher._own = there, there
    launcher.places, launcher._logs = {"actor-0": "b"}, tmp_path / "away"
    launcher._job = Job(experiment())
    for _ in range(2):
        with pytest.raises(OSError, match="away"):
            launcher.restart(["actor-0"])
    assert launcher._lives["actor-0"] == 0 and share.links == {"actor-0": of_the_dead} and told == []


def train_own_file(hidden: Path) -> subprocess.CompletedProcess[str]:
    """Have a host that does not see the folder train with `own.py` of it."""
    words = ["train", "own.py:experiment", "--launch", f"{LAUNCHERS}:BlindHost", "--layout", "given"]
    return subprocess.run(
        [sys.executable, "-m", "tidemill.cli.main", *words, "--run-dir", "run"],
        cwd=hidden,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_user_s_code_reaches_a_host_without_it_and_logs_come_back(hidden: Path) -> None:
    (hidden / "own.py").write_text(OWN_FILE)
    (hidden / "its_environment.py").write_text(ITS_ENVIRONMENT)
    done = train_own_file(hidden)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = {path.name: path.read_text() for path in (hidden / "run" / "logs").iterdir()}
    assert sorted(logs) == [f"actor-{i}.log" for i in range(4)]  # of both hosts, and no other file
    assert all("there is a walk" in text for text in logs.values())


def test_a_module_that_is_installed_on_the_runner_s_host_alone_is_named(
    hidden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = hidden / "site-packages"
    packages.mkdir()
    (packages / "only_here.py").write_text("")
    (hidden / "own.py").write_text(f"import only_here\n{OWN_FILE}")
    (hidden / "its_environment.py").write_text(ITS_ENVIRONMENT)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    done = train_own_file(hidden)
    (error,) = done.stderr.splitlines()
    assert done.returncode == 1 and error.startswith("error: host b cannot start its workers: ")
    assert "No module named 'only_here'; what is installed here must be installed there" in error
    assert not (hidden / "run").exists()
    wait_until(lambda: not agents_of(psutil.Process().children(recursive=True)), 60, "nothing is left")


def test_hosts_tell_whether_they_see_the_run_s_folder(hidden: Path) -> None:
    for kind, sees in ((TwoHosts, True), (BlindHost, False)):
        launcher = kind()
        try:
            hosts = launcher.hosts(str(hidden / kind.__name__))
            assert [(host.name, host.sees) for host in hosts] == [("runner", True), ("b", sees)]
        finally:
            launcher.close(0.0)
        assert not list((hidden / kind.__name__ / "logs").glob("seen-*"))


def test_a_folder_that_a_host_must_see_and_does_not_is_named(hidden: Path) -> None:
    launch, made = f"{LAUNCHERS}:BlindHost", experiment(updates=2, trainers=2)
    with pytest.raises(RunError, match=r"host b cannot.*is not seen there, and trainer-1 must read"):
        train(made, launch=launch, layout="given", run_dir=hidden / "run", quiet=True)
    wait_until(lambda: not psutil.Process().children(recursive=True), 60, "nothing is left")


class Judged(BlindHost):
    """A host that does not see the run's folder has who plays what is evaluated."""

    def __init__(self) -> None:
        super().__init__({"judge": "b"})


def test_versions_are_drawn_on_a_host_that_does_not_see_the_folder(hidden: Path) -> None:
    played = AgentSpec(parameters=Drawn(tag="evaluating"), mode="concise", samples="evaluation")
    made = experiment(lag=None)
    trainer = made.workers["trainer"].replace(database_updates=5)
    judge = Actors(environment=Gymnasium(id="CartPole-v1"), lanes=4, agents=(played,))
    workers = {**made.workers, "trainer": trainer, "judge": judge, "evaluation": Evaluation(games=8)}
    limits = Limits(until="evaluation/version >= 10")
    made = made.replace(workers=workers, limits=limits)
    summary = train(made, launch=Judged, layout="given", run_dir=hidden / "run", quiet=True).summary
    assert (summary["status"], summary["reason"]) == ("completed", limits.until)


ITS_SPEED = """
import os

import gymnasium
import numpy as np

from tidemill import PPO, ActorCritic, Actors, AgentSpec, Experiment, Gymnasium, Limits, Trainer


class Count(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        sum(range(20_000 if "SLOW" in os.environ else 10))
        return np.zeros(3, np.float32), 1.0, False, False, {}


def experiment():
    return Experiment(
        name="own",
        policies={"policy": ActorCritic(hidden=(16,))},
        workers={
            "actor": Actors(environment=Gymnasium(make=Count), lanes=8, agents=(AgentSpec(sample_steps=8),)),
            "trainer": Trainer(algorithm=PPO(minibatch_size=32)),
        },
        limits=Limits(updates=3),
    )
"""


def test_costs_are_measured_on_a_host_of_each_kind_and_a_slow_one_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.layouts.auto_layout.SECONDS", 240)  # also on a busy machine
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "own.py"
    file.write_text(ITS_SPEED)
    placed: list[dict[str, str]] = []

    class Noted(OtherKind):
        def launch(self, job: Job) -> dict[str, Link]:
            links = super().launch(job)
            placed.append(self.places)
            return links

    made, _ = resolve(f"{file}:experiment", {})
    run = train(made, launch=Noted, run_dir=tmp_path / "run", source=file, quiet=True)
    assert run.summary["status"] == "completed"
    told = json.loads((run.folder / "layout.json").read_text())
    here, there = told["kinds"].values()
    assert (here["hosts"], there["hosts"]) == (["runner"], ["b"])
    assert there["pace"] > 4 * here["pace"] and there["costs"]["env"] > 4 * here["costs"]["env"]
    assert f"; b ({there['processor']}): a step takes " in told["told"]
    # what computes layers is what all hosts have, as its bits are those of all
    config = json.loads((run.folder / "config.json").read_text())
    assert config["policies"]["policy"]["native"] in ("off", "baseline")
    (tmp_path / "cache").rename(tmp_path / "gone")  # a resumed run needs no costs
    resume(run.folder, launch=Noted, limits={"updates": 4}, quiet=True)
    assert [set(places.values()) for places in placed] == 2 * [{"runner"}]


def test_code_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "MOST_CODE_BYTES", 100)
    file = tmp_path / "large.py"
    file.write_text("#" * 101)
    with pytest.raises(ConfigError, match="the user's own code has 101 bytes in 1 files"):
        train(
            experiment(), launch=TwoHosts, layout="given", run_dir=tmp_path / "run", source=file, quiet=True
        )


def test_a_host_without_tidemill_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"host b has no agent: .*\n(.|\n)*No module named"):
        train(experiment(), launch=NoTidemill, layout="given", run_dir=tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        (NoCommand, "host b cannot be reached: its command no-such-shell cannot be run (No such file"),
        (CalledRunner, 'no host may be called "runner"'),
    ],
)
def test_a_host_that_cannot_be_called_is_named(
    launcher: type[HostsLauncher], said: str, tmp_path: Path
) -> None:
    with pytest.raises(TidemillError, match=re.escape(said)):
        train(experiment(), launch=launcher, run_dir=tmp_path / "run", quiet=True)
    wait_until(lambda: not agents_of(psutil.Process().children(recursive=True)), 60, "no agent is left")


def test_a_host_of_another_tidemill_is_named_before_it_is_told_what_it_does_not_understand(
    tmp_path: Path,
) -> None:
    """Its version is the same, as of clones of the repository."""
    other = tmp_path / "tidemill"
    shutil.copytree(Path(tidemill.__file__).parent, other, ignore=shutil.ignore_patterns("__pycache__"))
    orders = other / "hosts" / "orders.py"
    orders.write_text(orders.read_text().replace("    runner_address: str", "    address_of_the_runner: str"))

    class OtherTidemill(HostsLauncher):
        def engine(self) -> HostEngine:
            return CommandEngine({"b": CommandHost("127.0.0.1", ("env", f"PYTHONPATH={tmp_path}"))})

    with pytest.raises(RunError, match=r"host b has other versions, .*: tidemill 0\S+ \(.*, here 0\S+ \("):
        train(experiment(), launch=OtherTidemill, layout="given", run_dir=tmp_path / "run", quiet=True)


def test_a_host_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = report_checks.versions()
    monkeypatch.setattr(report_checks, "versions", lambda: {**ours, "numpy": "1.0"})
    with pytest.raises(RunError, match=f"host b has other versions.*numpy {ours['numpy']}, here 1.0"):
        train(experiment(), launch=TwoHosts, layout="given", run_dir=tmp_path / "run", quiet=True)
    wait_until(lambda: not agents_of(psutil.Process().children(recursive=True)), 60, "no agent is left")


def test_workers_are_placed_where_the_user_says() -> None:
    cores = {"runner": 2, "b": 4, "c": 1}
    made = experiment(trainers=2, servers=2)
    assert place(made, cores, {"actor": "c", "actor-1": "runner", "server-1": "b"}) == {
        "actor-0": "c",
        "actor-1": "runner",
        "trainer-0": "runner",
        "trainer-1": "b",
        "server-0": "c",
        "server-1": "b",
    }
    for chosen, said in (
        ({"actr": "b"}, r'--place actr=b: there is no such worker; did you mean "actor"'),
        ({"actor": "d"}, r"--place actor=d: there is no such host"),
    ):
        with pytest.raises(ConfigError, match=said):
            place(made, cores, chosen)
    together = made.replace(together=("actor", "trainer"))
    with pytest.raises(ConfigError, match="actor-0=b, trainer-0=c, and they share a process"):
        place(together, cores, {"actor": "b", "trainer": "c"})


def test_the_command_line_says_where_workers_stand(tmp_path: Path) -> None:
    launch, count = f"{LAUNCHERS}:OneCore", "workers.actor.count=2"
    words = ["train", "CartPole-v1", "--launch", launch, "--layout", "given", "--set", count]
    words += ["--place", "actor=b", "--max-steps", "20000", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "tidemill.cli.main", *words], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [
        (each.get("host/runner/workers"), each.get("host/b/workers"))
        for each in read_metrics(tmp_path / "run")
    ]
    assert (1, 2) in told, told
    table = f"host     cores   GPUs   workers\nrunner {cores():7}{visible_gpus():7}   trainer-0\n"
    table += "b            1      0   actor-0, actor-1"
    assert done.stdout.count(table) == 1, done.stdout
    assert done.stderr.count("host b has 1 core for 2 processes (actor-0, actor-1)") == 1, done.stderr
    words = ["status", str(tmp_path / "run")]
    told = subprocess.run(
        [sys.executable, "-m", "tidemill.cli.main", *words], capture_output=True, text=True, timeout=240
    ).stdout
    assert "Where its workers stood last" in told and table in told, told
