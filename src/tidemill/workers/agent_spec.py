"""Which agents of an environment one policy plays, how it is asked, what it sees, and
what becomes of the rows."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill.api.algorithm import PostProcessor
from tidemill.api.environment import AgentInfo
from tidemill.api.experiment import Experiment
from tidemill.core.config import Config, acting, check_several
from tidemill.core.errors import ConfigError, did_you_mean
from tidemill.streams.sources import Newest, ParameterSource
from tidemill.workers.sample_writers import WRITERS
from tidemill.workers.sample_writers.base import SampleWriter

INLINE = "inline"
PLAYED = ("policy", "inference", "samples", "frame_stack")
"""What actors of a replay memory say of the one agent that is played, as a spec does."""


_NO_ROWS = "without samples: no rows are kept"


def _has_rows(spec: Any) -> bool:
    return bool(spec.samples)


@dataclass(frozen=True, kw_only=True)
class PlayerSpec(Config):
    """A player spec says which agents of an environment one policy plays, how the policy
    is asked, and to which sample streams the agents' rows go. It is what `AgentSpec`
    (samples of many rows) and `TransitionSpec` (for a replay memory: a sample is one row
    of all seats, with what led to it, `api.algorithm.ARRIVAL_FIELDS`) have in common.

    match: regular expression, full match on an agent's name or index; the first spec that
        matches wins
    policy: name of the policy
    inference: "inline" (the actor computes) or the name of an inference stream (policy
        workers do)
    parameters: which version of the weights an inline policy plays: the newest
        (`Newest`), ones drawn from the parameter database (`Drawn`), or always the same
        (`Fixed`). The run's mean return is of agents that play the newest
    samples: name of the sample stream, or several names: each gets every sample; None to
        keep nothing
    deterministic: whether to take the likeliest action (of a Gaussian its mean) in place
        of a drawn one. Rows of such play are kept by an `AgentSpec` whose `mode` is
        "full" or "concise", or not at all
    frame_stack: number of newest observations that the policy sees and rows hold (see
        `tidemill.envs.frame_stack`); 1: the newest alone
    """

    match: str = ".*"
    policy: str = "policy"
    inference: str = INLINE
    parameters: ParameterSource = field(default_factory=Newest)
    samples: str | tuple[str, ...] | None = "samples"
    deterministic: bool = False
    frame_stack: int = 1

    # of rows that are sent one by one; settings of an `AgentSpec`
    mode = "transitions"
    """What a sample is: see `AgentSpec`."""
    burn_in = 0
    """Rows at a sample's beginning that are not trained on in it."""
    bootstrap = 0
    """Rows at a sample's end that are not trained on in it."""
    sample_steps = 1
    """Rows by which one sample of a fixed length advances."""
    padded = False
    """True when samples hold fillers up to the longest one's length."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.match)
        except re.error as error:
            raise ConfigError(f'match = "{self.match}" is not a regular expression: {error}') from None
        if self.inference != INLINE and self.parameters != Newest():
            raise ConfigError(
                f'agent spec "{self.match}": parameters = {self.parameters} is for inline policies, and '
                f'inference stream "{self.inference}" answers with the newest version; take inference = '
                '"inline"'
            )
        self.check_least(frame_stack=1)
        if len(set(self.streams)) < len(self.streams):
            raise ConfigError(f"samples = {self.streams}: a sample stream is named twice; name each once")
        super().__post_init__()

    @property
    def streams(self) -> tuple[str, ...]:
        """The names of the sample streams."""
        return (self.samples,) if isinstance(self.samples, str) else self.samples or ()

    def writer(self) -> type[SampleWriter]:
        """Return what writes its rows into samples."""
        raise TypeError(f"{type(self).__name__} has no writer()")

    @property
    def rows(self) -> int:
        """Rows of one sample of a fixed length."""
        return 1

    @property
    def post(self) -> tuple[PostProcessor, ...]:
        """What computes further fields of finished episodes' rows."""
        return ()


@dataclass(frozen=True, kw_only=True)
class AgentSpec(PlayerSpec):
    """An agent spec says which agents of an environment one policy plays, and which
    samples their rows become. `PlayerSpec` explains the fields that it has besides.

    mode: what a sample is, by name (`sample_writers`):

        * "fixed": so many rows, sent as soon as the last one is answered.
        * "after_done": the same rows, held back until the episode of the last one is
          done; then all samples that are complete are sent.
        * "full": one episode, all its rows, of one seat; needs a limit of an episode's
          steps.
        * "concise": one episode as one row: its first, with the last one's `done` and
          `truncated`, the info of the action that finished it, the version that did that
          (`last_version`), the number of the seat in its target (`seat`), and of each
          agent of the lane that another spec matches who played it (`others.version`, -1
          when that changed, `others.policy`). Not to be trained on.
    sample_steps: with "fixed" and "after_done": rows by which one sample goes on from the
        one before, those that are trained on; each sample holds `burn_in` more before
        them and `bootstrap` more behind
    burn_in: with "fixed" and "after_done": rows at a sample's beginning that only bring a
        recurrent policy's state up to date, and enter no loss
    bootstrap: with "fixed" and "after_done": rows at a sample's end that enter no loss,
        and whose values the returns of the rows before are bootstrapped from
    padded: with "full": whether fillers (version -1) follow up to the step limit, so that
        all samples are of one length. Else a sample has just its own rows
    post: with "after_done" and "full": what is computed of finished episodes and added to
        their rows, e.g. (`GAE`(),)
    """

    mode: str = acting("fixed", _has_rows, _NO_ROWS)
    sample_steps: int = acting(
        256,
        lambda spec: _has_rows(spec) and "sample_steps" in spec.writer().settings,
        'without samples of a fixed length, those of mode = "fixed" and "after_done"',
    )
    burn_in: int = acting(0, _has_rows, _NO_ROWS)
    bootstrap: int = acting(1, _has_rows, _NO_ROWS)
    padded: bool = acting(False, _has_rows, _NO_ROWS)
    post: tuple[PostProcessor, ...] = acting((), _has_rows, _NO_ROWS)

    @classmethod
    def of_today(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return saved settings in today's form: where `sample_steps` has no effect, the
        default that it had then is left out. See `Config.of_today`."""
        data = super().of_today(data)
        mode = data.get("mode", cls.mode)
        writer = WRITERS[mode] if isinstance(mode, str) and mode in WRITERS else None
        acts = data.get("samples", True) and (writer is None or "sample_steps" in writer.settings)
        if acts or data.get("sample_steps") != 128:
            return data
        return {name: data[name] for name in data if name != "sample_steps"}

    def __post_init__(self) -> None:
        if self.sample_steps < 1 or self.bootstrap < 1 or self.burn_in < 0:
            raise ConfigError(
                f"sample_steps = {self.sample_steps}, bootstrap = {self.bootstrap} (both at least 1: the "
                f"last row lends its value to the one before) and burn_in = {self.burn_in} (at least 0) "
                "cannot be"
            )
        if str(self.mode) == "stepwise":
            raise ConfigError(
                'mode = "stepwise" is gone: actors that send step by step, for a replay memory, have a '
                "configuration of their own; take ReplayActors(environment=…, lanes=…, frame_stack=…) in "
                'place of Actors(environment=…, agents=(AgentSpec(mode="stepwise"),))'
            )
        if self.mode not in WRITERS:
            raise ConfigError(f'mode = "{self.mode}" is not known; {did_you_mean(self.mode, WRITERS)}')
        for setting, what, asked in (
            ("deterministic", "deterministic = True with samples", self.deterministic and self.streams),
            ("padded", "padded = True", self.padded),
            ("post", "post", self.post),
            ("burn_in", f"burn_in = {self.burn_in}", self.burn_in > 0),
            ("bootstrap", f"bootstrap = {self.bootstrap}", self.bootstrap > 1),
        ):
            if asked and setting not in WRITERS[self.mode].settings:
                known = " or ".join(f'"{mode}"' for mode in WRITERS if setting in WRITERS[mode].settings)
                raise ConfigError(
                    f'{what} does not go with mode = "{self.mode}"; take mode = {known}, or leave it out'
                )
        check_several("post", self.post)
        names = [name for post in self.post for name in post.fields()]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"post: two post-processors make one field (they make {', '.join(names)}); leave one out"
            )
        super().__post_init__()

    def writer(self) -> type[SampleWriter]:
        return WRITERS[self.mode]

    @property
    def rows(self) -> int:
        return self.burn_in + self.sample_steps + self.bootstrap


def in_lockstep(experiment: Experiment, spec: PlayerSpec) -> bool:
    """True when a consumer of the spec's samples trains in lockstep with those who make
    them."""
    return any(any(experiment.in_lockstep(stream).values()) for stream in spec.streams)


def match_agents(agents: Sequence[AgentInfo], specs: Sequence[PlayerSpec]) -> list[list[int]]:
    """Return for each spec the indices of its agents. Raises `ConfigError` for an agent
    or a spec without a match, or unequal spaces in one spec."""
    groups: list[list[int]] = [[] for _ in specs]

    def matches(spec: PlayerSpec, index: int) -> bool:
        return bool(re.fullmatch(spec.match, agents[index].name) or re.fullmatch(spec.match, str(index)))

    for index, agent in enumerate(agents):
        for spec, group in zip(specs, groups, strict=True):
            if matches(spec, index):
                group.append(index)
                break
        else:
            patterns = ", ".join(f'"{spec.match}"' for spec in specs)
            raise ConfigError(
                f'no agent spec ({patterns}) matches agent {index} "{agent.name}"; widen one, or add '
                f'AgentSpec(match="{agent.name}")'
            )
    for spec, group in zip(specs, groups, strict=True):
        if not group:
            taken = [
                other.match
                for other, theirs in zip(specs, groups, strict=True)
                if any(matches(spec, index) for index in theirs)
            ]
            hint = (
                f'"{taken[0]}" stands before it and takes them all; let it stand first'
                if taken
                else did_you_mean(spec.match, (a.name for a in agents))
            )
            raise ConfigError(f'agent spec "{spec.match}" matches no agent that an earlier spec left; {hint}')
        first = agents[group[0]]
        for index in group:
            if agents[index].spaces != first.spaces:
                raise ConfigError(
                    f'agents "{first.name}" and "{agents[index].name}" have different spaces but one agent '
                    f'spec "{spec.match}"; give each kind a spec'
                )
    return groups
