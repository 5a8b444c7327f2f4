"""What limits an actor: the memory that its rows and lanes are going to fill, and the
lanes that an environment can have at a time. More is refused."""

from tidemill.api.environment import Environment
from tidemill.api.spaces import schema_of_space
from tidemill.api.worker import Context
from tidemill.core.errors import ConfigError
from tidemill.core.memory import Need, available, check_memory, give_back, resident_bytes
from tidemill.core.schema import layout
from tidemill.streams.inference import memory_need
from tidemill.workers.actor_config import ActorConfig
from tidemill.workers.actor_environments import build_environment
from tidemill.workers.agent_spec import INLINE, match_agents
from tidemill.workers.row_schema import limit_of_steps, row_schema, sample_schema
from tidemill.workers.trainer_config import TrainerConfig

MANY_LANES = 256  # an actor with as many or more looks first whether they fit
TELLING = 8 << 20  # bytes by which a process must grow before it is taken for the cost of its lanes


def memory_needs(context: Context, config: ActorConfig, environment: Environment) -> list[Need]:
    """Return the memory that one actor's rows will take: the slots of its streams, its
    own arrays, and its requests.

    `environment` may have fewer lanes than it is going to have. Offering a slot touches
    none of its pages, so that this can be refused later.
    """
    needs = []
    lanes, ring = config.lanes, config.ring
    for spec, group in zip(config.agents, match_agents(environment.agents, config.agents), strict=True):
        spaces, seats = environment.agents[group[0]].spaces, lanes * len(group)
        schema = sample_schema(
            spec, row_schema(context, spec, spaces, environment.info), len(environment.agents) - len(group)
        )
        writer, same_step = spec.writer(), environment.same_step
        need = writer.sizes(spec, seats, limit_of_steps(spec, environment), same_step, config.slots)
        row = sum(field.nbytes for field in schema.values())
        per_row = f"{seats:,} seats x {row:,} bytes" + f" x ring {ring}" * (ring > 1)
        kept = 2 + (spec.frame_stack > 1)  # rows in a request, and the newest frames
        kept += writer.own_rows(spec, need, same_step)
        if not spec.streams:
            kept += -(-need.rows * need.columns // seats)  # a slot that goes nowhere
        needs.append(
            Need("actors' own rows", ring * layout(schema, (kept, seats))[1], f"{kept:,} rows x {per_row}")
        )
        if spec.streams:
            channels = sum(
                len(context.edges(f"samples/{stream}/{context.name}/0/")) for stream in spec.streams
            )
            copies = f"{channels} consumers x " * (channels > 1)
            offered = ring * need.slots * layout(schema, (need.rows, need.columns))[1]
            needs.append(
                Need(
                    "samples",
                    channels * offered,
                    f"{copies}{config.slots} slot{'s' * (config.slots > 1)} x {need.rows:,} rows x {per_row}",
                    shared=True,
                )
            )
        if spec.inference != INLINE:
            policy = context.experiment.policies[spec.policy]
            answer, state = policy.answer(spaces), policy.state(spaces)
            observation = schema_of_space(spaces.observation, "obs")
            rows = ring * seats * (1 + environment.same_step)
            needs.append(memory_need(observation, state, answer, rows, ring * len(config.agents)))
    return needs


def check_rows(context: Context, config: ActorConfig, environment: Environment) -> list[Need]:
    """Return `memory_needs`. Raises `ConfigError`, with the sums, when all actors of the
    group together need more than there is."""
    needs = memory_needs(context, config, environment)
    check_memory(needs * config.count, available())
    return needs


def players(context: Context, config: ActorConfig) -> dict[str, ActorConfig]:
    """Return the groups of actors that play the environment of `config`."""
    played = config.environment.bare()
    actors = context.experiment.groups(ActorConfig)
    return {group: other for group, other in actors.items() if other.environment.bare() == played}


def lanes_of(config: ActorConfig) -> int:
    """Return how many lanes a group of actors has."""
    return config.count * config.ring * config.lanes


def check_most_lanes(context: Context, config: ActorConfig, environment: Environment) -> None:
    """Raise `ConfigError`, with the sums, when there cannot be as many lanes at a time as
    all that play this environment are going to have."""
    groups = players(context, config)
    sums = [
        f"{group}: count {other.count} x ring {other.ring} x {other.lanes} lanes"
        for group, other in groups.items()
    ]
    total = sum(map(lanes_of, groups.values()))
    for group, worker in context.experiment.groups(TrainerConfig).items():
        if worker.evaluation_lanes:
            sums.append(f"{group}: {worker.evaluation_lanes} lane of the evaluation, at least")
            total += worker.evaluation_lanes
    if 0 < environment.most_lanes < total:
        raise ConfigError(
            f"{total:,} lanes of the environment are needed at a time ({'; '.join(sums)}), and there can be "
            f"{environment.most_lanes:,}: its server takes no more sessions. Take fewer slots (--slots, "
            f"ring) or lanes, or a server that takes as many (serve-env --max-sessions {total})"
        )


def check_lanes(context: Context, config: ActorConfig, seed: int) -> None:
    """Raise `ConfigError`, with the sums, when so many lanes cannot fit: before they are
    all built, which may take hours.

    A few are built and thrown away, then 8 times as many, until the process has grown by
    what can be told from chance.
    """
    if config.lanes < MANY_LANES:
        return
    give_back()  # else lanes would lie where freed memory was
    lanes = 4
    marks: list[tuple[int, int]] = []  # lanes, bytes that the process held then
    while config.lanes >= lanes * 8:
        environment = build_environment(config, lanes, seed)
        try:
            if not marks:
                check_rows(context, config, environment)
            marks.append((lanes, resident_bytes()[0]))
        finally:
            environment.close()
            del environment
        (first, before), (last, after) = marks[0], marks[-1]
        if after - before > TELLING:
            each = (after - before) / (last - first)
            sums = f"ring {config.ring} x {config.lanes:,} lanes x {each:,.0f} bytes"
            check_memory(
                [Need("environments", int(each * config.lanes) * config.ring, sums)] * config.count,
                available(),
            )
            return
        lanes *= 8
