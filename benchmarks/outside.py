"""Runs that depend on something outside, for `moments.py`: a disk, a share, memory, a
tracker, simulators, a server; and how these fail."""

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from bridge_kills import folders, lives
from fault_rows.runs import processes
from fault_rows.taken import MET
from faulty import DEADLINE, LONGEST, SAVING, NoFault, Run, faulty_cartpole, judged, later, stop_for, trainers
from memory_groups import MemoryGroup, NoGroup, memory_group
from shares import NoShare, Share, share_in

from tidemill import (
    DQN,
    AgentSpec,
    Experiment,
    Limits,
    QNetwork,
    Replay,
    ReplayActors,
    ReplayTrainer,
    Rest,
    SimulatorEnvironment,
    Slots,
)
from tidemill.api.environment import EnvironmentConfig
from tidemill.bridge.world_side.language_files import sources_folder

WORLD, SERVER = "WORLD", "SERVER"  # variables: what simulates, where the server is
CLOSING = Path(__file__).with_name("closing_world.py")
STEPS = 3000  # of a run in slots
HELD = 2  # steps that two actors of two lanes can hold, whose other lanes have none
ROOM = 768 << 20  # bytes for a whole run: some three times as much as it takes
OVER = 60.0  # seconds that a share hangs at most, for a run that does not end before


class LeftBehind(Exception):
    """A run has left something outside of its folders."""


def in_simulators() -> Experiment:
    """Two actors of two simulators each, with a trainer and an evaluation."""
    world = os.environ[WORLD]
    arguments = (os.environ["FAULTS"],) if world.endswith(".py") else ()
    simulator = SimulatorEnvironment(path=world, arguments=arguments)
    return judged(simulator, {"trainer": trainers()}, AgentSpec(sample_steps=32), simulator, lanes=(2, 1))


def on_server() -> Experiment:
    """Two actors of four sessions each, with a trainer and an evaluation."""
    server = Rest(url=os.environ[SERVER])
    return judged(server, {"trainer": trainers()}, AgentSpec(sample_steps=32), server, lanes=(4, 2))


def in_slots(environment: EnvironmentConfig | None = None) -> Experiment:
    """Four slots, and a trainer with a replay memory that trains once for each two
    steps."""
    environment = environment or faulty_cartpole(threads=1)
    slots = Slots(environment=environment, deadline_s=2.0, backoff_s=0.1)
    return from_memory(ReplayActors(environment=slots, lanes=1, ring=4, restarts=1000))


def without_slots() -> Experiment:
    """The same, of two actors whose lanes step in their own threads."""
    return from_memory(ReplayActors(count=2, environment=faulty_cartpole(), lanes=2, restarts=1000))


def from_memory(actors: ReplayActors) -> Experiment:
    """Actors, and a trainer with a replay memory that trains once for each two steps."""
    trainer = ReplayTrainer(
        algorithm=DQN(), buffer=Replay(capacity=10_000, warm_up=100), batch_size=32, ratio="1/2",
        iteration_steps=STEPS // 5, evaluation_steps=200, restarts=1000, **SAVING,
    )  # fmt: skip
    return Experiment(
        name="memory",
        policies={"policy": QNetwork()},
        workers={"actor": actors, "trainer": trainer},
        limits=Limits(steps=STEPS, stall_s=60.0),
    )


def in_slots_of_server() -> Experiment:
    """The same, of a server's sessions."""
    return in_slots(Rest(url=os.environ[SERVER]))


@contextmanager
def python_world(folder: Path) -> Iterator[None]:
    """Simulators in Python."""
    with _folders_go():
        os.environ[WORLD] = str(CLOSING)
        yield


@contextmanager
def c_world(folder: Path) -> Iterator[None]:
    """Simulators in C: the example world."""
    source = sources_folder() / "native" / "reach.c"
    program = folder / "reach"
    subprocess.run(["cc", "-std=c99", "-O2", source, "-o", program, "-pthread", "-lm"], check=True)
    os.environ[WORLD] = str(program)
    with _folders_go():
        yield


@contextmanager
def _folders_go() -> Iterator[None]:
    """Raise `LeftBehind` with the folders of the bridge that are left."""
    before, ours = folders(), f"tidemill-{os.getuid()}-"
    yield
    left = [path for path in folders() - before if path.name.startswith(ours) and not lives(path)]
    if left:
        raise LeftBehind(f"left {', '.join(map(str, left))}")


def strike_simulator(run: Run, draw: random.Random, whose: str, number: int) -> None:
    """Send a signal to a simulator, once there is one: of a worker so named, or of any.
    Raises `NoFault` where there is none."""
    run.wait_for(lambda: simulators(run, ""))
    try:
        draw.choice(simulators(run, whose) or simulators(run, "")).send_signal(number)
    except (IndexError, psutil.Error):
        raise NoFault from None


def simulators(run: Run, whose: str) -> list[psutil.Process]:
    """Return the simulators of a run, of a worker so named."""
    workers = {process.pid for name, process in processes(run.main.pid).items() if whose in name}
    found = []
    for process in run.processes():
        with suppress(psutil.Error):
            if "--memory-path" in process.cmdline() and (not whose or process.ppid() in workers):
                found.append(process)
    return found


class Server:
    """The reference server, on a port that it has to itself while it is away, too."""

    def __init__(self) -> None:
        self._holder = socket.socket()
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind(("127.0.0.1", 0))
        self.port = self._holder.getsockname()[1]
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        program = Path(sys.executable).with_name("tidemill")
        self.process = subprocess.Popen(
            [program, "serve-env", "CartPole-v1", "--port", str(self.port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until = time.monotonic() + LONGEST
        while time.monotonic() < until:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            time.sleep(0.01)
        raise SystemExit("the server did not start")

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it, and give its port back."""
        self.kill()
        self._holder.close()

    def answer_rubbish(self, seconds: float, draw: random.Random) -> None:
        """Answer in its place, for so long, with what is no answer."""
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self.port))
            listener.listen(64)
            listener.settimeout(0.1)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                with suppress(OSError), listener.accept()[0] as connection:
                    connection.settimeout(0.1)
                    connection.recv(1 << 16)
                    connection.sendall(_rubbish(draw))


def _rubbish(draw: random.Random) -> bytes:
    noise = draw.randbytes(draw.randrange(1, 2000))
    body = draw.choice(
        [noise, b"{}", b"[1, 2]", b'{"session": "a", "episode": 0, "step": 1, "observation": 7}']
    )
    kind = draw.choice([b"application/json", b"application/msgpack", b"text/html"])
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, len(body))
    return draw.choice([noise, head + body, head + body[: len(body) // 2]])


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    """A server of CartPole."""
    made = Server()
    os.environ[SERVER] = f"http://127.0.0.1:{made.port}"
    try:
        yield made
    finally:
        made.close()


def restart_server(run: Run, draw: random.Random, whose: str) -> None:
    """Kill the server, and start it again."""
    run.beside.kill()
    time.sleep(draw.uniform(0.0, 2.0))
    run.beside.start()


def stop_server(run: Run, draw: random.Random, whose: str) -> None:
    """Stop the server for some seconds."""
    stop_for(psutil.Process(run.beside.process.pid), draw.uniform(1.0, 2 * DEADLINE))


def confuse_server(run: Run, draw: random.Random, whose: str) -> None:
    """Have somebody else answer for some seconds."""
    run.beside.kill()
    run.beside.answer_rubbish(draw.uniform(0.5, 3.0), draw)
    run.beside.start()


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 8 MB, below `folder`. Errors: SystemExit where this user may mount
    none."""
    place = folder / "disk"
    place.mkdir()
    _mount("-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", place)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def _mount(*words: str | Path) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"a disk of its own needs the right to mount one (run as root): {done.stderr}")


def fill_disk(run: Run, draw: random.Random, whose: str) -> None:
    """Leave no room on the run's disk for some seconds."""
    until = time.monotonic() + draw.uniform(0.5, 4.0)
    with open(run.beside / "filler", "wb", buffering=0) as file:
        while time.monotonic() < until and run.main.poll() is None:
            for size in (1 << 16, 512):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))
            time.sleep(0.01)
    (run.beside / "filler").unlink()


def forbid_disk(run: Run, draw: random.Random, whose: str) -> None:
    """Have the run's disk be read-only for some seconds."""
    # another one over it, since what is open for writing keeps a disk from becoming so
    other = run.folder / "read-only"
    other.mkdir()
    _mount("--bind", run.beside, other)
    _mount("-o", "remount,bind,ro", other)
    _mount("--bind", other, run.beside)
    until = time.monotonic() + draw.uniform(0.5, 4.0)
    while time.monotonic() < until and run.main.poll() is None:
        time.sleep(0.01)
    for place in (run.beside, other):
        subprocess.run(["umount", "-l", place], check=True)


@contextmanager
def little_memory(folder: Path) -> Iterator[MemoryGroup]:
    """A control group that allows `ROOM`. Errors: SystemExit where this user may make
    none."""
    try:
        with memory_group() as group:
            group.limit(ROOM)
            yield group
    except NoGroup as error:
        raise SystemExit(str(error)) from None


@contextmanager
def share(folder: Path) -> Iterator[Share]:
    """A share, below `folder`. Errors: SystemExit where this user may mount none."""
    try:
        with share_in(folder) as made:
            yield made
    except NoShare as error:
        raise SystemExit(str(error)) from None


def hang_share(run: Run, draw: random.Random, whose: str) -> None:
    """Have the run's share hang for some seconds."""
    run.beside.stop()
    later(draw.uniform(1.0, 15.0), run.beside.go_on)


def lose_share(run: Run, draw: random.Random, whose: str) -> None:
    """Have the run's share hang until the run is over."""
    run.beside.stop()
    with suppress(subprocess.TimeoutExpired):
        run.main.wait(OVER)
    run.beside.go_on()


def strike_tracker(run: Run, draw: random.Random, whose: str, how: str, longest: float = 0.0) -> None:
    """Have the run's tracker fail so (`Away` in `fault_rows/experiments.py`): for some
    seconds since the first record that meets that, `longest` at most; 0: for ever."""
    file, seconds = run.path.parent / how, draw.uniform(1.0, longest) if longest else 0.0
    file.touch()

    def end() -> None:
        run.wait_for((file.parent / MET).exists)
        time.sleep(seconds)
        file.unlink(missing_ok=True)

    if longest:
        later(0.0, end)
