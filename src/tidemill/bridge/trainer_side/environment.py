"""`SimulatorEnvironment`: any engine that has joined the bridge, as an environment to
train on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Literal

from tidemill.api.environment import EnvironmentConfig
from tidemill.api.external_code import Outside, called, quoted
from tidemill.bridge.protocol.samplers import parameter
from tidemill.bridge.protocol.side_channels import Channels, SideChannel
from tidemill.bridge.trainer_side.lanes import SEEDS, SimulatorLanes
from tidemill.bridge.trainer_side.process import command_of
from tidemill.bridge.trainer_side.simulator import Simulator
from tidemill.bridge.trainer_side.simulator_lane import Lane, close_all, start_all
from tidemill.bridge.trainer_side.spaces import Group
from tidemill.core.config import check_counts, decode
from tidemill.core.errors import ConfigError, SimulatorError, did_you_mean
from tidemill.core.secrets import reveal
from tidemill.core.step_deadlines import StepTimes
from tidemill.core.user_code_loading import is_expected, load_attribute


@dataclass(frozen=True, kw_only=True)
class SimulatorEnvironment(EnvironmentConfig):
    """A simulator environment plays a simulator: started anew for each lane, or open
    already (an editor), in one lane. docs/simulators.md tells how an engine joins.

    path: the executable; a FILE.py is run by this Python, a FILE.exe by Mono. None: an
        editor joins at the usual file
    arguments: its further arguments; {lane} and {seed} stand for the lane's number and
        seed
    layout: layout of the memory: "0", "0.3.0" or "0.3.2"
    framing: framing of side channels: "uuid", or "type" in older ones
    parameters: environment parameters by name: numbers, or samplers such as {"uniform":
        [0.5, 2.0]}
    engine: engine settings: width, height, quality_level, time_scale, target_frame_rate,
        capture_frame_rate
    channels: side channels of one's own: "module:NAME" or "FILE.py:NAME" of callables
        that return a `SideChannel`, called for each lane
    groups: groups that may appear late; those that are there after the first reset need
        not be declared
    seats: by group, how many agents may be alive at a time, where that is not the rows
        that it may have in an exchange
    same_step: an agent may begin an episode in the exchange that ends one. False, where
        that never happens, takes less memory
    start_seconds: how long a simulator may take until its groups are there
    deadline_s: seconds that it may take over a step, or a later reset; inf: any time.
        None: as the actor's `deadline_s` says, an editor any time where that is None, too
    max_episode_steps: a promise, where one is needed: no agent's episode has more steps;
        0: not known

    One that died, hung or told NaN is started again, as the actor's `lane_restarts` say,
    and its open episodes are cut; of an editor, that ends the run.
    """

    renamed: ClassVar[Mapping[str, str]] = {"deadline": "deadline_s"}
    retired: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "restarts": (
            0,
            "simulators are started again as often as lanes are made anew, lane_restarts of the actor (--set "
            "workers.actor.lane_restarts=N)",
        )
    }

    path: str | None = None
    arguments: tuple[str, ...] = ()
    layout: str = "0"
    framing: Literal["uuid", "type"] = "uuid"
    parameters: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, float] = field(default_factory=dict)
    channels: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    seats: dict[str, int] = field(default_factory=dict)
    same_step: bool = True
    start_seconds: float = 60.0
    deadline_s: float | None = None
    max_episode_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(max_episode_steps=0)
        self.check_above_zero("start_seconds")
        self.check_deadlines("deadline_s")
        if self.path is None and self.arguments:
            raise ConfigError(
                "arguments are for simulators that are started here; name one by path, or leave them out"
            )
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise ConfigError(f"groups declares a group twice ({', '.join(names)})")
        for name, value in self.parameters.items():
            parameter(name, value)

    @property
    def single(self) -> bool:
        return self.path is None

    draws = False
    timed_calls = True

    @property
    def one_row(self) -> str:
        return (
            "say that this simulator never does so, if that is true, by same_step=False (--env-arg "
            "same_step=false): its agents begin their next episodes in a later exchange than the one that "
            "ends one"
        )

    @classmethod
    def from_name(cls, name: str, settings: Mapping[str, Any]) -> EnvironmentConfig:
        file, layout = name.removeprefix("simulator:"), settings.get("layout")
        path = str(Path(file).absolute()) if file else None  # None: an editor that is open
        # as it is written on a command line, where it is a number
        named = {"layout": "0"} if layout == 0 else {}
        return decode(cls, {"kind": cls.__name__, "path": path, **settings, **named}, "environment")

    @classmethod
    def outside(cls, settings: Mapping[str, Any]) -> Sequence[Outside]:
        path, arguments, channels = settings.get("path"), settings.get("arguments"), settings.get("channels")
        started = (
            []
            if path is None
            else [
                Outside(
                    f"starts {quoted(path)}" + (f" with {quoted(arguments)}" if arguments else ""),
                    program=str(path),
                )
            ]
        )
        return [
            *started,
            *(called(channel, None) for channel in (channels if isinstance(channels, list) else ())),
        ]

    def build(self, lanes: int, seed: int, render: bool = False) -> SimulatorLanes:
        """Start `lanes` simulators and return them as an environment. Lane i is told
        ``seed + i`` as the environment parameter ``seed``."""
        check_counts(lanes=lanes)
        if self.path is None and lanes > 1:
            raise ConfigError(
                f"lanes = {lanes}, but an editor is one simulator; take lanes = 1, or name an executable by "
                "path"
            )
        made = [self._lane(number, seed) for number in range(lanes)]
        try:
            specs = dict(start_all(made, self.start_seconds, bool(self.groups)))
            for group in self.groups:
                specs.setdefault(group.name, group.spec())
            for name, count in self.seats.items():
                if name not in specs:
                    raise ConfigError(f'seats names group "{name}"; {did_you_mean(name, specs)}')
                if count < 1:
                    raise ConfigError(f'seats: group "{name}" needs at least 1 seat, not {count}')
            environment = SimulatorLanes(
                made, specs, [group.name for group in self.groups], self.seats, self.same_step
            )
            environment.max_episode_steps = self.max_episode_steps
            return environment
        except BaseException:
            close_all(made)
            raise

    def _lane(self, number: int, seed: int) -> Lane:
        own = (seed + number) % SEEDS
        # without an actor, which tells its own, it has any time
        times = StepTimes(inf if self.deadline_s is None else self.deadline_s)
        name = f"simulator {number} ({'an editor' if self.path is None else Path(self.path).name})"

        def start(lane: int, channels: Channels) -> Simulator:
            command, arguments = self._command(lane, own)
            return Simulator(
                command,
                arguments,
                layout=self.layout,
                channels=channels,
                start_seconds=self.start_seconds,
                times=times,
                # Mono's file in /dev/shm stays behind where it is killed
                environment={"MONO_DISABLE_SHARED_AREA": "1"},
            )

        lane = Lane(
            number,
            name,
            start,
            [self._channel(channel) for channel in self.channels],
            self.framing,
            times,
            self.deadline_s is not None,
            self.path is not None,
        )
        lane.engine.set(**self.engine)
        lane.parameters.set("seed", own)
        for key, value in self.parameters.items():
            lane.parameters.set(key, parameter(key, value), seed=own)
        return lane

    def _command(self, lane: int, seed: int) -> tuple[str | None, Sequence[str]]:
        """Return the executable and its arguments."""
        arguments = [
            text.replace("{lane}", str(lane)).replace("{seed}", str(seed)) for text in reveal(self.arguments)
        ]
        if self.path is None:
            return None, ()
        path, script = command_of(self.path)
        if not is_expected(Path(self.path)):
            raise SimulatorError(
                f"{self.path} is not what it was when it was allowed to run; see what has changed it, and "
                "start again"
            )
        return path, (*script, *arguments)

    def _channel(self, name: str) -> SideChannel:
        made = load_attribute(name, "channels")()
        if not isinstance(made, SideChannel):
            raise ConfigError(f"channels: {name} returned {made!r}; it must return a SideChannel")
        return made
