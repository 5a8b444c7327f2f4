"""The order of service that serves all environments which have answered by now, as one
batch.

So a round takes what has come, stores it as one row of all seats, asks once for the
actions of all that may go on, and sends these. What Python costs is per round and not per
environment, but for the calls of the environments themselves.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import Environment, NotReady, Tick
from tidemill.core.bell_batching import BatchedRings
from tidemill.core.clock import Clock, awake
from tidemill.core.errors import EnvironmentFault
from tidemill.core.forks import end_in_fork, forks
from tidemill.core.schema import Arrays
from tidemill.core.thread_loop import run_ready
from tidemill.replay_training.granted_order import GrantedOrder, credits_of
from tidemill.replay_training.slot_fault_notices import SlotFaults
from tidemill.replay_training.transitions import TransitionAgent
from tidemill.streams.credits import Credits
from tidemill.workers.actor_context import ActorContext
from tidemill.workers.agent import Agent
from tidemill.workers.info_numbers import InfoReader, Numbers
from tidemill.workers.sample_writers.base import Seats

LOOK_AGAIN = 0.1
"""Seconds between looks at all environments, whatever happens."""


class _Member(NamedTuple):
    """An environment, and its seats' parts of what all have together: views."""

    environment: Environment
    ticks: list[Tick]
    actions: list[Arrays]
    reset: NDArray[np.bool_]
    begun_in: NDArray[np.int64]


class ReadyBatch(GrantedOrder):
    """The order of service of a replay memory's actor: all environments that have
    answered are served as one batch. Environment i has the seats of `agent` from i ·
    lanes on. A round is `receive`, `begin`, the flush of requests, `send`.

    flush: function that sends the buffered requests, as in `ActorContext`
    least: requests that are buffered before they are flushed
    credits: the credits that steps need; None: nobody limits them
    ticked: as in `ActorContext`; a tick is what is received, or sent, together
    failed: as in `ActorContext`
    """

    one_target: ClassVar[bool] = True

    def __init__(
        self,
        environments: Sequence[Environment],
        agent: TransitionAgent,
        tick: Tick,
        clock: Clock,
        info_reader: InfoReader,
        flush: Callable[[int], bool],
        least: int = 1,
        credits: Credits | None = None,
        ticked: Callable[[float, bool], None] = lambda seconds, resets: None,
        failed: Callable[[int, Exception], None] = lambda target, fault: None,
    ) -> None:
        agent.hear = self._hear
        self.agents = [(0, agent)]
        self._info_reader, self._flush, self._least = info_reader, flush, least
        self._agent = agent
        self._tick = tick
        self._clock = clock
        self._credits, self._ticked, self._failed = credits, ticked, failed
        self._lanes = lanes = environments[0].lanes
        agent.next_observation(tick)
        self._members = [
            _member(env, agent, tick, slice(i * lanes, (i + 1) * lanes)) for i, env in enumerate(environments)
        ]
        self._forks, self._stage = forks(), 0
        self._rung: deque[int] = deque()  # by environments, in their threads
        self._away = [False] * len(environments)  # sent and not yet received
        self._back: set[int] = set()  # these have answered
        # received, in that order; how many credits each needs to go on
        self._idle = dict.fromkeys(range(len(environments)), 0)
        self._asked: dict[int, list[int]] = {}  # request → who goes on when it is answered
        self._leaving: list[int] = []  # they go on now: nobody acts in them
        self._looked_at, self._since = monotonic(), awake()
        self._without_credit = 0  # lanes that could step, and have no credit
        self._waited = 0.0
        self._steps = 0

    @classmethod
    def build(cls, parts: ActorContext) -> Self:
        config, environments = parts.config, parts.environments
        (spec,), (spaces,), first = config.agents, parts.spaces, environments[0]
        for environment in environments:
            environment.bind(parts.groups)
        terms = parts.terms(0, config.ring * config.lanes, 0)
        terms.offer(terms.schema)
        client = parts.client(spec, 0)
        agent = TransitionAgent(terms.row, terms.seats, spec.deterministic, client, terms.samples)
        made = cls(
            environments,
            agent,
            Tick.allocate(spaces.observation, terms.seats, first.info, False),
            parts.clock,
            parts.info_reader,
            parts.flush,
            config.flush_requests,
            credits_of(parts.context, spec),
            parts.ticked,
            parts.failed,
        )
        made.faults = SlotFaults(environments, False, parts.tell)
        for number, environment in enumerate(environments):
            environment.on_ready(made.waker(number, parts.context.endpoints.bell.ring))
        return made

    @property
    def steps(self) -> int:
        return self._steps

    def waker(self, number: int, ring: Callable[[], None]) -> Callable[[], None]:
        """Return what environment `number` calls, from any thread, when it is ready;
        `ring` wakes the actor."""

        def wake() -> None:
            self._rung.append(number)
            ring()

        return wake

    def _hear(self, seats: Sequence[int]) -> list[Numbers]:
        places = [divmod(seat, self._lanes) for seat in seats]
        return [
            self._info_reader.numbers(self._members[number].environment.episode_infos(0, (lane,))[0])
            for number, lane in places
        ]

    def enter_stage(self, stage: int, options: Mapping[str, Any]) -> None:
        self._stage = stage
        for member in self._members:
            member.environment.enter_stage(options)

    def serve(self, rounds: int) -> None:
        with BatchedRings():
            self.go_on()  # who has waited for credits goes before others are received
        for _ in range(rounds):
            with BatchedRings():  # who is woken finds the whole round done
                moved = self.receive()
                moved = self.go_on() or moved
            if not moved or self.called:
                return

    def go_on(self) -> bool:
        """Send on their way all that may go on. False when nothing could be done."""
        moved = self.begin()
        moved = self._flush(self._least) or moved
        return self.send() or moved or self._flush(1)

    # ---- from answers to rows ----------------------------------------------------------

    def receive(self) -> bool:
        """Take what environments have answered, and send it as a row. False when there is
        nothing, or no room for it."""
        self._look()
        if not self._back or not self._agent.has_room():
            return False
        members, agent, away, numbers = self._members, self._agent, self._away, sorted(self._back)
        self._back.clear()
        left = self._clock.enter("environment")
        for target in tuple(numbers):
            member = members[target]
            try:
                member.environment.recv(member.ticks)
            except NotReady:  # it comes once it is there again
                numbers.remove(target)
                continue
            except EnvironmentFault as fault:
                self._failed(target, fault)
                raise
            away[target] = False
        end_in_fork(self._forks)
        self._clock.enter(left)
        if not numbers:
            return False
        seconds = self._clock.last
        came = self._seats(numbers)
        agent.next_observation(self._tick)
        agent.observe(self._tick, came)
        self._steps += agent.stepped
        self.ticks += 1
        acts = agent.act(came)
        needs = acts if self._lanes == 1 else acts.reshape(-1, self._lanes).sum(1)
        self._idle.update(zip(numbers, needs.tolist(), strict=True))
        self._ticked(seconds, False)
        return True

    def _look(self) -> None:
        """Find out who has answered."""
        run_ready()
        rung = self._rung
        while rung:
            self._look_at(rung.popleft())
        if (now := monotonic()) - self._looked_at > LOOK_AGAIN:  # at deadlines, say, nobody rings
            self._looked_at = now
            for number in range(len(self._members)):
                self._look_at(number)

    def _look_at(self, number: int) -> None:
        try:
            if self._away[number] and number not in self._back and self._members[number].environment.ready():
                self._back.add(number)
        except EnvironmentFault as fault:
            self._failed(number, fault)
            raise

    def seats(self, target: int, lane: int | None) -> Sequence[tuple[Agent, Seats]]:
        seats = self._seats((target,))
        return [(self._agent, seats if lane is None else seats[lane : lane + 1])]

    def _seats(self, numbers: Sequence[int]) -> Seats:
        first = np.array(numbers, np.intp)
        return (
            first if self._lanes == 1 else (first[:, None] * self._lanes + np.arange(self._lanes)).reshape(-1)
        )

    @property
    def waited(self) -> float:
        return (self._waited + self._without_credit * (awake() - self._since)) / (
            len(self._members) * self._lanes
        )

    # ---- from credits to actions -------------------------------------------------------

    def begin(self) -> bool:
        """Let those go on that may: ask for their actions. False when nobody may."""
        now = awake()
        self._waited, self._since, self._without_credit = (
            self._waited + self._without_credit * (now - self._since),
            now,
            0,
        )
        if not self._idle:
            return False
        numbers, granted, left = [], 0, None if self._credits is None else self._credits.left()
        if self._credits is not None and self._credits.outlived:
            left = self._begin_anew(self._credits)
        finishing = self._credits is not None and self._credits.finishing
        for number, needs in self._idle.items():
            if not needs:
                self._leaving.append(number)
            elif finishing and self._agent.begins(number * self._lanes):
                continue
            elif left is None or granted + needs <= left:
                granted += needs
                numbers.append(number)
            else:
                left = granted  # they are served as they came
                self._without_credit += needs
        if numbers:
            if self._credits is not None:
                self._credits.spend(granted)
            numbers.sort()
            seats = self._seats(numbers)
            self._asked[
                self._agent.ask(seats if granted == len(seats) else seats[self._agent.act(seats)])
            ] = numbers
        for number in (*numbers, *self._leaving):
            self._idle.pop(number, None)
        return bool(numbers or self._leaving)

    def _begin_anew(self, credits: Credits) -> int:
        """The trainer lives again: go on from where all are. Return how many steps may
        start then; none as long as there is no room to say so."""
        if not self._agent.has_room():
            return 0
        self._agent.begin_anew(self._seats(sorted(self._idle)), credits.go_over())
        return credits.left()

    def send(self) -> bool:
        """Send those on their way whose actions are known. False when there is nobody."""
        agent, numbers = self._agent, self._leaving
        self._leaving = []
        for request in list(self._asked):
            if agent.answered(request):
                agent.take(request)
                numbers += self._asked.pop(request)
        if not numbers:
            return False
        left = self._clock.enter("environment")
        for target in numbers:
            member = self._members[target]
            try:
                member.environment.send(member.actions, member.reset)
            except EnvironmentFault as fault:
                self._failed(target, fault)
                raise
            member.begun_in.fill(self._stage)
            self._away[target] = True
            self._look_at(target)
        self._clock.enter(left)
        self._ticked(self._clock.last, 1 in agent.finished.tobytes())
        return True


def _member(environment: Environment, agent: TransitionAgent, tick: Tick, seats: slice) -> _Member:
    def part(arrays: Arrays) -> Arrays:
        return {name: array[seats] for name, array in arrays.items()}

    own = Tick(
        observation=part(tick.observation),
        reward=tick.reward[seats],
        done=tick.done[seats],
        truncated=tick.truncated[seats],
        present=tick.present[seats],
        info=part(tick.info),
        restarted=tick.restarted[seats],
        voided=tick.voided[seats],
    )
    return _Member(environment, [own], [part(agent.actions)], agent.finished[seats], agent.begun_in[seats])
