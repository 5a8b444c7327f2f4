"""Iterations: so many training steps, then an evaluation by the weights of that moment,
while training and gathering pause at a quiescent cut.

The evaluation has environments of its own, and draws random numbers of its own; it writes
no memory and takes no credits, so that training is what it would be without.

Its environments play side by side, each in its own time. What counts does not depend on
that: rounds of episodes (`counted_episodes`), up to the given number of steps.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import count, takewhile

from tidemill.api.environment import Environment, Tick
from tidemill.api.policy import Policy
from tidemill.api.spaces import Spaces, schema_of_space
from tidemill.api.worker import Context
from tidemill.core.clock import Clock, awake
from tidemill.core.errors import EnvironmentFault
from tidemill.core.seeding import derive_seed
from tidemill.envs.parallel_build import close_all, make_all
from tidemill.nets.weights import placeholder_weights
from tidemill.replay_training.granted_order import in_turn
from tidemill.replay_training.ready_environments import LOOK_AGAIN, ReadyBatch
from tidemill.replay_training.transitions import TransitionAgent
from tidemill.streams.inline import InlineInferenceClient
from tidemill.streams.samples import NullSampleProducer
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.actor_environments import build_environment
from tidemill.workers.actor_limits import lanes_of, players
from tidemill.workers.base import PollResult
from tidemill.workers.counted_episodes import next_counted
from tidemill.workers.info_numbers import InfoReader
from tidemill.workers.row_schema import row_schema


class _Play:
    """One environment and what was played in it. `client` answers one request at a time:
    in larger batches, actions depend on who else is in them. `seed`: of what is drawn for
    actions, None where the policy need not be one that can be seeded anew."""

    def __init__(
        self,
        context: Context,
        actors: ActorConfig,
        spaces: Spaces,
        client: InlineInferenceClient,
        environment: Environment,
        seed: int | None,
    ) -> None:
        environment.bind([[0]])
        schema = row_schema(context, actors.agents[0], spaces, environment.info)
        samples = NullSampleProducer()
        samples.offer(schema, 1, 1, 1)
        self.environment, self._client, self._seed = environment, client, seed
        self._agent = TransitionAgent(schema, 1, True, client, samples)
        tick = Tick.allocate(spaces.observation, 1, environment.info, False)
        self.batch = ReadyBatch([environment], self._agent, tick, Clock(), InfoReader(), self._flush)
        self.ended: list[tuple[float, int]] = []
        """Of each episode that ended the return, and the steps since the one before,
        those of cut episodes between them included."""
        self.open = 0
        """Steps since then."""
        self.stepped_at = awake()

    def _flush(self, least: int) -> bool:
        if self._client.buffered < least:
            return False
        if self._seed is not None:
            self._client.reseed(derive_seed(self._seed, self.batch.steps))
        self._client.flush()
        return True

    def go_on(self) -> bool:
        """Take a turn. False when there is nothing to be done before the environment
        answers."""
        batch, steps = self.batch, self.batch.steps
        moved = batch.go_on()
        moved = batch.receive() or moved
        if batch.steps > steps:
            self.open += batch.steps - steps
            self.stepped_at = awake()
        if len(self._agent.episodes) > len(self.ended):
            self.ended.append((self._agent.episodes[-1][0], self.open))
            self.open = 0
        return moved


def _counted(plays: Sequence[_Play], steps: int) -> list[float] | None:
    """Return the returns of the episodes that count in the first `steps` steps, None when
    these are not all played."""
    returns: list[float] = []
    while True:
        which, number = next_counted(len(returns), len(plays))
        play = plays[which]
        over = number < len(play.ended)
        ret, length = play.ended[number] if over else (0.0, play.open)
        steps -= length
        if over and steps >= 0:
            returns.append(ret)
        if steps <= 0:
            return returns
        if not over:
            return None


def evaluate(
    context: Context,
    actors: ActorConfig,
    spaces: Spaces,
    policy: Policy,
    steps: int,
    iteration: int,
    patience: float,
    stop: Callable[[], bool],
) -> Generator[PollResult, None, dict[str, float]]:
    """Play `steps` steps by `policy` as it is now, by the mode of its distribution, in as
    many environments of `actors` at a time as these have themselves, or fewer where there
    cannot be so many. Returns what came of it: the mean return of the episodes that
    ended, and how many these were; nothing when it is told to `stop`. An environment that
    fails so often that it rests, or answers no step for `patience` seconds, is left out.
    Raises `EnvironmentFault` when none is left."""
    config = context.experiment.policies[actors.agents[0].policy]
    seed = derive_seed(context.experiment.seed, "evaluation", iteration)
    with placeholder_weights():
        player = config.build(spaces, seed)
    player.load(policy.parameters(), policy.version)
    answer = config.answer(spaces)
    state = config.state(spaces)
    observation = schema_of_space(spaces.observation, "obs")
    drawn = in_turn(context, actors.agents[0])
    client = InlineInferenceClient(player, 0, None, answer, state, observation, 1, Clock())
    rung: deque[_Play] = deque()  # by environments, in their threads
    environments: list[Environment] = []
    try:
        plays: list[_Play] = []
        most = min(actors.count * actors.ring, steps)
        seeds = [derive_seed(seed, "environment", number) for number in range(most)]
        numbers = takewhile(lambda number: number < most, count())
        for environment in make_all(lambda number: build_environment(actors, 1, seeds[number]), numbers):
            own = seeds[len(environments)]
            environments.append(environment)
            if environment.most_lanes:
                most = min(
                    most, environment.most_lanes - sum(map(lanes_of, players(context, actors).values()))
                )
            plays.append(play := _Play(context, actors, spaces, client, environment, own if drawn else None))
            environment.on_ready(_waker(play, rung, context.endpoints.bell.ring))
            yield PollResult(0, 1)
            if stop():
                return {}
        moving = dict.fromkeys(plays)
        until, looked_at = awake() + 0.01, awake()
        for play in plays:
            play.stepped_at = looked_at
        while sum(play.batch.steps for play in plays) < steps or (returns := _counted(plays, steps)) is None:
            while rung:
                moving[rung.popleft()] = None
            if (now := awake()) - looked_at > LOOK_AGAIN:  # at deadlines, say, nobody rings
                looked_at = now
                plays = _left(plays, steps, patience, iteration)
                moving = dict.fromkeys(plays)
            moving = {play: None for play in moving if play.batch.steps < steps and play.go_on()}
            if stop():
                return {}
            if not moving or awake() > until:
                yield PollResult(0, len(moving))
                until = awake() + 0.01
    finally:
        close_all(environments)
    found = {"evaluation_episodes": float(len(returns)), "evaluation_steps": float(steps)}
    return {**found, "evaluation_return": sum(returns) / len(returns)} if returns else found


def _waker(play: _Play, rung: deque[_Play], ring: Callable[[], None]) -> Callable[[], None]:
    wake_play = play.batch.waker(0, ring)

    def wake() -> None:
        rung.append(play)
        wake_play()

    return wake


def _left(plays: list[_Play], steps: int, patience: float, iteration: int) -> list[_Play]:
    """Return those of `plays` that can go on, or have played all `steps`."""
    since = awake() - patience
    left = [
        play
        for play in plays
        if play.batch.steps >= steps or not (play.environment.resting or play.stepped_at < since)
    ]
    if left:
        return left
    faults = [fault for play in plays for fault in play.environment.faults[:1]]
    why = f"the first fault was: {faults[0]}" if faults else f"it answered no step for {patience:g} s"
    raise EnvironmentFault(f"the evaluation of iteration {iteration} was given up; {why}")
