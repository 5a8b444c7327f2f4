"""The works of `make bench` as experiments: PPO, MLP 64×64 tanh or Nature CNN, rollout
128, 4 epochs unless the name says otherwise; and DQN and SAC.

    tidemill bench benchmarks/works.py:cartpole

Hyper-parameters are those of the other systems' scripts (`peers/common.py`; a test
compares them): no normalisation but of each batch's advantages, a minibatch is a quarter
of a batch. Where workers run, and how many, is left to the system.
"""

from typing import Any, Literal

from tidemill import (
    DQN,
    PPO,
    SAC,
    ActorCritic,
    Actors,
    AgentSpec,
    Atari,
    Experiment,
    Gymnasium,
    GymnasiumVector,
    LinearSchedule,
    PolicyWorkers,
    QNetwork,
    Replay,
    ReplayActors,
    ReplayTrainer,
    Slots,
    SquashedGaussian,
    Trainer,
)
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.policy import PolicyConfig

ROLLOUT = 128


def _ppo(
    name: str,
    environment: EnvironmentConfig,
    lanes: int,
    policy: ActorCritic | None = None,
    *,
    rollout: int = ROLLOUT,
    minibatches: int = 4,
    **algorithm: Any,
) -> Experiment:
    rows = rollout * lanes // minibatches
    others_have = {"epochs": 4, "clip_apart": False, "normalise_returns": False}
    plain = PPO(minibatch_size=rows, **{**others_have, **algorithm})
    return Experiment(
        name=name,
        policies={"policy": policy or ActorCritic(normalise_observations=False)},
        workers={
            "actor": Actors(
                environment=environment, lanes=lanes, slots=2, agents=(AgentSpec(sample_steps=rollout),)
            ),
            "trainer": Trainer(algorithm=plain),
        },
    )


def cartpole() -> Experiment:
    """CartPole-v1, plain Gymnasium environments in lanes; minibatches of 2,048."""
    return _ppo("cartpole", Gymnasium(id="CartPole-v1"), 64, learning_rate=3e-3)


def cartpole_vector() -> Experiment:
    """CartPole-v1, Gymnasium's native vector environment; minibatches of 2,048."""
    return _ppo("cartpole_vector", GymnasiumVector(id="CartPole-v1"), 64, learning_rate=3e-3)


def half_cheetah() -> Experiment:
    """HalfCheetah-v5, plain Gymnasium environments in lanes; minibatches of 2,048."""
    return _ppo("half_cheetah", Gymnasium(id="HalfCheetah-v5"), 64)


def pong_float32() -> Experiment:
    """ALE/Pong-v5 by ale-py's vector environment, in float32 and with 8 lanes, as other
    systems have it: minibatches of 256."""
    return _pong("pong_float32", 4, "float32", lanes=8)


def pong_one_epoch_float32() -> Experiment:
    """The same with one epoch."""
    return _pong("pong_one_epoch_float32", 1, "float32", lanes=8)


def pong() -> Experiment:
    """ALE/Pong-v5 by ale-py's vector environment, convolutions in bfloat16."""
    return _pong("pong", 4, "bfloat16")


def pong_one_epoch() -> Experiment:
    """The same with one epoch."""
    return _pong("pong_one_epoch", 1, "bfloat16")


def _pong(
    name: str, epochs: int, convolutions: Literal["float32", "bfloat16"], lanes: int = 32
) -> Experiment:
    environment, policy = (
        Atari(id="ALE/Pong-v5"),
        ActorCritic(convolutions=convolutions, normalise_observations=False),
    )
    return _ppo(
        name,
        environment,
        lanes,
        policy,
        epochs=epochs,
        learning_rate=2.5e-4,
        clip=0.1,
        entropy_coefficient=0.01,
    )


def cartpole_small() -> Experiment:
    """CartPole-v1, batches as Stable-Baselines3 has them: 8 lanes of 256 rows,
    minibatches of 64, 10 epochs."""
    return _small(Gymnasium(id="CartPole-v1"))


def cartpole_vector_small() -> Experiment:
    """The same with Gymnasium's native vector environment."""
    return _small(GymnasiumVector(id="CartPole-v1"))


def hopper_small() -> Experiment:
    """The same with Hopper-v5."""
    return _small(Gymnasium(id="Hopper-v5"))


def half_cheetah_small() -> Experiment:
    """The same with HalfCheetah-v5."""
    return _small(Gymnasium(id="HalfCheetah-v5"))


def cartpole_one() -> Experiment:
    """CartPole-v1, one lane of 2,048 rows, as Stable-Baselines3 trains by default:
    minibatches of 64, 10 epochs."""
    return _small(Gymnasium(id="CartPole-v1"), lanes=1)


def hopper_one() -> Experiment:
    """The same with Hopper-v5."""
    return _small(Gymnasium(id="Hopper-v5"), lanes=1)


def _small(environment: Gymnasium | GymnasiumVector, lanes: int = 8) -> Experiment:
    return _ppo(
        str(environment.id),
        environment,
        lanes,
        rollout=2048 // lanes,
        minibatches=32,
        epochs=10,
        learning_rate=3e-4,
    )


def cartpole_served() -> Experiment:
    """`cartpole` with policy workers in place of inline inference: actor, policy worker
    and trainer by turns, in a process for each of two cores."""
    return _served(cartpole())


def pong_served() -> Experiment:
    """`pong` with policy workers."""
    return _served(pong())


def dqn() -> Experiment:
    """CartPole-v1: DQN as it was published, with MLPs, an update for every second
    step."""
    policy = QNetwork(hidden=(64, 64), duelling=False)
    epsilon = LinearSchedule(1, 0.05, from_step=1_000, to_step=21_000)
    algorithm = DQN(double=False, target_steps=1_000, epsilon=epsilon)
    return _off_policy(
        "dqn",
        Gymnasium(id="CartPole-v1"),
        policy,
        ReplayTrainer(algorithm=algorithm, buffer=_replay(), batch_size=64, ratio="1/2"),
    )


def sac() -> Experiment:
    """HalfCheetah-v5: SAC, an update for every step."""
    trainer = ReplayTrainer(algorithm=SAC(), buffer=_replay(), batch_size=256, ratio=1)
    return _off_policy("sac", Gymnasium(id="HalfCheetah-v5"), SquashedGaussian(), trainer)


def slots() -> Experiment:
    """CartPole-v1 in 32 slots, each in a thread of its own, DQN with an update for every
    fourth step."""
    trainer = ReplayTrainer(algorithm=DQN(double=False), buffer=_replay(), batch_size=64, ratio="1/4")
    environment = Slots(environment=Gymnasium(id="CartPole-v1", threads=1))
    made = _off_policy(
        "slots", Gymnasium(id="CartPole-v1"), QNetwork(hidden=(64, 64), duelling=False), trainer
    )
    actors = ReplayActors(environment=environment, lanes=1, ring=32, one_core=True)
    return made.replace(
        name="slots", workers={**made.workers, "actor": actors}, together=("actor", "trainer")
    )


def _replay() -> Replay:
    return Replay(capacity=100_000, warm_up=1_000)


def _off_policy(
    name: str, environment: Gymnasium, policy: PolicyConfig, trainer: ReplayTrainer
) -> Experiment:
    actors = ReplayActors(environment=environment, lanes=8)
    return Experiment(name=name, policies={"policy": policy}, workers={"actor": actors, "trainer": trainer})


def _served(made: Experiment, count: int = 2) -> Experiment:
    actors, trainer = made.workers["actor"], made.workers["trainer"]
    assert isinstance(actors, Actors)
    spec = actors.agents[0].replace(inference="inference")
    workers = {
        "actor": actors.replace(count=count, lanes=actors.lanes // count, slots=1, agents=(spec,)),
        "policy": PolicyWorkers(stream="inference", count=count),
        "trainer": trainer.replace(count=count),
    }
    return made.replace(name=f"{made.name}_served", workers=workers, together=tuple(workers))
