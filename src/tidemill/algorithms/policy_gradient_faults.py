"""What is recorded of an update of policy gradients that was not finite, and what such a
record leads to when it is computed again (`tidemill replay-fault`).

A record of stage "minibatch" has what one step took: raw inputs (`Rows.record`), actions,
``scalars`` (`COLUMNS`), ``weight``, and ``place``: where the rows lay. One of a batch
that no step was done with has its rows as samples have them, and ``estimate.*``, what was
computed of those that are trained.
"""

from collections.abc import Iterator, Sequence
from math import isfinite, prod
from typing import Any

import numpy as np

from tidemill.algorithms.minibatches import Integers, Rows, places, take_rows, trained_rows
from tidemill.algorithms.policy_gradient_loss import COLUMNS, Minibatches, PolicyGradientLoss
from tidemill.algorithms.policy_gradient_settings import MEASURED
from tidemill.api.algorithm import Sample, TracedArray
from tidemill.core.schema import Arrays

LARGEST_RECORD = 64 << 20
"""Bytes of a batch, about, that a record has at most."""
_LENT = ("obs", "state", "value")  # what is read of rows that are not trained, too, which lend their values


def record_batch(samples: Sequence[Sample], columns: Arrays) -> Arrays:
    """Return a batch of whose trained rows these `columns` were computed: its rows on
    which something acted; where they are many, those around the last one that is not
    finite. Nothing, where all of it is finite: what is not came from another trainer."""
    own = [*columns.values(), *(array for sample in samples for array in sample.values())]
    if all(np.isfinite(array).all() for array in own if array.dtype.kind == "f"):
        return {}
    record: Arrays = {}
    size = sum(array.nbytes for sample in samples for array in sample.values())
    share = LARGEST_RECORD / max(size, 1)
    acted = [_telling_rows(sample, max(1, int(share * sample["done"].size))) for sample in samples]
    trained = np.concatenate(
        [sample.trained().reshape(-1)[rows] for sample, rows in zip(samples, acted, strict=True)]
    )
    for name in samples[0]:
        kind = name.partition(".")[0]
        if kind != "info":
            record[name] = take_rows(samples, acted, name)
        if kind not in (*_LENT, "info"):
            record[name][~trained] = 0
    record["place"] = places(samples, acted)
    record |= {f"estimate.{name}": column for name, column in columns.items()}
    record["estimate.place"] = places(samples, trained_rows(samples))
    return record


def record_minibatch(
    loss: PolicyGradientLoss, of: Minibatches, pieces: Any, samples: Sequence[Sample]
) -> Arrays:
    """Return the minibatch of these `pieces`, whose rows are the trained ones of
    `samples`, as the `loss` took it."""
    read = loss.library.read
    record, rows = of.source.record(read(pieces))
    record |= {name: read(column)[rows] for name, column in of.columns[0].items()}
    record["scalars"] = np.ascontiguousarray(read(of.columns[1]["scalars"])[:, rows])
    record["weight"] = np.array([of.weight])
    record["place"] = places(samples, trained_rows(samples))[rows]
    return record


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
            finite &= good | ~sample.trained() if name.partition(".")[0] not in _LENT else good
    wrong = np.flatnonzero(~finite.reshape(-1)[acted])
    start = max(0, int(wrong[-1] if len(wrong) else len(acted)) - most // 2)
    return acted[start : start + most]


def explain(parts: Sequence[float], norm: float) -> str:
    """Return what of a step's measured parts and its gradient's norm is not finite."""
    values = dict(zip(MEASURED, parts, strict=True))
    wrong = [f"{name} is {value}" for name, value in values.items() if not isfinite(value)] or [
        f"the gradient's norm is {norm}"
    ]
    return f"{', '.join(wrong)} (all: {values}, gradient norm {norm})"


def trace_batch(record: Arrays) -> Iterator[TracedArray]:
    """Yield what `record_batch` recorded."""
    estimates = {name: array for name, array in record.items() if name.startswith("estimate.")}
    for name, array in record.items():
        if name not in (*estimates, "place"):
            yield TracedArray("input", name, array, 0, record["place"])
    of_estimates = estimates.pop("estimate.place")
    for name, array in estimates.items():
        yield TracedArray("loss", name.removeprefix("estimate."), array, 0, of_estimates)


def trace_minibatch(record: Arrays, loss: PolicyGradientLoss) -> Iterator[TracedArray]:
    """Yield what `record_minibatch` recorded, and what `loss` and its policy make of
    it."""
    policy, library = loss.policy, loss.library
    network, place = policy.network, record["place"]
    wanted = record.get("wanted")
    of_rows = place if wanted is None else np.where(wanted[:, None] >= 0, place[wanted], -1)
    for name, array in record.items():
        if name.partition(".")[0] == "obs":
            yield TracedArray("input", name, array, 0, of_rows)
        elif name.partition(".")[0] == "action":
            yield TracedArray("input", name, array, 0, place)
        elif name.startswith("state."):
            yield TracedArray("input", name, array, 0)
    for name, column in zip(COLUMNS, record["scalars"], strict=True):
        yield TracedArray("input", name, column, 0, place)
    for name, array in policy.parameters().items():
        yield TracedArray("weights", name, array)
    with network.place():
        source = Rows.again(library, policy, record)
        action = {n: a for n, a in record.items() if n.partition(".")[0] == "action"}
        columns = [library.columns(action), library.columns({"scalars": record["scalars"]})]
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
        loss.differentiate(Minibatches(source, columns, float(record["weight"][0])), pieces)
        for name, part in zip(MEASURED, library.read(loss.parts), strict=False):
            yield TracedArray("loss", name, part)
        flat, start = library.read(loss.gradient), 0
        for name, form in network.trained():
            size = prod(form)
            yield TracedArray("gradient", name, flat[start : start + size].reshape(form))
            start += size
        yield TracedArray("gradient", "norm", np.array(np.linalg.norm(flat)))
