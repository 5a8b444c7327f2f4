"""Experiments for the tests of runs: real workers, and a policy and an algorithm of numpy
alone, so that a run starts in half a second. Whatever only some of them need is imported
once they are made: all worker processes run this file."""

import os
import signal
import threading
import time
import traceback
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tidemill
from tidemill import (
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Limits,
    PolicyWorkers,
    Trainer,
)
from tidemill.api.algorithm import Algorithm, AlgorithmConfig, DataParallel, Sample
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.policy import Policy, PolicyConfig, number_of
from tidemill.api.processing import Processor, ProcessorConfig
from tidemill.api.spaces import Discrete, Spaces
from tidemill.core.schema import Array, Arrays, Field, Schema
from tidemill.core.user_code_loading import load_attribute
from tidemill.workers import data_parallel

ENVIRONMENTS = Path(__file__).with_name("environments.py")


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
    last checkpoint, after `updates`; or (`saved`) once it has. An equal one that `leaves`
    ends once it has saved for it, and there is a file `flag`.leave; and who lives again
    waits for nobody."""

    flag: str
    updates: int
    saved: bool
    leaves: bool

    def build(self, spaces: Spaces, seed: int) -> Policy:
        assert isinstance(spaces.action, Discrete)
        # however late it is, it is the first that writes that one
        data_parallel.LEAVE_ALONE = -1.0 if self.leaves and Path(self.flag).exists() else 60.0
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
        if config.leaves and any(f.name == "save_for_others" for f in traceback.extract_stack()):
            threading.Thread(target=self._leave, daemon=True).start()
        return super().parameters()

    def _leave(self) -> None:
        while not Path(f"{self.config.flag}.leave").exists():
            time.sleep(0.005)
        data_parallel.LEAVE_ALONE = -1.0


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
        update, log = number_of(self.policy.version), Path(os.readlink("/proc/self/fd/1")).stem
        for number, sample in enumerate(samples):
            np.savez(Path(self.config.into) / f"{update} {log} {os.getpid()} {number}.npz", **sample)
        return (yield from super().parallel_update(samples, steps))


@dataclass(frozen=True, kw_only=True)
class DiesAgain(Recorder):
    """Its trainer dies in each life where the next one of `deaths` says: "stored 3", once
    it has stored 3 samples in that life, or "trained", or "saved", as it is about to for
    the third time. `flags`: a folder, for a file for each death."""

    deaths: tuple[str, ...]
    flags: str

    def build(self, policy: Policy, seed: int) -> Algorithm:
        return _DiesAgain(self, policy)


class _DiesAgain(_Recorder):
    def __init__(self, config: DiesAgain, policy: Policy) -> None:
        super().__init__(config, policy)
        self._number = len(os.listdir(config.flags))
        self._done = dict.fromkeys(("stored", "trained", "saved"), 0)

    def _does(self, what: str) -> None:
        assert isinstance(self.config, DiesAgain)
        self._done[what] += 1
        if f"{what} {self._done[what]}" in self.config.deaths[self._number : self._number + 1]:
            (Path(self.config.flags) / str(self._number)).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def take_in(self, sample: Sample) -> None:
        self._does("stored")

    def parallel_update(
        self, samples: Sequence[Sample], steps: int
    ) -> Generator[Array, None, dict[str, float]]:
        self._does("trained")
        return (yield from super().parallel_update(samples, steps))

    def state(self) -> Arrays:
        self._does("saved")
        return super().state()


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
            load_attribute(f"{ENVIRONMENTS}:hold", "test")(Path(self.config.flag))
        return (yield from super().parallel_update(samples, steps))


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


def equal_by_torch() -> Experiment:
    """Two such, whose gradients torch.distributed adds up."""
    made = equal()
    trainer = made.workers["trainer"].replace(algorithm=tidemill.PPO(minibatch_size=32), sums="torch")
    policies = {"policy": tidemill.ActorCritic(hidden=(16,))}
    return made.replace(policies=policies, workers={**made.workers, "trainer": trainer})


def equal_with(flag: str, hangs: bool) -> Experiment:
    """Two such, one of which hangs in its environment, or lingers in an update."""
    made = equal()
    actor, trainer = made.workers["actor"], made.workers["trainer"]
    if hangs:
        actor = actor.replace(
            environment=Gymnasium(make=f"{ENVIRONMENTS}:HangsOnce", kwargs={"flag": flag}), lanes=1
        )
    else:
        trainer = trainer.replace(algorithm=Lingering(flag=flag))
    return made.replace(workers={"actor": actor, "trainer": trainer})


def slow_saving() -> Experiment:
    return experiment(Gymnasium(id="CartPole-v1"), algorithm=Recorder(save_seconds=1.0))


def warming_up() -> Experiment:
    """Its first sample is a long time off."""
    return experiment(Gymnasium(make=f"{ENVIRONMENTS}:Tells"), lanes=1, sample_steps=1_000_000)


def raises() -> Experiment:
    return experiment(Gymnasium(make=f"{ENVIRONMENTS}:Raises"), lanes=1)


def never_closes(breaks: bool) -> Experiment:
    """Two actors, whose environments do not let themselves be closed."""
    environment = Gymnasium(make=f"{ENVIRONMENTS}:NeverCloses", kwargs={"breaks": breaks})
    made = experiment(environment, lanes=2)
    actor = made.workers["actor"].replace(count=2, lane_restarts=None)
    return made.replace(workers={**made.workers, "actor": actor}, limits=Limits(updates=20))


def quits() -> Experiment:
    return experiment(Gymnasium(make=f"{ENVIRONMENTS}:Quits"), lanes=1)


def leaves() -> Experiment:
    return experiment(Gymnasium(make=f"{ENVIRONMENTS}:Leaves"), lanes=1)


def daemons() -> Experiment:
    return experiment(Gymnasium(make=f"{ENVIRONMENTS}:Daemons"), lanes=1)


def bare_daemon() -> Experiment:
    return experiment(Gymnasium(make=f"{ENVIRONMENTS}:BareDaemon"), lanes=1)


def dies(environment: str) -> Experiment:
    """Its actor's process dies in its environment."""
    return experiment(Gymnasium(make=f"{ENVIRONMENTS}:{environment}"), lanes=1)


def numbered(record: str) -> Experiment:
    """Two actors, a policy worker and a trainer that writes down every sample; each row
    says where it comes from."""
    made = experiment(
        Gymnasium(make=f"{ENVIRONMENTS}:Numbered"),
        inference="inference",
        algorithm=Recorder(record=record, seconds=0.02),
        batch_size=128,
    )
    actor = made.workers["actor"].replace(count=2)
    workers = {name: config.replace(restarts=50) for name, config in {**made.workers, "actor": actor}.items()}
    return made.replace(workers=workers)


@dataclass(frozen=True, kw_only=True)
class Slowly(ProcessorConfig):
    """Leaves samples as they are, and takes its time."""

    def build(self, schema: Schema, policy: Policy | None, seed: int) -> Processor:
        return _Slowly()


class _Slowly(Processor):
    def process(self, sample: Sample) -> None:
        time.sleep(0.01)


def numbered_behind_buffers(record: str) -> Experiment:
    """Two actors, a buffer worker that takes its time and a trainer that writes down
    every sample."""
    made = numbered(record)
    spec = made.workers["actor"].agents[0].replace(samples="gathered", inference="inline")
    actor = made.workers["actor"].replace(agents=(spec,))
    buffers = tidemill.Buffers(process=(Slowly(),), restarts=50)
    workers = {"actor": actor, "buffers": buffers, "trainer": made.workers["trainer"]}
    return made.replace(workers=workers)


def numbered_equals(into: str, lag: int | None) -> Experiment:
    """Three processes that gather and train by turns, and write down every sample; each
    row says where it comes from."""
    made = experiment(
        Gymnasium(make=f"{ENVIRONMENTS}:Numbered"),
        algorithm=EachRecorder(into=into, seconds=0.02),
        checkpoint_seconds=60.0,
        max_policy_lag=lag,
    )
    workers = {name: config.replace(count=3, restarts=50) for name, config in made.workers.items()}
    return made.replace(workers=workers, together=("actor", "trainer"))


def hangs_as_it_begins(flag: str, always: bool) -> Experiment:
    """Its actor's environment hangs as it is made, in a next life."""
    kwargs = {"flag": flag, "always": always}
    return experiment(Gymnasium(make=f"{ENVIRONMENTS}:HangsAsItBegins", kwargs=kwargs), lanes=1)


def snoozes(seconds: float = 0.5) -> Experiment:
    """Its actor's polls take 16 times as many seconds."""
    return experiment(Gymnasium(make=f"{ENVIRONMENTS}:Snoozes", kwargs={"seconds": seconds}), lanes=1)


def snoozes_long() -> Experiment:
    """Its actor's polls take longer than a run has that a signal is to end."""
    return snoozes(1.2)


def snoozes_by_turns() -> Experiment:
    """A process that gathers and trains by turns, of which one takes 256 seconds."""
    made = snoozes(1.0)
    actor = made.workers["actor"].replace(ring=16)
    return made.replace(workers={**made.workers, "actor": actor}, together=("actor", "trainer"))


def equals_snooze() -> Experiment:
    """Two such, with turns of 13 seconds, in which they gather a sample."""
    made = snoozes(0.8)
    workers = {name: config.replace(count=2) for name, config in made.workers.items()}
    return made.replace(workers=workers, together=("actor", "trainer"))


def hangs_once(flag: str) -> Experiment:
    """Its actor's environment hangs, once: then there is a file `flag`."""
    environment = Gymnasium(make=f"{ENVIRONMENTS}:HangsOnce", kwargs={"flag": flag})
    made = experiment(environment, lanes=1)
    return made.replace(limits=made.limits.replace(updates=100))


def awaits_an_evaluation() -> Experiment:
    """Its training waits for the evaluation of a version whose games do not end."""
    made = experiment(Gymnasium(make=f"{ENVIRONMENTS}:Talker"), database_updates=3)
    spec = AgentSpec(parameters=tidemill.Drawn(tag="evaluating"), samples="evaluation", mode="concise")
    judge = Actors(environment=Gymnasium(make=f"{ENVIRONMENTS}:EndlessGame"), lanes=1, agents=(spec,))
    return made.replace(
        workers={**made.workers, "judge": judge, "evaluation": tidemill.Evaluation(games=2, updates=3)}
    )


def evaluates_for_long() -> Experiment:
    """Its replay trainer takes minutes for the evaluation after the first iteration."""
    made = from_memory(Gymnasium(make=f"{ENVIRONMENTS}:SlowInEvaluation"))
    trainer = made.workers["trainer"].replace(iteration_steps=100, evaluation_steps=100_000)
    return made.replace(workers={**made.workers, "trainer": trainer})


def hangs_in_an_evaluation(flag: str) -> Experiment:
    """Its replay trainer's environment hangs in an evaluation, once: then there is a file
    `flag`."""
    made = from_memory(Gymnasium(make=f"{ENVIRONMENTS}:HangsInEvaluation", kwargs={"flag": flag}))
    trainer = made.workers["trainer"].replace(iteration_steps=100, evaluation_steps=5)
    return made.replace(
        workers={**made.workers, "trainer": trainer}, limits=made.limits.replace(steps=200, updates=None)
    )


def hangs_in_a_thread(flag: str) -> Experiment:
    """Two lanes that step in threads, of which the first that comes to its step 200
    hangs, once."""
    environment = Gymnasium(make=f"{ENVIRONMENTS}:HangsInAThread", kwargs={"flag": flag}, threads=2)
    made = experiment(environment, lanes=2)
    actor = made.workers["actor"].replace(deadline_s=60.0)
    return made.replace(workers={**made.workers, "actor": actor})


def hangs_at_last(flag: str, stall_s: float) -> Experiment:
    """Its actor's environment hangs, and nobody can end it in threads."""
    environment = Gymnasium(make=f"{ENVIRONMENTS}:HangsOnce", kwargs={"flag": flag})
    return experiment(environment, lanes=1).replace(limits=Limits(updates=1000, stall_s=stall_s))


def dawdles() -> Experiment:
    """Takes a quarter of a second for each step."""
    made = experiment(Gymnasium(make=f"{ENVIRONMENTS}:Dawdles"), lanes=1, sample_steps=4)
    return made.replace(limits=Limits(updates=4))


def hoards() -> Experiment:
    """Its environment takes all the memory that there is, once."""
    made = experiment(Gymnasium(make=f"{ENVIRONMENTS}:Hoards"), lanes=1)
    actor = made.workers["actor"].replace(deadline_s=240.0)  # to fill it takes as long as it does
    return made.replace(workers={**made.workers, "actor": actor}, limits=Limits(updates=40))


def hangs() -> Experiment:
    return experiment(Gymnasium(make=f"{ENVIRONMENTS}:Hangs"), lanes=1)


def two_hang() -> Experiment:
    """Two actors, the one's environment after the other's, before a sample is full."""
    made = experiment(Gymnasium(make=f"{ENVIRONMENTS}:HangsAtLast"), lanes=1, sample_steps=1000)
    return made.replace(workers={**made.workers, "actor": made.workers["actor"].replace(count=2)})


def judged(environment: str) -> Experiment:
    """An evaluation whose actor's process dies in its environment, each time."""
    made = experiment(Gymnasium(make=f"{ENVIRONMENTS}:Talker"))
    judge = Actors(
        environment=Gymnasium(make=f"{ENVIRONMENTS}:{environment}"),
        agents=(
            AgentSpec(parameters=tidemill.Drawn(tag="evaluating"), samples="evaluation", mode="concise"),
        ),
        restarts=1,
    )
    return made.replace(workers={**made.workers, "judge": judge, "evaluation": tidemill.Evaluation(games=2)})


def evaluated() -> Experiment:
    """An evaluation goes on beside it all the while."""
    return judged("Talker")


def dies_at_last(flag: str, saved: bool, trainers: int, leaves: bool = False) -> Experiment:
    """Trainers, each with an actor in its process, of which one dies as the run ends.
    However long that takes, there is no checkpoint between the first and the last."""
    made = experiment(Gymnasium(id="CartPole-v1"), checkpoint_share=1e-6, database_seconds=1000.0)
    workers = {name: config.replace(count=trainers) for name, config in made.workers.items()}
    policy = DiesAtLast(flag=flag, updates=50, saved=saved, leaves=leaves)
    together, limits = ("actor", "trainer"), Limits(updates=50)
    return made.replace(workers=workers, policies={"policy": policy}, together=together, limits=limits)


def starts_when_told() -> Experiment:
    """An actor whose environment is made once there is a file `told`, a policy worker and
    a trainer."""
    return experiment(Gymnasium(make=f"{ENVIRONMENTS}:StartsWhenTold"), inference="inference")


def starts() -> Experiment:
    """Five targets, one after another, whose environment takes half a second to make."""
    made = experiment(Gymnasium(make=f"{ENVIRONMENTS}:Starts"), lanes=1)
    return made.replace(workers={**made.workers, "actor": made.workers["actor"].replace(ring=5)})


def forwarded() -> Experiment:
    """An environment that takes half a second to make, and a buffer worker behind it."""
    made = experiment(Gymnasium(make=f"{ENVIRONMENTS}:Starts"), lanes=1)
    actor = made.workers["actor"].replace(agents=(AgentSpec(samples="gathered", sample_steps=16),))
    return made.replace(workers={**made.workers, "actor": actor, "buffers": tidemill.Buffers(process=())})


def speaks() -> Experiment:
    """Its environment prints, and nothing can take that."""
    return experiment(Gymnasium(make=f"{ENVIRONMENTS}:Speaks"), lanes=1)


def slots() -> Experiment:
    """Three that step in threads, and a replay memory with a ratio."""
    return limited("Dozes")


def slots_hang() -> Experiment:
    """The same, until all hang in their steps."""
    return limited("HangsAtLast")


def limited(environment: str) -> Experiment:
    return from_memory(tidemill.Slots(environment=Gymnasium(make=f"{ENVIRONMENTS}:{environment}", threads=1)))


def from_memory(environment: EnvironmentConfig) -> Experiment:
    """Three targets of one lane, and a replay memory with a ratio."""
    trainer = tidemill.ReplayTrainer(
        algorithm=Recorder(), buffer=tidemill.Replay(capacity=1000, warm_up=10), batch_size=8, ratio="1/2",
        checkpoint_seconds=0.1, checkpoint_share=1, database_seconds=0.05,
    )  # fmt: skip
    actors = tidemill.ReplayActors(environment=environment, lanes=1, ring=3)
    return experiment(environment).replace(workers={"actor": actors, "trainer": trainer})


def numbered_memory(slots: bool, environment: str = "Numbered") -> Experiment:
    """Two actors, of three slots or of three lanes, a policy worker, and a trainer with a
    replay memory and a journal; each row says where it comes from."""
    played = Gymnasium(make=f"{ENVIRONMENTS}:{environment}", threads=int(slots))
    made = from_memory(tidemill.Slots(environment=played) if slots else played)
    actors = made.workers["actor"].replace(count=2, inference="inference")
    workers = {
        "actor": actors if slots else actors.replace(lanes=3, ring=1),
        "server": PolicyWorkers(),
        "trainer": made.workers["trainer"].replace(journal=True, checkpoint_seconds=60.0),
    }
    return made.replace(workers={name: config.replace(restarts=50) for name, config in workers.items()})


def numbered_learner(sac: bool, slots: bool) -> Experiment:
    """The same, where SAC learns, or DQN by returns of three steps."""
    made = numbered_memory(slots, "NumberedForces" if sac else "Numbered")
    trainer = made.workers["trainer"].replace(
        algorithm=tidemill.SAC() if sac else tidemill.DQN(),
        buffer=tidemill.Replay(capacity=60_000, warm_up=10, steps=1 if sac else 3),
        checkpoint_seconds=0.2,
    )
    policy = tidemill.SquashedGaussian(hidden=(16,)) if sac else tidemill.QNetwork(hidden=(16,))
    return made.replace(workers={**made.workers, "trainer": trainer}, policies={"policy": policy})


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
                environment=tidemill.Scripted(agents=3, kinds=2, deaths=True),
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
        policies={"policy": tidemill.ActorCritic()},
        workers={
            "actor": Actors(
                environment=Gymnasium(id="CartPole-v1"), lanes=8, agents=(AgentSpec(sample_steps=16),)
            ),
            "trainer": Trainer(algorithm=tidemill.PPO(epochs=2, minibatch_size=64)),
        },
        limits=Limits(updates=8),
    )
