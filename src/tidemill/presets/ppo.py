"""Experiments by PPO, with inline inference: an actor worker and a trainer of each
policy."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tidemill.algorithms.ppo import PPO
from tidemill.api.environment import AgentInfo, EnvironmentConfig, alike
from tidemill.api.experiment import Experiment
from tidemill.api.limits import Limits
from tidemill.api.schedule import LinearSchedule
from tidemill.bridge.trainer_side.environment import SimulatorEnvironment
from tidemill.envs.atari import Atari
from tidemill.envs.pettingzoo import PettingZoo
from tidemill.nets.actor_critic import ActorCritic
from tidemill.nets.encoders import SMALLEST_IMAGE
from tidemill.presets.base import Preset, Presets, run_name
from tidemill.workers.actor_config import Actors
from tidemill.workers.agent_spec import AgentSpec
from tidemill.workers.trainer_config import Trainer


def ppo(
    name: str,
    environment: EnvironmentConfig,
    *,
    lanes: int = Actors.lanes,
    sample_steps: int = AgentSpec.sample_steps,
    policy: ActorCritic | None = None,
    algorithm: PPO | None = None,
    **limits: Any,
) -> Experiment:
    """Return PPO with inline inference on `environment`: one policy, one actor worker,
    one trainer. The classes' own defaults are for what nobody tuned."""
    return Experiment(
        name=run_name(name),
        policies={"policy": policy or ActorCritic()},
        workers={
            "actor": Actors(
                environment=environment, lanes=lanes, agents=(AgentSpec(sample_steps=sample_steps),)
            ),
            "trainer": Trainer(algorithm=algorithm or PPO()),
        },
        limits=Limits(**limits),
    )


# Tuned before observations were normalised, and gradients clipped apart, by default.
RAW = ActorCritic(normalise_observations=False)

TUNED: dict[str, Preset] = {
    # 475 in about 66 k env steps
    "CartPole-v1": partial(
        ppo,
        lanes=32,
        sample_steps=64,
        policy=RAW,
        algorithm=PPO(learning_rate=LinearSchedule(3e-3, 0), minibatch_size=256, epochs=6, clip_apart=False),
        steps=300_000,
    ),
    # -100 in about 30 k env steps
    "Acrobot-v1": partial(
        ppo,
        lanes=16,
        sample_steps=64,
        policy=RAW,
        algorithm=PPO(learning_rate=LinearSchedule(1e-3, 0), minibatch_size=256, epochs=4, clip_apart=False),
        steps=500_000,
    ),
    # -250 in about 60 k env steps
    "Pendulum-v1": partial(
        ppo,
        lanes=16,
        sample_steps=128,
        policy=RAW,
        algorithm=PPO(
            learning_rate=LinearSchedule(1e-3, 0), minibatch_size=256, epochs=8, clip_apart=False, gamma=0.9
        ),
        steps=500_000,
    ),
    # 200 in about 400 k env steps. Fewer or larger steps of Adam, or a falling rate, left
    # more hovering
    "LunarLander-v3": partial(
        ppo,
        lanes=16,
        sample_steps=256,
        policy=RAW,
        algorithm=PPO(
            learning_rate=4e-4,
            minibatch_size=128,
            epochs=6,
            clip_apart=False,
            gamma=0.999,
            gae_lambda=0.98,
            entropy_coefficient=0.01,
        ),
        steps=1_500_000,
    ),
    # 3,000 in about 250 k env steps, over 4,500 at 1 M
    "HalfCheetah-v5": partial(
        ppo,
        lanes=16,
        sample_steps=128,
        policy=ActorCritic(normalise_observations=True, log_std_init=-1.0),
        algorithm=PPO(
            learning_rate=LinearSchedule(1e-3, 0),
            minibatch_size=512,
            epochs=10,
            clip_apart=False,
            gamma=0.98,
            gae_lambda=0.92,
            max_gradient_norm=0.8,
        ),
        steps=1_000_000,
    ),
    # 562 to 1,008 at 200 k env steps (six seeds, 758 in the mean; the default 560), 2,237
    # at 600 k (one): four times as many steps of Adam, each a sixth as large
    "Walker2d-v5": partial(
        ppo,
        sample_steps=64,
        algorithm=PPO(learning_rate=5e-5, minibatch_size=32, epochs=20, clip=0.1, max_gradient_norm=1.0),
        steps=1_000_000,
    ),
    # 899 to 942 at 100 k env steps, of which the last 100 episodes are nearly all (six
    # seeds; the default 780 to 794)
    "InvertedPendulum-v5": partial(ppo, lanes=4, sample_steps=64, algorithm=PPO(clip=0.4), steps=200_000),
    # 227 to 293 at 200 k env steps, where discounting by 0.99 leaves it at 37: a stroke
    # pays late
    "Swimmer-v5": partial(
        ppo, algorithm=PPO(learning_rate=6e-4, gamma=0.9999, gae_lambda=0.98), steps=1_000_000
    ),
}


def atari(name: str, environment: Atari) -> Experiment:
    """Atari games: Nature CNN; 16 lanes x 129 rows of 4 x 84 x 84 bytes keep a sample
    slot under 60 MB."""
    algorithm = PPO(
        learning_rate=5e-4,
        minibatch_size=256,
        epochs=2,
        clip_apart=False,
        clip=0.1,
        entropy_coefficient=0.01,
    )
    policy = RAW.replace(convolutions="auto") if environment.size >= SMALLEST_IMAGE else ActorCritic()
    return ppo(
        name, environment, lanes=16, sample_steps=128, policy=policy, algorithm=algorithm, steps=10_000_000
    )


def each_policy(
    name: str,
    environment: EnvironmentConfig,
    matches: Mapping[str, str],
    lanes: int = Actors.lanes,
    sample_steps: int = AgentSpec.sample_steps,
) -> Experiment:
    """Return PPO with a stream and a trainer for each policy. `matches`: the regular
    expression of the agents that play it, by policy; one is as if there was one agent."""
    if len(matches) <= 1:
        return ppo(name, environment, lanes=lanes, sample_steps=sample_steps, steps=1_000_000)
    specs = (
        AgentSpec(match=match, policy=policy, samples=policy, sample_steps=sample_steps)
        for policy, match in matches.items()
    )
    trainers = {
        f"trainer-{policy}": Trainer(policy=policy, samples=policy, algorithm=PPO()) for policy in matches
    }
    return Experiment(
        name=run_name(name),
        policies=dict.fromkeys(matches, ActorCritic()),
        workers={
            "actor": Actors(environment=environment, lanes=lanes, agents=tuple(specs)),
            **trainers,
        },
        limits=Limits(steps=1_000_000),
    )


ROWS = 4_096  # of an update of a policy that several agents play, about
LEAST_STEPS = 32  # of a sample


def several(name: str, environment: PettingZoo) -> Experiment:
    """Environments of several agents: one policy for all that see and do the same.

    The environment is built once, here, to see which agents there are: so many bring as
    many rows a step, and fewer lanes have an update come as soon (docs/experiments.md).
    """
    built = environment.build(1, 0)
    built.close()
    seats = max(map(len, alike(built.agents)))
    fitting = max(1, min(Actors.lanes, ROWS // (seats * AgentSpec.sample_steps)))
    lanes = 1 << (fitting.bit_length() - 1)  # which can be shared among processes
    steps = max(LEAST_STEPS, min(AgentSpec.sample_steps, ROWS // (seats * lanes)))
    called = name.removeprefix("pettingzoo:")
    return each_policy(called, environment, kinds_of(built.agents), lanes, steps)


def simulated(name: str, environment: SimulatorEnvironment) -> Experiment:
    """Simulators: a policy for each group of agents.

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
    matches = {_policy_name(group, number): f"{re.escape(group)}_\\d+" for number, group in enumerate(seats)}
    called = Path(name.removeprefix("simulator:")).stem or "editor"
    return each_policy(called, environment, matches, lanes, max(LEAST_STEPS, min(512, ROWS // rows)))


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
    kinds: dict[str, str] = {}
    for number, group in enumerate(alike(agents)):
        names = [agents[index].name for index in group]
        stem = re.sub(r"_?\d+$", "", names[0])
        match = f"{re.escape(stem)}_?\\d*"
        if (
            not re.fullmatch(r"[A-Za-z]\w{0,30}", stem)
            or [a.name for a in agents if re.fullmatch(match, a.name)] != names
        ):
            stem, match = f"kind{number}", "|".join(map(re.escape, names))
        kinds[stem] = match
    return kinds


PRESETS = Presets(
    general=partial(ppo, steps=1_000_000),
    tuned=TUNED,
    kinds={Atari: atari, PettingZoo: several, SimulatorEnvironment: simulated},
    # first without a mask, since one that does not fit is the lesser obstacle
    policies=(ActorCritic(action_mask=None), ActorCritic()),
)
