"""Simulators as a Tidemill environment: a lane is a simulator, a group of its agents is
seats, a tick is an exchange with all of them at once.

Their agents are independent (`Environment.independent`): each one's episodes begin and
end by themselves, so that a lane has no episode and is never reset after its start. A
tick hands over to all simulators before it waits for one. A simulator that died, hung or
told NaN is started again in a thread, where that is permitted (`restart_lanes`): the tick
cuts its open episodes, and the next one waits for the new simulator.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.api.environment import AgentInfo, Environment, Tick
from tidemill.bridge.protocol.samplers import parameter
from tidemill.bridge.protocol.specs import BehaviorSpec, DecisionSteps, TerminalSteps
from tidemill.bridge.protocol.tables import RESET, STEP
from tidemill.bridge.trainer_side.simulator_lane import Lane, LaneGroup, Place, close_all
from tidemill.bridge.trainer_side.spaces import Group, describe, form_of
from tidemill.bridge.trainer_side.waiter import Waiter
from tidemill.core.errors import ConfigError, EnvironmentFault
from tidemill.core.schema import Arrays
from tidemill.core.tally import Tally, TallyEntry, summary

# seconds that `ready` waits for an answer before a thread does: most come sooner, and a
# wait by thread costs more than they do
PATIENCE = 0.002
# exchanges in a row in which no agent of a lane asks for a decision, at the begin of its
# episodes
MOST_EMPTY = 10_000
SEEDS = 1 << 24  # a seed travels as a float32


class SimulatorLanes(Environment):
    """Simulators as an environment, one in each lane. A lane whose agents have all
    finished is not reset by us: its simulator begins episodes when it likes.

    An agent that asks for a decision is present; one that has begun an episode and asks
    for none is absent. What ends together with the exchange that begins the next episode
    in its seat is `restarted`.
    """

    resets_any = False
    independent = True

    def __init__(
        self,
        lanes: Sequence[Lane],
        specs: Mapping[str, BehaviorSpec],
        declared: Sequence[str],
        seats: Mapping[str, int],
        same_step: bool,
    ):
        self.lanes, self.same_step, self.max_episode_steps = len(lanes), same_step, 0
        self._lanes, self._specs, self._declared = list(lanes), dict(specs), set(declared)
        self._forms = {name: form_of(spec) for name, spec in specs.items()}
        self._seats = {name: seats.get(name, spec.max_agents) for name, spec in specs.items()}
        self.agents = tuple(
            AgentInfo(f"{name}_{seat}", self._forms[name].spaces)
            for name in specs
            for seat in range(self._seats[name])
        )
        self.groups = {name: self._seats[name] for name in specs}
        """Groups by name, with their seats."""
        self.times = tuple(lane.times for lane in lanes)
        self._pending: list[Lane] = []
        self._started = False
        self._waiter = Waiter("simulators")

    def bind(self, groups: Sequence[Sequence[int]]) -> None:
        self._widths = [len(group) for group in groups]
        home = np.full((2, len(self.agents)), -1, np.intp)  # which group, and where in it
        for number, group in enumerate(groups):
            for position, agent in enumerate(group):
                if self.agents[agent].spaces != self.agents[group[0]].spaces:
                    raise ConfigError(
                        f'agents "{self.agents[group[0]].name}" and "{self.agents[agent].name}" have '
                        "different spaces"
                    )
                home[:, agent] = number, position
        for lane in self._lanes:
            first, lane.crowds = 0, []
            for name, count in self._seats.items():
                which, position = home[:, first : first + count]
                places = [
                    Place(n, len(groups[n]), np.where(which == n, position, -1))
                    for n in np.unique(which[which >= 0]).tolist()
                ]
                lane.crowds.append(LaneGroup(name, self._forms[name], count, places, lane.number))
                first += count

    def send(self, actions: Sequence[Arrays], reset: NDArray[np.bool_]) -> None:
        for lane, anew in zip(self._lanes, reset.tolist(), strict=True):
            begins = (
                not self._started
                or lane.gone
                or (anew and any(crowd.seats.taken.any() for crowd in lane.crowds))
            )
            lane.gone, lane.resetting, lane.empty = False, begins or anew, 0
            if begins:
                for crowd in lane.crowds:
                    crowd.clear()
            else:
                for crowd in lane.crowds:
                    crowd.act(actions, lane.simulator)
            lane.begin(RESET if begins else STEP)
        self._started = True
        self._pending = list(self._lanes)

    def ready(self) -> bool:
        if not self._waiter.idle:
            return False
        while self._pending:
            lane = self._pending[0]
            if not lane.wait(PATIENCE):
                self._waiter.begin([lane.wait for lane in self._pending])
                return False
            if self._take(lane):
                self._pending.pop(0)
        return True

    def recv(self, ticks: Sequence[Tick]) -> None:
        while not self.ready():
            self._waiter.join()
        for tick in ticks:
            for flags in (tick.done, tick.truncated, tick.present, tick.restarted):
                flags.fill(False)
            tick.reward.fill(0)
        for lane in self._lanes:
            steps = {} if lane.gone else self._steps_of(lane)
            for crowd in lane.crowds:
                if lane.gone:
                    crowd.cut(ticks)
                elif crowd.name in steps:
                    try:
                        crowd.observe(*steps[crowd.name], ticks, self.same_step)
                    except EnvironmentFault as error:
                        raise EnvironmentFault(f"{lane.name}: {error}") from None

    def _steps_of(self, lane: Lane) -> Mapping[str, tuple[DecisionSteps, TerminalSteps]]:
        """Return what the groups of a lane's simulator saw. Where that is no number it is
        void, all of it, and another simulator is started."""
        simulator = lane.simulator
        try:
            return {
                crowd.name: simulator.get_steps(crowd.name)
                for crowd in lane.crowds
                if crowd.name in simulator.behavior_specs
            }
        except EnvironmentFault as fault:
            lane.revive(fault)
            lane.gone = True
            return {}

    def _take(self, lane: Lane) -> bool:
        """Take the answer of a lane. False when it needs another exchange before there is
        something to tell."""
        if lane.gone:
            return True
        if not lane.finish():
            return lane.gone
        self._compare(lane)
        try:
            if not lane.resetting or any(
                len(lane.simulator.get_steps(name)[0]) for name in lane.simulator.behavior_specs
            ):
                return True
        except EnvironmentFault as fault:
            lane.revive(fault)
            return lane.gone
        lane.empty += 1
        if lane.empty >= MOST_EMPTY:
            raise EnvironmentFault(
                f"{lane.name}: no agent asked for a decision in {MOST_EMPTY:,} exchanges; let one begin an "
                "episode"
            )
        lane.begin(STEP)
        return False

    def _compare(self, lane: Lane) -> None:
        """Look at groups that have appeared."""
        specs = lane.simulator.behavior_specs
        if len(specs) == lane.known:
            return
        for name, spec in specs.items():
            known = self._specs.get(name)
            if known is None:
                raise EnvironmentFault(
                    f'{lane.name}: group "{name}" appeared after the start, and streams of samples cannot '
                    f"change under way; declare it: groups=({describe([(name, spec)])},), and give it an "
                    "agent spec"
                )
            # layout 0.3.2 tells more, which is no part of a declaration
            if Group.of(name, known) != Group.of(name, spec):
                raise EnvironmentFault(
                    f'{lane.name}: group "{name}" is {describe([(name, spec)])}, but '
                    f"{describe([(name, known)])} was "
                    + (
                        "declared"
                        if name in self._declared
                        else "what another simulator has, or it had at the start"
                    )
                )
        lane.known = len(specs)

    def episode_infos(self, group: int, seats: Sequence[int]) -> Sequence[Any]:
        """Return the statistics that the seats' simulators told in the exchange that
        ended these episodes."""
        return [summary(self._lanes[seat // self._widths[group]].newest_statistics) for seat in seats]

    def enter_stage(self, options: Mapping[str, Any]) -> None:
        for lane in self._lanes:
            for name, value in options.items():
                lane.parameters.set(name, parameter(name, value))

    def restart_lanes(self, permit: Callable[[Exception], int]) -> bool:
        for lane in self._lanes:
            lane.permit = permit
        return True

    def watch(self, deadline_s: float | None) -> None:
        for lane in self._lanes:
            lane.watch(deadline_s)

    @property
    def away(self) -> bool:  # type: ignore[override]
        """See `Environment`."""
        return any(lane.starting for lane in self._lanes)

    def restart(self) -> None:
        """Have the next `send` reset every simulator."""
        self._started = False

    def seed(self, seed: int) -> None:
        """Tell lane i ``seed + i``, which takes effect with its next reset."""
        for lane in self._lanes:
            lane.parameters.set("seed", (seed + lane.number) % SEEDS)

    def statistics(self) -> dict[str, TallyEntry]:
        tally = Tally()
        for lane in self._lanes:
            tally.merge(lane.tally.take())
        return tally.take()

    def on_ready(self, wake: Callable[[], None]) -> None:
        self._waiter.wake = wake

    def close(self) -> None:
        self._waiter.close()
        close_all(self._lanes)
