"""Self-play: connect four against versions of the learner's own past, rated as it goes.

tidemill train examples/self_play.py:experiment
# versions, their ratings and win rates
tidemill params RUN
tidemill plot RUN --y evaluation/elo --out elo.png
"""

from dataclasses import dataclass

import numpy as np

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Drawn,
    Evaluation,
    Experiment,
    Fixed,
    Limits,
    PettingZoo,
    Policy,
    PolicyConfig,
    Trainer,
)

GAME = PettingZoo(make="pettingzoo.classic.connect_four_v3")
FIRST, SECOND = "player_0", "player_1"


@dataclass(frozen=True, kw_only=True)
class Anyhow(PolicyConfig):
    """Drops its pieces into any column that is not full, each alike."""

    def answer(self, spaces):
        return ActorCritic().answer(spaces)

    def build(self, spaces, seed):
        return Player(np.random.default_rng(seed))


class Player(Policy):
    def __init__(self, rng):
        self.rng = rng

    def act(self, observation, state, deterministic, out):
        legal = observation["obs.action_mask"].astype(bool)
        out["action"][: len(legal)] = np.where(legal, self.rng.random(legal.shape), -1).argmax(1)
        out["log_prob"][: len(legal)] = -np.log(legal.sum(1))
        out["value"][: len(legal)] = 0

    def parameters(self):
        return {}

    def load(self, parameters, version):
        self.version = version


def learners(me: str, other: str) -> Actors:
    """One side learns against a version of the past that is drawn anew for each sample:
    the harder to beat, the more often."""
    past = AgentSpec(match=other, parameters=Drawn(how="prioritised"), samples=None)
    return Actors(environment=GAME, lanes=32, slots=2, agents=(AgentSpec(match=me, sample_steps=32), past))


def judges(me: str, other: str, opponent: AgentSpec, stream: str) -> Actors:
    """The version that is evaluated plays one side, in games of one lane: so an opponent
    that is drawn stays for a whole game."""
    judged = AgentSpec(match=me, parameters=Drawn(tag=f"{stream}-now"), samples=stream, mode="concise")
    return Actors(
        environment=GAME,
        lanes=1,
        ring=10,
        slots=2,
        agents=(judged, opponent.replace(match=other, samples=None)),
    )


def experiment() -> Experiment:
    rated, chance = AgentSpec(parameters=Drawn()), AgentSpec(policy="anyhow", parameters=Fixed())
    return Experiment(
        name="connect-four",
        policies={
            "policy": ActorCritic(hidden=(128, 128), activation="relu", normalise_observations=False),
            "anyhow": Anyhow(),
        },
        workers={
            "learn-first": learners(FIRST, SECOND),
            "learn-second": learners(SECOND, FIRST),
            "trainer": Trainer(
                algorithm=PPO(
                    learning_rate=1e-3,
                    minibatch_size=512,
                    epochs=4,
                    clip_apart=False,
                    entropy_coefficient=0.01,
                    gamma=0.99,
                ),
                database_seconds=5.0,
                database_versions=100,  # the past that opponents are drawn from
            ),
            # Elo, against the past
            "rate-first": judges(FIRST, SECOND, rated, "rated"),
            "rate-second": judges(SECOND, FIRST, rated, "rated"),
            "rating": Evaluation(samples="rated", tag="rated-now", games=100, drawn=0.0, name="evaluation"),
            # against chance
            "check-first": judges(FIRST, SECOND, chance, "checked"),
            "check-second": judges(SECOND, FIRST, chance, "checked"),
            "check": Evaluation(
                samples="checked", tag="checked-now", best="best-checked", games=200, drawn=0.0, name="chance"
            ),
        },
        limits=Limits(steps=1_000_000),
    )
