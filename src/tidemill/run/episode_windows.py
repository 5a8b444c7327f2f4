"""What the last episodes of a run have reached: of each policy, and of each agent spec
where several play one; kept beside checkpoints.

``episodes.json`` in the run's folder has, of each policy, the last episodes as they were
known when its newest checkpoints were begun. A resumed run goes on from those that belong
to its checkpoint.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tidemill.api.conditions import episode_metric
from tidemill.api.control_messages import Episodes
from tidemill.api.experiment import Experiment
from tidemill.core.errors import RunError
from tidemill.workers.info_numbers import NONE, Numbers, by_name

# checkpoints of each policy of whose time the last episodes are known: the newest ones,
# should one be damaged
CHECKPOINTS = 3


class LastEpisodes:
    """The last episodes of the agents of one spec; `window`: how many."""

    def __init__(self, window: int) -> None:
        # return, length, what was won, and what the environment said
        self._episodes: deque[tuple[float, int, float, Numbers]] = deque(maxlen=window)
        self._totals: dict[str, tuple[float, int]] | None = None

    def __len__(self) -> int:
        return len(self._episodes)

    @property
    def full(self) -> bool:
        """True once there were as many as the window holds."""
        return len(self._episodes) == self._episodes.maxlen

    def add(
        self, returns: Iterable[float], lengths: Iterable[int], won: Iterable[float], infos: Iterable[Numbers]
    ) -> None:
        """Add episodes that ended: their undiscounted returns, numbers of actions, what
        they won (1, or ½ where drawn), and what the environment said of them."""
        self._episodes.extend(zip(returns, lengths, won, infos, strict=True))
        self._totals = None

    def clear(self) -> None:
        """Forget all of them."""
        self._episodes.clear()
        self._totals = None

    def totals(self) -> dict[str, tuple[float, int]]:
        """Return the sum of their "return", "length" and "win_rate", and of each number
        that the environment said of them ("info/NAME"); and of how many it is. Nothing
        before the first."""
        if self._totals is None:
            kept = self.plain()
            parts: dict[str, Sequence[float]] = {
                "return": kept.returns,
                "length": kept.lengths,
                "win_rate": kept.won,
            }
            parts |= {f"info/{name}": values for name, values in by_name(kept.infos).items()}
            self._totals = {what: (sum(values), len(values)) for what, values in parts.items() if values}
        return self._totals

    def plain(self) -> "SavedEpisodes":
        """Return them as plain data, the oldest first."""
        columns: Any = ([episode[part] for episode in self._episodes] for part in range(4))
        return SavedEpisodes(*columns)


class SavedEpisodes(msgspec.Struct, frozen=True):
    """What `LastEpisodes` knows, as it is kept."""

    returns: list[float]
    lengths: list[int]
    won: list[float]
    infos: list[dict[str, float]] = msgspec.field(name="said")  # as earlier versions called it

    def whole(self) -> bool:
        """True when each episode has all of it."""
        return len(self.returns) == len(self.lengths) == len(self.won) == len(self.infos)


class CheckpointEpisodes(msgspec.Struct, frozen=True):
    """The last episodes of one policy at a checkpoint: the `updates` that it is of, the
    curriculum's stage (from 0) in which they began, and they by name (see
    `Experiment.players`)."""

    updates: int
    stage: int
    episodes: dict[str, SavedEpisodes]


class EpisodeWindows:
    """The last episodes of each policy and spec of an experiment, under the names that
    `Experiment.players` gives them. Where several specs play a policy, its episodes are
    the last ones of each: those of one spec come in a row, and what the others did would
    be pushed out by them."""

    def __init__(self, experiment: Experiment) -> None:
        self._specs = {player: names[-1] for player, names in experiment.players().items()}
        self._policies = {
            name: experiment.workers[group].plays()[number][0]
            for (group, number), name in self._specs.items()
        }
        self._last = {name: LastEpisodes(experiment.limits.window) for name in self._specs.values()}
        self._parts: dict[str, list[LastEpisodes]] = {name: [] for name in experiment.episode_names()}
        for player, names in experiment.players().items():
            for name in names:
                self._parts[name].append(self._last[self._specs[player]])

    def add(self, group: str, message: Episodes) -> None:
        """Add episodes that a worker of `group` tells of an agent spec."""
        if (name := self._specs.get((group, message.spec))) is not None:
            infos = message.infos or [NONE] * len(message.returns)
            if not len(message.returns) == len(message.lengths) == len(infos):
                raise RunError(
                    f"a worker of {group} reported {len(message.returns)} returns, {len(message.lengths)} "
                    f"lengths and {len(infos)} infos of the same episodes; Episodes has one of each per "
                    "episode, or no infos"
                )
            won = list(map(won_of, message.returns, infos))
            self._last[name].add(message.returns, message.lengths, won, infos)

    def clear(self, policy: str | None = None) -> None:
        """Forget all of them, or those of one policy."""
        for name, episodes in self._last.items():
            if policy in (None, self._policies[name]):
                episodes.clear()

    def count(self, who: str) -> int:
        """Return how many episodes of `who` are known."""
        return sum(map(len, self._parts[who]))

    def full(self, who: str) -> bool:
        """True once there were as many of each spec as the window holds."""
        return self.count(who) > 0 and all(part.full for part in self._parts[who])

    def all_full(self) -> bool:
        """True once there were as many of every spec as the window holds."""
        return all(part.full for part in self._last.values())

    def means(self, who: str) -> dict[str, float]:
        """Return the mean "return", "length", "win_rate" and "info/NAME" of `who`;
        nothing before the first episode."""
        totals: dict[str, tuple[float, int]] = {}
        for part in self._parts[who]:
            for what, (value, count) in part.totals().items():
                before = totals.get(what, (0.0, 0))
                totals[what] = (before[0] + value, before[1] + count)
        return {what: value / count for what, (value, count) in totals.items()}

    def mean_returns(self) -> dict[str, float | None]:
        """Return the mean return of each policy, by its name or "" where there is one;
        None before its first episode."""
        return {who: self.means(who).get("return") for who in self._parts if "/" not in who}

    def metrics(self, full: bool = False) -> dict[str, float]:
        """Return all means by the names of the metrics; `full`: those alone that are of
        as many episodes as the window holds."""
        known = [who for who in self._parts if not full or self.full(who)]
        return {episode_metric(what, who): mean for who in known for what, mean in self.means(who).items()}

    def plain(self, policy: str) -> dict[str, SavedEpisodes]:
        """Return those of a policy as plain data."""
        return {name: self._last[name].plain() for name, which in self._policies.items() if which == policy}

    def restore(self, saved: Mapping[str, SavedEpisodes]) -> None:
        """Take back what `plain` returned."""
        for name in self._last.keys() & saved.keys():
            if (known := saved[name]).whole():
                self._last[name].add(known.returns, known.lengths, known.won, known.infos)


def won_of(episode_return: float, info: Numbers) -> float:
    """Return 1 for an episode that was won, and 0 for one that was lost: as the
    environment says by "is_success" or "success", or else by its return, above 0 or
    below. One of 0 is drawn, and counts ½."""
    for name in ("is_success", "success"):
        if name in info:
            return min(max(info[name], 0.0), 1.0)
    return 1.0 if episode_return > 0 else 0.0 if episode_return < 0 else 0.5


def read_saved_episodes(data: bytes) -> dict[str, list[CheckpointEpisodes]]:
    """Return what ``episodes.json`` holds; nothing where it is damaged: a resumed run
    then counts its episodes from 0."""
    try:
        return msgspec.json.decode(data, type=dict[str, list[CheckpointEpisodes]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
