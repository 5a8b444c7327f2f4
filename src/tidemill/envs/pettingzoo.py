"""PettingZoo: environments of several agents, which act together (parallel) or in turn
(AEC)."""

import importlib.util
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from tidemill.api.environment import EnvironmentConfig
from tidemill.api.external_code import Outside, called
from tidemill.api.spaces import Box, Dict, Space, choices_of, leaves
from tidemill.core.config import check_counts
from tidemill.core.errors import ConfigError, close_each, did_you_mean, fault_of, forgiving, message_of
from tidemill.core.user_code_loading import Code, import_module, module_file, name_of_code
from tidemill.envs.aec import AECLanes
from tidemill.envs.gymnasium_registry import call_maker, is_id, is_registered, load_maker, pictures
from tidemill.envs.multi_agent import AgentLanes, AgentView
from tidemill.envs.parallel import ParallelLanes
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.envs.space_values import brief
from tidemill.envs.spaces import from_gymnasium
from tidemill.envs.wrapping import WRAPPERS, names_of, outside_wrappers, wrapped
from tidemill.nets.encoders import USUAL_SIDE

_INSTALL = {  # by the start of a module's name, longer ones first: what pip installs
    "pettingzoo.atari": "pettingzoo[atari]",
    "pettingzoo.butterfly": "pettingzoo[butterfly]",
    "pettingzoo.classic": "pettingzoo[classic]",
    "pettingzoo.sisl": "pettingzoo[sisl]",
    "pettingzoo": "pettingzoo",
    "mpe2": "mpe2",
}
_SUPERSUIT = {  # by names of wrappers of single environments: what does the same to each agent
    "flatten": "supersuit:flatten_v0",
    "frame-skip": "supersuit:frame_skip_v0(4)",
    "frame-stack": "supersuit:frame_stack_v1(4)",
    "grayscale": "supersuit:color_reduction_v0",
    "resize": f"supersuit:resize_v1({USUAL_SIDE}, {USUAL_SIDE})",
}
_FAMILIES = {
    "classic": "pettingzoo.classic",
    "butterfly": "pettingzoo.butterfly",
    "sisl": "pettingzoo.sisl",
    "atari": "pettingzoo.atari",
    "mpe": "mpe2",
    "mpe2": "mpe2",
}
"""Where the environments are of the families that users name."""


@dataclass(frozen=True, kw_only=True)
class PettingZoo(EnvironmentConfig):
    """A `PettingZoo` config builds a PettingZoo environment, a `ParallelEnv` or an
    `AECEnv`, whichever `make` returns. A `gymnasium.Env` whose observations, actions and
    rewards are tuples with a part for each agent is taken as a `ParallelEnv`.

    Agents are those of its `possible_agents`, in their order. An observation that is a
    Dict with a part `action_mask` keeps it as a part; a mask that comes in the agents'
    infos instead (seen when the environment is built) is added as one.

    make: "module:NAME" or "FILE.py:NAME": a class or function that returns the
        environment. "module" alone: its `parallel_env`, or else its `env`. By
        PettingZoo's registry: "pettingzoo:make", with kwargs = {"env_type": "aec", "id":
        "classic/chess-v6"}; by Gymnasium's: "module:ENV_ID", as
        "rware:rware-tiny-2ag-v2"
    kwargs: arguments of it
    state: whether the environment's global state (its `state()`) is added to every
        observation, as part `global_state`: for critics
    team_reward: whether every agent is paid the mean of what the agents that live are
        paid in a step, instead of its own reward
    wrap: wrappers around each copy, the first one inside: "supersuit:frame_skip_v0(4)",
        "module:NAME" or "FILE.py:NAME", with plain arguments in brackets; or a class or
        function that takes the environment
    max_episode_steps: most steps of a game, which is truncated there (where agents act in
        turn: actions of all agents together); 0: it ends by itself alone
    """

    make: Code
    kwargs: dict[str, Any] = field(default_factory=dict)
    state: bool = False
    team_reward: bool = False
    max_episode_steps: int = 0
    wrap: tuple[Code, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "make", name_of_code(self.make))
        object.__setattr__(self, "wrap", names_of(self.wrap))
        for text in self.wrap:
            if (name := str(text).partition("(")[0].strip()) in WRAPPERS:
                usual = _SUPERSUIT.get(name, "")
                cure = f': "{usual}" (pip install "supersuit")' if usual else ", FILE.py:NAME"
                raise ConfigError(
                    f"wrap: {text} goes around environments of one agent; around {self.make}, which is of "
                    f"several, go SuperSuit's and your own{cure}"
                )
        self.check_least(max_episode_steps=0)

    @classmethod
    def from_name(cls, name: str, settings: Mapping[str, Any]) -> EnvironmentConfig:
        return cls(make=module_of(name.removeprefix("pettingzoo:")), kwargs=dict(settings))

    @classmethod
    def outside(cls, settings: Mapping[str, Any]) -> Sequence[Outside]:
        made = called(settings.get("make"), settings.get("kwargs"))
        return [made, *outside_wrappers(settings.get("wrap"))]

    @property
    def smaller_images(self) -> str:
        return f'--wrap "{_SUPERSUIT["resize"]}" makes them so (pip install "supersuit")'

    def build(self, lanes: int, seed: int, render: bool = False) -> AgentLanes:
        """Return `lanes` copies as one environment."""
        check_counts(lanes=lanes)
        _need(self.make, "pettingzoo")
        from pettingzoo import ParallelEnv

        envs = [self._make_one(render)]
        try:
            ids, sights, actions = self._look(envs[0], seed)
            envs.extend(self._make_one(False) for _ in range(1, lanes))
            for lane, env in enumerate(envs):
                self._check_equal(env, envs[0], lane)
            kind = ParallelLanes if isinstance(envs[0], ParallelEnv) else AECLanes
            return kind(
                envs, self.make, seed, ids, sights, actions, self.team_reward, self.max_episode_steps, render
            )
        except BaseException:
            with forgiving():
                close_each(env.close for env in envs)
            raise

    def _make_one(self, render: bool) -> Any:
        """Return one bare environment, in its wrappers."""
        from pettingzoo import AECEnv, ParallelEnv

        return wrapped(self._make_bare(render), self.wrap, self.make, ParallelEnv, AECEnv)

    def _make_bare(self, render: bool) -> Any:
        from gymnasium import Env
        from pettingzoo import AECEnv, ParallelEnv

        from tidemill.envs.tuple_agents import TupleAgents

        if is_registered(self.make):
            env = Gymnasium(id=self.make, kwargs=self.kwargs).make_one(render)
        else:
            maker, accepts = find_maker(self.make)
            given = {**self.kwargs, **(pictures(maker) if render else {})}
            env = call_maker(maker, self.make, accepts, given)
        if isinstance(env, Env) and not isinstance(env, (AECEnv, ParallelEnv)):
            try:
                return TupleAgents(env, self.make)
            except BaseException:
                with forgiving():
                    env.close()
                raise
        if not isinstance(env, (AECEnv, ParallelEnv)):
            raise ConfigError(
                f"make: {self.make} returned {env!r}, which is neither a pettingzoo.ParallelEnv nor a "
                "pettingzoo.AECEnv, nor a gymnasium.Env of several agents"
            )
        return env

    def _look(self, env: Any, seed: int) -> tuple[list[Any], list[AgentView], list[Space]]:
        """Return the agents as the environment calls them, what each sees, and the space
        of its actions. The environment is reset for that."""
        ids = getattr(env, "possible_agents", None)
        if not ids:
            raise ConfigError(
                f"{self.make} does not say which agents there are; its possible_agents must name all that "
                "may ever appear"
            )
        try:
            answer = env.reset(seed=seed)
            infos = answer[1] if isinstance(answer, tuple) and len(answer) == 2 else getattr(env, "infos", {})
        except BaseException as error:
            fault_of(error)  # raises what is none
            raise ConfigError(
                f"{self.make} raised {type(error).__name__} at its first reset: {message_of(error)}"
            ) from error
        if not isinstance(infos, Mapping):
            raise ConfigError(
                f"{self.make}: the infos of its first reset are {brief(infos)}; they must be a mapping, by "
                "agent: {} where there is nothing to tell"
            )
        masked = any(isinstance(info, Mapping) and "action_mask" in info for info in infos.values())
        seen = [
            from_gymnasium(env.observation_space(agent), f"{self.make}: observation space of {agent}")
            for agent in ids
        ]
        state = self._state_space(env) if self.state else None
        sights, actions = [], []
        for agent, own in zip(ids, seen, strict=True):
            action = from_gymnasium(env.action_space(agent), f"{self.make}: action space of {agent}")
            mask = (
                _mask_space(action)
                if masked and not (isinstance(own, Dict) and "action_mask" in own.spaces)
                else None
            )
            sights.append(AgentView(own, mask, state))
            actions.append(action)
        return list(ids), sights, actions

    def _check_equal(self, env: Any, first: Any, lane: int) -> None:
        """Raise `ConfigError` where a lane has other agents, or spaces, than the
        first."""
        if [*env.possible_agents] != [*first.possible_agents]:
            raise ConfigError(f"{self.make}: lane {lane} has other possible_agents than lane 0")
        for agent in first.possible_agents:
            for space in ("observation_space", "action_space"):
                found, other = (getattr(each, space)(agent) for each in (env, first))
                where = f"{self.make}: {space} of {agent}"
                if found != other and from_gymnasium(found, where) != from_gymnasium(other, where):
                    raise ConfigError(
                        f"{where} is {found} in lane {lane}, and {other} in lane 0. Copies of an environment "
                        "must all have the same: let them follow from its arguments alone"
                    )

    def _state_space(self, env: Any) -> Box:
        """Return the space of the global state: as it is, with the bounds that the
        environment declares for it, if any."""
        try:
            state = np.asarray(env.state())
        except BaseException as error:
            fault_of(error)  # raises what is none
            raise ConfigError(
                f"state = true, but {self.make} has no state(): {message_of(error)}; leave state out"
            ) from error
        if state.dtype.kind not in "fiub":
            raise ConfigError(
                f"state = true, but the state() of {self.make} is of {state.dtype}, which no row can hold; "
                "leave state out"
            )
        declared = getattr(env, "state_space", None) or getattr(env.unwrapped, "state_space", None)
        if declared is not None:
            space = from_gymnasium(declared, f"{self.make}: state space")
            if isinstance(space, Box) and space.shape == state.shape:
                return space
        return Box(state.shape, state.dtype.name)


def module_of(name: str) -> str:
    """Return the module of the environment that users call `name`: "tictactoe_v3",
    "classic.tictactoe_v3", "classic/tictactoe-v3", "mpe.simple_spread_v3" (now in
    `mpe2`). What is none of PettingZoo's names is returned as it is. Raises `ConfigError`
    for a single word that is neither such a name nor a module."""
    known = re.fullmatch(rf"(?:pettingzoo\.)?({'|'.join(_FAMILIES)})[./:](\w+)[_-](v\d+)", name)
    if known:
        return f"{_FAMILIES[known[1]]}.{known[2]}_{known[3]}"
    if not name.isidentifier() or module_file(name):
        return name
    _need(name, "pettingzoo")
    places = {
        found.name: f"{package}.{found.name}"
        for package in _FAMILIES.values()
        if importlib.util.find_spec(package.partition(".")[0])
        for found in pkgutil.iter_modules(importlib.import_module(package).__path__)
        if re.fullmatch(r"\w+_v\d+", found.name)
    }
    if name not in places:
        raise ConfigError(
            f'no environment of PettingZoo is called "{name}", and no module; {did_you_mean(name, places)}'
        )
    return places[name]


def find_maker(make: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what `make` names (see `PettingZoo`), and what tells its arguments:
    PettingZoo's own modules have a `raw_env` for that.

    Raises `ConfigError`, saying what to install or what else there is.
    """
    source, _, name = make.rpartition(":")
    raw = None
    if make.endswith(".py"):
        raise ConfigError(
            f'make: {make} is a file; say which of its functions makes the environment: "{make}:NAME"'
        )
    if not source and is_id(make):
        raise ConfigError(
            f"make: {make} is no module; an environment of several agents of Gymnasium's registry is named "
            f'with the module that registers it: "module:{make}"'
        )
    if not source.endswith(".py"):
        module = _import(make, source or make)
        raw = getattr(module, "raw_env", None)
        if not source:
            source = make
            name = next((known for known in ("parallel_env", "env") if hasattr(module, known)), "")
        if not name:
            raise ConfigError(
                f'make: {make} has neither "parallel_env" nor "env"; say which of its functions makes the '
                f'environment: "{make}:NAME"'
            )
    maker = load_maker(f"{source}:{name}", "a ParallelEnv or an AECEnv")
    return maker, raw or maker


def _import(make: str, module: str) -> ModuleType:
    _need(make, module)
    try:
        return import_module(module, "make")
    except ConfigError as error:
        package = _package(module)
        if package is None or not isinstance(error.__cause__, ModuleNotFoundError):
            raise
        raise ConfigError(
            f'make: {make} needs the module "{error.__cause__.name}", which is not installed: pip install '
            f'"{package}"'
        ) from error


def _need(make: str, module: str) -> None:
    """Raise `ConfigError` unless `module` can be found."""
    root, parent = module.partition(".")[0], module.rpartition(".")[0]
    if module == "pettingzoo.mpe":
        raise ConfigError(
            f"make: {make}: the particle environments have a package of their own now: "
            f"{make.replace('pettingzoo.mpe', 'mpe2', 1)}"
        )
    if importlib.util.find_spec(root) is None:
        package = _package(module)
        cure = f'pip install "{package}"' if package else "install it, or name its folder in PYTHONPATH"
        raise ConfigError(f'make: {make} needs the module "{root}", which is not installed: {cure}')
    if not parent:
        return
    _need(make, parent)
    if not hasattr(import_module(parent, "make"), "__path__"):
        raise ConfigError(
            f'make: {parent} is a module, not a package; write "{parent}:{module.rpartition(".")[2]}" for '
            "what it holds"
        )
    if importlib.util.find_spec(module) is None:
        names = [
            f"{parent}.{found.name}"
            for found in pkgutil.iter_modules(importlib.import_module(parent).__path__)
        ]
        raise ConfigError(f'make: there is no module "{module}"; {did_you_mean(module, names)}')


def _package(module: str) -> str | None:
    return next(
        (package for start, package in _INSTALL.items() if module == start or module.startswith(f"{start}.")),
        None,
    )


def _mask_space(action: Space) -> Box | None:
    """Return the space of a mask of these actions, None where there can be none."""
    choices = sum(sum(choices_of(leaf)) for leaf in leaves(action, "action").values())
    return Box((choices,), "int8", (0.0,), (1.0,)) if choices else None
