"""Every setting of every configuration acts, or is refused where it would have no effect.

A new setting fails here until it is entered below: under `ALWAYS` if it acts whatever the
rest says, under `IDLE` with a case in which it does not. Either way something in the
library must read it, and some test or example must set it.
"""

import ast
import dataclasses
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import tidemill
from tidemill.algorithms.dqn import DQN
from tidemill.algorithms.impala import Impala
from tidemill.algorithms.ppo import PPO
from tidemill.algorithms.sac import SAC
from tidemill.api.environment import AgentInfo
from tidemill.api.experiment import Experiment
from tidemill.api.limits import Limits
from tidemill.api.schedule import LinearSchedule
from tidemill.api.spaces import Box, Dict, Discrete, Spaces
from tidemill.core.config import WHEN, Config
from tidemill.core.errors import ConfigError
from tidemill.nets.actor_critic import ActorCritic
from tidemill.nets.q_network import QNetwork
from tidemill.nets.torch_network import TorchNetwork
from tidemill.remote.fault_injection import Faults
from tidemill.replay.prioritised import PrioritisedReplay
from tidemill.replay.replay import Replay
from tidemill.replay_training.actor_config import ReplayActors
from tidemill.replay_training.trainer_config import ReplayTrainer
from tidemill.streams.sources import Drawn
from tidemill.testing.scripted import Scripted, ScriptedEnvironment
from tidemill.workers.actor_config import Actors
from tidemill.workers.actor_environments import stack_frames
from tidemill.workers.agent_spec import AgentSpec
from tidemill.workers.buffer_worker import Buffers
from tidemill.workers.population_config import Population
from tidemill.workers.trainer_config import Trainer

ROOT = Path(__file__).parent.parent
CHOICES = Spaces(Discrete(3), Discrete(2))
PLAIN = Spaces(Box((4,), "float32"), Discrete(2))
IMAGE = Spaces(Box((4, 84, 84), "uint8"), Discrete(2))
PUSHED = Spaces(Box((4,), "float32"), Box((1,), "float32", (-1.0,), (1.0,)))


def trainer(**settings):
    return Trainer(algorithm=PPO(), **settings)


def endless(algorithm):
    actors = Actors(environment=Scripted())
    workers = {"actor": actors, "trainer": Trainer(algorithm=algorithm)}
    Experiment(
        name="endless", policies={"policy": ActorCritic()}, workers=workers, limits=Limits(seconds=1)
    ).check()


def advised(algorithm, **workers):
    """Rows have advantages by `GAE`, and so the algorithm computes none."""
    gathered = "gathered" if workers else "samples"
    actors = Actors(
        environment=Scripted(),
        agents=(AgentSpec(mode="full", samples=gathered, post=(tidemill.GAE(gamma=0.9),)),),
    )
    workers = {"actor": actors, "trainer": Trainer(algorithm=algorithm), **workers}
    Experiment(
        name="advised", policies={"policy": ActorCritic()}, workers=workers, limits=Limits(updates=1)
    ).check()


def refilled(environment, **settings):
    """A replay memory is filled from it."""
    workers = {
        "actor": ReplayActors(environment=environment, lanes=1, **settings),
        "trainer": ReplayTrainer(algorithm=DQN(), buffer=Replay(capacity=10_000), batch_size=32, ratio=1),
    }
    Experiment(
        name="refilled", policies={"policy": QNetwork()}, workers=workers, limits=Limits(updates=1)
    ).check()


class Seeing(ScriptedEnvironment):
    def __init__(self, spaces):
        super().__init__(Scripted(), 1)
        self.agents = (AgentInfo("one", spaces),)


class Own(TorchNetwork):
    def network(self, spaces, outputs):
        raise AssertionError("not asked")


ALWAYS = {
    "Experiment": "name policies workers limits together curriculum exact_resume seed",
    "Limits": "steps updates seconds mean_return window until stall_s",
    "Stage": "options until",
    "WorkerConfig": "count restarts one_core math_threads",
    "ActorConfig": "environment lanes ring max_episode_steps deadline_s lane_restarts lane_fault_records",
    "Actors": "agents",
    "ReplayActors": "policy inference samples frame_stack",
    "BytesSetting": "scaled_bytes",
    "SquashedGaussian": "sde_steps",
    "PlayerSpec": "match policy inference samples deterministic",
    "TrainerConfig": "algorithm policy samples checkpoint_seconds checkpoint_share checkpoints "
    "database_seconds device fault_records fault_rate_factor",
    "Trainer": "buffer max_policy_lag sums",
    "ReplayTrainer": "buffer batch_size ratio slack exact journal keep_buffer iteration_steps "
    "finish_episodes max_no_progress_s",
    "PolicyWorkers": "stream policies most_rows threaded device",
    "Buffers": "samples into process",
    "Evaluation": "policy samples games updates tag best drawn name",
    "Population": "members explore updates metric quantile",
    "Query": "where order limit",
    "Drawn": "tag among how",
    "Fixed": "file",
    "Queue": "reuses",
    "PriorityQueue": "capacity reuses",
    "Replay": "capacity warm_up steps frame_stack whole_episodes drop_cut max_bytes mapped",
    "PrioritisedReplay": "alpha",
    "Returns": "gamma",
    "GAE": "gamma gae_lambda",
    "RandomShift": "pixels",
    "LinearSchedule": "start end to_step",
    "AdamSettings": "learning_rate adam_epsilon",
    "PolicyGradient": "minibatch_size value_coefficient entropy_coefficient max_gradient_norm clip_apart "
    "normalise_returns",
    "PPO": "clip epochs normalise_advantages clip_value target_kl desired_kl correct_off_policy",
    "Impala": "trace_lambda rho_clip c_clip",
    "DQN": "gamma double max_gradient_norm target_steps target_rate",
    "QRDQN": "kappa",
    "TwinCritics": "gamma learning_rate critic_learning_rate adam_epsilon max_gradient_norm target_rate",
    "SAC": "temperature learn_temperature",
    "TD3": "policy_delay exploration_noise target_noise target_noise_clip",
    "ActorCritic": "initialisation encoder shared_critic action_mask critic_only",
    "RecurrentActorCritic": "cell width",
    "QNetwork": "hidden initialisation duelling noise atoms quantiles action_mask",
    "BoundedActor": "hidden critic_hidden initialisation",
    "TorchNetwork": "action_mask",
    "Gymnasium": "id make kwargs max_episode_steps threads vectorized wrap",
    "EnvPool": "id num_threads max_episode_steps kwargs",
    "GymnasiumVector": "id make kwargs max_episode_steps seed_argument autoreset",
    "Atari": "id num_threads frame_skip stack size noop_max repeat_action_probability episodic_life "
    "reward_clipping fire_reset fire_lives full_action_space "
    "max_episode_steps",
    "PettingZoo": "make kwargs state team_reward max_episode_steps wrap",
    "Asynchronous": "make kwargs max_episode_steps deadline_s",
    "Rest": "url token form deadline_s attempt_s retries",
    "OpenEnv": "url translate kwargs reset max_episode_steps token deadline_s",
    "Slots": "environment deadline_s backoff_s max_backoff_s failures window_steps max_episode_seconds",
    "SimulatorEnvironment": "path layout framing parameters engine channels groups seats same_step "
    "start_seconds deadline_s max_episode_steps",
    "Group": "name max_agents observations continuous branches",
    "Scripted": "agents kinds shortest longest truncations deaths turns same_step delay fault",
    "Free": "agents shape dtype actions death_rate",
    "Faults": "latency too_many unavailable request_lost reply_lost reply_torn reply_repeated stall "
    "session_lost restart_every seed",
}
IDLE = {
    "Limits.return_of": lambda: Limits(return_of="policy"),
    "WorkerConfig.restarts_within_s": lambda: trainer(restarts=None, restarts_within_s=5.0),
    "ActorConfig.flush_requests": lambda: Actors(environment=Scripted(), flush_requests=2),
    "ActorConfig.lane_restarts_within_s": lambda: Actors(
        environment=Scripted(), lane_restarts=None, lane_restarts_within_s=60.0
    ),
    "ActorConfig.min_running": lambda: Actors(environment=Scripted(), restarts=None, min_running=0.5),
    "ActorConfig.slots": lambda: Actors(environment=Scripted(), agents=(AgentSpec(samples=None),), slots=3),
    "PlayerSpec.parameters": lambda: AgentSpec(inference="asked", parameters=Drawn()),
    "AgentSpec.mode": lambda: AgentSpec(samples=None, mode="after_done"),
    "AgentSpec.sample_steps": lambda: AgentSpec(mode="full", sample_steps=7),
    "AgentSpec.burn_in": lambda: AgentSpec(samples=None, burn_in=3),
    "AgentSpec.bootstrap": lambda: AgentSpec(samples=None, bootstrap=2),
    "AgentSpec.padded": lambda: AgentSpec(padded=True),
    "AgentSpec.post": lambda: AgentSpec(post=(tidemill.GAE(),)),
    "PlayerSpec.frame_stack": lambda: stack_frames(Seeing(CHOICES), (AgentSpec(frame_stack=4),)),
    "Trainer.batch_size": lambda: trainer(batch_size=64, max_policy_lag=0),
    "TrainerConfig.database_updates": lambda: trainer(database_seconds=None, database_updates=5),
    "TrainerConfig.database_versions": lambda: trainer(database_seconds=None, database_versions=3),
    "ReplayTrainer.evaluation_steps": lambda: ReplayTrainer(
        algorithm=DQN(), buffer=Replay(capacity=10_000), batch_size=32, ratio=1, evaluation_steps=10
    ),
    "Buffers.policy": lambda: Buffers(process=(), policy="policy"),
    "Population.steps": lambda: Population(members=("a", "b"), explore={}, updates=10, steps=5),
    "Population.factors": lambda: Population(members=("a", "b"), explore={}, factors=(0.5,)),
    "Population.resample": lambda: Population(members=("a", "b"), explore={}, resample=0.5),
    "Drawn.metric": lambda: Drawn(metric="evaluation/return"),
    "PrioritisedReplay.beta": lambda: PrioritisedReplay(capacity=10_000, alpha=0, beta=0.5),
    "PrioritisedReplay.beta_updates": lambda: PrioritisedReplay(capacity=10_000, beta=1, beta_updates=5),
    "PolicyGradient.gamma": lambda: advised(PPO(gamma=0.9)),
    "PPO.gae_lambda": lambda: advised(PPO(gae_lambda=0.9)),
    "PolicyGradient.chunk_steps": lambda: PPO(chunk_steps=8).build(ActorCritic().build(PLAIN, 0), 0),
    "LinearSchedule.from_step": lambda: LinearSchedule(1, 0, from_step=5),
    "DQN.epsilon": lambda: DQN(epsilon=0.5).build(QNetwork(noise=0.5).build(PLAIN, 0), 0),
    "SAC.target_entropy": lambda: SAC(learn_temperature=False, target_entropy=-3),
    "ActorCritic.hidden": lambda: ActorCritic(hidden=(512,)).weights(IMAGE),
    "ActorCritic.activation": lambda: ActorCritic(activation="relu").weights(IMAGE),
    "ActorCritic.layer_norm": lambda: ActorCritic(layer_norm=True).weights(IMAGE),
    "QNetwork.layer_norm": lambda: QNetwork(hidden=(), layer_norm=True).weights(PLAIN),
    "BoundedActor.layer_norm": lambda: tidemill.SquashedGaussian(hidden=(), layer_norm=True).weights(PUSHED),
    "ActorCritic.critic_hidden": lambda: ActorCritic(critic_hidden=(8,), shared_critic=True).weights(PLAIN),
    "QNetwork.activation": lambda: QNetwork(hidden=(), activation="elu").weights(PLAIN),
    "BoundedActor.activation": lambda: tidemill.SquashedGaussian(hidden=(), activation="elu").weights(PUSHED),
    "ActorCritic.convolutions": lambda: ActorCritic(convolutions="bfloat16").build(PLAIN, 0),
    "NativeSetting.native": lambda: ActorCritic(native="baseline").weights(IMAGE),
    "ActorCritic.normalise_observations": lambda: ActorCritic(normalise_observations=True).build(CHOICES, 0),
    "ReplayNetwork.normalise_observations": lambda: tidemill.QNetwork(normalise_observations=True).weights(
        CHOICES
    ),
    "ActorCritic.sde_steps": lambda: ActorCritic(sde_steps=4).weights(PLAIN),
    "ActorCritic.log_std_init": lambda: ActorCritic(log_std_init=-1.0).build(PLAIN, 0),
    "TorchNetwork.log_std_init": lambda: Own(log_std_init=-1.0).answer(PLAIN),
    "SquashedGaussian.log_std_init": lambda: tidemill.SquashedGaussian(log_std_init=-2.0),
    "QNetwork.filters": lambda: QNetwork(filters=8).build(PLAIN, 0),
    "QNetwork.least_return": lambda: QNetwork(least_return=-1.0),
    "QNetwork.greatest_return": lambda: QNetwork(greatest_return=1.0),
    "SimulatorEnvironment.arguments": lambda: tidemill.SimulatorEnvironment(arguments=("-x",)),
    "Scripted.fault_tick": lambda: Scripted(fault_tick=3),
    "Faults.retry_after": lambda: Faults(retry_after=1.0),
    "Faults.stall_seconds": lambda: Faults(stall_seconds=1.0),
    "Faults.restart_seconds": lambda: Faults(restart_seconds=1.0),
}


def configurations():
    """Return the classes of the library, by name."""
    for module in pkgutil.walk_packages(tidemill.__path__, "tidemill."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, todo = {}, [Config]
    while todo:
        todo += (kinds := todo.pop().__subclasses__())
        found |= {kind.__name__: kind for kind in kinds if kind.__module__.startswith("tidemill.")}
    return found


def settings():
    """Return by "Class.setting" the field of every setting, of the class that declares
    it."""
    found = {}
    for name, kind in configurations().items():
        for each in dataclasses.fields(kind):
            if not any(each.name in getattr(base, "__dataclass_fields__", {}) for base in kind.__mro__[1:]):
                found[f"{name}.{each.name}"] = each
    return found


def left(names, words_of, *folders):
    """Return those of the names that are in no file of these folders, among what
    `words_of` finds there. A file is parsed only if its text has one of those left."""
    names = set(names)
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        if not names.isdisjoint(re.findall(r"\w+", text := path.read_text())):
            names.difference_update(words_of(ast.walk(ast.parse(text))))
    return names


def read(nodes):
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def given(nodes):
    for node in nodes:
        if isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\w+", node.value)


def test_every_setting_is_known_to_act_always_or_to_be_refused_where_it_does_not():
    entered = {f"{kind}.{name}" for kind, names in ALWAYS.items() for name in names.split()}
    assert not entered & IDLE.keys()
    assert entered | IDLE.keys() == settings().keys()
    assert {name for name, each in settings().items() if WHEN in each.metadata} <= IDLE.keys()


REFUSED = (
    "no effect|leave it out|leave out|set both|set iteration_steps|does not go with|take inference|name one "
    "by path"
)


@pytest.mark.parametrize("name", IDLE)
def test_a_setting_without_effect_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=rf"{name.partition('.')[2]}\b.*({REFUSED})"):
        IDLE[name]()


def test_settings_act_where_the_rows_the_policy_or_the_image_lets_them():
    advised(PPO())
    advised(PPO(gamma=0.9, gae_lambda=0.9, correct_off_policy=True))
    advised(Impala(gamma=0.9))
    both = Spaces(Dict({"image": IMAGE.observation, "position": PLAIN.observation}), Discrete(2))
    ActorCritic(hidden=(8,), activation="relu").weights(both)
    ActorCritic(hidden=(8,), activation="relu", encoder="mlp").weights(
        Spaces(Box((36, 36), "uint8"), Discrete(2))
    )
    stack_frames(
        Seeing(Spaces(Dict({"position": PLAIN.observation, "choice": CHOICES.observation}), Discrete(2))),
        (AgentSpec(frame_stack=4),),
    )
    with pytest.raises(ConfigError, match="activation = 'relu' has no effect without hidden layers"):
        ActorCritic(hidden=(), activation="relu").weights(PLAIN)


def test_seconds_of_restarts_act_where_these_are_counted():
    in_slots = tidemill.Slots(environment=Scripted())
    refilled(in_slots, lane_restarts=3, lane_restarts_within_s=300.0)
    refilled(Scripted(), lane_restarts_within_s=300.0)
    with pytest.raises(ConfigError, match=r"lane_restarts_within_s = 300.0 has no effect in slots without"):
        refilled(in_slots, lane_restarts_within_s=300.0)


def test_what_rows_have_is_known_through_buffer_workers():
    through = {
        "first": Buffers(process=(), samples="gathered", into="between"),
        "second": Buffers(process=(), samples="between"),
    }
    with pytest.raises(
        ConfigError, match=r"PPO: gamma = 0.9 has no effect on rows that have their advantages"
    ):
        advised(PPO(gamma=0.9), **through)


def test_every_setting_is_read_somewhere_and_set_in_some_test_or_example():
    names = {name.partition(".")[2] for name in settings()}
    assert left(names, read, "src/tidemill") == set()
    assert left(names, given, "tests", "examples", "benchmarks") == set()
