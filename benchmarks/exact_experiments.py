"""Small runs of every kind that resumes exactly, for `exact_kills.py`: inline as they may
be there, elsewhere in lockstep."""

import time
from collections.abc import Callable
from typing import Any

from gymnasium.envs.classic_control import CartPoleEnv

from tidemill import (
    DQN,
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Drawn,
    Evaluation,
    Experiment,
    Gymnasium,
    Limits,
    PettingZoo,
    PolicyWorkers,
    PriorityQueue,
    QNetwork,
    Query,
    RecurrentActorCritic,
    Replay,
    ReplayActors,
    ReplayTrainer,
    Stage,
    Trainer,
    populate,
)
from tidemill.api.environment import EnvironmentConfig
from tidemill.api.policy import PolicyConfig
from tidemill.api.schedule import LinearSchedule

LASTING: dict[str, Any] = {"restarts": 1000}
CARTPOLE = Gymnasium(id="CartPole-v1", max_episode_steps=60)
SPEC = AgentSpec(sample_steps=8)
JUDGE = AgentSpec(parameters=Drawn(tag="evaluating"), mode="concise", samples="evaluation")
SMALL = PPO(minibatch_size=32, epochs=2)
# by steps: a run that is resumed beyond its limit has another end
FALLING = LinearSchedule(1e-2, 1e-4, to_step=400)


def trainer(inline: bool, **settings: Any) -> Trainer:
    """A trainer whose updates take milliseconds; in lockstep, where it is not inline."""
    return Trainer(**{"algorithm": SMALL, "max_policy_lag": None if inline else 0, **LASTING, **settings})


def actors(environment: EnvironmentConfig = CARTPOLE, **settings: Any) -> Actors:
    """Two actors of two targets, two lanes each."""
    given = {"lanes": 2, "ring": 2, "count": 2, "agents": (SPEC,), **LASTING, **settings}
    return Actors(environment=environment, **given)


def of(updates: int, policy: PolicyConfig | None = None, **workers: Any) -> Experiment:
    """An experiment of one policy."""
    return Experiment(
        name="exact",
        policies={"policy": policy or ActorCritic(hidden=(16,))},
        workers=workers,
        limits=Limits(updates=updates, window=8),
        exact_resume=True,
        seed=5,
    )


def one(inline: bool, updates: int) -> Experiment:
    """Two actors and a trainer, whose settings change with the steps."""
    rates = SMALL.replace(learning_rate=FALLING, entropy_coefficient=FALLING)
    return of(updates, actor=actors(), trainer=trainer(inline, algorithm=rates))


def served(inline: bool, updates: int) -> Experiment:
    """Two policies, each with a trainer, and a policy worker that answers an actor."""
    names = "speaker", "listener"
    specs = tuple(
        AgentSpec(match=f"{name}.*", policy=name, samples=name, sample_steps=8, inference=f"ask-{name}")
        for name in names
    )
    game = PettingZoo(make="mpe2.simple_speaker_listener_v4", kwargs={"max_cycles": 12})
    trainers = {name: trainer(inline, policy=name, samples=name) for name in names}
    servers = {
        f"server-{name}": PolicyWorkers(stream=f"ask-{name}", policies=(name,), **LASTING) for name in names
    }
    made = of(updates, actor=actors(game, count=1, agents=specs), **servers, **trainers)
    return made.replace(policies={name: ActorCritic(hidden=(8,)) for name in names})


def equal(inline: bool, updates: int) -> Experiment:
    """Two equal trainers; inline they lag, and use samples again."""
    buffer = {"buffer": PriorityQueue(capacity=400, reuses=2), "batch_size": 128} if inline else {}
    made = of(updates, actor=actors(), trainer=trainer(inline, count=2, **buffer))
    return made.replace(together=() if inline else ("actor", "trainer"))


def recurrent(inline: bool, updates: int) -> Experiment:
    """Memory, a normaliser, and actions of real numbers."""
    pendulum = Gymnasium(id="Pendulum-v1", max_episode_steps=30)
    policy = RecurrentActorCritic(hidden=(8,), normalise_observations=True)
    return of(updates, policy, actor=actors(pendulum), trainer=trainer(inline))


def drawn(inline: bool, updates: int) -> Experiment:
    """A game against versions that are drawn, beside an evaluation that watches."""
    game = PettingZoo(make="pettingzoo.classic.tictactoe_v3")
    past = AgentSpec(match="player_2", parameters=Drawn(among=Query(limit=4)), samples=None)
    return of(
        updates,
        actor=actors(game, agents=(SPEC.replace(match="player_1"), past)),
        trainer=trainer(inline, database_updates=1, database_versions=None),
        judge=actors(game, lanes=1, ring=1, count=1, agents=(JUDGE.replace(match="player_1"), past)),
        evaluation=Evaluation(games=3, **LASTING),
    )


def judged(inline: bool, updates: int) -> Experiment:
    """An evaluation of every second version, which training waits for."""
    return of(
        updates,
        actor=actors(count=1),
        trainer=trainer(inline, database_updates=1),
        judge=actors(count=1, agents=(JUDGE,)),
        evaluation=Evaluation(games=5, updates=2, **LASTING),
    )


def population(inline: bool, updates: int) -> Experiment:
    """Two members, compared by their evaluations: one of them learns nothing."""
    made = judged(inline, updates)
    workers = {name: made.workers[name].replace(ring=1) for name in ("actor", "judge")}
    made = made.replace(workers={**made.workers, **workers})
    starts = [{"learning_rate": rate} for rate in (1e-2, 1e-6)]
    ranges = {"learning_rate": (1e-6, 1.0)}
    made = populate(made, starts, explore=ranges, updates=2, resample=0.5, metric="evaluation/return")
    manager = made.workers["population"].replace(**LASTING)
    return made.replace(workers={**made.workers, "population": manager})


def staged(inline: bool, updates: int) -> Experiment:
    """A curriculum of three stages, by episodes and by what these have reached."""
    narrow, wide = {"low": -0.01, "high": 0.01}, {"low": -0.1, "high": 0.1}
    return one(inline, updates).replace(
        curriculum=(
            Stage(options=narrow, until="episodes >= 4"),
            Stage(options=wide, until="return/mean > 2 and update >= 4"),
            Stage(options=narrow),
        )
    )


class Slow(CartPoleEnv):
    """CartPole whose steps take so long that a replay memory's trainer, which tells of
    its updates by time, tells of nearly each."""

    def step(self, action: Any) -> Any:
        time.sleep(0.025)
        return super().step(action)


def replay(inline: bool, updates: int) -> Experiment:
    """DQN from a replay memory, eight env steps to an update."""
    slow = Gymnasium(make=f"{__file__}:Slow", max_episode_steps=60)
    return Experiment(
        name="exact",
        policies={"policy": QNetwork(hidden=(16,))},
        workers={
            "actor": ReplayActors(environment=slow, lanes=1, ring=3, **LASTING),
            "trainer": ReplayTrainer(
                algorithm=DQN(target_steps=2),
                exact=True,
                ratio="1/8",
                batch_size=8,
                buffer=Replay(capacity=500, warm_up=20),
                **LASTING,
            ),
        },
        limits=Limits(updates=updates),
        exact_resume=True,
        seed=5,
    )


KINDS: dict[str, Callable[[bool, int], Experiment]] = {
    function.__name__: function
    for function in (one, served, equal, recurrent, drawn, judged, population, staged, replay)
}
"""By what the run does: a function of whether it is inline, and of how many updates."""
