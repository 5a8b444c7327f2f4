"""A trained policy, taken out of a run's folder or an exported file: observation in,
action out, both in the environment's own form."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tidemill.api.experiment import Experiment
from tidemill.api.plain_spaces import read_spaces
from tidemill.api.policy import Policy, PolicyConfig, check_weights
from tidemill.api.spaces import Box, Discrete, Space, Spaces, field_of, leaves, schema_of_space
from tidemill.api.weights_header import read_header
from tidemill.core.clock import Clock
from tidemill.core.config import decode
from tidemill.core.errors import (
    CheckpointError,
    ConfigError,
    DatabaseError,
    RunError,
    SchemaError,
    did_you_mean,
)
from tidemill.core.moved import Gone
from tidemill.core.safetensors_io import unpack
from tidemill.core.schema import Array, Arrays, Field, allocate
from tidemill.core.seeding import derive_seed
from tidemill.core.untrusted_files import read_json, read_plain
from tidemill.core.user_code_loading import expect, load_file, own_code
from tidemill.envs.spaces import action_caster, nest, paths
from tidemill.nets.weights import placeholder_weights
from tidemill.run.folder import RunFolder
from tidemill.run.trust import Trust, allow, named
from tidemill.store.checkpoint import checkpoints, read_checkpoint, read_newest
from tidemill.streams.inline import InlineInferenceClient
from tidemill.streams.sources import Fixed, read_weights

if TYPE_CHECKING:
    from tidemill.trained.torch_policy import TorchPolicy


class LoadedPolicy:
    """A policy with the weights of one checkpoint or version.

    name: name of the policy in its experiment
    update, steps: finished updates and env steps behind the weights
    spaces: what it sees and does
    schema: the fields of an answer
    state: the fields of the recurrent state, {} for a feed-forward policy
    deterministic: take the mode of the distribution; else draw from it
    """

    act_rows = Gone("client(rows), which answers rows as actors ask for them; act and answer are as before")

    def __init__(
        self,
        name: str,
        config: PolicyConfig,
        spaces: Spaces,
        parameters: Mapping[str, Array],
        facts: Mapping[str, Any],
        seed: int,
    ) -> None:
        check_weights(config, spaces, parameters)
        self.name, self.spaces, self.deterministic = name, spaces, True
        self.update, self.steps = int(facts["updates"]), int(facts["steps"])
        self.schema, self.state = config.answer(spaces), config.state(spaces)
        self._config = config
        with placeholder_weights():
            self._policy: Policy = config.to_play().build(spaces, seed)
        self._policy.load(parameters, self.update)
        self._readers = [
            _Reader(leaf_name, path, leaf)
            for (leaf_name, leaf), path in zip(
                leaves(spaces.observation, "obs").items(), paths(spaces.observation), strict=True
            )
        ]
        self._casters = {
            leaf_name: action_caster(leaf) for leaf_name, leaf in leaves(spaces.action, "action").items()
        }
        self._memory: Arrays = {}

    def act(self, observation: Any) -> Any:
        """Return the action for one observation, or the actions for a batch of them, as
        the environment takes them.

        An observation has the form of its space: an array, an integer for Discrete, a
        mapping for Dict, a sequence for Tuple. In a batch every part has one more axis in
        front. A recurrent policy takes calls for steps of one episode (each place in
        a batch for one of its own), until `reset`. Raises `SchemaError` for what the
        space does not hold.
        """
        out, single = self._ask(observation)
        action = nest(self.spaces.action, iter([cast(out[name]) for name, cast in self._casters.items()]))
        return _first(action) if single else action

    def answer(self, observation: Any) -> dict[str, Any]:
        """Return everything that the policy answers: ``action`` as `act` gives it,
        ``value`` (expected return, in reward units), ``log_prob``.
        """
        out, single = self._ask(observation)
        action = nest(self.spaces.action, iter([cast(out[name]) for name, cast in self._casters.items()]))
        rest = {name: out[name] for name in self.schema if name not in self._casters}
        answer = {"action": action, **rest}
        return {name: _first(value) for name, value in answer.items()} if single else answer

    def reset(self, which: Any = None) -> None:
        """Forget what came before: a new episode begins. `which`, bool [n] or numbers of
        places, are those of a batch that begin one; None: all."""
        if which is None:
            self._memory = {}
        for memory in self._memory.values():
            memory[which] = 0

    def module(self) -> "TorchPolicy":
        """Return the policy as a torch module, with copies of its weights: it takes a
        batch of observations as `act` does, of tensors, and returns the actions that
        `act` gives for them when `deterministic`, normalised, masked and scaled alike.

        That of a recurrent policy is called with the state, too, and returns it
        after the actions: ``action, state = module(observation, state)``, where None
        begins. A class of one's own, such as a `TorchNetwork`, is refused with a
        `ConfigError`.
        """
        from tidemill.trained.torch_policy import torch_policy

        return torch_policy(self._config, self.spaces, self._policy.parameters())

    def client(self, rows: int) -> InlineInferenceClient:
        """Return who answers rows as actors ask for them, so many at a time at most; the
        asker keeps the recurrent state."""
        observation = schema_of_space(self.spaces.observation, "obs")
        return InlineInferenceClient(
            self._policy, 0, None, self.schema, self.state, observation, rows, Clock()
        )

    def _ask(self, observation: Any) -> tuple[Arrays, bool]:
        """Return the answers to the observation, and whether it was a single one."""
        parts = {reader.name: reader.read(observation) for reader in self._readers}
        counts = {name: count for name, (_, count) in parts.items()}
        if len(set(counts.values())) > 1:
            said = ", ".join(
                f"{name} {'a single one' if count is None else count}" for name, count in counts.items()
            )
            raise SchemaError(
                f"the parts of the observation are of different numbers of observations: {said}"
            )
        count = next(iter(counts.values()))
        rows = 1 if count is None else count
        if not self._memory:
            self._memory = allocate(self.state, (rows,))
        for memory in self._memory.values():
            if len(memory) != rows:
                raise SchemaError(
                    f"the policy remembers {len(memory)} observations and is given {rows}; call reset() first"
                )
        out = allocate({**self.schema, **self.state}, (rows,))
        self._policy.act(
            {name: array for name, (array, _) in parts.items()}, self._memory, self.deterministic, out
        )
        self._memory = {name: out[name].copy() for name in self.state}
        return out, count is None


class _Reader:
    """One leaf of the observation: from what the user has into rows."""

    def __init__(self, name: str, path: tuple[str | int, ...], leaf: Space) -> None:
        self.name, self._path, self._leaf = name, path, leaf
        self._field: Field = field_of(leaf)
        self._start = leaf.start if isinstance(leaf, Discrete) else 0

    def read(self, observation: Any) -> tuple[Array, int | None]:
        """Return [n, ...] rows and n, None for a single observation."""
        value, field = observation, self._field
        for key in self._path:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                raise SchemaError(
                    f"the observation has no part {key!r}; the policy was trained on {self._expected()}"
                ) from None
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise SchemaError(f"{self.name} is no array ({error}); expected {self._expected()}") from None
        single = array.shape == field.shape
        if not single and (array.ndim != len(field.shape) + 1 or array.shape[1:] != field.shape):
            raise SchemaError(f"{self.name} has shape {array.shape}; expected {self._expected()}")
        if not np.can_cast(array.dtype, field.dtype, "same_kind"):
            raise SchemaError(f"{self.name} has dtype {array.dtype}; expected {self._expected()}")
        rows = np.ascontiguousarray(array.reshape(-1, *field.shape) if single else array, field.dtype)
        rows = rows - self._start if self._start else rows
        self._check_values(rows)
        return rows, None if single else len(rows)

    def _check_values(self, rows: Array) -> None:
        if isinstance(self._leaf, Discrete):
            outside = rows[(rows < 0) | (rows >= self._leaf.n)]
            if len(outside):
                raise SchemaError(
                    f"{self.name} is {int(outside[0]) + self._start}; expected {self._expected()}"
                )
        elif (
            isinstance(self._leaf, Box)
            and self._field.dtype.startswith("float")
            and not np.isfinite(rows).all()
        ):
            raise SchemaError(f"{self.name} holds NaN or infinity; expected finite numbers")

    def _expected(self) -> str:
        if isinstance(self._leaf, Discrete):
            return (
                f"{self.name}: an integer from {self._start} to {self._start + self._leaf.n - 1}, or an "
                "array [n] of them"
            )
        shape = ", ".join(map(str, self._field.shape))
        return (
            f"{self.name}: {self._field.dtype} of shape [{shape}], or [n{', ' if shape else ''}{shape}] for "
            "a batch"
        )


def load(
    run: str | Path,
    *,
    policy: str | None = None,
    checkpoint: str | int | Path | None = None,
    version: str | int | None = None,
    file: str | Path | None = None,
    trust: Trust = False,
    deterministic: bool = True,
    seed: int = 0,
) -> LoadedPolicy:
    """Return a trained policy of the run in folder `run`, or the one in the file `run`
    that ``tidemill params RUN export`` wrote.

    policy: its name; may be left out when the run trains only one
    checkpoint: "update-35" or 35, or a checkpoint's folder; by default the newest that is
        whole
    version: instead of a checkpoint, a version or tag of the run's parameter database:
        35, "latest"
    file: the experiment's file, when it has changed since (or is elsewhere now); of an
        exported policy, the one that defines its class
    trust: True: run what the folder or the file names (the experiment's file, and
        settings of its classes), though this user never has
    deterministic: act by the mode of the policy's distribution; else draw from it, by a
        random stream of `seed`

    Raises `RunError`, `CheckpointError`, `DatabaseError`, or `ConfigError` for arguments
    that do not go together. The environment is not built, and torch is imported only by
    policies that need it to act.
    """
    path = Path(run)
    if path.is_file():
        if policy is not None or checkpoint is not None or version is not None:
            raise ConfigError(f"{path} is the file of one policy: leave policy, checkpoint and version out")
        loaded = _load_file(path, Path(file) if file is not None else None, trust, derive_seed(seed, "load"))
    else:
        folder = RunFolder.open(path)
        experiment = folder.experiment(file, trust, environments=False).experiment
        weights = Weights(checkpoint, version)
        loaded = load_policy(
            folder, experiment, policy or _only_policy(folder, experiment), weights, derive_seed(seed, "load")
        )
    loaded.deterministic = deterministic
    return loaded


@dataclass(frozen=True)
class Weights:
    """The choice of a policy's weights: those of a checkpoint, or a version (or tag) of
    the parameter database; by default the newest whole checkpoint."""

    checkpoint: str | int | Path | None = None
    version: str | int | None = None

    def __post_init__(self) -> None:
        if self.checkpoint is not None and self.version is not None:
            raise ConfigError(f"checkpoint {self.checkpoint} and version {self.version}: take one of the two")


def _load_file(path: Path, file: Path | None, trust: Trust, seed: int) -> LoadedPolicy:
    """Return the policy that the file at `path` holds."""
    try:
        arrays, text = unpack(read_plain(path, links=True))
        plain, spaces = read_header(text)
        found = named(plain, file)
        allow(path, found, trust, own_code([file] if file is not None else []))
        expect(found.files)
        if file is not None:
            load_file(file, "file")
        config = decode(PolicyConfig, plain, "policy")
        return LoadedPolicy(text["policy"], config, spaces, arrays, _updates_and_steps(text), seed)
    except ConfigError as error:
        raise ConfigError(
            f"{path}: {error}. If it is a class of your own, name the file that defines it: file=FILE.py"
        ) from None
    except OSError as error:
        raise DatabaseError(f"{path} cannot be read: {error.strerror}") from None
    except (SchemaError, KeyError, ValueError, TypeError, OverflowError) as error:
        raise DatabaseError(f"{path} is no exported policy: {error}") from None


def _load_version(
    folder: RunFolder, config: PolicyConfig, policy: str, version: str | int, seed: int
) -> LoadedPolicy:
    """Return a version of the run's parameter database."""
    data, number = folder.database().read(policy, version)
    try:
        arrays, text = unpack(data)
        return LoadedPolicy(policy, config, read_header(text)[1], arrays, _updates_and_steps(text), seed)
    except (SchemaError, KeyError, ValueError, TypeError, OverflowError) as error:
        raise DatabaseError(
            f'version {number} of policy "{policy}" in {folder.path} does not fit the run\'s configuration: '
            f"{error}"
        ) from None


def _updates_and_steps(text: Mapping[str, str]) -> dict[str, Any]:
    return {
        "updates": int(text["version"]),
        "steps": int(dict(read_json(text["counters"])).get("env_steps", 0)),
    }


def load_policy(
    folder: RunFolder, experiment: Experiment, policy: str, weights: Weights, seed: int
) -> LoadedPolicy:
    """Return the policy called `policy` of a run that was opened; `seed` is that of its
    sampling."""
    if policy not in experiment.policies:
        raise RunError(f'{folder.path} has no policy "{policy}"; {did_you_mean(policy, experiment.policies)}')
    if weights.version is not None:
        return _load_version(folder, experiment.policies[policy], policy, weights.version, seed)
    checkpoint = weights.checkpoint
    place = folder.checkpoints(policy)
    warnings: list[str] = []
    if checkpoint is None:
        path, arrays, facts, warnings = read_newest(place)
    else:
        path = _find(place, checkpoint)
        arrays, facts = read_checkpoint(path)
    for warning in warnings:
        print(f"warning: {warning}; taking {path}", file=sys.stderr)
    try:
        return LoadedPolicy(
            policy, experiment.policies[policy], read_spaces(facts["spaces"]), arrays["policy"], facts, seed
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"checkpoint {path} does not hold a policy: {type(error).__name__}: {error}"
        ) from None
    except SchemaError as error:
        raise CheckpointError(f"checkpoint {path} does not fit the run's configuration: {error}") from None


def load_fixed(experiment: Experiment, policy: str, fixed: Fixed, spaces: Spaces, seed: int) -> LoadedPolicy:
    """Return the policy called `policy` with the parameters that it is fixed to; an
    untrained one is built anew, from `seed`."""
    config = experiment.policies[policy]
    parameters, version = (
        (config.to_play().build(spaces, seed).parameters(), 0)
        if fixed.file is None
        else read_weights(Path(fixed.file))
    )
    try:
        return LoadedPolicy(
            policy,
            config,
            spaces,
            {k: v.copy() for k, v in parameters.items()},
            {"updates": version, "steps": 0},
            seed,
        )
    except SchemaError as error:
        raise ConfigError(f'file = {fixed.file} is of another policy than "{policy}": {error}') from None


def _only_policy(folder: RunFolder, experiment: Experiment) -> str:
    trained = experiment.trained()
    if len(trained) != 1:
        raise RunError(
            f"{folder.path} trains {len(trained)} policies; say which of {', '.join(sorted(trained))}"
        )
    return trained.pop()


def _find(place: Path, checkpoint: str | int | Path) -> Path:
    """Return the folder of the checkpoint that the user names."""
    text = str(checkpoint)
    name = f"update-{text}" if text.isdigit() else text
    known = {path.name: path for path in checkpoints(place)}
    if name in known:
        return known[name]
    if Path(text).is_dir():
        return Path(text)
    raise CheckpointError(f'{place} has no checkpoint "{text}"; {did_you_mean(name, known)}')


def _first(value: Any) -> Any:
    """Return the first row of a (nested) value: a scalar of numpy's where it has no axes
    of its own."""
    if isinstance(value, dict):
        return {key: _first(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_first(part) for part in value)
    return value[0]
