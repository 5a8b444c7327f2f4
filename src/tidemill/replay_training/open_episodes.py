"""The open episodes of an exact run's slots, as its trainer knows them from their rows:
what a resumed run plays again (see `replay_training.exact`).

Rows of exact runs have fields that begin with `SENT`: what was chosen after the row
before this one, for the slot whose row that was. These are taken out here, before any
buffer or journal sees them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tidemill.api.algorithm import Sample
from tidemill.api.stream import Offered, SampleConsumer, WatchedConsumer
from tidemill.core.errors import CheckpointError, SchemaError
from tidemill.core.safetensors_io import unpack
from tidemill.core.schema import Array, Arrays
from tidemill.core.untrusted_files import read_plain
from tidemill.envs.episode_replay import LONGEST
from tidemill.store.checkpoint import checkpoints

SENT = "sent."
FILE = "slots"


@dataclass
class OpenEpisode:
    """What is known of a slot.

    number: number of its newest episode; -1 before the first
    open: that one is not over
    steps: stored ones in it,
    actions: [steps, ...] by leaf name,
    rewards: float32 [steps]: what they were, and what they brought. Empty above `LONGEST`
    seen: its newest row's observation and state, by name, without an axis of seats
    chosen: what was chosen then, is in flight or about to be sent: by name, likewise;
        None: nothing yet
    """

    number: int = -1
    open: bool = False
    steps: int = 0
    actions: Arrays = field(default_factory=dict)
    rewards: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    seen: Arrays = field(default_factory=dict)
    chosen: Arrays | None = None

    @property
    def replayable(self) -> bool:
        """True when the episode can be played again."""
        return self.steps <= LONGEST

    def take(self, row: Mapping[str, Array]) -> None:
        """Take in its next row."""
        self.chosen = None
        if row["voided"]:
            self.open = False
            return
        if row["on_reset"]:
            self.number, self.open, self.steps = self.number + 1, True, 0
        elif row["version"] >= 0:
            if self.steps < LONGEST:
                for name, value in row.items():
                    if name == "action" or name.startswith("action."):
                        self.actions[name] = _with(self.actions.get(name), self.steps, value)
                self.rewards = _with(self.rewards, self.steps, row["reward"])
            self.steps += 1
            self.open = not (row["done"] or row["truncated"])
        self.seen = {
            name: value.copy() for name, value in row.items() if name.partition(".")[0] in ("obs", "state")
        }

    def arrays(self) -> Arrays:
        """Return all of it."""
        numbers = {"number": np.array(self.number), "steps": np.array(self.steps if self.open else -1)}
        if not self.open or not self.replayable:
            return numbers
        listed = (
            {name: array[: self.steps] for name, array in {**self.actions, "reward": self.rewards}.items()}
            if self.steps
            else {}
        )
        chosen = {} if self.chosen is None else {SENT + name: value for name, value in self.chosen.items()}
        return {**numbers, **listed, **self.seen, **chosen}

    @classmethod
    def of(cls, arrays: Arrays) -> "OpenEpisode":
        """Return what `arrays` returned these of. Raises KeyError."""

        def having(*families: str) -> Arrays:
            return {name: array for name, array in arrays.items() if name.partition(".")[0] in families}

        steps = int(arrays["steps"])
        made = cls(int(arrays["number"]), steps >= 0, max(steps, 0))
        if made.open and made.replayable:
            made.actions, made.seen = having("action"), having("obs", "state")
            made.rewards = arrays["reward"] if steps else made.rewards
            made.chosen = {name.removeprefix(SENT): array for name, array in having("sent").items()} or None
        return made


def _with(array: Array | None, place: int, value: Array) -> Array:
    """Return `array` with `value` at `place`, which may be its end."""
    if array is None or place >= len(array):
        longer = np.zeros((max(64, 2 * place), *value.shape), value.dtype)
        if array is not None:
            longer[:place] = array[:place]
        array = longer
    array[place] = value
    return array


class OpenEpisodes(WatchedConsumer):
    """A sample stream whose rows are noted as they are taken. `slots`: how many there
    are, each with a channel of its own."""

    def __init__(self, source: SampleConsumer, slots: int) -> None:
        super().__init__(source)
        self.slots = [OpenEpisode() for _ in range(slots)]
        self.last = -1
        """The slot whose row came last."""

    def offered(self) -> list[Offered] | None:
        offered = self._source.offered()
        if offered is None:
            return None
        return [
            Offered(
                {name: field for name, field in block.schema.items() if not name.startswith(SENT)},
                block.lead,
                block.slots,
                block.rows,
            )
            for block in offered
        ]

    def _look(self, sample: Sample) -> None:
        chosen = {
            name.removeprefix(SENT): sample.pop(name)[0, 0].copy()
            for name in [*sample]
            if name.startswith(SENT)
        }
        if self.last >= 0:
            before = self.slots[self.last]
            before.chosen = chosen if before.open and chosen["version"] >= 0 else None
        self.last = sample.channel
        self.slots[self.last].take({name: array[0, 0] for name, array in sample.items()})

    def arrays(self, whole: bool) -> Arrays:
        """Return what is to be kept: of all slots; not `whole`: only how many episodes
        each had."""
        kept: Arrays = {
            "last": np.array(self.last if whole else -1),
            "slots": np.array(len(self.slots)),
        }
        for number, slot in enumerate(self.slots):
            episode = slot if whole else OpenEpisode(slot.number)
            kept |= {f"{number}/{name}": array for name, array in episode.arrays().items()}
        return kept

    def restore(self, last: int, slots: Sequence[OpenEpisode]) -> None:
        """Take back what `arrays` returned."""
        self.last = last
        self.slots[: len(slots)] = slots[: len(self.slots)]


class OpenEpisodeTracker(WatchedConsumer):
    """A sample stream of which is known, at each of its seats, whether an episode is open
    that has a step. `seats`: how many each channel has."""

    def __init__(self, source: SampleConsumer, seats: Sequence[int]) -> None:
        super().__init__(source)
        self.open = [np.zeros(count, np.bool_) for count in seats]

    def _look(self, sample: Sample) -> None:
        flags = self.open[sample.channel]
        flags |= sample["version"][0] >= 0
        flags &= ~(sample["on_reset"] | sample["done"] | sample["truncated"] | sample["voided"])[0]

    def cut(self, channel: int) -> None:
        """The actor behind `channel` lives again: none of its episodes is open any
        more."""
        self.open[channel][:] = False

    def restore(self, slots: Sequence[OpenEpisode]) -> None:
        """Take back what is known of each channel's slot."""
        for flags, slot in zip(self.open, slots, strict=True):
            flags[:] = slot.open and slot.steps > 0


def read_slots(arrays: Arrays) -> tuple[int, list[OpenEpisode]]:
    """Return the slot whose row came last, -1 for none, and all slots, from what
    `OpenEpisodes.arrays` returned. Raises `CheckpointError`."""
    try:
        slots = [
            OpenEpisode.of(
                {
                    name.partition("/")[2]: array
                    for name, array in arrays.items()
                    if name.startswith(f"{number}/")
                }
            )
            for number in range(int(arrays["slots"]))
        ]
        return int(arrays["last"]), slots
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"the slots of the checkpoint cannot be read: {type(error).__name__}: {error}"
        ) from None


def newest_slots(folder: Path) -> tuple[int, list[OpenEpisode]] | None:
    """Return the slots in the newest checkpoint in `folder`; None where it has none: its
    run was not exact."""
    newest = checkpoints(folder)
    path = newest[-1] / f"{FILE}.safetensors" if newest else None
    if path is None or not path.is_file():
        return None
    try:
        return read_slots(unpack(read_plain(path))[0])
    except (OSError, SchemaError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
