"""The environments of an actor, as its agents see them."""

from collections.abc import Callable, Sequence

from tidemill.api.environment import Environment
from tidemill.api.spaces import Spaces
from tidemill.core.clock import awake
from tidemill.core.errors import ConfigError, EnvironmentAway, WrongServer, returned
from tidemill.core.step_deadlines import FIRST
from tidemill.envs.frame_stack import FrameStack, stacked
from tidemill.envs.lane_restarts import Remaking, RestartedTogether, may_come_back, text_of
from tidemill.envs.parallel_build import EnvironmentMaker
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
            environment = RestartedTogether(environment, made, permit, seed)
        if actors.max_episode_steps:
            environment = StepLimit(environment, actors.max_episode_steps)
        return stack_frames(environment, actors.agents)
    except ConfigError:
        environment.close()
        raise


class EnvironmentsAgain:
    """The environments of an actor that connect to what was there before, and may be away
    now: they are made as soon as it is, after the pauses of `Remaking`.

    tries: how many have failed so far
    away: how it was not there in the newest one, "" before
    """

    def __init__(
        self,
        make: Callable[[Environment | None], None],
        first: Callable[[], Environment] | None,
        permit: Callable[[Exception], int],
        wake: Callable[[], None],
    ) -> None:
        """`make` makes all of them, but for the first where that is given; `permit` is
        asked for each try but the first (see `Environment.restart_lanes`). `first` makes
        the first, where who answers there is to be heard in a thread: that may take long,
        and no other takes any time then. `wake` is called from it."""
        self._make, self._first, self._permit, self._wake = make, first, permit, wake
        self._maker: EnvironmentMaker | None = None
        self._remaking: Remaking | None = None
        self._try_at = awake()
        self.tries, self.away = 0, ""

    def made(self) -> bool:
        """Make them, once it is time for that. False where they are not made yet. Raises
        what keeps them from it for good, and what `permit` does."""
        try:
            if self._first is None:
                if awake() < self._try_at:
                    return False
                self._make(None)
                return True
            if self._maker is None:
                pause = max(0.0, self._try_at - awake())
                self._maker = EnvironmentMaker(self._first, self._wake, pause=pause)
            if (made := self._maker.made()) is None:
                return False
            self._maker = None
            if isinstance(made, Exception):
                raise made
            self._make(made)
            return True
        except WrongServer as error:  # the right one was there before
            fault: Exception = EnvironmentAway(str(error))
        except Exception as error:
            if not may_come_back(error):
                raise
            fault = error
        if self._remaking is None:
            self._remaking = Remaking(self._permit, fault, anew=False)
        else:
            self._remaking.failed(fault)
        self.tries += 1
        self._try_at, self.away = self._remaking.due, text_of(self._remaking.fault).partition("\n")[0]
        del fault  # whose traceback holds this frame
        return False

    @property
    def pauses(self) -> bool:
        """True while a pause is made before the next try, or that lasts no longer than a
        reset may."""
        return awake() < self._try_at + FIRST

    def give_up(self) -> None:
        """Nobody waits for them any more."""
        if self._maker is not None:
            self._maker.give_up()


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
