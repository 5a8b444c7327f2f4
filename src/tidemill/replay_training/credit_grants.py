"""The steps that the trainer of a replay memory grants to actors: how many each actor has
been granted, and how many of these have not come back as rows.

Steps are granted ahead, up to an actor's slots, first to whoever has least of what it can
use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tidemill.api.transport import Writer
from tidemill.core.schema import Array
from tidemill.replay.limiter import Limiter
from tidemill.streams.credits import CreditWriter


@dataclass(eq=False)
class _Grant:
    """An actor's: `slots` lanes of all its targets, `lanes` in each, `outstanding` steps
    granted that have not come, and as its actor knows them the steps `granted` and the
    samples that were `dealt` with."""

    credits: CreditWriter
    lanes: int
    slots: int = 0
    outstanding: int = 0
    granted: int = 0
    dealt: int = 0


class CreditGrants:
    """What all actors have.

    cells: where each actor reads its credits,
    lanes: and the lanes of each of its targets, by its name
    channels: for each channel of the samples, which actor sends through each, and how
        many seats it has
    life: the trainer's
    """

    def __init__(
        self,
        cells: Mapping[str, Writer],
        lanes: Mapping[str, int],
        channels: Sequence[tuple[str, int]],
        life: int = 0,
    ) -> None:
        self._life = life
        shares = {actor: _Grant(CreditWriter(cell, life), lanes[actor]) for actor, cell in cells.items()}
        self._grants, self._channels = [*shares.values()], [shares[actor] for actor, _ in channels]
        for share, (_, seats) in zip(self._channels, channels, strict=True):
            share.slots += seats
        self._open: Sequence[Array] | None = None
        self.slots = sum(share.slots for share in self._grants)
        """Of all actors."""
        self.holding = sum(share.lanes - 1 for share in self._grants)
        """Steps that can be granted to targets that need more before they can begin a
        tick; 0: every lane steps alone."""

    def go_on(self, steps: int) -> None:
        """The only actor has so many steps in flight again; the sample that it goes on
        after counts as the first one that it has sent."""
        (share,) = self._grants
        share.outstanding = share.granted = share.credits.granted = steps
        share.credits.received = 1

    def begin_life(self, channel: int, cell: Writer) -> int:
        """The actor behind `channel` lives again, and all that its last life had sent is
        received. Return how many of that one's steps were in flight: they are lost. The
        new life's credits, which begin at 0, it reads from `cell`."""
        share = self._channels[channel]
        lost, finishing = share.outstanding, share.credits.finishing
        share.credits = CreditWriter(cell, self._life)
        share.outstanding = share.granted = share.dealt = 0
        share.credits.finishing = finishing
        return lost

    def keep_to(self, open_: Sequence[Array] | None) -> None:
        """Have no episode begin from now on, and grant as many steps as there are open
        ones: which these are `open_` tells, by the seats of each channel. None: any may
        begin again."""
        self._open = open_
        for share in self._grants:
            share.credits.finishing = open_ is not None

    def receive(self, channel: int, steps: int) -> None:
        """A sample with so many of the steps that were granted has come through
        `channel`, and is dealt with."""
        share = self._channels[channel]
        share.credits.received += 1
        share.outstanding -= steps

    def start(self, limiter: Limiter) -> int:
        """Grant what `limiter` lets start, and return how many steps that was. Actors
        hear of it by `tell`."""
        started = 0
        for share in sorted(self._grants, key=lambda share: share.outstanding / max(share.slots, 1)):
            wanted = self._usable(share) - share.outstanding
            steps = limiter.start(wanted) if wanted > 0 else 0
            started += steps
            share.outstanding += steps
            share.credits.granted += steps
        return started

    def tell(self, dealt: bool) -> None:
        """Tell actors what they were granted since they heard last; where they wait for
        it, also what was `dealt` with."""
        for share in self._grants:
            credits = share.credits
            if credits.granted > share.granted or (dealt and credits.received > share.dealt):
                share.granted, share.dealt = credits.granted, credits.received
                credits.write()

    def quiet(self) -> bool:
        """True when no target can step: one of many lanes may hold fewer credits than it
        can use."""
        return all(share.outstanding < share.lanes for share in self._grants)

    def _usable(self, share: _Grant) -> int:
        if self._open is None:
            return share.slots
        return sum(
            int(np.count_nonzero(flags))
            for flags, whose in zip(self._open, self._channels, strict=True)
            if whose is share
        )
