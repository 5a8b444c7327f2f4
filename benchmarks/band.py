"""Draws where training tasks K stand against committed steps C, in bounded, exact and
free-running mode: docs/async-band.png.

    python benchmarks/band.py [docs/async-band.png]

A simulation of events in the limiter's own counters, with 8 slots whose steps take
lognormal times (median 1, sigma 1), and tasks that take 0.1, but for a stretch in which
they take 3 times as long, as when others want the machine; ratio 1. Free-running: nobody
waits for anybody.
"""

import heapq
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np

from tidemill.replay.limiter import Limiter

SLOTS, STEPS, WARM_UP, TASK, RATIO = 8, 1200, 100, 0.1, Fraction(1)
SLOW = (400, 700)  # committed steps between which tasks take longer


def task_seconds(committed):
    """Return what a task takes."""
    return TASK * (3 if SLOW[0] <= committed < SLOW[1] else 1)


def bounded(sigma=1.0, task=task_seconds):
    """Return (C, K) after each event, and the time that all took."""
    limiter, rng, now = Limiter(RATIO, SLOTS), np.random.default_rng(1), 0.0
    steps, points, training = [], [(0, 0)], None
    while limiter.counts.committed < STEPS:
        for _ in range(limiter.start(SLOTS - limiter.in_flight)):
            heapq.heappush(steps, now + rng.lognormal(0, sigma))
        if training is None and limiter.owed:
            training = now + task(limiter.counts.committed)
        now = min([*steps[:1], *([training] if training is not None else [])])
        if training == now:
            limiter.finish_task()
            training = None
        else:
            heapq.heappop(steps)
            limiter.commit()
            if limiter.counts.committed >= WARM_UP:
                limiter.sampleable()
        points.append((limiter.counts.committed, limiter.counts.tasks))
    return np.array(points), now, limiter.counts.waived


def exact(sigma=1.0, task=task_seconds):
    """The same, where the answers are taken in the order in which the steps began, each
    with all of its training before the next step of its slot."""
    limiter, rng, now = Limiter(RATIO, SLOTS), np.random.default_rng(1), 0.0
    due = [rng.lognormal(0, sigma) for _ in range(limiter.start(SLOTS))]
    points = [(0, 0)]
    for ticket in range(STEPS):
        now = max(now, due[ticket % SLOTS])
        limiter.commit()
        if limiter.counts.committed >= WARM_UP:
            limiter.sampleable()
        points.append((limiter.counts.committed, limiter.counts.tasks))
        while limiter.owed:
            now += task(limiter.counts.committed)
            limiter.finish_task()
            points.append((limiter.counts.committed, limiter.counts.tasks))
        due[ticket % SLOTS] = now + rng.lognormal(0, sigma) if limiter.start() else np.inf
    return np.array(points), now, limiter.counts.waived


def free():
    """The same, where nobody waits."""
    rng, now, committed, tasks = np.random.default_rng(1), 0.0, 0, 0
    steps = [rng.lognormal() for _ in range(SLOTS)]
    heapq.heapify(steps)
    training, points = np.inf, [(0, 0)]
    while committed < STEPS:
        if committed >= WARM_UP and training == np.inf:
            training = now + task_seconds(committed)
        now = min(steps[0], training)
        if now == training:
            tasks, training = tasks + 1, np.inf
        else:
            heapq.heapreplace(steps, now + rng.lognormal())
            committed += 1
        points.append((committed, tasks))
    return np.array(points), now, WARM_UP + SLOTS - 1


def main():
    """Draw."""
    from matplotlib.figure import Figure

    out = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/async-band.png")
    figure = Figure((11, 3.6), layout="constrained")
    axes = figure.subplots(1, 3, sharex=True)
    queue = Limiter(RATIO, SLOTS).queue
    for axis, (name, run) in zip(
        axes, (("bounded", bounded), ("exact", exact), ("free-running", free)), strict=True
    ):
        points, seconds, waived = run()
        steps = np.arange(STEPS + 1)
        owed = np.maximum(0, steps - waived) * float(RATIO)
        below = owed[points[:, 0]].astype(int) - points[:, 1]
        axis.fill_between(steps, 0, queue, color="0.88", label="0 ≤ D(C) - K ≤ Qt")
        axis.plot(points[:, 0], below, linewidth=0.8, label="D(C) - K")
        axis.set_title(f"{name}: {STEPS / seconds:.1f} steps per unit of time")
        axis.set_xlabel("committed steps C")
        print(
            f"{name}: debt {below.min()} to {below.max()}, band 0 to {queue}, {STEPS / seconds:.2f} steps "
            "per unit of time"
        )
    for sigma in (0.0, 0.25, 0.5, 1.0):
        rates = [STEPS / run(sigma, lambda committed: 1e-6)[1] for run in (bounded, exact)]
        print(
            f"exact at sigma {sigma}, tasks that take no time: {1 - rates[1] / rates[0]:.0%} less throughput "
            "than bounded"
        )
    axes[0].set_ylabel("tasks that are owed, D(C) - K")
    axes[0].legend(loc="upper left")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
