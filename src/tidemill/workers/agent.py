"""The contract of agents, and what every agent knows of its seats."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import Tick
from tidemill.api.stream import InferenceClient
from tidemill.core.schema import Arrays, Schema, allocate
from tidemill.workers.info_numbers import FIELD, NONE, Numbers
from tidemill.workers.sample_writers.base import SampleWriter, Seats

Episode = tuple[float, int, int, Numbers]
"""Undiscounted return, number of actions, the stage in which it began, what the
environment said of it at its end."""

_OF_TICKS = {"on_reset", "done", "truncated", "reward", "version", "policy"}


class Agent(ABC):
    """An agent is all seats that one agent spec matches in a target: it asks for their
    actions, and hands on as rows what came of them.

    schema: the fields of a row that are written here
    seats: N, in lane-major order
    deterministic: ask for the mode of the policy's distribution
    client: where requests go
    writer: where rows go

    in_place: environments write what they tell over what the seats saw before
    """

    in_place: ClassVar[bool] = False

    def __init__(
        self, schema: Schema, seats: int, deterministic: bool, client: InferenceClient, writer: SampleWriter
    ) -> None:
        self._seats, self._deterministic, self.client, self.writer = seats, deterministic, client, writer
        self._observation_names = [n for n in schema if n == "obs" or n.startswith("obs.")]
        self._state_names = [n for n in schema if n.startswith("state.")]
        action_names = [n for n in schema if n == "action" or n.startswith("action.")]
        cleared = [n for n in schema if n == "reward" or (n.startswith("info") and n != FIELD)]
        self._cleared = cleared  # what a row has only once its action was done
        known = {*self._observation_names, *self._state_names, *cleared, FIELD, *_OF_TICKS}
        self._answer_names = [n for n in schema if n not in known]
        self._info_names = [
            n for n in cleared if n not in ("reward", "info_mask", "info.return", "info.length")
        ]

        # What is known of each seat between ticks.
        self.finished = np.ones(seats, np.bool_)
        """bool [N]: the seat is between two episodes; its next row is the first of
        one."""
        self._return = np.zeros(seats, writer.returns)
        self._length = np.zeros(seats, np.int32)  # index within the episode of the seat's last row
        self._actions: Arrays = allocate({n: schema[n] for n in action_names}, (seats,))
        self._state: Arrays = allocate({n: schema[n] for n in self._state_names}, (seats,))
        self.episodes: list[Episode] = []
        """The episodes that ended; the worker takes them away."""
        self.hear: Callable[[Sequence[int]], Sequence[Numbers]] = lambda seats: [NONE] * len(seats)
        """Returns what the environment says of the episodes of these seats, which its
        last tick has ended."""
        self.stage = 0
        """Stage of the curriculum in which episodes begin now."""
        self._stages = np.zeros(seats, np.int64)
        self.acting = np.full(seats, -1, np.int64)
        """int64 [N]: the version that acts for the seat in this episode; -1 before it
        acts, and when it was more than one."""

    @abstractmethod
    def is_ready(self) -> bool:
        """True when no seat waits for an answer."""

    @abstractmethod
    def get_action(self) -> Arrays:
        """Return the actions: name → [N, ...], meaningless for seats that asked for none.
        Needs `is_ready`."""

    def has_room(self) -> bool:
        """True when the next rows have a place to go (False while the consumer holds all
        slots)."""
        return self.writer.has_room()

    @abstractmethod
    def next_observation(self, tick: Tick) -> None:
        """Point `tick.observation` to where the environment is to write it. Needs
        `has_room`."""

    @abstractmethod
    def observe(self, tick: Tick) -> None:
        """Take in a tick: write its rows."""

    @abstractmethod
    def _shown(self, seats: Seats) -> Arrays:
        """Return copies of what these seats saw last, and of ``version`` and ``policy``,
        which chose their actions then."""

    def newest(self, seats: Seats) -> Arrays:
        """Return copies of the newest row of these seats, for the record of a fault: what
        they saw, their actions (once `get_action` has returned them), ``version`` and
        ``policy`` of who chose these; ``steps``, the actions in their episodes before;
        ``stage``, in which those began; ``finished``: they are in none, and the rest
        means nothing."""
        return {
            **self._shown(seats),
            **{name: action[seats] for name, action in self._actions.items()},
            "steps": self._length[seats],
            "stage": self._stages[seats],
            "finished": self.finished[seats],
        }

    def _begin(self, seats: Seats) -> None:
        """An episode's first row: the default state, counts from 0."""
        self._stages[seats] = self.stage
        self._return[seats] = 0
        self._length[seats] = 0
        for state in self._state.values():
            state[seats] = 0

    def _returns_of(self, seats: Seats) -> NDArray[Any]:
        """Return the rewards of the open episodes of `seats` so far, summed; beyond what
        float32 can tell, its largest number."""
        most = np.finfo(np.float32).max
        return self._return[seats].clip(-most, most)

    def _end(
        self, tick: Tick, seats: Seats, lengths: NDArray[np.int32], rows: Arrays, at: Any
    ) -> Sequence[Numbers]:
        """The episodes of `seats` are over: show their info at `at` in `rows`, and return
        what the environment says of them."""
        returns, heard = self._returns_of(seats), self.hear(seats.tolist())
        rows["info_mask"][at], rows["info.return"][at], rows["info.length"][at] = True, returns, lengths
        for name in self._info_names:
            rows[name][at] = tick.info[name.removeprefix("info.")][seats]
        self.episodes += zip(
            returns.tolist(), lengths.tolist(), self._stages[seats].tolist(), heard, strict=True
        )
        return heard
