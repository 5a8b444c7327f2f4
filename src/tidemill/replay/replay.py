"""The replay memory: what actors did, to be drawn from again and again."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy import count_nonzero

from tidemill.api.algorithm import Sample
from tidemill.api.buffer import BufferConfig, BufferedSample, Demand, Received, ReplayBuffer
from tidemill.api.stream import Offered, SampleConsumer
from tidemill.core.errors import CheckpointError, ConfigError, SchemaError
from tidemill.core.memory import Need, available, own_of, size
from tidemill.core.schema import Array, Arrays, Schema
from tidemill.core.untrusted_files import open_plain, read_json, read_plain
from tidemill.native.library import asked_for, choices
from tidemill.replay.native_draws import NativeDraws, NativeSequences
from tidemill.replay.priorities import Priorities
from tidemill.replay.row_storage import Store, not_stacked
from tidemill.replay.sequences import Ints, Sequences
from tidemill.store.checkpoint import MANIFEST, sync, write_synced

LOOKED_AT = 256
"""So many first rows are looked at: are their stacks of frames what they should be?"""
LARGEST = float(np.finfo(np.float32).max) ** 0.25
"""Numbers up to this (4.3e9) make no update infinite by themselves: the norm of a
gradient is of squares of products of two."""
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Replay(BufferConfig):
    """A replay memory keeps the newest rows of every seat, and draws batches of
    transitions, each equally likely. It is for off-policy algorithms (`DQN`, `SAC`), and
    filled by `ReplayActors`. The trainer's `batch_size` is the number of transitions in a
    batch.

    capacity: rows that it holds; all seats share them equally. An episode of T steps
        takes T + 1
    warm_up: transitions that must be there before the first batch is drawn; 0: the first
        one will do. Draws are with replacement: of fewer transitions than a batch has,
        some come several times
    steps: n of n-step returns: a transition reaches over so many steps, fewer at an
        episode's end
    frame_stack: frames in an observation, as of the actors (or of the environment, as
        Atari's): stacked observations are kept as single frames, and stacked when they
        are drawn. What stands for the frames before an episode's first one is seen from
        the first rows.
        1: kept as they come
    whole_episodes: whether steps of an episode can be drawn only once it is over, and not
        from when they come
    drop_cut: whether an episode of which a step was lost, or that a resume cannot go on
        with, is taken out of the memory, and not kept as a truncated one; but not where
        fewer than `warm_up` transitions (or none) would be left
    max_bytes: most memory that it may take; None: what the machine has
    mapped: whether rows are kept in a file in the run's folder and not in memory: it has
        no name, takes its whole size on the disk at once, and is gone when the run ends,
        in whatever way. Checkpoints hold what is in it
    """

    replays: ClassVar[bool] = True

    capacity: int
    warm_up: int = 1000
    steps: int = 1
    frame_stack: int = 1
    whole_episodes: bool = False
    drop_cut: bool = False
    max_bytes: int | None = None
    mapped: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(capacity=1, warm_up=0, steps=1, frame_stack=1, max_bytes=1)
        if self.warm_up > self.capacity:
            raise ConfigError(
                f"{type(self).__name__}: warm_up = {self.warm_up:,} transitions are more than capacity = "
                f"{self.capacity:,} rows can hold"
            )

    @property
    def begins_midway(self) -> bool:
        return self.frame_stack == 1  # else the frames before that row are not there

    def build(self, source: SampleConsumer, demand: Demand) -> ReplayBuffer:
        return UniformReplay(self, source, demand)


class UniformReplay(ReplayBuffer):
    """The buffer that `Replay` describes."""

    def __init__(self, config: Replay, source: SampleConsumer, demand: Demand) -> None:
        super().__init__(source, demand)
        assert demand.rows is not None  # `ReplayTrainer.batch_size`
        self._config, self._batch = config, demand.rows
        self._rng = np.random.default_rng(demand.seed)
        self._warm, self._least = False, max(config.warm_up, 1)
        self._slots = 0  # of all producers, once these have made them
        self._looked_at = 0  # rows
        # whether the frames before an episode's first one are 0; else they are copies of
        # it
        self._blank = False
        self._places: Ints = np.empty(0, np.int64)  # where the last batch begins
        self._weight, self._priority = np.empty((2, 1, self._batch), np.float32)
        # what gathers batches; None: numpy does
        self._draws: NativeDraws | None = None
        self._make()

    # ---- making it ---------------------------------------------------------------------

    def _make(self) -> bool:
        """Make the memory, as soon as the producers' rows are known."""
        blocks = self._source.offered()
        if blocks is None:
            return False
        config, name = self._config, type(self._config).__name__
        seats = [block.lead[1] for block in blocks]
        lanes = sum(seats)
        self._first = np.add.accumulate([0, *seats])[:-1]
        length = config.capacity // lanes
        least = Sequences.least_length(config.steps, config.frame_stack)
        if length < least:
            raise ConfigError(
                f"{name}: capacity = {config.capacity:,} rows leave {length:,} for each of {lanes:,} seats, "
                f"and each needs {least} for steps = {config.steps} and frame_stack = {config.frame_stack}; "
                f"make it at least {least * lanes:,}"
            )
        if config.capacity < self._batch:
            raise ConfigError(
                f"{name}: capacity = {config.capacity:,} rows is less than a batch of {self._batch:,}; make "
                "it more, or batch_size less"
            )
        # with episodes of a single step, half of the rows are last ones
        reached = lanes * (length - config.steps - config.frame_stack) // 2
        if config.warm_up > reached:
            raise ConfigError(
                f"{name}: warm_up = {config.warm_up:,} transitions might never be reached: with {lanes:,} "
                f"seats, capacity = {config.capacity:,} rows are sure to hold {reached:,}, since episodes "
                "may be short; make warm_up less, or capacity more"
            )
        places = lanes * length
        self._store = Store(_common(blocks), config.frame_stack)
        self._open(lanes, length, places)
        self._slots = sum(block.slots for block in blocks)
        return True

    def _open(self, lanes: int, length: int, places: int) -> None:
        config, store = self._config, self._store
        rows, books = store.nbytes(places), self._books(places)
        formula = f"{places:,} rows x ({store.formula()} bytes) and {size(books)} to find them"
        free = available()
        if config.max_bytes is not None:
            self._fit(
                rows + books,
                config.max_bytes,
                f"max_bytes allows {config.max_bytes:,} bytes: {formula}",
                "max_bytes more",
            )
        held = books if config.mapped else rows + books
        cure = "free memory" if config.mapped else "mapped = True to keep rows in a file"
        self._fit(held, free, f"{size(free)} of memory are available: {formula}", cure)
        priorities = self._make_priorities(places)
        if config.mapped and self._demand.folder is None:
            raise ConfigError(
                "mapped = True keeps rows in a file in the run's folder, and this run has none; give it one, "
                "or take mapped = False"
            )
        store.open(places, self._demand.folder if config.mapped else None)
        settings = (
            lanes,
            length,
            config.steps,
            config.frame_stack,
            config.whole_episodes,
            config.drop_cut,
            priorities,
        )
        kernels = asked_for(choices()[-1])
        if kernels is None:
            self.sequences = Sequences(*settings)
        else:
            self.sequences = found = NativeSequences(kernels, *settings)
            self._draws = NativeDraws(found, store, config.steps, self._batch)
        own = Need("replay", books, f"what finds {places:,} rows")
        self.needs = (own,) if config.mapped else (Need("replay", rows, formula, shared=True), own)

    @property
    def unfilled(self) -> int:
        if not self._slots:
            return 0
        sequences = self.sequences
        return own_of(self.needs) * (sequences.length - sequences.written()) // sequences.length

    def _fit(self, takes: int, most: int, limit: str, cure: str) -> None:
        """Raise `ConfigError` when what it takes is more bytes than the most that there
        may be."""
        if takes > most:
            capacity, name = self._config.capacity, type(self._config).__name__
            raise ConfigError(
                f"{name}: capacity = {capacity:,} rows takes {size(takes)}, and {limit}; make capacity at "
                f"most {int(capacity * most / takes):,}, or "
                f"{cure}; stacked frames take less with frame_stack"
            )

    def _books(self, places: int) -> int:
        """Return the bytes of what finds rows."""
        return 8 * places

    def _make_priorities(self, places: int) -> Priorities | None:
        """Return what knows how likely each place is; None: all are equally."""
        return None

    # ---- rows come in ------------------------------------------------------------------

    def receive(self) -> list[Received]:
        received: list[Received] = []
        if not self._slots and not self._make():
            return received
        for _ in range(self._slots):
            sample = self._source.consume()
            if sample is None:
                break
            received.append(self._take_in(sample))
            self._source.release()
            if not self._warm and self.sequences.count >= self._least:
                self._begin_to_draw()
        return received

    def _begin_to_draw(self) -> None:
        self._warm, self.sequences.least = True, self._least

    def _take_in(self, sample: Sample) -> Received:
        start, seats = int(self._first[sample.channel]), sample["version"].shape[1]
        every = np.arange(start, start + seats)
        committed = lost = 0
        returns: list[float] = []
        for t in range(len(sample["version"])):
            row = {name: array[t] for name, array in sample.items()}
            begins, version = row["on_reset"], row["version"]
            stepped = version >= 0
            voided = row.get("voided")
            if voided is not None and count_nonzero(voided):
                self.sequences.cut(every[voided])
                lost += int(count_nonzero(voided))
            if count_nonzero(stepped & begins):
                raise SchemaError(
                    "a replay was sent rows whose first ones in an episode have acted already: they hold "
                    "what is done in them, not what led to them; take ReplayActors in place of Actors"
                )
            committed += int(count_nonzero(stepped))
            if count_nonzero(row["info_mask"]):
                returns += row["info.return"][row["info_mask"]].tolist()
            here = stepped | begins
            columns: Any = slice(None) if count_nonzero(here) == seats else here.nonzero()[0]
            lanes = every[columns]
            if len(lanes):
                places = self.sequences.append(
                    lanes, begins[columns], (row["done"] | row["truncated"])[columns]
                )
                self._store.write(places, row, columns)
                if self._store.frames:
                    self._look_at(places, row, columns)
        return Received(sample.channel, committed, lost, tuple(returns))

    def _look_at(self, places: Ints, row: Arrays, columns: Any) -> None:
        """Raise `ConfigError` when the stacks of rows cannot be made again of the frames
        that are kept of them: of the first rows, and of all that begin an episode. What
        stands for the frames before these is seen from them."""
        first = self.sequences.step[places] == 0
        if self._looked_at >= LOOKED_AT and not first.any():
            return
        self._looked_at += len(places)
        for name, frames in self._store.frames.items():
            given = row[name][columns]
            if np.array_equal(self._stack(name, places), given):
                continue
            self._blank |= bool(first.any())
            if not np.array_equal(self._stack(name, places), given):
                raise not_stacked(name, "another one in an episode's next row", frames.count)

    def _stack(self, name: str, places: Ints) -> Array:
        """Return the stacks [n, ...] of a leaf that end at `places`."""
        frames, (stacks, before) = self._store.frames[name], self.sequences.stacks(places)
        found = self._store.arrays[name][stacks]
        if self._blank:
            found[before] = 0
        return frames.join(found)

    # ---- batches -----------------------------------------------------------------------

    @property
    def sampleable(self) -> bool:
        return self._warm

    def take(self, version: int) -> Sequence[BufferedSample] | None:
        if not self._warm:
            return None
        places, weight = self._draw(self._batch, version)
        self._places = places
        sample, oldest, stamps = self._gather(places)
        sample["weight"], sample["priority"] = weight, self._priority
        self._priority.fill(np.nan)
        return [BufferedSample(sample, len(places), len(places), oldest, stamps)]

    def _draw(self, count: int, version: int) -> tuple[Ints, Array]:
        """Return where `count` transitions begin, and what each weighs, [1, count], for
        the algorithm that is at `version`."""
        self._weight.fill(1)
        return self.sequences.draw(count, self._rng), self._weight

    def _gather(self, places: Ints) -> tuple[Sample, int, int]:
        """Return the transitions that begin at `places`, the oldest of the versions that
        acted, and their sum. By the native core they lie in the same memory each time."""
        if self._draws is not None:
            sample, oldest, stamps = self._draws.gather(places)
            first, _, last = self._draws.places
            for name in self._store.frames:
                sample[name] = self._stack(name, first)[np.newaxis]
                sample[f"next.{name}"] = self._stack(name, last)[np.newaxis]
            return sample, oldest, stamps
        arrays, spans, n = self._store.arrays, self.sequences.span[places], np.arange(self._config.steps + 1)
        ahead = self.sequences.ahead(places[:, None], n)
        then, last = ahead[:, 1], ahead[np.arange(len(places)), spans]
        sample = Sample()
        sample.bootstrap = 0
        for name, array in arrays.items():
            if name.startswith("obs"):
                for whose, at in (("", places), ("next.", last)):
                    # a tenth of what an index takes
                    found = self._stack(name, at) if name in self._store.frames else array.take(at, 0)
                    sample[whose + name] = found[np.newaxis]
            elif name.startswith("action"):
                sample[name] = array[then][np.newaxis]
        rewards = arrays["reward"].take(ahead[:, 1:])
        rewards[n[1:] > spans[:, None]] = 0
        sample["rewards"], sample["steps"] = rewards[np.newaxis], spans[np.newaxis]
        sample["done"] = arrays["done"][last][np.newaxis]
        sample["version"] = versions = arrays["version"][then][np.newaxis]
        return sample, int(versions.min()), int(versions.sum(dtype=np.int64))

    def release(self) -> None:
        """Do nothing: the next batch is drawn over this one."""

    def forget_large(self) -> int:
        """See `ReplayBuffer.forget_large`. Half of `warm_up` stays in any case."""
        sample, places = self._gather(self._places)[0], self._places
        large = np.zeros(len(places), np.bool_)
        for name, array in sample.items():
            if array.dtype.kind == "f" and name.removeprefix("next.").partition(".")[0] in ("obs", "rewards"):
                large |= ~(np.abs(array[0].reshape(len(places), -1)) <= LARGEST).all(axis=1)
        found = np.unique(places[large])
        if len(found) == 0 or self.sequences.count - len(found) < max(self._least // 2, 1):
            return 0
        self.sequences.drop(found)
        return len(found)

    # ---- checkpoints -------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        fields = {name: [list(field.shape), field.dtype] for name, field in self._store.schema.items()}
        return {
            "format": FORMAT,
            # saved ones have the name that the class had first
            "kind": "Uniform" if type(self) is UniformReplay else type(self).__name__,
            "lanes": self.sequences.lanes,
            "length": self.sequences.length,
            "fields": fields,
            "steps": self._config.steps,
        }

    def _arrays(self) -> Arrays:
        """Return all arrays that make it up, by file name: views. Those of rows have the
        places first."""
        return {f"row.{name}": array for name, array in self._store.arrays.items()} | self.sequences.state()

    def save(self, folder: Path) -> None:
        filled = self.sequences.written()
        parts = {name: self._part(array, filled) for name, array in self._arrays().items()}
        try:
            # first: until it failed it would take the room that others on the disk need
            needed, disk = sum(part.nbytes for part in parts.values()), shutil.disk_usage(folder)
            if disk.total and needed > disk.free:  # a share may not say
                raise CheckpointError(
                    f"the replay cannot be written to {folder}: it takes {size(needed)}, of which "
                    f"{size(disk.free)} are free there; free space, or leave it out of checkpoints "
                    "(keep_buffer = False)"
                )
            formula = {name: _write(folder / f"{name}.npy", part) for name, part in parts.items()}
            chance = self._rng.bit_generator.state
            manifest = {
                **self._facts(),
                "filled": filled,
                "warm": self._warm,
                "blank": self._blank,
                "random": chance,
                "sha256": formula,
                **self._more_facts(),
            }
            write_synced(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
            sync(folder)
        except OSError as error:
            raise CheckpointError(
                f"the replay cannot be written to {folder}: {error.strerror}; free space or make the folder "
                "writable"
            ) from None

    def _part(self, array: Array, filled: int) -> Array:
        """Return of an array with the places first the rows that were ever written,
        [lanes, filled, ...]; others as they are."""
        lanes, length = self.sequences.lanes, self.sequences.length
        return (
            array.reshape(lanes, length, *array.shape[1:])[:, :filled]
            if len(array) == lanes * length
            else array
        )

    def _more_facts(self) -> dict[str, Any]:
        return {}

    def restore(self, folder: Path) -> None:
        try:
            manifest = read_json(read_plain(folder / MANIFEST))
            manifest.setdefault("steps", self._config.steps)  # earlier ones do not say it
            for name, own in self._facts().items():
                if manifest[name] != own:
                    raise CheckpointError(
                        f"the replay in {folder} has {name} = {manifest[name]}, and this one {own}; resume "
                        "with the settings and actors that saved it"
                    )
            for name, array in self._arrays().items():
                part = self._part(array, manifest["filled"])
                part[...] = _read(folder / f"{name}.npy", manifest["sha256"][name], part)
            self._rng.bit_generator.state = manifest["random"]
            self._blank = bool(manifest["blank"])
            self.sequences.recount()
            if manifest["warm"]:
                self._begin_to_draw()
            self._take_facts(manifest)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the replay in {folder} cannot be read: {type(error).__name__}: {error}"
            ) from None

    def _take_facts(self, manifest: dict[str, Any]) -> None:
        """Take back what `_more_facts` returned."""


def _common(blocks: Sequence[Offered]) -> Schema:
    """Return the schema of all producers' rows."""
    first, *others = (block.schema for block in blocks)
    for other in others:
        if dict(other) != dict(first):
            raise ConfigError(
                "a replay needs rows of one kind, and its producers send different ones; give each kind a "
                "sample stream and a trainer"
            )
    return first


def _write(path: Path, array: Array) -> str:
    """Write a new file that only its owner may read, and have it on the disk; return its
    checksum."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w+b") as file:
        np.lib.format.write_array(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path, checksum: str, like: Array) -> Array:
    with open_plain(path) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != checksum:
            raise CheckpointError(f"replay file {path} is damaged (its checksum differs)")
    array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.shape != like.shape or array.dtype != like.dtype:
        raise CheckpointError(
            f"replay file {path} holds {array.dtype}{list(array.shape)}, not {like.dtype}{list(like.shape)}"
        )
    return array
