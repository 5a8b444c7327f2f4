"""The process that speaks to Ray for a run: Ray's own driver, apart from the runner, so
that what ends the one (a cluster that is gone) does not end the other.

On standard input come lines of JSON: a `Wanted` first, then an `Introduce` for each
agent; on standard output go a `Failed`, or a `Brought`, an `Ended` for each agent that
ends, and a `Back` for each host that has another one then. With the end of its input all
is ended that it has begun. Nothing is handed to Ray but a class of ours (`AgentHolder`)
and plain text.
"""

import contextlib
import ipaddress
import logging
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from tidemill.core.user_code_loading import environment_of_ours
from tidemill.launchers.engine import AGENT, LEFT, RUNNER, how_it_ended

_REACH_S = 5.0  # seconds that Ray's address has to answer
PLACE_S = 30.0
"""Seconds that Ray has to give the run its hosts."""
_KEY_S = 60.0  # seconds that an agent has to tell its key
_END_S = 3.0  # seconds that an agent has to end
_LOOK_S = 0.5  # seconds between two looks whether an agent has ended
_AGAIN_S = 3.0  # seconds between two attempts to start one anew
_LEFT_S = 60.0  # and after one has left: what drains (a pod has 30 s) is gone by then
_TAIL = 2000  # characters of what Ray says that are shown
_ASKS_S = 60.0  # seconds that a process has to find out whether a Ray asks for a token
_ANYONE = """
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1])
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


class Wanted(msgspec.Struct, frozen=True):
    """What a run wants of Ray.

    address: of its head, host:port; "" for what RAY_ADDRESS says, or else the Ray of this
        machine
    hosts: how many hosts, the runner's included where it has cores; None: all
    insecure: whether a Ray without authentication may have an address of the internet
    """

    address: str
    hosts: int | None
    insecure: bool


class BroughtHost(msgspec.Struct, frozen=True):
    """A host that Ray has given, its agent's key, and its `own_version`."""

    address: str
    cores: int
    key: str
    gpus: int = 0
    version: str = ""


class Brought(msgspec.Struct, frozen=True, tag=True):
    """What Ray has given: the runner's own host, and the others by name. `alone`: no Ray
    was found, and nobody has named one."""

    address: str
    cores: int | None
    hosts: dict[str, BroughtHost]
    alone: bool = False
    gpus: int | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Why Ray gives no hosts."""

    why: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """How an agent has ended."""

    host: str
    how: str


class Back(msgspec.Struct, frozen=True, tag=True):
    """A host whose agent had ended has another one: on the same node or, where that is
    gone, on one that Ray has given in its place."""

    name: str
    host: BroughtHost


class Introduce(msgspec.Struct, frozen=True):
    """A line for an agent."""

    host: str
    line: str


class AgentHolder:
    """A Ray actor that holds the agent of its host: it starts it, hands it what it is
    told, and ends it; an agent ends with its holder, as its standard input does. Where it
    has ended, the holder starts another one when it is asked to; a holder that has ended
    begins anew."""

    def __init__(self, name: str) -> None:
        self._name = name

    def start(self) -> tuple[str, str, str]:
        """Start the agent; return this host's address, its node's id, and the first line
        that the agent tells, "" where it has ended."""
        import ray
        from ray.util import get_node_ip_address

        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (for as long as the agent lives)
        self._agent = subprocess.Popen(
            [sys.executable, *AGENT, self._name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment_of_ours(),
            start_new_session=True,
        )
        assert self._agent.stdout is not None
        address = str(get_node_ip_address())  # type: ignore[no-untyped-call]
        node = ray.get_runtime_context().get_node_id()
        return address, node, self._agent.stdout.readline(1 << 12).decode()

    def introduce(self, line: str) -> None:
        """Tell the agent who it is."""
        assert self._agent.stdin is not None
        with contextlib.suppress(OSError):  # it died, and `ended` says so
            self._agent.stdin.write(line.encode() + b"\n")
            self._agent.stdin.flush()

    def ended(self) -> tuple[int, str]:
        """Wait until the agent ends; return its status, and how it has."""
        code = self._agent.wait()
        self._log.seek(0)
        return code, how_it_ended(code, self._log.read())

    def end(self) -> None:
        """End the agent."""
        assert self._agent.stdin is not None
        with contextlib.suppress(OSError):
            self._agent.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._agent.wait(_END_S)
        self._agent.kill()


class NoHosts(Exception):
    """Ray gives no hosts: the reason, for the user."""


def check_address(address: str, insecure: bool) -> None:
    """Raise `NoHosts` for an address at which no Ray can be, or none that is safe."""
    if "://" in address:
        raise NoHosts(
            f"{address} is for clients outside of a cluster, and a runner is a process of the cluster: start "
            "it there, with `ray job submit -- tidemill train … --launch ray`, and name HOST:PORT if anything"
        )
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise NoHosts(f"{address} is no address of a Ray: write HOST:PORT, as `ray start --head` tells it")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _REACH_S) as connection:
            found = ipaddress.ip_address(connection.getpeername()[0])
    except OSError as error:
        raise NoHosts(
            f"nobody answers at {address} ({error.strerror or error}); is Ray up there (`ray start --head`), "
            "and its port open?"
        ) from None
    check_reach(found, address, insecure, address)


def check_reach(
    found: ipaddress.IPv4Address | ipaddress.IPv6Address, where: str, insecure: bool, address: str
) -> None:
    """Raise `NoHosts` where whoever likes may reach the Ray at `address`, one host of
    which is at `where`, and is let in: it asks nobody for a token."""
    if found.is_global and not insecure and asks_for_token(address) is not True:
        raise NoHosts(
            f"{where} is an address of the internet, and whoever reaches a Ray without authentication runs "
            "code on its hosts: start it with RAY_AUTH_MODE=token, and set that here, or say --insecure"
        )


@cache
def asks_for_token(address: str) -> bool | None:
    """Return whether the Ray there asks for a token, by trying to be let in without one;
    None where that cannot be found out."""
    without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    with contextlib.suppress(subprocess.TimeoutExpired):
        tried = subprocess.run(
            [sys.executable, "-c", _ANYONE, address],
            env={**without, "RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=_ASKS_S,
        )
        return "AuthenticationError: " in tried.stderr or (None if tried.returncode else False)
    return None


def named(address: str) -> str:
    """Return the address of Ray's head that the user has named, here or by RAY_ADDRESS;
    "" for none, as for Ray's own word for that."""
    found = address or os.environ.get("RAY_ADDRESS", "")
    return "" if found == "auto" else found


def ray_here() -> str:
    """Return the address of the Ray that this machine is of, "" where none answers."""
    from ray._private.services import canonicalize_bootstrap_address

    with contextlib.suppress(OSError):  # there is none, or one that has ended is still written down
        if (address := canonicalize_bootstrap_address("auto")) is not None:
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
            return str(address)
    return ""


def token_file() -> Path:
    """Return the file in which Ray looks for a token where RAY_AUTH_TOKEN has none."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def check_token(address: str) -> None:
    """Raise `NoHosts` where there is no token here that is to be shown, of which Ray
    would die, where Ray says that it does not know it (`ray.init` would ask it anew for
    25 s), or where who answers is no Ray."""
    asked, given = os.environ.get("RAY_AUTH_MODE") == "token", os.environ.get("RAY_AUTH_TOKEN")
    if asked and not given and not token_file().is_file():
        raise NoHosts(
            f"RAY_AUTH_MODE=token, and there is no token to show to {address}: neither RAY_AUTH_TOKEN nor "
            f"{token_file()}; copy that of Ray's head there, mode 0600"
        )
    import ray

    with contextlib.suppress(ImportError):  # it is not among the names that Ray promises
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        try:
            GcsClient(address=address)
        except ray.exceptions.RayError as error:
            said = str(error).partition(". ")[0]
            if type(error).__name__ == "AuthenticationError":
                raise NoHosts(
                    f"the Ray at {address} does not let us in: {said}; is its token the one here "
                    "(RAY_AUTH_MODE=token with RAY_AUTH_TOKEN, or ~/.ray/auth_token)?"
                ) from None
            raise _no_ray(address, said) from None


def _no_ray(address: str, said: object) -> NoHosts:
    return NoHosts(
        f"whoever answers at {address} is no Ray, or one that is not well: {said}; name the port that `ray "
        "start --head` tells (6379, if no other is given), or see there by `ray status`"
    )


def chosen(nodes: Sequence[dict[str, Any]], own: str, hosts: int | None) -> list[dict[str, Any]]:
    """Return the other nodes that a run takes, of all that Ray knows: the largest.
    Raises `NoHosts` where there are not so many. `own`: id of the runner's."""
    alive = [node for node in nodes if node["Alive"]]
    others = [node for node in alive if node["NodeID"] != own and cpus(node) >= 1]
    others.sort(key=cpus, reverse=True)
    works = sum(cpus(node) >= 1 for node in alive if node["NodeID"] == own)
    if hosts is None:
        return others
    if not 1 <= hosts <= len(others) + works:
        raise NoHosts(
            f"--hosts {hosts}: the cluster has {len(others) + works} that have cores for workers "
            f"({', '.join(sorted(node['NodeManagerHostname'] for node in alive))})"
        )
    return others[: hosts - works]


def cpus(node: dict[str, Any]) -> int:
    """Return how many cores a node of Ray has."""
    return int(node["Resources"].get("CPU", 0))


def gpus(node: dict[str, Any]) -> int:
    """Return how many GPUs a node of Ray has."""
    return int(node["Resources"].get("GPU", 0))


class RayHosts:
    """The hosts that Ray gives to a run."""

    def __init__(self) -> None:
        self._ray: Any = None  # imported once the address can be one
        self._group: Any = None
        self._holders: dict[str, Any] = {}
        self._waiting: dict[Any, str] = {}  # for the ends of agents
        self._nodes: dict[str, dict[str, Any]] = {}
        self._away: dict[str, float] = {}  # hosts without an agent, and when to try again
        self._starting: dict[Any, str] = {}

    def bring(self, wanted: Wanted) -> Brought:
        """Join Ray, and have it give the hosts. Raises `NoHosts`, and what Ray does."""
        if address := named(wanted.address):
            check_address(address, wanted.insecure)
        import ray

        self._ray = ray
        if not address and not (address := ray_here()):
            if wanted.hosts not in (None, 1):
                raise NoHosts(
                    f"--hosts {wanted.hosts}: there is no Ray here; start one (`ray start --head`, and `ray "
                    "start --address=HOST:PORT` on each other host), or name its head: --ray-address, "
                    "RAY_ADDRESS"
                )
            return Brought("127.0.0.1", None, {}, alone=True)
        check_token(address)
        own = f"tidemill-{os.getpid()}"
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, namespace=own)
        except ConnectionError as error:
            raise _no_ray(address, error) from None
        return self._give(wanted, address)

    def _give(self, wanted: Wanted, address: str) -> Brought:
        """Have Ray give the hosts, and start an agent on each."""
        ray = self._ray
        nodes = ray.nodes()
        own_id = ray.get_runtime_context().get_node_id()
        own = next(node for node in nodes if node["NodeID"] == own_id)
        others = chosen(nodes, own_id, wanted.hosts)
        for node in (own, *others):  # also where Ray was found by itself, or is called by a loopback
            where = node["NodeManagerAddress"]
            check_reach(ipaddress.ip_address(where), where, wanted.insecure, address)
        self._place(own, others)
        return Brought(own["NodeManagerAddress"], cpus(own), self._start(), gpus=gpus(own))

    def _place(self, own: dict[str, Any], others: Sequence[dict[str, Any]]) -> None:
        """Have Ray keep the hosts for this run: a bundle each, of which the first is the
        runner's own."""
        from ray.util.placement_group import placement_group

        # the first stays at the runner's, which may have no core for it to name
        bundles = [{**needs(own), f"node:{own['NodeManagerAddress']}": 0.001}, *map(needs, others)]
        labels = [{"ray.io/node-id": own["NodeID"]}, *({} for _ in others)]
        self._group = placement_group(bundles, strategy="STRICT_SPREAD", bundle_label_selector=labels)
        if not self._group.wait(PLACE_S):
            raise NoHosts(
                f"Ray did not give {len(bundles)} whole hosts within {PLACE_S:.0f} s: others use some of "
                "their cores (`ray status` says how many), or one is gone and Ray has not noticed yet; wait, "
                "or name fewer with --hosts"
            )

    def _start(self) -> dict[str, BroughtHost]:
        """Start an agent on each host that was given; return them by name."""
        from ray.util import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray = self._ray
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        table = placement_group_table(self._group)["bundles_to_node_id"]
        given = {index: nodes[table[index]] for index in sorted(table) if index}
        holder = ray.remote(AgentHolder)
        names = dict[str, dict[str, Any]]()
        for index, node in given.items():
            host = node["NodeManagerHostname"]
            names[host if host not in (*names, RUNNER) else f"{host}-{index}"] = node
        for (name, node), index in zip(names.items(), given, strict=True):
            self._holders[name] = holder.options(
                num_cpus=0,
                num_gpus=gpus(node),
                max_concurrency=4,  # the end is waited for meanwhile
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            ).remote(name)
        starts = {name: one.start.remote() for name, one in self._holders.items()}
        hosts = dict[str, BroughtHost]()
        for name, node in names.items():
            self._nodes[name] = node
            try:
                hosts[name] = self._begun(name, starts[name])
            except (ray.exceptions.RayError, msgspec.DecodeError, KeyError) as error:
                raise NoHosts(f"host {name} has no agent: {self._why(name, error)}") from None
        return hosts

    def _begun(self, name: str, start: Any) -> BroughtHost:
        """Return a host whose agent is being started. Raises what Ray does, and
        `DecodeError` or `KeyError` for an agent that has ended."""
        address, id_, line = self._ray.get(start, timeout=_KEY_S)
        told = msgspec.json.decode(line, type=dict[str, str])
        self._waiting[self._holders[name].ended.remote()] = name
        # it may be another one than before, that Ray has given in its place
        for node in self._ray.nodes():
            if node["NodeID"] == id_:
                self._nodes[name] = node
        cores, gpu_count = cpus(self._nodes[name]), gpus(self._nodes[name])
        return BroughtHost(address, cores, told["key"], gpu_count, told.get("tidemill", ""))

    def back(self) -> list[Back]:
        """Have another agent started on each host whose own has ended; return those that
        were."""
        for name, at in list(self._away.items()):
            if at <= monotonic():
                del self._away[name]
                self._starting[self._holders[name].start.remote()] = name
        found = []
        for start in self._done(self._starting):
            name = self._starting.pop(start)
            try:
                found.append(Back(name, self._begun(name, start)))
            except (self._ray.exceptions.RayError, msgspec.DecodeError, KeyError):  # the node is gone
                self._away[name] = monotonic() + _AGAIN_S
        return found

    def _done(self, references: dict[Any, str]) -> list[Any]:
        """Return which of Ray's answers have come."""
        if not references:
            return []
        done, _ = self._ray.wait(list(references), num_returns=len(references), timeout=0)
        return list(done)

    def _why(self, name: str, error: Exception) -> str:
        """Return why a host's agent has told no key."""
        if isinstance(error, self._ray.exceptions.RayError):
            text = str(error).strip()
            if "ModuleNotFoundError" in text:
                lack = text[text.rindex("ModuleNotFoundError") :].splitlines()[0]
                return f"{lack}; install Tidemill for its Ray's Python: pip install 'tidemill[ray]'"
            return text[-_TAIL:]
        try:
            return str(self._ray.get(self._holders[name].ended.remote(), timeout=1.0)[1])
        except self._ray.exceptions.RayError:
            return f"it told {error}"

    def introduce(self, order: Introduce) -> None:
        """Hand a line to an agent."""
        self._holders[order.host].introduce.remote(order.line)

    def ended(self) -> list[Ended]:
        """Return which agents have ended since the last call, and how."""
        found = []
        for reference in self._done(self._waiting):
            host = self._waiting.pop(reference)
            try:
                code, how = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                code, how = -1, f"Ray says of it: {str(error).strip()[:_TAIL]}"
            found.append(Ended(host, how))
            self._away[host] = monotonic() + (_LEFT_S if code == LEFT else _AGAIN_S)
        return found

    def close(self) -> None:
        """Give all back to Ray."""
        if self._ray is None or not self._ray.is_initialized():
            return  # whatever is asked of a Ray that was not joined starts one here
        ends = [holder.end.remote() for holder in list(self._holders.values())]
        with contextlib.suppress(Exception):  # hosts that are gone cannot end theirs
            self._ray.wait(ends, num_returns=len(ends), timeout=_END_S + 1)
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            with contextlib.suppress(Exception):
                remove_placement_group(self._group)
        self._ray.shutdown()


def needs(node: dict[str, Any]) -> dict[str, float]:
    """Return the bundle that takes the whole of a node."""
    return {name: node["Resources"][name] for name in ("CPU", "GPU") if node["Resources"].get(name, 0) > 0}


def main() -> None:
    """Bring hosts, until standard input ends."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Ray prints is for the log

    def tell(message: Failed | Brought | Ended | Back) -> None:
        with contextlib.suppress(OSError):  # the runner is gone, and so is the input
            output.write(msgspec.json.encode(message) + b"\n")
            output.flush()

    wanted = msgspec.json.decode(sys.stdin.buffer.readline(), type=Wanted)
    hosts, brought = RayHosts(), threading.Event()
    orders: queue.Queue[Introduce | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin.buffer:
            orders.put(msgspec.json.decode(line, type=Introduce))
        orders.put(None)
        if not brought.is_set():  # which may take minutes more, and nobody waits for it
            hosts.close()
            os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    try:
        tell(hosts.bring(wanted))
    except NoHosts as error:
        tell(Failed(str(error)))
    except Exception as error:  # Ray's own, of many kinds
        tell(Failed(f"{type(error).__name__}: {error}"))
    brought.set()
    while True:
        with contextlib.suppress(queue.Empty):
            if (order := orders.get(timeout=_LOOK_S)) is None:
                break
            hosts.introduce(order)
        for ended in hosts.ended():
            tell(ended)
        for back in hosts.back():
            tell(back)
    hosts.close()


if __name__ == "__main__":
    main()
