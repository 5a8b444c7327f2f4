"""An agent, the share of a host that one has, and the links of its workers, as the runner
knows them."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tidemill.api.launcher import ProbeAnswer
from tidemill.api.transport import Link
from tidemill.hosts.orders import (
    AgentKey,
    Called,
    Here,
    Launched,
    Listening,
    Order,
    Speak,
    Traffic,
    WantVersion,
    Whereabouts,
)
from tidemill.hosts.peer import Peer
from tidemill.launchers.engine import StartedAgent


@dataclass
class KnownAgent:
    """An agent, as the runner knows it.

    name: the wire's name for it
    home: the host that it is on
    holder: the agent that holds it, or the runner; None: the engine
    here: what its host has, once it has told
    share: the host whose share it has, "" for none
    listening, called: what it has told of agents that it waits for, and that it was to
        call, by name
    leaves: why it was told to leave, "" as long as it was not
    lost: why it is given up, "" as long as it is not
    held: what it has told of agents that it is asked to hold, by name
    how: how it ended, of one that another agent holds
    logged: bytes of each log that it has told
    noticed: how many notices it has told
    traffic: what it has told other hosts and heard of them
    unheard, unheard_at: others that it does not hear, as the user was told, and when
    wanted: what it wants of the parameter database and has not been sent
    measured: what came of the last measurement there, None as long as that goes on
    """

    name: str
    home: str
    holder: str | None
    started: StartedAgent
    peer: Peer
    here: Here | None = None
    share: str = ""
    listening: dict[str, Listening] = field(default_factory=dict)
    called: dict[str, Called] = field(default_factory=dict)
    leaves: str = ""
    answer: Whereabouts | None = None
    launched: Launched | None = None
    closed: bool = False
    lost: str = ""
    held: dict[str, AgentKey | None] = field(default_factory=dict)
    how: str = ""
    logged: dict[str, int] = field(default_factory=dict)
    noticed: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    unheard: Mapping[str, str] = field(default_factory=dict)
    unheard_at: float = float("-inf")
    wanted: WantVersion | None = None
    measured: ProbeAnswer | None = None


class HostLink(Link):
    """The runner's end of the control link of a life of a worker on another host. `tell`:
    tells the host's agent an order."""

    def __init__(self, worker: str, tell: Callable[[Order], None], life: int) -> None:
        self.worker, self.life, self._tell = worker, life, tell
        self.messages = deque[bytes]()
        self.gone = False

    def send(self, message: bytes) -> bool:
        if not self.gone:
            self._tell(Speak(self.worker, self.life, message))
        return not self.gone

    def receive(self) -> list[bytes] | None:
        messages = list(self.messages)
        self.messages.clear()
        return None if self.gone and not messages else messages


@dataclass
class Share:
    """The share of a host in the run's workers.

    agent: who has it; None once that is lost
    given: whether the agent was ordered to start the workers
    lost: why its workers had to live again, the last time
    moves: whether that was in order: its host was told to leave, or is back
    refused: holders whose agents could not start its workers
    links: of its workers, by name
    obituaries: how its workers ended
    """

    host: str
    agent: KnownAgent | None
    given: bool = False
    lost: str = ""
    moves: bool = False
    refused: set[str] = field(default_factory=set)
    links: dict[str, HostLink] = field(default_factory=dict)
    obituaries: dict[str, str] = field(default_factory=dict)
