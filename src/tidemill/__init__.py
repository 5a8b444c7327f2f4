"""Tidemill trains reinforcement-learning agents. Workers are joined by streams; the same
experiment runs in one thread, in threads, or in processes over shared memory.

    import tidemill
    from tidemill import PPO, ActorCritic, Actors, Experiment, Gymnasium, Limits, Trainer

    run = tidemill.train(Experiment(
        name="cartpole",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(environment=Gymnasium(id="CartPole-v1")),
            "trainer": Trainer(algorithm=PPO()),
        },
        limits=Limits(mean_return=475.0),
    ))
    policy = tidemill.load(run.folder)
    action = policy.act(observation)

Importing this imports no torch: a policy's `build` does.
"""

from typing import TYPE_CHECKING, Any

from tidemill.algorithms.augmentation import RandomShift
from tidemill.algorithms.dqn import DQN
from tidemill.algorithms.impala import Impala
from tidemill.algorithms.post import GAE, Returns
from tidemill.algorithms.ppo import PPO
from tidemill.algorithms.reanalysis import Reanalyse
from tidemill.algorithms.sac import SAC
from tidemill.api.algorithm import Algorithm, AlgorithmConfig, PostProcessor, Sample
from tidemill.api.curriculum import Stage
from tidemill.api.environment import AgentInfo, Environment, EnvironmentConfig, Tick
from tidemill.api.experiment import Experiment, Limits, WorkerConfig
from tidemill.api.policy import Policy, PolicyConfig
from tidemill.bridge.trainer_side.environment import SimulatorEnvironment
from tidemill.core.errors import TidemillError
from tidemill.core.moved import find_moved_modules
from tidemill.core.query import Query
from tidemill.envs.asynchronous import Asynchronous
from tidemill.envs.atari import Atari
from tidemill.envs.lanes import Gymnasium
from tidemill.envs.openenv import OpenEnv
from tidemill.envs.pettingzoo import PettingZoo
from tidemill.envs.rest.config import Rest
from tidemill.envs.scripted import Free, Scripted
from tidemill.envs.slots import Slots
from tidemill.envs.vector import GymnasiumVector
from tidemill.nets.actor_critic import ActorCritic
from tidemill.nets.q_network import QNetwork
from tidemill.nets.recurrent import RecurrentActorCritic
from tidemill.nets.squashed_gaussian import SquashedGaussian
from tidemill.replay.prioritised import PrioritisedReplay
from tidemill.replay.priority_queue import PriorityQueue
from tidemill.replay.queue import Queue
from tidemill.replay.replay import Replay
from tidemill.streams.sources import Drawn, Fixed, Newest
from tidemill.workers.actor import Actors, AgentSpec
from tidemill.workers.buffers import Buffers
from tidemill.workers.evaluation import Evaluation
from tidemill.workers.policy import PolicyWorkers
from tidemill.workers.population import Population, populate
from tidemill.workers.trainer_config import Trainer

if TYPE_CHECKING:
    from tidemill.run.evaluate import evaluate
    from tidemill.run.load import load
    from tidemill.run.runners import AsyncTrainRunner, TrainRunner, read_iterations
    from tidemill.run.session import resume, train

__version__ = "0.1.0"

__all__ = [
    "DQN",
    "GAE",
    "PPO",
    "SAC",
    "ActorCritic",
    "Actors",
    "AgentInfo",
    "AgentSpec",
    "Algorithm",
    "AlgorithmConfig",
    "AsyncTrainRunner",
    "Asynchronous",
    "Atari",
    "Buffers",
    "Drawn",
    "Environment",
    "EnvironmentConfig",
    "Evaluation",
    "Experiment",
    "Fixed",
    "Free",
    "Gymnasium",
    "GymnasiumVector",
    "Impala",
    "Limits",
    "Newest",
    "OpenEnv",
    "PettingZoo",
    "Policy",
    "PolicyConfig",
    "PolicyWorkers",
    "Population",
    "PostProcessor",
    "PrioritisedReplay",
    "PriorityQueue",
    "QNetwork",
    "Query",
    "Queue",
    "RandomShift",
    "Reanalyse",
    "RecurrentActorCritic",
    "Replay",
    "Rest",
    "Returns",
    "Sample",
    "Scripted",
    "SimulatorEnvironment",
    "Slots",
    "SquashedGaussian",
    "Stage",
    "Tick",
    "TidemillError",
    "TrainRunner",
    "Trainer",
    "WorkerConfig",
    "evaluate",
    "load",
    "populate",
    "read_iterations",
    "resume",
    "train",
]

_FRONT = {
    "AsyncTrainRunner": "tidemill.run.runners",
    "TrainRunner": "tidemill.run.runners",
    "evaluate": "tidemill.run.evaluate",
    "load": "tidemill.run.load",
    "read_iterations": "tidemill.run.runners",
    "resume": "tidemill.run.session",
    "train": "tidemill.run.session",
}


find_moved_modules()


def __getattr__(name: str) -> Any:
    """Import the Python front when it is first used: worker processes, which import this
    package too, have no use for it."""
    if name not in _FRONT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_FRONT[name]), name)
