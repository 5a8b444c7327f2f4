"""Native vector environments: whole arrays in, whole arrays out, no Python per lane."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import AgentInfo, Environment, EnvironmentConfig, Tick
from tidemill.api.external_code import Outside
from tidemill.api.spaces import Dict, Spaces, Tuple, leaves
from tidemill.core.clock import awake
from tidemill.core.config import check_counts
from tidemill.core.cut import Part
from tidemill.core.errors import ConfigError, EnvironmentFault, raised_by
from tidemill.core.schema import Arrays
from tidemill.core.user_code_loading import Code, name_of_code
from tidemill.envs.batch_lanes import BatchLanes, batch_of
from tidemill.envs.episode_replay import tells_state
from tidemill.envs.gymnasium_registry import arguments, call_maker, find_spec, fps_of, load_maker, outside
from tidemill.envs.hanging_threads import HANGING
from tidemill.envs.reset_options import take_options
from tidemill.envs.space_values import LeafReader, readers_of
from tidemill.envs.spaces import action_caster, from_gymnasium, nest
from tidemill.envs.tick_check import TickCheck, check_flag, check_number

Autoreset = Literal["next-step", "same-step", "disabled"]
# values of Gymnasium's AutoresetMode
_PUBLISHED: dict[str, Autoreset] = {"NextStep": "next-step", "SameStep": "same-step", "Disabled": "disabled"}
_MODES = {mode: published for published, mode in _PUBLISHED.items()}
_AHEAD_S = 1.0  # seconds of a step after which its thread's waiting is its actor's
_CLOSING_S = 5.0  # seconds that a step under way has to end before the environment is left


@dataclass(frozen=True, kw_only=True)
class GymnasiumVector(EnvironmentConfig):
    """A `GymnasiumVector` config builds an environment that comes as a vector of its own
    (Gymnasium's ``make_vec``), named by exactly one of `id` and `make`.

    id: "CartPole-v1", or "module:ENV_ID"
    make: "module:NAME" or "FILE.py:NAME": a callable that takes `num_envs` and returns a
        `gymnasium.vector.VectorEnv`
    kwargs: arguments of its constructor
    max_episode_steps: passed to its constructor; None: its own
    seed_argument: argument of its constructor that takes the seed, where `reset` does
        not
    autoreset: how finished lanes begin again. None: as the environment publishes, or
        next-step where it can be told. State it only for an environment that publishes
        nothing, or to choose for one that can be told
    """

    id: str | None = None
    make: Code | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    seed_argument: str | None = None
    autoreset: Autoreset | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "make", name_of_code(self.make))
        if (self.id is None) == (self.make is None):
            raise ConfigError(
                f"name an environment by exactly one of id and make, not id = {self.id!r} and make = "
                f"{self.make!r}"
            )

    @classmethod
    def outside(cls, settings: Mapping[str, Any]) -> Sequence[Outside]:
        return outside(settings)

    def build(self, lanes: int, seed: int, render: bool = False) -> "VectorLanes | BatchLanes":
        """Return the environment with `lanes` lanes."""
        import gymnasium

        check_counts(lanes=lanes)
        name = str(self.id or self.make)
        maker: Callable[..., Any]
        accepts: Any
        if self.make is not None:
            maker = accepts = load_maker(str(self.make), "a gymnasium.vector.VectorEnv")
        else:
            spec = find_spec(str(self.id))
            accepts = spec.vector_entry_point
            if accepts is None:
                raise ConfigError(
                    f'environment "{self.id}" has no vector form of its own: use Gymnasium(id="{self.id}"), '
                    "which steps copies of it"
                )

            def maker(**kwargs: Any) -> Any:
                return gymnasium.make_vec(spec, vectorization_mode="vector_entry_point", **kwargs)

        kwargs: dict[str, Any] = {**self.kwargs, "num_envs": lanes}
        if self.max_episode_steps is not None:
            kwargs["max_episode_steps"] = self.max_episode_steps
        if "autoreset_mode" in arguments(accepts):
            kwargs.setdefault(
                "autoreset_mode", gymnasium.vector.AutoresetMode(_MODES[self.autoreset or "next-step"])
            )
        if self.seed_argument is not None:
            kwargs[self.seed_argument] = seed % (1 << 31)
        if render:
            kwargs["render_mode"] = "rgb_array"
        env = call_maker(maker, f'vector environment "{name}"', accepts, kwargs)
        _check_vector(env, name, lanes)
        autoreset = autoreset_of(env, name, self.autoreset)
        if self.id is not None and not render and (batch := batch_of(env, lanes)) is not None:
            return batch(env, name, lanes, seed, env.max_episode_steps)
        vector = VectorLanes(env, name, None if self.seed_argument else seed, autoreset)
        own = getattr(getattr(env, "spec", None), "max_episode_steps", None)
        vector.max_episode_steps = (own if self.max_episode_steps is None else self.max_episode_steps) or 0
        return vector


def _check_vector(env: Any, name: str, lanes: int) -> None:
    """Raise `ConfigError`, with `env` closed where it can be, unless that is a vector of
    so many lanes."""
    missing = [
        part
        for part in ("num_envs", "single_observation_space", "single_action_space", "metadata")
        if not hasattr(env, part)
    ]
    if not missing and env.num_envs == lanes:
        return
    if callable(close := getattr(env, "close", None)):
        close()
    if missing:
        raise ConfigError(
            f'"{name}" made a {type(env).__name__}, which is no gymnasium.vector.VectorEnv: it has no '
            f"{', '.join(missing)}. Single environments are named by Gymnasium(id=…)"
        )
    raise ConfigError(
        f'vector environment "{name}" was asked for num_envs = {lanes} and has {env.num_envs}; it must take '
        "the number that it is given"
    )


def lane_spaces(env: Any, name: str) -> Spaces:
    """Return the spaces of a lane of a `gymnasium.vector.VectorEnv`."""
    return Spaces(
        from_gymnasium(env.single_observation_space, f"{name}: observation space"),
        from_gymnasium(env.single_action_space, f"{name}: action space"),
    )


def no_options(name: str) -> ConfigError:
    """Return the error of an environment whose lanes begin again by themselves, and that
    was asked to begin them in another way."""
    return ConfigError(
        f"{name} resets finished lanes by itself, without options, so that the experiment can have no "
        'curriculum; take GymnasiumVector(autoreset="disabled") where it can be told that, or copies of a '
        "single environment (Gymnasium)"
    )


def autoreset_of(env: Any, name: str, declared: Autoreset | None) -> Autoreset:
    """Return the mode that `env` publishes, or else the declared one. Raises
    `ConfigError` when there is neither, or both and they differ."""
    value = env.metadata.get("autoreset_mode")
    mode = _PUBLISHED.get(str(getattr(value, "value", value)))
    if mode is None and declared is None:
        env.close()
        raise ConfigError(
            f'vector environment "{name}" does not publish how it resets finished lanes '
            f'(metadata["autoreset_mode"] is {value!r}); read its documentation and set autoreset to '
            '"next-step", "same-step" or "disabled"'
        )
    if mode is not None and declared is not None and mode != declared:
        env.close()
        raise ConfigError(
            f'vector environment "{name}" publishes autoreset "{mode}"; it cannot be set to "{declared}". '
            "Leave autoreset away"
        )
    return mode or declared  # type: ignore[return-value]


class _Waiter:
    """A waiter's thread waits for what a library does elsewhere. It is a daemon, so that
    one that hangs keeps no program from its end, and is counted then."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Have the thread do this."""
        future: Future[Any] = Future()
        self._tasks.put((future, work))
        return future

    def end(self) -> None:
        """Have the thread end, once it has done what it was given."""
        self._tasks.put(None)

    def leave(self) -> None:
        """Take note that the thread hangs."""
        HANGING.leave(self._thread)
        if not self._thread.is_alive():
            HANGING.returned(self._thread)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, work = task
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del task, future, work  # which keep what they were about
        HANGING.returned(self._thread)


class VectorLanes(Environment):
    """A `gymnasium.vector.VectorEnv` of one agent as an environment.

    next-step: the environment resets a finished lane on the tick after, and the target's
        `reset` must say just that
    same-step: two rows in the tick that ends an episode: the final observation comes in
        the environment's infos
    disabled: the same two rows: here it is us who reset the finished lanes right after
        the step, since a finished lane must not be stepped. A lane can be reset at any
        other time, too: it is stepped once more with the rest, and what came of that is
        thrown away

    `partial_resets`: a next-step environment that takes ``options={"reset_mask": mask}``
    as well, so that any lane can be reset. `halves`: the environment has `send` and
    `recv`, and works on threads of its own in between; a thread here waits for it and
    rings. Where somebody looks at the time (`watch`), `recv` waits for what takes longer
    than a second: so one that hangs is seen where others are, in its actor's thread.
    `picture` makes lane 0's picture from the observation where the environment
    draws none.
    """

    def __init__(
        self,
        env: Any,
        name: str,
        seed: int | None,
        autoreset: Autoreset,
        *,
        partial_resets: bool = False,
        halves: bool = False,
        picture: Callable[[Any], NDArray[np.uint8]] | None = None,
    ) -> None:
        """Take over `env`; `name` is what messages call it, `seed` goes to its first
        `reset`."""
        self.env, self.name, self.lanes, self.autoreset = env, name, int(env.num_envs), autoreset
        self.same_step = autoreset != "next-step"
        self.resets_any = partial_resets or autoreset == "disabled"
        self._spaces = lane_spaces(env, name)
        self.agents = (AgentInfo("agent", self._spaces),)
        self._readers = readers_of(self._spaces.observation, _Reader)
        self._check = TickCheck(self._spaces.observation, name, ("agent",))
        self._casters = [
            (leaf_name, action_caster(leaf))
            for leaf_name, leaf in leaves(self._spaces.action, "action").items()
        ]
        self._nested = isinstance(self._spaces.action, (Dict, Tuple))
        self.render_fps = fps_of(env)
        self._seed: int | NDArray[np.int64] | None = seed  # one of all lanes, or of each
        self._options: dict[str, Any] | None = None  # of resets
        self._started = False
        # lanes that the environment resets by itself with the next step
        self._finished = np.zeros(self.lanes, np.bool_)
        # lanes whose row in the tick under way is the first of an episode
        self._began = np.zeros(self.lanes, np.bool_)
        self._result: Any = None
        self._picture = picture
        self._halves = halves
        self._waiter = _Waiter(f"{name} waiter") if halves else None
        self._pending: Future[Any] | None = None
        self._sent_at, self._watched = 0.0, False
        self._wake: Callable[[], None] | None = None

    def send(self, actions: Sequence[Arrays], reset: NDArray[np.bool_]) -> None:
        """Step all lanes, or reset all of them, or some where that is possible."""
        self._began = reset.copy()
        if not self._started or 0 not in reset.tobytes():  # `all` takes ten times as long
            seed, self._seed, self._started = self._seed, None, True
            answer = self._ask("resetting all lanes", lambda: self.env.reset(seed=seed, **self._asked()))
            if not isinstance(answer, tuple) or len(answer) != 2:
                raise EnvironmentFault(
                    f"{self.name}: reset must return (observations, infos), not this {type(answer).__name__}"
                )
            observation, _ = answer
            nothing = np.zeros(self.lanes, np.bool_)
            self._result = observation, np.zeros(self.lanes, np.float32), nothing, nothing, {}
            self._began.fill(True)
            return
        mask = self._to_reset(reset)
        parts = [cast(actions[0][name]) for name, cast in self._casters]
        given = nest(self._spaces.action, iter(parts)) if self._nested else parts[0]
        if self._waiter is None:
            self._result = self._ask("stepping", lambda: self._step(self.env.step(given), mask))
            return
        self._ask("stepping", lambda: self.env.send(given))
        self._sent_at = awake()
        self._pending = self._waiter.submit(lambda: self._step(self.env.recv(), mask))
        if self._wake is not None:
            wake = self._wake
            self._pending.add_done_callback(lambda _: wake())

    def _to_reset(self, reset: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        """Return which lanes are to be reset though they have not finished; None where
        the environment does all by itself. Raises `EnvironmentFault` where it cannot do
        that."""
        if reset.tobytes() == self._finished.tobytes():
            return None
        forced, left = reset & ~self._finished, self._finished & ~reset
        if not self.resets_any and forced.any():
            raise EnvironmentFault(
                f"{self.name} resets finished lanes by itself and no others; lane {int(np.argmax(forced))} "
                "has not finished and was to be reset"
            )
        if left.any():
            raise EnvironmentFault(
                f"{self.name} resets finished lanes on the next step; lane {int(np.argmax(left))} was to be "
                "left as it is"
            )
        return forced

    def ready(self) -> bool:
        """True when the step is done, when it takes too long for others to be served
        meanwhile, or when nobody asked to be rung: then `recv` waits for it."""
        if self._pending is None or self._wake is None or self._pending.done():
            return True
        return self._watched and awake() - self._sent_at > _AHEAD_S

    def watch(self, deadline_s: float | None) -> None:
        self._watched = True

    def on_ready(self, wake: Callable[[], None]) -> None:
        if self._halves:
            self._wake = wake

    def recv(self, ticks: Sequence[Tick]) -> None:
        """Write what the environment returned. Raises `EnvironmentFault` for what its
        spaces forbid."""
        if self._pending is not None:
            try:
                self._result = self._ask("stepping", self._pending.result)
            finally:
                if self._pending.done():  # else a signal had its caller leave it
                    self._pending = None
        tick = ticks[0]
        observation, reward, terminated, truncated, infos = self._result
        tick.reward[...], tick.done[...], tick.truncated[...] = reward, terminated, truncated
        if 1 in self._began.tobytes():
            tick.reward[self._began] = 0.0
        finished = tick.done | tick.truncated
        if 1 in tick.truncated.tobytes():  # an end is an end, even at the limit
            np.greater(tick.truncated, tick.done, tick.truncated)
        tick.present.fill(True)
        if not self.same_step:
            self._finished = finished
            tick.restarted.fill(False)
        else:
            tick.restarted[:] = finished
            if 1 in finished.tobytes():
                self._finals(tick, finished, infos)
        for reader in self._readers:
            reader.write_all(observation, tick.observation[reader.name], self.name)
        try:
            self._check(tick)
        except EnvironmentFault:  # what cannot be stored is told as it was
            for lane, each in enumerate(reward.tolist()):
                try:
                    check_number(each, "reward of agent agent", f"{self.name}: lane {lane}")
                except EnvironmentFault as larger:
                    larger.in_lane(lane).telling({"agent": {"reward": each}})
                    raise
            for reader in self._readers:
                reader.check_rows(reader.of(observation), self.name, range(self.lanes))
            raise

    def state(self) -> Part | None:
        if not tells_state(self.env):
            return None
        own = {"finished": self._finished, "seed": self._seed, "started": self._started}
        return {**own, "environment": self.env.tidemill_state()}

    def load_state(self, state: Part) -> Mapping[int, str]:
        self._finished, self._seed, self._started = state["finished"], state["seed"], state["started"]
        self.env.load_tidemill_state(state["environment"])
        return {}

    def episode_infos(self, group: int, seats: Sequence[int]) -> Sequence[Any]:
        infos = self._result[4]
        if self.autoreset == "same-step":  # the others are of the episodes that began
            infos = infos.get("final_info") if isinstance(infos, Mapping) else None
        return [_of_lane(infos, lane, self.lanes) for lane in seats]

    def seed(self, seed: int) -> None:
        """Seed the next reset of all lanes together; lanes that are reset by themselves
        have no seeds."""
        self._seed = seed

    def enter_stage(self, options: Mapping[str, Any]) -> None:
        if self.autoreset != "disabled":
            raise no_options(self.name)
        self._options = take_options(self.env, self.name, options)
        if "reset_mask" in self._options:
            raise ConfigError(
                f'{self.name}: a stage\'s options have "reset_mask", by which it is told which lanes to '
                "reset; rename it"
            )

    def _asked(self, mask: NDArray[np.bool_] | None = None) -> dict[str, Any]:
        """Return the arguments of a reset: of the lanes of `mask`, or of all. New ones
        each time, since Gymnasium takes the mask out of them."""
        options = {**(self._options or {}), **({} if mask is None else {"reset_mask": mask})}
        return {} if mask is None and self._options is None else {"options": options}

    def render(self) -> NDArray[np.uint8] | None:
        """Return lane 0's picture, when it was built with `render` and has any."""
        if self._picture is not None:
            return None if self._result is None else self._picture(self._result[0])
        if getattr(self.env, "render_mode", None) != "rgb_array":
            return None
        pictures = self.env.render()
        return None if pictures is None else np.asarray(pictures[0], np.uint8)

    def close(self) -> None:
        if self._waiter is not None:
            self._waiter.end()
            if self._pending is not None and not wait([self._pending], _CLOSING_S).done:
                self._waiter.leave()
                self.env = None  # it is not to be closed while it steps
        if self.env is not None:
            self.env.close()
            self.env = None

    def _step(self, result: Any, forced: NDArray[np.bool_] | None) -> Any:
        """Reset what must be reset after a step."""
        if not isinstance(result, (tuple, list)) or len(result) != 5:
            what = (
                f"{len(result)} values"
                if isinstance(result, (tuple, list))
                else f"this {type(result).__name__}"
            )
            raise EnvironmentFault(
                f"{self.name}: step must return (observations, rewards, terminated, truncated, infos), not "
                f"{what}"
            )
        observation, reward, terminated, truncated, infos = result
        reward, terminated, truncated = (
            self._array(reward, "reward"),
            self._array(terminated, "terminated"),
            self._array(truncated, "truncated"),
        )
        if forced is None and self.autoreset != "disabled":
            return observation, reward, terminated, truncated, infos
        # copies: what is reset may write where they lie
        reward, terminated, truncated = reward.copy(), terminated.copy(), truncated.copy()
        if forced is not None:  # what their last step led to is of an episode that is over
            terminated[forced] = truncated[forced] = False
        if self.autoreset == "disabled":
            over = terminated | truncated
            mask = over if forced is None else over | forced
            if mask.any():
                infos = {
                    **(infos if isinstance(infos, Mapping) else {}),
                    "final_obs": {reader.name: reader.of(observation)[over] for reader in self._readers},
                }
                observation, _ = self.env.reset(**self._asked(mask))
        elif forced is not None:
            observation, _ = self.env.reset(**self._asked(forced))
        return observation, reward, terminated, truncated, infos

    def _array(self, values: Any, name: str) -> NDArray[Any]:
        """Return rewards or ends as an array of the lanes. Raises `EnvironmentFault` for
        what is none of numbers, or of bools."""
        array = np.asarray(values)
        if array.shape != (self.lanes,):  # a single number would be everybody's
            raise EnvironmentFault(
                f"{self.name}: reward, terminated and truncated must each be an array of {self.lanes} lanes; "
                f"{name} has the shape {array.shape}"
            )
        if array.dtype.kind not in ("fiub" if name == "reward" else "b"):
            for lane, each in enumerate(array.tolist()):
                (check_number if name == "reward" else check_flag)(
                    each, f"{name} of agent agent", f"{self.name}: lane {lane}"
                )
        return array

    def _finals(self, tick: Tick, finished: NDArray[np.bool_], infos: Any) -> None:
        """Fill `tick.final` of the lanes that finished."""
        told = infos if isinstance(infos, Mapping) else {}
        final = told.get("final_obs")
        if final is None:
            raise EnvironmentFault(
                f'{self.name}: lanes finished in same-step mode, but infos has no "final_obs" (it has: '
                f"{', '.join(map(str, told)) or 'nothing'})"
            )
        for reader in self._readers:
            rows = (
                final[reader.name]
                if self.autoreset == "disabled"
                else reader.finals(final, finished, self._result[0], self.name)
            )
            out = np.empty((len(rows), *reader.field.shape), reader.field.dtype)
            reader.write_rows(rows, out, self.name, np.flatnonzero(finished).tolist())
            tick.final[reader.name][finished] = out

    def _ask(self, doing: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except EnvironmentFault:
            raise
        except BaseException as error:
            raise raised_by(f"{self.name}:", doing, error) from error


def _of_lane(infos: Any, lane: int, lanes: int) -> Any:
    """Return one lane's info of Gymnasium's infos of all: by name an array of all lanes,
    with a mask ``_NAME`` of those that said it, or again a mapping; or an array of infos.
    """
    if isinstance(infos, np.ndarray) and infos.dtype == object and len(infos) == lanes:
        return infos[lane]
    if not isinstance(infos, Mapping):
        return None
    found = {}
    for name, values in infos.items():
        mask = infos.get(f"_{name}")
        if (isinstance(name, str) and name.startswith("_")) or (
            isinstance(mask, np.ndarray) and mask.shape == (lanes,) and not mask[lane]
        ):
            continue
        if isinstance(values, Mapping):
            found[name] = _of_lane(values, lane, lanes)
        elif isinstance(values, (np.ndarray, list)) and len(values) == lanes:
            found[name] = values[lane]
    return found


class _Reader(LeafReader):
    """One leaf of the observation of all lanes at once."""

    def of(self, observation: Any) -> NDArray[Any]:
        """Return this leaf of all lanes."""
        for key in self.path:
            observation = observation[key]
        return np.asarray(observation)

    def write_all(self, observation: Any, out: NDArray[Any], name: str) -> None:
        """Fill `out`. Raises `EnvironmentFault` for what the space forbids; `name` is
        what it calls the environment."""
        try:
            values = self.of(observation)
        except (KeyError, IndexError, TypeError):
            raise EnvironmentFault(
                f"{name}: the observation has no part {self.name}, which its space declares"
            ) from None
        self.write_rows(values, out, name, range(len(out)))

    def write_rows(self, values: NDArray[Any], out: NDArray[Any], name: str, lanes: Sequence[int]) -> None:
        """Fill `out` by the rows of these lanes."""
        if values.shape[:1] != out.shape[:1]:
            raise EnvironmentFault(
                f"{name}: {self.name} of agent agent has shape {values.shape} for {len(out)} lanes; the "
                f"observation space says {out.shape}"
            )
        try:
            self.put(values, out)
        except (TypeError, ValueError, OverflowError):
            self.check_rows(values, name, lanes)
            raise

    def check_rows(self, values: NDArray[Any], name: str, lanes: Sequence[int]) -> None:
        """Raise `EnvironmentFault` where a lane has not what the space declares."""
        for lane, each in zip(lanes, values, strict=True):
            try:
                self.check_leaf(each, f"{name}: lane {lane}")
            except EnvironmentFault as fault:
                fault.in_lane(lane).telling({"agent": {self.name: each}})
                raise

    def finals(self, final: Any, finished: NDArray[np.bool_], observation: Any, name: str) -> NDArray[Any]:
        """Return this leaf of the lanes that finished, from one array of all lanes or, as
        Gymnasium's own do, an array of each lane's observation. Raises `EnvironmentFault`
        where that is the memory of `observation`, what the lanes see next."""
        lanes, now = np.flatnonzero(finished), self.of(observation)
        if isinstance(final, np.ndarray) and final.dtype == object:
            rows = final[finished].tolist()
            for key in self.path:
                rows = [row[key] for row in rows]
        else:
            rows = [self.of(final)[lane] for lane in lanes]
        if any(np.may_share_memory(row, now[lane]) for lane, row in zip(lanes, rows, strict=True)):
            raise EnvironmentFault(
                f'{name}: {self.name} in infos["final_obs"] is the memory of what the lane sees next, which '
                "has overwritten it; the environment must copy an observation before it resets the lane"
            )
        return np.stack(rows)
