"""Plain Gymnasium environments: many copies, stepped one after the other inside `send`,
or each in a thread."""

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import count_nonzero
from numpy.typing import NDArray

from tidemill.api.environment import AgentInfo, Environment, EnvironmentConfig, NotReady, Tick
from tidemill.api.external_code import Outside
from tidemill.api.spaces import schema_of_space
from tidemill.core.clock import awake
from tidemill.core.config import check_counts, layout_setting
from tidemill.core.cores import every_core
from tidemill.core.cut import Part
from tidemill.core.errors import ConfigError, EnvironmentAway, EnvironmentFault
from tidemill.core.schema import Arrays, allocate
from tidemill.core.user_code_loading import Code, name_of_code
from tidemill.envs.aliased_arrays import AliasDetector
from tidemill.envs.batch_lanes import BATCHES, BatchLanes, batch_of
from tidemill.envs.episode_replay import (
    TOO_LONG,
    KeptEpisodes,
    another,
    draw_from,
    drawn_from,
    play_again,
    tells_state,
)
from tidemill.envs.gymnasium_registry import call_maker, find_spec, fps_of, load_maker, outside, pictures
from tidemill.envs.lane_restarts import SEEDS_APART, Remaking, made_again
from tidemill.envs.lane_threads import LaneThreads, RaisedError
from tidemill.envs.reset_options import reset_env, take_options
from tidemill.envs.space_values import ActionWriter, LeafReader, brief, readers_of
from tidemill.envs.spaces import spaces_of
from tidemill.envs.tick_check import FLAGS, NUMBERS, TickCheck, check_flag, check_number, is_flag, is_number
from tidemill.envs.wrapping import names_of, outside_wrappers, wrapped

if TYPE_CHECKING:
    from tidemill.envs.lane_coroutines import LaneCoroutines

Result = tuple[Any, Any, Any, Any, Any]  # what a Gymnasium step returns


@dataclass(frozen=True, kw_only=True)
class Gymnasium(EnvironmentConfig):
    """A `Gymnasium` config builds the Gymnasium environment that exactly one of `id` and
    `make` names.

    id: "CartPole-v1", or "module:ENV_ID" to import the module that registers it
    make: "module:NAME" or "FILE.py:NAME", the place of a class or function that returns a
        `gymnasium.Env`; or that class or function itself
    kwargs: arguments that it is made with
    max_episode_steps: most steps of an episode, which is cut (truncated) there; None: the
        environment's own limit, 0: none. `Actors.max_episode_steps` comes on top: the
        smaller one holds
    threads: threads in which the lanes of a target step, at most one per lane; 0: in the
        actor's own, one lane after the other. For steps that wait, or compute outside
        Python's lock; quick ones in Python are slower so. Copies must not share anything
        that one thread alone may touch. Rows are the same whatever the number. Split the
        lanes among targets (`Actors.ring`), so that some step while the actor serves
        others, and where they wait keep it on one core (`Actors.one_core`): ring=16,
        lanes=4, threads=4 for 64 in all
    vectorized: whether lanes of an environment in `batch_lanes.BATCHES` (MuJoCo, several
        of classic control) step by whole arrays, which gives the numbers of Gymnasium's
        own in every bit; False: Gymnasium's own code steps each. Threads, pictures and
        wrappers have that in any case
    wrap: wrappers around each copy, the first one inside: a name, as "flatten" or
        "frame-skip(4)" (`envs.wrapping.WRAPPERS`), "module:NAME" or "FILE.py:NAME", with
        plain arguments in brackets; or a class or function that takes the environment
    """

    id: str | None = None
    make: Code | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    threads: int = layout_setting(0)
    vectorized: bool = True
    wrap: tuple[Code, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "make", name_of_code(self.make))
        if (self.id is None) == (self.make is None):
            raise ConfigError(
                'name an environment by exactly one of id ("CartPole-v1") and make ("FILE.py:NAME"), not id '
                f"= {self.id!r} and make = {self.make!r}"
            )
        self.check_least(max_episode_steps=0, threads=0)
        object.__setattr__(self, "wrap", names_of(self.wrap))

    @property
    def name(self) -> str:
        """What messages call this environment."""
        return str(self.id or self.make)

    @classmethod
    def outside(cls, settings: Mapping[str, Any]) -> Sequence[Outside]:
        return outside(settings) + outside_wrappers(settings.get("wrap"))

    @property
    def slowed_by_wrappers(self) -> bool:
        """True where lanes would step by whole arrays but for their wrappers."""
        return bool(
            self.wrap
            and self.id
            and self.vectorized
            and not self.threads
            and find_spec(self.id).entry_point in BATCHES
        )

    def build(self, lanes: int, seed: int, render: bool = False) -> "LaneLoop | BatchLanes":
        """Return `lanes` copies as one environment."""
        check_counts(lanes=lanes)
        import gymnasium

        first = self.make_one(render)
        own = getattr(getattr(first, "spec", None), "max_episode_steps", None)
        given = None if self.wrap and own else self.max_episode_steps  # which a wrapper may lower
        limit: int = (own if given is None else given) or 0
        limited = limit > 0 and not self.wrap and type(first) is gymnasium.wrappers.TimeLimit
        if self.vectorized and not (render or self.threads):
            bare = first.env if limited else first
            if (batch := batch_of(bare, lanes)) is not None:
                return batch(bare, self.name, lanes, seed, limit)
        envs = [first, *(self.make_one() for _ in range(lanes - 1))]
        # The loop counts the steps of all lanes at once, which is 0.1 µs a step less than
        # a wrapper around each.
        loop = LaneLoop(
            [env.env for env in envs] if limited else envs,
            self.name,
            seed,
            self.threads,
            limit=limit if limited else 0,
            make_one=(lambda: self.make_one().env) if limited else self.make_one,
        )
        loop.max_episode_steps = limit
        return loop

    def make_one(self, render: bool = False) -> Any:
        """Return one bare `gymnasium.Env`, with its time limit and in its wrappers."""
        return wrapped(self._make_bare(render), self.wrap, self.name)

    def _make_bare(self, render: bool) -> Any:
        import gymnasium
        from gymnasium.envs.registration import load_env_creator

        limit = self.max_episode_steps
        if self.make is not None:
            maker = load_maker(str(self.make), "a gymnasium.Env")
            env = call_maker(maker, self.make, maker, {**self.kwargs, **(pictures(maker) if render else {})})
            if not isinstance(env, gymnasium.Env):
                cure = (
                    f'; its step is async def: take Asynchronous(make="{self.make}")'
                    if iscoroutinefunction(getattr(env, "step", None))
                    else ""
                )
                raise ConfigError(f"make: {self.make} returned {env!r}, which is no gymnasium.Env{cure}")
            return gymnasium.wrappers.TimeLimit(env, limit) if limit else env
        spec = find_spec(str(self.id))
        if spec.entry_point is None:
            raise ConfigError(
                f'environment "{self.id}" has only a vector form: use GymnasiumVector(id="{self.id}")'
            )
        # The passive checker looks for what this file looks for, and the order of calls
        # is kept by the contract: neither is worth a call per step.
        plain = copy.copy(spec)
        plain.order_enforce, plain.disable_env_checker = False, True

        def make(**kwargs: Any) -> Any:
            creator: Any = (
                load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
            )
            given: dict[str, Any] = {**kwargs, **(pictures(creator) if render else {})}
            return gymnasium.make(plain, max_episode_steps=-1 if limit == 0 else limit, **given)

        return call_maker(make, f'environment "{self.id}"', spec.entry_point, self.kwargs)


class LaneLoop(Environment):
    """L Gymnasium environments of one agent. `send` steps them; `recv` writes what they
    returned. With `threads`, `send` has them stepped and `recv` is for when they are
    ready. Either raises `EnvironmentFault` when a lane raised: `send`, or with threads
    `recv`.

    Per tick and lane there is only the call of `step`: what the lanes return is turned
    into arrays by a few calls for all of them.
    """

    def __init__(
        self,
        envs: Sequence[Any],
        name: str,
        seed: int,
        threads: int = 0,
        stepper: "LaneThreads | LaneCoroutines | None" = None,
        limit: int = 0,
        make_one: Callable[[], Any] | None = None,
    ) -> None:
        """Take over `envs`, equal ones; `name` is what messages call them. `stepper`
        steps them, in place of threads, and is given Python's numbers. After `limit`
        steps an episode is cut; 0: they see to that themselves. `make_one` returns
        another such environment; None: nobody can make one."""
        self.name, self.lanes = name, len(envs)
        self.envs = list(envs)
        self.max_episode_steps = getattr(getattr(envs[0], "spec", None), "max_episode_steps", None) or 0
        self._spaces = spaces_of(envs[0], name)
        self.agents = (AgentInfo("agent", self._spaces),)
        self.render_fps = fps_of(envs[0])
        # env steps of each lane in its episode
        self._limit, self._counts = limit, np.zeros(self.lanes, np.int64)
        self._make_one, self._seed = make_one, seed
        self._permit: Callable[[Exception], int] | None = None  # asked before a lane is made anew
        self._anew: list[int] = []  # lanes that were made anew in this tick
        self._remaking: dict[int, Remaking] = {}  # lanes that are closed, and to be made anew
        self._voided = False  # the tick before had such lanes
        self._options: dict[str, Any] | None = None  # of resets
        self._seeds: dict[int, int] = {}  # of next resets
        self.seed(seed)
        self._steps = [env.step for env in envs]
        self._aliases = AliasDetector(name)
        self._check = TickCheck(self._spaces.observation, name, ("agent",))
        self._readers = readers_of(self._spaces.observation, LeafReader)
        self._writer = ActionWriter(self._spaces.action, plain=stepper is not None)
        self._results: list[Any] = []  # of each lane a `Result`, or `RaisedError`
        self._arguments: list[Any] = []
        self._left: set[int] = set()  # lanes whose environments hang, and are their threads' to close
        self._stepper = stepper or (LaneThreads(name, self.lanes, threads, self._leave) if threads else None)
        self._none = np.zeros(self.lanes, np.bool_)
        self._resets: NDArray[np.bool_] = self._none  # lanes that this tick resets
        self._pending = False  # with a crew: sent and not yet received
        # newest observation of each lane: what an idle one shows
        self._last: Sequence[Any] = [None] * self.lanes
        self._idle = np.ones(self.lanes, np.bool_)  # finished and not yet reset
        self._absent: NDArray[np.bool_] | None = None  # lanes that were idle in the tick under way
        self._kept: KeptEpisodes | None = None  # for a cut

    def send(self, actions: Sequence[Arrays], reset: NDArray[np.bool_]) -> None:
        """Step every lane, or reset it where `reset` says so. A finished lane that is not
        reset does nothing."""
        self._resets = self._none
        if self._kept is not None:
            self._kept.add(actions[0])
        calls = self._copying() if self._aliases.active else self._steps
        apart: Sequence[int] = ()
        self._counts += 1
        if count_nonzero(reset) or count_nonzero(self._idle):
            calls = calls.copy()
            self._resets = reset.copy()
            others = np.flatnonzero(reset | self._idle)
            self._counts[others] = 0
            for lane in (apart := others.tolist()):
                calls[lane] = self._beginner(lane) if reset[lane] else self._idler(lane)
            self._idle &= ~reset
            self._absent = self._idle.copy() if self._idle.any() else None
        else:
            self._absent = None
        given = self._writer.values(actions[0])
        self._arguments = given
        if self._stepper is not None:
            self._pending = True
            self._stepper.begin(calls, given, apart, range(self.lanes))
            return
        answered: list[Any] = []  # by so called who looks which lane hangs (`core/thread_stacks.py`)
        self._results = answered
        while True:
            begun = len(answered)
            try:  # keeps those before one that raises
                answered.extend(
                    map(operator.call, calls[begun:], given[begun:])
                    if begun
                    else map(operator.call, calls, given)
                )
                return
            except BaseException as error:
                raised = error
            lane = len(answered)
            answered.append(RaisedError(raised))
            self._restart(self._fault_of(lane, raised, bool(reset[lane])))
            del raised  # its traceback holds this frame, and the environment that is gone

    def _fault_of(self, lane: int, error: BaseException, resetting: bool) -> EnvironmentFault:
        """Return what a lane raised as a fault. Raises what is none."""
        from asyncio import CancelledError  # 30 ms that a worker can do without

        if isinstance(error, EnvironmentFault):
            return error.in_lane(lane)
        if not isinstance(error, (Exception, CancelledError)):
            raise error
        doing = "resetting" if resetting else f"stepping with action {self._arguments[lane]}"
        fault = EnvironmentFault(
            f"{self.name}: lane {lane} raised {type(error).__name__} while {doing}: {error}"
        ).in_lane(lane)
        fault.__cause__ = error
        return fault

    def restart_lanes(self, permit: Callable[[Exception], int]) -> bool:
        if self._make_one is None:
            return False
        self._permit = permit
        return True

    @property
    def away(self) -> bool:  # type: ignore[override]
        """See `Environment`."""
        return bool(self._remaking)

    def _restart(self, fault: EnvironmentFault) -> None:
        """Make the environment of the lane that failed anew, and reset it; again where
        that fails, and later where what it connects to is away. Raises the fault where
        that is not possible or not permitted."""
        lane = fault.lane
        if lane is None or self._make_one is None or self._permit is None:
            raise fault
        self._remaking[lane] = Remaking(self._permit, fault)
        self._anew.append(lane)
        self._close_lane(lane)
        self._restart_due()

    def _restart_due(self) -> bool:
        """Make those lanes anew whose time has come. True where none is left."""
        for lane, remaking in list(self._remaking.items()):
            while awake() >= remaking.due:
                fault = self._restarted(lane, remaking)
                if fault is None:
                    del self._remaking[lane]
                    break
                remaking.failed(fault)
        return not self._remaking

    def _restarted(self, lane: int, remaking: Remaking) -> EnvironmentFault | None:
        """Make the environment of a lane anew, and reset it. Return why that is to be
        tried again, if it is."""
        who, make = f"{self.name}: lane {lane}", self._make_one
        assert make is not None
        try:
            env = made_again(make, who, remaking.fault)
        except EnvironmentAway as away:
            return away
        if (found := spaces_of(env, self.name)) != self._spaces:
            env.close()
            raise EnvironmentFault(
                f"{who} came back with other spaces than it had ({found}): it is another environment, or "
                f"another version of it, now. It failed by this: {remaking.fault}"
            )
        self.envs[lane], self._steps[lane] = env, env.step
        self._left.discard(lane)
        self._seeds[lane] = self._seed + SEEDS_APART * remaking.number + lane
        self._counts[lane] = 0
        answer = self._do(lane, self._beginner(lane))
        if not isinstance(answer, RaisedError):
            self._results[lane] = answer
            return None
        self._close_lane(lane)
        return self._fault_of(lane, answer.error, resetting=True)

    def _close_lane(self, lane: int) -> None:
        """Close what failed, unless it is a thread's that hangs in it."""
        if lane not in self._left:
            with suppress(Exception):
                self.envs[lane].close()

    def _leave(self, lane: int) -> Callable[[], object]:
        """Leave the environment of a lane to the thread that hangs in it. Return what
        closes it."""
        self._left.add(lane)
        close: Callable[[], object] = self.envs[lane].close
        return close

    def _do(self, lane: int, call: Callable[[Any], Any]) -> Any:
        """Return what this call returns, or raised (`RaisedError`), where `lane` is
        stepped."""
        if self._stepper is None:
            try:
                return call(None)
            except BaseException as error:
                return RaisedError(error)
        told: list[Any] = list(self._results)
        calls = [_returning(answer) for answer in told]
        calls[lane] = call
        self._stepper.begin(calls, self._arguments, range(self.lanes), (lane,))
        self._results = self._stepper.take()
        return self._results[lane]

    def watch(self, deadline_s: float | None) -> None:
        if isinstance(self._stepper, LaneThreads):
            self._stepper.watch(deadline_s)

    def doing(self) -> str:
        return self._stepper.doing() if isinstance(self._stepper, LaneThreads) else ""

    def ready(self) -> bool:
        """True when all lanes have answered: without threads, always, but where one is
        made anew."""
        if self._stepper is not None and not self._stepper.ready():
            return False
        return not self._remaking or self._restart_due()

    def on_ready(self, wake: Callable[[], None]) -> None:
        if self._stepper is not None:
            self._stepper.on_ready(wake)

    def recv(self, ticks: Sequence[Tick]) -> None:
        """Write what the lanes returned. Raises `EnvironmentFault` for what the spaces
        forbid."""
        if self._pending:
            self._take()
        tick = ticks[0]
        while True:
            if self._remaking and not self._restart_due():
                raise NotReady
            try:
                observations = self._write(tick)
                break
            except Exception as error:
                fault = self._explained(error)
            self._restart(fault)
            del fault
        if self._limit:
            tick.truncated |= self._counts >= self._limit
        self._last = observations
        if count_nonzero(tick.done) or count_nonzero(tick.truncated):
            self._idle |= tick.done | tick.truncated
            tick.truncated[tick.done] = False  # an end is an end, even at the limit
        tick.present.fill(True)
        if self._absent is not None:
            tick.present[self._absent] = False
        tick.restarted.fill(False)
        if self._anew or self._voided:
            tick.voided.fill(False)
            self._voided, lost = bool(self._anew), [lane for lane in self._anew if not self._resets[lane]]
            tick.voided[lost] = tick.restarted[lost] = True
            self._anew.clear()
        if self._aliases.active:
            self._aliases.next_tick()
            self.shared = self._aliases.found

    def episode_infos(self, group: int, seats: Sequence[int]) -> Sequence[Any]:
        return [self._results[lane][4] for lane in seats]

    def seed(self, seed: int) -> None:
        self._seeds = {lane: seed + lane for lane in range(self.lanes)}

    def enter_stage(self, options: Mapping[str, Any]) -> None:
        self._options = take_options(self.envs[0], self.name, options)
        if self._kept is not None:
            self._kept.enter_stage(self._options)

    # ---- a cut -------------------------------------------------------------------------

    def keep_episodes(self) -> None:
        if not all(map(tells_state, self.envs)):
            self._kept = KeptEpisodes(self.lanes)

    def episode(self, lane: int) -> Part | None:
        if self._kept is None or not (self._stepper is None or isinstance(self._stepper, LaneThreads)):
            return None
        kept = self._kept.state(lane)
        if kept is None:
            return None
        return {**kept, "actions": {f"0:{name}": array[:, None] for name, array in kept["actions"].items()}}

    def begin_like(self, episode: Part) -> None:
        self._seeds = {} if episode["seed"] is None else {0: episode["seed"]}
        if episode["generator"] is not None:
            reset_env(self.envs[0], 0, self._options)
            draw_from(self.envs[0], episode["generator"])

    def state(self) -> Part | None:
        if self._stepper is not None and not isinstance(self._stepper, LaneThreads):
            return None
        return {
            "lanes": {str(lane): self._state_of(lane) for lane in range(self.lanes)},
            "seeds": {str(lane): seed for lane, seed in self._seeds.items()},
            "counts": self._counts,
            "idle": self._idle,
            "voided": self._voided,
        }

    def _state_of(self, lane: int) -> Part:
        """Return what is known of a lane; no "episode" where it is between two, or too
        long."""
        env = self.envs[lane]
        if tells_state(env):
            return {"own": env.tidemill_state()}
        drawn = {"generator": drawn_from(env)}
        if self._idle[lane] or self._kept is None or (episode := self._kept.state(lane)) is None:
            return drawn
        return {**drawn, "episode": episode, "seen": self._seen(self._last[lane])}

    def _seen(self, observation: Any) -> Arrays:
        """Return an observation as its rows have it."""
        seen = {}
        for reader in self._readers:
            row = np.empty((1, *reader.field.shape), reader.field.dtype)
            reader.write([observation], row)
            seen[reader.name] = row[0]
        return seen

    def load_state(self, state: Part) -> Mapping[int, str]:
        lanes = [state["lanes"][str(lane)] for lane in range(self.lanes)]
        self._counts[:], self._idle[:] = state["counts"], state["idle"]
        self._voided = state["voided"]
        calls = [self._bringer(lane, saved) for lane, saved in enumerate(lanes)]
        if self._stepper is None:
            answers = [call(None) for call in calls]
        else:  # each in the thread that steps it
            self._stepper.begin(calls, [None] * self.lanes, range(self.lanes))
            answers = self._stepper.take()
        self._last = [observation for observation, _ in answers]
        self._seeds = {int(lane): seed for lane, seed in state["seeds"].items()}
        if self._kept is not None:
            episodes = {lane: saved["episode"] for lane, saved in enumerate(lanes) if "episode" in saved}
            blank = allocate(schema_of_space(self._spaces.action, "action"), (self.lanes,))
            self._kept = KeptEpisodes.of(episodes, blank, self._kept.options)
        return {lane: why for lane, (_, why) in enumerate(answers) if why}

    def _bringer(self, lane: int, saved: Part) -> Callable[[Any], tuple[Any, str]]:
        """Return a function that brings a lane back to where it was. It returns what the
        lane shows, and why its open episode is lost, "" where it is not."""
        env, idle, kept = self.envs[lane], bool(self._idle[lane]), self._kept

        def bring(_: Any) -> tuple[Any, str]:
            try:
                # an idle lane's last observation, which nobody looks at, is any
                seen, why = reset_env(env, 0, self._options)[0], ""
                if "own" in saved:
                    env.load_tidemill_state(saved["own"])
                    return seen, why
                if not idle and "episode" not in saved:
                    why = TOO_LONG
                elif not idle:
                    assert kept is not None  # who cannot tell its state keeps its episodes
                    episode = saved["episode"]
                    seen, why = play_again(env, episode, self._done(episode), kept.options_of(episode))
                    now = {} if why else self._seen(seen)
                    other = [name for name in now if now[name].tobytes() != saved["seen"][name].tobytes()]
                    why = why or (f"another {other[0]} in the end" if other else "")
                    why = another(why) if why else ""
                draw_from(env, saved["generator"])
                return seen, why
            except Exception as error:
                return None, f"it raised {type(error).__name__} as an episode was played again: {error}"

        return bring

    def _done(self, episode: Part) -> list[Any]:
        """Return the actions of an episode as the environment takes them."""
        return self._writer.values(episode["actions"]) if episode["steps"] else []

    def render(self) -> NDArray[np.uint8] | None:
        """Return lane 0's picture, when it was built with `render`."""
        if getattr(self.envs[0], "render_mode", None) != "rgb_array":
            return None
        picture: NDArray[np.uint8] | None = self.envs[0].render()
        return picture

    def begin_close(self) -> None:
        if self._stepper is not None:
            self._stepper.begin_close()

    def close(self) -> None:
        """Close every lane; those that hang in a thread that thread closes once it comes
        back: nobody else may touch them."""
        envs, self.envs = self.envs, []
        self._aliases.close()
        closed = self._left | self._remaking.keys()
        ours = {lane: env for lane, env in enumerate(envs) if lane not in closed}
        stuck: list[int] = []
        if self._stepper is not None and envs:
            stuck = self._stepper.close(lambda lane: ours[lane].close())
        for lane in ours.keys() - {*stuck}:
            ours[lane].close()

    def wait_closed(self, seconds: float) -> bool:
        return self._stepper is None or self._stepper.left(seconds)

    def _take(self) -> None:
        """Take over what the crew's lanes returned; of those that raised, the first is
        the one that is told where they cannot be made anew."""
        assert self._stepper is not None
        self._results, self._pending = self._stepper.take(), False
        for lane in range(self.lanes):
            if isinstance(result := self._results[lane], RaisedError):
                self._restart(self._fault_of(lane, result.error, bool(self._resets[lane])))

    def _write(self, tick: Tick) -> Sequence[Any]:
        """Write what the lanes returned as it is, and return their observations. Raises
        whatever comes of what does not fit."""
        observations, rewards, terminated, truncated, _ = zip(*self._results, strict=True)
        for reader in self._readers:
            reader.write(observations, tick.observation[reader.name])
        if not (NUMBERS.issuperset(map(type, rewards)) or all(map(is_number, rewards))):
            raise TypeError("rewards")
        tick.reward[:] = rewards
        ends = terminated + truncated
        if not (FLAGS.issuperset(map(type, ends)) or all(map(is_flag, ends))):
            raise TypeError("flags")
        if ends.count(False) == len(ends):  # a tenth of what it takes to write them
            tick.done.fill(False)
            tick.truncated.fill(False)
        else:
            tick.done[:] = terminated
            tick.truncated[:] = truncated
        self._check(tick)
        return observations

    def _beginner(self, lane: int) -> Callable[[Any], Result]:
        """A stand-in for `step` that resets instead. Each lane is seeded once, or
        whenever `seed` says so."""
        env, seed = self.envs[lane], self._seeds.pop(lane, None)

        def begin(_: Any) -> Result:
            if self._kept is not None:
                self._kept.begin(lane, env, seed)
            with every_core():  # a simulator that it starts is no part of this process
                answer = reset_env(env, seed, self._options)
            return self._begun(lane, answer)

        return begin

    def _copying(self) -> list[Callable[[Any], Result]]:
        """Return the lanes' steps, each with what it tells copied before the next lane is
        stepped."""

        def copier(lane: int, step: Callable[[Any], Result]) -> Callable[[Any], Result]:
            return lambda action: self._copied(lane, step(action))

        return [copier(lane, step) for lane, step in enumerate(self._steps)]

    def _copied(self, lane: int, result: Any) -> Any:
        if not isinstance(result, tuple) or not result:
            return result  # `_explain` says what is wrong with it
        return self._aliases.copied(result[0], lane), *result[1:]

    def _begun(self, lane: int, answer: Any) -> Result:
        where = f"{self.name}: lane {lane}"
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise EnvironmentFault(f"{where}: reset returned {brief(answer)} instead of (observation, info)")
        for reader in self._readers:
            reader.check(answer[0], where)
        return (
            self._aliases.copied(answer[0], lane) if self._aliases.active else answer[0],
            0.0,
            False,
            False,
            None,
        )

    def _idler(self, lane: int) -> Callable[[Any], Result]:
        observation = self._last[lane]
        return lambda _: (observation, 0.0, False, False, None)

    def _explained(self, error: Exception) -> EnvironmentFault:
        """Find which lane's answer does not fit, and return a fault that says what it
        should have been."""
        for lane, result in enumerate(self._results):
            try:
                self._look(result, f"{self.name}: lane {lane}")
            except EnvironmentFault as fault:
                fault.__cause__ = error
                return fault.in_lane(lane).telling(self._told(lane))
        if isinstance(error, EnvironmentFault):
            return error if error.lane is None else error.telling(self._told(error.lane))
        unknown = EnvironmentFault(f"{self.name}: what it returned does not fit its spaces: {error}")
        unknown.__cause__ = error
        return unknown

    def _told(self, lane: int) -> dict[str, dict[str, Any]]:
        """Return what a lane returned, for its fault."""
        result = self._results[lane]
        names, told = ("obs", "reward", "terminated", "truncated", "info"), {"before": self._last[lane]}
        if not isinstance(result, tuple) or len(result) != len(names):
            return {"agent": {**told, "answer": result}}
        return {"agent": {**told, **dict(zip(names, result, strict=True))}}

    def _look(self, result: Any, where: str) -> None:
        """Raise `EnvironmentFault` for what no step may return."""
        if not isinstance(result, tuple) or len(result) != 5:
            raise EnvironmentFault(
                f"{where}: step returned {brief(result)} instead of (observation, reward, terminated, "
                "truncated, info)"
            )
        observation, reward, terminated, truncated, _ = result
        for reader in self._readers:
            reader.check(observation, where)
        check_number(reward, "reward of agent agent", where)
        check_flag(terminated, "terminated of agent agent", where)
        check_flag(truncated, "truncated of agent agent", where)


def _returning(answer: Any) -> Callable[[Any], Any]:
    return lambda _: answer
