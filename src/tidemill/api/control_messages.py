"""Messages of the control link between the runner and one worker: typed msgpack, nothing
else is understood.

Down: `Configure`, `TryAgain`, `Start`, `Pause`, `Finish`, `Hold`, `Exit`, `Hurry`,
`Save`, `EnterStage`, `Adopt`, `ChangeSettings`, `Renew`, `AnsweredBy`, `Stay`, `Rejoin`,
`LookAtMemory`. Up: `Status`, `WorkerStatistics`, `Episodes`, `Measured`,
`EnvironmentStatistics`, `RoundOver`, `Relay`, `SaveDue`, `Holding`, `Saving`, `Saved`,
`Staying`, `Voided`, `MemoryGrown`, `Notice`.
"""

import enum
from typing import Any

import msgspec

from tidemill.api.spaces import Spaces
from tidemill.api.transport import Handle
from tidemill.core.errors import SchemaError
from tidemill.core.memory import Need
from tidemill.core.tally import TallyEntry


class State(enum.StrEnum):
    """The states of a worker: CONFIGURING → READY → RUNNING ⇄ PAUSED → COMPLETED |
    FAILED."""

    CONFIGURING = "configuring"
    READY = "ready"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"


ENDED = frozenset({State.COMPLETED, State.FAILED})
LONGEST_GROWN = 1_000  # characters of `MemoryGrown.text` that are told


class SampleFacts(msgspec.Struct, frozen=True):
    """What the consumer of a sample stream must know of its samples. `mode` and `padded`
    are the agent spec's. A producer fills `at_once` samples at a time at each of its
    outlets: one of all seats, or one of each seat."""

    seats_per_lane: int
    burn_in: int
    bootstrap: int
    mode: str = "fixed"
    padded: bool = False
    at_once: int = 1

    @property
    def cut(self) -> bool:
        """True when a sample ends with its final row, whatever its slot holds behind
        that."""
        return self.mode == "full" and not self.padded


class Facts(msgspec.Struct, frozen=True):
    """Facts are what only the owners of environments know and the other workers need:
    spaces by policy name, the shape of samples by sample stream. Besides they tell, of
    any worker, the memory that it is going to fill and has not filled yet.

    Building an environment in the main process would cost its import and its memory
    there: so the owners of environments are configured first and answer READY with these,
    and the others are configured with them.
    """

    spaces: dict[str, Spaces] = {}
    samples: dict[str, SampleFacts] = {}
    memory: tuple[Need, ...] = ()


class Configure(msgspec.Struct, frozen=True, tag=True):
    """The message tells a worker to become READY. `facts` is empty for workers that own
    environments: they answer with it."""

    facts: Facts = Facts()


class Start(msgspec.Struct, frozen=True, tag=True):
    """The message tells a worker to run, or to run again after a pause."""


class TryAgain(msgspec.Struct, frozen=True, tag=True):
    """The message tells a worker that is not READY yet whether to try again what it
    connects to, where that is away: not (`on` False) while the run is paused."""

    on: bool = True


class Pause(msgspec.Struct, frozen=True, tag=True):
    """The message tells a worker to stop polling and keep everything."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The message tells an actor to begin no sample any more, and to pause once those are
    sent that it has begun: its host leaves the run. `Start` and `Pause` hold as ever."""


class Hold(msgspec.Struct, frozen=True, tag=True):
    """The message tells a worker to stay as it is, between two polls, and answer
    `Holding`, so that the run may be cut; or (`on` False) to go on as if nothing had
    been. Equal trainers do so between two updates. `cut` is the number of the cut that is
    to be made, or of the one that comes next: parts are kept by it."""

    on: bool = True
    cut: int = 0


class Exit(msgspec.Struct, frozen=True, tag=True):
    """The message tells a worker to finish; a trainer saves a final checkpoint first."""

    reason: str = ""


class Hurry(msgspec.Struct, frozen=True, tag=True):
    """The message tells a trainer that the run is about to be broken off: an update that
    is under way ends with the steps that it has done, so that none before it is lost;
    equal trainers undo it. An actor, where all take turns in one thread, ends its turns
    sooner from then on."""


class Save(msgspec.Struct, frozen=True, tag=True):
    """The message tells a trainer to write a checkpoint now; another worker, of a run
    that resumes exactly, to write its part of the cut that goes with these `checkpoints`:
    by policy, after how many updates. Whoever is held answers `Holding` then."""

    checkpoints: dict[str, int] = {}


class EnterStage(msgspec.Struct, frozen=True, tag=True):
    """The message says that the curriculum is at this stage (from 0) now. Environments
    read its options at their next resets; what was measured before belongs to another
    stage. `round`: the stage holds once the worker has done so many rounds (see
    `tidemill.workers.stages`); None: from now on."""

    stage: int
    options: dict[str, Any] = {}
    round: int | None = None


class Adopt(msgspec.Struct, frozen=True, tag=True):
    """The message tells a trainer to go on from this version of policy `source` in the
    parameter database, with these settings of its algorithm and a new optimiser.

    The version is loaded between two updates and published at once, as one version more;
    samples of versions before it are dropped (`Buffer.least`).
    """

    source: str
    version: int
    settings: dict[str, float] = {}


class ChangeSettings(msgspec.Struct, frozen=True, tag=True):
    """A trainer goes on with these settings of its algorithm (see
    `AlgorithmConfig.changeable`); equal trainers from one and the same update on.
    `number` grows with each change of the run: a later life of a trainer, which is told
    all of them again, leaves out those that its checkpoint knows."""

    settings: dict[str, float | None]
    number: int


class Renew(msgspec.Struct, frozen=True, tag=True):
    """The message says that whoever writes these edges has died, and how this worker
    reaches what its new life writes. The descriptors that the handles name come with the
    message, in the same order."""

    edges: dict[str, Handle]


class AnsweredBy(msgspec.Struct, frozen=True, tag=True):
    """The message tells who asks for a policy on an inference stream, and `server`, that
    this one answers from now on, over their spare edges: whoever did before has no life
    left. What that has not answered is asked again."""

    stream: str
    asker: str
    policy: str
    server: str


class Stay(msgspec.Struct, frozen=True, tag=True):
    """The message tells a trainer that equal ones have died, those that are `lost`: it
    ends an update that all have brought their parts to, undoes one that they have not,
    and stays as it is until their next lives (`Rejoin`). It answers `Staying`. `save`:
    it writes a checkpoint of then first, which the next lives go on from. The answer has
    the same `number`."""

    number: int
    lost: tuple[str, ...]
    save: bool = False


class Rejoin(msgspec.Struct, frozen=True, tag=True):
    """The message tells equal trainers that all of them live again, and one that is about
    to be configured with whom it will be.

    number: of their sums from now on; parts of earlier ones are none any more
    first: the version of no updates
    least: the oldest version that one of a new life trains on: samples of before may
        have been trained on in its last life
    """

    number: int
    first: int
    least: int


class LookAtMemory(msgspec.Struct, frozen=True, tag=True):
    """The message tells the worker to look at the objects of its process, which is
    suspected to grow, and, once it has grown by so many bytes, to answer (`MemoryGrown`)
    what has since it was told so first."""

    grown: int = 0


class Status(msgspec.Struct, frozen=True, tag=True):
    """The message says that the worker's state has changed. `error` is one message for
    the user and `details` the traceback, when it failed; `waited` the seconds that it had
    waited for others, where it failed for that."""

    state: State
    facts: Facts = Facts()
    error: str = ""
    details: str = ""
    reason: str = ""
    waited: float = 0.0


class WorkerStatistics(msgspec.Struct, frozen=True, tag=True):
    """The message holds numbers of the worker: `values` by metric name; `time` has what
    depends on the clock (rates, shares by place of `Clock`), so that the rest is equal in
    equal runs. `polls` counts the turns of the poll loop, the heartbeat; `progress` what
    the worker has done, in units of its own: it stands still while that only waits;
    `unsent` the env steps that it has begun samples with, and that nobody has yet;
    `unfilled` the bytes of its needs that are still to be filled, but for shared ones.
    While what its environment needs is away, `away` says so, and how that failed last,
    and `pauses` that a pause is made before it is tried again, or that the try lasts no
    longer than it may. `due`, of a worker for which nobody waits, is what it lacks of
    versions, by policy: the name of what is to be recorded of them, "" where they are to
    come. A trainer sends one per update with `update` set."""

    polls: int
    values: dict[str, float] = {}
    time: dict[str, float] = {}
    update: bool = False
    progress: int = 0
    unsent: int = 0
    unfilled: int = 0
    away: str = ""
    pauses: bool = False
    due: dict[str, str] = {}


class Episodes(msgspec.Struct, frozen=True, tag=True):
    """The message tells of episodes that ended since the last one: of each its
    undiscounted return and number of actions. `spec` is the agent spec's index (see
    `WorkerConfig.plays`), `stage` that of the curriculum in which they began, `infos` the
    numbers of each one's last info, [] where no info had any."""

    spec: int
    stage: int
    returns: list[float]
    lengths: list[int]
    infos: list[dict[str, float]] = []


class Measured(msgspec.Struct, frozen=True, tag=True):
    """The message holds a complete measurement, by metric name (see
    `WorkerConfig.measures`). It is of the weights that `step` env steps have trained, in
    this stage of the curriculum."""

    step: int
    stage: int
    values: dict[str, float]


class EnvironmentStatistics(msgspec.Struct, frozen=True, tag=True):
    """The message holds what environments measured by themselves since the last one (see
    `Environment.statistics`)."""

    values: dict[str, TallyEntry]


class RoundOver(msgspec.Struct, frozen=True, tag=True):
    """The message says that the worker has done its part of round `number` (see
    `tidemill.workers.stages`), and has told all of it; `updates`: how many a trainer has
    finished by then."""

    number: int
    updates: int = 0


class Relay(msgspec.Struct, frozen=True, tag=True):
    """The message asks the runner to hand another one to the trainer of `policy`."""

    policy: str
    message: Adopt


class SaveDue(msgspec.Struct, frozen=True, tag=True):
    """The message says that it is time for a checkpoint of a run that resumes exactly,
    which must be cut for that."""


class Holding(msgspec.Struct, frozen=True, tag=True):
    """The message says that the worker is held for the cut of this number, and has done
    what it was told before."""

    cut: int


class Saving(msgspec.Struct, frozen=True, tag=True):
    """The message says that a trainer writes the checkpoint of `policy` after so many
    `updates` from now on, and is silent until that is there."""

    policy: str
    updates: int


class Saved(msgspec.Struct, frozen=True, tag=True):
    """The message says that the checkpoint of `policy` after so many `updates` and env
    `steps` is on the disk."""

    policy: str
    updates: int
    steps: int


class Staying(msgspec.Struct, frozen=True, tag=True):
    """The message answers the `Stay` of that `number`: the trainer stays as it is after
    so many `updates`. `saved`: whether it has written the checkpoint of now; None: it was
    not told to."""

    number: int
    updates: int
    saved: bool | None = None


class Voided(msgspec.Struct, frozen=True, tag=True):
    """The message says that so many `samples` are void, which the life of the worker
    before this one may have sent on as it died, or not: they do not come twice."""

    samples: int


class MemoryGrown(msgspec.Struct, frozen=True, tag=True):
    """The message says what has grown in the worker's process, in words."""

    text: str


class Notice(msgspec.Struct, frozen=True, tag=True):
    """The message is a text that the user should read although the run goes on. `steps`:
    env steps that what it tells has cost."""

    text: str
    steps: int = 0


_Orders = (
    Configure | Start | Pause | Finish | Hold | Exit | Hurry | Save | EnterStage | Adopt | ChangeSettings
)
Down = _Orders | TryAgain | Renew | AnsweredBy | Stay | Rejoin | LookAtMemory
_Told = Status | WorkerStatistics | Episodes | Measured | EnvironmentStatistics | RoundOver | Relay | Notice
Up = _Told | SaveDue | Holding | Saving | Saved | Staying | Voided | MemoryGrown


def _plain(value: Any) -> float:
    """Return a number of numpy's or torch's as Python's."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise SchemaError(f"{value!r:.200} was to be reported, which is no number") from None


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_down: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)
_up: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)


def pack(message: Down | Up) -> bytes:
    """Return the message as bytes, with "?" in its texts for what UTF-8 cannot say: names
    of files may hold such, and errors tell them."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        fields = {name: getattr(message, name) for name in message.__struct_fields__}
        texts = {
            name: text.encode("utf-8", "replace").decode()
            for name, text in fields.items()
            if isinstance(text, str)
        }
        return _encoder.encode(msgspec.structs.replace(message, **texts))


def unpack_down(data: bytes) -> Down:
    """Return the message to a worker. Raises `SchemaError` for anything else."""
    try:
        return _down.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SchemaError(f"a control message to a worker cannot be read: {error}") from None


def unpack_up(data: bytes, worker: str = "a worker") -> Up:
    """Return the message from `worker`. Raises `SchemaError` for anything else."""
    try:
        return _up.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SchemaError(f"a control message from {worker} cannot be read: {error}") from None
