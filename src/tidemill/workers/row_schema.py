"""The fields of an agent spec's rows."""

from tidemill.api.environment import Environment
from tidemill.api.policy import PolicyConfig
from tidemill.api.spaces import Spaces, schema_of_space
from tidemill.api.worker import Context
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.core.schema import Field, Schema
from tidemill.workers.agent_spec import PlayerSpec


def row_schema(context: Context, spec: PlayerSpec, spaces: Spaces, info: Schema) -> dict[str, Field]:
    """Return the fields of a row as an `Agent` writes it."""
    policy = context.experiment.policies[spec.policy]
    answer, state = policy.answer(spaces), policy.state(spaces)
    own = {
        **schema_of_space(spaces.observation, "obs"),
        **spec.writer().row_fields,
    }
    for name in (*answer, *state):
        if name in own or name.startswith("state.") != (name in state):
            raise ConfigError(
                f'policy "{spec.policy}" ({type(policy).__name__}): its '
                f'{"state" if name in state else "answer"}() has a field "{name}"; names of a state, and no '
                f'others, begin with "state.", and rows have {", ".join(own)} besides'
            )
    return {**own, **answer, **state, **{f"info.{name}": field for name, field in info.items()}}


def sample_schema(spec: PlayerSpec, row: Schema, others: int) -> dict[str, Field]:
    """Return the fields of a sample's row: those of `row`, and what the spec's mode and
    post-processors add. `others`: agents of other specs."""
    schema = dict(row)
    for post in spec.post:
        for name in post.reads:
            if name not in schema:
                raise ConfigError(
                    f'agent spec "{spec.match}": {type(post).__name__} reads "{name}", which its rows lack; '
                    f"{did_you_mean(name, row)}"
                )
        schema |= {f"post.{name}": field for name, field in post.fields().items()}
    return {**schema, **spec.writer().sample_fields(others)}


def misfit_of_rows(schema: Schema, policy: PolicyConfig, spaces: Spaces) -> str:
    """Return what rows of `schema` lack, or have in another form, of what `policy` sees,
    remembers and answers; "" where they hold all of it."""
    for name, field in {
        **schema_of_space(spaces.observation, "obs"),
        **policy.state(spaces),
        **policy.answer(spaces),
    }.items():
        if schema.get(name) != field:
            there = f"{schema[name].dtype}{list(schema[name].shape)} there" if name in schema else "not there"
            return f"{name} is {field.dtype}{list(field.shape)}, and {there}"
    return ""


def limit_of_steps(spec: PlayerSpec, environment: Environment) -> int:
    """Return the most steps that an episode of `environment` can have, 0 when that is not
    known and `spec` does not need it.

    Raises `ConfigError` when it does: rows are kept until an episode is over, in memory
    that is sized at the start.
    """
    if not environment.max_episode_steps and spec.writer().needs_limit:
        raise ConfigError(
            f'agent spec "{spec.match}": mode = "{spec.mode}" keeps the rows of an episode until it is over, '
            "and no limit of its steps is known, so that memory cannot be sized; set "
            "Actors.max_episode_steps, or the limit of the environment where it has one"
        )
    return environment.max_episode_steps
