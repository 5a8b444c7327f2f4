"""Where an inline policy's parameters come from: the trainer's newest, a version drawn
from the run's parameter database, or a file.

Agents with one source share one inline client; of what is drawn each target has a client
of its own, so that a draw can hold for a whole episode.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Literal

import numpy as np

from tidemill.api.edges import Port
from tidemill.api.policy import Policy
from tidemill.api.worker import Context
from tidemill.core.config import Config, acting
from tidemill.core.cut import Part, generator_state, set_generator_state
from tidemill.core.errors import ConfigError, DatabaseAway, RunError, SchemaError, VersionGone
from tidemill.core.safetensors_io import unpack
from tidemill.core.schema import Arrays, check_finite
from tidemill.core.untrusted_files import read_plain
from tidemill.store.database_mirror import database_in
from tidemill.store.parameter_database import PARAMETERS, ParameterDatabase
from tidemill.store.query import Query
from tidemill.store.versions import Version
from tidemill.streams.parameters import ParameterSubscriber, Subscription

LOOK = 0.25  # seconds for which what is known of the database is taken to be true
CACHED_VERSIONS = 16  # versions whose arrays are kept, so that drawing one again reads no file
ATTEMPTS = 8  # versions that are drawn at once, each collected before it could be read
_CURE = "such a file is written by tidemill params RUN export VERSION FILE"


class ParameterSource(Config):
    """A parameter source says where the parameters of an inline policy come from."""

    @property
    def varies(self) -> bool:
        """True when two who ask at one time get different ones."""
        return False

    @property
    def numbered(self) -> bool:
        """True when it gives versions of this run, so that a version's number tells which
        weights it means."""
        return True

    @property
    def from_start(self) -> bool:
        """True when it has parameters before the first action is asked for, so that those
        which the policy is built with are never played."""
        return False

    def ports(self, policy: str) -> tuple[Port, ...]:
        """Return the ends of streams that the worker holds for it."""
        return ()

    def queries(self) -> tuple[Query, ...]:
        """Return what is asked of the parameter database, so that misspelt fields are
        found at the start."""
        return ()

    def build(self, context: Context, policy: str, rng: np.random.Generator) -> Subscription:
        """Return what loads `policy`. Draws come from `rng`."""
        raise TypeError(f"{type(self).__name__} has no build()")


@dataclass(frozen=True, kw_only=True)
class Newest(ParameterSource):
    """Newest, as `AgentSpec.parameters`, has an inline policy play the newest version
    that its trainer has published."""

    from_start = True  # trainers publish before they are ready, and nobody starts before that

    def ports(self, policy: str) -> tuple[Port, ...]:
        return (Port(policy, "subscribe"),)

    def build(self, context: Context, policy: str, rng: np.random.Generator) -> Subscription:
        (edge,) = context.edges(f"parameters/{policy}/")
        return ParameterSubscriber(context.endpoints.reader(edge.name))


@dataclass(frozen=True, kw_only=True)
class Drawn(ParameterSource):
    """Drawn, as `AgentSpec.parameters`, has an inline policy play versions drawn from the
    run's parameter database: a new draw with each episode where targets have one lane,
    else with each sample.

    tag: the version that this tag points to; before it points to any, the latest
    among: the versions to draw from; by itself all that are kept.
        ``Query(order="-evaluation/win_rate", limit=10)``: the ten best. While it finds
        none, the latest
    how: "uniform": each alike. "prioritised": in proportion to `metric`, so that whoever
        is hard to beat comes more often (Vinyals et al. 2019, "Grandmaster level in
        StarCraft II using multi-agent reinforcement learning", prioritised fictitious
        self-play)
    metric: what was recorded of versions, "evaluation/beats" being the share of games
        that each won against the one that was evaluated; one that was never played counts
        1
    """

    tag: str = ""
    among: Query = field(default_factory=Query)
    how: Literal["uniform", "prioritised"] = "uniform"
    metric: str = acting(
        "evaluation/beats",
        lambda drawn: drawn.how == "prioritised",
        'with how = "uniform": each version is drawn alike',
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tag and self.replace(tag="") != Drawn():
            raise ConfigError(
                f'tag = "{self.tag}" is one version, so that there is nothing to draw: leave out the tag, or '
                "among, how and metric"
            )

    @property
    def varies(self) -> bool:
        return not self.tag

    def ports(self, policy: str) -> tuple[Port, ...]:
        return (Port(policy, "draw"),)

    def queries(self) -> tuple[Query, ...]:
        return (
            ()
            if self.tag
            else (self.among, Query(order=self.metric))
            if self.how == "prioritised"
            else (self.among,)
        )

    def build(self, context: Context, policy: str, rng: np.random.Generator) -> Subscription:
        if context.folder is None:
            raise ConfigError(
                f'policy "{policy}" is drawn from the parameter database, but the run keeps no folder'
            )
        database = database_in(Path(context.folder) / PARAMETERS)
        # in a run that resumes exactly no draw depends on when somebody looked
        return DrawnParameters(database, policy, self, rng, 0.0 if context.experiment.exact_resume else LOOK)


@dataclass(frozen=True, kw_only=True)
class Fixed(ParameterSource):
    """Fixed, as `AgentSpec.parameters`, has an inline policy play one set of parameters
    for the whole run: those of `file`, written by ``tidemill params RUN export``, or
    without a file those that the policy is built with, untrained.
    """

    file: str | None = None

    @property
    def from_start(self) -> bool:
        return self.file is not None

    numbered = False

    def build(self, context: Context, policy: str, rng: np.random.Generator) -> Subscription:
        return FixedParameters(policy, None if self.file is None else Path(self.file))


class DrawnParameters(Subscription):
    """The parameters that `Drawn` describes; every refresh draws anew."""

    def __init__(
        self, database: ParameterDatabase, policy: str, drawn: Drawn, rng: np.random.Generator, look: float
    ) -> None:
        self._database, self._name, self._drawn, self._rng, self._look_each = (
            database,
            policy,
            drawn,
            rng,
            look,
        )
        self._looked = -LOOK
        self._known: list[tuple[int, float]] = []  # (version, weight) of those that may be drawn
        self._pushed: dict[int, Mapping[str, float]] = {}  # by version, what was pushed with it
        self._loaded: OrderedDict[int, Arrays] = OrderedDict()

    def refresh(self, policy: Policy) -> bool:
        for _ in range(ATTEMPTS):
            try:
                if monotonic() - self._looked >= self._look_each or not self._known:
                    self._look()
                if not self._known:
                    return False
                version = self._draw()
                self.counters = self._pushed[version]
                if version != policy.version:
                    policy.load(self._arrays(version), version)
                return True
            except VersionGone:  # collected since it was looked up
                self._known = []
            except DatabaseAway:  # which its writers tell
                if not self._look_each:  # an exact run would not be exact with what it has
                    raise
                return False
        raise RunError(
            f'policy "{self._name}": {ATTEMPTS} versions were drawn from {self._database.folder}, and each '
            "was collected before it could be read; keep more of them (database_versions)"
        )

    def state(self) -> Part:
        return {"random": generator_state(self._rng)}

    def load_state(self, state: Part) -> None:
        set_generator_state(self._rng, state["random"])

    def _look(self) -> None:
        drawn, self._looked = self._drawn, monotonic()
        versions = self._database.versions(self._name)
        if drawn.tag:
            found = [version for version in versions if drawn.tag in version.tags]
        else:
            found = drawn.among.select(versions, Version.values)
        self._known = [(version.version, self._weight(version)) for version in found or versions[-1:]]
        self._pushed = {version.version: version.counters for version in found or versions[-1:]}

    def _weight(self, version: Version) -> float:
        return (
            1.0 if self._drawn.how == "uniform" else max(version.values().get(self._drawn.metric, 1.0), 0.0)
        )

    def _draw(self) -> int:
        weights = np.array([weight for _, weight in self._known])
        total = weights.sum()
        return self._known[int(self._rng.choice(len(weights), p=weights / total if total else None))][0]

    def _arrays(self, version: int) -> Arrays:
        if version in self._loaded:
            self._loaded.move_to_end(version)
        else:
            self._loaded[version], _ = self._database.load(self._name, version)
            while len(self._loaded) > CACHED_VERSIONS:
                self._loaded.popitem(last=False)
        return self._loaded[version]


class FixedParameters(Subscription):
    """The parameters that `Fixed` describes. Raises `ConfigError` for a file that cannot
    be read, or is of another policy."""

    def __init__(self, policy: str, file: Path | None) -> None:
        self._name, self._file = policy, file
        self._weights = None if file is None else read_weights(file)

    def refresh(self, policy: Policy) -> bool:
        if policy.version < 0:
            arrays, version = self._weights or (policy.parameters(), 0)
            try:
                policy.load({name: array.copy() for name, array in arrays.items()}, version)
            except SchemaError as error:
                raise ConfigError(
                    f'file = {self._file} is of another policy than "{self._name}": {error}'
                ) from None
        return True


def read_weights(file: Path) -> tuple[Arrays, int]:
    """Return the arrays and the version in an exported file. Raises `ConfigError` for one
    that cannot be read."""
    try:
        arrays, text = unpack(read_plain(file, links=True))
        check_finite(arrays, infinities=True)  # whose they are is not known here
        return arrays, int(text["version"])
    except OSError as error:
        raise ConfigError(f"file = {file}: {error.strerror}; {_CURE}") from None
    except (SchemaError, KeyError, ValueError) as error:
        raise ConfigError(f"file = {file} holds no weights of a policy ({error}); {_CURE}") from None
