"""Experiments that the library ships: tuned ones for well-known environments, and a sound
start for every other."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.algorithms.dqn import DQN
from tidemill.algorithms.ppo import PPO
from tidemill.algorithms.sac import SAC
from tidemill.api.environment import AgentInfo, EnvironmentConfig
from tidemill.api.experiment import Experiment, Limits
from tidemill.api.policy import PolicyConfig
from tidemill.bridge.trainer_side.environment import SimulatorEnvironment
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.envs.atari import Atari
from tidemill.envs.pettingzoo import PettingZoo
from tidemill.nets.actor_critic import ActorCritic
from tidemill.nets.encoders import SMALLEST_IMAGE
from tidemill.nets.q_network import QNetwork
from tidemill.nets.squashed_gaussian import SquashedGaussian
from tidemill.remote.rest_config import Rest
from tidemill.replay.prioritised import PrioritisedReplay
from tidemill.replay.replay import Replay
from tidemill.replay_training.actor_config import ReplayActors
from tidemill.replay_training.trainer_config import ReplayTrainer
from tidemill.workers.actor_config import Actors
from tidemill.workers.agent_spec import AgentSpec
from tidemill.workers.trainer_config import Trainer


def run_name(name: str) -> str:
    """Return `name` (say "ALE/Pong-v5") as one that a run may have ("ALE-Pong-v5")."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name).strip("-")[:48] or "run"


UNTUNED = PPO(minibatch_size=64, epochs=10)
"""PPO for environments that nobody tuned: 320 steps of Adam for 2,048 rows, where those
of 2,048 rows and 4 epochs would be 4. With them Hopper-v5 reaches 1,000 in 200 k env
steps, without 190."""


def ppo(
    name: str,
    environment: EnvironmentConfig,
    *,
    lanes: int = 8,
    sample_steps: int = 256,
    policy: ActorCritic | None = None,
    algorithm: PPO | None = None,
    **limits: Any,
) -> Experiment:
    """Return PPO with inline inference on `environment`: one policy, one actor worker,
    one trainer. The defaults are for what nobody tuned."""
    return Experiment(
        name=run_name(name),
        policies={"policy": policy or ActorCritic()},
        workers={
            "actor": Actors(
                environment=environment, lanes=lanes, agents=(AgentSpec(sample_steps=sample_steps),)
            ),
            "trainer": Trainer(algorithm=algorithm or UNTUNED),
        },
        limits=Limits(**limits),
    )


def cartpole(environment: EnvironmentConfig) -> Experiment:
    """CartPole-v1: 475 in about 115 k env steps."""
    algorithm = PPO(learning_rate=4e-3, learning_rate_schedule="linear", minibatch_size=1024)
    return ppo("CartPole-v1", environment, lanes=128, sample_steps=32, algorithm=algorithm, steps=600_000)


def acrobot(environment: EnvironmentConfig) -> Experiment:
    """Acrobot-v1: -100 in about 30 k env steps."""
    algorithm = PPO(learning_rate=1e-3, learning_rate_schedule="linear", minibatch_size=256)
    return ppo("Acrobot-v1", environment, lanes=16, sample_steps=64, algorithm=algorithm, steps=500_000)


def pendulum(environment: EnvironmentConfig) -> Experiment:
    """Pendulum-v1: -250 in about 60 k env steps."""
    algorithm = PPO(
        learning_rate=1e-3, learning_rate_schedule="linear", minibatch_size=256, epochs=8, gamma=0.9
    )
    return ppo("Pendulum-v1", environment, lanes=16, sample_steps=128, algorithm=algorithm, steps=500_000)


def lunar_lander(environment: EnvironmentConfig) -> Experiment:
    """LunarLander-v3: 200 in about 400 k env steps. Fewer or larger steps of Adam, or a
    falling rate, left more hovering."""
    algorithm = PPO(
        learning_rate=4e-4,
        minibatch_size=128,
        epochs=6,
        gamma=0.999,
        gae_lambda=0.98,
        entropy_coefficient=0.01,
    )
    return ppo(
        "LunarLander-v3", environment, lanes=16, sample_steps=256, algorithm=algorithm, steps=1_500_000
    )


def half_cheetah(environment: EnvironmentConfig) -> Experiment:
    """HalfCheetah-v5: 3,000 in about 250 k env steps, over 4,500 at 1 M."""
    algorithm = PPO(
        learning_rate=1e-3,
        learning_rate_schedule="linear",
        minibatch_size=512,
        epochs=10,
        gamma=0.98,
        gae_lambda=0.92,
        max_gradient_norm=0.8,
    )
    policy = ActorCritic(normalise_observations=True, log_std_init=-1.0)
    return ppo(
        "HalfCheetah-v5",
        environment,
        lanes=16,
        sample_steps=128,
        policy=policy,
        algorithm=algorithm,
        steps=1_000_000,
    )


def atari(environment: Atari) -> Experiment:
    """Atari games: Nature CNN; 16 lanes x 129 rows of 4 x 84 x 84 bytes keep a sample
    slot under 60 MB."""
    algorithm = PPO(learning_rate=5e-4, minibatch_size=256, epochs=2, clip=0.1, entropy_coefficient=0.01)
    policy = ActorCritic(convolutions="bfloat16") if environment.size >= SMALLEST_IMAGE else ActorCritic()
    return ppo(
        "atari", environment, lanes=16, sample_steps=128, policy=policy, algorithm=algorithm, steps=10_000_000
    )


def several(name: str, environment: PettingZoo) -> Experiment:
    """Environments of several agents: one policy for all that see and do the same, each
    policy with a stream and a trainer of its own.

    The environment is built once, here, to see which agents there are.
    """
    built = environment.build(1, 0)
    built.close()
    kinds = kinds_of(built.agents)
    if len(kinds) == 1:
        return ppo(name, environment, steps=1_000_000)
    specs = tuple(
        AgentSpec(match=match, policy=kind, samples=kind, sample_steps=256) for kind, match in kinds.items()
    )
    return Experiment(
        name=run_name(name),
        policies={kind: ActorCritic() for kind in kinds},
        workers={
            "actor": Actors(environment=environment, lanes=8, agents=specs),
            **{f"trainer-{kind}": Trainer(policy=kind, samples=kind, algorithm=UNTUNED) for kind in kinds},
        },
        limits=Limits(steps=1_000_000),
    )


def simulated(name: str, environment: SimulatorEnvironment) -> Experiment:
    """Simulators: a policy for each group of agents, each with a stream and a trainer of
    its own.

    The simulator is started once, here, to see which groups there are. Of an editor that
    is not done: its groups are those that are declared, or else one. Up to 4 simulators
    at a time make 32 seats.
    """
    seats = {group.name: group.max_agents for group in environment.groups}
    if not environment.single:
        built = environment.build(1, 0)
        seats = built.groups
        built.close()
    lanes = 1 if environment.single or not seats else min(4, -(-32 // min(seats.values())))
    rows = lanes * min(seats.values(), default=1)
    sample_steps = max(32, min(512, 4096 // rows))
    if len(seats) <= 1:
        return ppo(name, environment, lanes=lanes, sample_steps=sample_steps, steps=1_000_000)
    names = {group: _policy_name(group, number) for number, group in enumerate(seats)}
    specs = (
        AgentSpec(match=f"{re.escape(group)}_\\d+", policy=policy, samples=policy, sample_steps=sample_steps)
        for group, policy in names.items()
    )
    return Experiment(
        name=run_name(name),
        policies={policy: ActorCritic() for policy in names.values()},
        workers={
            "actor": Actors(environment=environment, lanes=lanes, agents=tuple(specs)),
            **{
                f"trainer-{policy}": Trainer(policy=policy, samples=policy, algorithm=UNTUNED)
                for policy in names.values()
            },
        },
        limits=Limits(steps=1_000_000),
    )


def _policy_name(group: str, number: int) -> str:
    """Return what to call the policy of a group: as the group, where that may be a
    name."""
    return group if re.fullmatch(r"[A-Za-z]\w{0,30}", group) else f"group{number}"


def kinds_of(agents: Sequence[AgentInfo]) -> dict[str, str]:
    """Return what to call each kind of agents (those of equal spaces), and the regular
    expression that matches the names of just these.

    A kind is called as its agents are without their numbers ("adversary", adversary_.*),
    where that tells it from the others.
    """
    groups: list[list[AgentInfo]] = []
    for agent in agents:
        group = next((group for group in groups if group[0].spaces == agent.spaces), None)
        if group is None:
            groups.append([agent])
        else:
            group.append(agent)
    kinds: dict[str, str] = {}
    for number, group in enumerate(groups):
        names = [agent.name for agent in group]
        stem = re.sub(r"_?\d+$", "", names[0])
        match = f"{re.escape(stem)}_?\\d*"
        if (
            not re.fullmatch(r"[A-Za-z]\w{0,30}", stem)
            or [a.name for a in agents if re.fullmatch(match, a.name)] != names
        ):
            stem, match = f"kind{number}", "|".join(map(re.escape, names))
        kinds[stem] = match
    return kinds


def off_policy(
    name: str,
    environment: EnvironmentConfig,
    policy: PolicyConfig,
    trainer: ReplayTrainer,
    *,
    lanes: int = 8,
    **limits: Any,
) -> Experiment:
    """Return what trains from a replay memory on `environment`: one policy, one actor
    worker, one trainer, which grants the actor its steps."""
    actors = ReplayActors(environment=environment, lanes=lanes)
    return Experiment(
        name=run_name(name),
        policies={"policy": policy},
        workers={"actor": actors, "trainer": trainer},
        limits=Limits(**limits),
    )


def dqn(name: str, environment: EnvironmentConfig) -> Experiment:
    """DQN for any environment of Discrete actions: double, duelling, 3-step returns."""
    trainer = ReplayTrainer(
        algorithm=DQN(), buffer=Replay(capacity=100_000, warm_up=5_000, steps=3), batch_size=64, ratio="1/4"
    )
    return off_policy(name, environment, QNetwork(), trainer, steps=1_000_000)


def dqn_cartpole(name: str, environment: EnvironmentConfig) -> Experiment:
    """CartPole-v1: 475 in about 70 k env steps. Steps that leave the track are rare and
    an error counts as 1 at most: drawn uniformly they changed too little, and the cart
    left it again and again. A duelling head, or target weights that jump, fell back, too.
    """
    algorithm = DQN(
        learning_rate=1e-3,
        learning_rate_schedule="linear",
        target_every=1,
        target_rate=0.01,
        epsilon_end=0.01,
        epsilon_updates=4_000,
    )
    # β stays as it is
    replay = PrioritisedReplay(capacity=100_000, warm_up=1_000, steps=3, beta_updates=10_000_000)
    trainer = ReplayTrainer(algorithm=algorithm, buffer=replay, batch_size=64, ratio="1/2")
    return off_policy(name, environment, QNetwork(duelling=False), trainer, steps=100_000)


def dqn_minatar(name: str, environment: EnvironmentConfig) -> Experiment:
    """MinAtar's games: its convolution, and a hidden layer."""
    algorithm = DQN(learning_rate=2.5e-4, target_every=1_000, epsilon_end=0.02, epsilon_updates=25_000)
    trainer = ReplayTrainer(
        algorithm=algorithm,
        buffer=Replay(capacity=100_000, warm_up=5_000, steps=3),
        batch_size=32,
        ratio="1/4",
    )
    return off_policy(name, environment, QNetwork(hidden=(128,)), trainer, steps=1_000_000)


def dqn_atari(name: str, environment: EnvironmentConfig) -> Experiment:
    """Atari games: the settings of Mnih et al. 2015, with Adam and fewer rows. Single
    frames of 7 kB: 100,000 take 0.7 GB. Never run to its end."""
    algorithm = DQN(learning_rate=1e-4, target_every=2_000, epsilon_end=0.05, epsilon_updates=100_000)
    trainer = ReplayTrainer(
        algorithm=algorithm,
        buffer=Replay(capacity=100_000, warm_up=10_000, frame_stack=4),
        batch_size=32,
        ratio="1/4",
    )
    return off_policy(name, environment, QNetwork(hidden=(512,)), trainer, steps=10_000_000)


def sac(name: str, environment: EnvironmentConfig) -> Experiment:
    """SAC for any environment of Box actions: an update for each step, networks of 256
    and 256."""
    trainer = ReplayTrainer(
        algorithm=SAC(), buffer=Replay(capacity=1_000_000, warm_up=5_000), batch_size=256, ratio=1
    )
    return off_policy(name, environment, SquashedGaussian(), trainer, steps=1_000_000)


def sac_half_cheetah(name: str, environment: EnvironmentConfig) -> Experiment:
    """HalfCheetah-v5: batches of 128 take half the time of the usual 256, and the usual
    learning rate of 0.0003 a good deal more of the steps."""
    algorithm = SAC(learning_rate=7e-4, critic_learning_rate=1e-3)
    trainer = ReplayTrainer(
        algorithm=algorithm, buffer=Replay(capacity=300_000, warm_up=5_000), batch_size=128, ratio=1
    )
    return off_policy(name, environment, SquashedGaussian(), trainer, lanes=4, steps=300_000)


TUNED: dict[str, Callable[[EnvironmentConfig], Experiment]] = {
    "CartPole-v1": cartpole,
    "Acrobot-v1": acrobot,
    "Pendulum-v1": pendulum,
    "LunarLander-v3": lunar_lander,
    "HalfCheetah-v5": half_cheetah,
}
OFF_POLICY: Mapping[str, Callable[[str, EnvironmentConfig], Experiment]] = {"dqn": dqn, "sac": sac}
TUNED_OFF_POLICY = {("dqn", "CartPole-v1"): dqn_cartpole, ("sac", "HalfCheetah-v5"): sac_half_cheetah}
ALGORITHMS = ("ppo", *OFF_POLICY)


def experiment_for(name: str, environment: EnvironmentConfig, algorithm: str = "ppo") -> Experiment:
    """Return the experiment of `algorithm` that is tuned for the environment that users
    call `name`, or the general one. A server is asked what it plays. Raises
    `ConfigError`."""
    if isinstance(environment, Rest):
        name = environment.host().description.environment
    if algorithm in OFF_POLICY:
        if isinstance(environment, PettingZoo):
            raise ConfigError(
                f"{algorithm} trains one agent from a replay memory, and {name} is an environment of "
                "several; take ppo"
            )
        if algorithm == "dqn" and (name.startswith("MinAtar/") or isinstance(environment, Atari)):
            return (dqn_atari if isinstance(environment, Atari) else dqn_minatar)(name, environment)
        return TUNED_OFF_POLICY.get((algorithm, name), OFF_POLICY[algorithm])(name, environment)
    if algorithm != "ppo":
        raise ConfigError(f'no algorithm "{algorithm}" has presets; {did_you_mean(algorithm, ALGORITHMS)}')
    if isinstance(environment, Atari):
        return atari(environment).replace(name=run_name(name))
    if isinstance(environment, PettingZoo):
        return several(name.removeprefix("pettingzoo:"), environment)
    if isinstance(environment, SimulatorEnvironment):
        return simulated(Path(name.removeprefix("simulator:")).stem or "editor", environment)
    tuned = TUNED.get(name)
    return tuned(environment) if tuned is not None else ppo(name, environment, steps=1_000_000)
