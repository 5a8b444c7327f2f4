"""Open episodes of Gymnasium's environments, so that a run that resumes exactly has them
again.

An environment may tell its state (`tidemill_state`, `load_tidemill_state`). Others are
taken at their word that episodes follow from the generator's state at their beginning and
from the actions since: those are kept, and played again. What is seen then is compared
with what was seen.

The console of an Atari game tells a state that is nearly all of it: not the action that
sticks, nor what it draws with. So it is brought to a state of some steps ago, and plays
on from there, by which all else is as it was. Where it then is not in every bit where it
was, its episode is played again from its beginning.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from tidemill.core.cut import Part, flatten, generator_state, set_generator_state
from tidemill.core.errors import CheckpointError, fault_of, message_of
from tidemill.core.schema import Arrays
from tidemill.envs.reset_options import reset_env

LONGEST = 100_000
"""Steps of an episode that are kept; a longer one is cut at a resume."""
APART = 256
"""Steps between two states of a console that are kept. At a resume it plays so many again
at least, and less than twice as many."""
MOST_REPEATED = 0.5
"""Probability of sticky actions up to which the one that sticks is one of the last
`APART` steps, beyond any doubt."""
NOT_WHOLE = {"chopper_command", "miniature_golf"}
"""Games whose rewards, or ends, follow from what their consoles neither tell nor show."""
CONSOLE, CONSOLE_OF = "console", "console_of"
TOO_LONG = f"it has more than {LONGEST:,} steps, and so many are not played again"


def another(how: str) -> str:
    """Return why an episode is lost that was another one when it was played again."""
    return (
        f"played again from its seed with the same actions an episode was another one ({how}), so that the "
        "environment does not follow from these alone; it may have tidemill_state() and "
        "load_tidemill_state(state)"
    )


def tells_state(env: Any) -> bool:
    """Return whether `env` tells its state itself: not through wrappers, which have
    states of their own."""
    return getattr(env, "unwrapped", env) is env and all(
        callable(getattr(env, name, None)) for name in ("tidemill_state", "load_tidemill_state")
    )


def has_console(env: Any) -> bool:
    """Return whether `env` is an Atari game of which states of its console are kept: not
    one in wrappers, nor of a class of its own, which have states of their own."""
    return (
        type(env).__module__ == "ale_py.env"
        and env._game not in NOT_WHOLE
        and env.ale.getFloat("repeat_action_probability") <= MOST_REPEATED
    )


def drawn_from(env: Any) -> Part | None:
    """Return where the generator of a Gymnasium environment is; None where it has none
    yet, or one of another kind. An Atari game draws from its console as well, whose
    state is plain bytes."""
    own = getattr(env, "unwrapped", env)
    generator, console = getattr(own, "_np_random", None), getattr(own, "ale", None)
    if not isinstance(generator, np.random.Generator):
        return None
    drawn = generator_state(generator)
    if console is not None and hasattr(console, "cloneSystemState"):
        drawn[CONSOLE] = np.frombuffer(console.cloneSystemState().serialize(), np.uint8)
        drawn[CONSOLE_OF] = _console_of(own)
    return drawn


def _console_of(own: Any) -> str:
    """Return whose state of a console is that of the Atari game `own`: no other one can
    take it, and the library looks at little of it."""
    import ale_py

    return f"{getattr(own, '_game', 'a game')} of ale-py {ale_py.__version__}"


def draw_from(env: Any, state: Part | None) -> None:
    """Have the generator of `env` go on from `state`. Raises `CheckpointError` where that
    has a console's of another game, or of another version of ale-py."""
    if state is None:
        return
    env.unwrapped.np_random = generator = np.random.default_rng(0)
    drawn = {name: value for name, value in state.items() if name not in (CONSOLE, CONSOLE_OF)}
    set_generator_state(generator, drawn)
    if CONSOLE in state:
        from ale_py import ALEState

        if (now := _console_of(env.unwrapped)) != (then := state.get(CONSOLE_OF)):
            raise CheckpointError(
                f"the saved state of a console is that of {then or 'an earlier version of Tidemill'}, and "
                f"this is {now}: go on with what saved it"
            )
        env.unwrapped.ale.restoreSystemState(ALEState(state[CONSOLE].tobytes()))


class KeptEpisodes:
    """The open episodes of so many lanes: of each how it began, and the actions since."""

    def __init__(self, lanes: int) -> None:
        self._ticks: deque[Arrays] = deque()  # actions of all lanes
        self._now = 0  # number of the tick that comes next; the newest of `_ticks` is before it
        # of each lane: seed and generator of its reset, the tick of its first step, and
        # which options it was reset with
        self._begun: list[tuple[int | None, Part | None, int, int]] = [(None, None, 0, 0)] * lanes
        # of each lane, by steps of its open episode: the newest two states of its console
        self._consoles: list[dict[int, Part | None]] = [{} for _ in range(lanes)]
        self.options: list[dict[str, Any] | None] = [None]
        """What resets were told in each stage of a curriculum so far; stages in a row
        that tell the same are one."""

    def add(self, actions: Arrays) -> None:
        """Note what all lanes are about to do. Those that begin do nothing of it."""
        self._ticks.append({name: array.copy() for name, array in actions.items()})
        self._now += 1
        oldest = self._now - len(self._ticks)
        needed = min(tick for _, _, tick, _ in self._begun)
        for _ in range(max(needed - oldest, len(self._ticks) - LONGEST)):
            self._ticks.popleft()

    def begin(self, lane: int, env: Any, seed: int | None) -> None:
        """Note that `lane` is about to be reset."""
        drawn = None if seed is not None else drawn_from(env)
        self._begun[lane] = seed, drawn, self._now, len(self.options) - 1
        self._consoles[lane] = {}

    def look_at_consoles(self, envs: Sequence[Any]) -> None:
        """Note the states of these consoles, one a lane, where it is time for that. It is
        called before `add`."""
        for lane, env in enumerate(envs):
            steps = self._now - self._begun[lane][2]
            if steps and steps % APART == 0:
                kept = self._consoles[lane]
                kept[steps] = drawn_from(env)
                if len(kept) > 2:
                    del kept[min(kept)]

    def enter_stage(self, options: dict[str, Any]) -> None:
        """Note what resets are told from now on."""
        if options != self.options[-1]:
            self.options.append(options)

    @property
    def now(self) -> int:
        """The number of the tick that comes next."""
        return self._now

    def begun(self, lane: int) -> int:
        """Return the number of the tick of the first step of `lane` in its open
        episode."""
        return self._begun[lane][2]

    def ticks(self) -> Iterator[tuple[int, Arrays]]:
        """Yield the ticks that are kept, as (number, actions of all lanes)."""
        yield from enumerate(self._ticks, self._now - len(self._ticks))

    def state(self, lane: int) -> Part | None:
        """Return what `play_again` needs; None where the episode is too long."""
        seed, generator, begun, options = self._begun[lane]
        skipped = begun - (self._now - len(self._ticks))
        if skipped < 0:
            return None
        done = list(self._ticks)[skipped:]
        names = self._ticks[0] if self._ticks else {}
        actions = {name: np.array([tick[name][lane] for tick in done]) for name in names}
        consoles = {str(steps): drawn for steps, drawn in self._consoles[lane].items()}
        return {
            "seed": seed,
            "generator": generator,
            "options": options,
            "steps": len(done),
            "actions": actions if done else {},
            **({"consoles": consoles} if consoles else {}),
        }

    def options_of(self, state: Part) -> dict[str, Any] | None:
        """Return what the reset was told that the episode of this state began with."""
        return self.options[state.get("options", 0)]

    @classmethod
    def of(cls, states: Mapping[int, Part], blank: Arrays, options: list[dict[str, Any] | None]) -> Self:
        """Return the episodes that `state` told of: of these lanes, the others have none.
        `blank`: actions of all lanes, any. `options`: what resets were told so far."""
        kept = cls(len(next(iter(blank.values()))))
        kept.options = options
        kept._now = max((state["steps"] for state in states.values()), default=0)
        kept._ticks.extend({name: array.copy() for name, array in blank.items()} for _ in range(kept._now))
        kept._begun = [(None, None, kept._now, 0)] * len(kept._begun)
        for lane, state in states.items():
            begun = kept._now - state["steps"]
            kept._begun[lane] = state["seed"], state["generator"], begun, state.get("options", 0)
            kept._consoles[lane] = {int(steps): drawn for steps, drawn in state.get("consoles", {}).items()}
            for name, done in state["actions"].items():
                for tick in range(begun, kept._now):
                    kept._ticks[tick][name][lane] = done[tick - begun]
        return kept


def under_way(episode: Part) -> Part | None:
    """Return the rest of an episode from a state of its console, None where it has none
    that is old enough."""
    steps: int = episode["steps"]
    old = [each for each in map(int, episode.get("consoles", {})) if steps - each >= APART]
    if not old:
        return None
    since = max(old)
    return {
        **episode,
        "generator": episode["consoles"][str(since)],
        "steps": steps - since,
        "actions": {name: done[since:] for name, done in episode["actions"].items()},
        "under_way": True,
    }


def play_again(
    env: Any, episode: Part, actions: Sequence[Any], options: Mapping[str, Any] | None
) -> tuple[Any, str]:
    """Play an episode again in `env`, by these actions, or the rest of one that is
    `under_way`, for which it has been reset. Return what was seen last, and what else
    differs; "" for nothing."""
    draw_from(env, episode["generator"])
    seen = None if "under_way" in episode else reset_env(env, episode["seed"], options)[0]
    for number, action in enumerate(actions, 1):
        seen, _, ended, cut, _ = env.step(action)
        if ended or cut:
            return seen, f"it ended after {number:,} of {len(actions):,} steps"
    return seen, ""


def state_of(env: Any, episode: Part | None, seen: Callable[[], Arrays]) -> Part:
    """Return where `env` is, so that `bring_back` brings it there. `episode`: what is
    kept of its open one, None where it is between two, or that is too long; `seen`:
    returns what it shows, as its rows have it."""
    if tells_state(env):
        return {"own": env.tidemill_state()}
    drawn: Part = {"generator": drawn_from(env)}
    return drawn if episode is None else {**drawn, "episode": episode, "seen": seen()}


def bring_back(
    env: Any,
    state: Part,
    idle: bool,
    options: Mapping[str, Any] | None,
    again: Callable[[Part], tuple[Any, str]],
    rows: Callable[[Any], Arrays],
) -> tuple[Any, str]:
    """Bring `env` to where `state_of` was told. Return what it shows, and why its open
    episode is lost, "" where it is not.

    idle: whether it is between two episodes: what it shows then, nobody looks at
    options: of resets
    again: plays an episode again: see `play_again`
    rows: returns an observation as its rows have it
    """
    try:
        seen, why = reset_env(env, 0, options)[0], ""
        if "own" in state:
            env.load_tidemill_state(state["own"])
            return seen, why
        if "episode" in state:
            how = ""
            for episode in filter(None, (under_way(state["episode"]), state["episode"])):
                seen, how = again(episode)
                how = how or _other(rows(seen), state["seen"])
                if not (how or _elsewhere(env, state["generator"] or {})):
                    return seen, ""
            why = another(how) if how else ""
        elif not idle:
            why = TOO_LONG
        draw_from(env, state["generator"])
        return seen, why
    except BaseException as error:
        told = message_of(fault_of(error))
        return None, f"it raised {type(error).__name__} as an episode was played again: {told}"


def _other(now: Arrays, then: Arrays) -> str:
    """Return what of a row is another one now than it was then; "" for nothing."""
    other = [name for name in now if now[name].tobytes() != then[name].tobytes()]
    return f"another {other[0]} in the end" if other else ""


def _elsewhere(env: Any, state: Part) -> bool:
    """Return whether the generator of `env`, with its console, is not in `state`."""
    (arrays, facts), (arrays_then, facts_then) = flatten(drawn_from(env) or {}), flatten(state)
    return facts != facts_then or bool(_other(arrays, arrays_then))
