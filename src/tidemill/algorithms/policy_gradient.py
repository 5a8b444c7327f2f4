"""The learner of algorithms that follow the policy's gradient: an update estimates
advantages, goes through minibatches in epochs, and has normalisers take the batch in."""

from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from math import isfinite
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tidemill.algorithms.adam import spoilt
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
    take_leaves,
    trained_rows,
)
from tidemill.algorithms.policy_gradient_faults import (
    explain,
    record_batch,
    record_minibatch,
    trace_batch,
    trace_minibatch,
)
from tidemill.algorithms.policy_gradient_formulas import minibatch_sums, normalise_minibatches
from tidemill.algorithms.policy_gradient_loss import Minibatches, PolicyGradientLoss
from tidemill.algorithms.policy_gradient_settings import MEASURED, PolicyGradient
from tidemill.api.algorithm import DataParallel, Sample, TracedArray, UpdateFault, run_alone
from tidemill.api.schedule import number
from tidemill.core.schema import Array, Arrays
from tidemill.nets.trainable import TrainablePolicy


class PolicyGradientLearner(DataParallel):
    """A policy-gradient learner trains a `TrainablePolicy` in place. Deterministic given
    seed, samples and one thread. An algorithm says how returns are estimated, and has its
    `loss`.

    Equal trainers sum, per update: one array of sums over the rows (float64), then one
    per minibatch with the gradient, what is measured and the rows' share (float32), then
    the normalisers' moments (float64); and where advantages are normalised over each
    minibatch, before each epoch those of its minibatches (float64). All decisions (count
    of minibatches, clipping of the norm, the stops) follow from sums.
    """

    loss_type: ClassVar[type[PolicyGradientLoss]]
    """What `loss` is made of."""

    policy: TrainablePolicy
    config: PolicyGradient
    loss: PolicyGradientLoss
    """What the minibatches of the policy are differentiated by."""

    def __init__(self, config: PolicyGradient, policy: TrainablePolicy, seed: int) -> None:
        self.policy, self.config = policy, config.at(0, 0.0)
        self.loss = self.loss_type(self.config, policy)
        self._rng = np.random.default_rng(seed)

    @abstractmethod
    def _estimate(self, sample: Sample) -> tuple[Floats, Floats]:
        """See `Estimate`. Called for all samples before any step is done."""

    @property
    def rate(self) -> float:
        """The learning rate of the next update."""
        return number(self.config.learning_rate)

    @property
    def largest_sum(self) -> int:
        return max(int(self.loss.shared.nbytes), self.policy.moments({}, None).nbytes, 8 * SUMS)

    def parallel_update(
        self, samples: Sequence[Sample], steps: int
    ) -> Generator[Array, None, dict[str, float]]:
        """See `DataParallel`. Metrics are those of all trainers together. Raises
        `UpdateFault` when estimates, a minibatch's loss or gradient, or what normalisers
        are to take in is not finite: in all trainers at the same sum; neither weights nor
        normalisers are changed by it."""
        with closing(self._update(samples, alone=False)) as parts:
            while True:
                with np.errstate(over="ignore", invalid="ignore"):  # which is left while it waits
                    try:
                        numbers = next(parts)
                    except StopIteration as end:
                        metrics: dict[str, float] = end.value
                        return metrics
                yield numbers

    def update(self, samples: Sequence[Sample], steps: int) -> dict[str, float]:
        """See `Algorithm.update`. Nothing but measurements leaves the policy's device."""
        # once, since around each minibatch it would take 1 % of a small one: what is not
        # finite is looked for
        with np.errstate(over="ignore", invalid="ignore"):
            return run_alone(self._update(samples, alone=True))

    def _update(self, samples: Sequence[Sample], alone: bool) -> Generator[Array, None, dict[str, float]]:
        config, policy, loss = self.config, self.policy, self.loss
        loss.config, rate = config, self.rate
        batch = gather(samples, self._estimate, loss.library.host_empty)
        sums = sums_of(batch)
        yield sums
        if not np.isfinite(sums).all():
            estimates = {"advantage": batch.advantage, "target": batch.target, "value": batch.value}
            record = record_batch(samples, estimates)
            raise self._spoilt("its advantages or targets are not finite", "estimates", record)
        whole = BatchTotals.of(sums)
        if whole.rows == 0:
            return {"rows": 0.0, "learning_rate": rate}
        count = max(1, round(whole.rows / config.minibatch_size))
        with policy.network.place():
            loss.optimiser.begin()
            source, columns = self._source(batch, samples), loss.columns(batch, whole)
        of = Minibatches(source, columns, count / whole.rows)
        try:
            steps = yield from self._steps(of, samples, count, rate, alone)
        finally:
            loss.release()
        moments = policy.moments(batch.observation, batch.target if config.normalise_returns else None)
        yield moments
        if not np.isfinite(moments).all():
            record = record_batch(samples, {"target": batch.target})
            raise self._spoilt("what normalises would not be finite", "moments", record)
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
        """Return what the pieces of minibatches are picked from."""
        with self.policy.network.place():
            if not self.policy.recurrent:
                return Rows(self.loss.library, self.policy, batch.observation, len(batch))
            burn_in = max((sample.burn_in for sample in samples), default=0)
            return Chunks(
                self.loss.library,
                self.policy,
                cut(samples, trained_rows(samples), burn_in, self.config.chunk_steps),
            )

    def _steps(
        self, of: Minibatches, samples: Sequence[Sample], count: int, rate: float, alone: bool
    ) -> Generator[Array, None, NDArray[np.float64]]:
        """Do all epochs, each in `count` minibatches; return the measured parts and the
        gradient's norm before clipping of each step."""
        loss, library, place, pieces = self.loss, self.loss.library, self.policy.network.place, len(of.source)
        done, begun = 0, 0
        with place():
            found = library.zeros(self.config.epochs * count, len(MEASURED) + 1)
            each = self.config.normalise_advantages == "minibatch"
            advantage = library.read(of.columns[1]["scalars"][1]).copy() if each else None
        taken: list[Any] = []  # the pieces of each step

        def read(first: int = 0) -> NDArray[np.float64]:
            return self._read(found[first:done], taken[first:], of, samples)

        bounds = [pieces * i // count for i in range(count + 1)]
        for _ in range(self.config.epochs):
            if alone and done and self.hurried():
                break
            with place():
                order = of.source.shuffled(self._rng)
            if advantage is not None:
                with place():
                    read(begun)  # a step is made again with the advantages that it had
                begun = done
                yield from self._normalise(advantage, of, order, bounds)
            with place():
                whole_epoch = loss.epoch(of, order, bounds, rate, found[done:]) if alone else None
            if whole_epoch is not None:
                done += whole_epoch
                taken += [order[start:end] for start, end in pairwise(bounds[: whole_epoch + 1])]
                if not library.at_once:  # where what is not finite ends no epoch
                    with place():
                        read(done - whole_epoch)
                if whole_epoch < count:
                    break
                continue
            for start, end in pairwise(bounds):
                if alone and done and self.hurried():
                    break
                with place():
                    rows = loss.differentiate(of, order[start:end])
                share = float(np.float32(rows * of.weight))
                if not alone:
                    with place():
                        numbers = library.to_host(loss.shared)
                    yield numbers
                    share = float(numbers[-1])
                    with place():
                        library.from_host(numbers, loss.shared)
                if share == 0:  # fewer rows than minibatches at every trainer
                    continue
                with place():
                    parts = loss.parts[:-1] / share
                    if self.config.target_kl is not None and float(parts[3]) > self.config.target_kl:
                        return read()
                    found[done, :-1], found[done, -1] = parts, loss.descend(parts, share, rate)
                done += 1
                taken.append(order[start:end])
                if library.at_once and not isfinite(sum(found[done - 1].tolist())):
                    read(done - 1)
        with place():
            return read()

    def _normalise(
        self, advantage: Floats, of: Minibatches, order: Any, bounds: Sequence[int]
    ) -> Generator[Array, None, None]:
        """Write into the columns the batch's advantages [M] as each minibatch of an epoch
        takes them: normalised over its rows at all trainers."""
        library, place = self.loss.library, self.policy.network.place
        with place():
            pieces = library.read(order)
            rows = [of.source.numbers(pieces[start:end]) for start, end in pairwise(bounds)]
        lengths, flat = [len(each) for each in rows], np.concatenate(rows)
        sums = minibatch_sums(advantage[flat], lengths)
        numbers, most = sums.reshape(-1), self.largest_sum // sums.itemsize
        for start in range(0, len(numbers), most):
            yield numbers[start : start + most]
        normal = np.empty_like(advantage)
        normal[flat] = normalise_minibatches(advantage[flat], lengths, sums)
        with place():
            of.columns[1]["scalars"][1][:] = library.columns({"advantage": normal})["advantage"]

    def _read(
        self, found: Any, taken: Sequence[Any], of: Minibatches, samples: Sequence[Sample]
    ) -> NDArray[np.float64]:
        """Return what was measured. Raises `UpdateFault` for the first step that was not
        done since its loss or gradient was not finite; `taken`: each step's pieces."""
        loss = self.loss
        steps = loss.library.to_host(found).astype(np.float64)
        lost = ~np.isfinite(loss.of_parts(steps.T) + steps[:, -1])
        if not lost.any():
            return steps
        first = int(lost.argmax())
        *parts, norm = steps[first].tolist()
        loss.differentiate(of, taken[first])
        numbers = loss.library.read(loss.shared)
        own = not isfinite(numbers @ numbers)  # else it came from another trainer
        record = record_minibatch(loss, of, taken[first], samples) if own else {}
        raise self._spoilt(explain(parts, norm), "minibatch", record)

    def _spoilt(self, why: str, stage: str, record: Arrays) -> UpdateFault:
        return spoilt(type(self.config).__name__, "the weights", why, stage, record)

    def trace(self, stage: str, minibatch: Arrays) -> Iterator[TracedArray]:
        """See `Algorithm.trace`."""
        if stage != "minibatch":
            return trace_batch(minibatch)
        self.loss.config = self.config
        return trace_minibatch(minibatch, self.loss)

    def _evaluate(self, sample: Sample, rows: Integers) -> tuple[Floats, Floats]:
        """Return log π and the value (reward units) of the sample's rows at `rows` (into
        its flattened [T, N]), by the policy as it is now."""
        library, policy = self.loss.library, self.policy
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
        return {"random": random_state(self._rng), **prefixed("adam", self.loss.optimiser.state())}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take back what `state` returned; continues exactly as the learner that it came
        from would have."""
        check_learner_state(self.state(), state)
        set_random_state(self._rng, state["random"])
        self.loss.optimiser.load_state(unprefixed("adam", state))

    def separate(self, rank: int) -> None:
        """Shuffle by a stream of one's own: `rank` times 2^127 draws, about, ahead of the
        one that was taken back."""
        bits = self._rng.bit_generator
        assert isinstance(bits, np.random.PCG64)
        self._rng = np.random.Generator(bits.jumped(rank))
