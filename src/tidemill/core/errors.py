"""The tree of errors. Every error a user can meet is a `TidemillError` whose text names
the value, the cause and the cure.

TidemillError
├── ConfigError        a setting that is unknown, of a wrong type or impossible
│   ├── WrongServer    an address where somebody else answers than is asked for
│   └── TooManyFiles   more open files than a process may have
├── SchemaError        an array whose name, shape or dtype is not the declared one
├── EnvironmentFault   an environment that raised, or answered what its spaces forbid
│   ├── EnvironmentHangs       a lane that has not come back, and was left with its thread
│   ├── EnvironmentAway        one that cannot be made anew now: its server is not there
│   └── RemoteFault    an environment server that refused a call, or answered what its
│       │              protocol forbids
│       ├── ProtocolFault      an answer that its protocol forbids
│       ├── RemoteTimeout      no answer within the call's total deadline
│       ├── RemoteUnavailable  too many failures: the retry budget or the attempts are
│       │                      used up
│       ├── ReplyLost          a step may have been applied, its reply is gone, and it may
│       │                      not be sent again: the episode is lost
│       └── SessionLost        the server does not know the session (any more): it started
│                              anew, or closed it as idle
├── DeadlineError      a wait that ran out: says who should have woken it
├── CheckpointError    a checkpoint that is missing, torn or of another experiment
├── DatabaseError      a parameter database that is damaged, or cannot be written
│   ├── DatabaseAway   one that cannot be read or written now
│   └── VersionGone    a version that it does not hold (any more)
├── SimulatorError     a simulator that cannot start, or does not do its part
│   ├── ImageError     what it wrote into the shared memory cannot be
│   ├── PeerLost       the other end of the bridge died or closed
│   └── RecordingError a recording of an exchange that is torn, or none at all
└── RunError           a run that cannot start or ended in failure
    ├── Untrusted      a folder or file of somebody else's that names code, programs or
    │                  addresses
    ├── Interrupted    a measurement, or a check, that a signal ended
    ├── Overtaken      a run that another runner leads by now, which began later
    └── NoProgress     a worker whose others did not do their part for long

`BrokenOff` and `HangLeft` are none of them, and no `Exception`: a signal raises them.
"""

import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Self, TypeVar

from tidemill.core.foreign_names import FOREIGN_NAMES, WITHOUT_NAMES

T = TypeVar("T")
FOREIGN_LIMIT, OWN_LIMIT = 1_500, 4_000  # characters of messages: somebody else's error's, and ours


class TidemillError(Exception):
    """This is the base of every error that is raised on purpose. `str(error)` is one
    message that a user can act on."""


class ConfigError(TidemillError):
    """A setting is unknown, of a wrong type, or impossible together with another."""


class WrongServer(ConfigError):
    """Somebody else answers at an address than is asked for: that is wrong, or, where the
    right one has answered there before, away."""


class TooManyFiles(ConfigError):
    """A process needs more open files than it may have; later it may need fewer."""


class SchemaError(TidemillError):
    """An array does not have the declared name, shape or dtype."""


class EnvironmentFault(TidemillError):
    """An environment raised, or returned what its own spaces forbid (shape, dtype, NaN).

    lane: in which lane that was; None where it was none, or nobody knows
    told: what the environment told in that step, as it was, as far as that is known: of
        each agent, by its name, a mapping with ``obs`` (or its leaves by name),
        ``reward``, ``terminated``, ``truncated``, ``info``, and ``before``, the
        observation that it had told before
    """

    lane: int | None = None
    told: Mapping[str, Mapping[str, Any]] = {}

    def in_lane(self, lane: int) -> Self:
        """Say which lane it was, and return this."""
        self.lane = lane
        return self

    def telling(self, told: Mapping[str, Mapping[str, Any]]) -> Self:
        """Say what the environment told, and return this."""
        self.told = told
        return self


class EnvironmentHangs(EnvironmentFault):
    """A lane has not come back within its deadline, and was left with its thread, which
    alone may touch it. `too_many` is True where more hang than may: no other try will
    mend that."""

    too_many = False


class EnvironmentAway(EnvironmentFault):
    """An environment, or a lane, that has failed cannot be made anew, or reset, now: what
    it connects to is not there. Another try is made after `pause` seconds."""

    pause = 0.0


class RemoteFault(EnvironmentFault):
    """An environment server refused a call, or answered what its protocol forbids."""


class ProtocolFault(RemoteFault):
    """An environment server answered what its protocol forbids. `first` is True where it
    never answered a step otherwise: no other try will mend that."""

    first = False


class RemoteTimeout(RemoteFault):
    """An environment server did not answer within the call's total deadline."""


class RemoteUnavailable(RemoteFault):
    """An environment server failed too often: the retry budget, or the attempts of a
    call, are used up."""


class ReplyLost(RemoteFault):
    """A step may have been applied, its reply is gone, and it may not be sent again: the
    episode cannot go on."""


class SessionLost(RemoteFault):
    """An environment server does not know the session (any more): it started anew, or
    closed it as idle."""


@contextmanager
def needing(who: str, cure: str, kind: type[TidemillError] = ConfigError) -> Iterator[None]:
    """Let an import of the block that fails raise a `kind` which says who needs it, as
    "videos need", and the cure."""
    try:
        yield
    except ImportError as error:
        raise kind(f"{who} a package that is not installed: {cure} ({error})") from error


class DeadlineError(TidemillError):
    """A wait ended without being woken. The text says what was awaited, how long, and who
    should have woken it."""


class CheckpointError(TidemillError):
    """A checkpoint is missing, torn, or belongs to another experiment."""


class NewerCheckpoint(CheckpointError):
    """A newer version of Tidemill has written the checkpoint: it is whole, and nothing
    that could be passed over."""


class DatabaseError(TidemillError):
    """A parameter database, or a version in it, is damaged or cannot be written."""


class DatabaseAway(DatabaseError):
    """The parameter database cannot be read or written now: its disk is full, or away."""


class VersionGone(DatabaseError):
    """The parameter database does not hold the version or tag that was asked for: it was
    collected, or never pushed."""


class SimulatorError(TidemillError):
    """A simulator, or its trainer, cannot be started or joined, or does not do its
    part."""


class ImageError(SimulatorError):
    """What lies in the shared memory cannot be: a length, count or offset that does not
    fit, or another version."""


class PeerLost(SimulatorError):
    """The other end of the bridge died, or closed."""


class RecordingError(SimulatorError):
    """A recording of an exchange cannot be read: it is damaged, of another version, or
    none at all."""


class RunError(TidemillError):
    """A run cannot start, or ended in failure."""


class Overtaken(RunError):
    """Another runner, which began later, leads the run."""


class Untrusted(RunError):
    """A run's folder or an exported policy names code, programs or addresses that this
    user has neither had run before nor given the word for."""


class NoProgress(RunError):
    """The other workers did not do their part for so many `seconds`: what they reported
    meanwhile may be the cause."""

    def __init__(self, text: str, seconds: float) -> None:
        super().__init__(text)
        self.seconds = seconds


class Interrupted(RunError):
    """A signal ended what was to be measured, or found out. `reason` is what messages
    call it: "Ctrl-C", "SIGTERM"."""

    def __init__(self, reason: str, lost: str = "nothing was measured") -> None:
        super().__init__(f"interrupted by {reason}: {lost}")
        self.reason = reason


class BrokenOff(BaseException):
    """Raised in the main thread, wherever it is, by a later signal, or before a run
    begins by the first. No `Exception`: nothing catches it."""


class HangLeft(BaseException):
    """Raised in the main thread where an environment hangs that the run's end does not
    need. No `Exception`: nothing catches it but who leads the run.

    worker: whose step it is, which has no more turns; "" where it is closed
    """

    def __init__(self, worker: str = "") -> None:
        super().__init__(worker)
        self.worker = worker


SIGNALLED = (KeyboardInterrupt, BrokenOff, HangLeft)
"""What signals raise, wherever the main thread is."""


def fault_of(error: BaseException) -> Exception:
    """Return what an environment has raised as what costs it its episode: what is no
    `Exception` (a panic in Rust, say) as an `EnvironmentFault` with that as its cause.
    Raises what ends the run instead: what signals raise, and `SystemExit`."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, (*SIGNALLED, SystemExit)):
        raise error
    fault = EnvironmentFault(f"{type(error).__name__}: {message_of(error)}")
    fault.__cause__ = error
    return fault


def raised_by(who: str, doing: str, error: BaseException) -> EnvironmentFault:
    """Return what `who` has raised while `doing` something as its fault. Raises what
    `fault_of` does."""
    fault_of(error)  # raises what is none
    fault = EnvironmentFault(f"{who} raised {type(error).__name__} while {doing}: {message_of(error)}")
    fault.__cause__ = error
    return fault


@contextmanager
def forgiving() -> Iterator[None]:
    """Pass over what closing an environment raises that has failed, or is not wanted any
    more. Raises what `fault_of` does."""
    try:
        yield
    except BaseException as error:
        fault_of(error)


def close_each(closes: Iterable[Callable[[], object]]) -> None:
    """Call each of them, also after one that raises, and raise what the first one did in
    the end; what signals raise comes at once."""
    first: BaseException | None = None
    for close in closes:
        try:
            close()
        except SIGNALLED:
            raise
        except BaseException as error:
            first = error if first is None else first
    if first is not None:
        raise first


def message_of(error: BaseException) -> str:
    """Return what an error says, shortened where that is very long; where its own
    `__str__` raises, that."""
    try:
        return shortened(str(error), OWN_LIMIT if isinstance(error, TidemillError) else FOREIGN_LIMIT)
    except SIGNALLED:
        raise
    except BaseException as other:
        return f"its __str__ raised {type(other).__name__}"


def shortened(text: str, most: int) -> str:
    """Return a text of more than `most` characters as its beginning and its end, and how
    much is left out in between."""
    left, half = len(text) - most, most // 2
    return text if left <= 0 else f"{text[:half]} […{left:,} characters are left out…] {text[-half:]}"


def foreign(error: BaseException) -> BaseException | None:
    """Return the first of an error and its causes that is not ours to explain; None where
    all are."""
    link: BaseException | None = error
    while isinstance(link, TidemillError):
        link = link.__cause__
    return link


def place(error: BaseException | None, counts: Callable[[str], bool] = bool) -> str:
    """Return " (FILE, line N, in FUNCTION)" of where `error` was raised, or of the last
    of the files that count which led there; "" where there is none."""
    raised = None if error is None else error.__traceback__
    frames = [frame for frame in traceback.extract_tb(raised) if counts(frame.filename)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""


@contextmanager
def no_exits() -> Iterator[None]:
    """Raise `EnvironmentFault` in place of a `SystemExit`, which would end the caller's
    program as if that was what it wanted: not of one that a signal handler raised."""
    try:
        yield
    except SystemExit as error:
        handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
        if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise
        raise EnvironmentFault(
            f"sys.exit({error.code!r}) was called by the environment, or another part of the experiment"
            f"{place(error)}"
        ) from error


def returned(found: Any, kind: type[T], by: Callable[..., Any]) -> T:
    """Return what was `found` by a call of a part that may be a user's own. Raises
    `ConfigError` unless it is a `kind`."""
    if not isinstance(found, kind):
        raise ConfigError(
            f"{by.__qualname__}() returned {found!r:.200}; it must return an instance of {kind.__name__}"
        )
    return found


def did_you_mean(value: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the nearest known name, or all of them. For
    what Stable-Baselines3 has by another name it is ours.

    >>> did_you_mean("leraning_rate", ["learning_rate", "epochs"])
    'did you mean "learning_rate"?'
    >>> did_you_mean("n_epochs", ["learning_rate", "epochs"])
    'did you mean "epochs"?'
    """
    names, ours = sorted(known), FOREIGN_NAMES.get(value, ())
    for name in ours:
        if name in names:
            return f'did you mean "{name}"?'
    if value in WITHOUT_NAMES and value not in names:
        return f"{WITHOUT_NAMES[value]}: docs/rl-zoo.md"
    if ours:
        return f'it is called "{ours[0]}" here, and stands elsewhere: docs/rl-zoo.md'
    near = get_close_matches(value, names, n=1)
    if near:
        return f'did you mean "{near[0]}"?'
    return f"known: {', '.join(names) or 'none'}"
