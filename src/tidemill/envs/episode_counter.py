"""A wrapper that numbers episodes."""

from collections.abc import Sequence

import numpy as np
from numpy import count_nonzero
from numpy.typing import NDArray

from tidemill.api.environment import Environment, Tick
from tidemill.core.schema import Arrays
from tidemill.envs.wrapper import Wrapper


class EpisodeCounter(Wrapper):
    """An environment whose episodes are numbered, those of each lane from 0.

    A seat's episode lasts from its first observation to its end or cut, a lane's until
    all of its seats are finished; a seat's has the number of the lane's in which it
    began. Where agents are independent, a lane has none of its own: the episodes of each
    group's agents are numbered in the order in which they begin.

    episodes: int64 [L], finished episodes of each lane; where agents are independent, of
        each group that has begun any, as many as have ended of those that began first
    ended: per group (lane, number) of each seat whose episode the last tick has ended, in
        the order of seats
    """

    def __init__(self, inner: Environment) -> None:
        super().__init__(inner)
        self.episodes = np.zeros(self.lanes, np.int64)
        self.ended: list[list[tuple[int, int]]] = []
        self._reset = np.ones(self.lanes, np.bool_)

    def bind(self, groups: Sequence[Sequence[int]]) -> None:
        super().bind(groups)
        seats = [self.lanes * len(group) for group in groups]
        self._finished = [np.ones(count, np.bool_) for count in seats]
        self._number = [np.zeros(count, np.int64) for count in seats]
        self._begun = [np.zeros((self.lanes, 1), np.int64) for _ in seats]

    def send(self, actions: Sequence[Arrays], reset: NDArray[np.bool_]) -> None:
        self._reset[:] = reset
        super().send(actions, reset)

    def recv(self, ticks: Sequence[Tick]) -> None:
        super().recv(ticks)
        self.ended, begins = [], list[NDArray[np.bool_]]()
        for finished, number, tick in zip(self._finished, self._number, ticks, strict=True):
            final = (tick.done | tick.truncated) > finished  # and not
            self.ended.append([])
            if count_nonzero(final):
                seats = final.nonzero()[0]
                lanes = seats // (len(finished) // self.lanes)
                self.ended[-1] += zip(lanes.tolist(), number[seats].tolist(), strict=True)
            elif not count_nonzero(finished):
                begins.append(finished)  # nobody can
                continue
            begins.append(tick.present & (finished | (final & tick.restarted)))
            finished |= final
        if any(self.ended) or any(map(count_nonzero, begins)):
            self._count([each.reshape(self.lanes, -1) for each in begins])

    def _count(self, begins: Sequence[NDArray[np.bool_]]) -> None:
        """Number the episodes that begin (per group [L, A])."""
        every = [each.reshape(self.lanes, -1) for each in self._finished]
        if not self.independent:
            over = np.logical_and.reduce([~self._reset, *(each.all(axis=1) for each in every)])
            # a lane goes on when somebody begins in the tick in which all others finish
            if not self.same_step:
                over &= ~np.logical_or.reduce([each.any(axis=1) for each in begins])
            self.episodes += over
        for finished, flat, new, begun in zip(every, self._number, begins, self._begun, strict=True):
            number = flat.reshape(new.shape)
            first = begun + new.cumsum(axis=1) - 1 if self.independent else self.episodes[:, None]
            np.copyto(number, first, where=new)
            begun += new.sum(axis=1, keepdims=True)
            finished &= ~new
        if self.independent:
            ended = [
                np.where(finished, begun, flat.reshape(finished.shape)).min(axis=1)
                for finished, flat, begun in zip(every, self._number, self._begun, strict=True)
            ]
            shown = np.concatenate(self._begun, axis=1).T > 0
            most = np.iinfo(np.int64).max
            self.episodes = np.where(shown, ended, most).min(axis=0) * shown.any(axis=0)
