"""Which algorithms can train an environment by their presets, and why others cannot: what
`check-env` says of that."""

from tidemill.api.environment import Environment, EnvironmentConfig
from tidemill.api.spaces import Spaces
from tidemill.core.errors import ConfigError
from tidemill.nets.actor_critic import ActorCritic
from tidemill.nets.q_network import QNetwork
from tidemill.nets.squashed_gaussian import SquashedGaussian
from tidemill.replay_training.granted_order import replay_obstacle
from tidemill.testing.check_env import Finding

_OWN = (
    "write a policy that acts so, or give the agents one kind of actions: a Box, a Discrete or a "
    "MultiDiscrete"
)


def training(config: EnvironmentConfig, environment: Environment) -> list[Finding]:
    """Return what can be trained in `environment`, which `config` built, and what
    cannot."""
    kinds: list[tuple[str, Spaces]] = []
    for agent in environment.agents:
        if agent.spaces not in (spaces for _, spaces in kinds):
            kinds.append((agent.name, agent.spaces))
    failed = [(name, why) for name, spaces in kinds if (why := _obstacle("ppo", spaces))]
    if failed:
        return [
            Finding("training", "fail", f"{name} can be trained by no preset: {why}", _OWN)
            for name, why in failed
        ]
    off = [name for name in ("dqn", "sac") if not any(_obstacle(name, spaces) for _, spaces in kinds)]
    cause, cure = replay_obstacle(config, environment)
    if off and cause:
        return [
            Finding(
                "training",
                "ok",
                f"ppo can train it; {' and '.join(off)} cannot: their ReplayActors {cause}",
                cure,
            )
        ]
    return [Finding("training", "ok", f"{' and '.join(['ppo', *off])} can train it")]


def _obstacle(algorithm: str, spaces: Spaces) -> str:
    """Return why the algorithm's policy cannot act in these spaces; "" where it can."""
    try:
        match algorithm:
            case "ppo":
                # first, since a mask that does not fit is the lesser obstacle
                ActorCritic(action_mask=None).build(spaces, 0)
                ActorCritic().build(spaces, 0)
            case "dqn":
                QNetwork().plan(spaces)
            case "sac":
                SquashedGaussian().bounds(spaces)
    except ConfigError as error:
        return str(error)
    return ""
