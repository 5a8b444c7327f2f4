"""The policy contract: what acts. Configurations import no torch; `build` may.

Shapes: n rows of any seats. Observations come by leaf name (``obs``, ``obs.position``),
raw, as they are stored in rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from tidemill.api.spaces import Spaces
from tidemill.core.config import Config
from tidemill.core.cut import Part
from tidemill.core.errors import ConfigError, SchemaError
from tidemill.core.schema import Array, Arrays, Field, check_finite

VERSIONS_OF_LIFE = 1 << 32
"""Versions of a trainer that has died so many times begin at that many times this: those
of a later life are greater than all of the lives before, which it goes back behind."""


def number_of(version: int) -> int:
    """Return the number of finished updates behind a version, in whichever life of its
    trainer; -1 for none."""
    return version % VERSIONS_OF_LIFE if version >= 0 else version


class Policy(ABC):
    """A policy answers requests with actions, as actors and policy workers ask it; an
    algorithm changes its parameters."""

    version: int = -1
    """Number of finished updates behind the loaded parameters, after that of the lives of
    its trainer (see `VERSIONS_OF_LIFE`); -1 before the first `load`."""
    computed_by: str = ""
    """What computes it, as far as another would have other last bits: the instruction set
    of the native core, "numpy", "torch (cpu)", "torch (cuda)"; "" where that is not
    known."""

    @abstractmethod
    def act(self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays) -> None:
        """Answer n requests. `observation` and `state` map leaf names (``obs``,
        ``obs.position``; ``state.hidden``) to arrays [n, ...]; observations are raw, as
        rows hold them. Write every field that `PolicyConfig.answer` declares (``action``
        or its leaves; ``log_prob``, and ``value`` in reward units, where declared),
        and the next value of each field of `PolicyConfig.state`, into ``out[name][:n]``.
        `deterministic` (bool, or bool [n]) asks for the mode of the distribution. Keep no
        references to the arguments."""

    def begin(
        self, observation: Arrays, state: Arrays, deterministic: bool | Array, out: Arrays
    ) -> Callable[[], None]:
        """Start what `act` does, and return a function that finishes it: `out` is written
        once it has been called. It may be called from any thread; several are called in
        the order in which they were started. The other arguments may be reused as soon as
        `begin` returns. By default everything is done here, by `act`; override it for a
        policy that computes outside of the caller's thread."""
        self.act(observation, state, deterministic, out)
        return _nothing

    def reseed(self, seed: int) -> None:
        """Draw all that `act` draws from `seed` from now on, and from nothing else: in
        exact runs each action has a seed of its own."""
        raise ConfigError(
            f"{type(self).__name__} has no reseed(seed), which exact runs need, so that what is drawn for an "
            "action depends on slot, episode and step alone; add it (self._rng = "
            "np.random.default_rng(seed), say), or train with exact = False"
        )

    def random_state(self) -> Part:
        """Return where the random stream is that `act` draws from, as
        `core.cut.generator_state` has it."""
        raise self._no("random_state()")

    def set_random_state(self, state: Part) -> None:
        """Go on drawing from where `random_state` was."""
        raise self._no("set_random_state(state)")

    def _no(self, method: str) -> ConfigError:
        return ConfigError(
            f"{type(self).__name__} has no {method}, which runs with exact_resume need, so that a resumed "
            "run draws what it would have drawn; add random_state() and set_random_state(state) "
            "(tidemill.core.cut.generator_state of its generator, say), or take exact_resume = False"
        )

    @abstractmethod
    def parameters(self) -> Arrays:
        """Return all that a version consists of, weights and normalisers, as arrays that
        view the policy's own memory on the host; a policy on a GPU copies it there first.
        """

    @abstractmethod
    def load(self, parameters: Mapping[str, Array], version: int) -> None:
        """Copy `parameters` in and set `version`. Raises `SchemaError` when a name or
        shape differs."""


def _nothing() -> None:
    """What is left to do of an answer that is complete."""


def misfit(policy: Policy, out: Arrays, error: Exception) -> SchemaError:
    """Return what to raise when `policy` failed with `error` to write its answers into
    `out`."""
    declared = ", ".join(f"{name} {array.dtype}{list(array.shape[1:])}" for name, array in out.items())
    return SchemaError(
        f"{type(policy).__name__} did not answer: {type(error).__name__}: {error}. A row of what it writes, "
        "and of the state that it gets, must be "
        f"as answer() and state() of its configuration say: {declared}"
    )


class PolicyConfig(Config):
    """The configuration of a policy: a subclass is what `Experiment.policies` takes. It
    imports no torch; `build` may."""

    @property
    def undecided(self) -> bool:
        """True when settings are left to a measurement of this machine. Unmeasured it is
        built all the same."""
        return False

    def alternatives(self, spaces: Spaces) -> Sequence[Self]:
        """Return the configurations of which the one that is quickest on this machine is
        taken, all with the same weights; the plain one first, which is taken unless
        another is clearly quicker. Decided ones have none but themselves."""
        return (self,)

    def to_play(self) -> Self:
        """Return the configuration that plays with this one's weights on this machine,
        which may lack what its run computed with."""
        return self

    def weights(self, spaces: Spaces) -> dict[str, Field] | None:
        """Return the fields of `Policy.parameters`, without allocating them: what a file
        of weights is compared with before anything is built. None: that cannot be told.
        Raises `ConfigError` for spaces that it cannot see or act in."""
        return None

    def answer(self, spaces: Spaces) -> dict[str, Field]:
        """Return the fields of an answer: the action's leaves, ``log_prob``, ``value``
        and whatever else belongs into rows. No torch."""
        raise TypeError(f"{type(self).__name__} has no answer()")

    def state(self, spaces: Spaces) -> dict[str, Field]:
        """Return the recurrent state's fields, ``state.*``; {} when there is none. Zeros
        are the default state, that before an episode."""
        return {}

    def build(self, spaces: Spaces, seed: int) -> Policy:
        """Return the policy with weights drawn from `seed`, and its own random stream for
        sampling."""
        raise TypeError(f"{type(self).__name__} has no build()")

    def build_on(self, device: str, spaces: Spaces, seed: int) -> Policy:
        """Return the policy with its weights on `device`: "cpu", or a GPU as torch names
        it ("cuda:1"). A family that knows GPUs implements this."""
        if device != "cpu":
            raise ConfigError(
                f'device = "{device}", but {type(self).__name__} has no build_on() and so knows the CPU '
                'only; take device = "cpu"'
            )
        return self.build(spaces, seed)


def check_weights(config: PolicyConfig, spaces: Spaces, parameters: Mapping[str, Array]) -> None:
    """Raise `SchemaError` for parameters that are of another policy than `config`
    declares, or not finite. Nothing is allocated before."""
    declared = config.weights(spaces)
    if declared is not None:
        check_parameters(declared, parameters)
    check_finite(parameters, infinities=declared is None)


def check_parameters(declared: Mapping[str, Field], parameters: Mapping[str, Array]) -> None:
    """Raise `SchemaError` unless `parameters` are those that are declared: their names,
    shapes and dtypes."""
    if declared.keys() != parameters.keys():
        missing = sorted(declared.keys() - parameters.keys())
        unknown = sorted(parameters.keys() - declared.keys())
        raise SchemaError(
            f"these parameters are of another network: missing {missing or 'none'}, unknown "
            f"{unknown or 'none'}; build the policy with the configuration and spaces that it was trained "
            "with"
        )
    for name, field in declared.items():
        given = parameters[name]
        if given.shape != field.shape or given.dtype != field.dtype:
            raise SchemaError(
                f"parameter {name} is {given.dtype}{list(given.shape)}, but this network's is "
                f"{field.dtype}{list(field.shape)}; build the policy with the configuration and spaces that "
                "it was trained with"
            )


def check_next_state(policy: Policy, state: Arrays, out: Arrays) -> None:
    """Raise `SchemaError` when the next state that `policy` put into `out` has another
    form than the `state` that it was given."""
    for name, before in state.items():
        after = out[name]
        if after.shape[1:] != before.shape[1:] or after.dtype != before.dtype:
            raise SchemaError(
                f"{type(policy).__name__} was given {name} as {before.dtype}{list(before.shape[1:])} and "
                f"gives it back as {after.dtype}{list(after.shape[1:])}: a state keeps the form that state() "
                "of its configuration declares. Write into out[...][:n] in place"
            )
