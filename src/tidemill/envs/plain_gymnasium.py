"""Plain Gymnasium environments, named by their id or by what makes them. How their copies
step is in `lanes.py`; `batch_lanes.py` has those that step by whole arrays."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Any

from tidemill.api.environment import EnvironmentConfig
from tidemill.api.external_code import Outside
from tidemill.core.config import check_counts, layout_setting
from tidemill.core.errors import ConfigError, close_each, forgiving
from tidemill.core.forks import end_in_fork, forks
from tidemill.core.user_code_loading import Code, name_of_code
from tidemill.envs.batch_lanes import BATCHES, BatchLanes, batch_of
from tidemill.envs.gymnasium_registry import call_maker, find_spec, load_maker, outside, pictures
from tidemill.envs.lanes import LaneLoop
from tidemill.envs.wrapping import names_of, outside_wrappers, wrapped
from tidemill.nets.encoders import USUAL_SIDE

FEW = 8  # lanes that a run has, unless it is told otherwise


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
    def smaller_images(self) -> str:
        return f'--wrap "resize({USUAL_SIDE})" makes them so'

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

    def build(self, lanes: int, seed: int, render: bool = False) -> LaneLoop | BatchLanes:
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
        envs = [first]
        try:
            envs.extend(self._make_another(lanes) for _ in range(lanes - 1))
            # The loop counts the steps of all lanes at once, which is 0.1 µs a step less
            # than a wrapper around each.
            loop = LaneLoop(
                [env.env for env in envs] if limited else envs,
                self.name,
                seed,
                self.threads,
                limit=limit if limited else 0,
                make_one=(lambda: self.make_one().env) if limited else self.make_one,
            )
        except BaseException:
            with forgiving():
                close_each(env.close for env in envs)
            raise
        loop.max_episode_steps = limit
        return loop

    def make_one(self, render: bool = False) -> Any:
        """Return one bare `gymnasium.Env`, with its time limit and in its wrappers."""
        import gymnasium

        since = forks()
        try:
            return wrapped(self._make_bare(render), self.wrap, self.name, gymnasium.Env)
        finally:
            end_in_fork(since)  # before it makes, or closes, another lane

    def _make_another(self, lanes: int) -> Any:
        """As `make_one`, of `lanes` whose first was made: a `ConfigError` says besides
        what helps where a process may have one alone, as of some emulators."""
        try:
            return self.make_one()
        except ConfigError as error:
            raise ConfigError(
                f"{error}. The first of {lanes} lanes was made: where a process can have one alone, give "
                f"each actor one: --set workers.actor.lanes=1 --set workers.actor.count={max(lanes, FEW)}"
            ) from error

    def _make_bare(self, render: bool) -> Any:
        import gymnasium
        from gymnasium.envs.registration import load_env_creator

        limit = self.max_episode_steps
        if self.make is not None:
            maker = load_maker(str(self.make), "a gymnasium.Env")
            env = call_maker(maker, self.make, maker, {**self.kwargs, **(pictures(maker) if render else {})})
            if not isinstance(env, gymnasium.Env):
                cure = ""
                if iscoroutinefunction(getattr(env, "step", None)):
                    cure = f'; its step is async def: take Asynchronous(make="{self.make}")'
                elif any(base.__module__.partition(".")[0] == "gym" for base in type(env).__mro__):
                    cure = (
                        "; it is the old gym's, which has another interface: return "
                        "shimmy.GymV21CompatibilityV0(env=…) of it where its step returns four values, "
                        'shimmy.GymV26CompatibilityV0(env=…) where it returns five (pip install "shimmy")'
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
