"""Experiments for the tests of runs: real workers, and a policy and an algorithm of numpy
alone, so that a run starts in half a second."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Buffers,
    Drawn,
    Evaluation,
    Experiment,
    Gymnasium,
    Limits,
    PolicyWorkers,
    Replay,
    ReplayActors,
    ReplayTrainer,
    Scripted,
    Slots,
    Trainer,
)
from tidemill.algorithms.ppo import PPOLearner
from tidemill.api.algorithm import Algorithm, AlgorithmConfig, DataParallel, Sample
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.policy import Policy, PolicyConfig, number_of
from tidemill.api.spaces import Discrete, Spaces
from tidemill.core.schema import Array, Arrays, Field
from tidemill.core.thread_stacks import stack_of
from tidemill.workers import data_parallel


@dataclass(frozen=True, kw_only=True)
class ByObservation(PolicyConfig):
    """Its actions depend on the observation alone, whatever its parameters."""

    def answer(self, spaces: Spaces) -> dict[str, Field]:
        return {"action": Field((), "int64"), "log_prob": Field((), "float32"), "value": Field((), "float32")}

    def build(self, spaces: Spaces, seed: int) -> Policy:
        assert isinstance(spaces.action, Discrete)
        return _ByObservation(spaces.action.n)


class _ByObservation(Policy):
    def __init__(self, actions: int) -> None:
        self.actions, self.w = actions, np.zeros(64)

    def act(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        obs = observation["obs"]
        total = np.floor(1000 * (obs.astype(np.float64) * np.arange(1, 1 + obs.shape[1])).sum(axis=1))
        out["action"][: len(obs)] = total.astype(np.int64) % 7 % self.actions
        out["log_prob"][: len(obs)] = -np.arange(1, 1 + obs.shape[1]) @ obs.T / 1000
        out["value"][: len(obs)] = total / 1000

    def parameters(self) -> Arrays:
        return {"w": self.w}

    def load(self, parameters: Mapping[str, Array], version: int) -> None:
        self.w[:], self.version = parameters["w"], version


@dataclass(frozen=True, kw_only=True)
class DiesAtLast(ByObservation):
    """Its trainer's process dies, once (then there is a file `flag`), as it writes the
    last checkpoint, after `updates`; or (`saved`) once it has."""

    flag: str
    updates: int
    saved: bool

    def build(self, spaces: Spaces, seed: int) -> Policy:
        assert isinstance(spaces.action, Discrete)
        data_parallel.LEAVE_ALONE = 60.0  # however late it is, it is the first that writes that one
        return _DiesAtLast(self, spaces.action.n)


class _DiesAtLast(_ByObservation):
    def __init__(self, config: DiesAtLast, actions: int) -> None:
        super().__init__(actions)
        self.config = config

    def parameters(self) -> Arrays:
        config, flag = self.config, Path(self.config.flag)
        if getattr(self, "version", 0) == config.updates and not flag.exists():
            callers = {frame.name for frame in traceback.extract_stack()}
            if callers & {"_on_exit", "_finish"} and ("_write" in callers) != config.saved:
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().parameters()


@dataclass(frozen=True, kw_only=True)
class ByVersion(ByObservation):
    """Its actions depend on the version, too: each update of `Recorder` adds 1 to its
    weights."""

    def build(self, spaces: Spaces, seed: int) -> Policy:
        assert isinstance(spaces.action, Discrete)
        return _ByVersion(spaces.action.n)


class _ByVersion(_ByObservation):
    def act(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        super().act(observation, state, deterministic, out)
        assert self.w[0] == self.version
        rows = len(observation["obs"])
        out["action"][:rows] = (out["action"][:rows] + self.version) % self.actions
        out["value"][:rows] = self.version


@dataclass(frozen=True, kw_only=True)
class Recorder(AlgorithmConfig):
    """Adds 1 to every weight. `record` is a folder for the samples it gets, `seconds` how
    long an update takes, `save_seconds` a checkpoint, which takes longer while there is a
    file `held`."""

    record: str | None = None
    seconds: float = 0.005
    save_seconds: float = 0.0

    def measures(self) -> tuple[str, ...]:
        return "loss", "trainers"

    def build(self, policy: Policy, seed: int) -> Algorithm:
        return _Recorder(self, policy)


class _Recorder(DataParallel):
    largest_sum = 8

    def __init__(self, config: Recorder, policy: Policy) -> None:
        self.config, self.policy, self.count = config, policy, 0

    def parallel_update(
        self, samples: Sequence[Sample], steps: int
    ) -> Generator[Array, None, dict[str, float]]:
        for sample in samples:
            if self.config.record is not None:
                np.savez(f"{self.config.record}-{self.count}.npz", **sample)
            self.count += 1
        time.sleep(self.config.seconds)
        weights, trainers = self.policy.parameters()["w"], np.ones(1)
        weights[...] += 1000  # what an update that is broken off must not leave behind
        yield trainers
        weights[...] -= 999
        return {"loss": 1.0, "trainers": float(trainers[0])}

    def state(self) -> Arrays:
        if self.config.save_seconds:
            Path("saving").touch()
            time.sleep(self.config.save_seconds)
            until = time.monotonic() + 100
            while Path("held").exists() and time.monotonic() < until:
                Path("saving").touch()
                time.sleep(0.01)
        return {"count": np.array(self.count)}

    def load_state(self, state: Mapping[str, Array]) -> None:
        self.count = int(state["count"])


@dataclass(frozen=True, kw_only=True)
class EachRecorder(Recorder):
    """Each trainer writes down its samples into folder `into`: after which update, in
    which process, of which log."""

    into: str

    def build(self, policy: Policy, seed: int) -> Algorithm:
        data_parallel.LEAVE_ALONE = 20.0  # nobody takes another one for dead since it is late
        return _EachRecorder(self, policy)


class _EachRecorder(_Recorder):
    def parallel_update(
        self, samples: Sequence[Sample], steps: int
    ) -> Generator[Array, None, dict[str, float]]:
        assert isinstance(self.config, EachRecorder)
        update, log = number_of(self.policy.version), log_name()
        for number, sample in enumerate(samples):
            np.savez(Path(self.config.into) / f"{update} {log} {os.getpid()} {number}.npz", **sample)
        return (yield from super().parallel_update(samples, steps))


@dataclass(frozen=True, kw_only=True)
class Lingering(Recorder):
    """The first one of its trainers that comes to update 4 writes its log's name into a
    file `flag`, and stays in that update until there is a file `flag`.over."""

    flag: str

    def build(self, policy: Policy, seed: int) -> Algorithm:
        return _Lingering(self, policy)


class _Lingering(_Recorder):
    def parallel_update(
        self, samples: Sequence[Sample], steps: int
    ) -> Generator[Array, None, dict[str, float]]:
        assert isinstance(self.config, Lingering)
        if number_of(self.policy.version) == 3:
            hold(Path(self.config.flag))
        return (yield from super().parallel_update(samples, steps))


def hold(flag: Path) -> None:
    """Write this process's log's name into `flag`, where nobody has, and wait for
    `flag`.over."""
    with suppress(FileExistsError), flag.open("x") as file:
        file.write(log_name())
        file.flush()
        while not flag.with_suffix(".over").exists():
            time.sleep(0.05)


def log_name() -> str:
    """Return the name of this process's log: of the workers that share it."""
    return Path(os.readlink("/proc/self/fd/1")).stem


@dataclass(frozen=True, kw_only=True)
class Watched(PPO):
    """PPO whose trainers each write down, in a file of their own in `record`, their
    weights and their learning rate after each update."""

    record: str

    def build(self, policy: Policy, seed: int) -> Algorithm:
        return _Watched(self, self.trainable(policy), seed)


class _Watched(PPOLearner):
    def parallel_update(
        self, samples: Sequence[Sample], steps: int
    ) -> Generator[Array, None, dict[str, float]]:
        metrics = yield from super().parallel_update(samples, steps)
        weights = b"".join(array.tobytes() for array in self.policy.parameters().values())
        assert isinstance(self.config, Watched)
        with open(Path(self.config.record) / str(os.getpid()), "a") as file:
            file.write(f"{metrics['learning_rate']} {hashlib.sha256(weights).hexdigest()}\n")
        return metrics


def experiment(
    environment: EnvironmentConfig,
    lanes: int = 4,
    inference: str = "inline",
    sample_steps: int = 16,
    **trainer: Any,
) -> Experiment:
    servers = {} if inference == "inline" else {"server": PolicyWorkers(stream=inference)}
    return Experiment(
        name="test",
        policies={"policy": ByObservation()},
        workers={
            "actor": Actors(
                environment=environment,
                lanes=lanes,
                agents=(AgentSpec(inference=inference, sample_steps=sample_steps),),
            ),
            **servers,
            "trainer": Trainer(
                **{
                    "algorithm": Recorder(),
                    "checkpoint_seconds": 0.1,
                    "checkpoint_share": 1,
                    "database_seconds": 0.05,
                    **trainer,
                }
            ),
        },
        limits=Limits(updates=1_000_000),
    )


def cartpole() -> Experiment:
    """Actor, policy worker and trainer, in processes of their own."""
    return experiment(Gymnasium(id="CartPole-v1"), inference="inference")


def equal() -> Experiment:
    """Two processes that gather and train by turns."""
    made = experiment(Gymnasium(id="CartPole-v1"))
    workers = {name: config.replace(count=2) for name, config in made.workers.items()}
    return made.replace(workers=workers, together=("actor", "trainer"))


def equal_with(flag: str, hangs: bool) -> Experiment:
    """Two such, one of which hangs in its environment, or lingers in an update."""
    made = equal()
    actor, trainer = made.workers["actor"], made.workers["trainer"]
    if hangs:
        actor = actor.replace(
            environment=Gymnasium(make=f"{__file__}:HangsOnce", kwargs={"flag": flag}), lanes=1
        )
    else:
        trainer = trainer.replace(algorithm=Lingering(flag=flag))
    return made.replace(workers={"actor": actor, "trainer": trainer})


def slow_saving() -> Experiment:
    return experiment(Gymnasium(id="CartPole-v1"), algorithm=Recorder(save_seconds=1.0))


def warming_up() -> Experiment:
    """Its first sample is a long time off."""
    return experiment(Gymnasium(make=f"{__file__}:Tells"), lanes=1, sample_steps=1_000_000)


def raises() -> Experiment:
    return experiment(Gymnasium(make=f"{__file__}:Raises"), lanes=1)


def quits() -> Experiment:
    return experiment(Gymnasium(make=f"{__file__}:Quits"), lanes=1)


def grandchild() -> Experiment:
    return experiment(Gymnasium(make=f"{__file__}:Grandchild"), lanes=1)


def daemon() -> Experiment:
    return experiment(Gymnasium(make=f"{__file__}:Daemon"), lanes=1)


def dies(environment: str) -> Experiment:
    """Its actor's process dies in its environment."""
    return experiment(Gymnasium(make=f"{__file__}:{environment}"), lanes=1)


def numbered(record: str) -> Experiment:
    """Two actors, a policy worker and a trainer that writes down every sample; each row
    says where it comes from."""
    made = experiment(
        Gymnasium(make=f"{__file__}:Numbered"),
        inference="inference",
        algorithm=Recorder(record=record),
        batch_size=128,
    )
    actor = made.workers["actor"].replace(count=2)
    workers = {name: config.replace(restarts=50) for name, config in {**made.workers, "actor": actor}.items()}
    return made.replace(workers=workers)


def numbered_equals(into: str, lag: int | None) -> Experiment:
    """Three processes that gather and train by turns, and write down every sample; each
    row says where it comes from."""
    made = experiment(
        Gymnasium(make=f"{__file__}:Numbered"),
        algorithm=EachRecorder(into=into),
        checkpoint_seconds=60.0,
        max_policy_lag=lag,
    )
    workers = {name: config.replace(count=3, restarts=50) for name, config in made.workers.items()}
    return made.replace(workers=workers, together=("actor", "trainer"))


def hangs_once(flag: str) -> Experiment:
    """Its actor's environment hangs, once: then there is a file `flag`."""
    environment = Gymnasium(make=f"{__file__}:HangsOnce", kwargs={"flag": flag})
    made = experiment(environment, lanes=1)
    return made.replace(limits=made.limits.replace(updates=100))


def hangs_in_an_evaluation(flag: str) -> Experiment:
    """Its replay trainer's environment hangs in an evaluation, once: then there is a file
    `flag`."""
    made = from_memory(Gymnasium(make=f"{__file__}:HangsInEvaluation", kwargs={"flag": flag}))
    trainer = made.workers["trainer"].replace(iteration_steps=100, evaluation_steps=5)
    return made.replace(
        workers={**made.workers, "trainer": trainer}, limits=made.limits.replace(steps=200, updates=None)
    )


def hangs_in_a_thread(flag: str) -> Experiment:
    """Two lanes that step in threads, of which the first that comes to its step 200
    hangs, once."""
    environment = Gymnasium(make=f"{__file__}:HangsOnce", kwargs={"flag": flag}, threads=2)
    made = experiment(environment, lanes=2)
    actor = made.workers["actor"].replace(deadline_s=8.0)
    return made.replace(workers={**made.workers, "actor": actor})


def hangs_at_last(flag: str, stall_s: float) -> Experiment:
    """Its actor's environment hangs, and nobody can end it in threads."""
    environment = Gymnasium(make=f"{__file__}:HangsOnce", kwargs={"flag": flag})
    return experiment(environment, lanes=1).replace(limits=Limits(updates=1000, stall_s=stall_s))


def dawdles() -> Experiment:
    """Takes a quarter of a second for each step."""
    made = experiment(Gymnasium(make=f"{__file__}:Dawdles"), lanes=1, sample_steps=4)
    return made.replace(limits=Limits(updates=4))


def hangs() -> Experiment:
    return experiment(Gymnasium(make=f"{__file__}:Hangs"), lanes=1)


def judged(environment: str) -> Experiment:
    """An evaluation whose actor's process dies in its environment, each time."""
    made = experiment(Gymnasium(make=f"{__file__}:Talker"))
    judge = Actors(
        environment=Gymnasium(make=f"{__file__}:{environment}"),
        agents=(AgentSpec(parameters=Drawn(tag="evaluating"), samples="evaluation", mode="concise"),),
        restarts=1,
    )
    return made.replace(workers={**made.workers, "judge": judge, "evaluation": Evaluation(games=2)})


def dies_at_last(flag: str, saved: bool, trainers: int) -> Experiment:
    """Trainers, each with an actor in its process, of which one dies as the run ends.
    However long that takes, there is no checkpoint between the first and the last."""
    made = experiment(Gymnasium(id="CartPole-v1"), checkpoint_share=1e-6, database_seconds=1000.0)
    workers = {name: config.replace(count=trainers) for name, config in made.workers.items()}
    policy = DiesAtLast(flag=flag, updates=50, saved=saved)
    together, limits = ("actor", "trainer"), Limits(updates=50)
    return made.replace(workers=workers, policies={"policy": policy}, together=together, limits=limits)


def starts_when_told() -> Experiment:
    """An actor whose environment is made once there is a file `told`, a policy worker and
    a trainer."""
    return experiment(Gymnasium(make=f"{__file__}:StartsWhenTold"), inference="inference")


def starts() -> Experiment:
    """Five targets, one after another, whose environment takes half a second to make."""
    made = experiment(Gymnasium(make=f"{__file__}:Starts"), lanes=1)
    return made.replace(workers={**made.workers, "actor": made.workers["actor"].replace(ring=5)})


def forwarded() -> Experiment:
    """An environment that takes half a second to make, and a buffer worker behind it."""
    made = experiment(Gymnasium(make=f"{__file__}:Starts"), lanes=1)
    actor = made.workers["actor"].replace(agents=(AgentSpec(samples="gathered", sample_steps=16),))
    return made.replace(workers={**made.workers, "actor": actor, "buffers": Buffers(process=())})


def speaks() -> Experiment:
    """Its environment prints, and nothing can take that."""
    return experiment(Gymnasium(make=f"{__file__}:Speaks"), lanes=1)


def slots() -> Experiment:
    """Three that step in threads, and a replay memory with a ratio."""
    return limited("Dozes")


def slots_hang() -> Experiment:
    """The same, until all hang in their steps."""
    return limited("HangsAtLast")


def limited(environment: str) -> Experiment:
    return from_memory(Slots(environment=Gymnasium(make=f"{__file__}:{environment}", threads=1)))


def from_memory(environment: EnvironmentConfig) -> Experiment:
    """Three targets of one lane, and a replay memory with a ratio."""
    trainer = ReplayTrainer(
        algorithm=Recorder(), buffer=Replay(capacity=1000, warm_up=10), batch_size=8, ratio="1/2",
        checkpoint_seconds=0.1, checkpoint_share=1, database_seconds=0.05,
    )  # fmt: skip
    actors = ReplayActors(environment=environment, lanes=1, ring=3)
    return experiment(environment).replace(workers={"actor": actors, "trainer": trainer})


class Talker(gymnasium.Env[Any, Any]):
    """An episode ends with every tenth step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, self.steps % 10 == 0, False, {}


class Tells(Talker):
    """Says, by a file in the working directory, that it was stepped."""

    def step(self, action: Any) -> Any:
        if self.steps == 0:
            Path("stepped").touch()
        return super().step(action)


class Raises(Talker):
    """Raises after a second or so of training."""

    def step(self, action: Any) -> Any:
        if self.steps == 2000:
            raise ValueError("the arm is broken")
        return super().step(action)


class Quits(Talker):
    """Exits in the middle of training."""

    def step(self, action: Any) -> Any:
        if self.steps == 200:
            sys.exit("the arm is gone")
        return super().step(action)


class Numbered(Talker):
    """Sees which copy it is, as its seed says, in which episode and at which step, and is
    paid a number that follows from these."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,))
    copies = 16_777_199

    def __init__(self) -> None:
        super().__init__()
        self.episode = -1

    def _see(self) -> Any:
        return np.array([self.copy, self.episode, self.at], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.copy = seed % self.copies
        self.episode, self.at = self.episode + 1, 0
        return self._see(), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        over = self.at == 3 + (self.copy + self.episode) % 29
        reward = float(self.paid(self.copy, self.episode, self.at))
        return self._see(), reward, over and self.episode % 2 == 0, over and self.episode % 2 == 1, {}

    @staticmethod
    def paid(copy: Any, episode: Any, at: Any) -> Any:
        """Return the reward of the step that led there."""
        return copy % 97 + 100 * (episode % 100) + 10_000 * (at % 100)


class DiesInStep(Talker):
    """Kills its process after a second or so."""

    def step(self, action: Any) -> Any:
        if self.steps == 500:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class DiesAtOnce(Talker):
    """Kills its process as soon as it is made in one of a worker."""

    def __init__(self) -> None:
        super().__init__()
        os.kill(os.getpid(), signal.SIGKILL)


class Grandchild(Talker):
    """Leaves a process of its own to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.process = subprocess.Popen(["sleep", "1000"])


class Daemon(Talker):
    """Starts a process that leaves its session and its parent."""

    def __init__(self) -> None:
        super().__init__()
        subprocess.run(["sh", "-c", "setsid sleep 1000 &"], stdout=subprocess.DEVNULL)


class Speaks(Talker):
    """Prints in each step, onto a disk that is full, and letters that not every encoding
    has."""

    def __init__(self) -> None:
        super().__init__()
        full = os.open("/dev/full", os.O_WRONLY)
        for own in (1, 2):
            os.dup2(full, own)

    def step(self, action: Any) -> Any:
        print("… step", self.steps, flush=True)
        print("… step", self.steps, file=sys.stderr)
        return super().step(action)


class Starts(Talker):
    """Takes a while to make."""

    def __init__(self) -> None:
        time.sleep(0.5)
        super().__init__()


class StartsWhenTold(Talker):
    """Is made once there is a file `told`."""

    def __init__(self) -> None:
        until = time.monotonic() + 100
        while not Path("told").exists() and time.monotonic() < until:
            time.sleep(0.01)
        super().__init__()


class HangsOnce(Talker):
    """Does not come back from step 200 before there is a file `flag`.over, but when it
    has hung before."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self.flag = Path(flag)

    def step(self, action: Any) -> Any:
        if self.steps == 200 and not self.flag.exists():
            hold(self.flag)
        return super().step(action)


class HangsInEvaluation(HangsOnce):
    """Hangs so in a step of an evaluation of the replay trainer's."""

    def step(self, action: Any) -> Any:
        if any(call.file.endswith("iteration_evaluation.py") for call in stack_of(threading.get_ident())):
            self.steps = 200
        return super().step(action)


class Dawdles(Talker):
    def step(self, action: Any) -> Any:
        time.sleep(0.25)
        return super().step(action)


class Hangs(Talker):
    """Never comes back from step 200."""

    def step(self, action: Any) -> Any:
        if self.steps == 200:
            Path("hanging").touch()
            while True:
                time.sleep(1000)
        return super().step(action)


class Dozes(Talker):
    """Takes a while."""

    def step(self, action: Any) -> Any:
        time.sleep(0.002)
        return super().step(action)


class HangsAtLast(Dozes):
    """No copy of it comes back from the step that is the 300th of all, or from any later
    one."""

    taken = 0

    def step(self, action: Any) -> Any:
        HangsAtLast.taken += 1
        if HangsAtLast.taken >= 300:
            Path("hanging").touch()
            while True:
                time.sleep(1000)
        return super().step(action)


def rows() -> Experiment:
    """Two kinds of agents in 8 lanes that end at different ticks; every sample is written
    to $ROWS."""
    folder = os.environ["ROWS"]
    kinds = ("red", "blue")
    return Experiment(
        name="rows",
        policies={kind: ByObservation() for kind in kinds},
        workers={
            "actor": Actors(
                environment=Scripted(agents=3, kinds=2, deaths=True),
                lanes=8,
                agents=tuple(
                    AgentSpec(match=f"{kind}_.*", policy=kind, samples=kind, sample_steps=12, bootstrap=1)
                    for kind in kinds
                ),
            ),
            **{
                f"trainer-{kind}": Trainer(
                    policy=kind, samples=kind, algorithm=Recorder(record=f"{folder}/{kind}", seconds=0)
                )
                for kind in kinds
            },
        },
        limits=Limits(updates=6),
    )


def ppo() -> Experiment:
    return Experiment(
        name="ppo",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(
                environment=Gymnasium(id="CartPole-v1"), lanes=8, agents=(AgentSpec(sample_steps=16),)
            ),
            "trainer": Trainer(algorithm=PPO(epochs=2, minibatch_size=64)),
        },
        limits=Limits(updates=8),
    )
