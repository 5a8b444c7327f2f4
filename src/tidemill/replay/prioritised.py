"""The prioritised replay: what the algorithm was most wrong about is drawn more often."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tidemill.api.buffer import Demand, ReplayBuffer
from tidemill.api.policy import number_of
from tidemill.api.stream import SampleConsumer
from tidemill.core.config import acting
from tidemill.core.schema import Array, Arrays
from tidemill.replay.priorities import BlockSums, Priorities
from tidemill.replay.replay import Replay, UniformReplay
from tidemill.replay.sequences import Ints


@dataclass(frozen=True, kw_only=True)
class PrioritisedReplay(Replay):
    """A prioritised replay memory draws transitions in proportion to a power of their
    priority: Schaul et al. 2016, "Prioritized Experience Replay", section 3.3, the
    proportional variant. The priority p_i is the absolute TD error of transition i (for
    a distributional `QNetwork` its loss) when it was last trained on, at least 1e-6; a
    new transition has the greatest one so far. Transition i is drawn with probability
    P(i) = p_i^α / Σ p^α, stratified (the sum is split into as many equal parts as a batch
    has transitions), and its loss is weighted by (N · P(i))^-β, divided by the greatest
    weight in the batch.

    alpha: α: 0 draws uniformly, 1 in proportion to p
    beta: β at the start; it rises to 1 in a straight line
    beta_updates: number of updates after which β is 1
    """

    alpha: float = 0.5
    beta: float = acting(0.4, lambda replay: replay.alpha > 0, "with alpha = 0: all weights are 1")
    beta_updates: int = acting(
        100_000,
        lambda replay: replay.alpha > 0 and replay.beta < 1,
        "with alpha = 0 or beta = 1: nothing rises",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_shares("alpha", "beta")
        self.check_least(beta_updates=1)

    def build(self, source: SampleConsumer, demand: Demand) -> ReplayBuffer:
        return Prioritised(self, source, demand)


class Prioritised(UniformReplay):
    """The buffer that `PrioritisedReplay` describes."""

    _config: PrioritisedReplay
    _priorities: Priorities

    def __init__(self, config: PrioritisedReplay, source: SampleConsumer, demand: Demand) -> None:
        # places, the rows there, and where their new priorities will be
        self._drawn: tuple[Ints, Ints, Array] | None = None
        super().__init__(config, source, demand)

    def _books(self, places: int) -> int:
        return super()._books(places) + BlockSums.nbytes(places)

    def _make_priorities(self, places: int) -> Priorities:
        self._priorities = Priorities(places, self._config.alpha)
        return self._priorities

    def _draw(self, count: int, version: int) -> tuple[Ints, Array]:
        config = self._config
        places, chance = self._priorities.powers.find((np.arange(count) + self._rng.random(count)) / count)
        beta = config.beta + (1 - config.beta) * min(max(number_of(version), 0) / config.beta_updates, 1)
        weight = (chance * self.sequences.count) ** -beta
        self._weight[0] = weight / weight.max()
        return places, self._weight

    def take(self, version: int) -> Any:
        taken = super().take(version)
        if taken is not None:
            (held,) = taken
            self._drawn = self._places, self.sequences.rows(self._places), held.sample["priority"][0]
        return taken

    def release(self) -> None:
        """Take the new priorities of the batch, of those transitions that are still
        there."""
        if self._drawn is None:
            return
        (places, rows, priority), self._drawn = self._drawn, None
        valid = (
            np.isfinite(priority) & (self.sequences.span[places] > 0) & (self.sequences.rows(places) == rows)
        )
        self._priorities.change(places[valid], priority[valid])

    def _arrays(self) -> Arrays:
        return {**super()._arrays(), "powers": self._priorities.powers.numbers}

    def _more_facts(self) -> dict[str, Any]:
        return {"greatest": self._priorities.greatest}

    def _take_facts(self, manifest: dict[str, Any]) -> None:
        greatest, powers = float(manifest["greatest"]), self._priorities.powers
        told = np.append(powers.numbers, greatest)
        if not (np.isfinite(told) & (told >= 0)).all():
            raise ValueError("a priority is not a finite number from 0 on")
        self._priorities.greatest = greatest
        powers.refill(powers.numbers)
