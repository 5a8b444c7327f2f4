"""The environment contract: asked in two halves, many lanes at once, many agents each.

The loop that calls it (an `EnvTarget` does)::

    # once: which agents share a tick buffer
    environment.bind(groups)
    environment.send(actions, reset=all_lanes)     # first half
    while not environment.ready(): ...             # a plain environment is ready at once
    # second half: writes into the buffers it is given
    environment.recv(ticks)
    environment.send(actions, reset=finished_lanes)

Shapes: L lanes, A agents in a group, N = L·A seats in lane-major order (seat = lane·A +
agent). Time never appears here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.external_code import Outside, quoted
from tidemill.api.spaces import Space, Spaces, schema_of_space
from tidemill.core.config import Config
from tidemill.core.cut import Part
from tidemill.core.errors import CheckpointError, ConfigError
from tidemill.core.schema import Arrays, Field, Schema, allocate
from tidemill.core.step_deadlines import StepTimes
from tidemill.core.tally import TallyEntry


@dataclass(frozen=True)
class AgentInfo:
    """An agent info is an agent's name (which agent specs match) and its spaces."""

    name: str
    spaces: Spaces


def alike(agents: Sequence[AgentInfo]) -> list[list[int]]:
    """Return the agents, by index, in groups of equal spaces."""
    groups: list[list[int]] = []
    for index, agent in enumerate(agents):
        group = next((group for group in groups if agents[group[0]].spaces == agent.spaces), None)
        if group is None:
            groups.append([index])
        else:
            group.append(index)
    return groups


@dataclass
class Tick:
    """A tick holds what one step of a target's lanes brings for one group of agents. It
    is allocated once by the target and filled by `Environment.recv`.

    observation: leaf name → [N, ...]: the newest observation of each present seat. May be
        rows of a sample in shared memory: write, never keep.
    reward: float32 [N]: caused by the last action, and by what happened since; that of an
        absent seat adds to the row it wrote last
    done: bool [N]: the seat's episode *ended* (terminated); `observation` is its final
        one
    truncated: bool [N]: the episode was *cut* (truncated); never together with done
    present: bool [N]: the seat has an observation in this tick. An absent seat (dead, or
        not its turn) sends no request and stores no row; done or truncated may still be
        set for it and closes its open row
    info: name → [N]: the environment's own statistics of episodes (see
        `Environment.info`), meaningful where done or truncated
    restarted: bool [N]: the seat finished (in same-step environments, done or truncated,
        see `final`; or `voided`) *and* already began its next episode, whose first
        observation is in `observation`
    final: leaf name → [N, ...]: final observations of restarted seats; empty for other
        environments
    voided: bool [N]: the seat's step was lost, and its episode was cut after the
        observation before it. Never together with done or truncated. With `restarted`,
        the lane was made anew (`Environment.restart_lanes`) and its next episode has
        begun: a present seat's `observation` is its first one. Without, which is only
        where `Environment.voids`, nothing else of the seat means anything, and the lane
        is reset in the next tick. False at first: who never loses a step leaves it alone
    """

    observation: Arrays
    reward: NDArray[np.float32]
    done: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    present: NDArray[np.bool_]
    info: Arrays
    restarted: NDArray[np.bool_]
    final: Arrays = field(default_factory=dict)
    voided: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))

    @classmethod
    def allocate(cls, space: Space, seats: int, info: Schema, same_step: bool) -> "Tick":
        """Return a new tick for `seats` seats that observe `space`: all zeros, but for
        `present`, which is True everywhere. `info` is `Environment.info`; `final` is
        allocated only with `same_step`."""
        observation = schema_of_space(space, "obs")
        return cls(
            observation=allocate(observation, (seats,)),
            reward=np.zeros(seats, np.float32),
            done=np.zeros(seats, np.bool_),
            truncated=np.zeros(seats, np.bool_),
            present=np.ones(seats, np.bool_),
            info=allocate(info, (seats,)),
            restarted=np.zeros(seats, np.bool_),
            final=allocate(observation, (seats,)) if same_step else {},
            voided=np.zeros(seats, np.bool_),
        )


class NotReady(Exception):
    """A tick that was ready is not any more: its answer is lost, and what answers next
    is being made anew (`Environment.recv`)."""


class Environment(ABC):
    """An environment holds many lanes of one task and steps them together. Its attributes
    are fixed once it is built, but for `resting`, `rests`, `shared`, `away` and `faults`.

    agents: the agents, in the order of their indices
    lanes: L, the number of lanes
    same_step: whether a finished lane begins its next episode within the tick that ends
        it (two rows in a tick)
    resets_any: whether any lane can be reset at any time; False for environments that
        reset a finished lane by themselves on the next tick
    independent: whether each agent's episodes begin and end by themselves, so that a lane
        has none of its own
    info: schema of the environment's own episode statistics, {} when it has none
    max_episode_steps: promised limit: no lane's episode has more steps; 0 where that is
        not known
    most_lanes: most lanes that there can be at a time in all environments of one
        configuration together, whoever built them; 0 where that is not known
    needs_maker: whether the thread that made it must live as long as it does: an engine
        may be told to end with the thread that started it
    render_fps: pictures per second at which it is to be watched; 0 where that is not
        known
    voids: whether steps may be lost, and lanes not begin again in the same tick:
        `Tick.voided` is filled in every tick. Only `ReplayActors` can play in such an
        environment
    timed: whether episodes are cut by the clock, too: no exact run can have them
    resting: whether it failed often, and is tried again after pauses that grow (only
        where `voids`)
    rests: number of times that it began to rest
    shared: whether lanes were seen to hand out one array, which is copied before the
        next lane is stepped
    times: how long steps take, where it breaks off itself what takes too long; what takes
        its place takes them over (`core.step_deadlines.take_over`)
    away: whether it failed, and another one is being made, or a lane of it, for which the
        tick under way waits: what that connects to may be away for long
    faults: texts of what went wrong since they were last read and cleared (only where
        `voids`)
    """

    agents: tuple[AgentInfo, ...]
    lanes: int
    same_step: bool = False
    resets_any: bool = True
    independent: bool = False
    info: Mapping[str, Field] = {}
    max_episode_steps: int = 0
    most_lanes: int = 0
    needs_maker: bool = True
    render_fps: float = 0.0
    voids: bool = False
    timed: bool = False
    resting: bool = False
    rests: int = 0
    shared: bool = False
    times: Sequence[StepTimes] = ()
    away: bool = False
    faults: list[str] = []  # noqa: RUF012  # of those who never void: nobody appends

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if hasattr(cls, "said"):
            raise TypeError(f"{cls.__name__}.said is called episode_infos now; rename the method")

    def bind(self, groups: Sequence[Sequence[int]]) -> None:
        """Fix which agents (by index) make up each group. Called once, before the first
        `send`. Agents of a group have equal spaces. One agent makes the one group that
        there can be; an environment of several implements this."""
        if [list(group) for group in groups] != [[0]]:
            name = getattr(self, "name", type(self).__name__)
            raise ConfigError(f"{name} has one agent; it cannot be bound to groups {groups}")

    @abstractmethod
    def send(self, actions: Sequence[Arrays], reset: NDArray[np.bool_]) -> None:
        """Begin a tick. `actions` has per group leaf name (``action``, ``action.x``) →
        [N, ...], read before this returns; actions of absent or finished seats mean
        nothing. `reset` is bool [L]: these lanes begin a new episode instead of stepping.
        The first call resets all."""

    def ready(self) -> bool:
        """True when `recv` returns without waiting: of a plain environment always."""
        return True

    @abstractmethod
    def recv(self, ticks: Sequence[Tick]) -> None:
        """Finish the tick: fill every array of each group's tick. Raises
        `EnvironmentFault` naming lane and cause; and `NotReady` where it turns out now
        that something failed, and is made anew: it is `away`, and to be received again
        once it is ready."""

    def begin_close(self) -> None:
        """Tell what is under way elsewhere to end, without waiting for it: so several
        environments wait for that at the same time. `close` must follow."""

    @abstractmethod
    def close(self) -> None:
        """Free everything, but for what hangs in a thread of its own: that is freed
        there, once it comes back. May be called twice."""

    def wait_closed(self, seconds: float) -> bool:
        """Wait until everything is freed that `close` had to leave to others, so many
        seconds at most. Return whether it is."""
        return True

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Give the environment a callable that it calls, from any thread, when a tick
        becomes ready. Plain environments ignore it. Those on an event loop go on while
        the thread that sent waits at a `Bell`, or asks whether they are `ready`."""

    def seed(self, seed: int) -> None:
        """Seed lane i's next reset with ``seed + i``, so that its episode depends on that
        and on its actions alone. Exact runs call it before each reset, and after a resume
        play an open episode again by that. Environments that cannot do so ignore it."""

    def enter_stage(self, options: Mapping[str, Any]) -> None:
        """Hand `options` (plain data, see `Stage`) to each lane's resets from now on.
        Raises `ConfigError` where resets take none."""
        raise ConfigError(
            f"the resets of a {type(self).__name__} take no options, so that it can have no curriculum; use "
            "an environment whose do"
        )

    def restart_lanes(self, permit: Callable[[Exception], int]) -> bool:
        """Make a lane that fails anew from now on, reset it in the same tick, and flag
        its seats as `Tick.voided` and `restarted` where they were in an episode; where
        agents are `independent`, their open episodes are cut. `permit` is called with
        each fault before: it returns the number of the restart, and raises where there
        were too many. Return False where single lanes cannot be made anew, and nothing
        changes."""
        return False

    def watch(self, deadline_s: float | None) -> None:
        """Take a lane that hangs for failed from now on, after so many seconds; None:
        after what follows from its steps so far (see `ActorConfig.deadline_s`). Called
        before the first `send`, if at all. A `deadline_s` of the environment's own comes
        first. Most step in their caller's thread, and can do nothing about it."""

    def doing(self) -> str:
        """Return in which calls the threads are that have not answered, for messages; ""
        where it has none."""
        return ""

    def keep_episodes(self) -> None:
        """Keep from now on what `state` and `episode` need of open episodes. Called
        before the first `send`, in runs that resume exactly."""

    def episode(self, lane: int) -> Part | None:
        """Return how the open episode of a lane began, and what was done in it until now,
        for the record of a fault: ``seed`` and ``generator`` (of its reset; None: none,
        or not known), ``steps``, and ``actions``, GROUP:NAME → [steps, seats of a lane,
        ...]. That of a tick that failed is the last one. None where that is not kept."""
        return None

    def begin_like(self, episode: Part) -> None:
        """Have the next reset of lane 0 begin an episode as this one did (see `episode`).
        Called after `enter_stage`."""
        self.seed(episode["seed"])

    def state(self) -> Part | None:
        """Return all that its ticks to come depend on besides what they are sent: its
        lanes' open episodes and its random streams. Called between `recv` and `send`.
        None where that cannot be told: a run that is resumed cuts its open episodes."""
        return None

    def load_state(self, state: Part) -> Mapping[int, str]:
        """Be as the environment was that returned `state`, in place of the first `send`;
        it has as many lanes. Return of each lane whose open episode could not be brought
        back why not: that lane is reset with the next `send`."""
        raise CheckpointError(f"a {type(self).__name__} has no state that could be loaded")

    def episode_infos(self, group: int, seats: Sequence[int]) -> Sequence[Any]:
        """Return what the environment said in the infos of the tick that was received
        last, of each of these seats of a group: a mapping of anything, as it is, or None.
        Asked of seats whose episodes that tick has ended, or after which they were cut.
        Most have none."""
        return [None] * len(seats)

    def statistics(self) -> dict[str, TallyEntry]:
        """Return what the environment measured since the last call, besides rewards and
        episodes: by name, as `Tally.take` gives it. They become the run's metrics
        ``environment/NAME``. Most have none."""
        return {}

    def render(self) -> NDArray[np.uint8] | None:
        """Return lane 0 as [height, width, 3] uint8, or None when the environment has no
        picture."""
        return None


class EnvironmentConfig(Config):
    """The configuration of an environment: a subclass is what `Actors.environment` takes,
    and builds the environment."""

    @classmethod
    def from_name(cls, name: str, settings: Mapping[str, Any]) -> "EnvironmentConfig":
        """Return the configuration for what a user calls `name`, as "ALE/Pong-v5", with
        `settings` besides. `presets.environment_names.FAMILIES` says which kind of
        environment a name is of. Raises `ConfigError` for settings that do not fit."""
        raise TypeError(f"{cls.__name__} has no from_name()")

    def preset_name(self, name: str) -> str:
        """Return the name of what is played, where users call the environment `name`: of
        a server, what it says. Raises `ConfigError` where nobody answers."""
        return name

    def make_one(self) -> Any:
        """Return one bare `gymnasium.Env`, as a server plays it. Raises `ConfigError`
        where it is none."""
        raise ConfigError(
            f"a {type(self).__name__} environment cannot be served; one of Gymnasium or an Atari game can "
            'be served: "CartPole-v1", "FILE.py:NAME", "ALE/Pong-v5"'
        )

    @property
    def single(self) -> bool:
        """True when there is only one instance, which is never built twice (an editor
        that is open): it has one lane, and no check tries it out."""
        return False

    @property
    def draws(self) -> bool:
        """True when an environment built with `render` may have pictures; False where it
        never has, so that nobody is told to watch it."""
        return True

    @property
    def remote(self) -> bool:
        """True when a server takes the steps, so that calls for them may be lost."""
        return False

    @property
    def smaller_images(self) -> str:
        """What to do so that its images are smaller; for messages."""
        return "let the environment show smaller ones"

    @property
    def one_row(self) -> str:
        """What to do so that no tick has two rows of a lane, where its environments are
        `same_step`; for messages."""
        return (
            "take copies of a single environment (Gymnasium), or a vector environment that resets in the "
            "next step"
        )

    @property
    def timed_calls(self) -> bool:
        """True when its environments break off what takes too long themselves, wherever
        they step: by the deadline that `Environment.watch` tells them, or a `deadline_s`
        of their own. Who looks at the time besides (`Slots`) leaves them time for it."""
        return False

    @property
    def usual_restarts(self) -> float:
        """How often an actor's lanes are made anew where its `lane_restarts` is "auto":
        inf for those that rest for longer each time."""
        return 5

    @classmethod
    def outside(cls, settings: Mapping[str, Any]) -> Sequence[Outside]:
        """Return the code, programs and addresses that these settings of this class name:
        before a run from somebody else's folder uses them, the user is asked
        (`tidemill.run.trust`). The settings are plain data that nobody has checked. A
        class that does not implement this is asked about as a whole; one that wraps
        another environment leaves out what that names."""
        return [Outside(f"builds {cls.__name__} with {quoted(settings)}")]

    def build(self, lanes: int, seed: int, render: bool = False) -> Environment:
        """Return the environment with `lanes` lanes; lane i is seeded with ``seed + i``
        at its first reset. `render` asks for pictures."""
        raise TypeError(f"{type(self).__name__} has no build()")

    @property
    def rewarded(self) -> str:
        """What its rewards are where they are not the task's own, so that returns of
        training tell something else than one would think; else ""."""
        return ""

    def scored(self) -> "EnvironmentConfig":
        """Return what has the task's own rewards and episodes, so that it is known what a
        policy reaches: for an evaluation, or to watch."""
        return self

    def bare(self) -> "EnvironmentConfig":
        """Return what is to be built where several lanes step together and a fault may
        end it all: for an evaluation, or to watch."""
        return self
