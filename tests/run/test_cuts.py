"""Runs with `exact_resume` go on as if they had never ended: after a clean end at every
update, after a kill at any moment, in all modes; and what cannot is named."""

import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import psutil
import pytest
from pettingzoo import ParallelEnv
from tests.run.cut_experiments import MANY, beside_memory, experiment, population, two_memories, two_policies
from tests.run.dying_at_last import DYING, dying_at_last, fragile, lasting_at_last
from tests.run.staged import Widening
from tests.run.watching import log_of, wait_until
from typer.testing import CliRunner

from tidemill import (
    DQN,
    PPO,
    QRDQN,
    SAC,
    TD3,
    ActorCritic,
    Actors,
    AgentSpec,
    Buffers,
    DeterministicActor,
    Drawn,
    Evaluation,
    Experiment,
    Gymnasium,
    Impala,
    Limits,
    PettingZoo,
    Policy,
    PolicyWorkers,
    PriorityQueue,
    QNetwork,
    Query,
    Queue,
    Reanalyse,
    RecurrentActorCritic,
    ReplayActors,
    ReplayTrainer,
    SquashedGaussian,
    Stage,
    TidemillError,
    Trainer,
    check_resume,
    resume,
    train,
)
from tidemill.algorithms.ppo import PPOLearner
from tidemill.api.buffer import Buffer
from tidemill.api.control_messages import Hold, Holding, Save, Saved, State, unpack_down
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.processing import Processor, ProcessorConfig
from tidemill.api.schedule import LinearSchedule
from tidemill.cli.main import app
from tidemill.core.cut import generator_state, set_generator_state
from tidemill.core.errors import CheckpointError, ConfigError
from tidemill.launchers.inline import InlineLauncher
from tidemill.metrics.json_lines import read_metrics
from tidemill.replay.replay import Replay
from tidemill.run import cuts, ending
from tidemill.run.events import read_events
from tidemill.run.folder import RunFolder
from tidemill.run.member import Member
from tidemill.run.progress import Progress
from tidemill.run.restart_budget import RestartBudget
from tidemill.run.resume_point import ResumePoint
from tidemill.run.run_state import RunState
from tidemill.store.checkpoint import checkpoints, read_checkpoint, read_newest
from tidemill.training.check_resume import compare
from tidemill.transports.local import LocalBell, LocalLink
from tidemill.workers.actor import ActorWorker
from tidemill.workers.cut_files import (
    RUNNER,
    go_back_together,
    has_part,
    number_of,
    read_part_of,
    write_part_of,
)

FILE = Path(__file__)


@pytest.fixture(autouse=True, scope="module")
def patient_end() -> Iterator[None]:
    """However busy the machine is, all come to rest for a run's last cut."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ending, "CLOSE_DEADLINE", 60.0)
        yield


class Drifting(gymnasium.Env[Any, Any]):
    """Its rewards come from numpy's global generator, not from its own."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), np.random.random(), False, False, {}


class ForgetfulPPO(PPO):
    """An algorithm whose learner forgets its optimiser."""

    def build(self, policy: Any, seed: int) -> Any:
        return Forgetful(self, policy, seed)


class Forgetful(PPOLearner):
    def load_state(self, state: Any) -> None:
        pass


class Forgetting(Queue):
    """Its buffer does not tell what it holds."""

    def build(self, source: Any, demand: Any) -> Any:
        buffer = super().build(source, demand)
        buffer.state = Buffer.state.__get__(buffer)
        return buffer


# until the run ends, and by steps
SCHEDULED = PPO(
    minibatch_size=32,
    epochs=2,
    learning_rate=LinearSchedule(1e-2, 1e-4),
    entropy_coefficient=LinearSchedule(0.1, 0.0, to_step=500),
    clip=LinearSchedule(0.3, 0.1, to_step=300, from_step=100),
)
INLINE: dict[str, dict[str, Any]] = {
    "two targets, samples ahead": {"slots": 3},
    "several actors, requests joined": {"ring": 3, "count": 2, "flush_requests": 3},
    "one slot": {"slots": 1, "ring": 1, "lanes": 8},
    "held back until episodes are done": {
        "environment": Gymnasium(id="Acrobot-v1", max_episode_steps=40),
        "agents": (AgentSpec(mode="after_done", sample_steps=16, burn_in=2, frame_stack=3),),
        "max_episode_steps": 30,
    },
    "whole episodes": {
        "agents": (AgentSpec(mode="full", frame_stack=2),),
        "max_episode_steps": 25,
    },
    "memory and normaliser": {
        "environment": Gymnasium(id="Pendulum-v1", max_episode_steps=50),
        "policy": RecurrentActorCritic(hidden=(8,), normalise_observations=True),
    },
    "schedules": {"algorithm": SCHEDULED},
    "V-trace": {"algorithm": Impala(minibatch_size=32)},
}


@pytest.mark.parametrize(("launch", "trainers"), [("inline", 1), ("threads", 2), ("processes", 2)])
def test_runs_in_lockstep_resume_exactly_wherever_their_workers_are(launch: str, trainers: int) -> None:
    made = experiment(lag=0, count=2, trainers=trainers, algorithm=SCHEDULED)
    found = check_resume(made, updates=6, launch=launch)
    assert found.exact and found.compared > 40, found


class Counting(gymnasium.Env[Any, Any]):
    """Is paid, from its 50th step on, as often as it was brought back."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.steps = self.times = 0

    def tidemill_state(self) -> dict[str, Any]:
        return {"steps": self.steps, "times": self.times}

    def load_tidemill_state(self, state: dict[str, Any]) -> None:
        self.steps, self.times = int(state["steps"]), int(state["times"]) + 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(2, np.float32), float(self.times if self.steps > 48 else 0), False, False, {}


@pytest.mark.parametrize("launch", ["inline", "threads"])
def test_what_actors_hold_at_the_end_is_compared_or_what_comes_of_it(launch: str) -> None:
    made = experiment(lag=0, environment=Gymnasium(make=Counting), ring=1, lanes=2)
    found = check_resume(made, updates=3, launch=launch)  # of 16 steps each
    assert not found.exact and found.differences
    if launch == "inline":
        assert found.differences[0].startswith("cuts/actor-0: ")


@pytest.mark.parametrize(("launch", "lag"), [("inline", None), ("threads", 0)])
def test_several_policies_resume_exactly_all_of_them(launch: str, lag: int | None) -> None:
    found = check_resume(two_policies(lag), updates=6, launch=launch)
    assert found.exact and found.compared > 200, found


class Faulty(gymnasium.Env[Any, Any]):
    """One step of thirty tells NaN, by its own random stream."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def _told(self) -> Any:
        return self.np_random.normal(size=2).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._told(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        told = self._told()
        if self.np_random.random() < 1 / 30:
            told[0] = np.nan
        return told, float(told[1]), self.steps == 12, False, {}


class FaultyGame(ParallelEnv[str, Any, Any]):
    """The same, with one player."""

    metadata: ClassVar[dict[str, Any]] = {"name": "faulty"}

    def __init__(self) -> None:
        self.env, self.possible_agents = Faulty(), ["player"]

    def observation_space(self, agent: str) -> Any:
        return self.env.observation_space

    def action_space(self, agent: str) -> Any:
        return self.env.action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = ["player"]
        return tuple({"player": told} for told in self.env.reset(seed=seed))

    def step(self, actions: Any) -> Any:
        told = tuple({"player": each} for each in self.env.step(actions["player"]))
        self.agents = [] if told[2]["player"] else self.agents
        return told


@pytest.mark.parametrize(
    ("environment", "launch"), [(Gymnasium(make=Faulty), "inline"), (PettingZoo(make=FaultyGame), "threads")]
)
def test_lanes_that_are_made_anew_are_seeded_as_if_the_run_had_never_ended(
    environment: EnvironmentConfig, launch: str
) -> None:
    several = experiment(lag=0, environment=environment, lane_restarts=1000, lane_fault_records=0)
    found = check_resume(several, updates=8, launch=launch)
    assert found.exact and found.compared > 40, found
    times = re.search(r"made anew (\d+) times in the straight run and (\d+) times in", found.made_anew)
    assert times is not None and times[1] == times[2] and "nan" in found.made_anew.lower(), found


def self_play(lag: int | None, **trainer: Any) -> Experiment:
    """A game against versions that are drawn, which an evaluation watches."""
    game = PettingZoo(make="pettingzoo.classic.tictactoe_v3")
    past = AgentSpec(match="player_2", parameters=Drawn(among=Query(limit=4)), samples=None)
    judged = AgentSpec(
        match="player_1", parameters=Drawn(tag="evaluating"), mode="concise", samples="evaluation"
    )
    return Experiment(
        name="cuts",
        policies={"policy": ActorCritic(hidden=(8,))},
        workers={
            "actor": Actors(
                environment=game,
                lanes=1,
                ring=2,
                count=2,
                agents=(AgentSpec(match="player_1", sample_steps=8), past),
            ),
            "trainer": Trainer(
                algorithm=PPO(minibatch_size=16, epochs=1),
                max_policy_lag=lag,
                **{"database_updates": 2, "database_versions": None, **trainer},
            ),
            "judge": Actors(environment=game, lanes=1, agents=(judged, past)),
            "evaluation": Evaluation(games=3),
        },
        exact_resume=True,
        seed=5,
    )


@pytest.mark.parametrize(("launch", "lag"), [("inline", None), ("threads", 0)])
def test_drawn_opponents_are_drawn_again_and_evaluations_watch(launch: str, lag: int | None) -> None:
    found = check_resume(self_play(lag), updates=6, launch=launch)
    assert found.exact and found.compared > 150, found


DRAWS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "versions by the clock": ({"database_updates": None}, {}, "set workers.trainer.database_updates"),
    "versions that go": ({"database_versions": 20}, {}, "database_versions = None"),
    "by a tag": ({}, {"tag": "best"}, 'by the tag "best", which moves at any time'),
    "by what evaluations say": (
        {},
        {"how": "prioritised", "metric": "evaluation/return"},
        'by "evaluation/return", which moves',
    ),
}


@pytest.mark.parametrize(("trainer", "drawn", "match"), DRAWS.values(), ids=DRAWS)
def test_draws_that_depend_on_the_clock_are_refused_by_name(
    trainer: dict[str, Any], drawn: dict[str, Any], match: str, tmp_path: Path
) -> None:
    made = self_play(0, **trainer)
    actor = made.groups(Actors)["actor"]
    first, past = actor.agents
    actor = actor.replace(
        agents=(first, past.replace(parameters=Drawn(**drawn) if drawn else past.parameters))
    )
    with pytest.raises(ConfigError, match=f"exact_resume = True cannot be had here: .*{match}"):
        train(made.replace(workers={**made.workers, "actor": actor}), run_dir=tmp_path / "run", quiet=True)


def served(lag: int | None, **workers: Any) -> Experiment:
    """Two actors of two targets that a policy worker answers, with memory."""
    spec = AgentSpec(sample_steps=8, inference="served")
    policy = RecurrentActorCritic(hidden=(8,), normalise_observations=True)
    made = experiment(lag, updates=6, policy=policy, count=2, lanes=2, agents=(spec,))
    return made.replace(workers={**made.workers, "served": PolicyWorkers(stream="served", **workers)})


@pytest.mark.parametrize(("launch", "lag"), [("inline", None), ("threads", 0)])
def test_what_policy_workers_answer_follows_from_what_each_client_asks(launch: str, lag: int | None) -> None:
    """Whoever asks besides, and whenever the run is cut and goes on."""
    found = check_resume(served(lag), updates=6, launch=launch)
    assert found.exact and found.compared > 100, found


@pytest.mark.parametrize(("launch", "trainers"), [("inline", 2), ("threads", 3)])
def test_equal_trainers_rest_between_two_updates_and_cuts_change_nothing(
    launch: str, trainers: int, tmp_path: Path
) -> None:
    """Of as many updates as it takes until there were six cuts."""
    made = experiment(0, updates=MANY, trainers=trainers, count=3, ring=1)

    def save(record: dict[str, float], control: Any) -> None:
        if cuts_of(tmp_path / "cut")[-1:] >= [6]:
            control.stop()
        control.save()

    ended = train(made, launch=launch, run_dir=tmp_path / "cut", quiet=True, on_update=save).summary
    made = experiment(0, updates=ended["updates"], trainers=trainers, count=3, ring=1)
    train(made, launch=launch, run_dir=tmp_path / "whole", quiet=True)
    own = [f"cuts/trainer-{rank}" for rank in range(1, trainers)]
    assert differences(tmp_path / "whole", tmp_path / "cut", *own) == []
    assert len(cuts_of(tmp_path / "cut")) == 4


def cuts_of(folder: Path, worker: str = "actor-0") -> list[int]:
    """Return the numbers of the cuts of which a worker has its part."""
    return [number_of(path) for path in checkpoints(folder / "cuts" / worker)]


def differences(first: Path, second: Path, *places: str, policy: str = "policy") -> list[str]:
    """Return what differs between the newest checkpoints of two runs, and in other
    `places`."""
    found, count = list[str](), 0
    for place in (f"checkpoints/{policy}", *places):
        compared, differing = compare(place, read_newest(first / place), read_newest(second / place))
        found, count = found + differing, count + compared
    assert count > 15
    return found


RINGS = {
    "three targets, requests joined": experiment(0, 8, ring=3, flush_requests=2, count=2),
    "answered elsewhere": served(0),
    "two policies": two_policies(0).replace(limits=Limits(updates=8)),
    "a population": population(0),
}


@pytest.mark.parametrize("made", RINGS.values(), ids=RINGS)
def test_in_lockstep_bits_do_not_depend_on_when_an_actor_leaves_its_ring_to_others(
    made: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does, in the midst of it, where steps take long and another worker of its
    thread has something to do; here after each step."""
    whole, left = tmp_path / "whole", tmp_path / "left"
    train(made, launch="threads", run_dir=whole, quiet=True)
    ticked, calls = ActorWorker._ticked, list[str]()

    def tick_and_leave(actor: ActorWorker, seconds: float, resets: bool) -> None:
        ticked(actor, seconds, resets)
        actor.order.called = True
        calls.append(actor.name)

    monkeypatch.setattr(ActorWorker, "_ticked", tick_and_leave)
    train(made, launch="threads", run_dir=left, quiet=True)
    assert calls
    for policy in made.trained():
        assert differences(whole, left, policy=policy) == []


@pytest.mark.parametrize("settings", INLINE.values(), ids=INLINE)
def test_inline_runs_of_all_modes_may_be_cut_at_every_update(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    whole, cut, made = tmp_path / "whole", tmp_path / "cut", experiment(**settings)
    train(made, launch="inline", run_dir=whole, quiet=True)

    def at_once(record: dict[str, float], control: Any) -> None:
        control.stop()

    ended = [train(made, launch="inline", run_dir=cut, quiet=True, on_update=at_once).summary]
    while ended[-1]["updates"] < 6:
        ended.append(resume(cut, quiet=True, trust=True, on_update=at_once).summary)
    assert [each["updates"] for each in ended] == [1, 2, 3, 4, 5, 6]
    assert differences(whole, cut, *(f"cuts/{path.name}" for path in (whole / "cuts").iterdir())) == []


class Interrupted(InlineLauncher):
    """It is interrupted in the round that comes after so many in which all workers run:
    in the midst of a batch, or while an equal trainer has none."""

    rounds = 0
    by = signal.SIGTERM

    def __init__(self) -> None:
        super().__init__()
        self._left = Interrupted.rounds

    def wait(self, seconds: float, least: float = 0.0) -> None:
        super().wait(seconds, least)
        workers: Any = self._workers.values()
        if all(worker.state is State.RUNNING and not worker._held for worker in workers):
            self._left -= 1
            if self._left == 0:
                signal.raise_signal(Interrupted.by)


WAITING: dict[str, tuple[int | None, int, Any, dict[str, Any]]] = {
    "samples that wait, of which some are too old": (1, 1, Queue(), {}),
    "samples that are used again": (3, 1, Queue(reuses=3), {}),
    "copies of samples, of which some make room": (2, 1, PriorityQueue(capacity=600, reuses=3), {"count": 3}),
    "equal trainers": (None, 3, Queue(), {"count": 5, "slots": 4}),
    "equal trainers with copies": (4, 2, PriorityQueue(capacity=1000, reuses=3), {"count": 3}),
}


@pytest.mark.parametrize(("lag", "trainers", "buffer", "actors"), WAITING.values(), ids=WAITING)
def test_what_waits_for_trainers_is_there_again_whenever_an_inline_run_ends(
    lag: int | None, trainers: int, buffer: Any, actors: dict[str, Any], tmp_path: Path
) -> None:
    made = experiment(lag, updates=10, trainers=trainers, **{"count": 2, "slots": 3, **actors})
    trainer = made.workers["trainer"].replace(buffer=buffer, batch_size=192 * trainers)
    made = made.replace(workers={**made.workers, "trainer": trainer})
    dropped = interrupted_in_many_rounds(made, tmp_path)["dropped"]
    assert (dropped > 0) == (lag is not None)


def interrupted_in_many_rounds(made: Experiment, folder: Path) -> dict[str, Any]:
    """Train `made` without an end, and once more, ended and resumed after some rounds
    each; check that both come to the same, and return the summary."""
    whole, cut = folder / "whole", folder / "cut"
    Interrupted.rounds = 0
    summary = train(made, launch=Interrupted, run_dir=whole, quiet=True).summary
    Interrupted.rounds = 3
    ended = [train(made, launch=Interrupted, run_dir=cut, quiet=True).summary["updates"]]
    for rounds in (1, 2, 4, 1, 3, 5, 0):
        if ended[-1] < summary["updates"]:
            Interrupted.rounds = rounds
            ended.append(resume(cut, launch=Interrupted, quiet=True, trust=True).summary["updates"])
    assert len(ended) > 2 and ended[-1] == summary["updates"]
    assert differences(whole, cut, *(f"cuts/{path.name}" for path in (whole / "cuts").iterdir())) == []
    return summary


STAGED = {
    "episodes that are played again": (
        Gymnasium(make=Widening),
        ({"width": 1, "length": 30}, {"width": 4, "length": 50}),
    ),
    "lanes that step together": (
        Gymnasium(id="CartPole-v1"),
        ({"low": -0.1, "high": 0.1}, {"low": 0.0, "high": 0.0}),
    ),
}


@pytest.mark.parametrize(("environment", "options"), STAGED.values(), ids=STAGED)
def test_stages_of_a_curriculum_begin_again_where_they_did(
    environment: Any, options: Any, tmp_path: Path
) -> None:
    made = experiment(updates=14, environment=environment, count=2)
    summary = interrupted_in_many_rounds(in_stages(made, *options), tmp_path)
    assert summary["stage"] == "3 of 3" and summary["episodes"] > 20


def in_stages(made: Experiment, first: dict[str, float], second: dict[str, float]) -> Experiment:
    return made.replace(
        curriculum=(
            Stage(options=first, until="episodes >= 12"),
            Stage(options=second, until="return/mean > 2 and update >= 4"),
            Stage(options=first),
        ),
        limits=Limits(updates=14, window=8),
    )


def waiting_in_stages() -> Experiment:
    """Equal trainers that lag, with copies of samples, and a curriculum."""
    environment, options = STAGED["episodes that are played again"]
    made = experiment(4, environment=environment, count=3, trainers=2)
    buffer = PriorityQueue(capacity=1000, reuses=3)
    trainer = made.workers["trainer"].replace(buffer=buffer, batch_size=384)
    return in_stages(made.replace(workers={**made.workers, "trainer": trainer}), *options)


def kill_after_a_whole_cut(script: str, folder: Path, made: Experiment, *policies: str) -> int:
    """Have a script train without an end in `folder`, and kill it once all workers have
    written their part of a cut. Return after how many updates a run has more behind it
    than the policies' newest checkpoints."""
    run = subprocess.Popen([sys.executable, "-c", script, str(folder)], cwd=FILE.parents[2])
    try:
        parts = [folder / "cuts" / name for name, _ in made.members() if has_part(made, name)]
        deadline = time.monotonic() + 240
        while not all(map(checkpoints, parts)):
            assert time.monotonic() < deadline and run.poll() is None, "no whole cut is written"
            time.sleep(0.002)
    finally:
        run.kill()
        run.wait()
    return 20 + max(newest_update(folder, policy) for policy in policies or ("policy",))


def newest_update(folder: Path, policy: str = "policy") -> int:
    """Return after how many updates the newest checkpoint was written."""
    return int(checkpoints(folder / "checkpoints" / policy)[-1].name.removeprefix("update-"))


KILLED = """
import sys
from pathlib import Path
from tests.run.cut_experiments import MANY, experiment, two_policies
from tidemill import train
made = experiment(0, MANY, count=2, trainers=2)
train(made, launch="processes", run_dir=Path(sys.argv[1]), quiet=True)
"""


def test_a_killed_run_goes_on_from_its_newest_whole_cut(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    made = experiment(0, MANY, count=2, trainers=2)
    updates = kill_after_a_whole_cut(KILLED, killed, made)
    # as if the kill had come between the trainer's part of a later cut and the actors'
    newest = checkpoints(killed / "checkpoints" / "policy")[-1]
    half = newest.with_name(f"update-{newest_update(killed) + 1}")
    shutil.copytree(newest, half)
    result = resume(killed, limits={"updates": updates}, quiet=True, trust=True)
    assert result.summary["status"] == "completed"
    made = experiment(0, updates, count=2, trainers=2)
    train(made, launch="threads", run_dir=whole, quiet=True)
    assert differences(whole, killed, "cuts/trainer-1") == []
    # it was put aside, and the run has come beyond it since
    assert not [*killed.glob("checkpoints/*/later-*"), *killed.glob("cuts/*/later-*")]


def test_a_worker_that_is_killed_leads_all_back_to_the_newest_cut(tmp_path: Path) -> None:
    """So the run stays exact. Where a trainer dies as it is stopped it ends there."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    made = experiment(0, MANY, count=2, trainers=2).replace(together=("actor", "trainer"))
    left = [(1, 1), (0, 10), (1, 20)]  # which process, and from which update on

    def kill(record: dict[str, float], control: Any) -> None:
        lives = sum(event.what == "lives" for event in read_events(killed))
        if left and record["update"] >= left[0][1] and lives == 4 * (3 - len(left)):
            number, _ = left.pop(0)
            log = killed / "logs" / f"actor-{number}+trainer-{number}.log"
            (process,) = (each for each in psutil.Process().children() if log_of(each) == log)
            process.kill()
            if not left:
                control.stop()

    ended = train(made, launch="processes", run_dir=killed, quiet=True, on_update=kill).summary
    assert (ended.status, ended.reason) == ("completed", "stopped by on_update")
    assert ended.updates == newest_update(killed)
    died = [event.worker for event in read_events(killed) if event.what == "died"]
    assert died == ["actor-1", "trainer-1", "actor-0", "trainer-0", "actor-1", "trainer-1"]
    whole_cut = cuts.newest_whole_cut(RunFolder(killed), made)
    assert whole_cut[killed / "checkpoints" / "policy"].name == f"update-{ended.updates}"
    updates = newest_update(killed) + 20
    resume(killed, launch="threads", limits={"updates": updates}, quiet=True, trust=True)
    made = made.replace(limits=Limits(updates=updates))
    train(made, launch="threads", run_dir=whole, quiet=True)
    assert differences(whole, killed, "cuts/trainer-1") == []
    told = [record["update"] for record in read_metrics(killed)]
    assert told == sorted(told) and told[-1] == updates


@pytest.mark.parametrize("stopped", [False, True])
def test_a_trainer_that_dies_as_a_run_ends_at_its_limit_leads_all_there_again(
    stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other policy's trainer had ended by then. A run that was `stopped` besides ends
    where it has gone back to, and a resume leads there."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    flag, end = tmp_path / "died", RunState.end

    def end_and_tell(state: RunState, *reason: Any, **how: Any) -> None:
        end(state, *reason, **how)
        if stopped and not flag.with_suffix(".over").exists():
            end(state, "stopped by on_update")
        flag.with_suffix(".over").touch()

    monkeypatch.setattr(RunState, "end", end_and_tell)
    made, settings = dying_at_last(6, str(flag)), {"source": DYING, "quiet": True}
    ended = train(made, launch="processes", run_dir=killed, **settings).summary
    assert flag.exists() and ended.status == "completed"
    if stopped:
        assert ended.updates < 6 and ended.reason == "stopped by on_update"
        ended = resume(killed, quiet=True, trust=True).summary
    assert (ended.updates, ended.reason) == (6, "6 updates done")
    died = {event.worker for event in read_events(killed) if event.what == "died"}
    assert "listener-0" in died
    train(made, launch="threads", run_dir=whole, **settings)
    assert differences(whole, killed, "checkpoints/listener", policy="speaker") == []
    told = [record["update"] for record in read_metrics(killed)]
    assert told == sorted(told) and told[-1] == 6


@pytest.mark.parametrize(
    ("late", "stopped"), [(False, False), (True, False), (False, True)], ids=["before", "after", "stopped"]
)
def test_an_actor_that_dies_as_a_run_comes_to_its_limit_leads_all_there_again(
    late: bool, stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the end is a whole cut. One that is `stopped` ends with what it has trained, and
    the cut before, which is there from the start: it goes on from it. `late`: the actor
    dies once the trainer has ended."""
    folder, flag, end = tmp_path / "run", tmp_path / "died", RunState.end
    made, settings = lasting_at_last(3, str(flag)), {"source": DYING, "quiet": True}
    train(made.replace(limits=Limits(updates=1)), launch="inline", run_dir=folder, **settings)
    monkeypatch.setattr(RestartBudget, "spend", lambda *given: 600.0)

    def kill() -> None:
        (process,) = (each for each in psutil.Process().children() if log_of(each).stem == "actor-0")
        process.kill()

    def kill_before() -> None:
        wait_until(flag.with_suffix(".lasts").exists, 120, "the last update has begun")
        kill()
        wait_until(lambda: any(event.what == "died" for event in read_events(folder)), 60, "it has died")
        flag.touch()

    def end_and_ask(state: RunState, *reason: Any, **how: Any) -> None:
        end(state, *reason, **how)
        if stopped:
            end(state, "stopped by on_update")
        if late and not died:
            died.append(True)
            kill()

    monkeypatch.setattr(RunState, "end", end_and_ask)
    died = list[bool]()
    killer = threading.Thread(target=flag.touch if late else kill_before)
    killer.start()
    ended = resume(folder, launch="processes", limits={"updates": 4}, quiet=True, trust=True).summary
    killer.join()
    assert flag.exists() and (ended.status, ended.updates, ended.reason) == ("completed", 4, "4 updates done")
    assert newest_update(folder) == 4
    assert any(event.what == "went back" for event in read_events(folder)) != stopped
    whole_cut = cuts.newest_whole_cut(RunFolder(folder), made)
    assert (whole_cut[folder / "checkpoints" / "policy"].name == "update-4") != stopped
    train(made.replace(limits=Limits(updates=4)), launch="inline", run_dir=tmp_path / "whole", **settings)
    assert differences(tmp_path / "whole", folder) == []


def test_an_actor_that_dies_as_it_writes_its_last_part_leads_all_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, flag, end = tmp_path / "run", tmp_path / "died", RunState.end

    def end_and_tell(state: RunState, *reason: Any, **how: Any) -> None:
        end(state, *reason, **how)
        flag.with_suffix(".over").touch()

    monkeypatch.setattr(RunState, "end", end_and_tell)
    made, settings = fragile(3, str(flag)), {"source": DYING, "quiet": True}
    ended = train(made, launch="processes", run_dir=folder, **settings).summary
    assert flag.exists() and (ended.status, ended.updates) == ("completed", 3)
    whole_cut = cuts.newest_whole_cut(RunFolder(folder), made)
    assert whole_cut[folder / "checkpoints" / "policy"].name == "update-3"
    train(made, launch="inline", run_dir=tmp_path / "whole", **settings)
    assert differences(tmp_path / "whole", folder) == []


def test_who_fails_as_it_writes_its_last_part_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save, end, ended = ActorWorker._save_part, RunState.end, list[bool]()

    def end_and_note(state: RunState, *reason: Any, **how: Any) -> None:
        end(state, *reason, **how)
        ended.append(True)

    def save_or_fail(actor: ActorWorker, checkpoints: Any) -> None:
        if ended:
            raise RuntimeError("it cannot tell where it is")
        save(actor, checkpoints)

    monkeypatch.setattr(RunState, "end", end_and_note)
    monkeypatch.setattr(ActorWorker, "_save_part", save_or_fail)
    result = train(experiment(0, 4), launch="inline", run_dir=tmp_path / "run", quiet=True)
    assert (result.summary.status, result.summary.updates) == ("completed", 4)
    assert "actor-0: RuntimeError: it cannot tell where it is" in capsys.readouterr().err


def test_what_was_trained_stays_where_a_run_began_anew_for_a_death_and_failed_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It had come to its limit before its first cut: here there is none."""
    folder, flag, end = tmp_path / "run", tmp_path / "died", RunState.end

    def end_and_kill(state: RunState, *reason: Any, **how: Any) -> None:
        end(state, *reason, **how)
        if not flag.with_suffix(".away").exists():
            flag.with_suffix(".away").touch()
            (process,) = (each for each in psutil.Process().children() if log_of(each).stem == "actor-0")
            process.kill()

    monkeypatch.setattr(RunState, "end", end_and_kill)
    monkeypatch.setattr(cuts.Cuts, "cut", lambda self: None)
    made = fragile(3, str(flag), lane_restarts=None)
    with pytest.raises(TidemillError, match="nobody is there") as failed:
        train(made, launch="processes", run_dir=folder, source=DYING, quiet=True)
    (undone,) = (folder / "checkpoints" / "policy").glob("later-*")
    assert read_checkpoint(undone)[1]["updates"] == 3
    assert "policy begins anew, since there is no checkpoint to go back to yet" in capsys.readouterr().err
    shown = CliRunner().invoke(app, ["status", str(folder)]).output
    assert "policy to its beginning, since there is no checkpoint" in " ".join(shown.split())
    assert "tidemill resume" not in str(failed.value)


def test_all_are_held_before_a_run_at_its_limit_writes_its_last_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all trainers have come to their end before anybody was told to."""
    save, held = ActorWorker._save_part, list[bool]()

    def noted(actor: ActorWorker, checkpoints: Any) -> None:
        held.append(actor._held)
        save(actor, checkpoints)

    monkeypatch.setattr(ActorWorker, "_save_part", noted)
    train(experiment(0, 4, count=2), launch="threads", run_dir=tmp_path / "run", quiet=True)
    assert len(held) >= 2 and all(held)


def test_without_a_whole_cut_nothing_is_guessed(tmp_path: Path) -> None:
    train(experiment(), launch="inline", run_dir=tmp_path / "run", quiet=True)
    for path in (tmp_path / "run" / "cuts" / "actor-0").iterdir():
        (path / "part.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no whole cut .*: the run ended before all its"):
        resume(tmp_path / "run", limits={"updates": 8}, quiet=True, trust=True)


def test_a_run_without_a_whole_cut_does_not_say_that_it_can_be_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here none can be written: there is a file where they would lie."""
    whole, none, failed = (tmp_path / name for name in ("whole", "none", "failed"))
    for folder in (none, failed):
        folder.mkdir()
        (folder / "cuts").touch()
    train(experiment(updates=2), launch="inline", run_dir=whole)
    assert "tidemill resume" in capsys.readouterr().out
    train(experiment(updates=2), launch="inline", run_dir=none)
    assert "tidemill resume" not in capsys.readouterr().out
    monkeypatch.setattr(Failing, "steps_of_all", -200)  # it fails after its first updates
    made = experiment(environment=Gymnasium(make=Failing), lane_restarts=None)
    with pytest.raises(TidemillError, match="the line is cut") as raised:
        train(made, launch="inline", run_dir=failed, quiet=True)
    assert checkpoints(failed / "checkpoints" / "policy") and "tidemill resume" not in str(raised.value)


def drifting() -> Experiment:
    return experiment(environment=Gymnasium(make=f"{FILE}:Drifting"), max_episode_steps=20)


class Failing(Faulty):
    """One step of one copy raises, once, in whichever run it is."""

    steps_of_all = 0

    def step(self, action: Any) -> Any:
        Failing.steps_of_all += 1
        if Failing.steps_of_all == 100:
            raise ConnectionError("the line is cut")
        return self._told(), 1.0, False, self.np_random.random() < 0.1, {}


def faulty() -> Experiment:
    return experiment(environment=Gymnasium(make=f"{FILE}:Faulty"), lane_restarts=1000)


def failing() -> Experiment:
    return experiment(environment=Gymnasium(make=f"{FILE}:Failing"))


def forgetful() -> Experiment:
    return experiment(algorithm=ForgetfulPPO(minibatch_size=32))


@pytest.mark.parametrize(
    ("function", "status", "said"),
    [
        ("experiment", 0, r"exact: 6 updates, and [^\n]*compared\)\n$"),
        ("faulty", 0, r"exact: 6 updates, and [^\n]*compared\)\nBut lanes were made anew \d+ times in the s"),
        ("drifting", 1, "Likely cause: .*random numbers from elsewhere"),
        ("failing", 1, r"Likely cause: lanes were made anew 1 times in the straight run and 0 .*the line is"),
        ("forgetful", 1, r"Likely cause: .*load_state\(\) does not take back all .*algorithm/adam"),
    ],
)
def test_the_command_says_whether_a_run_resumes_exactly_or_why_not(
    function: str, status: int, said: str
) -> None:
    told = CliRunner().invoke(app, ["check-resume", f"{FILE}:{function}", "--updates", "6"])
    assert told.exit_code == status, told.output
    assert re.search(said, told.output), told.output


@pytest.mark.parametrize(
    ("policy", "algorithm", "environment"),
    [
        (QNetwork(hidden=(16,)), DQN(), "CartPole-v1"),
        (QNetwork(hidden=(16,), quantiles=8), QRDQN(), "CartPole-v1"),
        (SquashedGaussian(hidden=(16,)), SAC(), "Pendulum-v1"),
        (DeterministicActor(hidden=(16,)), TD3(), "Pendulum-v1"),
    ],
)
def test_a_replay_memory_that_is_exact_keeps_its_open_episodes_itself(
    policy: Any, algorithm: Any, environment: str
) -> None:
    made = Experiment(
        name="replay",
        policies={"policy": policy},
        workers={
            "actor": ReplayActors(environment=Gymnasium(id=environment), lanes=1, ring=3),
            "trainer": ReplayTrainer(
                algorithm=algorithm,
                exact=True,
                ratio="1/2",
                batch_size=8,
                buffer=Replay(capacity=500, warm_up=20),
            ),
        },
        together=("actor", "trainer"),
        seed=5,
    )
    found = check_resume(made)
    assert found.exact and found.compared > 30 and found.updates == 200 and 0 < found.ended < 200, found


@pytest.mark.parametrize("launch", ["inline", "threads"])
@pytest.mark.parametrize("made", [beside_memory, two_memories])
def test_policies_with_a_replay_memory_go_on_to_limits_of_their_own(
    made: Callable[[int], Experiment], launch: str
) -> None:
    """How far another one is as the first one comes to its limit is a matter of time."""
    found = check_resume(made(20), updates=20, launch=launch)
    assert found.exact and found.compared > 60, found


def test_a_run_is_complete_once_all_of_its_policies_are_at_limits_of_their_own() -> None:
    progress = Progress(steps=100, updates=10, updated={"one": (100, 10), "other": (60, 5)})
    point, run = ResumePoint("update-5", progress, False), Path("run")
    assert point.limit_reached(run, Limits(steps=100), True, "killed") == ""
    assert point.limit_reached(run, Limits(updates=5), True, "killed") == "its limit of 5 updates (5)"
    assert point.limit_reached(run, Limits(steps=60), True, "killed") == "its limit of 60 steps (60)"


def test_who_saves_from_a_replay_memory_between_cuts_pushes_out_none_of_a_whole_one(tmp_path: Path) -> None:
    """However often it does."""
    folder, seen = RunFolder(tmp_path / "run"), list[int]()
    made = beside_memory(MANY, checkpoint_seconds=1e-9, checkpoint_share=1)

    def on_update(record: dict[str, float], control: Any) -> None:
        if folder.has_checkpoints(made.policies) and (folder.path / "cuts" / "actor-0").exists():
            whole_cut = cuts.newest_whole_cut(folder, made)
            seen.append(int(whole_cut[folder.checkpoints("other")].name.removeprefix("update-")))
        if len({*seen}) > 2:
            control.stop()

    train(made, launch="inline", run_dir=folder.path, quiet=True, on_update=on_update)
    assert seen == sorted(seen)


class Mute(ActorCritic):
    """Its policy does not tell where its random stream is."""

    def build(self, spaces: Any, seed: int) -> Any:
        policy = super().build(spaces, seed)
        policy.random_state = Policy.random_state.__get__(policy)  # type: ignore[method-assign]
        return policy


def test_a_policy_that_does_not_tell_its_random_stream_is_refused_at_the_start(tmp_path: Path) -> None:
    made = experiment(policy=Mute(hidden=(16,)))
    with pytest.raises(TidemillError, match=r"has no random_state\(\)"):
        train(made, launch="inline", run_dir=tmp_path / "run", source=FILE, quiet=True)


def test_a_buffer_that_does_not_tell_what_it_holds_is_refused_at_the_start(tmp_path: Path) -> None:
    made = experiment()
    trainer = made.workers["trainer"].replace(buffer=Forgetting())
    made = made.replace(workers={**made.workers, "trainer": trainer})
    with pytest.raises(TidemillError, match=r"Forgetting, the buffer of trainer-0, has no state\(\)"):
        train(made, launch="inline", run_dir=tmp_path / "run", quiet=True)


def running(made: Experiment) -> tuple[RunState, Callable[[], list[tuple[str, Any]]]]:
    """Return the state of a run all of whose workers run, and a function that returns
    what each was told since the last call."""
    state, ends = RunState(made), dict[str, LocalLink]()
    for name, config in made.members():
        link, ends[name] = LocalLink.pair(LocalBell(), LocalBell())
        state.members[name] = Member(config, link, State.RUNNING)
    return state, lambda: [(n, unpack_down(data)) for n, end in ends.items() for data in end.receive() or ()]


def test_a_cut_that_somebody_does_not_come_to_rest_for_is_given_up_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuts, "PATIENCE", 0.0)
    state, told = running(experiment())
    cuts.Cuts(experiment(), False, state, lambda: None, lambda number, checkpoints: None).cut()
    orders = Hold(cut=1), Hold(on=False, cut=2)
    assert told() == [(name, order) for name in ("actor-0", "trainer-0") for order in orders]
    assert len(state.report.notices) == 1
    assert "actor-0, trainer-0 did not come to rest" in state.report.notices[0]


def test_parts_that_cannot_be_written_are_told_once_and_once_when_it_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the second update to the fifth there is a file where they would lie."""
    folder, aside = tmp_path / "run" / "cuts", tmp_path / "aside"

    def on_update(record: dict[str, float], control: Any) -> None:
        if record["update"] == 2:
            folder.rename(aside)
            folder.touch()
        elif record["update"] == 6:
            folder.unlink()
            aside.rename(folder)

    made = experiment(0, updates=8)
    trainer = made.workers["trainer"].replace(checkpoint_seconds=1e-9, checkpoint_share=1)
    made = made.replace(workers={**made.workers, "trainer": trainer})
    train(made, launch="inline", run_dir=tmp_path / "run", quiet=True, on_update=on_update)
    told = capsys.readouterr().err
    assert told.count("cannot be written: Not a directory") == 2  # the actor's, and the runner's
    assert told.count("parts of cuts are written again") == 2
    whole_cut = cuts.newest_whole_cut(RunFolder(tmp_path / "run"), made)
    assert whole_cut[tmp_path / "run" / "checkpoints" / "policy"].name == "update-8"


def test_while_parts_cannot_be_written_the_newest_whole_cut_stays(tmp_path: Path) -> None:
    """With its checkpoints, however many come after them that no part goes with."""
    folder, aside = tmp_path / "run" / "cuts", tmp_path / "aside"
    made = experiment(0, updates=MANY)
    trainer = made.workers["trainer"].replace(checkpoint_seconds=1e-9, checkpoint_share=1, checkpoints=2)
    made = made.replace(workers={**made.workers, "trainer": trainer})

    def on_update(record: dict[str, float], control: Any) -> None:
        if record["update"] == 3:
            folder.rename(aside)
            folder.touch()
        elif record["update"] == 12:
            folder.unlink()
            aside.rename(folder)
            whole_cut = cuts.newest_whole_cut(RunFolder(tmp_path / "run"), made)
            assert whole_cut[tmp_path / "run" / "checkpoints" / "policy"].name in ("update-1", "update-2")
            control.stop()

    train(made, launch="inline", run_dir=tmp_path / "run", quiet=True, on_update=on_update)
    assert newest_update(tmp_path / "run") == 12 and cuts.can_go_on(RunFolder(tmp_path / "run"), made)


def test_a_kill_ahead_of_the_parts_of_a_cut_leads_to_the_one_before(tmp_path: Path) -> None:
    """Whatever the number of checkpoints that are to be kept."""
    made, folder = experiment(0, updates=4), tmp_path / "run"
    trainer = made.workers["trainer"].replace(checkpoint_seconds=1e-9, checkpoint_share=1, checkpoints=1)
    made = made.replace(workers={**made.workers, "trainer": trainer})
    train(made, launch="inline", run_dir=folder, quiet=True)
    for part in checkpoints(folder / "cuts" / "actor-0"):
        if read_checkpoint(part)[1]["checkpoints"] == {"policy": 4}:
            shutil.rmtree(part)
    whole_cut = cuts.newest_whole_cut(RunFolder(folder), made)
    assert whole_cut[folder / "checkpoints" / "policy"].name == "update-3"


def test_a_member_that_has_come_to_its_limit_holds_up_no_cut_of_the_others() -> None:
    made = population(0)
    state, told = running(made)
    kept = list[Any]()

    def obey() -> None:
        for name, message in told():
            if isinstance(message, Save) and name == "trainer-0-0":
                cut.take(name, Saved("policy-0", 1, 8))
            cut.take(name, Holding(1))

    cut = cuts.Cuts(made, False, state, obey, lambda number, checkpoints: kept.append(dict(checkpoints)))
    cut.take("trainer-1-0", Saved("policy-1", 6, 48))
    state.members["trainer-1-0"].state = State.COMPLETED
    cut.cut()
    assert kept == [{"policy-0": 1, "policy-1": 6}] and not state.report.notices


def test_who_rests_late_for_a_cut_that_was_given_up_does_not_rest_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That is written once all rest for it; nobody who has died since rests."""
    monkeypatch.setattr(cuts, "PATIENCE", 0.0)
    state, _ = running(experiment())
    cut = cuts.Cuts(experiment(), False, state, lambda: None, lambda number, checkpoints: None)
    cut.cut()
    cut.hold()
    for name in state.members:
        cut.take(name, Holding(1))
    assert not cut.at_rest
    for name in state.members:
        cut.take(name, Holding(2))
    assert cut.at_rest
    state.members["actor-0"].bury("it was killed")
    cut.forget()
    assert not cut.at_rest
    cut.take("actor-0", Holding(2))  # in its next life
    assert cut.at_rest


def test_no_cut_waits_for_who_only_watches() -> None:
    """A judge hangs, or is given up: checkpoints are written all the same."""
    made = self_play(0)
    state, told = running(made)
    state.members["judge-0"].bury("it hung")
    asked, kept = set[str](), list[tuple[int, Any, bool]]()

    def obey() -> None:
        for name, message in told():
            asked.add(name)
            if isinstance(message, Save) and name == "trainer-0":
                cut.take(name, Saved("policy", 1, 8))
            cut.take(name, Holding(1))

    def keep(number: int, checkpoints: Any) -> None:
        kept.append((number, dict(checkpoints), cut.at_rest))

    cut = cuts.Cuts(made, False, state, obey, keep)
    cut.cut()
    assert kept == [(1, {"policy": 1}, True)] and not state.report.notices
    assert not cut.at_rest  # they go on
    asked |= {name for name, _ in told()}
    assert asked == {"actor-0", "actor-1", "trainer-0"}


def test_the_last_episodes_go_on_from_the_cut_after_a_kill_at_any_update(tmp_path: Path) -> None:
    """However soon after a cut that is, as what the run has told of episodes shows."""
    whole, images = tmp_path / "whole", list[Path]()

    def save(record: dict[str, float], control: Any) -> None:
        if record["update"] > 1:  # before there is no cut
            images.append(tmp_path / f"killed-{record['update']:.0f}")
            shutil.copytree(whole, images[-1], ignore=shutil.ignore_patterns(".*"))
        control.save()

    train(experiment(max_episode_steps=20), launch="inline", run_dir=whole, quiet=True, on_update=save)
    names = "episodes", "return/mean", "length/mean"
    told = [[record.get(name) for name in names] for record in read_metrics(whole)]
    assert len(images) == 5 and told[-1][0] > told[1][0] > 0
    for image in images[:-1]:  # the last one is at the limit
        resume(image, quiet=True, trust=True)
        assert [[record.get(name) for name in names] for record in read_metrics(image)] == told, image.name


def test_a_cut_that_was_being_written_once_more_at_a_kill_is_none(tmp_path: Path) -> None:
    """As where the run's end came in it: the runner's part is of the end then, and those
    of others are of before."""
    folder, made = RunFolder(tmp_path / "run"), experiment(max_episode_steps=20)

    def save(record: dict[str, float], control: Any) -> None:
        control.save()

    def newest() -> set[int]:
        cut = cuts.newest_whole_cut(folder, made)
        return {number_of(path) for place, path in cut.items() if place.parent.name == "cuts"}

    train(made, launch="inline", run_dir=folder.path, quiet=True, on_update=save)
    last = max(cuts_of(folder.path))
    assert newest() == {last}
    part = folder.path / "cuts" / "actor-0" / f"update-{last}"
    shutil.copytree(part, part.with_name(f"{part.name}.replaced"))
    assert newest() == {last}
    runner = read_part_of(folder.path, RUNNER)
    write_part_of(folder.path, RUNNER, runner, last, {"policy": 10**6})
    assert newest() == {last - 1}
    shutil.rmtree(folder.path / "cuts" / RUNNER)  # earlier versions wrote none
    assert newest() == {last}


def replay(steps: int) -> Experiment:
    """An exact replay memory in a run that resumes exactly."""
    return Experiment(
        name="replay",
        policies={"policy": QNetwork(hidden=(8,))},
        workers={
            "actor": ReplayActors(environment=Gymnasium(id="CartPole-v1"), lanes=1, ring=2),
            "trainer": ReplayTrainer(
                algorithm=DQN(),
                exact=True,
                ratio="1/2",
                batch_size=8,
                buffer=Replay(capacity=200, warm_up=20),
            ),
        },
        exact_resume=True,
        limits=Limits(steps=steps),
    )


@pytest.mark.parametrize("launch", ["inline", "threads"])
def test_a_replay_memory_that_is_stopped_drains_and_goes_on_exactly(
    launch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in flight comes, though all others stay as they are; and however busy the
    machine is."""
    monkeypatch.setattr("tidemill.replay_training.trainer.DRAIN", 60.0)
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def stop(record: dict[str, float], control: Any) -> None:
        control.stop()

    ended = train(replay(MANY), launch=launch, run_dir=cut, quiet=True, on_update=stop).summary
    steps = ended["env_steps"] + 30
    resume(cut, limits={"steps": steps}, quiet=True, trust=True)
    train(replay(steps), launch=launch, run_dir=whole, quiet=True)
    assert differences(whole, cut) == []


def test_judges_beside_a_replay_memory_are_no_part_of_a_cut(tmp_path: Path) -> None:
    game = Gymnasium(id="CartPole-v1", max_episode_steps=20)
    judged = AgentSpec(parameters=Drawn(tag="evaluating"), mode="concise", samples="evaluation")
    made = Experiment(
        name="replay",
        policies={"policy": QNetwork(hidden=(8,))},
        workers={
            "actor": ReplayActors(environment=game, lanes=1, ring=2),
            "trainer": ReplayTrainer(
                algorithm=DQN(),
                exact=True,
                ratio="1/2",
                batch_size=8,
                buffer=Replay(capacity=200, warm_up=20),
            ),
            "judge": Actors(environment=game, lanes=1, agents=(judged,)),
            "evaluation": Evaluation(games=1),
        },
        exact_resume=True,
        limits=Limits(steps=60),
    )
    assert go_back_together(made) == []
    train(made, launch="inline", run_dir=tmp_path / "run", quiet=True)
    result = resume(tmp_path / "run", limits={"steps": 80}, quiet=True, trust=True)
    assert result.summary["env_steps"] == 80


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "asynchronous": ({}, "threads", "max_policy_lag = None"),
    "equal trainers ahead": ({"workers.trainer.count": 2}, "threads", "max_policy_lag = None"),
    "a GPU": ({"workers.trainer.device": "auto"}, "inline", 'device = "auto"'),
}
ON_GPU = 'workers.trainer-other.device = "cuda"; take "cpu"'


@pytest.mark.parametrize(("settings", "launch", "match"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_resumed_exactly_is_refused_by_name(
    settings: dict[str, Any], launch: str, match: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"exact_resume = True cannot be had here: .*{match}"):
        train(experiment(), launch=launch, run_dir=tmp_path / "run", quiet=True, **settings)


def test_a_gpu_of_a_replay_memory_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=ON_GPU):
        train(beside_memory(6, device="cuda"), launch="inline", run_dir=tmp_path / "run", quiet=True)


def test_threads_of_policy_workers_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workers.served.threaded = True"):
        train(served(0, threaded=True), launch="inline", run_dir=tmp_path / "run", quiet=True)


@dataclass(frozen=True, kw_only=True)
class Noisy(ProcessorConfig):
    """Adds noise to rewards, more with each sample. `tells`: it has a state."""

    tells: bool = True

    def build(self, schema: Any, policy: Any, seed: int) -> Processor:
        return _Noise(seed) if self.tells else _MuteNoise(seed)


class _MuteNoise(Processor):
    def __init__(self, seed: int) -> None:
        self.drawn, self.count = np.random.default_rng(seed), 0

    def process(self, sample: Any) -> None:
        self.count += 1
        reward = sample["reward"]
        reward += 0.01 * self.count * self.drawn.standard_normal(reward.shape, np.float32)


class _Noise(_MuteNoise):
    def state(self) -> Any:
        return {"drawn": generator_state(self.drawn), "count": self.count}

    def load_state(self, state: Any) -> None:
        self.count = state["count"]
        set_generator_state(self.drawn, state["drawn"])


def processed(tells: bool = True, mode: str = "fixed") -> Experiment:
    """Samples of two actors that two buffer workers process for two equal trainers, by
    what they draw and by the newest weights."""
    spec = AgentSpec(samples="gathered", **({"sample_steps": 8} if mode == "fixed" else {"mode": mode}))
    made = experiment(
        3, updates=8, trainers=2, count=2, lanes=2, slots=3, agents=(spec,), max_episode_steps=20
    )
    buffers = Buffers(process=(Noisy(tells=tells), Reanalyse()), policy="policy", count=2)
    return made.replace(workers={**made.workers, "buffers": buffers})


@pytest.mark.parametrize("mode", ["fixed", "full"])
def test_buffer_workers_go_on_where_their_processors_were(mode: str, tmp_path: Path) -> None:
    interrupted_in_many_rounds(processed(mode=mode), tmp_path)


def test_check_resume_finds_no_difference_behind_buffer_workers() -> None:
    found = check_resume(processed(), updates=8, source=FILE)
    assert found.exact and found.compared > 100, found


def test_a_processor_that_does_not_tell_its_state_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TidemillError, match=r"_MuteNoise, which buffers-0 processes .* has no state\(\)"):
        train(processed(tells=False), launch="inline", run_dir=tmp_path / "run", quiet=True, source=FILE)


def test_buffer_workers_elsewhere_are_refused_by_name(tmp_path: Path) -> None:
    made = processed()
    made = made.replace(workers={"buffers": made.workers["buffers"], **made.workers})
    with pytest.raises(ConfigError, match=r"workers.buffers are buffer workers, whose samples come"):
        train(made, launch="threads", run_dir=tmp_path / "run", quiet=True, source=FILE)
