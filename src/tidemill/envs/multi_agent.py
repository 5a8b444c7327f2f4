"""Copies of an environment of several agents, stepped one after the other inside `send`:
what PettingZoo's two kinds have in common.

Python is paid per lane, and per agent where the environment is Python per agent anyway;
what the agents see becomes rows by a few calls for all of them. A seat, here, is lane · A
+ agent over *all* agents of the environment; a group picks those of its own agents.

An agent's episode is open from its first observation to its end or cut. Meanwhile it may
be absent (not its turn, hidden, away), and what it is paid then adds to its last row. A
lane is over when no episode is open, also when somebody never appeared; an agent that
comes back after its end begins a new episode in the same lane. In the tick that cuts a
lane nobody begins.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import AgentInfo, Environment, Tick
from tidemill.api.spaces import (
    Box,
    Dict,
    MultiBinary,
    MultiDiscrete,
    Space,
    Spaces,
    Tuple,
    choices_of,
    leaves,
    schema_of_space,
)
from tidemill.core.cut import Part
from tidemill.core.errors import ConfigError, EnvironmentFault, close_each, fault_of, message_of, raised_by
from tidemill.core.schema import Array, Arrays, allocate
from tidemill.envs.aliased_arrays import AliasDetector
from tidemill.envs.episode_replay import TOO_LONG, KeptEpisodes, another
from tidemill.envs.gymnasium_registry import fps_of
from tidemill.envs.reset_options import reset_env, take_options
from tidemill.envs.space_values import ActionWriter, LeafReader, readers_of
from tidemill.envs.tick_check import NUMBERS, TickCheck, check_flag, check_number, is_number

# where the parts of an observation come from
OWN, MASK, STATE = "own observation", "action mask", "global state"
GAMES_APART = 1_299_709
"""Distance between the seeds of two games of a lane, in runs that resume exactly."""


@dataclass(frozen=True)
class AgentView:
    """What one agent sees.

    own: its own observation
    mask: an action mask that comes in its info: part ``action_mask``; None where there is
        none, or the observation holds it
    state: the environment's global state: part ``global_state``; None where it was not
        asked for
    """

    own: Space
    mask: Box | None = None
    state: Box | None = None

    def space(self) -> Space:
        """Return the observation's space: `own`, or a Dict of it (its parts, or
        ``observation``) and what is added."""
        added = {
            name: part
            for name, part in (("action_mask", self.mask), ("global_state", self.state))
            if part is not None
        }
        if not added:
            return self.own
        parts = dict(self.own.spaces) if isinstance(self.own, Dict) else {"observation": self.own}
        for name in added:
            if name in parts:
                raise ConfigError(f'the observation has a part "{name}" already; leave state out')
        return Dict({**parts, **added})

    def readers(self) -> list[tuple[str, LeafReader]]:
        """Return the leaves of the observation, each with where it comes from."""
        plain = self.mask is self.state is None
        name = "obs" if plain or isinstance(self.own, Dict) else "obs.observation"
        found = [(OWN, reader) for reader in readers_of(self.own, LeafReader, name)]
        if self.mask is not None:
            found.append((MASK, LeafReader("obs.action_mask", (), self.mask)))
        if self.state is not None:
            found.append((STATE, LeafReader("obs.global_state", (), self.state)))
        return found


class _Group:
    """The seats of one group of agents, in its order."""

    def __init__(
        self,
        seats: list[int],
        every: int,
        names: list[str],
        readers: list[tuple[str, LeafReader]],
        action: Space,
        check: TickCheck,
    ) -> None:
        self.check = check
        self.names, self.readers, self.seats = names, readers, seats
        self.whole = seats == list(range(every))
        self.action, self.writer = action, ActionWriter(action, plain=True)
        self.pick: Callable[[Any], Sequence[Any]] = (lambda values: values) if self.whole else picker(seats)


class AgentLanes(Environment):
    """L copies of an environment of A agents. `_begin` and `_step` of a kind call `_show`
    for every agent that has an observation in this tick, and `_end` for every one whose
    episode is over; whoever is in neither is absent.

    An agent's episode is open from its first observation to its end; it may be absent
    meanwhile, and begin another one in the same game. A lane is over when no agent's
    episode is open; then it does nothing until it is reset.
    """

    _at_once: ClassVar[bool]
    """A lane tells all of its agents at one time, so that they may see one array; else by
    turns, and what one has seen is kept from the next."""

    def __init__(
        self,
        envs: Sequence[Any],
        name: str,
        seed: int,
        ids: Sequence[Any],
        sights: Sequence[AgentView],
        actions: Sequence[Space],
        team_reward: bool,
        max_steps: int,
        draws: bool,
    ) -> None:
        """Take over `envs`, equal ones; `name` is what messages call them, `ids` are the
        agents as they call them."""
        self.name, self.lanes, self.envs = name, len(envs), list(envs)
        self.agents = tuple(
            AgentInfo(str(agent), Spaces(sight.space(), action))
            for agent, sight, action in zip(ids, sights, actions, strict=True)
        )
        self._ids, self._count, self.render_fps = list(ids), len(ids), fps_of(envs[0])
        self._index = {agent: number for number, agent in enumerate(ids)}
        self._readers = [sight.readers() for sight in sights]
        # what an info without a mask means
        self._allowed = [
            None if sight.mask is None else np.ones(sight.mask.shape, np.int8) for sight in sights
        ]
        self._masked = any(sight.mask is not None for sight in sights)
        self._stated = any(sight.state is not None for sight in sights)
        self._team, self._draws, self.max_episode_steps = team_reward, draws, max_steps
        self._seed = seed
        self._seeds: list[int | None] = [seed + lane for lane in range(self.lanes)]  # None once used
        self._options: dict[str, Any] | None = None  # of resets
        self._groups: list[_Group] = []
        every = self.lanes * self._count
        self._open = [False] * every
        self._living = [0] * self.lanes  # open episodes
        self._steps = [0] * self.lanes
        self._done, self._truncated, self._present = (np.zeros(every, np.bool_) for _ in range(3))
        self._observed: dict[str, list[Any]] = {}
        # of each lane's last step, by what the environment calls its agents
        self._infos: list[Mapping[Any, Any]] = [{}] * self.lanes
        self._rewards: list[Any] = []
        self._aliases = AliasDetector(name)
        self._kept: KeptEpisodes | None = None  # for a cut
        self._games = [0] * self.lanes  # that were begun, where they are kept

    def bind(self, groups: Sequence[Sequence[int]]) -> None:
        every = self.lanes * self._count
        for group in groups:
            first = self.agents[group[0]]
            for index in group:
                if self.agents[index].spaces != first.spaces:
                    raise ConfigError(
                        f'{self.name}: agents "{first.name}" and "{self.agents[index].name}" have different '
                        "spaces and cannot be in one group"
                    )
            seats = [lane * self._count + index for lane in range(self.lanes) for index in group]
            names = [self.agents[index].name for index in group]
            check = TickCheck(first.spaces.observation, self.name, names)
            self._groups.append(
                _Group(seats, every, names, self._readers[group[0]], first.spaces.action, check)
            )

    def send(self, actions: Sequence[Arrays], reset: NDArray[np.bool_]) -> None:
        """Step or reset every lane; one that is over and not reset does nothing."""
        given = self._lane_actions(actions)
        if self._kept is not None:
            self._kept.add(self._by_lane(actions))
        self._tell_nothing(slice(0, self.lanes * self._count))
        for lane, begins in enumerate(reset.tolist()):
            try:
                if begins:
                    seed, self._seeds[lane] = self._seeds[lane], None
                    if self._kept is not None:
                        seed = self._note_beginning(lane, seed)
                    self._begin_anew(lane, seed)
                elif self._living[lane]:
                    self._step_on(lane, given)
            except EnvironmentFault as fault:
                fault.in_lane(lane)
                raise
            except BaseException as error:
                doing = "resetting" if begins else self._doing(lane, given)
                raise raised_by(f"{self.name}: lane {lane}", doing, error).in_lane(lane) from error

    def _tell_nothing(self, seats: slice) -> None:
        """Forget what these seats were told in the tick before."""
        count = seats.stop - seats.start
        for source in (OWN, MASK, STATE):
            self._observed.setdefault(source, [])[seats] = [None] * count
        self._rewards[seats] = [0.0] * count
        for flags in (self._done, self._truncated, self._present):
            flags[seats] = False

    def _begin_anew(self, lane: int, seed: int | None) -> None:
        first = lane * self._count
        self._open[first : first + self._count] = [False] * self._count
        self._living[lane] = self._steps[lane] = 0
        self._begin(lane, seed)

    def _step_on(self, lane: int, given: list[Any]) -> None:
        self._steps[lane] += 1
        self._step(lane, given, self._steps[lane] == self.max_episode_steps)

    def recv(self, ticks: Sequence[Tick]) -> None:
        """Write what the lanes told. Raises `EnvironmentFault` for what the spaces
        forbid."""
        for group, tick in zip(self._groups, ticks, strict=True):
            index: Any = slice(None) if group.whole else group.seats
            tick.done[:] = self._done[index]
            tick.truncated[:] = self._truncated[index]
            tick.present[:] = self._present[index]
            tick.restarted.fill(False)
            rows = None if tick.present.all() else tick.present.nonzero()[0]
            pick = group.pick if rows is None else picker([group.seats[row] for row in rows.tolist()])
            try:
                paid = group.pick(self._rewards)
                if not (NUMBERS.issuperset(map(type, paid)) or all(map(is_number, paid))):
                    raise TypeError("rewards")
                tick.reward[:] = paid
                for source, reader in group.readers:
                    values = pick(self._observed[source])
                    if rows is None:
                        reader.write(values, tick.observation[reader.name])
                    else:
                        reader.write_some(values, tick.observation[reader.name], rows)
                group.check(tick)
            except BaseException as error:
                self._explain(group, fault_of(error))
        if self._aliases.active:
            self._aliases.next_tick()
            self.shared = self._aliases.found

    def episode_infos(self, group: int, seats: Sequence[int]) -> Sequence[Any]:
        of = self._groups[group].seats
        told = [(self._infos[of[seat] // self._count], self._ids[of[seat] % self._count]) for seat in seats]
        return [infos.get(agent) if isinstance(infos, Mapping) else None for infos, agent in told]

    def seed(self, seed: int) -> None:
        self._seeds = [seed + lane for lane in range(self.lanes)]

    def enter_stage(self, options: Mapping[str, Any]) -> None:
        self._options = take_options(self.envs[0], self.name, options)
        if self._kept is not None:
            self._kept.enter_stage(self._options)

    def render(self) -> NDArray[np.uint8] | None:
        """Return lane 0's picture, when it was built with `render`."""
        picture = self.envs[0].render() if self._draws else None
        return picture if isinstance(picture, np.ndarray) else None

    def close(self) -> None:
        envs, self.envs = self.envs, []
        self._aliases.close()
        close_each(env.close for env in envs)

    # ---- a cut -------------------------------------------------------------------------

    def keep_episodes(self) -> None:
        self._kept = KeptEpisodes(self.lanes)

    def _note_beginning(self, lane: int, seed: int | None) -> int:
        """Return the seed by which a game begins that may be played again: each has one,
        since where PettingZoo's environments have their random streams nobody knows."""
        assert self._kept is not None
        if seed is None:
            seed = (self._seed + lane + GAMES_APART * self._games[lane]) % (1 << 31)
        self._games[lane] += 1
        self._kept.begin(lane, self.envs[lane], seed)
        return seed

    def _by_lane(self, actions: Sequence[Arrays]) -> Arrays:
        """Return the actions of all groups, name → [L, …]."""
        return {
            f"{number}:{name}": array.reshape(self.lanes, -1, *array.shape[1:])
            for number, arrays in enumerate(actions)
            for name, array in arrays.items()
        }

    def _by_group(self, actions: Arrays) -> list[Arrays]:
        """Return what `_by_lane` was given."""
        found: list[Arrays] = [{} for _ in self._groups]
        for key, array in actions.items():
            number, _, name = key.partition(":")
            found[int(number)][name] = array.reshape(-1, *array.shape[2:])
        return found

    def episode(self, lane: int) -> Part | None:
        return None if self._kept is None else self._kept.state(lane)

    def state(self) -> Part:
        return {
            "lanes": {str(lane): self._state_of(lane) for lane in range(self.lanes)},
            "games": self._games,
            "seed": self._seed,
        }

    def _state_of(self, lane: int) -> Part:
        """Return what is known of a lane: nothing where it is between two games, no
        "episode" where that is too long."""
        if not self._living[lane]:
            return {}
        assert self._kept is not None  # only who was told to keep episodes is asked
        episode = self._kept.state(lane)
        return {"seen": self._seen(lane)} | ({} if episode is None else {"episode": episode})

    def _seen(self, lane: int) -> Arrays:
        """Return what the lane's agents see, as their rows have it."""
        seen = {}
        for agent in range(self._count):
            seat = lane * self._count + agent
            for source, reader in self._readers[agent] if self._present[seat] else ():
                seen[f"{agent}:{reader.name}"] = reader.row(self._observed[source][seat])
        return seen

    def load_state(self, state: Part) -> Mapping[int, str]:
        saved = {lane: state["lanes"].get(str(lane)) or {} for lane in range(self.lanes)}
        self._seed, self._games = state["seed"], list(state["games"])
        self._seeds = [None if games else self._seeds[lane] for lane, games in enumerate(self._games)]
        episodes = {lane: each["episode"] for lane, each in saved.items() if "episode" in each}
        blank = [
            allocate(schema_of_space(group.action, "action"), (len(group.seats),)) for group in self._groups
        ]
        assert self._kept is not None  # only who was told to keep episodes is told where they were
        kept = self._kept = KeptEpisodes.of(episodes, self._by_lane(blank), self._kept.options)
        self._tell_nothing(slice(0, self.lanes * self._count))
        lost = {lane: TOO_LONG for lane, each in saved.items() if each and lane not in episodes}
        now_told = self._options
        for lane, episode in episodes.items():
            self._options = kept.options_of(episode)
            self._again(lost, lane, partial(self._begin_anew, lane, episode["seed"]))
        self._options = now_told
        for number, actions in kept.ticks():
            given = self._lane_actions(self._by_group(actions))
            for lane in episodes.keys() - lost.keys():
                if number >= kept.begun(lane):
                    self._again(lost, lane, partial(self._step_on, lane, given))
        for lane in episodes.keys() - lost.keys():
            now, then = self._seen(lane), saved[lane]["seen"]
            if other := [
                name for name in then if name not in now or now[name].tobytes() != then[name].tobytes()
            ]:
                agent, _, name = other[0].partition(":")
                lost[lane] = another(f"another {name} of agent {self.agents[int(agent)].name} in the end")
        return lost

    def _again(self, lost: dict[int, str], lane: int, play: Callable[[], None]) -> None:
        """Play a part of a lane's episode again; note why that cannot be."""
        self._tell_nothing(slice(lane * self._count, (lane + 1) * self._count))
        try:
            play()
            if not self._living[lane]:
                lost[lane] = another("it ended before it had")
        except BaseException as error:
            told = message_of(fault_of(error))
            lost[lane] = f"it raised {type(error).__name__} as an episode was played again: {told}"

    # ---- what a kind does --------------------------------------------------------------

    @abstractmethod
    def _begin(self, lane: int, seed: int | None) -> None:
        """Reset a lane."""

    @abstractmethod
    def _step(self, lane: int, given: list[Any], last: bool) -> None:
        """Step a lane by the actions `given` per seat. `last`: it reaches the step limit,
        so that every open episode ends with it."""

    @abstractmethod
    def _doing(self, lane: int, given: list[Any]) -> str:
        """What a lane that raised was doing."""

    # ---- for the kinds -----------------------------------------------------------------

    def _reset(self, lane: int, seed: int | None) -> Any:
        """Reset a lane's environment, with the curriculum's options where there is one,
        and return what it returned."""
        return reset_env(self.envs[lane], seed, self._options)

    def _show(self, lane: int, agent: int, observation: Any, info: Mapping[str, Any] | None) -> None:
        """This agent has an observation. Its first one since its last end begins an
        episode."""
        seat = lane * self._count + agent
        if self._done[seat] or self._truncated[seat]:
            raise EnvironmentFault(
                f"{self.name}: lane {lane}: the episode of agent {self.agents[agent].name} ended and another "
                "began within one step; let the agent come back in a later one"
            )
        self._present[seat] = True
        self._observed[OWN][seat] = self._copied(observation, lane, agent)
        if self._masked:
            self._observed[MASK][seat] = self._mask_of(lane, agent, info)
        if not self._open[seat]:
            self._open[seat] = True
            self._living[lane] += 1
            for source, reader in self._readers[agent]:
                if source is OWN:
                    reader.check(observation, f"{self.name}: lane {lane}", self.agents[agent].name)

    def _end(self, lane: int, agent: int, done: bool) -> None:
        """This agent's open episode is over: it ended (done), or was cut."""
        seat = lane * self._count + agent
        (self._done if done else self._truncated)[seat] = True
        self._open[seat] = False
        self._living[lane] -= 1

    def _end_all(self, lane: int, done: bool) -> None:
        for agent in range(self._count):
            if self._open[lane * self._count + agent]:
                self._end(lane, agent, done)

    def _copied(self, value: Any, lane: int, agent: int) -> Any:
        """Return what a lane told of an agent as it is now, whatever others write where
        it lies."""
        if not self._aliases.active:
            return value
        return self._aliases.copied(value, lane if self._at_once else lane * self._count + agent)

    def _paid_equally(self, lane: int, rewards: Mapping[Any, Any], agents: Sequence[Any]) -> float:
        """Return the mean of what `agents` are paid."""
        for agent in agents:
            if type(rewards[agent]) not in NUMBERS:
                check_number(rewards[agent], f"reward of agent {agent}", f"{self.name}: lane {lane}")
        return float(sum(rewards[agent] for agent in agents)) / max(len(agents), 1)

    def _over(self, lane: int, agent: Any, terminated: Any, truncated: Any) -> bool:
        """True when an agent's episode is over, by what the environment says."""
        for name, value in (("terminated", terminated), ("truncated", truncated)):
            if type(value) is not bool:
                check_flag(value, f"{name} of agent {agent}", f"{self.name}: lane {lane}")
        return bool(terminated or truncated)

    def _see_state(self, lane: int) -> None:
        """Every agent of the lane sees the global state as it is now."""
        if self._stated:
            state = self._copied(self.envs[lane].state(), lane, 0)
            self._observed[STATE][lane * self._count : (lane + 1) * self._count] = [state] * self._count

    def _number(self, lane: int, agent: Any) -> int:
        """Return the index of an agent, by what the environment calls it."""
        try:
            return self._index[agent]
        except KeyError:
            raise EnvironmentFault(
                f"{self.name}: lane {lane} has an agent {agent!r} that is not among its possible_agents "
                f"({', '.join(map(str, self._ids))}); name all that may ever appear there"
            ) from None

    def _mask_of(self, lane: int, agent: int, info: Mapping[str, Any] | None) -> Any:
        mask = None if info is None or self._allowed[agent] is None else info.get("action_mask")
        if mask is None:
            return self._allowed[agent]
        if isinstance(mask, (dict, tuple, list)):
            return joined_mask(self.agents[agent].spaces.action, mask)
        return self._copied(mask, lane, agent)

    # ---- the rest ----------------------------------------------------------------------

    def _lane_actions(self, actions: Sequence[Arrays]) -> list[Any]:
        """Return each seat's action, as the environment takes it."""
        given: list[Any] = [None] * (self.lanes * self._count)
        for group, arrays in zip(self._groups, actions, strict=True):
            values = group.writer.values(arrays)
            if group.whole:
                return values
            for seat, value in zip(group.seats, values, strict=True):
                given[seat] = value
        return given

    def _explain(self, group: _Group, error: Exception) -> None:
        """Find whose answer does not fit, and raise a fault that says what it should have
        been."""
        for row, seat in enumerate(group.seats):
            where, agent = f"{self.name}: lane {seat // self._count}", group.names[row % len(group.names)]
            try:
                check_number(self._rewards[seat], f"reward of agent {agent}", where)
                if self._present[seat]:
                    for source, reader in group.readers:
                        reader.check(self._observed[source][seat], where, agent)
            except EnvironmentFault as fault:
                lane = seat // self._count
                raise fault.in_lane(lane).telling(self._told(lane)) from error
        if isinstance(error, EnvironmentFault):
            raise error if error.lane is None else error.telling(self._told(error.lane))
        raise EnvironmentFault(
            f"{self.name}: what it returned does not fit its spaces: {message_of(error)}"
        ) from error

    def _told(self, lane: int) -> dict[str, dict[str, Any]]:
        """Return what a lane told its agents, for its fault."""
        told = {}
        for number, agent in enumerate(self.agents):
            seat = lane * self._count + number
            names = {
                source: "obs" if reader.path else reader.name for source, reader in self._readers[number]
            }
            seen = {name: self._observed[source][seat] for source, name in names.items()}
            told[agent.name] = {
                **(seen if self._present[seat] else {}),
                "reward": self._rewards[seat],
                "terminated": self._done[seat],
                "truncated": self._truncated[seat],
            }
        return told


def joined_mask(space: Space, mask: Any) -> Array:
    """Return the mask of all discrete leaves of an action side by side, of one that is
    nested as the action is, a MultiDiscrete's in branches. None in its place allows all
    of a leaf."""
    in_parts = isinstance(mask, (tuple, list)) and any(part is None or np.ndim(part) for part in mask)
    match space:
        case Dict() if isinstance(mask, dict):
            return np.concatenate([joined_mask(part, mask.get(key)) for key, part in space.spaces.items()])
        case Tuple() if in_parts:
            return np.concatenate([joined_mask(*both) for both in zip(space.spaces, mask, strict=True)])
        case MultiDiscrete() if in_parts:
            return np.concatenate(mask)
    if mask is None:
        choices = sum(sum(choices_of(leaf)) for leaf in leaves(space, "action").values())
        return np.ones(choices, np.int8)
    return np.zeros(0, np.int8) if isinstance(space, (Box, MultiBinary)) else np.asarray(mask)


def picker(places: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """Return what takes these places of a list, or keys of a mapping, in their order."""
    if len(places) < 2:
        return lambda values: [values[place] for place in places]
    return itemgetter(*places)
