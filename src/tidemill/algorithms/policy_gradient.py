"""What algorithms that follow the policy's gradient have in common: their settings, and
the learner that goes through minibatches. Imports torch only for policies that are made
of it."""

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, prod
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.algorithms.adam import AdamSettings, spoilt
from tidemill.algorithms.array_library import Library, NumpyLibrary
from tidemill.algorithms.batch_totals import SUMS, BatchTotals, sums_of
from tidemill.algorithms.learner_state import (
    check_learner_state,
    prefixed,
    random_state,
    set_random_state,
    unprefixed,
)
from tidemill.algorithms.minibatches import (
    Batch,
    Chunks,
    Floats,
    Integers,
    Rows,
    cut,
    gather,
    places,
    take_leaves,
    take_rows,
    trained_rows,
)
from tidemill.algorithms.policy_gradient_formulas import (
    differentiate_value_loss,
    minibatch_sums,
    normalise_minibatches,
)
from tidemill.api.algorithm import DataParallel, Sample, TracedArray, UpdateFault, run_alone
from tidemill.api.policy import Policy
from tidemill.api.schedule import LinearSchedule, number
from tidemill.core.errors import ConfigError
from tidemill.core.schema import Array, Arrays
from tidemill.nets.trainable import Network, TrainablePolicy

MEASURED = ("loss/policy", "loss/value", "entropy", "kl", "clip_fraction")
"""What is measured on every minibatch, in this order."""
LENT = ("obs", "state", "value")
"""What is read of rows that are not trained, too, which lend their values."""
LARGEST_RECORD = 64 << 20  # bytes of a batch, about, that an `UpdateFault` takes along
COLUMNS = ("log_prob", "advantage", "target", "value")
"""What the loss needs of each row, in this order."""


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(AdamSettings):
    """The settings that `PPO` and `Impala` share: Adam down the gradient of a policy
    loss, a value loss and an entropy bonus."""

    ranges: ClassVar[Mapping[str, tuple[float, float, str]]] = {
        "gamma": (0, 1, "0.99 is usual"),
        "minibatch_size": (1, 1e12, "a quarter of the trainer's batch_size is usual"),
        "learning_rate": (0, 1e6, "0.0003 is usual"),
        "value_coefficient": (0, 1e9, "0.5 is usual"),
        "entropy_coefficient": (-1e9, 1e9, "0 to 0.01 is usual"),
        "max_gradient_norm": (1e-9, 1e9, "0.5 is usual; None leaves gradients as they are"),
        "chunk_steps": (1, 1e9, "16 to 128 is usual; None takes the whole length of a sample"),
    }

    gamma: float = 0.99
    """Discount of a step."""
    minibatch_size: int = 2048
    """Rows of a minibatch, about: the trained rows of a batch are split into equal parts
    of nearly this size. Equal trainers share them: each has its part of every minibatch,
    so that learning does not change with their number."""
    value_coefficient: float | LinearSchedule = 0.5
    """Weight of the value loss ½ (V - target)²."""
    entropy_coefficient: float | LinearSchedule = 0.0
    """Weight of the entropy bonus, per nat."""
    max_gradient_norm: float | None = 0.5
    """Gradients of all weights together are scaled down to this Euclidean norm.
    None: they are not scaled."""
    clip_apart: bool = False
    """Whether the actor's gradient and the critic's, where they share no weights, are
    scaled down to `max_gradient_norm` each by itself, so that large errors of values do
    not shorten the actor's steps."""
    normalise_returns: bool = True
    """Whether values are learnt in units of the running standard deviation of their
    targets."""
    chunk_steps: int | None = None
    """Rows of a chunk, of a recurrent policy: each seat's rows are cut into chunks,
    through which gradients flow back in time (truncated backpropagation). None, or more
    than a sample has: all of them. A minibatch has whole chunks, about `minibatch_size`
    rows. A chunk begins with the state that the policy that acted had there; with
    `AgentSpec.burn_in` so many rows before it first bring that up to date."""

    @property
    def epochs(self) -> int:
        """Passes over each batch."""
        return 1

    @property
    def clip_value(self) -> float | LinearSchedule | None:
        """ε of the clipped value loss; None leaves it unclipped."""
        return None

    @property
    def target_kl(self) -> float | None:
        """The KL divergence above which an update ends; None: none is too far."""
        return None

    @property
    def normalise_advantages(self) -> bool | Literal["minibatch"]:
        """Whether advantages are brought to mean 0 and standard deviation 1, and of
        what."""
        return False

    def measures(self) -> tuple[str, ...]:
        return *MEASURED, "gradient_norm", "explained_variance", "learning_rate", "rows", "minibatches"

    def trainable(self, policy: Policy) -> TrainablePolicy:
        """Return `policy`. Raises `ConfigError` when gradients cannot train it."""
        if not isinstance(policy, TrainablePolicy):
            raise ConfigError(
                f"{type(self).__name__} cannot train a {type(policy).__name__}: it is no TrainablePolicy "
                "(see tidemill.nets.trainable)"
            )
        if self.chunk_steps is not None and not policy.recurrent:
            raise ConfigError(
                f"chunk_steps = {self.chunk_steps}: a {type(policy).__name__} has no state, so that it is "
                "trained on rows one by one; leave it out, or take RecurrentActorCritic"
            )
        return policy


class PolicyLoss(NamedTuple):
    """The policy's loss over the rows of a minibatch, as arrays and scalars of the
    policy's library."""

    loss: Any
    """Summed over the rows."""
    of_log_prob: Any
    """Its derivative with respect to log π(a) of each row, [n]."""
    kl: Any
    """Estimate of KL(μ‖π), summed over the rows."""
    clipped: Any
    """How many rows' ratio is beyond where it is clipped."""


class PolicyGradientLearner(DataParallel):
    """A policy-gradient learner trains a `TrainablePolicy` in place. Deterministic given
    seed, samples and one thread. An algorithm says how returns are estimated and what the
    policy's loss is.

    Equal trainers sum, per update: one array of sums over the rows (float64), then one
    per minibatch with the gradient, what is measured and the rows' share (float32), then
    the normalisers' moments (float64); and where advantages are normalised over each
    minibatch, before each epoch those of its minibatches (float64). All decisions (count
    of minibatches, clipping of the norm, the stops) follow from sums.
    """

    policy: TrainablePolicy
    config: PolicyGradient

    def __init__(self, config: PolicyGradient, policy: TrainablePolicy, seed: int) -> None:
        self.policy, self.config = policy, config.at(0, 0.0)
        self._rng = np.random.default_rng(seed)
        self._library = _library_of(policy.network)
        size = policy.network.size
        with policy.network.place():
            self._shared = self._library.zeros(size + len(MEASURED) + 1)
            """[gradient, measured parts, share]: those of the loss summed over own rows,
            in units of 1 / (rows of a minibatch, about)."""
            self._gradient, self._parts = self._shared[:size], self._shared[size:]
            self._optimiser = self._library.optimiser(policy.network, self._gradient, config.adam_epsilon)
            self._recorded: Callable[[Any], Any] | None = None
            self._recorded_columns: Sequence[Mapping[str, Any]] | None = None
            towers = policy.network.towers if config.clip_apart else ()
            self._towers = [[self._gradient[place] for place in tower] for tower in towers]

    @abstractmethod
    def _estimate(self, sample: Sample) -> tuple[Floats, Floats]:
        """See `Estimate`. Called for all samples before any step is done."""

    @abstractmethod
    def _weigh(self, advantage: Floats, whole: BatchTotals) -> None:
        """Turn a batch's advantages [M] into what its loss takes, in place."""

    @abstractmethod
    def _policy_loss(self, log_prob: Any, behaviour: Any, advantage: Any) -> PolicyLoss:
        """Return the loss of a minibatch [n] whose actions have these log-probabilities
        now, and had those of the behaviour."""

    @property
    def rate(self) -> float:
        """The learning rate of the next update."""
        return number(self.config.learning_rate)

    @property
    def largest_sum(self) -> int:
        return max(int(self._shared.nbytes), self.policy.moments({}, None).nbytes, 8 * SUMS)

    def parallel_update(
        self, samples: Sequence[Sample], steps: int
    ) -> Generator[Array, None, dict[str, float]]:
        """See `DataParallel`. Metrics are those of all trainers together. Raises
        `UpdateFault` when estimates, a minibatch's loss or gradient, or what normalisers
        are to take in is not finite: in all trainers at the same sum; neither weights nor
        normalisers are changed by it."""
        return self._update(samples, alone=False)

    def update(self, samples: Sequence[Sample], steps: int) -> dict[str, float]:
        """See `Algorithm.update`. Nothing but measurements leaves the policy's device."""
        return run_alone(self._update(samples, alone=True))

    def _update(self, samples: Sequence[Sample], alone: bool) -> Generator[Array, None, dict[str, float]]:
        config, policy = self.config, self.policy
        rate = self.rate
        batch = gather(samples, self._estimate)
        sums = sums_of(batch)
        yield sums
        if not np.isfinite(sums).all():
            columns = {"advantage": batch.advantage, "target": batch.target, "value": batch.value}
            raise self._fault("its advantages or targets are not finite", "estimates", samples, columns)
        whole = BatchTotals.of(sums)
        if whole.rows == 0:
            return {"rows": 0.0, "learning_rate": rate}
        count = max(1, round(whole.rows / config.minibatch_size))
        with policy.network.place():
            self._optimiser.begin()
        source = self._source(batch, samples)
        try:
            steps = yield from self._steps(source, batch, samples, whole, count, rate, alone)
        finally:
            self._recorded = self._recorded_columns = None  # they hold the batch
        moments = policy.moments(batch.observation, batch.target if config.normalise_returns else None)
        yield moments
        if not np.isfinite(moments).all():
            columns = {"target": batch.target}
            raise self._fault("what normalises would not be finite", "moments", samples, columns)
        policy.fold_moments(moments)
        metrics = {
            "explained_variance": whole.explained_variance,
            "learning_rate": rate,
            "rows": whole.rows,
            "minibatches": float(len(steps)),
        }
        if len(steps):
            means, last = steps.mean(0).tolist(), steps[-count:].mean(0).tolist()
            # kl and clip_fraction: how far the last epoch has gone, not the average of
            # all
            metrics |= dict(zip(MEASURED, means[:3] + last[3:5], strict=True))
            metrics["gradient_norm"] = means[5]
        return metrics

    def _source(self, batch: Batch, samples: Sequence[Sample]) -> Rows:
        """Return what minibatches are made of."""
        with self.policy.network.place():
            if not self.policy.recurrent:
                return Rows(self._library, self.policy, batch.observation, len(batch))
            burn_in = max((sample.burn_in for sample in samples), default=0)
            return Chunks(
                self._library,
                self.policy,
                cut(samples, trained_rows(samples), burn_in, self.config.chunk_steps),
            )

    def _steps(
        self,
        source: Rows,
        batch: Batch,
        samples: Sequence[Sample],
        whole: BatchTotals,
        count: int,
        rate: float,
        alone: bool,
    ) -> Generator[Array, None, NDArray[np.float64]]:
        """Do all epochs, each in `count` minibatches; return the measured parts and the
        gradient's norm before clipping of each step."""
        library, place, pieces = self._library, self.policy.network.place, len(source)
        weight, done, begun = count / whole.rows, 0, 0
        with place():
            columns = self._columns(batch, whole)
            found = library.zeros(self.config.epochs * count, len(MEASURED) + 1)
            each = self.config.normalise_advantages == "minibatch"
            advantage = library.read(columns[1]["scalars"][1]).copy() if each else None
        taken: list[Any] = []  # the pieces of each step

        def read(first: int = 0) -> NDArray[np.float64]:
            return self._read(found[first:done], taken[first:], source, columns, samples, weight)

        bounds = [pieces * i // count for i in range(count + 1)]
        for _ in range(self.config.epochs):
            if alone and done and self.hurried():
                break
            with place():
                order = source.shuffled(self._rng)
            if advantage is not None:
                with place():
                    read(begun)  # a step is made again with the advantages that it had
                begun = done
                yield from self._normalise(advantage, source, columns, order, bounds)
            with place():
                whole_epoch = (
                    self._epoch(source, columns, order, bounds, weight, rate, found[done:]) if alone else None
                )
            if whole_epoch is not None:
                done += whole_epoch
                taken += [order[start:end] for start, end in pairwise(bounds[: whole_epoch + 1])]
                with place():
                    read(done - whole_epoch)
                if whole_epoch < count:
                    break
                continue
            for start, end in pairwise(bounds):
                if alone and done and self.hurried():
                    break
                with place():
                    rows = self._differentiate(source, columns, order[start:end], weight)
                share = float(np.float32(rows * weight))
                if not alone:
                    with place():
                        numbers = library.to_host(self._shared)
                    yield numbers
                    share = float(numbers[-1])
                    with place():
                        library.from_host(numbers, self._shared)
                if share == 0:  # fewer rows than minibatches at every trainer
                    continue
                with place():
                    parts = self._parts[:-1] / share
                    if self.config.target_kl is not None and float(parts[3]) > self.config.target_kl:
                        return read()
                    found[done, :-1], found[done, -1] = parts, self._step(parts, share, rate)
                done += 1
                taken.append(order[start:end])
                if library.at_once and not np.isfinite(found[done - 1]).all():
                    read(done - 1)
        with place():
            return read()

    def _normalise(
        self,
        advantage: Floats,
        source: Rows,
        columns: Sequence[Mapping[str, Any]],
        order: Any,
        bounds: Sequence[int],
    ) -> Generator[Array, None, None]:
        """Write into `columns` the batch's advantages [M] as each minibatch of an epoch
        takes them: normalised over its rows at all trainers."""
        library, place = self._library, self.policy.network.place
        with place():
            pieces = library.read(order)
            rows = [source.numbers(pieces[start:end]) for start, end in pairwise(bounds)]
        lengths, flat = [len(each) for each in rows], np.concatenate(rows)
        sums = minibatch_sums(advantage[flat], lengths)
        numbers, most = sums.reshape(-1), self.largest_sum // sums.itemsize
        for start in range(0, len(numbers), most):
            yield numbers[start : start + most]
        normal = np.empty_like(advantage)
        normal[flat] = normalise_minibatches(advantage[flat], lengths, sums)
        with place():
            columns[1]["scalars"][1][:] = library.columns({"advantage": normal})["advantage"]

    def _epoch(
        self,
        source: Rows,
        columns: Sequence[Mapping[str, Any]],
        order: Any,
        bounds: Sequence[int],
        weight: float,
        rate: float,
        found: Any,
    ) -> int | None:
        """Do an epoch at once, by the pieces of `order` between `bounds`; write what is
        measured into `found`, and return how many minibatches were done: fewer where the
        KL divergence ends the update, or one is not finite. None where this cannot be
        done at once. By default by what a device has recorded of a step, where what is
        done next follows from nothing but pieces."""
        if self.policy.recurrent or self.config.target_kl is not None:
            return None
        if self._recorded_columns is not columns:

            def step(pieces: Any) -> Any:
                share = float(np.float32(self._differentiate(source, columns, pieces, weight) * weight))
                parts = self._parts[:-1] / share
                measured = self._library.zeros(len(MEASURED) + 1)
                measured[:-1], measured[-1] = parts, self._step(parts, share, rate)
                return measured

            self._recorded, self._recorded_columns = self._library.recorded(step), columns
        if self._recorded is None:
            return None
        for i, (start, end) in enumerate(pairwise(bounds)):
            found[i] = self._recorded(order[start:end])
        return len(bounds) - 1

    def _read(
        self,
        found: Any,
        taken: Sequence[Any],
        source: Rows,
        columns: Sequence[Mapping[str, Any]],
        samples: Sequence[Sample],
        weight: float,
    ) -> NDArray[np.float64]:
        """Return what was measured. Raises `UpdateFault` for the first step that was not
        done since its loss or gradient was not finite; `taken`: each step's pieces of
        `source`."""
        steps = self._library.to_host(found).astype(np.float64)
        lost = ~np.isfinite(self._loss(steps.T) + steps[:, -1])
        if not lost.any():
            return steps
        first = int(lost.argmax())
        *parts, norm = steps[first].tolist()
        read, minibatch = self._library.read, Arrays()
        self._differentiate(source, columns, taken[first], weight)
        if not np.isfinite(read(self._shared)).all():  # else it came from another trainer
            minibatch, rows = source.record(read(taken[first]))
            minibatch |= {name: read(column)[rows] for name, column in columns[0].items()}
            minibatch["scalars"] = read(columns[1]["scalars"])[:, rows]
            minibatch["weight"] = np.array([weight])
            minibatch["place"] = places(samples, trained_rows(samples))[rows]
        raise spoilt(type(self.config).__name__, "the weights", _explain(parts, norm), "minibatch", minibatch)

    def _fault(self, why: str, stage: str, samples: Sequence[Sample], columns: Arrays) -> UpdateFault:
        """Return what to raise for a batch that no step is done with, of whose trained
        rows these `columns` were computed: its rows on which something acted go with
        it; where they are many, those around the last one that is not finite."""
        minibatch: Arrays = {}
        own = [*columns.values(), *(array for sample in samples for array in sample.values())]
        if not all(np.isfinite(array).all() for array in own if array.dtype.kind == "f"):
            size = sum(array.nbytes for sample in samples for array in sample.values())
            share = LARGEST_RECORD / max(size, 1)
            acted = [_telling_rows(sample, max(1, int(share * sample["done"].size))) for sample in samples]
            trained = np.concatenate(
                [sample.trained().reshape(-1)[rows] for sample, rows in zip(samples, acted, strict=True)]
            )
            for name in samples[0]:
                if name.partition(".")[0] != "info":
                    minibatch[name] = take_rows(samples, acted, name)
                if name.partition(".")[0] not in (*LENT, "info"):
                    minibatch[name][~trained] = 0
            minibatch["place"] = places(samples, acted)
            minibatch |= {f"estimate.{name}": column for name, column in columns.items()}
            minibatch["estimate.place"] = places(samples, trained_rows(samples))
        return spoilt(type(self.config).__name__, "the weights", why, stage, minibatch)

    def trace(self, stage: str, minibatch: Arrays) -> Iterator[TracedArray]:
        """See `Algorithm.trace`."""
        place = minibatch["place"]
        if stage != "minibatch":
            estimates = {n: a for n, a in minibatch.items() if n.startswith("estimate.")}
            for name, array in minibatch.items():
                if name not in (*estimates, "place"):
                    yield TracedArray("input", name, array, 0, place)
            of_estimates = estimates.pop("estimate.place")
            for name, array in estimates.items():
                yield TracedArray("loss", name.removeprefix("estimate."), array, 0, of_estimates)
            return
        library, network = self._library, self.policy.network
        wanted = minibatch.get("wanted")
        of_rows = place if wanted is None else np.where(wanted[:, None] >= 0, place[wanted], -1)
        for name, array in minibatch.items():
            if name.partition(".")[0] == "obs":
                yield TracedArray("input", name, array, 0, of_rows)
            elif name.partition(".")[0] == "action":
                yield TracedArray("input", name, array, 0, place)
            elif name.startswith("state."):
                yield TracedArray("input", name, array, 0)
        for name, column in zip(COLUMNS, minibatch["scalars"], strict=True):
            yield TracedArray("input", name, column, 0, place)
        for name, array in self.policy.parameters().items():
            yield TracedArray("weights", name, array)
        with network.place():
            source = Rows.again(library, self.policy, minibatch)
            action = {n: a for n, a in minibatch.items() if n.partition(".")[0] == "action"}
            columns = [library.columns(action), library.columns({"scalars": minibatch["scalars"]})]
            pieces = np.arange(len(source))
            inputs, rows = source.pick(pieces)
            for name, array in inputs.items():
                seen = library.read(array)
                if seen.dtype.kind == "f" and not name.startswith("state."):
                    yield TracedArray("layer", name, seen, 0, of_rows if len(seen) == len(of_rows) else None)
            for name, array, axis in network.trace(inputs, library.take(columns[0], rows)):
                own = place if array.shape[axis] == len(place) else of_rows
                yield TracedArray("layer", name, array, axis, own if array.shape[axis] == len(own) else None)
            found = network.forward(inputs, library.take(columns[0], rows))
            for name, array in found._asdict().items():
                yield TracedArray("layer", name, library.read(array), 0, place)
            self._differentiate(source, columns, pieces, float(minibatch["weight"][0]))
            for name, part in zip(MEASURED, library.read(self._parts), strict=False):
                yield TracedArray("loss", name, part)
            gradient, start = library.read(self._gradient), 0
            for name, form in network.trained():
                size = prod(form)
                yield TracedArray("gradient", name, gradient[start : start + size].reshape(form))
                start += size

    def _loss(self, parts: Any) -> Any:
        of_value, of_entropy = (
            number(each) for each in (self.config.value_coefficient, self.config.entropy_coefficient)
        )
        return parts[0] + of_value * parts[1] - of_entropy * parts[2]

    def _columns(self, batch: Batch, whole: BatchTotals) -> list[Mapping[str, Any]]:
        """Return the actions and (as one array, rows last) `COLUMNS` of a batch."""
        if len(batch):
            self.policy.check(batch.observation)
        scale = np.float32(self.policy.value_scale)
        scalars = np.empty((len(COLUMNS), len(batch)), np.float32)
        scalars[0] = batch.log_prob
        scalars[1] = batch.advantage
        self._weigh(scalars[1], whole)
        np.divide(batch.target, scale, out=scalars[2])
        np.divide(batch.value, scale, out=scalars[3])
        return [self._library.columns(arrays) for arrays in (batch.action, {"scalars": scalars})]

    def _differentiate(
        self, source: Rows, columns: Sequence[Mapping[str, Any]], pieces: Any, weight: float
    ) -> int:
        """Write the loss's gradient and its parts, summed over the rows of `pieces` and
        multiplied by `weight`, into the shared array; return how many rows these are."""
        if not len(pieces):
            self._shared[:] = 0
            return 0
        config, policy, take, xp = self.config, self.policy, self._library.take, self._library.namespace
        inputs, rows = source.pick(pieces)
        action = take(columns[0], rows)
        log_prob, advantage, target, old_value = take(columns[1], rows, 1)["scalars"]
        with np.errstate(over="ignore", invalid="ignore"):  # `_step` looks for what is not finite
            found = policy.network.forward(inputs, action)
            of_policy, of_log_prob, kl, clipped = self._policy_loss(found.log_prob, log_prob, advantage)
            of_log_prob *= weight
            value_loss, of_value = differentiate_value_loss(
                xp, found.value, target, old_value, number(config.clip_value)
            )
            of_value *= weight * number(config.value_coefficient)
            bonus = number(config.entropy_coefficient)
            of_entropy = xp.full_like(of_value, -bonus * weight) if bonus else None
            self._library.total(
                (of_policy, value_loss, found.entropy.sum(), kl, clipped, len(rows)), weight, self._parts
            )
            policy.network.backward(of_log_prob, of_entropy, of_value, self._gradient)
        return len(rows)

    def _step(self, parts: Any, share: float, rate: float) -> Any:
        """Do one step of Adam down the shared gradient; return its norm before
        clipping."""
        limit, loss = self.config.max_gradient_norm, self._loss(parts)
        if len(self._towers) < 2 or limit is None:
            return self._optimiser.descend(rate, share, limit, loss)
        norms = [self._optimiser.clip(tower, share, limit) for tower in self._towers]
        whole = sum(norm**2 for norm in norms) ** 0.5
        self._optimiser.descend(rate, share, None, loss + whole)  # the gradient is not its own any more
        return whole

    def _evaluate(self, sample: Sample, rows: Integers) -> tuple[Floats, Floats]:
        """Return log π and the value (reward units) of the sample's rows at `rows` (into
        its flattened [T, N]), by the policy as it is now."""
        library, policy = self._library, self.policy
        log_prob, value = np.empty((2, len(rows)), np.float32)
        with policy.network.place(), library.without_gradients():
            if policy.recurrent:  # each seat's rows as one chunk
                source: Rows = Chunks(library, policy, cut([sample], [rows], 0, None))
            else:
                source = Rows(library, policy, take_leaves([sample], [rows], "obs"), len(rows))
            action = library.columns(take_leaves([sample], [rows], "action"))
            size, pieces = max(1, self.config.minibatch_size // source.rows), np.arange(len(source))
            for start in range(0, len(pieces), size):
                inputs, picked = source.pick(pieces[start : start + size])
                found = policy.network.forward(inputs, library.take(action, picked))
                log_prob[picked] = library.to_host(found.log_prob)
                value[picked] = library.to_host(found.value)
        value *= np.float32(policy.value_scale)
        return log_prob, value

    def state(self) -> Arrays:
        """Return copies of Adam's moments and step (``adam.0.step``, …) and the shuffling
        stream's state."""
        return {"random": random_state(self._rng), **prefixed("adam", self._optimiser.state())}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take back what `state` returned; continues exactly as the learner that it came
        from would have."""
        check_learner_state(self.state(), state)
        set_random_state(self._rng, state["random"])
        self._optimiser.load_state(unprefixed("adam", state))

    def separate(self, rank: int) -> None:
        """Shuffle by a stream of one's own: `rank` times 2^127 draws, about, ahead of the
        one that was taken back."""
        bits = self._rng.bit_generator
        assert isinstance(bits, np.random.PCG64)
        self._rng = np.random.Generator(bits.jumped(rank))


def _telling_rows(sample: Sample, most: int) -> Integers:
    """Return the rows of `sample` on which something acted; where these are more than
    `most`, as many of them around the last one with a number that is not finite."""
    acted = np.flatnonzero(sample["version"] >= 0)
    if len(acted) <= most:
        return acted
    finite = np.ones(sample["done"].shape, np.bool_)
    for name, array in sample.items():
        if array.dtype.kind == "f" and name.partition(".")[0] != "info":
            good = np.isfinite(array).reshape(*finite.shape, -1).all(2)
            finite &= good | ~sample.trained() if name.partition(".")[0] not in LENT else good
    wrong = np.flatnonzero(~finite.reshape(-1)[acted])
    start = max(0, int(wrong[-1] if len(wrong) else len(acted)) - most // 2)
    return acted[start : start + most]


def _library_of(network: Network) -> Library:
    """Return the library of the arrays of `network`; torch is imported when it is
    needed."""
    if network.library == "numpy":
        return NumpyLibrary()
    from tidemill.algorithms.torch_library import TorchLibrary

    return TorchLibrary(network)


def _explain(parts: Sequence[float], norm: float) -> str:
    values = dict(zip(MEASURED, parts, strict=True))
    wrong = [f"{name} is {value}" for name, value in values.items() if not isfinite(value)] or [
        f"the gradient's norm is {norm}"
    ]
    return f"{', '.join(wrong)} (all: {values}, gradient norm {norm})"
