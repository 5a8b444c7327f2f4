"""A lane of a simulator environment: one simulator, its groups of agents, and where their
rows go."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Event, Thread
from typing import Any

import numpy as np
from numpy import count_nonzero

from tidemill.api.environment import Tick
from tidemill.bridge.protocol.messages import ChannelError
from tidemill.bridge.protocol.side_channels import (
    Channels,
    EngineSettings,
    EnvironmentParameters,
    Framing,
    SideChannel,
    Statistics,
)
from tidemill.bridge.protocol.specs import ActionTuple, BehaviorSpec, DecisionSteps, TerminalSteps
from tidemill.bridge.protocol.tables import RESET
from tidemill.bridge.trainer_side.seats import Index, Seats
from tidemill.bridge.trainer_side.simulator import Simulator, grace_after
from tidemill.bridge.trainer_side.spaces import Form, describe
from tidemill.core.clock import awake
from tidemill.core.errors import (
    ConfigError,
    DeadlineError,
    EnvironmentFault,
    ImageError,
    SimulatorError,
    TidemillError,
)
from tidemill.core.schema import Arrays
from tidemill.core.step_deadlines import StepTimes
from tidemill.core.tally import Tally, TallyEntry

CLOSE_SECONDS = 2.0  # that simulators have for ending by themselves; less than the controller gives an actor
MOST_KNOWN = 64  # arrays of seats whose rows are kept

Start = Callable[[int, Channels], Simulator]
"""Given the lane and its side channels, starts a simulator."""


class Place:
    """Where the seats of one group of agents (as the simulator has them) lie in one group
    of the tick (as agent specs have them).

    tick: which tick
    width: seats of a lane in that tick
    position: int [seats]: where each seat lies among them; -1: in another tick
    whole: all seats lie in this tick
    """

    def __init__(self, tick: int, width: int, position: Index) -> None:
        self.tick, self.width, self.position = tick, width, position
        self.whole = bool((position >= 0).all())

    def rows(self, lane: int, seats: Index) -> tuple[Any, Any]:
        """Return (which of `seats` lie here, the rows of these), as indices."""
        position = self.position[seats]
        which: Any = slice(None)
        if not self.whole:
            which = (position >= 0).nonzero()[0]
            position = position[which]
        rows = position + lane * self.width
        steps = len(rows) - 1
        if steps >= 0 and rows[-1] - rows[0] == steps and count_nonzero(rows[1:] - rows[:-1] == 1) == steps:
            return which, slice(int(rows[0]), int(rows[-1]) + 1)
        return which, rows


Rows = list[tuple[Place, Any, Any]]
"""For each place: which of some seats lie there, and their rows, as indices."""


class LaneGroup:
    """One group of agents in one lane: their seats, and where their rows go."""

    def __init__(self, name: str, form: Form, seats: int, places: Sequence[Place], lane: int) -> None:
        self.name, self.form, self.places, self.lane = name, form, places, lane
        self.seats = Seats(name, seats)
        self.asking: Index = np.zeros(0, np.intp)  # the seats of those that asked last, in their order
        self._rows: Rows = []
        # by the array of seats: what was found, while `Seats` gives the same again
        self._known: dict[int, tuple[Index, Rows]] = {}

    def _rows_of(self, seats: Index) -> Rows:
        known = self._known.get(id(seats))
        if known is None:
            if len(self._known) == MOST_KNOWN:
                self._known.clear()
            known = self._known[id(seats)] = (
                seats,
                [(place, *place.rows(self.lane, seats)) for place in self.places],
            )
        return known[1]

    def act(self, actions: Sequence[Arrays], simulator: Simulator) -> None:
        """Set the actions of those that asked."""
        if not len(self.asking):
            return
        out: ActionTuple = self.form.empty(len(self.asking))
        for place, which, rows in self._rows:
            self.form.act(actions[place.tick], rows, which, out)
        simulator.set_actions(self.name, out)

    def observe(
        self, decisions: DecisionSteps, terminals: TerminalSteps, ticks: Sequence[Tick], same_step: bool
    ) -> None:
        """Write what came."""
        ended: Index = np.zeros(0, np.intp)
        if len(terminals):
            ended, known = self.seats.of(terminals.agent_id), None
            if count_nonzero(ended < 0):  # they asked for no decision before they ended
                known = (ended >= 0).nonzero()[0]
                ended = ended[known]
            if len(set(ended.tolist())) < len(ended):
                agents, times = np.unique(
                    terminals.agent_id if known is None else terminals.agent_id[known], return_counts=True
                )
                raise EnvironmentFault(
                    f'group "{self.name}": agent {agents[times > 1][0]} ends two episodes in one exchange; '
                    "exchange in between"
                )
            for place, which, rows in self._rows_of(ended):
                tick, those = ticks[place.tick], which if known is None else known[which]
                interrupted = terminals.interrupted[those]
                tick.done[rows] = ~interrupted
                tick.truncated[rows] = interrupted
                tick.reward[rows] = terminals.reward[those]
                tick.present[rows] = True
                self.form.observe(terminals, those, tick.observation, rows)
            self.seats.free(ended)
        seats, new = self.seats.seat(decisions.agent_id, ended)
        if seats is not self.asking:
            self.asking, self._rows = seats, self._rows_of(seats)
        fresh = count_nonzero(new)
        if fresh and len(ended) and len(again := ended[self.seats.taken[ended]]):
            self._restart(again, ticks, same_step)
        for place, which, rows in self._rows:
            tick = ticks[place.tick]
            tick.present[rows] = True
            tick.reward[rows] = (
                np.where(new[which], tick.reward[rows], decisions.reward[which])
                if fresh
                else decisions.reward[which]
            )
            self.form.observe(decisions, which, tick.observation, rows)

    def _restart(self, seats: Index, ticks: Sequence[Tick], same_step: bool) -> None:
        """These seats ended an episode in this exchange and have another one already."""
        if not same_step:
            raise EnvironmentFault(
                f'group "{self.name}": {len(seats)} agents ended an episode and others took their seats in '
                "one exchange, although same_step = False says that this never happens; leave it out"
            )
        for place, _, rows in self._rows_of(seats):
            tick = ticks[place.tick]
            tick.restarted[rows] = True
            for name, final in tick.final.items():
                final[rows] = tick.observation[name][rows]

    def cut(self, ticks: Sequence[Tick]) -> None:
        """The simulator is gone: episodes that are open are cut."""
        for place, _, rows in self._rows_of(self.clear()):
            ticks[place.tick].truncated[rows] = True

    def clear(self) -> Index:
        """Nobody has a seat any more. Returns the seats that were taken."""
        self.asking, self._rows = np.zeros(0, np.intp), []
        return self.seats.clear()


class Lane:
    """One simulator, and what is between it and the environment.

    number: which lane it is; `name` is what messages call it
    gone: it died in this tick, when episodes were open, and another one is being started
    permit: asked before it is started again; None: nobody allows that
    times: of its steps, with the deadline
    resetting: the exchange under way begins episodes
    empty: exchanges in a row in which nobody asked for a decision
    known: how many groups it had when they were last looked at
    newest_statistics: the statistics that came with its last answer
    """

    def __init__(
        self,
        number: int,
        name: str,
        start: Start,
        channels: Sequence[SideChannel],
        framing: Framing,
        times: StepTimes,
        own: bool,
        repeatable: bool,
    ) -> None:
        """`own`: its deadline is set, whatever its actor's is; `repeatable`: another
        simulator can be started in its place."""
        self.number, self.name, self._start, self.times = number, name, start, times
        self.permit: Callable[[Exception], int] | None = None
        self._own, self._repeatable = own, repeatable
        self.engine = EngineSettings()
        self.parameters = EnvironmentParameters()
        self.statistics = Statistics()
        self._own_channels, self._framing = channels, framing
        self.tally, self.newest_statistics = Tally(), dict[str, TallyEntry]()
        self.crowds: list[LaneGroup] = []
        self.gone, self.resetting, self.empty, self.known = False, True, 0, 0
        self._simulator: Simulator | None = None
        self._starting: Future[Simulator] | None = None
        self._closed = False
        self._ended = Event()  # the one before is
        self._ended.set()

    def watch(self, deadline_s: float | None) -> None:
        """Break its steps off after so many seconds, or by what they take (None), unless
        it has a deadline of its own. An editor, which somebody may have stopped there, is
        waited for, but where a number is given."""
        if not self._own and (deadline_s is not None or self._repeatable):
            self.times.given = deadline_s

    @property
    def starting(self) -> bool:
        """True while another simulator is being started."""
        return self._starting is not None

    @property
    def simulator(self) -> Simulator:
        """The simulator, when it is not being started."""
        assert self._simulator is not None
        return self._simulator

    def start(self) -> Simulator:
        """Start the simulator, and wait until it is there. What was set of engine and
        parameters is told to it with the first exchange."""
        self._simulator = self._start(self.number, self._channels())
        return self._simulator

    def _channels(self) -> Channels:
        return Channels((self.engine, self.parameters, self.statistics, *self._own_channels), self._framing)

    def wait(self, seconds: float) -> bool:
        """True when `finish` returns without waiting."""
        if self._starting is not None:
            with suppress(TimeoutError, Exception):
                self._starting.result(seconds)
            return self._starting.done()
        return self.simulator.wait(seconds)

    def begin(self, command: int) -> None:
        """Hand over the turn. One that is being started is going to be reset, whatever
        the command."""
        if self._starting is None:
            try:
                self.simulator.begin(command)
            except (SimulatorError, DeadlineError) as error:
                self.revive(error)

    def finish(self) -> bool:
        """Take the answer. False when the simulator died, and another one is being
        started."""
        try:
            if self._starting is not None:
                starting, self._starting = self._starting, None
                self._simulator = starting.result()
            self.simulator.take()
            self.newest_statistics = self.statistics.tally.take()
            self.tally.merge(self.newest_statistics)
            return True
        except (SimulatorError, DeadlineError) as error:
            self.revive(error)
            return False

    def revive(self, error: TidemillError) -> None:
        """Start another simulator, in a thread, for the one that is gone, or told what
        is no number, and is ended there first; or raise."""
        lost, self._simulator = self._simulator, None
        try:
            fault = EnvironmentFault(f"{self.name}: {error}")
            fault.__cause__ = told = EnvironmentFault(str(error)).in_lane(self.number)
            told.__cause__, told.told = error, getattr(error, "told", {})
            if self.permit is None or not self._repeatable or isinstance(error, (ImageError, ChannelError)):
                raise fault
            self.permit(fault)
        except BaseException:
            if lost is not None:
                lost.close(grace_after(error))
            raise
        self.known, self.newest_statistics = 0, {}
        self.gone = self.gone or any(crowd.seats.taken.any() for crowd in self.crowds)
        self.resetting = True
        self.engine.repeat()
        self.parameters.repeat()
        self._starting = Future()
        self._ended.clear()
        Thread(
            target=self._start_again,
            args=(self._starting, lost, grace_after(error)),
            name=f"start of {self.name}",
            daemon=True,
        ).start()

    def _start_again(self, starting: "Future[Simulator]", lost: Simulator | None, grace: float) -> None:
        try:
            try:
                if lost is not None:
                    lost.close(grace)
            finally:
                self._ended.set()
            simulator = self._start(self.number, self._channels())
            if self._closed:
                simulator.close()
            else:
                simulator.begin(RESET)
                simulator.wait()
            starting.set_result(simulator)
        except BaseException as error:
            starting.set_exception(error)

    def close(self) -> None:
        """End the simulator."""
        self._closed = True
        if self._simulator is not None:
            self._simulator.close(CLOSE_SECONDS)
        elif self._starting is not None and self._starting.done() and self._starting.exception() is None:
            self._starting.result().close(CLOSE_SECONDS)
        self._ended.wait(CLOSE_SECONDS)


def start_all(lanes: Sequence[Lane], seconds: float, declared: bool) -> Mapping[str, BehaviorSpec]:
    """Start the simulators at once, and step each until it has a group (not where some
    were `declared`). Return the groups."""
    with ThreadPoolExecutor(len(lanes)) as pool:
        found = list(pool.map(lambda lane: _start(lane, seconds, declared), lanes))
    for lane, specs in zip(lanes, found, strict=True):
        if specs != found[0]:
            raise ConfigError(
                f"{lane.name} has other groups than {lanes[0].name}: {describe([*specs.items()])} and "
                f"{describe([*found[0].items()])}"
            )
    return found[0]


def _start(lane: Lane, seconds: float, declared: bool) -> dict[str, BehaviorSpec]:
    deadline = awake() + seconds
    try:
        simulator = lane.start()
        simulator.reset()
        while not simulator.behavior_specs and not declared:
            if awake() > deadline:
                raise DeadlineError(
                    f"no group of agents appeared within {seconds:g} s (start_seconds); let it register its "
                    "worlds, or declare them by groups=(…)"
                )
            simulator.step()
    except (SimulatorError, DeadlineError) as error:
        raise EnvironmentFault(f"{lane.name}: {error}") from error
    return dict(simulator.behavior_specs)


def close_all(lanes: Sequence[Lane]) -> None:
    """Close all simulators at once."""
    if lanes:
        with ThreadPoolExecutor(len(lanes)) as pool:
            list(pool.map(Lane.close, lanes))
