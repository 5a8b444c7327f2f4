"""Iterations: so many training steps, then an evaluation by the weights of that moment, while training and gathering pause at a quiescent cut.

The evaluation has an environment of its own, and draws random numbers of its own; it writes no memory and takes no credits, so that training is what
it would be without.
"""

from collections.abc import Callable, Generator
from time import monotonic

from tidemill.api.environment import Tick
from tidemill.api.experiment import Context
from tidemill.api.policy import Policy
from tidemill.api.spaces import Spaces, schema_of_space
from tidemill.core.clock import Clock
from tidemill.core.errors import EnvironmentFault
from tidemill.core.seeding import derive_seed
from tidemill.streams.inline import InlineInferenceClient
from tidemill.streams.parameters import Subscription
from tidemill.streams.samples import NullSampleProducer
from tidemill.workers.actor_config import Actors
from tidemill.workers.base import PollResult
from tidemill.workers.frames import build_environment
from tidemill.workers.gang import Gang
from tidemill.workers.rows import row_schema
from tidemill.workers.stepwise import StepwiseAgent


class _Frozen(Subscription):
    """Parameters that stay."""

    def refresh(self, policy: Policy) -> bool:
        return True


def evaluate(
    context: Context,
    actors: Actors,
    spaces: Spaces,
    policy: Policy,
    steps: int,
    iteration: int,
    patience: float,
    stop: Callable[[], bool],
) -> Generator[PollResult, None, dict[str, float]]:
    """Play `steps` steps of the environment of `actors` by `policy` as it is now, by the mode of its distribution. Returns what came of it: the mean
    return of the episodes that ended, and how many these were; nothing when it is told to `stop`. Raises `EnvironmentFault` when its environment
    fails as often as quarantines a slot, or answers no step for `patience` seconds."""
    spec, config = actors.agents[0], context.experiment.policies[actors.agents[0].policy]
    seed = derive_seed(context.experiment.seed, "evaluation", iteration)
    player = config.build(spaces, seed)
    player.load(policy.parameters(), policy.version)
    environment = build_environment(actors, 1, seed)
    try:
        environment.bind([[0]])
        answer, state, observation = config.answer(spaces), config.state(spaces), schema_of_space(spaces.observation, "obs")
        client = InlineInferenceClient(player, 0, _Frozen(), answer, state, observation, 1, Clock())
        schema, samples = row_schema(context, spec, spaces, environment.info), NullSampleProducer()
        samples.offer(schema, 1, 1, 1)
        agent = StepwiseAgent(schema, 1, True, client, samples, environment.voids)
        tick = Tick.allocate(spaces.observation, 1, environment.info, False)
        gang = Gang([environment], agent, tick, actors.max_episode_steps, Clock())
        environment.on_ready(gang.waker(0, context.endpoints.bell.ring))
        until = monotonic() + 0.01
        played, stepped_at = 0, monotonic()
        while gang.steps < steps:
            if gang.steps > played:
                played, stepped_at = gang.steps, monotonic()
            elif environment.quarantined or monotonic() - stepped_at > patience:
                why = f"the first fault was: {environment.faults[0]}" if environment.faults else f"it answered no step for {patience:g} s"
                raise EnvironmentFault(f"the evaluation of iteration {iteration} was given up; {why}")
            moved = gang.begin()
            client.flush()
            moved = gang.send() or moved
            moved = gang.receive() or moved
            if stop():
                return {}
            if not moved or monotonic() > until:
                yield PollResult(0, int(moved))
                until = monotonic() + 0.01
    finally:
        environment.close()
    returns = [ret for ret, _, _ in agent.episodes]
    found = {"evaluation_episodes": float(len(returns)), "evaluation_steps": float(gang.steps)}
    return {**found, "evaluation_return": sum(returns) / len(returns)} if returns else found
