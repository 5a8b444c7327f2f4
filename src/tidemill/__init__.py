"""Tidemill trains reinforcement-learning agents. Workers are joined by streams; the same
experiment runs in one thread, in threads, or in processes over shared memory.

    import tidemill

    result = tidemill.train("CartPole-v1", mean_return=475)
    action = result.policy.act(observation)

An experiment says more: which workers there are, and which streams join them.

    from tidemill import PPO, ActorCritic, Actors, Experiment, Gymnasium, Limits, Trainer

    result = tidemill.train(Experiment(
        name="cartpole",
        policies={"policy": ActorCritic()},
        workers={
            "actor": Actors(environment=Gymnasium(id="CartPole-v1")),
            "trainer": Trainer(algorithm=PPO()),
        },
        limits=Limits(mean_return=475.0),
    ))

Importing this imports no torch: a policy's `build` does.
"""

from typing import TYPE_CHECKING, Any

from tidemill.core import config
from tidemill.core.moved import find_moved_modules

if TYPE_CHECKING:
    from tidemill.algorithms.augmentation import RandomShift as RandomShift
    from tidemill.algorithms.dqn import DQN as DQN
    from tidemill.algorithms.impala import Impala as Impala
    from tidemill.algorithms.post_processors import GAE as GAE
    from tidemill.algorithms.post_processors import Returns as Returns
    from tidemill.algorithms.ppo import PPO as PPO
    from tidemill.algorithms.reanalysis import Reanalyse as Reanalyse
    from tidemill.algorithms.sac import SAC as SAC
    from tidemill.api.algorithm import Algorithm as Algorithm
    from tidemill.api.algorithm import AlgorithmConfig as AlgorithmConfig
    from tidemill.api.algorithm import PostProcessor as PostProcessor
    from tidemill.api.algorithm import Sample as Sample
    from tidemill.api.curriculum import Stage as Stage
    from tidemill.api.environment import AgentInfo as AgentInfo
    from tidemill.api.environment import Environment as Environment
    from tidemill.api.environment import EnvironmentConfig as EnvironmentConfig
    from tidemill.api.environment import Tick as Tick
    from tidemill.api.experiment import Experiment as Experiment
    from tidemill.api.experiment import Limits as Limits
    from tidemill.api.experiment import WorkerConfig as WorkerConfig
    from tidemill.api.launcher import Launcher as Launcher
    from tidemill.api.metric_sink import LoggedRun as LoggedRun
    from tidemill.api.metric_sink import MetricSink as MetricSink
    from tidemill.api.policy import Policy as Policy
    from tidemill.api.policy import PolicyConfig as PolicyConfig
    from tidemill.bridge.trainer_side.environment import SimulatorEnvironment as SimulatorEnvironment
    from tidemill.core.errors import ConfigError as ConfigError
    from tidemill.core.errors import RunError as RunError
    from tidemill.core.errors import TidemillError as TidemillError
    from tidemill.envs.asynchronous import Asynchronous as Asynchronous
    from tidemill.envs.atari import Atari as Atari
    from tidemill.envs.fault_tolerant import Slots as Slots
    from tidemill.envs.lanes import Gymnasium as Gymnasium
    from tidemill.envs.pettingzoo import PettingZoo as PettingZoo
    from tidemill.envs.vector import GymnasiumVector as GymnasiumVector
    from tidemill.launchers.processes import ProcessesLauncher as ProcessesLauncher
    from tidemill.metrics.json_lines import read_metrics as read_metrics
    from tidemill.nets.actor_critic import ActorCritic as ActorCritic
    from tidemill.nets.q_network import QNetwork as QNetwork
    from tidemill.nets.recurrent import RecurrentActorCritic as RecurrentActorCritic
    from tidemill.nets.squashed_gaussian import SquashedGaussian as SquashedGaussian
    from tidemill.nets.torch_network import TorchNetwork as TorchNetwork
    from tidemill.presets.experiments import experiment_for as experiment_for
    from tidemill.remote.openenv import OpenEnv as OpenEnv
    from tidemill.remote.rest_config import Rest as Rest
    from tidemill.replay.prioritised import PrioritisedReplay as PrioritisedReplay
    from tidemill.replay.priority_queue import PriorityQueue as PriorityQueue
    from tidemill.replay.queue import Queue as Queue
    from tidemill.replay.replay import Replay as Replay
    from tidemill.replay_training.actor_config import ReplayActors as ReplayActors
    from tidemill.replay_training.trainer_config import ReplayTrainer as ReplayTrainer
    from tidemill.run.run_control import RunControl as RunControl
    from tidemill.store.query import Query as Query
    from tidemill.streams.sources import Drawn as Drawn
    from tidemill.streams.sources import Fixed as Fixed
    from tidemill.streams.sources import Newest as Newest
    from tidemill.trained.evaluate import evaluate as evaluate
    from tidemill.trained.load import load as load
    from tidemill.trained.plot import plot as plot
    from tidemill.training.check_env import check_env as check_env
    from tidemill.training.result import Result as Result
    from tidemill.training.result import Summary as Summary
    from tidemill.training.runners import AsyncTrainRunner as AsyncTrainRunner
    from tidemill.training.runners import TrainRunner as TrainRunner
    from tidemill.training.runners import read_iterations as read_iterations
    from tidemill.training.train import resume as resume
    from tidemill.training.train import train as train
    from tidemill.workers.actor_config import Actors as Actors
    from tidemill.workers.agent_spec import AgentSpec as AgentSpec
    from tidemill.workers.base import PollResult as PollResult
    from tidemill.workers.base import Worker as Worker
    from tidemill.workers.buffer_worker import Buffers as Buffers
    from tidemill.workers.evaluation import Evaluation as Evaluation
    from tidemill.workers.policy import PolicyWorkers as PolicyWorkers
    from tidemill.workers.population import Population as Population
    from tidemill.workers.population import populate as populate
    from tidemill.workers.trainer_config import Trainer as Trainer

__version__ = "0.1.0"

# Public names by the module that is imported when one of them is first used.
_NAMES = {
    "tidemill.algorithms.augmentation": "RandomShift",
    "tidemill.algorithms.dqn": "DQN",
    "tidemill.algorithms.impala": "Impala",
    "tidemill.algorithms.post_processors": "GAE Returns",
    "tidemill.algorithms.ppo": "PPO",
    "tidemill.algorithms.reanalysis": "Reanalyse",
    "tidemill.algorithms.sac": "SAC",
    "tidemill.api.algorithm": "Algorithm AlgorithmConfig PostProcessor Sample",
    "tidemill.api.curriculum": "Stage",
    "tidemill.api.environment": "AgentInfo Environment EnvironmentConfig Tick",
    "tidemill.api.experiment": "Experiment Limits WorkerConfig",
    "tidemill.api.launcher": "Launcher",
    "tidemill.api.metric_sink": "LoggedRun MetricSink",
    "tidemill.api.policy": "Policy PolicyConfig",
    "tidemill.bridge.trainer_side.environment": "SimulatorEnvironment",
    "tidemill.core.errors": "ConfigError RunError TidemillError",
    "tidemill.envs.asynchronous": "Asynchronous",
    "tidemill.envs.atari": "Atari",
    "tidemill.envs.lanes": "Gymnasium",
    "tidemill.envs.pettingzoo": "PettingZoo",
    "tidemill.envs.fault_tolerant": "Slots",
    "tidemill.envs.vector": "GymnasiumVector",
    "tidemill.launchers.processes": "ProcessesLauncher",
    "tidemill.metrics.json_lines": "read_metrics",
    "tidemill.nets.actor_critic": "ActorCritic",
    "tidemill.nets.q_network": "QNetwork",
    "tidemill.nets.recurrent": "RecurrentActorCritic",
    "tidemill.nets.squashed_gaussian": "SquashedGaussian",
    "tidemill.nets.torch_network": "TorchNetwork",
    "tidemill.presets.experiments": "experiment_for",
    "tidemill.remote.openenv": "OpenEnv",
    "tidemill.remote.rest_config": "Rest",
    "tidemill.replay.prioritised": "PrioritisedReplay",
    "tidemill.replay.priority_queue": "PriorityQueue",
    "tidemill.replay.queue": "Queue",
    "tidemill.replay.replay": "Replay",
    "tidemill.replay_training.actor_config": "ReplayActors",
    "tidemill.replay_training.trainer_config": "ReplayTrainer",
    "tidemill.run.run_control": "RunControl",
    "tidemill.store.query": "Query",
    "tidemill.streams.sources": "Drawn Fixed Newest",
    "tidemill.trained.evaluate": "evaluate",
    "tidemill.trained.load": "load",
    "tidemill.trained.plot": "plot",
    "tidemill.training.check_env": "check_env",
    "tidemill.training.result": "Result Summary",
    "tidemill.training.runners": "AsyncTrainRunner TrainRunner read_iterations",
    "tidemill.training.train": "resume train",
    "tidemill.workers.actor_config": "Actors",
    "tidemill.workers.agent_spec": "AgentSpec",
    "tidemill.workers.base": "PollResult Worker",
    "tidemill.workers.buffer_worker": "Buffers",
    "tidemill.workers.evaluation": "Evaluation",
    "tidemill.workers.policy": "PolicyWorkers",
    "tidemill.workers.population": "Population populate",
    "tidemill.workers.trainer_config": "Trainer",
}
# Names that are no longer public: environments for tests.
_OTHERS = {"tidemill.testing.scripted": "Free Scripted"}
_MODULES = {
    name: module for table in (_NAMES, _OTHERS) for module, names in table.items() for name in names.split()
}
__all__ = sorted(name for names in _NAMES.values() for name in names.split())

config.homes.update(_MODULES)
find_moved_modules()


def __getattr__(name: str) -> Any:
    """Import what is public when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
