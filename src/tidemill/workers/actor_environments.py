"""The environments of an actor, as its agents see them."""

from collections.abc import Callable, Sequence

from tidemill.api.environment import Environment
from tidemill.api.spaces import Spaces
from tidemill.core.errors import ConfigError, returned
from tidemill.envs.frame_stack import FrameStack, stacked
from tidemill.envs.lane_restarts import Remaking, RestartedTogether, may_come_back
from tidemill.envs.step_limit import StepLimit
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.agent_spec import PlayerSpec, match_agents


def build_environment(
    actors: ActorConfig,
    lanes: int,
    seed: int,
    render: bool = False,
    permit: Callable[[Exception], int] | None = None,
) -> Environment:
    """Return the environment of `actors` with `lanes` lanes, as its agents see it: with
    their frame stacks and the step limit. See `EnvironmentConfig.build`; and for `permit`
    `Environment.restart_lanes`: None: a lane that fails ends it all."""
    build = actors.environment.build

    def made(added: int) -> Environment:
        environment = returned(build(lanes, seed + added, render), Environment, build)
        environment.watch(actors.deadline_s)
        return environment

    environment = made(0)
    try:
        if permit is not None and not (
            actors.environment.single
            or environment.restart_lanes(permit)
            or environment.independent
            or environment.voids
        ):
            environment = RestartedTogether(environment, made, permit)
        if actors.max_episode_steps:
            environment = StepLimit(environment, actors.max_episode_steps)
        return stack_frames(environment, actors.agents)
    except ConfigError:
        environment.close()
        raise


def make_until_there(
    make: Callable[[], None], permit: Callable[[Exception], int], wait: Callable[[Remaking], None]
) -> None:
    """Call `make`, which makes environments, again and again where a connection fails in
    it, after the pauses of `Remaking`, for each of which `wait` is called; `permit` is
    asked for each. Raises what `make` raises for any other reason, and what `permit`
    does."""
    remaking: Remaking | None = None
    while True:
        try:
            make()
            return
        except Exception as error:
            if not may_come_back(error):
                raise
            fault = error
        if remaking is None:
            remaking = Remaking(permit, fault, anew=False)
        else:
            remaking.failed(fault)
        del fault  # whose traceback holds this frame
        wait(remaking)


def stack_frames(environment: Environment, specs: Sequence[PlayerSpec]) -> Environment:
    """Return `environment` as its agents see it by their specs. Raises `ConfigError` as
    `match_agents` does."""
    if all(spec.frame_stack == 1 for spec in specs):
        return environment
    counts = [1] * len(environment.agents)
    for spec, group in zip(specs, match_agents(environment.agents, specs), strict=True):
        space = environment.agents[group[0]].spaces.observation
        if stacked(space, 2) == space:
            spec.refuse_idle(
                "frame_stack", "on observations without a Box: Discrete and binary parts are not stacked"
            )
        for index in group:
            counts[index] = spec.frame_stack
    return FrameStack(environment, counts)


def seen_by(spec: PlayerSpec, spaces: Spaces) -> Spaces:
    """Return the spaces that the policy of `spec` is built for, where the environment's
    are `spaces`."""
    return Spaces(stacked(spaces.observation, spec.frame_stack), spaces.action)
