"""Which algorithms can train an environment by their presets, and why others cannot: what
`check-env` says of that."""

from tidemill.api.environment import Environment, EnvironmentConfig
from tidemill.api.spaces import Box, Discrete, Space, Spaces
from tidemill.core.errors import ConfigError
from tidemill.nets.encoders import large_images, pixels_of
from tidemill.presets.experiments import ALGORITHMS, presets_of
from tidemill.replay_training.granted_order import replay_obstacle
from tidemill.testing.check_env import Finding

_OWN = (
    "write a policy that acts so, or give the agents actions that are Discrete, MultiDiscrete, MultiBinary "
    "or a Box of floats, each alone or as part of a Dict or Tuple"
)


def from_replay_memories() -> str:
    """Return which algorithms train from a replay memory, by the actions that they are
    for: "dqn or qrdqn (Discrete actions), sac or td3 (Box)"."""
    seen = Box((1,), "float32")
    acted: dict[str, Space] = {"Discrete actions": Discrete(2), "Box": Box((1,), "float32", (-1.0,), (1.0,))}
    names = [name for name in ALGORITHMS if presets_of(name).replay]
    return ", ".join(
        f"{' or '.join(name for name in names if not _obstacle(name, Spaces(seen, space)))} ({kind})"
        for kind, space in acted.items()
    )


def training(config: EnvironmentConfig, environment: Environment) -> list[Finding]:
    """Return what can be trained in `environment`, which `config` built, and what
    cannot."""
    kinds: list[tuple[str, Spaces]] = []
    for agent in environment.agents:
        if agent.spaces not in (spaces for _, spaces in kinds):
            kinds.append((agent.name, agent.spaces))
    obstacles = {
        name: [(agent, why) for agent, spaces in kinds if (why := _obstacle(name, spaces))]
        for name in ALGORITHMS
    }
    fitting = [name for name in ALGORITHMS if not obstacles[name]]
    if not fitting:
        # what the algorithm says that fits most of them
        nearest = min(obstacles.values(), key=len)
        return [
            Finding("training", "fail", f"{agent} can be trained by no preset: {why}", _OWN)
            for agent, why in nearest
        ]
    large = filter(None, (large_images(pixels_of(spaces.observation)) for _, spaces in kinds))
    images = [Finding("images", "warn", text, config.smaller_images) for text in dict.fromkeys(large)]
    cause, cure = replay_obstacle(config, environment)
    if cause and (replaying := [name for name in fitting if presets_of(name).replay]):
        others = " and ".join(name for name in fitting if name not in replaying)
        text = f"{others} can train it; {' and '.join(replaying)} cannot: their ReplayActors {cause}"
        return [Finding("training", "ok", text, cure), *images]
    return [Finding("training", "ok", f"{' and '.join(fitting)} can train it"), *images]


def _obstacle(algorithm: str, spaces: Spaces) -> str:
    """Return why the algorithm's policy cannot act in these spaces; "" where it can."""
    try:
        for policy in presets_of(algorithm).policies:
            policy.weights(spaces)
    except ConfigError as error:
        return str(error)
    return ""
