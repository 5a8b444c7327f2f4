"""Experiments that train from a replay memory, by DQN, QR-DQN, SAC and TD3."""

from functools import partial
from typing import Any

from tidemill.algorithms.dqn import DQN
from tidemill.algorithms.qr_dqn import QRDQN
from tidemill.algorithms.sac import SAC
from tidemill.algorithms.td3 import TD3
from tidemill.api.algorithm import AlgorithmConfig
from tidemill.api.buffer import BufferConfig
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.experiment import Experiment
from tidemill.api.limits import Limits
from tidemill.api.policy import PolicyConfig
from tidemill.api.schedule import LinearSchedule
from tidemill.core.errors import ConfigError
from tidemill.envs.atari import Atari
from tidemill.envs.pettingzoo import PettingZoo
from tidemill.nets.deterministic_actor import DeterministicActor
from tidemill.nets.q_network import QNetwork
from tidemill.nets.squashed_gaussian import SquashedGaussian
from tidemill.presets.base import Presets, run_name
from tidemill.replay.prioritised import PrioritisedReplay
from tidemill.replay.replay import Replay
from tidemill.replay_training.actor_config import ReplayActors
from tidemill.replay_training.trainer_config import ReplayTrainer


def off_policy(
    name: str,
    environment: EnvironmentConfig,
    *,
    policy: PolicyConfig,
    algorithm: AlgorithmConfig,
    buffer: BufferConfig,
    batch_size: int,
    ratio: str | int,
    lanes: int = 8,
    steps: int = 1_000_000,
) -> Experiment:
    """Return what trains from a replay memory on `environment`: one policy, one actor
    worker, one trainer, which grants the actor its steps."""
    trainer = ReplayTrainer(algorithm=algorithm, buffer=buffer, batch_size=batch_size, ratio=ratio)
    return Experiment(
        name=run_name(name),
        policies={"policy": policy},
        workers={"actor": ReplayActors(environment=environment, lanes=lanes), "trainer": trainer},
        limits=Limits(steps=steps),
    )


def refuse_several(algorithm: str, name: str, environment: EnvironmentConfig) -> Experiment:
    """Raise `ConfigError`: a replay memory is of one agent."""
    raise ConfigError(
        f"{algorithm} trains one agent from a replay memory, and {name} is an environment of several; take "
        "ppo"
    )


# what DQN and QR-DQN have for any environment: 3-step returns, an update for 4 steps
value_learning = partial(
    off_policy,
    buffer=Replay(capacity=100_000, warm_up=5_000, steps=3),
    batch_size=64,
    ratio="1/4",
)
# What SAC and TD3 have: an update for each step, networks of 256 and 256. One lane: an
# update takes some thirty times as long as a step, so that lanes save nothing, and each
# has an episode of its own that was begun with less learnt. Pendulum's first 100
# episodes: -302 with one lane, -337 with two, -384 with eight; -606 with eight and a
# warm-up of 5,000 steps
actor_learning = partial(
    off_policy, buffer=Replay(capacity=1_000_000, warm_up=100), batch_size=256, ratio=1, lanes=1
)

# What DQN and QR-DQN have for Atari games: the settings of Mnih et al. 2015, with Adam
# and fewer rows. Single frames of 7 kB: 100,000 take 0.7 GB. Never run to its end
screen_learning = partial(
    off_policy,
    buffer=Replay(capacity=100_000, warm_up=10_000, frame_stack=4),
    batch_size=32,
    ratio="1/4",
    steps=10_000_000,
)
ON_SCREENS: dict[str, Any] = {
    "learning_rate": 1e-4,
    "target_steps": 8_000,
    "epsilon": LinearSchedule(1, 0.05, to_step=400_000),
}

# What DQN has for tasks of control: rl-zoo's settings for Acrobot and LunarLander with
# targets of 3 steps, and half the updates
control_learning = partial(
    off_policy,
    policy=QNetwork(hidden=(256, 256), duelling=False),
    algorithm=DQN(
        double=False,
        learning_rate=6.3e-4,
        target_steps=250,
        epsilon=LinearSchedule(1, 0.1, to_step=12_000),
    ),
    buffer=Replay(capacity=50_000, steps=3),
    batch_size=128,
    ratio="16/32",
    lanes=4,
)

DQN_PRESETS = Presets(
    # double, duelling
    general=partial(value_learning, policy=QNetwork(), algorithm=DQN()),
    tuned={
        # 475 in about 70 k env steps. Steps that leave the track are rare and an error
        # counts as 1 at most: drawn uniformly they changed too little, and the cart left
        # it again and again. A duelling head, or target weights that jump, fell back, too
        "CartPole-v1": partial(
            off_policy,
            policy=QNetwork(duelling=False),
            algorithm=DQN(
                learning_rate=LinearSchedule(1e-3, 0),
                target_steps=0,
                target_rate=0.01,
                epsilon=LinearSchedule(1, 0.01, from_step=1_000, to_step=9_000),
            ),
            # β stays as it is
            buffer=PrioritisedReplay(capacity=100_000, warm_up=1_000, steps=3, beta_updates=10_000_000),
            batch_size=64,
            ratio="1/2",
            steps=100_000,
        ),
        # -112 to -115 in training after 120 k env steps, -98 to -103 played without
        # exploration. The goal is only found by a policy that stays the same for some
        # steps: each lane plays 16 by one, and then come 32 updates. With targets of one
        # step it was at -160 then
        "MountainCar-v0": partial(
            control_learning,
            algorithm=DQN(
                double=False,
                learning_rate=1e-3,
                target_steps=600,
                epsilon=LinearSchedule(1, 0.07, to_step=24_000),
            ),
            ratio="32/64",
            steps=120_000,
        ),
        "LunarLander-v3": partial(control_learning, steps=300_000),
        "Acrobot-v1": partial(control_learning, steps=100_000),
        # its convolution, and a hidden layer
        "MinAtar/": partial(
            off_policy,
            policy=QNetwork(hidden=(128,)),
            algorithm=DQN(
                learning_rate=2.5e-4, target_steps=4_000, epsilon=LinearSchedule(1, 0.02, to_step=100_000)
            ),
            buffer=Replay(capacity=100_000, warm_up=5_000, steps=3),
            batch_size=32,
            ratio="1/4",
        ),
    },
    kinds={
        PettingZoo: partial(refuse_several, "dqn"),
        Atari: partial(screen_learning, policy=QNetwork(hidden=(512,)), algorithm=DQN(**ON_SCREENS)),
    },
    policies=(QNetwork(),),
    replay=True,
)
QRDQN_PRESETS = Presets(
    general=partial(value_learning, policy=QNetwork(quantiles=25), algorithm=QRDQN()),
    tuned={},
    kinds={
        PettingZoo: partial(refuse_several, "qrdqn"),
        Atari: partial(
            screen_learning, policy=QNetwork(hidden=(512,), quantiles=25), algorithm=QRDQN(**ON_SCREENS)
        ),
    },
    policies=(QNetwork(quantiles=25),),
    replay=True,
)
SAC_PRESETS = Presets(
    general=partial(actor_learning, policy=SquashedGaussian(), algorithm=SAC()),
    tuned={
        # batches of 128 take half the time of the usual 256, and the usual learning rate
        # of 0.0003 a good deal more of the steps
        "HalfCheetah-v5": partial(
            off_policy,
            policy=SquashedGaussian(),
            algorithm=SAC(learning_rate=7e-4, critic_learning_rate=1e-3),
            buffer=Replay(capacity=300_000, warm_up=5_000),
            batch_size=128,
            ratio=1,
            lanes=4,
            steps=300_000,
        ),
        # rl-zoo's settings. The car has to be driven one way for many steps to find the
        # goal, which noise that stays does: 92.2 and 92.5 in training after 30,000 steps,
        # -10 by the general settings after 50,000
        "MountainCarContinuous-v0": partial(
            off_policy,
            policy=SquashedGaussian(hidden=(64, 64), sde_steps=32, log_std_init=-3.67),
            algorithm=SAC(gamma=0.9999, target_rate=0.01, temperature=0.1, learn_temperature=False),
            buffer=Replay(capacity=50_000, warm_up=100),
            batch_size=512,
            ratio="32/32",
            lanes=1,
            steps=30_000,
        ),
    },
    kinds={PettingZoo: partial(refuse_several, "sac")},
    policies=(SquashedGaussian(),),
    replay=True,
)
TD3_PRESETS = Presets(
    general=partial(actor_learning, policy=DeterministicActor(), algorithm=TD3()),
    tuned={},
    kinds={PettingZoo: partial(refuse_several, "td3")},
    policies=(DeterministicActor(),),
    replay=True,
)
