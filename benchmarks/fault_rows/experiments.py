"""The experiments that have the faults of `benchmarks/faults.py`, and what has them: an
environment and a metric sink."""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from hoard import take_all_memory
from taken import FOLDER, MET, taken

from tidemill import (
    DQN,
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
    LoggedRun,
    MetricSink,
    PolicyWorkers,
    QNetwork,
    Replay,
    ReplayActors,
    ReplayTrainer,
    SimulatorEnvironment,
    Slots,
    Trainer,
    populate,
)

CARTPOLE = Gymnasium(id="CartPole-v1")
LOOK_EVERY = 16  # steps of a lane between looks at whether it is to have a fault
STILL = 0.1  # seconds between two steps of a process that are written down
DEADLINE = 2.0  # seconds after which a step counts as hung
STORM = 192  # rewards in a row that are too large: those of three samples
SAMPLE_STEPS = 64
LANES = 16


class Faulty(CartPoleEnv):
    """CartPole that takes faults (`taken.py`), and writes down, in `FAULTS/../still`,
    from when to when none of this process's lanes took a step, where that was long."""

    last = 0.0

    def __init__(self) -> None:
        super().__init__()
        self._left, self._storm = LOOK_EVERY, 0
        self._still = Path(os.environ[FOLDER]).parent / "still"

    def step(self, action: Any) -> Any:
        now = time.time()
        if now - Faulty.last > STILL and Faulty.last:
            with self._still.open("a") as file:
                file.write(f"{os.getpid()} {Faulty.last} {now}\n")
        Faulty.last = now
        observation, reward, over, cut, info = super().step(action)
        self._left -= 1
        if self._left == 0:
            self._left = LOOK_EVERY
            if fault := taken():
                observation, reward = self._suffer(fault, observation, reward)
        if self._storm:
            self._storm, reward = self._storm - 1, 3e38
        return observation, reward, over, cut, info

    def _suffer(self, fault: str, observation: Any, reward: Any) -> tuple[Any, Any]:
        match fault:
            case "hang":
                time.sleep(1e6)
            case "raise":
                raise RuntimeError("the pole is gone")
            case "nan observation":
                return np.full_like(observation, np.nan), reward
            case "nan reward":
                return observation, float("nan")
            case "huge reward":  # of which learning's numbers become infinite
                return observation, 3e38
            case "huge rewards":
                self._storm = STORM
            case "eat":
                take_all_memory()
        return observation, reward


class SlowToMake(CartPoleEnv):
    """CartPole that takes 8 s to make."""

    def __init__(self) -> None:
        time.sleep(8.0)
        super().__init__()


class Unclosable(CartPoleEnv):
    """CartPole that never comes back from being closed."""

    def close(self) -> None:
        time.sleep(1e6)


class Away(MetricSink):
    """A tracker that hangs, is away, or broken, while files of these names lie beside the
    run's folder; it writes the number of each update there, and by which file it failed
    last (`MET`)."""

    title = "the tracker"

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self._beside = run.folder.parent

    def write(self, record: Mapping[str, float]) -> None:
        # one look alone, so that it never fails by what it has not noted
        found = next((name for name in ("hangs", "away", "broken") if (self._beside / name).exists()), "")
        if found:
            (self._beside / MET).write_text(found)
        while found == "hangs" and (self._beside / found).exists():
            time.sleep(0.01)
        if found == "away":
            raise ConnectionError("nobody answers there")
        if found == "broken":
            raise RuntimeError("it is broken")
        if "update" in record:
            with (self._beside / "tracked").open("a") as file:
                file.write(f"{record['update']:.0f}\n")


def _lasting(made: Experiment) -> Experiment:
    """Have its workers die as often as it takes, and lanes fail likewise."""
    workers = {}
    for name, config in made.workers.items():
        workers[name] = config.replace(restarts=1000)
        if isinstance(config, Actors):
            workers[name] = workers[name].replace(lane_restarts=1000)
    return made.replace(workers=workers)


def _on_policy(
    environment: Any = CARTPOLE,
    lanes: int = LANES,
    actors: Mapping[str, Any] | None = None,
    spec: AgentSpec | None = None,
    policy: Any = None,
    algorithm: Any = None,
    trainer: Mapping[str, Any] | None = None,
    **others: Any,
) -> Experiment:
    played = spec or AgentSpec(sample_steps=SAMPLE_STEPS)
    workers = {
        "actor": Actors(
            environment=environment, lanes=lanes, agents=(played,), **{"slots": 2, **(actors or {})}
        ),
        "trainer": Trainer(algorithm=algorithm or PPO(minibatch_size=512, epochs=4), **(trainer or {})),
    }
    made = Experiment(
        name="faults",
        policies={"policy": policy or ActorCritic()},
        workers=workers | others,
        limits=Limits(updates=100_000_000),
    )
    return _lasting(made)


def apart() -> Experiment:
    """Two actors, a policy worker and a trainer, each in a process of its own."""
    asks = AgentSpec(inference="inference", sample_steps=SAMPLE_STEPS)
    return _on_policy(actors={"count": 2}, spec=asks, server=PolicyWorkers(stream="inference"))


def two_servers() -> Experiment:
    """Two actors, each with a policy worker of its own that lives twice, and a trainer
    that needs samples of both, each in a process of its own."""
    asks = AgentSpec(inference="inference", sample_steps=SAMPLE_STEPS)
    made = _on_policy(
        actors={"count": 2}, spec=asks, server=PolicyWorkers(stream="inference", count=2),
        trainer={"max_policy_lag": 0},
    )  # fmt: skip
    servers = made.workers["server"].replace(restarts=1)
    return made.replace(workers={**made.workers, "server": servers})


def plain() -> Experiment:
    """An actor and a trainer, and checkpoints each second."""
    return _on_policy(trainer={"checkpoint_seconds": 1.0, "checkpoint_share": 0.5, "checkpoints": 10})


def equal() -> Experiment:
    """Two processes, each an actor and a trainer by turns: the usual layout."""
    made = _on_policy(Gymnasium(make=f"{__file__}:Faulty", max_episode_steps=500))
    workers = {name: config.replace(count=2) for name, config in made.workers.items()}
    return made.replace(workers=workers, together=("actor", "trainer"))


def memory() -> Experiment:
    """An actor and a trainer with a replay memory by turns."""
    return _from_memory(ReplayActors(environment=CARTPOLE, lanes=8), warm_up=500)


def memory_of_lanes() -> Experiment:
    """The same, of faulty lanes."""
    environment = Gymnasium(make=f"{__file__}:Faulty", max_episode_steps=500)
    return _from_memory(ReplayActors(environment=environment, lanes=8), warm_up=500)


def memory_apart() -> Experiment:
    """Two actors and a trainer with a replay memory, each in a process of its own."""
    made = _from_memory(ReplayActors(environment=CARTPOLE, lanes=8, count=2), warm_up=500)
    return made.replace(together=())


def warming_up() -> Experiment:
    """An actor and a trainer by turns, whose memory never has enough to begin with."""
    return _from_memory(ReplayActors(environment=CARTPOLE, lanes=8), warm_up=1_000_000)


def evaluating() -> Experiment:
    """The same with an evaluation, after its first 1,000 steps, that takes minutes."""
    actors = ReplayActors(environment=CARTPOLE, lanes=1)
    return _from_memory(actors, warm_up=500, iteration_steps=1000, evaluation_steps=1_000_000)


def slots() -> Experiment:
    """Four slots, each with a thread, and a replay memory."""
    environment = Gymnasium(make=f"{__file__}:Faulty", threads=1, max_episode_steps=500)
    actors = ReplayActors(environment=Slots(environment=environment), lanes=1, ring=4, deadline_s=DEADLINE)
    return _from_memory(actors, warm_up=500)


def _from_memory(actors: ReplayActors, warm_up: int, **trainer: Any) -> Experiment:
    memory = Replay(capacity=max(50_000, 4 * warm_up), warm_up=warm_up)
    learns = ReplayTrainer(algorithm=DQN(), buffer=memory, batch_size=64, ratio="1/8", **trainer)
    return _lasting(
        Experiment(
            name="faults",
            policies={"policy": QNetwork()},
            workers={"actor": actors, "trainer": learns},
            together=("actor", "trainer"),
            limits=Limits(updates=100_000_000),
        )
    )


def buffered() -> Experiment:
    """Two actors, each with a buffer worker, and a trainer."""
    into = AgentSpec(samples="gathered", sample_steps=SAMPLE_STEPS)
    return _on_policy(actors={"count": 2}, spec=into, buffer=Buffers(process=(), count=2))


def judged() -> Experiment:
    """An actor, a trainer, and an evaluation with its own actor."""
    spec = AgentSpec(parameters=Drawn(tag="evaluating"), samples="evaluation", mode="concise")
    judge = Actors(environment=CARTPOLE, lanes=8, agents=(replace(spec, deterministic=True),))
    often = {"database_seconds": 1.0}
    return _on_policy(trainer=often, judge=judge, evaluation=Evaluation(games=16))


def population() -> Experiment:
    """Two members, each an actor and a trainer, and what manages them."""
    one = _on_policy(lanes=8, trainer={"database_seconds": 1.0})
    explore = {"learning_rate": (1e-5, 1e-2)}
    return _lasting(populate(one, [{"learning_rate": 1e-3}, {"learning_rate": 3e-4}], explore=explore))


def lanes() -> Experiment:
    """An actor in whose own thread faulty lanes step, and a trainer."""
    return _faulty(threads=0)


def lanes_in_threads() -> Experiment:
    """The same, with two threads for four lanes."""
    return _faulty(threads=2)


def patient() -> Experiment:
    """An actor that waits for its lanes for as long as they take, and a trainer."""
    return _faulty(threads=0, deadline_s=1000.0)


def starving() -> Experiment:
    """The same, beside an actor and a trainer of another policy, to which nothing
    happens."""
    made = patient()
    learns = Trainer(policy="other", samples="other", algorithm=PPO(minibatch_size=512, epochs=4))
    spec = AgentSpec(policy="other", samples="other", sample_steps=128)
    plays = Actors(environment=CARTPOLE, lanes=4, slots=2, agents=(spec,))
    workers = {**made.workers, "other_actor": plays, "other_trainer": learns}
    return _lasting(made.replace(policies={**made.policies, "other": ActorCritic()}, workers=workers))


def _faulty(threads: int, deadline_s: float = DEADLINE) -> Experiment:
    environment = Gymnasium(make=f"{__file__}:Faulty", threads=threads, max_episode_steps=500)
    often = {"checkpoint_seconds": 1.0, "checkpoint_share": 0.5, "checkpoints": 10}
    return _on_policy(environment, lanes=4, actors={"deadline_s": deadline_s}, trainer=often)


def unclosable() -> Experiment:
    """An environment that does not let itself be closed."""
    return _on_policy(Gymnasium(make=f"{__file__}:Unclosable", max_episode_steps=500), lanes=1)


def simulators() -> Experiment:
    """An actor with two simulators, and a trainer."""
    path = str(Path(__file__).with_name("world.py"))
    return _on_policy(SimulatorEnvironment(path=path), lanes=2, actors={"deadline_s": DEADLINE})


def slow_to_make() -> Experiment:
    """An environment that takes 8 s to make."""
    return _on_policy(Gymnasium(make=f"{__file__}:SlowToMake"), lanes=1)


def long_update() -> Experiment:
    """Updates that take minutes."""
    return _on_policy(algorithm=PPO(minibatch_size=64, epochs=20_000))


def large() -> Experiment:
    """Networks of four million weights, and a checkpoint each second."""
    often = {"checkpoint_seconds": 1.0, "checkpoint_share": 0.5}
    return _on_policy(
        policy=ActorCritic(hidden=(2048, 2048)), algorithm=PPO(minibatch_size=2048, epochs=1), trainer=often
    )


def too_large() -> Experiment:
    """Samples that no machine has room for."""
    return _on_policy(spec=AgentSpec(sample_steps=10**10))
