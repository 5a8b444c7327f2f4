"""Repeat the card that was shown four steps ago (POPGym, Morad et al. 2023:
RepeatPreviousEasy). Without memory there is nothing to go by.

pip install "tidemill[popgym]"
tidemill train examples/repeat_previous.py:experiment      # with a GRU
tidemill train examples/repeat_previous.py:feed_forward    # the same without memory
"""

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Gymnasium,
    Limits,
    RecurrentActorCritic,
    Trainer,
)

# 48 cards to repeat, each 1/48, or -1/48 when it is the wrong one
GAME = Gymnasium(make="popgym.envs.repeat_previous:RepeatPreviousEasy")


def of(policy, name: str, **algorithm) -> Experiment:
    return Experiment(
        name=name,
        policies={"policy": policy},
        workers={
            "actor": Actors(environment=GAME, lanes=64, slots=2, agents=(AgentSpec(sample_steps=52),)),
            "trainer": Trainer(
                algorithm=PPO(
                    learning_rate=2e-3,
                    minibatch_size=832,
                    epochs=4,
                    clip_apart=False,
                    entropy_coefficient=0.01,
                    **algorithm,
                )
            ),
        },
        limits=Limits(mean_return=0.95, steps=1_000_000),
    )


def experiment() -> Experiment:
    return of(RecurrentActorCritic(cell="gru", normalise_observations=False), "repeat-previous")


def feed_forward() -> Experiment:
    return of(ActorCritic(normalise_observations=False), "repeat-previous-feed-forward")
