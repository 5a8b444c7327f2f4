"""The simulator's end in Python: the bridge, which exchanges the requests of all worlds
for actions."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

from tidemill.bridge.protocol.files import (
    SIMULATOR_SUFFIX,
    TRAINER_SUFFIX,
    Lock,
    PeerWatch,
    editor_path,
    owner_of,
    remove_dead,
    remove_memory,
    shared_folder,
)
from tidemill.bridge.protocol.open_memory import join_memory
from tidemill.bridge.protocol.shared_memory import SharedMemory
from tidemill.bridge.protocol.specs import Ints, RawChannels
from tidemill.bridge.protocol.tables import CLOSE, QUERY, RESET, STEP
from tidemill.bridge.world_side.requests import read_actions
from tidemill.bridge.world_side.world import World
from tidemill.core.errors import ConfigError, PeerLost, SchemaError, SimulatorError, did_you_mean

_LOOK = 0.2  # seconds between looks at the trainer, while there are no requests


class Bridge:
    """A bridge joins worlds and a trainer, where there is one.

        bridge = Bridge()
        world = bridge.add(World("reach", 10, [(4,)], continuous_size=2))
        while bridge.exchange():
            for event in world.actions(): ...
            world.request_decision(0).set_reward(1.0).set_observation(0, [1, 2, 3, 4])

    memory_path: the file at which the two meet; None: what follows `--memory-path` on the
        command line, else the editor's file if a trainer waits there, else there is no
        trainer and heuristics act. Its layout is seen from it
    channels: stands for this end's side channels
    on_reset: function that is called when the trainer resets; pending requests of all
        worlds were dropped then
    """

    def __init__(
        self,
        memory_path: str | Path | None = None,
        *,
        channels: RawChannels | None = None,
        on_reset: Callable[[], None] | None = None,
    ) -> None:
        self._channels, self._on_reset = channels, on_reset
        self._worlds: dict[str, World] = {}
        self._memory: SharedMemory | None = None
        self._watch: PeerWatch | None = None
        self._lock: Lock | None = None
        self._begun = False  # the first step or reset has come
        self._ours = False  # a command has come, and is to be answered
        self._next_look = 0.0
        self.reason = "there is no trainer"
        started = memory_path is None and (memory_path := _argument(sys.argv)) is not None
        self._parent = os.getppid() if started else None
        try:
            path = editor_path() if memory_path is None else shared_folder() / memory_path
        except ConfigError:
            if memory_path is None:
                return  # nobody can wait there
            raise
        self._path = path
        self._watch = PeerWatch.find(Path(f"{path}{TRAINER_SUFFIX}"))
        if (
            memory_path is None
            and not path.exists()
            and (self._watch is None or owner_of(Path(f"{path}{SIMULATOR_SUFFIX}")) is None)
        ):
            if self._watch is not None:
                self._watch.close()
                self._watch = None
            return
        if self._watch is not None and not self._watch.alive():
            owner = self._watch.owner
            self._watch.close()
            if memory_path is None:
                return
            raise SimulatorError(
                f"the trainer of {path} (process {owner}) is dead; a living one has to start this simulator"
            )
        try:
            self._join(path)
        except BaseException:
            if self._watch is not None:
                self._watch.close()
            raise

    def _join(self, path: Path) -> None:
        """Join the memory; first see that nobody has, since whoever did may have left
        this file for a larger one."""
        mark = Path(f"{path}{SIMULATOR_SUFFIX}")
        if self._watch is not None:
            try:
                self._lock = Lock(mark)
            except BlockingIOError:
                raise self._taken(f" (process {owner_of(mark)})") from None
        try:
            memory = join_memory(path)
            if memory.joined:
                memory.close()
                raise self._taken("")
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            raise
        self._memory, self.reason = memory, ""

    def _taken(self, who: str) -> ConfigError:
        return ConfigError(
            f"another simulator{who} has joined the trainer at {self._path}, and a trainer takes one; end "
            "that one, or start a trainer of its own for this one"
        )

    @property
    def has_trainer(self) -> bool:
        """Whether a trainer acts, and not heuristics."""
        return self._memory is not None

    def add(self, world: World) -> World:
        """Register a world; the trainer sees it at the next exchange. At any time."""
        if self._worlds.setdefault(world.name, world) is not world:
            raise ConfigError(f'there is a world "{world.name}" already')
        if self._memory is not None and self._memory.layout.files == 1:
            world.requests.share()
        return world

    def world(self, name: str) -> World:
        """Return the world of that name."""
        if name not in self._worlds:
            raise SchemaError(f'there is no world "{name}", {did_you_mean(name, self._worlds)}')
        return self._worlds[name]

    def exchange(self) -> bool:
        """Hand all requests over and wait for the actions. Without any request it returns
        at once, and the trainer goes on waiting.

        Only a trainer's very first step is answered without requests, too, by worlds
        without agents, so that its reset can come. Returns False once a trainer has
        closed or died, with the cause in `reason`; heuristics act from then on, as they
        do where there was none. Errors: SimulatorError where a new world cannot be added
        to the shared memory (it is named), or where what the trainer wrote cannot be.
        """
        worlds = list(self._worlds.values())
        if not any(len(world.requests) for world in worlds):
            for world in worlds:
                world.drop()
            self._idle(worlds)
            return not self._lost
        if self._memory is not None:
            try:
                self._exchange(self._memory, worlds)
                return True
            except PeerLost as error:
                self._lose(str(error))
        for world in worlds:
            world.act_alone()
        return not self._lost

    def close(self) -> None:
        """Tell the trainer that this simulator ends; the memory's files are then the
        trainer's to delete."""
        if self._memory is not None:
            self._memory.hand_over(CLOSE)
            self._lose("this simulator closed the bridge", closed=True)

    @property
    def _lost(self) -> bool:
        return self._memory is None and self._begun

    def _exchange(self, memory: SharedMemory, worlds: Sequence[World]) -> None:
        # the trainer's first command; what was asked before a reset is dropped
        if not self._ours and self._receive(memory) == RESET:
            return self._reset(worlds)
        if memory.peer_closed():
            raise PeerLost("the trainer closed the bridge")
        asking, generation = self._answer(memory, worlds)
        if self._receive(memory) == RESET:
            return self._reset(worlds)
        for world, agents in zip(worlds, asking, strict=True):
            if memory.generation != generation and world.name not in memory.named:
                raise SimulatorError(f'the trainer took world "{world.name}" out of the shared memory')
            world.answer(agents, *read_actions(memory.data, memory.named[world.name], len(agents)))

    def _answer(self, memory: SharedMemory, worlds: Sequence[World]) -> tuple[list[Ints], int]:
        """Hand over what is asked. Return who asks, by world, and the memory's
        generation."""
        memory.put(
            self._outgoing(), [(world.name, world.spec) for world in worlds if world.name not in memory.named]
        )
        asking = [
            world.requests.write(memory.layout, memory.data, memory.named[world.name]) for world in worlds
        ]
        generation = memory.generation
        self._ours = False
        memory.hand_over(STEP)
        return asking, generation

    def _receive(self, memory: SharedMemory, seconds: float = inf) -> int | None:
        """Wait for the trainer's command, STEP or RESET, or None after so many seconds;
        queries are answered at once."""
        while True:
            command = memory.receive(self._look, seconds)
            if command is None:
                return None
            if command == CLOSE:
                raise PeerLost("the trainer closed the bridge")
            self._ours = True
            data = memory.take_side_channel()
            if data and self._channels is not None:
                self._channels.incoming(data)
            if command != QUERY:
                self._begun = True
                return command
            memory.put(self._outgoing())
            self._ours = False
            memory.hand_over(STEP)

    def _outgoing(self) -> bytes:
        return b"" if self._channels is None else self._channels.outgoing()

    def _reset(self, worlds: Sequence[World]) -> None:
        for world in worlds:
            world.drop()
        if self._on_reset is not None:
            self._on_reset()

    def _idle(self, worlds: Sequence[World]) -> None:
        """Without requests: take a first command that has come, and see now and then
        whether the trainer is still there."""
        if self._memory is None:
            return
        try:
            if not self._ours and self._memory.mine:
                self._begin(self._memory, worlds)
            if (now := time.monotonic()) >= self._next_look:
                self._next_look = now + _LOOK
                if self._memory.peer_closed():
                    raise PeerLost("the trainer closed the bridge")
                self._look()
        except PeerLost as error:
            self._lose(str(error))

    def _begin(self, memory: SharedMemory, worlds: Sequence[World]) -> None:
        """Take the command that has come while nobody asks: a reset, or a step, of which
        the very first is answered with no agents."""
        first, command = not self._begun, self._receive(memory, 0.0)
        if command == RESET:
            self._reset(worlds)
        elif command == STEP and first:
            self._answer(memory, worlds)

    def _look(self) -> None:
        if not self._lives():
            raise PeerLost(
                f"the trainer (process {self._parent if self._watch is None else self._watch.owner}) died"
            )

    def _lives(self) -> bool:
        """Whether the trainer lives, as far as that can be known."""
        if self._watch is not None:
            return self._watch.alive()
        return self._parent is None or os.getppid() == self._parent

    def _lose(self, reason: str, closed: bool = False) -> None:
        """Go on without a trainer. Of another make's the side that has not `closed`
        deletes the files; one of ours deletes them while it lives."""
        memory, self._memory = self._memory, None
        assert memory is not None
        self._begun, self.reason = True, reason
        lives = self._lives()
        if self._watch is None and not (closed and lives):
            remove_memory(self._path)
        elif not lives:
            remove_dead(self._path)
        memory.close()
        if self._lock is not None:
            self._lock.release()
        if self._watch is not None:
            self._watch.close()


def _argument(arguments: Sequence[str]) -> str | None:
    """Return what follows `--memory-path`."""
    for i, argument in enumerate(arguments):
        if argument == "--memory-path" and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith("--memory-path="):
            return argument.split("=", 1)[1]
    return None
