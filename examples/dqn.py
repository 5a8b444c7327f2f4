"""Deep Q-learning from a replay memory, with so many updates for each step that is stored
(Mnih et al. 2015, Hessel et al. 2018).

# CartPole: double, 3-step returns, priorities
tidemill train examples/dqn.py:experiment
# CartPole: with a duelling head, noise in place of ε, and distributions of returns
# besides
tidemill train examples/dqn.py:rainbow

The first one is what `tidemill train CartPole-v1 --algorithm dqn` does.
"""

from tidemill import (
    DQN,
    Experiment,
    Gymnasium,
    Limits,
    LinearSchedule,
    PrioritisedReplay,
    QNetwork,
    ReplayActors,
    ReplayTrainer,
)


def of(name: str, environment: Gymnasium, policy: QNetwork, trainer: ReplayTrainer, steps: int) -> Experiment:
    return Experiment(
        name=name,
        policies={"policy": policy},
        workers={
            "actor": ReplayActors(environment=environment, lanes=8),
            "trainer": trainer,
        },
        limits=Limits(steps=steps),
    )


CARTPOLE = Gymnasium(id="CartPole-v1")
GENTLY = DQN(learning_rate=LinearSchedule(1e-3, 0), target_steps=0, target_rate=0.01)
EXPLORING = GENTLY.replace(epsilon=LinearSchedule(1, 0.01, from_step=1_000, to_step=9_000))
# β stays as it is
REPLAY = PrioritisedReplay(capacity=100_000, warm_up=1_000, steps=3, beta_updates=10_000_000)


def experiment() -> Experiment:
    network = QNetwork(hidden=(128, 128), duelling=False)
    return of(
        "dqn",
        CARTPOLE,
        network,
        ReplayTrainer(algorithm=EXPLORING, buffer=REPLAY, batch_size=64, ratio="1/2"),
        100_000,
    )


def rainbow() -> Experiment:
    algorithm, replay = GENTLY.replace(target_rate=0.005), REPLAY.replace(beta_updates=50_000)
    network = QNetwork(hidden=(128, 128), noise=0.5, atoms=51, least_return=0, greatest_return=100)
    return of(
        "rainbow",
        CARTPOLE,
        network,
        ReplayTrainer(algorithm=algorithm, buffer=replay, batch_size=64, ratio="1/2"),
        100_000,
    )
