"""The library of kernels that this process calls, and the choice of its instruction set
by ``TIDEMILL_NATIVE`` or a policy's setting."""

import ctypes
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import ConfigError
from tidemill.native.build import LIBRARY, WHY, digest

VARIABLE = "TIDEMILL_NATIVE"
INSTRUCTION_SETS = ("baseline", "avx2", "avx512")
"""Each has those before it."""
BUILT = Path(__file__).with_name(LIBRARY)

_MOST_TOLD = 3000  # characters of what a compiler has said

Floats = NDArray[np.float32]


class NativeUnavailable(Exception):
    """The kernels cannot be used here; says why and what to do."""


class KernelLeaf(ctypes.Structure):
    """A leaf of the action; the fields are those of ``Leaf`` in kernels.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "size", "branches")),
        ("sizes", ctypes.c_void_p),
    )


class KernelNetwork(ctypes.Structure):
    """A network of plain layers; the fields are those of ``Network`` in kernels.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("towers", "layers", "inputs", "seen", "activation", "leaves")),
        *((name, ctypes.c_int64) for name in ("size", "branches", "deviations", "critic_layers")),
        *((name, ctypes.c_void_p) for name in ("widths", "critic_widths", "actions", "weights", "scratch")),
    )


class KernelLayers(ctypes.Structure):
    """Networks of plain layers side by side; the fields are those of ``Layers`` in
    layers.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("towers", "layers", "inputs", "activation", "normed")),
        *((name, ctypes.c_void_p) for name in ("widths", "weights")),
    )


class KernelTransitions(ctypes.Structure):
    """Transitions to learn action values from; the fields are those of ``Transitions`` in
    dqn.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("online", "online_hidden", "online_out")),
        *((name, ctypes.c_void_p) for name in ("target", "target_hidden", "target_out")),
        *((name, ctypes.c_int64) for name in ("n", "reach", "actions", "duelling", "twice")),
        *((name, ctypes.c_void_p) for name in ("seen", "then", "forbidden", "action", "rewards", "steps")),
        *((name, ctypes.c_void_p) for name in ("done", "weight", "powers", "spare", "gradient")),
        *((name, ctypes.c_void_p) for name in ("losses", "error", "value")),
    )


class KernelChosen(ctypes.Structure):
    """Rows to act on by action values; the fields are those of ``Chosen`` in dqn.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "hidden", "out")),
        *((name, ctypes.c_int64) for name in ("n", "actions", "duelling")),
        *((name, ctypes.c_void_p) for name in ("seen", "forbidden", "drawn", "chance")),
        ("epsilon", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("action", "value", "probability")),
    )


class KernelMemory(ctypes.Structure):
    """The rows of a replay memory; the fields are those of ``Memory`` in replay.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("lanes", "length")),
        *((name, ctypes.c_void_p) for name in ("heads", "span", "ends")),
    )


class KernelCopied(ctypes.Structure):
    """A field of drawn transitions; the fields are those of ``Copied`` in replay.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("row", "bytes")),
        *((name, ctypes.c_void_p) for name in ("source", "into")),
    )


class KernelDrawn(ctypes.Structure):
    """Drawn transitions; the fields are those of ``Drawn`` in replay.c."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("reach", "fields")),
        *((name, ctypes.c_void_p) for name in ("copied", "reward", "version", "first", "next", "last")),
        *((name, ctypes.c_void_p) for name in ("steps", "rewards")),
        *((name, ctypes.c_int64) for name in ("oldest", "stamps")),
    )

    oldest: int
    stamps: int


class KernelActing(ctypes.Structure):
    """Rows to act on; the fields are those of ``Acting`` in kernels.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("features", "noise", "forbidden", "modes")),
        *((name, ctypes.c_void_p) for name in ("action", "log_prob", "value")),
        *((name, ctypes.c_int64) for name in ("n", "mode")),
        ("scale", ctypes.c_float),
    )


class KernelCartPoles(ctypes.Structure):
    """Carts and poles; the fields are those of ``CartPoles`` in cart_pole.c."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("force", "gravity", "total_mass", "pole_mass", "length")),
        *((name, ctypes.c_double) for name in ("pole_mass_length", "seconds", "farthest", "steepest")),
        ("n", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("action", "cosine", "sine", "state", "over", "seen")),
    )


class KernelCopy(ctypes.Structure):
    """An array that is copied into rows; the fields are those of ``Copy`` in ticks.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("bytes", "step")),
        *((name, ctypes.c_void_p) for name in ("source", "into")),
    )


class KernelCounted(ctypes.Structure):
    """A tick of seats; the fields are those of ``Counted`` in ticks.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("seats", "wide")),
        *((name, ctypes.c_void_p) for name in ("reward", "done", "truncated", "present", "restarted")),
        *((name, ctypes.c_void_p) for name in ("returns", "length")),
    )


class KernelStepped(ctypes.Structure):
    """Lanes that have stepped; the fields are those of ``Stepped`` in ticks.c."""

    _fields_ = (
        ("lanes", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("count", "limit", "idle", "done", "truncated")),
        *((name, ctypes.c_void_p) for name in ("present", "restarted", "reward")),
    )


class KernelRows(ctypes.Structure):
    """The rows of an update; the fields are those of ``Rows`` in kernels.c."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in ("features", "forbidden", "action", "log_prob", "advantage", "target", "value")
    )


class KernelLoss(ctypes.Structure):
    """The settings of PPO's loss; the fields are those of ``Loss`` in kernels.c."""

    _fields_ = tuple(
        (name, ctypes.c_double) for name in ("clip", "clip_value", "value_coefficient", "entropy_coefficient")
    )


class KernelDescent(ctypes.Structure):
    """A descent by Adam; the fields are those of ``Descent`` in kernels.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("size", "steps", "apart")),
        *((name, ctypes.c_void_p) for name in ("weights", "gradient", "first", "second")),
        *((name, ctypes.c_double) for name in ("rate", "epsilon", "limit", "target_kl")),
        ("spare", ctypes.c_void_p),
    )

    steps: int


class KernelTrajectory(ctypes.Structure):
    """The rows of a sample; the fields are those of ``Trajectory`` in advantages.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("steps", "seats")),
        *((name, ctypes.c_void_p) for name in ("reward", "value", "done", "truncated", "acted", "rho")),
        *((name, ctypes.c_void_p) for name in ("advantage", "target")),
    )


_I, _P, _D = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
SIGNATURES: Mapping[str, tuple[Any, list[Any]]] = {
    "digest": (_I, []),
    "scratch": (_I, [_P]),
    "act": (None, [_P, _P]),
    "ppo": (None, [_P, _P, _P, _P, _I, _D, _P, _P]),
    "ppo_epoch": (_I, [*[_P] * 5, _I, _D, _P, _P]),
    "square": (_D, [_I, _P]),
    "descend": (_D, [_I, _P, _P, _P, _P, _I, *[_D] * 5]),
    "gae": (None, [_P, *[ctypes.c_float] * 2]),
    "vtrace": (None, [_P, *[ctypes.c_float] * 4]),
    "cart_pole": (None, [_P]),
    "copy_rows": (None, [_P, _I, _I]),
    "count_tick": (_I, [_P, _P]),
    "end_lanes": (None, [_P]),
    "helpers": (_I, [_I]),
    "forward": (None, [_P, _P, _I, _P, _P]),
    "backward": (None, [_P, _P, _I, _P, _P, _P, _P, _P]),
    "backward_chosen": (None, [_P, _I, *[_P] * 6]),
    "squash": (None, [_I, _I, *[_P] * 7]),
    "dqn": (_D, [_P]),
    "explore": (None, [_P]),
    "held_rows": (_I, [_P]),
    "find_places": (_I, [_P, _I, _P, _P]),
    "gather": (None, [_P, _I]),
    "approach": (None, [_I, ctypes.c_float, _P, _P]),
}
"""What each kernel returns and takes."""


def _why_not(path: Path) -> str:
    """Return why there is no library at `path`, as far as its build has left it."""
    try:
        with path.with_name(WHY).open(encoding="utf-8", errors="replace") as file:
            return " ".join(file.read(_MOST_TOLD).split())
    except OSError:
        return "no C compiler was found at installation"


class Kernels:
    """The kernels of one instruction set. Arrays are handed in by address: C-contiguous,
    of the types that the sources say.

    processor: the best one that this processor has
    best: the best one of these that the library has
    """

    def __init__(self, path: Path, instruction_set: str | None = None) -> None:
        """Load the library at `path`. None: the best instruction set that this processor
        has. Raises `NativeUnavailable`."""
        if not path.exists():
            raise NativeUnavailable(
                f"{path} was not built ({_why_not(path)}); with a C compiler that works (gcc, clang, or what "
                "the environment variable CC names) run `python -m tidemill.native.build`"
            )
        try:
            library = ctypes.CDLL(str(path))
            known = INSTRUCTION_SETS[: library.tidemill_instruction_sets()]
            built_of = getattr(library, "tidemill_digest_baseline", None)
            if built_of is not None:
                built_of.restype = ctypes.c_int64
            own = 0 if built_of is None else built_of()
        except (OSError, AttributeError) as error:
            raise NativeUnavailable(
                f"{path} cannot be loaded ({error}); run `python -m tidemill.native.build`"
            ) from None
        sources = None
        with suppress(FileNotFoundError):  # an installation may lack them
            sources = digest()
        if sources not in (None, own):
            raise NativeUnavailable(
                f"{path} was built of other sources than are there now, of another version of Tidemill, say "
                f"({own:x} and {sources:x}); run `python -m tidemill.native.build`"
            )
        self.processor = known[-1]
        has = [name for name in known if hasattr(library, f"tidemill_digest_{name}")]
        self.best = has[-1]
        self.instruction_set = has[-1] if instruction_set is None else instruction_set
        if self.instruction_set not in has:
            lacks = (
                "the library was built without" if self.instruction_set in known else "this processor lacks"
            )
            raise NativeUnavailable(f"{lacks} {self.instruction_set}; there is {', '.join(has)}")
        for name, (returned, taken) in SIGNATURES.items():
            function = getattr(library, f"tidemill_{name}_{self.instruction_set}")
            function.restype, function.argtypes = returned, taken
            setattr(self, name, function)

    act: Any
    ppo: Any
    ppo_epoch: Any
    square: Any
    descend: Any
    gae: Any
    vtrace: Any
    cart_pole: Any
    copy_rows: Any
    count_tick: Any
    end_lanes: Any
    helpers: Any
    forward: Any
    backward: Any
    backward_chosen: Any
    squash: Any
    dqn: Any
    explore: Any
    held_rows: Any
    find_places: Any
    gather: Any
    approach: Any
    scratch: Any


def address(array: NDArray[Any]) -> int:
    """Return where `array` lies, which must be C-contiguous and outlive the use."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


_threads = 1


def use_threads(count: int) -> None:
    """Have networks of plain layers that are built from now on computed by up to `count`
    threads of this process, which changes no bit of what they tell."""
    global _threads
    _threads = count


def threads() -> int:
    """Return the threads that compute plain layers."""
    return _threads


@cache
def choose(wish: str) -> Kernels | None:
    """Return the kernels that `wish`, a value of ``TIDEMILL_NATIVE``, asks for; warns
    where there are none. Raises `ConfigError` for a wish that is not known, and where
    kernels are required and cannot be had."""
    if wish == "off":
        return None
    if wish != "require" and wish not in INSTRUCTION_SETS:
        raise ConfigError(
            f'{VARIABLE} = "{wish}" is not known; take one of off, {", ".join(INSTRUCTION_SETS)}, require'
        )
    try:
        return Kernels(BUILT, None if wish == "require" else wish)
    except NativeUnavailable as error:
        if wish == "require":
            raise ConfigError(f"{VARIABLE} = require, but {error}") from None
        told = f"numpy computes the networks: {VARIABLE} = {wish}, but {error}"
        warnings.warn(told, RuntimeWarning, stacklevel=2)
        return None


def unavailable(setting: str) -> str | None:
    """Return why what a policy's setting ``native`` names cannot be had here, the best
    instruction set for "auto"; None where it can."""
    if setting == "off":
        return None
    try:
        Kernels(BUILT, None if setting == "auto" else setting)
    except NativeUnavailable as error:
        return str(error)
    return None


def choices() -> list[str]:
    """Return the settings that "auto" may become on this machine: numpy, and the best
    instruction set, unless the environment says which."""
    if wish := os.environ.get(VARIABLE):
        kernels = choose(wish)
        return ["off" if kernels is None else kernels.instruction_set]
    return ["off"] if unavailable("auto") else ["off", Kernels(BUILT).instruction_set]


@cache
def named(setting: str) -> Kernels | None:
    """Return the kernels of the instruction set that a policy's setting ``native`` names,
    None for "off", and for "auto" outside a run. Raises `ConfigError` where they cannot
    be had: a run keeps to what it names, since others have other last bits."""
    if setting in ("off", "auto"):
        return None
    if why := unavailable(setting):
        raise ConfigError(
            f'native = "{setting}", but {why}. {VARIABLE}=off has numpy compute the network, with other last '
            "bits"
        )
    return Kernels(BUILT, setting)


def asked_for(setting: str) -> Kernels | None:
    """Return the kernels that the environment asks for, or, where it says nothing, a
    policy's `setting`; None where numpy is to compute."""
    wish = os.environ.get(VARIABLE)
    return choose(wish) if wish else named(setting)
