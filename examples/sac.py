"""Soft actor-critic from a replay memory, with an update for each step that is stored
(Haarnoja et al. 2018).

tidemill train examples/sac.py:experiment    # Pendulum
tidemill train examples/sac.py:cheetah       # HalfCheetah (extra mujoco)

The second one is what `tidemill train HalfCheetah-v5 --algorithm sac` does.
"""

from tidemill import SAC, Experiment, Gymnasium, Limits, Replay, ReplayActors, ReplayTrainer, SquashedGaussian


def of(name: str, env_id: str, policy: SquashedGaussian, trainer: ReplayTrainer, steps: int) -> Experiment:
    return Experiment(
        name=name,
        policies={"policy": policy},
        workers={
            "actor": ReplayActors(environment=Gymnasium(id=env_id), lanes=4),
            "trainer": trainer,
        },
        limits=Limits(steps=steps),
    )


def experiment() -> Experiment:
    trainer = ReplayTrainer(
        algorithm=SAC(learning_rate=1e-3), buffer=Replay(capacity=50_000, warm_up=500), batch_size=64, ratio=1
    )
    return of("sac", "Pendulum-v1", SquashedGaussian(hidden=(64, 64)), trainer, 10_000)


def cheetah() -> Experiment:
    algorithm = SAC(learning_rate=7e-4, critic_learning_rate=1e-3)
    trainer = ReplayTrainer(
        algorithm=algorithm, buffer=Replay(capacity=300_000, warm_up=5_000), batch_size=128, ratio=1
    )
    return of("cheetah", "HalfCheetah-v5", SquashedGaussian(), trainer, 300_000)
