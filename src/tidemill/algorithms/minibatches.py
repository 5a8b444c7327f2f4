"""From samples to minibatches: targets computed on [T, N], the trained rows gathered, and
picked by themselves or, for recurrent policies, as chunks of rows one after the other.
Numpy only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.algorithms.array_library import Library
from tidemill.algorithms.policy_gradient_formulas import gae
from tidemill.api.algorithm import Sample
from tidemill.core.schema import Arrays
from tidemill.nets.trainable import TrainablePolicy

Floats = NDArray[np.float32]
Integers = NDArray[np.intp]


@dataclass
class Batch:
    """A batch holds the M rows that enter the loss, in arrays of its own: the samples may
    be released."""

    observation: Arrays
    """Raw observations by leaf name, [M, ...]."""
    action: Arrays
    """Actions by leaf name, [M, ...]."""
    log_prob: Floats
    """Log-probabilities of the actions, by the policy that acted, [M]."""
    value: Floats
    """Values by the policy that acted, [M], reward units."""
    advantage: Floats
    """[M], reward units."""
    target: Floats
    """λ-returns, [M], reward units."""

    def __len__(self) -> int:
        return len(self.advantage)


Estimate = Callable[[Sample], tuple[Floats, Floats]]
"""sample → (advantages, targets of the values), each [T, N], reward units."""
Empty = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
"""(shape, dtype) → an array to be filled."""
LogRatio = Callable[[Sample, Integers], Floats]
"""(sample, indices into its flattened [T, N]) → log π - log μ of each of these rows,
which all acted."""


def gae_of(
    gamma: float,
    lam: float,
    log_ratio: LogRatio | None = None,
    formula: Callable[..., tuple[Floats, Floats]] = gae,
) -> Estimate:
    """Return what estimates advantages and values' targets by `gae`, or by the `formula`
    of the native core. With `log_ratio` traces are corrected for how far the policy has
    moved since it acted; without, estimates that the rows have already
    (`tidemill.algorithms.post_processors.GAE`) are taken as they are."""

    def estimate(sample: Sample) -> tuple[Floats, Floats]:
        fields: dict[str, NDArray[Any]] = dict(sample)
        if log_ratio is None and "post.advantage" in fields:
            return fields["post.advantage"], fields["post.target"]
        done, truncated, version = fields["done"], fields["truncated"], fields["version"]
        rho = None
        if log_ratio is not None:
            acted = np.flatnonzero((version >= 0) & ~(done | truncated))
            rho = np.ones(version.shape, np.float32)
            rho.reshape(-1)[acted] = np.exp(log_ratio(sample, acted))
        return formula(fields["reward"], fields["value"], done, truncated, version >= 0, gamma, lam, rho)

    return estimate


def trained_rows(samples: Sequence[Sample]) -> list[Integers]:
    """Return the indices, into each sample's flattened [T, N], of its rows that enter the
    loss."""
    return [np.flatnonzero(sample.trained()) for sample in samples]


def places(samples: Sequence[Sample], indices: Sequence[Integers]) -> Integers:
    """Return where the chosen rows (as of `take_rows`) lie, [n, 3]: number of the sample,
    row and seat."""
    found = [
        np.stack([np.full(len(index), i), *np.divmod(index, sample["done"].shape[1])], 1)
        for i, (sample, index) in enumerate(zip(samples, indices, strict=True))
    ]
    return np.concatenate(found) if found else np.zeros((0, 3), np.intp)


def gather(samples: Sequence[Sample], estimate: Estimate, empty: Empty = np.empty) -> Batch:
    """Return the trained rows of `samples`, in order (without samples: no rows and no
    leaves), with their estimates; observations in memory that `empty` gives."""
    if not samples:
        return Batch({}, {}, *(np.zeros((4, 0), np.float32)))
    indices, advantages, targets = trained_rows(samples), [], []
    for sample, index in zip(samples, indices, strict=True):
        advantage, target = estimate(sample)
        advantages.append(advantage.reshape(-1).take(index))
        targets.append(target.reshape(-1).take(index))
    return Batch(
        take_leaves(samples, indices, "obs", empty),
        take_leaves(samples, indices, "action"),
        take_rows(samples, indices, "log_prob"),
        take_rows(samples, indices, "value"),
        np.concatenate(advantages),
        np.concatenate(targets),
    )


def take_leaves(
    samples: Sequence[Sample], indices: Sequence[Integers], name: str, empty: Empty = np.empty
) -> Arrays:
    """Return the chosen rows of every leaf of `name` (``obs``, ``obs.position`` …)."""
    return {
        key: take_rows(samples, indices, key, empty)
        for key in samples[0]
        if key == name or key.startswith(f"{name}.")
    }


def take_rows(
    samples: Sequence[Sample], indices: Sequence[Integers], key: str, empty: Empty = np.empty
) -> NDArray[Any]:
    """Return the chosen rows (indices into the flattened [T, N]) of one field of all
    samples, copied once, into memory that `empty` gives."""
    first = samples[0][key]
    out = empty((sum(len(i) for i in indices), *first.shape[2:]), first.dtype)
    start = 0
    for sample, index in zip(samples, indices, strict=True):
        field = sample[key]
        # mode: with "raise" numpy would write to a copy of `out` first; the indices are
        # in range
        np.take(
            field.reshape(-1, *field.shape[2:]),
            index,
            axis=0,
            out=out[start : start + len(index)],
            mode="clip",
        )
        start += len(index)
    return out


class Rows:
    """The `inputs` of `count` rows, each of which may be trained on by itself."""

    rows = 1
    """Rows of a piece."""

    def __init__(self, library: Library, policy: TrainablePolicy, observation: Arrays, count: int) -> None:
        self._library, self._count, self._observation = library, count, observation
        self.inputs = library.columns(policy.prepare(observation)) if count else {}

    def __len__(self) -> int:
        """Return how many pieces minibatches are made of."""
        return self._count

    def shuffled(self, rng: np.random.Generator) -> Any:
        """Return the numbers of all pieces in random order, as `pick` takes them."""
        return self._library.columns({"order": rng.permutation(self._count)})["order"]

    def pick(self, pieces: Any) -> tuple[Mapping[str, Any], Any]:
        """Return the inputs of `pieces`, in memory that the next call rewrites, and the
        numbers of their rows in the batch."""
        return self._library.take(self.inputs, pieces), pieces

    def numbers(self, pieces: Integers) -> Integers:
        """Return the numbers of the rows of `pieces` in the batch."""
        return pieces

    def record(self, pieces: Integers) -> tuple[Arrays, Integers]:
        """Return what `again` makes the same of: raw arrays of `pieces`, and the numbers
        of their rows in the batch."""
        return {name: array[pieces] for name, array in self._observation.items()}, pieces

    @staticmethod
    def again(library: Library, policy: TrainablePolicy, recorded: Arrays) -> "Rows":
        """Return the rows that `record` returned as `recorded`: of chunks, or by
        themselves."""
        observation = {name: array for name, array in recorded.items() if name.partition(".")[0] == "obs"}
        if "wanted" not in recorded:
            return Rows(library, policy, observation, len(next(iter(observation.values()))))
        state = {name: array for name, array in recorded.items() if name.startswith("state.")}
        return Chunks(library, policy, Cut(observation, recorded["on_reset"], state, recorded["wanted"]))


@dataclass
class Cut:
    """A cut of samples into n chunks of L rows: first the rows that only bring the state
    up to date, then those that are wanted, as far as there are any."""

    observation: Arrays
    """Raw, by leaf name, [L·n, ...], time first; zeros where nothing acted."""
    on_reset: NDArray[np.bool_]
    """[L, n]."""
    state: Arrays
    """Before the first row, ``state.*`` [n, ...]."""
    place: Integers
    """[L·n]: the row's number among the wanted ones, -1 where it is none of them."""


class Chunks(Rows):
    """The inputs of chunks, each of which is trained on as a whole. What is written of
    `Rows` is true of them, a piece being a chunk."""

    def __init__(self, library: Library, policy: TrainablePolicy, cut: Cut) -> None:
        self.rows, count = cut.on_reset.shape
        super().__init__(library, policy, cut.observation, count)
        self._starts, self._on_reset = library.columns(cut.state), library.columns({"on_reset": cut.on_reset})
        self._cut, self._place = cut, cut.place
        self._first = np.arange(self.rows)[:, np.newaxis] * count  # of each time, among all rows

    def shuffled(self, rng: np.random.Generator) -> Any:
        return rng.permutation(len(self))

    def pick(self, pieces: Any) -> tuple[Mapping[str, Any], Any]:
        taken = (self._first + pieces).reshape(-1)
        place = self._place.take(taken)
        rows = np.flatnonzero(place >= 0)
        take = self._library.take
        inputs = take(self.inputs, taken) | take(self._starts, pieces) | take(self._on_reset, pieces, 1)
        return {**inputs, **self._library.columns({"rows": rows})}, place.take(rows)

    def numbers(self, pieces: Integers) -> Integers:
        place = self._place.take((self._first + pieces).reshape(-1))
        found: Integers = place[place >= 0]
        return found

    def record(self, pieces: Integers) -> tuple[Arrays, Integers]:
        taken = (self._first + pieces).reshape(-1)
        place = self._place.take(taken)
        rows = np.flatnonzero(place >= 0)
        wanted = np.full(len(taken), -1)
        wanted[rows] = np.arange(len(rows))
        arrays, _ = super().record(taken)
        arrays |= {name: array[pieces] for name, array in self._cut.state.items()}
        return {**arrays, "on_reset": self._cut.on_reset[:, pieces], "wanted": wanted}, place.take(rows)


def cut(samples: Sequence[Sample], wanted: Sequence[Integers], burn_in: int, steps: int | None) -> Cut:
    """Return the chunks of `samples` that have wanted rows, each seat's rows being cut
    into chunks of `steps` and up to `burn_in` more before them.

    wanted: of each sample, indices into the flattened [T, N], in the order in which the
        batch has them; none of the first `burn_in` rows
    steps: None, or more than there are: all rows up to the last one that is wanted

    The state before a chunk is the one that its first row holds: that of the policy that
    acted, by weights that may be older than the ones trained (Kapturowski et al. 2019,
    "Recurrent Experience Replay in Distributed RL", section 3, "stored state" with
    burn-in).
    """
    ends = [
        int(indices.max()) // sample["done"].shape[1] + 1 if len(indices) else 0
        for sample, indices in zip(samples, wanted, strict=True)
    ]
    longest = max(1, max(ends, default=0) - burn_in)
    steps = min(steps or longest, longest)
    length = burn_in + steps
    parts: list[tuple[Arrays, Integers]] = []
    before = 0
    for sample, indices, end in zip(samples, wanted, ends, strict=True):
        rows, seats = sample["done"].shape
        starts = np.arange(0, end - burn_in, steps)
        number = np.full((rows + length) * seats, -1)
        number[indices] = np.arange(before, before + len(indices))
        before += len(indices)
        index = (
            (np.arange(length)[:, np.newaxis] + starts)[:, :, np.newaxis] * seats + np.arange(seats)
        ).reshape(length, -1)
        place = number.take(index)
        place[:burn_in] = -1
        some = (place >= 0).any(0)
        if some.any():
            # what is beyond the sample's end is its last row, and not wanted
            inside = np.minimum(index, (rows - 1) * seats + index % seats)
            parts.append((_windows(sample, inside[:, some]), place[:, some]))
    return _joined(parts, length)


def _windows(sample: Sample, index: Integers) -> Arrays:
    """Return what a policy is evaluated on, of the rows at `index` [L, n]: observations
    and ``on_reset`` [L, n, ...], states [n, ...]."""
    idle = sample["version"].reshape(-1).take(index) < 0
    found: Arrays = {"on_reset": sample["on_reset"].reshape(-1).take(index)}
    for name, field in sample.items():
        kind = name.partition(".")[0]
        if kind in ("obs", "state"):
            at = np.s_[:] if kind == "obs" else np.s_[0]
            found[name] = field.reshape(-1, *field.shape[2:])[index[at]]
            found[name][idle[at]] = 0  # what lies in rows on which nothing acted is void, and may be NaN
    return found


def _joined(parts: Sequence[tuple[Arrays, Integers]], length: int) -> Cut:
    """Return the chunks of all samples side by side."""
    if not parts:
        return Cut({}, np.zeros((length, 0), np.bool_), {}, np.zeros(0, np.intp))
    observation, state = {}, {}
    for name in parts[0][0]:
        arrays = [windows[name] for windows, _ in parts]
        if name.startswith("state."):
            state[name] = np.concatenate(arrays)
        else:
            joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, 1)
            observation[name] = joined.reshape(-1, *joined.shape[2:])
    on_reset = observation.pop("on_reset").reshape(length, -1)
    return Cut(observation, on_reset, state, np.concatenate([place for _, place in parts], 1).reshape(-1))
