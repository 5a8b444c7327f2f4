"""Three agents are to cover three landmarks without bumping into each other
(simple_spread of MPE2, Lowe et al. 2017).

pip install "tidemill[pettingzoo]"
tidemill train examples/simple_spread.py:experiment     # one policy plays all three
tidemill train examples/simple_spread.py:separate       # each has a policy of its own
# one policy, whose critic sees what all three see (MAPPO)
tidemill train examples/simple_spread.py:centralised
"""

from tidemill import (
    PPO,
    ActorCritic,
    Actors,
    AgentSpec,
    Experiment,
    Limits,
    LinearSchedule,
    PettingZoo,
    Trainer,
)

GAME = PettingZoo(make="mpe2.simple_spread_v3", team_reward=True)  # agents are paid what they reach together
AGENTS = ("agent_0", "agent_1", "agent_2")
HIDDEN = (128, 128)


def trainer(agents: int, **names) -> Trainer:
    steps = PPO(
        learning_rate=LinearSchedule(1e-3, 0),
        epochs=20,
        clip_apart=False,
        minibatch_size=400 * agents,
        gamma=0.95,
        entropy_coefficient=0.003,
    )
    return Trainer(algorithm=steps, **names)


def of(name: str, policies, trainers, *specs, game=GAME) -> Experiment:
    workers = {"actor": Actors(environment=game, lanes=64, slots=2, agents=specs), **trainers}
    return Experiment(name=name, policies=policies, workers=workers, limits=Limits(steps=400_000))


def experiment() -> Experiment:
    return of(
        "simple-spread",
        {"policy": ActorCritic(hidden=HIDDEN, normalise_observations=False)},
        {"trainer": trainer(3)},
        AgentSpec(sample_steps=25),
    )


def separate() -> Experiment:
    policies = {name: ActorCritic(hidden=HIDDEN, normalise_observations=False) for name in AGENTS}
    trainers = {f"trainer_{name}": trainer(1, policy=name, samples=name) for name in AGENTS}
    specs = (AgentSpec(match=name, policy=name, samples=name, sample_steps=25) for name in AGENTS)
    return of("simple-spread-separate", policies, trainers, *specs)


def centralised() -> Experiment:
    policies = {
        "policy": ActorCritic(hidden=HIDDEN, critic_only=("global_state",), normalise_observations=False)
    }
    return of(
        "simple-spread-centralised",
        policies,
        {"trainer": trainer(3)},
        AgentSpec(sample_steps=25),
        game=GAME.replace(state=True),
    )
