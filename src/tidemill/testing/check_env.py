"""Looks an environment over before it is trained on: what `tidemill check-env` prints."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import AgentInfo, Environment, EnvironmentConfig, Tick, alike
from tidemill.api.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space, choices_of, field_of, leaves
from tidemill.core.clock import awake
from tidemill.core.errors import ConfigError, EnvironmentFault, TidemillError, fault_of, message_of
from tidemill.core.schema import Arrays, poison
from tidemill.envs.plain_gymnasium import Gymnasium
from tidemill.transports.local import LocalBell

LONG_EPISODE = 100_000  # steps; longer ones rarely end within a run, and then there is nothing to learn from
SECONDS = 2.0  # at most, for each of the checks that play


@dataclass(frozen=True)
class Finding:
    """What one check found, and what to do about it."""

    name: str
    level: Literal["ok", "warn", "fail"]
    message: str
    cure: str = ""


Look = Callable[[EnvironmentConfig, Environment], list[Finding]]


def check_environment(
    config: EnvironmentConfig, seed: int = 0, seconds: float = SECONDS, look: Look | None = None
) -> list[Finding]:
    """Build the environment, play it with random actions and return what was found: one
    `Finding` per check, in order. `look` looks at it besides.

    Checks that need what has failed before them are left out. No finding is of level
    "fail" when the environment can be trained on.
    """
    try:
        environment = config.build(1 if config.single else 2, seed)
        alone = ""
    except BaseException as raised:
        error = fault_of(raised)
        cure = "" if isinstance(error, ConfigError) else "see the error that its constructor raised"
        failed = [Finding("build", "fail", _short(error), cure)]
        if config.single:
            return failed
        try:
            environment, alone = config.build(1, seed), _short(error)
        except BaseException:
            return failed
    try:
        play, lanes = Play(environment, seed), environment.lanes
        built = f"{len(environment.agents)} agent(s), {lanes} lane{'s' * (lanes > 1)}"
        findings = [Finding("build", "warn", f"{built}, and no second one: {alone}")]
        if not alone:
            findings = [Finding("build", "ok", built)]
        for group in play.groups:
            findings += _spaces([environment.agents[index] for index in group])
        findings += look(config, environment) if look is not None else []
        findings += _play(play, seconds)
    finally:
        closed = _close(environment)
    findings += closed
    if isinstance(config, Gymnasium):
        findings.append(_checked("raw observation", lambda: _dtype(config, seed)))
    if not config.single and not any(finding.level == "fail" for finding in findings):
        findings.append(_checked("determinism", lambda: _determinism(config, seed, lanes, seconds)))
        findings.append(_checked("speed", lambda: _speed(config, seed, seconds)))
    return findings


def _checked(name: str, check: Callable[[], Finding]) -> Finding:
    """Return what a check of another copy of the environment finds: what that raises,
    too."""
    try:
        return check()
    except BaseException as raised:
        cure = "see the error: a copy was made, and played, before it, and a run makes one for each lane"
        return Finding(name, "fail", _short(fault_of(raised)), cure)


def _close(environment: Environment) -> list[Finding]:
    """Close it, and return what that raised, as a finding."""
    try:
        environment.close()
    except BaseException as raised:
        return [Finding("close", "fail", _short(fault_of(raised)), "see the error that its close() raised")]
    return []


class Play:
    """A play steps an environment with random actions and keeps the rules of the
    contract, as an actor would.

    `over` is [L, A] per group: seats whose episode is finished and whose next one has not
    begun. `episodes` and `longest` are of lanes or, where these have none, of seats.
    """

    def __init__(self, environment: Environment, seed: int) -> None:
        """Bind `environment`, with agents of equal spaces in one group."""
        self.environment, self.rng = environment, np.random.default_rng(seed)
        self.groups = alike(environment.agents)
        environment.bind(self.groups)
        self._bell = LocalBell()
        environment.on_ready(self._bell.ring)
        lanes = environment.lanes
        self.spaces = [environment.agents[group[0]].spaces for group in self.groups]
        self.ticks = [
            Tick.allocate(spaces.observation, lanes * len(group), environment.info, environment.same_step)
            for spaces, group in zip(self.spaces, self.groups, strict=True)
        ]
        self.over = [np.ones((lanes, len(group)), np.bool_) for group in self.groups]
        self.reset = np.ones(lanes, np.bool_)
        self.lengths = np.zeros(lanes, np.int64)  # of the episodes under way
        self.longest, self.episodes = 0, 0
        # the same of seats, where they are independent
        self._seat_lengths = [np.zeros((lanes, len(group)), np.int64) for group in self.groups]
        self.spent = 0.0  # seconds in the environment

    def tick(self, force: NDArray[np.bool_] | None = None) -> None:
        """Play one tick, `force` resetting lanes besides those that must be. What it told
        lies in `ticks`."""
        lanes = self.environment.lanes
        self.reset = np.logical_and.reduce([over.all(axis=1) for over in self.over])
        finished = int(self.reset.sum())
        if force is not None:
            self.reset |= force
        actions = [
            sample_actions(spaces.action, self.rng, lanes * len(group))
            for spaces, group in zip(self.spaces, self.groups, strict=True)
        ]
        for given, spaces, tick in zip(actions, self.spaces, self.ticks, strict=True):
            keep_allowed(given, spaces.action, tick.observation, self.rng)
        for tick in self.ticks:
            poison({**tick.observation, "reward": tick.reward})
        began = time.perf_counter()
        self.environment.send(actions, self.reset)
        deadline = awake() + 60
        while not self.environment.ready():
            if awake() > deadline:
                raise EnvironmentFault(
                    "a tick was not ready after 60 s; the environment hangs, or nothing answers it"
                )
            self._bell.wait(0.1)
        buffers = [tick.observation for tick in self.ticks]
        for tick in self.ticks:  # as actors do: what is put in an array's place is lost
            tick.observation = dict(tick.observation)
        self.environment.recv(self.ticks)
        self.spent += time.perf_counter() - began
        for tick, observation in zip(self.ticks, buffers, strict=True):
            tick.observation = observation
        if self.environment.independent:
            self._count_seats()
        else:
            self._count_lanes(finished)
        for over, tick in zip(self.over, self.ticks, strict=True):
            ends = tick.done | tick.truncated
            over |= ends.reshape(over.shape)
            over &= ~((tick.present & ~ends) | tick.restarted).reshape(over.shape)

    def _count_lanes(self, finished: int) -> None:
        self.episodes += finished if self.lengths.any() else 0
        self.lengths[self.reset] = 0
        self.lengths[~self.reset] += 1
        restarted = np.logical_or.reduce(
            [t.restarted.reshape(len(self.reset), -1).any(axis=1) for t in self.ticks]
        )
        self.episodes += int(restarted.sum())
        self.longest = max(self.longest, int(self.lengths.max()))
        self.lengths[restarted] = 0

    def _count_seats(self) -> None:
        for lengths, over, tick in zip(self._seat_lengths, self.over, self.ticks, strict=True):
            ends = (tick.done | tick.truncated).reshape(over.shape)
            lengths += ~over
            self.episodes += int(ends.sum())
            self.longest = max(self.longest, int(lengths.max()))
            lengths[ends] = 0


def sample_actions(space: Space, rng: np.random.Generator, rows: int) -> Arrays:
    """Return `rows` random actions by leaf name, as a policy would answer: Discrete from
    0, Box within its bounds where it has any."""
    actions: Arrays = {}
    for name, leaf in leaves(space, "action").items():
        out = field_of(leaf)
        match leaf:
            case Discrete(n=n):
                values: NDArray[Any] = rng.integers(0, n, rows)
            case MultiDiscrete(nvec=nvec):
                values = rng.integers(0, nvec, (rows, len(nvec)))
            case MultiBinary(n=n):
                values = rng.integers(0, 2, (rows, n))
            case _:
                assert isinstance(leaf, Box)
                low, high = (np.asarray(bound, np.float64) for bound in leaf.bounds())
                bounded = np.isfinite(low) & np.isfinite(high)
                values = np.where(
                    bounded,
                    rng.uniform(np.where(bounded, low, 0), np.where(bounded, high, 1), (rows, *leaf.shape)),
                    rng.normal(size=(rows, *leaf.shape)),
                )
        actions[name] = values.astype(out.dtype)
    return actions


def keep_allowed(actions: Arrays, space: Space, observation: Arrays, rng: np.random.Generator) -> None:
    """Draw those actions anew for which `observation` has a mask, among those that it
    allows. See `tidemill.nets.masks.mask_of` for where masks lie."""
    joined, taken = observation.get("obs.action_mask"), 0
    for name, leaf in leaves(space, "action").items():
        branches = choices_of(leaf)
        mask = observation.get("obs.action_mask" + name.removeprefix("action"))
        if joined is not None:
            mask, taken = joined[:, taken : taken + sum(branches)], taken + sum(branches)
        if mask is None or not branches:
            continue
        drawn = np.split(rng.random(mask.shape) * (mask != 0), np.cumsum(branches)[:-1], axis=1)
        chosen = np.stack([part.argmax(axis=1) for part in drawn], axis=1)
        actions[name][...] = chosen.reshape(actions[name].shape)


def _short(error: BaseException) -> str:
    return (
        message_of(error)
        if isinstance(error, TidemillError)
        else f"{type(error).__name__}: {message_of(error)}"
    )


def _spaces(agents: Sequence[AgentInfo]) -> Iterator[Finding]:
    agent = agents[0]
    seen, done = leaves(agent.spaces.observation, "obs"), leaves(agent.spaces.action, "action")
    sees, does = (
        ", ".join(f"{name} {_describe(leaf)}" for name, leaf in found.items()) for found in (seen, done)
    )
    names = ", ".join(a.name for a in agents[:4]) + f" and {len(agents) - 4} more" * (len(agents) > 4)
    verbs = ("sees", "does") if len(agents) == 1 else ("see", "do")
    yield Finding("spaces", "ok", f"{names} {verbs[0]} {sees}; {verbs[1]} {does}")
    for name, leaf in done.items():
        if isinstance(leaf, Box) and not all(np.isfinite(bound).all() for bound in leaf.bounds()):
            unbounded = f"{name} has no bounds: policies start with actions around 0 ± 1"
            yield Finding(
                "action bounds", "warn", unbounded, "give the action space the bounds that make sense"
            )


def _describe(leaf: Space) -> str:
    match leaf:
        case Box():
            return f"{leaf.dtype}{list(leaf.shape)}"
        case Discrete():
            return f"one of {leaf.n}"
        case MultiDiscrete():
            return f"one each of {list(leaf.nvec)}"
    return f"{field_of(leaf).shape[0]} bits"


def _play(play: Play, seconds: float) -> Iterator[Finding]:
    """Play until episodes have ended, forcing a reset on the way, and look at every
    tick."""
    environment, outside, broken = play.environment, "", ""
    start, ticks = time.monotonic(), 0
    try:
        while time.monotonic() - start < seconds and not (ticks >= 1000 and play.episodes >= 5):
            force = np.zeros(environment.lanes, np.bool_)
            force[0] = environment.resets_any and ticks == 5
            play.tick(force)
            ticks += 1
            broken = broken or _broken(play)
            outside = outside or _outside(play)
    except BaseException as raised:
        error = fault_of(raised)
        cure = "" if isinstance(raised, TidemillError) else "see the error that it raised"
        yield Finding("play", "fail", f"tick {ticks}: {_short(error)}", cure)
        return
    steps = ticks * environment.lanes
    played = f"{steps} steps, with observations and rewards of the declared shapes and dtypes"
    yield Finding("play", "ok", played)
    if outside:
        cure = "declare the bounds that hold: normalisation of observations, and one-hot codes, trust them"
        yield Finding("bounds", "warn", outside, cure)
    else:
        yield Finding("bounds", "ok", "observations lie within the bounds of their space")
    if broken:
        cure = "see Tick in tidemill.api.environment: what each tick must tell"
        yield Finding("reset and step", "fail", broken, cure)
    else:
        yield Finding("reset and step", "ok", _autoreset(environment))
    if environment.shared:
        yield Finding(
            "copies",
            "warn",
            "copies of the environment (or agents of one, by turns) hand out one array; each observation "
            "is copied before another is asked for",
            "make the array in __init__ rather than in the class or the module, or return a fresh one: "
            "then copies can step in threads, too",
        )
    yield _episodes(play, ticks)


def _autoreset(environment: Environment) -> str:
    if environment.independent:
        return "agents begin their episodes by themselves"
    if environment.same_step:
        return "finished lanes begin again in the same tick, and tell their final observation"
    if environment.resets_any:
        return "lanes are reset when told"
    return "finished lanes begin again on the next tick"


def _episodes(play: Play, ticks: int) -> Finding:
    limit = "limit it: max_episode_steps, or the step limit of the agent"
    if play.longest >= LONG_EPISODE:
        return Finding("episodes", "warn", f"an episode took {play.longest} steps", limit)
    if play.episodes == 0:
        none = f"no episode ended within {ticks} steps"
        return Finding("episodes", "warn", none, f"that may be right; otherwise {limit}")
    return Finding("episodes", "ok", f"{play.episodes} episodes ended, the longest took {play.longest} steps")


def _broken(play: Play) -> str:
    """What this tick got wrong about ends and beginnings, "" when nothing."""
    lanes = play.environment.lanes
    for tick, group in zip(play.ticks, play.groups, strict=True):
        names = [play.environment.agents[a].name for a in group]

        def where(seats: NDArray[np.bool_], names: list[str] = names) -> str:
            lane, agent = divmod(int(np.argmax(seats)), len(names))
            return f"agent {names[agent]} in lane {lane}"

        ends = tick.done | tick.truncated
        began = np.repeat(play.reset, len(group))
        unfit = ~np.isfinite(tick.reward)
        for array in tick.observation.values():
            unfit |= tick.present & ~np.isfinite(array).reshape(len(unfit), -1).all(axis=1)
        for seats, what in (
            (unfit, "given what is not finite, or nothing: each array is to be written into"),
            (tick.done & tick.truncated, "done and truncated at once"),
            (began & ends, "done or truncated in the first tick of its episode"),
            (began & (tick.reward != 0), "rewarded in the first tick of its episode"),
            (tick.restarted & ~ends, "restarted without having finished"),
        ):
            if seats.any():
                return f"{where(seats)} was {what}"
        if play.reset.any() and not any(t.present.reshape(lanes, -1)[play.reset].any() for t in play.ticks):
            return f"no agent is present in the first tick of lane {int(np.argmax(play.reset))}"
    return ""


def _outside(play: Play) -> str:
    """Which observation lies outside its space, "" when none."""
    for tick, spaces in zip(play.ticks, play.spaces, strict=True):
        for name, leaf in leaves(spaces.observation, "obs").items():
            values = tick.observation[name][tick.present]
            low, high = _limits(leaf)
            wrong = np.argwhere((values < low) | (values > high))
            if len(wrong):
                each, *place = wrong[0].tolist()
                low, high = (np.broadcast_to(bound, values.shape)[each, *place] for bound in (low, high))
                where = f"{name}{place}" if place else name
                return f"{where} is {values[each, *place]}, outside of its space ({low} … {high})"
    return ""


def _limits(leaf: Space) -> tuple[Any, Any]:
    match leaf:
        case Box():
            return leaf.bounds()
        case Discrete():
            return 0, leaf.n - 1
        case MultiDiscrete():
            return 0, np.asarray(leaf.nvec) - 1
    return 0, 1


def _dtype(config: Gymnasium, seed: int) -> Finding:
    """Compare one raw observation with its space, more strictly than training needs."""
    env = config.make_one()
    try:
        observation, _ = env.reset(seed=seed)
        if env.observation_space.contains(observation):
            return Finding("raw observation", "ok", "its space contains the first observation")
        dtype = getattr(observation, "dtype", type(observation).__name__)
        what = f"the space does not contain the first observation (dtype {dtype}); it is converted"
        cure = "return what observation_space declares, dtype included: other libraries insist on it"
        return Finding("raw observation", "warn", what, cure)
    except BaseException as raised:
        error = fault_of(raised)
        must = "it must be reset(self, *, seed=None, options=None), and return (observation, info)"
        return Finding("raw observation", "fail", _short(error), f"see the error; {must}")
    finally:
        env.close()


_FEWEST = 5  # ticks are compared, however long the environment takes to be built and to step


def _record(config: EnvironmentConfig, seed: int, lanes: int, until: float) -> Iterator[tuple[bytes, ...]]:
    """What each of up to 300 ticks told, for the same random actions every time."""
    environment = config.build(lanes, seed)
    try:
        play = Play(environment, seed)
        for tick in range(300):
            if tick >= _FEWEST and time.monotonic() > until:
                return
            play.tick()
            yield tuple(
                part[tick.present].tobytes()
                for tick in play.ticks
                for part in (*tick.observation.values(), tick.reward, tick.done, tick.truncated)
            ) + tuple(tick.present.tobytes() for tick in play.ticks)
    finally:
        environment.close()


def _determinism(config: EnvironmentConfig, seed: int, lanes: int, seconds: float) -> Finding:
    now = time.monotonic()
    once: Iterable[tuple[bytes, ...]]
    once, again = (_record(config, seed, lanes, now + seconds) for _ in range(2))
    if lanes == 1:  # then two copies may be one too many for a process
        once = list(_record(config, seed, lanes, now + seconds / 2))
    compared = 0
    for first, second in zip(once, again, strict=False):
        if first != second:
            what = f"the same seed and actions gave something else in tick {compared}"
            cure = (
                "draw all random numbers from self.np_random after super().reset(seed=seed); without that, "
                "runs cannot be repeated"
            )
            return Finding("determinism", "warn", what, cure)
        compared += 1
    return Finding("determinism", "ok", f"the same seed and actions gave the same {compared} ticks, twice")


def _speed(config: EnvironmentConfig, seed: int, seconds: float) -> Finding:
    environment = config.build(1, seed)
    try:
        play = Play(environment, seed)
        play.tick()
        play.spent, steps = 0.0, 0
        while play.spent < seconds / 2 and steps < 2000:
            play.tick()
            steps += 1
    finally:
        environment.close()
    rate = steps / play.spent
    if rate < 100:
        cure = "use many lanes in the threads launcher (--launch threads) if it waits for something else"
        return Finding("speed", "warn", f"{rate:.0f} steps/s in one lane", cure)
    return Finding("speed", "ok", f"{rate:,.0f} steps/s in one lane")
