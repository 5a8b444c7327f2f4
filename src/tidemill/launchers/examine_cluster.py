"""What a cluster lacks for a run on its hosts: ``tidemill doctor cluster``. The engine
brings the hosts as for a run; each is looked over, and the line between each two."""

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import msgspec

from tidemill.core.errors import ConfigError, RunError, SchemaError
from tidemill.core.memory import size
from tidemill.hosts.orders import Introduction
from tidemill.hosts.peer import Peer
from tidemill.hosts.wire import Wire
from tidemill.launchers.engine import RUNNER, HostEngine, StartedAgent, at_most
from tidemill.launchers.examination import (
    REACH_S,
    Await,
    Awaits,
    Found,
    Join,
    Leave,
    Look,
    MeasuredLine,
    MeasureLine,
    Order,
    Report,
    look,
    measure_line,
    pack,
    read,
    reports,
)
from tidemill.launchers.host import versions
from tidemill.launchers.hosts import HostsLauncher
from tidemill.launchers.ray_driver import asks_for_token, named, ray_here, token_file
from tidemill.launchers.report_checks import check_tidemill
from tidemill.launchers.table import chosen_launcher, make_launcher
from tidemill.testing.check_env import Finding
from tidemill.transports.shared import EventBell

CLOCK_S = 1.0  # by which clocks may differ
FEW_FILES = 4096  # that may be open: a run of some hundred workers needs more
SLOW, FAR_S = 50e6, 0.01  # bytes per second, and seconds of a round trip, that are told
ALONE = {
    "ray": "ray start --head, and on each other host: ray start --address=HOST:PORT",
    "slurm": "salloc --nodes=2 tidemill doctor cluster --launch slurm",
}
"""What brings a launcher more hosts."""
_ANSWER_S = 30.0  # seconds that a host has for an order, besides those of its line


def examine_cluster(launch: str, folder: Path) -> Iterator[Finding]:
    """Yield what there is to tell of the hosts that a launcher brings, each with what
    mends it. `folder`: that of a run, which hosts are to see. Raises `ConfigError` for a
    launcher of this machine alone."""
    kind = launch.partition("(")[0]
    if kind == "ray":
        _, _, options = chosen_launcher(launch)
        yield from _authentication(named(options.get("address") or ""))
    if kind == "slurm" and "SLURM_JOB_ID" not in os.environ:
        yield from _login_node()
        return
    launcher = make_launcher(launch)
    if not isinstance(launcher, HostsLauncher):
        raise ConfigError(
            f"--launch {launch} has this machine alone (look it over by: tidemill doctor); name ray, slurm, "
            "or FILE.py:NAME of a launcher of several hosts"
        )
    with ExitStack() as stack:
        bell = os.eventfd(0)
        stack.callback(os.close, bell)
        wire = stack.enter_context(closing(Wire(RUNNER, EventBell(bell))))
        try:
            engine = launcher.engine()
            stack.callback(engine.close)
            started = engine.start(None)
        except RunError as error:
            yield Finding("hosts", "fail", str(error))
            return
        if not started:
            yield Finding(
                "hosts",
                "warn",
                "there is none but this one: a run has this machine alone",
                ALONE.get(kind, ""),
            )
            return
        yield Finding("hosts", "ok", f"{len(started) + 1}: {', '.join([RUNNER, *started])}")
        for host, agent in list(started.items()):
            try:
                check_tidemill(host, agent)
            except RunError as error:  # what it is told, it may not understand
                yield Finding(f"host {host}", "fail", str(error))
                del started[host]
        yield from _Examiner(wire, engine, started).findings(folder)


def _authentication(address: str) -> Iterator[Finding]:
    """Whether the Ray at an address asks for a token, and who may read ours. "": the one
    of this machine. Nothing is told where there is none, or none that is well."""
    address = address or ray_here()
    if not address or (asks := asks_for_token(address)) is None:
        return
    if not asks:
        yield Finding(
            "Ray's token",
            "warn",
            f"the Ray at {address} asks for none: whoever reaches it runs code on its hosts, and hosts' keys "
            "are as safe as its network",
            "export RAY_AUTH_MODE=token; ray get-auth-token --generate; restart Ray with it on each host",
        )
        return
    path = token_file()
    safe = "Ray itself encrypts nothing, but with its TLS: keys of hosts are as safe as its network"
    if os.environ.get("RAY_AUTH_TOKEN"):
        yield Finding("Ray's token", "ok", f"it is asked for, and stands in RAY_AUTH_TOKEN. {safe}")
    elif not path.is_file():
        cure = "copy that of Ray's head there, mode 0600, and export RAY_AUTH_MODE=token"
        yield Finding("Ray's token", "fail", f"there is none: neither RAY_AUTH_TOKEN nor {path}", cure)
    elif stat.S_IMODE(path.stat().st_mode) & 0o77:
        yield Finding("Ray's token", "warn", f"others may read {path}", f"chmod 600 {path}")
    else:
        yield Finding("Ray's token", "ok", f"it is asked for, and only you may read {path}. {safe}")


def _login_node() -> Iterator[Finding]:
    """What can be told of Slurm where there is no allocation."""
    from tidemill.launchers.slurm import slurm

    if lacking := [
        name for name in ("sbatch", "srun", "squeue", "scontrol", "sinfo") if not shutil.which(name)
    ]:
        cure = "begin on a login node of the cluster"
        yield Finding("Slurm", "fail", f"there is no {', '.join(lacking)} here", cure)
        return
    try:
        told = slurm("sinfo", "--noheader", "--format=%R %a %D %t").split("\n")
    except RunError as error:
        yield Finding("Slurm", "fail", str(error), "see `scontrol ping`, and ask whoever runs it")
        return
    partitions = "; ".join(filter(None, (line.strip() for line in told)))
    yield Finding(
        "Slurm", "ok" if partitions else "fail", f"partitions, state and nodes: {partitions or 'none'}"
    )
    yield Finding("hosts", "warn", "this is no allocation: the nodes were not looked at", ALONE["slurm"])


@dataclass
class _Known:
    started: StartedAgent
    peer: Peer
    found: Found | None = None
    ahead_s: float = 0.0  # its clock


class _Examiner:
    """Who looks the hosts over that an engine has started."""

    def __init__(self, wire: Wire, engine: HostEngine, started: Mapping[str, StartedAgent]) -> None:
        self._wire, self._engine = wire, engine
        self._hosts: dict[str, _Known] = {}
        for host, agent in started.items():
            peer, ports = wire.listen(host, agent.key, engine.own_address, joined=False)
            self._hosts[host] = _Known(agent, peer)
            own, key = engine.own_address, wire.keys.public.decode()
            introduction = Introduction(host, agent.address, RUNNER, own, ports, key, examined=True)
            engine.introduce(host, msgspec.json.encode(introduction))

    def findings(self, folder: Path) -> Iterator[Finding]:
        """Yield what is found."""
        own = look("", versions())
        cores, gpus = self._engine.own_cores, self._engine.own_gpus
        yield _host(RUNNER, own, cores, 0 if cores == 0 else gpus)  # without cores for workers it has no GPU
        folder = next(path for path in [folder, *folder.parents] if path.is_dir())
        with tempfile.NamedTemporaryFile(prefix=".seen-", dir=folder) as file:
            for host in list(self._hosts):
                yield from self._look(host, os.path.realpath(file.name))
        yield from self._shared(folder)
        for host, known in self._hosts.items():
            if known.found is not None:
                yield from _differences(host, known.found, own)
        yield from self._clocks()
        yield from self._lines()
        for host in self._hosts:
            self._tell(host, Leave())
        self._turn(lambda: all(known.peer.words.heard_all for known in self._hosts.values()), 2.0)

    def _tell(self, host: str, order: Order) -> None:
        self._wire.tell(host, pack(order))

    def _turn(self, done: Callable[[], object], seconds: float) -> bool:
        """Turn the wire until it is done; False where that is not within `seconds`."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                return False
            self._wire.turn(0.05)
        return True

    def _hear(self, host: str, seconds: float) -> Report | str:
        """Return what a host reports next, or why it does not."""
        words, heard, why = self._hosts[host].peer.words, list[Report](), ""

        def came() -> bool:
            nonlocal why
            try:
                if (report := read(self._wire, host, reports)) is not None:
                    heard.append(report)
            except SchemaError as error:
                why = str(error)
            why = why or self._hosts[host].peer.ended or self._engine.ended(host)
            return bool(heard or (why and not words.unread))

        self._turn(came, seconds)
        strangers = "; ".join(self._wire.refused)
        return heard[0] if heard else why or strangers or f"it said nothing within {seconds:.0f} s"

    def _look(self, host: str, seen: str) -> Iterator[Finding]:
        known = self._hosts[host]
        self._tell(host, Look(seen))
        told = self._hear(host, _ANSWER_S)
        if isinstance(told, Found):
            known.found = told
            known.ahead_s = told.clock - time.time() + (known.peer.round_trip_s or 0.0) / 2
            yield _host(host, told, known.started.cores, known.started.gpus)
            return
        address = self._engine.own_address
        yield Finding(
            f"host {host}",
            "fail",
            f"it does not call this host at {address}: {told}",
            f"let hosts reach each other on all ports; here: nc -l {address} 5000, there: nc {address} 5000",
        )

    def _shared(self, folder: Path) -> Iterator[Finding]:
        blind = [host for host, known in self._hosts.items() if known.found and not known.found.sees]
        if blind:
            yield Finding(
                "folder",
                "warn",
                f"{', '.join(blind)} cannot see {folder}: further equal trainers and exact resume want that, "
                "and so does Slurm",
                "put the run where all hosts see it: --run-dir",
            )
        else:
            yield Finding("folder", "ok", f"all hosts see {folder}")

    def _clocks(self) -> Iterator[Finding]:
        far = {
            h: k.ahead_s for h, k in self._hosts.items() if k.found is not None and abs(k.ahead_s) > CLOCK_S
        }
        if far:
            text = ", ".join(f"{host} by {ahead:+.1f} s" for host, ahead in far.items())
            yield Finding(
                "clocks", "warn", f"they differ from this host's: {text}", "there: chronyc makestep"
            )
        else:
            yield Finding("clocks", "ok", f"within {CLOCK_S:g} s of this host's")

    def _lines(self) -> Iterator[Finding]:
        """Each two hosts, one pair after the other."""
        hosts = [host for host, known in self._hosts.items() if known.found is not None]
        lines: dict[str, MeasuredLine] = {}
        for host in hosts:
            self._tell(host, MeasureLine(RUNNER, sends=False))
            ours = measure_line(self._wire, MeasureLine(host, sends=True))
            lines[f"{RUNNER} – {host}"] = ours if ours.error else self._line(ours, host)
        hosts = [host for host in hosts if not lines[f"{RUNNER} – {host}"].error]
        for host, other in combinations(hosts, 2):
            lines[f"{host} – {other}"] = self._between(host, other)
        for name, line in lines.items():
            if line.error:
                hint = "a firewall, or a NetworkPolicy, refuses connections on free ports"
                yield Finding(name, "fail", line.error, f"let hosts reach each other on all ports ({hint})")
                continue
            text = f"{line.rate / 1e6:,.0f} MB/s, encrypted; round trip {line.round_trip_s * 1000:.2f} ms"
            if line.rate < SLOW or line.round_trip_s > FAR_S:
                cure = "leave slow hosts out; iperf3 and ping say what the network does without Tidemill"
                yield Finding(name, "warn", text, cure)
            else:
                yield Finding(name, "ok", text)

    def _line(self, sender: MeasuredLine | str, receiver: str) -> MeasuredLine:
        """Return what two hosts have found together. `sender`: what one has."""
        told = self._hear(receiver, REACH_S + 2)
        for each in (sender, told):
            if not isinstance(each, MeasuredLine):
                return MeasuredLine(receiver, error=str(each))
            if each.error:
                return each
        assert isinstance(sender, MeasuredLine) and isinstance(told, MeasuredLine)
        return MeasuredLine(receiver, told.rate, sender.round_trip_s)

    def _between(self, host: str, other: str) -> MeasuredLine:
        one, two = self._hosts[host].started, self._hosts[other].started
        self._tell(host, Await(other, two.key.decode()))
        awaits = self._hear(host, _ANSWER_S)
        if not isinstance(awaits, Awaits):
            return MeasuredLine(other, error=str(awaits))
        self._tell(other, Join(host, one.address, awaits.ports, one.key.decode()))
        self._tell(other, MeasureLine(host, sends=True))
        self._tell(host, MeasureLine(other, sends=False))
        sender = self._hear(other, REACH_S + 2)
        return self._line(sender if isinstance(sender, MeasuredLine) else str(sender), host)


def _host(host: str, found: Found, cores: int | None, gpus: int | None) -> Finding:
    """What a host has. `cores`, `gpus`: how many an engine gives a run; None: all."""
    cores, gpus = at_most(cores, found.cores), at_most(gpus, found.gpus)
    files = "any number of" if found.files < 0 else f"{found.files:,}"
    has = f"{cores} core{'s' * (cores != 1)}, {gpus or 'no'} GPU{'s' * (gpus > 1)}"
    text = f"{has}, {size(found.memory)} can be filled, {files} open files"
    if 0 <= found.files < FEW_FILES:
        where = "here" if host == RUNNER else "there"
        return Finding(f"host {host}", "warn", text, f"{where}: ulimit -Hn 65536, or LimitNOFILE= of systemd")
    return Finding(f"host {host}", "ok", text)


def _differences(host: str, found: Found, own: Found) -> Iterator[Finding]:
    wrong = {name: version for name, version in own.versions.items() if found.versions.get(name) != version}
    if not wrong:
        text = ", ".join(f"{name} {version}" for name, version in own.versions.items())
        yield Finding(f"versions of {host}", "ok", text)
        return
    text = "; ".join(
        f"{name} {found.versions.get(name, 'none')}, here {version}" for name, version in wrong.items()
    )
    packages = " ".join(f"{name}=={version}" for name, version in wrong.items() if name != "python")
    cure = f"there: pip install {packages}" if packages else f"install Python {wrong['python']} there"
    yield Finding(f"versions of {host}", "fail", text, cure)
