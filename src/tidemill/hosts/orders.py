"""What the runner orders of a host's agent, and what the agent reports: typed msgpack,
nothing else is understood. It goes in `Words`, which come once and in order.

Down: `Listen`, `CallHost`, `Measure`, `Work`, `RunEnds`, `Part`, `Revive`, `Vacate`,
`HoldAgent`, `IntroduceAgent`, `LetGo`, `ForgetAgent`, `KnownVersions`, `VersionPart`,
`Speak`, `Ask`, `LeaveRun`, `Close`. Up: `Here`, `Listening`, `Called`, `HungUp`,
`ProbeAnswer`, `Launched`, `Parted`, `WantVersion`, `Vacated`, `AgentKey`, `AgentEnded`,
`Speak`, `Logged`, `Traffic`, `WorkerGone`, `Whereabouts`, `Leaving`, `Closed`.
"""

from typing import TypeVar

import msgspec

from tidemill.api.launcher import HostKind, ProbeAnswer
from tidemill.core.errors import SchemaError
from tidemill.core.thread_stacks import Call

T = TypeVar("T")
Ports = tuple[int, int]
"""Of a host's two connections to another: control, and data."""
EdgeFlow = tuple[int, str, int, float]
"""The number of an edge, the host to which it leads, the bytes that were sent there, and
for how many seconds something of it was under way."""


class Introduction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an agent is told before it is joined to the runner, as JSON on its standard
    input: who it is, and how it calls the runner, which waits for its key.

    host: the agent's name
    address: by which other hosts reach it
    runner: the runner's name
    runner_address, ports, key: where the runner waits, and its public key
    examined: there is no run, the host is looked over (`launchers/examination.py`)
    seen: path of a file in the run's folder by which a host knows that it sees that; "":
        there is none
    """

    host: str
    address: str
    runner: str
    runner_address: str
    ports: Ports
    key: str
    examined: bool = False
    seen: str = ""


class Here(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The first report of an agent: what its host has.

    kind: of what costs depend on, its cores among it
    versions: of what results depend on, by name
    gpus: how many a process may use
    sees: whether it sees the run's folder, where it was introduced with a file there
    """

    kind: HostKind
    versions: dict[str, str]
    gpus: int = 0
    sees: bool = False


class Listen(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to wait for agent `agent`, which has this public key."""

    agent: str
    key: str


class Listening(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The report that an agent is waited for at these ports, or why it cannot be. `full`:
    since no more files may be open there, so that it can be for no agent."""

    agent: str
    ports: Ports = (0, 0)
    error: str = ""
    full: bool = False


class CallHost(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to call agent `agent`, which waits there."""

    agent: str
    address: str
    ports: Ports
    key: str


class Called(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The report that agent `agent` has answered a call, or why it has not. `own`: that
    lies with who was to call."""

    agent: str
    error: str = ""
    own: bool = False


class HungUp(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The report that nothing is said to agent `agent` any more, and why: what came of it
    was no message, or none that fits, or what it is to be told, by this one's `own`
    fault, cannot be said."""

    agent: str
    why: str
    own: bool = False


class SentExperiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An experiment as hosts are sent it.

    experiment: JSON, in which files are named by their whole paths
    source, files: see `Job`
    path: where the runner looks for modules
    code: the user's own files by their paths, for a host that does not have them
    """

    experiment: str
    source: str | None
    files: dict[str, str]
    path: list[str]
    code: dict[str, bytes]


class Measure(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to measure what an experiment's parts cost, in so many seconds at most.
    What comes of it is reported (`ProbeAnswer`)."""

    sent: SentExperiment
    seconds: float


class Work(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to start the workers of a host's share. The rest is of `Job`.

    host: whose share it is
    agents: who has the shares of the other hosts, of those that are there
    lives: how often workers had died before, of those that have
    places: the host of each worker, by its name
    seen: a file in the run's folder, by which a host knows that it sees the same one; ""
        where there is no folder
    """

    host: str
    agents: dict[str, str]
    lives: dict[str, int]
    sent: SentExperiment
    places: dict[str, str]
    folder: str | None
    epoch: int
    resume: str | None
    seen: str
    gpus: dict[str, int]


class Launched(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The report that the workers were started, or why not. `draws`: some of them draw
    versions, and do not see the run's folder."""

    error: str = ""
    draws: bool = False


class KnownVersions(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to have this as the index of the run's parameter database: SQLite's
    file."""

    index: bytes


class WantVersion(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The report that the file of a version is wanted, from byte `start` on."""

    policy: str
    version: int
    start: int


class VersionPart(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to take a part of the file that was wanted, b"" of one that is gone.
    `whole`: bytes of all of it."""

    policy: str
    version: int
    data: bytes
    whole: int


class Speak(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A message of the control link of a worker's life, in either direction."""

    worker: str
    life: int
    message: bytes


class Revive(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to begin the next life of those of `workers` that live here, and to have
    what any of them writes carried anew.

    moved: who has the shares of hosts now that were lost
    """

    workers: list[str]
    moved: dict[str, str] = {}


class RunEnds(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The word that the run is to end, or is not any more."""

    ends: bool


class Part(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to have no more to do with the agent that has a host's share: it is
    lost."""

    host: str


class Parted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The report that this is so, and what has come of that host's samples (see
    `Crossing.came`)."""

    host: str
    came: list[tuple[int, int, int, int]]


class Vacate(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to end the workers: they were taken for dead, and another agent gets
    their share."""


class Vacated(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The report that the agent has no share any more, and may hold other agents.

    sent: see `Crossing.sent`
    unsent: number of its last life, from 1, and env steps that it had begun samples with,
        of each worker, as far as it had told
    """

    sent: list[tuple[int, int, int]] = []
    unsent: dict[str, tuple[int, int]] = {}


class HoldAgent(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to start another agent beside this one."""

    agent: str


class AgentKey(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The report that an agent was started, and its public key, or why not."""

    agent: str
    key: str = ""
    error: str = ""


class IntroduceAgent(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to hand a held agent its `Introduction`, as JSON."""

    agent: str
    introduction: bytes


class LetGo(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to end a held agent."""

    agent: str


class ForgetAgent(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to know an agent no more, which is gone."""

    agent: str


class AgentEnded(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The report of how a held agent has ended."""

    agent: str
    how: str


class Logged(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The report of what workers have written into a log, on a host that does not see the
    run's folder.

    log: the file's name
    """

    log: str
    text: bytes


class Noticed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The report of what the user is to be told of the host's workers."""

    text: str


class Traffic(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The report of bytes of data that the host has sent to others and received of them,
    and of messages that it has said besides.

    edges: what has gone over each edge that leads to another host
    at: second of the host's own clock at which that was so
    unheard: what is known of others of which nothing has been heard for a long time
    """

    sent: int = 0
    received: int = 0
    said: int = 0
    edges: list[EdgeFlow] = []
    at: float = 0.0
    unheard: dict[str, str] = {}


class WorkerGone(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The report that a worker's link is gone, and how this life of it ended."""

    worker: str
    life: int
    obituary: str


class Ask(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to say in what condition a worker is and, with `stack`, where its thread
    is, for which the worker is interrupted."""

    number: int
    worker: str
    stack: bool


class Whereabouts(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The report upon an `Ask` of this number.

    calls: those that the thread is in, the innermost first
    """

    number: int
    calls: list[Call]
    condition: str


class LeaveRun(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to leave the run as upon SIGTERM: the host whose share the agent has is
    back."""


class Close(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The order to end what still lives within so many seconds, and itself."""

    seconds: float


class Leaving(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The report of an agent that is to leave the run (SIGTERM, `LeaveRun`): its workers
    have paused, and what they had sent is there, unless that took too long. `sent`: see
    `Crossing.sent`."""

    sent: list[tuple[int, int, int]] = []


class Closed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The last report of an agent: nothing of the run is left on its host."""


Order = (
    Listen
    | CallHost
    | Measure
    | Work
    | RunEnds
    | Part
    | Revive
    | Vacate
    | HoldAgent
    | IntroduceAgent
    | LetGo
    | ForgetAgent
    | KnownVersions
    | VersionPart
    | Speak
    | Ask
    | LeaveRun
    | Close
)
Report = (
    Here
    | Listening
    | Called
    | HungUp
    | ProbeAnswer
    | Launched
    | Parted
    | WantVersion
    | Vacated
    | AgentKey
    | AgentEnded
    | Speak
    | Logged
    | Noticed
    | Traffic
    | WorkerGone
    | Whereabouts
    | Leaving
    | Closed
)

_encoder = msgspec.msgpack.Encoder()
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def pack(message: Order | Report) -> bytes:
    """Return the message as bytes."""
    return _encoder.encode(message)


def unpack_order(data: bytes) -> Order:
    """Return what the runner orders. Raises `SchemaError` for anything else."""
    return _unpack(_orders, data)


def unpack_report(data: bytes) -> Report:
    """Return what an agent reports. Raises `SchemaError` for anything else."""
    return _unpack(_reports, data)


def _unpack(decoder: "msgspec.msgpack.Decoder[T]", data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SchemaError(f"{len(data)} bytes that a host told cannot be read: {error}") from None
